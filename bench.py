"""Time every part against its peers and against what the machine can do; print a table, or with --json=True one object.

    python bench.py config/t5_small.py --what=step              # --peer=hf: transformers' T5 as well; --compile=True
    python bench.py config/t5_small.py --what=optim             # or data, prepare, start, variants
    python bench.py config/t5_small.py --what=generate --peer=hf,ct2
    python bench.py --what=gpu                                  # T5 base as nanoT5 trained it, in ten minutes
    python bench.py config/t5_small.py --what=all --json=True > result.json

Contestants take turns in one process, and so do the limits: large matrix products, and the copying of memory. Machines
are noisy: read the ratios and shares of one run, not the seconds. A product that counts for a share of the peak is
whatever `T5.flops` counts; an AdamW step must move 28 bytes a parameter.
"""
import contextlib
import dataclasses
import inspect
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

import data
import distributed
import files
import kernels
import runtime
from configurator import configure
from data import Batches, DataConfig
from model import EOS, T5, T5Config, hf_name
from optim import OptimConfig, make_optimizer

HERE = Path(__file__).resolve().parent
PARTS = ("step", "optim", "data", "prepare", "generate", "start", "variants", "gpu")
PEERS = {"step": ["hf"], "generate": ["hf", "ct2"], "all": ["hf", "ct2"]}
PACKAGES = {"hf": "transformers", "ct2": "ctranslate2"}
NANOT5 = {"nanot5_a100_seconds": 0.56, "nanot5_a100_mfu": 0.31}     # Nawrot 2023: a step of T5 base, batch 128, bf16


@dataclass
class BenchConfig:
    """What is measured."""
    what: str = "step"              # step, optim, data, prepare, generate, start, variants or gpu; all: but these two
    repeats: int = 9                # timed turns of each contestant, after one that is not timed
    prepare_repeats: int = 3        # the same for prepare and start, whose turns are processes
    batch_size: int = 128           # data, gpu: rows of an optimizer step
    micro_batch_size: int | None = None     # rows at a time; None: at most 4 on a CPU, 32 on a GPU, with gpu: all
    compile: bool = False           # step, variants: also the compiled model
    peer: str | None = None         # step: hf (transformers' T5); generate: hf, ct2 (CTranslate2), or hf,ct2
    file_gb: float = 10.0           # data: size of the large token file, which takes no room on the disk
    text: str | None = None         # prepare: a source of prepare.py; None: pydocs, repeated up to text_mb
    text_mb: int = 50               # prepare: size of that text
    vocab: str | None = None        # prepare: SentencePiece file, folder or Hub name; None: as prepare.py chooses
    batch_sizes: str = "1,8,32"     # generate: rows at a time
    num_beams: int = 4              # generate: beams, beside greedy search; 1: greedy alone
    new_tokens: int = 64            # generate: ids written for each row
    tiny_data: str = "data/pydocs"  # start: what config/tiny.py reads; the default is prepared where it is missing
    minutes: float = 8.0            # gpu: no other variant begins after so long
    peak_size: int = 0              # side of the matrices of the peak; 0: 4,096, on a GPU 8,192
    json: bool = False              # one JSON object on stdout, the table on stderr
    device: str = "auto"            # auto, cpu, cuda
    dtype: str = "auto"             # auto, float32, bfloat16

    def __post_init__(self):
        if self.what not in (*PARTS, "all"):
            raise ValueError(f"what={self.what!r} is unknown; there are {', '.join(PARTS)} and all")
        known = PEERS.get(self.what, [])
        for peer in self.peers:
            if peer not in known:
                raise ValueError(f"peer={peer!r} is unknown; what={self.what} has {', '.join(known) or 'none'}")
        for name in ("repeats", "prepare_repeats", "batch_size", "num_beams", "new_tokens", "text_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.batch_size:
            raise ValueError(f"micro_batch_size={self.micro_batch_size} must lie in [1, {self.batch_size}]")
        if self.peak_size < 0 or self.file_gb < 0.001:
            raise ValueError(f"peak_size={self.peak_size}, file_gb={self.file_gb}: the first must not be negative,"
                             f" the second at least 0.001")
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.batch_sizes):
            raise ValueError(f"batch_sizes={self.batch_sizes!r} must be numbers with commas between, as in 1,8,32")

    @property
    def peers(self):
        return self.peer.split(",") if self.peer else []


