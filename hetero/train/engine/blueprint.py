"""The blueprint of a prepared model, drawn before anything is touched (floor 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from hetero.config import Config
from hetero.device import CpuDevice, Device
from hetero.errors import ConfigError
from hetero.memory.codec import CODECS, CODED, EXACT, Blocked, Codec, Workspace, slice_numel
from hetero.memory.layout import (
    ALIGN,
    SHARE_ALIGN,
    Bucket,
    Layout,
    ParamSpec,
    build_layout,
    dense_stride,
)
from hetero.train.engine.check import pageable, pages, tables
from hetero.train.gradients.crossing import exchange_bytes
from hetero.train.model.parts import Parts, PlainTensors
from hetero.train.model.units import Unit, assign, find_units
from hetero.train.update.masters import WORKING, low_dtype, named_by, working_dtypes
from hetero.train.update.rules import Group, Rule
from hetero.types import Kind


class Costs(NamedTuple):
    """Bytes that training adds to an element of a parameter."""

    grad: int
    """While several gradients add up."""
    master: int
    state: int
    whole: bool
    """Whether the rule needs whole tensors."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Units, layout and sizes; ``needs[unit]`` are the buckets that a unit's access pins."""

    units: tuple[Unit, ...]
    layout: Layout
    needs: tuple[tuple[int, ...], ...]
    costs: tuple[Costs, ...]
    """Of an element, by bucket."""
    stages_bytes: int
    """Of HOST, for copies of memory that is not page-locked."""
    crossing_bytes: int
    """Of HOST, for gradients on their way between ranks."""
    widest: int = field(init=False)
    """The unit that pins most frames."""
    least_bytes: int = field(init=False)
    """Bytes of the frames that the widest unit pins: fewer cannot work."""
    home_bytes: int = field(init=False)
    """Bytes of parameters, gradients and states at home."""

    def __post_init__(self) -> None:  # computed once: every step reads them
        most, widest = max(((self.granules(u), -u) for u in range(len(self.units))), default=(0, 0))
        object.__setattr__(self, "widest", -widest)
        object.__setattr__(self, "least_bytes", most * self.granule_bytes)
        object.__setattr__(self, "home_bytes", self._home_bytes())

    @property
    def granule_bytes(self) -> int:
        return self.layout.chunk_numel

    def granules(self, unit: int) -> int:
        """Frames that a unit's access pins."""
        return sum(self.layout.buckets[b].granules for b in self.needs[unit])

    def frames_of_units(self) -> tuple[dict[int, int], ...]:
        """Return the bytes of frames of each unit's buckets; none of shares, which are gathered in
        frames wherever their homes are."""
        buckets = self.layout.buckets
        return (
            () if self.is_shared else tuple({b: buckets[b].n_bytes for b in u} for u in self.needs)
        )

    @property
    def widest_name(self) -> str:
        return self.units[self.widest].name or "model"

    def _home_bytes(self) -> int:
        total = 0
        for bucket in self.layout.buckets:
            total += bucket.home_bytes
            costs = self.costs[bucket.id]
            # one rank's may never add up, those of several always do
            grad = costs.grad if self.is_shared else min(costs.grad, bucket.dtype.itemsize)
            total += bucket.share_numel * (grad + costs.master + costs.state)
        return total

    def state_bytes(self, numels: Iterable[int]) -> int:
        """Return the bytes of all that training keeps of parameters with so many elements each, in
        the order of the layout: weights as they lie at home, gradients, masters, states.

        Nothing that pads chunks or shares is in it: it is a figure of the model, not of a tier.
        """
        rows = zip(numels, self.layout.home, strict=True)
        return sum(self._state_bytes(n, self.layout.buckets[home[0]]) for n, home in rows)

    def _state_bytes(self, numel: int, bucket: Bucket) -> int:
        costs = self.costs[bucket.id]
        grad = bucket.dtype.itemsize if costs.grad else 0
        kept = numel * (grad + costs.master + costs.state)
        return bucket.codec.n_bytes(numel, bucket.dtype) + kept

    @property
    def is_coded(self) -> bool:
        """Whether any parameters lie at home in code."""
        return any(not bucket.codec.exact for bucket in self.layout.buckets)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the homes."""
        return self.layout.is_shared

    def decoding(self, *, is_cuda: bool) -> tuple[Blocked, int] | None:
        """Return the codec there is, and the elements it decodes at once; None without one."""
        coded = {b.numel: b.codec for b in self.layout.buckets if isinstance(b.codec, Blocked)}
        if not coded:
            return None
        most = max(coded)
        return coded[most], slice_numel(coded[most], most, is_cuda=is_cuda)

    def workspace_bytes(self, *, is_cuda: bool) -> int:
        """Return the HBM in which codes are decoded."""
        found = self.decoding(is_cuda=is_cuda)
        return 0 if found is None else Workspace.size_bytes(*found)

    @property
    def grad_sizes(self) -> list[int]:
        """Bytes of each trainable parameter's gradient."""
        trainable = [b for b in self.layout.buckets if self.costs[b.id].grad]
        return [s.spec.numel * b.dtype.itemsize for b in trainable for s in b.segments]

    def element_bytes(self, bucket: Bucket) -> dict[Kind, int]:
        """Return the bytes of an element of a trainable bucket by kind, PARAM left out."""
        costs = self.costs[bucket.id]
        sizes = {Kind.GRAD: costs.grad, Kind.MASTER: costs.master, Kind.STATE: costs.state}
        return {kind: size for kind, size in sizes.items() if size}

    def has_master(self, bucket: Bucket) -> bool:
        """Whether a trainable bucket's weights have fp32 masters."""
        return self.costs[bucket.id].master > 0

    def may_update_anywhere(self, bucket: Bucket) -> bool:
        """Whether a trainable bucket's update gives the same bits on every device: by formulas."""
        return self.has_master(bucket) and not self.whole_tensors(bucket)

    def whole_tensors(self, bucket: Bucket) -> bool:
        """Whether a trainable bucket's update needs whole tensors in memory."""
        return self.costs[bucket.id].whole


