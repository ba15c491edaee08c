"""Token files to batches: memory-mapped parts, windows in a keyed random order, span corruption; the tokenizer.

A batch is a pure function of (seed, step): no iterator has a state that could be lost, every rank can compute its own
rows, and to resume is to ask for the next step. Needs numpy alone; the vocabulary needs sentencepiece.

Letters in shapes: B rows, R raw tokens a row before corruption, S source tokens, T target tokens.
"""
import bisect
import functools
import hashlib
import itertools
import json
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMAT = 1              # of meta.json and the token files
N_SENTINEL = 100        # T5's <extra_id_0> ... <extra_id_99>
PAD, EOS = 0, 1
VOCABULARY = "spiece.model"
ANEW = "prepare the data again, with --overwrite=True"
VAL_SEED = 2023         # windows and noise of the held-out text: the same numbers whoever asks and whenever


@dataclass
class DataConfig:
    """What is read and how it is corrupted."""
    data_dir: str = "data/c4"       # folder made by prepare.py; data/pydocs is made on the spot
    input_length: int = 512         # source tokens a row, sentinels and EOS included
    noise_density: float = 0.15     # share of the raw tokens that is masked
    mean_span: float = 3.0          # tokens a masked span


# --- span corruption -------------------------------------------------------------------------------------------------

@dataclass
class SpanPlan:
    """Lengths of one row, all in tokens but n_span; source and target include their EOS."""
    raw: int
    source: int
    target: int
    n_noise: int
    n_span: int


def noise_counts(raw, noise_density, mean_span):
    """(noise tokens, spans) of `raw` tokens: rounded half to even, at least one span, no more spans than gaps."""
    n_noise = min(max(round(raw * noise_density), 1), raw - 1)
    n_span = min(max(round(n_noise / mean_span), 1), n_noise, raw - n_noise)
    return n_noise, n_span


def span_plan(input_length, noise_density=0.15, mean_span=3.0, n_sentinel=N_SENTINEL):
    """Find how many raw tokens fill `input_length` exactly after corruption. 512 -> 568 raw, target 114.

    raises ValueError where no row can be made: too short, or more spans than sentinels.

    The rule is T5's (t5/data/preprocessors.py, random_spans_helper and random_spans_noise_mask), in one function for
    the plan and for the mask: T5's two round and clamp apart and disagree at short lengths and at mean span 1.
    """
    if not 0 < noise_density < 1:
        raise ValueError(f"noise_density={noise_density} must lie between 0 and 1")
    if mean_span < 1:
        raise ValueError(f"mean_span={mean_span} must be at least 1 token")
    if not 4 <= input_length <= 1_000_000:
        raise ValueError(f"input_length={input_length} must lie between 4 and 1,000,000 tokens")

    def source_length(raw):
        n_noise, n_span = noise_counts(raw, noise_density, mean_span)
        return raw - n_noise + n_span + 1

    def plan(length):
        raw = max(2, length - 1)                            # a span is at least as long as its sentinel
        while source_length(raw + 1) <= length:
            raw += 1
        n_noise, n_span = noise_counts(raw, noise_density, mean_span)
        if noise_density == 0.5 and n_noise + n_span + 1 > length and source_length(raw - 1) == length:
            raw -= 1                                        # T5's rule: at one half, no target longer than its source
            n_noise, n_span = noise_counts(raw, noise_density, mean_span)
        if source_length(raw) < length:                     # many short spans: one more token brings one span too many
            raw += 1
            n_noise, _ = noise_counts(raw, noise_density, mean_span)
            n_span = length - 1 - (raw - n_noise)
        return SpanPlan(raw, length, n_noise + n_span + 1, n_noise, n_span)

    found = plan(input_length)
    if found.n_span > n_sentinel:
        most = bisect.bisect_right(range(input_length), n_sentinel, lo=4, key=lambda n: plan(n).n_span) - 1
        raise ValueError(f"input_length={input_length} needs {found.n_span} spans but there are {n_sentinel} sentinels;"
                         f" at noise_density={noise_density}, mean_span={mean_span} the largest is {most}")
    return found


