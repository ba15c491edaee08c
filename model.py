"""T5 in one file: config, norm, attention, feed-forward, stacks, loss, greedy generation.

T5 v1.1 by default (untied head, gated GELU); `tied=True, gated=False` gives v1.0 (Raffel et al. 2020, arXiv
1910.10683; Shazeer 2020, arXiv 2002.05202). Needs torch alone.

Letters in shapes: B rows, S source tokens, T target tokens, Q and N the queries and keys of one attention,
D = d_model, H = n_head, K = d_kv, F = d_ff, V = vocab_size.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PAD, EOS = 0, 1         # T5's ids; the decoder starts from PAD
IGNORE = -100           # a target with this id costs nothing (torch's and Hugging Face's convention)


@dataclass
class T5Config:
    """Sizes of the model; the defaults are T5 v1.1 small."""
    vocab_size: int | None = None       # ids, sentinels and rounding included; None: taken from the data folder
    d_model: int = 512                  # width of the residual stream
    d_kv: int = 64                      # width of one head; n_head * d_kv need not equal d_model
    d_ff: int = 1024                    # width inside the feed-forward layer
    n_head: int = 6
    n_layer: int = 8                    # encoder blocks
    n_decoder_layer: int | None = None  # decoder blocks; None: as many as the encoder
    n_bucket: int = 32                  # rows of the relative position table
    max_distance: int = 128             # tokens; all farther keys share the last bucket
    dropout: float = 0.0                # T5 v1.1 pre-trains without
    tied: bool = False                  # head = embedding (v1.0)
    gated: bool = True                  # gated GELU (v1.1) or ReLU (v1.0)
    init: str = "t5x"                   # t5x: head at d_model^-0.5; nanot5: head at 1, as in nanoT5 and Hugging Face

    def __post_init__(self):
        if self.n_decoder_layer is None:
            self.n_decoder_layer = self.n_layer
        for name in ("d_model", "d_kv", "d_ff", "n_head", "n_layer", "n_decoder_layer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.vocab_size is not None and self.vocab_size < 4:
            raise ValueError(f"vocab_size={self.vocab_size} leaves no room for pad, EOS, unknown and a sentinel")
        if self.n_bucket < 4 or self.n_bucket % 4 or self.max_distance <= self.n_bucket // 2:
            raise ValueError(f"n_bucket={self.n_bucket}, max_distance={self.max_distance}: n_bucket must be a multiple"
                             " of 4, and max_distance greater than n_bucket / 2")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        if self.init not in ("t5x", "nanot5"):
            raise ValueError(f"init={self.init!r} is unknown; there are 't5x' and 'nanot5'")


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learnt weight; no mean, no shift.

    The statistics are taken in fp32 whatever the autocast (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):                                       # (..., D) -> (..., D)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, eps=1e-6)


def relative_bucket(distance, bidirectional, n_bucket=32, max_distance=128):
    """Choose the row of the bias table for every query-key pair.

    distance  (Q, N) ints, tokens: key position minus query position
    returns   (Q, N) int64 in [0, n_bucket)

    Near keys own a row each, far keys share rows on a log scale, and all beyond max_distance share the last.
    An encoder gives half of the rows to the keys ahead; a decoder, which never sees those, gives all to the past.
    Raffel et al. 2020, section 2.1; tests/test_model.py::test_buckets_by_hand
    """
    bucket = torch.zeros_like(distance)
    if bidirectional:
        n_bucket //= 2
        bucket = bucket + (distance > 0) * n_bucket
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    n_exact = n_bucket // 2
    log_ratio = torch.log(distance.clamp(min=1).float() / n_exact) / math.log(max_distance / n_exact)
    far = n_exact + (log_ratio * (n_bucket - n_exact)).long()
    return bucket + torch.where(distance < n_exact, distance, far.clamp(max=n_bucket - 1))


def attend_eager(q, k, v, bias, dropout):
    """The reference: softmax(q k' + bias) v, written out. q (B,H,Q,K), k and v (B,H,N,K), bias to (B,H,Q,N) or None."""
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    return F.dropout(scores.softmax(-1), dropout) @ v           # training is told by dropout > 0


def attend_sdpa(q, k, v, bias, dropout):
    """The same through torch's fused kernels. scale=1: T5 folds 1/sqrt(d_kv) into the initialisation of q."""
    if bias is not None:
        bias = bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)


