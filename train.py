"""Pre-train a T5 by span corruption.

    python train.py config/tiny.py                               # a small one on the CPU, from nothing
    python train.py config/t5_base.py --batch_size=128           # nanoT5's model; needs a GPU and data/c4
    python train.py config/t5_base.py --resume=True              # go on where a run stopped
"""
import contextlib
import importlib.util
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

import data
import distributed
import files
import kernels
import runtime
from configurator import config_files, configure
from data import Batches, DataConfig
from distributed import Ranks
from kernels import IGNORE
from model import T5, T5Config, pretrained_folder
from optim import Average, Muon, OptimConfig, lr_at, make_optimizer, set_lr
from runtime import CKPT_KEYS, Progress, RunConfig, check_finite


@dataclass
class TrainConfig(RunConfig):
    """The run: length, batch, device, what is written and when."""
    max_steps: int = 65_536         # optimizer steps
    eval_every: int = 2_000         # optimizer steps; 0: only before the first and after the last
    eval_batches: int = 32          # held-out batches of 128 rows, whatever batch_size is
    init_from: str | None = None    # weights to start from: run folder, checkpoint, Hugging Face folder or Hub name
    dry_run: bool = False           # print sizes, FLOPs and memory, and stop
    n_sample: int = 0               # held-out sentences to fill in at the end
    eval_noise_density: float | None = None     # of the held-out rows; None: as in training
    eval_mean_span: float | None = None         # likewise
    z_loss: float = 0.0             # weight of log(Z)^2 beside the training loss; T5X: 1e-4
    ema: float = 0.0                # above 0: evaluate and export a moving average of the weights with this decay

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_steps", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_every", "n_sample", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema} must lie in [0, 1)")


EVAL_ROWS = 128                     # of a held-out batch: runs of every batch size are scored on the same rows

# What may differ from the stopped run when it is resumed: nothing that the loss depends on beyond rounding.
FREE = runtime.FREE | {"data_dir", "eval_every", "init_from", "dry_run", "n_sample", "max_steps"}


def check_resume(ckpt, settings, meta, optim_cfg):
    """Refuse to go on with another model, vocabulary, seed or recipe than the checkpoint's, naming both values."""
    runtime.check_settings(ckpt["settings"], settings, FREE)
    for name in ("vocabulary_sha256", "train_tokens"):
        old, new = ckpt["data"][name], data_identity(meta)[name]
        if old != new:
            raise ValueError(f"the stopped run was fed other data ({name} {old}, now {new}); give its data_dir")
    old, new = ckpt["settings"]["max_steps"], settings["max_steps"]
    if any(lr_at(s, optim_cfg, old) != lr_at(s, optim_cfg, new) for s in range(ckpt["step"])):
        raise ValueError(f"the stopped run has max_steps={old}, this one {new}, and the learning rates of its first"
                         f" {ckpt['step']} steps follow from that with schedule={optim_cfg.schedule};"
                         f" resume with --max_steps={old} (constant, and wsd before its decay, may change it)")


def data_identity(meta):
    return {"vocabulary_sha256": meta["vocabulary_sha256"], "train_tokens": meta["splits"]["train"]["tokens"]}


