"""Addends of all ranks, exchanged bucket by bucket and summed in the order of ranks (floor 2).

Every backward pass exchanges every trainable bucket once, in one order on all ranks: a bucket
leaves when this rank's gradients of it are complete, or when the pass is over. The ranks tell each
other which gradients they have; one that no rank has stays None, and a bucket without any is left
out.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hetero.cores import Cores
from hetero.device import Device
from hetero.device.comm import Comm, standing_for
from hetero.errors import DivergenceError, RankLost, StateError
from hetero.memory.extent import overlap
from hetero.memory.home import Home
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.link import Link
from hetero.train.gradients.crossing import Crossing, Crossings, Load, Sources
from hetero.train.gradients.device_sums import SumSpace
from hetero.train.gradients.rank_sums import Sum
from hetero.train.gradients.ring import GradRing

MOST_ASKED = 8  # passes: some buckets may never get a gradient
Open = Callable[[Segment], bool]
"""Prepares a gradient for a sum; returns whether it adds to an earlier one."""


class Exchange:
    """Sends this rank's addends to the owners of their shares, and sums those of its own.

    Args:
        ring: bounds the addends that are held on the device until they have left.
        space: for sums at homes on the device.
        expected: returns the positions of a bucket's segments whose gradients a pass makes.
        opens: see `Open`; called for each gradient that any rank has.
        closed: called with it when its sum is at home.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        *,
        device: Device,
        link: Link,
        ring: GradRing,
        cores: Cores,
        space: SumSpace,
        home: Callable[[Bucket], Home],
        expected: Callable[[Bucket], set[int]],
        is_summed: Callable[[Segment], bool],
        opens: Open,
        closed: Callable[[Segment], None],
    ) -> None:
        self.unscale = 1.0
        self._layout = layout
        self._comm = comm
        self._has_bytes = device.has_bytes
        self._link = link
        self._ring = ring
        self._home = home
        self._expected = expected
        self._is_summed = is_summed
        self._opens = opens
        self._closed = closed
        # as backward comes to them if units were registered as they are called
        self._order = [b for b in reversed(layout.buckets) if b.trainable]
        self._completed: list[int] | None = []  # buckets of this pass, until an order is known
        self._n_asked = 0  # passes of which the order was asked
        self._next = 0
        self._addends: dict[int, dict[int, torch.Tensor]] = {b.id: {} for b in self._order}
        self._exchanged: set[int] = set()  # buckets of this pass
        self._crossings = Crossings(comm, device, link, cores, space)
        self._crossing: deque[tuple[Crossing, list[Segment]]] = deque()
        """Buckets under way, with the gradients that any rank has."""
        self._torn: set[int] = set()
        """Buckets of which this rank's sums failed: others may not read them."""

    def add(self, segment: Segment, grad: torch.Tensor) -> None:
        """Take an addend of this rank's, in the parameter's own strides."""
        bucket = self._layout.bucket(segment)
        if bucket.id in self._exchanged:
            raise StateError(
                f"a gradient of {segment.spec.name!r} comes after those of its bucket were summed"
                " over ranks",
                advice="use one backward pass for each micro-batch",
            )
        if bucket.id not in self._addends:
            raise StateError(
                f"{segment.spec.name!r} was frozen when the model was prepared, and its gradients"
                " are not summed over ranks",
                advice="on all ranks, hetero.release the model, thaw it, and prepare it again; or"
                " prepare it before it is frozen",
            )
        known = self._addends[bucket.id]
        before = known.get(segment.position)
        known[segment.position] = grad if before is None else before.add_(grad)
        if self._completed is not None and self._expected(bucket) <= known.keys():
            self._completed.append(bucket.id)

    def advance(self) -> None:
        """Begin the exchanges that are due."""
        while self._next < len(self._order):
            bucket = self._order[self._next]
            expected = self._expected(bucket)
            if not (expected and expected <= self._addends[bucket.id].keys()):
                return
            self._begin(bucket)

    def finish_pass(self) -> None:
        """Exchange what is left of a pass; all sums are at home then."""
        while self._next < len(self._order):
            self._begin(self._order[self._next])
        while self._crossing:
            self._finish_oldest()
        self._ring.poll()
        self.clear()
        self._learn()

    def _learn(self) -> None:
        """From the first pass on keep to the order in which the first rank completed buckets: one
        that comes late holds up all that follow it, whose addends stay on the device meanwhile.

        A pass in which that rank left out some says nothing of their place: the next one is asked,
        a few times. What it never completes goes last.
        """
        if self._completed is None:
            return
        mine = pickle.dumps(self._completed)
        told = pickle.loads(self._comm.agree(mine, "the order of gradients")[0])
        places = {bucket: place for place, bucket in reversed(list(enumerate(told)))}
        self._n_asked += 1
        if self._n_asked < MOST_ASKED and any(b.id not in places for b in self._order):
            self._completed = []
            return
        self._completed = None
        self._order.sort(key=lambda bucket: places.get(bucket.id, len(told)))

    def settle(self, bucket: Bucket) -> None:
        """Wait for the sums of a bucket that are being made: its homes may move then."""
        while any(crossing.bucket is bucket for crossing, _ in self._crossing):
            self._finish_oldest()

    def forget(self) -> list[Segment]:
        """Drop the addends of a pass that failed; return the gradients that lack some."""
        lost = [s for b in self._order for s in b.segments if s.position in self._addends[b.id]]
        if self._completed is not None:
            self._completed = []
        for crossing, present in self._crossing:  # that other ranks make, too
            try:
                crossing.wait()
            except BaseException:  # of any kind: that of the pass is on its way to the user
                lost += present
                self._torn.add(crossing.bucket.id)
            else:
                self._home(crossing.bucket).changes.end()
                self._close(present)
        self.clear()
        return lost

    def clear(self) -> None:
        """Begin anew."""
        self._next = 0
        self._crossing.clear()
        self._crossings.clear()
        self._exchanged.clear()
        for addends in self._addends.values():
            addends.clear()

    def close(self) -> None:
        """End the thread that makes crossings; none is under way."""
        self._crossings.close()

    # -- one bucket ------------------------------------------------------------------------------

    def _begin(self, bucket: Bucket) -> None:
        """Agree which gradients of a bucket there are, and let them cross."""
        mine = self._addends[bucket.id]
        here = bytes(segment.position in mine for segment in bucket.segments)
        earlier = bytes(self._is_summed(segment) for segment in bucket.segments)
        self._close_done()
        with standing_for(self._comm, self._link.log), self._own_first():
            told = self._comm.agree(here + earlier, f"gradients of bucket {bucket.id}")
        there = [row[: len(here)] for row in told]
        present = present_in(bucket, there)
        self._check_earlier(present, [row[len(here) :] for row in told])
        if present:
            self._let_cross(self._load(bucket, present, there), present)
        self._addends[bucket.id] = {}
        self._exchanged.add(bucket.id)
        self._next += 1

    def _check_earlier(self, present: Iterable[Segment], told: Sequence[bytes]) -> None:
        """Raise DivergenceError on all ranks unless they add to sums of earlier passes, or none
        does. ``told``: which of a bucket's gradients are such sums, by rank."""
        if len(set(told)) == 1:
            return
        for segment in present:
            has = [bool(row[segment.position]) for row in told]
            if len(set(has)) > 1:
                said = ["adds to an earlier pass" if each else "begins anew" for each in has]
                raise DivergenceError(
                    f"ranks that share a model differ in the gradient of {segment.spec.name!r}"
                    f" ({self._comm.members.listed(said)})",
                    advice="call optimizer.zero_grad(), or take gradients away, on all ranks",
                )

    @contextmanager
    def _own_first(self) -> Iterator[None]:
        """Raise, in place of what other ranks do because of it, what failed here meanwhile."""
        try:
            yield
        except (DivergenceError, RankLost):
            for crossing, _ in self._crossing:
                if crossing.failed:
                    crossing.wait()
            raise

    def _load(self, bucket: Bucket, present: Iterable[Segment], there: Sequence[bytes]) -> Load:
        try:
            ranks = having(there)
            adding = [Adding(s, ranks[s.position], self._opens(s)) for s in present]
            sums, group_sums = self._sums_of(bucket, adding)
        except BaseException as error:
            self._begin_change(bucket)
            self._torn.add(bucket.id)
            self._crossings.refuse(error)
            raise
        self._begin_change(bucket)
        return Load(
            *(bucket, self._addends[bucket.id], self._ring.mark()),
            *(sums, group_sums, self._home(bucket)),
            unscale=self.unscale,
        )

    def _begin_change(self, bucket: Bucket) -> None:
        """Count the change of a bucket's gradients that all ranks begin."""
        home = self._home(bucket)
        if bucket.id in self._torn:  # from here on readers wait for the change that begins
            self._torn.discard(bucket.id)
            home.changes.end()
        home.changes.begin()

    def _let_cross(self, load: Load, present: list[Segment]) -> None:
        crossing = Crossing(load, self._crossings)
        self._crossing.append((crossing, present))
        self._crossings.begin(crossing)
        self._ring.hold(Sources(crossing), list(load.addends.values()))

    def _sums_of(
        self, bucket: Bucket, adding: Sequence[Adding]
    ) -> tuple[list[Sum], list[list[Sum]]]:
        """Return the sums of this rank's share, and with a relay those that go to other ranks."""
        share, relay = bucket.share(self._comm.rank), self._comm.relay
        if relay is None:
            return sums_in(share, adding), []
        groups = [each._replace(ranks=relay.groups(each.ranks)) for each in adding]
        if not self._has_bytes:  # of a thousand ranks there are too many
            return sums_in(share, groups), []
        mine = [
            Adding(each.segment, numbers, adds=False)
            for each in adding
            if (numbers := relay.numbers(each.ranks))
        ]
        return sums_in(share, groups), [sums_in(bucket.share(s), mine) for s in relay.shares]

    def _close_done(self) -> None:
        """Close the gradients whose sums are at home.

        A sum that failed is an error at the end of the pass: a rank that left before would leave
        out calls which the others make, and take theirs for those of its next pass.
        """
        while self._crossing and self._crossing[0][0].done and not self._crossing[0][0].failed:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        crossing, present = self._crossing[0]
        crossing.wait()
        self._crossing.popleft()
        self._home(crossing.bucket).changes.end()
        self._close(present)

    def _close(self, present: Iterable[Segment]) -> None:
        for segment in present:
            self._closed(segment)


