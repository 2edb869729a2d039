"""The tensors of a home's segments, that state dicts get (floor 1)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch

from hetero.device import ALONE, Slab, use_count
from hetero.internals import storage_uses
from hetero.memory.layout import row


class Copy:
    """Stands for a segment of a home that cannot be aliased; dense, on HOST."""

    __slots__ = ("_digest", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._digest = self._now()

    @property
    def held(self) -> bool:
        """Whether an alias of it is alive."""
        return use_count(self.value) > ALONE

    @property
    def written(self) -> bool:
        """Whether it differs from the value shown last."""
        return self._now() != self._digest

    def show(self, value: torch.Tensor) -> None:
        """Take a new value from its home."""
        self.value.copy_(value)
        self._digest = self._now()

    def _now(self) -> bytes:
        flat = row(self.value).view(torch.uint8)
        return blake2b(memoryview(flat.numpy()), digest_size=16).digest()


class SegmentViews:
    """The tensors of a home's segments, and what refers to them."""

    __slots__ = ("_addresses", "_baseline", "_storages", "segments")

    def __init__(self, segments: Iterable[torch.Tensor]) -> None:
        self.segments = list(segments)
        self._storages = [segment.untyped_storage() for segment in self.segments]
        self._addresses = [storage._cdata for storage in self._storages]  # theirs while they live
        self._baseline = self._uses()

    @property
    def held(self) -> bool:
        """Whether the user's code refers to the memory of a segment."""
        return self._uses() > self._baseline

    @property
    def objects_held(self) -> bool:
        """Whether anything but one state dict of ours refers to a segment's very object."""
        return max(map(sys.getrefcount, self.segments), default=0) > _OURS

    @property
    def versions(self) -> tuple[int, ...]:
        """How often torch has seen each segment written."""
        return tuple(segment._version for segment in self.segments)

    def _uses(self) -> int:
        return sum(map(storage_uses, self._addresses))

    def clear(self) -> None:
        """Drop them."""
        for known in (self.segments, self._storages, self._addresses):
            known.clear()


def _references() -> int:
    """Return the reference count, in this Python, of a segment that only a state dict refers to."""
    segments = [object()]
    state = {"key": segments[0]}
    (count,) = map(sys.getrefcount, segments)
    return count if state else 0


_OURS = _references()


def shaped(
    slab: Slab,
    offset_bytes: int,
    shape: Sequence[int],
    stride: Sequence[int],
    numel: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return part of a slab as a tensor of this geometry, with its own storage."""
    piece = slab.carve(offset_bytes, numel * dtype.itemsize).view(dtype)
    return torch.as_strided(piece, tuple(shape), tuple(stride))


def valueless(shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Return a tensor that stands for a segment of which there is no tensor."""
    number = float("nan") if dtype.is_floating_point else 0
    return torch.full((), number, dtype=dtype, device=place).expand(shape)
