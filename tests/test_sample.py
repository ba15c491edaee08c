"""sample.py: prompts in, answers out, in order, filled in, streamed; and one line for each wrong use."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_generate import lively_t5

import data
import sample
from data import Tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A lively random model with the corpus's vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    lively_t5(4, eos=1.0, vocab_size=256).save_pretrained(folder, Tokenizer(corpus / "spiece.model"))
    return folder


def lines(capsys, *argv):
    assert not sample.main(["--max_new_tokens=12", *map(str, argv)])
    return capsys.readouterr().out.splitlines()


PROMPTS = ["The list of the array", "value", "", "The <extra_id_0> of the list",
           "A number of new lines of the class. " * 5, "the name", "first second next last",
           "The <extra_id_0> is the <extra_id_1>."]


def test_a_file_is_answered_in_its_order_whatever_the_batches(folder, tmp_path, capsys, monkeypatch):
    """A line each, the empty one too; as each prompt gets alone; also when the file is longer than one chunk."""
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    alone = [lines(capsys, f"--model={folder}", prompt)[0] if prompt else "" for prompt in PROMPTS]
    assert len(set(alone)) >= 6
    monkeypatch.setattr(sample, "CHUNK", 2)
    for batch_size in (1, 3, 16):
        got = lines(capsys, f"--model={folder}", f"--file={tmp_path / 'in.txt'}", f"--batch_size={batch_size}")
        assert got == alone


def test_the_answer_is_what_generate_writes(folder, corpus, capsys):
    tokenizer, model = Tokenizer(corpus / "spiece.model"), sample.T5.from_pretrained(folder)
    source, _ = tokenizer.batch(["The list of the array"])
    seen = set()
    for settings in ({}, dict(num_beams=3, length_penalty=0.2), dict(num_beams=3, early_stopping=True, num_samples=2),
                     dict(temperature=3.0), dict(temperature=3.0, top_k=3), dict(temperature=3.0, top_p=0.3)):
        argv = [f"--{name}={value}" for name, value in settings.items()]
        ids = model.generate(torch.from_numpy(source), max_new_tokens=12, suppress=tokenizer.suppress(256),
                             seed=int(data.key_of(0, 0)[0]) >> 1, **settings)
        got = lines(capsys, f"--model={folder}", "The list of the array", *argv)
        assert got == [tokenizer.decode(row) for row in ids]
        seen.add(tuple(got))
    assert len(seen) >= 5


def test_blanks_are_filled_in_the_prompts_own_words(folder, capsys):
    filled, = lines(capsys, f"--model={folder}", "The <extra_id_0> of the list<extra_id_1>.")
    assert filled.startswith("The ") and " of the list" in filled and filled.endswith(".") and "extra_id" not in filled
    assert filled.count("[") + filled.count("____") >= 2
    record, = map(json.loads, lines(capsys, f"--model={folder}", "The <extra_id_0> of", "--json=True"))
    assert record.keys() == {"index", "prompt", "answers", "filled"} and record["filled"][0].startswith("The ")


def test_json_samples_and_seeds(folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    argv = [f"--model={folder}", f"--file={tmp_path / 'in.txt'}", "--json=True", "--temperature=1", "--num_samples=3"]
    records = [json.loads(line) for line in lines(capsys, *argv)]
    assert [(r["index"], r["prompt"]) for r in records] == list(enumerate(PROMPTS))
    assert all(len(r["answers"]) == 3 for r in records) and records[2]["answers"] == ["", "", ""]
    assert len(set(records[0]["answers"])) > 1
    assert records == [json.loads(line) for line in lines(capsys, *argv, "--batch_size=2")]
    assert records != [json.loads(line) for line in lines(capsys, *argv, "--seed=100")]
    other = [json.loads(line) for line in lines(capsys, *argv, "--seed=1")]     # a prompt's numbers are its own
    assert not {tuple(r["answers"]) for r in records[:2]} & {tuple(r["answers"]) for r in other[:2]}
    assert len(lines(capsys, *argv[:2], *argv[3:])) == 3 * len(PROMPTS)
    (tmp_path / "in.txt").write_text("\n" * 4 + PROMPTS[4])
    assert json.loads(lines(capsys, *argv)[4])["answers"] == records[4]["answers"]


def test_sentinels_can_be_banned(folder, capsys):
    argv = [f"--model={folder}", "The <extra_id_0> of", "--json=True", "--temperature=2", "--num_samples=40"]
    free, banned = (json.loads(lines(capsys, *argv, f"--ban_sentinels={ban}")[0])["answers"] for ban in (False, True))
    assert any("extra_id" in text for text in free) and not any("extra_id" in text for text in banned)


def test_standard_input_of_odd_bytes(folder):
    """Windows line ends, a byte that is no UTF-8, no line end at the last one: an answer each."""
    done = subprocess.run([sys.executable, ROOT / "sample.py", f"--model={folder}", "--max_new_tokens=5", "--json=1"],
                          input="The list\r\nof \xff\n\nä".encode("latin-1"), capture_output=True, check=True)
    records = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [r["prompt"] for r in records] == ["The list", "of \ufffd", "", "\ufffd"] and not done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("argv", [["The list of the array"], ["The <extra_id_0> of"], [""],
                                  ["The list of the array", "--num_beams=3"]])
def test_one_prompt_on_a_terminal_gives_what_it_gives_elsewhere(folder, capsys, argv):
    import pty
    wanted, = lines(capsys, f"--model={folder}", *argv)
    main, side = pty.openpty()
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", f"--model={folder}", "--max_new_tokens=12", *argv],
                               stdout=side)
    assert process.wait(60) == 0
    os.close(side)
    assert os.read(main, 10_000).decode() == wanted + "\r\n"
    os.close(main)


def test_streaming_writes_word_by_word(folder, monkeypatch, capsys):
    cfg, _ = sample.parse([f"--model={folder}", "--max_new_tokens=12"])
    writer, written = sample.Writer(cfg), []
    monkeypatch.setattr("builtins.print", lambda *text, end="\n", flush=False: written.append("".join(text) + end))
    writer.stream("The list of the array")
    assert sum(bool(part.strip()) for part in written) > 4
    monkeypatch.undo()
    assert "".join(written).splitlines() == lines(capsys, f"--model={folder}", "The list of the array")


def test_prompts_behind_two_dashes(folder, capsys):
    assert sample.parse([f"--model={folder}", "a", "--", "-5 + 3", "--x", "b.py"])[1] == ["a", "-5 + 3", "--x", "b.py"]
    assert len(lines(capsys, f"--model={folder}", "--", "- the list", "--name")) == 2
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    assert "[--name=value ...] [PROMPT ...]" in capsys.readouterr().out


def test_answers_come_as_soon_as_those_before_them(folder, tmp_path, capsys, monkeypatch):
    """What has been answered when a run is stopped is there; lines end at \\n alone; long prompts are batched apart."""
    text = ["The list " * 30, "of\rthe value", "", "name"]
    (tmp_path / "in.txt").write_bytes("\n".join(text).encode())
    cfg, _ = sample.parse([f"--model={folder}", "--batch_size=2", f"--file={tmp_path / 'in.txt'}"])
    writer = sample.Writer(cfg)
    assert [[n for n, _ in part] for part in writer.batches(list(enumerate(text)))] == [[0, 1], [3, 2]]
    long = [(0, "list " * 1100), (1, "list"), (2, "list " * 1500), (3, "name")]
    assert [len(part) for part in writer.batches(long)] == [1, 1, 2]
    whole = lines(capsys, f"--model={folder}", f"--file={tmp_path / 'in.txt'}")
    assert len(whole) == 4
    answers, calls = sample.Writer.answers, []

    def stop_at_the_second(self, numbers, prompts):
        calls.append(numbers)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answers(self, numbers, prompts)

    monkeypatch.setattr(sample.Writer, "answers", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        sample.main([f"--model={folder}", "--batch_size=2", f"--file={tmp_path / 'in.txt'}", "--max_new_tokens=12"])
    assert capsys.readouterr().out.splitlines() == whole[:3]


def test_too_little_memory_is_one_line(folder, monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sample.T5, "generate", full)
    with pytest.raises(sample.files.Stopped, match=r"not memory enough for 1 prompts of \d+ ids"):
        sample.main([f"--model={folder}", "The list"])


def test_letters_of_several_bytes_are_streamed_whole(tmp_path, capsys, monkeypatch):
    """A model of bytes: half a letter is held back, an end that never comes is dropped."""
    lively_t5(4, vocab_size=384).save_pretrained(tmp_path, Tokenizer())
    writer = sample.Writer(sample.parse([f"--model={tmp_path}"])[0])
    written, answer = [], [*"aé\n日".encode(), 0xE6]
    monkeypatch.setattr(writer.model, "generate", lambda *a: [a[-1](torch.tensor([[b + 3]])) for b in answer] and
                        torch.tensor([[b + 3 for b in answer]]))
    monkeypatch.setattr("builtins.print", lambda *text, end="\n", flush=False: written.append("".join(text) + end))
    writer.stream("x")
    assert "".join(written) == "aé\n日\n" and written[:4] == ["a", "", "é", "\n"]
    assert writer.show(0, "x", [[b + 3 for b in answer]]) == ["aé 日"]              # one line each


def test_a_reader_that_goes_away_is_no_fault(folder, tmp_path):
    (tmp_path / "in.txt").write_text("The list\n" * 40, encoding="utf-8")
    command = f"{sys.executable} {ROOT / 'sample.py'} --model={folder} --file={tmp_path / 'in.txt'} --max_new_tokens=2"
    done = subprocess.run(f"{command} --batch_size=1 | head -1", shell=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1 and not done.stderr


@pytest.mark.parametrize("argv, part", [
    (["x"], "no model is given; --model=runs/tiny"),
    (["--model=no/such/folder", "x"], "no/such/folder is no folder here"),
    (["--model={folder}", "--file=none.txt"], "none.txt"),
    (["--model={folder}", "--file=none.txt", "x"], "exclude each"),
    (["--model={folder}", "x", "--num_samples=2"], "need a temperature above 0"),
    (["--model={folder}", "x", "--temperature=-1"], "temperature=-1.0"),
    (["--model={folder}", "x", "--num_beams=2", "--temperature=1"], "exclude each other"),
    (["--model={folder}", "x", "--beams=2"], "no setting is called 'beams'. Did you mean 'num_beams'"),
    (["--model={folder}", "x", "--vocab=none.model"], "vocabulary none.model is missing"),
    (["--model={wide}", "x", "--vocab={folder}/spiece.model"], "the model has 1,280 rows for ids"),
    (["--model={folder}", "x", "--dtype=float16"], "dtype=float16 is refused"),
    (["--model={folder}", "x", "--max_new_tokens=0"], "max_new_tokens=0"),
    (["--model={folder}", "- x"], "a prompt that begins with - stands behind a lone --"),
    (["--model={folder}", "x", "--batch_size=0"], "batch_size=0 must be at least 1"),
    (["--model={root}/config", "x"], "holds no model in Hugging Face's format"),
    (["--model={long}", "x"], "model_type 'longt5' is not a T5 of this kind"),
])
def test_wrong_uses_get_one_line(argv, part, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lively_t5(vocab_size=1280).save_pretrained(tmp_path / "wide")
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "model.safetensors").write_bytes(b"")
    (tmp_path / "long" / "config.json").write_text('{"model_type": "longt5"}')
    argv = [arg.format(folder=folder, root=ROOT, wide=tmp_path / "wide", long=tmp_path / "long") for arg in argv]
    with pytest.raises((ValueError, OSError)) as error:
        sample.main(argv)
    assert part in str(error.value) and "\n" not in str(error.value)
