"""Text to token files: sources, vocabulary, stops, damage."""
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from conftest import sentence, texts, write_corpus, write_jsonl, write_parquet

import data
import prepare
import sources

ROOT = Path(__file__).resolve().parent.parent


def make(source, out_dir, *more):
    return prepare.main([f"--source={source}", f"--out_dir={out_dir}", "--n_proc=1", *more])


def documents(folder, split):
    """The documents of a split, as lists of ids."""
    meta = data.read_meta(folder)
    tokens = data.Tokens(folder, split, meta)
    rows, row = [], []
    for t in tokens.read(0, len(tokens)).tolist() if len(tokens) else []:
        if t == data.EOS:
            rows.append(row)
            row = []
        else:
            row.append(t)
    assert not row, "a split ends with EOS"
    return rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "a.txt", "a.txt.gz"])
def test_every_format_gives_what_sentencepiece_itself_gives(tmp_path, corpus, name):
    """All documents once, in order within their split, each as sentencepiece encodes it plus one EOS."""
    rows = texts(50)
    opener = gzip.open if name.endswith(".gz") else open
    path = tmp_path / name
    if "json" in name:
        write_jsonl(path, rows, opener)
    elif "parquet" in name:
        write_parquet(path, rows)
    else:
        with opener(path, "wt", encoding="utf-8") as file:
            file.write("\n\n".join(rows))
    make(path, tmp_path / "out", f"--vocab={corpus}", "--val_share=0.2")
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "spiece.model"))
    wanted = [vocabulary.encode(row) for row in rows]
    got = {split: documents(tmp_path / "out", split) for split in ("train", "val")}
    assert sorted(got["train"] + got["val"]) == sorted(wanted)
    assert [r for r in wanted if r in got["train"]] == got["train"] and 1 < len(got["val"]) < 25
    meta = data.read_meta(tmp_path / "out")
    assert meta["text_bytes"] == sum(len(r.encode()) for r in rows)
    assert meta["splits"]["train"]["tokens"] == sum(len(r) + 1 for r in got["train"])


def test_a_folder_in_c4s_layout_keeps_its_validation_files(tmp_path, corpus):
    folder = tmp_path / "en"
    folder.mkdir()
    parts = [texts(20, seed) for seed in range(3)]
    for i in (0, 1):
        write_jsonl(folder / f"c4-train.0000{i}-of-00002.json.gz", parts[i], gzip.open)
    write_jsonl(folder / "c4-validation.00000-of-00001.json.gz", parts[2], gzip.open)
    make(folder, tmp_path / "out", f"--vocab={corpus / 'spiece.model'}")
    vocabulary = data.load_vocabulary(corpus / "spiece.model")
    assert documents(tmp_path / "out", "train") == [vocabulary.encode(t) for t in parts[0] + parts[1]]
    assert documents(tmp_path / "out", "val") == [vocabulary.encode(t) for t in parts[2]]


def test_markers_in_the_text_stay_text(tmp_path, corpus):
    """<pad>, </s> and <extra_id_0> become plain pieces, never ids 0, 1 or a sentinel."""
    write_jsonl(tmp_path / "a.jsonl", ["use <pad> then </s> and <extra_id_0> here"] * 3)
    make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}", "--val_share=0")
    meta = data.read_meta(tmp_path / "out")
    for row in documents(tmp_path / "out", "train"):
        assert len(row) > 10 and min(row) >= 2 and max(row) < meta["n_piece"]


def vocabulary_with_sentinels(markers):
    rng, model = random.Random(0), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence(rng) + " <extra_id_0> extra" for _ in range(200)]), model_writer=model,
        vocab_size=80 + len(markers), pad_id=0, eos_id=1, unk_id=2, bos_id=-1, user_defined_symbols=markers,
        minloglevel=2)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_sentinels_of_the_vocabulary_itself_must_count_down():
    with pytest.raises(ValueError, match=r"do not count down from <extra_id_0> \(id 3\)"):
        data.sentinels(vocabulary_with_sentinels([f"<extra_id_{k}>" for k in range(100)]))
    with pytest.raises(ValueError, match="do not count down"):
        data.sentinels(vocabulary_with_sentinels(["<extra_id_1>", "<extra_id_0>"]))


