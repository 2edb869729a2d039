"""Waits for calls that ranks make together, as polls with a deadline (floor 3).

gloo wakes a waiting thread only when the peer answers or the group's own timeout passes; NCCL makes
a stream wait, and a thread that waits for that stream waits as long as the device does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from hetero import interrupts
from hetero.errors import RankLost
from hetero.parallel.farewell import Parting, reason_of
from hetero.parallel.news import HEARING_SECONDS, Left, News

POLL_SECONDS = (0.0, 0.0, 0.0001, 0.001)
"""Between looks at a call that is under way, as many of each as `LOOKS`; the last one repeats."""
LOOKS = 64
"""With one pause, and between looks whether a rank has said that it failed."""

TIMED_OUT = "Timed out"
"""In gloo's errors of calls that took longer than their group's timeout."""


class Waits:
    """Waits for calls under way: looks again and again whether one is over.

    A rank that is lost is lost for good: from then on each wait says so.

    Args:
        timeout_seconds: after which a rank that does not answer is lost.
        patience_seconds: for one that says that it failed, to answer all the same.
        pauses_seconds: see `POLL_SECONDS`.
    """

    def __init__(
        self,
        news: News,
        timeout_seconds: float,
        *,
        patience_seconds: float = HEARING_SECONDS,
        pauses_seconds: Sequence[float] = POLL_SECONDS,
    ) -> None:
        self.members, self.size = news.members, news.size
        self.timeout_seconds = timeout_seconds
        self.communicators: list[dist.ProcessGroup] = []
        """Aborted when a rank is lost: what they run on a device would never end."""
        self._news = news
        self._patience = patience_seconds
        self._pauses = pauses_seconds
        self._losing = threading.Lock()
        self._loss: tuple[str, Left] | None = None

    def until(self, work: dist.Work, what: str) -> None:
        """Block until a call is over; raises RankLost if it never will be."""
        began = time.monotonic()
        self.poll(work.is_completed, what)
        self.finish(work, what, began)

    def poll(self, is_over: Callable[[], bool], what: str) -> None:
        """Block until a call is over, by its own account; raises RankLost as `until`."""
        began, looks = time.monotonic(), 0
        while not is_over():
            self.check()
            looks += 1
            failed = None if looks % LOOKS else self._news.overdue(self._patience)
            if failed is not None:
                raise self.lose(what, failed)
            if time.monotonic() - began > self.timeout_seconds:
                raise self.lose(what, self.late())
            interrupts.point(2)
            time.sleep(self._pauses[min(looks // LOOKS, len(self._pauses) - 1)])

    def finish(self, work: dist.Work, what: str, began: float | None = None) -> None:
        """Block inside torch until a call is over, at most for its group's timeout: nothing else
        ends that wait. Raises RankLost as `until` does, which ``began`` before."""
        began = time.monotonic() if began is None else began
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failed(error, what, began) from None

    def failed(self, error: RuntimeError, what: str, began: float) -> RankLost:
        """Return what the caller of a failed call raises; the wait for it ``began`` then."""
        if TIMED_OUT in str(error):  # gloo's own clock, which began with the call, was first
            return self.lose(what, self.late())
        why = f"lost a connection ({reason_of(error)})"
        broken = Left(Parting.SILENT, self._news.rank, why)
        left = self.timeout_seconds - (time.monotonic() - began)
        return self.lose(what, self._news.cause(broken, min(HEARING_SECONDS, left)))

    def explained(self, error: RuntimeError, what: str, began: float) -> RankLost | None:
        """Return what the caller of torch's own code raises in place of its error, if a rank has
        left, or did not answer within the time limit of its group; the wait ``began`` then."""
        if TIMED_OUT in str(error):
            return self.failed(error, what, began)
        unknown = Left(Parting.SILENT, -1, "")
        left = self._news.cause(unknown, HEARING_SECONDS)
        return None if left is unknown else self.lose(what, left)

    def late(self) -> Left:
        """Return the cause of a wait that is too long; without one, as much as is known of it."""
        news, seconds = self._news, f"{self.timeout_seconds:.0f} s"
        late = Left(Parting.SILENT, news.rank, f"had no answer for {seconds}")
        if self.size == 2:
            other = self.members.ranks[1 - news.number]
            late = Left(Parting.SILENT, other, f"said nothing for {seconds}")
        return self._news.known() or late

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self._loss is not None:
            raise self._news.lost(*self._loss)

    def lose(self, what: str, left: Left) -> RankLost:
        """Note that a rank is lost; return what the caller raises. On any thread."""
        with self._losing:
            first, self._loss = self._loss is None, self._loss or (what, left)
        if first:
            for group in self.communicators:
                group.abort()
        return self._news.lost(what, left)
