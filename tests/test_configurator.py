"""Settings: every way of writing them that users have tried, and the one-line answers."""
from dataclasses import dataclass

import pytest

from configurator import configure


@dataclass
class Demo:
    """Settings of these tests."""
    out_dir: str | None = None      # folder
    name: str = "x"
    max_steps: int = 10             # optimizer steps
    learning_rate: float = 1e-3
    dropout: float = 0.1
    compile: bool | None = None
    eval_only: bool = False
    batch_size: int = 4
    seed: int = 0


def read(*argv):
    return configure(Demo, argv=list(argv))[0]


@pytest.mark.parametrize("arg, name, value", [
    ("--out_dir=a=b", "out_dir", "a=b"),
    ("--out_dir=2024", "out_dir", "2024"),
    ("--name=None", "name", "None"),
    ("--name=1e3", "name", "1e3"),
    ("--name=", "name", ""),
    ("--out_dir=None", "out_dir", None),
    ("--dropout=0", "dropout", 0.0),
    ("--learning_rate=1", "learning_rate", 1.0),
    ("--learning_rate=5e-3", "learning_rate", 0.005),
    ("--max_steps=1e3", "max_steps", 1000),
    ("--max_steps=2_000", "max_steps", 2000),
    ("--max_steps=-5", "max_steps", -5),
    ("--compile=true", "compile", True),
    ("--compile=1", "compile", True),
    ("--compile=False", "compile", False),
    ("--compile=0", "compile", False),
    ("--compile=none", "compile", None),
])
def test_accepted_forms(arg, name, value):
    got = getattr(read(arg), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("argv, parts", [
    (["--seed=007"], ["seed=007", "leading zeros"]),
    (["--batch_size", "8"], ["--batch_size needs a value, as in --batch_size=4"]),
    (["--eval_only"], ["--eval_only=True"]),
    (["--lr=1"], ["'lr'"]),
    (["--learning_rat=1"], ["'learning_rat'", "Did you mean 'learning_rate'?"]),
    (["--learning_rate=nan"], ["learning_rate=nan", "a float"]),
    (["--learning_rate=inf"], ["learning_rate=inf", "a float"]),
    (["--learning_rate=1e999"], ["learning_rate", "a float"]),
    (["--learning_rate=fast"], ["learning_rate=fast", "a float"]),
    (["--batch_size=1.5"], ["batch_size=1.5", "an int"]),
    (["--batch_size=True"], ["batch_size=True", "an int"]),
    (["--batch_size="], ["batch_size= ", "an int"]),
    (["--batch_size=None"], ["batch_size=None", "an int"]),
    (["--compile=maybe"], ["compile=maybe", "a bool or None"]),
    (["--compile=2"], ["compile=2", "a bool"]),
    (["-seed=1"], ["'-seed=1'", "--name=value"]),
    (["missing.py"], ["missing.py is missing"]),
    (["seed=1"], ["--name=value"]),
])
def test_slips_are_named_in_one_line(argv, parts):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read(*argv)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in parts), text


def test_a_home_folder_is_found_in_paths(tmp_path, monkeypatch):
    """bash leaves the ~ of --name=~/x as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "c.py").write_text("name = '~/y'")
    for argv, wanted in ((["--name=~/x"], "/home/me/x"), ([str(tmp_path / "c.py")], "/home/me/y"),
                         (["--name=~x"], "~x"), (["--name=a ~/x"], "a ~/x")):
        assert configure(Named, argv=argv)[0].name == wanted


@dataclass
class Named:
    """A name."""
    name: str = ""


def test_later_wins(tmp_path):
    (tmp_path / "a.py").write_text("import math\n_half = 2\nmax_steps = 8 // _half\nbatch_size = 1e1\n")
    (tmp_path / "b.py").write_text("max_steps = 7\n")
    a, b = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    assert (read(a).max_steps, read(a, b).max_steps, read(b, a).max_steps) == (4, 7, 4)
    assert read("--max_steps=1", a).max_steps == 4
    assert read(a, "--max_steps=1").max_steps == 1
    assert read(a).batch_size == 10 and type(read(a).batch_size) is int


@pytest.mark.parametrize("text, parts", [
    ("d_modle = 1", ["no setting is called 'd_modle'"]),
    ("batch_size = '8'", ["batch_size='8'", "an int"]),
    ("dropout = float('nan')", ["dropout=nan", "a float"]),
    ("seed = True", ["seed=True", "an int"]),
    ("out_dir = 3", ["out_dir=3", "a str or None"]),
    ("a = (", ["c.py:1: SyntaxError"]),
    ("seed = 1\nbatch_size = 1 / 0", ["c.py:2: ZeroDivisionError"]),
    ("seed = 1\nimport json\njson.loads('')", ["c.py:3: JSONDecodeError"]),
    ("seed = 1\nraise SystemExit(0)", ["c.py:2: SystemExit"]),
    ("seed = 1\0", ["c.py:1: "]),
    ("seed = 1  # \udcff", ["c.py:1: UnicodeDecodeError"]),
])
def test_slips_in_a_config_file_name_the_file(tmp_path, text, parts):
    path = tmp_path / "c.py"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError) as error:
        read(str(path))
    assert "c.py" in str(error.value) and all(part in str(error.value) for part in parts), error.value


def test_help_lists_every_setting_with_default_and_note(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--max_steps=10" in text and "optimizer steps" in text and "--eval_only=False" in text
