"""Time the parts against their peers, in alternation in one process, and print medians and ratios.

    python bench.py config/t5_small.py --what=step --batch_size=4           # --peer=hf: transformers' T5 as well
    python bench.py config/t5_small.py --what=optim
    python bench.py config/t5_small.py --what=data --batch_size=128
    python bench.py config/t5_small.py --what=generate --batch_size=8 --num_beams=4     # --peer=hf,ct2

Machines are noisy: read the ratios of one run, not the seconds.
"""
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import data
import files
import runtime
from configurator import configure
from data import Batches, DataConfig
from model import EOS, T5, T5Config, hf_name
from optim import OptimConfig, make_optimizer


@dataclass
class BenchConfig:
    """What is measured."""
    what: str = "step"              # step, optim, data or generate
    batch_size: int = 4             # rows of a step or of a batch
    repeats: int = 9                # timed calls of each contestant, after one that is not timed
    compile: bool = False           # step: also measure the compiled model
    peer: str | None = None         # step, generate: hf: transformers' T5 beside ours; generate: ct2: CTranslate2's
    num_beams: int = 1              # generate: 1: greedy
    new_tokens: int = 64            # generate: ids written for each row
    device: str = "auto"            # auto, cpu, cuda
    dtype: str = "auto"             # auto, float32, bfloat16


def alternate(contestants, repeats, device):
    """Median seconds of each function of a dict, called in turn so that all meet the same weather."""
    times = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, call in contestants.items():
            runtime.synchronize(device)
            t0 = time.perf_counter()
            call()
            runtime.synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - t0)
    return {name: statistics.median(t) for name, t in times.items()}


def hugging_face(model):
    """transformers' T5 with the same weights, eager attention, in training mode."""
    import transformers
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


def bench_step(cfg, model, plan, device, dtype):
    """Forward and backward of one micro-batch as a share of the matrix product peak timed beside it."""
    high = model.config.vocab_size
    source, target = (torch.randint(3, high, (cfg.batch_size, n), device=device) for n in (plan.source, plan.target))
    autocast = runtime.autocast(device, dtype)
    n = 4096
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))

    def step(module, call):
        def run():
            module.zero_grad(set_to_none=True)
            with autocast:
                loss = call(source, target)
            loss.backward()
        return run

    contestants = {"peak": lambda: a @ b, "ours": step(model, model)}
    if cfg.compile:
        contestants["compiled"] = step(model, torch.compile(model))
    if cfg.peer == "hf":
        theirs = hugging_face(model).to(device)
        contestants["hf"] = step(theirs, lambda s, t: theirs(input_ids=s, labels=t).loss)
    seconds = alternate(contestants, cfg.repeats, device)
    peak = 2 * n ** 3 / seconds.pop("peak")
    flops = model.flops(cfg.batch_size, plan.source, plan.target)
    print(f"forward and backward, {cfg.batch_size} rows of {plan.source}/{plan.target}, {flops / 1e9:,.0f} GFLOP;"
          f" peak (4,096 square) {peak / 1e9:,.0f} GFLOP/s")
    for name, t in seconds.items():
        print(f"  {name:<10} {t:.3f} s  {flops / t / peak:.1%} of peak  {t / seconds['ours']:.2f} x ours")
    print(f"  highest memory of the process {runtime.memory_used(device) / 1e9:.2f} GB")


def bench_optim(cfg, model, optim_cfg, device):
    """A whole optimizer step on all parameters, against torch's fused AdamW."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    ours = make_optimizer(model, optim_cfg)
    peer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = alternate({optim_cfg.optimizer: ours.step, "torch AdamW": peer.step}, cfg.repeats, device)
    print(f"optimizer step, {model.n_params():,} parameters")
    for name, t in seconds.items():
        print(f"  {name:<12} {t * 1e3:.1f} ms  {t / seconds['torch AdamW']:.2f} x torch's fused AdamW")


def bench_data(cfg, plan):
    """Batches a second on one core from a file of 50 million tokens, and the memory that 1,000 batches cost."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        n = 50_000_000
        np.random.default_rng(0).integers(3, 32_000, n).astype(np.uint16).tofile(Path(folder) / "train-00000.bin")
        meta = {"dtype": "uint16", "splits": {"train": {"parts": [{"name": "train-00000.bin", "tokens": n}]}}}
        batches = Batches(data.Tokens(folder, "train", meta), plan, 0, cfg.batch_size, 32_099)
        raw = np.stack([batches.tokens.read(i * plan.raw, plan.raw) for i in range(cfg.batch_size)])
        keys = data.key_of(0, np.arange(cfg.batch_size))
        device = torch.device("cpu")
        seconds = alternate({
            "whole batch": lambda: batches.rows(0),
            "span corruption": lambda: data.corrupt(raw, data.span_lengths(plan, keys), 32_099)},
            max(50, cfg.repeats), device)
        for name, t in seconds.items():
            print(f"  {name:<16} {t * 1e3:.2f} ms  {cfg.batch_size * plan.raw / t / 1e6:.1f} million raw tokens/s")
        before = private_memory()
        for step in range(1000):
            batches.rows(step)
        print(f"  memory over 1,000 batches: {(private_memory() - before) / 1e6:+.1f} MB")


