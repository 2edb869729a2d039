"""Shares torch's own threads among several updating threads (floor 0).

An operation of torch runs a team of OpenMP threads, one for each core. Two teams at once hinder
each other (measured: ten times slower), as do threads that move data (twice as slow). So if several
threads update, each stays on one core; only rules whose results depend on the number of threads
(sums over a tensor) use torch's team, one after another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(n_threads: int) -> Iterator[None]:
    """Let torch's operations use ``n_threads`` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Cores:
    """Turns at torch's threads, for updates on ``n_threads`` other than the launcher."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._alone = threading.Lock()
        self._limit = limiter() if n_threads else None

    @contextmanager
    def all(self, n_threads: int | None = None) -> Iterator[None]:
        """Let operations use every core, or ``n_threads``; one caller at a time."""
        with self._alone, self._counting(n_threads):
            yield

    @contextmanager
    def _counting(self, n_threads: int | None) -> Iterator[None]:
        """Let this thread's operations use ``n_threads``; None leaves them as they are."""
        before = torch.get_num_threads()
        if n_threads is None or n_threads == before:
            yield
            return
        count = self._limit or torch.set_num_threads
        count(n_threads)
        try:
            yield
        finally:
            count(before)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Keep this thread's operations on one core: for work with the same result on any cut."""
        if self._limit is None:
            with self.all():
                yield
            return
        before = torch.get_num_threads()
        self._limit(1)
        try:
            yield
        finally:
            self._limit(before)


def limiter() -> Callable[[int], None] | None:
    """Return a setter of torch's thread count for the calling thread; None if there is none.

    `torch.set_num_threads` also changes the count of every thread that starts later, including the
    user's. OpenMP's own call does not; check that torch obeys it.
    """
    try:
        limit = ctypes.PyDLL(None).omp_set_num_threads  # which keeps the interpreter meanwhile
    except (OSError, AttributeError):  # another runtime, or linked statically
        return None
    before = torch.get_num_threads()
    limit(before + 1)
    heard = torch.get_num_threads() == before + 1
    limit(before)
    return limit if heard and torch.get_num_threads() == before else None
