"""Which part each layer has in a transformer, by its name (floor 3).

Layers come in pairs, the first cut in columns and the last in rows, so that ranks sum once a pair:
attention by heads, an MLP by its inner width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum

from torch import nn

from hetero.errors import ConfigError

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "up", "fc1", "w1", "w3")
ROWS = ("o_proj", "out_proj", "out", "down_proj", "down", "fc2", "w2")
FUSED = ("qkv", "qkv_proj", "query_key_value")
"""Queries, keys and values of all heads in one layer: its columns are gathered again."""
WORDS = ("embed_tokens", "tokens", "embed", "wte", "word_embeddings", "tok_embeddings")
PLACES = ("wpe", "positions", "position_embeddings", "pos_embed")
HEADS = ("lm_head", "head", "output")
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MixtralRMSNorm")
"""Norms of transformers that are torch's, apart from how they round."""


class LayerRole(Enum):
    """What a layer is in a transformer."""

    COLUMNS = "first of a pair"
    ROWS = "last of a pair"
    FUSED = "queries, keys and values"
    FUSED_ROWS = "after them"
    WORDS = "embedding of words"
    PLACES = "embedding of positions"
    HEAD = "head"
    NORM = "norm"


CUT_IN_ROWS = (LayerRole.ROWS, LayerRole.FUSED_ROWS)


def roles_of(model: nn.Module) -> Iterator[tuple[str, LayerRole]]:
    """Yield the role of each layer that has one."""
    shared = tied(model)
    for path, module in model.named_modules():
        layers = {
            name: child
            for name, child in module.named_children()
            if id(getattr(child, "weight", None)) not in shared
        }
        yield from ((joined(path, name), role) for name, role in roles_in(layers).items())


def roles_in(layers: Mapping[str, nn.Module]) -> dict[str, LayerRole]:
    """Return the roles of one module's layers."""
    found: dict[str, LayerRole] = {}
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    rows = [name for name in linear if name in ROWS]
    fused = [name for name in linear if name in FUSED]
    columns = [name for name in linear if name in COLUMNS]
    if len(rows) == 1 and fused and not columns:
        found |= dict.fromkeys(fused, LayerRole.FUSED) | {rows[0]: LayerRole.FUSED_ROWS}
    elif len(rows) == 1 and columns and not fused:
        found |= dict.fromkeys(columns, LayerRole.COLUMNS) | {rows[0]: LayerRole.ROWS}
    for name, layer in layers.items():
        if isinstance(layer, nn.Embedding) and name in (*WORDS, *PLACES):
            found[name] = LayerRole.WORDS if name in WORDS else LayerRole.PLACES
        elif name in HEADS and isinstance(layer, nn.Linear):
            found[name] = LayerRole.HEAD
        elif is_norm(layer) and not columns and not fused:  # next to them, of heads
            found[name] = LayerRole.NORM
    return found


def is_norm(layer: nn.Module) -> bool:
    known = type(layer).__name__ in RMS_NORMS and hasattr(layer, "variance_epsilon")
    return known or isinstance(layer, (nn.LayerNorm, nn.RMSNorm))


def tied(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have several names: torch would divide each by itself."""
    names = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    return {param for param, count in names.items() if count > 1}


def check_divides(model: nn.Module, name: str, size: int, dim: int, n_ranks: int) -> None:
    """Raise ConfigError if a dimension of a layer's weight is not divisible by its parts."""
    layer = model.get_submodule(name)
    what = "inputs" if dim else "outputs"
    if is_norm(layer):
        what = "features"
    elif isinstance(layer, nn.Embedding):
        what = "features" if dim else "words"
    elif not dim and name.rpartition(".")[2] in HEADS:
        what = "words"
    head = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    in_rows = name.rpartition(".")[2] in ROWS
    if isinstance(head, int) and head and size % head == 0 and bool(dim) == in_rows:
        size, what = size // head, f"heads of {head}"
    if size % n_ranks:
        raise ConfigError(
            f"{name!r} has {size} {what}, which {n_ranks} ranks do not divide",
            advice=f"divide the model over {' or '.join(map(str, fitting(size)))} ranks",
        )


def fitting(size: int) -> list[int]:
    """Return the smallest numbers of ranks, above one, that divide a size."""
    return [n for n in range(2, size + 1) if size % n == 0][:3] or [1]


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
