"""The faster forms of the model's operations against the plain ones, values and gradients."""
import pytest
import torch
import torch.nn.functional as F
from test_model import ids, tiny_t5

import kernels
from kernels import ATTENTION, IGNORE, try_attention
from optim import OptimConfig, make_optimizer

ONEDNN_WAYS = [False, True] if kernels.ONEDNN else [False]


def leaves(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_same(ours, plain, inputs, tolerance=1e-4):
    """Values and all gradients equal to `tolerance` of the largest."""
    a, b = ours(*inputs), plain(*inputs)
    g = torch.randn(a.shape, generator=torch.Generator().manual_seed(1))
    for x, y in zip([a, *torch.autograd.grad(a, inputs, g)], [b, *torch.autograd.grad(b, inputs, g)], strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, atol=tolerance * float(y.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("trains", ONEDNN_WAYS)
@pytest.mark.parametrize("shape", [(7, 32), (3, 5, 32), (1, 1, 32)])
def test_linear(shape, trains, monkeypatch):
    monkeypatch.setattr(kernels, "ONEDNN_TRAINS", trains)
    assert_same(kernels.linear, F.linear, leaves(shape, (48, 32)))


def test_linear_of_a_frozen_weight_or_input():
    x, w = leaves((4, 32), (48, 32))
    for a, b in ((x.detach(), w), (x, w.detach())):
        wanted = torch.autograd.grad(F.linear(a, b).square().sum(), [t for t in (a, b) if t.requires_grad])
        got = torch.autograd.grad(kernels.linear(a, b).square().sum(), [t for t in (a, b) if t.requires_grad])
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-4)


def test_rms_norm():
    x, w = leaves((3, 5, 32), (32,))
    assert kernels.by_hand(x)
    assert_same(lambda x, w: kernels.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (32,), w, 1e-6), [x, w])
    tiny = (1e-4 * x).detach().requires_grad_()                 # where eps counts
    assert_same(lambda x, w: kernels.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (32,), w, 1e-6), [tiny, w])


def plain_feed_forward(x, wi_0, wi_1, wo):
    return F.linear(F.gelu(F.linear(x, wi_0), approximate="tanh") * F.linear(x, wi_1), wo)


@pytest.mark.parametrize("trains", ONEDNN_WAYS)
def test_gated_feed_forward(trains, monkeypatch):
    monkeypatch.setattr(kernels, "ONEDNN_TRAINS", trains)
    assert_same(lambda *x: kernels.GatedFeedForward.apply(*x, 0.0), plain_feed_forward,
                leaves((3, 5, 32), (64, 32), (64, 32), (32, 64)))


def test_dropout_in_the_feed_forward_is_the_same_in_both_passes():
    """With wo the identity the output shows which places were dropped; the gradient must be that of these places."""
    x, wi_0, wi_1 = leaves((40, 8), (16, 8), (16, 8))
    wo = torch.eye(16, requires_grad=True)
    torch.manual_seed(0)
    y = kernels.GatedFeedForward.apply(x, wi_0, wi_1, wo, 0.25)
    kept = y != 0
    assert 0.2 < 1 - kept.float().mean() < 0.3
    plain = F.linear(F.gelu(F.linear(x, wi_0), approximate="tanh") * F.linear(x, wi_1) * kept / 0.75, wo)
    torch.testing.assert_close(y, plain, atol=1e-4, rtol=0)
    got, wanted = (torch.autograd.grad(z.sin().sum(), (x, wi_0, wi_1, wo), retain_graph=True) for z in (y, plain))
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("trains", ONEDNN_WAYS)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_head_cross_entropy(trains, z_loss, monkeypatch):
    monkeypatch.setattr(kernels, "ONEDNN_TRAINS", trains)
    target = torch.tensor([5, IGNORE, 0, 99, 7, IGNORE])

    def plain(y, w):
        logits = F.linear(y, w)
        log_z = logits.exp().sum(-1).log()[target != IGNORE]
        return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum") + z_loss * (log_z ** 2).sum()

    for way in (lambda y, w: kernels.HeadCrossEntropy.apply(y, w, target, z_loss),
                lambda y, w: kernels.cross_entropy(F.linear(y, w), target, z_loss)):
        assert_same(way, plain, leaves((6, 32), (100, 32)))


@pytest.mark.parametrize("trains", ONEDNN_WAYS)
def test_products_of_stacks(trains, monkeypatch):
    monkeypatch.setattr(kernels, "ONEDNN_TRAINS", trains)
    x, y = torch.randn(3, 5, 7), torch.randn(3, 4, 7)
    torch.testing.assert_close(kernels.products(x, y), torch.einsum("nik,njk->nij", x, y), atol=1e-5, rtol=0)


BIASES = [None, (1, 3, 40, 24), (2, 3, 40, 24), (2, 1, 1, 24)]


