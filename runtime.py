"""What every script does alike: errors, device and precision, checkpoints, log lines, stop signals."""
import contextlib
import ctypes
import functools
import json
import linecache
import math
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch

# --- errors ----------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """A run that cannot go on, told in one line; exit code 1."""


def run(main):
    """Call main() and turn the user's slips into one line and exit code 2.

    A ValueError that our own `raise` made and any OSError are messages to the user. Everything else, int("x") too, is a
    fault of the code and keeps its traceback. Ctrl-C: exit code 130.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")    # a console without a letter shows "?" and the run goes on
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                     # who read our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Stopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, OSError) as error:
        if not isinstance(error, OSError) and not raised_here(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def raised_here(error):
    """Whether a `raise` statement of this project made the error."""
    tb = error.__traceback__
    while tb.tb_next:
        tb = tb.tb_next
    file = tb.tb_frame.f_code.co_filename
    ours = Path(file).resolve().parent == Path(__file__).resolve().parent
    return ours and linecache.getline(file, tb.tb_lineno).lstrip().startswith("raise ")


def first_line(error):
    return str(error).partition("\n")[0]


# --- device and precision --------------------------------------------------------------------------------------------

def pick_device(name="auto"):
    """auto: CUDA, else Apple's MPS, else the CPU. Also sets what costs nothing and gains much on each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={name} cannot be used here: {first_line(error)}") from None
    torch.set_flush_denormal(True)          # a saturated softmax yields denormals, which x86 handles in microcode
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory():
    """Tell glibc to keep large freed blocks. By default each big tensor is handed back to the kernel and its pages
    are zeroed anew at the next use: log-softmax over 456 x 32,128 logits took 33 ms so, and 12 ms without."""
    if platform.system() == "Linux":
        with contextlib.suppress(OSError, AttributeError):      # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)       # M_MMAP_THRESHOLD: up to 1 GiB from the heap
            libc.mallopt(-1, 1 << 30)       # M_TRIM_THRESHOLD: give back only what exceeds 1 GiB


def pick_dtype(name, device):
    """The dtype of matrix products: float32, or bfloat16 by autocast. auto: bfloat16 on a CUDA device that has it."""
    if name == "auto":
        has = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
        name = "bfloat16" if has else "float32"
    if name in ("float16", "fp16", "half"):
        raise ValueError("dtype=float16 is refused: T5's feed-forward output passes 65,504, the largest float16;"
                         " use bfloat16 or float32")
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={name!r} is unknown; there are auto, float32 and bfloat16")
    return getattr(torch, name)


def autocast(device, dtype):
    """Weights and moments stay fp32; only matrix products run in bfloat16, and only when dtype says so."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype == torch.bfloat16)


PEAK = {"A100": 312e12, "A10G": 70e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
        "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12}      # dense bfloat16 FLOP/s, from data sheets


@functools.cache
def peak_flops(device, dtype):
    """FLOP/s that a share is taken of (MFU): the data sheet's for a known GPU in bfloat16, else the best of large
    square matrix products timed now for a second or two."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAK.items():
            if re.search(rf"\b{known}\b", name):
                return peak
    n = 3072 if device.type == "cpu" else 8192
    a, best, start = torch.randn(n, n, device=device, dtype=dtype), math.inf, time.perf_counter()
    out = torch.empty_like(a)
    while time.perf_counter() - start < 1.5:
        synchronize(device)
        t0 = time.perf_counter()
        torch.mm(a, a, out=out)
        synchronize(device)
        best = min(best, time.perf_counter() - t0)
    return 2 * n ** 3 / best


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def memory_used(device):
    """Highest use so far, bytes: of the GPU's memory, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


# --- checkpoints -----------------------------------------------------------------------------------------------------

def write_atomically(path, write):
    """Call write(file) on a file beside `path`, flush it to the disk, then rename: a reader, or a run that is killed
    at any moment, finds the old file or the new one, never a part."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if not isinstance(error, (OSError, RuntimeError)):      # RuntimeError: what torch.save makes of a full disk
            raise
        raise OSError(f"{path} cannot be written: {first_line(error)}") from None
    if os.name == "posix":                  # the rename itself reaches the disk with its folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def lock(path, name, shared=False, wait=False):
    """Open a file for appending and hold it until it is closed: alone, or `shared` with others who share it. If
    somebody else holds it, ValueError that speaks of `name`, or `wait`. Returns the open file."""
    file = open(path, "ab")
    try:
        import fcntl
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise ValueError(f"{name} is in use by another process; wait for it, or write to another --out_dir") from None
    except (ImportError, OSError):
        pass                                                    # Windows, or a file system without locks
    return file


