"""How fast the lanes of a CUDA device copy (floor 0)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from hetero.device.face import OPPOSITE, PROBE_BYTES, Move
from hetero.device.lanes import CudaLanes
from hetero.device.memory import CudaMemory
from hetero.device.staging import Staging
from hetero.types import Lane

BESIDE = 3  # times as many copies keep the other lane busy all the while
ROUNDS = 5  # of copies that measure a lane: a card that had nothing to do has a slow link at first
SPIN_CYCLES = 50_000  # of a device's clock while the host queues one copy: 25 us at 2 GHz


class LaneRates:
    """Measures a lane once, and predicts its copies."""

    def __init__(self, lanes: CudaLanes, staging: Staging, memory: CudaMemory) -> None:
        self._lanes = lanes
        self._staging = staging
        self._memory = memory
        self._bytes_per_second: dict[Lane, float] = {}

    def seconds(self, lane: Lane, n_bytes: int) -> float:
        """Return the time of a copy of ``n_bytes`` on a free lane."""
        if lane not in self._bytes_per_second:
            self.measure(lane)
        return n_bytes / self._bytes_per_second[lane]

    def measure(self, lane: Lane) -> None:
        """Measure a lane's rate: that of the fastest of several copies."""
        with self._ends(lane) as (target, source):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
            with self._lanes.on(lane):
                target.copy_(source, non_blocking=True)  # the first one warms up
                marks[0].record()
                for mark in marks[1:]:
                    target.copy_(source, non_blocking=True)
                    mark.record()
            marks[-1].synchronize()
        fastest = min(begin.elapsed_time(end) for begin, end in pairwise(marks))
        self._bytes_per_second[lane] = target.numel() / max(float(fastest) / 1000, 1e-9)

    @contextmanager
    def _ends(self, lane: Lane) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lend target and source of a copy, with a stage at the host's end."""
        if lane is Lane.D2D:
            yield self._memory.take(PROBE_BYTES), self._memory.take(PROBE_BYTES)
            return
        with self._staging.lent(PROBE_BYTES) as below:
            here = self._memory.take(below.numel())
            yield (here, below) if lane is Lane.H2D else (below, here)

    def of_moves(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move]) -> float:
        """Return the time of copies on a lane, with those of ``beside`` on the other one."""
        # 1. make both lanes wait until all is queued: the host is slower than small copies
        self._settle()
        other = OPPOSITE[lane]
        beside = [*beside] * BESIDE
        cycles = SPIN_CYCLES * (len(moves) + len(beside))
        with self._lanes.on(lane):
            torch.cuda._sleep(cycles)
            queued = torch.cuda.Event()
            queued.record()
        self._lanes.streams[other].wait_event(queued)
        # 2. queue the copies on the other lane, then the timed ones
        with self._lanes.on(other):
            for move in beside:
                move.dst.copy_(move.src, non_blocking=True)
        with self._lanes.on(lane):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for move in moves:
                move.dst.copy_(move.src, non_blocking=True)
            end.record()
        end.synchronize()
        seconds = float(begin.elapsed_time(end)) / 1000
        self._settle()
        return seconds

    def _settle(self) -> None:
        self._staging.finish()
        self._lanes.settle()