def mix(x):
    """Scramble uint64 numbers one to one: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*numbers):
    """One uint64 key from ints or int arrays, in which every number counts: key_of(seed, step, rows) -> (B,)"""
    key = np.zeros(1, np.uint64)
    for n in numbers:
        key = mix(key + np.asarray(n).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return key


def random_segments(n, n_part, keys):
    """Cut n items into n_part non-empty parts, all segmentations equally likely.

    keys     (B,) uint64, one a row
    returns  (B, n_part) int64 lengths, each at least 1, that sum to n
    """
    if n_part == 1:
        return np.full((len(keys), 1), n)
    place = np.arange(n - 1, dtype=np.uint64)
    draw = mix(keys[:, None] + place * np.uint64(0x9E3779B97F4A7C15))
    draw = (draw & ~np.uint64(0xFFFF)) | place              # no two places draw the same number
    last = np.partition(draw, n_part - 2, axis=1)[:, n_part - 2:n_part - 1]
    cuts = np.nonzero(draw <= last)[1].reshape(len(keys), n_part - 1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=n)


def span_lengths(plan, keys):
    """(B, 2 * n_span): kept, masked, kept, masked ... A row starts with kept tokens and ends with a masked span, as in
    T5 (google-research/text-to-text-transfer-transformer issue 905)."""
    lengths = np.empty((len(keys), 2 * plan.n_span), np.int64)
    lengths[:, 0::2] = random_segments(plan.raw - plan.n_noise, plan.n_span, mix(keys ^ np.uint64(1)))
    lengths[:, 1::2] = random_segments(plan.n_noise, plan.n_span, mix(keys ^ np.uint64(2)))
    return lengths


def corrupt(tokens, lengths, first_sentinel, eos=EOS):
    """Replace the masked spans of each row by sentinels, and list them as the target.

    tokens   (B, R) ids
    lengths  (B, 2 * n_span) from span_lengths; all rows mask the same number of tokens
    returns  source (B, S), target (B, T), int64:  a b c d e, masked c d  ->  a b <0> e EOS,  <0> c d EOS

    Sentinels count down from first_sentinel (T5: 32,099, 32,098, ...), and none closes the target.
    Raffel et al. 2020, section 3.1.4; tests/test_data.py::test_t5s_own_example
    """
    B, n_piece = lengths.shape
    piece = np.repeat(np.tile(np.arange(n_piece), B), lengths.ravel())      # (B * R,) number of each token's piece
    flat = tokens.reshape(-1).astype(np.int64)
    first = np.empty(piece.shape, bool)                                     # first token of its piece
    first[0] = True
    np.not_equal(piece[1:], piece[:-1], out=first[1:])
    masked = (piece & 1).astype(bool)
    sentinel = first_sentinel - (piece >> 1)
    source = np.where(masked, sentinel, flat)[~masked | first].reshape(B, -1)
    # each kept piece is one sentinel in the target; it stands right before its masked span
    target = np.where(masked, flat, sentinel)[masked | first].reshape(B, -1)
    end = np.full((B, 1), eos)
    return np.hstack([source, end]), np.hstack([target, end])


# --- token files -----------------------------------------------------------------------------------------------------

def read_meta(data_dir):
    """meta.json of a data folder, checked against the files beside it; one line of error for what does not fit."""
    folder = Path(data_dir)
    path = folder / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with: python prepare.py --source=... --out_dir={data_dir}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format"]
        if version != FORMAT:
            raise ValueError(f"format {version} instead of {FORMAT}")
        dtype = np.dtype(meta["dtype"])
        if dtype.name not in ("uint16", "uint32"):
            raise ValueError(f"dtype {dtype}")
        parts = [(part["name"], int(part["tokens"])) for split in ("train", "val")
                 for part in meta["splits"][split]["parts"]]
        if not N_SENTINEL <= int(meta["first_sentinel"]) < int(meta["n_id"]) <= np.iinfo(dtype).max + 1:
            raise ValueError("first_sentinel, n_id and dtype do not go together")
        wanted_hash, vocabulary = meta["vocabulary_sha256"], folder / meta["vocabulary"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be used ({type(error).__name__}: {error}); {ANEW}") from None
    for name, tokens in parts:
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing but named in {path}; {ANEW}")
        size, wanted = file.stat().st_size, tokens * dtype.itemsize
        if size > wanted:
            raise ValueError(f"{file} has {size:,} bytes, {path} says {wanted:,}: its preparation still runs or was"
                             f" stopped; start the same prepare.py command again")
        if size < wanted:
            raise ValueError(f"{file} has {size:,} bytes, {path} says {wanted:,}; {ANEW}")
    if not vocabulary.is_file():
        raise FileNotFoundError(f"{vocabulary} is missing; copy the vocabulary that the tokens were made with there")
    if file_hash(vocabulary) != wanted_hash:
        raise ValueError(f"{vocabulary} is not the vocabulary that the tokens were made with (sha256 differs)")
    return meta


def file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def round_up(n, to=128):
    """Rows of the embedding for n ids: T5 rounds 32,100 to 32,128."""
    return -(-n // to) * to


class Tokens:
    """One split of a data folder: its part files, memory-mapped, read as one long ring of tokens."""

    def __init__(self, data_dir, split, meta=None):
        meta = meta or read_meta(data_dir)
        parts = [p for p in meta["splits"][split]["parts"] if p["tokens"]]
        self.maps = [np.memmap(Path(data_dir) / p["name"], dtype=meta["dtype"], mode="r") for p in parts]
        if hasattr(mmap, "MADV_RANDOM"):                        # windows lie anywhere: else 128 KB are fetched for 1 KB
            for m in self.maps:
                m._mmap.madvise(mmap.MADV_RANDOM)               # 10 GB, nothing cached: 16 to 30 batches/s without, 150
        self.ends = np.cumsum([len(m) for m in self.maps], dtype=np.int64)
        self.dtype, self.name = np.dtype(meta["dtype"]), f"{data_dir} ({split})"

    def __len__(self):
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start, n):
        """n tokens from `start` on, over the edges of parts and past the end back to the beginning."""
        out, filled = np.empty(n, self.dtype), 0
        while filled < n:
            at = (start + filled) % len(self)
            i = int(np.searchsorted(self.ends, at, side="right"))
            offset = at - (int(self.ends[i]) - len(self.maps[i]))
            piece = self.maps[i][offset:offset + n - filled]
            out[filled:filled + len(piece)] = piece
            filled += len(piece)
        return out


def permute(i, n, key):
    """Position i (an int array) of a random order of range(n) that `key` fixes, in constant memory.

    A Feistel network shuffles the next power of 4; numbers past n are shuffled on until they fall inside, so that
    the order stays one to one ("cycle walking", Black & Rogaway 2002). tests/test_data.py::test_permute_is_a_shuffle
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    x = np.asarray(i).astype(np.uint64)
    todo = np.ones(x.shape, bool)
    while todo.any():
        left, right = x[todo] >> half, x[todo] & low
        for turn in range(6):
            left, right = right, left ^ (mix(right + key_of(key, turn)) & low)
        x[todo] = (left << half) | right
        todo = x >= n
    return x.astype(np.int64)


