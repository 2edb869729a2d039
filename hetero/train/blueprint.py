"""The blueprint of a prepared model: what is decided before anything is touched (floor 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hetero.config import Config
from hetero.memory.layout import Layout, ParamSpec, build_layout, dense_stride
from hetero.train.check import pageable
from hetero.train.precision import WORKING, low_dtype, working_dtypes
from hetero.train.rules import Rule, is_elementwise
from hetero.train.units import Unit, assign, find_units


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Units, layout and sizes; ``needs[unit]`` are the buckets that a unit's access pins."""

    units: tuple[Unit, ...]
    layout: Layout
    needs: tuple[tuple[int, ...], ...]
    state_bytes: int
    """Bytes of optimizer states for all trainable buckets."""

    @property
    def granule_bytes(self) -> int:
        return self.layout.chunk_numel

    def granules(self, unit: int) -> int:
        """Frames that a unit's access pins."""
        return sum(self.layout.buckets[b].granules for b in self.needs[unit])

    @property
    def widest(self) -> int:
        """The unit that pins most frames."""
        return max(range(len(self.units)), key=self.granules)

    @property
    def widest_name(self) -> str:
        return self.units[self.widest].name or "model"

    @property
    def least_bytes(self) -> int:
        """Bytes of the frames that the widest unit pins: fewer cannot work."""
        return self.granules(self.widest) * self.granule_bytes

    @property
    def home_bytes(self) -> int:
        """Bytes of parameters, gradients and states at home."""
        params = sum(b.n_bytes for b in self.layout.buckets)
        return (
            params + sum(b.n_bytes for b in self.layout.buckets if b.trainable) + self.state_bytes
        )


def draw(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> Blueprint:
    """Find the units, lay out the buckets and size the states; touches nothing."""
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else set()
    units, home = assign(model, find_units(model, config.units))
    working = working_dtypes(model, config.precision, config.keep_fp32)
    specs = [
        ParamSpec(
            name=name,
            unit=home[name],
            shape=tuple(p.shape),
            stride=dense_stride(name, p.shape, p.stride()),
            dtype=working[id(p)],
            trainable=p.requires_grad or id(p) in owned,
        )
        for name, p in model.named_parameters()
        if pageable(p)
    ]
    layout = build_layout(specs, [unit.name or "model" for unit in units], config.chunk_bytes)
    paged = [p for p in model.parameters() if pageable(p)]
    bucket_of = {id(p): layout.home[i][0] for i, p in enumerate(paged)}
    needs = tuple(unit_needs(i, unit, layout, bucket_of) for i, unit in enumerate(units))
    trainable = [b for b in layout.buckets if b.trainable]
    per_element = state_bytes_per_element(optimizer, {b.dtype for b in trainable}, config.precision)
    states = sum(b.numel * per_element[b.dtype] for b in trainable)
    return Blueprint(tuple(units), layout, needs, states)


def unit_needs(
    index: int, unit: Unit, layout: Layout, bucket_of: dict[int, int]
) -> tuple[int, ...]:
    """Return the buckets that a unit's access pins, those of parameters tied elsewhere too."""
    if unit.module is None:
        return tuple(b.id for b in layout.buckets if b.unit == index)
    return tuple(sorted({bucket_of[id(p)] for p in unit.module.parameters() if pageable(p)}))


def state_bytes_per_element(
    optimizer: torch.optim.Optimizer | None, dtypes: Iterable[torch.dtype], precision: str
) -> dict[torch.dtype, int]:
    """Return the bytes of states, and of what a master takes, that an element of a dtype costs."""
    found = dict.fromkeys(dtypes, 0)
    low = low_dtype(precision)
    for dtype in found:
        has_master = low is not None and dtype is WORKING[precision]
        if optimizer is not None:
            found[dtype] = probed_bytes(optimizer, torch.float32 if has_master else dtype)
        if has_master and low is not None:
            found[dtype] += low.itemsize
    return found


def probed_bytes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> int:
    """Return the bytes of state that an element costs, by stepping a tiny parameter."""
    rule, most = Rule(optimizer), 0
    for group in optimizer.param_groups:
        probe = torch.zeros(4, 4, dtype=dtype)
        probe.grad = torch.zeros_like(probe)
        with torch.no_grad():
            (state,) = rule.run({**group, "lr": 0.0}, [probe], [{}])
        held = (v for k, v in state.items() if is_elementwise(k, v, probe.shape))
        most = max(most, sum(v.element_size() for v in held))
    return most
