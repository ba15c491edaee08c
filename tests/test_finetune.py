"""The fine-tuning loop: stops, resumption, accumulation, the best checkpoint, seeds, scores, answers to slips."""
import gzip
import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import checkpoint, metrics, stop_at, write_instructions

import data
import distributed
import files
import finetune
import optim
import score
import tasks
from model import T5, T5Config

WORDS = "list array value string index name file line".split()


@pytest.fixture(scope="module")
def start(corpus, tmp_path_factory):
    """A small model with random weights, as a folder in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("start") / "model"
    tokenizer = data.Tokenizer(corpus / "spiece.model")
    torch.manual_seed(0)
    model = T5(T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=48, n_head=3, n_layer=2))
    model.save_pretrained(folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two words to the second one, up to three times: train.jsonl, val.jsonl, test.jsonl."""
    folder = tmp_path_factory.mktemp("pairs")
    both = [(a, b) for a in WORDS for b in WORDS]
    for name, part in (("train", both[11:]), ("val", both[:6]), ("test", both[6:11])):
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"id": f"{a}-{b}", "input": f"the {a} of the {b} " + a * (len(b) % 3),
                        "target": " ".join([b] * (1 + len(a) % 3))}) + "\n"
            for a, b in part))
    return folder


FAST = ["--device=cpu", "--max_source_length=64", "--max_target_length=12", "--log_every=1", "--batch_size=6",
        "--bucket_batches=3", "--learning_rate=3e-3"]


def run(start, pairs, out_dir, *more):
    return finetune.main([f"--model={start}", f"--data={pairs}", f"--out_dir={out_dir}", *FAST, *more])


def predictions(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "predictions.jsonl").read_text().splitlines()]


def same_weights(a, b):
    return all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])


# --- the loop --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("at", [1, 5, 11, 18, 19])
def test_resuming_equals_not_stopping(start, pairs, tmp_path, at):
    """Two epochs of 9 steps, the last batch of each smaller, with dropout, accumulation and a metric that is
    generated for: stopped in an epoch, at its end and in the last step, then resumed, bit for bit."""
    more = ["--micro_batch_size=2", "--dropout=0.1", "--metric=exact_match", "--log_every=4", "--save_every=3"]
    run(start, pairs, tmp_path / "whole", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "lr_at", lambda step, *a, real=finetune.lr_at: stop_at(at, step) or real(step, *a))
        assert run(start, pairs, tmp_path / "cut", *more) == (0 if at > 18 else 128 + signal.SIGTERM)
    assert (tmp_path / "cut" / "result.json").exists() == (at > 18)         # stopped: not scored either
    assert checkpoint(tmp_path / "cut")["step"] == min(at, 18)
    assert run(start, pairs, f"{tmp_path}/cut/", *more, "--resume=True") == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert len(metrics(tmp_path / "whole", "loss")) == 5 and len(metrics(tmp_path / "whole", "val_loss")) == 3
    for name in ("ckpt.pt", "best.pt"):
        assert same_weights(checkpoint(tmp_path / "cut", name), checkpoint(tmp_path / "whole", name))
    assert predictions(tmp_path / "cut") == predictions(tmp_path / "whole")


