"""Span corruption, windows and batches."""
import itertools
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import Batches, SpanPlan, Tokens, corrupt, key_of, permute, random_segments, span_lengths, span_plan

SENTINEL = 32_099


def keys(n, seed=0):
    return key_of(seed, np.arange(n))


# --- lengths ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given_, raw, target", [
    ((64, 0.2, 2.0), 70, 22), ((64, 0.2, 1.0), 63, 27),                             # pinned by T5's own tests
    ((512, 0.15, 3.0), 568, 114), ((1024, 0.15, 3.0), 1137, 229), ((256, 0.15, 3.0), 284, 58),
    ((128, 0.15, 3.0), 141, 29), ((64, 0.15, 3.0), 70, 14), ((512, 0.25, 3.0), 614, 206),
])
def test_lengths_are_t5s(given_, raw, target):
    """random_spans_helper of google-research/text-to-text-transfer-transformer."""
    plan = span_plan(*given_)
    assert (plan.raw, plan.source, plan.target) == (raw, given_[0], target)


def test_one_half_keeps_the_target_no_longer_than_the_source():
    """T5's special case; it needs 128 sentinels, so the usual 100 refuse it."""
    plan = span_plan(512, 0.5, 3.0, n_sentinel=200)
    assert (plan.raw, plan.target) == (766, 512)


@given(st.integers(4, 700), st.sampled_from([0.05, 0.15, 0.25, 0.3, 0.5, 0.7]), st.sampled_from([1.0, 2.0, 3.0, 5.5]))
@settings(max_examples=200, deadline=None)
def test_every_length_is_met_exactly(length, density, mean_span):
    """T5's planner and mask maker disagree at short lengths and at mean span 1; here one function serves both."""
    plan = span_plan(length, density, mean_span, n_sentinel=1000)
    tokens = np.arange(plan.raw)[None] + 10
    source, target = corrupt(tokens, span_lengths(plan, keys(1)), SENTINEL)
    assert (source.shape[1], target.shape[1]) == (length, plan.target) == (plan.source, plan.target)
    assert 1 <= plan.n_noise < plan.raw and 1 <= plan.n_span <= plan.n_noise


def test_more_spans_than_sentinels_are_refused_with_the_largest_length():
    assert span_plan(1809).n_span == 100
    with pytest.raises(ValueError, match=r"input_length=1810 needs 101 spans .* the largest is 1809"):
        span_plan(1810)


@pytest.mark.parametrize("given_, part", [
    ((1,), "input_length=1"), ((3,), "input_length=3"), ((-5,), "input_length=-5"), ((64, 0.0), "noise_density=0.0"),
    ((64, 1.0), "noise_density=1.0"), ((64, 0.15, 0.5), "mean_span=0.5"),
])
def test_impossible_lengths_are_named(given_, part):
    with pytest.raises(ValueError, match=part):
        span_plan(*given_)


# --- corruption ------------------------------------------------------------------------------------------------------

def test_t5s_own_example():
    """denoise() of T5's tests: these tokens under this mask, sentinels from 25 down; only the EOS is added here."""
    tokens = np.array([[3, 2, 20, 4, 3, 2, 8, 13, 2, 3, 2, 23, 7, 19, 22, 3, 2, 7, 2]])
    source, target = corrupt(tokens, np.array([[8, 1, 5, 5]]), first_sentinel=25)
    assert source.tolist() == [[3, 2, 20, 4, 3, 2, 8, 13, 25, 3, 2, 23, 7, 19, 24, 1]]
    assert target.tolist() == [[25, 2, 24, 22, 3, 2, 7, 2, 1]]


def test_sentinels_count_down_and_none_closes_the_target():
    """ids 5 to 24, places 3, 4 and 10 masked (and the last, since a row ends with a masked span)."""
    source, target = corrupt(np.arange(5, 25)[None], np.array([[3, 2, 5, 1, 8, 1]]), SENTINEL)
    assert source.tolist() == [[5, 6, 7, 32099, 10, 11, 12, 13, 14, 32098, *range(16, 24), 32097, 1]]
    assert target.tolist() == [[32099, 8, 9, 32098, 15, 32097, 24, 1]]