class Batches:
    """Rows of any step: `rows(step, lo, hi)` gives rows lo to hi of the batch as (source, target), int64 arrays.

    Each epoch cuts the tokens into windows of plan.raw from another offset, and visits each window once, in an order
    of its own. Row r of step s is example s * batch_size + r of the run, whoever computes it.
    """

    def __init__(self, tokens, plan, seed, batch_size, first_sentinel):
        if len(tokens) < plan.raw:
            raise ValueError(f"{tokens.name} holds {len(tokens):,} tokens but one row needs {plan.raw:,}; prepare more"
                             f" text (for held-out text, with a larger --val_share) or lower input_length")
        self.tokens, self.plan, self.seed = tokens, plan, seed
        self.batch_size, self.first_sentinel = batch_size, first_sentinel
        self.n_window = len(tokens) // plan.raw

    def starts(self, example):
        """First token of each example, an int array of numbers counted from the start of the run."""
        start = np.empty(len(example), np.int64)
        epochs = example // self.n_window
        for epoch in np.unique(epochs):
            here = epochs == epoch
            window = permute(example[here] % self.n_window, self.n_window, int(key_of(self.seed, 1, epoch)[0]))
            offset = int(key_of(self.seed, 2, epoch)[0]) % len(self.tokens)
            start[here] = (offset + window * self.plan.raw) % len(self.tokens)
        return start

    def rows(self, step, lo=0, hi=None):
        row = np.arange(lo, self.batch_size if hi is None else hi)
        raw = [self.tokens.read(int(s), self.plan.raw) for s in self.starts(step * self.batch_size + row)]
        keys = key_of(self.seed, 3, step, row)
        return corrupt(np.stack(raw), span_lengths(self.plan, keys), self.first_sentinel)


