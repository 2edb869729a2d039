"""From the setting `mesh` to the ranks that share a model (floor 3).

Ranks along "dp_replicate", "dp_shard" and "cp" have parts of one step's tokens: gradients are the
means of theirs. Those along "tp" have parts of tensors, and DTensors say what is summed. Those
along "pp" have layers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hetero.device.comm import ALONE_COMM, Alone, Comm
from hetero.errors import ConfigError
from hetero.internals import is_traceable_wrapper_subclass
from hetero.members import Members
from hetero.parallel.gloo import Gloo, Talks, local_ranks
from hetero.parallel.started import launched
from hetero.train.model.parts import Parts, PlainTensors

STAGES, REPLICATE, SHARD = "pp", "dp_replicate", "dp_shard"
CONTEXT, TENSOR = "cp", "tp"
AXES = (STAGES, REPLICATE, SHARD, CONTEXT, TENSOR)
"""Outermost first: ranks that differ in the last one alone follow each other."""


def parts_of(model: Any) -> Parts:
    """Return what a model's parameters have inside: DTensors, if any of them is one."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    if not any(map(is_traceable_wrapper_subclass, params)):
        return PlainTensors()
    # other models do not pay for the import
    from hetero.parallel.tensor import dtensors_of

    return dtensors_of(model)


def open_comm(
    mesh: Any,
    timeout_seconds: float,
    sum_group: int = 1,
    *,
    one_sided: bool = True,
    gather_shares: bool = False,
    averages: bool = False,
    tensor_ranks: Sequence[int] = (),
) -> Comm:
    """Return the ranks with which this one shares its homes; collective if they are several.

    Args:
        mesh: as `Config.mesh`.
        timeout_seconds: after which a rank that does not answer is lost.
        sum_group: as `Config.sum_group`.
        one_sided: whether ranks of one machine may read each other's memory.
        gather_shares: as `Config.gather_shares`.
        averages: whether the caller averages gradients of ranks that each keep a whole model.
        tensor_ranks: those that have the parts of this rank's parameters, which are DTensors.

    Raises ConfigError for a mesh that is not of the process group's size, or without such a group;
    without a mesh in a group of several ranks, which would each train alone; and for groups of
    ranks that do not fit the mesh.
    """
    world, n_context = world_size(), 1
    if mesh is None and tensor_ranks:
        check_covered(world, tensor_ranks)
        n_shares = n_copies = 1
    elif mesh is None:
        check_alone(world)
        n_shares = n_copies = 1
    else:
        n_shares, n_copies = shares_of(mesh, world, averages, tensor_ranks)
        n_context = sizes_of(mesh, world)[CONTEXT]
    check_group(sum_group, n_shares, n_copies)
    n_tensor = len(tensor_ranks)
    n_stage = len(stage_ranks(mesh, world)) if world else 1  # ranks of a stage of a pipeline
    stages = [range(first, first + n_stage) for first in range(0, world, n_stage)]
    if n_shares == 1:
        return alone(n_tensor, len(stages), world, timeout_seconds)
    teams = [stage[part :: max(1, n_tensor)] for stage in stages for part in range(n_tensor or 1)]
    return Gloo(
        *(n_shares, timeout_seconds, sum_group),
        n_context=n_context,
        one_sided=one_sided,
        gather_shares=gather_shares,
        teams=teams if len(teams) > 1 else None,  # with the same parts of the same stage
        everyone=Talks(stages, timeout_seconds) if n_tensor else None,
    )


def alone(n_tensor: int, n_stages: int, world: int, timeout_seconds: float) -> Comm:
    """Return this rank as the only one with its parts of tensors, or its stages of a pipeline."""
    n = max(1, n_tensor) * max(1, n_stages)
    n_local = min(n, local_ranks() or n)
    if n_tensor:
        tensors = [range(first, first + n_tensor) for first in range(0, world, n_tensor)]
        return Alone(n_local, Talks(tensors, timeout_seconds), Members((dist.get_rank(),), world))
    return ALONE_COMM if n == 1 else Alone(n_local, members=Members((dist.get_rank(),), world))


