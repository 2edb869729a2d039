"""Threads that update homes while the model computes (floor 0).

A `Job` is work on one bucket, cut into slices that may run in parallel. Worker threads take jobs in
the order of submission, and a thread that waits for a job helps with its slices first. They never
touch the device: a job is submitted when its inputs have landed. Carriers do: threads that bring
slices to the device and back. Which slices they carry is decided by who is free first.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch

from hetero import interrupts
from hetero.errors import StorageError
from hetero.events import go_behind
from hetero.types import noop

Slice = Callable[[], None]


class Portable(NamedTuple):
    """A slice that may be carried to a device."""

    here: Slice
    carried: Slice
    """The same work there."""
    numel: int


class Job:
    """Slices of work, ``finish`` after the last of them, and the jobs that come before it.

    A slice that raises StorageError has changed nothing (it fails while reading its inputs) and
    stays to be done: the next waiter tries it again. So does one that a second Ctrl-C stopped. Any
    other error ends the job; without ``retries`` these do, too.
    """

    __slots__ = (
        *("_after", "_changed", "_clock", "_closed", "_error", "_finish", "_flushes", "_left"),
        *("_portable", "_retries", "_slices", "began", "ended", "then"),
    )

    def __init__(
        self,
        slices: Iterable[Slice],
        *,
        portable: Iterable[Portable] = (),
        finish: Slice | None = None,
        after: Sequence[Job] = (),
        clock: Callable[[], float] = time.monotonic,
        retries: bool = True,
        keeps_denormals: bool = False,
    ) -> None:
        self._clock = clock
        self._retries = retries
        self._flushes = not keeps_denormals and flushes_denormals()  # as on the submitting thread
        self.began: float | None = None
        """When its first slice began, in seconds of ``clock``."""
        self.ended: float | None = None
        """When it was done, or had failed."""
        self.then: Callable[[Job], None] | None = None
        """Called when it is done, unless it failed."""
        self._slices = deque(slices)
        self._portable = deque(portable)
        self._left = len(self._slices) + len(self._portable)
        self._finish = finish
        self._after = tuple(after)
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._closed = False
        self._changed = threading.Condition()
        if not self._left:
            self._slices.append(noop)
            self._left = 1

    @property
    def done(self) -> bool:
        """Whether it is done, or has failed."""
        return self._closed

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def is_portable(self) -> bool:
        """Whether a slice is left that a carrier may take."""
        return bool(self._portable)

    def help(self, *, carries: bool = False) -> bool:
        """Do one slice; False if none is left to begin, or it cannot be done now. Who ``carries``
        takes one that may be carried, the last one first."""
        try:
            return self._do_one(carries=carries)
        except StorageError:  # a waiter tries again, and gets the error
            return False

    def _take(self, *, carries: bool) -> tuple[Slice, Slice] | None:
        """Take a slice; return it, and what puts it back. None if none is left."""
        if self._slices and not carries:
            work = self._slices.popleft()
            return work, partial(self._slices.appendleft, work)
        if not self._portable:
            return None
        if carries:
            last = self._portable.pop()
            return last.carried, partial(self._portable.append, last)
        first = self._portable.popleft()
        return first.here, partial(self._portable.appendleft, first)

    def _do_one(self, *, carries: bool = False) -> bool:
        """Do one slice; False if none is left. After StorageError or Ctrl-C it is still to do."""
        with self._changed:
            taken = self._take(carries=carries)
            if taken is None:
                return False
            work, put_back = taken
            if self.began is None:
                self.began = self._clock()
        try:
            for job in self._after:
                job.wait()
            with self._modes():
                work()
                put_back = partial(self._slices.appendleft, noop)  # only the finish, if it fails
                del work, taken  # a waiter may count the memory of what they copy, once it is done
                self._complete()
        except (StorageError, KeyboardInterrupt) as error:
            if not self._retries:
                self.fail(error)
                if isinstance(error, KeyboardInterrupt):
                    raise
                return True
            with self._changed:
                put_back()
                self._changed.notify_all()
            raise
        except BaseException as error:
            self.fail(error)
        return True

    def _modes(self) -> AbstractContextManager[object]:
        """Return the modes in which slices run; a thread of ours mostly is in them."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return _updating(self._flushes)
        return _NOTHING if flushes_denormals() == self._flushes else flushing(self._flushes)

    def _complete(self) -> None:
        with self._changed:
            last = self._left == 1
            if not last:
                self._left -= 1
        if last:
            if self._finish is not None:
                self._finish()
            self._close()

    def fail(self, error: BaseException) -> None:
        """Give up: no further slice begins, and every `wait` raises ``error``."""
        with self._changed:
            if self._error is None:
                # the traceback as raised, without waiters' frames
                self._error = error, error.__traceback__
            self._slices.clear()
            self._portable.clear()
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._finish, self._after = None, ()
            if self.ended is None:
                self.ended = self._clock()
            self._closed = True
            self._changed.notify_all()
        then, self.then = self.then, None
        if then is not None and self._error is None:
            then(self)

    def settle(self) -> None:
        """Help until the job is done or has failed; raises the errors of `_do_one`. A slice that
        failed on another thread is tried again here: its drive may work by now."""
        while not self._closed:
            while self._do_one():
                interrupts.point(2)
            with self._changed:
                interrupts.wait(self._changed, self._may_go_on)

    def _may_go_on(self) -> bool:
        return self._closed or bool(self._slices or self._portable)

    def wait(self) -> None:
        """Help until the job is done; raises its error, if it failed."""
        self.settle()
        if self._error is not None:
            error, trace = self._error
            raise error.with_traceback(trace)


