"""Each part of the benchmark on a very small model; its arithmetic by hand."""
import importlib.util
import json

import pytest
import torch

import bench
import data
from bench import BenchConfig, Limits, Setup, alternate
from model import T5Config
from optim import OptimConfig

CPU = torch.device("cpu")
SIZES = dict(d_model=32, d_kv=8, d_ff=48, n_head=2, n_layer=1, vocab_size=200)
TINY = [*(f"--{name}={value}" for name, value in SIZES.items()), "--input_length=16", "--repeats=1",
        "--prepare_repeats=1", "--peak_size=128", "--file_gb=0.02", "--batch_size=4", "--device=cpu"]
HF = importlib.util.find_spec("transformers") is not None
CT2 = importlib.util.find_spec("ctranslate2") is not None


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads only wait for each other at such sizes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures(capsys, *argv, code=0):
    """{part: {row: figures}} of a run with --json=True, whose standard output is JSON and nothing else."""
    assert bench.main([*TINY, *argv, "--json=True"]) == code
    return json.loads(capsys.readouterr().out)


def setup(**settings):
    cfg = BenchConfig(repeats=1, peak_size=64, batch_size=4, device="cpu", **settings)
    return Setup(cfg, OptimConfig(), T5Config(**SIZES), data.DataConfig(input_length=16), data.span_plan(16), CPU,
                 torch.float32)


def test_contestants_take_turns_and_the_first_round_does_not_count():
    calls = []

    def laps():
        calls.append("b")
        yield "first"
        calls.append("-")

    seconds = alternate({"a": lambda: calls.append("a"), "b": laps}, 2, CPU)
    assert "".join(calls) == "ab-" * 3
    assert set(seconds) == {"a", "b", "b: first"} and 0 < seconds["b: first"] <= seconds["b"]


def limits():
    found = Limits(setup())
    found.work = {"torch.mm": 2e9, "oneDNN": 2e9, "copy": 4e9, "in place": 4e9}
    seconds = {"torch.mm": 0.02, "oneDNN": 0.01, "copy": 0.2, "in place": 0.1, "ours": 1.0}
    rows = dict(found.take(seconds))
    assert seconds == {"ours": 1.0}
    assert [row.get("gflop_per_s", row.get("gb_per_s")) for row in rows.values()] == [100, 200, 20, 40]
    return found


def test_shares_of_the_peaks_by_hand():
    """100 GFLOP in 2 s are 50 GFLOP/s: half of torch.mm's 100, a quarter of the best, 200."""
    assert limits().of_products(100e9, 2.0) == {
        "gflop_per_s": 50, "share_of_torch_mm_peak": 0.5, "share_of_best_peak": 0.25}
    on_gpu = limits()
    on_gpu.products["data sheet"] = 1000e9
    assert on_gpu.of_products(100e9, 2.0)["share_of_best_peak"] == 0.05


def test_share_of_the_memory_limit_by_hand():
    """A billion parameters are 28 GB to move; in 1.4 s that is 20 GB/s, all of what a copy
    reaches, half of what work in place does."""
    found = limits().of_memory(10 ** 9, 1.4)
    assert found == pytest.approx({"gb_per_s": 20, "share_of_copy": 1, "share_of_memory_limit": 0.5})


def test_the_loops_need_by_hand():
    """Four rows in 2 s are two rows a second, a batch of 128 in 64 s."""
    cfg = BenchConfig(batch_size=128)
    assert bench.data_need(Setup(cfg, None, None, None, None, CPU, torch.float32), 2.0) == pytest.approx(1 / 64)


def test_flops_of_the_encoder_by_hand():
    """One layer, 3 rows of 5: 2 for each of 4 x 32 x 16 + 3 x 32 x 48 weights and token, 4 x 16 for each pair."""
    assert bench.encoder_flops(T5Config(**SIZES), 3, 5) == 3 * (5 * 2 * (2048 + 4608) + 4 * 16 * 25)


def test_the_limits_are_measured():
    found = Limits(setup())
    rows = dict(found.take(alternate(found.calls, 1, CPU)))
    assert list(rows) == [f"limit: {name}" for name in found.calls]
    assert {"torch.mm", "copy", "in place"} <= set(found.calls) <= {"torch.mm", "oneDNN", "copy", "in place"}
    assert all(value > 0 for row in rows.values() for value in row.values())


