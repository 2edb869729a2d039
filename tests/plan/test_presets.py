"""Published models by name: each is built with as many parameters as were published."""

from __future__ import annotations

import pytest

from hetero.plan.presets import MEGATRON, PRESETS
from hetero.plan.shape import shape_of
from hetero.rehearse.models import from_config

PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "gemma-2b": 2_506_172_416,
    "gpt2": 124_439_808,
    "phi-3-mini": 3_821_079_552,
    "bert-base-uncased": 109_482_240,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "bloom-176b": 176_247_271_424,
}
ROUND = {"gpt-3-175b": 175, "moe-1t": 1041.2} | {
    **dict(zip(MEGATRON, (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008), strict=True))
}
"""Billions, as their papers round them; the mixture's is our own."""
HEAD_OF_BERT = (768 + 1) * 768 + 2 * 768 + 30522  # beside the tied matrix: what predicts a word
POOLER_OF_BERT = (768 + 1) * 768  # published with BertModel; a language model has none


def test_every_published_count_has_its_configuration() -> None:
    assert set(PUBLISHED) | set(ROUND) == set(PRESETS)


@pytest.mark.parametrize("name", ROUND)
def test_a_published_model_has_as_many_billions_as_its_paper_says(name: str) -> None:
    shape = shape_of(PRESETS[name])

    assert shape is not None
    assert round(shape.numel / 1e9, 1) == pytest.approx(ROUND[name], rel=4e-3)


@pytest.mark.campaign(seconds=0.5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_built_with_the_parameters_that_it_has(name: str) -> None:
    others = HEAD_OF_BERT - POOLER_OF_BERT if name.startswith("bert") else 0

    count = sum(param.numel() for param in from_config(PRESETS[name]).parameters())

    assert count == PUBLISHED[name] + others
