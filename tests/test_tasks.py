"""Examples from files, prompts, lengths, the order of an epoch."""
import datetime
import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ASSETS, write_instructions

import data
import tasks
from model import shift_right
from tasks import Example, Rows, Task, TaskBatches, TaskConfig, prompt

PAIRS = [("one two", "three"), ("four", "five six"), ("seven", "eight")]


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return data.Tokenizer(corpus / "spiece.model")


# --- prompts ---------------------------------------------------------------------------------------------------------

COLOURS = Task("task900_colours", "question_answering", " Name the colour ",
               [{"input": "grass", "output": "green", "explanation": "Leaves are green!"},
                {"input": "What is the sky?", "output": "blue"}, {"input": "snow", "output": "white"}],
               [{"input": "coal", "output": "a tree", "explanation": "A tree is no colour"}])
LEMON = Example("x-1", " a lemon\n", ["yellow"], COLOURS)


def test_a_prompt_by_hand():
    """Tk-Instruct's text: a full stop only where no punctuation ends a field, blanks before the example's lines."""
    text, cut = prompt(LEMON, TaskConfig(), lambda text: True)
    assert text == ("Definition: Name the colour.\n\n"
                    " Positive Example 1 -\nInput: grass.\n Output: green.\n\n"
                    " Positive Example 2 -\nInput: What is the sky?\n Output: blue.\n\n"
                    "Now complete the following example -\nInput: a lemon.\nOutput: ")
    assert cut == ""


def test_name_negative_examples_and_explanations_by_hand():
    form = TaskConfig(add_task_name=True, num_pos_examples=1, num_neg_examples=2, add_explanation=True)
    text, _ = prompt(LEMON, form, lambda text: True)
    assert text == ("task900_colours. Definition: Name the colour.\n\n"
                    " Positive Example 1 -\nInput: grass.\n Output: green.\n Explanation: Leaves are green!\n\n"
                    " Negative Example 1 -\nInput: coal.\n Output: a tree.\n Explanation: A tree is no colour.\n\n"
                    "Now complete the following example -\nInput: a lemon.\nOutput: ")
    text, _ = prompt(LEMON, TaskConfig(add_task_definition=False, num_pos_examples=0), lambda text: True)
    assert text == "Now complete the following example -\nInput: a lemon.\nOutput: "


def fits(n):
    return lambda text: len(text.split()) <= n


def test_an_example_comes_only_while_the_whole_fits():
    whole, _ = prompt(LEMON, TaskConfig(), fits(10 ** 9))
    assert prompt(LEMON, TaskConfig(), fits(len(whole.split()))) == (whole, "")
    text, cut = prompt(LEMON, TaskConfig(), fits(len(whole.split()) - 1))
    assert "Positive Example 1" in text and "Positive Example 2" not in text and cut == "examples"
    # a negative one may still fit where a longer positive one did not
    long = Task("t", "c", "Do it", [{"input": "word " * 50, "output": "x"}], [{"input": "a", "output": "b"}])
    text, cut = prompt(Example("1", "in", ["out"], long), TaskConfig(num_neg_examples=1), fits(40))
    assert "Negative Example 1" in text and "Positive" not in text and cut == "examples"
    # but of one kind none comes after one that did not
    long.positive.append({"input": "a", "output": "b"})
    text, _ = prompt(Example("1", "in", ["out"], long), TaskConfig(), fits(40))
    assert "Positive" not in text


def test_the_limit_counts_the_eos(tokenizer):
    """A prompt of n ids with its EOS is whole at a limit of n and gives up an example at n - 1."""
    n = len(tokenizer.encode(prompt(LEMON, TaskConfig(), lambda text: True)[0])) + 1
    for limit, cut in ((n, ""), (n - 1, "examples")):
        rows = Rows([LEMON], tokenizer, TaskConfig(max_source_length=limit))
        (source,), _ = rows.epoch()
        assert rows.cuts["examples"] == bool(cut) and len(source) <= limit and (len(source) == n) == (cut == "")
    pair = Example("1", "the list of the array of the value", ["x"])
    n = len(tokenizer.encode(pair.input)) + 1
    for limit, cut in ((n, ""), (n - 1, "source")):
        rows = Rows([pair], tokenizer, TaskConfig(max_source_length=limit))
        assert len(rows.epoch()[0][0]) == limit and rows.cuts["source"] == bool(cut)


