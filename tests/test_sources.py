"""Reading text: blocks, broken connections, the Hub's listing."""
import gzip
import os

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


def test_a_reading_that_fails_midway_is_taken_up_where_it_was(tmp_path, monkeypatch):
    """A remote file whose connection breaks twice: the same blocks, none lost, none doubled."""
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    shard = sources.Shard("a", f"file://{tmp_path}/a.jsonl", "json", False, 1)
    monkeypatch.setattr(sources, "BLOCK", 1000)
    monkeypatch.setattr(sources.time, "sleep", lambda s: None)
    wanted = [b.content for b in sources.read_blocks(shard, sources.SourceConfig())]
    real, breaks = sources.open_blocks, [3, 5]

    def flaky(shard, cfg):
        for i, block in enumerate(real(shard, cfg)):
            if breaks and i == breaks[0]:
                breaks.pop(0)
                raise ConnectionResetError("peer went away")
            yield block

    monkeypatch.setattr(sources, "open_blocks", flaky)
    got = [b.content for b in sources.read_blocks(shard, sources.SourceConfig())]
    assert got == wanted and len(wanted) > 8 and not breaks


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