def test_markers_that_are_pieces_of_the_vocabulary_stay_text():
    """mT5's vocabularies hold <extra_id_0> as a piece; text must not turn into it."""
    vocabulary = vocabulary_with_sentinels([f"<extra_id_{k}>" for k in reversed(range(100))])
    marker = vocabulary.piece_to_id("<extra_id_0>")
    text = "The list <extra_id_0> of"
    assert marker in vocabulary.encode(text)
    encoder = prepare.Encoder(vocabulary, sources.SourceConfig(), "uint16", 0.0, 0)
    first, second = (ids.tolist() for ids in encoder.ids_of([text, "a"]))
    assert marker not in first and first[-1] == 1 and second == vocabulary.encode("a") + [1]
    assert data.sentinels(vocabulary) == (marker, 180) == (102, 180)


def test_sample_by_says_what_a_document_is(tmp_path, corpus):
    (tmp_path / "a.txt").write_bytes("one line\nsecond line\r\n\r\nthe next\n \n\n\nlast ünd\n".encode())
    wanted = {"line": ["one line", "second line", "the next", " ", "last ünd"],
              "paragraph": ["one line\nsecond line", "the next", "last ünd"],
              "document": ["one line\nsecond line\r\n\r\nthe next\n \n\n\nlast ünd\n"]}
    vocabulary = data.load_vocabulary(corpus / "spiece.model")
    for how, rows in wanted.items():
        make(tmp_path / "a.txt", tmp_path / how, f"--vocab={corpus}", "--val_share=0", f"--sample_by={how}")
        assert documents(tmp_path / how, "train") == [vocabulary.encode(r) for r in rows if r.strip()]


BAD = [b'{"text": "good one"}', b'{"text": ', b'{"txt": "no field"}', b'{"text": 5}', b'["text"]', b"\xff\xfe",
       b'{"text": "\\ud800"}', b'{"text": "good two"}', b"", b'{"text": "  "}', b"[" * 100_000]


def test_bad_lines_are_named_or_counted(tmp_path, corpus, capsys):
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(BAD))
    with pytest.raises(ValueError, match=r"b\.jsonl:2: not JSON, one object a line .*--skip_bad=True"):
        make(tmp_path / "b.jsonl", tmp_path / "out", f"--vocab={corpus}", "--val_share=0")
    make(tmp_path / "b.jsonl", tmp_path / "out", f"--vocab={corpus}", "--val_share=0", "--skip_bad=True")
    meta = data.read_meta(tmp_path / "out")
    assert (meta["bad_lines"], meta["empty_documents"], meta["splits"]["train"]["documents"]) == (7, 1, 2)
    assert "7 bad lines" in capsys.readouterr().out
    block = sources.Block("b.jsonl", "json", list(enumerate(filter(None, BAD), 1)), 0, [])
    named = sources.documents_of(block, sources.SourceConfig())[1]
    assert [line.split(":")[1] for line in named] == ["2", "3", "4", "5", "6", "7", "10"]


@pytest.mark.parametrize("content, name, part", [
    (gzip.compress(b'{"text": "a"}\n' * 9999)[:60], "a.jsonl.gz", "cut off, damaged"),
    (b"no gzip at all", "a.jsonl.gz", "a.jsonl.gz"),
    (b"PAR1 not really", "a.parquet", "not a Parquet file, or damaged"),
    (b"x", "a.pdf", "this kind of file is not read"),
    (b"", "a.txt", "no text to train a vocabulary on"),
])
def test_broken_files_are_named(tmp_path, corpus, content, name, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=part):
        make(tmp_path / name, tmp_path / "out", *([] if name == "a.txt" else [f"--vocab={corpus}"]))


