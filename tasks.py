"""Examples to fine-tune on and to score: pairs of texts from files, Super-Natural-Instructions, prompts, batches.

What is drawn (the reference that is learnt, the format of a prompt, the order of an epoch) is a pure function of
(seed, epoch, example), so that a resumed run needs nothing but its step. Needs numpy alone.
"""
import csv
import gzip
import hashlib
import io
import json
import math
import string
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import EOS, PAD, key_of, pad_rows

UNK = 2                             # SentencePiece's id of what the vocabulary lacks
IGNORE = -100                       # a target id that costs nothing
FIXED = 2023                        # in place of a seed, for choices that are the same in every run
CUTS = ("examples", "definition", "instance", "source", "target")    # what a limit can take away


@dataclass
class TaskConfig:
    """What is learnt and scored: files of pairs, or a clone of natural-instructions."""
    data: str | None = None         # file or folder of pairs, a clone of natural-instructions, or dates (made here)
    val: str | None = None          # file of validation pairs
    test: str | None = None         # file of test pairs
    val_share: float = 0.0          # share of the training examples held out, by their input, if there are no others
    input_key: str = "input"        # field or column of the input
    target_key: str = "target"      # field or column of the target; in JSON it may hold a list of references
    header: bool = True             # .csv, .tsv: the first row names the columns; False: the keys are numbers from 1
    prefix: str = ""                # written before each input of a pair
    skip_bad: bool = False          # leave out rows that cannot be used, and say how many, instead of stopping
    max_source_length: int = 1024   # ids, EOS included
    max_target_length: int = 128    # ids, EOS included; also the most that is generated
    eos_on_cut_target: bool = False     # close a cut target with EOS (nanoT5); else it does not teach where to stop
    split: str = "default"          # natural-instructions: folder in splits/ with train_tasks.txt and test_tasks.txt
    allow_missing: bool = False     # go on without the files of listed tasks that are not there
    max_num_instances_per_task: int = 100       # drawn from each training task
    max_num_instances_per_eval_task: int = 100  # the first ones of each test task
    add_task_name: bool = False     # before all else in a prompt
    add_task_definition: bool = True    # before the examples
    num_pos_examples: int = 2       # most positive examples in a prompt
    num_neg_examples: int = 0       # most negative ones
    add_explanation: bool = False   # of each example
    tk_instruct: bool = False       # training prompts: each of Tk-Instruct's five formats as likely as the others
    prompt_style: str = "keep_instance"     # a prompt too long loses its definition's end; nanot5: its right end

    def __post_init__(self):
        for name, least in (("max_source_length", 8), ("max_target_length", 2), ("max_num_instances_per_task", 1),
                            ("max_num_instances_per_eval_task", 1), ("num_pos_examples", 0), ("num_neg_examples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share={self.val_share} must lie in [0, 1)")
        if self.prompt_style not in ("keep_instance", "nanot5"):
            raise ValueError(f"prompt_style={self.prompt_style!r} is unknown; there are keep_instance and nanot5")


@dataclass
class Task:
    """What the instances of one task of Super-Natural-Instructions share."""
    name: str
    category: str                   # as Tk-Instruct names it: textual_entailment
    definition: str
    positive: list                  # of dicts with input, output and perhaps explanation
    negative: list


@dataclass
class Example:
    id: str
    input: str
    references: list                # of texts: any of them is right
    task: Task | None = None        # None: a pair


# --- pairs -----------------------------------------------------------------------------------------------------------

# settings of the one kind of data that mean nothing to the other, and so are refused there
FOR_PAIRS = ("val", "test", "input_key", "target_key", "header", "prefix", "skip_bad")
FOR_INSTRUCTIONS = ("split", "allow_missing", "add_task_name", "num_neg_examples", "add_explanation", "tk_instruct")
# what a prompt shows beside the instance, in Tk-Instruct's words
SHOWN = ("add_task_name", "add_task_definition", "num_pos_examples", "num_neg_examples", "add_explanation")

ENDINGS = (".jsonl", ".json", ".csv", ".tsv")
SPLITS = {"train": ("train", "training"), "val": ("validation", "valid", "val", "dev", "devset"), "test": ("test",)}


class BadRow(ValueError):
    pass


def file_kind(path):
    """The ending that tells how a file is read, with or without .gz behind it."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_text(path):
    """The text of a file in UTF-8, unpacked if it is a .gz."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_pairs(path, cfg):
    """The examples of a file, and a line for each row that cannot be used; such rows stop the reading unless skip_bad.

    raises  ValueError or FileNotFoundError that names file, row and fault
    """
    path = Path(path).expanduser()
    kind = file_kind(path)
    if kind not in ENDINGS:
        raise ValueError(f"{path}: pairs are read from {', '.join(ENDINGS)}, each also with .gz")
    text, examples, bad = read_text(path), [], []
    for number, row in (json_rows(path, text) if kind.startswith(".json") else table_rows(path, text, kind, cfg)):
        try:
            if isinstance(row, BadRow):
                raise row
            given, references = row_texts(row, cfg)
            name = f"{path.name}:{number}" if row.get("id") is None else str(row["id"])
            examples.append(Example(name, given, references))
        except BadRow as error:
            bad.append(f"{path}:{number}: {error}")
    if bad and not cfg.skip_bad:
        more = f" (and {len(bad) - 1:,} more rows)" if len(bad) > 1 else ""
        raise ValueError(f"{bad[0]}{more}; --skip_bad=True leaves such rows out")
    if not examples:
        raise ValueError(f"{path} holds no pairs")
    return examples, bad


def json_rows(path, text):
    """(line, object or BadRow) of JSON lines, or of one list of objects."""
    if text.lstrip().startswith("["):
        try:
            yield from enumerate(json.loads(text), 1)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} begins as a list but is not JSON ({error})") from None
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, BadRow(f"not JSON, one object a line ({error})")


