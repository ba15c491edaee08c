"""Turn text into token files: data/NAME/{train,val}-*.bin, meta.json and the vocabulary.

    python prepare.py                                                            # pydocs, the embedded corpus
    python prepare.py --source=my/texts --vocab_size=8000 --out_dir=data/mine    # own text, own vocabulary
    python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4               # from the Hub, T5's vocabulary
    python prepare.py --source=path/to/c4/en --vocab=path/to/spiece.model --out_dir=data/c4

Stop it when you like (Ctrl-C, kill -9) and start it again with the same command: it goes on.

The main thread reads the source and cuts it into blocks, others parse and tokenize blocks (SentencePiece lets go of
Python's lock meanwhile, so they fill as many cores), and the main one writes the ids in order. Every input file
("shard") has one output file a split and one progress file, which says how many blocks of it are safely on disk; after
a stop the output is cut back to that and the reading goes on from there.
"""
import functools
import hashlib
import io
import json
import math
import os
import re
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import configure
from data import FORMAT, N_SENTINEL, VOCABULARY, check_layout, file_hash, hub_file, load_vocabulary, sentinels
from files import first_line, lock, run, write_atomically, write_json
from sources import SourceConfig, documents_of, find_shards, progress, read_blocks

COMMIT = 32                     # blocks between two commits of a shard
T5_VOCABULARY = "google/t5-v1_1-base"


@dataclass
class PrepareConfig:
    """How text becomes tokens, and where they go."""
    out_dir: str | None = None      # None: data/NAME of the source
    vocab: str | None = None        # SentencePiece file, folder or Hub name; None: T5's for c4, else trained here
    vocab_size: int | None = None   # pieces of a vocabulary trained here; None: 32,000 or what the text supports
    n_sentinel: int = N_SENTINEL    # ids above the pieces of a vocabulary that has no sentinels itself; umT5: 300
    vocab_only: bool = False        # stop once the vocabulary is there
    n_tokens: int | None = None     # stop after about so many training tokens of this call's files; may be raised later
    n_val_tokens: int = 10_000_000  # stop reading validation files after about so many
    val_share: float = 0.01         # share of documents held out, by their content, if there are no validation files
    shards: str | None = None       # FIRST:END of the source's files, to split the work over machines
    n_proc: int = 0                 # threads that tokenize; 0: one a core
    skip_bad: bool = False          # count and report lines and files that cannot be read, instead of stopping
    seed: int = 0                   # of the choice of held-out documents
    overwrite: bool = False         # start anew although out_dir was prepared with other settings

    def __post_init__(self):
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share={self.val_share} must lie in [0, 1)")
        if self.vocab and self.vocab_size:
            raise ValueError("vocab_size belongs to a vocabulary trained here; leave out --vocab or --vocab_size")
        if self.vocab_size is not None and self.vocab_size < 8:
            raise ValueError(f"vocab_size={self.vocab_size} is too small; 8 is the least")
        if self.n_sentinel < N_SENTINEL:
            raise ValueError(f"n_sentinel={self.n_sentinel} must be at least {N_SENTINEL}")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^63)")
        if self.n_proc < 0:
            raise ValueError(f"n_proc={self.n_proc} must not be negative")
        if self.n_tokens is not None and self.n_tokens < 1:
            raise ValueError(f"n_tokens={self.n_tokens} must be at least 1")
        if self.shards and self.overwrite:
            raise ValueError("overwrite=True would delete the other shards too; leave out --shards or --overwrite")
        if self.shards and not re.fullmatch(r"\d*:\d*", self.shards):
            raise ValueError(f"shards={self.shards!r} must read FIRST:END, as in 0:64")


# --- tokenizing: what a thread does ----------------------------------------------------------------------------------

