"""The shape of a transformer: what its memory and its time depend on (floor 1, no torch).

A `Decoder` holds sizes and which parts there are, read from the ``config.json`` beside a model's
weights; its properties count parameters exactly (E1 of the planner's equations). The published
counts of twelve models are its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from hetero.errors import ConfigError


class Norm(IntEnum):
    """A norm over the features; the value is how many vectors of parameters it has."""

    RMS = 1
    LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A stack of equal transformer layers between an embedding and a head."""

    layers: int
    """Number of layers."""
    hidden: int
    """Features of the residual stream."""
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    """Key and value heads of a layer."""
    head_dim: int
    """Features of a head."""
    ffn: int
    """Features inside the MLP, or inside one expert."""
    vocab: int
    """Tokens of the embedding."""
    tied: bool = False
    """Whether the head uses the embedding's weight."""
    headless: bool = False
    """Whether there is no head over the vocabulary."""
    gated: bool = True
    """Whether the MLP has a gate: three matrices, not two."""
    norm: Norm = Norm.RMS
    """Two in a layer, and one after the last layer unless `embedding_norm`."""
    head_norms: bool = False
    """Whether queries and keys are normed head by head."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: int = 0
    """Learned positions; 0 where they are rotary."""
    token_types: int = 0
    """Rows of BERT's third embedding."""
    embedding_norm: bool = False
    """Whether norms follow layers, and the embedding instead of the last layer (BERT)."""
    pooler: bool = False
    """Whether a square matrix with bias pools the first token (BERT)."""
    experts: int = 0
    """MLPs of a layer that a router chooses from; 0 for one MLP and no router."""
    experts_per_token: int = 0
    shared_ffn: int = 0
    """Features of the expert that every token passes, after a gate of its own."""

    @property
    def query_dim(self) -> int:
        """Features of all query heads: a·d."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Features of all key heads: g·d."""
        return self.kv_heads * self.head_dim

    @property
    def norm_numel(self) -> int:
        """Parameters of one norm."""
        return self.norm * self.hidden

    @property
    def attention_numel(self) -> int:
        """Parameters of a layer's attention: h·ad + 2h·gd + ad·h, biases and norms of heads."""
        weights = 2 * self.hidden * (self.query_dim + self.kv_dim)
        biases = self.qkv_bias * (self.query_dim + 2 * self.kv_dim) + self.out_bias * self.hidden
        return weights + biases + 2 * self.norm * self.head_dim * self.head_norms

    @property
    def mlp_numel(self) -> int:
        """Parameters of a layer's MLP: 3hf; with experts E·3hf, the router h·E, and the shared."""
        if not self.experts:
            return self._mlp_numel(self.ffn)
        shared = self._mlp_numel(self.shared_ffn) + self.hidden if self.shared_ffn else 0
        return self.experts * (self._mlp_numel(self.ffn) + self.hidden) + shared

    def _mlp_numel(self, ffn: int) -> int:
        inside = 2 if self.gated else 1
        return (inside + 1) * self.hidden * ffn + self.mlp_bias * (inside * ffn + self.hidden)

    @property
    def layer_numel(self) -> int:
        """Parameters of a layer: N_l = h·ad + 2h·gd + ad·h + 3hf + 2h, for the Llama type."""
        return self.attention_numel + self.mlp_numel + 2 * self.norm_numel

    @property
    def embedding_numel(self) -> int:
        """Parameters before the first layer: V·h, with positions, types and their norm."""
        rows = self.vocab + self.positions + self.token_types
        return rows * self.hidden + self.embedding_norm * self.norm_numel

    @property
    def head_numel(self) -> int:
        """Parameters that only the head has: V·h, or none where it is tied or missing."""
        return 0 if self.tied or self.headless else self.vocab * self.hidden

    @property
    def tail_numel(self) -> int:
        """Parameters after the last layer: the last norm, the pooler and the head."""
        norm = 0 if self.embedding_norm else self.norm_numel
        return norm + self.pooler * (self.hidden + 1) * self.hidden + self.head_numel

    @property
    def numel(self) -> int:
        """Parameters: N = V·h + L·N_l + h + V·h, for the Llama type (E1)."""
        return self.embedding_numel + self.layers * self.layer_numel + self.tail_numel

    @property
    def layer_matmul_numel(self) -> int:
        """Weights of a layer that one token is multiplied with: of experts, only its own."""
        inside = 2 if self.gated else 1
        width = self.ffn
        if self.experts:
            width = self.experts_per_token * self.ffn + self.shared_ffn
        router = self.hidden * (self.experts + bool(self.shared_ffn))
        attention = 2 * self.hidden * (self.query_dim + self.kv_dim)
        return attention + (inside + 1) * self.hidden * width + router

    @property
    def head_matmul_numel(self) -> int:
        """Weights of the head that one token is multiplied with, tied or not: V·h."""
        return 0 if self.headless else self.vocab * self.hidden

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor: the embedding, or a matrix of a layer or an expert."""
        return self.hidden * max(self.vocab, self.positions, self.ffn, self.query_dim)


Config = Mapping[str, Any]


def from_config(config: Config) -> Decoder:
    """Read a Hugging Face ``config.json`` mapping.

    Keys that are missing have transformers' defaults where a published config relies on them.
    Raises ConfigError for a ``model_type`` that is not known, a key that is missing, and layers
    that are not all alike.
    """
    kind = config.get("model_type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(sorted(_READERS))
        raise ConfigError(
            f"model_type {kind!r} is not one whose equations are known",
            advice=f"known: {known}; for others, plan with the model itself: it is traced",
        )
    try:
        return read(config)
    except KeyError as error:
        raise ConfigError(
            f"the configuration of a {kind} model has no {error.args[0]!r}",
            advice="pass the whole config.json",
        ) from None


def preset(name: str) -> Decoder:
    """Return a published model by name; see `PRESETS`."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        known = ", ".join(PRESETS)
        raise ConfigError(f"unknown model {name!r}{hint}", advice=f"known models: {known}")
    return from_config(PRESETS[name])