@dataclass
class Setup:
    """What every part is given: settings, lengths of a row, device and precision."""
    cfg: BenchConfig
    optim: OptimConfig
    t5: T5Config
    data: DataConfig
    plan: data.SpanPlan
    device: torch.device
    dtype: torch.dtype

    @property
    def rows(self):                     # of a micro-batch
        return self.cfg.micro_batch_size or min(self.cfg.batch_size, 4 if self.device.type == "cpu" else 32)

    def model(self):
        torch.manual_seed(0)
        return T5(self.t5).to(self.device)

    def batch(self, rows):
        return [torch.randint(3, self.t5.vocab_size, (rows, n), device=self.device)
                for n in (self.plan.source, self.plan.target)]

    def optimizer(self, model, name=None):      # a small rate: the weights must not run away while the clock runs
        return make_optimizer(model, dataclasses.replace(self.optim, optimizer=name or self.optim.optimizer,
                                                         learning_rate=1e-5))


# --- the clock, and what the machine can do --------------------------------------------------------------------------

def alternate(contestants, repeats, device, warm_up=1):
    """Median seconds of each function of a dict, called in turn so that all meet the same weather, after warm_up
    rounds that do not count. Where a function is a generator, what it yields names the lap that ends there:
    {"ours": ..., "ours: forward": ..., ...}"""
    times = defaultdict(list)
    for _ in range(warm_up + repeats):
        for name, call in contestants.items():
            runtime.synchronize(device)
            start = t0 = time.perf_counter()
            result = call()
            for lap in result if inspect.isgenerator(result) else ():
                runtime.synchronize(device)
                t1 = time.perf_counter()
                times[f"{name}: {lap}"].append(t1 - t0)
                t0 = t1
            runtime.synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[warm_up:]) for name, t in times.items()}


class Limits:
    """What the machine reaches, timed among the contestants: matrix products and memory, by each way there is.

    torch.mm is what a training step calls. oneDNN's product, which torch's compiler calls on x86, is twice as fast on
    an AMD processor; so a share of torch.mm's peak says how well the step uses what it calls, a share of the best peak
    what the machine has to give. A known GPU's data sheet counts as a peak too (bfloat16). Memory is read and written
    by a copy and in place: a CPU reads what a copy overwrites too, which an optimizer, working in place, is spared."""

    def __init__(self, setup):
        device, dtype = setup.device, setup.dtype
        n = setup.cfg.peak_size or (8192 if device.type == "cuda" else 4096)
        a, b, out = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
        source, copy = torch.ones(2, 1 << 26, device=device)    # 256 MB each, far more than any cache holds
        self.calls = {"torch.mm": lambda: torch.mm(a, b, out=out)}
        if device.type == "cpu" and kernels.ONEDNN:
            self.calls["oneDNN"] = lambda: onednn_product(a, b)
        self.products, self.memory = {}, {}
        self.work = dict.fromkeys(self.calls, 2 * n ** 3) | dict.fromkeys(("copy", "in place"), 2 * copy.nbytes)
        self.calls |= {"copy": lambda: copy.copy_(source), "in place": lambda: copy.neg_()}
        if device.type == "cuda" and dtype == torch.bfloat16:
            self.products["data sheet"] = runtime.peak_flops(device, dtype)

    def take(self, seconds):
        """Take the limits' own times out of alternate's, and yield their rows."""
        for name, work in self.work.items():
            t, memory = seconds.pop(name), name in ("copy", "in place")
            (self.memory if memory else self.products)[name] = work / t
            yield f"limit: {name}", {"seconds": t, "gb_per_s" if memory else "gflop_per_s": work / t / 1e9}

    def of_products(self, flops, seconds, mfu=False):
        """Figures of so many floating point operations in so many seconds; what a whole model makes of the best peak
        is called MFU as well."""
        rate = flops / seconds
        best = rate / max(self.products.values())
        return {"gflop_per_s": rate / 1e9, "share_of_torch_mm_peak": rate / self.products["torch.mm"],
                "share_of_best_peak": best, **({"mfu": best} if mfu else {})}

    def of_memory(self, n_params, seconds):
        """Figures of an optimizer step: AdamW reads weight, gradient and two moments and writes all but the gradient,
        seven times four bytes a parameter."""
        rate = 7 * 4 * n_params / seconds
        return {"gb_per_s": rate / 1e9, "share_of_copy": rate / self.memory["copy"],
                "share_of_memory_limit": rate / max(self.memory.values())}


