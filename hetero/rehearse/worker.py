"""Updates on a dry device: they take time, and that is all (floor 4)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

from hetero.dry import DryDevice
from hetero.internals import without_modes
from hetero.jobs import Job, Portable, Slice, Worker, hurried
from hetero.rehearse.disk import DryDisk
from hetero.rehearse.made import Made
from hetero.types import Lane, noop

UpdateSeconds = Callable[[int], float]


class DryJob(Job):
    """A job that is done when its time has come.

    Its slices are carried out at once when it begins, or when the last of those that may be carried
    is taken. A disk they wait for takes its time, during which their own work goes on.
    """

    __slots__ = ("_worker", "asked", "here", "numel", "until")

    def __init__(
        self,
        slices: Iterable[Slice],
        numel: int,
        worker: DryWorker,
        *,
        portable: Sequence[Portable],
        finish: Slice | None,
        after: Sequence[Job],
    ) -> None:
        last = [noop] * bool(portable)  # it is over when the worker says so
        super().__init__(
            [*slices, *last], portable=portable, finish=finish, after=after, clock=worker.clock
        )
        self.numel = numel
        self.asked = worker.clock()
        self.here: deque[int] = deque()
        """Elements of slices that HOST takes one by one, if others may be carried meanwhile."""
        self.until = 0.0
        """The end of the slices that were taken."""
        self._worker = worker
        if portable:
            size = max(each.numel for each in portable)
            left = numel - sum(each.numel for each in portable)
            self.here.extend(min(size, left - start) for start in range(0, left, size))

    @property
    def done(self) -> bool:
        return super().done and (self.ended or 0.0) <= self._clock()

    @property
    def last_numel(self) -> int:
        """The elements of the slice that a carrier takes next."""
        return self._portable[-1].numel

    def take(self) -> int:
        """Let HOST take a slice; returns its elements."""
        if self.here:
            return self.here.popleft()
        first = self._portable.popleft()
        self._slices.append(first.here)
        return first.numel

    def took(self, begin: float, end: float) -> None:
        """A slice was taken; after the last one it is carried out."""
        self.began = begin if self.began is None else self.began
        self.until = max(self.until, end)
        if not (self.here or self._portable):
            self._carry_out(self.began, self.until)

    def begin(self, begin: float) -> None:
        """Carry all of it out on HOST, from a time on."""
        self.began = begin
        self._carry_out(begin, begin + self._worker.update_seconds(self.numel))

    def _carry_out(self, begin: float, end: float) -> None:
        disk, self.ended = self._worker.disk, end
        at_disk = nullcontext() if disk is None else disk.at(begin)
        with without_modes(), self._worker.made, at_disk:
            super().settle()
            if disk is not None and disk.now() > end:
                self.ended = disk.now()

    def settle(self) -> None:
        self._worker.run_until(self)
        self._worker.device.pass_until(self.ended or 0.0)


class DryWorker(Worker):
    """Carries out one job after the other, on the device's clock, and carriers some slices.

    Args:
        update_seconds: of a step over so many parameters.
        disk: that slices may wait for.
        ram_seconds: in which RAM moves the bytes of such a step, wherever that is made: what HOST
            and carriers do at one time cannot be done sooner.
        made: results of updates, known from other rehearsals.
    """

    def __init__(
        self,
        device: DryDevice,
        update_seconds: UpdateSeconds,
        disk: DryDisk | None = None,
        *,
        ram_seconds: UpdateSeconds = lambda numel: 0.0,
        n_carriers: int = 0,
        made: Made | None = None,
    ) -> None:
        super().__init__(0, n_carriers=n_carriers)
        self.made = made or Made()
        self.device = device
        self.disk = disk
        self.clock = device.clock
        self.update_seconds = update_seconds
        self._ram_seconds = ram_seconds
        self._ram_free_at = 0.0
        self._jobs: deque[DryJob] = deque()
        self._free_at = 0.0
        self._carriers = [0.0] * n_carriers  # when each is free
        self._is_running = False
        device.time_passed = self.poll

    def job(
        self,
        slices: Iterable[Slice],
        numel: int,
        *,
        portable: Iterable[Portable] = (),
        finish: Slice | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        return DryJob(slices, numel, self, portable=[*portable], finish=finish, after=after)

    def submit(self, job: Job) -> Job:
        if isinstance(job, DryJob):
            self._jobs.append(job)
            self.poll()
        return job

    def hurry(self, jobs: Iterable[Job]) -> None:
        self._jobs = deque(hurried(self._jobs, jobs))

    def poll(self) -> None:
        """Begin what has its turn by now."""
        while self._jobs and not self._is_running and self._go_on(self.clock()):
            pass

    def run_until(self, job: DryJob) -> None:
        """Begin the jobs submitted up to one; if it never was submitted, it begins now."""
        while job in self._jobs and self._go_on(math.inf):
            pass
        if job.began is None:
            job.begin(self.clock())

    def _go_on(self, until: float) -> bool:
        """Let HOST or a carrier, whichever is free first, take what is next, if that is before a
        time; returns whether one did."""
        carried = next((job for job in self._jobs if job.is_portable), None)
        at_host = max(self._free_at, self._jobs[0].asked)
        at_carrier = math.inf
        if carried is not None and self._carriers:
            at_carrier = max(min(self._carriers), carried.asked)
        if min(at_host, at_carrier) > until:
            return False
        self._is_running = True
        try:
            if carried is None or at_host <= at_carrier:
                self._on_host(self._jobs[0], at_host)
            else:
                self._carry(carried, at_carrier)
        finally:
            self._is_running = False
        return True

    def _on_host(self, job: DryJob, begin: float) -> None:
        if not (job.here or job.is_portable):
            self._jobs.popleft()
            job.begin(begin)
            self._free_at = job.ended or 0.0
        else:
            numel = job.take()
            end = begin + self.update_seconds(numel)
            self._free_at = max(end, self._ram(begin, numel))
            self._took(job, begin, self._free_at)
        self.device.busy_until(Lane.UPDATE, self._free_at)

    def _carry(self, job: DryJob, begin: float) -> None:
        numel = job.last_numel
        with self.device.at(begin), without_modes(), self.made:
            job.help(carries=True)
            end = max(self.device.clock_seconds, self._ram(begin, numel))
        self._carriers[self._carriers.index(min(self._carriers))] = end
        self._took(job, begin, end)

    def _took(self, job: DryJob, begin: float, end: float) -> None:
        if not (job.here or job.is_portable):
            self._jobs.remove(job)
        job.took(begin, end)

    def _ram(self, begin: float, numel: int) -> float:
        """Return when RAM has moved the bytes of a slice that begins at a time."""
        self._ram_free_at = max(self._ram_free_at, begin) + self._ram_seconds(numel)
        return self._ram_free_at
