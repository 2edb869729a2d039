"""The extra rules compute their papers' formulas, and 8-bit moments stay within their bounds."""

from __future__ import annotations

import copy
import inspect
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hetero.optim
from hetero.optim import (
    LAMB,
    LARS,
    AdamW8bit,
    Lion,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
)

Make = Callable[..., torch.optim.Optimizer]
Array = np.ndarray[Any, np.dtype[np.float64]]
ALL: list[Make] = [Lion, LAMB, partial(LARS, lr=0.1), partial(AdamW8bit, block_size=16)]
KINDS: list[type[torch.optim.Optimizer]] = [Lion, LAMB, LARS, AdamW8bit]
SHAPES = [(7, 5), (13,), (3, 4, 2, 2), (), (1, 9)]
STEPS = 8

every_rule = pytest.mark.parametrize("make", ALL, ids=["Lion", "LAMB", "LARS", "AdamW8bit"])


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in SHAPES]


def gradients(params: Sequence[Tensor], steps: int = STEPS, seed: int = 1) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(p.shape, generator=draw).to(p.dtype) for p in params] for _ in range(steps)
    ]


def advance(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: list[list[Tensor]]
) -> None:
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        optimizer.step()


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- the formulas --------------------------------------------------------------------------------


def lion(p: Array, grads: list[Array], h: dict[str, Any]) -> Array:
    m = np.zeros_like(p)
    for g in grads:
        u = np.sign(h["betas"][0] * m + (1 - h["betas"][0]) * g)
        p = p - h["lr"] * (u + h["weight_decay"] * p)
        m = h["betas"][1] * m + (1 - h["betas"][1]) * g
    return p


def lamb(p: Array, grads: list[Array], h: dict[str, Any]) -> Array:
    m = v = np.zeros_like(p)
    b1, b2 = h["betas"]
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if h["bias_correction"] else (m, v)
        r = m_hat / (np.sqrt(v_hat) + h["eps"]) + h["weight_decay"] * p
        p_norm, r_norm = math.sqrt((p**2).sum()), math.sqrt((r**2).sum())
        trust = p_norm / r_norm if p_norm and r_norm else 1.0
        p = p - h["lr"] * min(trust, h["max_trust_ratio"] or math.inf) * r
    return p


def lars(p: Array, grads: list[Array], h: dict[str, Any]) -> Array:
    buffer = None
    for g in grads:
        p_norm, g_norm = math.sqrt((p**2).sum()), math.sqrt((g**2).sum())
        rate = 1.0
        if p_norm and g_norm and not (h["exclude_1d"] and p.ndim < 2):
            rate = p_norm / (g_norm + h["weight_decay"] * p_norm + h["eps"])
            rate *= h["trust_coefficient"]
        d = rate * (g + h["weight_decay"] * p)
        if h["momentum"]:
            damped = (1 - h["dampening"]) * d
            buffer = d if buffer is None else h["momentum"] * buffer + damped
            d = d + h["momentum"] * buffer if h["nesterov"] else buffer
        p = p - h["lr"] * d
    return p