def onednn_product(a, b):
    with torch.no_grad():
        return kernels.onednn(a, b)


def encoder_flops(c, rows, length):
    """Of the encoder's forward pass: 2 for each weight and token, 4 * H * K for each query-key pair."""
    weights = 4 * c.d_model * c.n_head * c.d_kv + (3 if c.gated else 2) * c.d_model * c.d_ff
    return rows * c.n_layer * length * (2 * weights + 4 * c.n_head * c.d_kv * length)


def process_memory(entry):
    """Bytes of this process by Linux' own account: VmHWM, the highest use; RssAnon, what are no pages of files.
    getrusage's highest use will not do: a child process begins with its parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return runtime.memory_used(torch.device("cpu")) if entry == "VmHWM" else None
    return int(re.search(rf"^{entry}:\s+(\d+) kB", status.read_text(), re.M)[1]) * 1024


# --- peers -----------------------------------------------------------------------------------------------------------

def package(peer):
    try:
        return import_module(PACKAGES[peer])
    except ImportError:
        raise ValueError(f"peer={peer} needs a package: pip install {PACKAGES[peer]}") from None


def attempt(setup, name, add):
    """add() a peer. In what=all one that fails is a row of the result and not the end."""
    try:
        add()
    except Exception as error:
        if setup.cfg.what != "all":
            raise
        yield f"peer {name}", {"error": f"{type(error).__name__}: {files.first_line(error)}"}


def hugging_face(model):
    """transformers' T5 with the same weights, eager attention, in training mode."""
    transformers = package("hf")
    c = model.config
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=c.vocab_size, d_model=c.d_model, d_kv=c.d_kv, d_ff=c.d_ff, num_heads=c.n_head,
        num_layers=c.n_layer, num_decoder_layers=c.n_decoder_layer, dropout_rate=0.0, decoder_start_token_id=0,
        pad_token_id=0, feed_forward_proj="gated-gelu" if c.gated else "relu", tie_word_embeddings=c.tied,
        attn_implementation="eager"))
    if not c.tied:      # transformers 5 ties a fresh v1.1 as well
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    answer = theirs.load_state_dict({hf_name(k): w for k, w in model.state_dict().items()}, strict=False)
    aliases = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert not answer.unexpected_keys and set(answer.missing_keys) <= aliases
    return theirs.train()


class CTranslate2:
    """The same weights in CTranslate2, in float32 and with as many threads. It runs in a process of its own: in ours
    its threads make every small operation of torch slower (10.6 -> 16.5 ms a step; LOG.md, 2026-12-02)."""

    def __init__(self, model, folder):
        converters = package("ct2").converters
        model.save_pretrained(folder / "hf")
        data.Tokenizer().save_pretrained(folder / "hf")         # it wants a vocabulary; bytes and made-up names will do
        converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
        vocabulary = folder / "ct2" / "shared_vocabulary.json"
        names = json.loads(vocabulary.read_text(encoding="utf-8"))
        names[3:] = [f"<{i}>" for i in range(3, len(names))]
        vocabulary.write_text(json.dumps(names), encoding="utf-8")
        self.names, self.ids = names, {name: i for i, name in enumerate(names)}
        self.process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), ctranslate2_load,
                                           (str(folder / "ct2"), torch.get_num_threads()))

    def generate(self, source, num_beams, new_tokens):
        rows = [[self.names[i] for i in row] for row in source]
        answers = self.process.submit(ctranslate2_translate, rows, num_beams, new_tokens).result()
        return [[self.ids[name] for name in row] for row in answers]


def ctranslate2_load(folder, threads):
    global translator
    import ctranslate2
    translator = ctranslate2.Translator(folder, device="cpu", compute_type="float32", intra_threads=threads)


def ctranslate2_translate(rows, num_beams, new_tokens):
    answers = translator.translate_batch(rows, beam_size=num_beams, max_decoding_length=new_tokens, max_input_length=0)
    return [answer.hypotheses[0] for answer in answers]


# --- the parts: each yields (name, figures), with units in the figures' names ----------------------------------------

def training_step(setup, module, loss_of, optimizer=None, n_micro=1):
    """One training step as train.py makes it, a generator function whose laps are its parts."""
    def run():
        for _ in range(n_micro):
            with runtime.autocast(setup.device, setup.dtype):
                loss = loss_of() / n_micro
            yield "forward"
            loss.backward()
            yield "backward"
        if optimizer:
            torch.nn.utils.clip_grad_norm_(module.parameters(), setup.optim.grad_clip or math.inf)
            optimizer.step()
        module.zero_grad(set_to_none=True)
        yield "optimizer"
    return run