ATTENTION = {"eager": attend_eager, "sdpa": attend_sdpa}


class Attention(nn.Module):
    """Multi-head attention without biases and without 1/sqrt(d_kv); `memory` is x itself or the encoder's output."""

    def __init__(self, config):
        super().__init__()
        width = config.n_head * config.d_kv
        self.n_head, self.dropout = config.n_head, config.dropout
        self.q = nn.Linear(config.d_model, width, bias=False)
        self.k = nn.Linear(config.d_model, width, bias=False)
        self.v = nn.Linear(config.d_model, width, bias=False)
        self.o = nn.Linear(width, config.d_model, bias=False)
        self.attend = attend_eager                              # T5.set_attention changes it

    def heads(self, x):                                         # (B, N, H * K) -> (B, H, N, K)
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x, memory, bias):                         # (B, Q, D), (B, N, D) -> (B, Q, D)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))
        y = self.attend(q, k, v, bias, self.dropout if self.training else 0.0)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """wo(gelu(wi_0 x) * wi_1 x), or wo(relu(wi x)) when not gated. GELU is the tanh form, "gelu_new"."""

    def __init__(self, config):
        super().__init__()
        self.gated, self.dropout = config.gated, config.dropout
        if config.gated:
            self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
            self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        else:
            self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):                                       # (B, N, D) -> (B, N, D)
        h = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x) if self.gated else F.relu(self.wi(x))
        return self.wo(F.dropout(h, self.dropout, self.training))


class Block(nn.Module):
    """Self-attention, cross-attention in a decoder, feed-forward; each as x + dropout(layer(norm(x)))."""

    def __init__(self, config, is_decoder):
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm, self.attention = RMSNorm(config.d_model), Attention(config)
        if is_decoder:
            self.cross_norm, self.cross = RMSNorm(config.d_model), Attention(config)
        self.ff_norm, self.ff = RMSNorm(config.d_model), FeedForward(config)

    def forward(self, x, bias, memory=None, memory_bias=None):
        h = self.attention_norm(x)
        x = x + F.dropout(self.attention(h, h, bias), self.dropout, self.training)
        if memory is not None:
            x = x + F.dropout(self.cross(self.cross_norm(x), memory, memory_bias), self.dropout, self.training)
        return x + F.dropout(self.ff(self.ff_norm(x)), self.dropout, self.training)


class Stack(nn.Module):
    """An encoder or a decoder: blocks that share one relative position table, and a last norm."""

    def __init__(self, config, is_decoder):
        super().__init__()
        self.config, self.is_decoder = config, is_decoder
        self.gradient_checkpointing = False
        self.bias = nn.Embedding(config.n_bucket, config.n_head)
        self.blocks = nn.ModuleList(Block(config, is_decoder)
                                    for _ in range(config.n_decoder_layer if is_decoder else config.n_layer))
        self.norm = RMSNorm(config.d_model)

    def position_bias(self, n, device):
        """(1, H, n, n): what is added to the scores for distance; in a decoder the future gets the lowest number."""
        at = torch.arange(n, device=device)
        distance = at[None, :] - at[:, None]                    # key minus query
        bucket = relative_bucket(distance, not self.is_decoder, self.config.n_bucket, self.config.max_distance)
        bias = self.bias(bucket).permute(2, 0, 1).contiguous()[None].float()
        if self.is_decoder:
            bias = bias.masked_fill(distance > 0, torch.finfo(bias.dtype).min)
        return bias

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        """x (B, N, D) embedded tokens; mask, memory_mask (B, N), (B, S) where 0 marks padding; returns (B, N, D)."""
        bias = self.position_bias(x.shape[1], x.device)         # once for all blocks
        if mask is not None:
            bias = bias.masked_fill(mask[:, None, None, :] == 0, torch.finfo(bias.dtype).min)
        memory_bias = None
        if memory_mask is not None:
            hidden = memory_mask[:, None, None, :] == 0
            memory_bias = torch.zeros(hidden.shape, device=x.device).masked_fill(hidden, torch.finfo(torch.float).min)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, bias, memory, memory_bias, use_reentrant=False)
            else:
                x = block(x, bias, memory, memory_bias)
        return F.dropout(self.norm(x), self.config.dropout, self.training)