def test_the_definition_gives_way_before_the_instance():
    """A definition of 2,000 words and the input X: the source ends as it must (fault F46)."""
    long = Example("1", "X", ["y"], Task("t", "c", "word " * 2000, [{"input": "a", "output": "b"}], []))
    text, cut = prompt(long, TaskConfig(), fits(100))
    assert cut == "definition" and len(text.split()) == 100
    assert text.startswith("Definition: word word") and text.endswith("word.\n\nNow complete the following example -\n"
                                                                      "Input: X.\nOutput: ")
    named, _ = prompt(long, TaskConfig(add_task_name=True), fits(100))
    assert named.startswith("t. Definition: word word") and len(named.split()) == 100
    text, cut = prompt(long, TaskConfig(), fits(100), keep_instance=False)    # nanoT5's, cut on the right later
    assert cut == "instance" and len(text.split()) > 2000 and text.endswith("Input: X.\nOutput: ")
    huge = Example("1", " ".join(f"w{i}" for i in range(200)), ["y"], long.task)
    text, cut = prompt(huge, TaskConfig(), fits(50))
    assert cut == "instance" and "Definition" not in text and len(text.split()) == 50
    assert text.startswith("Now complete the following example -\nInput: w0 w1") and text.endswith(".\nOutput: ")


def test_rows_never_pass_the_limits_and_the_two_styles_differ(tokenizer):
    task = Task("t", "c", "the list of the value " * 60, [], [])
    examples = [Example("1", "last word", ["string " * 200], task)]
    for style in ("keep_instance", "nanot5"):
        cfg = TaskConfig(max_source_length=64, max_target_length=16, prompt_style=style)
        rows = Rows(examples, tokenizer, cfg)
        (source,), (target,) = rows.epoch()
        assert len(source) <= 64 and source[-1] == 1 and len(target) == 16
        assert rows.cuts["definition" if style == "keep_instance" else "instance"] == rows.cuts["target"] == 1
        assert ("last word" in tokenizer.decode(source)) == (style == "keep_instance")


def test_tk_instruct_draws_its_five_formats_alike(tokenizer):
    """Definition alone, examples alone, both, with wrong ones, with explanations; drawn anew each epoch, the same for
    whoever asks, and not at evaluation."""
    examples = [Example(str(i), "a lemon", ["yellow"], COLOURS) for i in range(500)]
    cfg = TaskConfig(tk_instruct=True)
    rows = Rows(examples, tokenizer, cfg, seed=3, training=True)
    texts = [rows.source_text(i, 0)[0] for i in range(500)]
    kinds = Counter(("Definition" in t, t.count("Positive"), t.count("Negative"), t.count("Explanation"))
                    for t in texts)
    assert set(kinds) == {(True, 0, 0, 0), (False, 2, 0, 0), (True, 2, 0, 0), (True, 2, 1, 0), (True, 2, 0, 1)}
    assert all(70 <= n <= 130 for n in kinds.values())
    assert texts == [Rows(examples, tokenizer, cfg, 3, True).source_text(i, 0)[0] for i in range(500)]
    assert texts != [rows.source_text(i, 1)[0] for i in range(500)]
    assert texts != [Rows(examples, tokenizer, cfg, 4, True).source_text(i, 0)[0] for i in range(500)]
    assert [len(s) for s in rows.epoch(0)[0]] != [len(s) for s in rows.epoch(1)[0]]
    assert len({Rows(examples, tokenizer, cfg).source_text(i)[0] for i in range(500)}) == 1


