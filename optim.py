"""Optimizers, learning-rate schedules and an average of the weights.

AdamWScale and Adafactor step by a share of each weight tensor's root mean square (RMS), as nanoT5 and T5 do; Muon makes
the steps of hidden matrices orthogonal; AdamW is torch's own. No optimizer here makes the device wait: whatever depends
on tensors stays a tensor.
"""
import contextlib
import math
from dataclasses import dataclass

import torch

import kernels

SCHEDULES = ("cosine", "inverse_sqrt", "linear", "wsd", "constant")
OPTIMIZERS = ("adamwscale", "muon", "adafactor", "adamw", "adamw_hf")


@dataclass
class OptimConfig:
    """Optimizer and schedule; the defaults are nanoT5's recipe."""
    optimizer: str = "adamwscale"   # adamwscale, muon, adafactor, adamw, or adamw_hf as in transformers 4.44
    learning_rate: float = 2e-2     # peak; with adamwscale and adafactor a share of each tensor's RMS
    schedule: str = "cosine"        # cosine, inverse_sqrt, linear (to 0), wsd (flat, then linear to 0) or constant
    warmup_steps: int = 10_000      # optimizer steps; inverse_sqrt is flat at the peak for so long
    warmup_start: float = 0.5       # the first learning rate as a share of the peak; nanoT5: 0.5
    final_lr: float = 1e-5          # where cosine ends
    decay_share: float = 0.2        # wsd: last share of the steps, falling linearly to 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6               # adamwscale, adamw_hf: added to sqrt(v) before the bias correction, as in nanoT5
    embedding_lr: float | None = None       # peak for the embedding; None: learning_rate
    muon_lr: float = 2e-2           # muon: peak for hidden matrices; learning_rate is for all others
    muon_momentum: float = 0.95
    muon_rms: bool = True           # muon: a share of each matrix's RMS; False: of its fan-in, so of its first RMS
    normuon: bool = False           # muon: even out the rows of each step
    weight_decay: float = 0.0       # share of the weight removed a step, times the learning rate; matrices only
    cautious_decay: bool = False    # muon: hidden matrices decay only where the step goes towards 0 anyway
    grad_clip: float = 1.0          # largest norm of all gradients together; 0: no clipping

    def __post_init__(self):
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; there are {', '.join(known)}")
        for name in ("learning_rate", "embedding_lr", "muon_lr", "eps"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        for name in ("warmup_steps", "final_lr", "weight_decay", "grad_clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("warmup_start", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")


def lr_at(step, config, max_steps):
    """The learning rate of the update after `step` updates (step 0 is the first); a pure function.

    cosine        linear from warmup_start * peak to the peak over warmup_steps, then half a cosine to final_lr
    inverse_sqrt  T5's own: the peak for warmup_steps, then falling as 1 / sqrt(step), the last tenth linear to 0;
                  a peak of 1e-2 for 10,000 steps is T5's and nanoT5's min(1e-2, 1 / sqrt(step)), its "legacy"
    linear        warm-up as cosine, then linear to 0
    wsd           warm-up, flat at the peak, the last decay_share of the steps linear to 0: until then a run serves
                  any max_steps, so a stopped one may be resumed to end sooner or later (MiniCPM, arXiv 2404.06395)
    constant      warm-up, then flat

    cosine and inverse_sqrt follow nanoT5 (nanoT5/utils/model_utils.py) step by step: tests/test_optim.py
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "inverse_sqrt":
        start = math.ceil(0.9 * max_steps)
        rate = peak * math.sqrt(min(1, max(1, warmup) / max(1, min(step, start))))
        return rate * max(0.0, 1 - max(0, step - start) / max(1, max_steps - start))
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


def set_lr(optimizer, lr):
    """Give every parameter group its learning rate: `lr`, or a group's own share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_share", 1.0)


def parameter_groups(model, weight_decay):
    """Two groups, each parameter in one: matrices with weight decay; norm weights and position tables without."""
    decay, plain = [], []
    for name, p in model.named_parameters():                # a tied head comes once
        (plain if p.ndim < 2 or ".bias." in name else decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def split(groups, params, **settings):
    """The groups with `params` taken out of theirs into one more of each, which has these settings too."""
    ids, result = {id(p) for p in params}, []
    for group in groups:
        for inside in (False, True):
            part = [p for p in group["params"] if (id(p) in ids) == inside]
            if part:
                result.append({**group, "params": part, **(settings if inside else {})})
    return result


def hidden_matrices(model):
    """{name: parameter} of the matrices of all blocks: q, k, v, o, wi and wo."""
    return {name: p for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2}


def make_optimizer(model, config):
    """The optimizer of the settings, over `parameter_groups`; for muon the hidden matrices make two more of them, since
    q has learning rates of its own."""
    groups = parameter_groups(model, config.weight_decay)
    if config.embedding_lr:
        groups = split(groups, [model.shared.weight], lr_share=config.embedding_lr / config.learning_rate)
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        hidden = hidden_matrices(model)
        share = config.muon_lr / config.learning_rate
        groups = split(groups, hidden.values(), muon=True, scale_q=1.0, lr_share=share)
        q = [p for name, p in hidden.items() if name.endswith(".q.weight")]
        groups = split(groups, q, scale_q=model.config.d_kv ** -0.5)
        return Muon(groups, lr=config.learning_rate, betas=betas, eps=config.eps, momentum=config.muon_momentum,
                    by_rms=config.muon_rms, normuon=config.normuon, cautious=config.cautious_decay)
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
            if params:
                self.update(group, params)
        return loss

    def update(self, group, params):
        for p in params:
            if not self.state[p]:
                self.state[p] = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        group["t"] = t = group.get("t", 0) + 1
        steps = [torch.full((), t, dtype=torch.float32, device=params[0].device)]
        beta1, beta2 = group["betas"]
        if group.get("scale", True):                            # checkpoints of before lack it
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


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)       # steepest at 0 that keeps [0, 1] in about [0.7, 1.2] (Jordan 2024)


def orthogonalize(x, steps=5):
    """The nearest semi-orthogonal matrices to a stack of them, about: the singular values that are not tiny beside the
    largest come to lie between 0.7 and 1.2, the singular vectors stay. (n, A, B) -> (n, A, B)

    Newton-Schulz iteration by products alone, in bfloat16 on CUDA and float32 elsewhere. Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon; tests/test_optim.py
    """
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x.contiguous()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=1e-12)     # Frobenius: no singular value above 1
    for _ in range(steps):
        gram = kernels.products(x, x)
        gram = kernels.products(gram, gram).mul_(c).add_(gram, alpha=b)     # symmetric, so its own transpose
        x = kernels.products(gram, x.mT).add_(x, alpha=a)
    return x.mT if tall else x


