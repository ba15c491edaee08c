"""Generation: against transformers' greedy and beam search, against the model without a cache, and by frequencies."""
import copy
import math
import platform

import pytest
import torch
import torch.nn.functional as F
from test_model import hugging_face_twin, ids, tiny_t5
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import model as t5
from model import Cache, Linear, StaticCache

LENGTHS = [3, 40, 12, 7, 1, 25, 33, 9, 18, 5, 2, 30, 11, 14, 21, 6, 8, 37, 4, 16]


def prompts(lengths=LENGTHS, seed=5):
    """(ids, mask) of rows of these lengths, filled up with PAD."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids(*mask.shape, seed=seed).masked_fill(~mask, 0), mask


def lively_t5(seed=0, eos=0.0, **changes):
    """Random weights whose answers vary and end: every layer counts, and EOS is liked more by `eos`."""
    model = tiny_t5(seed, init="nanot5", **changes).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(1.5 if "bias" in name else 4.0 if model.config.tied and name.endswith("o.weight") else 1.0)
        if not model.config.tied:
            model.lm_head.weight.mul_(0.25)
        model.lm_head.weight[1] += eos * torch.randn(32, generator=torch.Generator().manual_seed(9))
    return model


FAMILIES = {"v1.1": {}, "v1.0": dict(tied=True, gated=False), "deep encoder": dict(n_layer=4, n_decoder_layer=1)}
THEIR_CACHE = False      # transformers 5.24 cannot keep a cache for a decoder that is deeper than its encoder


# --- the cache -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", [*FAMILIES, "umT5"])
@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("static", [False, True])
def test_cached_steps_equal_the_whole_decoder(family, attention, static):
    """At each of 150 times, past the room that the cache begins with and past the last bucket, to 1e-5. What stands in
    a static cache where nothing is written yet does not count."""
    model = tiny_t5(**FAMILIES.get(family, dict(bias_per_layer=True))).eval()
    model.set_attention(attention)
    source, mask = prompts([20, 6, 1])
    target = ids(3, 150, seed=8)
    with torch.no_grad():
        whole = model.logits(source, target, mask)
        start = model.decoder.blocks, model.encode(source, mask), mask, 1
        cache = StaticCache(*start, 150) if static else Cache(*start)
        if static:
            for x in (x for pair in cache.own for x in pair):
                assert x.shape[2] == 160 and not x.any()
                x.fill_(30.0)
        for t, newest in enumerate(F.pad(target[:, :-1], (1, 0)).T):
            step = model.next_logits(newest[:, None], cache)[:, 0]
            torch.testing.assert_close(step, whole[:, t], atol=1e-5, rtol=0)


def test_sequences_of_a_row_and_dropped_rows_keep_their_own_past():
    """Three sequences a row that take over each other's past, then rows dropped and moved: as the whole decoder."""
    model, G = tiny_t5().eval(), 3
    source, mask = prompts([20, 6, 11])
    rng = torch.Generator().manual_seed(1)
    past = torch.zeros(3, G, 1, dtype=torch.long)
    rows = torch.arange(3)
    with torch.no_grad():
        cache = Cache(model.decoder.blocks, model.encode(source, mask), mask, G)
        for t in range(70):
            step = model.next_logits(past[:, :, -1], cache)
            for g in range(G):
                target = F.pad(past[:, g, 1:], (0, 1), value=3)
                whole = model.logits(source[rows], target, mask[rows])[:, -1]
                torch.testing.assert_close(step[:, g], whole, atol=1e-5, rtol=0)
            parent = torch.randint(G, (len(rows), G), generator=rng)
            cache.follow(parent)
            past = past.gather(1, parent[..., None].expand_as(past))
            past = torch.cat([past, torch.randint(2, 160, (len(rows), G, 1), generator=rng)], 2)
            if t in (20, 40):
                order = t5.compact(torch.arange(len(rows)) > 0)         # the first one drops, the last takes its place
                cache.select(order)
                past, rows = past[order], rows[order]
    assert rows.tolist() == [1]