@pytest.mark.skipif(not ASSETS.is_dir(), reason="no folder of real tasks beside the project")
def test_388_prompts_equal_those_that_nanot5s_code_made():
    """383 whole, character by character; five cut ones by the ids that are fed in: nanoT5 cuts at 1,024 ids, decodes,
    which loses unknown pieces, and encodes again."""
    folder = ASSETS / "natural-instructions"
    t5 = data.Tokenizer(ASSETS / "t5_tokenizer" / "spiece.model")
    golden = json.loads((folder / "prompts_golden.json").read_text())["prompts"]
    by_task, n = {}, Counter()
    for case in golden:
        if case["task"] not in by_task:
            by_task[case["task"]] = tasks.read_task(folder / "tasks" / f"{case['task']}.json")[1]
        rows = Rows([by_task[case["task"]][case["instance"]]], t5, TaskConfig(prompt_style="nanot5",
                                                                              **case["settings"]))
        text, cut = rows.source_text(0)
        n["cut" if cut == "instance" else "whole"] += 1
        wanted = t5.encode(case["source"])[:1023] + [1]
        assert rows.epoch()[0][0].tolist() == wanted
        assert cut == "instance" or text == case["source"]
    assert n == {"whole": 383, "cut": 5}


# --- Super-Natural-Instructions --------------------------------------------------------------------------------------

def test_a_clone_is_read_by_its_lists(tmp_path):
    """Of a training task instances drawn by the seed, of a test task the first ones."""
    folder = write_instructions(tmp_path, {"task1_a": 30, "task2_b": 5, "task0_z": 30}, {"task3_c": 30})
    listed = folder / "splits" / "default" / "train_tasks.txt"
    listed.write_text(listed.read_text() + "task1_a\n")             # twice, but read once
    cfg = TaskConfig(data=str(folder), max_num_instances_per_task=10, max_num_instances_per_eval_task=7)
    sets, told = tasks.load_examples(cfg, seed=0)
    assert Counter(e.task.name for e in sets["train"]) == {"task1_a": 10, "task2_b": 5, "task0_z": 10}
    a, z = ([int(e.id.split("-")[1]) for e in sets["train"] if e.task.name == name] for name in ("task1_a", "task0_z"))
    assert a != z and a != list(range(10))
    assert [e.id for e in sets["test"]] == [f"task3_c-{i}" for i in range(7)] and not sets["val"]
    assert sets["test"][0].task.category == "title_generation"
    assert "train: 25 examples of 3 tasks" in told[0] and "test:  7 examples of 1 tasks" in told[1]
    drawn = [[e.id for e in tasks.load_examples(cfg, seed=s)[0]["train"]] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert tasks.load_examples(cfg, 0, eval_only=True)[0]["test"] == sets["test"]
    listed.write_text(listed.read_text() + "task3_c\n")
    with pytest.raises(ValueError, match="task3_c is listed for training and for testing"):
        tasks.load_examples(cfg, 0)


def test_listed_tasks_without_a_file_are_refused_or_counted(tmp_path, capsys):
    folder = write_instructions(tmp_path, {"task1_a": 3, "task2_b": 3}, {"task3_c": 3})
    (folder / "tasks" / "task2_b.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of the 3 tasks .* have no file in .*task2_b first; --allow_miss"):
        tasks.load_examples(TaskConfig(data=str(folder)), 0)
    sets, _ = tasks.load_examples(TaskConfig(data=str(folder), allow_missing=True), 0)
    assert len(sets["train"]) == 3 and "warning: 1 of the 3 tasks" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="--split can be default"):
        tasks.load_examples(TaskConfig(data=str(folder), split="xlingual"), 0)


@pytest.mark.parametrize("change, part", [
    ({"Definition": []}, "index out of range"), ({"Definition": 3}, "not text"), ({"Instances": []}, "no instances"),
    ({"Instances": None}, "NoneType"), ({"Instances": [{"input": "x"}]}, "'output' is missing"),
    ({"Instances": [{"input": "x", "output": []}]}, "instance 0 has no input and output of text"),
    ({"Instances": [{"input": "x", "output": [1]}]}, "instance 0"),
    ({"Positive Examples": [{"input": "x"}]}, "example is not text"), (None, "Expecting value"),
])
def test_broken_tasks_are_refused_by_file(tmp_path, change, part):
    folder = write_instructions(tmp_path, {"task1_a": 3}, {"task3_c": 3})
    path = folder / "tasks" / "task1_a.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else "no")
    with pytest.raises(ValueError, match=rf"task1_a.json is not a task of natural-instructions: .*{part}"):
        tasks.load_examples(TaskConfig(data=str(folder)), 0)


