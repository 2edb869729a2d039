"""Closed forms of memory against traces of plain torch models, and against published figures."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.plan.footprint import (
    FP32,
    MIXED,
    NOT_COUNTED,
    Attention,
    Footprint,
    NormCode,
    OptimizerCode,
    Workload,
    attention_bytes,
    footprint,
    layer_bytes,
    loss_forward_bytes,
    loss_peak,
    optimizer_temporary_bytes,
    state_bytes,
)
from hetero.plan.shape import Decoder, Norm, preset
from tests.plan.traced import DTYPES, Layer, LiveBytes, extrapolate, trace

MIB, GIB = 2**20, 2**30
TOLERANCE = 1e-3
LLAMA = preset("llama-3-8b")


def llama(**sizes: object) -> Decoder:
    common = {
        "layers": 2,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 5632,
        "vocab": 32000,
    }
    return Decoder(**common | sizes)


def gpt(**sizes: object) -> Decoder:
    common = {
        "kv_heads": sizes.get("heads", 16),
        "ffn": 8192,
        "gated": False,
        "norm": Norm.LAYER,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    }
    return llama(**common | sizes)


def errors(found: Footprint, traced: Footprint) -> dict[str, float]:
    """Return the relative error of each phase and of the whole."""
    pairs = zip(found.peaks, traced.peaks, strict=True)
    per_phase = {a.phase: a.n_bytes / b.n_bytes - 1 for a, b in pairs}
    return per_phase | {"peak": found.peak.n_bytes / traced.peak.n_bytes - 1}


def drawn(seed: int) -> tuple[Decoder, Workload]:
    """Return a shape and a workload, each choice by chance."""
    rng = random.Random(seed)
    hidden, head_dim = rng.choice([512, 768, 1024, 2048, 3072]), rng.choice([64, 128])
    heads = hidden // head_dim * rng.choice([1, 1, 2])
    sizes = {
        "layers": rng.choice([2, 3, 4]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": rng.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        "head_dim": head_dim,
        "ffn": rng.choice([hidden // 2, hidden, 2 * hidden, 11 * hidden // 4, 4 * hidden]),
        "vocab": rng.choice([8000, 32000, 50257, 128256]),
        "tied": rng.random() < 0.3,
    }
    gated = rng.random() < 0.7
    shape = llama(**sizes, head_norms=rng.random() < 0.2) if gated else gpt(**sizes)
    load = Workload(
        micro_batch=rng.choice([1, 2, 4]),
        sequence=rng.choice([128, 512, 2048, 4096]),
        activation_bytes=rng.choice([2, 2, 4]),
        norm=rng.choice(list(NormCode)),
        checkpoint=seed % 2 == 1,
        upcast_logits=rng.random() < 0.5,
        returns_logits=rng.random() < 0.3,
        keeps_gradients=rng.random() < 0.7,
        optimizer=rng.choice(list(OptimizerCode)),
    )
    return shape, load


# --- against traces -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [14, pytest.param(40, marks=pytest.mark.slow)])
def test_configurations_by_chance_agree_with_their_traces_phase_by_phase(count: int) -> None:
    found = []
    for seed in range(count):
        shape, load = drawn(seed)
        traced, _ = trace(shape, load)
        worst = errors(footprint(shape, load), traced)
        assert all(abs(error) <= TOLERANCE for error in worst.values()), (shape, load, worst)
        found += map(abs, worst.values())

    assert median(found) <= TOLERANCE / 100


# planner: h 2048, a 16, g 8, f 5632, V 32000, T 4096; MiB that MemTracker counted
EXACT = [
    (NormCode.WRITTEN, True, 2, 596.0),
    (NormCode.WRITTEN, True, 4, 628.0),
    (NormCode.WRITTEN, False, 2, 1268.6),
    (NormCode.WRITTEN, False, 4, 1973.1),
    (NormCode.COMPOSITE, True, 2, 612.0),
    (NormCode.COMPOSITE, True, 4, 644.0),
    (NormCode.COMPOSITE, False, 2, 1348.6),
    (NormCode.COMPOSITE, False, 4, 2117.1),
]


@pytest.mark.parametrize(("norm", "checkpoint", "layers", "mib"), EXACT)
def test_forward_peaks_at_what_memtracker_counted(
    norm: NormCode, checkpoint: bool, layers: int, mib: float
) -> None:
    shape = llama(layers=layers)
    load = Workload(
        micro_batch=2, sequence=2048, norm=norm, checkpoint=checkpoint, upcast_logits=False
    )

    assert loss_forward_bytes(shape, load) / MIB == pytest.approx(mib, abs=0.05)
    assert trace(shape, load)[1] / MIB == pytest.approx(mib, abs=0.05)


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("shape", [llama(), llama(heads=8, kv_heads=2, head_norms=True), gpt()])
def test_a_layer_keeps_what_its_closed_form_says(shape: Decoder, attention: Attention) -> None:
    load = Workload(micro_batch=2, sequence=512, attention=attention, norm=NormCode.FUSED)
    with torch.device("meta"):
        layer = Layer(shape, load).to(DTYPES[2])
        x = torch.empty(2, 512, shape.hidden, dtype=DTYPES[2], requires_grad=True)
    mode = LiveBytes()
    mode.known(layer.parameters())
    with mode:
        out = layer(x * 1)  # the layer's input counts as what its first norm keeps

    kept_bytes = mode.live_bytes - out.nbytes  # with the 24 bytes of a generator's state
    assert 0 <= kept_bytes - layer_bytes(shape, load) <= 24


LAYERED = {
    "llama": llama(),
    "gpt2": gpt(tied=True, positions=1024, hidden=768, heads=12, head_dim=64, ffn=3072),
    "experts": llama(hidden=1024, heads=16, head_dim=64, ffn=2816, experts=4, experts_per_token=2),
}


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", LAYERED)
def test_two_and_three_layers_tell_of_twelve(name: str, checkpoint: bool) -> None:
    load = Workload(micro_batch=2, sequence=1024, norm=NormCode.WRITTEN, checkpoint=checkpoint)
    two, three, twelve = (trace(replace(LAYERED[name], layers=n), load)[0] for n in (2, 3, 12))

    found = errors(extrapolate(two, three, 12), twelve)
    assert all(abs(error) <= TOLERANCE for error in found.values()), found


def test_closed_forms_extrapolate_term_by_term() -> None:
    load = Workload(micro_batch=1, sequence=4096, checkpoint=True)
    two, three = (footprint(replace(LLAMA, layers=n), load) for n in (2, 3))

    assert extrapolate(two, three, LLAMA.layers) == footprint(LLAMA, load)


@pytest.mark.parametrize("code", [OptimizerCode.FOREACH, OptimizerCode.SINGLE])
def test_an_adam_step_takes_what_torchs_own_takes(code: OptimizerCode) -> None:
    sizes = (1 << 20, 3 << 20, 5 << 20, 4 << 20)
    params = [torch.empty(n, device="meta", requires_grad=True) for n in sizes]
    for param in params:
        param.grad = torch.empty_like(param)
    adam = torch.optim.AdamW(params, foreach=code is OptimizerCode.FOREACH)
    adam.step()
    mode = LiveBytes()
    states = [value for state in adam.state.values() for value in state.values()]
    mode.known([*params, *(param.grad for param in params), *states])
    with mode:
        adam.step()

    expected = optimizer_temporary_bytes(code, [param.nbytes for param in params])
    assert max(mode.peaks.values()) == pytest.approx(expected, rel=TOLERANCE)


def test_a_fused_adam_takes_nothing() -> None:
    assert optimizer_temporary_bytes(OptimizerCode.FUSED, [MIB]) == 0


# --- published figures ----------------------------------------------------------------------------


PAPER = Workload(micro_batch=1, sequence=2048)


def test_a_layer_of_llama_3_has_20_and_a_half_units() -> None:
    load = Workload(micro_batch=1, sequence=4096)
    statistics = 4 * load.tokens * (2 + LLAMA.heads)

    units = (layer_bytes(LLAMA, load) - statistics) / (2 * load.tokens * LLAMA.hidden)
    assert units == 20.5


def test_attention_without_a_kernel_takes_560_mib_a_layer_more() -> None:
    shape = llama(kv_heads=16)
    flash = Workload(micro_batch=2, sequence=2048)
    math = replace(flash, attention=Attention.MATH)

    more = attention_bytes(shape, math) - attention_bytes(shape, flash)
    assert more / MIB == pytest.approx(560, abs=0.5)


def test_the_loss_of_llama_3_takes_23_and_a_half_gib_at_16_k_tokens() -> None:
    loss = loss_peak(LLAMA, Workload(micro_batch=4, sequence=4096))

    assert dict(loss.terms)["loss"] / GIB == pytest.approx(23.5, abs=0.05)


def test_states_of_a_parameter_are_the_published_bytes() -> None:
    """16 of AdamW in fp32, and of mixed precision with a whole master (arXiv 1910.02054)."""
    assert [(states.resting, states.total) for states in (FP32, MIXED)] == [(12, 16), (14, 16)]
    assert state_bytes(LLAMA, MIXED) == 16 * 8_030_261_248


# --- terms and refusals ---------------------------------------------------------------------------


def test_a_footprint_prints_every_term_and_what_it_leaves_out() -> None:
    load = Workload(micro_batch=1, sequence=4096, returns_logits=True)
    found = footprint(LLAMA, load)
    text = str(found)

    assert all(term.name in text for peak in found.peaks for term in peak.terms)
    assert all(part in text for part in NOT_COUNTED)
    assert found.peak.n_bytes == max(sum(n for _, n in peak.terms) for peak in found.peaks)


@pytest.mark.parametrize(
    ("shape", "load", "why"),
    [
        (preset("mixtral-8x7b"), PAPER, "experts"),
        (preset("bert-base-uncased"), PAPER, "normed behind and a model without a head"),
        (LLAMA, replace(PAPER, attention=Attention.MATH), "operation by operation"),
    ],
)
def test_what_has_no_closed_form_is_to_be_traced(shape: Decoder, load: Workload, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        footprint(shape, load)

    assert "trace two and three layers" in caught.value.advice


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_more_sequences_tokens_layers_or_words_never_take_less(seed: int) -> None:
    shape, load = drawn(seed)
    least = footprint(shape, load).peak.n_bytes
    loads = [
        replace(load, micro_batch=load.micro_batch + 1),
        replace(load, sequence=load.sequence + 64),
    ]
    shapes = [
        replace(shape, layers=shape.layers + 1),
        replace(shape, vocab=shape.vocab + 1000),
    ]

    assert all(footprint(shape, more).peak.n_bytes >= least for more in loads)
    assert all(footprint(more, load).peak.n_bytes >= least for more in shapes)