def test_rows_that_ended_leave_the_batch():
    model = lively_t5(eos=2.0)
    source, mask = prompts()
    sizes, inner = [], model.next_logits

    def spy(newest, cache):
        sizes.append(len(newest))
        return inner(newest, cache)

    model.next_logits = spy
    got = model.generate(source, mask, max_new_tokens=40)
    n_ids = [len(until_eos(row)) for row in got.tolist()]
    assert len(set(n_ids)) > 3
    assert sizes == [sum(n > t for n in n_ids) for t in range(max(n_ids))]


# --- greedy and beam search ------------------------------------------------------------------------------------------

def same_rows(ours, theirs):
    """Equal up to EOS; theirs begins with the decoder's start, and what they fill up with varies."""
    assert [until_eos(row) for row in ours.tolist()] == [until_eos(row) for row in theirs[:, 1:].tolist()]


def until_eos(row):
    return row[:row.index(1) + 1] if 1 in row else row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [
    dict(), dict(num_beams=4), dict(num_beams=4, early_stopping=True), dict(num_beams=3, length_penalty=0.5),
    dict(num_beams=4, length_penalty=2.0), dict(num_beams=4, length_penalty=-1.0), dict(num_beams=2, num_samples=2)])
def test_ids_equal_transformers(family, settings):
    """20 prompts of 1 to 40 ids in one padded batch, 30 new ids."""
    model = lively_t5(eos=1.0, **FAMILIES[family])
    source, mask = prompts()
    twin = hugging_face_twin(model).eval()
    theirs = twin.generate(input_ids=source, attention_mask=mask.long(), max_new_tokens=30, do_sample=False,
                           use_cache=THEIR_CACHE,
                           **{"num_return_sequences" if k == "num_samples" else k: v for k, v in settings.items()})
    ours = model.generate(source, mask, max_new_tokens=30, **settings)
    same_rows(ours, theirs)
    assert len({tuple(row) for row in ours.tolist()}) > 6


@pytest.mark.parametrize("settings", [dict(), dict(num_beams=4)])
def test_suppressed_ids_never_come_and_the_rest_equals_transformers(settings):
    model = lively_t5(eos=1.0)
    source, mask = prompts()
    free = model.generate(source, mask, max_new_tokens=20, **settings)
    banned = [0, *free.unique().tolist()[4:12]]
    theirs = hugging_face_twin(model).eval().generate(
        input_ids=source, attention_mask=mask.long(), max_new_tokens=20, do_sample=False, suppress_tokens=banned,
        use_cache=THEIR_CACHE, **settings)
    ours = model.generate(source, mask, max_new_tokens=20, suppress=banned, **settings)
    same_rows(ours, theirs)
    for row in ours.tolist():
        assert not set(until_eos(row)) & set(banned)


@pytest.mark.parametrize("settings", [dict(), dict(num_beams=4, num_samples=2), dict(temperature=1.0, num_samples=3)])
def test_a_row_does_not_depend_on_its_companions(settings):
    model = lively_t5(eos=1.0)
    source, mask = prompts()
    n = settings.get("num_samples", 1)
    together = model.generate(source, mask, max_new_tokens=20, seed=7, **settings)
    assert together.shape[1] == max(len(until_eos(row)) for row in together.tolist())
    assert not any(any(row[len(until_eos(row)):]) for row in together.tolist())             # PAD after EOS
    for row, length in enumerate(LENGTHS):
        alone = model.generate(source[row:row + 1, :length], max_new_tokens=20, seed=7 + row, **settings)
        width = alone.shape[1]
        assert together[row * n:row * n + n, :width].tolist() == alone.tolist()
        assert not together[row * n:row * n + n, width:].any()


def test_a_source_of_4096_tokens_equals_transformers():
    """Far beyond the training length: distances to 4,095 share the last buckets; encoder output, loss and ids."""
    model = lively_t5()
    twin = hugging_face_twin(model).eval()
    source = ids(1, 4096, seed=4)
    with torch.no_grad():
        torch.testing.assert_close(model.encode(source), twin.encoder(source).last_hidden_state, atol=1e-4, rtol=0)
    same_rows(model.generate(source, max_new_tokens=8),
              twin.generate(input_ids=source, max_new_tokens=8, do_sample=False, use_cache=THEIR_CACHE))