def test_odd_but_whole_tasks_are_read(tmp_path):
    """An output that is a text, a definition that is one, no examples at all (fault F48)."""
    path = tmp_path / "task9_x.json"
    path.write_text(json.dumps({"Definition": "Do", "Categories": "Data to Text", "Instances": [
        {"input": "a", "output": "b"}]}))
    task, (instance,) = tasks.read_task(path)
    assert (task.definition, task.category, task.positive, task.negative) == ("Do", "data_to_text", [], [])
    assert (instance.id, instance.references) == ("task9_x-0", ["b"])


def test_leakage_is_told_with_the_tasks(tmp_path):
    folder = write_instructions(tmp_path, {"task1_a": 4}, {"task3_c": 4})
    path = folder / "tasks" / "task3_c.json"
    path.write_text(path.read_text().replace("task3_c input 1", "  TASK1_A  input 2 "))
    _, told = tasks.load_examples(TaskConfig(data=str(folder)), 0)
    assert told[-1] == ("warning: 1 of the 4 test inputs (25.0%) are training inputs too; 1 of task3_c are in task1_a")


def test_leakage_is_looked_for_between_all_splits(tmp_path):
    for name, words in (("train", "a b c"), ("val", "A d"), ("test", "d e")):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"input": w, "target": "x"}) + "\n" for w in words.split()))
    _, told = tasks.load_examples(TaskConfig(data=str(tmp_path)), 0)
    assert told[3:] == ["warning: 1 of the 2 val inputs (50.0%) are training inputs too",
                        "test:  none of its inputs is a training input",
                        "warning: 1 of the 2 test inputs (50.0%) are validation inputs too"]


# --- pairs -----------------------------------------------------------------------------------------------------------

def write(path, text, open_=open):
    with open_(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


JSONL = "".join(json.dumps({"input": a, "target": b}) + "\n" for a, b in PAIRS)


@pytest.mark.parametrize("name, text, more", [
    ("a.jsonl", JSONL, {}), ("a.jsonl.gz", JSONL, {}), ("a.json", json.dumps([
        {"input": a, "target": [b]} for a, b in PAIRS]), {}),
    ("a.csv", "\ufeffinput,target\r\n" + "".join(f'"{a}",{b}\r\n' for a, b in PAIRS), {}),
    ("a.tsv", "".join(f"{a}\t{b}\tmore\n" for a, b in PAIRS), {"header": False, "input_key": "1", "target_key": "2"}),
    ("a.tsv.gz", "ref\tmr\n" + "".join(f"{b}\t{a}\n" for a, b in PAIRS), {"input_key": "mr", "target_key": "ref"}),
])
def test_pairs_are_read_from_every_kind_of_file(tmp_path, name, text, more):
    path = write(tmp_path / name, text, gzip.open if name.endswith("gz") else open)
    examples, bad = tasks.read_pairs(path, TaskConfig(**more))
    assert [(e.input, e.references) for e in examples] == [(a, [b]) for a, b in PAIRS] and not bad


def test_quotes_are_csvs_and_not_tsvs(tmp_path):
    csv = write(tmp_path / "a.csv", 'input,target\n"one, ""two""\nthree",x\n')
    assert tasks.read_pairs(csv, TaskConfig())[0][0].input == 'one, "two"\nthree'
    tsv = write(tmp_path / "a.tsv", 'input\ttarget\n"he said\t5" wide\n')
    assert (tasks.read_pairs(tsv, TaskConfig())[0][0].input, tasks.read_pairs(tsv, TaskConfig())[0][0].references) == (
        '"he said', ['5" wide'])


@pytest.mark.parametrize("name, text, part", [
    ("a.jsonl", JSONL + "{no}\n", "a.jsonl:4: not JSON, one object a line"),
    ("a.jsonl", "[1]\n", "not an object but int"), ("a.jsonl", '{"input": "x"}\n', "a.jsonl:1: there is no 'target'"),
    ("a.jsonl", '{"input": "x", "target": []}\n', "target is an empty list"),
    ("a.jsonl", '{"input": "x", "target": " "}\n', "target is empty"),
    ("a.jsonl", '{"input": null, "target": "x"}\n', "input is NoneType, not text"),
    ("a.jsonl", '{"input": "x", "target": ["a", true]}\n', "target is bool, not text"),
    ("a.json", "[{]", "begins as a list but is not JSON"), ("a.jsonl", "\n", "holds no pairs"),
    ("a.csv", "input,target\nx,y\nz\n", "a.csv:3: 1 columns instead of 2"),
    ("a.csv", 'input,target\nx,"y" z\nx,y\n', "a.csv:2: not a row of a .csv file"),
    ("a.csv", 'input,target\nx,y\nx,"y\n' + "x,y\n" * 9, "a.csv:3: a quote that opens in this row is never closed"),
    ("a.csv", "input,input,target\na,b,c\n", "two columns of one name among input, input, target"),
    ("a.jsonl", "x" + "[" * 200_000, "a.jsonl:1: not JSON"), ("a.json", "[" * 200_000, "not JSON"),
    ("a.csv", "mr,ref\nx,y\n", "has the columns mr, ref, not input and target; name them with --input_key"),
    ("a.txt", "x", "pairs are read from .jsonl"),
])
def test_bad_rows_are_named(tmp_path, name, text, part):
    with pytest.raises(ValueError) as error:
        tasks.read_pairs(write(tmp_path / name, text), TaskConfig())
    assert part in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"input": "\xff"}')
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    packed = bytearray(gzip.compress(b'{"input": "x", "target": "y"}' * 9))
    packed[12] ^= 255
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            tasks.read_pairs(tmp_path / name, TaskConfig())
    with pytest.raises(FileNotFoundError, match=r"none\.csv is missing"):
        tasks.read_pairs(tmp_path / "none.csv", TaskConfig())


