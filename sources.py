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

BLOCK = 1 << 20                 # bytes of text in a block
LONGEST = 64 << 20              # bytes; a longer document is refused
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
    suffix = Path(str(path).removesuffix(".gz")).suffix
    kind = KINDS.get(suffix)
    return None if kind == "parquet" and str(path).endswith(".gz") else kind


def is_validation(name):
    return bool(re.search(r"(^|[^a-z])(val|valid|validation|dev|eval)([^a-z]|$)", name.lower()))


def find_shards(cfg, out_dir):
    """The files of a source, in the order of their names, validation files first."""
    path = Path(cfg.source).expanduser()
    if cfg.source == "pydocs":
        path = out_dir / "pydocs.jsonl"
        if not path.exists():
            write_pydocs(path)
    if path.is_file():
        if not kind_of(path):
            raise ValueError(f"{path}: this kind of file is not read; there are {', '.join(KINDS)} and .gz of them")
        found = [(path.name, path)]
    elif path.is_dir():
        found = [(p.relative_to(path).as_posix(), p) for p in path.rglob("*") if p.is_file() and kind_of(p)
                 and not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not found:
            raise ValueError(f"{path} holds no {', '.join(KINDS)} file, nor one of these with .gz")
    elif cfg.source == "c4" or (re.fullmatch(r"[\w.-]+(/[\w.-]+)?", cfg.source) and not kind_of(cfg.source)):
        return hub_shards(cfg)
    else:
        raise FileNotFoundError(f"source {cfg.source} is no file or folder here")
    shards = [Shard(name, str(p), kind_of(p), is_validation(name), p.stat().st_size) for name, p in found]
    return sorted(shards, key=lambda s: (not s.is_val, s.name))


def hub_shards(cfg):
    """The files of a data set on the Hub, as its own description lists them."""
    import datasets
    from fsspec.core import url_to_fs
    name, subset = C4 if cfg.source == "c4" else (cfg.source, None)
    subset = cfg.subset or subset

    for attempt in range(3):
        try:
            files = datasets.load_dataset_builder(name, subset).config.data_files or {}
            sizes = {str(url): url_to_fs(str(url)) for urls in files.values() for url in urls}
            sizes = {url: fs.info(path)["size"] for url, (fs, path) in sizes.items()}
            break
        except Exception as error:
            if attempt == 2:
                raise FileNotFoundError(f"source {cfg.source} is no file or folder here, and the Hub gave no data set"
                                        f" of that name ({type(error).__name__}: {first_line(error)})") from None
            wait_to_retry(attempt, f"data set {name}", error)
    shards = [Shard(f"{split}/{str(url).rsplit('/', 1)[-1]}", str(url), kind_of(url) or "", str(split) != "train",
                    sizes[str(url)]) for split, urls in files.items() if str(split) in ("train", "validation")
              for url in urls]
    unread = [s.path for s in shards if not s.kind]
    if unread or not shards:
        raise ValueError(f"data set {name}: {unread[0] if unread else 'no train split'} cannot be read here")
    return sorted(shards, key=lambda s: (not s.is_val, s.name))


def first_line(error):
    return str(error).partition("\n")[0]


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
    pattern = re.compile(r"(^[ \t]*[rR]?)?(\"\"\"|''')(.*?)\2", re.S | re.M)
    seen = set()

    def documents():
        for root_name, root in roots:
            for file in sorted(root.rglob("*.py")):
                parts = file.relative_to(root).parts
                if {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"} & set(parts):
                    continue
                text = file.read_text(encoding="utf-8", errors="replace")
                for at_line_start, _, body in pattern.findall(text):
                    if at_line_start or text.startswith(('"""', 'r"""')):
                        yield "/".join((root_name, *parts)), inspect.cleandoc(body)
        from pydoc_data.topics import topics
        for name, text in sorted(topics.items()):
            yield f"topics/{name}", text

    def write(file):
        for origin, text in progress(documents(), desc="pydocs", unit=" texts"):
            if len(text) >= 100 and text not in seen:           # shorter ones say too little, and many stand twice
                seen.add(text)
                file.write((json.dumps({"text": text, "origin": origin}) + "\n").encode())

    from runtime import write_atomically  # not at the top: it brings torch, which no worker needs
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


def progress(iterable=None, **options):
    from tqdm import tqdm
    return tqdm(iterable, dynamic_ncols=True, mininterval=0.5, **options)


# --- reading: a shard as blocks --------------------------------------------------------------------------------------

@dataclass
class Block:
    """Work for one worker: whole documents of one shard."""
    shard: str
    kind: str                       # text, json, parquet; damaged: content is what went wrong
    first: int                      # number of its first line or row in the file, from 1
    content: bytes | list           # bytes of text and json, a list of str of parquet
    at: int = 0                     # bytes of the stored file read so far


def read_blocks(shard, cfg, skip=0):
    """Yield the blocks of a shard from number `skip` on. The same file always gives the same blocks.

    A file on the Hub that fails midway is opened again, with back-off, and read up to where it was. A local one ends
    in a block that says what is wrong with it.
    """
    done, attempt = skip, 0
    while True:
        try:
            for number, block in enumerate(open_blocks(shard, cfg)):
                if number >= done:
                    done, attempt = number + 1, 0
                    yield block
            return
        except ValueError:                                      # ours: the content, not the transport
            raise
        except Exception as error:
            if "://" in shard.path and attempt < 8:
                wait_to_retry(attempt, shard.path, error)
                attempt += 1
            elif isinstance(error, (EOFError, zlib.error, OSError)):
                yield Block(shard.path, "damaged", 0, f"{shard.path}: the file is cut off, damaged or cannot be read"
                            f" ({first_line(error)})".encode())
                return
            else:
                raise


def open_blocks(shard, cfg):
    import fsspec
    with fsspec.open(shard.path, "rb") as raw:
        if shard.kind == "parquet":
            yield from parquet_blocks(shard, cfg, raw)
            return
        import gzip
        file = gzip.GzipFile(fileobj=raw) if shard.path.endswith(".gz") else raw
        ends = (b"\n\n", b"\n\r\n") if shard.kind == "text" and cfg.sample_by == "paragraph" else (b"\n",)
        whole = shard.kind == "text" and cfg.sample_by == "document"
        line, rest = 1, b""
        while chunk := file.read(BLOCK):
            rest += chunk
            cut = 0 if whole else max(rest.rfind(end) + len(end) if end in rest else 0 for end in ends)
            if cut:
                yield Block(shard.path, shard.kind, line, rest[:cut], raw.tell())
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
            elif len(rest) > LONGEST:
                hint = " or try --sample_by=line" if shard.kind == "text" and cfg.sample_by != "line" else ""
                raise ValueError(f"{shard.path}:{line}: a document of more than {LONGEST >> 20} MB; split it{hint}")
        if rest:
            yield Block(shard.path, shard.kind, line, rest, raw.tell())


def parquet_blocks(shard, cfg, raw):
    import pyarrow
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(raw)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{shard.path} is not a Parquet file ({first_line(error)})") from None
    if cfg.text_key not in file.schema_arrow.names:
        raise ValueError(f"{shard.path} has no column {cfg.text_key!r}; it has {', '.join(file.schema_arrow.names)}:"
                         f" give --text_key")
    row, texts, size = 1, [], 0
    for batch in file.iter_batches(batch_size=256, columns=[cfg.text_key]):
        texts += batch.column(0).to_pylist()
        size += batch.nbytes
        if size >= BLOCK:
            yield Block(shard.path, shard.kind, row, texts, raw.tell())
            row, texts, size = row + len(texts), [], 0
    if texts:
        yield Block(shard.path, shard.kind, row, texts, raw.tell())


def documents_of(block, cfg):
    """(documents, bad) of a block: a list of str, and a list of "file:line: why" for what cannot be read."""
    text_key, sample_by, documents, bad = cfg.text_key, cfg.sample_by, [], []
    if block.kind == "damaged":
        return [], [block.content.decode()]

    def add(number, item):
        try:
            item = item()
            if not isinstance(item, str):
                raise ValueError(f"{text_key!r} is {type(item).__name__}, not text")
            item.encode()                                       # lone surrogates are not text
            documents.append(item)
        except UnicodeError as error:
            bad.append(f"{block.shard}:{number}: not UTF-8 ({error.reason})")
        except json.JSONDecodeError as error:
            bad.append(f"{block.shard}:{number}: not JSON ({error.msg})")
        except (KeyError, TypeError):
            bad.append(f"{block.shard}:{number}: no field {text_key!r}")
        except ValueError as error:
            bad.append(f"{block.shard}:{number}: {error}")

    if block.kind == "parquet":
        for i, text in enumerate(block.content):
            add(block.first + i, lambda: text)
    elif block.kind == "json" or sample_by == "line":
        for i, line in enumerate(block.content.split(b"\n")):
            if line.strip():
                add(block.first + i, (lambda: json.loads(line)[text_key]) if block.kind == "json"
                    else lambda: line.decode().removesuffix("\r"))
    elif sample_by == "document":
        add(block.first, block.content.decode)
    else:
        number = block.first
        for piece in re.split(rb"(\n[ \t\r]*\n)", block.content):
            if piece.strip():
                add(number, piece.decode)
            number += piece.count(b"\n")
    return documents, bad