J = TypeVar("J", bound=Job)

_DENORMAL = 5e-324


def flushes_denormals() -> bool:
    """Whether this thread takes denormals for zero: torch can set that, but not tell."""
    return _DENORMAL == 0.0


@contextmanager
def flushing(flush: bool) -> Iterator[None]:
    """Set in a block whether denormals count as zero: `torch.set_flush_denormal` is per thread."""
    before = flushes_denormals()
    if before == flush:
        yield
        return
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def _updating(flush: bool) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), flushing(flush):
        yield


_NOTHING = nullcontext()


class _Queue:
    """The threads' queue: they must not keep their Worker alive."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self.jobs: list[Job] = []
        self.portable: list[Job] = []  # those of which carriers may take slices
        self.changed = threading.Condition()
        self.closed = False
        self.pick = pick

    def add(self, job: Job) -> None:
        """Let threads, and carriers if they may, help with a job."""
        with self.changed:
            self.jobs.append(job)
            if job.is_portable:
                self.portable.append(job)
            self.changed.notify_all()

    def next(self, *, carries: bool) -> Job | None:
        """Wait for a job to help with; None when it is time to end."""
        jobs = self.portable if carries else self.jobs
        with self.changed:
            while not jobs and not self.closed:
                self.changed.wait()
            return jobs[self.pick(len(jobs))] if jobs else None

    def drop(self, job: Job, *, carries: bool) -> None:
        """Remove a job: all its slices have begun."""
        jobs = self.portable if carries else self.jobs
        with self.changed:
            if job in jobs:
                jobs.remove(job)

    def hurry(self, first: Iterable[Job]) -> None:
        """Put these jobs first, in this order, of those that are queued."""
        first = [*first]
        with self.changed:
            for jobs in (self.jobs, self.portable):
                jobs[:] = hurried(jobs, first)

    def clear(self) -> None:
        """Leave the rest to waiters."""
        self.jobs.clear()
        self.portable.clear()


class Worker:
    """Runs jobs on ``n_threads`` threads, which start with the first job.

    Args:
        n_threads: 0 runs every job in `submit`.
        n_carriers: more threads, which carry slices that may be carried.
        pick: which of n waiting jobs a thread helps with next (tests reorder here).
    """

    def __init__(
        self, n_threads: int, *, n_carriers: int = 0, pick: Callable[[int], int] = lambda n: 0
    ) -> None:
        self.n_threads = n_threads
        self.n_carriers = n_carriers
        self.clock: Callable[[], float] = time.monotonic
        """For jobs' begin and end."""
        self.keeps_denormals = False
        """Whether `torch.set_flush_denormal` is left out: it is of the CPU, and where a device
        computes its kernels keep denormals, so that bits would depend on where homes lie."""
        self._queue = _Queue(pick)
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._watches_forks = False
        self._at_exit = _if_alive(weakref.ref(self), Worker.close)

    def job(
        self,
        slices: Iterable[Slice],
        numel: int,
        *,
        portable: Iterable[Portable] = (),
        finish: Slice | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        """Return a job over ``numel`` elements, to be submitted or done by its first waiter."""
        return Job(
            slices,
            portable=portable,
            finish=finish,
            after=after,
            clock=self.clock,
            keeps_denormals=self.keeps_denormals,
        )

    def submit(self, job: Job) -> Job:
        """Queue a job; it is done before `Job.wait` returns."""
        if self.n_threads == 0 or self._pid != os.getpid():  # threads do not survive a fork
            while job.help():
                pass
            return job
        if not self._threads:
            self._start()
        self._queue.add(job)
        return job

    def hurry(self, jobs: Iterable[Job]) -> None:
        """Let threads take these jobs first, in this order, of those that are queued."""
        self._queue.hurry(jobs)

    def _start(self) -> None:
        for number in range(self.n_threads + self.n_carriers):
            carries = number >= self.n_threads
            thread = threading.Thread(
                target=_loop,
                args=(self._queue, carries),
                name=f"hetero-{'carry' if carries else 'update'}-{number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
            _STARTED.add(thread)
        atexit.register(self._at_exit)
        if hasattr(os, "register_at_fork") and not self._watches_forks:
            # A child has no threads: a slice under way would never be done there.
            os.register_at_fork(before=_if_alive(weakref.ref(self), Worker.rest))
            self._watches_forks = True

    def rest(self) -> None:
        """Wait until every submitted job is done, or has failed."""
        with self._queue.changed:
            jobs = [*self._queue.jobs, *self._queue.portable]
        for job in jobs:
            with suppress(StorageError):  # none of its slices is under way then
                job.settle()

    def close(self) -> None:
        """End the threads; they finish slices under way, and leave the rest to waiters."""
        if self._pid != os.getpid():
            return  # a forked child: the threads, and perhaps a lock, are the parent's
        with self._queue.changed:
            self._queue.clear()
            self._queue.closed = True
            self._queue.changed.notify_all()
        for thread in self._threads:
            interrupts.join(thread)
        self._threads.clear()
        self._queue.closed = False
        atexit.unregister(self._at_exit)

    def __del__(self) -> None:
        # Not joined: garbage collection may run on one of these very threads.
        if self._pid != os.getpid():
            return
        with self._queue.changed:
            self._queue.closed = True
            self._queue.changed.notify_all()
        atexit.unregister(self._at_exit)


def hurried(queued: Iterable[J], jobs: Iterable[Job]) -> list[J]:
    """Return queued jobs with ``jobs`` first, in their order, after those that have begun."""
    places = {id(job): place for place, job in enumerate(jobs)}
    return sorted(
        queued, key=lambda job: places.get(id(job), len(places)) if job.began is None else -1
    )


def thread_budget(n_local: int = 1) -> int:
    """Return the number of updating threads: the process's cores but one, for the launcher.

    ``n_local`` processes like this one divide the cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // n_local - 1)


def _if_alive(worker: weakref.ref[Worker], act: Callable[[Worker], None]) -> Callable[[], None]:
    """Return a call for the interpreter's callback lists, which must not keep a worker alive."""

    def call() -> None:
        found = worker()
        if found is not None:
            act(found)

    return call


_STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Wait for threads of workers that are gone, which finish what is under way.

    A thread inside torch while the interpreter ends would abort the process.
    """
    for thread in list(_STARTED):
        interrupts.join(thread)


def _loop(queue: _Queue, carries: bool) -> None:
    go_behind()
    torch.set_grad_enabled(False)  # of this thread
    while (job := queue.next(carries=carries)) is not None:
        if not job.help(carries=carries):
            queue.drop(job, carries=carries)
        del job  # its references go now, not when the next job comes