LONG_ROW = 100                      # lines of a .csv's row from which on an unclosed quote is suspected


def table_rows(path, text, kind, cfg):
    """(first line, dict or BadRow) of each row of a .csv, or of a .tsv, which knows no quotes."""
    csv.field_size_limit(1 << 30)
    quotes = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {"strict": True}
    rows = csv.reader(io.StringIO(text, newline=""), **quotes)
    names, keys = None, (cfg.input_key, cfg.target_key)
    while True:
        start = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise ValueError(f"{path}:{start}: a quote that opens in this row is never closed, to the end of the"
                                 f" file") from None
            yield start, BadRow(f"not a row of a {kind} file ({error})")
            continue
        if not row:
            continue
        if rows.line_num - start >= LONG_ROW:
            print(f"warning: {path}:{start}: a row of {rows.line_num - start + 1:,} lines; is a quote not closed?")
        if names is None:
            names = row if cfg.header else [str(n) for n in range(1, len(row) + 1)]
            lacking = [key for key in keys if key not in names]
            if lacking:
                hint = "" if not cfg.header else ("; name them with --input_key and --target_key, or without a row of"
                                                  " names --header=False and the columns' numbers")
                raise ValueError(f"{path} has the columns {', '.join(names)}, not {' and '.join(lacking)}{hint}")
            if any(names.count(key) > 1 for key in keys):
                raise ValueError(f"{path} has two columns of one name among {', '.join(names)}")
            if cfg.header:
                continue
        if len(row) != len(names):
            yield start, BadRow(f"{len(row)} columns instead of {len(names)}")
        else:
            yield start, dict(zip(names, row, strict=True))


def row_texts(row, cfg):
    """(input, references) of a row; BadRow that says what is wrong with it."""
    if not isinstance(row, dict):
        raise BadRow(f"not an object but {type(row).__name__}")

    def plain(value, key):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise BadRow(f"{key} is {type(value).__name__}, not text")
        if not value.strip():
            raise BadRow(f"{key} is empty")
        return value

    for key in (cfg.input_key, cfg.target_key):
        if key not in row:
            raise BadRow(f"there is no {key!r}, only {', '.join(map(repr, row))}")
    targets = row[cfg.target_key]
    targets = targets if isinstance(targets, list) else [targets]
    if not targets:
        raise BadRow(f"{cfg.target_key} is an empty list")
    return plain(row[cfg.input_key], cfg.input_key), [plain(text, cfg.target_key) for text in targets]