def test_the_loop_is_the_plain_loop(start, pairs, tmp_path):
    """Five steps by hand: the mean over all target tokens of a batch, whatever their lengths, clipping, AdamW."""
    more = ["--max_steps=5", "--dropout=0", "--grad_clip=0.7", "--schedule=linear", "--warmup_steps=2"]
    run(start, pairs, tmp_path, *more)
    model, tokenizer = T5.from_pretrained(start), data.Tokenizer.from_pretrained(start)
    model.train()
    model.set_dropout(0.0)
    rows = [json.loads(line) for line in (pairs / "train.jsonl").read_text().splitlines()]
    encoded = [([*tokenizer.encode(r["input"]), 1], [*tokenizer.encode(r["target"]), 1]) for r in rows]
    lengths = torch.tensor([[len(s), len(t)] for s, t in encoded]).numpy()
    order = tasks.epoch_order(lengths, 6, 3, 0, 0)
    opt = torch.optim.AdamW(optim.parameter_groups(model, 0.0), lr=1.0, eps=1e-6)
    for step in range(5):
        nll, n = 0.0, 0
        for i in order[step]:                               # one by one, without padding
            source, target = (torch.tensor([x]) for x in encoded[i])
            logits = model.logits(source, target)
            nll = nll + torch.nn.functional.cross_entropy(logits[0], target[0], reduction="sum")
            n += len(target[0])
        loss = nll / n
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        lr = 3e-3 * (0.5 + step / 4) if step < 2 else 3e-3 * (1 - (step - 2) / 3)
        for group in opt.param_groups:
            group["lr"] = lr
        opt.step()
        found = {k: v for s, k, v in metrics(tmp_path) if s == step + 1 and not k.startswith("val")}
        assert found["loss"] == pytest.approx(float(loss.detach()), abs=2e-5)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert found["lr"] == pytest.approx(lr, rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(checkpoint(tmp_path)["model"][name], p.detach(), atol=2e-4, rtol=0)


def test_accumulation_equals_the_large_batch(start, pairs, tmp_path):
    """Micro-batches of unequal numbers of target tokens (fault F32), to 1e-5: fp32 sums in another order."""
    for micro in (6, 3, 1):
        run(start, pairs, tmp_path / str(micro), "--max_steps=6", "--dropout=0", f"--micro_batch_size={micro}")
    whole = metrics(tmp_path / "6", "loss", "grad_norm")
    for micro in (3, 1):
        for (_, key, a), (_, _, b) in zip(metrics(tmp_path / str(micro), "loss", "grad_norm"), whole, strict=True):
            assert a == pytest.approx(b, rel=2e-4 if key == "grad_norm" else 2e-5)


def test_dropout_draws_anew_in_every_part_of_every_step(start, pairs, tmp_path, monkeypatch):
    """And in every run of another seed; the setting, not the model's own, says how much."""
    drawn = {}
    for seed in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "manual_seed", lambda n, seed=seed: drawn.setdefault(seed, []).append(n))
            run(start, pairs, tmp_path / str(seed), "--max_steps=3", "--micro_batch_size=2", f"--seed={seed}")
    noise = [numbers[1:] for numbers in drawn.values()]         # the first one is for new weights
    assert [len(n) for n in noise] == [9, 9] and len({*noise[0], *noise[1]}) == 18
    run(start, pairs, tmp_path / "none", "--max_steps=3", "--dropout=0")
    run(start, pairs, tmp_path / "much", "--max_steps=3", "--dropout=0.5")
    assert metrics(tmp_path / "none", "loss") != metrics(tmp_path / "much", "loss")


def test_the_seed_reaches_weights_order_and_draws(start, tmp_path, monkeypatch):
    clone = write_instructions(tmp_path / "clone", {"task1_a": 30}, {"task3_c": 3})
    asked, rows_of = [], []
    monkeypatch.setattr(tasks, "load_examples", lambda cfg, seed, real=tasks.load_examples: asked.append(seed)
                        or real(cfg, seed))
    monkeypatch.setattr(tasks, "Rows", lambda *a, real=tasks.Rows, **k: rows_of.append(real(*a, **k)) or rows_of[-1])
    losses = []
    for seed in (0, 5):
        run(start, clone, tmp_path / str(seed), "--max_steps=1", "--dropout=0", f"--seed={seed}",
            "--max_source_length=99")
        losses.append(metrics(tmp_path / str(seed), "loss"))
    assert asked == [0, 5] and losses[0] != losses[1]
    assert {(r.seed, r.training) for r in rows_of if r.training} == {(0, True), (5, True)}
    assert {r.seed for r in rows_of if not r.training} == {tasks.FIXED}
    orders = [[e.tolist() for e in tasks.TaskBatches(rows_of[1], 4, 1, seed).order(0)] for seed in (0, 5)]
    assert orders[0] != orders[1]
    norms = []
    for seed in (0, 5):
        run(start, clone, tmp_path / f"new{seed}", "--max_steps=1", "--model=random", f"--vocab={start}/spiece.model",
            "--d_model=32", "--d_kv=8", "--d_ff=48", "--n_head=3", "--n_layer=1", f"--seed={seed}", "--save_every=1",
            "--max_source_length=99", "--learning_rate=1e-9")
        norms.append(checkpoint(tmp_path / f"new{seed}")["model"]["shared.weight"])
    assert not torch.allclose(norms[0], norms[1], atol=0.1)


def test_the_order_of_batches_follows_from_the_seed(start, pairs, tmp_path):
    for seed in (0, 1):
        run(start, pairs, tmp_path / str(seed), "--max_steps=1", "--dropout=0", f"--seed={seed}")
    assert metrics(tmp_path / "0", "loss") != metrics(tmp_path / "1", "loss")