@pytest.mark.parametrize("name", ["sdpa", "by_head", "auto"])
@pytest.mark.parametrize("bias", BIASES)
def test_attention(name, bias, monkeypatch):
    monkeypatch.setattr(kernels.AttendByHead, "LEAST", 1)       # auto: by head
    q, k, v = leaves((2, 40, 3, 16), (2, 24, 3, 16), (2, 24, 3, 16))
    inputs = [q, k, v, *leaves(bias)] if bias else [q, k, v]

    def call(attend):
        return lambda q, k, v, bias=None: attend(*(x.transpose(1, 2) for x in (q, k, v)), bias, 0.0)

    assert_same(call(ATTENTION[name]), call(ATTENTION["eager"]), inputs)


@pytest.mark.parametrize("name", ["by_head", "auto"])
def test_attention_drops_weights_in_training(name, monkeypatch):
    monkeypatch.setattr(kernels.AttendByHead, "LEAST", 1)
    q, k, v = leaves((2, 3, 40, 16), (2, 3, 24, 16), (2, 3, 24, 16))
    found = []
    for way in (name, "eager"):
        torch.manual_seed(0)
        found.append(ATTENTION[way](q, k, v, None, 0.5))
    assert torch.equal(*found) and not torch.allclose(found[0], ATTENTION["eager"](q, k, v, None, 0.0), atol=0.1)


def test_a_batch_without_any_target_learns_nothing():
    for reduction in ("sum", "mean"):
        model = tiny_t5()
        loss = model(ids(2, 12), torch.full((2, 5), IGNORE), reduction=reduction)
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("n", [114, 120])
def test_an_aligned_bias_is_the_same(n):
    bias = torch.randn(1, 2, 3, n, requires_grad=True)
    out = kernels.aligned(bias)
    assert torch.equal(out, bias) and out.stride()[:3] == (720, 360, 120) and (out is bias) == (n == 120)
    out.sum().backward()
    assert torch.equal(bias.grad, torch.ones_like(bias))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("bias", BIASES)
def test_flex_attention_without_gradients(bias):
    """Its backward pass exists on CUDA alone; the formula is the same."""
    q, k, v = (x.detach() for x in leaves((2, 3, 40, 16), (2, 3, 24, 16), (2, 3, 24, 16)))
    bias = leaves(bias)[0].detach() if bias else None
    with torch.no_grad():
        torch.testing.assert_close(ATTENTION["flex"](q, k, v, bias, 0.0), ATTENTION["eager"](q, k, v, bias, 0.0),
                                   atol=1e-5, rtol=0)


def test_a_way_to_attend_that_is_wrong_or_missing_is_not_taken(monkeypatch):
    def wrong(q, k, v, bias, dropout):
        return ATTENTION["eager"](q, k, v, bias.detach(), dropout) + 0 * bias.sum()      # no gradient for the bias

    def missing(q, k, v, bias, dropout):
        raise RuntimeError("no kernel\nfor this card")

    monkeypatch.setitem(ATTENTION, "wrong", wrong)
    monkeypatch.setitem(ATTENTION, "missing", missing)
    found = try_attention(["sdpa", "wrong", "missing"], (2, 2, 16, 8), torch.device("cpu"), torch.float32)
    assert found["sdpa"][1] is None and found["sdpa"][0] < 10
    assert "differs" in found["wrong"][1] and found["missing"][1] == "RuntimeError: no kernel"
    assert kernels.fastest(found) == "sdpa"
    assert kernels.fastest({"missing": found["missing"]}) == "eager"


@pytest.mark.parametrize("sizes", [{}, {"tied": True, "gated": False}, {"bias_per_layer": True}])
def test_loss_and_gradients_of_the_whole_model(sizes, monkeypatch):
    """With every operation of this file, and with none."""
    monkeypatch.setattr(kernels.AttendByHead, "LEAST", 1)
    source, target = ids(3, 20), ids(3, 9, seed=1)
    target[1, 5:] = IGNORE
    mask = torch.arange(20)[None, :] < torch.tensor([[20], [13], [4]])
    results = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(kernels, "is_plain_cpu", lambda x: False)
        model = tiny_t5(**sizes)
        loss = model(source, target, mask)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5 * max(1.0, float(b.abs().max())), rtol=0)


@pytest.mark.parametrize("sizes", [{}, {"tied": True, "gated": False}, {"bias_per_layer": True, "dropout": 0.1}])
def test_the_compiler_takes_the_whole_model_as_one_graph(sizes):
    torch._dynamo.reset()
    mask = torch.ones(3, 20, dtype=torch.bool)
    told = torch._dynamo.explain(tiny_t5(**sizes).train())(ids(3, 20), ids(3, 9), mask, "sum")
    assert (told.graph_count, told.break_reasons) == (1, [])


@pytest.mark.parametrize("name", ["adamwscale", "adamw_hf", "adafactor"])
def test_the_compiler_takes_an_optimizer_step_as_one_graph(name):
    model = tiny_t5()
    model(ids(3, 20), ids(3, 9)).backward()
    optimizer = make_optimizer(model, OptimConfig(optimizer=name))
    optimizer.step()
    torch._dynamo.reset()
    told = torch._dynamo.explain(optimizer.step)()
    assert (told.graph_count, told.break_reasons) == (1, [])