def hf_step(setup, model, source, target, with_optimizer=True):
    theirs = hugging_face(model).to(setup.device)
    optimizer = setup.optimizer(theirs) if with_optimizer else None
    return training_step(setup, theirs, lambda: theirs(input_ids=source, labels=target).loss, optimizer)


def bench_step(setup):
    """A training step of one micro-batch: forward, backward and optimizer apart, memory, transformers' beside it."""
    model, rows, plan = setup.model(), setup.rows, setup.plan
    source, target = setup.batch(rows)
    limits, n_params = Limits(setup), model.n_params()
    flops, n_token = model.flops(rows, plan.source, plan.target), rows * (plan.source + plan.target)
    yield "batch", {"rows": rows, "source_tokens": plan.source, "target_tokens": plan.target, "parameters": n_params,
                    "gflop": flops / 1e9}
    optimizer = setup.optimizer(model)
    contestants = {"ours": training_step(setup, model, lambda: model(source, target), optimizer)}
    if setup.cfg.compile:
        compiled = torch.compile(model)
        contestants["compiled"] = training_step(setup, model, lambda: compiled(source, target), optimizer)
        t0 = time.perf_counter()
        list(contestants["compiled"]())
        yield "compiled: start-up", {"seconds": time.perf_counter() - t0}
    if "hf" in setup.cfg.peers:
        def add():
            run = hf_step(setup, model, source, target)
            list(run())                                         # what does not work fails here, not among the others
            contestants["hf"] = run
        yield from attempt(setup, "hf", add)
    seconds = alternate({**limits.calls, **contestants}, setup.cfg.repeats, setup.device)
    yield from limits.take(seconds)
    for name in contestants:
        lap = {part: seconds[f"{name}: {part}"] for part in ("forward", "backward", "optimizer")}
        lap["forward and backward"] = lap["forward"] + lap["backward"]
        for part, share in (("forward", 1 / 3), ("backward", 2 / 3), ("forward and backward", 1)):
            yield f"{name}: {part}", {
                "seconds": lap[part], "share_of_step": lap[part] / seconds[name],
                "times_ours": lap[part] / sum(seconds[f"ours: {p}"] for p in part.split(" and ")),
                **limits.of_products(share * flops, lap[part])}
        yield f"{name}: optimizer, clipping", {
            "seconds": lap["optimizer"], "share_of_step": lap["optimizer"] / seconds[name],
            "times_ours": lap["optimizer"] / seconds["ours: optimizer"], **limits.of_memory(n_params, lap["optimizer"])}
        yield f"{name}: whole step", {
            "seconds": seconds[name], "times_ours": seconds[name] / seconds["ours"],
            "tokens_per_s": n_token / seconds[name], **limits.of_products(flops, seconds[name], mfu=True)}
    for name in [name for name in ("ours", "hf") if name in contestants]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield f"{name}: highest memory", process.submit(training_memory, setup, name).result()


def training_memory(setup, name):
    """The highest memory of this process, which does nothing else, after 8 times forward and backward and after 8
    whole steps. On a CPU python and torch are in it; on CUDA tensors alone are."""
    device = runtime.pick_device(str(setup.device))

    def highest():
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory("VmHWM")

    figures = {"gb_before_the_model": highest() / 1e9}
    model, (source, target) = setup.model(), setup.batch(setup.rows)
    for part, with_optimizer in (("forward_backward", False), ("whole_step", True)):
        if name == "hf":
            run = hf_step(setup, model, source, target, with_optimizer)
        else:
            optimizer = setup.optimizer(model) if with_optimizer else None
            run = training_step(setup, model, lambda: model(source, target), optimizer)
        for _ in range(8):
            list(run())
        figures[f"gb_{part}"] = highest() / 1e9
    return figures


def bench_optim(setup):
    """A whole optimizer step on all parameters, against torch's fused AdamW and the limit of memory."""
    model, limits = setup.model(), Limits(setup)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    names = list(dict.fromkeys([setup.optim.optimizer, "adamwscale", "muon", "adafactor", "adamw"]))
    calls = {name: setup.optimizer(model, name).step for name in names}
    calls["torch fused AdamW"] = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step
    seconds = alternate({**limits.calls, **calls}, setup.cfg.repeats, setup.device)
    yield from limits.take(seconds)
    for name, t in seconds.items():
        yield name, {"seconds": t, "times_torch_adamw": t / seconds["torch fused AdamW"],
                     "parameters_per_s": model.n_params() / t, **limits.of_memory(model.n_params(), t)}


