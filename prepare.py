"""Turn text into token files: data/NAME/{train,val}-*.bin, meta.json and the vocabulary.

    python prepare.py                                                            # pydocs, the embedded corpus
    python prepare.py --source=my/texts --vocab_size=8000 --out_dir=data/mine    # own text, own vocabulary
    python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4               # from the Hub, T5's vocabulary
    python prepare.py --source=path/to/c4/en --vocab=path/to/spiece.model --out_dir=data/c4

Stop it when you like (Ctrl-C, kill -9) and start it again with the same command: it goes on.

One process reads the source and cuts it into blocks; the others parse and tokenize blocks; the first one writes
them in order. Every input file ("shard") has one output file a split and one progress file, which says how many
blocks of it are safely on disk; after a stop the output is cut back to that and the reading goes on from there.
"""
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from configurator import configure
from data import EOS, FORMAT, N_SENTINEL, file_hash, load_vocabulary
from sources import BLOCK, SourceConfig, documents_of, find_shards, first_line, progress, read_blocks

COMMIT = 32                     # blocks between two commits of a shard
VOCABULARY = "spiece.model"
T5_VOCABULARY = "google/t5-v1_1-base"


@dataclass
class PrepareConfig:
    """How text becomes tokens, and where they go."""
    out_dir: str | None = None      # None: data/NAME of the source
    vocab: str | None = None        # SentencePiece file, folder or Hub name; None: T5's for c4, else trained here
    vocab_size: int | None = None   # pieces of a vocabulary trained here; None: 32,000 as T5, 2,000 for pydocs
    vocab_only: bool = False        # stop once the vocabulary is there
    n_tokens: int | None = None     # stop after about so many training tokens
    n_val_tokens: int = 10_000_000  # stop reading validation files after about so many
    val_share: float = 0.01         # share of documents held out, by their content, if there are no validation files
    shards: str | None = None       # FIRST:END of the source's files, to split the work over machines
    n_proc: int = 0                 # worker processes; 0: one a core
    skip_bad: bool = False          # count and report lines that cannot be read, instead of stopping
    seed: int = 0                   # of the choice of held-out documents
    overwrite: bool = False         # start anew although out_dir was prepared with other settings

    def __post_init__(self):
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share={self.val_share} must lie in [0, 1)")
        if self.vocab and self.vocab_size:
            raise ValueError("vocab_size belongs to a vocabulary trained here; leave out --vocab or --vocab_size")
        if self.vocab_size is not None and self.vocab_size < 8:
            raise ValueError(f"vocab_size={self.vocab_size} is too small; 8 is the least")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.n_proc < 0 or (self.n_tokens is not None and self.n_tokens < 1):
            raise ValueError(f"n_proc={self.n_proc} and n_tokens={self.n_tokens} must not be negative")
        if self.shards and not re.fullmatch(r"\d*:\d*", self.shards):
            raise ValueError(f"shards={self.shards!r} must read FIRST:END, as in 0:64")


# --- tokenizing: what a worker does ----------------------------------------------------------------------------------

def start_worker(vocabulary, settings):
    """Load the vocabulary once a process. Ctrl-C is the parent's business, and its death is ours."""
    global worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    worker = Encoder(load_vocabulary(vocabulary), **settings)


def work(block, is_val):
    return worker.encode(block, is_val)