def split_files(folder):
    """{split: file} of a folder with train.jsonl, validation.csv and the like."""
    found = {}
    for path in sorted(folder.iterdir()):
        stem = path.name.lower().partition(".")[0]
        for split, names in SPLITS.items():
            if stem in names and file_kind(path) in ENDINGS:
                if split in found:
                    raise ValueError(f"{folder} has two files for {split}: {found[split].name} and {path.name}")
                found[split] = path
    if not found:
        raise ValueError(f"{folder} is no clone of natural-instructions (tasks/ and splits/), nor does it hold"
                         f" train, validation or test as {', '.join(ENDINGS)}")
    return found


def merged(examples):
    """Pairs of the same input as one example with all their references, each once; tasks keep their instances."""
    by_input = {}
    for e in examples:
        by_input.setdefault((e.input, e.id if e.task else None), []).append(e)
    return [Example(same[0].id, same[0].input, list(dict.fromkeys(text for e in same for text in e.references)),
                    same[0].task) for same in by_input.values()]


def folded(text):
    """A text as it is compared: words in lower case, parted by single blanks."""
    return " ".join(text.lower().split())


# --- Super-Natural-Instructions --------------------------------------------------------------------------------------

def read_task(path):
    """(Task, its instances) of a task file in the published layout of allenai/natural-instructions."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        definition = content["Definition"]
        definition = definition[0] if isinstance(definition, list) else definition
        category = content["Categories"]
        category = "_".join((category[0] if isinstance(category, list) else category).lower().split())
        shown = [[{k: e[k] for k in ("input", "output", "explanation") if isinstance(e.get(k), str)}
                  for e in content.get(f"{kind} Examples") or []] for kind in ("Positive", "Negative")]
        if not all(e.keys() >= {"input", "output"} for e in shown[0] + shown[1]) or not isinstance(definition, str):
            raise ValueError("a definition or example is not text")
        task, instances = Task(path.stem, category, definition, *shown), []
        for number, instance in enumerate(content["Instances"]):
            outputs = instance["output"] if isinstance(instance["output"], list) else [instance["output"]]
            if not outputs or not all(isinstance(text, str) for text in [instance["input"], *outputs]):
                raise ValueError(f"instance {number} has no input and output of text")
            name = str(instance.get("id", f"{path.stem}-{number}"))
            instances.append(Example(name, instance["input"], outputs, task))
        if not instances:
            raise ValueError("it has no instances")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a task of natural-instructions: {what}") from None
    return task, instances


def read_instructions(folder, cfg, seed):
    """{train, test: examples} of a clone of natural-instructions, by its lists of tasks: of a training task instances
    drawn by the seed, of a test task the first ones, as in Tk-Instruct."""
    sets, listed, missing = {"train": [], "test": []}, {}, []
    for split in sets:
        path = folder / "splits" / cfg.split / f"{split}_tasks.txt"
        if not path.is_file():
            known = sorted(p.name for p in (folder / "splits").iterdir() if p.is_dir())
            raise FileNotFoundError(f"{path} is missing; --split can be {', '.join(known)}")
        listed[split] = list(dict.fromkeys(path.read_text(encoding="utf-8").split()))
        missing += [name for name in listed[split] if not (folder / "tasks" / f"{name}.json").is_file()]
    both = sorted(set(listed["train"]) & set(listed["test"]))
    if both:
        raise ValueError(f"{folder}/splits/{cfg.split}: {both[0]} is listed for training and for testing")
    if missing:
        n = sum(map(len, listed.values()))
        told = f"{len(missing):,} of the {n:,} tasks listed in splits/{cfg.split} have no file in {folder}/tasks"
        if not cfg.allow_missing:
            raise FileNotFoundError(f"{told}, {missing[0]} first; --allow_missing=True goes on without them")
        print(f"warning: {told}")
    for split, examples in sets.items():
        for name in listed[split]:
            if name in missing:
                continue
            _, instances = read_task(folder / "tasks" / f"{name}.json")
            if split == "train" and len(instances) > cfg.max_num_instances_per_task:
                keys = key_of(seed, 1, text_hash(name), np.arange(len(instances)))
                drawn = np.argsort(keys, kind="stable")[:cfg.max_num_instances_per_task]
                instances = [instances[i] for i in sorted(drawn)]
            examples += instances if split == "train" else instances[:cfg.max_num_instances_per_eval_task]
    return sets


def text_hash(text):
    """A number in [0, 2^64) that the text alone decides."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# --- a task made on the spot -----------------------------------------------------------------------------------------

