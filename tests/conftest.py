"""One small corpus for all tests: invented sentences, prepared once."""
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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared data folder with a vocabulary of 150 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "text.txt")
    prepare.main([f"--source={folder / 'text.txt'}", f"--out_dir={folder / 'data'}", "--vocab_size=150",
                  "--val_share=0.1", "--n_proc=1"])
    return folder / "data"
