"""Weights that compute reads at home (floor 1, mechanism).

[Note: read at home]  A home on the device has the very bytes that frames would have. Accesses of
units bind parameters there: nothing is copied, and no frame is taken. A write to them is a write to
the home, noticed once it is made. So a bucket is read in frames wherever a write may be undone or
has to wait: in `gathered` and other uses outside of units, and while a save has yet to read the
home. If its weights are written or seen outside of an access all the same, they are remembered as
they were, so that masters follow the weights that differ; and from then on frames it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from hetero.device import Device
from hetero.errors import BudgetError
from hetero.memory.arena import Arena
from hetero.memory.below import UNDO
from hetero.memory.chunk import CopyTable
from hetero.memory.homecopy import HomeCopy, HomeEvents
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket
from hetero.memory.replica import APART, Replica
from hetero.memory.shown import refresh
from hetero.types import CopyState


class CopySpace:
    """HBM for copies of weights at home, charged with the homes.

    Args:
        growing: entered while a copy is made; what gives way to it has done so then.
    """

    def __init__(
        self,
        store: HomeStore,
        device: Device,
        growing: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._device = device
        self._growing = growing

    def take(self, bucket: Bucket, weights: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy of a bucket's weights; OutOfMemory if there is none."""
        n_bytes = weights.nbytes
        with self._growing(n_bytes):
            self._store.charge_copy(bucket.id, n_bytes)
            try:
                return self._device.arena(n_bytes).carve(0, n_bytes).view(weights.dtype)
            except BaseException:
                self._store.credit_copy(bucket.id, n_bytes)
                raise

    def give_back(self, bucket: Bucket, copy: torch.Tensor) -> None:
        """Take a copy off the books, which the caller drops."""
        self._store.credit_copy(bucket.id, copy.nbytes)


class AtHome(Replica):
    """A bucket's weights where they are at home; ``n_bytes`` are charged there."""

    __slots__ = ("_space", "before")

    def __init__(
        self, bucket: Bucket, piece: torch.Tensor, table: CopyTable, space: CopySpace
    ) -> None:
        super().__init__(bucket, APART, piece, table)
        self._space = space
        self.before: torch.Tensor | None = None
        """The weights as they were when they were exposed."""

    @property
    def granules(self) -> int:
        return 0

    @property
    def n_bytes(self) -> int:
        return 0

    @property
    def used(self) -> torch.Tensor:
        """All elements of its parameters."""
        return self.flat[: self.bucket.segments[-1].end]

    def settle(self) -> None:
        super().settle()
        self.renew()

    def renew(self) -> None:
        """What differs from now on was written by the user's code, if it can be."""
        if not self.exposed:
            self.forget()
            return
        if self.before is None:
            self.before = self._space.take(self.bucket, self.used)
        self.before.copy_(self.used)

    def forget(self) -> None:
        """Give back the memory of the weights as they were."""
        if self.before is not None:
            self._space.give_back(self.bucket, self.before)
            self.before = None


class AtHomeBelow:
    """Keeps what is at home what replicas show: the two are one.

    Args:
        counts: the manager's.
        space: for weights as they were.
    """

    def __init__(
        self,
        copies: Sequence[HomeCopy],
        arena: Arena,
        device: Device,
        events: HomeEvents,
        counts: Counter[str],
        space: CopySpace,
    ) -> None:
        self._copies = copies
        self._space = space
        self._arena = arena
        self._device = device
        self._events = events
        self._counts = counts
        self._known: dict[int, AtHome] = {}  # by bucket
        self._written: set[int] = set()  # buckets that frames are for

    def serves(self, bucket_id: int) -> bool:
        """Whether an access may read a bucket at home."""
        is_readable = self._copies[bucket_id].home.is_readable
        return is_readable and not (bucket_id in self._written or self._events.saving(bucket_id))

    def stand(self, bucket_id: int) -> AtHome:
        """Return the home of a bucket as its replica; no update is under way."""
        copy, replica = self._copies[bucket_id], self._known.get(bucket_id)
        copy.check_digest()
        for ticket in copy.home.written_at:
            self._device.wait(ticket)
        if replica is None:
            with torch.no_grad():  # views of another mode are not written
                replica = AtHome(copy.bucket, copy.home.whole(), self._arena.table, self._space)
            self._known[bucket_id] = replica
        replica.move(CopyState.FILLING, "fetch")
        replica.move(CopyState.CLEAN, "ready")
        self._arena.stand(replica)
        return replica

    def leave(self, replica: AtHome) -> None:
        """Undo `stand`."""
        replica.forget()
        self._arena.leave(replica)

    def forget(self, bucket_id: int) -> None:
        """A home moves: its memory goes."""
        self._known.pop(bucket_id, None)

    def expose(self, replica: AtHome) -> None:
        """See [Note: read at home]."""
        self.written(replica)
        if not replica.exposed:
            replica.exposed = True
            try:
                replica.renew()
            except BudgetError:  # the next access tries again
                replica.exposed = False
                raise

    def written(self, replica: AtHome) -> None:
        """See [Note: read at home]."""
        self._events.writing(replica.bucket.id)
        self._written.add(replica.bucket.id)

    def flush(self, replica: AtHome, copy: HomeCopy) -> None:
        """Let masters, digests and copies follow the weights that were written."""
        if not replica.is_news:
            return
        self._events.writing(copy.bucket.id)
        self._events.wrote(copy.bucket, replica.before)
        replica.forget()
        if replica.dirty:
            replica.move(CopyState.FLUSHING, "flush")
            replica.move(CopyState.CLEAN, "ready")
        copy.home.rewritten()
        copy.note_digest()
        refresh(copy.home)
        self._counts["flush"] += 1

    def refetch(self, replica: AtHome, copy: HomeCopy) -> None:
        """Weights at home are new: what differs from these was written."""
        replica.renew()

    def undo(self, replica: AtHome, copy: HomeCopy) -> None:
        """Write back what was there when they were exposed."""
        if replica.before is not None:
            replica.used.copy_(replica.before)
        replica.move(CopyState.FILLING, UNDO if replica.dirty else "fetch")
        replica.move(CopyState.CLEAN, "ready")
        copy.home.rewritten()
