"""The shape of a decoder, from its configuration, and the part of it that a rank has (floor 1; no
torch)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero.errors import ConfigError

LLAMAS = ("llama", "mistral", "qwen2", "gemma", "phi3", "mixtral")
KINDS = (*LLAMAS, "gpt2", "bloom")
TIED = ("gemma", "gpt2", "bloom")  # unless their configuration says otherwise
WINDOW = {"mistral": 4096}  # positions that a token sees
DROPOUT = {"gpt2": 0.1}
READ = {  # keys of a configuration that say all there is to a shape
    *("model_type", "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("n_inner", "n_positions", "num_local_experts", "num_experts_per_tok", "tie_word_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder of a published kind."""

    kind: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Width between the two layers of an MLP."""
    experts: int = 0
    """MLPs of a layer, of which a token takes some; 0: one, which all take."""
    chosen: int = 0
    """Experts that a token takes."""
    positions: int = 0
    """Rows of a table of positions; 0 without one."""
    window: int | None = None
    tied: bool = False
    dropout: float = 0.0

    @property
    def layer_numel(self) -> int:
        """Parameters of a layer, as `transformers` builds it."""
        return sum(self.layer_sizes())

    def layer_sizes(self, n_ranks: int = 1) -> tuple[int, int]:
        """Return the parameters of a layer that ranks divide, one's part of them, and those that
        each has whole."""
        w, h, kv, inner = self.width, self.heads * self.head_width, self.kv_heads, self.inner
        heads = w * (h + 2 * kv * self.head_width) + h * w
        if self.kind in LLAMAS:
            mlp = 3 * w * inner * max(1, self.experts)
            bias = h + 2 * kv * self.head_width if self.kind == "qwen2" else 0
            return (heads + mlp + bias) // n_ranks, 2 * w + self.experts * w
        split = heads + 2 * w * inner + 3 * h + inner
        return split // n_ranks, 2 * w + 4 * w  # biases of rows, and two norms

    @property
    def table_numel(self) -> int:
        """Parameters of an embedding, or of a head."""
        return self.vocab * self.width

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(self.share_numel(StageShare(0, self.layers, opens=True, closes=True)))

    def share_numel(self, share: StageShare) -> tuple[int, int]:
        """Return the parameters of a rank: its parts of those that ranks divide, and the others."""
        split, whole = self.layer_sizes(share.n_ranks)
        split, whole = share.n_layers * split, share.n_layers * whole
        table = -(-self.vocab // share.n_ranks) * self.width
        if share.opens:
            split += table
            whole += self.positions * self.width + 2 * self.width * (self.kind == "bloom")
        if share.closes:
            split += table * (not (self.tied and share.opens))
            whole += self.width * (1 if self.kind in LLAMAS else 2)
        return split, whole

    def flops(self, share: StageShare, samples: int, sequence: int) -> float:
        """Return the operations of a forward of a rank's share: matrix products, attention causal
        (T1)."""
        tokens = samples * sequence
        mlps = 2 if self.kind not in LLAMAS else 3 * max(1, self.chosen)
        heads = self.heads * self.head_width
        layer = self.width * (2 * heads + 2 * self.kv_heads * self.head_width + mlps * self.inner)
        scores = 2 * sequence * heads * (1 if self.kind == "bloom" else 0.5)
        per_token = share.n_layers * (layer + scores) + share.closes * self.table_numel
        return 2.0 * tokens * per_token / share.n_ranks


class StageShare(NamedTuple):
    """What one rank has of a decoder: layers in a row, and of their tensors a part."""

    first: int
    after: int
    """The first layer that is of the next stage."""
    opens: bool
    """Whether it has the embedding."""
    closes: bool
    """Whether it has the head, and the loss."""
    n_ranks: int = 1
    """That divide the tensors."""

    @property
    def n_layers(self) -> int:
        return self.after - self.first


def shape_of(config: Mapping[str, Any]) -> DecoderShape | None:
    """Return the shape in a configuration; None if its kind is not one of `KINDS`, or if it says
    more than a shape."""
    kind = str(config.get("model_type"))
    if kind not in KINDS or not READ.issuperset(config):
        return None
    width = int(config.get("hidden_size") or config["n_embd"])
    heads = int(config.get("num_attention_heads") or config["n_head"])
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * width
    return DecoderShape(
        kind=kind,
        vocab=int(config["vocab_size"]),
        width=width,
        layers=int(config.get("num_hidden_layers") or config["n_layer"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or width // heads),
        inner=int(inner),
        experts=int(config.get("num_local_experts") or 0),
        chosen=int(config.get("num_experts_per_tok") or 0),
        positions=int(config.get("n_positions", 1024)) if kind == "gpt2" else 0,
        window=WINDOW.get(kind),
        tied=bool(config.get("tie_word_embeddings", kind in TIED)),
        dropout=DROPOUT.get(kind, 0.0),
    )


def check_divides(shape: DecoderShape, n_ranks: int) -> None:
    """Refuse ranks that do not divide heads or widths of a decoder."""
    sizes = (("heads", shape.heads), ("heads of keys", shape.kv_heads), ("inner", shape.inner))
    for what, size in sizes:
        if size % n_ranks:
            fit = [n for n in (2, 4, 8, 16) if all(each % n == 0 for _, each in sizes)]
            said = f"tp={' or '.join(map(str, fit))}" if fit else "no tp"
            raise ConfigError(
                f"{n_ranks} ranks do not divide {size} {what}", advice=f"use {said} for this model"
            )


def even_cut(shape: DecoderShape, n_stages: int, n_ranks: int = 1) -> list[StageShare]:
    """Return the stages of a decoder, of as equal numbers of parameters as whole layers allow.

    An embedding and a head count as the layers that they weigh: with BLOOM's 250,880 words each is
    one.
    """
    table = shape.table_numel / shape.layer_numel
    whole = shape.layers + 2 * table
    cuts = [0]
    for stage in range(1, n_stages):
        cuts.append(max(0, min(shape.layers, round(whole * stage / n_stages - table))))
    cuts.append(shape.layers)
    if any(low >= high for low, high in itertools.pairwise(cuts)):
        raise ConfigError(
            f"{shape.layers} layers make no {n_stages} stages",
            advice=f"use at most {shape.layers} stages",
        )
    return shares_at(cuts, n_ranks)


def shares_at(cuts: Sequence[int], n_ranks: int = 1) -> list[StageShare]:
    """Return the stages between cuts: the first layer of each, and the number of layers."""
    last = len(cuts) - 2
    return [
        StageShare(low, high, opens=at == 0, closes=at == last, n_ranks=n_ranks)
        for at, (low, high) in enumerate(itertools.pairwise(cuts))
    ]
