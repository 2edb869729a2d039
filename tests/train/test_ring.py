"""Gradients on their way down: who holds their bytes, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero.device import SimDevice
from hetero.events import EventLog
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.train.gradients.ring import GradRing
from hetero.types import Kind, Tier

PIECE_BYTES = 256


def a_ring() -> tuple[GradRing, Ledger]:
    device = SimDevice(checked=True, lazy=0.0)
    ledger = Ledger({})
    link = Link(device, EventLog())
    return GradRing(device, link, ledger, sizes_bytes=[PIECE_BYTES], most_bytes=2**20), ledger


class Late:
    """A job that reads its piece when somebody waits for it, and no sooner."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.done = False
        self._read = read

    def wait(self) -> None:
        if not self.done:
            self._read()
            self.done = True


def test_a_gradient_is_held_until_its_copy_has_landed() -> None:
    ring, _ = a_ring()
    target = torch.zeros(64, dtype=torch.uint8)
    ring.copy(target, torch.full((64,), 7, dtype=torch.uint8), bucket=0)
    assert ring.held_bytes == 64

    ring.finish()  # the device refuses a copy of bytes that nobody holds

    assert target.eq(7).all()
    assert ring.held_bytes == 0


def test_too_much_that_is_held_waits_for_the_oldest() -> None:
    ring, _ = a_ring()
    ring.limit_bytes = 100
    targets = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]

    for target in targets:
        ring.copy(target, torch.full((64,), 7, dtype=torch.uint8), bucket=0)

    assert [bool(target.eq(7).all()) for target in targets] == [True, True, False]
    ring.finish()


def test_a_stage_is_filled_anew_when_its_job_has_read_it() -> None:
    ring, ledger = a_ring()
    source = torch.randn(5 * PIECE_BYTES)
    found, jobs = torch.zeros_like(source), []

    def consume(piece: torch.Tensor, start: int) -> Any:
        jobs.append(Late(lambda: found[start : start + piece.numel()].copy_(piece)))
        return jobs[-1]

    n_jobs = ring.n_pieces(source)
    ring.hand(source, consume, bucket=0)
    ring.finish()
    for job in jobs:
        job.wait()

    assert len(jobs) == n_jobs == 20
    assert torch.equal(found, source)
    assert 0 < ledger.used(Tier.HOST, Kind.GRAD) < source.nbytes
    ring.close()
    assert ledger.used(Tier.HOST, Kind.GRAD) == 0