def draw(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    device: Device | None = None,
    n_shares: int = 1,
    n_copies: int = 1,
    parts: Parts | None = None,
) -> Blueprint:
    """Find the units, lay out the buckets and size the states, for a CPU unless a device is given;
    touches nothing. ``n_copies`` of the homes are cut in ``n_shares`` each, one a rank."""
    device, parts = device or CpuDevice(), parts or PlainTensors()
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else set()
    units, home = assign(model, find_units(model, config.units))
    check_tables(model, config)
    working = working_dtypes(model, config.precision, config.keep_fp32)
    codecs = codecs_of(model, config, working)
    align = ALIGN if n_shares == 1 else SHARE_ALIGN
    specs = [
        ParamSpec(
            name=name,
            unit=home[name],
            shape=tuple(own.shape),
            stride=dense_stride(name, own.shape, own.stride()),
            dtype=working[id(p)],
            trainable=id(p) not in codecs and (p.requires_grad or id(p) in owned),
            codec=codecs.get(id(p), EXACT),
            align=max(align, device.align_bytes // working[id(p)].itemsize),
        )
        for name, p in pages(model)
        for own in [parts.local(p)]
    ]
    names = [unit.name or "model" for unit in units]
    dtype = WORKING.get(config.precision)
    layout = build_layout(specs, names, config.chunk_bytes, dtype, n_shares, n_copies)
    bucket_of = {id(p): layout.home[i][0] for i, (_, p) in enumerate(pages(model))}
    needs = tuple(unit_needs(i, unit, layout, bucket_of) for i, unit in enumerate(units))
    groups = optimizer.param_groups if optimizer else []
    rule = Rule(optimizer) if optimizer else None
    costs = cache(partial(costs_of, rule, groups, config.precision))
    each = (costs(b.dtype, shapes(b), b.trainable) for b in layout.buckets)
    largest = max((bucket.home_bytes for bucket in layout.buckets), default=0)
    stages = device.stages_bytes(largest, config.pinned)
    crossing = exchange_bytes(layout, config.sum_group)
    return Blueprint(tuple(units), layout, needs, tuple(each), stages, crossing)


def check_tables(model: nn.Module, config: Config) -> None:
    """Refuse parameters that are not paged, hence not converted, next to working weights."""
    working = WORKING.get(config.precision)
    for name, param in tables(model):
        if working is not None and pageable(param) and param.dtype is not working:
            raise ConfigError(
                f"parameter {name!r} is made anew by its module each time (as PEFT's LoRA on"
                f" nn.MultiheadAttention does): hetero leaves it {param.dtype}, beside weights that"
                f" compute in {working}",
                advice=f"convert the model before adapters are added: model.to({working})",
            )


def codecs_of(
    model: nn.Module, config: Config, working: dict[int, torch.dtype]
) -> dict[int, Codec]:
    """Return the codecs of parameters that lie at home in code, by the parameter's id.

    Only frozen matrices do, whether or not an optimizer lists them: norms and biases are small, and
    each of their numbers matters. One that is not contiguous keeps its memory format.
    """
    codec = CODECS[config.frozen]
    if codec.exact:
        return {}
    kept = named_by(model, config.keep_exact)
    return {
        id(p): codec
        for _, p in pages(model)
        if not p.requires_grad
        and p.dim() >= 2
        and working[id(p)] in CODED
        and p.is_contiguous()
        and id(p) not in kept
    }


def unit_needs(
    index: int, unit: Unit, layout: Layout, bucket_of: dict[int, int]
) -> tuple[int, ...]:
    """Return the buckets that a unit's access pins, those of parameters tied elsewhere too."""
    if unit.module is None:
        return tuple(b.id for b in layout.buckets if b.unit == index)
    return tuple(sorted({bucket_of[id(p)] for p in unit.module.parameters() if id(p) in bucket_of}))


def shapes(bucket: Bucket) -> frozenset[tuple[int, ...]]:
    """Return the shapes of a bucket's parameters: rules choose their states by them."""
    return frozenset(tuple(segment.spec.shape) for segment in bucket.segments)


def costs_of(
    rule: Rule | None,
    groups: Sequence[Group],
    precision: str,
    dtype: torch.dtype,
    shapes: frozenset[tuple[int, ...]],
    trainable: bool,
) -> Costs:
    """Return the costs of an element of a bucket under an optimizer and a precision."""
    if not trainable:
        return Costs(0, 0, 0, False)
    low = low_dtype(precision)
    has_master = low is not None and dtype is WORKING[precision]
    master = low.itemsize if low is not None and has_master else 0
    if rule is None:
        return Costs(0, master, 0, False)
    whole = not all(rule.may_flatten(group, dtype) for group in groups)
    if has_master:
        whole = rule.formula is None
    kept = torch.float32 if has_master else dtype
    found: dict[str, int] = {}  # the home of a state spans its whole bucket
    for group in groups:
        for shape in sorted(shapes):
            for key, state in rule.states_of(group, kept, shape).items():
                found[key] = max(state.itemsize, found.get(key, 0))
    return Costs(4 if has_master else dtype.itemsize, master, sum(found.values()), whole)
