"""The model's operations in faster forms: attention in four ways, and what a CPU does with its own backward passes.

Each equals the plain form to rounding (tests/test_kernels.py), and which one is taken is decided by what runs: plain
ones under torch.compile, which fuses them itself, under autocast, and wherever nothing faster is known.

On an AMD CPU the BLAS behind torch's products (MKL) takes a slow path: oneDNN, which torch brings along too, needs
less than half of its time. Forward and backward of v1.1 small on 4 rows of 512/114: 2.63 s with torch's own
operations, 1.56 s with those of this file (LOG.md, 2026-12-02).

Letters in shapes: B rows, Q and N the queries and keys of one attention, H heads of width K, D = d_model, F = d_ff,
V = vocab_size.
"""
import contextlib
import functools
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

IGNORE = -100           # a target with this id costs nothing (torch's and Hugging Face's convention)


# --- what runs here --------------------------------------------------------------------------------------------------

def has_onednn():
    """Whether oneDNN's matrix product is there, which torch's compiler calls on x86: tried, as it is not documented."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(2, 3))
        product = torch.ops.mkldnn._linear_pointwise(torch.ones(1, 3), weight, None, "none", [], "")
        return platform.machine().lower() in ("x86_64", "amd64") and product.tolist() == [[3.0, 3.0]]
    except Exception:
        return False


def is_intel():
    with contextlib.suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return "Intel" in platform.processor()


ONEDNN = has_onednn()
ONEDNN_TRAINS = ONEDNN and not is_intel()       # Intel's own CPUs keep MKL: oneDNN's gradients are not timed there


def is_plain_cpu(x):
    """Whether x is float32 on a CPU, with neither autocast nor torch.compile at work."""
    return (not torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu"))


def by_hand(x):
    """Whether to take the operations of this file that have a backward pass of their own."""
    return is_plain_cpu(x) and torch.is_grad_enabled()


# --- products --------------------------------------------------------------------------------------------------------

def onednn(x, weight):
    """x weight' by oneDNN, without a gradient: (..., I), (O, I) -> (..., O). The weight, or its transpose, must be
    contiguous: for other strides oneDNN falls back to code a thousand times slower."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def product(x, weight):
    """x weight' by whatever is faster here in training, without a gradient."""
    return onednn(x, weight) if ONEDNN_TRAINS else F.linear(x, weight)


class OneDNNLinear(torch.autograd.Function):
    """F.linear(x, weight) and its gradients by oneDNN."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return onednn(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        dx, dweight = ctx.needs_input_grad
        return (onednn(g, weight.t()) if dx else None,
                weight_gradient(x, g) if dweight else None)


def weight_gradient(x, g):
    """g' x, the gradient of the weight of a product: (..., I), (..., O) -> (O, I)"""
    return product(g.flatten(0, -2).t(), x.flatten(0, -2).t())


def products(x, y):
    """x y' of two stacks of matrices, without a gradient: (n, I, K), (n, J, K) -> (n, I, J). One batched product, or
    one by one where oneDNN is the faster: 36 of 128 x 128 take 4.0 ms so on one core of an AMD EPYC, and 11.4 ms in
    torch.bmm (LOG.md, 2026-12-02)."""
    if ONEDNN_TRAINS and x.device.type == "cpu":
        return torch.stack([onednn(a, b) for a, b in zip(x, y, strict=True)])
    return torch.bmm(x, y.mT)


def linear(x, weight):
    """F.linear, by oneDNN where that is faster: in training on AMD, without gradients on any x86."""
    if is_plain_cpu(x) and weight.dtype == x.dtype and (ONEDNN_TRAINS if torch.is_grad_enabled() else ONEDNN):
        return OneDNNLinear.apply(x, weight) if torch.is_grad_enabled() else onednn(x, weight)
    return F.linear(x, weight)


# --- norm, gated feed-forward, loss ----------------------------------------------------------------------------------

