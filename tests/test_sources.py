"""Reading text: files, blocks, broken connections, the Hub's listing."""
import gzip
import io
import os
from pathlib import Path

import pytest
from conftest import texts, write_jsonl

import sources


def test_block_edges_lose_nothing(tmp_path, monkeypatch, corpus):
    """Blocks of 64 bytes, smaller than most documents: the same tokens as in one block."""
    rows = texts(40)
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.txt").write_text("\n\n".join(rows))
    for name in ("a.jsonl", "a.txt"):
        shard = sources.Shard(name, str(tmp_path / name), sources.kind_of(name), False, 1)
        cfg = sources.SourceConfig()
        whole = list(sources.read_blocks(shard, cfg))
        monkeypatch.setattr(sources, "BLOCK", 64)
        small = list(sources.read_blocks(shard, cfg))
        monkeypatch.undo()
        assert len(whole) <= 2 and len(small) > 20
        found = [sources.documents_of(b, cfg) for b in small]
        assert [t.strip() for d, bad in found for t in d] == rows and not any(bad for _, bad in found)
        assert list(sources.read_blocks(shard, cfg, skip=len(whole))) == []


class Flaky:
    """Opens files as fsspec does, but the n-th opened one breaks after limits[n] bytes."""

    def __init__(self, limits):
        self.limits, self.opened = limits, 0

    def open(self, path, mode):
        file = io.BytesIO(Path(path.removeprefix("file://")).read_bytes())
        left = self.limits[self.opened] if self.opened < len(self.limits) else None
        self.opened += 1

        def broken(read):
            def call(*size):
                if left is not None and file.tell() > left:
                    raise ConnectionResetError("peer went away")
                return read(*size)
            return call

        file.readline, file.read = (broken(f) for f in (file.readline, file.read))
        return file


@pytest.mark.parametrize("name, opener", [("a.jsonl", open), ("a.jsonl.gz", gzip.open)])
def test_a_reading_that_fails_midway_is_taken_up_where_it_was(tmp_path, monkeypatch, name, opener):
    """A remote file whose connection breaks three times: the same blocks, none lost, none doubled."""
    write_jsonl(tmp_path / name, texts(6000), opener)
    size = os.path.getsize(tmp_path / name)
    shard = sources.Shard("a", f"file://{tmp_path}/{name}", "json", False, size)
    monkeypatch.setattr(sources, "BLOCK", 10_000)
    monkeypatch.setattr(sources.time, "sleep", lambda s: None)
    wanted = [b.items for b in sources.read_blocks(shard, sources.SourceConfig())]
    flaky = Flaky([size // 3, size // 3, size // 2])
    monkeypatch.setattr("fsspec.open", flaky.open)
    got = [b.items for b in sources.read_blocks(shard, sources.SourceConfig())]
    assert got == wanted and len(wanted) > 8 and flaky.opened == 4


def test_an_outage_is_no_damage(tmp_path, monkeypatch):
    """A connection that stays away stops the run, whatever skip_bad says: the rest of the file is not given up."""
    write_jsonl(tmp_path / "a.jsonl", texts(600))
    shard = sources.Shard("a", f"file://{tmp_path}/a.jsonl", "json", False, 1)
    monkeypatch.setattr(sources, "BLOCK", 10_000)
    monkeypatch.setattr(sources.time, "sleep", lambda s: None)
    monkeypatch.setattr("fsspec.open", Flaky([20_000] * 99).open)
    blocks = sources.read_blocks(shard, sources.SourceConfig())
    assert not next(blocks).bad
    with pytest.raises(OSError, match=r"cannot be read .*peer went away.* start the same command again"):
        list(blocks)


def test_a_remote_file_that_is_damaged_itself_is_named_after_some_tries(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl.gz", texts(600), gzip.open)
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:len(whole) // 2])
    shard = sources.Shard("a", f"file://{tmp_path}/a.jsonl.gz", "json", False, 1)
    monkeypatch.setattr(sources.time, "sleep", lambda s: None)
    (block,) = sources.read_blocks(shard, sources.SourceConfig())
    assert len(block.items) > 100 and "cut off" in block.bad[0]


@pytest.mark.parametrize("name, held_out", [
    ("c4-validation.00000-of-00008.json.gz", True), ("validation/0.parquet", True), ("dev.txt", True),
    ("a/val-1.jsonl", True), ("dev/a.jsonl", False), ("valid/more/a.txt", False), ("evaluate.txt", False),
    ("train.jsonl", False), ("test.jsonl", False)])
def test_names_that_say_held_out(name, held_out):
    assert sources.is_validation(name) is held_out


def test_a_folder_is_listed_without_hidden_and_foreign_files_and_the_output(tmp_path, capsys):
    for name in ("a.txt", "B.TXT", "sub/c.jsonl.GZ", ".git/x.txt", "notes.md", "out/meta.json", "out/progress/0.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    shards = sources.find_shards(sources.SourceConfig(source=str(tmp_path)), tmp_path / "out")
    assert [(s.name, s.kind) for s in shards] == [("B.TXT", "text"), ("a.txt", "text"), ("sub/c.jsonl.GZ", "json")]
    assert "1 files of other kinds are left alone" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="named OWNER/NAME"):
        sources.find_shards(sources.SourceConfig(source="mytexts"), tmp_path / "out")


def test_paragraphs_end_at_blank_lines_with_blanks_in_them(tmp_path, monkeypatch):
    """No document is taken for longer than it is: 30 paragraphs of 40 bytes pass a limit of 100."""
    (tmp_path / "a.txt").write_text("\n \t\n".join("x" * 40 for _ in range(30)))
    shard = sources.Shard("a.txt", str(tmp_path / "a.txt"), "text", False, 1)
    monkeypatch.setattr(sources, "LONGEST", 100)
    (block,) = sources.read_blocks(shard, sources.SourceConfig())
    assert [number for number, _ in block.items] == list(range(1, 60, 2))
    (block,) = sources.read_blocks(shard, sources.SourceConfig(sample_by="document"))
    documents, bad = sources.documents_of(block, sources.SourceConfig(sample_by="document"))
    assert not documents and bad[0].startswith(f"{tmp_path}/a.txt:1: a document of more than")


@pytest.mark.parametrize("how, text", [("line", "a\n{}\nb\nc"), ("paragraph", "a\n\n{}\n\nb\n\n\nc\n"),
                                       ("line", "a\n{}\nb\nc\n"), ("paragraph", "\n a\n\n{}\nx\n\nb\n \nc")])
def test_a_document_that_is_too_long_is_named_and_the_next_ones_are_read(tmp_path, monkeypatch, how, text):
    monkeypatch.setattr(sources, "LONGEST", 100)
    cfg = sources.SourceConfig(sample_by=how)
    for length in (50, 99, 101, 102, 250, 300):
        (tmp_path / "a.txt").write_text(text.format("x" * length))
        (block,) = sources.read_blocks(sources.Shard("a.txt", str(tmp_path / "a.txt"), "text", False, 1), cfg)
        documents, bad = sources.documents_of(block, cfg)
        assert [d.strip() for d in documents if "x" not in d] == ["a", "b", "c"]
        line = text.split("{}")[0].count("\n") + 1
        if length < 98:
            assert len(documents) == 4 and not bad
        elif length > 100:
            assert len(documents) == 3 and len(bad) == 1 and f"a.txt:{line}: a document" in bad[0]


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "binary"])
def test_parquet_text_of_every_kind_is_read_in_blocks_and_bad_rows_are_numbered(tmp_path, monkeypatch, kind):
    import pyarrow
    import pyarrow.parquet
    rows = texts(600)
    column = pyarrow.array([None if i in (2, 500) else row for i, row in enumerate(rows)])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    monkeypatch.setattr(sources, "BLOCK", 10_000)
    shard = sources.Shard("a", str(tmp_path / "a.parquet"), "parquet", False, 1)
    blocks = list(sources.read_blocks(shard, sources.SourceConfig()))
    found = [sources.documents_of(block, sources.SourceConfig()) for block in blocks]
    assert len(blocks) > 3 and [t for t, _ in found for t in t] == rows[:2] + rows[3:500] + rows[501:]
    assert [b.split(":")[1] for _, bad in found for b in bad] == ["3", "501"]


def test_a_parquet_file_without_the_column_or_with_damaged_pages_is_named_and_nothing_else(tmp_path):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(i) * 50 for i in range(5000)]}), tmp_path / "a.parquet",
                                compression="none", use_dictionary=False)
    shard = sources.Shard("a", str(tmp_path / "a.parquet"), "parquet", False, 1)
    (block,) = sources.read_blocks(shard, sources.SourceConfig(text_key="body"))
    assert block.bad == [f"{tmp_path}/a.parquet: no column 'body'; it has text: give --text_key"]
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[10_000:60_000] = b"\xff" * 50_000
    (tmp_path / "a.parquet").write_bytes(content)
    *_, last = sources.read_blocks(shard, sources.SourceConfig())
    assert sources.documents_of(last, sources.SourceConfig())[1]