def test_a_damaged_file_among_others_can_be_left_out(tmp_path, corpus):
    """What stands before the damage is kept, the damage is counted, the next file is read."""
    source = tmp_path / "in"
    source.mkdir()
    write_jsonl(source / "a.jsonl.gz", texts(3000), gzip.open)
    whole = (source / "a.jsonl.gz").read_bytes()
    (source / "a.jsonl.gz").write_bytes(whole[:len(whole) // 2])
    write_jsonl(source / "b.jsonl", texts(30, seed=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", 1 << 12)
        make(source, tmp_path / "out", f"--vocab={corpus}", "--skip_bad=True", "--val_share=0")
    meta, got = data.read_meta(tmp_path / "out"), documents(tmp_path / "out", "train")
    vocabulary = data.load_vocabulary(corpus / "spiece.model")
    assert meta["bad_lines"] == 1 and got[-30:] == [vocabulary.encode(t) for t in texts(30, seed=1)]
    assert 1000 < len(got) - 30 < 2000 and got[:-30] == [vocabulary.encode(t) for t in texts(3000)[:len(got) - 30]]


def test_a_missing_column_and_an_empty_folder_are_named(tmp_path, corpus):
    write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body'; it has text, n"):
        make(tmp_path / "a.parquet", tmp_path / "out", f"--vocab={corpus}", "--text_key=body")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no"):
        make(tmp_path / "empty", tmp_path / "out2")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        make(tmp_path / "not/here.jsonl", tmp_path / "out3")


# --- vocabulary ------------------------------------------------------------------------------------------------------

def test_a_vocabulary_trained_here_is_laid_out_as_t5s(corpus):
    meta, vocabulary = data.read_meta(corpus), data.load_vocabulary(corpus / "spiece.model")
    assert [vocabulary.id_to_piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert (meta["n_piece"], meta["n_id"], meta["first_sentinel"]) == (150, 250, 249)
    assert 2 in vocabulary.encode("Ω")                          # unknown: no byte fallback


def test_the_embedding_is_rounded_up():
    assert [data.round_up(n) for n in (32_100, 1_100, 1_152, 1_153)] == [32_128, 1_152, 1_152, 1_280]


def test_a_vocabulary_larger_than_the_text_allows_is_refused_with_the_largest(tmp_path):
    write_corpus(tmp_path / "a.txt", n=30)
    with pytest.raises(ValueError, match=r"vocab_size=5000 is more than the text supports; at most \d+"):
        make(tmp_path / "a.txt", tmp_path / "out", "--vocab_size=5000")
    with pytest.raises(ValueError, match=r"vocab_size=10 is less than the text's letters need; at least \d+"):
        make(tmp_path / "a.txt", tmp_path / "out2", "--vocab_size=10")
    make(tmp_path / "a.txt", tmp_path / "out3")                 # no size given: what the text supports
    assert 50 < data.read_meta(tmp_path / "out3")["n_piece"] < 5000


def test_a_vocabulary_with_other_control_ids_is_refused(tmp_path):
    rng = random.Random(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence(rng) for _ in range(200)]), model_prefix=str(tmp_path / "llama"),
        vocab_size=80, minloglevel=2)
    write_corpus(tmp_path / "a.txt", n=5)
    with pytest.raises(ValueError, match="T5 needs pad 0, eos 1, unk 2"):
        make(tmp_path / "a.txt", tmp_path / "out", f"--vocab={tmp_path / 'llama.model'}")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        make(tmp_path / "a.txt", tmp_path / "out", f"--vocab={tmp_path / 'a.txt'}")
    with pytest.raises(FileNotFoundError, match=r"none\.model is missing"):
        make(tmp_path / "a.txt", tmp_path / "out", f"--vocab={tmp_path / 'none.model'}")


# --- stops, limits, shards -------------------------------------------------------------------------------------------

def folder_bytes(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.bin"))} | {
        "meta": {k: v for k, v in data.read_meta(folder).items() if k != "source"}}


def test_copies_of_a_document_land_on_one_side(tmp_path, corpus):
    write_jsonl(tmp_path / "a.jsonl", texts(30) * 2)
    make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}", "--val_share=0.3")
    train, val = (set(map(tuple, documents(tmp_path / "out", s))) for s in ("train", "val"))
    assert train and val and not train & val


def big_source(folder, n_file=3, n=6000):
    folder.mkdir()
    for i in range(n_file):
        write_jsonl(folder / f"part{i}.jsonl", texts(n, seed=i))
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_preparation_goes_on_without_loss_or_doubles(tmp_path, corpus, number):
    """Stopped at three moments, then run to its end: byte for byte the folder of a run without stops."""
    source = big_source(tmp_path / "in")
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    program = ("import files, prepare, sources\nsources.BLOCK, prepare.COMMIT = 1 << 14, 2\n"
               "if __name__ == '__main__': files.run(prepare.main)")
    command = [sys.executable, "-c", program, f"--source={source}", f"--out_dir={tmp_path / 'cut'}",
               f"--vocab={corpus}", "--n_proc=1"]
    stopped = 0
    for size in (20_000, 200_000, 500_000):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.time() + 60
        while process.poll() is None and time.time() < deadline:
            if sum(p.stat().st_size for p in (tmp_path / "cut").glob("*.bin")) > size:
                process.send_signal(number)
                break
            time.sleep(0.002)
        stopped += process.wait(60) != 0
        process.stderr.close()
    assert stopped >= 2
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert folder_bytes(tmp_path / "cut") == folder_bytes(tmp_path / "whole")


def test_shards_split_the_work_and_add_up(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=100)
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    for part in ("2:", ":1", "1:2"):
        make(source, tmp_path / "parts", f"--vocab={corpus}", f"--shards={part}")
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")
    with pytest.raises(ValueError, match="names none of the 3 files"):
        make(source, tmp_path / "parts", f"--vocab={corpus}", "--shards=3:9")
    with pytest.raises(ValueError, match="same vocabulary"):
        make(source, tmp_path / "other", "--shards=0:1")


def test_parts_of_another_vocabulary_or_other_settings_are_not_merged(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=60)
    other = vocabulary_with_sentinels([])
    (tmp_path / "other.model").write_bytes(other.serialized_model_proto())
    make(source, tmp_path / "a", f"--vocab={corpus}", "--shards=0:1")
    for name, more in (("b", [f"--vocab={tmp_path / 'other.model'}"]), ("c", [f"--vocab={corpus}", "--seed=1"])):
        make(source, tmp_path / name, *more, "--shards=1:3")
        merged = shutil.copytree(tmp_path / "a", tmp_path / f"a{name}")
        for file in [*(tmp_path / name).glob("*.bin"), *(tmp_path / name).glob("progress/0*.json")]:
            shutil.copy(file, merged / file.relative_to(tmp_path / name))
        with pytest.raises(ValueError, match="belongs to other text, settings or another vocabulary"):
            make(source, merged, f"--vocab={corpus}")


def test_a_vocabulary_made_first_serves_the_shards(tmp_path):
    """The way that the message about --shards names, in one folder, the path of the vocabulary spelt in two ways."""
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", "--vocab_only=True", "--vocab_size=120")
    make(source, tmp_path / "out", f"--vocab={tmp_path / 'out'}", "--shards=0:1")
    make(source, tmp_path / "out", f"--vocab={tmp_path}/./out/spiece.model", "--shards=1:")
    assert data.read_meta(tmp_path / "out")["shards"] == 3
    with pytest.raises(ValueError, match="vocabulary of 120 pieces, now vocab_size=130"):
        make(source, tmp_path / "out", "--vocab_size=130")


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_lost_part_is_named_not_filled_with_zeros(tmp_path, corpus, damage):
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}")
    part = tmp_path / "out" / "train-00001.bin"
    os.truncate(part, 100) if damage == "short" else part.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin has .* bytes, but .* were written; .*--overwrite=True"):
        make(source, tmp_path / "out", f"--vocab={corpus}")
    make(source, tmp_path / "out", f"--vocab={corpus}", "--overwrite=True")
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_part_that_another_process_writes_is_refused(tmp_path, corpus):
    fcntl = pytest.importorskip("fcntl")
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}", "--shards=0:1")
    with open(tmp_path / "out" / "train-00001.bin", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"train-00001\.bin is in use by another process"):
            make(source, tmp_path / "out", f"--vocab={corpus}")
    make(source, tmp_path / "out", f"--vocab={corpus}")


