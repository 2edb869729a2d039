"""Parameters of tensor parallel models: DTensors, paged by the tensors inside (floor 3).

The DTensor stays the user's object, on the user's mesh; its local tensor is bound to frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.torch_version import TorchVersion

from hetero.boxes import Side, cuts_of, divided, sizes_of
from hetero.errors import ConfigError, StateError
from hetero.internals import version_of
from hetero.memory.layout import Layout
from hetero.parallel.recipe import parallelize as parallelize
from hetero.train.gradients.slot import LazyGrad
from hetero.train.model import binding
from hetero.train.model.binding import Binding, PartBinding
from hetero.train.model.faults import (
    GEOMETRY,
    METADATA,
    BoundPage,
    Faults,
    UnboundPage,
    paged_classes,
)
from hetero.train.model.parts import Parted, PartPlace, PlainTensors

Geometry = tuple[tuple[int, ...], tuple[str, ...]]
"""Of a mesh: its shape, and the names of its axes."""

LEAST_TORCH = "2.13"  # whose DTensors give hetero's models plain torch's bits


class Sent(NamedTuple):
    """A norm on its way to a rank that has the same parts of other tensors."""

    local: torch.Tensor
    placements: tuple[Placement, ...] | None = None
    """None: it is no DTensor."""
    geometry: Geometry = ((), ())


LINEAR = ("sum", "avg")
"""Ways to come from addends to a gradient under which several passes add up, addend by addend."""


class PreparedDTensor:
    """What a DTensor of a prepared model does as one, bound or not."""

    __slots__ = ()

    @staticmethod
    def hetero_shown(param: Any) -> str:
        return repr(nn.Parameter(data_of(param), param.requires_grad))

    @staticmethod
    def hetero_copied(param: Any) -> nn.Parameter:
        value = param._local_tensor.detach().to("cpu", copy=True)
        return nn.Parameter(like(param, value), param.requires_grad)


class UnboundDTensor(PreparedDTensor, UnboundPage, DTensor):
    """A DTensor whose bytes are elsewhere. Its own methods ask no ``__torch_function__``."""

    __slots__ = ()
    hetero_metadata = METADATA | GEOMETRY

    @property
    def data(self) -> torch.Tensor:
        found: torch.Tensor = self.hetero_runtime.fault(bound_data, (self,), {})
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        refuse_data(self)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = self.hetero_runtime.fault(DTensor.to_local, (self,), kwargs)
        return found

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        found: DTensor = self.hetero_runtime.fault(DTensor.redistribute, (self, *args), kwargs)
        return found

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = self.hetero_runtime.fault(DTensor.full_tensor, (self,), kwargs)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # mypy: torch's own takes no class
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """An operation of C++ code, which asked no ``__torch_function__``."""
        return cls.hetero_runtime.fault(func, args, kwargs or {})


class BoundDTensor(PreparedDTensor, BoundPage, DTensor):
    """A DTensor whose local tensor lies in a pinned frame."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return self.hetero_runtime.alias(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        refuse_data(self)


def refuse_data(param: Any) -> NoReturn:
    """Refuse an assignment of which torch changes the shell alone: the old bytes would compute."""
    raise StateError(
        f"{param.hetero_runtime.name(param)!r} is a DTensor, whose own numbers torch keeps when"
        " p.data is assigned",
        advice="copy: p.copy_(value) under torch.no_grad(), or p.data.copy_(value)",
    )


def dtensor_classes(owner: Faults) -> tuple[type, type]:
    """Return the classes of ``owner``'s unbound and bound DTensors."""

    class PagedDTensor(UnboundDTensor):
        __slots__ = ()
        hetero_runtime = owner

    class PinnedDTensor(BoundDTensor):
        __slots__ = ()
        hetero_runtime = owner

    return PagedDTensor, PinnedDTensor


def like(part: DTensor, local: torch.Tensor) -> DTensor:
    """Return ``local`` as a DTensor with another one's mesh, placements and global geometry."""
    return DTensor(local, spec_for(part._spec, local.dtype), requires_grad=False)