def test_step(capsys):
    ballast = torch.ones(1 << 29)           # 2 GB: a child's getrusage would begin with them on Linux
    found = figures(capsys, "--what=step", *["--peer=hf"] * HF)
    del ballast
    assert {"processor", "threads", "torch", "commit", "settings"} <= set(found["machine"])
    step = found["step"]
    whole = step["ours: whole step"]
    assert {"seconds", "tokens_per_s", "share_of_torch_mm_peak", "share_of_best_peak", "mfu"} <= set(whole)
    assert whole["tokens_per_s"] == pytest.approx(4 * (16 + 5) / whole["seconds"])
    laps = [step[f"ours: {part}"] for part in ("forward", "backward", "optimizer, clipping")]
    assert sum(lap["share_of_step"] for lap in laps) == pytest.approx(1, abs=0.02)
    for name in ["ours"] + ["hf"] * HF:
        memory = step[f"{name}: highest memory"]
        assert 0.05 < memory["gb_before_the_model"] <= memory["gb_forward_backward"] <= memory["gb_whole_step"] < 2
        assert step[f"{name}: whole step"]["times_ours"] > 0


def test_optim(capsys):
    found = figures(capsys, "--what=optim", "--optimizer=adamw_hf")["optim"]
    names = [name for name in found if not name.startswith("limit")]
    assert names == ["adamw_hf", "adamwscale", "muon", "adafactor", "adamw", "torch fused AdamW"]
    assert found["torch fused AdamW"]["times_torch_adamw"] == 1
    assert all(found[name]["share_of_memory_limit"] > 0 for name in names)


def test_data(capsys):
    found = figures(capsys, "--what=data")["data"]
    for name in ("batches, file of 0.1 GB", "batches, file of 0.02 GB", "span corruption"):
        assert found[name]["batches_per_s"] == pytest.approx(
            found[name]["times_need"] * found["need of a step of 4 rows"]["batches_per_s"])
    assert found["file of 0.02 GB: opening"]["seconds"] < 1
    assert abs(found["1,000 batches of it"]["private_mb_more"]) < 20


def test_prepare(capsys, corpus):
    found = figures(capsys, "--what=prepare", f"--text={corpus.parent / 'text.txt'}", f"--vocab={corpus}")["prepare"]
    alone, one, two = found.values()
    assert list(found)[1:] == ["prepare.py, 1 worker process", "prepare.py, 2 worker processes"]
    assert one["mb"] == two["mb"] == pytest.approx((corpus.parent / "text.txt").stat().st_size / 1e6, rel=0.05)
    assert two["share_of_limit"] == pytest.approx(two["mb_per_s"] / alone["mb_per_s"] / 2)
    assert two["times_one_process"] == pytest.approx(two["mb_per_s"] / one["mb_per_s"])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_compares_ids(capsys, num_beams):
    peers = ["hf"] * HF + ["ct2"] * (CT2 and num_beams == 1)    # its converter's scores are wrong for beams: README
    peer = f"--peer={','.join(peers)}" if peers else "--peer=None"
    found = figures(capsys, "--what=generate", "--batch_sizes=1,2", "--new_tokens=5", f"--num_beams={num_beams}", peer,
                    "--vocab_size=640", "--n_layer=2")["generate"]
    assert found["2 x 16 tokens, encoder"]["share_of_best_peak"] > 0
    rows = {name: row for name, row in found.items() if " ids, " in name}
    assert list(rows) == [f"{n} x 5 ids, {how}: {name}" for n in (1, 2) for how in dict.fromkeys(
        ["greedy", "greedy" if num_beams == 1 else "3 beams"]) for name in ["ours", *peers]]
    assert all(row["share_of_rows_as_ours"] == 1 for row in rows.values())


def test_start(capsys, corpus):
    found = figures(capsys, "--what=start", f"--tiny_data={corpus}")["start"]
    seconds = {name: row["seconds"] for name, row in found.items()}
    assert 0 < seconds["start to first step without evaluation"] < seconds["start to first step"]
    assert seconds["python -c 'import train'"] < seconds["start to first step"]
    with pytest.raises(ValueError, match=r"did not reach its first step: error: .*meta\.json is missing"):
        bench.main([*TINY, "--what=start", "--tiny_data=not/there"])


