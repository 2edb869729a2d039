"""Threads that update homes while the model computes (floor 0).

A `Job` is work on one bucket, cut into slices that may run in parallel. Worker threads take jobs in
the order of submission, and a thread that waits for a job helps with its slices first. Workers
never touch the device: a job is submitted when its inputs have landed.
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
from types import TracebackType
from typing import TypeVar

import torch

from hetero import interrupts
from hetero.errors import StorageError
from hetero.events import go_behind
from hetero.types import noop

Slice = Callable[[], None]


class Job:
    """Slices of work, ``finish`` after the last of them, and the jobs that come before it.

    A slice that raises StorageError has changed nothing (it fails while reading its inputs) and
    stays to be done: the next waiter tries it again. So does one that a second Ctrl-C stopped. Any
    other error ends the job; without ``retries`` these do, too.
    """

    __slots__ = (
        *("_after", "_changed", "_clock", "_closed", "_error", "_finish", "_flushes", "_left"),
        *("_retries", "_slices", "began", "ended", "then"),
    )

    def __init__(
        self,
        slices: Iterable[Slice],
        *,
        finish: Slice | None = None,
        after: Sequence[Job] = (),
        clock: Callable[[], float] = time.monotonic,
        retries: bool = True,
    ) -> None:
        self._clock = clock
        self._retries = retries
        self._flushes = flushes_denormals()  # as on the submitting thread
        self.began: float | None = None
        """When its first slice began, in seconds of ``clock``."""
        self.ended: float | None = None
        """When it was done, or had failed."""
        self.then: Callable[[Job], None] | None = None
        """Called when it is done, unless it failed."""
        self._slices = deque(slices)
        self._left = len(self._slices)
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

    def help(self) -> bool:
        """Do one slice; False if none is left to begin, or it cannot be done now."""
        try:
            return self._do_one()
        except StorageError:  # a waiter tries again, and gets the error
            return False

    def _do_one(self) -> bool:
        """Do one slice; False if none is left. After StorageError or Ctrl-C it is still to do."""
        with self._changed:
            if not self._slices:
                return False
            work = self._slices.popleft()
            if self.began is None:
                self.began = self._clock()
        try:
            for job in self._after:
                job.wait()
            with self._modes():
                work()
                work = noop  # not again, should the finish fail
                self._complete()
        except (StorageError, KeyboardInterrupt) as error:
            if not self._retries:
                self.fail(error)
                if isinstance(error, KeyboardInterrupt):
                    raise
                return True
            with self._changed:
                self._slices.appendleft(work)
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
                interrupts.wait(self._changed, lambda: self._closed or bool(self._slices))

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
        self.changed = threading.Condition()
        self.closed = False
        self.pick = pick

    def next(self) -> Job | None:
        """Wait for a job to help with; None when it is time to end."""
        with self.changed:
            while not self.jobs and not self.closed:
                self.changed.wait()
            return self.jobs[self.pick(len(self.jobs))] if self.jobs else None

    def drop(self, job: Job) -> None:
        """Remove a job: all its slices have begun."""
        with self.changed:
            if job in self.jobs:
                self.jobs.remove(job)


class Worker:
    """Runs jobs on ``n_threads`` threads, which start with the first job.

    Args:
        n_threads: 0 runs every job in `submit`.
        pick: which of n waiting jobs a thread helps with next (tests reorder here).
    """

    def __init__(self, n_threads: int, *, pick: Callable[[int], int] = lambda n: 0) -> None:
        self.n_threads = n_threads
        self.clock: Callable[[], float] = time.monotonic
        """For jobs' begin and end."""
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
        finish: Slice | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        """Return a job over ``numel`` elements, to be submitted or done by its first waiter."""
        return Job(slices, finish=finish, after=after, clock=self.clock)

    def submit(self, job: Job) -> Job:
        """Queue a job; it is done before `Job.wait` returns."""
        if self.n_threads == 0 or self._pid != os.getpid():  # threads do not survive a fork
            while job.help():
                pass
            return job
        if not self._threads:
            self._start()
        with self._queue.changed:
            self._queue.jobs.append(job)
            self._queue.changed.notify_all()
        return job

    def hurry(self, jobs: Iterable[Job]) -> None:
        """Let threads take these jobs first, in this order, of those that are queued."""
        with self._queue.changed:
            self._queue.jobs = hurried(self._queue.jobs, jobs)

    def _start(self) -> None:
        for number in range(self.n_threads):
            thread = threading.Thread(
                target=_loop, args=(self._queue,), name=f"hetero-update-{number}", daemon=True
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
            jobs = list(self._queue.jobs)
        for job in jobs:
            with suppress(StorageError):  # none of its slices is under way then
                job.settle()

    def close(self) -> None:
        """End the threads; they finish slices under way, and leave the rest to waiters."""
        if self._pid != os.getpid():
            return  # a forked child: the threads, and perhaps a lock, are the parent's
        with self._queue.changed:
            self._queue.jobs.clear()
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


def _loop(queue: _Queue) -> None:
    go_behind()
    torch.set_grad_enabled(False)  # of this thread
    while (job := queue.next()) is not None:
        if not job.help():
            queue.drop(job)
        del job  # its references go now, not when the next job comes