def test_buckets_of_far_distances_equal_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention
    distance = torch.arange(-4095, 4096)[None]
    for bidirectional in (True, False):
        ours = t5.relative_bucket(distance, bidirectional)
        assert torch.equal(ours, T5Attention._relative_position_bucket(distance, bidirectional)) and ours.max() == 31


# --- samples ---------------------------------------------------------------------------------------------------------

def first_ids(model, n=4000, **settings):
    """How often each id comes first, from n samples of one row."""
    got = model.generate(ids(1, 9), max_new_tokens=1, num_samples=n, **settings)[:, 0]
    return torch.bincount(got, minlength=160) / n


@pytest.mark.parametrize("settings", [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=1.0, top_k=5),
                                      dict(temperature=2.0, top_p=0.6), dict(temperature=1.5, top_k=20, top_p=0.8)])
def test_samples_come_as_often_as_their_probabilities(settings):
    """Within 4.5 standard deviations for every id, and never from outside of top_k and top_p."""
    model, n = lively_t5(), 4000
    with torch.no_grad():
        logits = model.logits(ids(1, 9), torch.tensor([[3]]))[0, 0] / settings["temperature"]
    p, order = logits.softmax(-1).sort(descending=True)
    k = settings.get("top_k", 160)
    p[k:] = 0
    p /= p.sum()
    kept = [i for i in range(160) if p[:i].sum() < settings.get("top_p", 1.0)]
    wanted = torch.zeros(160)
    wanted[order[kept]] = p[kept] / p[kept].sum()
    got = first_ids(model, n, **settings)
    assert ((got - wanted).abs() <= 4.5 * (wanted * (1 - wanted) / n).sqrt() + 1e-9).all()
    assert not got[wanted == 0].any()


def test_seeds_repeat_samples_and_differ_from_each_other():
    model, (source, mask) = lively_t5(), prompts()

    def draw(seed, **more):
        return model.generate(source, mask, max_new_tokens=12, temperature=1.0, num_samples=2, seed=seed, **more)

    a = draw(3)
    assert torch.equal(a, draw(3)) and not torch.equal(a, draw(4))
    assert torch.equal(a, draw([3 + r for r in range(20)]))
    assert (a[0::2] != a[1::2]).any(1).sum() >= 18                  # the two samples of a row
    longer = model.generate(source, mask, max_new_tokens=19, temperature=1.0, num_samples=2, seed=3)
    assert torch.equal(longer[:, :12], a)
    with pytest.raises(ValueError, match="2 seeds for 20 rows"):
        draw([1, 2])
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    draw(3)
    assert torch.equal(torch.rand(1), before)                       # torch's own generator is left alone


def test_the_narrowest_choice_is_the_greedy_one():
    model, (source, mask) = lively_t5(eos=1.0), prompts()
    greedy = model.generate(source, mask, max_new_tokens=15)
    for narrow in (dict(top_k=1), dict(top_p=1e-6), dict(temperature=1e-4)):
        assert torch.equal(model.generate(source, mask, max_new_tokens=15, **{"temperature": 1.0, **narrow}), greedy)


def test_the_lowest_and_the_highest_random_number_draw_ids_that_are_allowed():
    """0 and 0.99999994, the largest that torch.rand gives, where the first, the last and inner ids are banned."""
    logits = torch.randn(1, 1, 32_128, generator=torch.Generator().manual_seed(0))
    logits[0, 0, [0, 1, 5000, 5001, 32_125, 32_126, 32_127]] = -math.inf
    low, high = torch.tensor([[0.0]]), torch.tensor([[1 - 2 ** -24]])
    assert t5.draw(logits, 0, 1.0, low) == 2 and t5.draw(logits, 0, 1.0, high) == 32_124
    assert t5.draw(logits, 2, 1.0, high) == logits.topk(2)[1][0, 0, 1]
    total = logits.softmax(-1).cumsum(-1)[0, 0]
    edge = total[[4998, 4999, 5002, 5003]] / total[-1]      # all around the banned ones in the middle
    for u in torch.linspace(float(edge[0]), float(edge[-1]), 2000):
        assert t5.draw(logits, 0, 1.0, u[None, None]) not in (5000, 5001)