class Encoder:
    """Blocks to ids: encode(block, is_val) gives bytes of ids a split, a Counter and the bad lines; of many threads."""

    def __init__(self, vocabulary, source_cfg, dtype, val_share, seed):
        self.vocabulary, self.source_cfg, self.dtype = vocabulary, source_cfg, dtype
        self.limit, self.salt = int(val_share * 2 ** 64), seed.to_bytes(8, "little")
        self.unk = vocabulary.unk_id()
        # mT5's vocabularies hold the sentinels as pieces: text must not turn into them
        self.markers = [i for i in range(vocabulary.get_piece_size())
                        if re.fullmatch(r"\u2581?<extra_id_\d+>", vocabulary.id_to_piece(i))]

    def held_out(self, content):
        """Decided by the text alone: copies of a document land on one side, in whatever order files are read."""
        digest = hashlib.blake2b(content, digest_size=8, key=self.salt).digest()
        return int.from_bytes(digest, "little") < self.limit

    def ids_of(self, documents):
        """An int32 array of each document, closed by EOS; as arrays, since lists of ints take a third longer."""
        encode = functools.partial(self.vocabulary.encode, num_threads=1, return_type="numpy")
        rows = encode(documents, add_eos=True)
        if self.markers:
            for i, ids in enumerate(rows):
                if np.isin(ids, self.markers).any():
                    pieces = re.split(r"(?<=<)(?=extra_id_)", documents[i])
                    rows[i] = np.concatenate([encode(piece, add_eos=piece is pieces[-1]) for piece in pieces])
        return rows

    def encode(self, block, is_val):
        documents, bad = documents_of(block, self.source_cfg)
        parts = {"train": [], "val": []}
        counts = Counter(bad=len(bad))
        for text, ids in zip(documents, self.ids_of(documents), strict=True):
            content = text.encode()
            counts["bytes"] += len(content)
            if len(ids) == 1:                                   # nothing but blanks, and EOS
                counts["empty"] += 1
                continue
            split = "val" if is_val or self.held_out(content) else "train"
            parts[split].append(ids)
            counts[f"{split}_documents"] += 1
        blobs = {}
        for split, rows in parts.items():
            flat = np.concatenate(rows) if rows else np.empty(0, np.int32)
            counts[f"{split}_tokens"] = len(flat)
            counts["unknown"] += int(np.count_nonzero(flat == self.unk))
            blobs[split] = flat.astype(self.dtype).tobytes()
        return blobs, counts, bad


# --- vocabulary ------------------------------------------------------------------------------------------------------

def get_vocabulary(cfg, source_cfg, out_dir, shards):
    """The bytes of a SentencePiece model, the first that applies of: the file, folder or Hub name that --vocab gives,
    that of a folder begun before, T5's own for C4, one trained on the source."""
    begun = (out_dir / "progress" / "source.json").exists() and not cfg.overwrite
    if cfg.vocab and Path(cfg.vocab).expanduser().exists():
        path = Path(cfg.vocab).expanduser()
        path = path / VOCABULARY if path.is_dir() else path
    elif cfg.vocab:
        path = hub_vocabulary(cfg.vocab)
    elif begun and (out_dir / VOCABULARY).exists():
        path = out_dir / VOCABULARY
    elif source_cfg.source == "c4" and not cfg.vocab_size:
        path = hub_vocabulary(T5_VOCABULARY)
    elif cfg.shards:
        raise ValueError("with --shards every machine needs the same vocabulary: make it once with"
                         " --vocab_only=True and give it with --vocab")
    else:
        return train_vocabulary(cfg, source_cfg, shards)
    vocabulary = load_vocabulary(path)
    check_layout(vocabulary, path)
    if cfg.vocab_size and vocabulary.get_piece_size() != cfg.vocab_size:
        raise ValueError(f"{out_dir} was begun with a vocabulary of {vocabulary.get_piece_size()} pieces, now"
                         f" vocab_size={cfg.vocab_size}; use another --out_dir, or --overwrite=True")
    return path.read_bytes()