class RMSNorm(torch.autograd.Function):
    """F.rms_norm(x, (D,), weight, eps), which on the CPU keeps three tensors of x's size for its backward pass; this
    one keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps):                           # (..., D), (D,)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        dweight = (g * unit).flatten(0, -2).sum(0)
        g = g * weight
        along = (g * unit).mean(-1, keepdim=True)               # a longer x changes nothing: that part is taken out
        return g.sub_(unit.mul_(along)).mul_(scale), dweight, None


def rms_norm(x, weight, eps):
    if by_hand(x):
        return RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class GatedFeedForward(torch.autograd.Function):
    """wo(dropout(gelu(wi_0 x) * wi_1 x)); keeps the two products alone, and makes what follows from them once more in
    the backward pass instead of keeping it."""

    @staticmethod
    def forward(ctx, x, wi_0, wi_1, wo, dropout):               # (..., D), twice (F, D), (D, F)
        a, b = product(x, wi_0), product(x, wi_1)
        h, mask = F.gelu(a, approximate="tanh").mul_(b), None
        if dropout:
            mask = torch.empty_like(h, dtype=torch.bool).bernoulli_(1 - dropout)
            h.mul_(mask).div_(1 - dropout)
        ctx.save_for_backward(x, a, b, wi_0, wi_1, wo, mask)
        ctx.dropout = dropout
        return product(h, wo)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, a, b, wi_0, wi_1, wo, mask = ctx.saved_tensors
        dh = product(g, wo.t())
        gate = F.gelu(a, approximate="tanh")
        h = gate * b
        if mask is not None:
            for part in (h, dh):
                part.mul_(mask).div_(1 - ctx.dropout)
        dwo = weight_gradient(h, g)
        db = torch.mul(dh, gate, out=gate)
        da = torch.ops.aten.gelu_backward(torch.mul(dh, b, out=dh), a, approximate="tanh")
        dx = product(da, wi_0.t()).add_(product(db, wi_1.t()))
        return dx, weight_gradient(x, da), weight_gradient(x, db), dwo, None


class HeadCrossEntropy(torch.autograd.Function):
    """cross_entropy(F.linear(y, weight), target): one (N, V) tensor is kept and becomes the logits' gradient in place,
    where torch's own passes hold three."""

    @staticmethod
    def forward(ctx, y, weight, target, z_loss):                # (N, D), (V, D), (N,) -> ()
        logits = product(y, weight)
        log_p = logits.log_softmax(-1)
        log_z = (logits[:, 0] - log_p[:, 0]) * (target != IGNORE) if z_loss else None
        del logits
        ctx.save_for_backward(y, weight, target, log_p, log_z)
        ctx.z_loss = z_loss
        loss = F.nll_loss(log_p, target, ignore_index=IGNORE, reduction="sum")
        return loss + z_loss * log_z.square().sum() if z_loss else loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        y, weight, target, log_p, log_z = ctx.saved_tensors
        scale = (target != IGNORE) * g
        dlogits = log_p.exp_().mul_((scale * (1 + 2 * ctx.z_loss * log_z) if ctx.z_loss else scale)[:, None])
        dlogits[torch.arange(len(target)), target.clamp(min=0)] -= scale
        return product(dlogits, weight.t()), weight_gradient(y, dlogits), None, None


def cross_entropy(logits, target, z_loss=0.0):
    """Sum over all targets of -log softmax, and of z_loss * log(Z)^2, Z being the softmax's denominator: that keeps
    logits from drifting, T5X takes 1e-4. (N, V), (N,) -> ()"""
    loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum")
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(-1) * (target != IGNORE)).square().sum()
    return loss


# --- attention -------------------------------------------------------------------------------------------------------

def attend_eager(q, k, v, bias, dropout):
    """The reference: softmax(q k' + bias) v, written out. q (B,H,Q,K), k and v (B,H,N,K), bias to (B,H,Q,N) or None."""
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    return F.dropout(scores.softmax(-1), dropout) @ v           # training is told by dropout > 0


def attend_sdpa(q, k, v, bias, dropout):
    """The same through torch's fused kernels. scale=1: T5 folds 1/sqrt(d_kv) into the initialisation of q."""
    if bias is not None:
        bias = bias.to(q.dtype)         # cuDNN was silently wrong with a float32 bias and bfloat16 queries
        bias = aligned(bias) if q.is_cuda else bias
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)


def aligned(bias, to=8):
    """The same bias with rows that begin a multiple of 8 elements apart, as torch's memory-efficient kernel needs: 114
    keys of a target do not."""
    n = bias.shape[-1]
    return bias if n % to == 0 or bias.stride(-2) % to == 0 else F.pad(bias, (0, -n % to))[..., :n]


@functools.cache
def flex_attention():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention) if torch.cuda.is_available() else flex_attention


def attend_flex(q, k, v, bias, dropout):
    """The same through FlexAttention, whose kernel reads the bias as it goes; it has no dropout, which goes to
    attend_sdpa, and on the CPU no gradient."""
    if dropout:
        return attend_sdpa(q, k, v, bias, dropout)

    def add_bias(score, b, h, query, key):
        sizes = bias.shape              # (1 or B, 1 or H, 1 or Q, N)
        return score + bias[b if sizes[0] > 1 else 0, h if sizes[1] > 1 else 0, query if sizes[2] > 1 else 0, key]

    return flex_attention()(q, k, v, score_mod=None if bias is None else add_bias, scale=1.0)