def test_skip_bad_leaves_rows_out_and_counts_them(tmp_path):
    path = write(tmp_path / "a.jsonl", "{no}\n" + JSONL + '{"input": 3}\n')
    sets, told = tasks.load_examples(TaskConfig(data=str(path), skip_bad=True), 0)
    assert len(sets["train"]) == 3 and f"warning: 2 rows of {path} are left out, {path}:1: not JSON" in told[0]


def test_a_row_of_very_many_lines_is_told(tmp_path, capsys):
    path = write(tmp_path / "a.csv", 'input,target\nx,"' + "line\n" * 200 + '"\nx,y\n')
    assert len(tasks.read_pairs(path, TaskConfig())[0]) == 2
    assert "a.csv:2: a row of 201 lines; is a quote not closed?" in capsys.readouterr().out


def test_rows_of_one_input_are_references_of_one_example_when_scored(tmp_path):
    rows = [("a", "x"), ("b", "y"), ("a", "z"), ("a", "x")]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"input": a, "target": b}) + "\n" for a, b in rows))
    sets, _ = tasks.load_examples(TaskConfig(data=str(path)), 0, eval_only=True)
    assert [(e.input, e.references) for e in sets["test"]] == [("a", ["x", "z"]), ("b", ["y"])]
    assert len(tasks.load_examples(TaskConfig(data=str(path)), 0)[0]["train"]) == 4


def test_a_held_out_share_keeps_equal_inputs_on_one_side(tmp_path):
    path = write(tmp_path / "a.jsonl", "".join(
        json.dumps({"input": f"input {i % 300}", "target": str(i)}) + "\n" for i in range(900)))
    odd = write(tmp_path / "b.jsonl", "".join(json.dumps({"input": f"{('Word', 'word ')[i % 2]} {i // 2}",
                                                          "target": "x"}) + "\n" for i in range(300)))
    assert tasks.load_examples(TaskConfig(data=str(odd), val_share=0.3), 0)[1][-1] == (
        "val:   none of its inputs is a training input")        # case and blanks do not part them
    sets, told = tasks.load_examples(TaskConfig(data=str(path), val_share=0.2), 0)
    train, val = {e.input for e in sets["train"]}, {e.input for e in sets["val"]}
    assert not train & val and len(train | val) == 300 and 40 <= len(val) == len(sets["val"]) <= 80
    assert told[-1] == "val:   none of its inputs is a training input"
    assert all(len(e.references) == 3 for e in sets["val"])


