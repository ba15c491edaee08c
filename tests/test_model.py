"""The model: against transformers' T5 where it can be compared, by hand elsewhere."""
import math

import pytest
import torch
import torch.nn.functional as F

import bench
from kernels import attend_eager, attend_sdpa
from model import T5, T5Config, hf_name, relative_bucket, shift_right

PAD = 0


def tiny_t5(seed=0, **changes):
    """d_model is not n_head * d_kv, and the stacks differ in depth."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=160, d_model=32, d_kv=16, d_ff=48, n_head=3, n_layer=2, n_decoder_layer=3)
    return T5(T5Config(**{**sizes, **changes}))


def ids(*shape, seed=1, high=160):
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))


def hugging_face_twin(model):
    pytest.importorskip("transformers")
    return bench.hugging_face(model)


@pytest.mark.parametrize("tied, gated", [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_loss_and_every_gradient_equal_transformers(tied, gated, padded):
    """To 1e-5: v1.1 (untied, gated) and v1.0 (tied, ReLU), with and without padding on both sides."""
    model = tiny_t5(tied=tied, gated=gated)
    twin = hugging_face_twin(model)
    source, target, mask = ids(3, 37), ids(3, 11, seed=2), None
    if padded:
        mask = torch.arange(37) < torch.tensor([[37], [20], [5]])
        source = source.masked_fill(~mask, PAD)
        target = target.masked_fill(torch.arange(11) >= torch.tensor([[4], [11], [8]]), -100)
    theirs = twin(input_ids=source, attention_mask=mask, labels=target)
    torch.testing.assert_close(model.logits(source, target, mask), theirs.logits, atol=1e-5, rtol=0)
    loss = model(source, target, mask)
    torch.testing.assert_close(loss, theirs.loss, atol=1e-5, rtol=0)
    loss.backward()
    theirs.loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[hf_name(name)], atol=1e-5, rtol=0,
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_lengths_beyond_the_bias_table_equal_transformers():
    model = tiny_t5()
    source, target = ids(1, 600), ids(1, 300, seed=2)
    theirs = hugging_face_twin(model)(input_ids=source, labels=target).logits
    torch.testing.assert_close(model.logits(source, target), theirs, atol=1e-5, rtol=0)


def test_buckets_by_hand():
    """32 buckets, distance 128. Bidirectional: 0-7 exact behind, then log steps to 15; the same plus 16 ahead.
    Causal: 0-15 exact, log steps to 31, everything ahead in bucket 0."""
    distance = torch.tensor([[-200, -128, -127, -8, -1, 0, 1, 7, 8, 127, 128, 200]])
    both = relative_bucket(distance, bidirectional=True)
    assert both.tolist() == [[15, 15, 15, 8, 1, 0, 17, 23, 24, 31, 31, 31]]
    past = relative_bucket(distance, bidirectional=False)
    assert past.tolist() == [[31, 31, 31, 8, 1, 0, 0, 0, 0, 0, 0, 0]]
    far = relative_bucket(torch.tensor([[-15, -16, -17, -31, -32, -63, -64, -112, -113]]), bidirectional=False)
    assert far.tolist() == [[15, 16, 16, 21, 21, 26, 26, 30, 31]]


def test_the_decoder_does_not_look_ahead():
    model, source, target = tiny_t5().eval(), ids(2, 12), ids(2, 9)
    changed = target.clone()
    changed[:, 5] = 3       # read by the decoder at place 6 and later
    a, b = model.logits(source, target), model.logits(source, changed)
    torch.testing.assert_close(a[:, :6], b[:, :6], atol=0, rtol=0)
    assert (a[:, 6:] - b[:, 6:]).abs().amax((1, 2)).min() > 1e-3


def test_padding_and_companions_change_nothing():
    """A short row alone equals itself in a batch behind a longer one, to 1e-5 (fp32 sums in another order)."""
    model, short, long, target = tiny_t5().eval(), ids(1, 5), ids(1, 40, seed=3), ids(2, 6)
    batch = torch.cat([F.pad(short, (0, 35), value=PAD), long])
    mask = torch.ones(2, 40)
    mask[0, 5:] = 0
    torch.testing.assert_close(model.logits(batch, target, mask)[:1], model.logits(short, target[:1]),
                               atol=1e-5, rtol=0)
    torch.testing.assert_close(model.encode(batch, mask)[:1, :5], model.encode(short), atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_equals_eager_with_gradients(masked):
    def run(name):
        model = tiny_t5()
        model.set_attention(name)
        mask = torch.arange(20) < torch.tensor([[20], [9]]) if masked else None
        loss = model(ids(2, 20), ids(2, 7), mask)
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    (a, grads_a), (b, grads_b) = run("eager"), run("sdpa")
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    for x, y in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)


def test_scores_are_not_divided_by_the_head_width():
    q, k, v = torch.eye(2)[None, None] * 3, torch.eye(2)[None, None], torch.eye(2)[None, None]
    weight = math.exp(3) / (math.exp(3) + 1)        # softmax of (3, 0)
    for attend in (attend_eager, attend_sdpa):
        assert abs(attend(q, k, v, None, 0.0)[0, 0, 0, 0].item() - weight) < 1e-6


def test_gradient_checkpointing_changes_no_gradient():
    plain, saving = tiny_t5(), tiny_t5()
    saving.set_gradient_checkpointing()
    for model in (plain, saving):
        model(ids(2, 12), ids(2, 9)).backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=0)


def test_the_decoder_input_is_the_target_shifted():
    target = torch.tensor([[5, 6, 1], [7, -100, -100]])
    assert shift_right(target).tolist() == [[0, 5, 6], [0, 7, 0]]


def test_ignored_places_cost_nothing_and_sum_is_mean_times_count():
    model, source, target = tiny_t5(), ids(2, 12), ids(2, 9)
    short = target.clone()
    short[:, 6:] = -100
    cut = model(source, target[:, :6])
    torch.testing.assert_close(model(source, short), cut, atol=1e-6, rtol=0)
    torch.testing.assert_close(model(source, short, reduction="sum"), cut * 12, atol=1e-4, rtol=0)


def test_dropout_acts_in_training_only():
    model, source, target = tiny_t5(dropout=0.5), ids(2, 12), ids(2, 9)
    assert (model(source, target) - model(source, target)).abs() > 1e-4
    model.eval()
    assert model(source, target) == model(source, target)


def test_first_loss_is_near_the_logarithm_of_the_vocabulary():
    """t5x initialisation: within 1 of ln V; nanot5's head at 1 starts far above (nanoT5 issue 25)."""
    sizes = dict(vocab_size=1000, d_model=128, d_kv=32, n_head=4, d_ff=256, n_layer=2, n_decoder_layer=2)
    source, target = ids(4, 30, high=1000), ids(4, 20, high=1000)
    assert abs(tiny_t5(**sizes)(source, target).item() - math.log(1000)) < 1
    assert tiny_t5(**sizes, init="nanot5")(source, target).item() > 30