def test_variants(capsys):
    names = {name: (dtype, compile, attention) for name, dtype, compile, attention in bench.variants(CPU)}
    assert names["bf16, sdpa, compiled"] == (torch.bfloat16, True, "sdpa")
    assert names["float32, eager"] == (torch.float32, False, "eager")
    assert not any("flex" in name for name in names)
    assert "TF32, eager" in {name for name, *_ in bench.variants(torch.device("cuda"))}
    found = figures(capsys, "--what=variants")["variants"]
    assert set(found) == {name for name in names if "compiled" not in name}
    assert all(row["rows"] == 4 and row["seconds"] > 0 and row["share_of_best_peak"] > 0 for row in found.values())
    late = figures(capsys, "--what=variants", "--minutes=0", code=1)["variants"]
    assert all("left out" in row["error"] for row in late.values())


def test_the_list_for_a_gpu_takes_what_memory_allows(monkeypatch):
    """The whole step of four rows, in micro-batches of one after two refusals; the variants go on with one."""
    measure = bench.measure

    def small_memory(setup, model, module, rows, batch_size):
        if rows > 1:
            raise torch.cuda.OutOfMemoryError
        return measure(setup, model, module, rows, batch_size)

    monkeypatch.setattr(bench, "measure", small_memory)
    (name, whole), *rest = bench.bench_gpu(setup(), compile=False)
    assert name == "whole step of 4 rows, bf16, sdpa" and (whole["rows"], whole["rows_asked"]) == (1, 4)
    assert whole["times_nanot5_seconds"] == pytest.approx(whole["seconds"] / 0.56)
    monkeypatch.setattr(bench, "measure", lambda *args: 1 / 0)
    _, first = next(bench.bench_gpu(setup(), compile=False))
    assert first == {"error": "ZeroDivisionError: division by zero"}
    assert [name for name, _ in rest] == [name for name, *_ in bench.variants(CPU, False)]
    assert all(row["rows"] == row["rows_asked"] == 1 for _, row in rest)


def test_what_fails_does_not_lose_the_rest(capsys, monkeypatch):
    monkeypatch.setattr(bench, "PACKAGES", {"hf": "no_such_package", "ct2": "no_such_package"})
    monkeypatch.setattr(bench, "PARTS", ("generate", "prepare", "optim", "variants", "gpu"))
    found = figures(capsys, "--what=all", "--peer=hf,ct2", "--text=not/there.txt", "--batch_sizes=2", code=1)
    for peer in ("hf", "ct2"):
        wanted = f"ValueError: peer={peer} needs a package: pip install no_such_package"
        assert found["generate"][f"peer {peer}"] == {"error": wanted}
    assert found["generate"]["2 x 64 ids, greedy: ours"]["tokens_per_s"] > 0 and "adamwscale" in found["optim"]
    assert "not/there.txt" in found["prepare"]["failed"]["error"]
    with pytest.raises(ValueError, match=r"^peer=hf needs a package: pip install no_such_package$"):
        bench.main([*TINY, "--what=generate", "--peer=hf"])


@pytest.mark.parametrize("argv, message", [
    (["--what=speed"], "what='speed' is unknown; there are step, optim,"),
    (["--peer=tf"], "peer='tf' is unknown; what=step has hf"), (["--peer=ct2"], "peer='ct2' is unknown"),
    (["--what=data", "--peer=hf"], "what=data has none"), (["--repeats=0"], "repeats=0 must be at least 1"),
    (["--batch_sizes=1,x"], "batch_sizes='1,x' must be numbers with commas between"),
    (["--batch_size=2", "--micro_batch_size=3"], r"micro_batch_size=3 must lie in \[1, 2\]"),
    (["--file_gb=0"], "file_gb=0.0"), (["--what=gpu", "--device=cpu"], "what=gpu needs a GPU with CUDA"),
])
def test_a_wrong_setting_is_one_line(argv, message):
    with pytest.raises(ValueError, match=message) as error:
        bench.main(argv)
    assert "\n" not in str(error.value)


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name}=" in text for name in BenchConfig.__dataclass_fields__)