FORMULAS = [
    (lion, Lion, {}, [{"lr": 0.02}, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}]),
    (lamb, LAMB, {}, [{"lr": 0.02}, {"lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.95)}]),
    (lamb, LAMB, {"bias_correction": False}, [{}, {"max_trust_ratio": 0.5, "eps": 0.1}]),
    (lars, LARS, {"lr": 2.0}, [{}, {"weight_decay": 0.0, "trust_coefficient": 0.01}]),
    (lars, LARS, {"lr": 0.1, "nesterov": True}, [{"exclude_1d": False}, {"eps": 0.5}]),
    (lars, LARS, {"lr": 0.1, "dampening": 0.3}, [{"momentum": 0.5}, {"momentum": 0.0}]),
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5)],  # a hundred roundings of 8 steps
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize(("formula", "kind", "defaults", "groups"), FORMULAS)
def test_eight_steps_are_the_formula_in_every_group(
    formula: Callable[[Array, list[Array], dict[str, Any]], Array],
    kind: Make,
    defaults: dict[str, Any],
    groups: list[dict[str, Any]],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    params = parameters(dtype)
    with torch.no_grad():
        params[4].zero_()  # a norm that is 0
    grads = gradients(params)
    cut = [params[:2], params[2:]]
    optimizer = kind(
        [{**g, "params": part} for g, part in zip(groups, cut, strict=True)], **defaults
    )
    wanted = [
        formula(p.detach().double().numpy(), [row[i].double().numpy() for row in grads], group)
        for group in optimizer.param_groups
        for i, p in enumerate(params)
        if any(p is q for q in group["params"])
    ]

    advance(optimizer, params, grads)

    for p, reference in zip(params, wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [LAMB, partial(LARS, lr=0.1)], ids=["LAMB", "LARS"])
def test_a_zero_gradient_on_a_zero_parameter_moves_nothing(kind: Make) -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    advance(kind([p]), [p], [[torch.zeros(4, 4)]] * 3)

    assert torch.equal(p, torch.zeros(4, 4))


@pytest.mark.parametrize("n_cuts", [1, 3, 17, 200])
def test_lion_gives_the_same_bits_on_any_flat_cut(n_cuts: int) -> None:
    whole = nn.Parameter(torch.randn(1003))
    borders = sorted({0, 1003, *torch.randint(1, 1003, (n_cuts,)).tolist()})
    pieces = [nn.Parameter(whole.detach()[a:b].clone()) for a, b in pairwise(borders)]
    grads = gradients([whole])
    cut = [[g[a:b] for a, b in pairwise(borders)] for (g,) in grads]

    advance(Lion([whole], lr=0.013, weight_decay=0.1), [whole], grads)
    advance(Lion(pieces, lr=0.013, weight_decay=0.1), pieces, cut)

    assert torch.equal(whole, torch.cat([p.detach() for p in pieces]))


# -- what a torch optimizer does -----------------------------------------------------------------


@every_rule
def test_maximize_is_the_step_of_the_negated_gradient(make: Make) -> None:
    up, down = parameters(), parameters()
    grads = gradients(up)
    advance(make(up, maximize=True), up, grads)
    advance(make(down), down, [[-g for g in row] for row in grads])

    assert same_bits(up, down)


@every_rule
def test_a_parameter_without_gradient_is_skipped_and_does_not_age(make: Make) -> None:
    params = parameters()
    grads = gradients(params)
    before = params[0].detach().clone()
    optimizer = make(params)
    advance(optimizer, params[1:], [row[1:] for row in grads])

    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    assert params[1] in optimizer.state
    assert all(s.get("step", STEPS) == STEPS for s in optimizer.state.values())


@every_rule
def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(make: Make) -> None:
    p = nn.Parameter(torch.tensor([[3.0, -2.0]]))
    optimizer = make([p])

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 13.0
    assert float(p.detach().square().sum()) < 13.0


@every_rule
def test_a_tensor_lr_steps_like_its_number(make: Make) -> None:
    number, tensor = parameters(), parameters()
    grads = gradients(number)
    advance(make(number, lr=0.125), number, grads)
    advance(make(tensor, lr=torch.tensor(0.125)), tensor, grads)

    assert same_bits(number, tensor)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_saved_and_loaded_run_continues_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    grads = gradients(params)
    optimizer = make(params)
    advance(optimizer, params, grads[:4])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(params)
    other = make(resumed, lr=7.0)
    other.load_state_dict(torch.load(file))
    advance(optimizer, params, grads[4:])
    advance(other, resumed, grads[4:])

    assert same_bits(params, resumed)
    for p, q in zip(params, resumed, strict=True):
        for key, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][key].dtype
            assert torch.equal(value, other.state[q][key])


@every_rule
def test_step_counts_are_torchs(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    advance(optimizer, params, gradients(params))
    counts = [s["step"] for s in optimizer.state.values() if "step" in s]

    assert len(counts) == (len(params) if "step" in optimizer.state[params[0]] else 0)
    assert all(
        c.dtype == torch.float32 and c.shape == () and c.device.type == "cpu" for c in counts
    )


@every_rule
def test_sparse_gradients_are_refused_before_anything_moves(make: Make) -> None:
    first, second = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    first.grad, second.grad = torch.ones(3, 3), torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        make([first, second]).step()

    assert torch.equal(first, torch.ones(3, 3))


@every_rule
def test_complex_parameters_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="complex"):
        make([nn.Parameter(torch.ones(3, dtype=torch.complex64))])


BAD: list[tuple[str, Any]] = [
    *(("lr", bad) for bad in (-1.0, math.nan, torch.ones(2))),
    *(("betas", bad) for bad in ((1.0, 0.9), (0.9, -0.1), (0.9,))),
    *((name, -1e-3) for name in ("eps", "weight_decay", "momentum", "dampening")),
    ("trust_coefficient", -1.0),
    ("max_trust_ratio", 0.0),
    ("block_size", 0),
    ("block_size", 2.5),
    ("nesterov", True),
]


REFUSED = [(k, n, v) for k in KINDS for n, v in BAD if n in inspect.signature(k).parameters]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_bad_setting_is_refused_as_a_default_and_in_a_group(
    kind: Make, name: str, value: Any
) -> None:
    base = {"lr": 0.1, **({"momentum": 0.0} if kind is LARS else {})}
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"Invalid|Nesterov"):
        kind([p], **{**base, name: value})
    optimizer = kind([p], **base)
    with pytest.raises(ValueError, match=r"Invalid|Nesterov"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: value})

    assert len(optimizer.param_groups) == 1


