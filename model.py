"""T5 in one file: config, norm, attention, feed-forward, stacks, loss, generation, Hugging Face's format.

T5 v1.1 by default (untied head, gated GELU); `tied=True, gated=False` gives v1.0, `bias_per_layer=True` umT5 (Raffel
et al. 2020, arXiv 1910.10683; Shazeer 2020, arXiv 2002.05202; Chung et al. 2023, arXiv 2304.09151). Needs torch alone;
reading and writing weights needs safetensors, and a name on the Hub huggingface_hub.

Letters in shapes: B rows, S source tokens, T target tokens, Q and N the queries and keys of one attention,
G sequences that are generated for one row, D = d_model, H = n_head, K = d_kv, F = d_ff, V = vocab_size.
"""
import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import IGNORE

PAD, EOS = 0, 1         # T5's ids; the decoder starts from PAD
LOWEST = torch.finfo(torch.bfloat16).min    # what hides a key; finite in float32 too: a row of hidden keys has no NaN


@dataclass
class T5Config:
    """Sizes of the model; the defaults are T5 v1.1 small."""
    vocab_size: int | None = None       # ids, sentinels and rounding included; None: as the vocabulary has
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
    bias_per_layer: bool = False        # a relative position table in each layer (umT5), not one a stack
    init: str = "t5x"                   # t5x: head at d_model^-0.5; nanot5: head at 1, as in nanoT5 and Hugging Face
    zero_out: bool = False              # start with o and wo at 0: each block adds nothing at first
    match_init: bool = False            # start cross-attention's k as its q: a sentinel attends to itself in the source
    local_init: float = 0.0             # start the position tables at this times ALiBi's slopes: near keys first

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


class Linear(nn.Linear):
    """A matrix product without a shift; on a CPU by whichever library is faster there (kernels.py)."""

    packed = None       # the weight in oneDNN's own order, while generate() runs

    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x):                                       # (..., d_in) -> (..., d_out)
        return kernels.linear(x, self.weight) if self.packed is None else kernels.onednn(x, self.packed)


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learnt weight; no mean, no shift.

    The statistics are taken in fp32 whatever the autocast (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):                                       # (..., D) -> (..., D)
        return kernels.rms_norm(x.float(), self.weight, eps=1e-6)


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


class Attention(nn.Module):
    """Multi-head attention without biases and without 1/sqrt(d_kv); `memory` is x itself or the encoder's output."""

    def __init__(self, config):
        super().__init__()
        width = config.n_head * config.d_kv
        self.n_head, self.dropout = config.n_head, config.dropout
        self.q = Linear(config.d_model, width)
        self.k = Linear(config.d_model, width)
        self.v = Linear(config.d_model, width)
        self.o = Linear(width, config.d_model)
        self.attend = kernels.attend_auto                       # T5.set_attention changes it

    def heads(self, x):                                         # (B, N, H * K) -> (B, H, N, K)
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def keys_values(self, memory):                              # (B, N, D) -> twice (B, H, N, K)
        return self.heads(self.k(memory)), self.heads(self.v(memory))

    def attend_to(self, x, k, v, bias):                         # (B, Q, D) -> (B, Q, D)
        y = self.attend(self.heads(self.q(x)), k, v, bias, self.dropout if self.training else 0.0)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x, memory, bias):                         # (B, Q, D), (B, N, D) -> (B, Q, D)
        return self.attend_to(x, *self.keys_values(memory), bias)


class FeedForward(nn.Module):
    """wo(gelu(wi_0 x) * wi_1 x), or wo(relu(wi x)) when not gated. GELU is the tanh form, "gelu_new"."""

    def __init__(self, config):
        super().__init__()
        self.gated, self.dropout = config.gated, config.dropout
        if config.gated:
            self.wi_0 = Linear(config.d_model, config.d_ff)
            self.wi_1 = Linear(config.d_model, config.d_ff)
        else:
            self.wi = Linear(config.d_model, config.d_ff)
        self.wo = Linear(config.d_ff, config.d_model)

    def forward(self, x):                                       # (B, N, D) -> (B, N, D)
        if self.gated and kernels.by_hand(x):
            return kernels.GatedFeedForward.apply(x, self.wi_0.weight, self.wi_1.weight, self.wo.weight,
                                                  self.dropout if self.training else 0.0)
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

    def step(self, y, bias, cache, i):
        """The same for the newest ids alone, (B, G, D); keys and values come from entry i of the cache."""
        h = self.attention_norm(y)
        y = y + self.attention.attend_to(h, *cache.append(i, *self.attention.keys_values(h)), bias)
        y = y + self.cross.attend_to(self.cross_norm(y), *cache.cross[i], cache.memory_bias)
        return y + self.ff(self.ff_norm(y))


