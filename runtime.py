"""What both loops and the other scripts do alike: device and precision, batches to the device, checkpoints, log lines,
stop signals."""
import contextlib
import ctypes
import functools
import json
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import distributed
import kernels
from files import Stopped, first_line, lock, who, write_atomically

# --- what a training run has ------------------------------------------------------------------------------------------

@dataclass
class RunConfig:
    """The run: batch, device, what is written and when."""
    out_dir: str | None = None      # run folder; None: runs/NAME, of the config files' names
    batch_size: int = 128           # rows an optimizer step
    micro_batch_size: int | None = None     # rows at a time, the rest by accumulation; None: the whole batch
    seed: int = 0                   # of new weights, order, noise and other choices
    device: str = "auto"            # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"             # auto, float32 or bfloat16 (autocast; weights stay float32)
    compile: bool | None = None     # torch.compile; None: in pre-training on CUDA only
    attention: str = "auto"         # eager, sdpa, flex (CUDA), by_head (CPU); auto: the fastest that is known or tried
    gradient_checkpointing: bool = False    # recompute blocks in the backward pass: less memory, more time
    fsdp: bool = False              # with torchrun: share out weights, gradients and moments over the ranks (FSDP2)
    save_every: int = 1_000         # optimizer steps; 0: only after the last one and at a new best held-out score
    log_every: int = 100            # optimizer steps
    keep: int = 1                   # last checkpoints kept, beside the best one
    resume: bool = False            # go on from out_dir/ckpt.pt
    overwrite: bool = False         # start anew although out_dir holds a run
    tensorboard: bool = False       # also write TensorBoard's files into out_dir
    wandb: bool = False             # also log to Weights & Biases

    def __post_init__(self):
        for name in ("batch_size", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.save_every < 0:
            raise ValueError(f"save_every={self.save_every} must not be negative")
        if self.micro_batch_size is None:
            self.micro_batch_size = self.batch_size
        if self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size:
            fit = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0 and n <= self.micro_batch_size]
            raise ValueError(f"batch_size={self.batch_size} does not split into micro-batches of"
                             f" {self.micro_batch_size} rows; try micro_batch_size={max(fit, default=1)}")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^63)")
        if self.resume and self.overwrite:
            raise ValueError("resume=True and overwrite=True exclude each other")


# RunConfig's settings that a resumed run may change: nothing that its losses depend on beyond rounding, and beyond the
# noise of dropout, which is drawn for each micro-batch
FREE = {"out_dir", "micro_batch_size", "device", "dtype", "compile", "attention", "gradient_checkpointing", "fsdp",
        "save_every", "log_every", "keep", "resume", "overwrite", "tensorboard", "wandb"}


CKPT_KEYS = ("step", "model", "optimizer", "progress", "settings", "data")      # what a run's checkpoint holds


@dataclass
class Progress:
    """Where a run stands; part of each checkpoint."""
    step: int = 0                   # optimizer steps done
    losses: list | None = None      # of the steps since the last log line
    evaluated: int = -1             # step of the last held-out evaluation
    best: float = math.inf          # lowest held-out loss, or what is lowest when best
    seconds: float = 0.0            # spent in training steps


def check_out_dir(cfg, out_dir):
    """Refuse to write over a run, or to resume none: before weights are read or fetched."""
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out_dir={out_dir} is a file, not a folder")
    has_run = (out_dir / "ckpt.pt").exists()
    if has_run and not cfg.resume and not cfg.overwrite:
        raise ValueError(f"{out_dir} holds a run already; go on with --resume=True, replace it with"
                         f" --overwrite=True, or name another --out_dir")
    if cfg.resume and not has_run:
        raise FileNotFoundError(f"{out_dir / 'ckpt.pt'} is missing, so there is nothing to resume;"
                                f" leave --resume out")