# -- eight bits ----------------------------------------------------------------------------------

BLOCK = 16
magnitudes = st.floats(1e-16, 1e6) | st.just(0.0)
blocks = st.lists(magnitudes, min_size=BLOCK, max_size=BLOCK)
signs = st.lists(st.sampled_from((-1.0, 1.0)), min_size=BLOCK, max_size=BLOCK)
SLACK = 1 + 1e-5  # fp32 roundings of the codec itself


def codes_for(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), torch.empty(x.shape[0], 1)


@settings(deadline=None, max_examples=200)
@given(blocks, signs)
def test_a_first_moment_comes_back_within_its_bound(block: list[float], sign: list[float]) -> None:
    m = (torch.tensor(block) * torch.tensor(sign)).view(1, -1)
    codes, absmax = codes_for(m, torch.int8)
    encode_signed(m, codes, absmax)
    error = (decode_signed(codes, absmax) - m).abs().double()
    top = m.abs().max().double()

    assert float(absmax) == float(top)
    assert bool((error <= SLACK * ((m.abs() * top).sqrt() / 127 + top / 64516)).all())


@settings(deadline=None, max_examples=200)
@given(blocks, st.integers(1, 10**6))
def test_a_second_moment_comes_back_within_one_code_and_never_as_zero(
    block: list[float], step: int
) -> None:
    v = torch.tensor(block).view(1, -1)
    codes, absmax = codes_for(v, torch.uint8)
    encode_positive(v, codes, absmax, step)
    back = decode_positive(codes, absmax)
    top = max(float(v.max()), 1e-30)
    roots, wanted = ((x.double() / top) ** 0.125 for x in (back, v))

    assert torch.equal(back > 0, v > 0)
    assert float(back.max()) == float(v.max())
    assert float((roots - wanted).abs().max()) <= SLACK / 255


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_second_moments_neither_climb_nor_stick_over_a_thousand_steps(spread: float) -> None:
    """Codes rounded up would climb to 2 to 100 times sqrt(v)."""
    draw = torch.Generator().manual_seed(3)
    scale = torch.exp(spread * torch.randn(8, 256, generator=draw))
    exact, v = torch.zeros(8, 256), torch.zeros(8, 256)
    codes, absmax = codes_for(v, torch.uint8)
    for step in range(1, 1001):
        g = scale * torch.randn(8, 256, generator=draw)
        exact.mul_(0.999).addcmul_(g, g, value=0.001)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        encode_positive(v, codes, absmax, step)
        v = decode_positive(codes, absmax)
    ratio = (v / exact).sqrt()

    assert 0.97 < float(ratio.median()) < 1.03
    assert float((ratio - 1).square().mean().sqrt()) < 0.12