class Stack(nn.Module):
    """An encoder or a decoder: blocks, the relative position table that they share (umT5: one each), a last norm."""

    def __init__(self, config, is_decoder):
        super().__init__()
        self.config, self.is_decoder = config, is_decoder
        self.gradient_checkpointing = False
        n_layer = config.n_decoder_layer if is_decoder else config.n_layer
        self.bias = nn.ModuleList(nn.Embedding(config.n_bucket, config.n_head)
                                  for _ in range(n_layer if config.bias_per_layer else 1))
        self.blocks = nn.ModuleList(Block(config, is_decoder) for _ in range(n_layer))
        self.norm = RMSNorm(config.d_model)

    def buckets(self, distance):
        """Rows of the table for distances of any shape, key minus query."""
        return relative_bucket(distance, not self.is_decoder, self.config.n_bucket, self.config.max_distance)

    def alibi(self):
        """(n_bucket, H): mean distance of the keys that share a bucket, times 2^(-8 h / H) for head h = 1 ... H, as in
        Press et al. 2022 (arXiv 2108.12409)."""
        most, H = self.config.max_distance, self.config.n_head
        distance = torch.arange(-most, 1 if self.is_decoder else most + 1)
        bucket, zeros = self.buckets(distance), torch.zeros(self.config.n_bucket)
        count = zeros.index_add(0, bucket, torch.ones(len(distance)))
        mean = zeros.index_add(0, bucket, distance.abs().float()) / count.clamp(min=1)
        return mean[:, None] * 2.0 ** (-8 * torch.arange(1, H + 1) / H)

    def position_bias(self, i, bucket, hidden):
        """What table i adds to the scores, (1, H, Q, N), and the lowest number where `hidden` is true."""
        bias = self.bias[i](bucket).permute(2, 0, 1).contiguous()[None].float()
        return bias if hidden is None else bias.masked_fill(hidden, LOWEST)

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        """x (B, N, D) embedded tokens; mask, memory_mask (B, N), (B, S) where 0 marks padding; returns (B, N, D)."""
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[None, :] - at[:, None]
        bucket, hidden = self.buckets(distance), distance > 0 if self.is_decoder else None
        if mask is not None:
            padding = mask[:, None, None, :] == 0
            hidden = padding if hidden is None else hidden | padding
        memory_bias = padding_bias(memory_mask)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            if i < len(self.bias):                              # mostly one table: its bias serves all blocks
                bias = self.position_bias(i, bucket, hidden)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, bias, memory, memory_bias, use_reentrant=False)
            else:
                x = block(x, bias, memory, memory_bias)
        return F.dropout(self.norm(x), self.config.dropout, self.training)

    def step(self, y, cache):
        """The decoder on the newest id of each sequence: y (B, G, D) -> (B, G, D); the cache grows by these ids."""
        distance, hidden = cache.begin()
        bucket = self.buckets(distance)
        for i, block in enumerate(self.blocks):
            if i < len(self.bias):
                bias = self.position_bias(i, bucket, hidden)
            y = block.step(y, bias, cache, i)
        return self.norm(y)


class Cache:
    """What a decoder remembers while it generates G sequences for each of B rows.

    cross   for each block keys and values of the source, (B, H, S, K): computed once, shared by a row's sequences
    own     for each block keys and values of the ids so far, (B, H, room, K). The id that sequence g gets at time t
            stands at place t * G + g for good; slots (B, G, t) tells which of them a sequence consists of. So no keys
            are copied when one beam goes on from another's ids.
    """
    is_static = False

    def __init__(self, blocks, memory, source_mask, n_sequence, room=32):
        """room: times that there is room for at first; then doubled"""
        self.n_sequence, self.length = n_sequence, 0
        self.cross = [tuple(x.contiguous() for x in block.cross.keys_values(memory)) for block in blocks]
        self.memory_bias = padding_bias(source_mask)
        self.own = [tuple(x.new_empty(*x.shape[:2], room * n_sequence, x.shape[3]) for x in pair)
                    for pair in self.cross]
        self.slots = torch.empty(len(memory), n_sequence, 0, dtype=torch.long, device=memory.device)

    def begin(self):
        """Make room for one more time; returns (1, t * G), how far behind the newest id each key lies (0, -1, ...), and
        (B, 1, G, t * G), true where a key is another sequence's (None: it never is)."""
        self.length += 1
        if self.length * self.n_sequence > self.own[0][0].shape[2]:
            self.own = [tuple(F.pad(x, (0, 0, 0, x.shape[2])) for x in pair) for pair in self.own]
        distance = torch.arange(1 - self.length, 1, device=self.slots.device)[None]
        if self.n_sequence == 1:
            return distance, None
        g = torch.arange(self.n_sequence, device=self.slots.device)
        self.slots = torch.cat([self.slots, g[None, :, None].expand(len(self.slots), -1, 1)], 2)
        return distance.repeat_interleave(self.n_sequence, 1), (self.slots[..., None] != g).flatten(2)[:, None]

    def append(self, i, k, v):
        """Store the newest keys and values of block i, (B, H, G, K); returns all of them so far, (B, H, t * G, K)."""
        lo, hi = (self.length - 1) * self.n_sequence, self.length * self.n_sequence
        for whole, new in zip(self.own[i], (k, v), strict=True):
            whole[:, :, lo:hi] = new
        return tuple(whole[:, :, :hi] for whole in self.own[i])

    def follow(self, parent):
        """Sequence g of each row goes on from what its sequence parent[row, g] has been until now."""
        self.slots = self.slots.gather(1, parent[..., None].expand_as(self.slots))

    def select(self, order):
        """Row i becomes what row order[i] was, rows past the end of `order` are dropped. Only what moves is copied."""
        n = len(order)
        moved = (order != torch.arange(n, device=order.device)).nonzero().flatten()

        def take(x):
            x[moved] = x[order[moved]]
            return x[:n]

        self.cross, self.own = ([(take(k), take(v)) for k, v in pairs] for pairs in (self.cross, self.own))
        self.slots = take(self.slots)
        if self.memory_bias is not None:
            self.memory_bias = take(self.memory_bias)


