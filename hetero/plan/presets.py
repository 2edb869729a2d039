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
        "gpt2": MappingProxyType(
            {
                "model_type": "gpt2",
                "vocab_size": 50257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
            }
        ),
        "phi-3-mini": _published("phi3", 32064, 3072, 32, 32, 32, 8192),
        "bert-base-uncased": _published(
            "bert", 30522, 768, 12, 12, 12, 3072, max_position_embeddings=512, type_vocab_size=2
        ),
        "tinyllama-1.1b": _published("llama", 32000, 2048, 22, 32, 4, 5632),
        "smollm2-135m": _published("llama", 49152, 576, 30, 9, 3, 1536, tie_word_embeddings=True),
    }
)
"""Published configurations, as in their ``config.json``."""