def memory_estimate(cfg, t5, plan, n_params, optimizer, device, dtype, n_ranks=1):
    """Bytes at the highest moment of a step: either in the backward pass, where weights, moments and what one
    micro-batch has kept are there, or in the update, where all gradients are. Of one process, unsharded: within 8 % of
    what seven models took on a CPU beside the imports (LOG.md, 2026-12-02); on a GPU it has not been measured.
    """
    S, T, HK, attention = plan.source, plan.target, t5.n_head * t5.d_kv, cfg.attention
    _, rows = rows_of_a_rank(cfg, n_ranks)
    bf16, by_hand = dtype == torch.bfloat16, device.type == "cpu" and dtype == torch.float32 and not cfg.compile
    product = 2 if bf16 else 4                      # bytes of an element of a matrix product's output
    norm = 8 if by_hand else 12                     # a float32 of the stream, one of the norm's output, one between
    ff = (4 if t5.gated else 2) * t5.d_ff
    if by_hand and t5.gated:
        ff = 2 * t5.d_ff                            # the gate and its product are made again

    def scores(n, keys):                            # bytes of the attention weights that are kept for one head
        fused = attention in ("sdpa", "flex") or (attention == "auto" and device.type == "cuda")
        by_head = by_hand and kernels.ONEDNN_TRAINS and n * keys >= kernels.AttendByHead.LEAST
        return 0 if fused or attention == "by_head" or (attention == "auto" and by_head) else n * keys * (
            6 if bf16 else 4)

    def block(n, keys):                             # bytes kept for n tokens that attend to so many keys each
        return (n * (norm * t5.d_model * (len(keys) + 1) + product * (4 * HK * len(keys) + ff))
                + t5.n_head * sum(scores(n, k) for k in keys))

    encoder, decoder = block(S, [S]), block(T, [T, S]) + product * 2 * HK * S
    if cfg.gradient_checkpointing:
        kept = 4 * t5.d_model * (t5.n_layer * S + t5.n_decoder_layer * T) + 2 * max(encoder, decoder)
    else:
        kept = t5.n_layer * encoder + t5.n_decoder_layer * decoder
    kept += (8 if by_hand else 14 if bf16 else 12) * T * t5.vocab_size
    held, head = n_params * (4 if optimizer == "adafactor" else 12), 4 * t5.d_model * t5.vocab_size
    held += n_params * 4 * (cfg.ema > 0)
    grads = 4 * n_params
    if cfg.fsdp:                                    # beside its share each rank has embedding and head whole
        held, grads, head = held / n_ranks + 2 * head, grads / n_ranks, 2 * head
    activations = rows * kept + bf16 * 2 * n_params + head      # the head's gradient is the first one
    # measured on a CPU: what oneDNN and threads take, gaps between freed blocks (glibc 2.36), the update's temporaries
    library, gaps = (0.15e9, 1.2) if device.type == "cpu" else (0, 1.05)
    return library + max(held + activations * gaps, 1.05 * (held + grads) + head)


@torch.no_grad()
def evaluate(model, rows, micro_batch_size, device, autocast, ranks):
    """Loss and token accuracy on held-out rows, a dict of val_loss (nats per target token) and val_accuracy; each rank
    takes its share of the rows."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, device=device)                       # loss, right tokens
    with distributed.whole(model):
        for lo, hi in pieces(ranks.share(rows.batch_size), micro_batch_size):
            source, target = (torch.from_numpy(a).to(device) for a in rows.rows(0, lo, hi))
            with autocast:
                logits = model.logits(source, target).float()
            total += torch.stack([
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"),
                (logits.argmax(-1) == target).sum()])
    model.train(was_training)
    loss, correct = (ranks.sum(total) / (rows.batch_size * rows.plan.target)).tolist()
    return {"val_loss": loss, "val_accuracy": correct}


def pieces(span, size):
    """A span of rows cut into such of `size` rows, the last one shorter: (0, 5), 2 -> (0, 2), (2, 4), (4, 5)"""
    lo, hi = span
    return [(at, min(at + size, hi)) for at in range(lo, hi, size)]


def show_samples(model, tokenizer, rows, n, device):
    """Print n held-out sentences with blanks, what the model puts there, and what stood there."""
    picked = data.pick_sentences(tokenizer, rows, n)
    if not picked:
        print("\nno held-out sentence is short and plain enough to be shown with its blanks")
    for number, (row, part) in enumerate(picked, 1):
        source, target = rows.rows(0, row, row + 1)
        guess = model.generate(torch.from_numpy(source).to(device), max_new_tokens=target.shape[1],
                               suppress=tokenizer.suppress(model.config.vocab_size))[0]
        print(f"\nheld-out sentence {number}")
        for title, filling in (("blanks", None), ("model ", guess.tolist()), ("truth ", target[0])):
            print(f"  {title}  {tokenizer.fill(source[0, part], filling)}")


def open_data(data_dir, ranks):
    """The data folder's meta; the embedded corpus is prepared first if it is asked for and not there."""
    if Path(data_dir).name == "pydocs" and not (Path(data_dir) / "meta.json").exists() and ranks.first:
        import prepare
        print(f"{data_dir} is not there yet: preparing the embedded corpus")
        prepare.main(["--source=pydocs", f"--out_dir={data_dir}"])
    ranks.wait()
    return data.read_meta(data_dir)