MONTHS = ("January February March April May June July August September October November December").split()


def dates(n_train=20_000, n_held_out=500):
    """{train, val, test: examples} of dates as people write them, to be written as 1998-05-14. A date stands in one
    split only, in whatever form."""
    sets = {"train": [], "val": [], "test": []}
    sizes = {"train": n_train, "val": n_held_out, "test": n_held_out}
    number, known = 0, set()
    while any(len(sets[split]) < size for split, size in sizes.items()):
        year, month, day, form = (int(key_of(FIXED, number, i)[0] % n) for i, n in enumerate((200, 12, 28, 6)))
        year, day, number = 1900 + year, day + 1, number + 1
        split = ("val", "test", *["train"] * 8)[text_hash(f"{year} {month} {day}") % 10]
        if len(sets[split]) == sizes[split] or (year, month, day, form) in known:
            continue
        known.add((year, month, day, form))
        name, short = MONTHS[month], MONTHS[month][:3]
        th = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        text = (f"{day} {name} {year}", f"{name} {day}, {year}", f"the {day}{th} of {name}, {year}",
                f"{short} {day}{th} {year}", f"{day}.{month + 1}.{year}", f"{year}, {day} {short}")[form]
        sets[split].append(Example(f"{split}-{len(sets[split])}", text, [f"{year}-{month + 1:02d}-{day:02d}"]))
    return sets


# --- all of it -------------------------------------------------------------------------------------------------------

def read_sets(cfg, seed, eval_only):
    """({train, val, test: examples}, warnings) of the files that the settings name."""
    sets, told = {"train": [], "val": [], "test": []}, []
    folder = Path(cfg.data).expanduser() if cfg.data else None
    is_clone = folder is not None and (folder / "tasks").is_dir() and (folder / "splits").is_dir()
    is_own = is_clone or cfg.data == "dates"
    for name in FOR_PAIRS if is_own else FOR_INSTRUCTIONS:
        if getattr(cfg, name) != getattr(TaskConfig, name):
            what = "files of pairs" if is_own else "a clone of natural-instructions"
            raise ValueError(f"{name}={getattr(cfg, name)} is for {what}, which {cfg.data or cfg.test} is not")
    if is_own:
        return sets | (read_instructions(folder, cfg, seed) if is_clone else dates()), told
    files = {"val": cfg.val, "test": cfg.test}
    if folder and folder.is_dir():
        files = split_files(folder) | {split: path for split, path in files.items() if path}
    elif folder:
        files["test" if eval_only and not cfg.test else "train"] = folder
    if eval_only:
        files = {"test": files.get("test") or files.get("val")}
        if not files["test"]:
            raise ValueError(f"{cfg.data} has neither a test nor a validation file; name one with --test")
        told.append(f"scored: {files['test']}")
    for split, path in files.items():
        if path:
            sets[split], bad = read_pairs(path, cfg)
            told += [f"warning: {len(bad):,} rows of {path} are left out, {bad[0]}"] if bad else []
    return sets, told


def load_examples(cfg, seed, eval_only=False):
    """({train, val, test: examples}, lines to print about them); with eval_only what is not for scoring may lack."""
    if cfg.data is None and not (eval_only and cfg.test):
        raise ValueError("no data is given; --data=FILE or FOLDER of pairs, a clone of natural-instructions, or dates")
    sets, told = read_sets(cfg, seed, eval_only)
    if cfg.val_share and not sets["val"]:                       # by the input, so that its copies stay on one side
        parts = {"train": [], "val": []}
        for e in sets["train"]:
            parts["val" if text_hash(folded(e.input)) < cfg.val_share * 2 ** 64 else "train"].append(e)
        sets |= parts
    sets |= {split: merged(sets[split]) for split in ("val", "test")}
    if not eval_only and not sets["train"]:
        raise ValueError(f"{cfg.data} leaves no training examples")
    for split, examples in sets.items():
        if not examples:
            continue
        known = set()
        for e in examples:                                      # predictions are known by their ids
            own, n = e.id, 1
            while e.id in known:
                n += 1
                e.id = f"{own} ({n})"
            known.add(e.id)
        n_task = len({e.task.name for e in examples if e.task})
        several = sum(len(e.references) > 1 for e in examples)
        told.append(f"{split + ':':<7}{len(examples):,} examples{f' of {n_task:,} tasks' if n_task else ''}"
                    f"{f', {several:,} with several references' if several else ''}")
    return sets, told + leakage(sets)