class Encoder:
    """Blocks to ids: encode(block, is_val) gives bytes of ids a split, a Counter and the bad lines."""

    def __init__(self, vocabulary, source_cfg, dtype, val_share, seed):
        self.vocabulary, self.source_cfg, self.dtype = vocabulary, source_cfg, dtype
        self.limit, self.salt = int(val_share * 2 ** 64), seed.to_bytes(8, "little")
        self.unk = vocabulary.unk_id()
        # mT5's vocabularies hold the sentinels as pieces: text must not turn into them
        self.markers = {i for i in range(vocabulary.get_piece_size())
                        if re.fullmatch(r"\u2581?<extra_id_\d+>", vocabulary.id_to_piece(i))}

    def held_out(self, text):
        """Decided by the text alone: copies of a document land on one side, in whatever order files are read."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.salt).digest()
        return int.from_bytes(digest, "little") < self.limit

    def ids_of(self, documents):
        rows = self.vocabulary.encode(documents, num_threads=1)
        if self.markers:
            for i, ids in enumerate(rows):
                if not self.markers.isdisjoint(ids):
                    pieces = re.split(r"(?<=<)(?=extra_id_)", documents[i])
                    rows[i] = [t for piece in pieces for t in self.vocabulary.encode(piece)]
        return rows

    def encode(self, block, is_val):
        documents, bad = documents_of(block, self.source_cfg)
        parts = {"train": [], "val": []}
        counts = Counter(bad=len(bad))
        for text, ids in zip(documents, self.ids_of(documents), strict=True):
            counts["bytes"] += len(text.encode())
            if not ids:                                         # nothing but blanks
                counts["empty"] += 1
                continue
            ids.append(EOS)
            split = "val" if is_val or self.held_out(text) else "train"
            parts[split].append(ids)
            counts[f"{split}_documents"] += 1
        blobs = {}
        for split, rows in parts.items():
            n = sum(map(len, rows))
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=self.dtype, count=n)
            counts[f"{split}_tokens"], counts["unknown"] = n, counts["unknown"] + int((flat == self.unk).sum())
            blobs[split] = flat.tobytes()
        return blobs, counts, bad


# --- vocabulary ------------------------------------------------------------------------------------------------------

def get_vocabulary(cfg, source_cfg, out_dir, shards):
    """Put the SentencePiece model at out_dir/spiece.model: copied, fetched from the Hub, or trained on the text."""
    path = out_dir / VOCABULARY
    wanted = cfg.vocab or (T5_VOCABULARY if source_cfg.source == "c4" else None)
    if path.exists() and (out_dir / "progress" / "source.json").exists():      # begun with the settings of now
        return path
    if wanted is None:
        if cfg.shards:
            raise ValueError("with --shards every machine needs the same vocabulary: make it once with"
                             " --vocab_only=True and give it with --vocab")
        content = train_vocabulary(cfg, source_cfg, shards)
    else:
        given = Path(wanted).expanduser()
        if given.is_dir():
            given = given / VOCABULARY
        if not given.is_file():
            if given.suffix or given.is_absolute() or not re.fullmatch(r"[\w.-]+/[\w.-]+", wanted):
                raise FileNotFoundError(f"vocabulary {given} is missing")
            from huggingface_hub import hf_hub_download
            try:
                given = Path(hf_hub_download(wanted, VOCABULARY))
            except Exception as error:
                raise FileNotFoundError(f"vocabulary {wanted} is no file here, and the Hub gave none"
                                        f" ({type(error).__name__}: {first_line(error)}); a local copy of its"
                                        f" {VOCABULARY} can be given as --vocab=PATH") from None
        load_vocabulary(given)
        content = given.read_bytes()
    write_atomically(path, lambda file: file.write(content))
    vocabulary = load_vocabulary(path)
    if (vocabulary.pad_id(), vocabulary.eos_id(), vocabulary.unk_id()) != (0, 1, 2):
        path.unlink()
        raise ValueError(f"vocabulary {wanted}: T5 needs pad 0, eos 1, unk 2, but it has pad {vocabulary.pad_id()},"
                         f" eos {vocabulary.eos_id()}, unk {vocabulary.unk_id()}")
    return path


def train_vocabulary(cfg, source_cfg, shards, sample=10 << 20):
    """A unigram vocabulary as T5's (pad 0, eos 1, unk 2, no byte fallback), from about 10 MB of the source's text,
    taken evenly from up to 64 of its files; returns the model's bytes."""
    import sentencepiece
    size = cfg.vocab_size or (2_000 if source_cfg.source == "pydocs" else 32_000)
    train = [s for s in shards if not s.is_val] or shards
    chosen = train[::max(1, len(train) // 64)][:64]

    def lines():
        for shard in chosen:
            left = sample // len(chosen)
            for block in read_blocks(shard, source_cfg):
                for text in documents_of(block, source_cfg)[0]:
                    for line in text.split("\n"):
                        for i in range(0, len(line), 1000):     # the trainer leaves out lines over 4,192 bytes
                            yield line[i:i + 1000]
                left -= len(block.content) if block.kind != "parquet" else BLOCK
                if left <= 0:
                    break

    model, taken = io.BytesIO(), []
    bar = progress(desc=f"vocabulary of {size:,} pieces: reading", unit="B", unit_scale=True)
    for line in lines():
        taken.append(line)
        bar.update(len(line))
    bar.close()
    if not any(line.strip() for line in taken):
        raise ValueError(f"{source_cfg.source} holds no text to train a vocabulary on")
    print("training the vocabulary ...", flush=True)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(taken), model_writer=model, vocab_size=size, model_type="unigram", pad_id=0,
            eos_id=1, unk_id=2, bos_id=-1, num_threads=os.cpu_count(), minloglevel=2)
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        least = re.search(r"required_chars[^0-9]*\d+[^0-9]+(\d+)|smaller than required_chars\D*(\d+)", str(error))
        if most:
            raise ValueError(f"vocab_size={size} is more than the text supports; at most {most[1]}") from None
        raise ValueError(f"vocab_size={size} does not fit the text: {first_line(error)}"
                         if not least else f"vocab_size={size} is less than the text's letters need") from None
    return model.getvalue()


# --- writing: shards, progress, meta.json ----------------------------------------------------------------------------

def write_atomically(path, write):
    from runtime import write_atomically as call  # not at the top: it brings torch, which no worker needs
    call(path, write)


def write_json(path, content):
    from runtime import write_json as call
    call(path, content)


def check_same_source(cfg, source_cfg, out_dir, shards):
    """Refuse to go on in a folder that was begun from other text or with other settings, naming what differs; returns
    what to write down about this source once it has begun."""
    path = out_dir / "progress" / "source.json"
    free = ("out_dir", "n_tokens", "n_val_tokens", "shards", "n_proc", "skip_bad", "overwrite", "vocab_only", "source")
    now = {k: v for k, v in {**asdict(source_cfg), **asdict(cfg)}.items() if k not in free}
    now["source"] = Path(source_cfg.source).name
    now["files"] = [[s.name, s.size] for s in shards]
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        for name in now:
            if old.get(name) != now[name]:
                what = (f"{name}={old.get(name)}, now {now[name]}" if name != "files" else "other files, or files of"
                        " other sizes")
                raise ValueError(f"{out_dir} was begun with {what}; use the same, another --out_dir, or"
                                 f" --overwrite=True")
    return path, now


class ShardWriter:
    """The output of one shard: two token files and a progress file, which is written after them and so is the truth."""

    def __init__(self, out_dir, number):
        self.progress_file = out_dir / "progress" / f"{number:05d}.json"
        self.paths = {split: out_dir / f"{split}-{number:05d}.bin" for split in ("train", "val")}
        self.counts, self.blocks, self.complete, self.bad, self.sizes = Counter(), 0, False, [], Counter()
        if self.progress_file.exists():
            saved = json.loads(self.progress_file.read_text(encoding="utf-8"))
            self.counts, self.sizes = Counter(saved["counts"]), Counter(saved["sizes"])
            self.blocks, self.complete, self.bad = saved["blocks"], saved["complete"], saved["bad"]
        self.files = None

    def open(self):
        self.files = {}
        for split, path in self.paths.items():
            self.files[split] = open(path, "r+b" if path.exists() else "w+b")
            self.files[split].truncate(self.sizes[split])       # what came after the last commit is done again
            self.files[split].seek(0, io.SEEK_END)

    def add(self, blobs, counts, bad):
        for split, blob in blobs.items():
            self.files[split].write(blob)
            self.sizes[split] += len(blob)
        self.counts.update(counts)
        self.blocks += 1
        self.bad = (self.bad + bad)[:20]

    def commit(self, complete=False):
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        self.complete = complete
        write_json(self.progress_file, {"counts": self.counts, "sizes": self.sizes, "blocks": self.blocks,
                                        "complete": complete, "bad": self.bad})

    def close(self):
        for file in self.files.values():
            file.close()


def write_meta(source, out_dir, vocabulary_path, dtype, n_shards):
    """meta.json from every shard that the folder has a progress file of; returns it."""
    vocabulary = load_vocabulary(vocabulary_path)
    writers = [ShardWriter(out_dir, n) for n in range(n_shards)
               if (out_dir / "progress" / f"{n:05d}.json").exists()]
    counts = sum((w.counts for w in writers), Counter())
    first_sentinel, n_id = sentinels(vocabulary)
    splits = {}
    for split in ("train", "val"):
        parts = [{"name": w.paths[split].name, "tokens": w.sizes[split] // np.dtype(dtype).itemsize}
                 for w in writers if w.sizes[split]]
        splits[split] = {"tokens": sum(p["tokens"] for p in parts), "documents": counts[f"{split}_documents"],
                         "parts": parts}
    tokens = sum(s["tokens"] for s in splits.values())
    meta = {"format": FORMAT, "dtype": dtype, "splits": splits, "n_piece": vocabulary.get_piece_size(), "n_id": n_id,
            "first_sentinel": first_sentinel, "n_sentinel": N_SENTINEL, "vocabulary": VOCABULARY,
            "vocabulary_sha256": file_hash(vocabulary_path), "source": source,
            "unknown_share": counts["unknown"] / max(1, tokens), "text_bytes": counts["bytes"],
            "bad_lines": counts["bad"], "empty_documents": counts["empty"],
            "shards": len(writers), "shards_of_source": n_shards}
    write_json(out_dir / "meta.json", meta)
    return meta


def sentinels(vocabulary):
    """(id of <extra_id_0>, number of ids): 100 above the pieces, or where the vocabulary itself has them (mT5)."""
    n = vocabulary.get_piece_size()
    for name in ("<extra_id_0>", "\u2581<extra_id_0>"):
        i = vocabulary.piece_to_id(name)
        if i != vocabulary.unk_id():
            return i, n
    return n + N_SENTINEL - 1, n + N_SENTINEL


def main(argv=None):
    cfg, source_cfg = configure(PrepareConfig, SourceConfig, argv=argv)
    name = Path(source_cfg.source).name.split(".")[0] or "text"
    out_dir = Path(cfg.out_dir or f"data/{name}")
    if cfg.overwrite and (out_dir / "progress").is_dir():
        for file in [*out_dir.glob("*.bin"), *(out_dir / "progress").glob("*.json"), out_dir / "meta.json",
                     out_dir / VOCABULARY]:
            file.unlink(missing_ok=True)
    (out_dir / "progress").mkdir(parents=True, exist_ok=True)
    t0 = time.time()
    shards = find_shards(source_cfg, out_dir)
    begun = check_same_source(cfg, source_cfg, out_dir, shards)
    vocabulary_path = get_vocabulary(cfg, source_cfg, out_dir, shards)
    write_json(*begun)
    _, n_id = sentinels(load_vocabulary(vocabulary_path))
    dtype = "uint16" if n_id <= 65_536 else "uint32"
    if cfg.vocab_only:
        print(f"{vocabulary_path} is ready")
        return 0
    first, end = (int(x) if x else None for x in (cfg.shards or ":").split(":"))
    mine = list(enumerate(shards))[first:end]
    if not mine:
        raise ValueError(f"shards={cfg.shards} names none of the {len(shards)} files of {source_cfg.source}")
    settings = dict(source_cfg=source_cfg, dtype=dtype, seed=cfg.seed,
                    val_share=0.0 if any(s.is_val for s in shards) else cfg.val_share)
    tokenize(cfg, out_dir, mine, vocabulary_path, settings)
    meta = write_meta(source_cfg.source, out_dir, vocabulary_path, dtype, len(shards))
    report(cfg, out_dir, meta, mine, time.time() - t0)
    return 0


def tokenize(cfg, out_dir, shards, vocabulary_path, settings):
    """Tokenize (number, shard) pairs into out_dir, from wherever an earlier call stopped."""
    writers = [(ShardWriter(out_dir, number), shard) for number, shard in shards]
    total = {split: sum(w.counts[f"{split}_tokens"] for w, s in writers) for split in ("train", "val")}
    n_proc = cfg.n_proc or os.cpu_count()
    by_tokens = cfg.n_tokens is not None
    bar = progress(desc=str(out_dir), total=cfg.n_tokens if by_tokens else sum(s.size for _, s in shards),
                   initial=total["train"] if by_tokens else sum(s.size for w, s in writers if w.complete),
                   unit=" tokens" if by_tokens else "B", unit_scale=True)
    t0, text = time.time(), 0
    pool = ProcessPoolExecutor(n_proc, multiprocessing.get_context("spawn"), start_worker,
                               (str(vocabulary_path), settings))
    try:
        for writer, shard in writers:
            if writer.complete:
                continue
            full = (lambda: total["val"] >= cfg.n_val_tokens) if shard.is_val else \
                   (lambda: by_tokens and total["train"] >= cfg.n_tokens)
            if full():
                continue
            writer.open()
            waiting, blocks, at = deque(), read_blocks(shard, settings["source_cfg"], writer.blocks), 0
            while True:
                while len(waiting) < 3 * n_proc and (block := next(blocks, None)) is not None:
                    waiting.append((pool.submit(work, block, shard.is_val), block.at))
                    del block
                if not waiting or full():
                    break
                future, now = waiting.popleft()
                blobs, counts, bad = future.result()
                if bad and not cfg.skip_bad:
                    writer.commit()
                    raise ValueError(f"{bad[0]}; --skip_bad=True leaves such lines out and counts them")
                writer.add(blobs, counts, bad)
                for split in total:
                    total[split] += counts[f"{split}_tokens"]
                text += counts["bytes"]
                bar.update(counts["train_tokens"] if by_tokens else now - at)
                at = now
                rate = text / 1e6 / (time.time() - t0)
                bar.set_postfix_str(f"{sum(total.values()):,} tokens, {rate:.1f} MB/s of text", refresh=False)
                if writer.blocks % COMMIT == 0:
                    writer.commit()
            writer.commit(complete=not waiting)
            writer.close()
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)


def report(cfg, out_dir, meta, shards, seconds):
    """Print what was made, and what to do about what is odd."""
    train, val = meta["splits"]["train"], meta["splits"]["val"]
    size = sum(f.stat().st_size for f in out_dir.glob("*.bin"))
    print(f"{out_dir}: {train['documents'] + val['documents']:,} documents, {train['tokens']:,} training tokens and"
          f" {val['tokens']:,} held out, unknown share {meta['unknown_share']:.4%}, {meta['text_bytes']:,} bytes of"
          f" text in {size:,} bytes, {seconds:.1f} seconds")
    if meta["bad_lines"]:
        print(f"left out: {meta['bad_lines']:,} bad lines, among them")
        for number, _ in shards:
            for line in ShardWriter(out_dir, number).bad[:3]:
                print(f"  {line}")
    if meta["empty_documents"]:
        print(f"left out: {meta['empty_documents']:,} documents without text")
    if meta["shards"] < meta["shards_of_source"] and not cfg.n_tokens:
        print(f"{meta['shards']} of the source's {meta['shards_of_source']} files are in this folder; run the others"
              f" with --shards here, or copy their .bin and progress files here and run once more")
    if meta["unknown_share"] > 0.01:
        print("more than 1 % of the tokens are unknown pieces: this vocabulary does not fit the text")
    for split, n in (("training", train["tokens"]), ("held-out", val["tokens"])):
        if not n:
            print(f"there are no {split} tokens; train.py needs some"
                  + (" (raise --val_share)" if split == "held-out" else ""))


if __name__ == "__main__":
    from runtime import run
    run(main)