def swap(param: nn.Parameter, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor, on another device, and keep the object."""
    whole = like(cast("DTensor", param), local.detach())
    torch.utils.swap_tensors(param, nn.Parameter(whole, param.requires_grad))


def spec_for(spec: Any, dtype: torch.dtype) -> Any:
    """Return a spec for another dtype."""
    meta = spec.tensor_meta
    if meta.dtype is dtype:
        return spec
    return replace(spec, tensor_meta=meta._replace(dtype=dtype))


def bound_data(param: DTensor) -> torch.Tensor:
    """Return a bound parameter's ``data``, which is then known to be exposed."""
    return param.data


def data_of(param: DTensor) -> DTensor:
    """Return a parameter's ``data``."""
    return like(param, param._local_tensor.detach())


class DTensors:
    """The parameters of a model of which some are DTensors: see `hetero.train.model.parts`."""

    kinds: tuple[type, ...] = (DTensor,)

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        self._meshes = {geometry_of(mesh): mesh for mesh in meshes}
        self.ranks = tuple(flattened(meshes[0]))
        self.groups = tuple({group for mesh in meshes for group in mesh.get_all_groups()})
        self.device_type = meshes[0].device_type
        self.is_first = dist.get_rank() == self.ranks[0]

    def check(self, name: str, param: nn.Parameter) -> None:
        if isinstance(param, DTensor):
            check_placements(name, param)
            check_ranks(name, param, self.ranks)

    def inside(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor._local_tensor if isinstance(tensor, DTensor) else None

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def wrapping(self, tensor: torch.Tensor) -> Parted:
        spec = cast("DTensor", tensor)._spec

        def wrap(local: torch.Tensor) -> torch.Tensor:
            return DTensor(local, spec_for(spec, local.dtype), requires_grad=False)

        return wrap

    def place(self, name: str, tensor: torch.Tensor) -> PartPlace | None:
        return place_of(name, tensor) if isinstance(tensor, DTensor) else None

    def shown(self, tensor: torch.Tensor) -> str:
        return f"{tensor.placements}" if isinstance(tensor, DTensor) else ""

    def value(self, param: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return self.local(given)
        if not isinstance(given, DTensor):
            raise StateError(
                f"a {type(given).__name__} is to become the value of a DTensor",
                advice="distribute it first: distribute_tensor(value, p.device_mesh, p.placements)",
            )
        if given.placements != param.placements:
            given = given.redistribute(placements=param.placements)
        return settled(given)._local_tensor

    def data(self, param: nn.Parameter) -> torch.Tensor:
        return data_of(param) if isinstance(param, DTensor) else binding.read_data(param)

    def version(self, param: torch.Tensor) -> int:
        # operations count on the wrapper, writes to `to_local()` on what is inside
        inside = self.inside(param)
        return version_of(param) + (0 if inside is None else version_of(inside))

    # -- binding ---------------------------------------------------------------------------------

    def bind_to(
        self, params: Sequence[nn.Parameter], layout: Layout, place: torch.device, owner: Faults
    ) -> Binding:
        whole, parted = paged_classes(owner), dtensor_classes(owner)
        return PartBinding(
            *(params, layout, place),
            insides=[self.local(param) for param in params],
            classes=[parted if isinstance(param, DTensor) else whole for param in params],
            version_of=self.version,
        )

    def pinned(self, owner: Faults) -> Callable[[nn.Parameter], type]:
        (_, whole), (_, parted) = paged_classes(owner), dtensor_classes(owner)
        return lambda param: parted if isinstance(param, DTensor) else whole

    def point(self, param: nn.Parameter, value: torch.Tensor) -> None:
        if not isinstance(param, DTensor):
            binding.point(param, value)
        elif param.is_meta:
            swap(param, value)
        elif param.dtype is value.dtype:
            binding.take_data(param._local_tensor, value)
        else:  # the wrapper, and what is inside, change their dtype
            whole = like(param, value.detach())
            binding.take_data(param, whole)
            param._local_tensor, param._spec = whole._local_tensor, whole._spec

    def plain(self, param: nn.Parameter, value: torch.Tensor) -> None:
        if isinstance(param, DTensor):
            plain: Any = DTensor
            param.__class__ = plain
            self.point(param, value)
        else:
            binding.plain(param, value)

    def empty(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        if not isinstance(param, DTensor):
            binding.empty(param, dtype)
            return
        plain: Any = DTensor
        param.__class__ = plain
        if not param.is_meta:
            swap(param, torch.empty_like(param._local_tensor, dtype=dtype, device="meta"))

    # -- gradients -------------------------------------------------------------------------------

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        grad = binding.get_grad(param)
        if not isinstance(grad, DTensor):
            return grad
        there = settled(grad)
        if there is not grad:
            binding.set_grad(param, there)
        return there._local_tensor

    def as_grad(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return grad
        now = binding.get_grad(param)
        return like(now if isinstance(now, DTensor) else param, grad)

    def fit(self, param: nn.Parameter, name: str) -> bool:
        grad = binding.get_grad(param)
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return False
        for placement in grad.placements:
            if isinstance(placement, Partial) and placement.reduce_op not in LINEAR:
                raise StateError(
                    f"the gradient of {name!r} is {placement}, which is no sum over ranks",
                    advice="redistribute what the loss is computed from, as Shard or Replicate",
                )
        if grad._local_tensor.shape == param._local_tensor.shape:
            return False
        was_whole = all(placement.is_replicate() for placement in grad.placements)
        part = settled(grad.redistribute(placements=param.placements))
        local = part._local_tensor.clone()  # not a view, which would keep all of it
        binding.set_grad(param, like(param, local))
        return was_whole

    def is_placed(self, param: nn.Parameter) -> bool:
        grad = binding.get_grad(param)
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return True
        return bool(grad.placements == param.placements)

    def is_whole(self, param: nn.Parameter) -> bool:
        return not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements)

    def is_pending(self, param: nn.Parameter) -> bool:
        grad = binding.get_grad(param)
        return isinstance(grad, DTensor) and is_addend(grad)

    def summed(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        now = binding.get_grad(param)
        if not isinstance(param, DTensor) or not isinstance(now, DTensor):
            return grad
        whole = like(now, grad).redistribute(placements=param.placements)
        return settled(whole)._local_tensor

    def addend(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        return like(cast("DTensor", binding.get_grad(param)), grad)

    def norms(
        self, params: Sequence[nn.Parameter], ord: float, whole: Callable[[nn.Parameter], bool]
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for param in params:
            grad = binding.get_grad(param)
            if isinstance(grad, DTensor):
                found.append(norm_of(grad, ord, is_cut=whole(param)))
            elif grad is not None:
                found.append(torch.linalg.vector_norm(grad, ord))
        return found

    def total(self, norms: Sequence[torch.Tensor], ord: float) -> torch.Tensor:
        by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
        for norm in norms:
            mesh = norm.device_mesh if isinstance(norm, DTensor) else None
            by_mesh.setdefault(mesh, []).append(norm)
        totals = [
            total.full_tensor() if isinstance(total, DTensor) else total
            for each in by_mesh.values()
            for total in [torch.linalg.vector_norm(torch.stack(each), ord)]
        ]
        if not totals:
            return torch.zeros((), device="cpu")
        total = (
            totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), ord)
        )
        whole: torch.Tensor = total
        return whole

    def sent(self, norm: torch.Tensor) -> Sent:
        if not isinstance(norm, DTensor):
            return Sent(norm.cpu())
        there = settled(norm)
        return Sent(there._local_tensor.cpu(), there.placements, geometry_of(there.device_mesh))

    def taken(self, sent: Sent, place: torch.device) -> torch.Tensor:
        local = sent.local.to(place)
        if sent.placements is None:
            return local
        mesh = self._meshes.get(sent.geometry)
        if mesh is None:
            raise ConfigError(
                f"a stage of another rank divides tensors on a mesh of {sent.geometry}, and none of"
                " this rank's stages does",
                advice="parallelize all stages on meshes of the same shape and names",
            )
        found: DTensor = DTensor.from_local(local, mesh, sent.placements, run_check=False)
        return found


def norm_of(grad: DTensor, ord: float, *, is_cut: bool) -> DTensor:
    """Return the norm of a gradient as torch has it, in fp32 for a parameter with a master."""
    if is_cut or is_addend(grad):
        local = grad._local_tensor
        if isinstance(local, LazyGrad) and local.slot.has_master:  # sums are made in fp32
            grad = like(grad, local.slot.shown().to(local.device))
        grad = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    norm = torch.linalg.vector_norm(grad, ord)
    return like(norm, norm._local_tensor)


def is_addend(grad: DTensor) -> bool:
    """Whether ranks have an addend each of a gradient."""
    return any(placement.is_partial() for placement in grad.placements)


def settled(tensor: DTensor) -> DTensor:
    """Return a DTensor whose collective is over."""
    local = tensor._local_tensor
    wait = getattr(local, "wait", None)  # of torch's tensors that stand for a collective's result
    return tensor if wait is None else like(tensor, wait())


def dtensors_of(model: nn.Module) -> DTensors | PlainTensors:
    """Return the parts of a model whose DTensors are all on the ranks of the first one."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not meshes:
        return PlainTensors()
    if TorchVersion(torch.__version__) < LEAST_TORCH:
        raise ConfigError(
            f"tensor parallel models under torch {torch.__version__}: weights that all ranks have"
            " trained to other numbers under 2.11, and no release before 2.13 was compared",
            advice=f"install torch {LEAST_TORCH}, or train without a tensor parallel axis",
        )
    return DTensors(meshes)


def ranks_of(param: DTensor) -> list[int]:
    return flattened(param.device_mesh)


def flattened(mesh: DeviceMesh) -> list[int]:
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def geometry_of(mesh: DeviceMesh) -> Geometry:
    return tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())


def check_placements(name: str, param: DTensor) -> None:
    """Refuse a DTensor of which this rank has no part of its own."""
    if any(not isinstance(placement, (Replicate, Shard)) for placement in param.placements):
        raise ConfigError(
            f"parameter {name!r} is placed as ({', '.join(map(str, param.placements))})",
            advice="redistribute it as Shard or Replicate before hetero.prepare",
        )


def check_ranks(name: str, param: DTensor, ranks: Sequence[int]) -> None:
    """Refuse a DTensor on other ranks than the first one is on."""
    if ranks_of(param) != list(ranks):
        raise ConfigError(
            f"parameter {name!r} is a DTensor on ranks {ranks_of(param)}, another one on"
            f" {list(ranks)}",
            advice="parallelize the whole model on one mesh",
        )


# -- where a part is -----------------------------------------------------------------------------


def place_of(name: str, tensor: DTensor) -> PartPlace:
    """Return where this rank's part of a DTensor is, by torch's own rule of division."""
    shape, at = tuple(tensor.shape), tensor.device_mesh.get_coordinate()
    assert at is not None
    sides: list[list[Side]] = [[(0, size)] for size in shape]
    mine: list[Side] = [(0, size) for size in shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            dim, n_parts = placement.dim % len(shape), tensor.device_mesh.size(axis)
            sides[dim] = [part for side in sides[dim] for part in divided(side, n_parts)]
            mine[dim] = divided(mine[dim], n_parts)[at[axis]]
    box = tuple(mine)
    if sizes_of(box) != tuple(tensor._local_tensor.shape):
        raise ConfigError(
            f"{name!r} is a DTensor of {list(shape)} of which this rank has"
            f" {list(tensor._local_tensor.shape)}, and torch would give it {list(sizes_of(box))}:"
            " nothing tells which elements these are",
            advice="distribute it with torch's distribute_tensor, which divides it evenly",
        )
    copies = zip(at, tensor.placements, strict=True)
    is_first = all(not coordinate for coordinate, each in copies if each.is_replicate())
    return PartPlace(shape, cuts_of(shape, sides), box, is_first)
