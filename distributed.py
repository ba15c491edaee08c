"""A run on many processes, as torchrun starts them: DistributedDataParallel, or FSDP2 with sharded checkpoints.

    torchrun --nproc_per_node=8 train.py config/t5_base.py                # as many GPUs, or processes on a CPU
    torchrun --nproc_per_node=8 train.py config/t5_large.py --fsdp=True   # a model that is too large for one of them

Each rank computes its rows of the same global batch, so that losses and learning rates do not depend on how many there
are, and a run can be resumed on another number. One process alone goes the same way, and nothing is sent.
"""
import contextlib
import ctypes
import datetime
import gc
import os
import re
import shutil
import signal
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from files import Stopped, first_line


class Ranks:
    """The processes of one run, as torchrun starts them: who this one is, and what they do together.

    number, count    this process's, from 0, and how many there are; one process alone: 0 and 1, and nothing is sent
    local            its number on its machine: which GPU is its own

    Every rank does the same steps in the same order; rank 0 alone prints and writes.
    """

    def __init__(self, device="auto"):
        self.number, self.count, self.local = (int(os.environ.get(name, default)) for name, default in (
            ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        if self.count > 1 and not dist.is_initialized():
            gpu = torch.cuda.is_available() and device != "cpu"
            # what is in the CPU's memory goes through gloo, which notices at once when a process has gone
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=10))
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):          # should torchrun be killed: SIGTERM to us
                ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)       # 1: PR_SET_PDEATHSIG
        if self.number:
            sys.stdout = open(os.devnull, "w")

    @property
    def first(self):
        return self.number == 0

    def share(self, n):
        """(lo, hi): which of n things are this rank's; shares differ by one at most."""
        return n * self.number // self.count, n * (self.number + 1) // self.count

    def sum(self, tensor):
        """A tensor summed over the ranks, in place, the same bits everywhere; a number is made a tensor first."""
        tensor = torch.as_tensor(tensor, dtype=torch.float64 if isinstance(tensor, float) else None)
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, number):
        """The largest of the ranks' numbers (None is 0); None where all are 0. No rank's GPU is waited for."""
        if self.count == 1:
            return number
        tensor = torch.tensor(number or 0)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor) or None

    def gather(self, content):
        """A list of what each rank has, plain Python, on every rank."""
        if self.count == 1:
            return [content]
        found = [None] * self.count
        dist.all_gather_object(found, content)
        return found

    def wait(self):
        """Until all are here."""
        if self.count > 1:
            self.any(0)

    @contextlib.contextmanager
    def told(self):
        """Stop with one line when another rank has gone, which every exchange with it then meets."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not re.search("gloo|NCCL|Connection|[Tt]imed? ?out|peer|process group", str(error)):
                raise
            reason = re.sub(r"^\[/[^]]*\] *", "", first_line(error)).partition(". ")[0]   # not the line of gloo's code
            raise Stopped(f"of {self.count} ranks another one has gone ({reason[:150]});"
                          f" the last checkpoint stays as it is, go on with --resume=True") from None

    def close(self):
        if self.count > 1:
            self.wait()                                 # so that none meets a connection that another has closed
            gc.collect()                                # DistributedDataParallel holds on to the group in a cycle
            dist.destroy_process_group()


def check_ranks(cfg, optim_cfg, ranks):
    """Refuse what cannot be shared out."""
    if cfg.batch_size < ranks.count:
        raise ValueError(f"batch_size={cfg.batch_size} is less than the {ranks.count} ranks; each needs a row")
    if cfg.fsdp and ranks.count == 1:
        raise ValueError("fsdp=True shares a model out over several ranks; start it with torchrun"
                         " --nproc_per_node=N, or leave it out")
    if cfg.fsdp and optim_cfg.optimizer in ("adafactor", "muon"):
        raise ValueError(f"fsdp=True and optimizer={optim_cfg.optimizer} exclude each other: it needs whole matrices on"
                         " each rank; take adamwscale or adamw")
    if cfg.fsdp and getattr(cfg, "ema", 0):
        raise ValueError("fsdp=True and ema exclude each other: the average is not shared out over the ranks")


def over_ranks(model, ranks, device, fsdp=False):
    """What to call for a training step: the model itself, in DistributedDataParallel, or, with fsdp, the model that
    shard() has made. The gradients that come out are means over the ranks, summed up in the last backward pass before
    each optimizer step: see last_micro."""
    if ranks.count == 1 or fsdp:
        return model
    from torch.nn.parallel import DistributedDataParallel
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None,
                                   gradient_as_bucket_view=True)


def shard(model, ranks, device, compiled=False):
    """Share out a model's weights over the ranks (FSDP2), and with them the gradients and moments: each holds a part
    of every tensor, and a block's weights are whole only while it runs. The weights are rank 0's; the other ranks may
    come with a model on torch's "meta" device. Returns a new model, set up as its config says."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    weights = model.state_dict() if ranks.first else {}
    with torch.device("meta"):
        model = type(model)(model.config)
    mesh = init_device_mesh(device.type, (ranks.count,))
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("logits", "generate"):         # beside forward: so that these may come first
        register_fsdp_forward_method(model, name)
    model.to_empty(device=device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


@contextlib.contextmanager
def whole(model):
    """Give every rank all weights of a sharded model, for evaluation and generation, where ranks do different things
    between two exchanges. Other models stay as they are."""
    parts = [m for m in model.modules() if hasattr(m, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model)


def whole_weights(model):
    """All weights of a model by name, on the CPU where it is sharded; a sharded model's come to rank 0 alone."""
    if not hasattr(model, "unshard"):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def number_of(tensor):
    """A scalar that may be spread over ranks as a plain tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def last_micro(model, is_last):
    """A context for the pass of one micro-batch: the gradients of all ranks are summed in the last one alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "no_sync") and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


# --- sharded checkpoints ----------------------------------------------------------------------------------------------

def save_shards(out_dir, step, model, optimizer, ranks):
    """Write each rank's part of a sharded run into out_dir/shards-STEP; returns the folder's name and a checksum of
    each file in it. The checkpoint that names the folder is written after it: until then the old one holds."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    taken = {path.name for path in Path(out_dir).glob("shards-*")}      # a step may be saved twice, by a resumed run
    name = next(name for name in (f"shards-{step:08d}{mark}" for mark in ("", "b", "c", "d")) if name not in taken)
    name = ranks.gather(name)[0]
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(out_dir) / name)
    files = sorted((Path(out_dir) / name).iterdir())[ranks.number::ranks.count]
    sums = ranks.gather({file.name: checksum(file) for file in files})
    return name, {name: value for part in sums for name, value in part.items()}


def checksum(path):
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def check_shards(folder, sums):
    """Refuse parts that are missing or damaged; each rank looks at some of them."""
    number, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in sorted(sums)[number::count]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, a part of the checkpoint {folder.parent / 'ckpt.pt'}")
        if checksum(folder / name) != sums[name]:
            raise ValueError(f"{folder / name} is damaged: its checksum does not hold")
    if dist.is_initialized():
        dist.barrier()                          # before one reads what another has found damaged


def drop_shards(out_dir):
    """Remove the parts that no checkpoint names any more."""
    folders = list(Path(out_dir).glob("shards-*"))
    named = {torch.load(path, weights_only=True, mmap=True).get("shards")
             for kind in ("ckpt*.pt", "best.pt") for path in Path(out_dir).glob(kind)} if folders else set()
    for folder in folders:
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


def restore(ckpt, out_dir, model, optimizer=None):
    """Set the weights and, if given, the optimizer's state from a checkpoint, written by any number of ranks, sharded
    or not, into a model that is or is not."""
    if ckpt.get("shards") or hasattr(model, "unshard"):
        return restore_shards(ckpt, out_dir, model, optimizer)
    model.load_state_dict(ckpt["model"])
    if optimizer is not None:
        optimizer.load_state_dict(ckpt["optimizer"])


def restore_shards(ckpt, out_dir, model, optimizer):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd
    if ckpt.get("step") == 0:                   # moments of no step yet: to ask for them has made one of zeros
        optimizer = None
    if ckpt.get("shards"):                      # each rank reads its part, whoever wrote it
        check_shards(Path(out_dir) / ckpt["shards"], ckpt["checksums"])
        content = {"model": sd.get_model_state_dict(model)}
        if optimizer is not None:
            content["optimizer"] = sd.get_optimizer_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")      # one process reads all parts
            dcp.load(content, checkpoint_id=Path(out_dir) / ckpt["shards"])
        options = sd.StateDictOptions()
    else:                                       # of a run that was not sharded; its optimizer numbers the weights
        content, options = {"model": ckpt["model"]}, sd.StateDictOptions(full_state_dict=True)
        if optimizer is not None:
            of = {p: name for name, p in model.named_parameters()}
            names = [of[p] for group in optimizer.param_groups for p in group["params"]]
            content["optimizer"] = {
                "state": {names[i]: state for i, state in ckpt["optimizer"]["state"].items()},
                "param_groups": [{**group, "params": [names[i] for i in group["params"]]}
                                 for group in ckpt["optimizer"]["param_groups"]]}
    sd.set_model_state_dict(model, content["model"], options=options)
    if optimizer is not None:
        sd.set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
