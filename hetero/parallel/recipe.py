"""Placements for transformers, found by the names of their layers (floor 3).

A pair of layers is cut in columns and in rows, so that ranks sum once a pair: attention by heads,
an MLP by its inner width. Embeddings and heads are cut by words; norms are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hetero.parallel.grids import divide
from hetero.parallel.roles import CUT_IN_ROWS, LayerRole, check_divides, roles_of

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


STYLES: Mapping[LayerRole, Callable[[], ParallelStyle]] = {
    LayerRole.COLUMNS: ColwiseParallel,
    LayerRole.ROWS: RowwiseParallel,
    LayerRole.FUSED: lambda: ColwiseParallel(output_layouts=Replicate()),
    LayerRole.FUSED_ROWS: lambda: RowwiseParallel(input_layouts=Replicate()),
    LayerRole.WORDS: lambda: RowwiseParallel(input_layouts=Replicate()),
    LayerRole.HEAD: lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""What is divided over one axis; all else is whole."""


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
            advice="give init_device_mesh(device, sizes) such sizes, or choose other dims=",
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


def divide_in_one(model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, LayerRole]) -> None:
    """Divide layers over one axis, each with torch's own class."""
    plan = {name: STYLES[role]() for name, role in roles.items() if role in STYLES}
    for name in plan:
        layer: Any = model.get_submodule(name)
        in_rows = roles[name] in CUT_IN_ROWS
        check_divides(model, name, layer.weight.shape[in_rows], int(in_rows), mesh.size())
    parallelize_module(model, mesh, plan)


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