@pytest.mark.parametrize("init, head", [("t5x", 64 ** -0.5), ("nanot5", 1.0)])
def test_initial_standard_deviations(init, head):
    """The table of both recipes, to 5 % (each tensor has 8,192 weights or more); q carries 1/sqrt(d_kv)."""
    model = tiny_t5(vocab_size=512, d_model=64, d_kv=32, n_head=4, d_ff=192, init=init)
    attention, ff = model.encoder.blocks[0].attention, model.encoder.blocks[0].ff
    wanted = [(model.shared, 1.0), (model.lm_head, head), (attention.q, (64 * 32) ** -0.5),
              (attention.k, 64 ** -0.5), (attention.v, 64 ** -0.5), (attention.o, 128 ** -0.5),
              (ff.wi_0, 64 ** -0.5), (ff.wi_1, 64 ** -0.5), (ff.wo, 192 ** -0.5)]
    for module, std in wanted:
        assert abs(module.weight.std().item() / std - 1) < 0.05
    if init == "t5x":       # truncated at two standard deviations of the untruncated normal
        assert ff.wo.weight.abs().max() <= 2 * 192 ** -0.5 / 0.8796 + 1e-6


@pytest.mark.parametrize("sizes, wanted", [
    (dict(d_model=512, d_ff=1024, n_head=6, n_layer=8), 76_961_152),                         # v1.1 small
    (dict(d_model=768, d_ff=2048, n_head=12, n_layer=12), 247_577_856),                      # v1.1 base
    (dict(d_model=1024, d_ff=2816, n_head=16, n_layer=24), 783_150_080),                     # v1.1 large
    (dict(d_model=512, d_ff=2048, n_head=8, n_layer=6, tied=True, gated=False), 60_506_624),  # v1.0 small
    (dict(d_model=1024, d_ff=16384, n_head=32, d_kv=128, n_layer=24, tied=True, gated=False), 2_851_598_336),
])
def test_parameter_counts_are_the_published_ones(sizes, wanted):
    with torch.device("meta"):
        assert T5(T5Config(vocab_size=32_128, **sizes)).n_params() == wanted