def write_json(path, content):
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=1).encode()))


def save_checkpoint(out_dir, content, keep=1, best=False):
    """Write out_dir/ckpt.pt; with best=True also best.pt; with keep > 1 the last `keep` as ckpt-STEP.pt.

    content   dict of tensors and plain types with "step" in it; anything else would not load with weights_only=True
    """
    out_dir = Path(out_dir)
    path = out_dir / "ckpt.pt"
    if best:        # first best.pt, then ckpt.pt: after a kill between them the run evaluates this step once more
        write_atomically(out_dir / "best.pt", lambda file: torch.save(content, file))
        link(out_dir / "best.pt", path)
    else:
        write_atomically(path, lambda file: torch.save(content, file))
    if keep > 1:
        link(path, out_dir / f"ckpt-{content['step']:08d}.pt")
        for old in sorted(out_dir.glob("ckpt-*.pt"))[:-keep]:
            old.unlink()


def link(path, to):
    """A second name for a file, without a second copy where the file system allows it."""
    aside = to.with_name(to.name + ".tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)
    os.replace(aside, to)


def load_checkpoint(path, needs=()):
    """Read a checkpoint into the CPU's memory without running any code that it may hold; ValueError if its checksums
    do not hold, or if it lacks one of the keys `needs`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = torch.load(path, map_location="cpu", weights_only=True) if not damaged else {}
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of this project"
                         f" ({type(error).__name__}: {first_line(error)})") from None
    if damaged:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} does not hold")
    lacking = [name for name in needs if not isinstance(content, dict) or name not in content]
    if lacking:
        raise ValueError(f"{path} is not a checkpoint of train.py: it lacks {', '.join(lacking)}")
    return content


# --- log lines -------------------------------------------------------------------------------------------------------

def describe_run(settings, argv):
    """What config.json records: settings, command, commit, versions, hardware."""
    here = Path(__file__).resolve().parent
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, text=True,
                         capture_output=True) if shutil.which("git") else None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"settings": settings, "command": [Path(sys.argv[0]).name, *argv],
            "commit": git.stdout.strip() if git and git.returncode == 0 else None,
            "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "gpus": gpus,
            "started": time.strftime("%Y-%m-%d %H:%M:%S")}


def weight_norm(model):
    """L2 norm of all weights together."""
    return float(torch.nn.utils.get_total_norm(list(model.parameters())))


class Metrics:
    """metrics.jsonl, and TensorBoard or Weights & Biases if asked for: one record a call."""

    def __init__(self, out_dir, resume_step=None, tensorboard=False, wandb=False, settings=None):
        self.path = Path(out_dir) / "metrics.jsonl"
        self.board = self.wandb = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("tensorboard=True needs a package: pip install tensorboard") from None
            self.board = SummaryWriter(out_dir)
        if wandb:
            try:
                import wandb as library
            except ImportError:
                raise ValueError("wandb=True needs a package: pip install wandb") from None
            known = Path(out_dir) / "wandb_id"              # so that a resumed run goes on in its own chart
            run_id = known.read_text() if resume_step != -1 and known.exists() else secrets.token_hex(4)
            known.write_text(run_id)
            self.wandb = library.init(project="nanot5", name=Path(out_dir).name, dir=out_dir, config=settings,
                                      resume="allow", id=run_id)
        if resume_step is not None and self.path.exists():      # what came after the checkpoint is done again
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if parsed(line).get("step", resume_step + 1) <= resume_step]
            write_atomically(self.path, lambda file: file.write("".join(f"{k}\n" for k in kept).encode()))

    def write(self, **record):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        numbers = {k: v for k, v in record.items() if k != "step"}
        if self.board:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, record["step"])
        if self.wandb:
            self.wandb.log(numbers, step=record["step"])


    def close(self):
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


def parsed(line):
    """A JSON line as a dict; a line that was cut off by a crash as an empty one."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def duration(seconds):
    """1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class StopSignal:
    """Turns the first SIGTERM or Ctrl-C into a flag that the loop reads; a second Ctrl-C stops at once."""

    def __enter__(self):
        self.received = None
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        print(f"\n{signal.Signals(number).name}: finishing this step, then saving", file=sys.stderr, flush=True)
