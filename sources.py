"""Where text comes from: files, folders, data sets on the Hub and the embedded corpus, as blocks of documents.

A source is a list of shards (files), a shard a sequence of blocks of about a megabyte, a block some whole documents.
The same file always gives the same blocks, so a place in the text is a shard and a number of blocks.
"""
import inspect
import json
import re
import sys
import sysconfig
import time
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from files import first_line, write_atomically

BLOCK = 1 << 20                 # bytes of text in a block
LONGEST = 64 << 20              # bytes; a longer document counts as bad
KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}    # the first three also with .gz
C4 = ("allenai/c4", "en")


@dataclass
class SourceConfig:
    """Where text comes from, and what a document is."""
    source: str = "pydocs"          # pydocs, c4, a file, a folder, or the Hub name of a data set
    subset: str | None = None       # a Hub data set's configuration
    text_key: str = "text"          # field of .jsonl, .json.gz and .parquet that holds the text
    sample_by: str = "paragraph"    # what is a document in a .txt: line, paragraph (blank lines between) or document

    def __post_init__(self):
        if not self.source:
            raise ValueError("source is empty; give a file, a folder, the Hub name of a data set, or pydocs")
        if self.sample_by not in ("line", "paragraph", "document"):
            raise ValueError(f"sample_by={self.sample_by!r} is unknown; there are line, paragraph and document")


# --- where text comes from -------------------------------------------------------------------------------------------

@dataclass
class Shard:
    """One input file: a local path, or a URL that fsspec opens (hf://...)."""
    name: str
    path: str
    kind: str                       # text, json or parquet
    is_val: bool
    size: int                       # bytes as stored


def kind_of(path):
    """text, json, parquet or None, by the file's ending."""
    name = str(path).lower()
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind == "parquet" and name.endswith(".gz") else kind


def is_validation(name):
    """Whether the name of a file, or of the folder it lies in, says that it is held out."""
    *_, folder, file = ("/" + name.lower()).split("/")
    return folder in ("val", "valid", "validation") or bool(
        re.search(r"(^|[^a-z])(val|valid|validation|dev|eval)([^a-z]|$)", file))