def test_flops_of_base_and_small():
    """One row of base at 512/114: 389.1 GFLOP of matrix products and 36.9 of attention scores."""
    with torch.device("meta"):
        base = T5(T5Config(vocab_size=32_128, d_model=768, d_ff=2048, n_head=12, n_layer=12))
        small = T5(T5Config(vocab_size=32_128))
    assert abs(base.flops(1, 512, 114) / 425.9e9 - 1) < 1e-3
    assert abs(small.flops(4, 512, 114) / 425.0e9 - 1) < 1e-3


def test_greedy_generation_equals_a_search_by_hand():
    """Each id is the best one given the source and the ids before; a row stops at EOS and is padded."""
    model, source = tiny_t5().eval(), ids(3, 12)
    with torch.no_grad():
        model.lm_head.weight[1] += 0.3      # let some rows end early
    got = model.generate(source, max_new_tokens=10)
    for row in range(3):
        so_far = []
        for _ in range(10):
            target = torch.tensor([[*so_far, 0]])
            so_far.append(model.logits(source[row:row + 1], target)[0, -1].argmax().item())
            if so_far[-1] == 1:
                break
        mine = got[row].tolist()
        assert mine[:len(so_far)] == so_far and not any(mine[len(so_far):])


@pytest.mark.parametrize("changes, part", [
    (dict(init="he"), "init='he'"), (dict(n_head=0), "n_head=0"), (dict(dropout=1.0), "dropout=1.0"),
    (dict(vocab_size=2), "vocab_size=2"), (dict(n_bucket=3), "n_bucket=3"), (dict(max_distance=8), "max_distance=8"),
])
def test_impossible_sizes_are_named(changes, part):
    with pytest.raises(ValueError, match=part):
        tiny_t5(**changes)


def test_zero_out_lets_the_first_blocks_add_nothing():
    """o and wo at 0: the encoder's output is the normed embedding; all other weights are as without."""
    model, plain = tiny_t5(zero_out=True), tiny_t5()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(model.encode(ids), model.encoder.norm(model.shared(ids)))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (not p.any()) if name.endswith((".o.weight", ".wo.weight")) else torch.equal(p, q)


def test_match_init_lets_a_token_find_itself_in_the_source():
    """Cross-attention of the first decoder block at the start: for most tokens of a source without repeats the same
    token in the source has the highest score in each head; without match_init for few. The scale of k is kept."""
    found = {}
    for match in (False, True):
        model = tiny_t5(match_init=match, d_model=64, d_kv=16, n_head=4, vocab_size=256)
        cross, ids = model.decoder.blocks[0].cross, torch.arange(3, 35)[None]
        with torch.no_grad():
            x = model.shared(ids)
            scores = cross.heads(cross.q(x)) @ cross.heads(cross.k(x)).mT
        found[match] = (scores.argmax(-1) == torch.arange(32)).float().mean().item()
        assert 0.9 < cross.k.weight.std() * 64 ** 0.5 < 1.1
    assert found[True] > 0.9 and found[False] < 0.2


def test_local_init_by_hand():
    """Tables are lower by local_init * 2^(-8h/H) a token: at distance 3 by 3 * 2 * (1/4, 1/16, ...) for 4 heads."""
    plain, local = tiny_t5(n_head=4), tiny_t5(n_head=4, local_init=2.0)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    for stack, plain_stack in ((local.encoder, plain.encoder), (local.decoder, plain.decoder)):
        lower = plain_stack.bias[0].weight - stack.bias[0].weight
        for distance in (0, -1, -3, *([5] if stack is local.encoder else [])):
            row = stack.buckets(torch.tensor([[distance]])).item()
            torch.testing.assert_close(lower[row], 2 * abs(distance) * slopes, atol=1e-5, rtol=0)
        far = stack.buckets(torch.tensor([[-100]])).item()
        assert 60 < lower[far, 0] * 2 < 120 and torch.all(lower >= -1e-6)
