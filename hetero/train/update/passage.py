"""Updates through HBM: slices of homes on HOST go up, are updated, and come down (floor 2).

A slice is carried by a thread that waits for each of its copies, in one of a few slots on HBM. So
an update is the same job wherever its slices run, with the same errors and the same waits, and a
slot is free when its thread is. The arithmetic is that of homes on HBM: the same bits. Nothing is
staged: bytes that are not page-locked stay where they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hetero.device import Device, Slab, Ticket
from hetero.errors import StateError
from hetero.memory.home import Home
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.types import Kind, Lane, Tier

N_SLOTS = 3  # one goes up, one comes down, and one is updated, or waits while its thread is late
ALIGN_BYTES = 256  # of a tensor in a slot
MOST_NUMEL = 2**22  # of a slot: a launcher's thread waits for the interpreter once in 1 ms or more
LEAST_NUMEL = 2**8
VECTOR = 16  # elements at whose multiples slices begin
MOST_TENSORS = 6  # of a slice: weight, low half, gradient, three states


class Operand(NamedTuple):
    """A run of a home that a slice reads."""

    home: Home
    kind: Kind
    run: slice
    is_written: bool = True

    @property
    def part(self) -> torch.Tensor:
        return self.home.part(self.run)


class Slot:
    """A piece of HBM for the tensors of one slice."""

    __slots__ = ("_bytes", "_slab")

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._bytes = slab.carve(0, slab.n_bytes)

    def like(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors here of the dtypes and lengths of ``parts``."""
        start, found = 0, []
        for part in parts:
            piece = self._bytes[start : start + part.nbytes]
            found.append(piece.view(part.dtype))
            start += aligned(part.nbytes)
        if start > self._slab.n_bytes:
            raise StateError(f"a slice of {start} bytes is too long for {self._slab.n_bytes}")
        return found


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def slot_numel(n_bytes: int, element_bytes: int) -> int:
    """Return the elements of a slice whose slots take ``n_bytes`` in all."""
    each = n_bytes // N_SLOTS - MOST_TENSORS * ALIGN_BYTES
    return max(0, min(MOST_NUMEL, each // element_bytes // LEAST_NUMEL * LEAST_NUMEL))


def passage_bytes(numel: int, element_bytes: int) -> int:
    """Return the bytes of the slots for slices of ``numel`` elements."""
    return N_SLOTS * aligned(numel * element_bytes + MOST_TENSORS * ALIGN_BYTES)


class Passage:
    """A few slots on HBM, and the way through them. Closed, everything is updated at home."""

    def __init__(self, device: Device, link: Link, ledger: Ledger) -> None:
        self.numel = 0
        """The most elements of a slice; 0 if it is closed."""
        self.passed_numel = 0
        """Of all slices so far."""
        self.is_only_way = False
        """Whether no carriers are there: who updates a slice that may pass carries it."""
        self.share = 0.0
        """Of each bucket's elements, the last ones: so many may pass."""
        self._device = device
        self._link = link
        self._ledger = ledger
        self.n_bytes = 0
        """Of HBM, for the slots."""
        self._free: deque[Slot] = deque()
        self._changed = threading.Condition()

    def open(self, numel: int, element_bytes: int, share: float) -> None:
        """Make the slots, or change the share; BudgetError if HBM has no room for them."""
        self.share = share
        if self.numel:
            return
        n_bytes = passage_bytes(numel, element_bytes)
        self._ledger.charge(Tier.HBM, Kind.BUFFER, n_bytes, "updates through HBM")
        try:
            slots = [Slot(self._device.arena(n_bytes // N_SLOTS)) for _ in range(N_SLOTS)]
        except BaseException:
            self._ledger.credit(Tier.HBM, Kind.BUFFER, n_bytes)
            raise
        with self._changed:
            self._free.extend(slots)
            self.n_bytes, self.numel = n_bytes, numel

    def close(self) -> None:
        """Wait for the slices under way, and give the slots back; others run at home."""
        if not self.numel:
            return
        with self._changed:
            self.numel = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._free) == N_SLOTS)
            self._free.clear()
        self._ledger.credit(Tier.HBM, Kind.BUFFER, self.n_bytes)
        self.n_bytes = 0

    def tail(self, numel: int) -> int:
        """Return the first of a bucket's elements that may pass."""
        if not self.numel:
            return numel
        return max(0, numel - int(self.share * numel)) // VECTOR * VECTOR

    def takes(self, operands: Sequence[Operand]) -> bool:
        """Whether a slice of such homes may pass: they are on HOST, and nothing stages them."""
        homes = all(each.home.stays and not each.home.on_device for each in operands)
        return homes and all(self._device.is_direct(raw(each.part)) for each in operands)

    def carry(
        self,
        operands: Sequence[Operand],
        update: Callable[[list[torch.Tensor]], None],
        bucket: int,
        home: Callable[[], None],
    ) -> None:
        """Bring operands up, update them, and bring down those that are written; if it was closed
        meanwhile, do it at ``home``."""
        with self._slot() as slot:
            if slot is None:
                home()
                return
            parts = [each.part for each in operands]
            there = slot.like(parts)
            with self._landing() as queued:
                for each, here, up in zip(operands, parts, there, strict=True):
                    queued.append(self._move(Lane.H2D, up, here, each.kind, bucket, ()))
                sizes = zip(operands, there, strict=True)
                n_bytes = sum(up.nbytes * (1 + each.is_written) for each, up in sizes)
                made = self._device.on_side_stream(
                    Lane.UPDATE, lambda: update(there), [*queued], n_bytes
                )
                queued.append(made)
                for each, here, up in zip(operands, parts, there, strict=True):
                    if each.is_written:
                        queued.append(self._move(Lane.D2H, here, up, each.kind, bucket, (made,)))
            with self._changed:
                self.passed_numel += parts[0].numel()

    def _move(
        self,
        lane: Lane,
        dst: torch.Tensor,
        src: torch.Tensor,
        kind: Kind,
        bucket: int,
        after: Sequence[Ticket],
    ) -> Ticket:
        return self._link.move(
            lane, raw(dst), raw(src), kind=kind, after=after, bucket=bucket, why="update"
        )

    @contextmanager
    def _landing(self) -> Iterator[list[Ticket]]:
        """Wait in the end for tickets, whatever happens: the slot and the homes are used again."""
        queued: list[Ticket] = []
        try:
            yield queued
        finally:
            for ticket in reversed(queued):  # one wait, mostly: the last comes after all others
                self._device.sync(ticket)

    @contextmanager
    def _slot(self) -> Iterator[Slot | None]:
        """Lend a slot, once one is free; None if the passage is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self.numel)
            slot = self._free.popleft() if self.numel else None
        try:
            yield slot
        finally:
            if slot is not None:
                with self._changed:
                    self._free.append(slot)
                    self._changed.notify_all()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