def world_size() -> int:
    """Return the ranks of the process group; 0 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def stage_ranks(mesh: Any, world: int) -> range:
    """Return the ranks that have this one's stages of the pipeline: all of them without one."""
    if mesh is None or not world:
        return range(world)
    size = world // sizes_of(mesh, world)[STAGES]
    first = dist.get_rank() // size * size
    return range(first, first + size)


def check_alone(world: int) -> None:
    """Refuse a rank of several that names no mesh: each would train alone, in silence."""
    if not world and launched() > 1:
        raise ConfigError(
            f"this process was launched as one of {launched()} ranks, and there is no process"
            " group: each would train alone",
            advice="call torch.distributed.init_process_group() and set mesh='world'; commands"
            " of hetero run on one rank; where ranks are to train apart, unset WORLD_SIZE",
        )
    if world > 1:
        raise ConfigError(
            f"this process is one of {world} ranks, and mesh= is not set: each would train alone",
            advice="share the model with mesh='world'; HeteroAccelerator averages whole models"
            " that each rank keeps",
        )


def check_covered(world: int, tensor_ranks: Sequence[int]) -> None:
    """Refuse ranks beyond those of the model's own mesh, if no mesh says what they do."""
    if len(tensor_ranks) != world:
        n = len(tensor_ranks)
        raise ConfigError(
            f"the parameters are DTensors on {n} of {world} ranks, and mesh= is not set: nothing"
            " would average the gradients of the others",
            advice=f"set mesh={{'dp_shard': {world // n}, 'tp': {n}}}",
        )


def check_tensor(mesh: Any, size: int, tensor_ranks: Sequence[int]) -> None:
    """Refuse a mesh whose axis "tp" is not that of the model's parameters."""
    if size == 1 and not tensor_ranks:
        return
    if not tensor_ranks:
        raise ConfigError(
            f"mesh={mesh!r}, and no parameter of the model is a DTensor",
            advice="parallelize the model before hetero.prepare, with torch's parallelize_module"
            " or transformers' tp_plan",
        )
    first = tensor_ranks[0]
    follow = list(tensor_ranks) == list(range(first, first + len(tensor_ranks)))
    if len(tensor_ranks) != size or not follow or first % size:
        n = len(tensor_ranks)
        raise ConfigError(
            f"mesh={mesh!r}, and the parameters are DTensors on ranks"
            f' {", ".join(map(str, tensor_ranks))}: "tp" is of {size}',
            advice=f"set 'tp': {n} in mesh=, and let the ranks of a tensor follow each other:"
            " init_device_mesh(device, (..., tp), mesh_dim_names=(..., 'tp'))['tp']",
        )


def shares_of(
    mesh: Any, world: int, averages: bool, tensor_ranks: Sequence[int]
) -> tuple[int, int]:
    """Return the shares that homes are cut in, and the copies of the model that add up gradients.

    Ranks that each keep a whole model are alone to us: others average for them, or it is refused.
    """
    if not world:
        raise ConfigError(
            f"mesh={mesh!r} without a process group",
            advice="start the script with torchrun, and call"
            " torch.distributed.init_process_group() before hetero.prepare",
        )
    sizes = sizes_of(mesh, world)
    check_tensor(mesh, sizes[TENSOR], tensor_ranks)
    if sizes[SHARD] * sizes[CONTEXT] > 1:
        return sizes[SHARD] * sizes[CONTEXT], sizes[REPLICATE]
    if sizes[REPLICATE] > 1 and tensor_ranks:
        raise ConfigError(
            f"mesh={mesh!r}: nothing would average the gradients of {sizes[REPLICATE]} models whose"
            " tensors ranks divide",
            advice=f"let the ranks that have the same parts share them: {SHARD} in place of"
            f" {REPLICATE}",
        )
    if sizes[REPLICATE] > 1 and not averages:
        raise ConfigError(
            f"mesh={mesh!r}: nothing would average the gradients of {sizes[REPLICATE]} whole"
            " models",
            advice="share the model with mesh='world', or let HeteroAccelerator prepare it,"
            " which averages",
        )
    return 1, 1


