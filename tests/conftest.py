"""Invented sentences, files of them, and one small corpus for all tests, prepared once."""
import json
import os
import random
import signal
from pathlib import Path

import pytest

import prepare
import runtime

# real tasks and texts, which are not part of the project: what needs them is skipped without them
ASSETS = Path(__file__).resolve().parents[2] / "shared" / "assets"

WORDS = ("list array value string object module function index number name file line error class method table"
         " first second next last new old small large empty sorted random common given current").split()


def sentence(rng):
    noun, other = rng.choice(WORDS), rng.choice(WORDS)
    return f"The {noun} of the {other} is the {noun}{rng.choice(['s', 'ed', ''])} that holds {rng.randrange(100)}."


def write_corpus(path, n=400, seed=0):
    """A .txt of n paragraphs."""
    rng = random.Random(seed)
    path.write_text("\n\n".join(" ".join(sentence(rng) for _ in range(rng.randrange(1, 8))) for _ in range(n)))
    return path


def texts(n, seed=0):
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(sentence(rng) for _ in range(rng.randrange(1, 5))) for i in range(n)]


def write_jsonl(path, rows, open_=open):
    with open_(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row, "url": "x"}) + "\n" for row in rows)
    return path


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "n": list(range(len(rows)))}), path)
    return path


def metrics(out_dir, *keys):
    """(step, key, value) of every number in metrics.jsonl that does not depend on the clock."""
    timed = ("seconds", "tokens_per_s", "mfu", "step")
    lines = [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], k, v) for line in lines for k, v in line.items()
            if k not in timed and (not keys or k in keys)]


def checkpoint(out_dir, name="ckpt.pt"):
    return runtime.load_checkpoint(Path(out_dir) / name)


def stop_at(at, step):
    """SIGTERM to this process in the step before step `at`, as the learning rate of that step is asked for."""
    if step == at - 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared data folder with a vocabulary of 150 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "text.txt")
    prepare.main([f"--source={folder / 'text.txt'}", f"--out_dir={folder / 'data'}", "--vocab_size=150",
                  "--val_share=0.1", "--n_proc=1"])
    return folder / "data"


def write_instructions(folder, train, test):
    """A clone of natural-instructions with invented tasks: {name: number of instances} of each split."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "splits" / "default").mkdir(parents=True)
    for split, named in (("train", train), ("test", test)):
        (folder / "splits" / "default" / f"{split}_tasks.txt").write_text("".join(f"{name}\n" for name in named))
        for name, n in named.items():
            shown = [{"input": f"shown {i}", "output": f"{i}", "explanation": "so it is"} for i in range(3)]
            content = {"Definition": [f"Say the number of {name}"], "Categories": ["Title Generation"],
                       "Positive Examples": shown, "Negative Examples": shown[:1], "Instances": [
                           {"id": f"{name}-{i}", "input": f"{name} input {i}", "output": [f"{i}", f"number {i}"]}
                           for i in range(n)]}
            (folder / "tasks" / f"{name}.json").write_text(json.dumps(content))
    return folder