def held_out_rows(tokens, plan, n, first_sentinel):
    """The first n held-out rows as a Batches of one step: fixed windows, fixed noise, fewer where the text is short."""
    return Batches(tokens, plan, VAL_SEED, min(n, len(tokens) // plan.raw), first_sentinel)


def unigram_floor(train, batches, n_id, n_sample=4_000_000):
    """Nats per target token of a model that knows how often each piece occurs and where sentinels may stand.

    Pieces cost -log of their share in the training text (from the first n_sample tokens, add-one smoothed). The
    layout costs log C(n_noise - 1, n_span - 1) a row, since all segmentations are equally likely; which sentinel comes
    next, and the closing EOS, are then certain. A model above this number has learnt nothing but frequencies.
    """
    from math import lgamma
    counts = np.bincount(train.read(0, min(len(train), n_sample)), minlength=n_id) + 1.0
    if len(counts) > n_id:
        raise ValueError(f"{train.name} holds id {len(counts) - 1:,} but its vocabulary ends at {n_id - 1:,}: it is"
                         f" damaged or of another vocabulary; {ANEW}")
    cost = -np.log(counts / counts.sum())
    _, target = batches.rows(0)
    pieces = target[:, :-1][~is_sentinel(target[:, :-1], batches.first_sentinel)]
    n, k = batches.plan.n_noise - 1, batches.plan.n_span - 1
    layout = lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
    return float((cost[pieces].sum() + layout * len(target)) / target.size)


def pad_rows(rows, fill=PAD):
    """Rows of ids of several lengths as (B, longest) int64, filled up on the right, and a mask, false where filled."""
    ids = np.full((len(rows), max(map(len, rows))), fill)
    for row, values in zip(ids, rows, strict=True):
        row[:len(values)] = values
    return ids, np.arange(ids.shape[1]) < np.array([[len(row)] for row in rows])


def by_length(lengths, batch_size):
    """Batches alike in length (in ids) to generate for, longest first: lists of row numbers, batch_size of them, or
    fewer so that the encoder has no more scores, rows x length x length, than for batch_size rows of 1,024 ids."""
    rows = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    while rows:
        n = max(1, min(batch_size, batch_size * 1024 ** 2 // int(lengths[rows[0]]) ** 2))
        yield rows[:n]
        del rows[:n]


# --- text to ids and back --------------------------------------------------------------------------------------------

def hub_file(name, file, optional=False):
    """The local copy of a file of a model on the Hub, fetched if it is not there yet; an `optional` one that the model
    lacks is None."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:
        lacks_it = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if optional and lacks_it:                               # not: no network to ask
            return None
        first = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"{name} is no file or folder here, and the Hub gave no {file} of it"
                                f" ({type(error).__name__}: {first})") from None


def load_vocabulary(path):
    """A SentencePieceProcessor; one line of error for what is not a SentencePiece model."""
    import sentencepiece
    if not Path(path).is_file():
        raise FileNotFoundError(f"vocabulary {path} is missing")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=os.fspath(path))
    except (RuntimeError, OSError):
        raise ValueError(f"{path} is not a SentencePiece model") from None


def sentinels(vocabulary, n_sentinel=N_SENTINEL):
    """(id of <extra_id_0>, number of ids): n_sentinel above the pieces, or 100 where the vocabulary itself has them
    (mT5). They must count down from <extra_id_0>, as T5's do."""
    n, unk = vocabulary.get_piece_size(), vocabulary.unk_id()
    for mark in ("", "\u2581"):
        ids = [vocabulary.piece_to_id(f"{mark}<extra_id_{k}>") for k in range(N_SENTINEL)]
        if ids[0] != unk:
            if ids != [ids[0] - k for k in range(N_SENTINEL)]:
                raise ValueError(f"the vocabulary's own sentinels do not count down from <extra_id_0> (id {ids[0]}) to"
                                 f" <extra_id_{N_SENTINEL - 1}>; leave them out of its pieces")
            return ids[0], n
    return n + n_sentinel - 1, n + n_sentinel


def is_sentinel(ids, first_sentinel, n_sentinel=N_SENTINEL):
    """Whether an id, or each of an array of ids, is a sentinel."""
    return (ids <= first_sentinel) & (ids > first_sentinel - n_sentinel)


def split_spans(target, first_sentinel, n_sentinel=N_SENTINEL):
    """What a target says for each sentinel, {k: ids up to the next one}; of a sentinel that comes twice the first. The
    closing EOS is left out; one inside a span is a document's end."""
    target = [int(i) for i in target if i != PAD]
    spans, current = {}, []
    for i in target[:-1] if target[-1:] == [EOS] else target:
        if is_sentinel(i, first_sentinel, n_sentinel):
            current = []
            spans.setdefault(first_sentinel - i, current)
        else:
            current.append(i)
    return spans


def check_layout(vocabulary, path):
    """Refuse a vocabulary whose control pieces or sentinels stand elsewhere than T5's."""
    ids = vocabulary.pad_id(), vocabulary.eos_id(), vocabulary.unk_id()
    if ids != (0, 1, 2):
        raise ValueError(f"vocabulary {path}: T5 needs pad 0, eos 1, unk 2, but it has pad {ids[0]}, eos {ids[1]},"
                         f" unk {ids[2]}")
    sentinels(vocabulary)


class Tokenizer:
    """Text to ids and back for prompts and answers: a SentencePiece vocabulary with T5's sentinels, or ByT5's bytes.

    `<extra_id_N>` in a text becomes a sentinel here, and here only: prepare.py keeps it as text. Other names of
    special ids, such as </s>, stay text. Ids are those of transformers 4's T5 tokenizer with legacy=False: no blank is
    put before a text that follows a sentinel at once, "<extra_id_0>. Hello" -> 32099 5 8774. That needs a vocabulary
    that folds blanks and puts one in front, as T5's and prepare.py's do; with others, blanks beside a sentinel become
    pieces as they stand. tests/test_tokenizer.py

    Attributes: n_id, ids in all; first_sentinel, the id of <extra_id_0>; n_sentinel, how many count down from there.
    """

    def __init__(self, vocabulary=None, n_sentinel=N_SENTINEL):
        """vocabulary: path of a SentencePiece model; None: bytes, id = byte + 3. ByT5 was trained with the highest
        bytes as its sentinels (Xue et al. 2022, arXiv 2105.13626, section 3.1); UTF-8 never uses the last 11."""
        self.path = Path(vocabulary).expanduser() if vocabulary is not None else None
        if self.path is None:
            self.vocabulary, self.n_sentinel = None, 11
            self.first_sentinel, self.n_id = 258, 259
        else:
            self.vocabulary = load_vocabulary(self.path)
            self.content = self.path.read_bytes()
            check_layout(self.vocabulary, vocabulary)
            self.first_sentinel, self.n_id = sentinels(self.vocabulary, n_sentinel)
            has_own = self.n_id == self.vocabulary.get_piece_size() and n_sentinel > 0
            self.n_sentinel = N_SENTINEL if has_own else n_sentinel

    @classmethod
    def from_pretrained(cls, name):
        """The tokenizer of a folder in Hugging Face's format (or of its hf/), or of a model on the Hub."""
        folder = Path(name).expanduser()
        local = folder.is_dir()

        def find(file):
            path = folder / file if local else hub_file(str(name), file, optional=True)
            return path if path and path.is_file() else None

        if local and not find("tokenizer_config.json") and not find(VOCABULARY):
            folder = folder / "hf"
        config, added, n_sentinel = find("tokenizer_config.json"), {}, N_SENTINEL
        if config:
            settings = read_dict(config)
            if str(settings.get("tokenizer_class")).startswith("ByT5"):
                return cls()
            try:
                n_sentinel = n_sentinel_of(settings)
                named = settings.get("added_tokens_decoder") or {}
                added = {token.get("content"): int(i) for i, token in named.items()}
            except (ValueError, AttributeError, TypeError):
                raise ValueError(f"{config} is not Hugging Face's {config.name}") from None
        vocabulary = find(VOCABULARY)
        if not vocabulary:
            raise FileNotFoundError(f"{name} holds no vocabulary: there is no {VOCABULARY} in it, nor the"
                                    f" tokenizer_config.json of a ByT5 (transformers 5 writes none: copy it from the"
                                    f" model that this one was made from); sample.py takes --vocab=PATH")
        tokenizer = cls(vocabulary, n_sentinel)
        if local and find("added_tokens.json"):
            added |= read_dict(find("added_tokens.json"))
        unknown = [repr(text) for text, i in added.items() if i >= tokenizer.n_id]
        if unknown:
            raise ValueError(f"{name} has {len(unknown)} tokens of its own beside the vocabulary"
                             f" ({', '.join(unknown[:5])}); such tokens are not known here")
        return tokenizer

    def save_pretrained(self, folder):
        """Write the files that Hugging Face's AutoTokenizer opens: the vocabulary and tokenizer_config.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config, files = {"tokenizer_class": "ByT5Tokenizer"}, {}
        if self.vocabulary is not None:
            n_piece = self.vocabulary.get_piece_size()
            config = {"tokenizer_class": "T5Tokenizer", "extra_ids": self.n_id - n_piece, "legacy": False}
            files[VOCABULARY] = self.content
        config |= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        files["tokenizer_config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        for file, content in files.items():         # a run writes the same each time: then nobody finds half a file
            if not (folder / file).is_file() or (folder / file).read_bytes() != content:
                (folder / file).write_bytes(content)
        for file in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):     # of what was there before
            (folder / file).unlink(missing_ok=True)

    @functools.cached_property
    def without_blank(self):
        """The vocabulary without the blank that SentencePiece puts before a text: normalizer_spec (field 3 of the
        model) is given once more, with add_dummy_prefix (its field 3) false."""
        import sentencepiece
        model = self.vocabulary.serialized_model_proto() + b"\x1a\x02\x18\x00"
        return sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text):
        """Ids of a text, a list, without EOS."""
        text = text.encode("utf-8", "replace").decode()         # lone surrogates, such as odd bytes of a command line
        ids, start = [], 0
        for mark in re.finditer(r"<extra_id_(0|[1-9][0-9]{0,3})>", text):
            if int(mark[1]) < self.n_sentinel:
                ids += self.pieces(text[start:mark.start()], start > 0)
                ids.append(self.first_sentinel - int(mark[1]))
                start = mark.end()
        return ids + self.pieces(text[start:], start > 0)

    def pieces(self, text, follows_sentinel):
        if self.vocabulary is None:
            return [byte + 3 for byte in text.encode()]
        # does it begin with a blank, or with what the vocabulary makes one of? Its first letters tell
        glued = follows_sentinel and self.without_blank.normalize(f"a{text[:9]}")[1:2] != "\u2581"
        return (self.without_blank if glued else self.vocabulary).encode(text)

    def is_sentinel(self, i):
        return is_sentinel(i, self.first_sentinel, self.n_sentinel)

    def batch(self, texts):
        """Ids of several texts, each closed by EOS, shorter ones filled up with PAD.

        returns  (B, S) int64 ids, (B, S) bool, false at the padding
        """
        return pad_rows([[*self.encode(text), EOS] for text in texts])

    def decode(self, ids, sentinels=False):
        """Text of ids, as SentencePiece's decode. Padding, EOS and ids without a piece (negative ones, those above the
        last) give nothing, and so do sentinels, or with sentinels=True their names."""
        if not sentinels:
            return self.plain([i for i in map(int, ids) if self.is_text(i)])
        text = ""
        for part, k in self.segments(ids):
            text += part
            if k is not None:
                apart = self.vocabulary is not None and text[-1:] not in ("", " ")
                text += f"{' ' * apart}<extra_id_{k}>"
        return text if self.vocabulary is None else text.removeprefix(" ")

    def is_text(self, i):
        """Whether an id has a piece of text: padding, EOS, sentinels and ids past the end have none."""
        if self.vocabulary is None:
            return 3 <= i < self.n_id and not self.is_sentinel(i)
        return (0 <= i < self.vocabulary.get_piece_size() and not self.vocabulary.is_control(i)
                and not self.is_sentinel(i))

    def plain(self, ids):
        if self.vocabulary is None:
            return bytes(i - 3 for i in ids).decode("utf-8", "ignore")
        return self.vocabulary.decode(ids)

    def segments(self, ids):
        """(text, k) of each stretch of ids and of the sentinel k that ends it; k is None for the last one. The blank
        that a stretch begins with is kept."""
        stretch = []
        for i in [*map(int, ids), None]:
            if i is None or self.is_sentinel(i):
                text = self.plain(stretch)
                if self.vocabulary is not None and stretch and self.vocabulary.id_to_piece(stretch[0])[0] == "\u2581":
                    text = f" {text}"                           # decode() drops it
                yield text, None if i is None else self.first_sentinel - i
                stretch = []
            elif self.is_text(i):
                stretch.append(i)

    def fill(self, source, target=None):
        """The sentence of source ids, each sentinel replaced by what target ids say for it, in brackets; where they say
        nothing, or without a target, by a line."""
        spans = split_spans(target, self.first_sentinel, self.n_sentinel) if target is not None else {}
        text = ""
        for part, k in self.segments(source):
            text += part
            if k is not None:
                text += f" [{self.decode(spans[k]).strip()}]" if k in spans else " ____"
        return " ".join(text.split())

    def suppress(self, vocab_size, sentinels=False):
        """Ids that a model of vocab_size rows must not write: PAD, ids without a piece; if wanted, sentinels too."""
        return [i for i in range(vocab_size)
                if i != EOS and not self.is_text(i) and (sentinels or not self.is_sentinel(i))]

    def check_fits(self, vocab_size):
        """Refuse a model whose embedding is not made for this vocabulary: fewer rows, or many more."""
        if not self.n_id <= vocab_size <= self.n_id + 1024:
            raise ValueError(f"the model has {vocab_size:,} rows for ids, the vocabulary"
                             f" {self.path or 'of bytes'} has {self.n_id:,} ids: they do not belong together")


def n_sentinel_of(settings):
    """How many sentinels a tokenizer_config.json names; 100 if it names none."""
    names = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    names = [str(token.get("content") if isinstance(token, dict) else token) for token in names]
    names += [str(token.get("content")) for token in (settings.get("added_tokens_decoder") or {}).values()]
    found = {int(match[1]) for match in (re.fullmatch(r"<extra_id_(\d+)>", name) for name in names) if match}
    return max(found) + 1 if found else int(settings.get("extra_ids") or N_SENTINEL)


def read_dict(path):
    """The JSON object of a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not Hugging Face's {path.name}")
    return content


def pick_sentences(tokenizer, batches, n, most_rows=256):
    """Choose n masked sentences to show to a person, as (row, slice of its source) pairs: 10 to 40 tokens, letters and
    plain punctuation, one to three blanks of at most two pieces; fewer where the first rows have no more."""
    rows = min(batches.batch_size, most_rows)
    found = []
    for row, (source, target) in enumerate(zip(*batches.rows(0, 0, rows), strict=True)):
        spans = split_spans(target, batches.first_sentinel)
        last = [tokenizer.decode([t])[-1:] for t in source]
        ends = [i + 1 for i, t in enumerate(source) if t == EOS or (last[i] and last[i] in ".?!")]
        for lo, hi in itertools.pairwise(ends):
            text = tokenizer.decode(source[lo:hi])
            prose = all(c.isalpha() or c in " .,'-" for c in text)
            blanks = [spans[k] for k in batches.first_sentinel - source[lo:hi] if k in spans]
            if 10 <= hi - lo <= 40 and prose and 1 <= len(blanks) <= 3 and max(map(len, blanks)) <= 2:
                found.append((row, slice(lo, hi)))
                break                                       # one sentence a row
        if len(found) == n:
            break
    return found
