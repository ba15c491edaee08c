"""Optimizers and learning-rate schedules.

AdamWScale and Adafactor step by a share of each weight tensor's root mean square (RMS), as nanoT5 and T5 do; AdamW is
torch's own. No optimizer here makes the device wait: whatever depends on tensors stays a tensor.
"""
import math
from dataclasses import dataclass

import torch

SCHEDULES = ("cosine", "legacy", "linear", "wsd", "constant")
OPTIMIZERS = ("adamwscale", "adafactor", "adamw", "adamw_hf")


@dataclass
class OptimConfig:
    """Optimizer and schedule; the defaults are nanoT5's recipe."""
    optimizer: str = "adamwscale"   # adamwscale, adafactor, adamw, or adamw_hf as in transformers 4.44
    learning_rate: float = 2e-2     # peak; with adamwscale and adafactor a share of each tensor's RMS
    schedule: str = "cosine"        # cosine, legacy (inverse square root), linear (to 0), wsd or constant
    warmup_steps: int = 10_000      # optimizer steps; legacy has its own warm-up, a flat 1e-2, and ignores this
    warmup_start: float = 0.5       # the first learning rate as a share of the peak; nanoT5: 0.5
    final_lr: float = 1e-5          # where cosine ends
    decay_share: float = 0.2        # wsd: last share of the steps, falling linearly to 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6               # adamwscale, adamw_hf: added to sqrt(v) before the bias correction, as in nanoT5
    weight_decay: float = 0.0       # share of the weight removed a step, times the learning rate; matrices only
    grad_clip: float = 1.0          # largest norm of all gradients together; 0: no clipping

    def __post_init__(self):
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; there are {', '.join(known)}")
        for name in ("learning_rate", "eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        for name in ("warmup_steps", "final_lr", "weight_decay", "grad_clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("warmup_start", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")


def lr_at(step, config, max_steps):
    """The learning rate of the update after `step` updates (step 0 is the first); a pure function.

    cosine    linear from warmup_start * peak to the peak over warmup_steps, then half a cosine to final_lr
    legacy    T5's own: min(1e-2, 1 / sqrt(step)) whatever the peak, the last tenth linear to 0
    linear    warm-up as cosine, then linear to 0
    wsd       warm-up, flat at the peak, the last decay_share of the steps linear to 0
    constant  warm-up, then flat

    cosine and legacy follow nanoT5 (nanoT5/utils/model_utils.py) step by step: tests/test_optim.py
    """
    if config.schedule == "legacy":
        start = math.ceil(0.9 * max_steps)
        rate = min(1e-2, 1 / math.sqrt(max(1, min(step, start))))
        return rate * max(0.0, 1 - max(0, step - start) / max(1, max_steps - start))
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (config.warmup_start + (1 - config.warmup_start) * step / warmup)
    if config.schedule == "constant":
        return peak
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, max_steps - round(config.decay_share * max_steps))
    done = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    if config.schedule == "cosine":
        return config.final_lr + (peak - config.final_lr) * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done)