def test_a_folder_of_splits_and_single_files(tmp_path):
    for name in ("train.csv", "dev.csv", "test.csv"):
        write(tmp_path / name, f"input,target\n{name},y\n")
    sets, _ = tasks.load_examples(TaskConfig(data=str(tmp_path)), 0)
    assert {k: v[0].input for k, v in sets.items()} == {"train": "train.csv", "val": "dev.csv", "test": "test.csv"}
    cfg = TaskConfig(data=str(tmp_path / "train.csv"), test=str(tmp_path / "dev.csv"))
    sets, _ = tasks.load_examples(cfg, 0)
    assert (sets["val"], sets["test"][0].input) == ([], "dev.csv")
    # a file that is named goes before the folder's; its own validation file before a share
    cfg = TaskConfig(data=str(tmp_path), test=str(tmp_path / "dev.csv"), val_share=0.99)
    sets, _ = tasks.load_examples(cfg, 0)
    assert {k: v[0].input for k, v in sets.items()} == {"train": "train.csv", "val": "dev.csv", "test": "dev.csv"}
    # what is scored without training: --test, else the folder's test file, else the one file
    for data_path, test, wanted in ((tmp_path, None, "test.csv"), (tmp_path / "train.csv", None, "train.csv"),
                                    (tmp_path / "train.csv", tmp_path / "dev.csv", "dev.csv")):
        sets, _ = tasks.load_examples(TaskConfig(data=str(data_path), test=test and str(test)), 0, eval_only=True)
        assert [e.input for e in sets["test"]] == [wanted] and not sets["train"]
    write(tmp_path / "valid.csv", "input,target\nx,y\n")
    with pytest.raises(ValueError, match=r"two files for val: dev.csv and valid.csv"):
        tasks.load_examples(TaskConfig(data=str(tmp_path)), 0)


# --- ids and batches -------------------------------------------------------------------------------------------------

def test_a_target_that_fits_ends_in_eos_and_a_cut_one_does_not(tokenizer):
    """Fault F45; nanoT5's tokenizer closes the cut one as well."""
    ids = tokenizer.encode("the list of the array")
    n = len(ids)
    for most, flag, wanted in ((n + 1, False, [*ids, 1]), (n, False, ids), (n, True, [*ids[:-1], 1]),
                               (3, False, ids[:3]), (3, True, [*ids[:2], 1])):
        cfg = TaskConfig(max_target_length=most, eos_on_cut_target=flag)
        rows = Rows([Example("1", "x", ["the list of the array"])], tokenizer, cfg)
        assert rows.epoch()[1][0].tolist() == wanted
        assert rows.cuts["target"] == (len(wanted) < n + 1)


def test_padding_is_ignored_and_the_decoder_starts_from_pad():
    """Faults F45 and F47: labels [5, 6, 1] come after [0, 5, 6]; -100 becomes 0 on the way in."""
    source, target, mask = tasks.padded([[7, 8, 1], [9, 1]], [[5, 6, 1], [1]])
    assert source.tolist() == [[7, 8, 1], [9, 1, 0]] and mask.tolist() == [[True] * 3, [True, True, False]]
    assert target.tolist() == [[5, 6, 1], [1, -100, -100]]
    assert shift_right(torch.from_numpy(target)).tolist() == [[0, 5, 6], [0, 1, 0]]


def test_a_source_that_is_cut_keeps_its_eos_and_its_beginning(tokenizer):
    rows = Rows([Example("1", "the list of the array is old", ["x"])], tokenizer, TaskConfig(max_source_length=8))
    ids = tokenizer.encode("the list of the array is old")
    assert rows.epoch()[0][0].tolist() == [*ids[:7], 1] and rows.cuts["source"] == 1
    assert "1 (100.0%) had the source cut on the right" in tasks.length_report("train", rows)[-1]