class AttendByHead(torch.autograd.Function):
    """The same one head of one row at a time, whose (Q, N) scores stay in the processor's cache. They are not kept but
    made once more in the backward pass, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135): for 4 rows of 512
    and 6 heads 25 MB less a layer, in 32 ms instead of 37; for 8 rows of 1,024 in 181 ms instead of 297 (LOG.md,
    2026-12-02)."""

    LEAST = 1 << 17     # scores of a head from which on it pays, by measurement between 256 x 256 and 512 x 512

    @staticmethod
    def weights(q, k, bias, b, h):                              # -> (Q, N), softmax(q k' + bias) of one head
        scores = onednn(q[b, h], k[b, h])
        if bias is not None:
            scores += bias[b % len(bias), h % bias.shape[1]]    # a size of 1 serves all
        return torch.softmax(scores, -1, out=scores)

    @staticmethod
    def forward(ctx, q, k, v, bias):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v, bias)
        B, H, Q, K = q.shape
        y = q.new_empty(B, Q, H, K)                             # so that the heads of a query lie side by side
        for b in range(B):
            for h in range(H):
                y[b, :, h] = onednn(AttendByHead.weights(q, k, bias, b, h), v[b, h].t())
        return y.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k, v, bias = ctx.saved_tensors
        g = g.contiguous()
        dq, dk, dv = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                p = AttendByHead.weights(q, k, bias, b, h)
                dv[b, h] = onednn(g[b, h].t().contiguous(), p.t()).t()
                ds = torch._softmax_backward_data(onednn(g[b, h], v[b, h]), p, -1, p.dtype)
                dq[b, h] = onednn(ds, k[b, h].t())
                dk[b, h] = onednn(q[b, h].t().contiguous(), ds.t()).t()
                if dbias is not None:
                    part = dbias[b % len(bias), h % bias.shape[1]]
                    part += ds.sum_to_size(part.shape)
        return dq, dk, dv, dbias


def attend_by_head(q, k, v, bias, dropout):
    if dropout or not (ONEDNN and is_plain_cpu(q)):
        return attend_eager(q, k, v, bias, dropout)
    return AttendByHead.apply(q, k, v, bias)


def attend_auto(q, k, v, bias, dropout):
    """The fused kernels on CUDA, and on any device when no gradient is wanted; else by head where that pays, and eager
    elsewhere: torch has no fused kernel on the CPU for a bias that is learnt."""
    if q.is_cuda or not torch.is_grad_enabled():
        return attend_sdpa(q, k, v, bias, dropout)
    pays = ONEDNN_TRAINS and is_plain_cpu(q) and q.shape[2] * k.shape[2] >= AttendByHead.LEAST
    return (attend_by_head if pays else attend_eager)(q, k, v, bias, dropout)


ATTENTION = {"auto": attend_auto, "eager": attend_eager, "sdpa": attend_sdpa, "flex": attend_flex,
             "by_head": attend_by_head}


def try_attention(names, shape, device, dtype, repeats=5):
    """Which of these ways to attend are right here, and how fast: {name: (seconds, error)}, error None where outputs
    and gradients equal the eager reference's, else what is wrong in one line.

    names    of ATTENTION
    shape    (B, H, N, K) of the queries and keys of a self-attention with a bias that is learnt
    dtype    float32, or bfloat16 as under autocast; then the reference is computed in float32
    """
    generator = torch.Generator().manual_seed(0)
    _, H, N, K = shape
    q, k, v, g = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    q, table = q * K ** -0.5, torch.randn(1, H, N, N, generator=generator).to(device)

    def call(attend, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = attend(*leaves, 0.0)
        return [y.detach(), *torch.autograd.grad(y, leaves, g.to(y.dtype))]

    def wait():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    wanted, found = call(attend_eager, *(x.float() for x in (q, k, v)), table), {}
    for name in names:
        seconds, error = float("inf"), None
        try:
            for _ in range(repeats):
                wait()
                t0 = time.perf_counter()
                got = call(ATTENTION[name], q, k, v, table)
                wait()
                seconds = min(seconds, time.perf_counter() - t0)
            bound = 1e-4 if dtype == torch.float32 and device.type == "cpu" else 2e-2   # TF32 and bfloat16: 3 digits
            off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
            if not off < bound:
                error = f"differs from the reference by {off:.1e}"
        except Exception as problem:                            # no compiler, no memory, no kernel for this card
            error = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        found[name] = (seconds, error)
    return found


def fastest(found):
    """The fastest of try_attention's right ones; eager where there is none."""
    right = {name: seconds for name, (seconds, error) in found.items() if error is None}
    return min(right, key=right.get, default="eager")