@given(st.integers(4, 300), st.sampled_from([0.15, 0.3, 0.5]), st.sampled_from([1.0, 3.0]), st.integers(0, 2 ** 60),
       st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_source_and_target_rebuild_the_text(length, density, mean_span, seed, n_row):
    plan = span_plan(length, density, mean_span, n_sentinel=1000)
    tokens = np.random.default_rng(seed % 1000).integers(1, 40, (n_row, plan.raw))     # EOS between documents as well
    source, target = corrupt(tokens, span_lengths(plan, keys(n_row, seed)), SENTINEL)
    for row in range(n_row):
        spans = data.split_spans(target[row], SENTINEL, plan.n_span)
        assert list(spans) == list(range(plan.n_span)) and all(spans.values())
        rebuilt = []
        for token in source[row, :-1].tolist():
            rebuilt += spans[SENTINEL - token] if token > SENTINEL - plan.n_span else [token]
        assert rebuilt == tokens[row].tolist() and source[row, -1] == target[row, -1] == 1
        assert source[row, 0] == tokens[row, 0] and source[row, -2] == SENTINEL - plan.n_span + 1


def test_short_rows_have_one_place_for_their_span():
    """20 tokens: always 17 kept and 3 masked (T5 issue 905); 10: 8 and 2."""
    for raw, wanted in ((20, [17, 3]), (10, [8, 2])):
        n_noise, n_span = data.noise_counts(raw, 0.15, 3.0)
        plan = SpanPlan(raw, 0, 0, n_noise, n_span)
        assert {tuple(x) for x in span_lengths(plan, keys(50)).tolist()} == {tuple(wanted)}


@pytest.mark.parametrize("n, n_part", [(7, 3), (6, 2), (5, 4)])
def test_segmentations_are_uniform(n, n_part):
    """Chi-square over all C(n-1, k-1) segmentations, 20,000 draws; 5 sigma, on fixed keys."""
    rows = random_segments(n, n_part, keys(20_000, seed=7))
    counts = Counter(map(tuple, rows.tolist()))
    possible = {tuple(np.diff([0, *cut, n])) for cut in itertools.combinations(range(1, n), n_part - 1)}
    assert set(counts) == possible
    expected = 20_000 / len(possible)
    chi2, freedom = sum((c - expected) ** 2 / expected for c in counts.values()), len(possible) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_masked_and_kept_lengths_are_independent():
    """Both come from one row key; their first parts must not go together. Correlation of 20,000 draws, 5 sigma."""
    lengths = span_lengths(span_plan(64), keys(20_000))
    assert abs(np.corrcoef(lengths[:, 0], lengths[:, 1])[0, 1]) < 5 / 20_000 ** 0.5


def test_the_mask_density_is_the_one_asked_for():
    """15 % of the raw tokens, at every inner place alike; the ends are fixed by the rule that a row begins kept."""
    plan, n = span_plan(128), 4000
    lengths = span_lengths(plan, keys(n))
    mask = np.repeat(np.tile([0, 1], plan.n_span * n), lengths.ravel()).reshape(n, -1)
    assert mask.mean() == plan.n_noise / plan.raw and abs(mask.mean() - 0.15) < 0.002
    assert not mask[:, 0].any() and mask[:, -1].all()
    middle = mask[:, 30:-30].mean(0)
    assert abs(middle - middle.mean()).max() < 5 * (0.15 * 0.85 / n) ** 0.5


# --- token files -----------------------------------------------------------------------------------------------------

def make_folder(path, train=1000, val=200, parts=1, dtype="uint16", n_id=32_100):
    """A data folder of counting tokens, as prepare.py writes it, in `parts` files a split."""
    path.mkdir(exist_ok=True)
    (path / "spiece.model").write_bytes(b"not read here")
    splits = {}
    for split, n in (("train", train), ("val", val)):
        pieces = np.array_split(np.arange(n) % 30_000 + 3, parts)
        for i, piece in enumerate(pieces):
            piece.astype(dtype).tofile(path / f"{split}-{i}.bin")
        splits[split] = {"tokens": n, "documents": 1, "parts": [
            {"name": f"{split}-{i}.bin", "tokens": len(p)} for i, p in enumerate(pieces)]}
    meta = {"format": data.FORMAT, "dtype": dtype, "splits": splits, "n_piece": n_id - 100, "n_id": n_id,
            "first_sentinel": n_id - 1, "vocabulary": "spiece.model",
            "vocabulary_sha256": data.file_hash(path / "spiece.model")}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def test_tokens_are_one_ring_over_all_parts(tmp_path):
    one = Tokens(make_folder(tmp_path / "one"), "train")
    five = Tokens(make_folder(tmp_path / "five", parts=5), "train")
    assert len(one) == len(five) == 1000
    for start, n in ((0, 1000), (190, 25), (399, 2), (990, 30), (0, 2500)):
        wanted = (start + np.arange(n)) % 1000 + 3
        assert (one.read(start, n) == wanted).all() and (five.read(start, n) == wanted).all()


def test_large_ids_are_stored_in_four_bytes(tmp_path):
    tokens = Tokens(make_folder(tmp_path, dtype="uint32", n_id=250_112), "train")
    assert tokens.dtype == np.uint32 and (tokens.read(0, 5) == np.arange(5) + 3).all()


def test_a_damaged_folder_is_refused_by_name(tmp_path):
    folder = make_folder(tmp_path / "d")
    meta = json.loads((folder / "meta.json").read_text())

    def refused(change, part):
        bad = json.loads(json.dumps(meta))
        change(bad)
        (folder / "meta.json").write_text(json.dumps(bad))
        with pytest.raises((ValueError, FileNotFoundError), match=part):
            data.read_meta(folder)
        (folder / "meta.json").write_text(json.dumps(meta))

    refused(lambda m: m.update(format=99), "format 99")
    refused(lambda m: m.update(dtype="uint8"), "dtype uint8")
    refused(lambda m: m.update(n_id=65_637), "do not go together")
    refused(lambda m: m.update(first_sentinel=50), "do not go together")
    refused(lambda m: m.update(n_id="x"), "cannot be used")
    refused(lambda m: m.pop("n_id"), "KeyError: 'n_id'")
    refused(lambda m: m["splits"].pop("val"), "KeyError: 'val'")
    refused(lambda m: m["splits"]["train"]["parts"][0].update(tokens=7), "has 2,000 bytes")
    refused(lambda m: m["splits"]["val"]["parts"][0].update(name="gone.bin"), "gone.bin is missing")
    refused(lambda m: m.update(vocabulary_sha256="0"), "sha256 differs")
    refused(lambda m: m.pop("dtype"), "cannot be used")
    (folder / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json cannot be used"):
        data.read_meta(folder)
    with pytest.raises(FileNotFoundError, match=r"prepare\.py"):
        data.read_meta(tmp_path / "nothing")


def sparse_folder(path, n_byte, parts):
    """A data folder of n_byte of training tokens, all zeros that take no room on the disk; None where they would."""
    folder = make_folder(path, parts=1)
    meta = json.loads((folder / "meta.json").read_text())
    size = n_byte // parts // 2 * 2
    meta["splits"]["train"] = {"tokens": parts * size // 2, "documents": 1, "parts": [
        {"name": f"train-{i}.bin", "tokens": size // 2} for i in range(parts)]}
    for i in range(parts):
        file = folder / f"train-{i}.bin"
        with open(file, "wb") as out:
            out.truncate(1 << 20 if i == 0 else size)
        if i == 0:                                          # tried on a small one, so that no disk is filled
            if getattr(file.stat(), "st_blocks", 1 << 20) * 512 > 1 << 16:
                return None
            with open(file, "ab") as out:
                out.truncate(size)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def private_memory():
    """Bytes that this process holds for itself, mapped files not counted; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_ten_gigabytes_are_opened_at_once_and_read_in_flat_memory(tmp_path):
    """Seconds are generous bounds of what takes far less; 20 MB are about five times what one batch of rows takes."""
    folder = sparse_folder(tmp_path / "big", 10 ** 10, parts=10)
    if folder is None:
        pytest.skip("this file system has no sparse files")
    t0 = time.time()
    batches = Batches(Tokens(folder, "train"), span_plan(512), 0, 128, SENTINEL)
    opened = time.time()
    source, _ = batches.rows(0)
    assert opened - t0 < 5 and time.time() - opened < 5
    assert len(batches.tokens) == 5 * 10 ** 9 and source.shape == (128, 512)
    for step in range(1, 20):                               # the allocator has its buffers by then
        batches.rows(step)
    before = private_memory()
    for step in range(20, 320):
        batches.rows(step)
    assert private_memory() - before < 20 << 20
    starts = batches.starts(np.arange(2000 * 128))
    assert len(np.unique(starts)) == 2000 * 128
    shares = np.bincount(starts // (5 * 10 ** 8), minlength=10) / len(starts)
    assert len(shares) == 10 and abs(shares - 0.1).max() < 0.01     # 0.0006 is one sigma


# --- order and batches -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_shuffle(n):
    got = permute(np.arange(n), n, key=5)
    assert sorted(got.tolist()) == list(range(n))
    if n > 100:
        other = permute(np.arange(n), n, key=6)
        assert (got == other).mean() < 0.02 and abs(np.corrcoef(np.arange(n), got)[0, 1]) < 5 / n ** 0.5


def test_permute_needs_no_memory_for_billions():
    n = 275_000_000_000
    got = permute(np.arange(1000), n, key=1)
    assert len(set(got.tolist())) == 1000 and 0 <= got.min() and got.max() < n and got.max() > 0.9 * n


def make_batches(tmp_path, seed=0, batch_size=4, train=1000, length=20):
    plan = span_plan(length)
    return Batches(Tokens(make_folder(tmp_path, train=train), "train"), plan, seed, batch_size, SENTINEL)


def test_a_batch_is_a_function_of_seed_and_step_whoever_asks(tmp_path):
    a, b = make_batches(tmp_path), make_batches(tmp_path)
    for step in (7, 0, 3):      # in any order
        for x, y in zip(a.rows(step), b.rows(step), strict=True):
            assert (x == y).all()
    source, target = a.rows(5)
    for lo in range(4):         # as micro-batches or ranks would
        part = b.rows(5, lo, lo + 1)
        assert (part[0] == source[lo]).all() and (part[1] == target[lo]).all()
    assert not (make_batches(tmp_path, seed=1).rows(5)[0] == source).all()


def test_an_epoch_visits_every_window_once_and_the_next_ones_differ(tmp_path):
    batches = make_batches(tmp_path, batch_size=4)
    n = batches.n_window
    assert n == 1000 // batches.plan.raw
    orders = []
    for epoch in range(3):
        starts = batches.starts(np.arange(epoch * n, (epoch + 1) * n))
        covered = np.sort((starts[:, None] + np.arange(batches.plan.raw)).ravel() % 1000)
        assert len(set(covered.tolist())) == len(covered) == n * batches.plan.raw
        orders.append(tuple(starts))
    assert len(set(orders)) == 3


def test_noise_differs_from_row_to_row_and_from_epoch_to_epoch(tmp_path):
    """Every row of six epochs masks in its own way (128 tokens have C(20,6) * C(119,6) masks)."""
    batches = make_batches(tmp_path, length=128, batch_size=7)
    masks = [tuple(np.nonzero(row > SENTINEL - 100)[0]) for step in range(6) for row in batches.rows(step)[0]]
    assert len(set(masks)) == len(masks)


def test_text_shorter_than_a_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds 50 tokens but one row needs 568"):
        make_batches(tmp_path, train=50, length=512)
    with pytest.raises(ValueError, match=r"holds 0 tokens"):
        make_batches(tmp_path, train=0, length=512)


def test_held_out_rows_do_not_depend_on_seed_or_number(tmp_path):
    tokens, plan = Tokens(make_folder(tmp_path, val=600), "val"), span_plan(20)
    few, many = (data.held_out_rows(tokens, plan, n, SENTINEL) for n in (3, 1000))
    assert few.batch_size == 3 and many.batch_size == 600 // plan.raw
    assert (few.rows(0)[0] == many.rows(0)[0][:3]).all()


@pytest.mark.parametrize("first_sentinel, token", [(109, 3), (102, 103)])     # above the pieces; among them
def test_the_unigram_floor_by_hand(tmp_path, first_sentinel, token):
    """Two tokens in equal numbers: log 2 a piece (add-one smoothing over 110 ids shifts that by a known amount),
    plus log C(n_noise - 1, n_span - 1) a row for the layout; sentinels and EOS are free."""
    folder, n = make_folder(tmp_path, n_id=110), 40_000
    meta = json.loads((folder / "meta.json").read_text())
    (np.arange(n) % 2 + token).astype("uint16").tofile(folder / "train-0.bin")
    meta["splits"]["train"]["parts"][0]["tokens"] = n
    (folder / "meta.json").write_text(json.dumps(meta))
    plan = span_plan(64)                                    # 10 masked tokens in 3 spans, target 14
    tokens = Tokens(folder, "train")
    rows = Batches(tokens, plan, 0, 5, first_sentinel)
    piece = -np.log((n / 2 + 1) / (n + 110))
    assert abs(data.unigram_floor(tokens, rows, 110) - (10 * piece + np.log(36)) / 14) < 1e-9
