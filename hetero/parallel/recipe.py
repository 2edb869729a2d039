"""Placements for transformers, found by the names of their layers (floor 3).

A pair of layers is cut in columns and in rows, so that ranks sum once a pair: attention by heads,
an MLP by its inner width. Embeddings and heads are cut by words; norms are whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
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
PLACES = ("wpe", "positions", "position_embeddings", "pos_embed")
HEADS = ("lm_head", "head", "output")
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MixtralRMSNorm")
"""Norms of transformers that are torch's, apart from how they round."""
DIMS: Mapping[str, tuple[int, str]] = {
    "1d": (1, "one axis"),
    "2d": (2, "q x q"),
    "2.5d": (3, "q x q x d"),
    "3d": (3, "q x q x q"),
}
"""The axes of a mesh for each, and their sizes."""


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

    sizes: tuple[int, ...]
    """Of the mesh's axes."""
    layers: tuple[PlacedLayer, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        heads = ("layer", "", "placement", "whole", f"on each of {shown(self.sizes)} ranks")
        rows = [heads] + [
            (each.name, f"x {each.n_layers}", each.placements, shown(each.whole), shown(each.part))
            for each in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "number"


class Role(Enum):
    """What a layer is in a transformer."""

    COLUMNS = "first of a pair"
    ROWS = "last of a pair"
    FUSED = "queries, keys and values"
    FUSED_ROWS = "after them"
    WORDS = "embedding of words"
    PLACES = "embedding of positions"
    HEAD = "head"
    NORM = "norm"


STYLES: Mapping[Role, Callable[[], ParallelStyle]] = {
    Role.COLUMNS: ColwiseParallel,
    Role.ROWS: RowwiseParallel,
    Role.FUSED: lambda: ColwiseParallel(output_layouts=Replicate()),
    Role.FUSED_ROWS: lambda: RowwiseParallel(input_layouts=Replicate()),
    Role.WORDS: lambda: RowwiseParallel(input_layouts=Replicate()),
    Role.HEAD: lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""What is divided over one axis; all else is whole."""
CUT_IN_ROWS = (Role.ROWS, Role.FUSED_ROWS)


def parallelize(model: nn.Module, mesh: DeviceMesh, dims: str = "1d") -> PlacedModel:
    """Divide the layers of a transformer over the ranks of a mesh; returns what became of each.

    Layers are known by their names (`COLUMNS` and `ROWS` in one module, `FUSED`, `WORDS`, `PLACES`,
    `HEADS`). A module of attention has to take the number of its heads from the shape of what its
    layers return, as those of transformers do.

    Args:
        mesh: of one axis for "1d", of sizes (q, q) for "2d", (q, q, d) for "2.5d", (q, q, q) for
            "3d".
        dims: "1d" is torch's ``parallelize_module``: activations between pairs of layers are whole;
            around a `FUSED` layer a module computes all heads on each rank; tied weights stay
            whole. In the others (`hetero.parallel.grid`) activations are divided as well: all
            ranks get the same batch, each embedding gives its part, the head the whole.

    Raises ConfigError, before anything is divided, if there is no such pair of layers, if the mesh
    does not divide words, widths or heads, or, where activations are divided, for a layer whose
    part in the model is not known.
    """
    if dims not in DIMS:
        raise ConfigError(f"dims={dims!r}", advice=f"one of {', '.join(DIMS)}")
    check_axes(mesh, dims)
    check_whole(model)
    roles = dict(roles_of(model))
    if not any(role in CUT_IN_ROWS for role in roles.values()):
        raise ConfigError(
            f"no layers of this {type(model).__name__} are known by their names",
            advice="name the placements yourself, with torch's parallelize_module",
        )
    if dims == "1d":
        divide_in_one(model, mesh, roles)
    else:
        from hetero.parallel.grids import divide  # which other models do not pay for

        divide(model, mesh, roles, dims)
    return PlacedModel(tuple(mesh.shape), tuple(placed(model)))


def check_axes(mesh: DeviceMesh, dims: str) -> None:
    """Refuse a mesh of other axes than ``dims`` has."""
    n_axes, form = DIMS[dims]
    equal = {"2d": 2, "2.5d": 2, "3d": 3}.get(dims, 1)  # axes of one size
    if mesh.ndim != n_axes or len(set(mesh.shape[:equal])) > 1:
        sizes = " x ".join(map(str, mesh.shape))
        raise ConfigError(
            f"dims={dims!r} on a mesh of {sizes} ranks: it takes {form}",
            advice=f"init_device_mesh(device, ({form.replace(' x ', ', ')}))",
        )


def check_whole(model: nn.Module) -> None:
    """Refuse a model that is divided already."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"parameter {name!r} is a DTensor already, on ranks"
                f" {param.device_mesh.mesh.flatten().tolist()}",
                advice="parallelize a plain model, once",
            )


def divide_in_one(model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, Role]) -> None:
    """Divide layers over one axis, each with torch's own class."""
    plan = {name: STYLES[role]() for name, role in roles.items() if role in STYLES}
    for name in plan:
        layer: Any = model.get_submodule(name)
        in_rows = roles[name] in CUT_IN_ROWS
        check_divides(model, name, layer.weight.shape[in_rows], int(in_rows), mesh.size())
    parallelize_module(model, mesh, plan)


def roles_of(model: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yield the role of each layer that has one."""
    shared = tied(model)
    for path, module in model.named_modules():
        layers = {
            name: child
            for name, child in module.named_children()
            if id(getattr(child, "weight", None)) not in shared
        }
        yield from ((joined(path, name), role) for name, role in roles_in(layers).items())


def roles_in(layers: Mapping[str, nn.Module]) -> dict[str, Role]:
    """Return the roles of one module's layers."""
    found: dict[str, Role] = {}
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    rows = [name for name in linear if name in ROWS]
    fused = [name for name in linear if name in FUSED]
    columns = [name for name in linear if name in COLUMNS]
    if len(rows) == 1 and fused and not columns:
        found |= dict.fromkeys(fused, Role.FUSED) | {rows[0]: Role.FUSED_ROWS}
    elif len(rows) == 1 and columns and not fused:
        found |= dict.fromkeys(columns, Role.COLUMNS) | {rows[0]: Role.ROWS}
    for name, layer in layers.items():
        if isinstance(layer, nn.Embedding) and name in (*WORDS, *PLACES):
            found[name] = Role.WORDS if name in WORDS else Role.PLACES
        elif name in HEADS and isinstance(layer, nn.Linear):
            found[name] = Role.HEAD
        elif is_norm(layer) and not columns and not fused:  # beside them, of heads
            found[name] = Role.NORM
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