def test_settings_reach_the_model(start):
    cfg, *_, t5_cfg = finetune.configure(finetune.FinetuneConfig, tasks.TaskConfig, score.ScoreConfig,
                                         finetune.FinetuneOptim, finetune.ModelConfig, argv=[
        f"--model={start}", "--dropout=0.3", "--attention=sdpa", "--gradient_checkpointing=True"])
    model = finetune.open_model(cfg, finetune.open_vocabulary(cfg, t5_cfg)[1], 32, torch.device("cpu"), torch.float32,
                                distributed.Ranks())
    assert model.encoder.gradient_checkpointing and model.encoder.blocks[0].attention.attend.__name__ == "attend_sdpa"
    assert {m.dropout for m in model.modules() if hasattr(m, "dropout")} == {0.3} == {model.config.dropout}


def scripted(monkeypatch, values, numbers):
    """Validations that find these exact matches, one after the other, and note whom they were asked about."""
    left = iter(values)

    def answer(model, rows, asked, *rest):
        numbers.append(asked)
        return [("x", dict.fromkeys(score.METRICS, next(left)))]

    monkeypatch.setattr(finetune, "answer", answer)


def test_the_best_is_the_highest_exact_match_after_the_start(start, pairs, tmp_path, monkeypatch):
    """A start that none beats does not count, a tie goes to the first, and three without a better one end the run."""
    numbers = []
    scripted(monkeypatch, [90, 10, 30, 30, 20, 29, 99], numbers)
    run(start, pairs / "train.jsonl", tmp_path, f"--val={pairs / 'val.jsonl'}", "--metric=exact_match", "--patience=3",
        "--eval_every=1", "--max_steps=9", "--n_val=3")
    assert [v for _, _, v in metrics(tmp_path, "val_exact_match")] == [90, 10, 30, 30, 20, 29]
    assert checkpoint(tmp_path, "best.pt")["step"] == 2 and checkpoint(tmp_path)["step"] == 5
    assert all(len(n) == 3 for n in numbers)


def test_the_validation_loss_is_per_target_token(start, pairs, tmp_path):
    run(start, pairs, tmp_path, "--max_steps=1")
    model, tokenizer = T5.from_pretrained(start), data.Tokenizer.from_pretrained(start)
    nll, n = 0.0, 0
    for row in map(json.loads, (pairs / "val.jsonl").read_text().splitlines()):
        source, target = (torch.tensor([[*tokenizer.encode(row[k]), 1]]) for k in ("input", "target"))
        nll, n = nll + float(model(source, target, reduction="sum").detach()), n + target.numel()
    assert metrics(tmp_path, "val_loss")[0][2] == pytest.approx(nll / n, abs=1e-5)


def test_predictions_are_what_the_model_writes_for_each_example(start, pairs, tmp_path):
    """In the file's order, each the same as alone; beams and the limit of length reach the search."""
    run(start, pairs, tmp_path / "run", "--max_steps=40", "--num_beams=3", "--max_target_length=5")
    model, tokenizer = T5.from_pretrained(tmp_path / "run"), data.Tokenizer.from_pretrained(start)
    suppress = tokenizer.suppress(256, sentinels=True)
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text().splitlines()]
    for row, found in zip(rows, predictions(tmp_path / "run"), strict=True):
        source, mask = map(torch.from_numpy, tokenizer.batch([row["input"]]))
        ids = model.generate(source, mask, 5, num_beams=3, suppress=suppress)[0]
        assert (found["id"], found["prediction"]) == (row["id"], tokenizer.decode(ids))
        assert found["exact_match"] == 100 * (found["prediction"] == row["target"])


def test_every_example_is_seen_in_every_epoch(start, tmp_path):
    """Ten examples, batches of 4, two epochs: six steps, none dropped, none twice (fault F27)."""
    (tmp_path / "train.jsonl").write_text("".join(
        json.dumps({"input": w * (i + 1), "target": w}) + "\n" for i, w in enumerate([*WORDS, "row", "key"])))
    run(start, tmp_path, tmp_path / "run", "--batch_size=4", "--micro_batch_size=2")
    assert [s for s, _, _ in metrics(tmp_path / "run", "loss")] == [1, 2, 3, 4, 5, 6]
    assert [round(v, 4) for _, _, v in metrics(tmp_path / "run", "epoch")] == [.3333, .6667, 1, 1.3333, 1.6667, 2]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()     # without validation the last model is kept
    assert not (tmp_path / "run" / "predictions.jsonl").exists()


