"""Published models by name: their configurations, as a ``config.json`` has them (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Preset = Mapping[str, Any]


def _published(
    model_type: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    **others: Any,
) -> Preset:
    """Return a configuration with Llama's names, and ``others`` as further keys."""
    return MappingProxyType(
        {
            "model_type": model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            **others,
        }
    )


def _gpt(vocab: int, hidden: int, layers: int, heads: int, positions: int) -> Preset:
    """Return a configuration with GPT-2's names."""
    return MappingProxyType(
        {
            "model_type": "gpt2",
            "vocab_size": vocab,
            "n_positions": positions,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
        }
    )


MEGATRON: Mapping[str, Preset] = MappingProxyType(
    {
        f"megatron-{size}b": _gpt(51200, hidden, layers, heads, 2048)
        for size, hidden, layers, heads in (
            ("1.7", 2304, 24, 24),
            ("3.6", 3072, 30, 32),
            ("7.5", 4096, 36, 32),
            ("18", 6144, 40, 48),
            ("39", 8192, 48, 64),
            ("76", 10240, 60, 80),
            ("145", 12288, 80, 96),
            ("310", 16384, 96, 128),
            ("530", 20480, 105, 128),
            ("1008", 25600, 128, 160),
        )
    }
)
"""The models of Megatron-LM's table of 2021 (arXiv 2104.04473), by billions of parameters."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama-3-8b": _published("llama", 128256, 4096, 32, 32, 8, 14336),
        "llama-3-70b": _published("llama", 128256, 8192, 80, 64, 8, 28672),
        "llama-3-405b": _published("llama", 128256, 16384, 126, 128, 8, 53248),
        "llama-2-7b": _published("llama", 32000, 4096, 32, 32, 32, 11008),
        "mistral-7b": _published("mistral", 32000, 4096, 32, 32, 8, 14336),
        "mixtral-8x7b": _published(
            "mixtral", 32000, 4096, 32, 32, 8, 14336, num_local_experts=8, num_experts_per_tok=2
        ),
        "qwen2.5-7b": _published("qwen2", 152064, 3584, 28, 28, 4, 18944),
        "gemma-2b": _published("gemma", 256000, 2048, 18, 8, 1, 16384, head_dim=256),
        "gpt2": _gpt(50257, 768, 12, 12, 1024),
        "gpt-3-175b": _gpt(50257, 12288, 96, 96, 2048),
        "bloom-176b": MappingProxyType(
            {
                "model_type": "bloom",
                "vocab_size": 250880,
                "hidden_size": 14336,
                "n_layer": 70,
                "n_head": 112,
            }
        ),
        "moe-1t": _published(  # no model of its own: as wide, as deep and with as many experts as
            # the largest open ones (Kimi K2), in Mixtral's form
            *("mixtral", 163840, 7168, 61, 64, 8, 2048),
            num_local_experts=384,
            num_experts_per_tok=8,
        ),
        "phi-3-mini": _published("phi3", 32064, 3072, 32, 32, 32, 8192),
        "bert-base-uncased": _published(
            "bert", 30522, 768, 12, 12, 12, 3072, max_position_embeddings=512, type_vocab_size=2
        ),
        "tinyllama-1.1b": _published("llama", 32000, 2048, 22, 32, 4, 5632),
        "smollm2-135m": _published("llama", 49152, 576, 30, 9, 3, 1536, tie_word_embeddings=True),
        **MEGATRON,
    }
)
"""Published configurations, as in their ``config.json``."""