def sizes_of(mesh: Any, world: int) -> dict[str, int]:
    """Return the size of each axis; ConfigError unless they multiply to the world's."""
    if mesh == "world":
        return dict.fromkeys(AXES, 1) | {SHARD: world}
    if not isinstance(mesh, Mapping):
        check_order(mesh)
    mesh = sizes_named(mesh)
    check_axes(mesh)
    sizes = {name: int(mesh.get(name, 1)) for name in AXES}
    if math.prod(sizes.values()) != world:
        raise ConfigError(
            f"mesh={dict(mesh)} is of {math.prod(sizes.values())} ranks; there are {world}",
            advice=f"use mesh='world', or sizes whose product is {world}",
        )
    return sizes


def along_axes(comm: Comm, n_tensor: int, n_ranks: int) -> dict[str, int]:
    """Return the ranks of a model along each axis; empty for one that is alone.

    ``n_ranks``: of all stages of a pipeline; less without one.
    """
    n_stage = comm.size * n_tensor
    if n_ranks > n_stage:
        return {STAGES: n_ranks // n_stage, **axes_of_stage(comm, n_tensor)}
    return axes_of_stage(comm, n_tensor) if n_stage > 1 else {}


def axes_of_stage(comm: Comm, n_tensor: int) -> dict[str, int]:
    n_shares = comm.n_shares // comm.n_context
    sizes = comm.n_copies, n_shares, comm.n_context, n_tensor
    return dict(zip((REPLICATE, SHARD, CONTEXT, TENSOR), sizes, strict=True))


def device_mesh(kind: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return torch's mesh of these axes, on a kind of device. Collective."""
    return init_device_mesh(kind, tuple(sizes[name] for name in AXES), mesh_dim_names=AXES)


def check_group(sum_group: int, n_shares: int, n_copies: int) -> None:
    """Refuse groups that do not fit: each is an equal part of a copy, or some copies."""
    size = n_shares * n_copies
    fits = [n for n in range(1, size + 1) if size % n == 0 and not (n % n_shares and n_shares % n)]
    if sum_group not in fits:
        raise ConfigError(
            f"sum_group={sum_group} with {n_copies} x {n_shares} ranks that share a model",
            advice=f"use one of {', '.join(map(str, fits))}: groups of ranks are equal, and each is"
            " an equal part of a copy of the model, or some copies",
        )


def sizes_named(mesh: Any) -> Mapping[str, int]:
    """Return the size of each axis that a mesh names."""
    if isinstance(mesh, Mapping):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return dict(zip(names, mesh.shape, strict=False)) if names else {}


OWN_LOOP = (
    "cut the model with hetero.split, prepare its stages, and call their schedule in a loop of your"
    " own: examples/three_d.py"
)


def refuse_stages(mesh: Any, what: str, advice: str = OWN_LOOP) -> None:
    """Refuse a mesh with stages of a pipeline where ``what`` takes each rank's model for all."""
    if sizes_named(mesh).get(STAGES, 1) > 1:
        raise ConfigError(
            f"mesh={mesh!r}: {what} knows no pipelines",
            advice=advice,
        )


def refuse_context(mesh: Any, what: str, advice: str) -> None:
    """Refuse a mesh whose ranks have parts of sequences where ``what`` has whole ones."""
    if sizes_named(mesh).get(CONTEXT, 1) > 1:
        raise ConfigError(f"mesh={mesh!r}: {what} knows no parts of sequences", advice=advice)


def check_axes(mesh: Mapping[str, Any]) -> None:
    unknown = [name for name in mesh if name not in AXES]
    if unknown:
        raise ConfigError(f"mesh has an axis {unknown[0]!r}", advice=f"axes are {', '.join(AXES)}")


def check_order(mesh: Any) -> None:
    """Refuse a DeviceMesh whose ranks are not numbered as those of a mapping."""
    names = [name for name in mesh.mesh_dim_names or () if name in AXES]
    if names != [name for name in AXES if name in names] or mesh.mesh.flatten().tolist() != list(
        range(mesh.mesh.numel())
    ):
        raise ConfigError(
            f"mesh={mesh}: ranks that keep one copy of the model are numbered one after the other",
            advice="use init_device_mesh(device, (copies, shares), mesh_dim_names="
            f"('{REPLICATE}', '{SHARD}'))",
        )
