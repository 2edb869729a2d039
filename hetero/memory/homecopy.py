"""The manager's state of a bucket's parameters at home (floor 1, mechanism).

[Note: update tickets]  An optimizer's step hands homes over to work that goes on while the model
computes. A fetch or state dict that needs the bytes of such a home finishes its update first: it
waits for that work alone, and raises the work's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from hetero.device import Ticket
from hetero.errors import TransferError, too_early
from hetero.events import EventLog, What
from hetero.memory.chunk import CopyTable
from hetero.memory.extent import PinSpan, Request
from hetero.memory.home import Home, cut
from hetero.memory.layout import Bucket, Segment
from hetero.memory.nopool import NoPool
from hetero.memory.pool import Pool
from hetero.memory.shown import refresh
from hetero.types import CopyState, Tier


class Work(Protocol):
    """Something that rewrites a home (see [Note: update tickets])."""

    @property
    def done(self) -> bool:
        """Whether waiting would return, or raise, at once."""

    def wait(self) -> None:
        """Return when it is done; raises its error."""


class HomeEvents(NamedTuple):
    """Callbacks for what happens to parameters' homes."""

    writing: Callable[[int], None]
    """A user's writes are about to come to a bucket's home; returns when they may."""
    overwriting: Callable[[Bucket, int, int], Callable[[], None]]
    """Elements [start, end) at home are about to be overwritten; the result is called after."""
    written: Callable[[Segment], None]
    """A parameter was written at home, through a state dict."""
    wrote: Callable[[Bucket, torch.Tensor | None], None]
    """A bucket was written at home, where compute reads it. From its first element on it was as
    given; None: only parameters that were noted as written were."""
    saving: Callable[[int], bool]
    """Whether a save has yet to read a bucket's homes."""
    updated: Callable[[Bucket], None]
    """An update of a bucket is finished."""


class HomeCopy:
    """One home: its update under way, its versions in a state dict, its announced reads."""

    __slots__ = (
        *("_announced", "_checked", "_digest", "_pool", "_table"),
        *("bucket", "exposed", "home", "is_early", "reader", "unit", "update"),
    )

    def __init__(
        self,
        bucket: Bucket,
        home: Home,
        *,
        unit: str,
        table: CopyTable,
        pool: Pool | NoPool,
        checked: bool,
    ) -> None:
        self.bucket = bucket
        self.home = home
        self.unit = unit
        self.update: Any = None
        """The work that rewrites it now."""
        self.is_early = False  # whether that belongs to a step not made yet
        self.reader: Ticket | None = None
        """The last fetch from it, until an update has waited for it."""
        self._table = table
        self._pool = pool
        self._checked = checked
        self._announced: list[Request] | None = None  # read ahead for the next fetch
        self._digest: int | None = None
        self.exposed: tuple[int, ...] | None = None  # versions last seen of what a state dict shows

    def move(self, state: CopyState, why: str) -> None:
        """Change its state, or raise StateError."""
        self._table.transition(self.bucket.id, Tier.HOST, state, why)

    def rehome(self, home: Home) -> None:
        """Its bytes have moved to another home; no update is under way."""
        self.home = home
        self._announced = None
        if self._digest is None or not home.stays:  # slots on disk have digests of their own
            self.note_digest()

    # -- updates ---------------------------------------------------------------------------------

    def begin_update(self, work: Work) -> None:
        """Let ``work`` rewrite it."""
        self.move(CopyState.FILLING, "update")
        self.update = work

    def finish_update(self, log: EventLog) -> None:
        """Wait for its update, or raise StateError while that belongs to a step not made yet."""
        if self.is_early:
            raise too_early(f"the weights of unit {self.unit!r} are needed")
        if self.update.done:
            self.update.wait()  # raises its error
        else:
            with log.during(What.WAIT, bucket=self.bucket.id, why="update"):
                self.update.wait()
        self.end_update("ready")

    def end_update(self, why: str) -> None:
        """Take it back as the update left it."""
        self.update = None
        self.move(CopyState.CLEAN, why)
        self.home.rewritten()
        self.note_digest()

    # -- reading ahead ---------------------------------------------------------------------------

    def is_busy(self, *, resident: bool) -> bool:
        """Whether a fetch would wait for an update or the disk; begins to read ahead."""
        if self.update is not None and (self.is_early or not self.update.done):
            return True
        if not (resident or self.home.changes.are_made):
            return True
        if resident or self.home.stays:
            return False
        if self._announced is None:
            items = self.home.items(0, self.bucket.segments[-1].end)
            runs = cut(items.start, items.stop, self.home.extent_numel)
            self._announced = [Request([PinSpan(self.home, r.start, r.stop)]) for r in runs]
            self._pool.ahead(self._announced)
        return not all(map(self._pool.ready, self._announced))

    def fetched(self) -> None:
        """It is fetched now: announce the next fetch anew."""
        self._announced = None

    # -- exposure through state dicts ------------------------------------------------------------

    @property
    def is_shown(self) -> bool:
        """Whether a state dict shows its tensors, or copies of them."""
        return self.exposed is not None or bool(self.home.copies)

    def expose(self) -> None:
        """Its tensors are handed out: track their versions from now on."""
        self.exposed = self.home.views.versions

    def hide(self) -> None:
        """Stop tracking it if no state dict refers to it any more."""
        if self.exposed is not None and not self.home.views.held:
            self.exposed = None

    def changed(self) -> list[Segment]:
        """Return the segments written since their versions were last seen."""
        if self.exposed is None:
            return []
        now = zip(self.bucket.segments, self.exposed, self.home.views.versions, strict=True)
        return [segment for segment, then, later in now if then != later]

    def rewritten(self) -> None:
        """Its bytes changed: digest, copies and versions follow."""
        self.home.rewritten()
        self.note_digest()
        refresh(self.home)
        self.hide()
        if self.exposed is not None:
            self.expose()

    # -- digests ---------------------------------------------------------------------------------

    def note_digest(self) -> None:
        """Remember a digest of its bytes, if they are checked."""
        if self._checked:
            self._digest = self.home.crc()

    def check_digest(self) -> None:
        """Compare its bytes with the digest, unless it is exposed and may change unseen."""
        if self._digest is None or self.exposed is not None:
            return
        if self.home.crc() != self._digest:
            raise TransferError(
                f"the HOST home of bucket {self.bucket.id} changed, and hetero did not write it",
                advice="look for code that writes to memory it does not own",
                moves=self._table.moves(),
            )