class T5(nn.Module):
    """The encoder-decoder. `model(source, target)` is the loss; `logits` and `encode` are what it is made of.

    source       (B, S) ids
    target       (B, T) ids; IGNORE (-100) marks places that cost nothing
    source_mask  (B, S), 0 where source is padding. None means that there is none: a padded batch needs its mask.
    """

    def __init__(self, config):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("T5Config.vocab_size must be set")
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, is_decoder=False)
        self.decoder = Stack(config, is_decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.shared.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw all weights. Both recipes scale by fan-in and fold 1/sqrt(d_kv) into q, and differ in the untied head:

        t5x     head, wi and wo truncated normal at fan_in^-0.5, the table uniform (google-research/t5x, layers.py)
        nanot5  plain normals, the head at 1 (PiotrNawrot/nanoT5, t5_model.py): first loss near 109 at base width
                instead of 10.7, and the head's step under RMS scaling 28 times larger
        """
        c, t5x = self.config, self.config.init == "t5x"

        def normal(weight, std, truncate=False):
            if truncate:                                        # cut at two sigma; .8796 restores the variance
                nn.init.trunc_normal_(weight, std=std / 0.87962566, a=-2 * std / 0.87962566, b=2 * std / 0.87962566)
            else:
                nn.init.normal_(weight, std=std)

        normal(self.shared.weight, 1.0)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Attention):
                normal(module.q.weight, (c.d_model * c.d_kv) ** -0.5)
                normal(module.k.weight, c.d_model ** -0.5)
                normal(module.v.weight, c.d_model ** -0.5)
                normal(module.o.weight, (c.n_head * c.d_kv) ** -0.5)
            elif isinstance(module, FeedForward):
                for linear in module.children():                # wi_0, wi_1, wo or wi, wo
                    normal(linear.weight, linear.in_features ** -0.5, truncate=t5x)
            elif isinstance(module, Stack):
                if t5x:                                         # variance scaling, fan_avg, uniform
                    nn.init.xavier_uniform_(module.bias.weight)
                else:
                    normal(module.bias.weight, c.d_model ** -0.5)
        if not c.tied:
            normal(self.lm_head.weight, c.d_model ** -0.5 if t5x else 1.0, truncate=t5x)

    def set_attention(self, name):
        """Choose 'eager' or 'sdpa' for every layer; both give the same numbers to rounding."""
        if name not in ATTENTION:
            raise ValueError(f"attention={name!r} is unknown; there are {', '.join(ATTENTION)}")
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = ATTENTION[name]

    def set_gradient_checkpointing(self, on=True):
        """Recompute each block in the backward pass: less memory, about a third more time."""
        self.encoder.gradient_checkpointing = self.decoder.gradient_checkpointing = on

    def encode(self, source, source_mask=None):
        """(B, S) ids -> (B, S, D), the encoder's output."""
        return self.encoder(self.shared(source), mask=source_mask)

    def decode(self, decoder_input, memory, source_mask=None):
        """(B, T) ids and the encoder's (B, S, D) -> (B, T, V) logits."""
        return self.head(self.decoder(self.shared(decoder_input), memory=memory, memory_mask=source_mask))

    def head(self, y):                                          # (B, T, D) -> (B, T, V)
        if self.config.tied:
            y = y * self.config.d_model ** -0.5                 # v1.0 only: the embedding has unit variance
        return self.lm_head(y)

    def logits(self, source, target, source_mask=None):
        """(B, T, V): at each place the scores of target's id, given the source and target's earlier ids."""
        x, y = self.shared(torch.cat([source, shift_right(target)], 1)).split([source.shape[1], target.shape[1]], 1)
        memory = self.encoder(x, mask=source_mask)              # one look-up for both: one gradient of (V, D), not two
        return self.head(self.decoder(y, memory=memory, memory_mask=source_mask))

    def forward(self, source, target, source_mask=None, reduction="mean"):
        """Cross-entropy in nats per target token; reduction="sum" gives the sum over all target tokens of the batch."""
        logits = self.logits(source, target, source_mask)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction=reduction)

    @torch.no_grad()
    def generate(self, source, source_mask=None, max_new_tokens=64):
        """Greedy decoding: (B, S) ids -> (B, up to max_new_tokens) ids, each row PAD after its EOS; without dropout."""
        was_training = self.training
        self.eval()
        memory = self.encode(source, source_mask)
        target = source.new_full((len(source), 1), PAD)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(max_new_tokens):
            best = self.decode(target, memory, source_mask)[:, -1].argmax(-1)
            best = best.masked_fill(ended, PAD)
            target = torch.cat([target, best[:, None]], 1)
            ended |= best == EOS
            if ended.all():
                break
        self.train(was_training)
        return target[:, 1:]

    def n_params(self):
        """Number of weights, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops(self, batch, source_length, target_length):
        """Floating point operations of forward and backward on `batch` rows: 6 for each weight of a matrix product
        and token, 12 * H * K for each query-key pair. T5 v1.1 base, one row of 512/114: 425.9e9."""
        c, S, T = self.config, source_length, target_length
        attention = 4 * c.d_model * c.n_head * c.d_kv           # weights of q, k, v and o
        ff = (3 if c.gated else 2) * c.d_model * c.d_ff
        encoder = c.n_layer * S * (attention + ff)
        decoder = c.n_decoder_layer * (T * (1.5 * attention + ff) + S * attention / 2)  # cross: q, o on T; k, v on S
        pairs = c.n_layer * S * S + c.n_decoder_layer * (T * T + T * S)
        return batch * (6 * (encoder + decoder + T * c.d_model * c.vocab_size) + 12 * c.n_head * c.d_kv * pairs)


def shift_right(target):
    """The decoder's input: PAD first, the last id dropped, IGNORE read as PAD. [5, 6, 1] -> [0, 5, 6]"""
    shifted = F.pad(target[:, :-1], (1, 0), value=PAD)
    return shifted.masked_fill(shifted == IGNORE, PAD)


def hf_name(name):
    """The name that Hugging Face's T5 gives to a weight: decoder.blocks.3.ff.wo.weight ->
    decoder.block.3.layer.2.DenseReluDense.wo.weight"""
    ff = "2" if name.startswith("decoder.") else "1"
    for ours, theirs in (
            (".bias.weight", ".blocks.0.attention.relative_attention_bias.weight"),
            ("coder.norm.", "coder.final_layer_norm."),
            (".blocks.", ".block."),
            (".attention_norm.", ".layer.0.layer_norm."), (".attention.", ".layer.0.SelfAttention."),
            (".cross_norm.", ".layer.1.layer_norm."), (".cross.", ".layer.1.EncDecAttention."),
            (".ff_norm.", f".layer.{ff}.layer_norm."), (".ff.", f".layer.{ff}.DenseReluDense.")):
        name = name.replace(ours, theirs)
    return name