def test_the_best_checkpoint_is_kept_and_scored(start, pairs, tmp_path, monkeypatch):
    """A rate that spoils the weights after step 6: best.pt, hf/ and the scores are those of step 6."""
    monkeypatch.setattr(finetune, "lr_at", lambda step, *a: 3e-3 if step < 6 else 30.0)
    run(start, pairs, tmp_path, "--max_steps=12", "--eval_every=3")
    best = checkpoint(tmp_path, "best.pt")
    losses = {step: v for step, _, v in metrics(tmp_path, "val_loss")}
    assert set(losses) == {0, 3, 6, 9, 12} and best["step"] == min((3, 6, 9, 12), key=losses.get) == 6
    kept = T5.from_pretrained(tmp_path)
    assert all(torch.equal(best["model"][k], v) for k, v in kept.state_dict().items())
    finetune.main([f"--model={tmp_path}", f"--data={pairs / 'test.jsonl'}", "--eval_only=True", *FAST,
                   f"--out_dir={tmp_path / 'eval'}"])
    assert predictions(tmp_path) == predictions(tmp_path / "eval")


def test_early_stopping(start, pairs, tmp_path, monkeypatch, capsys):
    """Two validations without a better one end the run, which is then done for whoever resumes it."""
    monkeypatch.setattr(finetune, "lr_at", lambda step, *a: 3e-3 if step < 4 else 30.0)
    more = ["--max_steps=40", "--eval_every=2", "--patience=2"]
    run(start, pairs, tmp_path, *more)
    assert [s for s, _, _ in metrics(tmp_path, "val_loss")] == [0, 2, 4, 6, 8]
    assert checkpoint(tmp_path)["step"] == 8 and checkpoint(tmp_path, "best.pt")["step"] == 4
    assert "no better val_loss in 2 validations: done" in capsys.readouterr().out
    before = predictions(tmp_path)
    run(start, pairs, tmp_path, *more, "--resume=True")
    assert "is at step 8 of 40 and has its scores" in capsys.readouterr().out and predictions(tmp_path) == before


def test_a_run_that_lacks_only_its_scores_gets_them(start, pairs, tmp_path):
    run(start, pairs, tmp_path, "--max_steps=3")
    before = predictions(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "predictions.jsonl").unlink()
    run(start, pairs, tmp_path, "--max_steps=3", "--resume=True")
    assert predictions(tmp_path) == before and len(metrics(tmp_path, "loss")) == 3


def test_a_nan_stops_the_run_and_spares_the_checkpoint(start, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "lr_at", lambda step, *a: 3e-3 if step < 5 else math.inf)
    with pytest.raises(files.Stopped, match=r"at step 6|update of step 5"):
        run(start, pairs, tmp_path, "--max_steps=9", "--save_every=1")
    assert checkpoint(tmp_path)["step"] == 5
    assert all(torch.isfinite(v).all() for v in checkpoint(tmp_path)["model"].values())


def test_seeds_give_mean_and_spread_and_each_resumes(start, pairs, tmp_path, capsys):
    more = ["--n_seed=3", "--seed=4", "--max_steps=4", "--model=random", "--d_model=32", "--d_kv=8", "--d_ff=48",
            "--n_head=3", "--n_layer=2", f"--vocab={start / 'spiece.model'}"]
    run(start, pairs, tmp_path / "whole", *more)
    assert "+-" in capsys.readouterr().out
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    values = [json.loads((tmp_path / "whole" / f"seed-{s}" / "result.json").read_text())["all"] for s in (4, 5, 6)]
    assert result["rougeL"]["values"] == [v["rougeL"] for v in values] and result["seeds"] == [4, 5, 6]
    losses = [metrics(tmp_path / "whole" / f"seed-{s}", "loss") for s in (4, 5, 6)]
    assert losses[0] != losses[1] != losses[2]
    calls, real = iter(range(100)), finetune.lr_at
    with pytest.MonkeyPatch.context() as patch:             # the second run is stopped at its third step
        patch.setattr(finetune, "lr_at", lambda step, *a: stop_at(7, next(calls)) or real(step, *a))
        assert run(start, pairs, tmp_path / "cut", *more) == 128 + signal.SIGTERM
    run(start, pairs, tmp_path / "cut", *more, "--resume=True")
    assert json.loads((tmp_path / "cut" / "result.json").read_text()) == result
    assert [metrics(tmp_path / "cut" / f"seed-{s}", "loss") for s in (4, 5, 6)] == losses


