"""HOST homes: where every parameter's authoritative bytes live (floor 1, mechanism).

One slab per kind and bucket, exactly sized and page-locked on CUDA. Every segment of a slab is its
own storage, so that saving a state dict writes a tensor's bytes and not its neighbours'.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch

from hetero.device import Device, Slab, release_slab, use_count
from hetero.memory.layout import Bucket
from hetero.memory.ledger import Ledger
from hetero.types import Kind, Tier


class Home:
    """One kind of one bucket on HOST: flat, by bytes, and by segment."""

    __slots__ = ("_baseline", "_slab", "bytes", "flat", "segments")

    def __init__(self, slab: Slab, bucket: Bucket, dtype: torch.dtype) -> None:
        self._slab = slab
        self.bytes = slab.carve(0, bucket.numel * dtype.itemsize)
        self.flat = self.bytes.view(dtype)
        self.segments = [
            shaped(
                slab, s.offset * dtype.itemsize, s.spec.shape, s.spec.stride, s.spec.numel, dtype
            )
            for s in bucket.segments
        ]
        self._baseline = sum(use_count(segment) for segment in self.segments)

    @property
    def held(self) -> bool:
        """Whether somebody outside refers to a segment."""
        return sum(use_count(segment) for segment in self.segments) > self._baseline

    @property
    def objects_held(self) -> bool:
        """Whether a segment's very object is referred to by more than one dict of ours."""
        return any(sys.getrefcount(segment) > _OURS for segment in self.segments)

    def close(self) -> None:
        release_slab(self._slab)


def _references() -> int:
    """Return the references to a segment that a state dict has and nobody else (it differs
    between releases of Python)."""
    segments = [object()]
    state = {"key": segments[0]}
    counts = [sys.getrefcount(segment) for segment in segments]
    return counts[0] if state else 0


_OURS = _references()


def shaped(
    slab: Slab,
    offset_bytes: int,
    shape: Sequence[int],
    stride: Sequence[int],
    numel: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return part of a slab as a tensor of the given geometry, with a storage of its own."""
    piece = slab.carve(offset_bytes, numel * dtype.itemsize).view(dtype)
    return torch.as_strided(piece, tuple(shape), tuple(stride))


class HomeStore:
    """Makes homes under their tier's budget and keeps them: ``homes[kind name, bucket id]``.

    With ``resident`` the homes are on the device, otherwise on HOST.
    """

    __slots__ = ("_charged", "_device", "_ledger", "_names", "_resident", "homes")

    def __init__(self, device: Device, ledger: Ledger, *, resident: bool = False) -> None:
        self._device = device
        self._ledger = ledger
        self._resident = resident
        self._charged: dict[tuple[str, int], tuple[Kind, int]] = {}
        self._names: set[str] = set()
        self.homes: dict[tuple[str, int], Home] = {}

    @property
    def tier(self) -> Tier:
        """Where the homes are."""
        return Tier.HBM if self._resident else Tier.HOST

    def get(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype | None = None) -> Home:
        """Return the home of ``name`` (a parameter kind or a state's key), made when missing."""
        home = self.homes.get((name, bucket.id))
        if home is None:
            dtype = dtype or bucket.dtype
            n_bytes = bucket.numel * dtype.itemsize
            self._ledger.charge(self.tier, kind, n_bytes, f"{name} of bucket {bucket.id}")
            self._charged[name, bucket.id] = (kind, n_bytes)
            make = self._device.arena if self._resident else self._device.slab
            home = Home(make(n_bytes), bucket, dtype)
            self.homes[name, bucket.id] = home
            self._names.add(name)
        return home

    def of_bucket(self, bucket_id: int) -> Iterator[tuple[str, Home]]:
        """Yield the homes of one bucket with their names."""
        for name in sorted(self._names):
            home = self.homes.get((name, bucket_id))
            if home is not None:
                yield name, home

    def drop(self, name: str, bucket_id: int) -> None:
        """Let one home go; its memory goes when its last tensor does."""
        home = self.homes.pop((name, bucket_id), None)
        if home is not None:
            home.close()
            self._ledger.credit(self.tier, *self._charged.pop((name, bucket_id)))

    def close(self) -> None:
        """Let all homes go."""
        for home in self.homes.values():
            home.close()
        self.homes.clear()