def bench_generate(cfg, model, source_length, device, dtype):
    """new_tokens ids for each of some rows of random ids, all as long: encoder, caches, search."""
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0                       # a logit of 0: never the best of thousands, so no row ends
    model.eval()
    source = torch.randint(3, model.config.vocab_size, (cfg.batch_size, source_length), device=device)
    answers, contestants = {}, {}

    def contestant(name, call):
        def run():
            answers[name] = call()
        contestants[name] = run

    contestant("ours", lambda: model.generate(source, None, cfg.new_tokens, cfg.num_beams).tolist())
    peers = (cfg.peer or "").split(",")
    if "hf" in peers:
        theirs = hugging_face(model).to(device).eval()
        theirs.set_attn_implementation("sdpa")              # transformers' own default
        mask = torch.ones_like(source)
        contestant("hf", lambda: theirs.generate(
            input_ids=source, attention_mask=mask, max_new_tokens=cfg.new_tokens, num_beams=cfg.num_beams,
            do_sample=False)[:, 1:].tolist())
    with tempfile.TemporaryDirectory() as folder:
        if "ct2" in peers:
            contestant("ct2", ctranslate2_call(cfg, model, source.tolist(), Path(folder)))
        with runtime.autocast(device, dtype):
            seconds = alternate(contestants, cfg.repeats, device)
    print(f"{cfg.batch_size} rows of {source_length} tokens to {cfg.new_tokens} new ones,"
          f" {'greedy' if cfg.num_beams == 1 else f'{cfg.num_beams} beams'}")
    for name, t in seconds.items():
        same = sum(a == b for a, b in zip(answers["ours"], answers[name], strict=True))
        print(f"  {name:<6} {t:.2f} s  {cfg.batch_size * cfg.new_tokens / t:,.0f} tokens/s  {t / seconds['ours']:.2f} x"
              f" ours  {same} of {cfg.batch_size} rows as ours")


def ctranslate2_call(cfg, model, source, folder):
    """A call of CTranslate2's translate_batch with the same weights, in float32 and with as many threads. It runs in a
    process of its own: in ours its threads make every small operation of torch slower (10.6 -> 16.5 ms a step; LOG.md,
    2026-12-02)."""
    import ctranslate2
    model.save_pretrained(folder / "hf")
    data.Tokenizer().save_pretrained(folder / "hf")             # it wants a vocabulary; bytes and made-up names will do
    ctranslate2.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    vocabulary = folder / "ct2" / "shared_vocabulary.json"
    names = json.loads(vocabulary.read_text(encoding="utf-8"))
    names[3:] = [f"<{i}>" for i in range(3, len(names))]
    vocabulary.write_text(json.dumps(names), encoding="utf-8")
    ids = {name: i for i, name in enumerate(names)}
    rows = [[names[i] for i in row] for row in source]
    process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), ctranslate2_load,
                                  (str(folder / "ct2"), torch.get_num_threads()))

    def call():
        answers = process.submit(ctranslate2_translate, rows, cfg.num_beams, cfg.new_tokens).result()
        return [[ids[name] for name in row] for row in answers]
    return call


def ctranslate2_load(folder, threads):
    global translator
    import ctranslate2
    translator = ctranslate2.Translator(folder, device="cpu", compute_type="float32", intra_threads=threads)


def ctranslate2_translate(rows, num_beams, new_tokens):
    answers = translator.translate_batch(rows, beam_size=num_beams, max_decoding_length=new_tokens, max_input_length=0)
    return [answer.hypotheses[0] for answer in answers]


def private_memory():
    """Bytes of this process that are not file pages (Linux)."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssAnon"].split()[0]) * 1024


def main(argv=None):
    cfg, data_cfg, optim_cfg, t5_cfg = configure(BenchConfig, DataConfig, OptimConfig, T5Config, argv=argv)
    if cfg.what not in ("step", "optim", "data", "generate"):
        raise ValueError(f"what={cfg.what!r} is unknown; there are step, optim, data and generate")
    known = {"step": ["hf"], "generate": ["hf", "ct2"]}.get(cfg.what, [])
    unknown = [peer for peer in (cfg.peer.split(",") if cfg.peer else []) if peer not in known]
    if unknown:
        raise ValueError(f"peer={unknown[0]!r} is unknown; what={cfg.what} has {', '.join(known) or 'none'}")
    plan = data.span_plan(data_cfg.input_length, data_cfg.noise_density, data_cfg.mean_span)
    if cfg.what == "data":
        return bench_data(cfg, plan)
    device = runtime.pick_device(cfg.device)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    t5_cfg.vocab_size = t5_cfg.vocab_size or 32_128
    torch.manual_seed(0)
    model = T5(t5_cfg).to(device)
    if cfg.what == "optim":
        return bench_optim(cfg, model, optim_cfg, device)
    if cfg.what == "generate":
        return bench_generate(cfg, model, plan.source, device, dtype)
    return bench_step(cfg, model, plan, device, dtype)


if __name__ == "__main__":
    files.run(main)
