"""The link between HBM and HOST: two lanes, counted and logged (floor 1, mechanism)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

import torch

from hetero.device import Device, Stall, Ticket
from hetero.events import EventLog, What
from hetero.types import Kind, Lane


class Link:
    """Queues copies on the lanes H2D and D2H and counts what they move."""

    __slots__ = ("_device", "_moving", "log", "n_bytes")

    def __init__(self, device: Device, log: EventLog) -> None:
        self._device = device
        self._moving = threading.Lock()  # gradients for other ranks move on a thread of their own
        self.log = log
        self.n_bytes: Counter[Lane] = Counter()

    def move(
        self,
        lane: Lane,
        dst: torch.Tensor,
        src: torch.Tensor,
        *,
        kind: Kind,
        after: Iterable[Ticket] = (),
        bucket: int = -1,
        why: str = "",
    ) -> Ticket:
        """Queue a copy of raw bytes (1-D uint8, equally long); its ticket fires when it lands."""
        with self._moving:
            ticket = self._device.copy(lane, dst, src, after)
            self.n_bytes[lane] += dst.numel()
        self.log.add(
            *(What.MOVE, 0.0, ticket),
            lane=lane,
            bucket=bucket,
            n_bytes=dst.numel(),
            category=kind,
            why=why,
        )
        return ticket

    def count(self, lane: Lane, n_bytes: int, *, kind: Kind, bucket: int, why: str) -> None:
        """Count the bytes of a copy that is not needed: both sides are one memory."""
        with self._moving:
            self.n_bytes[lane] += n_bytes
        self.log.now(What.MOVE, lane=lane, bucket=bucket, n_bytes=n_bytes, category=kind, why=why)

    def wait(self, ticket: Ticket, *, kind: Kind, bucket: int = -1) -> None:
        """Make compute that is queued from now on run after a copy's ticket."""
        self._note(self._device.wait(ticket), ticket, kind, bucket)

    def sync(self, ticket: Ticket, *, kind: Kind, bucket: int = -1) -> None:
        """Block the host until a copy has landed."""
        self._note(self._device.sync(ticket), ticket, kind, bucket)

    def has_landed(self, ticket: Ticket) -> bool:
        """Return whether a copy has landed, without blocking."""
        return self._device.query(ticket)

    def _note(self, stall: Stall | None, ticket: Ticket, kind: Kind, bucket: int) -> None:
        if stall is not None:
            self.log.add(What.WAIT, *stall, bucket=bucket, category=kind, why=ticket.lane.value)
