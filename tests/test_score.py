"""ROUGE-L, exact match, means and spread."""
import json
import statistics

import pytest
from conftest import ASSETS

import score
from score import ScoreConfig, Scorer, exact_match, rouge_l
from tasks import Example, Task


@pytest.mark.parametrize("prediction, reference, default, whitespace", [
    ("he run fast", "he runs fast", 1.0, 2 / 3), ("A", "a", 1.0, 1.0), ("-1", "1", 1.0, 0.0), ("", "", 0.0, 0.0),
    ("{}", "{}", 0.0, 1.0), ("\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440",
                             "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", 0.0, 1.0),
    ("yes", "the answer is yes", 0.4, 0.4), ("a b c d", "a c x d", 0.75, 0.75), ("a b", "c d", 0.0, 0.0),
])
def test_rouge_l_by_hand(prediction, reference, default, whitespace):
    """2 PR / (P + R) of the longest common subsequence; the stemmer makes runs and run one."""
    assert rouge_l(prediction, reference) == pytest.approx(default, abs=1e-9)
    assert rouge_l(prediction, reference, "whitespace") == pytest.approx(whitespace, abs=1e-9)


def test_exact_match_folds_blanks_and_if_asked_case_and_punctuation():
    assert exact_match(" a  b\n", "a b") and not exact_match("A b", "a b") and not exact_match("a b.", "a b")
    assert exact_match("A b.", "a, b", normalize=True) and not exact_match("a c", "a b", normalize=True)


def test_the_best_reference_and_the_one():
    """yes against ['yes', 'the answer is yes']: 1.0 at best, 0.4 with the second (fault F53)."""
    cfg, references = ScoreConfig(), ["yes", "the answer is yes"]
    assert score.score("yes", references, 1, cfg) == pytest.approx(
        {"rougeL": 100, "rougeL_one": 40, "exact_match": 100})
    assert score.score("yes", references, 0, cfg)["rougeL_one"] == 100
    assert score.score("Yes!", references, 0, cfg)["exact_match"] == 0
    assert score.score("Yes!", references, 0, ScoreConfig(normalize=True))["exact_match"] == 100
    assert score.score("the answer is yes", references, 0, cfg)["exact_match"] == 100
    assert score.score("{}", ["{}"], 0, ScoreConfig(rouge_tokenizer="whitespace"))["rougeL"] == 100


def test_means_by_task_and_category():
    a, b, c = (Task(name, category, "", [], []) for name, category in (("a", "x"), ("b", "x"), ("c", "y")))
    examples = [Example(str(i), "", ["r"], task) for i, task in enumerate((a, a, b, c))]
    scores = [dict.fromkeys(score.METRICS, value) for value in (0.0, 50.0, 100.0, 30.0)]
    result = score.summary(examples, scores)
    assert {k: (v["n"], v["rougeL"]) for k, v in result["tasks"].items()} == {"a": (2, 25), "b": (1, 100), "c": (1, 30)}
    assert {k: (v["n"], v["exact_match"]) for k, v in result["categories"].items()} == {"x": (3, 50), "y": (1, 30)}
    assert result["all"] == {"n": 4, "rougeL": 45, "rougeL_one": 45, "exact_match": 45}
    lines = score.table(result, ScoreConfig())
    assert any(line.split() == ["x", "3", "50.00", "50.00", "50.00"] for line in lines)
    assert score.summary([Example("1", "", ["r"])], scores[:1])["tasks"] == {}


def test_spread_over_seeds():
    results = [{"all": dict.fromkeys(score.METRICS, v)} for v in (1.0, 2.0, 6.0)]
    found = score.spread(results)["rougeL"]
    assert found == {"mean": 3, "std": pytest.approx(7 ** 0.5), "values": [1, 2, 6]}
    assert score.spread(results[:2])["rougeL"]["std"] == pytest.approx(0.5 ** 0.5)


def test_processes_give_the_same_scores(monkeypatch):
    items = [(f"a b {i % 5}", [f"a {i % 3} b", "c"], 0) for i in range(40)]
    monkeypatch.setattr(score, "PER_PROCESS", 10)
    found = []
    for n_proc in (1, 2):
        with Scorer(40, ScoreConfig(), n_proc) as scorer:
            assert (scorer.pool is not None) == (n_proc > 1)
            for lo in (20, 0):
                scorer.add(range(lo, lo + 20), items[lo:lo + 20])
            found.append(scorer.results())
    assert found[0] == found[1] == {i: score.score(*item, ScoreConfig()) for i, item in enumerate(items)}


@pytest.mark.skipif(not ASSETS.is_dir(), reason="no folder of rouge-score's own test data beside the project")
def test_a_thousand_pairs_of_rouge_score():
    """40.2651, the figure that google-research/rouge gives for them."""
    predictions, targets = ((ASSETS / "rouge" / f"{name}_large.txt").read_text().splitlines()
                            for name in ("prediction", "target"))
    assert 100 * statistics.fmean(map(rouge_l, predictions, targets)) == pytest.approx(40.2651, abs=5e-5)


@pytest.mark.skipif(not ASSETS.is_dir(), reason="no folder of real tasks beside the project")
def test_copy_baselines_of_ten_tasks():
    """The input, and the first demonstration's output, as the answer; figures of an independent program."""
    import tasks
    folder = ASSETS / "natural-instructions"
    known = json.loads((folder / "copy_baselines.json").read_text())["tasks"]
    for name in (folder / "splits" / "default" / "test_tasks.txt").read_text().split():
        task, instances = tasks.read_task(folder / "tasks" / f"{name}.json")
        for baseline in ("copy_input", "copy_demo"):
            scores = [score.score(e.input if baseline == "copy_input" else task.positive[0]["output"], e.references, 0,
                                  ScoreConfig()) for e in instances[:100]]
            mean = score.mean(scores)
            assert mean["rougeL"] == pytest.approx(known[name][baseline]["rougeL"], abs=5e-5), (name, baseline)
            assert mean["exact_match"] == known[name][baseline]["exact_match"]