class StaticCache(Cache):
    """The same with one shape at all times, so that a step can be compiled once and be replayed as a CUDA graph: there
    is room for all times from the start, and what changes are the contents of tensors that stay where they are.

    time    (), the time of the newest ids; place (G,), where their keys stand
    slots   (B, G, room), -1 at times that are not written yet: no sequence consists of those, so they are hidden
    """
    is_static = True

    def __init__(self, blocks, memory, source_mask, n_sequence, n_time):
        room = math.ceil(n_time / 16) * 16                      # calls of like lengths have one shape
        super().__init__(blocks, memory, source_mask, n_sequence, room)
        for k, v in self.own:                                   # hidden is 0 times the value: that may be no NaN
            k.zero_(), v.zero_()
        device = memory.device
        self.slots = torch.full((len(memory), n_sequence, room), -1, device=device)
        self.time, self.place = torch.full((), -1, device=device), torch.arange(-n_sequence, 0, device=device)

    def begin(self):
        G, room = self.slots.shape[1:]
        self.time.add_(1)
        self.place.add_(G)
        g, at = torch.arange(G, device=self.slots.device), torch.arange(room, device=self.slots.device)
        self.slots.index_copy_(2, self.time[None], g[:, None].expand(len(self.slots), -1, 1))
        distance = (at - self.time).repeat_interleave(G)[None]  # above 0 where nothing is written yet
        return distance, (self.slots[..., None] != g).flatten(2)[:, None]

    def append(self, i, k, v):
        for whole, new in zip(self.own[i], (k, v), strict=True):
            whole.index_copy_(2, self.place, new)
        return self.own[i]

    def follow(self, parent):
        self.slots.copy_(self.slots.gather(1, parent[..., None].expand_as(self.slots)))

    def tensors(self):
        """All that it consists of, in one order."""
        bias = [] if self.memory_bias is None else [self.memory_bias]
        return [x for pair in self.cross + self.own for x in pair] + [self.slots, self.time, self.place] + bias


