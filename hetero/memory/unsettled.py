"""Weights that ranks have written, and that are not at home yet (floor 1, mechanism).

[Note: settled writes]  Ranks change a home together: each waits until all are about to. When a
replica is evicted is each rank's own matter, so no such change may wait for that. A write of
weights comes home where the program makes it: at the end of the access in which it was noticed. A
replica that is exposed is compared with its home there, or at the next access; while the user's
code holds a view of it, also at the first access without one. In between no other change begins, so
all ranks make the same ones in the same order, also where one of them reads, evaluates or evicts on
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetero.memory.layout import Layout
from hetero.memory.replica import Replica


class Unsettled:
    """The replicas that may hold bytes of which the homes, shared by ranks, have none."""

    __slots__ = ("_is_shared", "_new", "_of")

    def __init__(self, layout: Layout) -> None:
        self._is_shared = layout.is_shared
        self._of: set[int] = set()  # buckets
        self._new: set[int] = set()  # those that no later access has looked at

    def add(self, bucket_id: int) -> None:
        """A replica was written or exposed."""
        if self._is_shared:
            self._of.add(bucket_id)
            self._new.add(bucket_id)

    def due(self, replicas: Mapping[int, Replica], *, ended: bool) -> Iterator[int]:
        """Yield the buckets to be flushed where an access has ``ended``, or another one begins, in
        the same order on all ranks."""
        for bucket_id in sorted(self._of):
            is_new = bucket_id in self._new and not ended
            replica = replicas.get(bucket_id)
            if replica is not None and (is_new or replica.dirty or replica.may_leave):
                self._new.discard(bucket_id)
                yield bucket_id
                replica = replicas.get(bucket_id)
            if replica is None or not replica.is_news:
                self._new.discard(bucket_id)
                self._of.discard(bucket_id)