def hub_vocabulary(name):
    """The local copy of the SentencePiece model of a model on the Hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.endswith(".model"):
        raise FileNotFoundError(f"vocabulary {name} is missing")
    try:
        return hub_file(name, VOCABULARY)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"vocabulary {error}; a local copy of it can be given as --vocab=PATH") from None


def train_vocabulary(cfg, source_cfg, shards, sample=10_000_000):
    """A unigram vocabulary as T5's (pad 0, eos 1, unk 2, no byte fallback); returns the model's bytes.

    It sees about `sample` characters: the first ones of up to 64 of the source's files, spread evenly. Without
    vocab_size it has 32,000 pieces (pydocs: 2,000), or as many as the text supports.
    """
    import sentencepiece
    size = cfg.vocab_size or (2_000 if source_cfg.source == "pydocs" else 32_000)
    train = [s for s in shards if not s.is_val] or shards
    chosen = train[::math.ceil(len(train) / 64)]

    def documents(shard):
        for block in read_blocks(shard, source_cfg):
            texts, bad = documents_of(block, source_cfg)
            refuse(bad, cfg.skip_bad)
            yield from texts

    model, lines = io.BytesIO(), []
    bar = progress(desc=f"vocabulary of {size:,} pieces: reading", unit="B", unit_scale=True)
    for shard in chosen:
        left = sample // len(chosen)
        for text in documents(shard):
            for line in text.split("\n"):
                lines += [line[i:i + 1000] for i in range(0, len(line), 1000)]  # the trainer drops longer ones
            bar.update(len(text))
            left -= len(text)
            if left <= 0:
                break
    bar.close()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{source_cfg.source} holds no text to train a vocabulary on")
    print("training the vocabulary ...", flush=True)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type="unigram", pad_id=0,
            eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=cfg.vocab_size is not None, minloglevel=2,
            num_threads=16)                                     # the pieces depend on it: the same on every machine
    except RuntimeError as error:
        most, least = re.search(r"value <= (\d+)", str(error)), re.search(r"required_chars.*?\d+ vs (\d+)", str(error))
        raise ValueError(f"vocab_size={size} is more than the text supports; at most {most[1]}" if most else
                         f"vocab_size={size} is less than the text's letters need; at least {least[1]}" if least else
                         f"vocab_size={size} does not fit the text: {first_line(error)}") from None
    return model.getvalue()


def token_dtype(n_id):
    return "uint16" if n_id <= 65_536 else "uint32"


# --- writing: shards, progress, meta.json ----------------------------------------------------------------------------

def refuse(bad, skip_bad):
    if bad and not skip_bad:
        raise ValueError(f"{bad[0]}; --skip_bad=True leaves such lines out and counts them")


def source_record(cfg, source_cfg, shards, vocabulary):
    """What the tokens follow from: files, settings, vocabulary. A folder holds tokens of one such record only."""
    more = {"n_sentinel": cfg.n_sentinel} if cfg.n_sentinel != N_SENTINEL else {}
    return more | {
            "source": Path(source_cfg.source).name, "subset": source_cfg.subset, "text_key": source_cfg.text_key,
            "sample_by": source_cfg.sample_by, "val_share": cfg.val_share, "seed": cfg.seed,
            "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(), "files": [[s.name, s.size] for s in shards]}


def check_same_source(out_dir, record):
    """Refuse to go on in a folder that was begun from something else, naming what differs."""
    path = out_dir / "progress" / "source.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else record
    for name in record | old:
        was, now = (values.get(name, N_SENTINEL if name == "n_sentinel" else None) for values in (old, record))
        if was != now:
            what = {"files": "other files, or files of other sizes", "vocabulary_sha256": "another vocabulary"}.get(
                name, f"{name}={was}, now {now}")
            raise ValueError(f"{out_dir} was begun with {what}; use the same, another --out_dir, or --overwrite=True")


class ShardWriter:
    """The output of one shard: two token files and a progress file, which is written after them and so is the truth."""

    def __init__(self, out_dir, number, made_from):
        self.progress_file = out_dir / "progress" / f"{number:05d}.json"
        self.paths = {split: out_dir / f"{split}-{number:05d}.bin" for split in ("train", "val")}
        self.made_from, self.files = made_from, {}
        self.load()

    def load(self):
        """Take up what the progress file says, if there is one, and check that it can be so."""
        self.counts, self.blocks, self.complete, self.bad, self.sizes = Counter(), 0, False, [], Counter()
        if not self.progress_file.exists():
            return
        saved = json.loads(self.progress_file.read_text(encoding="utf-8"))
        if saved["made_from"] != self.made_from:
            raise ValueError(f"{self.progress_file} belongs to other text, settings or another vocabulary than this"
                             f" folder's progress/source.json")
        self.counts, self.sizes = Counter(saved["counts"]), Counter(saved["sizes"])
        self.blocks, self.complete, self.bad = saved["blocks"], saved["complete"], saved["bad"]
        for split, path in self.paths.items():
            size = path.stat().st_size if path.exists() else 0
            if size < self.sizes[split]:
                raise ValueError(f"{path} has {size:,} bytes, but {self.sizes[split]:,} were written; copy it here"
                                 f" again, or start anew with --overwrite=True")

    def open(self):
        for split, path in self.paths.items():
            self.files[split] = lock(path, path)
        self.load()                                             # again: nobody else writes any more
        for split, file in self.files.items():
            file.truncate(self.sizes[split])                    # what came after the last commit is done again

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
                                        "complete": complete, "bad": self.bad, "made_from": self.made_from})

    def close(self):                                            # may come twice
        for file in self.files.values():
            file.close()


def write_meta(cfg, source, out_dir, made_from, n_shards, vocabulary):
    """meta.json from every shard that the folder has a progress file of; returns it."""
    writers = [ShardWriter(out_dir, n, made_from) for n in range(n_shards)
               if (out_dir / "progress" / f"{n:05d}.json").exists()]
    counts = sum((w.counts for w in writers), Counter())
    first_sentinel, n_id = sentinels(vocabulary, cfg.n_sentinel)
    dtype = token_dtype(n_id)
    splits = {}
    for split in ("train", "val"):
        parts = [{"name": w.paths[split].name, "tokens": w.sizes[split] // np.dtype(dtype).itemsize}
                 for w in writers if w.sizes[split]]
        splits[split] = {"tokens": sum(p["tokens"] for p in parts), "documents": counts[f"{split}_documents"],
                         "parts": parts}
    tokens = sum(s["tokens"] for s in splits.values())
    meta = {"format": FORMAT, "dtype": dtype, "splits": splits, "n_piece": vocabulary.get_piece_size(), "n_id": n_id,
            "first_sentinel": first_sentinel, "n_sentinel": cfg.n_sentinel, "vocabulary": VOCABULARY,
            "vocabulary_sha256": file_hash(out_dir / VOCABULARY), "source": source,
            "unknown_share": counts["unknown"] / max(1, tokens), "text_bytes": counts["bytes"],
            "bad_lines": counts["bad"], "empty_documents": counts["empty"],
            "shards": len(writers), "shards_of_source": n_shards}
    write_json(out_dir / "meta.json", meta)
    return meta


def main(argv=None):
    cfg, source_cfg = configure(PrepareConfig, SourceConfig, argv=argv)
    name = Path(source_cfg.source).name.split(".")[0] or "text"
    out_dir = Path(cfg.out_dir or f"data/{name}")
    t0 = time.time()
    shards = find_shards(source_cfg, out_dir)
    held_out = [s.name for s in shards if s.is_val]
    if held_out:
        print(f"held out by their names: {len(held_out)} of {len(shards)} files, the first is {held_out[0]}")
    first, end = (int(x) if x else None for x in (cfg.shards or ":").split(":"))
    mine = list(enumerate(shards))[first:end]
    if not mine:
        raise ValueError(f"shards={cfg.shards} names none of the {len(shards)} files of {source_cfg.source}")
    vocabulary = get_vocabulary(cfg, source_cfg, out_dir, shards)
    record = source_record(cfg, source_cfg, shards, vocabulary)
    (out_dir / "progress").mkdir(parents=True, exist_ok=True)
    with lock(out_dir / "progress" / "lock", out_dir, shared=not cfg.overwrite):
        if cfg.overwrite:
            for file in [out_dir / "meta.json", *out_dir.glob("progress/*.json"), *out_dir.glob("*.bin")]:
                file.unlink(missing_ok=True)
        check_same_source(out_dir, record)
        write_atomically(out_dir / VOCABULARY, lambda file: file.write(vocabulary))
        write_json(out_dir / "progress" / "source.json", record)
        if cfg.vocab_only:
            print(f"{out_dir / VOCABULARY} is ready")
            return 0
        made_from = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        writers = [(ShardWriter(out_dir, number, made_from), shard) for number, shard in mine]
        loaded = load_vocabulary(out_dir / VOCABULARY)
        _, n_id = sentinels(loaded, cfg.n_sentinel)
        encoder = Encoder(loaded, source_cfg, token_dtype(n_id), 0.0 if held_out else cfg.val_share, cfg.seed)
        tokenize(cfg, out_dir, writers, encoder)
        with lock(out_dir / "progress" / "meta_lock", out_dir, wait=True):      # other shards may end at this moment
            meta = write_meta(cfg, source_cfg.source, out_dir, made_from, len(shards), loaded)
    report(cfg, out_dir, meta, [line for w, _ in writers for line in w.bad], time.time() - t0)
    return 0


def tokenize(cfg, out_dir, writers, encoder):
    """Tokenize shards into out_dir, (writer, shard) pairs, from wherever an earlier call stopped."""
    total = {split: sum(w.counts[f"{split}_tokens"] for w, s in writers) for split in ("train", "val")}
    limits = {"train": cfg.n_tokens, "val": cfg.n_val_tokens}
    n_proc = cfg.n_proc or max(2, os.cpu_count())       # 2: so that one core does not wait for a remote source
    by_tokens = cfg.n_tokens is not None
    bar = progress(desc=str(out_dir), total=cfg.n_tokens if by_tokens else sum(s.size for _, s in writers),
                   initial=total["train"] if by_tokens else sum(s.size for w, s in writers if w.complete),
                   unit=" tokens" if by_tokens else "B", unit_scale=True)
    t0, text, read_bytes = time.time(), 0, 0
    pool = ThreadPoolExecutor(n_proc)

    def full(shard):
        split = "val" if shard.is_val else "train"
        return limits[split] is not None and total[split] >= limits[split]

    def blocks():
        """(writer, shard, block) of all shards, so that no thread is idle from one file to the next; None ends one."""
        for writer, shard in writers:
            if writer.complete or full(shard):
                continue
            writer.open()
            for block in read_blocks(shard, encoder.source_cfg, writer.blocks):
                yield writer, shard, block
            yield writer, shard, None

    try:
        for writer, shard, now, result in in_order(blocks(), encoder, pool, n_proc):
            if full(shard):
                continue                                # of what was read ahead nothing counts
            if result:
                blobs, counts, bad = result
                if bad and not cfg.skip_bad:
                    writer.commit()                     # so that --skip_bad=True goes on from here
                    refuse(bad, cfg.skip_bad)
                writer.add(blobs, counts, bad)
                for split in total:
                    total[split] += counts[f"{split}_tokens"]
                text += counts["bytes"]
                bar.update(counts["train_tokens"] if by_tokens else now - read_bytes)
                rate = text / 1e6 / (time.time() - t0)
                bar.set_postfix_str(f"{sum(total.values()):,} tokens, {rate:.1f} MB/s of text", refresh=False)
            read_bytes = now
            if full(shard) or not result:
                writer.commit(complete=not result)      # a full one may have more text or not: another call looks
                writer.close()
            elif writer.blocks % COMMIT == 0:
                writer.commit()
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)
        for writer, _ in writers:
            writer.close()


def in_order(blocks, encoder, pool, n_proc):
    """Yield (writer, shard, bytes of the file read, what Encoder.encode gives) of each block in order, while threads do
    the next ones. At a shard's end the last two are 0 and None."""
    waiting = deque()
    while True:
        while len(waiting) < 3 * n_proc and (found := next(blocks, None)):
            writer, shard, block = found
            future = pool.submit(encoder.encode, block, shard.is_val) if block else None
            waiting.append((writer, shard, block.read_bytes if block else 0, future))
            del found, block                            # or the last one stays in memory
        if not waiting:
            return
        *where, future = waiting.popleft()
        yield *where, future.result() if future else None