def padding_bias(mask):
    """(B, N), 0 where padding is -> (B, 1, 1, N) to add to scores; None -> None."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, LOWEST)[:, None, None, :]


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
        self.lm_head = Linear(config.d_model, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.shared.weight
        self.tokenizer_files = []                               # what from_pretrained found beside the weights
        self.compiled_steps = {}                                # by shapes: what generate(compile_step=True) compiled
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw all weights. Both recipes scale by fan-in and fold 1/sqrt(d_kv) into q, and differ in the untied head:

        t5x     head, wi and wo truncated normal at fan_in^-0.5, the table uniform (google-research/t5x, layers.py)
        nanot5  plain normals, the head at 1 (PiotrNawrot/nanoT5, t5_model.py): first loss near 109 at base width
                instead of 10.7, and the head's step under RMS scaling 28 times larger

        match_init and local_init begin with what a denoiser learns late: a decoder's sentinel finds its place in the
        source, since both have one embedding (q and k alike as in Trockman & Kolter 2023, arXiv 2305.09828), and what
        stands there is mixed with its neighbours (LOG.md, 2026-12-02). Trained weights are a stock T5 all the same.
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
                if c.match_init and any(module is block.cross for block in self.decoder.blocks):
                    module.k.weight.copy_(module.q.weight * c.d_kv ** 0.5)
            elif isinstance(module, FeedForward):
                for linear in module.children():                # wi_0, wi_1, wo or wi, wo
                    normal(linear.weight, linear.in_features ** -0.5, truncate=t5x)
            elif isinstance(module, Stack):
                for table in module.bias:
                    if t5x:                                     # variance scaling, fan_avg, uniform
                        nn.init.xavier_uniform_(table.weight)
                    else:
                        normal(table.weight, c.d_model ** -0.5)
                    if c.local_init:
                        table.weight -= c.local_init * module.alibi()
        if not c.tied:
            normal(self.lm_head.weight, c.d_model ** -0.5 if t5x else 1.0, truncate=t5x)
        if c.zero_out:
            for name, p in self.named_parameters():
                if name.endswith((".o.weight", ".wo.weight")):
                    p.zero_()

    def set_attention(self, name):
        """Choose one of kernels.ATTENTION for every layer; all give the same numbers to rounding."""
        if name not in kernels.ATTENTION:
            raise ValueError(f"attention={name!r} is unknown; there are {', '.join(kernels.ATTENTION)}")
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = kernels.ATTENTION[name]

    def set_dropout(self, p):
        """Another probability in every layer than the one that came with the weights."""
        self.config.dropout = p
        for module in self.modules():
            if hasattr(module, "dropout"):
                module.dropout = p

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
        return self.lm_head(self.scaled(y))

    def scaled(self, y):
        return y * self.config.d_model ** -0.5 if self.config.tied else y   # v1.0 only: its head has unit variance

    def logits(self, source, target, source_mask=None):
        """(B, T, V): at each place the scores of target's id, given the source and target's earlier ids."""
        return self.head(self.decoder_output(source, target, source_mask))

    def decoder_output(self, source, target, source_mask=None):
        """(B, T, D): what the head makes logits of."""
        x, y = self.shared(torch.cat([source, shift_right(target)], 1)).split([source.shape[1], target.shape[1]], 1)
        memory = self.encoder(x, mask=source_mask)              # one look-up for both: one gradient of (V, D), not two
        return self.decoder(y, memory=memory, memory_mask=source_mask)

    def forward(self, source, target, source_mask=None, reduction="mean", z_loss=0.0):
        """Cross-entropy in nats per target token; reduction="sum" gives the sum over all target tokens of the batch.
        z_loss: weight of log(Z)^2, see kernels.cross_entropy."""
        y, ids = self.decoder_output(source, target, source_mask), target.flatten()
        if kernels.by_hand(y):
            loss = kernels.HeadCrossEntropy.apply(self.scaled(y).flatten(0, 1), self.lm_head.weight, ids, z_loss)
        else:
            loss = kernels.cross_entropy(self.head(y).float().flatten(0, 1), ids, z_loss)
        return loss if reduction == "sum" else loss / (ids != IGNORE).sum().clamp(min=1)

    def next_logits(self, ids, cache):
        """(B, G) newest ids -> (B, G, V) scores of what follows them; the cache holds what came before."""
        return self.head(self.decoder.step(self.shared(ids), cache)).float()

    def compiled_step(self, cache):
        """(next_logits compiled for the shapes of a static cache, the cache to use it with, which is filled like
        `cache`). A CUDA graph reads and writes at fixed addresses, so both are kept for the next call of these shapes.
        """
        tensors = cache.tensors()
        key = tuple((x.shape, x.dtype, x.device) for x in tensors)
        if key not in self.compiled_steps:
            for x in tensors:
                torch._dynamo.mark_static_address(x)
            self.compiled_steps[key] = cache, torch.compile(
                type(self).next_logits, mode="reduce-overhead", fullgraph=True, dynamic=False, isolate_recompiles=True)
        known, step = self.compiled_steps[key]
        if known is not cache:
            for old, new in zip(known.tensors(), tensors, strict=True):
                old.copy_(new)
        return lambda ids, cache: step(self, ids, cache), known     # bound here: a copy of the model calls itself

    @torch.no_grad()
    def generate(self, source, source_mask=None, max_new_tokens=128, num_beams=1, num_samples=1, temperature=0.0,
                 top_k=0, top_p=1.0, length_penalty=1.0, early_stopping=False, suppress=(), seed=0, on_step=None,
                 static=None, compile_step=False):
        """Write a target for each source: greedy by default, sampled if temperature > 0, or by beam search.

        source       (B, S) ids; source_mask (B, S), 0 where source is padding
        num_beams    above 1: beam search; the best num_samples of its num_beams results are returned, the best first.
                     Scores are sums of log-probabilities over length ** length_penalty; early_stopping ends a row as
                     soon as num_beams results are complete
        temperature  above 0: num_samples samples a row, from the top_k likeliest ids (0: all) and of those from the
                     likeliest that make up top_p
        suppress     ids that never come out, such as data.Tokenizer.suppress gives
        seed         of the samples: an int (row r uses seed + r), or a list of one for each row
        on_step      called with the (B, num_samples) ids of each time (not by beam search)
        static       True: each step has the same shapes and does not wait for the device. All rows stay in the batch
                     until the last is complete, which is asked every 16 times only (at each one if there is an
                     on_step). None: true on CUDA devices and with compile_step. Results are the same
        compile_step compile the step (on CUDA devices: record it as a CUDA graph) at the first call of these shapes.
                     What is compiled and its cache stay in memory until model.compiled_steps.clear()
        returns      (B * num_samples, up to max_new_tokens) ids, PAD after EOS; without dropout

        A row's result depends neither on its companions nor on how many they are, save for rounding; what a sample
        has drawn up to some time, not on max_new_tokens. A row that is complete is taken out of the batch, unless
        static. One call at a time: while it runs the model is in evaluation mode, and on an x86 CPU the decoder's
        weights are held a second time, packed. Beam search is that of transformers 5 (num_beams, length_penalty and
        early_stopping mean the same); tests/test_generate.py.
        """
        if max_new_tokens < 1 or num_beams < 1 or num_samples < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}, num_beams={num_beams}, num_samples={num_samples}:"
                             f" each must be at least 1")
        if not (temperature == 0 or 1e-6 <= temperature <= 1e6) or top_k < 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature={temperature}, top_k={top_k}, top_p={top_p}: temperature must be 0 or lie in"
                             f" [1e-6, 1e6], top_k must not be negative, and top_p must lie in (0, 1]")
        if not -10 <= length_penalty <= 10 or early_stopping not in (True, False):
            raise ValueError(f"length_penalty={length_penalty}, early_stopping={early_stopping}: the first must lie in"
                             f" [-10, 10], the second must be True or False")
        if num_beams > 1 and temperature > 0:
            raise ValueError(f"num_beams={num_beams} and temperature={temperature} exclude each other: beam search"
                             f" takes no samples")
        if num_beams > 1 and num_samples > num_beams:
            raise ValueError(f"num_samples={num_samples} is more than num_beams={num_beams} give")
        if num_beams == 1 and temperature == 0 and (num_samples > 1 or top_k > 0 or top_p < 1):
            raise ValueError(f"num_samples={num_samples}, top_k={top_k}, top_p={top_p} need a temperature above 0:"
                             f" without one the likeliest id is taken")
        if static is False and compile_step:
            raise ValueError("static=False and compile_step=True exclude each other: only a static step is compiled")
        if source_mask is not None and source_mask.shape != source.shape:
            raise ValueError(f"source_mask is {tuple(source_mask.shape)}, source {tuple(source.shape)}")
        if source_mask is not None and source_mask.all():
            source_mask = None
        seeds = seed if isinstance(seed, (list, tuple)) else range(int(seed), int(seed) + len(source))
        if len(seeds) != len(source):
            raise ValueError(f"there are {len(seeds)} seeds for {len(source)} rows")
        suppress = torch.as_tensor(list(suppress), dtype=torch.long, device=source.device)
        with generating(self):
            memory = self.encode(source, source_mask)
            if not memory.isfinite().all():
                raise ValueError("the encoder's output is not finite: the weights are damaged, or dtype is too narrow")
            G, step = max(num_beams, num_samples), self.next_logits
            if static or (static is None and (source.is_cuda or compile_step)):
                cache = StaticCache(self.decoder.blocks, memory, source_mask, G, max_new_tokens)
            else:
                cache = Cache(self.decoder.blocks, memory, source_mask, G)
            if compile_step:
                step, cache = self.compiled_step(cache)
            del memory
            if num_beams > 1:
                return self.beam_search(step, cache, max_new_tokens, num_samples, length_penalty, early_stopping,
                                        suppress)
            return self.sample(step, cache, max_new_tokens, temperature, top_k, top_p, suppress, seeds, on_step)

    def sample(self, step, cache, max_new_tokens, temperature, top_k, top_p, suppress, seeds, on_step):
        """generate's loop for greedy search and samples."""
        n, G, device = len(cache.slots), cache.n_sequence, cache.slots.device
        result = torch.full((n, G, max_new_tokens), PAD, device=device)
        ids, ended = torch.full((n, G), PAD, device=device), torch.zeros(n, G, dtype=torch.bool, device=device)
        if temperature > 0:         # all random numbers of a row come from its own seed, (B, T, G)
            uniform = torch.stack([torch.rand(max_new_tokens, G, generator=torch.Generator().manual_seed(int(s)))
                                   for s in seeds]).to(device)
        rows = torch.arange(n, device=device)                   # which row each entry of the cache belongs to
        for t in range(max_new_tokens):
            logits = step(ids, cache).index_fill_(-1, suppress, -math.inf)
            if temperature > 0:
                ids = draw(logits / temperature, top_k, top_p, uniform[rows, t])
            else:
                ids = logits.argmax(-1)
            ids = ids.masked_fill(ended, PAD)
            result[rows, :, t] = ids
            if on_step is not None:
                on_step(result[:, :, t])
            ended = ended | (ids == EOS)
            going_on = ~ended.all(1)
            if cache.is_static:
                if (on_step is not None or t % 16 == 15) and not going_on.any():
                    break
            elif not going_on.all():
                order = compact(going_on)
                if not len(order):
                    break
                cache.select(order)
                ids, ended, rows = ids[order], ended[order], rows[order]
        result = result.flatten(0, 1)
        before_eos = ((result == EOS).cumsum(1) == 0).any(0)    # (T,), true as long as some row goes on
        return result[:, :int(before_eos.sum()) + 1]

    def beam_search(self, step, cache, max_new_tokens, n_best, length_penalty, early_stopping, suppress):
        """generate's loop for beams. Each time the 2 G best continuations of a row are looked at: those among the
        first G that end are kept as results if they are better than the worst kept, the best G that do not end go on.
        A row is complete when all its G results are better than its best beam could become at its present length."""
        n, G = len(cache.slots), cache.n_sequence
        device, V = cache.slots.device, self.config.vocab_size
        ids = torch.full((n, G), PAD, device=device)
        history = torch.full((n, G, max_new_tokens), PAD, device=device)
        score = torch.full((n, G), -1e9, device=device)
        score[:, 0] = 0.0                                       # at first all beams are the same: count one
        kept, kept_score = history.clone(), torch.full((n, G), -1e9, device=device)     # complete results of a row
        result, rows = history[:, :n_best].clone(), torch.arange(n, device=device)
        ended = torch.zeros(n, dtype=torch.bool, device=device)
        for t in range(max_new_tokens):
            logits = step(ids, cache)
            total = logits.logsumexp(-1, keepdim=True)
            best, best_ids = logits.index_fill_(-1, suppress, -math.inf).topk(min(2 * G, V), -1)     # of each beam ...
            new_score, at = (score[..., None] + best - total).flatten(1).topk(2 * G, -1)            # ... and of a row
            parent, ids = at // best.shape[-1], best_ids.flatten(1).gather(1, at)
            new_history = history.gather(1, parent[..., None].expand(-1, -1, max_new_tokens))
            new_history[:, :, t] = ids
            ends = (ids == EOS) | (t == max_new_tokens - 1)
            # results
            final = (new_score / (t + 1) ** length_penalty).masked_fill(~ends, -1e9)[:, :G]
            kept_score, keep = torch.cat([kept_score, final], 1).topk(G, -1)
            kept = torch.cat([kept, new_history[:, :G]], 1).gather(1, keep[..., None].expand_as(kept))
            # beams
            score, go_on = new_score.masked_fill(ends, -1e9).topk(G, -1)
            parent, ids = parent.gather(1, go_on), ids.gather(1, go_on)
            history = new_history.gather(1, go_on[..., None].expand_as(history))
            cache.follow(parent)
            hopeless = score[:, 0] / (t + 1) ** length_penalty <= kept_score[:, -1]
            complete = kept_score[:, -1] > -1e9 if early_stopping else hopeless
            if t == max_new_tokens - 1:
                complete = torch.ones_like(complete)
            new = complete & ~ended                             # a static cache's rows stay when they are complete
            result[rows] = torch.where(new[:, None, None], kept[:, :n_best], result[rows])
            ended = ended | complete
            if cache.is_static:
                if t % 16 == 15 and ended.all():
                    break
            elif complete.any():
                order = compact(~complete)
                if not len(order):
                    break
                cache.select(order)
                ids, score, history, kept, kept_score, rows, ended = (
                    x[order] for x in (ids, score, history, kept, kept_score, rows, ended))
        result = result.flatten(0, 1)
        longest = (result != PAD).any(0).nonzero()
        return result[:, :int(longest.max()) + 1 if len(longest) else 1]

    @classmethod
    def from_pretrained(cls, name, device="cpu"):
        """Load T5 v1.0, v1.1, Flan-T5, LM-adapted T5, mT5, umT5 or ByT5 from a folder in Hugging Face's format, a run
        folder of train.py, or by its name on the Hub.

        returns  the model in evaluation mode, fp32. At most one more tensor is held on the way, or of a .bin in half
                 precision what is still to be converted
        raises   FileNotFoundError; ValueError that names what is not of this kind and every tensor too many, missing or
                 of another shape; tests/test_pretrained.py
        """
        folder = pretrained_folder(name)
        config, one_table = config_from_hf(folder)
        with torch.device("meta"):
            model = cls(config)
        wanted = {hf_name(ours): (ours, tensor.shape) for ours, tensor in model.state_dict().items()}
        aliases = dict.fromkeys(COPIES, "shared.weight")
        if config.tied:
            aliases["lm_head.weight"] = "shared.weight"
        found, first, unknown = {}, {}, []
        for path in weight_files(folder):
            for theirs, tensor in read_weights(path):
                theirs = theirs.removeprefix("module.").removeprefix("_orig_mod.")
                key = aliases.get(theirs, theirs)
                if key not in wanted:
                    unknown += [theirs] if theirs not in UNUSED else []
                elif tensor.shape != wanted[key][1]:
                    raise ValueError(f"{path}: {theirs} has the shape {tuple(tensor.shape)}, config.json asks for"
                                     f" {tuple(wanted[key][1])}")
                elif key not in found:
                    found[key], first[key] = tensor.to(device), theirs
                elif not torch.equal(found[key], tensor.to(device)):
                    raise ValueError(f"{path}: {theirs} differs from {first[key]}, though config.json says that both"
                                     f" are one")
        if one_table and "lm_head.weight" not in found and "shared.weight" in found:
            found["lm_head.weight"] = found["shared.weight"] if config.tied else found["shared.weight"].clone()
        missing = sorted(set(wanted) - set(found))
        if missing or unknown:
            told = [f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
                    for names, what in ((missing, "missing"), (unknown, "unknown")) if names]
            raise ValueError(f"{folder} does not hold the weights of a whole T5: {' and '.join(told)}")
        model.load_state_dict({wanted[key][0]: tensor for key, tensor in found.items()}, assign=True)
        if config.tied:
            model.lm_head.weight = model.shared.weight
        model.tokenizer_files = [path.absolute() for path in (folder / file for file in TOKENIZER) if path.is_file()]
        return model.eval()

    def save_pretrained(self, folder, tokenizer=None, weights=None):
        """Write a folder that transformers and CTranslate2 open: config.json, generation_config.json,
        model.safetensors, and the tokenizer's files.

        tokenizer  a data.Tokenizer; None: the files that came with the weights in from_pretrained, if any
        weights    what state_dict() would give, where the model itself holds a part of it (FSDP)
        """
        from safetensors.torch import save_file
        folder = Path(folder).expanduser()
        if (folder / "ckpt.pt").exists():
            raise ValueError(f"{folder} is the folder of a run, whose config.json would be lost; name another one")
        if tokenizer is not None:
            tokenizer.check_fits(self.config.vocab_size)
        beside = [(file.name, file.read_bytes()) for file in self.tokenizer_files] if tokenizer is None else []
        folder.mkdir(parents=True, exist_ok=True)
        weights = {hf_name(ours): tensor.detach().contiguous()
                   for ours, tensor in (weights or self.state_dict()).items()
                   if not (self.config.tied and ours == "lm_head.weight")}
        dtype = str(self.shared.weight.dtype).removeprefix("torch.")
        for file, content in ((folder / "config.json", config_to_hf(self.config) | {"torch_dtype": dtype}),
                              (folder / "generation_config.json", {
                                  "decoder_start_token_id": PAD, "eos_token_id": EOS, "pad_token_id": PAD})):
            text = json.dumps(content, indent=2) + "\n"
            if not file.is_file() or file.read_text(encoding="utf-8") != text:  # the next best of a run: nobody may
                file.write_text(text, encoding="utf-8")                         # find half a file
        aside = folder / f"model.safetensors.{os.getpid()}.tmp"
        try:
            save_file(weights, aside, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", aside)          # safetensors lets nobody else read it
            os.replace(aside, folder / "model.safetensors")         # a reader finds the old file or the new one
        finally:
            aside.unlink(missing_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        else:
            for file in TOKENIZER if beside else ():                # of another model that was here
                (folder / file).unlink(missing_ok=True)
            for file, content in beside:
                (folder / file).write_bytes(content)

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


@contextlib.contextmanager
def generating(model):
    """Without dropout, and with the weights packed that each step uses; afterwards all is as it was before."""
    training = [(module, module.training) for module in model.modules()]
    once = {linear for block in model.decoder.blocks for linear in (block.cross.k, block.cross.v)}
    linears = {m for part in (model.decoder, model.lm_head) for m in part.modules() if isinstance(m, Linear)} - once
    try:
        model.eval()
        for linear in linears:
            if kernels.ONEDNN and kernels.is_plain_cpu(linear.weight):
                linear.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
        yield
    finally:
        for linear in linears:
            linear.packed = None
        for module, mode in training:
            module.training = mode


def draw(logits, top_k, top_p, uniform):
    """The id at which the summed probabilities of the ids allowed pass `uniform`; (B, G, V), (B, G) -> (B, G)."""
    if top_k or top_p < 1:
        logits, ids = logits.topk(min(top_k, logits.shape[-1]) if top_k else logits.shape[-1], -1)   # likeliest first
    p = logits.softmax(-1)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)       # the likeliest always stays
    total = p.cumsum(-1).masked_fill(p == 0, 0.0)               # rounding must not let in what has no probability
    limit = uniform[..., None] * total.amax(-1, keepdim=True)   # below the sum itself: uniform is at most 1 - 2^-24
    at = (total > limit).to(torch.uint8).argmax(-1, keepdim=True)       # the first one
    return (ids.gather(-1, at) if top_k or top_p < 1 else at).squeeze(-1)


def compact(going_on):
    """Which entry to put where when some are dropped: those that stay and have room stay, the last ones fill the gaps.
    [1, 0, 1, 0, 1] -> [0, 4, 2]"""
    n = int(going_on.sum())
    order = torch.arange(n, device=going_on.device)
    order[~going_on[:n]] = n + going_on[n:].nonzero().flatten()
    return order


def shift_right(target):
    """The decoder's input: PAD first, the last id dropped, IGNORE read as PAD. [5, 6, 1] -> [0, 5, 6]"""
    shifted = F.pad(target[:, :-1], (1, 0), value=PAD)
    return shifted.masked_fill(shifted == IGNORE, PAD)


# --- Hugging Face's format -------------------------------------------------------------------------------------------

# Our name and theirs, tried from the top; {i} is the number of a block. `shared` has up to three names in their files.
HF_NAMES = (
    ("shared.weight", "shared.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("encoder.norm.weight", "encoder.final_layer_norm.weight"),
    ("decoder.norm.weight", "decoder.final_layer_norm.weight"),
    ("encoder.bias.{i}.weight", "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"),
    ("decoder.bias.{i}.weight", "decoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"),
    ("encoder.blocks.{i}.attention_norm.", "encoder.block.{i}.layer.0.layer_norm."),
    ("decoder.blocks.{i}.attention_norm.", "decoder.block.{i}.layer.0.layer_norm."),
    ("encoder.blocks.{i}.attention.", "encoder.block.{i}.layer.0.SelfAttention."),
    ("decoder.blocks.{i}.attention.", "decoder.block.{i}.layer.0.SelfAttention."),
    ("decoder.blocks.{i}.cross_norm.", "decoder.block.{i}.layer.1.layer_norm."),
    ("decoder.blocks.{i}.cross.", "decoder.block.{i}.layer.1.EncDecAttention."),
    ("encoder.blocks.{i}.ff_norm.", "encoder.block.{i}.layer.1.layer_norm."),
    ("decoder.blocks.{i}.ff_norm.", "decoder.block.{i}.layer.2.layer_norm."),
    ("encoder.blocks.{i}.ff.", "encoder.block.{i}.layer.1.DenseReluDense."),
    ("decoder.blocks.{i}.ff.", "decoder.block.{i}.layer.2.DenseReluDense."),
)
HF_SIZES = (("vocab_size", "vocab_size"), ("d_model", "d_model"), ("d_kv", "d_kv"), ("d_ff", "d_ff"),
            ("n_head", "num_heads"), ("n_layer", "num_layers"), ("n_decoder_layer", "num_decoder_layers"),
            ("n_bucket", "relative_attention_num_buckets"), ("max_distance", "relative_attention_max_distance"))
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")     # further names of shared.weight
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)    # in T5 v1.0's files; no use
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER = ("spiece.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def hf_name(name):
    """The name that Hugging Face's T5 gives to a weight: decoder.blocks.3.ff.wo.weight ->
    decoder.block.3.layer.2.DenseReluDense.wo.weight"""
    number = re.search(r"\.(\d+)\.", name)
    for ours, theirs in HF_NAMES:
        ours, theirs = (text.replace("{i}", number[1] if number else "{i}") for text in (ours, theirs))
        if name.startswith(ours):
            return theirs + name[len(ours):]
    raise AssertionError(f"{name} has no name in Hugging Face's T5")


def pretrained_folder(name):
    """The folder that holds a model in Hugging Face's format: `name` itself, its hf/ (a run of train.py), or the local
    copy of a repository on the Hub, fetched if it is not there yet."""
    folder = Path(name).expanduser()
    for inside in (folder, folder / "hf"):
        if any((inside / file).is_file() for file in WEIGHTS):
            return inside
    if folder.exists():
        raise FileNotFoundError(f"{name} holds no model in Hugging Face's format: there is none of {', '.join(WEIGHTS)}"
                                f" in it, nor an hf/, which train.py writes at each new best held-out loss")
    hub_name = str(name).rstrip("/")
    is_slip = "/" in hub_name and any(Path(hub_name).parent.glob("*/metrics.jsonl"))     # a run's name mistyped
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_name) or is_slip:
        raise FileNotFoundError(f"model {name} is no folder here, and a name on the Hub reads OWNER/NAME")
    return hub_folder(hub_name)


def hub_folder(name):
    """The local copy of a model on the Hub, fetched where it is not whole: config, weights in one format, tokenizer."""
    from huggingface_hub import HfApi, snapshot_download
    local = None
    with contextlib.suppress(Exception):
        folder = Path(snapshot_download(name, local_files_only=True))
        local = folder if all(path.is_file() for path in weight_files(folder)) else None
    if local and any((local / file).is_file() for file in TOKENIZER):
        return local                                            # no question to the network
    try:
        files = HfApi().list_repo_files(name)
        kind = next((file for file in WEIGHTS if file in files), WEIGHTS[0])
        shards = "model-*.safetensors" if kind.startswith("model") else "pytorch_model-*.bin"
        return Path(snapshot_download(name, allow_patterns=["config.json", *TOKENIZER, kind, shards]))
    except Exception as error:
        if local:
            return local
        first = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"model {name} is no folder here, and the Hub gave none"
                                f" ({type(error).__name__}: {first})") from None


