"""Scores of predictions: ROUGE-L by rouge-score, exact match; per example, task and category; the table and the files.

ROUGE-L is the F-measure of the longest common subsequence of words (Lin 2004), with rouge-score's stemmer, in per cent,
and the mean over examples. It is taken both ways in use: `rougeL` is the best over an example's references, as
Tk-Instruct reports it, `rougeL_one` that against one reference chosen at random, as nanoT5 does; the two are not to be
compared with one another. Needs rouge-score.
"""
import functools
import json
import multiprocessing
import os
import signal
import statistics
import string
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import files
import tasks

METRICS = ("rougeL", "rougeL_one", "exact_match")
PER_PROCESS = 500                   # examples; fewer are not worth the start of a process
MOST_PROCESSES = 8                  # each takes some 250 MB


@dataclass
class ScoreConfig:
    """How predictions are scored."""
    rouge_tokenizer: str = "default"    # default: a to z and 0 to 9 alone count; whitespace: for other scripts and code
    normalize: bool = False         # exact match ignores case and punctuation, as Tk-Instruct's does; else only blanks

    def __post_init__(self):
        if self.rouge_tokenizer not in ("default", "whitespace"):
            raise ValueError(f"rouge_tokenizer={self.rouge_tokenizer!r} is unknown; there are default and whitespace")


class Whitespace:
    """The words of a text in lower case, whatever their script; no stemmer."""

    def tokenize(self, text):
        return text.lower().split()


@functools.cache
def rouge(tokenizer):
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("scores need a package: pip install rouge-score") from None
    return RougeScorer(["rougeL"], use_stemmer=True, tokenizer=Whitespace() if tokenizer == "whitespace" else None)


def rouge_l(prediction, reference, tokenizer="default"):
    """Between 0 and 1, as rouge-score's rougeL F-measure: tests/test_score.py"""
    return rouge(tokenizer).score(reference, prediction)["rougeL"].fmeasure


def exact_match(prediction, reference, normalize=False):
    """Whether two texts are equal but for blanks; with normalize also but for case and punctuation."""
    def plain(text):
        if normalize:
            text = "".join(c for c in text.lower() if c not in string.punctuation)
        return " ".join(text.split())

    return plain(prediction) == plain(reference)


def score(prediction, references, one, cfg):
    """{metric: per cent} of one prediction; `one` is the place of the reference for rougeL_one."""
    by_reference = [rouge_l(prediction, reference, cfg.rouge_tokenizer) for reference in references]
    return {"rougeL": 100 * max(by_reference), "rougeL_one": 100 * by_reference[one],
            "exact_match": 100.0 * any(exact_match(prediction, r, cfg.normalize) for r in references)}


def score_many(items, cfg):
    return [score(*item, cfg) for item in items]