def test_a_tiny_model_learns_the_task(start, tmp_path):
    """The second of three words, on triples never seen: none right before, nearly all after 200 steps."""
    triples = [(a, b, c) for a in WORDS for b in WORDS for c in WORDS]
    for name, part in (("train", triples[::2] + triples[1::4]), ("test", triples[3::16])):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"input": f"{a} {b} {c}", "target": b}) + "\n" for a, b, c in part))
    run(start, tmp_path, tmp_path / "run", "--max_steps=200", "--learning_rate=1e-2", "--schedule=linear",
        "--dropout=0", "--score_before=True", "--log_every=50", "--batch_size=32")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["before"]["exact_match"] == 0 and result["all"]["exact_match"] >= 80 and result["all"]["n"] == 32
    losses = [v for _, _, v in metrics(tmp_path / "run", "loss")]
    assert losses[-1] < 0.1 * losses[0]


def test_instructions_are_learnt_and_scored_by_task_and_category(start, tmp_path, capsys):
    clone = write_instructions(tmp_path / "clone", {"task1_a": 9, "task2_b": 8}, {"task3_c": 5, "task4_d": 4})
    run(start, clone, tmp_path / "run", "--max_steps=2", "--max_source_length=400", "--n_test=6", "--show=1")
    out = capsys.readouterr().out
    assert "train: 17 examples of 2 tasks" in out and "test:  9 examples of 2 tasks" in out
    assert "Definition: Say the number of task" in out and "Output: \n--- its target" in out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["all"]["n"] == sum(t["n"] for t in result["tasks"].values()) == 6
    assert set(result["tasks"]) == {"task3_c", "task4_d"} and result["categories"]["title_generation"]["n"] == 6
    record = predictions(tmp_path / "run")[0]
    assert set(record) == {"id", "task", "category", "input", "references", "prediction", *score.METRICS}
    assert record["references"] in ([f"{i}", f"number {i}"] for i in range(9))


def test_a_changed_run_is_not_resumed(start, pairs, tmp_path):
    run(start, pairs, tmp_path / "run", "--max_steps=2")
    for change, part in ((["--dropout=0.2"], r"the stopped run has dropout=0.1; this one dropout=0.2"),
                         (["--learning_rate=1"], "learning_rate"), (["--batch_size=3"], "batch_size"),
                         (["--prefix=x"], "prefix"), (["--metric=rougeL"], "metric")):
        with pytest.raises(ValueError, match=part):
            run(start, pairs, tmp_path / "run", "--max_steps=4", "--resume=True", *change)
    for other in ({"data": "test.jsonl", "val": "val.jsonl"}, {"data": "train.jsonl", "val": "test.jsonl"}):
        with pytest.raises(ValueError, match="was fed other data"):
            run(start, pairs, tmp_path / "run", "--max_steps=4", "--resume=True", *(
                f"--{name}={pairs / file}" for name, file in other.items()))
    run(start, pairs, tmp_path / "run", "--max_steps=4", "--resume=True")       # a constant rate may go on
    assert checkpoint(tmp_path / "run")["step"] == 4
    run(start, pairs, tmp_path / "linear", "--max_steps=4", "--schedule=linear")
    with pytest.raises(ValueError, match="resume with --max_steps=4"):
        run(start, pairs, tmp_path / "linear", "--max_steps=6", "--schedule=linear", "--resume=True")


def test_overwriting_leaves_nothing_of_the_run_before(start, pairs, tmp_path):
    run(start, pairs, tmp_path, "--max_steps=2")
    with pytest.raises(ValueError, match="holds a run already"):
        run(start, pairs, tmp_path, "--max_steps=2")
    run(start, pairs / "train.jsonl", tmp_path, "--max_steps=1", "--overwrite=True")
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "best.pt").exists()