def report(cfg, out_dir, meta, bad, seconds):
    """Print what was made, and what to do about what is odd."""
    train, val = meta["splits"]["train"], meta["splits"]["val"]
    size = sum(f.stat().st_size for f in out_dir.glob("*.bin"))
    print(f"{out_dir}: {train['documents'] + val['documents']:,} documents, {train['tokens']:,} training tokens and"
          f" {val['tokens']:,} held out, unknown share {meta['unknown_share']:.4%}, {meta['text_bytes']:,} bytes of"
          f" text in {size:,} bytes, {seconds:.1f} seconds")
    if meta["bad_lines"]:
        print(f"left out: {meta['bad_lines']:,} bad lines, among them")
        print("\n".join(f"  {line}" for line in bad[:20]))
    if meta["empty_documents"]:
        print(f"left out: {meta['empty_documents']:,} documents without text")
    lacking = meta["shards_of_source"] - meta["shards"]
    if cfg.shards and lacking:
        print(f"{lacking} of the source's {meta['shards_of_source']} files are not in this folder; run the others with"
              f" --shards here, or copy their .bin and progress files here and run once more")
    if meta["unknown_share"] > 0.01:
        print("more than 1 % of the tokens are unknown pieces: this vocabulary does not fit the text")
    for split, n in (("training", train["tokens"]), ("held-out", val["tokens"])):
        if not n:
            print(f"there are no {split} tokens; train.py needs some"
                  + (" (more --n_val_tokens; without validation files a larger --val_share, with --overwrite=True)"
                     if split == "held-out" else ""))


if __name__ == "__main__":
    run(main)
