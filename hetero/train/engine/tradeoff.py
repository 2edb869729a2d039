"""How much HBM activations leave to homes: as much as makes a step shortest (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from hetero.memory.layout import Layout
from hetero.plan.activations import Policy
from hetero.plan.placement import BucketHomes, hold
from hetero.plan.weighing import (
    SPARE,
    Copies,
    Drive,
    Traffic,
    UnitStep,
    passing_share,
    step_seconds,
)
from hetero.train.activations.forecast import Forecast
from hetero.train.engine.passing import Passing
from hetero.train.engine.room import Room

TRIED = 32  # numbers of homes on HBM, of which the best is taken
WORTH = 0.97  # of a step's time: what is gained has to be worth other policies

Option = Callable[[int], Sequence[Policy] | None]


class Weighed(NamedTuple):
    """A step, by its time and what decides it."""

    seconds: float
    room_bytes: int
    """For activations."""
    policies: Sequence[Policy]
    stages: Sequence[UnitStep]
    held: frozenset[int]


class Tradeoff:
    """Weighs policies of activations, and homes in the room that they leave.

    Args:
        needs: the buckets that each unit's access pins.
        copies: how long copies take.
        pace: returns the seconds in which HOST updates a parameter; None if it is unknown yet.
        drive: returns what homes on disk cost.
        passing: whether updates of homes on HOST pass through HBM.
        early: whether HOST updates homes while backward goes on.
        share: of the room that activations may take, in place of the best (benchmarks).
    """

    def __init__(
        self,
        room: Room,
        forecast: Forecast,
        layout: Layout,
        needs: Sequence[Sequence[int]],
        *,
        copies: Copies,
        pace: Callable[[], float | None],
        drive: Callable[[], Drive],
        passing: Passing,
        early: bool,
        share: float | None = None,
    ) -> None:
        self._room = room
        self._forecast = forecast
        self._layout = layout
        self._needs = needs
        self._copies = copies
        self._pace = pace
        self._drive = drive
        self._passing = passing
        self._early = early
        self._share = share
        self._weighed = False

    @property
    def is_open(self) -> bool:
        """Whether it is to be weighed, or a choice to be seen in a step."""
        return self.is_due or self._passing.is_trying

    @property
    def is_due(self) -> bool:
        """Whether it can weigh for the first time: updates were measured since."""
        return not self._weighed and bool(self._room.homes.homes) and self._pace() is not None

    def room_bytes(self, units: Sequence[int], option: Option) -> int | None:
        """Return the room for activations with which a step is shortest; None if it does not matter
        much, or is unknown.

        ``option`` returns the policies that fit a room, None if none do.
        """
        pace, homes = self._pace(), self._room.homes.homes
        if pace is None or not homes:
            return None
        self._weighed = True
        traffic, drive = traffic_of(self._layout, homes, pace), self._drive()
        uses = [self._forecast.use(unit) for unit in units]
        hbm = self._room.hbm
        most = hbm.most_bytes - self._room.ring.useful_bytes
        if self._share is not None:
            return int(self._share * (most - hbm.streaming_bytes()))
        found: list[Weighed] = []
        for held in some(homes, most - hbm.least_bytes):
            held_bytes = sum(each.n_bytes for each in homes if each.bucket in held)
            left = most - hbm.streaming_bytes(held) - held_bytes
            policies = option(left) if left > 0 else None
            if policies is not None:
                stages = [
                    UnitStep(use, policy, self._needs[unit])
                    for unit, use, policy in zip(units, uses, policies, strict=True)
                ]
                seconds = step_seconds(
                    *(stages, traffic, held, self._copies), early=self._early, drive=drive
                )
                found.append(Weighed(seconds, left, policies, stages, held))
        if not found:
            return None
        # with as many homes as fit with the policies that cost least, whatever homes do
        cheapest = min(each.seconds for each in found if each.policies == found[0].policies)
        best = min(found, key=attrgetter("seconds"))
        self._let_pass(best, traffic)
        return best.room_bytes if best.seconds < WORTH * cheapest else None

    def _let_pass(self, step: Weighed, traffic: Mapping[int, Traffic]) -> None:
        """Weigh whether some of a step's updates should pass through HBM: those of shares do not,
        nor where nothing takes time."""
        if self._layout.is_shared or not step.seconds:
            return
        share = passing_share(traffic, step.held, self._copies)
        seconds = step_seconds(
            *(step.stages, traffic, step.held, self._copies), early=self._early, passing=share
        )
        self._passing.choose(min(1.0, SPARE * share), seconds / step.seconds)


def traffic_of(layout: Layout, homes: Sequence[BucketHomes], pace: float) -> dict[int, Traffic]:
    """Return what each bucket costs where its homes are not on HBM.

    Args:
        homes: that may be there.
        pace: the seconds in which HOST updates a parameter.
    """
    sizes = {each.bucket: each.n_bytes for each in homes}
    shared = layout.is_shared  # the rest is gathered, and addends leave, in any case
    return {
        bucket.id: Traffic(
            bucket.home_bytes if shared else bucket.n_bytes,
            bucket.n_bytes if bucket.trainable and not shared else 0,
            pace * bucket.numel if bucket.trainable else 0.0,
            sizes.get(bucket.id, 0),
        )
        for bucket in layout.buckets
    }


def some(homes: Sequence[BucketHomes], most_bytes: int) -> list[frozenset[int]]:
    """Return the buckets of no homes, of some, and of as many as ``most_bytes`` hold, which all may
    be: at most `TRIED` + 1 of them, evenly spaced."""
    whole = min(most_bytes, sum(each.n_bytes for each in homes))
    return list(dict.fromkeys(hold(homes, whole * i // TRIED) for i in range(TRIED + 1)))
