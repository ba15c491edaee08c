"""Runs on several processes: the same numbers as on one, and what happens when one of them goes."""
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_finetune
import test_train
import torch
from conftest import checkpoint, metrics
from test_finetune import pairs, predictions, start  # noqa: F401  fixtures

import data
import distributed
import files
import runtime
import train
from model import T5

ROOT = Path(__file__).resolve().parent.parent


def launch(n, script, argv):
    """Start a script n times, as torchrun does; a list of Popen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n),
              "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, str(ROOT / script), *map(str, argv)], text=True,
                             env={**common, "RANK": str(i), "LOCAL_RANK": str(i)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(n)]


def finish(processes, timeout=120):
    """[(exit code, stderr)] of each."""
    told = []
    for process in processes:
        try:
            _, error = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for p in processes:
                p.kill()
            raise
        told.append((process.returncode, error))
    return told


def train_argv(corpus, out_dir, *more):
    return [f"--data_dir={corpus}", f"--out_dir={out_dir}", *test_train.SIZES, *more]


def on_ranks(n, script, argv):
    for code, error in finish(launch(n, script, argv)):
        assert code == 0, error


def assert_same_numbers(a, b, loss=1e-5):
    """Of two runs: the same lines, learning rates equal, losses to 1e-5, norms to 1e-4 of them."""
    a, b = metrics(a), metrics(b)
    assert [line[:2] for line in a] == [line[:2] for line in b]
    for (step, key, x), (_, _, y) in zip(a, b, strict=True):
        bound = 0 if key == "lr" else loss if "loss" in key else 1e-4 * abs(x)
        assert abs(x - y) <= bound, (step, key, x, y)


@pytest.mark.parametrize("n", [2, 3])
def test_any_number_of_ranks_gives_the_same_run(corpus, tmp_path, n):
    """Seven rows, which two or three ranks share unequally, in micro-batches of two."""
    more = ["--batch_size=7", "--micro_batch_size=7", "--max_steps=20", "--eval_every=10"]
    test_train.run(corpus, tmp_path / "one", *more)
    on_ranks(n, "train.py", train_argv(corpus, tmp_path / "many", "--batch_size=7", "--micro_batch_size=1",
                                       *more[2:]))
    assert_same_numbers(tmp_path / "one", tmp_path / "many")
    a, b = (checkpoint(tmp_path / name) for name in ("one", "many"))
    for name, weight in a["model"].items():
        torch.testing.assert_close(weight, b["model"][name], atol=2e-4, rtol=0)
    assert not list((tmp_path / "many").glob("*.tmp"))


@pytest.mark.parametrize("optimizer", ["adamwscale", "adamw"])
def test_a_sharded_run_equals_one_process_and_each_goes_on_from_the_other(corpus, tmp_path, optimizer):
    more = [f"--optimizer={optimizer}", "--learning_rate=3e-3", "--schedule=constant", "--eval_every=3",
            "--weight_decay=0.1"]
    test_train.run(corpus, tmp_path / "whole", *more, "--max_steps=8")
    first, second = tmp_path / "sharded_first", tmp_path / "sharded_last"
    test_train.run(corpus, second, *more, "--max_steps=4")
    both = [launch(2, "train.py", train_argv(corpus, first, *more, "--max_steps=4", "--fsdp=True")),
            launch(3, "train.py", train_argv(corpus, second, *more, "--max_steps=8", "--fsdp=True", "--resume=True"))]
    for processes in both:
        for code, error in finish(processes):
            assert code == 0, error
    assert checkpoint(first)["shards"] == "shards-00000004" and checkpoint(first)["model"] == {}
    assert [p.name for p in sorted(first.glob("shards-*"))] == sorted({checkpoint(first, name)["shards"] for name in (
        "ckpt.pt", "best.pt")})
    weights, sizes, _ = test_train.train.load_weights(str(first))              # as --init_from does
    assert sizes["d_model"] == 32
    torch.testing.assert_close(T5.from_pretrained(first).state_dict(), weights, atol=0, rtol=0)    # the best: step 4
    test_train.run(corpus, first, *more, "--max_steps=8", "--resume=True")
    whole = metrics(tmp_path / "whole")
    for name in (first, second):
        found = metrics(name)
        assert {line[0] for line in found if line[1] == "loss"} == set(range(1, 9))
        for step, key, value in whole:
            near = [x for s, k, x in found if (s, k) == (step, key)]
            assert near and abs(near[0] - value) <= (1e-5 if "loss" in key else 1e-4 * abs(value)), (step, key)


def test_a_sharded_run_accumulates_as_one_process(corpus, tmp_path):
    """Seven rows one by one: four passes of one rank, three of the other, which makes an empty one."""
    more = ["--batch_size=7", "--max_steps=4"]
    test_train.run(corpus, tmp_path / "one", *more)
    on_ranks(2, "train.py", train_argv(corpus, tmp_path / "many", *more, "--micro_batch_size=1", "--fsdp=True"))
    assert_same_numbers(tmp_path / "one", tmp_path / "many")


def test_a_sharded_run_may_save_a_step_twice(tmp_path):
    """The first checkpoint of a step stays whole until the second one is named in its place."""
    model = torch.nn.Linear(2, 2)
    optimizer, ranks = torch.optim.SGD(model.parameters(), lr=0.1), distributed.Ranks()
    names = []
    for _ in range(2):
        names.append(distributed.save_shards(tmp_path, 5, model, optimizer, ranks)[0])
    assert names == ["shards-00000005", "shards-00000005b"]
    torch.save({"shards": names[1]}, tmp_path / "ckpt.pt")
    torch.save([1, 2], tmp_path / "other.pt")                   # not of the run
    distributed.drop_shards(tmp_path)
    assert [p.name for p in tmp_path.glob("shards-*")] == names[1:]


def test_missing_and_damaged_parts_are_told_in_one_line(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer, ranks = torch.optim.SGD(model.parameters(), lr=0.1), distributed.Ranks()
    name, sums = distributed.save_shards(tmp_path, 5, model, optimizer, ranks)
    ckpt = {"step": 5, "shards": name, "checksums": sums}
    distributed.restore(ckpt, tmp_path, model)
    part = next((tmp_path / name).glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its checksum does not hold"):
        distributed.restore(ckpt, tmp_path, model)
    part.unlink()
    with pytest.raises(FileNotFoundError, match="is missing, a part of the checkpoint"):
        distributed.restore(ckpt, tmp_path, model)


def wait_for_steps(out_dir, n, processes):
    file, until = Path(out_dir) / "metrics.jsonl", time.time() + 90
    while not file.exists() or file.read_text().count('"grad_norm"') < n:
        assert time.time() < until and all(p.poll() is None for p in processes)
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_stops_the_others_with_one_line(corpus, tmp_path, victim):
    more = ["--max_steps=100000", "--save_every=3", "--schedule=constant"]
    processes = launch(2, "train.py", train_argv(corpus, tmp_path, *more))
    wait_for_steps(tmp_path, 5, processes)
    processes[victim].kill()
    killed = time.time()
    told = finish(processes)
    assert time.time() - killed < 60
    code, error = told[1 - victim]
    assert code == 1 and "another one has gone" in error and "--resume=True" in error and "Traceback" not in error
    step = checkpoint(tmp_path)["step"]
    assert step >= 3
    more[0] = f"--max_steps={step + 2}"
    assert test_train.run(corpus, tmp_path, *more, "--resume=True") == 0       # on one process


def test_a_signal_to_one_rank_stops_all_of_them_with_a_checkpoint(corpus, tmp_path):
    more = ["--schedule=constant", "--save_every=0", "--dropout=0"]
    processes = launch(2, "train.py", train_argv(corpus, tmp_path / "cut", *more, "--max_steps=100000"))
    wait_for_steps(tmp_path / "cut", 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    told = finish(processes)
    assert [code for code, _ in told] == [128 + signal.SIGTERM] * 2, told
    step = checkpoint(tmp_path / "cut")["step"]
    assert step >= 3
    on_ranks(3, "train.py", train_argv(corpus, tmp_path / "cut", *more, f"--max_steps={step + 4}", "--resume=True"))
    test_train.run(corpus, tmp_path / "whole", *more, f"--max_steps={step + 4}")
    whole = {line[:2]: line[2] for line in metrics(tmp_path / "whole", "loss")}
    cut = {line[:2]: line[2] for line in metrics(tmp_path / "cut", "loss")}
    assert cut.keys() == whole.keys()
    assert max(abs(cut[k] - whole[k]) for k in cut) < 1e-4      # some dozens of steps add rounding up


def test_fine_tuning_and_its_scores_are_the_same_on_three_ranks(start, pairs, tmp_path):  # noqa: F811
    """The last batch of an epoch has one example, so that two ranks have none."""
    more = ["--batch_size=4", "--micro_batch_size=1", "--dropout=0", "--metric=rougeL", "--learning_rate=1e-3"]
    test_finetune.run(start, pairs, tmp_path / "one", *more)
    on_ranks(3, "finetune.py", [f"--model={start}", f"--data={pairs}", f"--out_dir={tmp_path / 'many'}",
                                *test_finetune.FAST, *more])
    assert_same_numbers(tmp_path / "one", tmp_path / "many", loss=1e-4)        # 28 steps
    assert [line[2] for line in metrics(tmp_path / "one", "lr")] == [1e-3] * 28
    assert predictions(tmp_path / "one") == predictions(tmp_path / "many")


def test_fine_tuning_a_sharded_model(start, pairs, tmp_path):  # noqa: F811
    """The 14th step has one example, so that one rank has none."""
    more = ["--batch_size=4", "--micro_batch_size=1", "--max_steps=14", "--dropout=0", "--metric=exact_match",
            "--learning_rate=1e-3"]
    test_finetune.run(start, pairs, tmp_path / "one", *more)
    on_ranks(2, "finetune.py", [f"--model={start}", f"--data={pairs}", f"--out_dir={tmp_path / 'many'}",
                                *test_finetune.FAST, *more, "--fsdp=True"])
    assert_same_numbers(tmp_path / "one", tmp_path / "many", loss=5e-5)
    assert predictions(tmp_path / "one") == predictions(tmp_path / "many")


def test_the_shares_of_ranks_are_all_of_it(monkeypatch):
    ranks = distributed.Ranks()
    for n, count in ((7, 3), (2, 2), (128, 5)):
        shares = []
        for ranks.number in range(count):
            ranks.count = count
            shares.append(ranks.share(n))
        assert shares[0][0] == 0 and shares[-1][1] == n
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
        sizes = [hi - lo for lo, hi in shares]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0


@pytest.mark.parametrize("argv, part", [
    (["--fsdp=True"], "fsdp=True shares a model out over several ranks"),
    (["--device=cuda:7"], "device=cuda:7 cannot be used here")])
def test_slips_get_one_line(corpus, tmp_path, argv, part):
    with pytest.raises(ValueError) as error:
        test_train.run(corpus, tmp_path / "run", "--max_steps=1", *argv)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_shared_is_refused():
    ranks = distributed.Ranks()
    ranks.count = 4
    cfg = runtime.RunConfig(batch_size=3)
    with pytest.raises(ValueError, match="batch_size=3 is less than the 4 ranks"):
        distributed.check_ranks(cfg, None, ranks)
    sharded = train.TrainConfig(batch_size=8, fsdp=True)
    for name in ("adafactor", "muon"):
        with pytest.raises(ValueError, match=f"optimizer={name} exclude"):
            distributed.check_ranks(sharded, train.OptimConfig(optimizer=name), ranks)
    with pytest.raises(ValueError, match="ema exclude"):
        distributed.check_ranks(train.TrainConfig(batch_size=8, fsdp=True, ema=0.9), train.OptimConfig(), ranks)
    with pytest.raises(ValueError, match="device=mps cannot be shared by 4 ranks"):
        runtime.pick_device("mps", ranks)
    with pytest.raises(files.Stopped, match="of 4 ranks another one has gone"), ranks.told():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer\nmore")
    with pytest.raises(RuntimeError, match="sizes do not match"), ranks.told():
        raise RuntimeError("sizes do not match")


@pytest.mark.parametrize("thread", [False, True])
def test_the_feed_gives_the_batches_of_each_step(thread):
    """In any order of steps, with what is no array as it came; what goes wrong in the thread is raised here."""
    made = []

    def make(step):
        made.append(step)
        if step == 4:
            raise ValueError("no batch 4")
        return [(np.full((2, 3), step), "beside", k) for k in range(2)]

    feed = runtime.Feed(make, last=6, device=torch.device("cpu"), thread=thread)
    for step in (0, 1, 2, 5, 3):
        parts = feed(step)
        assert [(p[0].tolist(), p[1], p[2]) for p in parts] == [([[step] * 3] * 2, "beside", k) for k in range(2)]
        assert len(feed.ahead) <= 1                             # what was made in vain is dropped
    assert max(made) <= 5                                       # nothing beyond the last step
    with pytest.raises(ValueError, match="no batch 4"):
        feed(4)
    feed.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_waits_for_the_gpu(corpus, tmp_path, monkeypatch):
    """From the first step after a log line to the next one nothing may ask the device for a number."""
    def learns(step, *rest, real=test_train.train.lr_at):
        torch.cuda.set_sync_debug_mode("error" if step % 5 else "default")     # the first ones compile and make states
        return real(step, *rest)

    def looks(model, real=runtime.weight_norm):
        torch.cuda.set_sync_debug_mode("default")
        return real(model)

    monkeypatch.setattr(test_train.train, "lr_at", learns)
    monkeypatch.setattr(runtime, "weight_norm", looks)
    sizes = [x for x in test_train.SIZES if not x.startswith(("--device", "--log_every"))]
    test_train.train.main([f"--data_dir={corpus}", f"--out_dir={tmp_path}", *sizes, "--log_every=5", "--max_steps=20",
                           "--micro_batch_size=3", "--device=cuda"])
    assert data.read_meta(corpus) and len(metrics(tmp_path, "loss")) == 4