def leakage(sets):
    """Lines on how many inputs of a held-out split are in another split as well, compared as `folded`."""
    told = []
    for ours, theirs, name in (("val", "train", "training"), ("test", "train", "training"),
                               ("test", "val", "validation")):
        known = {folded(e.input): e for e in reversed(sets[theirs])}
        twins = [(e, known[folded(e.input)]) for e in sets[ours] if folded(e.input) in known]
        n = len(sets[ours])
        if twins:
            pairs = Counter((e.task.name, twin.task.name) for e, twin in twins if e.task).most_common(3)
            told.append(f"warning: {len(twins):,} of the {n:,} {ours} inputs ({len(twins) / n:.1%}) are {name}"
                        f" inputs too{''.join(f'; {k} of {a} are in {b}' for (a, b), k in pairs)}")
        elif n and sets[theirs]:
            told.append(f"{ours + ':':<7}none of its inputs is a {name} input")
    return told


# --- prompts ---------------------------------------------------------------------------------------------------------

# tk_instruct: definition alone; examples alone; definition and examples; also wrong ones; also why they are right
TK_INSTRUCT = [TaskConfig(num_pos_examples=0), TaskConfig(add_task_definition=False), TaskConfig(),
               TaskConfig(num_neg_examples=2), TaskConfig(add_explanation=True)]


def line(label, text):
    """`Label: text` with a full stop where no punctuation ends it, and the line's end."""
    written = f"{label}: {text.strip()}"
    return written + ("" if written[-1] in string.punctuation else ".") + "\n"


def shown_example(kind, number, example, with_explanation):
    text = f" {kind} Example {number} -\n" + line("Input", example["input"]) + line(" Output", example["output"])
    if with_explanation and "explanation" in example:
        text += line(" Explanation", example["explanation"])
    return text + "\n"


def instance_text(text):
    return "Now complete the following example -\n" + line("Input", text) + "Output: "


def prompt(example, form, fits, keep_instance=True):
    """The source text of an instance: name, definition, positive and negative examples as long as the whole fits,
    and the instance.

    form     the TaskConfig that says which of these
    fits     whether a text is within the limit
    returns  text, what the limit took away ("" or one of CUTS)

    The text is that of Tk-Instruct's collator, which nanoT5 uses: tests/test_tasks.py. If even the definition and the
    instance do not fit, the text comes back too long, to be cut on the right as there; with keep_instance the
    definition loses words from its end, then the instance's input does.
    """
    task, instance = example.task, instance_text(example.input)
    name = f"{task.name}. " if form.add_task_name else ""
    definition = line("Definition", task.definition) + "\n" if form.add_task_definition else ""
    shown = [[shown_example(kind, number, e, form.add_explanation) for number, e in enumerate(examples[:n], 1)]
             for kind, examples, n in (("Positive", task.positive, form.num_pos_examples),
                                       ("Negative", task.negative, form.num_neg_examples))]
    whole = "".join([name, definition, *shown[0], *shown[1], instance])
    if fits(whole):
        return whole, ""
    kept = ""
    for texts in shown:
        for text in texts:
            if not fits(name + definition + kept + text + instance):
                break
            kept += text
    text = name + definition + kept + instance
    if fits(text) or not keep_instance:
        return text, "examples" if fits(text) else "instance"

    def longest(words, build):
        """build() of as many first words as fit, at least none."""
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(build(words[:middle])) else (low, middle - 1)
        return build(words[:low])

    text = longest(task.definition.split() if definition else [],
                   lambda words: name + (line("Definition", " ".join(words)) + "\n" if words else "") + instance)
    if fits(text):
        return text, "definition"
    return longest(example.input.split(), lambda words: instance_text(" ".join(words))), "instance"


# --- rows and batches ------------------------------------------------------------------------------------------------

