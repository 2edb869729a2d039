"""Replicas: the copies of parameters that compute reads (floor 1, mechanism).

[Note: leases]  A view of a weight can outlive its pin (``p.detach()`` kept by a logger, a unit that
returns ``latents.expand(...)``). Every replica has a storage of its own; its frames are reused only
when the storage's use count is back at its baseline. Until then they stay charged.

[Note: exposed bytes]  Writes through an alias that autograd does not count (``p.data.clamp_()``)
leave no trace. If a view of a replica outlives its access, the replica is *exposed*: it is always
flushed, before it is evicted and before its home is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetero.device import Ticket, use_count
from hetero.internals import storage_uses
from hetero.memory.chunk import CopyTable
from hetero.memory.layout import Bucket
from hetero.types import CopyState, Tier

APART = -1  # start of a replica with memory of its own


class Replica:
    """The contiguous HBM run of one bucket's PARAM chunks, with a prebuilt view per parameter.
    Fetches fill ``incoming`` (see [Note: decoded in place] in codec.py)."""

    __slots__ = (
        *("bucket", "start", "bytes", "incoming", "flat", "views", "cdata", "baseline"),
        *("pins", "stamp", "ready", "idle", "is_apart", "wire", "_table"),
        *("exposed", "seen", "dirty"),
    )

    def __init__(
        self,
        bucket: Bucket,
        start: int,
        piece: torch.Tensor,
        table: CopyTable,
        wire: torch.Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        self.start = start
        self.is_apart = start == APART  # with memory of its own, and no frames of the arena
        self.bytes = piece
        self.incoming = piece[piece.numel() - bucket.whole_bytes :]
        self.wire = (piece if wire is None else wire)[piece.numel() - bucket.whole_bytes :]
        """The same bytes under another storage: what moves them lets go late, like a lease."""
        self.flat = piece.view(bucket.dtype)
        self.views = [
            torch.as_strided(self.flat, s.spec.shape, s.spec.stride, s.offset)
            for s in bucket.segments
        ]
        self.cdata = piece.untyped_storage()._cdata
        self.pins = 0
        self.stamp = 0
        self.ready: Ticket | None = None
        self.idle: Ticket | None = None
        self.exposed = False
        self.seen: set[int] | None = None
        """While it is exposed, the positions of parameters whose memory is; None: of any."""
        self.dirty: set[int] = set()  # chunks written here
        self._table = table
        self.baseline = use_count(piece)

    @property
    def granules(self) -> int:
        """Frames that it takes, of the arena's size."""
        return self.bucket.granules

    @property
    def n_bytes(self) -> int:
        """Bytes of HBM that it takes."""
        return self.bucket.n_bytes

    @property
    def leased(self) -> bool:
        """Whether the user's code still holds a view; only meaningful while unbound."""
        # A fetch under way holds the frames too; the user has not seen its bytes yet.
        return self.ready is None and storage_uses(self.cdata) > self.baseline

    @property
    def may_leave(self) -> bool:
        """Whether it is neither pinned nor leased."""
        return not (self.pins or self.leased)

    @property
    def is_news(self) -> bool:
        """Whether it may hold bytes that its home does not."""
        return self.exposed or bool(self.dirty)

    @property
    def state(self) -> CopyState:
        return self._table.state(self.bucket.id, Tier.HBM)

    def aliases(self, n_bound: int) -> bool:
        """Whether the user's code holds a view while ``n_bound`` parameters are bound here."""
        return storage_uses(self.cdata) > self.baseline + n_bound

    def move(self, state: CopyState, why: str) -> None:
        """Change its state, or raise StateError; only DIRTY and FLUSHING keep dirty chunks."""
        self._table.transition(self.bucket.id, Tier.HBM, state, why)
        if state in (CopyState.ABSENT, CopyState.FILLING, CopyState.CLEAN):
            self.dirty.clear()

    def show(self, positions: Iterable[int] | None) -> None:
        """The user's code may hold the memory of some parameters; None: of any. It is `exposed`
        next."""
        before = self.seen if self.exposed else set()
        known = positions is not None and before is not None
        self.seen = {*(before or ()), *(positions or ())} if known else None

    @property
    def seen_runs(self) -> list[slice]:
        """The elements that may have been written without a trace."""
        segments = self.bucket.segments
        if self.seen is None:
            return [slice(0, segments[-1].end)]
        return [slice(segments[at].offset, segments[at].end) for at in sorted(self.seen)]

    def settle(self) -> None:
        """Its bytes are at home: only a lease still exposes them."""
        self.exposed = self.leased

    def write(self, start: int, end: int) -> None:
        """Note that elements [start, end) were written here."""
        chunks = self.bucket.chunks_of(start, end)
        if chunks:
            self.move(CopyState.DIRTY, "write")
            self.dirty.update(chunks)

    def dirty_runs(self) -> list[slice]:
        """Return the dirty chunks as runs of elements, so that neighbours move in one copy."""
        runs: list[slice] = []
        size = self.bucket.chunk_numel
        for chunk in sorted(self.dirty):
            start = (chunk - self.bucket.first_chunk) * size
            if runs and runs[-1].stop == start:
                start = runs.pop().start
            runs.append(slice(start, (chunk - self.bucket.first_chunk + 1) * size))
        return runs
