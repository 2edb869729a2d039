"""Counts the bytes that autograd graphs hold (floor 2)."""

from __future__ import annotations

from typing import Protocol

import torch

from hetero.errors import StateError

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace"
    " operation: {what} is at version {now}; expected version {then} instead"
)


class Held:
    """A graph's claim on a storage, counted in the footprint while the graph holds it."""

    __slots__ = ("_footprint", "_key")

    def __init__(self, footprint: GraphFootprint, key: int, n_bytes: int) -> None:
        self._footprint = footprint
        self._key = key
        footprint.hold(key, n_bytes)

    def __del__(self) -> None:
        self._footprint.drop(self._key)


class WentBelow(Protocol):
    """The place of an offloaded tensor."""

    def up(self) -> torch.Tensor:
        """Return it, on the device again."""


class Kept:
    """A tensor saved by a graph: an alias and its version, or its place once offloaded."""

    __slots__ = ("__weakref__", "below", "held", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, held: Held) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.held: Held | None = held
        self.below: WentBelow | None = None

    def sink(self, below: WentBelow) -> Held | None:
        """Drop the tensor, whose bytes are being flushed; return its claim."""
        held, self.held = self.held, None
        self.tensor, self.below = None, below
        return held

    def get(self) -> torch.Tensor:
        """Return the tensor; raise torch's own error if it was written since."""
        if self.tensor is None:
            if self.below is None:
                raise StateError("a saved tensor is neither on the device nor below it")
            return self.below.up()
        now = self.tensor._version
        if now != self.version:
            what = f"[{self.tensor.type()} {list(self.tensor.shape)}]"
            raise RuntimeError(CHANGED.format(what=what, now=now, then=self.version))
        return self.tensor


class GraphFootprint:
    """Bytes that autograd graphs hold, by distinct storage, and their peak."""

    __slots__ = (
        *("_levels", "_uses", "between_bytes", "earlier", "earlier_bytes", "largest_bytes"),
        *("live_bytes", "output_bytes", "peak_bytes", "stayed_bytes"),
    )

    def __init__(self) -> None:
        self._uses: dict[int, list[int]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self.output_bytes = 0
        self.between_bytes = 0
        """Saved outside units, and offloaded; they stay on the device if no unit offloads."""
        self.stayed_bytes = 0
        """To be offloaded; they stay on the device, because there is no room below."""
        self.earlier_bytes = 0
        """Held when a forward of the whole model began, at most: by those before it."""
        self.earlier = 0
        """The number of those: they wait for their backwards."""
        self._levels: list[int] = []  # bytes held when each of them began, ascending

    @property
    def bound_bytes(self) -> int:
        """Bytes held at the peak, with a bound on temporaries.

        Measured: storages that graphs hold, also those recomputed in backward, and the model's
        outputs. Bounded: two tensors of the largest size in flight in backward, and the loss's
        copy and gradient of the outputs (a head's float upcast peaks at three times its logits).
        """
        return self.peak_bytes + 2 * self.largest_bytes + 3 * self.output_bytes

    def hold(self, key: int, n_bytes: int) -> None:
        """Count one more hold of a graph on a storage."""
        row = self._uses.get(key)
        if row is not None:
            row[0] += 1
            return
        self._uses[key] = [1, n_bytes]
        self.live_bytes += n_bytes
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def forward_begins(self) -> None:
        """Note what earlier forwards of the whole model left to their backwards. A forward counts
        as long as more is held than when it began."""
        while self._levels and self._levels[-1] >= self.live_bytes:
            self._levels.pop()
        self._levels.append(self.live_bytes)
        if self.waiting and self.live_bytes >= self.earlier_bytes:
            self.earlier, self.earlier_bytes = self.waiting, self.live_bytes

    @property
    def waiting(self) -> int:
        """The number of forwards that waited for their backwards when this one began."""
        return max(0, len(self._levels) - 1)

    def drop(self, key: int) -> None:
        """Drop one hold on a storage."""
        row = self._uses[key]
        row[0] -= 1
        if row[0] == 0:
            self.live_bytes -= row[1]
            del self._uses[key]

    def restart(self) -> None:
        """Begin a new measurement; held storages stay counted."""
        self.peak_bytes = self.live_bytes
        self.largest_bytes = self.output_bytes = self.between_bytes = self.stayed_bytes = 0
        self.earlier = self.earlier_bytes = 0
        self._levels.clear()