def test_a_compiled_run_equals_an_eager_one(start, pairs, tmp_path):
    for compiled in (True, False):
        run("random", pairs / "train.jsonl", tmp_path / str(compiled), "--max_steps=3", f"--compile={compiled}",
            "--dropout=0", f"--vocab={start}/spiece.model", "--d_model=16", "--d_kv=8", "--d_ff=16", "--n_head=2",
            "--n_layer=1")
    for (_, _, a), (_, _, b) in zip(metrics(tmp_path / "True", "loss"), metrics(tmp_path / "False", "loss"),
                                    strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# --- scores without training -----------------------------------------------------------------------------------------

def test_a_file_of_predictions_is_scored_without_a_model(pairs, tmp_path, capsys):
    test = [json.loads(line) for line in (pairs / "test.jsonl").read_text().splitlines()]
    right = [test[0]["target"], "none", test[2]["target"], "none", "none"]
    (tmp_path / "p.txt").write_text("\n".join(right) + "\n")
    (tmp_path / "p.jsonl").write_text("".join(
        json.dumps({"id": t["id"], "prediction": p}) + "\n" for t, p in list(zip(test, right, strict=True))[::-1]))
    for name in ("p.txt", "p.jsonl"):
        finetune.main([f"--predictions={tmp_path / name}", f"--test={pairs / 'test.jsonl'}",
                       f"--out_dir={tmp_path / name[-3:]}"])
        result = json.loads((tmp_path / name[-3:] / "result.json").read_text())["all"]
        assert result == {"n": 5, "rougeL": 40, "rougeL_one": 40, "exact_match": 40}
    # what this wrote holds its references, so it can be scored alone
    finetune.main([f"--predictions={tmp_path / 'txt' / 'predictions.jsonl'}"])
    assert capsys.readouterr().out.splitlines()[-2].split() == ["all", "examples", "5", "40.00", "40.00", "40.00"]


@pytest.mark.parametrize("content, part", [
    ('{"id": "x"}', "p.jsonl:1: not an object with id and prediction"), ("[1]", "p.jsonl:1"),
    ('{"id": "list-file", "prediction": "x"}', "4 examples have no prediction"), ("x", "p.jsonl:1: not an object"),
    ('{"id": "a", "prediction": "x"}', "rows of one input are one example"), ("", "5 examples have no prediction"),
    ('{"id": "a", "prediction": "x"}\n{"id": "a", "prediction": "y"}', "p.jsonl:2: a second prediction for a"),
    ('{"id": "a", "prediction": "x"}', "1 predictions have no example (a first)"),
])
def test_odd_predictions_are_named(pairs, tmp_path, content, part):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError) as error:
        finetune.main([f"--predictions={tmp_path / 'p.jsonl'}", f"--test={pairs / 'test.jsonl'}"])
    assert part in str(error.value)


def test_sentinels_are_banned_unless_wanted(start, pairs, tmp_path):
    """Fault F49."""
    first, banned = data.Tokenizer.from_pretrained(start).first_sentinel, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T5, "generate", lambda self, *a, suppress, real=T5.generate: banned.append(set(suppress))
                      or real(self, *a, suppress=suppress))
        for ban in (True, False):
            finetune.main([f"--model={start}", f"--data={pairs / 'test.jsonl'}", "--eval_only=True",
                           f"--ban_sentinels={ban}", f"--out_dir={tmp_path / str(ban)}", *FAST])
    assert banned[0] - banned[1] == {first - k for k in range(100)}


