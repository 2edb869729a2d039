"""Updates on a dry device: they take time, and that is all (floor 4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

from hetero.dry import DryDevice
from hetero.internals import without_modes
from hetero.jobs import Job, Slice, Worker, hurried
from hetero.rehearse.disk import DryDisk
from hetero.types import Lane

UpdateSeconds = Callable[[int], float]


class DryJob(Job):
    """A job that is done when its time has come.

    Its slices are carried out at once when it begins. A disk they wait for takes its time, during
    which their own work goes on.
    """

    __slots__ = ("_worker", "asked", "seconds")

    def __init__(
        self,
        slices: Iterable[Slice],
        seconds: float,
        worker: DryWorker,
        *,
        finish: Slice | None,
        after: Sequence[Job],
    ) -> None:
        super().__init__(slices, finish=finish, after=after, clock=worker.clock)
        self.seconds = seconds
        self.asked = worker.clock()
        self._worker = worker

    @property
    def done(self) -> bool:
        return super().done and (self.ended or 0.0) <= self._clock()

    def begin(self, begin: float) -> None:
        """Carry it out from a time on."""
        self.began, self.ended = begin, begin + self.seconds
        disk = self._worker.disk
        with without_modes(), nullcontext() if disk is None else disk.at(begin):
            super().settle()
            if disk is not None and disk.now() > self.ended:
                self.ended = disk.now()

    def settle(self) -> None:
        self._worker.run_until(self)
        self._worker.device.pass_until(self.ended or 0.0)


class DryWorker(Worker):
    """Carries out one job after the other, on the device's clock.

    Args:
        update_seconds: of a step over so many parameters.
        disk: that slices may wait for.
    """

    def __init__(
        self, device: DryDevice, update_seconds: UpdateSeconds, disk: DryDisk | None = None
    ) -> None:
        super().__init__(0)
        self.device = device
        self.disk = disk
        self.clock = device.clock
        self._update_seconds = update_seconds
        self._jobs: deque[DryJob] = deque()
        self._free_at = 0.0
        self._is_running = False
        device.time_passed = self.poll

    def job(
        self,
        slices: Iterable[Slice],
        numel: int,
        *,
        finish: Slice | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        return DryJob(slices, self._update_seconds(numel), self, finish=finish, after=after)

    def submit(self, job: Job) -> Job:
        if isinstance(job, DryJob):
            self._jobs.append(job)
            self.poll()
        return job

    def hurry(self, jobs: Iterable[Job]) -> None:
        self._jobs = deque(hurried(self._jobs, jobs))

    def poll(self) -> None:
        """Begin the jobs whose turn has come by now."""
        while self._jobs and not self._is_running and self._free_at <= self.clock():
            self._run(self._jobs.popleft())

    def run_until(self, job: DryJob) -> None:
        """Begin the jobs submitted up to one; if it never was submitted, it begins now."""
        if job.began is not None:
            return
        while job in self._jobs:
            self._run(self._jobs.popleft())
        if job.began is None:
            job.begin(self.clock())

    def _run(self, job: DryJob) -> None:
        self._is_running = True
        try:
            job.begin(max(self._free_at, job.asked))
            self._free_at = job.ended or 0.0
            self.device.busy_until(Lane.UPDATE, self._free_at)
        finally:
            self._is_running = False