# --- static shapes ---------------------------------------------------------------------------------------------------

VARIANTS = [dict(), dict(num_beams=4), dict(num_beams=4, early_stopping=True), dict(temperature=1.0, num_samples=3),
            dict(num_beams=3, length_penalty=0.5, num_samples=2), dict(num_beams=3, length_penalty=2.0),
            dict(temperature=1.5, top_k=20, top_p=0.8), dict(num_beams=3, suppress=[0, 5, 9, 40]),
            dict(suppress=[0, 5, 9, 40])]


@pytest.fixture
def memory_holds_nan():
    """What torch.empty gives is NaN: nothing may be read before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", [*FAMILIES, "umT5", "deep decoder"])
def test_static_shapes_give_the_same_ids(family, memory_holds_nan):
    """Rows that end early, late or never, with padding and without: ids and shape, for each kind of search."""
    shape = {"umT5": dict(bias_per_layer=True), "deep decoder": dict(n_layer=1, n_decoder_layer=4, seed=4)}
    model, n_ids = lively_t5(eos=2.0, **FAMILIES.get(family, shape.get(family))), []
    for lengths, variants in (([9, 4, 30, 1, 17, 12], VARIANTS), ([7, 7], VARIANTS[:2])):
        source, mask = prompts(lengths)
        for settings in variants:
            a, b = (model.generate(source, mask, max_new_tokens=40, static=on, **settings) for on in (False, True))
            assert a.tolist() == b.tolist(), settings
            n_ids += [len(until_eos(row)) for row in a.tolist()]
    assert len(set(n_ids)) > 5 and min(n_ids) < 10


def counting_compile(monkeypatch):
    """The graphs that torch.compile makes from now on, a list of lists of one entry a run; executed as they are."""
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        runs = []
        graphs.append(runs)
        return lambda *args: runs.append(None) or graph(*args)

    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **more: compile_(f, **{"backend": backend, **more}))
    return graphs


@pytest.mark.parametrize("settings", [dict(), dict(num_beams=3), dict(temperature=1.0, num_samples=2)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_step_is_compiled_once(settings, padded, monkeypatch):
    """One graph for 40 times, no break (fullgraph raises at one), and none more for other sources of these shapes."""
    model, graphs = lively_t5(), counting_compile(monkeypatch)
    model.next_logits = torch.compile(model.next_logits, fullgraph=True)
    source, mask = prompts([9, 4, 30] if padded else [30] * 3)
    settings = dict(settings, suppress=[1])                         # no EOS: no row ends
    wanted = lively_t5().generate(source, mask, max_new_tokens=40, **settings)
    assert model.generate(source, mask, max_new_tokens=40, static=True, **settings).tolist() == wanted.tolist()
    assert [len(runs) for runs in graphs] == [40]
    model.generate(source.flip(1), mask, max_new_tokens=35, static=True, **settings)
    assert [len(runs) for runs in graphs] == [75]


def test_compiled_steps_are_kept_for_calls_of_their_shapes(monkeypatch):
    """... and read other sources, changed weights, and what the call before left behind; a copied model is its own."""
    model, graphs = lively_t5(eos=1.0), counting_compile(monkeypatch)
    source, mask = prompts([9, 4, 30, 1])

    def check(model, source, max_new_tokens, n_graphs, **settings):
        a, b = (model.generate(source, mask, max_new_tokens=max_new_tokens, compile_step=on, **settings)
                for on in (False, True))
        assert a.tolist() == b.tolist() and len(graphs) == n_graphs
        return b.tolist()

    first = check(model, source, 20, 1)
    assert check(model, source.flip(1), 30, 1) != first == check(model, source, 20, 1)
    check(model, source, 33, 2)                                     # room for 48, not for 32
    check(model, source, 20, 3, num_beams=3)
    held = [x for cache, _ in model.compiled_steps.values() for x in cache.tensors()]
    check(model, source.flip(1), 24, 3, num_beams=3)
    now = [x for cache, _ in model.compiled_steps.values() for x in cache.tensors()]
    assert all(x is y for x, y in zip(held, now, strict=True))       # where a CUDA graph looks for them
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert check(model, source, 20, 3) != first == other.generate(source, mask, 20, compile_step=True).tolist()
    assert len(model.compiled_steps) == 3


@pytest.mark.parametrize("num_beams", [1, 3])
def test_all_but_the_newest_ids_stays_where_it_is(num_beams, monkeypatch):
    """A CUDA graph copies whatever is not marked, and torch records none for a step that changes such a tensor."""
    seen, compile_ = [], torch.compile

    def look(graph, inputs):
        meta = TracingContext.get().fw_metadata
        changed = {i for i, info in enumerate(meta.input_info) if info.mutates_data}
        copied = set(range(len(inputs))) - set(meta.static_input_indices)
        seen.append((len(changed), changed & copied, [tuple(inputs[i].shape) for i in copied]))
        return graph

    backend = aot_autograd(fw_compiler=look, inference_compiler=look, keep_inference_input_mutations=True)
    monkeypatch.setattr(torch, "compile", lambda f, mode, **more: compile_(f, backend=backend, **more))
    source, mask = prompts([9, 4])
    model = lively_t5()
    model.generate(source, mask, max_new_tokens=5, num_beams=num_beams, compile_step=True)
    assert seen == [(3 + 2 * len(model.decoder.blocks), set(), [(2, num_beams)])]   # slots, time, place; keys, values


class Waits(TorchDispatchMode):
    """Counts the operations after which the host knows a number from the device."""
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [dict(), dict(num_beams=3), dict(temperature=1.0, num_samples=2)])
def test_a_static_search_asks_every_16_times_whether_all_have_ended(settings):
    model, (source, mask) = lively_t5(), prompts([9, 4, 30])
    settings, n, steps, inner = dict(settings, suppress=[1]), {}, [], model.next_logits
    for static in (False, True):
        for times in (16, 64):
            with Waits() as waits:
                model.generate(source, mask, max_new_tokens=times, static=static, **settings)
            n[static, times] = waits.n
    assert n[True, 64] - n[True, 16] == 3 and n[False, 64] - n[False, 16] >= 48
    model.next_logits = lambda newest, cache: steps.append(len(newest)) or inner(newest, cache)
    settings["suppress"] = [0, *range(2, 160)]                      # all end at once
    got = model.generate(source, mask, max_new_tokens=64, static=True, **settings)
    assert set(got.flatten().tolist()) == {1} and got.shape[1] == 1 and steps == [3] * 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", VARIANTS)
def test_cuda_graphs_give_the_same_ids(settings):
    model, (source, mask) = lively_t5(eos=2.0).cuda(), (x.cuda() for x in prompts([9, 4, 30, 1]))
    wanted = model.generate(source, mask, max_new_tokens=40, static=False, **settings).tolist()
    for more in (dict(), dict(compile_step=True), dict(compile_step=True)):
        assert model.generate(source, mask, max_new_tokens=40, **settings, **more).tolist() == wanted


# --- what it leaves behind -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("static", [False, True])
def test_streaming_sees_each_id_and_modes_are_left_as_they_were(static):
    model = lively_t5(eos=2.0, dropout=0.3)
    model.train()
    model.decoder.blocks[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    source, mask = prompts([9, 4])
    seen = []
    got = model.generate(source, mask, max_new_tokens=20, static=static,
                         on_step=lambda newest: seen.append(newest.clone()))
    assert torch.equal(torch.cat(seen, 1), got) and got.shape[1] < 15
    assert torch.equal(got, model.generate(source, mask, max_new_tokens=20))        # no dropout
    assert {name: module.training for name, module in model.named_modules()} == before

    def stop(newest):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(source, mask, on_step=stop, static=static)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(module.packed is None for module in model.modules() if isinstance(module, Linear))
    model(source, source).backward()                                                # trainable as before
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_weights_changed_between_two_calls_count():
    model, (source, mask) = lively_t5(), prompts()
    a = model.generate(source, mask, max_new_tokens=5)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    b = model.generate(source, mask, max_new_tokens=5)
    assert (a[:, 0] + b[:, 0]).tolist() == [159] * 20


@pytest.mark.parametrize("shape", [(1, 1, 32), (7, 32), (5, 0, 32)])
@pytest.mark.parametrize("packed", [False, True])
def test_products_without_gradients_equal_those_with_them(shape, packed):
    linear, x = Linear(32, 48), torch.randn(shape)
    wanted = linear(x)
    with torch.no_grad():
        if packed and kernels.ONEDNN:
            linear.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
        torch.testing.assert_close(linear(x), wanted.detach(), atol=1e-5, rtol=0)


def test_without_onednn_ids_are_the_same(monkeypatch):
    model, (source, mask) = lively_t5(eos=1.0), prompts()
    wanted = [model.generate(source, mask, max_new_tokens=20, num_beams=n) for n in (1, 3)]
    if platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
        assert kernels.ONEDNN
    monkeypatch.setattr(kernels, "ONEDNN", False)
    for n, ids_ in zip((1, 3), wanted, strict=True):
        assert torch.equal(model.generate(source, mask, max_new_tokens=20, num_beams=n), ids_)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: 1 / 0, raising=False)
    assert not kernels.has_onednn()


def test_weights_that_are_no_numbers_are_told():
    model = tiny_t5()
    with torch.no_grad():
        model.encoder.blocks[0].ff.wo.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="the encoder's output is not finite"):
        model.generate(ids(1, 4))


def test_a_compiled_model_generates_and_computes_without_gradients():
    """torch.compile's wrapper passes on what it does not define."""
    model, (source, mask) = lively_t5(), prompts()
    compiled = torch.compile(model)
    assert torch.equal(*(m.generate(source, mask, max_new_tokens=3) for m in (compiled, model)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(source, source, mask), model(source, source, mask), atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings, part", [
    (dict(max_new_tokens=0), "max_new_tokens=0"), (dict(num_beams=0), "num_beams=0"),
    (dict(num_samples=2), "need a temperature above 0"), (dict(top_k=5), "need a temperature above 0"),
    (dict(temperature=-1.0), "temperature=-1.0"), (dict(temperature=1.0, top_p=0.0), "top_p=0.0"),
    (dict(temperature=1e-38), "temperature=1e-38"), (dict(temperature=1e300), "temperature=1e"),
    (dict(num_beams=2, early_stopping="never"), "early_stopping=never"),
    (dict(num_beams=2, length_penalty=1000), "length_penalty=1000"),
    (dict(source_mask=torch.ones(1, 3)), r"source_mask is \(1, 3\), source \(1, 4\)"),
    (dict(static=False, compile_step=True), "only a static step is compiled"),
    (dict(temperature=1.0, num_beams=2), "exclude each other"), (dict(num_beams=2, num_samples=3), "more than"),
])
def test_settings_that_do_not_go_together(settings, part):
    with pytest.raises(ValueError, match=part):
        tiny_t5().generate(ids(1, 4), **settings)


