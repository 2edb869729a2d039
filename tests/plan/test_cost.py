"""Operations against published figures and the planner's table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.plan.cost import layer_flops, step_flops
from hetero.plan.shape import Decoder, Norm, preset

LLAMA = preset("llama-3-8b")
TOKENS = 32 * 1024


def gpt(layers: int, hidden: int, heads: int) -> Decoder:
    return Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=51200,
        tied=True,
        gated=False,
        norm=Norm.LAYER,
    )


# arXiv 2205.05198, Tables 3 and 5: layers, hidden, heads, batch, GPUs, seconds, MFU in %
TRAINED = [
    (48, 6144, 64, 4, 8, 1.10, 41.5),
    (96, 12288, 96, 64, 64, 13.75, 51.4),
    (105, 20480, 128, 280, 280, 37.83, 56.0),
    (128, 25600, 160, 512, 512, 71.49, 56.3),
]
A100 = 312e12


@pytest.mark.parametrize(("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu"), TRAINED)
def test_utilisations_of_megatron_are_those_published(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float
) -> None:
    tokens = 2048 * batch
    flops = step_flops(gpt(layers, hidden, heads), tokens=tokens, sequence=2048, causal=False)

    found = 100 * flops / (seconds * gpus * A100)
    assert found == pytest.approx(mfu, abs=0.2)  # seconds have three digits


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(96, 12288, 96), (105, 20480, 128)])
def test_operations_of_a_gpt_are_megatrons_closed_forms(
    layers: int, hidden: int, heads: int
) -> None:
    batch, s, vocab = 8, 2048, 51200
    tokens = batch * s
    model = 72 * batch * layers * s * hidden**2
    model *= 1 + s / (6 * hidden) + vocab / (12 * hidden * layers)  # arXiv 2205.05198
    again = 96 * batch * s * layers * hidden**2
    again *= 1 + s / (6 * hidden) + vocab / (16 * layers * hidden)  # arXiv 2104.04473
    shape = gpt(layers, hidden, heads)

    plain = step_flops(shape, tokens=tokens, sequence=s, causal=False)
    checkpointed = step_flops(shape, tokens=tokens, sequence=s, causal=False, checkpoint=True)
    assert plain == pytest.approx(model, rel=1e-12)
    assert checkpointed == pytest.approx(again, rel=1e-12)


def test_causal_attention_takes_half_of_the_scores() -> None:
    full = layer_flops(LLAMA, tokens=TOKENS, sequence=4096, causal=False)
    half = layer_flops(LLAMA, tokens=TOKENS, sequence=4096)

    assert full - half == 2 * TOKENS * 4096 * LLAMA.hidden


# --- planner's table of a step of Llama-3-8B over 32 k tokens, layers checkpointed ----------------

# name: bytes/s of DRAM, H2D and D2H; then seconds: H2D, D2H and CPU Adam
# achieved operations/s, and seconds of compute
COMPUTE = {"rtx4090": (0.85 * 165.2e12, 21.9), "h200": (794.5e12, 4.1), "gh200": (828.6e12, 3.9)}


@pytest.mark.parametrize("name", COMPUTE)
def test_compute_of_the_table_is_met_within_its_unstated_convention(name: str) -> None:
    """The table names neither the sequence nor whether the embedding counts.

    One sequence of all tokens, T1 as written: 21.8, 3.85 and 3.69 s. With 8·T for every parameter,
    embedding and recomputed head included, it is 4.07 and 3.90 s for the last two.
    """
    rate, seconds = COMPUTE[name]
    flops = step_flops(LLAMA, tokens=TOKENS, sequence=TOKENS, checkpoint=True)

    assert flops / rate == pytest.approx(seconds, rel=0.07)


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_more_tokens_layers_or_words_are_never_fewer_operations(
    layers: int, batch: int, checkpoint: bool
) -> None:
    def flops(shape: Decoder, sequences: int) -> int:
        return step_flops(shape, tokens=512 * sequences, sequence=512, checkpoint=checkpoint)

    shape = replace(LLAMA, layers=layers)
    least = flops(shape, batch)
    assert flops(shape, batch + 1) > least
    assert flops(replace(shape, layers=layers + 1), batch) > least
    assert flops(replace(shape, vocab=shape.vocab + 1), batch) > least