def parameter_groups(model, weight_decay):
    """Two groups, each parameter in one: matrices with weight decay; norm weights and position tables without."""
    decay, plain = [], []
    for name, p in model.named_parameters():                # a tied head comes once
        (plain if p.ndim < 2 or name.endswith(".bias.weight") else decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def make_optimizer(model, config):
    """The optimizer of the settings, over `parameter_groups`."""
    groups = parameter_groups(model, config.weight_decay)
    betas = (config.beta1, config.beta2)
    if config.optimizer in ("adamwscale", "adamw_hf"):
        return AdamWScale(groups, lr=config.learning_rate, betas=betas, eps=config.eps,
                          scale=config.optimizer == "adamwscale")
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def local(tensor):
    """What this rank holds of a tensor that is spread over ranks (FSDP2), in place; other tensors themselves."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rms_scale(params, floor=1e-3):
    """A list of max(floor, RMS(p)) as 0-d tensors, read by few kernels and without a wait; of tensors that are spread
    over ranks, that of the whole.

    On a CPU torch adds up a whole tensor's norm so that 16 million float32 elements come out 6e-4 too small; row by
    row the error is 3e-8, and the time 0.6 of it."""
    by_row = [torch.linalg.vector_norm(p, dim=-1) if p.ndim > 1 and p.device.type == "cpu" else p
              for p in map(local, params)]
    norms = torch._foreach_norm(by_row)
    if hasattr(params[0], "to_local"):
        squares = torch.stack(norms).square_()
        torch.distributed.all_reduce(squares, group=params[0].device_mesh.get_group())
        norms = list(squares.sqrt_().unbind())
    torch._foreach_div_(norms, [math.sqrt(p.numel()) for p in params])
    torch._foreach_clamp_min_(norms, floor)
    return norms


class AdamWScale(torch.optim.Optimizer):
    """AdamW whose step is multiplied by max(1e-3, RMS(p)) of each tensor, exactly as in nanoT5:

        m, v = moments of the gradient g, as in Adam
        p   -= lr * max(1e-3, RMS(p)) * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
        p   -= lr * weight_decay * p                        (after the step, without the RMS)

    nanoT5 adds eps before the bias correction, torch's kernel after it; so torch's fused kernel does the whole work
    when it gets eps / sqrt(1 - beta2^t) and each tensor's own learning rate. nanoT5's loop asks for the RMS of every
    tensor and waits for each answer. Source: PiotrNawrot/nanoT5, copied_utils.py; tests/test_optim.py

    scale=False leaves the RMS out: what is left is the AdamW of transformers 4.44, with which nanoT5 fine-tunes.
    """

    def __init__(self, params, lr=2e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, scale=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, scale=scale))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            group["t"] = t = group.get("t", 0) + 1
            steps = [torch.full((), t, dtype=torch.float32, device=params[0].device)]
            beta1, beta2 = group["betas"]
            if group.get("scale", True):                        # checkpoints of before lack it
                rates = rms_scale(params)
                torch._foreach_mul_(rates, group["lr"])
            else:
                rates = [group["lr"]] * len(params)
            for p, rate in zip(params, rates, strict=True):
                s = self.state[p]
                tensors = [[local(x)] for x in (p, p.grad, s["exp_avg"], s["exp_avg_sq"])]
                torch._fused_adamw_(*tensors, [], steps, lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0,
                                    eps=group["eps"] / math.sqrt(1 - beta2 ** t), amsgrad=False, maximize=False)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        return loss


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum, with the step scaled by RMS(p), as nanoT5 uses Hugging Face's class:

        u  = g / sqrt(v), v the running mean of g^2 + 1e-30, kept as one row and one column for a matrix
        u /= max(1, RMS(u))
        p -= lr * max(1e-3, RMS(p)) * u

    The running mean forgets at rate 1 - t^-0.8. Shazeer & Stern 2018, arXiv 1804.04235; equal to
    transformers.Adafactor(relative_step=False): tests/test_optim.py
    """

    def __init__(self, params, lr=2e-2, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["t"] = t = group.get("t", 0) + 1
            keep = 1 - t ** -0.8
            rates = rms_scale(params)
            torch._foreach_mul_(rates, group["lr"])
            for p, rate in zip(params, rates, strict=True):
                state, square = self.state[p], p.grad.square().add_(1e-30)
                if p.ndim >= 2:
                    if not state:
                        state["row"], state["col"] = square.new_zeros(p.shape[:-1]), square.new_zeros(p.shape[1:])
                    state["row"].mul_(keep).add_(square.mean(-1), alpha=1 - keep)
                    state["col"].mul_(keep).add_(square.mean(-2), alpha=1 - keep)
                    row = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt_()
                    u = torch.mul(p.grad, row[..., None], out=square).mul_(state["col"].rsqrt()[..., None, :])
                else:
                    if not state:
                        state["square"] = torch.zeros_like(p)
                    state["square"].mul_(keep).add_(square, alpha=1 - keep)
                    u = torch.mul(p.grad, state["square"].rsqrt(), out=square)
                rms = torch.linalg.vector_norm(u).div_(math.sqrt(u.numel()))
                if group["weight_decay"]:
                    p.mul_(1 - group["weight_decay"] * rate)
                p.sub_(u.mul_(rate / rms.clamp_(min=1.0)))
        return loss
