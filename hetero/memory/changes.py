"""Changes of a home that all ranks make to their shares of it (floor 1, mechanism).

Every rank makes the same changes. Each counts those that it has begun, and the others say how many
are done there: so a reader waits for slower ranks. Gradients of a bucket have a counter of their
own: a sum is made part by part while backward may still read the bucket's weights. A change begins
when no rank reads: an optimizer's after the roll call of its step, a user's after a meeting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hetero.device.comm import Comm, Node, standing_for
from hetero.events import EventLog
from hetero.memory.layout import Layout
from hetero.types import Kind


class Changes:
    """Of a home that this rank keeps alone."""

    __slots__ = ()

    @property
    def are_made(self) -> bool:
        """Whether other ranks have made the changes that this one has begun."""
        return True

    def wait(self) -> None:
        """Block until that is so; raises RankLost if it never will be."""

    def standing(self, log: EventLog) -> AbstractContextManager[None]:
        """Log the length of a block as a wait for other ranks."""
        return _NOTHING

    def begin(self) -> None:
        """This rank begins a change that all ranks make."""

    def end(self) -> None:
        """The change is made here; on any thread."""

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Let the user's code change the home inside a block, on all ranks."""
        return _NOTHING


class Sharing:
    """Whether homes have their first values, and no rank alone may change them."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False


class GatheredChanges(Changes):
    """Of homes whose shares ranks gather, all at the same time."""

    __slots__ = ("_comm", "_sharing")

    def __init__(self, comm: Comm, sharing: Sharing) -> None:
        self._comm = comm
        self._sharing = sharing

    def standing(self, log: EventLog) -> AbstractContextManager[None]:
        return standing_for(self._comm, log)

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        if not self._sharing.is_open:
            yield
            return
        self._comm.agree(b"", f"a write of {what}")
        self.begin()
        yield
        self.end()


class SharedChanges(GatheredChanges):
    """Of the homes of a counter, whose shares the ranks of a machine read from each other."""

    __slots__ = ("_counter", "_node")

    def __init__(self, comm: Comm, sharing: Sharing, node: Node, counter: int) -> None:
        super().__init__(comm, sharing)
        self._node = node
        self._counter = counter

    @property
    def are_made(self) -> bool:
        return self._node.is_current(self._counter)

    def wait(self) -> None:
        self._node.wait(self._counter)

    def begin(self) -> None:
        self._node.begin(self._counter)

    def end(self) -> None:
        self._node.changed(self._counter)


def counter_of(bucket: int, kind: Kind) -> int:
    """Return the number of a counter."""
    return 2 * bucket + (kind is Kind.GRAD)


def bucket_of(counter: int) -> int:
    return counter // 2


def count(layout: Layout) -> int:
    """Return how many counters there are."""
    return 2 * len(layout.buckets)


_NOTHING: AbstractContextManager[None] = nullcontext()
UNSEEN = Changes()
