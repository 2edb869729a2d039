"""A transformer on a mesh of two or three axes: each layer becomes one of which ranks have parts
(floor 3).

Each parameter has to be known: what it multiplies is divided, so its gradient is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from hetero.errors import ConfigError
from hetero.parallel.grid import (
    GRIDS,
    CutLinear,
    CutNorm,
    CutPlaces,
    CutWords,
    Grid,
    Norm,
    along,
    batch_parts,
    joins_of,
    places_placements,
    product,
    vector_placements,
    weight_placements,
    words_placements,
)
from hetero.parallel.roles import LayerRole, check_divides, joined, tied

Placements = Mapping[str, list[Placement]]
"""Of the parameters of a layer, by their names."""


def divide(model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, LayerRole], dims: str) -> None:
    """Divide a model over a mesh, once all of it is known to be divisible."""
    grid = GRIDS[dims]
    check_known(model, roles)
    plan = {name: placements_of(role, grid) for name, role in roles.items()}
    for name, placements in plan.items():
        check_layer(model, name, roles[name], placements, mesh.shape)
    for name, placements in plan.items():
        layer = model.get_submodule(name)
        distribute(layer, mesh, placements)
        MADE[roles[name]](layer, mesh, grid)


def placements_of(role: LayerRole, grid: Grid) -> Placements:
    """Return how the parameters of a layer are placed."""
    outside, inside = grid.outside, grid.inside
    if role in (LayerRole.COLUMNS, LayerRole.HEAD):
        weight = weight_placements(grid, outside, inside)
        return {"weight": weight, "bias": vector_placements(grid, inside)}
    if role is LayerRole.ROWS:
        weight = weight_placements(grid, inside, outside)
        return {"weight": weight, "bias": vector_placements(grid, outside)}
    if role is LayerRole.NORM:
        return dict.fromkeys(("weight", "bias"), vector_placements(grid, outside))
    return {
        "weight": words_placements(grid) if role is LayerRole.WORDS else places_placements(grid)
    }


# -- refusals ------------------------------------------------------------------------------------


def check_known(model: nn.Module, roles: Mapping[str, LayerRole]) -> None:
    """Refuse a model of which something is not known to work on parts of activations."""
    shared = tied(model)
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in shared:
                refuse(joined(path, name), "is tied", "untie it: tie_word_embeddings=False")
            elif path not in roles:
                refuse(joined(path, name), "is of a layer whose name says nothing", "use dims='1d'")
        if isinstance(module, nn.Dropout) and module.p:
            refuse(path, "drops features, the same ones of each part", "set its p to 0")
    for name, role in roles.items():
        check_kind(name, role, model.get_submodule(name))
    for role in (LayerRole.WORDS, LayerRole.HEAD):
        if role not in roles.values():
            refuse(f"the {role.value}", "is not found", "give it a name that is known")


def check_kind(name: str, role: LayerRole, layer: Any) -> None:
    """Refuse a layer of a known name that does more than it says."""
    if role in (LayerRole.FUSED, LayerRole.FUSED_ROWS):
        refuse(name, "is cut between heads", "divide it in q_proj, k_proj and v_proj")
    kinds = {nn.Linear, nn.Embedding}
    if role is not LayerRole.NORM and type(layer) not in kinds:
        refuse(name, f"is a {type(layer).__name__}", "parallelize the model before adapters")
    if role is LayerRole.NORM and (layer.weight is None or layer.weight.dim() != 1):
        refuse(name, "has no weight of one dimension", "use dims='1d'")
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        refuse(name, "has max_norm, sparse or scale_grad_by_freq", "leave them out")


def refuse(name: str, why: str, advice: str) -> None:
    raise ConfigError(f"{name!r} {why}, and ranks divide activations", advice=advice)


def check_layer(
    model: nn.Module, name: str, role: LayerRole, placements: Placements, sizes: Sequence[int]
) -> None:
    """Refuse a layer with a dimension that ranks do not divide."""
    weight: Any = model.get_submodule(name).weight
    for dim, size in enumerate(weight.shape):
        n_parts = 1
        for placement, n in zip(placements["weight"], sizes, strict=True):
            n_parts *= n if placement == Shard(dim) else 1
        check_divides(model, name, size, dim, n_parts)


# -- layers --------------------------------------------------------------------------------------


def distribute(layer: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    for name, param in list(layer.named_parameters(recurse=False)):
        part = distribute_tensor(param.detach(), mesh, placements[name])
        layer.register_parameter(name, nn.Parameter(part, param.requires_grad))


def become(layer: nn.Module, kind: type[nn.Module], **facts: Any) -> None:
    layer.__class__ = kind
    vars(layer).update(facts)


def columns(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    become(layer, CutLinear, moves=product(mesh, grid, grid.outside, grid.inside), joins=())


def rows(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    become(layer, CutLinear, moves=product(mesh, grid, grid.inside, grid.outside), joins=())


def head(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    columns(layer, mesh, grid)
    become(layer, CutLinear, joins=joins_of(mesh, grid.inside))


def words(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    become(layer, CutWords, parts=batch_parts(mesh, grid.outside))


def places(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    become(layer, CutPlaces, copies=batch_parts(mesh, grid.outside))


def norm(layer: nn.Module, mesh: DeviceMesh, grid: Grid) -> None:
    facts: Any = layer
    cut = Norm(
        n=facts.weight.shape[0],
        eps=facts.variance_epsilon if hasattr(facts, "variance_epsilon") else facts.eps,
        is_centered=isinstance(layer, nn.LayerNorm),
        features=along(mesh, grid.outside.features, -1),
        copies=batch_parts(mesh, grid.outside),
    )
    become(layer, CutNorm, norm=cut)


MADE: Mapping[LayerRole, Callable[[nn.Module, DeviceMesh, Grid], None]] = {
    LayerRole.COLUMNS: columns,
    LayerRole.ROWS: rows,
    LayerRole.HEAD: head,
    LayerRole.WORDS: words,
    LayerRole.PLACES: places,
    LayerRole.NORM: norm,
}