def check_settings(old, new, free):
    """Refuse to go on with settings, beside the `free` ones, other than a checkpoint's, naming both values."""
    differ = {name: value for name, value in old.items() if name not in free and new.get(name) != value}
    if differ:
        was, now = (", ".join(f"{name}={values.get(name)}" for name in differ) for values in (differ, new))
        raise ValueError(f"the stopped run has {was}; this one {now}. Resume with the old settings"
                         f" ({' '.join(f'--{name}={value}' for name, value in differ.items())}), or start anew in"
                         f" another --out_dir")


def open_run(cfg, out_dir, step, settings, ranks):
    """Make the run's folder ours: rid of what a kill while saving has left, and of what belongs to steps after `step`
    or, with overwrite, to the run before. Returns a file that locks it until closed, and its Metrics; for all but the
    first rank such that do nothing."""
    if not ranks.first:
        return contextlib.nullcontext(), NoMetrics()
    out_dir.mkdir(parents=True, exist_ok=True)
    lock_file = lock(out_dir / ".lock", out_dir)
    metrics = Metrics(out_dir, step if cfg.resume else -1, cfg.tensorboard, cfg.wandb, settings)
    for old in out_dir.glob("*.tmp"):
        old.unlink()
    for old in out_dir.glob("ckpt-*.pt"):
        if cfg.overwrite or int(old.stem[5:]) > step:
            old.unlink()
    if cfg.overwrite:
        for name in ("ckpt.pt", "best.pt"):
            (out_dir / name).unlink(missing_ok=True)
        shutil.rmtree(out_dir / "hf", ignore_errors=True)
    distributed.drop_shards(out_dir)
    return lock_file, metrics


def check_finite(step, losses, grad_norm, weight_norm):
    """Stop at the first loss since the last check that is not a number, or after an update that has spoilt the weights
    (an infinite gradient may come with a finite loss); what is on the disk stays as it is."""
    finite = torch.stack(losses).isfinite().tolist() if losses else []
    bad = None
    if not all(finite):
        at = finite.index(False)
        bad = f"loss is {float(losses[at])} at step {step - len(losses) + at}"
    elif not math.isfinite(grad_norm) or not math.isfinite(weight_norm):
        bad = f"gradient norm is {grad_norm} and weight norm {weight_norm} after the update of step {step - 1}"
    if bad:
        raise Stopped(f"{bad}; the last good checkpoint stays as it is."
                      f" Try a lower learning_rate or a longer warm-up")


# --- device and precision --------------------------------------------------------------------------------------------

def pick_device(name="auto", ranks=None):
    """auto: CUDA, else Apple's MPS, else the CPU; with several `ranks` each its own GPU. Also sets what costs nothing
    and gains much on each."""
    several = ranks is not None and ranks.count > 1
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cpu" if several and name == "mps" else name
    if several and name not in ("cpu", "cuda"):
        raise ValueError(f"device={name} cannot be shared by {ranks.count} ranks; leave it out, or give cpu or cuda")
    if several and name == "cuda":
        name = f"cuda:{ranks.local}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={name} cannot be used here: {first_line(error)}") from None
    torch.set_flush_denormal(True)          # a saturated softmax yields denormals, which x86 handles in microcode
    if device.type == "cuda":
        torch.cuda.set_device(device)
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


def pick_attention(model, cfg, n_source, device, dtype, ranks):
    """Set the model's way to attend and return its name. auto on CUDA: the faster of SDPA and FlexAttention on self-
    attention of this length, if its output and gradients equal the eager reference's there."""
    name = cfg.attention
    if name == "auto" and device.type == "cuda":
        c = model.config
        found = kernels.try_attention(["sdpa", "flex"], (min(cfg.micro_batch_size, 16), c.n_head, n_source, c.d_kv),
                                      device, dtype)
        for way, (seconds, error) in found.items():
            print(f"attention {way}: {error or f'{seconds * 1e3:.2f} ms forward and backward'}")
        name = ranks.gather(kernels.fastest(found))[0]          # all ranks do as the first one
    model.set_attention(name)
    return name


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


@contextlib.contextmanager
def memory_told(of_what, hint):
    """Stop with one line where there is not memory enough."""
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise Stopped(f"there is not memory enough for {of_what}; try {hint}") from None


