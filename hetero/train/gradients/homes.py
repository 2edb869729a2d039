"""The homes of gradients: in their own dtype, or wide where a master needs the sum (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hetero.device import Device
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.types import Kind, noop

GRAD, WIDE = Kind.GRAD.value, "grad32"
Growing = Callable[[int], AbstractContextManager[None]]
"""Makes room on HBM for so many bytes, which are taken inside."""


def standing(n_bytes: int) -> AbstractContextManager[None]:
    """Nothing on HBM gives way: there is room."""
    return nullcontext()


class GradHomes:
    """One home a bucket, made for its first gradient, in the parameters' dtype or in fp32.

    A bucket with masters begins narrow, and is made fp32 when a second gradient is added.
    """

    def __init__(
        self,
        store: HomeStore,
        layout: Layout,
        device: Device,
        growing: Growing = standing,
        before_sums: Callable[[], None] = noop,
    ) -> None:
        self.store = store
        self._growing = growing  # on HBM, for bytes of a home there
        self._before_sums = before_sums  # makes room in RAM for wide homes, or raises BudgetError
        self.expects_sums = False
        """Whether gradients will be summed: homes of buckets with masters then begin in fp32."""
        self.layout = layout
        # a slower rank may still read a gradient that this one has dropped
        self._may_drop = device.cheap_slabs and not layout.is_shared

    def has_master(self, segment: Segment) -> bool:
        """Whether a parameter's gradients are summed in fp32."""
        return self.layout.bucket(segment).has_master

    def narrow(self, bucket: Bucket) -> Home | None:
        """Return the home of a bucket's gradients in their own dtype, if there is one."""
        return self.store.homes.get((GRAD, bucket.id))

    def wide(self, bucket: Bucket) -> Home:
        """Return the home of a bucket's gradients in fp32; make it if there is none."""
        if (WIDE, bucket.id) in self.store.homes:
            return self.store.homes[WIDE, bucket.id]
        if bucket.id in self.store.places.on_hbm:
            with self._growing(bucket.share_numel * torch.float32.itemsize):
                return self.store.get(Kind.GRAD, WIDE, bucket, torch.float32)
        self._before_sums()
        return self.store.get(Kind.GRAD, WIDE, bucket, torch.float32)

    def of(self, bucket: Bucket) -> Home:
        """Return the home of a bucket's gradients, wide or narrow."""
        wide = self.store.homes.get((WIDE, bucket.id))
        return wide or self.store.homes[GRAD, bucket.id]

    def make(self, bucket: Bucket, *, wide: bool) -> Home:
        """Return the home for a new gradient; the caller has widened it if needed."""
        there = self.store.homes.get((WIDE, bucket.id))
        sums = bucket.has_master and self.expects_sums and self.narrow(bucket) is None
        if bucket.has_master and (wide or there is not None or sums):
            return there or self.wide(bucket)
        return self.store.get(Kind.GRAD, GRAD, bucket)

    def read(self, home: Home, segment: Segment) -> torch.Tensor:
        """Return a gradient at home: the home's own tensor on HOST, a copy from disk."""
        return home.value(segment)

    def write(self, home: Home, segment: Segment, grad: torch.Tensor) -> None:
        """Write a gradient home, unless it is the home's own tensor."""
        home.write(segment, grad)

    def add_here(
        self, home: Home, segment: Segment, grad: torch.Tensor, *, first: bool, unscale: float
    ) -> None:
        """Add a gradient to a home on the device, in order of compute; write the ``first``."""
        part = home.view(segment)
        exact = grad if unscale == 1.0 else grad.float() * unscale
        part.copy_(exact) if first else part.add_(exact)

    def drop(self, bucket: Bucket) -> None:
        """Free the memory of a bucket's gradients if that is cheap."""
        for name in (GRAD, WIDE):
            home = self.store.homes.get((name, bucket.id))
            if home is not None and (self._may_drop or not home.stays):
                self.store.drop(name, bucket.id)


def shaped(segment: Segment, grad: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in the parameter's own strides, and in ``dtype``."""
    spec = segment.spec
    grad = grad.resolve_conj().resolve_neg()
    if tuple(grad.stride()) != spec.stride or grad.dtype != dtype:
        same = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=grad.device)
        return same.copy_(grad)
    plain: torch.Tensor = grad
    return plain