class Adding(NamedTuple):
    """A gradient, and who adds to it."""

    segment: Segment
    ranks: tuple[int, ...]
    adds: bool
    """Whether an earlier pass left a sum at home."""


def sums_in(share: slice, adding: Iterable[Adding]) -> list[Sum]:
    """Return the sums of the parts of gradients that are in a share."""
    found = []
    for segment, ranks, adds in adding:
        run = overlap(slice(segment.offset, segment.end), share)
        if run.start < run.stop:
            found.append(Sum(run, segment.position, ranks, adds))
    return merged(found)


def present_in(bucket: Bucket, there: Sequence[bytes]) -> list[Segment]:
    """Return a bucket's gradients that any rank has."""
    return [s for s in bucket.segments if any(have[s.position] for have in there)]


def having(there: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return the ranks that have each gradient of a bucket; most have the same ones."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for column in zip(*there, strict=True):
        if column not in known:
            known[column] = tuple(rank for rank, has in enumerate(column) if has)
        found.append(known[column])
    return found


def merged(sums: Sequence[Sum]) -> list[Sum]:
    """Join sums of neighbours to which the same ranks add; the padding between them goes along.

    A gradient between them that no rank has now may be at home from an earlier pass.
    """
    found: list[Sum] = []
    for each in sums:
        if found and found[-1].precedes(each):
            each = each._replace(run=slice(found.pop().run.start, each.run.stop))
        found.append(each)
    return found
