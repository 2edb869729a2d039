"""Updates on a dry device: they take time, and that is all (floor 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.utils._python_dispatch import _disable_current_modes

from hetero.dry import DryDevice
from hetero.train.worker import Job, Slice, Worker

UpdateSeconds = Callable[[int], float]


class DryJob(Job):
    """A job that is carried out at once, and is done when its time has come."""

    __slots__ = ("_device", "seconds")

    def __init__(
        self,
        slices: Iterable[Slice],
        seconds: float,
        device: DryDevice,
        *,
        finish: Slice | None,
        after: Sequence[Job],
    ) -> None:
        super().__init__(slices, finish=finish, after=after, clock=device.clock)
        self.seconds = seconds
        self._device = device

    @property
    def done(self) -> bool:
        return super().done and (self.ended or 0.0) <= self._device.clock()

    def begin(self, seconds: float) -> None:
        """Begin at a time of the device's clock, and be carried out; it may still take long."""
        self.began, self.ended = seconds, seconds + self.seconds
        with _disable_current_modes():
            super().settle()

    def settle(self) -> None:
        if self.began is None:
            self.begin(self._device.clock())
        self._device.pass_until(self.ended or 0.0)
        super().settle()


class DryWorker(Worker):
    """Carries out one job behind the other, on the device's clock.

    Args:
        update_seconds: of a step over so many parameters.
    """

    def __init__(self, device: DryDevice, update_seconds: UpdateSeconds) -> None:
        super().__init__(0)
        self._device = device
        self._update_seconds = update_seconds
        self._free_at = 0.0

    def job(
        self,
        slices: Iterable[Slice],
        numel: int,
        *,
        finish: Slice | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        seconds = self._update_seconds(numel)
        return DryJob(slices, seconds, self._device, finish=finish, after=after)

    def submit(self, job: Job) -> Job:
        if isinstance(job, DryJob):
            job.begin(max(self._free_at, self._device.clock()))
            self._free_at = job.ended or 0.0
        return job