def test_predictions_of_every_kind_and_of_a_part(pairs, tmp_path, capsys):
    """With a mark at the file's start, blank lines, packed, of --n_test examples; another ending is refused."""
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text().splitlines()]
    records = [json.dumps({"id": r["id"], "prediction": r["target"]}) for r in rows]
    texts = {"a.txt": "\ufeff" + "\n".join(r["target"] for r in rows), "a.jsonl": "\ufeff" + "\n\n".join(records),
             "a.json": "[" + ",".join(records) + "]", "a.jsonl.gz": "\n".join(records)}
    for name, text in texts.items():
        with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(text)
        finetune.main([f"--predictions={tmp_path / name}", f"--test={pairs / 'test.jsonl'}"])
        assert capsys.readouterr().out.splitlines()[-2].split()[-4:] == ["5", "100.00", "100.00", "100.00"]
    chosen = finetune.subset(5, 2)
    (tmp_path / "part.jsonl").write_text("\n".join(records[i] for i in chosen))
    finetune.main([f"--predictions={tmp_path / 'part.jsonl'}", f"--test={pairs / 'test.jsonl'}", "--n_test=2"])
    assert capsys.readouterr().out.splitlines()[-2].split()[-4:] == ["2", "100.00", "100.00", "100.00"]
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"predictions are read from .txt, .jsonl and .json"):
        finetune.main([f"--predictions={tmp_path / 'a.csv'}", f"--test={pairs / 'test.jsonl'}"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe4"}')
    with pytest.raises(ValueError, match=r"latin.jsonl cannot be read"):
        finetune.main([f"--predictions={tmp_path / 'latin.jsonl'}"])


def test_scores_alone_keep_the_tasks_and_do_not_write_over_others(start, tmp_path, capsys):
    clone = write_instructions(tmp_path / "clone", {"task1_a": 3}, {"task3_c": 5, "task4_d": 4})
    argv = [f"--model={start}", f"--data={clone}", "--eval_only=True", f"--out_dir={tmp_path / 'eval'}", *FAST]
    finetune.main(argv)
    table = capsys.readouterr().out
    settings = json.loads((tmp_path / "eval" / "config.json").read_text())["settings"]
    assert settings["data"] == str(clone) and settings["max_source_length"] == 64
    finetune.main([f"--predictions={tmp_path / 'eval' / 'predictions.jsonl'}"])
    again = capsys.readouterr().out.splitlines()
    assert [line for line in again if line.startswith(("task", "title"))] == [
        line for line in table.splitlines() if line.startswith(("task3", "task4", "tasks", "title"))]
    for more in (argv, ["--predictions=" + str(tmp_path / "eval" / "predictions.jsonl"), argv[3]]):
        with pytest.raises(ValueError, match="eval holds scores already"):
            finetune.main(more)
    finetune.main([*argv, "--overwrite=True", "--n_test=2"])
    assert len(predictions(tmp_path / "eval")) == 2
    (clone / "splits" / "default" / "test_tasks.txt").write_text("")
    with pytest.raises(ValueError, match="has no test examples"):
        finetune.main([*argv, "--overwrite=True"])


def test_a_model_that_is_scored_on_other_prompts_than_it_learnt_is_told(start, pairs, tmp_path, capsys):
    run(start, pairs, tmp_path / "run", "--max_steps=1", "--prefix=say: ")
    capsys.readouterr()
    run(tmp_path / "run", pairs / "test.jsonl", tmp_path / "eval", "--eval_only=True", "--max_target_length=20")
    assert "was trained with prefix=say: , here ; max_target_length=12, here 20" in capsys.readouterr().out


# --- which scores are whose ------------------------------------------------------------------------------------------

def interrupted(*args):
    raise KeyboardInterrupt


def test_scores_of_a_shorter_run_are_not_those_of_the_longer(start, pairs, tmp_path, monkeypatch):
    run(start, pairs, tmp_path, "--max_steps=2")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "answer", interrupted)
        run(start, pairs, tmp_path, "--max_steps=6", "--resume=True")
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2
    run(start, pairs, tmp_path, "--max_steps=6", "--resume=True")
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 6
    with pytest.raises(ValueError, match=r"at step 6 already, past the 4 steps"):
        run(start, pairs, tmp_path, "--max_steps=4", "--resume=True")


def test_a_finished_run_is_scored_anew_in_another_way(start, pairs, tmp_path, capsys):
    run(start, pairs, tmp_path, "--max_steps=2")
    for more, key, value in ((["--num_beams=2"], "num_beams", 2), (["--n_test=3"], "n_test", 3),
                             (["--normalize=True"], "normalize", True)):
        run(start, pairs, tmp_path, "--max_steps=2", "--resume=True", *more)
        assert json.loads((tmp_path / "result.json").read_text())[key] == value
        assert "has its scores" not in capsys.readouterr().out
    run(start, pairs, tmp_path, "--max_steps=2", "--resume=True", "--normalize=True")
    assert "has its scores" in capsys.readouterr().out
    run(start, pairs, tmp_path / "best", "--max_steps=2", "--metric=rougeL")
    with pytest.raises(ValueError, match="num_beams=1; this one num_beams=2"):
        run(start, pairs, tmp_path / "best", "--max_steps=4", "--metric=rougeL", "--resume=True", "--num_beams=2")


def test_what_a_killed_run_has_left_is_not_reported(start, pairs, tmp_path):
    (tmp_path / "before").mkdir()
    for file in ("before/result.json", "result.json"):
        (tmp_path / file).write_text('{"all": {"n": 7}, "steps": 2}')
    run(start, pairs, tmp_path, "--max_steps=2")
    result = json.loads((tmp_path / "result.json").read_text())
    assert "before" not in result and result["all"]["n"] == 5


def test_a_signal_in_the_last_step_of_a_seed_stops_all(start, pairs, tmp_path):
    calls, real = iter(range(100)), finetune.lr_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "lr_at", lambda step, *a: stop_at(3, next(calls)) or real(step, *a))
        assert run(start, pairs, tmp_path, "--max_steps=3", "--n_seed=3") == 128 + signal.SIGTERM
    assert checkpoint(tmp_path / "seed-0")["step"] == 3 and not (tmp_path / "seed-1").exists()
    assert run(start, pairs, tmp_path, "--max_steps=3", "--n_seed=3", "--resume=True") == 0
    assert len(json.loads((tmp_path / "result.json").read_text())["rougeL"]["values"]) == 3
    for more in ([], ["--n_seed=2", "--overwrite=True"], ["--n_seed=3"], ["--n_seed=2", "--seed=2"]):
        with pytest.raises(ValueError, match=r"holds (another|a) run"):
            run(start, pairs, tmp_path, "--max_steps=3", *more)
    run(start, pairs, tmp_path / "one", "--max_steps=1")
    with pytest.raises(ValueError, match="one holds another run"):
        run(start, pairs, tmp_path / "one", "--max_steps=1", "--n_seed=2", "--overwrite=True")