class Scorer:
    """Scores by processes of their own, so that the model can go on generating: `add` predictions as they come, then
    take `results`. For few examples the scores are taken on the spot."""

    def __init__(self, n_example, cfg, n_proc=None):
        self.cfg, self.waiting = cfg, []
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        n_proc = min(n_proc or cores, n_example // PER_PROCESS, MOST_PROCESSES)
        self.pool = ProcessPoolExecutor(n_proc, multiprocessing.get_context("spawn"), signal.signal,
                                        (signal.SIGINT, signal.SIG_IGN)) if n_proc > 1 else None
        rouge(cfg.rouge_tokenizer)                              # a missing package is told before anything is generated

    def add(self, numbers, items):
        """items: (prediction, references, place of the one reference) of the examples of these numbers"""
        items = list(items)
        result = self.pool.submit(score_many, items, self.cfg) if self.pool else score_many(items, self.cfg)
        self.waiting.append((list(numbers), result))

    def results(self):
        """{number: scores} of all that was added."""
        try:
            return {number: scores for numbers, result in self.waiting
                    for number, scores in zip(numbers, result.result() if self.pool else result, strict=True)}
        except BrokenProcessPool:
            raise OSError("a process that takes scores was ended from outside (out of memory?)") from None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def mean(scores):
    """{"n": how many, metric: mean} of a list of scores."""
    return {"n": len(scores), **{m: statistics.fmean(s[m] for s in scores) for m in METRICS}}


def summary(examples, scores):
    """Means over all examples, and over those of each task and category where there are tasks.

    examples  with task (name, category) or None; scores  {metric: per cent} of each, in the same order
    returns   {"all": mean, "tasks": {name: mean}, "categories": {name: mean}}
    """
    by_task, by_category = {}, {}
    for e, s in zip(examples, scores, strict=True):
        if e.task:
            by_task.setdefault(e.task.name, []).append(s)
            by_category.setdefault(e.task.category, []).append(s)
    return {"all": mean(scores), "tasks": {name: mean(by_task[name]) for name in sorted(by_task)},
            "categories": {name: mean(by_category[name]) for name in sorted(by_category)}}


def spread(results):
    """{metric: {"mean": .., "std": .., "values": [..]}} of the "all" of several summaries; the standard deviation is
    that of a sample (n - 1)."""
    values = {m: [r["all"][m] for r in results] for m in METRICS}
    return {m: {"mean": statistics.fmean(v), "std": statistics.stdev(v) if len(v) > 1 else 0.0, "values": v}
            for m, v in values.items()}


def table(result, cfg):
    """A summary as lines: tasks, categories, all."""
    names = [*result["tasks"], *result["categories"], "all examples"]
    width = max(map(len, names))
    exact = "exact match, no case or punctuation" if cfg.normalize else "exact match"
    lines = [f"{'':<{width}} {'n':>6}  ROUGE-L  one ref.  {exact}"]

    def row(name, m):
        return f"{name:<{width}} {m['n']:>6,}  {m['rougeL']:>7.2f}  {m['rougeL_one']:>8.2f}  {m['exact_match']:>11.2f}"

    for kind in ("tasks", "categories"):
        if result[kind]:
            lines += [f"{kind}:", *(row(name, m) for name, m in result[kind].items())]
    kind = "words parted by blanks" if cfg.rouge_tokenizer == "whitespace" else "stemmer"
    return [*lines, row("all examples", result["all"]),
            f"(per cent; ROUGE-L: best reference, {kind}; one ref.: one at random)"]


def report(examples, answers, score_cfg, out_dir=None, known=None):
    """Print the table of scores and, into a folder, write predictions.jsonl and result.json, the latter with what is
    `known` of how the answers came about. Returns what result.json holds."""
    result = {**(known or {}), **asdict(score_cfg), **summary(examples, [scores for _, scores in answers])}
    print("\n".join(table(result, score_cfg)), flush=True)
    if out_dir:
        lines = []
        for e, (text, scores) in zip(examples, answers, strict=True):
            of_task = {"task": e.task.name, "category": e.task.category} if e.task else {"task": None}
            lines.append(json.dumps({"id": e.id, **of_task, "input": e.input, "references": e.references,
                                     "prediction": text, **scores}, ensure_ascii=False) + "\n")
        out_dir.mkdir(parents=True, exist_ok=True)
        files.write_atomically(out_dir / "predictions.jsonl",
                               lambda file: file.write("".join(lines).encode("utf-8", "replace")))
        files.write_json(out_dir / "result.json", result)
        print(f"see {out_dir}/predictions.jsonl and result.json")
    return result


def read_result(path):
    """What a result.json holds; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_predictions(path, examples):
    """(examples, predictions) of a .txt with a prediction a line, in the examples' order, or of a .jsonl with id and
    prediction, and references where no examples are given.

    raises  FileNotFoundError; ValueError that names the line, or how many do not go together with the examples
    """
    path = Path(path)
    kind, text, found, own = tasks.file_kind(path), tasks.read_text(path), {}, []
    merging = "; rows of one input are one example" if any(not e.task for e in examples) else ""
    if kind == ".txt":
        lines = text.removesuffix("\n").split("\n")
        if not examples:
            raise ValueError(f"{path} holds no references; give --data or --test")
        if len(lines) != len(examples):
            raise ValueError(f"{path} has {len(lines):,} lines for {len(examples):,} examples{merging}")
        return examples, lines
    if kind not in (".jsonl", ".json"):
        raise ValueError(f"{path}: predictions are read from .txt, .jsonl and .json, each also with .gz")
    for number, record in tasks.json_rows(path, text):
        if not isinstance(record, dict) or not isinstance(record.get("prediction"), str) or "id" not in record:
            raise ValueError(f"{path}:{number}: not an object with id and prediction, the latter a text")
        name = str(record["id"])
        if name in found:
            raise ValueError(f"{path}:{number}: a second prediction for {name}")
        found[name] = record["prediction"]
        if not examples:
            references = record.get("references")
            if not references or not isinstance(references, list) or not all(isinstance(r, str) for r in references):
                raise ValueError(f"{path}:{number}: it has no list of references; give --data or --test")
            task = record.get("task") and tasks.Task(str(record["task"]), str(record.get("category")), "", [], [])
            own.append(tasks.Example(name, str(record.get("input", "")), references, task))
    examples = examples or own
    known = {e.id for e in examples}
    lacking = [e.id for e in examples if e.id not in found]
    unknown = [name for name in found if name not in known]
    if lacking or unknown:
        told = [f"{len(ids):,} {what} ({ids[0]} first)" for ids, what in (
            (lacking, "examples have no prediction"), (unknown, "predictions have no example")) if ids]
        raise ValueError(f"{path}: {' and '.join(told)}{merging}")
    return examples, [found[e.id] for e in examples]