class Muon(AdamWScale):
    """Groups with muon=True: momentum, made orthogonal (Jordan et al. 2024). Other groups: AdamWScale. A matrix p of
    shape (A, B) with the gradient g:

        m  = momentum * m + (1 - momentum) * g
        u  = orthogonalize((1 - momentum) * g + momentum * m) * sqrt(max(A, B))        Nesterov; RMS(u) is about 1
        p -= lr * scale * u

    scale  by_rms: max(1e-3, RMS(p)), as in AdamWScale. Otherwise B^-0.5, the RMS that p was drawn with, times scale_q:
           d_kv^-0.5 for q, 1 for others. That is the published sqrt(max(1, A / B)) without sqrt(max(A, B)).
           T5 folds attention's 1 / sqrt(d_kv) into q, where Adafactor and AdamWScale keep to it as their steps follow
           RMS(p); with scale_q the steps are those of a q that is drawn without and multiplied in the forward pass,
           so what is stored stays a stock T5.
    normuon   each row of u over the root of a running mean of its squares, then u scaled back to its norm
              (Li et al. 2025, arXiv 2510.05491)
    weight_decay, cautious   p -= lr * weight_decay * p, cautious: where u and p have one sign (arXiv 2510.12402)

    Matrices of one shape are made orthogonal as one stack. Not for parameters that are sharded (FSDP2).
    """

    def __init__(self, params, lr=2e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, momentum=0.95, by_rms=True,
                 normuon=False, cautious=False):
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            if group.setdefault("muon", False):
                group.update(momentum=momentum, by_rms=by_rms, normuon=normuon, cautious=cautious)

    def update(self, group, params):
        if not group["muon"]:
            return super().update(group, params)
        by_shape = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        for (rows, columns), same in by_shape.items():
            for p in same:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                    if group["normuon"]:
                        self.state[p]["rows"] = p.new_zeros(rows, 1)
            grads, beta = [p.grad for p in same], group["momentum"]
            moments = [self.state[p]["momentum"] for p in same]
            torch._foreach_lerp_(moments, grads, 1 - beta)
            u = orthogonalize(torch.stack(torch._foreach_lerp(grads, moments, beta)))
            if group["normuon"]:
                u = self.even_rows(u, [self.state[p]["rows"] for p in same])
            u = (u * math.sqrt(max(rows, columns))).to(same[0].dtype).unbind()
            if group["by_rms"]:
                rates = rms_scale(same)
                torch._foreach_mul_(rates, group["lr"])
            else:
                rates = [group["lr"] * columns ** -0.5 * group["scale_q"]] * len(same)
            if group["weight_decay"]:
                shrink = group["lr"] * group["weight_decay"]
                torch._foreach_sub_(same, [p * (p * x > 0) * shrink if group["cautious"] else p * shrink
                                           for p, x in zip(same, u, strict=True)])
            torch._foreach_sub_(same, [x * rate for x, rate in zip(u, rates, strict=True)])

    @staticmethod
    def even_rows(u, rows, beta=0.95):
        """(n, A, B) divided by the running RMS of each row, at the norm that it had."""
        norm = torch.linalg.matrix_norm(u, keepdim=True)
        torch._foreach_lerp_(rows, list(u.float().square().mean(-1, keepdim=True).unbind()), 1 - beta)
        u = u / torch.stack(rows).sqrt_().add_(1e-8)
        return u * (norm / torch.linalg.matrix_norm(u, keepdim=True).clamp_(min=1e-12))

    def flops(self):
        """Floating point operations of the Newton-Schulz iterations of one step."""
        shapes = [sorted(p.shape) for group in self.param_groups if group["muon"] for p in group["params"]]
        return sum(5 * (4 * a * a * b + 2 * a ** 3) for a, b in shapes)


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


class Average:
    """An exponential moving average of a model's weights, to evaluate and export in place of the last ones. Early on it
    forgets faster, at 9 / (10 + t), so that the random start is soon gone."""

    def __init__(self, model, decay):
        self.model, self.decay, self.t = model, decay, 0
        self.weights = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        self.t += 1
        torch._foreach_lerp_(self.weights, list(self.model.parameters()),
                             1 - min(self.decay, (1 + self.t) / (10 + self.t)))

    @contextlib.contextmanager
    def in_place(self):
        """Within, the model has the average's weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self):
        for i, p in enumerate(self.model.parameters()):
            p.data, self.weights[i] = self.weights[i], p.data

    def state_dict(self):
        of = {id(p): weight for p, weight in zip(self.model.parameters(), self.weights, strict=True)}
        return {"t": self.t, "weights": {name: of[id(p)]        # a tied head under both names, as in the model's own
                                         for name, p in self.model.named_parameters(remove_duplicate=False)}}

    def load_state_dict(self, state):
        self.t = state["t"]
        for (name, _), weight in zip(self.model.named_parameters(), self.weights, strict=True):
            weight.copy_(state["weights"][name])