def _common(config: Config) -> dict[str, Any]:
    """Return what all configurations with Llama's names have in common."""
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
    }


def _llama(config: Config) -> Decoder:
    biased = config.get("attention_bias", False)
    return Decoder(
        **_common(config),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=config.get("mlp_bias", False),
    )


def _mistral(config: Config) -> Decoder:
    return Decoder(**_common(config))


def _mixtral(config: Config) -> Decoder:
    return Decoder(
        **_common(config),
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
    )


def _qwen2(config: Config) -> Decoder:
    return Decoder(**_common(config), qkv_bias=True)


def _qwen2_moe(config: Config) -> Decoder:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ConfigError(
            "only some layers of this model have experts; the equations take equal layers",
            advice="plan with the model itself: it is traced",
        )
    common = _common(config) | {"ffn": config["moe_intermediate_size"]}
    return Decoder(
        **common,
        qkv_bias=True,
        experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        shared_ffn=config["shared_expert_intermediate_size"],
    )


def _qwen3(config: Config) -> Decoder:
    biased = config.get("attention_bias", False)
    common = _common(config) | {"head_dim": config.get("head_dim", 128)}
    return Decoder(**common, qkv_bias=biased, out_bias=biased, head_norms=True)


def _gemma(config: Config) -> Decoder:
    common = _common(config) | {"tied": config.get("tie_word_embeddings", True)}
    biased = config.get("attention_bias", False)
    return Decoder(**common, qkv_bias=biased, out_bias=biased)


def _gpt2(config: Config) -> Decoder:
    hidden, heads = config["n_embd"], config["n_head"]
    return Decoder(
        layers=config["n_layer"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.get("n_inner") or 4 * hidden,
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", True),
        gated=False,
        norm=Norm.LAYER,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=config["n_positions"],
    )


def _bert(config: Config) -> Decoder:
    """Read BERT: the encoder with its pooler, as ``BertModel`` has it."""
    return Decoder(
        **_common(config),
        headless=True,
        gated=False,
        norm=Norm.LAYER,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=config["max_position_embeddings"],
        token_types=config["type_vocab_size"],
        embedding_norm=True,
        pooler=True,
    )


_READERS: Mapping[str, Callable[[Config], Decoder]] = MappingProxyType(
    {
        "bert": _bert,
        "gemma": _gemma,
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _mistral,
        "mixtral": _mixtral,
        "phi3": _mistral,
        "qwen2": _qwen2,
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen3,
    }
)


def _published(
    model_type: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    **others: Any,
) -> Config:
    """Return a configuration with Llama's names; ``others`` are further keys of it."""
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


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "llama-3-8b": _published("llama", 128256, 4096, 32, 32, 8, 14336),
        "llama-3-70b": _published("llama", 128256, 8192, 80, 64, 8, 28672),
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
"""Published configurations, each as its ``config.json`` has it."""