def test_a_writer_made_before_another_ended_takes_up_what_that_one_wrote(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}", "--n_tokens=1")
    record = (tmp_path / "out" / "progress" / "source.json").read_text()
    made_from = hashlib.sha256(json.dumps(json.loads(record)).encode()).hexdigest()
    early = prepare.ShardWriter(tmp_path / "out", 2, made_from)     # its file is not there yet
    make(source, tmp_path / "out", f"--vocab={corpus}")
    before = folder_bytes(tmp_path / "out")
    early.open()
    early.close()
    assert early.complete and folder_bytes(tmp_path / "out") == before


def test_an_unfinished_preparation_is_told_from_a_damaged_one(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}")
    with open(tmp_path / "out" / "train-00001.bin", "ab") as file:
        file.write(b"1234")
    with pytest.raises(ValueError, match="still runs or was stopped; start the same prepare"):
        data.read_meta(tmp_path / "out")
    (tmp_path / "out" / "progress" / "00001.json").unlink()
    make(source, tmp_path / "out", f"--vocab={corpus}")
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_vocabulary_that_is_not_there_is_an_error_in_a_folder_begun_before(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}")
    with pytest.raises(FileNotFoundError, match=r"typo\.model is missing"):
        make(source, tmp_path / "out", f"--vocab={tmp_path / 'typo.model'}")
    (tmp_path / "other.model").write_bytes(vocabulary_with_sentinels([]).serialized_model_proto())
    with pytest.raises(ValueError, match="was begun with another vocabulary"):
        make(source, tmp_path / "out", f"--vocab={tmp_path / 'other.model'}")


