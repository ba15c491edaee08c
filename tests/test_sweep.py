"""Sweeps and pictures: the grid, going on after a stop, what a result holds, steps that a recipe needs."""
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import plot
import runtime
import sweep

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["--input_length=32", "--d_model=16", "--d_kv=8", "--d_ff=16", "--n_head=2", "--n_layer=1", "--max_steps=4",
         "--batch_size=2", "--warmup_steps=2", "--eval_batches=1", "--eval_every=2", "--device=cpu"]


def sweep_args(corpus, tmp_path, *more):
    return [f"--data_dir={corpus}", f"--results={tmp_path}/out/r.jsonl", f"--runs={tmp_path}/runs", *SIZES, *more]


def test_the_grid_by_hand():
    got = sweep.grid(["a.py", "--x=1,2", "--y=3", "--seed=0,1"])
    assert got == [(["a.py", f"--x={x}", "--y=3", f"--seed={seed}"], f"x={x}") for x in (1, 2) for seed in (0, 1)]


def test_a_sweep_runs_its_grid_once(corpus, tmp_path, capsys):
    """Two rates and two seeds are four lines; the same again makes none, one value more makes two."""
    args = sweep_args(corpus, tmp_path, "--seed=0,1", "--jobs=2")
    assert sweep.main([*args, "--learning_rate=1e-2,2e-2"]) == 0
    records = sweep.read_results(tmp_path / "out" / "r.jsonl")
    assert sorted((r["label"], r["seed"], r["steps"]) for r in records) == [
        (f"learning_rate={x}", seed, 4) for x in ("1e-2", "2e-2") for seed in (0, 1)]
    assert all([step for step, _ in r["curve"]] == [0, 2, 4] and r["curve"][-1][1] == round(r["val_loss"], 4)
               and r["flops"] > 0 and r["floor"] > 0 and r["seconds"] > 0 for r in records)
    assert len({r["val_loss"] for r in records}) == 4 and not list((tmp_path / "runs").iterdir())
    capsys.readouterr()
    assert sweep.main([*args, "--learning_rate=2e-2,1e-2"]) == 0
    assert "4 runs, 4 of them" in capsys.readouterr().out
    assert sweep.main([*args, "--learning_rate=2e-2,3e-2", "--label=more"]) == 0
    assert [r["label"] for r in sweep.read_results(tmp_path / "out" / "r.jsonl")].count("more") == 2


def test_settings_that_do_not_exist_stop_a_sweep_before_it_starts(corpus, tmp_path):
    with pytest.raises(ValueError, match="no setting is called 'learning_rat'"):
        sweep.main(sweep_args(corpus, tmp_path, "--learning_rat=1,2"))
    with pytest.raises(ValueError, match="optimizer='sgd'"):
        sweep.main(sweep_args(corpus, tmp_path, "--optimizer=adamw,sgd"))
    assert not (tmp_path / "runs").exists()


def test_a_diverged_run_is_a_result(corpus, tmp_path):
    assert sweep.main(sweep_args(corpus, tmp_path, "--optimizer=adamw", "--learning_rate=1e30")) == 0
    record, = sweep.read_results(tmp_path / "out" / "r.jsonl")
    assert record["val_loss"] is None and "at step" in record["error"]


def test_a_run_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(runtime.Stopped, match="meta"):
        sweep.main(sweep_args(tmp_path / "none", tmp_path))


def test_a_stopped_sweep_goes_on(corpus, tmp_path):
    """SIGTERM to the sweep alone stops its run too: no result is written; the next start resumes the run."""
    args = sweep_args(corpus, tmp_path, "--max_steps=3000", "--eval_every=0", "--save_every=20")
    process = subprocess.Popen([sys.executable, str(ROOT / "sweep.py"), *args])
    while not list((tmp_path / "runs").glob("*/ckpt.pt")):
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM and not (tmp_path / "out" / "r.jsonl").exists()
    assert sweep.main(args) == 0
    record, = sweep.read_results(tmp_path / "out" / "r.jsonl")
    assert record["steps"] == 3000


def records(label, losses, seeds=1, flops=1.0, seconds=1.0):
    return [{"label": label, "settings": {"optimizer": label, "seed": seed}, "seed": seed, "steps": n,
             "val_loss": loss + 0.1 * seed, "floor": 9.0, "flops": flops * n, "seconds": seconds * n,
             "curve": [[0, 10.0], [n, loss + 0.1 * seed]]} for n, loss in losses.items() for seed in range(seeds)]


def test_steps_that_a_recipe_needs_by_hand():
    """Between 100 steps at 4.0 and 400 at 3.0, 3.5 is reached at 200, the middle of the logarithms."""
    assert plot.steps_to([(400, 3.0), (100, 4.0)], 3.5) == pytest.approx(200)
    assert plot.steps_to([(100, 4.0), (400, 3.0)], 2.9) is None
    slow, fast = records("slow", {400: 3.45}, seeds=2), records("fast", {100: 4.0, 400: 3.0}, 2, flops=1.5, seconds=2.0)
    row, = plot.needed(slow + fast, "fast")
    shares = [200 / 400, 100 * 4 ** 0.6 / 400]
    assert row["loss"] == pytest.approx(3.5) and row["share"] == pytest.approx(sum(shares) / 2)
    assert row["share_spread"] == pytest.approx(abs(shares[0] - shares[1]) / math.sqrt(2))
    assert row["share_flops"] == pytest.approx(1.5 * row["share"])
    assert row["share_seconds"] == pytest.approx(2 * row["share"])
    with pytest.raises(ValueError, match="there are slow, fast"):
        plot.needed(slow + fast, "fats")


def test_table_by_hand():
    table = plot.table_of(records("a", {10: 3.0}, seeds=2) + records("b", {10: math.nan}), "optimizer", "schedule")
    mean, spread, count, failed = table["a"]["cosine"]
    assert (round(mean, 6), round(spread, 6), count, failed) == (3.05, round(0.1 / math.sqrt(2), 6), 2, 0)


@pytest.mark.parametrize("kind", plot.KINDS)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(kind, suffix, tmp_path):
    """Each kind is drawn, twice the same bytes, and an SVG names what it shows."""
    pytest.importorskip("matplotlib")
    lines = records("slow", {100: 3.9, 400: 3.45}, seeds=2) + records("fast", {100: 4.0, 400: 3.0}, seeds=2)
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    drawn = []
    for name in ("a", "b"):
        out = tmp_path / f"{name}.{suffix}"
        assert plot.main([str(tmp_path / "r.jsonl"), f"--kind={kind}", f"--out={out}"]) == 0
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1] and 1000 < len(drawn[0]) < 200_000
    if suffix == "svg":
        assert re.search("slow", drawn[0].decode())


def test_a_run_folder_is_drawn(corpus, tmp_path):
    pytest.importorskip("matplotlib")
    import train
    train.main([f"--data_dir={corpus}", f"--out_dir={tmp_path}/tiny", *SIZES])
    assert plot.main([f"{tmp_path}/tiny"]) == 0 and (tmp_path / "tiny.png").stat().st_size > 1000


@pytest.mark.parametrize("argv, part", [
    ([], "name a run's folder"), (["none.jsonl"], "none.jsonl is missing"), (["none"], "none is neither"),
    (["none.jsonl", "--kind=pie"], "kind='pie'"), (["none.jsonl", "--out=x.gif"], "out=x.gif")])
def test_wrong_uses_of_plot_are_named(argv, part):
    with pytest.raises((ValueError, FileNotFoundError), match=part):
        plot.main(argv)