def test_several_references_are_learnt_in_turn_and_scored_by_a_fixed_one(tokenizer):
    examples = [Example("x", str(i), ["list", "array", "value"]) for i in range(300)]
    rows = Rows(examples, tokenizer, TaskConfig(), seed=1, training=True)
    epochs = [[tuple(t) for t in rows.epoch(n)[1]] for n in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1] and all(c > 60 for c in Counter(epochs[0]).values())
    other = Rows(examples, tokenizer, TaskConfig(), seed=2, training=True).epoch(0)[1]
    assert [tuple(t) for t in other] != epochs[0]
    fixed = [[tuple(t) for t in Rows(examples, tokenizer, TaskConfig()).epoch(n)[1]] for n in (0, 1)]
    assert fixed[0] == fixed[1]
    assert [tasks.one_of(e) for e in examples] == [tasks.one_of(e) for e in examples[::-1]][::-1]
    assert len({tasks.one_of(e) for e in examples}) == 3


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    lengths = np.random.default_rng(0).integers(1, 200, (1003, 1)) // [1, 8] + 1
    orders = [tasks.epoch_order(lengths, 8, 20, 5, epoch) for epoch in (0, 1, 0)]
    for batches in orders:
        assert sorted(np.concatenate(batches)) == list(range(1003)) and len(batches) == 126
        assert sorted(map(len, batches))[0] == 3 and sorted(map(len, batches))[1] == 8
    assert all(map(np.array_equal, orders[0], orders[2]))
    for other in (orders[1], tasks.epoch_order(lengths, 8, 20, 6, 0)):      # other company, not another order alone
        assert len({tuple(sorted(b)) for b in orders[0]} & {tuple(sorted(b)) for b in other}) < 5
    same = np.ones_like(lengths)                                # of one length: the batches' own order is drawn too
    first = [[int(b[0]) for b in tasks.epoch_order(same[:64], 8, 8, seed, epoch)] for seed, epoch in (
        (5, 0), (5, 1), (6, 0))]
    shuffled = [np.argsort(data.key_of(seed, 4, epoch, np.arange(64)))[::8].tolist() for seed, epoch in (
        (5, 0), (5, 1), (6, 0))]
    places = [[s.index(i) for i in f] for f, s in zip(first, shuffled, strict=True)]
    assert places[0] != places[1] and places[0] != places[2] and places[0] != sorted(places[0])
    plain = tasks.epoch_order(lengths, 8, 1, 5, 0)
    assert tasks.padding(lengths, orders[0], 8) < 0.8 * tasks.padding(lengths, plain, 8)
    # the order of batches tells nothing about their length
    mean = [lengths[b].sum(1).mean() for b in orders[0]]
    assert abs(np.corrcoef(mean, range(len(mean)))[0, 1]) < 0.3


def test_batches_of_a_pool_are_cut_from_those_sorted_by_source_and_target_together():
    lengths = np.random.default_rng(0).integers(1, 100, (160, 2))
    spans = sorted((lengths[b].sum(1).min(), lengths[b].sum(1).max()) for b in tasks.epoch_order(lengths, 8, 20, 0, 0))
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))


def test_padding_by_hand():
    """The longest source and the longest target count, though they are of two examples."""
    lengths = np.array([[2, 3], [4, 1], [6, 1]])
    assert tasks.padding(lengths, [np.array([0, 2]), np.array([1])], 8) == (2 * (6 + 3) + 4 + 1) / 17
    assert tasks.padding(lengths, [np.array([0, 2]), np.array([1])], 1) == 1.0


def test_micro_batches_share_out_the_batch(tokenizer):
    examples = [Example(str(i), "the list " * (i % 7 + 1), ["value " * (i % 3 + 1)]) for i in range(10)]
    batches = TaskBatches(Rows(examples, tokenizer, TaskConfig()), 8, 2, seed=0)
    assert batches.steps_per_epoch == 2
    seen = []
    for step in range(4):
        parts = batches.micro_batches(step, 3)
        whole, = batches.micro_batches(step, 8)
        seen.append(sum(len(s) for s, *_ in parts))
        rows = [[row[m].tolist() for row, m in zip(s, m, strict=True)] for s, _, m, *_ in parts]
        assert [r for part in rows for r in part] == [row[m].tolist() for row, m in zip(whole[0], whole[2],
                                                                                        strict=True)]
        sums = [len(source) + int((t != -100).sum()) for source, t in zip(
            (r for part in rows for r in part), (t for _, ts, *_ in parts for t in ts), strict=True)]
        assert sums == sorted(sums)                             # so that micro-batches are padded less
    assert sorted(seen[:2]) == sorted(seen[2:]) == [2, 8]


