"""Optimizers against plainly written references and transformers; schedules against nanoT5's own numbers."""
import copy
import math

import pytest
import torch

from model import T5, T5Config, hf_name
from optim import (
    Adafactor,
    AdamWScale,
    Average,
    Muon,
    OptimConfig,
    hidden_matrices,
    lr_at,
    make_optimizer,
    orthogonalize,
    parameter_groups,
    rms_scale,
    set_lr,
)


def problem(seed=0):
    """Some weights of several shapes and scales, and 20 gradients of each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (5, 7), (33, 16), (9,), (4, 3)]
    scales = [1.0, 0.02, 1e-5, 1.0, 3.0]
    weights = [torch.randn(s, generator=generator) * a for s, a in zip(shapes, scales, strict=True)]
    gradients = [[torch.randn(s, generator=generator) * 10 ** (i % 3 - 2) for s in shapes] for i in range(20)]
    return weights, gradients


def run(make, weights, gradients, rates):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = make(params)
    for g, rate in zip(gradients, rates, strict=True):
        for p, x in zip(params, g, strict=True):
            p.grad = x.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return [p.detach() for p in params]


RATES = [0.02 * (1 + i % 5) / 5 for i in range(20)]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamwscale_equals_the_formula(weight_decay, scaled):
    """nanoT5's update written out in float64: 1e-6 relative over 20 steps. Without the RMS it is the AdamW that
    transformers had, which adds eps before the bias correction too."""
    weights, gradients = problem()
    got = run(lambda p: AdamWScale(p, weight_decay=weight_decay, scale=scaled), weights, gradients, RATES)
    for i, w in enumerate(weights):
        p, m, v = w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()
        for t, (g, lr) in enumerate(zip(gradients, RATES, strict=True), 1):
            g = g[i].double()
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            scale = max(1e-3, p.pow(2).mean().sqrt().item()) if scaled else 1.0
            p = p - lr * scale * math.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t) * m / (v.sqrt() + 1e-6)
            p = p - lr * weight_decay * p
        torch.testing.assert_close(got[i].double(), p, atol=1e-6 * p.abs().max().item(), rtol=1e-6)


def test_the_rms_of_a_large_tensor_is_exact():
    """16 million elements: to 1e-6 of float64, where torch's norm of the whole is 6e-4 off on a CPU."""
    p = torch.randn(32_128, 512, generator=torch.Generator().manual_seed(0))
    wanted = p.double().pow(2).mean().sqrt().item()
    assert abs(rms_scale([p])[0].item() / wanted - 1) < 1e-6
    assert all(x == torch.tensor(1e-3) for x in rms_scale([torch.zeros(5), torch.zeros(3, 4)]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adafactor_equals_transformers(weight_decay):
    transformers = pytest.importorskip("transformers")
    weights, gradients = problem()
    got = run(lambda p: Adafactor(p, weight_decay=weight_decay), weights, gradients, RATES)
    theirs = run(lambda p: transformers.Adafactor(p, lr=0.02, relative_step=False, weight_decay=weight_decay),
                 weights, gradients, RATES)
    for a, b, w in zip(got, theirs, weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6 * w.abs().max().item(), rtol=1e-6)


def test_adafactor_equals_the_formula():
    """The same once more, written out in float64, so that the check stands without transformers."""
    weights, gradients = problem()
    got = run(Adafactor, weights, gradients, RATES)
    for i, w in enumerate(weights):
        p, square = w.double(), None
        row = col = 0.0
        for t, (g, lr) in enumerate(zip(gradients, RATES, strict=True), 1):
            g, keep = g[i].double(), 1 - t ** -0.8
            g2 = g * g + 1e-30
            if w.ndim == 2:
                row, col = keep * row + (1 - keep) * g2.mean(1), keep * col + (1 - keep) * g2.mean(0)
                v = row[:, None] * col[None, :] / row.mean()
            else:
                square = v = g2 if square is None else keep * square + (1 - keep) * g2
            u = g / v.sqrt()
            u = u / max(1.0, u.pow(2).mean().sqrt().item())
            p = p - lr * max(1e-3, p.pow(2).mean().sqrt().item()) * u
        torch.testing.assert_close(got[i].double(), p, atol=2e-6 * w.abs().max().item(), rtol=2e-6)


def test_adamw_equals_the_formula():
    """torch's own, with the settings passed on: betas, eps and decay reach it."""
    model = torch.nn.Linear(5, 7)
    config = OptimConfig(optimizer="adamw", learning_rate=0.01, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.1)
    p = model.weight.detach().double()
    m = v = torch.zeros_like(p)
    optimizer = make_optimizer(model, config)
    _, gradients = problem()
    for t in range(1, 21):
        g = gradients[t - 1][0]
        model.weight.grad, model.bias.grad = g.clone(), torch.zeros(7)
        optimizer.step()
        g = g.double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        p = p * (1 - 0.01 * 0.1) - 0.01 * m / (1 - 0.8 ** t) / ((v / (1 - 0.95 ** t)).sqrt() + 1e-8)
    torch.testing.assert_close(model.weight.detach().double(), p, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("normuon", [False, True])
def test_a_saved_muon_goes_on_exactly(normuon):
    model, config = small_t5(), OptimConfig(optimizer="muon", normuon=normuon, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    learn(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(model, optimizer, range(3, 6))
    learn(twin, other, range(3, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamwscale", "adafactor", "adamw"])
def test_a_saved_optimizer_goes_on_exactly(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    config = OptimConfig(optimizer=name, learning_rate=0.01)
    optimizer = make_optimizer(model, config)

    def step(model, optimizer, i):
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(3):
        step(model, optimizer, i)
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(3, 6):
        step(model, optimizer, i)
        step(twin, other, i)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group_and_norms_do_not_decay(tied):
    model = T5(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, n_head=2, n_layer=2, tied=tied))
    decay, plain = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    got = [id(p) for p in decay["params"] + plain["params"]]
    assert len(got) == len(set(got)) and set(got) == {id(p) for p in model.parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    without = sorted(names[id(p)] for p in plain["params"])
    assert without == sorted(n for n in names.values() if "norm" in n or "bias" in n)
    assert {"encoder.bias.0.weight", "decoder.bias.0.weight"} < set(without)


# --- Muon ------------------------------------------------------------------------------------------------------------

def plain_newton_schulz(g):
    """One matrix, as Jordan et al. 2024 write it, in float64."""
    x = g.double()
    x = x / x.norm()
    if g.shape[0] > g.shape[1]:
        return plain_newton_schulz(g.T).T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (24, 64), (5, 1)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    """Singular vectors stay, singular values from 1 down to 1 / 50 of the norm come to [0.65, 1.25]; a stack equals its
    matrices one by one, and a matrix times 1e-6 or 1e6 gives the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *shape, generator=generator)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    x = u * torch.linspace(1, 0.1, s.shape[-1]) @ v
    y = orthogonalize(x)
    got = u.mT @ y @ v.mT
    values = got.diagonal(dim1=-2, dim2=-1)
    assert 0.65 < values.min() and values.max() < 1.25
    assert (got - torch.diag_embed(values)).abs().max() < 1e-5
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(b.double(), plain_newton_schulz(a), atol=1e-5, rtol=0)
    torch.testing.assert_close(orthogonalize(x * 1e-6), y, atol=1e-4, rtol=0)
    torch.testing.assert_close(orthogonalize(x * 1e6), y, atol=1e-4, rtol=0)
    assert torch.equal(orthogonalize(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def small_t5(**changes):
    torch.manual_seed(0)
    return T5(T5Config(**dict(vocab_size=64, d_model=16, d_kv=4, d_ff=40, n_head=3, n_layer=2) | changes))


def learn(model, optimizer, steps, rate=None):
    """Some steps on batches that follow from their number; returns the gradients of each."""
    gradients = []
    for i in steps:
        g = torch.Generator().manual_seed(i)
        model(torch.randint(3, 60, (4, 12), generator=g), torch.randint(3, 60, (4, 6), generator=g)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        if rate:
            set_lr(optimizer, rate * (1 + i % 3))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("changes", [
    dict(), dict(muon_rms=False), dict(muon_rms=False, weight_decay=0.5), dict(normuon=True),
    dict(weight_decay=0.5, cautious_decay=True, muon_momentum=0.8)])
def test_muon_equals_the_formula_of_a_single_matrix(changes):
    """Written out for one matrix at a time in float64, 6 steps, over all hidden matrices of a model; what is no hidden
    matrix goes as with AdamWScale."""
    model, config = small_t5(), OptimConfig(optimizer="muon", learning_rate=0.01, muon_lr=0.03, beta2=0.98, **changes)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, config)
    gradients = learn(model, optimizer, range(6), rate=0.01)
    hidden = hidden_matrices(model)
    assert len(hidden) == 2 * 7 + 2 * 11 and not any("bias" in n or "norm" in n for n in hidden)
    for name, got in hidden.items():
        p, m, rows = start[name].double(), 0.0, 0.0
        A, B = p.shape
        for i, grads in enumerate(gradients):
            g, lr, beta = grads[name].double(), 0.03 * (1 + i % 3), config.muon_momentum
            m = beta * m + (1 - beta) * g
            u = plain_newton_schulz((1 - beta) * g + beta * m)
            if config.normuon:
                norm = u.norm()
                rows = 0.95 * rows + 0.05 * u.square().mean(1, keepdim=True)
                u = u / (rows.sqrt() + 1e-8)
                u = u * norm / u.norm()
            u = u * max(A, B) ** 0.5
            scale = B ** -0.5 * (4 ** -0.5 if name.endswith(".q.weight") else 1)
            if config.muon_rms:
                scale = max(1e-3, p.square().mean().sqrt().item())
            decay = lr * config.weight_decay * p
            if config.cautious_decay:
                decay = decay * (u * p > 0)
            p = p - decay - lr * scale * u
        torch.testing.assert_close(got.detach().double(), p, atol=2e-4 * p.abs().max().item(), rtol=0, msg=name)
    others = [name for name in start if name not in hidden]
    twins = [torch.nn.Parameter(start[name].clone()) for name in others]
    decays = [config.weight_decay if n in ("shared.weight", "lm_head.weight") else 0.0 for n in others]
    reference = AdamWScale([{"params": [t], "weight_decay": d} for t, d in zip(twins, decays, strict=True)],
                           betas=(0.9, 0.98))
    for i, grads in enumerate(gradients):
        for name, twin in zip(others, twins, strict=True):
            twin.grad = grads[name].clone()
        set_lr(reference, 0.01 * (1 + i % 3))
        reference.step()
    for name, twin in zip(others, twins, strict=True):
        torch.testing.assert_close(dict(model.named_parameters())[name], twin, atol=1e-6, rtol=1e-6)


def test_muons_scale_of_q_is_that_of_an_attention_with_an_explicit_scale():
    """A q that is drawn without 1 / sqrt(d_kv), trained by plain Muon, and multiplied by it in the forward pass: after
    5 steps both models give the same logits, so what is stored is a stock T5."""
    model, config = small_t5(), OptimConfig(optimizer="muon", learning_rate=0.01, muon_lr=0.05, muon_rms=False)
    twin = copy.deepcopy(model)
    class Scaled(torch.nn.Module):
        def forward(self, w):
            return w * 4 ** -0.5
    for module in twin.modules():
        if hasattr(module, "q"):
            module.q.weight.data.mul_(4 ** 0.5)
            torch.nn.utils.parametrize.register_parametrization(module.q, "weight", Scaled(), unsafe=True)
    hidden = [p for n, p in twin.named_parameters() if ".blocks." in n and p.ndim == 2]
    others = [p for n, p in twin.named_parameters() if not (".blocks." in n and p.ndim == 2)]
    other = Muon([{"params": others}, {"params": hidden, "muon": True, "scale_q": 1.0, "lr_share": 5.0}], by_rms=False)
    learn(model, make_optimizer(model, config), range(5), rate=0.01)
    learn(twin, other, range(5), rate=0.01)
    source, target = torch.arange(3, 15)[None], torch.arange(20, 26)[None]
    torch.testing.assert_close(model.logits(source, target), twin.logits(source, target), atol=1e-4, rtol=0)


def test_a_step_of_muon_moves_a_matrix_by_about_its_rate():
    """by_rms: a step at 0.02 changes a hidden matrix by 0.01 to 0.024 of its norm, wherever it is."""
    model = small_t5(d_model=64, d_kv=16, d_ff=96)
    before = {name: p.detach().clone() for name, p in hidden_matrices(model).items()}
    learn(model, make_optimizer(model, OptimConfig(optimizer="muon", learning_rate=0.02)), [0], rate=0.02)
    for name, p in hidden_matrices(model).items():
        share = ((p - before[name]).norm() / before[name].norm()).item()
        assert 0.01 < share < 0.024, (name, share)


def test_muons_flops_by_hand():
    """A (2, 3) matrix: 5 times x x' (24), its square (16) and their sum's product with x (24)."""
    p = torch.nn.Parameter(torch.zeros(2, 3))
    assert Muon([{"params": [p], "muon": True, "scale_q": 1.0}]).flops() == 5 * (24 + 16 + 24)


def test_average_by_hand():
    """Decay 0.9: after t steps the newest weights enter at 9 / (10 + t), at least 0.1."""
    model = torch.nn.Linear(2, 1, bias=False)
    average = Average(model, 0.9)
    wanted = model.weight.detach().clone()
    for t in range(1, 120):
        model.weight.data.add_(1.0)
        average.update()
        wanted.lerp_(model.weight.detach(), max(0.1, 9 / (10 + t)))
    last = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), wanted)
    assert torch.equal(model.weight.detach(), last)
    other = Average(torch.nn.Linear(2, 1, bias=False), 0.9)
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    assert other.t == average.t and torch.equal(other.weights[0], average.weights[0])


def test_average_of_a_tied_model_has_the_head_under_both_names():
    model = small_t5(tied=True)
    average = Average(model, 0.5)
    with torch.no_grad():
        model.shared.weight.add_(1.0)
    average.update()
    weights = average.state_dict()["weights"]
    assert set(weights) == set(model.state_dict()) and weights["lm_head.weight"] is weights["shared.weight"]


# --- schedules -------------------------------------------------------------------------------------------------------

def test_cosine_is_nanot5s():
    """Peak 0.02, warm-up 10 of 60 steps, final 1e-5: the rates that nanoT5's own code used at these steps."""
    config = OptimConfig(learning_rate=0.02, warmup_steps=10, schedule="cosine", final_lr=1e-5)
    wanted = {0: 0.01, 1: 0.011, 5: 0.015, 9: 0.019, 10: 0.02, 11: 0.019980277150640574, 35: 0.010005,
              50: 0.0019188751412224016, 59: 2.9722849359425773e-05}
    for step, rate in wanted.items():
        assert abs(lr_at(step, config, 60) - rate) < 1e-12


def test_inverse_sqrt_is_nanot5s_legacy():
    """Flat 1e-2 for the first 10,000 steps, then 1/sqrt(step); the last tenth straight to 0."""
    config = OptimConfig(schedule="inverse_sqrt", learning_rate=1e-2, warmup_steps=10_000)
    wanted = {0: 0.01, 53: 0.01, 54: 0.01, 55: 0.008333333333333333, 59: 0.001666666666666667}
    for step, rate in wanted.items():
        assert abs(lr_at(step, config, 60) - rate) < 1e-12
    assert lr_at(10_000, config, 65_536) == 0.01
    assert lr_at(40_000, config, 65_536) == 0.005
    assert abs(lr_at(58_983, config, 65_536) * math.sqrt(58_983) - 1) < 1e-12
    assert 0 < lr_at(65_535, config, 65_536) < 1e-6


@pytest.mark.parametrize("schedule, wanted", [
    ("linear", {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
    ("wsd", {0: 0.0, 10: 1.0, 88: 1.0, 99: 0.5, 110: 0.0}),
    ("constant", {0: 0.0, 5: 0.5, 10: 1.0, 110: 1.0}),
])
def test_other_schedules_by_hand(schedule, wanted):
    """110 steps, 10 of warm-up from 0; wsd falls over the last fifth, 22 steps."""
    config = OptimConfig(schedule=schedule, learning_rate=1.0, warmup_steps=10, warmup_start=0.0)
    for step, rate in wanted.items():
        assert abs(lr_at(step, config, 110) - rate) < 1e-12


@pytest.mark.parametrize("changes, part", [
    (dict(optimizer="sgd"), "optimizer='sgd'"), (dict(schedule="step"), "schedule='step'"),
    (dict(learning_rate=0.0), "learning_rate=0.0"), (dict(beta2=1.0), "beta2=1.0"), (dict(grad_clip=-1.0), "grad_clip"),
    (dict(warmup_steps=-1), "warmup_steps=-1"), (dict(decay_share=2.0), "decay_share=2.0"),
])
def test_impossible_settings_are_named(changes, part):
    with pytest.raises(ValueError, match=part):
        OptimConfig(**changes)


# --- whole trajectories of nanoT5's own code -------------------------------------------------------------------------

def formula_model():
    """A T5 v1.1 whose weights are a formula, so that any program can have the same: with Hugging Face's names in
    alphabetical order, i the place of a tensor and k that of an element in it,
    sqrt(2) * std * sin(1 + 12.9898 k (1 + 0.1 i) + 78.233 i), std as nanoT5 draws it, norms 1."""
    config = T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, n_head=3, n_layer=2)
    model = T5(config)
    named = {hf_name(name): p for name, p in model.named_parameters()}
    for i, name in enumerate(sorted(named)):
        p = named[name]
        if "layer_norm" in name:
            continue
        std = {"q": (32 * 8) ** -0.5, "o": (3 * 8) ** -0.5, "wo": 64 ** -0.5, "shared": 1.0, "lm_head": 1.0}.get(
            name.split(".")[-2], 32 ** -0.5)
        k = torch.arange(p.numel(), dtype=torch.float64)
        values = math.sqrt(2) * std * torch.sin(1 + 12.9898 * k * (1 + 0.1 * i) + 78.233 * i)
        p.data.copy_(values.view(p.shape))
    return model


def formula_batch(t):
    r, c = torch.arange(4)[:, None], torch.arange(24)[None]
    source = 2 + (7 * r + 11 * c + 5 * t + c * c % 13) % 246
    c = torch.arange(10)[None]
    target = 2 + (3 * r + 17 * c + 5 * t + c * c * r % 7) % 246
    target[:, -1] = 1
    return source, target


def trajectory(optimizer_name, schedule, n=60):
    """Losses, rates and gradient norms of the steps, as train.py makes them."""
    model = formula_model()
    config = OptimConfig(optimizer=optimizer_name, learning_rate=0.02, warmup_steps=10)
    if schedule == "legacy":
        config = OptimConfig(optimizer=optimizer_name, schedule="inverse_sqrt", learning_rate=0.01, warmup_steps=10_000)
    optimizer = make_optimizer(model, config)
    losses, rates, norms = [], [], []
    for step in range(n):
        rates.append(lr_at(step, config, 60))
        set_lr(optimizer, rates[-1])
        loss = model(*formula_batch(step % 8))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, rates, norms


# Losses of steps 0 to 59 that nanoT5's own code gave (its model, optimizers, schedules and clipping;
# transformers 4.57.6, torch 2.13, fp32, CPU) from the weights and batches of the formulas above.
TRAJECTORIES = {
    "adamwscale/cosine": [
        21.831945, 19.588249, 11.441057, 9.454795, 6.238542, 6.747634, 6.042496, 6.942674, 6.066201, 5.857965,
        5.065733, 5.171894, 4.710043, 4.971733, 4.629970, 5.163811, 5.333011, 4.806519, 4.365819, 4.113688,
        3.952504, 4.008124, 4.049756, 4.439746, 4.205153, 4.031807, 3.338202, 3.436725, 3.249721, 3.341508,
        3.506650, 3.749302, 3.382113, 3.475895, 2.949266, 3.226107, 2.869947, 2.903234, 3.022122, 3.396725,
        3.073553, 3.269039, 2.641726, 2.926432, 2.533861, 2.585012, 2.709886, 3.104490, 2.969771, 3.012479,
        2.472678, 2.744801, 2.386549, 2.485586, 2.569966, 3.010983, 2.905199, 2.945456, 2.414504, 2.697331,
    ],
    "adamwscale/legacy": [
        21.831945, 19.588249, 11.840495, 10.245493, 6.635400, 6.750503, 5.751582, 6.731414, 5.864428, 5.687303,
        5.120424, 5.343783, 4.827102, 5.260791, 5.064062, 5.318611, 4.919072, 4.970703, 4.529889, 4.533420,
        4.247523, 4.486032, 4.495164, 4.553299, 4.484766, 4.158281, 4.023991, 3.931073, 3.825010, 3.883915,
        3.864784, 4.033768, 4.000364, 3.637367, 3.329551, 3.405562, 3.399010, 3.456570, 3.296100, 3.708306,
        3.702946, 3.255193, 2.958144, 2.982053, 3.025785, 3.202623, 2.881021, 3.407582, 3.356795, 3.116362,
        2.683512, 2.660722, 2.616397, 2.892760, 2.698447, 3.250035, 3.032470, 2.946651, 2.526434, 2.553426,
    ],
    "adafactor/cosine": [
        21.831945, 19.509584, 10.867212, 8.150422, 6.057195, 6.946244, 5.810730, 6.819545, 6.681009, 6.080711,
        5.598390, 5.729249, 5.735517, 5.816600, 5.387292, 5.406074, 5.956054, 5.676590, 4.919071, 4.935178,
        4.594516, 4.845147, 4.258231, 4.405096, 4.777636, 4.408186, 3.757709, 4.110803, 4.099562, 4.006465,
        3.742371, 3.691989, 4.122512, 3.993296, 3.500734, 3.444938, 3.398710, 3.608207, 3.255534, 3.081388,
        3.561933, 3.467957, 2.901836, 2.989677, 3.020862, 3.086574, 2.820374, 2.656389, 3.272358, 3.125983,
        2.591020, 2.707593, 2.746540, 2.835241, 2.582640, 2.451877, 3.057047, 2.947769, 2.442688, 2.596396,
    ],
    "adafactor/legacy": [
        21.831945, 19.509584, 11.242052, 8.905437, 5.870215, 6.543292, 5.672067, 6.494994, 6.087826, 5.800577,
        5.420862, 5.482049, 4.803742, 5.551884, 4.935203, 5.542490, 5.584832, 5.101132, 4.899432, 4.806921,
        4.618603, 4.752609, 4.471913, 4.803113, 5.022882, 4.414642, 4.119731, 4.016617, 3.896083, 4.109985,
        3.917323, 4.030105, 4.456989, 3.984975, 3.538137, 3.682341, 3.813678, 3.896992, 3.730332, 3.570581,
        4.147754, 3.539535, 3.584742, 3.279732, 3.707127, 3.657012, 3.653098, 3.236753, 3.825395, 3.499408,
        3.159552, 3.149357, 3.432119, 3.350910, 3.452762, 2.897908, 3.509266, 3.148831, 2.762320, 2.763509,
    ],
}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_nanot5s_trajectories_are_followed(name):
    wanted = TRAJECTORIES[name]
    losses, _, _ = trajectory(*name.split("/"))
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 5e-5
