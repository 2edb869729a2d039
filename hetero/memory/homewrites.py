"""What the user's code writes to homes through state dicts (floor 1, mechanism)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetero.device import Ticket
from hetero.errors import ConfigError, StateError
from hetero.memory import shown
from hetero.memory.below import LocalBelow
from hetero.memory.homecopy import HomeCopy, HomeEvents
from hetero.memory.replica import Replica


class HomeWrites:
    """Finds such writes, and lets replicas and masters follow them.

    Args:
        mark: of compute, after which replicas may be overwritten.
        flush: brings what was written to a replica home.
        finish_update: waits for the update of a bucket.
        refresh: lets the replica of a bucket show what is at home.
    """

    def __init__(
        self,
        copies: Sequence[HomeCopy],
        replicas: Mapping[int, Replica],
        below: LocalBelow,
        events: HomeEvents,
        *,
        mark: Callable[[], Ticket],
        flush: Callable[[Replica, HomeCopy], None],
        finish_update: Callable[[int], None],
        refresh: Callable[[int], None],
    ) -> None:
        self._copies = copies
        self._replicas = replicas
        self._below = below
        self._events = events
        self._mark = mark
        self._flush = flush
        self._finish_update = finish_update
        self._refresh = refresh

    def adopt_all(self, *, held: bool = True) -> None:
        """Take the writes to homes through state dicts. Without ``held``, take only those to copies
        no longer held, and drop these copies."""
        for copy in self._copies:
            if held and copy.exposed is not None and copy.update is None:
                self.adopt(copy.bucket.id)
        for copy in self._copies:
            self.adopt_copies(copy.bucket.id, held=held)

    def adopt(self, bucket_id: int) -> None:
        """Drop a replica whose home was written through a tensor of a state dict."""
        self.adopt_copies(bucket_id)
        copy = self._copies[bucket_id]
        if copy.exposed is None:
            return
        self._finish_update(bucket_id)
        if not copy.changed():
            return
        replica = self._replicas.get(bucket_id)
        if replica is not None and replica.is_news:
            self._below.merge_writes(replica, copy)
        for segment in copy.changed():
            self._events.written(segment)
        self._refresh(bucket_id)

    def adopt_copies(self, bucket_id: int, *, held: bool = True) -> None:
        """Take the writes to copies of a home (see [Note: copies that are shown])."""
        copy = self._copies[bucket_id]
        if not copy.home.copies or copy.update is not None:
            return
        written = shown.written(copy.home, held=held)
        if not written:
            return
        self._events.writing(bucket_id)
        replica = self._replicas.get(bucket_id)
        if replica is not None and replica.is_news:
            self._below.wait_fetch(replica)
            self._flush(replica, copy)  # the other segments: these are overwritten
        try:
            for segment in written:
                shown.take(copy.home, segment)
                self._events.written(segment)
        except ConfigError as error:
            raise StateError(str(error), advice=error.advice) from None
        finally:
            self._refresh(bucket_id)

    def fetch_unseen(self, bucket_id: int) -> None:
        """Fetch a replica again if a state dict shows its home, or did since the last fetch. Writes
        by numpy or through ``.data`` move no version."""
        copy = self._copies[bucket_id]
        if copy.exposed is None:
            return
        self._finish_update(bucket_id)
        copy.note_digest()
        copy.hide()  # the last time, if no state dict refers to it
        replica = self._replicas.get(bucket_id)
        if replica is not None and replica.may_leave and not replica.is_news:
            self._below.wait_fetch(replica)
            self._below.fetch(replica, copy, (self._mark(),), "refresh")
