"""Settings: dataclass defaults, then config files, then --name=value; the later one wins.

A config file is plain Python, run in a namespace of its own; its names are settings. Names that begin with "_",
modules, functions and classes are the file's own business. Nothing else in this project calls exec.
"""
import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import sys
import traceback
import types
import typing
from pathlib import Path


def config_files(argv):
    """The config files named on a command line, in their order."""
    return [Path(a) for a in argv if not a.startswith("-")]


def configure(*classes, argv=None, also=""):
    """Build one instance of each dataclass from `argv` (default: the command line).

    returns   a list of instances, in the order of `classes`
    raises    ValueError or FileNotFoundError with one line that names the key, the value and what would be right

    --help prints every setting with its type, default and the comment beside it, and exits; its first line names what
    `also` may stand on the command line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    types_of, defaults = {}, {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            if field.name in types_of:
                raise AssertionError(f"two settings are called {field.name!r}")
            types_of[field.name], defaults[field.name] = field.type, field.default
    if "--help" in argv or "-h" in argv:
        print(help_text(classes, also))
        raise SystemExit(0)
    values = {}
    for arg in argv:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")         # only the first "=": a value may hold others
            check_name(name, types_of, "command line")
            if not equals:
                example = not defaults[name] if split_type(types_of[name])[0] is bool else defaults[name]
                raise ValueError(f"command line: --{name} needs a value, as in --{name}={example}")
            values[name] = from_text(name, text, types_of[name])
        elif arg.startswith("-"):
            raise ValueError(f"command line: {arg!r} is not understood; settings are written --name=value")
        else:
            for name, value in run_file(arg).items():
                check_name(name, types_of, arg)
                values[name] = from_value(name, value, types_of[name], arg)
    return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}) for cls in classes]


def run_file(path):
    """The settings that a config file assigns."""
    if not Path(path).is_file():
        hint = "" if str(path).endswith(".py") else "; settings are written --name=value"
        raise FileNotFoundError(f"config file {path} is missing{hint}")
    space = {"__file__": str(path), "__name__": "config"}
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), str(path), "exec"), space)
    except (Exception, SystemExit) as error:
        lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
        line = (error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None) or 1
        raise ValueError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    own = (types.ModuleType, types.FunctionType, type)
    return {k: v for k, v in space.items() if not k.startswith("_") and not isinstance(v, own)}


def check_name(name, known, where):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " --help lists all."
        raise ValueError(f"{where}: no setting is called {name!r}.{hint}")


def split_type(kind):
    """(plain type, may it be None) of an annotation such as `int` or `int | None`."""
    args = typing.get_args(kind)
    return (next(a for a in args if a is not type(None)), True) if args else (kind, False)


def type_name(kind):
    plain, optional = split_type(kind)
    return plain.__name__ + (" or None" if optional else "")


def from_text(name, text, kind):
    """Read what stands after --name=. Strings stay as they are; 1e3 is an int, 1 a float, true and 1 are True."""
    plain, optional = split_type(kind)
    if optional and text.lower() == "none":
        return None
    if plain is str:
        return from_value(name, text, kind, "command line")
    if plain is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if plain in (int, float) and re.fullmatch(r"[+-]?0\d[\d_]*", text):     # octal in C, an error in Python
        raise ValueError(f"command line: {name}={text}: write the number without leading zeros")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if plain is not bool and not isinstance(value, str):
        return from_value(name, value, kind, "command line")
    raise ValueError(f"command line: {name}={text} must be {article(kind)}")


def from_value(name, value, kind, where):
    """Check a Python value against the setting's type: ints pass for floats, whole floats for ints."""
    plain, optional = split_type(kind)
    if value is None and optional:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain is float and number and math.isfinite(value):
        return float(value)
    if plain is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if plain is bool and (isinstance(value, bool) or (number and value in (0, 1))):
        return bool(value)
    if plain is str and isinstance(value, (str, Path)):
        home = str(value).startswith("~/")                      # bash leaves it as it is in --name=~/path
        return os.path.expanduser(value) if home else str(value)
    raise ValueError(f"{where}: {name}={value!r} must be {article(kind)}")


def article(kind):
    name = type_name(kind)
    finite = " that is finite" if split_type(kind)[0] is float else ""
    return {"i": "an "}.get(name[0], "a ") + name + finite


def help_text(classes, also=""):
    """Every setting with type, default and the comment beside its declaration."""
    lines = [f"usage: python SCRIPT.py [config/FILE.py ...] [--name=value ...]{also}      the later one wins", ""]
    for cls in classes:
        lines.append((inspect.getdoc(cls) or cls.__name__).split("\n")[0])
        notes = {}
        for base in reversed(cls.__mro__[:-1]):             # what a class inherits comes from its bases' sources
            notes |= re.findall(r"^    (\w+): [^#\n]*#[ ]?(.*)$", inspect.getsource(base), re.M)
        for field in dataclasses.fields(cls):
            left = f"  --{field.name}={field.default}"
            lines.append(f"{left:<36} {type_name(field.type):<14} {notes.get(field.name, '')}".rstrip())
        lines.append("")
    return "\n".join(lines)