def test_each_epoch_has_its_own_ids_and_order(tokenizer):
    """With several references an epoch's targets are its own, and so is its sorting by length."""
    examples = [Example("x", f"the list {i + 10}", ["value", "value " * 9]) for i in range(24)]
    rows = Rows(examples, tokenizer, TaskConfig(), seed=1, training=True)
    batches = TaskBatches(rows, 4, 6, seed=1)
    for epoch in (0, 1):
        targets = [t.tolist() for step in range(6 * epoch, 6 * epoch + 6)
                   for _, target, *_ in batches.micro_batches(step, 4) for t in target]
        wanted = Rows(examples, tokenizer, TaskConfig(), seed=1, training=True).epoch(epoch)[1]
        assert sorted([i for i in t if i != -100] for t in targets) == sorted(t.tolist() for t in wanted)
        waste = [float((target == -100).mean()) for step in range(6 * epoch, 6 * epoch + 6)
                 for _, target, *_ in batches.micro_batches(step, 4)]
        assert sum(w > 0 for w in waste) <= 1                   # sorted: one batch at most holds both lengths


def test_the_prefix_stands_before_each_input(tokenizer):
    rows = Rows([Example("1", "list", ["x"])], tokenizer, TaskConfig(prefix="value of the "))
    assert rows.source_text(0) == ("value of the list", "")


def test_dates_are_right_and_stand_in_one_split_only():
    sets = tasks.dates(2000, 200)
    forms = ("%d %B %Y", "%B %d, %Y", "the %d of %B, %Y", "%b %d %Y", "%d.%m.%Y", "%Y, %d %b")
    found = Counter()
    for examples in sets.values():
        for e in examples:
            text = e.input
            for ending in ("st", "nd", "rd", "th"):
                text = text.replace(f"1{ending}", "1").replace(f"2{ending}", "2").replace(f"3{ending}", "3")
            text = " ".join(w.removesuffix("th") if w[:1].isdigit() else w for w in text.split())
            for form in forms:
                try:
                    date = datetime.datetime.strptime(text, form)
                except ValueError:
                    continue
                found[form] += 1
                assert [f"{date:%Y-%m-%d}"] == e.references
    assert sum(found.values()) == 2400 and len(found) == 6
    days = [{e.references[0] for e in examples} for examples in sets.values()]
    assert not (days[0] & days[1] or days[0] & days[2] or days[1] & days[2])
    assert [len(examples) for examples in sets.values()] == [2000, 200, 200]


def test_equal_ids_are_told_apart(tmp_path):
    rows = [{"id": name, "input": str(i), "target": "x"} for i, name in enumerate(("a", "a (2)", "a", None))]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sets, _ = tasks.load_examples(TaskConfig(data=str(path)), 0, eval_only=True)
    assert [e.id for e in sets["test"]] == ["a", "a (2)", "a (3)", "a.jsonl:4"]


def test_files_beside_a_clone_are_refused(tmp_path):
    folder = write_instructions(tmp_path / "clone", {"task1_a": 3}, {"task3_c": 3})
    with pytest.raises(ValueError, match=r"test=x.jsonl is for files of pairs, which .*clone is not"):
        tasks.load_examples(TaskConfig(data=str(folder), test="x.jsonl"), 0)
    path = write(tmp_path / "a.jsonl", JSONL)
    with pytest.raises(ValueError, match="tk_instruct=True is for a clone of natural-instructions"):
        tasks.load_examples(TaskConfig(data=str(path), tk_instruct=True), 0)
    (tmp_path / "train.jsonl").write_text(JSONL)
    with pytest.raises(ValueError, match="has neither a test nor a validation file"):
        tasks.load_examples(TaskConfig(data=str(tmp_path)), 0, eval_only=True)


def test_what_the_vocabulary_lacks_is_told(tokenizer):
    rows = Rows([Example("1", "the list", ["J"]), Example("2", "the list", ["list"])], tokenizer, TaskConfig())
    told = tasks.length_report("train", rows)
    assert told[0].startswith("warning: 1 (50.0%) of the train targets hold letters that the vocabulary lacks")


def test_no_data_is_told():
    with pytest.raises(ValueError, match="no data is given"):
        tasks.load_examples(TaskConfig(), 0)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl is missing"):
        tasks.load_examples(TaskConfig(data="none.jsonl"), 0)
    with pytest.raises(ValueError, match="is no clone of natural-instructions"):
        tasks.load_examples(TaskConfig(data=str(Path(__file__).parent)), 0)