def test_cached_steps_in_bfloat16_equal_the_whole_decoder():
    """To a twentieth of the logits' deviation; keys are kept in bfloat16, scores come in float32."""
    model = lively_t5()
    source, mask = prompts([20, 6, 1])
    target = ids(3, 40, seed=8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model.logits(source, target, mask).float()
        cache = Cache(model.decoder.blocks, model.encode(source, mask), mask, 1)
        assert cache.own[0][0].dtype == cache.cross[0][0].dtype == torch.bfloat16
        for t, newest in enumerate(F.pad(target[:, :-1], (1, 0)).T):
            step = model.next_logits(newest[:, None], cache)[:, 0]
            assert step.dtype == torch.float32 and (step - whole[:, t]).std() < 0.05 * whole.std()
        for settings in (dict(num_beams=3), dict(temperature=1.0, num_samples=2)):
            assert model.generate(source, mask, max_new_tokens=5, **settings).max() < 160


def test_under_autocast_products_are_in_bfloat16():
    model, (source, mask) = lively_t5(), prompts([9, 4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.generate(source, mask, max_new_tokens=4)
        mask[1] = False                             # nothing but padding
        assert model.generate(source, mask, max_new_tokens=4).shape == low.shape == (2, 4)
        for attention in ("eager", "sdpa"):
            model.set_attention(attention)
            assert model.logits(source, source, mask).isfinite().all()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.lm_head(torch.randn(1, 32)).dtype == torch.bfloat16