def test_the_folder_is_locked_while_the_test_is_scored(start, pairs, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    found = []

    def answer(*args, real=finetune.answer):
        with pytest.raises(ValueError, match="in use by another process"):
            files.lock(tmp_path / ".lock", tmp_path)
        found.append(args[-2])
        return real(*args)

    monkeypatch.setattr(finetune, "answer", answer)
    run(start, pairs, tmp_path, "--max_steps=1", "--score_before=True")
    assert found == ["test before", "test"]
    files.lock(tmp_path / ".lock", tmp_path).close()


def test_a_missing_package_is_told_before_the_training(start, pairs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    score.rouge.cache_clear()
    with pytest.raises(ValueError, match="pip install rouge-score"):
        run(start, pairs, tmp_path, "--max_steps=1")
    assert not (tmp_path / "metrics.jsonl").exists()


# --- slips -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv, part", [
    ([], "no model is given"), (["--model={start}"], "no data is given"),
    (["--model=not/even/here", "--data={pairs}"], "model not/even/here is no folder here"),
    (["--model={start}", "--data={pairs}", "--out_dir={start}/config.json"], "config.json is a file, not a folder"),
    (["--model={start}", "--data={pairs}", "--eval_only=True", "--resume=True"], "resume and n_seed are for training"),
    (["--model={start}", "--data={pairs}", "--patience=2", "--eval_every=0"], "patience=2 needs validations"),
    (["--model={start}", "--data={pairs}", "--num_neg_examples=2"], "num_neg_examples=2 is for a clone of natural"),
    (["--model={start}", "--data={pairs}", "--resume=True", "--n_seed=2", "--out_dir={start}/no"], "nothing to resume"),
    (["--model=random", "--data={pairs}"], "model=random needs a vocabulary"),
    (["--model={start}", "--data={pairs}", "--d_model=64"], "d_model=64, but"),
    (["--model={start}", "--data={pairs}", "--metric=bleu"], "metric='bleu' is unknown"),
    (["--model={start}", "--data={pairs}", "--batch_size=0"], "batch_size=0 must be at least 1"),
    (["--model={start}", "--data={pairs}/train.jsonl", "--patience=2"], "there are no validation examples"),
    (["--model={start}", "--data={pairs}", "--val_share=1"], "val_share=1.0 must lie in [0, 1)"),
    (["--model={start}", "--data={pairs}/train.jsonl", "--input_key=q"], "train.jsonl:1: there is no 'q', only 'id'"),
    (["--model={start}", "--data={pairs}", "--out_dir={start}"], "holds the model to start from"),
    (["--model={start}", "--data={pairs}", "--resume=True", "--out_dir={start}/none"], "nothing to resume"),
    (["--model={start}", "--data={pairs}", "--prompt_style=mine"], "prompt_style='mine' is unknown"),
    (["--model={start}", "--data={pairs}", "--rouge_tokenizer=thai"], "rouge_tokenizer='thai' is unknown"),
    (["--predictions=none.jsonl"], "none.jsonl is missing"),
    (["--model={start}", "--data={pairs}", "--learning_rte=1"], "Did you mean 'learning_rate'?"),
])
def test_slips_get_one_line(start, pairs, tmp_path, monkeypatch, argv, part):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)) as error:
        finetune.main([a.format(start=start, pairs=pairs) for a in argv])
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_vocabulary_of_another_model_is_refused(start, pairs, tmp_path):
    model = T5(T5Config(vocab_size=2048, d_model=32, d_kv=8, d_ff=48, n_head=3, n_layer=2))
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"2,048 rows for ids, .* has 250 ids"):
        run(tmp_path / "wide", pairs, tmp_path / "run", f"--vocab={start / 'spiece.model'}")


def test_a_dry_run_writes_nothing(start, pairs, tmp_path, capsys):
    run(start, pairs, tmp_path / "run", "--dry_run=True")
    out = capsys.readouterr().out
    assert "padding: the batches have" in out and "train: nothing is cut" in out and not (tmp_path / "run").exists()


def test_settings_that_free_a_resume_are_settings():
    names = {f for cls in finetune.configure(finetune.FinetuneConfig, tasks.TaskConfig, score.ScoreConfig,
                                             finetune.FinetuneOptim, finetune.ModelConfig, argv=["--model=x"])
             for f in vars(cls)}
    assert names >= finetune.FREE