def open_tokenizer(data_dir, meta):
    """The tokenizer for hf/ and for samples; None where a package for that is missing, since training needs neither."""
    if all(importlib.util.find_spec(name) for name in ("sentencepiece", "safetensors")):
        return data.Tokenizer(Path(data_dir) / meta["vocabulary"], meta["n_sentinel"])
    print("note: hf/ and samples are left out; they need packages: pip install sentencepiece safetensors")
    return None


def rows_of_a_rank(cfg, n_ranks):
    """(rows of the batch that one rank has at most, how many of them at a time)."""
    most = math.ceil(cfg.batch_size / n_ranks)
    return most, min(cfg.micro_batch_size, most)


def batch_told(cfg, ranks):
    most, rows = rows_of_a_rank(cfg, ranks.count)
    if ranks.count == 1:
        return f"{rows} rows x {most // rows} micro-batches = {cfg.batch_size}"
    return f"{ranks.count} ranks of up to {most} rows in {math.ceil(most / rows)} micro-batches = {cfg.batch_size}"


def dry_run(cfg, optim_cfg, t5_cfg, plan, device, dtype, ranks):
    """Print what the run would cost, without weights in memory."""
    with torch.device("meta"):
        model = T5(t5_cfg)
    n = model.n_params()
    flops = model.flops(cfg.batch_size, plan.source, plan.target)
    memory = memory_estimate(cfg, t5_cfg, plan, n, optim_cfg.optimizer, device, dtype, ranks.count)
    _, rows = rows_of_a_rank(cfg, ranks.count)
    where = f"{device.type}, a rank" if ranks.count > 1 else device.type
    print(f"""parameters       {n:,}  (vocabulary {t5_cfg.vocab_size:,})
row              {plan.raw} raw tokens -> source {plan.source}, target {plan.target}, {plan.n_span} spans
batch            {batch_told(cfg, ranks)}
run              {cfg.max_steps:,} steps, {cfg.max_steps * cfg.batch_size * plan.raw:,} raw tokens
FLOPs            {flops:.3e} a step, {flops * cfg.max_steps:.3e} in all
memory           about {memory / 1e9:.1f} GB at {rows} rows, {str(dtype)[6:]}, on {where}""")


def load_weights(init_from):
    """(weights, settings, what is known of the vocabulary) of a checkpoint, of a run's last one, or of a model in
    Hugging Face's format."""
    path = Path(init_from)
    path = path / "ckpt.pt" if (path / "ckpt.pt").is_file() else path
    if path.is_file():
        ckpt = runtime.load_checkpoint(path, CKPT_KEYS)
        if ckpt.get("shards"):
            model = T5(T5Config(**{f.name: ckpt["settings"][f.name] for f in fields(T5Config)}))
            distributed.restore(ckpt, path.parent, model)
            ckpt["model"] = model.state_dict()
        ckpt["model"] |= ckpt.get("average", {}).get("weights", {})
        return ckpt["model"], ckpt["settings"], {"vocabulary_sha256": ckpt["data"]["vocabulary_sha256"]}
    folder = pretrained_folder(init_from)
    model = T5.from_pretrained(folder)
    file, vocabulary = folder / data.VOCABULARY, {}
    if file.is_file():
        vocabulary = {"vocabulary_sha256": data.file_hash(file)}
        if importlib.util.find_spec("sentencepiece"):
            vocabulary["first_sentinel"] = data.Tokenizer.from_pretrained(folder).first_sentinel
    return model.state_dict(), asdict(model.config), vocabulary