def find_shards(cfg, out_dir):
    """The files of a source, in the order of their names, validation files first; out_dir is never a part of it."""
    path = Path(cfg.source).expanduser()
    if cfg.source == "pydocs":
        path = out_dir / "pydocs.jsonl"
        if not path.exists():
            write_pydocs(path)
    if path.is_file():
        if not kind_of(path):
            raise ValueError(f"{path}: this kind of file is not read; there are {', '.join(KINDS)} and .gz of them")
        return [Shard(path.name, str(path), kind_of(path), False, path.stat().st_size)]    # whatever its name says
    if not path.is_dir():
        if cfg.source != "c4" and (kind_of(cfg.source) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", cfg.source)):
            raise FileNotFoundError(f"source {cfg.source} is no file or folder here; a data set on the Hub is named"
                                    f" OWNER/NAME")
        return hub_shards(cfg)
    shards, others, own = [], 0, out_dir.resolve()
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if not file.is_file() or f"/{name}".count("/.") or own in file.resolve().parents:
            continue
        if kind := kind_of(file):
            shards.append(Shard(name, str(file), kind, is_validation(name), file.stat().st_size))
        else:
            others += 1
    if not shards:
        raise ValueError(f"{path} holds no {', '.join(KINDS)} file, nor one of these with .gz")
    if others:
        print(f"{path}: {others:,} files of other kinds are left alone")
    return sorted(shards, key=lambda s: (not s.is_val, s.name))


def hub_shards(cfg):
    """The files of a data set on the Hub, as its own description lists them; failed requests are repeated by its
    library."""
    import datasets
    from fsspec.core import url_to_fs
    name, subset = C4 if cfg.source == "c4" else (cfg.source, None)
    subset = cfg.subset or subset
    print(f"looking for the data set {name} on the Hugging Face Hub", flush=True)
    try:
        files = datasets.load_dataset_builder(name, subset).config.data_files or {}
        sizes = {str(url): url_to_fs(str(url)) for urls in files.values() for url in urls}
        sizes = {url: fs.info(path)["size"] for url, (fs, path) in sizes.items()}
    except Exception as error:
        raise FileNotFoundError(f"source {cfg.source} is no file or folder here, and the Hub gave no data set"
                                f" of that name ({type(error).__name__}: {first_line(error)})") from None
    shards = [Shard(f"{split}/{str(url).rsplit('/', 1)[-1]}", str(url), kind_of(url) or "", str(split) != "train",
                    sizes[str(url)]) for split, urls in files.items() if str(split) in ("train", "validation")
              for url in urls]
    unread = [s.path for s in shards if not s.kind]
    if unread or not shards:
        raise ValueError(f"data set {name}: {unread[0] if unread else 'no train split'} cannot be read here")
    return sorted(shards, key=lambda s: (not s.is_val, s.name))


def wait_to_retry(attempt, what, error):
    """Tell about a network failure and wait 1, 2, 4 ... at most 60 seconds."""
    pause = min(60, 2 ** attempt)
    print(f"{what}: {type(error).__name__}: {first_line(error)}; trying again in {pause} s", file=sys.stderr)
    time.sleep(pause)


def write_pydocs(path):
    """Collect the documentation strings of the standard library, torch and numpy, and the topics of Python's help().

    Read from the sources by pattern, since parsing them takes ten times as long. One JSON object a line: text, origin.
    """
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    roots += [(name, Path(find_spec(name).origin).parent) for name in ("numpy", "torch") if find_spec(name)]
    # every triple-quoted string, so that no closing quotes are taken for opening ones; those that begin a line count
    pattern = re.compile(r"(?P<indent>^[ \t]*[rR]?)?(\"\"\"|''')(?P<body>.*?)\2", re.S | re.M)
    seen = set()

    def documents():
        for root_name, root in roots:
            for file in sorted(root.rglob("*.py")):
                parts = file.relative_to(root).parts
                if {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"} & set(parts):
                    continue
                for match in pattern.finditer(file.read_text(encoding="utf-8", errors="replace")):
                    if match["indent"] is not None:
                        yield "/".join((root_name, *parts)), inspect.cleandoc(match["body"])
        from pydoc_data.topics import topics
        for name, text in sorted(topics.items()):
            yield f"topics/{name}", text

    def write(file):
        for origin, text in progress(documents(), desc="pydocs", unit=" texts"):
            if len(text) >= 100 and text not in seen:           # shorter ones say too little, and many stand twice
                seen.add(text)
                file.write((json.dumps({"text": text, "origin": origin}) + "\n").encode())

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


def progress(iterable=None, **options):
    from tqdm import tqdm
    return tqdm(iterable, dynamic_ncols=True, mininterval=0.5, **options)


# --- reading: a shard as blocks --------------------------------------------------------------------------------------

class Damaged(Exception):
    """What is wrong with a document, or with a file from some place on."""


@dataclass
class Block:
    """Work for one worker: whole documents of one shard, not parsed yet."""
    shard: str
    kind: str                       # text, json or parquet
    items: list                     # (number of the first line or row, from 1; bytes, no text at all, or Damaged)
    read_bytes: int                 # of the stored file so far
    bad: list                       # what is wrong with the file behind these documents: nothing, or one str


def read_blocks(shard, cfg, skip=0):
    """Yield the blocks of a shard from number `skip` on. The same file always gives the same blocks.

    A remote file that fails midway is opened again, with back-off, and read up to where it was; OSError after eight
    failures at one place. A damaged file ends in a block that says what is wrong with it.
    """
    done, attempt, remote = skip, 0, "://" in shard.path
    while True:
        try:
            for number, block in enumerate(open_blocks(shard, cfg, last_try=not remote or attempt == 8)):
                if number >= done:
                    done, attempt = number + 1, 0
                    yield block
            return
        except Exception as error:
            if not remote:
                raise
            if attempt == 8:
                raise OSError(f"{shard.path} cannot be read ({type(error).__name__}: {first_line(error)});"
                              f" start the same command again to go on") from None
            wait_to_retry(attempt, shard.path, error)
            attempt += 1


def open_blocks(shard, cfg, last_try=True):
    """Yield the blocks of a shard once. What breaks the reading is raised, so that it can be tried again; on the last
    try a damaged file ends in a block that tells so, and only a broken connection is raised."""
    import gzip
    remote = "://" in shard.path
    if remote:
        import fsspec
        opened = fsspec.open(shard.path, "rb")
    else:
        opened = open(shard.path, "rb")
    with opened as raw:
        if shard.kind == "parquet":
            found = parquet_rows(raw, cfg.text_key)
        else:
            file = gzip.GzipFile(fileobj=raw) if shard.path.lower().endswith(".gz") else raw
            found = pieces(file, "line" if shard.kind == "json" else cfg.sample_by)
        items, size, bad = [], 0, []
        try:
            for number, item in found:
                items.append((number, item))
                size += len(item) if isinstance(item, bytes) else 64
                if size >= BLOCK:
                    yield Block(shard.path, shard.kind, items, raw.tell(), [])
                    items, size = [], 0
        except Damaged as error:                                # certain: no other try would find it whole
            bad = [f"{shard.path}: {error}"]
        except (EOFError, zlib.error, OSError) as error:
            broken_connection = remote and isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile)
            if broken_connection or not last_try:
                raise
            bad = [f"{shard.path}: the file is cut off, damaged or cannot be read ({first_line(error)})"]
        if items or bad:
            yield Block(shard.path, shard.kind, items, raw.tell(), bad)


def pieces(file, sample_by):
    """(number of the first line, bytes) of each document of a file of lines; Damaged in place of one over LONGEST."""
    lines, size, first, number, ended = [], 0, 1, 1, True
    while True:
        line = file.readline(LONGEST + 1)                       # b"" at the end; the rest of a longer line comes next
        between = sample_by == "paragraph" and ended and not line.strip()
        ended = line.endswith(b"\n")
        if not between:
            size += len(line)
            if size > LONGEST:
                lines.clear()
            else:
                lines.append(line)
        number += ended
        if not line or between or (sample_by == "line" and ended):
            content = b"".join(lines).rstrip(b"\r\n")
            if size > LONGEST:
                yield first, Damaged(f"a document of more than {LONGEST >> 20} MB; split it, or see --sample_by")
            elif content.strip():
                yield first, content
            lines, size, first = [], 0, number
        if not line:
            return


def parquet_rows(raw, text_key):
    """(number of the row, bytes of its text) of a Parquet file; what is no text stays as it is."""
    import pyarrow
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(raw)
        if text_key not in file.schema_arrow.names:
            raise Damaged(f"no column {text_key!r}; it has {', '.join(file.schema_arrow.names)}: give --text_key")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[text_key]):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if column.type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                column = column.cast(pyarrow.binary() if column.type == pyarrow.string() else pyarrow.large_binary())
            for item in column.to_pylist():                     # bytes: the worker decodes them and can name a bad row
                number += 1
                yield number, item
    except pyarrow.ArrowInvalid as error:
        raise Damaged(f"not a Parquet file, or damaged ({first_line(error)})") from None


def documents_of(block, cfg):
    """(documents, bad) of a block: a list of str, and a list of "file:line: why" for what cannot be read."""
    documents, bad = [], []
    for number, item in block.items:
        try:
            if isinstance(item, Damaged):
                raise ValueError(str(item))
            if block.kind == "json":
                row = json.loads(item)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, not an object with a field {cfg.text_key!r}")
                item = row[cfg.text_key]
            elif isinstance(item, bytes):
                item = item.decode()
            if not isinstance(item, str):
                raise ValueError(f"{cfg.text_key!r} is {type(item).__name__}, not text")
            item.encode()                                       # lone surrogates are not text
            documents.append(item)
        except UnicodeError as error:
            bad.append(f"{block.shard}:{number}: not UTF-8 ({error.reason})")
        except json.JSONDecodeError as error:
            bad.append(f"{block.shard}:{number}: not JSON, one object a line ({error.msg})")
        except KeyError:
            bad.append(f"{block.shard}:{number}: no field {cfg.text_key!r}")
        except (ValueError, RecursionError) as error:
            bad.append(f"{block.shard}:{number}: {error}")
    return documents, bad + block.bad
