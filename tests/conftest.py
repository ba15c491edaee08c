"""Invented sentences, files of them, and one small corpus for all tests, prepared once."""
import json
import random

import pytest

import prepare

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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared data folder with a vocabulary of 150 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "text.txt")
    prepare.main([f"--source={folder / 'text.txt'}", f"--out_dir={folder / 'data'}", "--vocab_size=150",
                  "--val_share=0.1", "--n_proc=1"])
    return folder / "data"
