"""Divides HBM until the next border: buffers, activations, ring, frames (floor 1).

Pure arithmetic on bytes; no torch. Activations' need is measured and forecast elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hetero.plan.activations import Policy
from hetero.plan.placement import BucketHomes, hold

WIDEST = 3  # frames for so many of the widest unit that pages come before homes
WORTH = 8  # add frames only for more than 1/8 of HBM: they are filled and planned anew


@dataclass(frozen=True, slots=True)
class Hbm:
    """The bytes of a device, and its fixed parts."""

    total_bytes: int
    buffer_bytes: int
    least_bytes: int
    """Of the frames that the widest unit pins: the minimum."""
    granule_bytes: int
    """Of one frame."""
    useful_frames: int = sys.maxsize
    """More of them would stay empty."""
    units: tuple[Mapping[int, int], ...] = ()
    """Of the frames that each unit pins, by bucket, where homes on HBM need none; else empty."""

    @property
    def most_bytes(self) -> int:
        """For frames, activations and the ring."""
        return self.total_bytes - self.buffer_bytes

    @property
    def room_bytes(self) -> int:
        """For activations and the ring, with the fewest frames."""
        return self.most_bytes - self.least_bytes

    @property
    def fewest_frames(self) -> int:
        """The minimum number of frames."""
        return self.least_bytes // self.granule_bytes

    def frames(self, n_bytes: int) -> int:
        """Return how many frames fit with ``n_bytes`` of activations and ring."""
        return (self.most_bytes - n_bytes) // self.granule_bytes

    def left_bytes(self, frames: int) -> int:
        """Return the bytes that ``frames`` leave to activations and the ring."""
        return self.most_bytes - frames * self.granule_bytes

    def streaming_bytes(self, held: Collection[int] = (), *, units: int = WIDEST) -> int:
        """Return the bytes of frames that let fetches overlap with compute: of a few of the widest
        unit, where the homes of ``held`` buckets are on HBM, and of the minimum."""
        if not self.units:
            return units * self.least_bytes
        widest = max(sum(n for b, n in pins.items() if b not in held) for pins in self.units)
        return max(self.least_bytes, units * widest)

    def is_worth(self, n_bytes: int, frames: int, held: Collection[int] = ()) -> bool:
        """Whether many more than ``frames`` fit with ``n_bytes`` of activations and ring, or the
        few that let fetches of others than ``held`` buckets overlap with compute."""
        few = frames * self.granule_bytes < self.streaming_bytes(held)
        least = self.least_bytes if few else max(self.most_bytes // WORTH, self.least_bytes)
        return self.left_bytes(frames) - n_bytes > least


@dataclass(frozen=True, slots=True)
class Division:
    """A division of HBM; the rest is less than a frame, or not worth a new plan."""

    buffer_bytes: int
    activation_bytes: int
    ring_bytes: int
    """Of gradients on their way down."""
    frames: int
    policies: Mapping[int, Policy] = field(default_factory=dict)
    """Of activations, by unit."""
    on_hbm: frozenset[int] = frozenset()
    """Buckets whose homes are on HBM."""
    home_bytes: int = 0
    """Of HBM, for those homes."""
    passage_bytes: int = 0
    """Through which updates of other homes pass."""

    @property
    def moving_bytes(self) -> int:
        """Of activations and the ring, charged together."""
        return self.activation_bytes + self.ring_bytes


def divide(
    hbm: Hbm,
    activation_bytes: int,
    *,
    ring_bytes: int = 0,
    frames: int = 0,
    keeps: bool = False,
    policies: Mapping[int, Policy] | None = None,
    homes: Sequence[BucketHomes] = (),
    on_hbm: frozenset[int] = frozenset(),
    stuck: frozenset[int] = frozenset(),
    passage_bytes: int = 0,
) -> Division:
    """Return the division: activations first, then the ring, the passage of updates, a few frames,
    homes, more frames.

    Args:
        activation_bytes: expected need of the next step.
        ring_bytes: of the ring that lets copies overlap with compute; it may get less.
        frames: present number.
        keeps: whether to stay at that number, and with those homes, if only a few more would fit.
        homes: that may be on HBM, the most useful first.
        on_hbm: buckets whose homes are there now.
        stuck: those of them whose homes cannot leave.
        passage_bytes: through which updates of homes on HOST would pass, if there is room.

    Raises ValueError if activations do not fit with the fewest frames.
    """
    room = hbm.room_bytes - sum(home.n_bytes for home in homes if home.bucket in stuck)
    if activation_bytes > room:
        raise ValueError(f"{activation_bytes} bytes of activations; there is {room}")
    ring = min(ring_bytes, room - activation_bytes)
    taken = activation_bytes + ring
    passage = passage_bytes if taken + passage_bytes <= room else 0
    taken += passage
    held = choose_homes(hbm, taken, homes, on_hbm if keeps else frozenset(), stuck)
    home_bytes = sum(home.n_bytes for home in homes if home.bucket in held)
    taken += home_bytes
    fitting = min(hbm.frames(taken), hbm.useful_frames)
    stays = keeps and fitting > frames and not hbm.is_worth(taken, frames, held)
    return Division(
        hbm.buffer_bytes,
        activation_bytes,
        ring,
        frames if stays else fitting,
        dict(policies or {}),
        held,
        home_bytes,
        passage,
    )


def choose_homes(
    hbm: Hbm,
    taken_bytes: int,
    homes: Sequence[BucketHomes],
    on_hbm: frozenset[int],
    stuck: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """Return the buckets whose homes are on HBM, after activations and the ring.

    Frames for a few units come first, so that fetches overlap with compute. Homes that are there
    stay unless they do not fit, or many more would: a move takes as long as several steps. Those
    of ``stuck`` buckets stay in any case.
    """
    room = hbm.most_bytes - taken_bytes
    wanted = _most_homes(hbm, room, homes, stuck)
    now, then = (sum(h.n_bytes for h in homes if h.bucket in b) for b in (on_hbm, wanted))
    fits = now <= room - hbm.streaming_bytes(on_hbm, units=WIDEST - 1)
    if on_hbm and fits and then - now <= hbm.most_bytes // WORTH:
        return on_hbm
    return wanted


def _most_homes(
    hbm: Hbm, room_bytes: int, homes: Sequence[BucketHomes], stuck: frozenset[int]
) -> frozenset[int]:
    """Return the buckets whose homes fit next to the frames that the others need.

    The widest unit goes up first, as a rule, and the frames for it become room for more homes.
    """
    free = [home for home in homes if home.bucket not in stuck]
    room = room_bytes - sum(home.n_bytes for home in homes if home.bucket in stuck)
    frames = hbm.streaming_bytes(stuck)
    found = stuck | hold(free, room - frames)
    while (fewer := hbm.streaming_bytes(found)) < frames:
        more = stuck | hold(free, room - fewer)
        if hbm.streaming_bytes(more) > fewer:  # another one went up in the place of the widest
            return found
        found, frames = more, fewer
    return found