def bench_data(setup):
    """Batches from token files of two sizes, in random order, as multiples of what the training step can take."""
    cfg, plan, model, n = setup.cfg, setup.plan, setup.model(), 10
    source, target = setup.batch(setup.rows)
    turn, large_name = iter(range(10 ** 9)), f"{cfg.file_gb:g} GB"
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "0.1 GB.bin", Path(folder) / f"{large_name}.bin"
        np.random.default_rng(0).integers(3, 32_000, 50_000_000).astype(np.uint16).tofile(small)
        large.touch()
        os.truncate(large, int(cfg.file_gb * 1e9) // 2 * 2)     # zeros that take no room on the disk

        def batches(path):
            parts = [{"name": path.name, "tokens": path.stat().st_size // 2}]
            tokens = data.Tokens(folder, "train", {"dtype": "uint16", "splits": {"train": {"parts": parts}}})
            return Batches(tokens, plan, 0, cfg.batch_size, 32_099)

        def several(batches):       # new windows at each call, or the processor's cache would answer
            def run():
                at = next(turn)
                for i in range(n):
                    batches.rows(at * n + i)
            return run

        t0 = time.perf_counter()
        large = batches(large)
        t1 = time.perf_counter()
        large.rows(0)
        yield f"file of {large_name}: opening", {
            "seconds": t1 - t0, "seconds_to_first_batch": time.perf_counter() - t0}
        small, keys = batches(small), data.key_of(0, np.arange(cfg.batch_size))
        raw = np.stack([small.tokens.read(i * plan.raw, plan.raw) for i in range(cfg.batch_size)])
        seconds = alternate({
            "step": training_step(setup, model, lambda: model(source, target)),
            "batches, file of 0.1 GB": several(small), f"batches, file of {large_name}": several(large),
            "span corruption": lambda: [data.corrupt(raw, data.span_lengths(plan, keys), 32_099) for _ in range(n)],
        }, cfg.repeats, setup.device)
        need = data_need(setup, seconds["step: forward"] + seconds["step: backward"])
        yield f"need of a step of {setup.rows} rows", {"batches_per_s": need, "raw_tokens_per_s": need * raw.size}
        for name, t in seconds.items():
            if not name.startswith("step"):
                yield name, {"seconds": t / n, "batches_per_s": n / t, "raw_tokens_per_s": n * raw.size / t,
                             "times_need": n / t / need}
        before = process_memory("RssAnon")
        for step in range(1000):
            large.rows(step)
        if before:                                              # Linux
            yield "1,000 batches of it", {"private_mb_more": (process_memory("RssAnon") - before) / 1e6}


def data_need(setup, seconds):
    """Batches of batch_size rows a second that a step of `rows` rows in so many seconds can take."""
    return setup.rows / (seconds * setup.cfg.batch_size)


def script(name, *arguments):
    """Run one of the scripts to its end, in a process of its own; ValueError with its last line if it fails."""
    done = subprocess.run([sys.executable, str(HERE / name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name}: {(done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]}")


def bench_prepare(setup):
    """prepare.py from its start to its end with one and two tokenizing threads; sentencepiece alone as the limit."""
    cfg = setup.cfg
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text, vocab = cfg.text, cfg.vocab
        if not text:
            script("prepare.py", f"--out_dir={folder / 'pydocs'}", "--vocab_only=True", *option("vocab", vocab))
            text, vocab = folder / "text.jsonl", folder / "pydocs" / data.VOCABULARY
            lines = (folder / "pydocs" / "pydocs.jsonl").read_bytes()
            repeated = lines * -(-cfg.text_mb * 10 ** 6 // len(lines))
            text.write_bytes(repeated[:repeated.index(b"\n", cfg.text_mb * 10 ** 6 - 1) + 1])
        script("prepare.py", f"--source={text}", f"--out_dir={folder / 'first'}", *option("vocab", vocab))
        vocabulary = folder / "first" / data.VOCABULARY
        meta = data.read_meta(folder / "first")
        tokens = sum(split["tokens"] for split in meta["splits"].values())
        spiece, ids = data.load_vocabulary(vocabulary), data.Tokens(folder / "first", "train", meta)
        ids = ids.read(0, min(len(ids), 1_000_000))
        documents = spiece.decode([row.tolist() for row in np.split(ids, np.flatnonzero(ids == EOS)) if len(row)])
        size = sum(len(d.encode()) for d in documents)

        def prepare(n):
            return lambda: script("prepare.py", f"--source={text}", f"--vocab={vocabulary}", f"--n_proc={n}",
                                  f"--out_dir={folder / str(n)}", "--overwrite=True")

        seconds = alternate({"sentencepiece": lambda: spiece.encode(documents, num_threads=1),
                             "1": prepare(1), "2": prepare(2)}, cfg.prepare_repeats, torch.device("cpu"), warm_up=0)
        alone = size / 1e6 / seconds["sentencepiece"]
        yield "limit: sentencepiece alone, one thread", {"mb": size / 1e6, "mb_per_s": alone,
                                                         "tokens_per_s": len(ids) / seconds["sentencepiece"]}
        for n in (1, 2):
            t, mb = seconds[str(n)], meta["text_bytes"] / 1e6
            yield f"prepare.py, {n} worker process{'es' * (n > 1)}", {
                "seconds": t, "mb": mb, "mb_per_s": mb / t, "tokens_per_s": tokens / t,
                "share_of_limit": mb / t / alone / n, "times_one_process": seconds["1"] / t}


def option(name, value):
    return [f"--{name}={value}"] if value else []


def bench_generate(setup):
    """new_tokens ids for rows of random ids, all as long: encoder, caches, search."""
    cfg, device, model, limits = setup.cfg, setup.device, setup.model().eval(), Limits(setup)
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0                       # a logit of 0: never the best of thousands, so no row ends
    ways, answers = {"ours": lambda source, beams: model.generate(source, None, cfg.new_tokens, beams).tolist()}, {}

    if device.type == "cuda":
        ways["ours, CUDA graphs"] = lambda source, beams: model.generate(source, None, cfg.new_tokens, beams,
                                                                         compile_step=True).tolist()

    def encode(source):
        with torch.no_grad(), runtime.autocast(device, setup.dtype):
            model.encode(source)

    def call(name, source, beams):
        with runtime.autocast(device, setup.dtype):
            answers[name] = ways[name](source, beams)

    def add_hf():
        theirs = hugging_face(model).to(device).eval()
        theirs.set_attn_implementation("sdpa")              # transformers' own default
        ways["hf"] = lambda source, beams: theirs.generate(
            input_ids=source, attention_mask=torch.ones_like(source), max_new_tokens=cfg.new_tokens, num_beams=beams,
            do_sample=False)[:, 1:].tolist()

    def add_ct2():
        theirs = CTranslate2(model, folder)
        at_end.callback(theirs.process.shutdown)
        theirs.generate(setup.batch(1)[0].tolist(), 1, 1)
        ways["ct2"] = lambda source, beams: theirs.generate(source.tolist(), beams, cfg.new_tokens)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        folder = Path(folder)
        for name, add in (("hf", add_hf), ("ct2", add_ct2)):
            if name in cfg.peers:
                yield from attempt(setup, name, add)
        for number, rows in enumerate(int(n) for n in cfg.batch_sizes.split(",")):
            source = setup.batch(rows)[0]
            for beams in dict.fromkeys([1, cfg.num_beams]):
                calls = {name: lambda name=name: call(name, source, beams) for name in ways}
                if beams == 1:
                    calls |= {**limits.calls, "encoder": lambda: encode(source)}
                seconds = alternate(calls, cfg.repeats, device)
                if beams == 1:
                    own_rows, t = list(limits.take(seconds)), seconds.pop("encoder")
                    yield from own_rows if number == 0 else ()
                    yield f"{rows} x {source.shape[1]} tokens, encoder", {
                        "seconds": t, **limits.of_products(encoder_flops(setup.t5, rows, source.shape[1]), t)}
                for name, t in seconds.items():
                    same = sum(a == b for a, b in zip(answers["ours"], answers[name], strict=True))
                    yield f"{rows} x {cfg.new_tokens} ids, {'greedy' if beams == 1 else f'{beams} beams'}: {name}", {
                        "seconds": t, "tokens_per_s": rows * cfg.new_tokens / t, "times_ours": t / seconds["ours"],
                        "share_of_rows_as_ours": same / rows}


def bench_start(setup):
    """From the start of `python train.py config/tiny.py` to its first optimizer step, with its data ready."""
    ready = [str(HERE / "train.py"), str(HERE / "config" / "tiny.py"), f"--data_dir={setup.cfg.tiny_data}"]

    def first_step():
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
                [sys.executable, "-u", *ready, f"--out_dir={folder}/run", "--max_steps=1", "--log_every=1",
                 "--eval_batches=1", "--device=cpu"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            line = ""
            for line in process.stdout:
                if "FLOPs a step" in line:
                    yield "before"
                elif line.startswith("step 0/") and "held-out loss" in line:
                    yield "evaluation"
                elif line.startswith("step 1/"):
                    yield "step"
                    process.kill()                              # what it does after that step is not asked for
                    return
            raise ValueError(f"train.py did not reach its first step: {line.strip()}")

    list(first_step())                                          # not timed: it may have to prepare the data
    seconds = alternate({"import": lambda: subprocess.run([sys.executable, "-c", "import train"], cwd=HERE, check=True),
                         "run": first_step}, setup.cfg.prepare_repeats, torch.device("cpu"), warm_up=0)
    before, evaluation, step = (seconds[f"run: {lap}"] for lap in ("before", "evaluation", "step"))
    for name, t in {"python -c 'import train'": seconds["import"], "imports, data, model, 1.5 s for the peak": before,
                    "evaluation of 128 rows before any step": evaluation, "first step and its log line": step,
                    "start to first step without evaluation": before + step,
                    "start to first step": before + evaluation + step}.items():
        yield name, {"seconds": t}


# --- variants of the training step, mostly for GPUs ------------------------------------------------------------------

def variants(device, compiled=True):
    """(name, dtype, compile, attention) of each way to compute on a device, the likely best first. On CUDA float32
    means TF32. Of the ways to attend flex learns the position bias on CUDA alone, and by_head is for the CPU."""
    cuda = device.type == "cuda"
    for compile in (True, False) if compiled else (False,):
        for dtype in (torch.bfloat16, torch.float32):
            for attention in ("sdpa", "flex" if cuda else "by_head", "eager"):
                short = "bf16" if dtype == torch.bfloat16 else "TF32" if cuda else "float32"
                yield f"{short}, {attention}{', compiled' * compile}", dtype, compile, attention


def bench_variants(setup, t0=None):
    """Forward and backward of a micro-batch in each variant."""
    model, t0 = setup.model(), t0 or time.perf_counter()
    for name, dtype, compile, attention in variants(setup.device, setup.device.type == "cuda" or setup.cfg.compile):
        if time.perf_counter() - t0 > 60 * setup.cfg.minutes:
            yield name, {"error": f"left out, since {setup.cfg.minutes:g} minutes are over"}
            continue
        yield name, variant(dataclasses.replace(setup, dtype=dtype), model, compile, attention)


def variant(setup, model, compile, attention, batch_size=None):
    """Figures of forward and backward of a micro-batch, or of a whole optimizer step on batch_size rows; with half of
    the rows at a time, and half of these, until the GPU's memory suffices. What does not work here is told instead."""
    model.set_attention(attention)
    torch._dynamo.reset()
    module, rows = torch.compile(model) if compile else model, setup.rows
    while True:
        try:
            return {"rows": rows, "rows_asked": setup.rows, **measure(setup, model, module, rows, batch_size)}
        except Exception as error:
            if rows == 1 or not isinstance(error, torch.cuda.OutOfMemoryError):
                return {"error": f"{type(error).__name__}: {files.first_line(error)}"}
        rows //= 2                      # here, where no error holds the tensors that filled the memory any longer
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def measure(setup, model, module, rows, batch_size):
    (source, target), n_micro = setup.batch(rows), -(-batch_size // rows) if batch_size else 1
    step = training_step(setup, model, lambda: module(source, target), setup.optimizer(model) if batch_size else None,
                         n_micro)

    def run():
        list(step())                    # without a wait between the laps, as a GPU trains
        runtime.synchronize(setup.device)

    t0, memory = time.perf_counter(), {}
    run()
    start_up = time.perf_counter() - t0
    if setup.device.type == "cuda":     # before the limits' matrices are there; on a CPU a process cannot tell
        torch.cuda.reset_peak_memory_stats(setup.device)
        run()
        memory = {"memory_gb": torch.cuda.max_memory_allocated(setup.device) / 1e9}
    limits = Limits(setup)
    seconds = alternate({**limits.calls, "run": run}, setup.cfg.repeats, setup.device)
    list(limits.take(seconds))
    flops = model.flops(rows * n_micro, setup.plan.source, setup.plan.target)
    return {"seconds": seconds["run"], "first_call_seconds": start_up, **memory,
            **limits.of_products(flops, seconds["run"], mfu=True)}


def bench_gpu(setup, compile=True):
    """A whole step of batch_size rows in bfloat16, compiled, beside nanoT5's published one; then every variant."""
    t0 = time.perf_counter()
    whole = dataclasses.replace(setup, dtype=torch.bfloat16, cfg=dataclasses.replace(
        setup.cfg, micro_batch_size=setup.cfg.micro_batch_size or setup.cfg.batch_size))
    figures = variant(whole, whole.model(), compile, "sdpa", setup.cfg.batch_size)
    if "seconds" in figures:
        figures |= {**NANOT5, "times_nanot5_seconds": figures["seconds"] / NANOT5["nanot5_a100_seconds"]}
        whole.cfg.micro_batch_size = figures["rows"]
    yield f"whole step of {setup.cfg.batch_size} rows, bf16, sdpa", figures
    yield from bench_variants(whole, t0)


# --- the whole -------------------------------------------------------------------------------------------------------

def shown(name, value):
    if isinstance(value, float):
        share = "share" in name or "mfu" in name
        return f"{value:.1%}" if share else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def tell(rows, found):
    """Print (name, figures) rows as they come, under a head whenever their columns change, and keep them in `found`."""
    columns = None
    for name, figures in rows:
        found[name] = figures
        if list(figures) != columns:
            columns = list(figures)
            print(" " * 40 + "  ".join(f"{c:>10}" for c in columns))
        print(f"{name:<40}" + "  ".join(f"{shown(c, figures[c]):>{max(10, len(c))}}" for c in columns), flush=True)


def machine(setup, argv):
    settings = {**asdict(setup.cfg), **asdict(setup.data), **asdict(setup.optim), **asdict(setup.t5)}
    cpu = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", cpu.read_text() if cpu.exists() else "", re.M)
    found = runtime.describe_run(settings, argv, distributed.Ranks())
    return {**found, "processor": name[1] if name else found["processor"], "device": str(setup.device),
            "dtype": str(setup.dtype)[6:]}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    cfg, data_cfg, optim_cfg, t5_cfg = configure(BenchConfig, DataConfig, OptimConfig, T5Config, argv=argv)
    device = runtime.pick_device(cfg.device)
    if cfg.what == "gpu":
        if device.type != "cuda":
            raise ValueError(f"what=gpu needs a GPU with CUDA, but the device is {device}; see what=variants")
        t5_cfg, data_cfg = T5Config(d_model=768, d_ff=2048, n_head=12, n_layer=12), DataConfig()
    t5_cfg.vocab_size = t5_cfg.vocab_size or 32_128
    plan = data.span_plan(data_cfg.input_length, data_cfg.noise_density, data_cfg.mean_span)
    setup = Setup(cfg, optim_cfg, t5_cfg, data_cfg, plan, device, runtime.pick_dtype(cfg.dtype, device))
    for peer in cfg.peers if cfg.what != "all" else []:
        package(peer)
    result, failed = {"machine": machine(setup, argv)}, False
    all_parts = PARTS[:-1] if device.type == "cuda" else PARTS[:-2]
    with contextlib.redirect_stdout(sys.stderr) if cfg.json else contextlib.nullcontext():
        print("{processor}, {threads} threads, {device}, {dtype}, torch {torch}, commit {commit}".format(
            **result["machine"]))
        for what in all_parts if cfg.what == "all" else [cfg.what]:
            print(f"\n{what}: {inspect.getdoc(BENCH[what]).partition(chr(10))[0]}", flush=True)
            result[what] = {}
            try:
                tell(BENCH[what](setup), result[what])
            except Exception as error:
                if cfg.what != "all":
                    raise
                result[what]["failed"] = {"error": f"{type(error).__name__}: {files.first_line(error)}"}
                print(f"failed: {result[what]['failed']['error']}", flush=True)
            failed = failed or any("error" in figures for figures in result[what].values())
    if cfg.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    return int(failed)


BENCH = {"step": bench_step, "optim": bench_optim, "data": bench_data, "prepare": bench_prepare,
         "generate": bench_generate, "start": bench_start, "variants": bench_variants, "gpu": bench_gpu}

if __name__ == "__main__":
    files.run(main)