def test_the_first_step_has_adamws_bits() -> None:
    ours, plain = parameters(), parameters()
    grads = gradients(ours, steps=1)
    advance(AdamW8bit(ours, lr=0.01, weight_decay=0.1), ours, grads)
    advance(torch.optim.AdamW(plain, lr=0.01, weight_decay=0.1, foreach=False), plain, grads)

    assert same_bits(ours, plain)


def fit(make: Make, seed: int) -> float:
    """Return the loss over all data after 300 steps on a noisy regression, floor near 0.09."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2048, 16, generator=draw)
    y = torch.sin(x @ torch.randn(16, 4, generator=draw) / 4)
    y += 0.3 * torch.randn(2048, 4, generator=draw)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = make(net.parameters(), lr=3e-3)
    for step in range(300):
        rows = slice(256 * (step % 8), 256 * (step % 8 + 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return nn.functional.mse_loss(net(x), y).item()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.campaign(seconds=1)) for n in (1, 2))]
)
def test_a_regression_ends_within_two_per_cent_of_adamws_loss(seed: int) -> None:
    plain, ours = fit(torch.optim.AdamW, seed), fit(AdamW8bit, seed)

    assert plain < 0.2
    assert abs(ours / plain - 1) < 0.02


def test_states_take_two_bytes_a_parameter_and_eight_a_block() -> None:
    p = nn.Parameter(torch.randn(10, 4, 5, 5).to(memory_format=torch.channels_last))
    optimizer = AdamW8bit([p], block_size=256)
    advance(optimizer, [p], gradients([p], steps=2))
    state = optimizer.state[p]
    codes = [state["exp_avg_q"], state["exp_avg_sq_q"]]
    scales = [state["exp_avg_absmax"], state["exp_avg_sq_absmax"]]

    assert sum(x.nbytes for x in codes + scales) == 2 * 1000 + 8 * 4
    assert [x.dtype for x in codes + scales] == [torch.int8, torch.uint8, *[torch.float32] * 2]
    assert all(x.shape == p.shape and x.stride() == p.stride() for x in codes)
    assert set(state) == {
        "step",
        *(f"exp_avg{s}_{k}" for s in ("", "_sq") for k in ("q", "absmax")),
    }


def test_slices_and_strides_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.randn(6, 8, 5, 5)
    plain = nn.Parameter(start.clone())
    sliced = nn.Parameter(start.clone())
    strided = nn.Parameter(start.clone(memory_format=torch.channels_last))
    grads = gradients([plain])
    advance(AdamW8bit([plain], block_size=64), [plain], grads)
    advance(AdamW8bit([strided], block_size=64), [strided], grads)
    monkeypatch.setattr(hetero.optim, "SLICE_NUMEL", 200)
    advance(AdamW8bit([sliced], block_size=64), [sliced], grads)

    assert not strided.is_contiguous()
    assert torch.equal(plain, strided)
    assert torch.equal(plain, sliced)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_any_number_of_elements_is_stepped_whole(numel: int) -> None:
    p = nn.Parameter(torch.zeros(numel))
    advance(AdamW8bit([p], lr=0.1, block_size=64), [p], [[torch.ones(numel)]] * 2)

    assert torch.allclose(p, torch.full((numel,), -0.2), atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])  # its square overflows
def test_a_gradient_that_is_not_finite_makes_its_block_nan_at_the_next_step(bad: float) -> None:
    p = nn.Parameter(torch.randn(100))
    grads = gradients([p])
    grads[-2][0][17] = bad
    optimizer = AdamW8bit([p], block_size=16)
    advance(optimizer, [p], grads)
    block = torch.arange(100) // 16 == 1

    assert bool(p[block].isnan().all())
    assert bool(p[~block].isfinite().all())
    assert optimizer.state[p]["exp_avg_sq_absmax"].isnan().tolist() == [i == 1 for i in range(7)]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
@every_rule
def test_a_gpu_steps_like_the_host(make: Make) -> None:
    """Tolerance: fused multiply-adds round otherwise, which may move a code by one."""
    host = parameters()
    device = [nn.Parameter(p.detach().to("cuda")) for p in host]
    grads = gradients(host)
    advance(make(host, lr=1e-3), host, grads)
    advance(make(device, lr=1e-3), device, [[g.to("cuda") for g in row] for row in grads])

    for p, q in zip(host, device, strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-4)
