"""Placements for transformers, found by the names of their layers (floor 3).

A pair of layers is cut in columns and in rows, so that ranks sum once a pair: attention by heads,
an MLP by its inner width. Embeddings and heads are cut by words; norms are whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hetero.errors import ConfigError

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "up", "fc1", "w1", "w3")
ROWS = ("o_proj", "out_proj", "out", "down_proj", "down", "fc2", "w2")
FUSED = ("qkv", "qkv_proj", "query_key_value")
"""Queries, keys and values of all heads in one layer: its columns are gathered again."""
WORDS = ("embed_tokens", "tokens", "embed", "wte", "word_embeddings", "tok_embeddings")
HEADS = ("lm_head", "head", "output")


class PlacedLayer(NamedTuple):
    """What becomes of a layer's weight."""

    name: str
    """With a star for its number, if layers of other numbers are placed alike."""
    n_layers: int
    placements: str
    whole: tuple[int, ...]
    part: tuple[int, ...]


@dataclass(frozen=True)
class PlacedModel:
    """How ranks divide a model; prints as a table."""

    n_ranks: int
    layers: tuple[PlacedLayer, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        heads = ("layer", "", "placement", "whole", f"on each of {self.n_ranks} ranks")
        rows = [heads] + [
            (each.name, f"x {each.n_layers}", each.placements, shown(each.whole), shown(each.part))
            for each in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "number"


def parallelize(model: nn.Module, mesh: DeviceMesh) -> PlacedModel:
    """Divide the layers of a transformer over the ranks of a mesh of one axis, with torch's
    ``parallelize_module``; returns what became of each.

    Layers are known by their names (`COLUMNS` and `ROWS` in one module, `FUSED`, `WORDS`, `HEADS`).
    A module of attention has to take the number of its heads from the shape of what its layers
    return, as those of transformers do; around a `FUSED` layer it computes all heads on each rank.
    Tied weights stay whole.

    Raises ConfigError, before anything is divided, if there is no such pair of layers, or if the
    number of ranks does not divide words, widths or heads.
    """
    plan = dict(styles(model))
    if not any(isinstance(style, RowwiseParallel) for style in plan.values()):
        raise ConfigError(
            f"no layers of this {type(model).__name__} are known by their names",
            advice="name the placements yourself, with torch's parallelize_module",
        )
    check_divides(model, plan, mesh.size())
    parallelize_module(model, mesh, plan)
    return PlacedModel(mesh.size(), tuple(placed(model)))


def styles(model: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield how each layer that is divided is."""
    shared = tied(model)
    for path, module in model.named_modules():
        layers = {
            name: child
            for name, child in module.named_children()
            if isinstance(child, (nn.Linear, nn.Embedding)) and id(child.weight) not in shared
        }
        yield from ((joined(path, name), style) for name, style in styles_in(layers).items())


def styles_in(layers: Mapping[str, nn.Module]) -> dict[str, ParallelStyle]:
    """Return how those of one module's layers are cut that are."""
    found: dict[str, ParallelStyle] = {}
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    rows = [name for name in linear if name in ROWS]
    fused = [name for name in linear if name in FUSED]
    columns = [name for name in linear if name in COLUMNS]
    if len(rows) == 1 and fused and not columns:
        found |= {name: ColwiseParallel(output_layouts=Replicate()) for name in fused}
        found[rows[0]] = RowwiseParallel(input_layouts=Replicate())
    elif len(rows) == 1 and columns and not fused:
        found |= {name: ColwiseParallel() for name in columns}
        found[rows[0]] = RowwiseParallel()
    for name, layer in layers.items():
        if name in WORDS and isinstance(layer, nn.Embedding):
            found[name] = RowwiseParallel(input_layouts=Replicate())
        elif name in HEADS and isinstance(layer, nn.Linear):
            found[name] = ColwiseParallel(output_layouts=Replicate())
    return found


def tied(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have several names: torch would divide each by itself."""
    names = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    return {param for param, count in names.items() if count > 1}


def check_divides(model: nn.Module, plan: Mapping[str, ParallelStyle], n_ranks: int) -> None:
    """Raise ConfigError that names the first layer whose words, width or heads do not divide."""
    for name, style in plan.items():
        layer: Any = model.get_submodule(name)
        rows, columns = layer.weight.shape
        in_rows = isinstance(style, RowwiseParallel) and isinstance(layer, nn.Linear)
        size, what = (columns, "inputs") if in_rows else (rows, "outputs")
        if isinstance(layer, nn.Embedding) or name.rpartition(".")[2] in HEADS:
            what = "words"
        head = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if isinstance(head, int) and head and size % head == 0:
            size, what = size // head, f"heads of {head}"
        if size % n_ranks:
            raise ConfigError(
                f"{name!r} has {size} {what}, which {n_ranks} ranks do not divide",
                advice=f"divide the model over {' or '.join(map(str, fitting(size)))} ranks",
            )


def fitting(size: int) -> list[int]:
    """Return the smallest numbers of ranks, above one, that divide a size."""
    return [n for n in range(2, size + 1) if size % n == 0][:3] or [1]


def placed(model: nn.Module) -> Iterator[PlacedLayer]:
    """Yield what each layer's weight became, layers of one kind together."""
    counts: dict[tuple[Any, ...], int] = {}
    for name, param in model.named_parameters():
        alike, said, part = re.sub(r"\.\d+\.", ".*.", name), "whole", tuple(param.shape)
        if isinstance(param, DTensor):
            said, part = ", ".join(map(str, param.placements)), tuple(param._local_tensor.shape)
        row = (alike, said, tuple(param.shape), part)
        counts[row] = counts.get(row, 0) + 1
    for (name, said, whole, part), count in counts.items():
        yield PlacedLayer(name, count, said, whole, part)


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