def check_start(init_from, theirs, t5_cfg, vocabulary, meta):
    """Refuse weights of other sizes or of another vocabulary than this run has."""
    differ = {name: theirs.get(name) for name, value in asdict(t5_cfg).items()
              if name not in ("dropout", "init", "zero_out", "match_init", "local_init") and theirs.get(name) != value}
    if differ:
        was, now = (", ".join(f"{name}={values[name]}" for name in differ) for values in (differ, asdict(t5_cfg)))
        raise ValueError(f"{init_from} has {was}, this run {now}; start with its sizes:"
                         f" {' '.join(f'--{name}={old}' for name, old in differ.items())}")
    if not vocabulary:
        print(f"warning: {init_from} holds no {data.VOCABULARY}; that its ids are those of data_dir cannot be checked")
    elif vocabulary["vocabulary_sha256"] != meta["vocabulary_sha256"]:
        raise ValueError(f"{init_from} was trained with another vocabulary than this run's data_dir has")
    elif vocabulary.get("first_sentinel", meta["first_sentinel"]) != meta["first_sentinel"]:
        n_sentinel = vocabulary["first_sentinel"] + 1 - meta["n_piece"]
        raise ValueError(f"{init_from} has <extra_id_0> at id {vocabulary['first_sentinel']}, this run's data_dir at"
                         f" {meta['first_sentinel']}; prepare the data with --n_sentinel={n_sentinel}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    cfg, data_cfg, optim_cfg, t5_cfg = configure(TrainConfig, DataConfig, OptimConfig, T5Config, argv=argv)
    configs = config_files(argv)
    out_dir = Path(cfg.out_dir or f"runs/{'_'.join(file.stem for file in configs) or 'train'}")
    ranks = Ranks(cfg.device)
    distributed.check_ranks(cfg, optim_cfg, ranks)
    device = runtime.pick_device(cfg.device, ranks)
    with ranks.told():
        code = train(cfg, data_cfg, optim_cfg, t5_cfg, out_dir, ranks, device, argv)
    ranks.close()
    return code


def train(cfg, data_cfg, optim_cfg, t5_cfg, out_dir, ranks, device, argv):
    """The run; returns the exit code."""
    dtype = runtime.pick_dtype(cfg.dtype, device)
    plan = data.span_plan(data_cfg.input_length, data_cfg.noise_density, data_cfg.mean_span)

    # data, and the vocabulary size that follows from it
    if cfg.dry_run and not (Path(data_cfg.data_dir) / "meta.json").exists():
        print(f"{data_cfg.data_dir} is not there; T5's 32,100 ids are assumed")
        meta = {"n_id": 32_100}
    else:
        meta = open_data(data_cfg.data_dir, ranks)
    if not cfg.dry_run:
        runtime.check_out_dir(cfg, out_dir)
    start = load_weights(cfg.init_from) if cfg.init_from and not cfg.resume and not cfg.dry_run else None
    if t5_cfg.vocab_size is None:                       # umT5's embedding has more rows than its ids need
        t5_cfg.vocab_size = max(data.round_up(meta["n_id"]), start[1]["vocab_size"] if start else 0)
    if t5_cfg.vocab_size < meta["n_id"]:
        raise ValueError(f"vocab_size={t5_cfg.vocab_size} is less than the {meta['n_id']} ids of"
                         f" {data_cfg.data_dir}; leave it out, or give at least {meta['n_id']}")
    if cfg.dry_run:
        return dry_run(cfg, optim_cfg, t5_cfg, plan, device, dtype, ranks)
    settings = {**asdict(cfg), **asdict(data_cfg), **asdict(optim_cfg), **asdict(t5_cfg)}
    train_tokens, val_tokens = (data.Tokens(data_cfg.data_dir, split, meta) for split in ("train", "val"))
    batches = Batches(train_tokens, plan, cfg.seed, cfg.batch_size, meta["first_sentinel"])
    eval_plan = data.span_plan(data_cfg.input_length, cfg.eval_noise_density or data_cfg.noise_density,
                               cfg.eval_mean_span or data_cfg.mean_span)
    held_out = data.held_out_rows(val_tokens, eval_plan, cfg.eval_batches * EVAL_ROWS, meta["first_sentinel"])
    floor = data.unigram_floor(train_tokens, held_out, meta["n_id"])
    tokenizer = open_tokenizer(data_cfg.data_dir, meta)

    # model and optimizer, new or from a checkpoint
    autocast = runtime.autocast(device, dtype)
    torch.manual_seed(cfg.seed)
    with contextlib.nullcontext() if ranks.first or not cfg.fsdp else torch.device("meta"):
        model = T5(t5_cfg)
    if start:
        weights, sizes, vocabulary = start
        check_start(cfg.init_from, sizes, t5_cfg, vocabulary, meta)
        if ranks.first or not cfg.fsdp:
            model.load_state_dict(weights)
        del weights, start
    compiled = cfg.compile if cfg.compile is not None else device.type == "cuda"
    model = distributed.shard(model, ranks, device, compiled) if cfg.fsdp else model.to(device)
    model.set_gradient_checkpointing(cfg.gradient_checkpointing)
    attention = runtime.pick_attention(model, cfg, plan.source, device, dtype, ranks)
    optimizer = make_optimizer(model, optim_cfg)
    average = Average(model, cfg.ema) if cfg.ema else None
    at = Progress(losses=[])
    if cfg.resume:
        ckpt = runtime.load_checkpoint(out_dir / "ckpt.pt", CKPT_KEYS)
        check_resume(ckpt, settings, meta, optim_cfg)
        distributed.restore(ckpt, out_dir, model, optimizer)
        if average:
            average.load_state_dict(ckpt["average"])
        at = Progress(**ckpt["progress"])
        at.losses = [torch.tensor(x, device=device) for x in at.losses]
        del ckpt
        if at.step >= cfg.max_steps:
            print(f"done: {out_dir} is at step {at.step} of {cfg.max_steps}")
            return 0
    step_model = distributed.over_ranks(model, ranks, device, cfg.fsdp)
    step_model = torch.compile(step_model) if compiled and not cfg.fsdp else step_model

    # the run's folder and first lines
    lock_file, metrics = runtime.open_run(cfg, out_dir, at.step, settings, ranks)
    if ranks.first:
        files.write_json(out_dir / "config.json", runtime.describe_run(settings, argv, ranks))
    micro_batches = pieces(ranks.share(cfg.batch_size), cfg.micro_batch_size)
    most, rows = rows_of_a_rank(cfg, ranks.count)
    n_micro = math.ceil(most / rows)
    micro_batches += [None] * (n_micro - len(micro_batches))    # each rank makes as many passes: they exchange weights
    ranks.wait()
    flops = model.flops(cfg.batch_size, plan.source, plan.target)
    update_flops = optimizer.flops() if isinstance(optimizer, Muon) else 0      # of other optimizers: next to nothing
    peak = float(ranks.sum(float(runtime.peak_flops(device, dtype))))
    print(f"{out_dir}: {model.n_params():,} parameters, vocabulary {t5_cfg.vocab_size:,}, on {device} in"
          f" {str(dtype)[6:]}{', compiled' if compiled else ''}, attention {attention}, dropout {t5_cfg.dropout}")
    print(f"batch {batch_told(cfg, ranks)} rows of"
          f" {plan.source}/{plan.target} tokens; an epoch is {batches.n_window / cfg.batch_size:,.0f} steps;"
          f" {held_out.batch_size:,} held-out rows")
    print(f"{flops:.2e} FLOPs a step, peak {peak / 1e9:,.0f} GFLOP/s; a model of frequencies alone would have a"
          f" held-out loss of {floor:.3f} (the floor)", flush=True)
    if optim_cfg.schedule != "inverse_sqrt" and optim_cfg.warmup_steps >= cfg.max_steps:
        print(f"warning: with warmup_steps={optim_cfg.warmup_steps:,} and max_steps={cfg.max_steps:,} the learning rate"
              f" never reaches its peak")
    if cfg.resume:
        print(f"resumed at step {at.step:,}", flush=True)

    grad_norm, weight_norm, lr = torch.zeros(()), 0.0, 0.0

    def parts(step):
        """(source, target) of each micro-batch; one that has no rows gets one that costs nothing."""
        for span in micro_batches:
            source, target = batches.rows(step, *(span or (0, 1)))
            yield source, target if span else np.full_like(target, IGNORE)

    feed = runtime.Feed(parts, cfg.max_steps, device)
    t0, n_timed = time.perf_counter(), 0        # the clock runs over training steps alone
    with (runtime.StopSignal() as stop, contextlib.closing(metrics), lock_file, contextlib.closing(feed)):
        for step in range(at.step, cfg.max_steps + 1):      # the extra pass looks and saves, without an update
            # the first pass of a resumed run has logged and saved already, but may owe an evaluation
            done, new = step == cfg.max_steps, step > at.step
            stopping = ranks.any(stop.received) if not done else None
            due_log = new and (done or step % cfg.log_every == 0)
            due_eval = step != at.evaluated and (done or step == 0
                                                 or (cfg.eval_every and step % cfg.eval_every == 0))
            due_save = new and (done or (cfg.save_every and step % cfg.save_every == 0))
            improved = False
            at.step = step

            # look
            if due_log or due_eval or due_save or stopping:
                weight_norm = runtime.weight_norm(model)
                check_finite(step, at.losses, float(grad_norm), weight_norm)
                elapsed = time.perf_counter() - t0
                at.seconds += elapsed
            if due_log:
                rate = n_timed / elapsed
                line = {"step": step, "loss": float(torch.stack(at.losses).mean()), "lr": lr,
                        "grad_norm": float(grad_norm), "weight_norm": weight_norm,
                        "tokens_per_s": rate * cfg.batch_size * (plan.source + plan.target),
                        "mfu": rate * flops / peak, "seconds": at.seconds}
                at.losses.clear()
                metrics.write(**line)
                print(f"step {step:,}/{cfg.max_steps:,} | loss {line['loss']:.4f} |"
                      f" grad {line['grad_norm']:.2f} | weights {line['weight_norm']:,.1f} | lr {lr:.2e} |"
                      f" {1 / rate:.2f} s/step | {line['tokens_per_s']:,.0f} tokens/s | MFU {line['mfu']:.0%} |"
                      f" ETA {runtime.duration((cfg.max_steps - step) / rate)}", flush=True)
            if due_eval and not stopping:
                with average.in_place() if average else contextlib.nullcontext():
                    result = evaluate(model, held_out, cfg.micro_batch_size, device, autocast, ranks)
                val_loss = result["val_loss"]
                check_finite(step, [torch.tensor(val_loss)], float(grad_norm), weight_norm)
                at.evaluated, improved = step, step > 0 and val_loss < at.best
                at.best = val_loss if improved else at.best
                metrics.write(step=step, **result, floor=floor, flops=step * (flops + update_flops), seconds=at.seconds)
                print(f"step {step:,}/{cfg.max_steps:,} | held-out loss {val_loss:.4f} | floor {floor:.4f} |"
                      f" perplexity {math.exp(min(val_loss, 700)):,.1f} |"
                      f" accuracy {result['val_accuracy']:.1%}", flush=True)

            # keep
            if due_save or improved or stopping:
                progress = {**asdict(at), "losses": [float(x) for x in at.losses]}
                content = {"step": step, "progress": progress, "settings": settings, "data": data_identity(meta)}
                runtime.save_run(out_dir, content, model, optimizer, ranks, cfg.keep, best=improved,
                                 tokenizer=tokenizer if improved else None, average=average)
            if stopping:
                print(f"stopped at step {step:,}; go on with --resume=True")
                return 128 + stopping
            if due_log or due_eval or due_save:
                t0, n_timed = time.perf_counter(), 0
            if done:
                break

            # learn
            lr = lr_at(step, optim_cfg, cfg.max_steps)
            set_lr(optimizer, lr)
            loss = 0.0
            for micro, (source, target) in enumerate(feed(step)):
                if t5_cfg.dropout:                  # noise of its own for each part of a step: nothing to save
                    noise = data.key_of(cfg.seed, 4, step, micro * ranks.count + ranks.number)
                    torch.manual_seed(int(noise[0]) >> 1)
                with autocast, distributed.last_micro(step_model, micro == n_micro - 1):
                    part = step_model(source, target, reduction="sum", z_loss=cfg.z_loss)
                    part = part / (cfg.batch_size * plan.target)
                    (part * ranks.count).backward() # the mean over ranks of these gradients is that of the whole batch
                loss = loss + part.detach()         # stays on the device: nothing waits
            grad_norm = distributed.number_of(torch.nn.utils.clip_grad_norm_(
                model.parameters(), optim_cfg.grad_clip or math.inf))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if average:
                average.update()
            at.losses.append(ranks.sum(loss))
            n_timed += 1

    print(f"done: {cfg.max_steps:,} steps in {runtime.duration(at.seconds)}; best held-out loss {at.best:.4f}"
          f" (floor {floor:.4f}); see {out_dir}")
    if cfg.n_sample and tokenizer:
        with distributed.whole(model), average.in_place() if average else contextlib.nullcontext():
            if ranks.first:
                show_samples(model, tokenizer, held_out, cfg.n_sample, device)
        ranks.wait()
    return 0


if __name__ == "__main__":
    files.run(main)
