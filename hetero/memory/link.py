"""The link between HBM and HOST: two lanes, counted (floor 1, mechanism)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from hetero.device import Device, Ticket
from hetero.events import EventLog
from hetero.types import Lane


class Link:
    """Queues copies on the lanes H2D and D2H and counts what they move."""

    __slots__ = ("_device", "_log", "n_bytes")

    def __init__(self, device: Device, log: EventLog) -> None:
        self._device = device
        self._log = log
        self.n_bytes: Counter[Lane] = Counter()

    def move(
        self,
        lane: Lane,
        dst: torch.Tensor,
        src: torch.Tensor,
        *,
        after: Iterable[Ticket] = (),
        subject: str = "",
        why: str = "",
    ) -> Ticket:
        """Queue a copy of raw bytes (1-D uint8, equally long); its ticket fires when it landed."""
        queued = self._device.now()
        ticket = self._device.copy(lane, dst, src, after)
        self.n_bytes[lane] += dst.numel()
        self._log.append((lane, "copy", queued, ticket.end, subject, dst.numel(), why))
        return ticket
