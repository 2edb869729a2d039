"""Which buckets stay on HBM from one forward to the next (floor 1, policy; no torch).

Without training the same accesses repeat, and no update rewrites a bucket. The bucket used last is
then needed last, so fetching as early as frames permit would bring every bucket across the link in
every forward. The best choice is to let some buckets stand and to stream the rest: each standing
byte saves a byte of every forward. Streaming needs frames for two accesses, one that computes and
the next one in flight. Standing buckets are spread over the forward, so that the link stays busy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hetero.plan.schedule import Shape
from hetero.plan.trace import Trace

GOLDEN = 0.6180339887498949  # of a cycle: any number of its multiples spread evenly


def may_stand(trace: Trace, shapes: Mapping[int, Shape]) -> bool:
    """Whether all buckets of a trace survive from one pass to the next."""
    return not any(shapes[bucket].rewritten for bucket in trace.uses())


def standing(trace: Trace, shapes: Mapping[int, Shape], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return sets of buckets that may stand, the least valuable bucket of each last.

    The first prefers buckets of rare sizes, so that the rest streams through frames of one size;
    the second the largest, so that the rest needs few frames.
    """
    uses = list(trace.uses())
    sizes = Counter(shapes[bucket].granules for bucket in uses)
    spread = [uses[i] for i in sorted(range(len(uses)), key=lambda i: i * GOLDEN % 1.0)]
    odd = sorted(spread, key=lambda b: sizes[shapes[b].granules])
    large = sorted(spread, key=lambda b: -shapes[b].granules)
    return tuple(_filled(order, trace, shapes, limit) for order in (odd, large))


def _filled(
    order: Sequence[int], trace: Trace, shapes: Mapping[int, Shape], limit: int
) -> tuple[int, ...]:
    """Return the buckets that fit together with the window of the rest."""
    found: list[int] = []
    held, stream = 0, StreamedBuckets(trace, shapes)
    for bucket in order:
        more = held + shapes[bucket].granules
        if more > limit:
            continue
        stream.take_out(bucket)
        if more + stream.window <= limit:
            found.append(bucket)
            held = more
        else:
            stream.put_back(bucket)
    return tuple(found)


class StreamedBuckets:
    """The streamed buckets, a ring of accesses, from which standing ones are taken out."""

    def __init__(self, trace: Trace, shapes: Mapping[int, Shape]) -> None:
        self._shapes = shapes
        self._needs = [set(access.buckets) for access in trace.accesses if access.buckets]
        n = len(self._needs)
        self._before = [(at - 1) % n for at in range(n)]
        self._behind = [(at + 1) % n for at in range(n)]
        self._uses: dict[int, list[int]] = {}
        for at, need in enumerate(self._needs):
            for bucket in need:
                self._uses.setdefault(bucket, []).append(at)
        self._pairs: Counter[int] = Counter()  # frames of a pair in a row -> number of pairs
        self._count(range(n), 1)

    @property
    def window(self) -> int:
        """The most frames that two accesses in a row take; see `window`."""
        return max(self._pairs, default=0)

    def take_out(self, bucket: int) -> None:
        """Stop streaming a bucket."""
        for at in self._uses[bucket]:
            before, behind, near = self._before[at], self._behind[at], {self._before[at], at}
            self._count(near, -1)
            self._needs[at].remove(bucket)
            if not self._needs[at]:
                self._behind[before], self._before[behind] = behind, before
                near.remove(at)
            self._count(near, 1)

    def put_back(self, bucket: int) -> None:
        """Undo the last `take_out`."""
        for at in reversed(self._uses[bucket]):
            before, behind, near = self._before[at], self._behind[at], {self._before[at], at}
            gone = not self._needs[at]
            self._count(near - {at} if gone else near, -1)
            self._needs[at].add(bucket)
            if gone:
                self._behind[before] = self._before[behind] = at
            self._count(near, 1)

    def _count(self, places: Iterable[int], n: int) -> None:
        for at in places:
            need = self._needs[at] | self._needs[self._behind[at]]
            takes = sum(self._shapes[b].granules for b in need)
            self._pairs[takes] += n
            if not self._pairs[takes]:
                del self._pairs[takes]


def window(trace: Trace, shapes: Mapping[int, Shape], stand: set[int]) -> int:
    """Return the most frames that two accesses in a row take, without standing buckets."""
    needs = [frozenset(access.buckets) - stand for access in trace.accesses]
    streams = [need for need in needs if need]
    if not streams:
        return 0
    pairs = itertools.pairwise([*streams, streams[0]])
    return max(sum(shapes[b].granules for b in one | other) for one, other in pairs)
