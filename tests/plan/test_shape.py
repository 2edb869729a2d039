"""Parameters of published models, counted from their configurations."""

from __future__ import annotations

import pytest
import torch

from hetero.errors import ConfigError
from hetero.plan.shape import PRESETS, Norm, from_config, preset

PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
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
}

SMALL = {  # what published models of these types do not show
    "qwen3": {"head_dim": 64, "attention_bias": True},
    "qwen2_moe": {
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 80,
    },
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"tie_word_embeddings": True, "pad_token_id": 0},
}


def test_every_published_count_has_its_configuration() -> None:
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_published_model_are_counted_exactly(name: str) -> None:
    assert preset(name).numel == PUBLISHED[name]


def test_a_layer_of_llama_3_8b_has_218_million_parameters() -> None:
    assert round(preset("llama-3-8b").layer_numel / 1e6, 1) == 218.1


def count_of_transformers(config: dict[str, object]) -> int:
    """Return the parameters of the model that transformers builds, without any memory."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**config)
    headless = config["model_type"] == "bert"
    auto = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(made)
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "mixtral-8x7b", "gpt2", "bert-base-uncased", "gemma-2b", "qwen2.5-7b"]
)
def test_transformers_builds_as_many_parameters(name: str) -> None:
    config = dict(PRESETS[name])

    assert count_of_transformers(config) == preset(name).numel


@pytest.mark.parametrize("kind", SMALL)
def test_transformers_builds_as_many_parameters_of_unusual_settings(kind: str) -> None:
    config = {
        "model_type": kind,
        "vocab_size": 300,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        **SMALL[kind],
    }

    assert count_of_transformers(config) == from_config(config).numel


def test_key_heads_and_head_size_have_defaults() -> None:
    config = dict(PRESETS["llama-2-7b"])
    del config["num_key_value_heads"]
    config["head_dim"] = None  # as some config.json have it

    assert from_config(config) == preset("llama-2-7b")


def test_a_token_is_multiplied_with_its_own_experts_only() -> None:
    one = preset("mistral-7b")
    many = preset("mixtral-8x7b")
    router = many.hidden * many.experts

    extra = many.layer_matmul_numel - one.layer_matmul_numel
    assert extra == 3 * one.hidden * one.ffn + router


def test_a_tied_head_multiplies_and_has_no_parameters() -> None:
    gpt2 = preset("gpt2")

    assert gpt2.head_numel == 0
    assert gpt2.head_matmul_numel == 50257 * 768
    assert gpt2.norm is Norm.LAYER
    assert preset("bert-base-uncased").head_matmul_numel == 0


def test_an_unknown_model_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'mamba'") as caught:
        from_config({"model_type": "mamba"})

    assert "llama" in caught.value.advice and "bert" in caught.value.advice


def test_a_missing_key_is_named() -> None:
    config = dict(PRESETS["llama-3-8b"])
    del config["vocab_size"]

    with pytest.raises(ConfigError, match="'vocab_size'"):
        from_config(config)


def test_a_model_in_which_only_some_layers_have_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="only some layers"):
        from_config({"model_type": "qwen2_moe", "decoder_sparse_step": 2})


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean llama-3-8b"):
        preset("llama3-8b")