def memory_used(device):
    """Highest use so far, bytes: of the GPU's memory, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


# --- batches to the device -------------------------------------------------------------------------------------------

class Feed:
    """The batches of a run as tensors on the device: feed(step) is make(step), a list of tuples, with all arrays there.

    For a GPU the next step's are made in a thread and copied from pinned memory, so that neither waits for the other;
    a batch follows from its step alone, so nothing that was made ahead could be lost. `last` is not made ahead."""

    def __init__(self, make, last, device, thread=None):
        self.make, self.last, self.device = make, last, device
        self.pool = ThreadPoolExecutor(1) if (device.type == "cuda" if thread is None else thread) else None
        self.ahead = {}                 # {step: what the thread makes}

    def __call__(self, step):
        if self.pool is None:
            made = self.prepare(step)
        else:
            future = self.ahead.pop(step, None) or self.pool.submit(self.prepare, step)
            if step + 1 < self.last:
                self.ahead = {step + 1: self.pool.submit(self.prepare, step + 1)}
            made = future.result()      # an error of the thread is raised here
        return [tuple(x.to(self.device, non_blocking=True) if torch.is_tensor(x) else x for x in part) for part in made]

    def prepare(self, step):
        def tensor(x):
            x = torch.from_numpy(x)
            return x.pin_memory() if self.device.type == "cuda" else x

        return [tuple(tensor(x) if isinstance(x, np.ndarray) else x for x in part) for part in self.make(step)]

    def close(self):
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


# --- checkpoints -----------------------------------------------------------------------------------------------------

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


def save_run(out_dir, content, model, optimizer, ranks, keep=1, best=False, tokenizer=None, average=None):
    """save_checkpoint of a run on any number of ranks, which all call it: adds weights and optimizer to `content`, of a
    sharded model as files of each rank. With a tokenizer also out_dir/hf, the model in Hugging Face's format; with an
    `average` of its weights (optim.py) that is what stands in hf/."""
    sharded = hasattr(model, "unshard")
    weights = distributed.whole_weights(model) if tokenizer or not sharded else None
    if sharded:
        name, sums = distributed.save_shards(out_dir, content["step"], model, optimizer, ranks)
        content |= {"model": {}, "optimizer": {}, "shards": name, "checksums": sums}
    if not ranks.first:
        return
    if not sharded:
        content |= {"model": weights, "optimizer": optimizer.state_dict()}
    if average:
        content["average"] = average.state_dict()
    if tokenizer:
        exported = weights | content["average"]["weights"] if average else weights
        model.save_pretrained(Path(out_dir) / "hf", tokenizer, exported)
    save_checkpoint(out_dir, content, keep, best)
    distributed.drop_shards(out_dir)


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
        raise ValueError(f"{path} is not a checkpoint of this project: it lacks {', '.join(lacking)}")
    return content


# --- log lines -------------------------------------------------------------------------------------------------------

def describe_run(settings, argv, ranks):
    """What config.json records: settings, command, commit, versions, hardware."""
    here = Path(__file__).resolve().parent
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, text=True,
                         capture_output=True) if shutil.which("git") else None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"settings": settings, "command": [Path(sys.argv[0]).name, *argv],
            "commit": git.stdout.strip() if git and git.returncode == 0 else None,
            "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "gpus": gpus,
            "ranks": ranks.count,
            "started": time.strftime("%Y-%m-%d %H:%M:%S")}


def weight_norm(model):
    """L2 norm of all weights together."""
    return float(distributed.number_of(torch.nn.utils.get_total_norm(list(model.parameters()))))


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


class NoMetrics:
    """What the ranks have that do not write."""

    def write(self, **record):
        pass

    def close(self):
        pass


def parsed(line):
    """A JSON line as a dict; a line that was cut off by a crash as an empty one."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
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
        print(f"\n{who()}{signal.Signals(number).name}: finishing this step, then saving", file=sys.stderr, flush=True)