def test_overwrite_deletes_nothing_before_the_new_source_is_known(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=60)
    make(source, tmp_path / "out", f"--vocab={corpus}")
    before = folder_bytes(tmp_path / "out")
    for wrong in ([tmp_path / "typo.jsonl"], [source, f"--vocab={tmp_path / 'typo.model'}"]):
        with pytest.raises(FileNotFoundError):
            make(wrong[0], tmp_path / "out", *wrong[1:], "--overwrite=True")
        assert folder_bytes(tmp_path / "out") == before
    make(source, tmp_path / "out", f"--vocab={tmp_path / 'out'}", "--overwrite=True", "--val_share=0.5")
    assert data.read_meta(tmp_path / "out")["vocabulary_sha256"] == before["meta"]["vocabulary_sha256"]


def test_many_workers_write_what_one_writes(tmp_path, corpus):
    source = big_source(tmp_path / "in", n=3000)
    make(source, tmp_path / "one", f"--vocab={corpus}")
    make(source, tmp_path / "two", f"--vocab={corpus}", "--n_proc=3")
    assert folder_bytes(tmp_path / "two") == folder_bytes(tmp_path / "one")


def test_a_limit_is_met_alike_by_many_workers_though_they_read_ahead_into_the_next_files(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 1 << 12)
    source = big_source(tmp_path / "in", n=100)
    for limit in (1000, 5000, 10_000):
        for name, n_proc in (("one", 1), ("many", 4)):
            make(source, tmp_path / f"{name}{limit}", f"--vocab={corpus}", f"--n_tokens={limit}", f"--n_proc={n_proc}")
        one, many = (data.read_meta(tmp_path / f"{name}{limit}") for name in ("one", "many"))
        assert one == many and one["splits"]["train"]["tokens"] >= limit
    make(source, tmp_path / "many5000", f"--vocab={corpus}", "--n_proc=4")
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    assert folder_bytes(tmp_path / "many5000") == folder_bytes(tmp_path / "whole")


def test_preparing_text_does_not_wait_for_torch():
    """Importing it takes a second."""
    program = "import sys, prepare\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_n_tokens_stops_early_and_can_be_raised(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 1 << 12)
    source = big_source(tmp_path / "in", n=300)
    make(source, tmp_path / "out", f"--vocab={corpus}", "--n_tokens=5000")
    first = data.read_meta(tmp_path / "out")["splits"]["train"]["tokens"]
    assert 5000 <= first < 8000
    make(source, tmp_path / "out", f"--vocab={corpus}", "--n_tokens=1e9")
    make(source, tmp_path / "whole", f"--vocab={corpus}")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_folder_begun_with_other_settings_is_refused(tmp_path, corpus):
    write_jsonl(tmp_path / "a.jsonl", texts(30))
    make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}")
    with pytest.raises(ValueError, match=r"val_share=0.01, now 0.5"):
        make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}", "--val_share=0.5")
    write_jsonl(tmp_path / "a.jsonl", texts(31))
    with pytest.raises(ValueError, match="other files"):
        make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}")
    make(tmp_path / "a.jsonl", tmp_path / "out", f"--vocab={corpus}", "--overwrite=True")
    assert data.read_meta(tmp_path / "out")["splits"]["train"]["documents"] == len(documents(tmp_path / "out", "train"))
    assert sum(len(documents(tmp_path / "out", split)) for split in ("train", "val")) == 31


def test_the_smallest_dtype_that_holds_the_ids_is_chosen(corpus):
    meta = data.read_meta(corpus)
    assert meta["dtype"] == "uint16" and np.dtype(meta["dtype"]).itemsize == 2
    assert os.path.getsize(corpus / "train-00000.bin") == 2 * meta["splits"]["train"]["tokens"]
    assert [prepare.token_dtype(n) for n in (32_100, 65_536, 65_537, 250_100)] == ["uint16"] * 2 + ["uint32"] * 2