def progress(rows, title):
    """The rows, with a bar on a terminal where there are many."""
    if len(rows) < 5_000:
        return rows
    from tqdm import tqdm
    return tqdm(rows, desc=title, unit=" examples", leave=False, disable=None)


def one_of(example, seed=FIXED, epoch=0):
    """The place of a reference at random: of the one that is learnt, or that scores with one reference take."""
    return int(key_of(seed, 3, epoch, text_hash(example.input))[0] % len(example.references))


class Rows:
    """The ids of examples: `epoch(n)` gives (sources, targets), two lists of int32 arrays, closed by EOS.

    In training the reference that is learnt, and with tk_instruct the prompt's format, are drawn anew each epoch; at
    evaluation they are the same in every run. `cuts` counts what the limits took away in the last epoch asked for.
    """

    def __init__(self, examples, tokenizer, cfg, seed=FIXED, training=False):
        self.examples, self.tokenizer, self.cfg = examples, tokenizer, cfg
        self.seed, self.training = seed, training
        self.drawn = training and (cfg.tk_instruct or any(len(e.references) > 1 for e in examples))
        self.number = None

    def __len__(self):
        return len(self.examples)

    def source_text(self, i, epoch=0):
        """(text, what the limit took away) of example i."""
        e, cfg = self.examples[i], self.cfg
        if e.task is None:
            return cfg.prefix + e.input, ""
        form = cfg
        if self.training and cfg.tk_instruct:
            form = TK_INSTRUCT[int(key_of(self.seed, 2, epoch, i)[0] % len(TK_INSTRUCT))]
        return prompt(e, form, lambda text: len(self.tokenizer.encode(text)) < cfg.max_source_length,
                      cfg.prompt_style == "keep_instance")

    def epoch(self, number=0):
        number = number if self.drawn else 0
        if number != self.number:
            if self.number is None or (self.training and self.cfg.tk_instruct):
                self.sources = [self.source(i, number) for i in progress(range(len(self)), "tokenizing")]
            self.targets = [self.target(i, number) for i in range(len(self))]
            self.cuts = Counter(cut for _, cut in self.sources + self.targets)
            self.number, self.rows = number, tuple([ids for ids, _ in side] for side in (self.sources, self.targets))
        return self.rows

    def source(self, i, epoch):
        """(ids, what the limit took away) of example i."""
        cfg, (text, cut) = self.cfg, self.source_text(i, epoch)
        ids = self.tokenizer.encode(text)
        if len(ids) >= cfg.max_source_length:
            cut = cut or "source"
            if cfg.prompt_style == "nanot5":                    # goes by way of text there, where unknown pieces vanish
                ids = self.tokenizer.encode(self.tokenizer.decode([k for k in ids[:cfg.max_source_length] if k != UNK]))
            ids = ids[:cfg.max_source_length - 1]
        return np.array([*ids, EOS], np.int32), cut

    def target(self, i, epoch):
        """(ids, what the limit took away) of example i."""
        cfg, e = self.cfg, self.examples[i]
        ids = self.tokenizer.encode(e.references[one_of(e, self.seed, epoch)])
        if len(ids) < cfg.max_target_length:
            return np.array([*ids, EOS], np.int32), ""
        kept = ids[:cfg.max_target_length - cfg.eos_on_cut_target]
        return np.array(kept + [EOS] * cfg.eos_on_cut_target, np.int32), "target"

    def lengths(self, number=0):
        """(n, 2) ids of source and target."""
        return np.array([[len(s), len(t)] for s, t in zip(*self.epoch(number), strict=True)])


