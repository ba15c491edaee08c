"""Fine-tune a T5 on pairs of texts or on Super-Natural-Instructions, and score what it writes.

    python finetune.py config/finetune_tiny.py                   # dates, by the model of config/tiny.py, on a CPU
    python finetune.py config/finetune_pairs.py --model=google/t5-v1_1-small --data=my/train.jsonl --test=my/test.jsonl
    python finetune.py config/finetune_sni.py --model=runs/t5_base --data=path/to/natural-instructions
    python finetune.py --eval_only=True --model=runs/finetune_pairs --data=my/test.jsonl
    python finetune.py --predictions=my/predictions.jsonl --data=my/test.jsonl      # scores alone, without a model
"""
import contextlib
import hashlib
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

import data
import distributed
import files
import runtime
import score
import tasks
from configurator import config_files, configure
from distributed import Ranks
from model import T5, T5Config, config_from_hf, pretrained_folder
from optim import OptimConfig, lr_at, make_optimizer, set_lr
from runtime import CKPT_KEYS, Progress, RunConfig, check_finite
from score import ScoreConfig
from tasks import TaskConfig


@dataclass
class FinetuneConfig(RunConfig):
    """The run: where it starts, how long it is, what is written and when."""
    model: str | None = None        # run folder, folder in Hugging Face's format, or Hub name; random: new weights
    vocab: str | None = None        # SentencePiece file; None: the model's own
    batch_size: int = 8             # examples an optimizer step
    epochs: int = 2                 # times that each example is seen
    max_steps: int | None = None    # optimizer steps; None: as the epochs have
    bucket_batches: int = 50        # batches whose examples are sorted by length together; 1: as they come
    eval_every: int | None = None   # optimizer steps between validations; None: each epoch; 0: only at start and end
    metric: str = "val_loss"        # what the best checkpoint is best in: val_loss, rougeL, rougeL_one or exact_match
    patience: int = 0               # validations without a better one after which the run stops; 0: never
    n_val: int = 200                # validation examples generated for, where the metric is not val_loss
    n_test: int | None = None       # test examples scored, a fixed random choice; None: all
    score_before: bool = False      # score the test examples before training too
    n_seed: int = 1                 # runs with seed, seed + 1, ...: mean and spread
    eval_only: bool = False         # score the model on --test, or on --data where there is no test
    predictions: str | None = None  # score this file without a model: .jsonl with id and prediction, or lines of a .txt
    eval_batch_size: int = 32       # examples generated for at a time, fewer of very long ones
    num_beams: int = 1              # above 1: beam search
    ban_sentinels: bool = True      # never write <extra_id_N>
    show: int = 0                   # training sources and targets to print in full
    dry_run: bool = False           # print counts, lengths and padding, and stop

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("epochs", 1), ("max_steps", 1), ("bucket_batches", 1), ("eval_every", 0), ("patience", 0),
                            ("n_val", 1), ("n_test", 1), ("n_seed", 1), ("eval_batch_size", 1), ("num_beams", 1),
                            ("show", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.metric not in ("val_loss", *score.METRICS):
            raise ValueError(f"metric={self.metric!r} is unknown; there are val_loss, {', '.join(score.METRICS)}")
        if self.eval_only and self.predictions:
            raise ValueError("eval_only=True and predictions exclude each other")
        if (self.eval_only or self.predictions) and (self.resume or self.n_seed > 1):
            raise ValueError("resume and n_seed are for training, not for scores alone")
        if self.patience and self.eval_every == 0:
            raise ValueError(f"patience={self.patience} needs validations: leave eval_every=0 out")
        if self.model is None and not self.predictions:
            raise ValueError("no model is given; --model=runs/tiny, a folder in Hugging Face's format, a Hub name, or"
                             " random for new weights")


@dataclass
class FinetuneOptim(OptimConfig):
    """Optimizer and schedule."""
    optimizer: str = "adamw"        # adamw, adamwscale, adafactor, or adamw_hf as in transformers 4.44
    learning_rate: float = 5e-5     # peak; with adamwscale and adafactor a share of each tensor's RMS
    schedule: str = "constant"      # constant, linear (to 0), cosine, wsd or inverse_sqrt
    warmup_steps: int = 0           # optimizer steps
    grad_clip: float = 0.0          # largest norm of all gradients together; 0: no clipping


@dataclass
class ModelConfig(T5Config):
    """dropout; and with --model=random the sizes of the new weights, which otherwise come with the model."""
    dropout: float = 0.1            # of whatever model


# What a resumed run may change: nothing that its losses and its best checkpoint depend on.
FREE = runtime.FREE | {"model", "vocab", "epochs", "max_steps", "n_test", "score_before", "n_seed", "eval_only",
                       "predictions", "eval_batch_size", "show", "dry_run", "data", "val", "test",
                       "max_num_instances_per_eval_task", "allow_missing"}
GENERATING = {"num_beams", "ban_sentinels", "n_val", "rouge_tokenizer", "normalize"}    # free where the loss decides


@dataclass
class FinetuneProgress(Progress):
    stale: int = 0                  # validations since the best one


def is_over(at, cfg):
    """Whether the validations have got no better for so long that the run stops early."""
    return cfg.patience > 0 and at.stale >= cfg.patience


def open_vocabulary(cfg, t5_cfg):
    """(tokenizer, T5Config) of --model, before its weights are read."""
    if cfg.model == "random":
        if not cfg.vocab:
            raise ValueError("model=random needs a vocabulary: --vocab=PATH of a SentencePiece file")
        tokenizer = data.Tokenizer(cfg.vocab)
        t5_cfg = replace(t5_cfg, vocab_size=t5_cfg.vocab_size or data.round_up(tokenizer.n_id))
    else:
        folder = pretrained_folder(cfg.model)
        sizes = config_from_hf(folder)[0]
        for name, default in ((f.name, f.default) for f in fields(T5Config) if f.name not in ("dropout", "init")):
            given, its = getattr(t5_cfg, name), getattr(sizes, name)
            if given not in (default, its) and not (name == "n_decoder_layer" and given == t5_cfg.n_layer):
                raise ValueError(f"{name}={given}, but {cfg.model} has {its}; sizes are for --model=random alone")
        tokenizer = data.Tokenizer(cfg.vocab) if cfg.vocab else data.Tokenizer.from_pretrained(folder)
        t5_cfg = replace(sizes, dropout=t5_cfg.dropout)
    tokenizer.check_fits(t5_cfg.vocab_size)
    return tokenizer, t5_cfg


def open_model(cfg, t5_cfg, n_source, device, dtype, ranks):
    """The model with its starting weights."""
    torch.manual_seed(cfg.seed)
    if cfg.fsdp and not ranks.first:
        with torch.device("meta"):
            model = T5(t5_cfg)
    else:
        model = T5(t5_cfg) if cfg.model == "random" else T5.from_pretrained(cfg.model)
    model = distributed.shard(model, ranks, device, cfg.compile) if cfg.fsdp else model.to(device)
    model.set_dropout(t5_cfg.dropout)
    model.set_gradient_checkpointing(cfg.gradient_checkpointing)
    runtime.pick_attention(model, cfg, n_source, device, dtype, ranks)
    return model


def data_identity(sets, tokenizer):
    """What a resumed run must find again: the examples and the ids they become."""
    examples, known = hashlib.sha256(), {e.task.name: asdict(e.task) for e in sets["train"] if e.task}
    for content in (known, *([e.input, e.references, e.task and e.task.name] for e in sets["train"] + sets["val"])):
        examples.update(json.dumps(content).encode())
    vocabulary = hashlib.sha256(tokenizer.content).hexdigest() if tokenizer.path else "bytes"
    return {"vocabulary_sha256": vocabulary, "train_examples": len(sets["train"]),
            "examples_sha256": examples.hexdigest()}


def subset(n, most):
    """The numbers of a fixed random choice of `most` of n examples, in order."""
    return sorted(np.argsort(data.key_of(tasks.FIXED, 6, np.arange(n)), kind="stable")[:most].tolist())


@torch.no_grad()
def validation_loss(model, rows, cfg, device, autocast, ranks):
    """Nats per target token over all examples of `rows`; the ranks take turns at batches."""
    was_training = model.training
    model.eval()
    (sources, targets), loss = rows.epoch(), torch.zeros((), device=device)
    batches = list(data.by_length([len(s) for s in sources], cfg.micro_batch_size))
    with distributed.whole(model):
        for part in batches[ranks.number::ranks.count]:
            source, target, mask = (torch.from_numpy(a).to(device) for a in tasks.padded(
                [sources[i] for i in part], [targets[i] for i in part]))
            with autocast, runtime.memory_told(f"{len(source)} examples of {source.shape[1]:,} ids",
                                               "a smaller --micro_batch_size"):
                loss = loss + model(source, target, mask, reduction="sum")
    model.train(was_training)
    return float(ranks.sum(loss)) / sum(map(len, targets))


def to_score(example, text):
    return text, example.references, tasks.one_of(example)


def answer(model, rows, numbers, cfg, score_cfg, device, autocast, title, ranks):
    """What the model writes for the examples of these numbers, and its scores: a list of (text, scores). The ranks take
    turns at batches, and each gets the whole list."""
    from tqdm import tqdm
    sources, _ = rows.epoch()
    suppress = rows.tokenizer.suppress(model.config.vocab_size, cfg.ban_sentinels)
    texts = {}
    batches = [[numbers[k] for k in part]
               for part in data.by_length([len(sources[i]) for i in numbers], cfg.eval_batch_size)]
    batches = batches[ranks.number::ranks.count]
    n = sum(map(len, batches))
    with (score.Scorer(n, score_cfg) as scorer, distributed.whole(model),
          tqdm(total=n, desc=title, unit=" examples", disable=None if ranks.first else True) as bar):
        for part in batches:
            source, mask = (torch.from_numpy(a).to(device) for a in data.pad_rows([sources[i] for i in part]))
            with autocast, runtime.memory_told(f"{len(part)} sources of {source.shape[1]:,} ids",
                                               "a smaller --eval_batch_size"):
                ids = model.generate(source, mask, rows.cfg.max_target_length, cfg.num_beams, suppress=suppress)
            texts |= {i: rows.tokenizer.decode(row) for i, row in zip(part, ids.tolist(), strict=True)}
            scorer.add(part, [to_score(rows.examples[i], texts[i]) for i in part])
            bar.update(len(part))
        scores = scorer.results()
    found = {}
    for part in ranks.gather({i: (texts[i], scores[i]) for i in texts}):
        found |= part
    return [found[i] for i in numbers]


def open_test(task_cfg, cfg):
    """The examples to score without training, after what there is to say about them."""
    sets, told = tasks.load_examples(task_cfg, cfg.seed, eval_only=True)
    print("\n".join(told), flush=True)
    if not sets["test"]:
        raise ValueError(f"{task_cfg.data} has no test examples")
    return [sets["test"][i] for i in subset(len(sets["test"]), cfg.n_test)]


def check_unscored(cfg, out_dir):
    if (out_dir / "result.json").exists() and not cfg.overwrite and not cfg.dry_run:
        raise ValueError(f"{out_dir} holds scores already; replace them with --overwrite=True, or name another"
                         f" --out_dir")


def score_file(cfg, task_cfg, score_cfg):
    """Score a file of predictions against the test examples, or the references that it holds."""
    out_dir = Path(cfg.out_dir) if cfg.out_dir else None
    if out_dir:
        check_unscored(cfg, out_dir)
    if not Path(cfg.predictions).is_file():
        raise FileNotFoundError(f"{cfg.predictions} is missing")
    examples = open_test(task_cfg, cfg) if task_cfg.data or task_cfg.test else []
    examples, texts = score.read_predictions(cfg.predictions, examples)
    if not examples:
        raise ValueError(f"{cfg.predictions} holds no predictions")
    with score.Scorer(len(examples), score_cfg) as scorer:
        for lo in range(0, len(examples), score.PER_PROCESS):
            part = range(lo, min(lo + score.PER_PROCESS, len(examples)))
            scorer.add(part, [to_score(examples[i], texts[i]) for i in part])
        scores = scorer.results()
    score.report(examples, [(text, scores[i]) for i, text in enumerate(texts)], score_cfg, out_dir,
                 {"predictions": cfg.predictions})
    return 0


def warn_of_other_settings(cfg, task_cfg):
    """Tell where a run's prompts were made in another way than those that it is scored on."""
    file = Path(cfg.model).expanduser() / "config.json"
    trained = runtime.parsed(file.read_text(encoding="utf-8")) if file.is_file() else {}
    trained = trained.get("settings", {})
    differ = [f"{name}={trained[name]}, here {getattr(task_cfg, name)}" for name in (
        "prefix", "max_source_length", "max_target_length", "prompt_style", *tasks.SHOWN)
        if name in trained and trained[name] != getattr(task_cfg, name)]
    if differ:
        print(f"warning: {cfg.model} was trained with {'; '.join(differ)}")


def score_model(cfg, task_cfg, score_cfg, t5_cfg, ranks, argv):
    """Score a model on test examples, without training."""
    out_dir = Path(cfg.out_dir or f"runs/eval_{Path(cfg.model).name}")
    check_unscored(cfg, out_dir)
    device = runtime.pick_device(cfg.device, ranks)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    autocast = runtime.autocast(device, dtype)
    tokenizer, t5_cfg = open_vocabulary(cfg, t5_cfg)
    warn_of_other_settings(cfg, task_cfg)
    rows = tasks.Rows(open_test(task_cfg, cfg), tokenizer, task_cfg)
    print("\n".join(tasks.length_report("test", rows)), flush=True)
    if cfg.dry_run:
        return 0
    model = open_model(cfg, t5_cfg, task_cfg.max_source_length, device, dtype, ranks)
    answers = answer(model, rows, range(len(rows)), cfg, score_cfg, device, autocast, "test", ranks)
    if ranks.first:
        score.report(rows.examples, answers, score_cfg, out_dir, how_answered(cfg, task_cfg))
        settings = {**asdict(cfg), **asdict(task_cfg), **asdict(score_cfg), **asdict(t5_cfg)}
        files.write_json(out_dir / "config.json", runtime.describe_run(settings, argv, ranks))
    return 0


def how_answered(cfg, task_cfg, **more):
    """What result.json says of how the answers came about."""
    return {"model": cfg.model, "data": task_cfg.data, "test": task_cfg.test, "n_test": cfg.n_test,
            "num_beams": cfg.num_beams, "ban_sentinels": cfg.ban_sentinels,
            "max_source_length": task_cfg.max_source_length, "max_target_length": task_cfg.max_target_length, **more}


def open_examples(cfg, task_cfg, score_cfg, tokenizer):
    """({train, val, test: examples}, {split: Rows} of those that are not empty), after what there is to say of them."""
    sets, told = tasks.load_examples(task_cfg, cfg.seed)
    print("\n".join(told), flush=True)
    if not sets["val"] and (cfg.metric != "val_loss" or cfg.patience or cfg.eval_every):
        raise ValueError(f"metric={cfg.metric}, patience={cfg.patience}, eval_every={cfg.eval_every}: there are no"
                         f" validation examples; give --val, or a larger --val_share")
    if sets["test"] or cfg.metric != "val_loss":
        score.rouge(score_cfg.rouge_tokenizer)              # a missing package is told now and not after the training
    rows = {split: tasks.Rows(examples, tokenizer, task_cfg) for split, examples in sets.items() if examples}
    rows["train"] = tasks.Rows(sets["train"], tokenizer, task_cfg, cfg.seed, training=True)
    describe(rows, cfg)
    return sets, rows


def describe(rows, cfg):
    """Print how long the examples of each split are, how much the training batches are padded, and some in full."""
    for split in rows:
        print("\n".join(tasks.length_report(split, rows[split])), flush=True)
    train = rows["train"]
    lengths = train.lengths()
    pads = [tasks.padding(lengths, tasks.epoch_order(lengths, cfg.batch_size, pool, cfg.seed, 0), cfg.micro_batch_size)
            for pool in (cfg.bucket_batches, 1)]
    print(f"padding: the batches have {pads[0]:.2f} x the ids of the examples, without buckets {pads[1]:.2f} x",
          flush=True)
    sources, targets = train.epoch()
    for i in subset(len(train), cfg.show):
        print(f"--- source of {train.examples[i].id}, {len(sources[i])} ids\n{train.source_text(i)[0]}\n--- its target,"
              f" {len(targets[i])} ids\n{train.tokenizer.decode(targets[i])}\n---")


def check_resume(ckpt, settings, identity, optim_cfg, max_steps):
    """Refuse to go on with other data, settings or length than the checkpoint's, naming both values."""
    free = FREE | GENERATING if settings["metric"] == "val_loss" else FREE
    runtime.check_settings(ckpt["settings"], settings, free)
    for name, new in identity.items():
        if ckpt["data"][name] != new:
            raise ValueError(f"the stopped run was fed other data ({name} {ckpt['data'][name]}, now {new}); give its"
                             f" data")
    old = ckpt["data"]["max_steps"]
    if any(lr_at(s, optim_cfg, old) != lr_at(s, optim_cfg, max_steps) for s in range(ckpt["step"])):
        raise ValueError(f"the stopped run has {old} steps, this one {max_steps}, and the learning rates already used"
                         f" follow from that; resume with --max_steps={old}")


def train(cfg, task_cfg, score_cfg, optim_cfg, t5_cfg, out_dir, ranks, argv):
    """One run of one seed. Returns what its result.json holds, {} without test examples; the signal that stopped it;
    None after a dry run."""
    device = runtime.pick_device(cfg.device, ranks)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    autocast = runtime.autocast(device, dtype)

    # examples
    tokenizer, t5_cfg = open_vocabulary(cfg, t5_cfg)
    sets, rows = open_examples(cfg, task_cfg, score_cfg, tokenizer)
    if cfg.dry_run:
        return None
    batches = tasks.TaskBatches(rows["train"], cfg.batch_size, cfg.bucket_batches, cfg.seed)
    max_steps = cfg.max_steps or cfg.epochs * batches.steps_per_epoch
    eval_every = batches.steps_per_epoch if cfg.eval_every is None else cfg.eval_every
    val_numbers = subset(len(sets["val"]), cfg.n_val)
    test_numbers = subset(len(sets["test"]), cfg.n_test)
    test_examples = [sets["test"][i] for i in test_numbers]
    identity = data_identity(sets, tokenizer)
    settings = {**asdict(cfg), **asdict(task_cfg), **asdict(score_cfg), **asdict(optim_cfg), **asdict(t5_cfg)}

    # model and optimizer, at the start or from a checkpoint
    model = open_model(cfg, t5_cfg, task_cfg.max_source_length, device, dtype, ranks)
    model.train()
    optimizer = make_optimizer(model, optim_cfg)
    at = FinetuneProgress(losses=[])
    if cfg.resume:
        ckpt = runtime.load_checkpoint(out_dir / "ckpt.pt", CKPT_KEYS)
        check_resume(ckpt, settings, identity, optim_cfg, max_steps)
        distributed.restore(ckpt, out_dir, model, optimizer)
        at = FinetuneProgress(**ckpt["progress"])
        at.losses = [torch.tensor(x, device=device) for x in at.losses]
        del ckpt
        if at.step > max_steps:
            raise ValueError(f"{out_dir} is at step {at.step:,} already, past the {max_steps:,} steps of this command")
        known = {**how_answered(cfg, task_cfg, steps=at.step), **asdict(score_cfg)}
        result = score.read_result(out_dir / "result.json")
        if (at.step == max_steps or is_over(at, cfg)) and all(result.get(k, k) == v for k, v in known.items()):
            print(f"done: {out_dir} is at step {at.step:,} of {max_steps:,} and has its scores")
            return result
    step_model = distributed.over_ranks(model, ranks, device, cfg.fsdp)
    step_model = torch.compile(step_model, dynamic=True) if cfg.compile and not cfg.fsdp else step_model

    # the run's folder and first lines
    lock_file, metrics = runtime.open_run(cfg, out_dir, at.step, settings, ranks)
    if ranks.first:
        files.write_json(out_dir / "config.json", runtime.describe_run(settings, argv, ranks))
    ranks.wait()
    peak = float(ranks.sum(float(runtime.peak_flops(device, dtype))))
    print(f"{out_dir}: {cfg.model}, {model.n_params():,} parameters, on {device} in {str(dtype)[6:]}"
          f"{', compiled' if cfg.compile else ''}, dropout {t5_cfg.dropout}; {optim_cfg.optimizer} at"
          f" {optim_cfg.learning_rate:g}, {optim_cfg.schedule}; {max_steps:,} steps of {cfg.batch_size} examples"
          f"{f' on {ranks.count} ranks' if ranks.count > 1 else ''}, an"
          f" epoch is {batches.steps_per_epoch:,}; seed {cfg.seed}", flush=True)
    if cfg.resume:
        print(f"resumed at step {at.step:,}", flush=True)

    if not cfg.resume and ranks.first:          # what the run before has left
        shutil.rmtree(out_dir / "before", ignore_errors=True)
        for name in ("predictions.jsonl", "result.json"):
            (out_dir / name).unlink(missing_ok=True)

    def test(folder, title, **more):
        answers = answer(model, rows["test"], test_numbers, cfg, score_cfg, device, autocast, title, ranks)
        return score.report(test_examples, answers, score_cfg, folder if ranks.first else None,
                            how_answered(cfg, task_cfg, **more))

    def parts(step):
        return batches.micro_batches(step, cfg.micro_batch_size, ranks.number, ranks.count)

    with lock_file:
        if cfg.score_before and test_examples and not at.step:
            test(out_dir / "before", "test before", steps=0)

        grad_norm, weight_norm, lr, n_real, flops = torch.zeros(()), 0.0, 0.0, 0, 0.0
        feed = runtime.Feed(parts, max_steps, device)
        t0, n_timed = time.perf_counter(), 0        # the clock runs over training steps alone
        with runtime.StopSignal() as stop, contextlib.closing(metrics), contextlib.closing(feed):
            for step in range(at.step, max_steps + 1):          # the extra pass looks and saves, without an update
                # the first pass of a resumed run has logged and saved already, but may owe a validation
                new = step > at.step
                done = step == max_steps or is_over(at, cfg)
                stopping = ranks.any(stop.received) if not done else None
                due_eval = "val" in rows and step != at.evaluated and (
                    done or step == 0 or (eval_every and step % eval_every == 0))
                due_log = new and (done or step % cfg.log_every == 0)
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
                    n_real, flops = ranks.sum(torch.tensor([n_real, flops], dtype=torch.float64)).tolist()
                    record = {"step": step, "epoch": step / batches.steps_per_epoch,
                              "loss": float(torch.stack(at.losses).mean()), "lr": lr, "grad_norm": float(grad_norm),
                              "weight_norm": weight_norm, "tokens_per_s": n_real / elapsed,
                              "mfu": flops / elapsed / peak, "seconds": at.seconds}
                    at.losses.clear()
                    metrics.write(**record)
                    print(f"step {step:,}/{max_steps:,} | loss {record['loss']:.4f} | grad {record['grad_norm']:.2f} |"
                          f" weights {weight_norm:,.1f} | lr {lr:.2e} | {1 / rate:.2f} s/step |"
                          f" {record['tokens_per_s']:,.0f} tokens/s | MFU {record['mfu']:.0%} |"
                          f" ETA {runtime.duration((max_steps - step) / rate)}", flush=True)
                if due_eval and not stopping:
                    result = {"val_loss": validation_loss(model, rows["val"], cfg, device, autocast, ranks)}
                    check_finite(step, [torch.tensor(result["val_loss"])], float(grad_norm), weight_norm)
                    if cfg.metric != "val_loss":
                        answers = answer(model, rows["val"], val_numbers, cfg, score_cfg, device, autocast, "val",
                                         ranks)
                        means = score.mean([scores for _, scores in answers])
                        result |= {f"val_{m}": means[m] for m in score.METRICS}
                    value = result["val_loss"] if cfg.metric == "val_loss" else -result[f"val_{cfg.metric}"]
                    at.evaluated, improved = step, step > 0 and value < at.best
                    at.best = value if improved else at.best
                    at.stale = at.stale + 1 if step > 0 and not improved else 0
                    metrics.write(step=step, **result, seconds=at.seconds)
                    print(f"step {step:,}/{max_steps:,} | validation " + " | ".join(
                        f"{name[4:]} {value:.4f}" for name, value in result.items()), flush=True)
                    if is_over(at, cfg) and not done:
                        done = due_save = True
                        print(f"no better {cfg.metric} in {at.stale} validations: done")

                # keep
                if due_save or improved or stopping:
                    progress = {**asdict(at), "losses": [float(x) for x in at.losses]}
                    content = {"step": step, "progress": progress, "settings": settings,
                               "data": {**identity, "max_steps": max_steps}}
                    to_hf = improved or (done and "val" not in rows)
                    runtime.save_run(out_dir, content, model, optimizer, ranks, cfg.keep, best=improved,
                                     tokenizer=tokenizer if to_hf else None)
                if stopping:
                    print(f"stopped at step {step:,}; go on with --resume=True")
                    return stopping
                if due_log or due_eval or due_save:
                    t0, n_timed, n_real, flops = time.perf_counter(), 0, 0, 0.0
                if done:
                    break

                # learn
                lr = lr_at(step, optim_cfg, max_steps)
                set_lr(optimizer, lr)
                loss, fed = 0.0, feed(step)
                for micro, (source, target, mask, n_target, n_id) in enumerate(fed):
                    if t5_cfg.dropout:                  # noise of its own for each part of a step: nothing to save
                        noise = data.key_of(cfg.seed, 7, step, micro * ranks.count + ranks.number)
                        torch.manual_seed(int(noise[0]) >> 1)
                    with (autocast, distributed.last_micro(step_model, micro == len(fed) - 1),
                          runtime.memory_told(f"{len(source)} examples of {source.shape[1]:,} ids",
                                              "a smaller --micro_batch_size")):
                        part = step_model(source, target, mask, reduction="sum") / n_target
                        (part * ranks.count).backward() # the mean over ranks of these is the whole batch's gradient
                    loss = loss + part.detach()         # stays on the device: nothing waits
                    n_real += n_id
                    flops += model.flops(len(source), source.shape[1], target.shape[1])
                grad_norm = distributed.number_of(torch.nn.utils.clip_grad_norm_(
                    model.parameters(), optim_cfg.grad_clip or math.inf))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                at.losses.append(ranks.sum(loss))
                n_timed += 1

        stopping = ranks.any(stop.received)     # also: until the first rank has written the best checkpoint
        if stopping:
            print("stopped before the test; go on with --resume=True")
            return stopping
        best = ""
        if "val" in rows:
            weights = runtime.load_checkpoint(out_dir / "best.pt", CKPT_KEYS)
            distributed.restore(weights, out_dir, model)
            best = f"; best {cfg.metric} {abs(at.best):.4f} at step {weights['step']:,}"
        print(f"done: {at.step:,} steps in {runtime.duration(at.seconds)}{best}; the model is {out_dir}/hf", flush=True)
        if not test_examples:
            return {}
        before = score.read_result(out_dir / "before" / "result.json").get("all")
        return test(out_dir, "test", steps=at.step, **({"before": before} if before else {}))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    cfg, task_cfg, score_cfg, optim_cfg, t5_cfg = configure(FinetuneConfig, TaskConfig, ScoreConfig, FinetuneOptim,
                                                            ModelConfig, argv=argv)
    ranks = Ranks(cfg.device)
    distributed.check_ranks(cfg, optim_cfg, ranks)
    with ranks.told():
        if cfg.predictions:
            code = score_file(cfg, task_cfg, score_cfg) if ranks.first else 0
        elif cfg.eval_only:
            code = score_model(cfg, task_cfg, score_cfg, t5_cfg, ranks, argv)
        else:
            code = train_seeds(cfg, task_cfg, score_cfg, optim_cfg, t5_cfg, ranks, argv)
    ranks.close()
    return code


def train_seeds(cfg, task_cfg, score_cfg, optim_cfg, t5_cfg, ranks, argv):
    """One run, or --n_seed runs and their spread; returns the exit code."""
    configs = config_files(argv)
    out_dir = Path(cfg.out_dir or f"runs/{'_'.join(file.stem for file in configs) or 'finetune'}")
    start = Path(cfg.model).expanduser().resolve()
    if out_dir.resolve() in (start, *start.parents):
        raise ValueError(f"{out_dir} holds the model to start from; name another --out_dir")
    runs = {seed: out_dir / f"seed-{seed}" if cfg.n_seed > 1 else out_dir
            for seed in range(cfg.seed, cfg.seed + cfg.n_seed)}
    if not cfg.dry_run:
        check_runs(cfg, out_dir, runs.values())
        if cfg.n_seed > 1 and ranks.first:
            (out_dir / "result.json").unlink(missing_ok=True)
    results = []
    for seed, folder in runs.items():
        resume = cfg.resume and (folder / "ckpt.pt").exists()
        result = train(replace(cfg, seed=seed, resume=resume), task_cfg, score_cfg, optim_cfg, t5_cfg, folder, ranks,
                       argv)
        if cfg.dry_run:
            return 0
        if isinstance(result, int):                             # a signal
            return 128 + result
        results += [result] if result else []
    if len(results) > 1:
        spread = score.spread(results)
        if ranks.first:
            files.write_json(out_dir / "result.json", {"model": cfg.model, "seeds": list(runs), **spread})
        for name, s in spread.items():
            values = ", ".join(f"{v:.2f}" for v in s["values"])
            print(f"{name:<12} {s['mean']:.2f} +- {s['std']:.2f} over {len(results)} seeds ({values})")
    return 0


def check_runs(cfg, out_dir, folders):
    """Refuse to write over runs, or to resume none, before the first of several seeds is trained; one seed's run and
    several seeds' do not share a folder."""
    others = [path.parent for path in out_dir.glob("seed-*/ckpt.pt") if path.parent not in folders]
    others += [out_dir] if (out_dir / "ckpt.pt").exists() and out_dir not in folders else []
    if others:
        raise ValueError(f"{others[0]} holds another run; name another --out_dir")
    if cfg.resume and any((folder / "ckpt.pt").exists() for folder in folders):
        return
    for folder in folders:
        runtime.check_out_dir(cfg, folder)


if __name__ == "__main__":
    files.run(main)