def config_from_hf(folder):
    """(T5Config, whether the file with the weights may leave out the head because it equals the embedding) of a
    folder's config.json; ValueError that names what is not of this kind."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        c = json.loads(path.read_text(encoding="utf-8"))
        kind = c.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not Hugging Face's config.json ({error})") from None
    if kind not in ("t5", "mt5", "umt5"):
        raise ValueError(f"{path}: model_type {kind!r} is not a T5 of this kind; there are t5 (v1.0, v1.1, Flan, ByT5),"
                         f" mt5 and umt5")
    ff = c.get("feed_forward_proj", "relu")
    if ff not in ("relu", "gated-gelu", "gated-gelu_new"):
        raise ValueError(f"{path}: feed_forward_proj {ff!r} is not known here; there are relu and gated-gelu")
    for name, known in (("layer_norm_epsilon", 1e-6), ("pad_token_id", PAD), ("eos_token_id", EOS),
                        ("decoder_start_token_id", PAD)):
        if c.get(name, known) not in (known, None):
            raise ValueError(f"{path}: {name} {c[name]!r} is not known here, only {known}")
    # transformers 5 writes tie_word_embeddings true for all and tells v1.1 by scale_decoder_outputs; mT5 never scales
    one_table = bool(c.get("tie_word_embeddings", kind != "mt5"))
    scaled = bool(c.get("scale_decoder_outputs", one_table)) and kind != "mt5"
    defaults = {"num_decoder_layers": c.get("num_layers"), "relative_attention_num_buckets": 32,
                "relative_attention_max_distance": 128}
    sizes = {ours: defaults.get(theirs) if c.get(theirs) is None else c[theirs] for ours, theirs in HF_SIZES}
    for ours, theirs in HF_SIZES:
        if not isinstance(sizes[ours], int):
            raise ValueError(f"{path}: {theirs} is {sizes[ours]!r}, not a whole number")
    try:
        return T5Config(**sizes, dropout=c.get("dropout_rate", 0.1), tied=scaled, gated=ff != "relu",
                        bias_per_layer=kind == "umt5"), one_table
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def config_to_hf(c):
    """What config.json says of a T5Config. tie_word_embeddings has the meaning of Google's files: true scales the
    decoder's output (transformers 4 and CTranslate2 read it so, and transformers 5 understands it)."""
    kind = "umt5" if c.bias_per_layer else "t5"
    return {"architectures": [f"{kind.upper()}ForConditionalGeneration"], "model_type": kind,
            "is_encoder_decoder": True, **{theirs: getattr(c, ours) for ours, theirs in HF_SIZES},
            "dropout_rate": c.dropout, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": c.tied,
            "feed_forward_proj": "gated-gelu" if c.gated else "relu", "initializer_factor": 1.0,
            "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD, "use_cache": True}


def weight_files(folder):
    """The files that hold a folder's weights, safetensors before .bin."""
    for name in WEIGHTS:
        path = folder / name
        if path.is_file():
            if path.suffix != ".json":
                return [path]
            try:
                return [folder / file for file in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, AttributeError, TypeError):
                raise ValueError(f"{path} is not an index of weight files") from None
    raise FileNotFoundError(f"{folder} holds no weights: there is none of {', '.join(WEIGHTS)}")


def read_weights(path, block=1 << 22):
    """Yield (name, fp32 tensor) of one file of weights. Of a .safetensors at most `block` elements are held besides
    the tensor itself: the library maps the file into memory, and what has been read counts until the map is closed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open
            with safe_open(path, framework="pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
            for name, shape in shapes.items():
                tensor = torch.empty(shape, dtype=torch.float32)
                rows = max(1, block * shape[0] // max(1, math.prod(shape))) if shape else 1
                for lo in range(0, shape[0] if shape else 1, rows):
                    with safe_open(path, framework="pt") as file:
                        if shape:
                            tensor[lo:lo + rows] = file.get_slice(name)[lo:lo + rows]
                        else:
                            tensor.copy_(file.get_tensor(name))
                yield name, tensor
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
            for name in list(content):
                yield name, content.pop(name).float()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read as weights ({type(error).__name__}: {first})") from None