def length_report(title, rows):
    """Lines on how long the examples are and what the limits take away."""
    lengths, n, cfg = rows.lengths(), len(rows), rows.cfg
    told = []
    for side, ids in zip(("source", "target"), rows.epoch(), strict=True):
        unknown = sum(bool((row == UNK).any()) for row in ids) if rows.tokenizer.vocabulary else 0
        if unknown:
            told.append(f"warning: {unknown:,} ({unknown / n:.1%}) of the {title} {side}s hold letters that the"
                        f" vocabulary lacks{'; such an answer is never written right' if side == 'target' else ''}")
    for side, column, most in (("source", 0, cfg.max_source_length), ("target", 1, cfg.max_target_length)):
        x = lengths[:, column]
        told.append(f"{title} {side}: mean {x.mean():.0f}, median {np.median(x):.0f}, 95 % up to"
                    f" {np.percentile(x, 95):.0f}, longest {x.max():,} ids of at most {most:,}")
    what = {"examples": "gave up examples", "definition": "had the definition cut at its end",
            "instance": "had the instance cut on the right", "source": "had the source cut on the right",
            "target": f"had the target cut on the right ({'with' if cfg.eos_on_cut_target else 'without'} EOS)"}
    cut = [f"{rows.cuts[c]:,} ({rows.cuts[c] / n:.1%}) {what[c]}" for c in CUTS if rows.cuts[c]]
    return [*told, f"{title}: {', '.join(cut) or 'nothing is cut'}"]


def epoch_order(lengths, batch_size, pool, seed, epoch):
    """The examples of each batch of an epoch, a list of int arrays; a pure function of its arguments.

    lengths  (n, 2) ids of each example's source and target

    The examples are shuffled, those of `pool` batches are sorted by the ids of source and target together and cut into
    batches, and the batches are shuffled: every example once, the last batch of the last pool smaller. pool=1: the
    shuffle alone decides.
    """
    n = len(lengths)
    order = np.argsort(key_of(seed, 4, epoch, np.arange(n)), kind="stable")
    batches = []
    for lo in range(0, n, pool * batch_size):
        part = order[lo:lo + pool * batch_size]
        part = part[np.argsort(lengths[part].sum(1), kind="stable")] if pool > 1 else part
        batches += np.split(part, range(batch_size, len(part), batch_size))
    if pool == 1:
        return batches
    return [batches[i] for i in np.argsort(key_of(seed, 5, epoch, np.arange(len(batches))), kind="stable")]


def padding(lengths, batches, micro_batch_size):
    """Ids in the padded batches of an epoch over ids in its examples; 1.0 is no padding.

    lengths  (n, 2) ids of each example's source and target; batches  int arrays of examples
    """
    padded = 0
    for batch in batches:
        part = lengths[batch][np.argsort(lengths[batch].sum(1), kind="stable")]
        for lo in range(0, len(part), micro_batch_size):
            rows = part[lo:lo + micro_batch_size]
            padded += len(rows) * rows.max(0).sum()
    return padded / lengths.sum()


class TaskBatches:
    """The batches of a run; which examples a step has, and in which order, follows from seed and step alone."""

    def __init__(self, rows, batch_size, pool, seed):
        self.source, self.batch_size, self.pool, self.seed = rows, batch_size, pool, seed
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.number = None

    def order(self, epoch):
        if epoch != self.number:
            self.number = epoch
            self.batches = epoch_order(self.source.lengths(epoch), self.batch_size, self.pool, self.seed, epoch)
        return self.batches

    def micro_batches(self, step, micro_batch_size, rank=0, count=1):
        """The padded arrays of a step, micro_batch_size examples at a time, alike in length: a list of (source (B, S),
        target (B, T), source_mask (B, S), target tokens of the whole step, real ids here), int64, int64, bool, ints.
        Of `count` ranks each takes every count-th example, and all have as many micro-batches: where one has no more
        examples, it takes another's and learns nothing from it.
        """
        epoch, number = divmod(step, self.steps_per_epoch)
        batch = self.order(epoch)[number]
        sources, targets = self.source.epoch(epoch)
        batch = sorted(batch, key=lambda i: len(sources[i]) + len(targets[i]))
        n_target, own = sum(len(targets[i]) for i in batch), batch[rank::count]
        made = []
        for lo in range(0, math.ceil(len(batch) / count), micro_batch_size):
            part = own[lo:lo + micro_batch_size]
            source, target, mask = padded(*([ids[i] for i in part or batch[:1]] for ids in (sources, targets)))
            if not part:
                target.fill(IGNORE)
            made.append((source, target, mask, n_target, sum(len(sources[i]) + len(targets[i]) for i in part)))
        return made


def padded(sources, targets):
    """source (B, S), target (B, T) with IGNORE where it is padding, source_mask (B, S), of lists of ids."""
    source, mask = pad_rows(sources, PAD)
    target, _ = pad_rows(targets, IGNORE)
    return source, target, mask
