"""Jobs on HOST that write gradients home, or add them there (floor 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero.cores import Cores
from hetero.jobs import Job, Worker
from hetero.memory.extent import PinUse
from hetero.memory.layout import row
from hetero.train.gradients.homes import GradHomes
from hetero.train.gradients.ring import GradRing
from hetero.train.gradients.slot import GradNorm, GradSlot, GradState, NormWay, whole_norm


@dataclass(slots=True)
class Addition:
    """Work of one job: a piece of a gradient, which begins at the parameter's element ``start``.

    A disk may fail between two runs; the rest is tried again later. Adding gives the same bits on
    any number of threads, so it takes one; a norm does not, and takes as many as ``n_threads``.
    """

    homes: GradHomes
    slot: GradSlot
    piece: torch.Tensor
    start: int
    first: bool
    """Whether it is written, and not added."""
    unscale: float
    norm_way: NormWay | None
    """Of the norm of the whole sum, taken after its last piece."""
    cores: Cores
    n_threads: int
    """Of torch in the thread that handed the gradient."""
    done: int = 0

    def __call__(self) -> None:
        with self.cores.one():
            self._add()
        is_last = self.start + self.piece.numel() == self.slot.segment.spec.numel
        if is_last and not self.first and self.norm_way is not None:
            self._take_norm(self.norm_way)

    def _add(self) -> None:
        piece, home, segment = self.piece, self.slot.home, self.slot.segment
        exact = piece if self.unscale == 1.0 else piece.float() * self.unscale
        first, end = segment.offset + self.start, segment.offset + self.start + piece.numel()
        use = PinUse.FRESH if self.first else PinUse.WRITE
        for run in home.runs(first + self.done, end, use):
            part, addend = home.part(run), exact[run.start - first : run.stop - first]
            part.copy_(addend) if self.first else part.add_(addend)
            self.done = run.stop - first

    def _take_norm(self, way: NormWay) -> None:
        segment = self.slot.segment
        whole = self.homes.read(self.slot.home, segment)
        with self.cores.all(self.n_threads):
            norm = whole_norm(whole, way, in_fp32=self.homes.has_master(segment))
        self.slot.norm = GradNorm(way, norm)


class GradSums:
    """Adds gradients at home in order of arrival, a job a piece."""

    def __init__(self, homes: GradHomes, ring: GradRing, worker: Worker, cores: Cores) -> None:
        self.jobs: dict[int, Job] = {}
        """The last job that writes or reads each parameter's gradient, by index."""
        self._homes = homes
        self._ring = ring
        self._worker = worker
        self._cores = cores

    def add(
        self,
        slot: GradSlot,
        grad: torch.Tensor,
        *,
        first: bool,
        unscale: float,
        norm_way: NormWay | None,
    ) -> None:
        """Let jobs add a gradient to its home, or begin the sum with it."""
        index, n_threads = slot.segment.index, torch.get_num_threads()
        slot.become(GradState.ARRIVING, "add")

        def consume(piece: torch.Tensor, start: int) -> Job:
            work = Addition(
                *(self._homes, slot, piece, start, first, unscale, norm_way),
                cores=self._cores,
                n_threads=n_threads,
            )
            slot.n_flying -= 1
            before = self.jobs.get(index)
            after = () if before is None or before.done else (before,)
            job = self.jobs[index] = self._worker.job([work], piece.numel(), after=after)
            return self._worker.submit(job)

        bucket, flat = self._homes.layout.bucket(slot.segment), row(grad)
        # counted before: handing may fail after some are on their way, and some run at once
        slot.n_flying += self._ring.n_pieces(flat)
        self._ring.hand(flat, consume, bucket=bucket.id)