def test_local_names_are_not_taken_for_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a::b.txt", "data:y.txt"):
        (tmp_path / name).write_text("text")
        (block,) = sources.read_blocks(sources.Shard(name, name, "text", False, 4), sources.SourceConfig())
        assert block.items == [(1, b"text")]


def test_a_data_set_of_the_hub_is_listed_by_its_own_description(tmp_path, corpus):
    """The real look-up of `datasets`, on a local folder in place of a name: splits, sizes, order, then the text."""
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train-00001.jsonl.gz", texts(20, 1), gzip.open)
    write_jsonl(folder / "train-00000.jsonl.gz", texts(20, 0), gzip.open)
    write_jsonl(folder / "validation.jsonl.gz", texts(20, 2), gzip.open)
    shards = sources.hub_shards(sources.SourceConfig(source=str(folder)))
    assert [(s.name.split("/")[1], s.is_val) for s in shards] == [
        ("validation.jsonl.gz", True), ("train-00000.jsonl.gz", False), ("train-00001.jsonl.gz", False)]
    assert all(s.size == os.path.getsize(folder / s.name.split("/")[1]) and s.kind == "json" for s in shards)
    blocks = [b for s in shards for b in sources.read_blocks(s, sources.SourceConfig())]
    found = [t for b in blocks for t in sources.documents_of(b, sources.SourceConfig())[0]]
    assert found == texts(20, 2) + texts(20, 0) + texts(20, 1)


def test_a_name_that_the_hub_does_not_have_is_told_in_one_line(monkeypatch):
    import datasets

    def offline(*args):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    monkeypatch.setattr(sources.time, "sleep", lambda s: None)
    with pytest.raises(FileNotFoundError, match="someone/corpus is no file or folder here, and the Hub gave") as error:
        sources.hub_shards(sources.SourceConfig(source="someone/corpus"))
    assert "\n" not in str(error.value)
