"""Updates that begin in backward, before `step` (floor 2).

With ``updates="backward"`` the update of a unit's parameters begins once backward has left the unit
and all its gradients are at home, with the groups' settings of that moment. `step` makes the other
updates and counts the step. Drive, RAM and cores then work throughout the step.

[Note: early updates]  Between such an update and `step` a weight has numbers that plain torch would
not show yet, and they cannot be taken back. So a unit's update is early only if its weights are
expected to be needed no more: in every step so far forward entered it once, backward reached it
once, and its parameters were used nowhere else. Any other use of them before `step` raises
StateError, as does a change of a gradient, a setting or a group: the numbers are plain torch's, or
there is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

NOWHERE = -1


class Visits:
    """Which units a whole step visits once: one forward, one backward, no other use.

    Args:
        needs: the buckets of each unit. A unit that shares one with another never counts as once.
    """

    def __init__(self, needs: Sequence[Sequence[int]]) -> None:
        owners = Counter(bucket for buckets in needs for bucket in set(buckets))
        self._unit_of = {b: unit for unit, buckets in enumerate(needs) for b in buckets}
        self._often = {unit for unit, bs in enumerate(needs) if any(owners[b] > 1 for b in bs)}
        self._once: set[int] = set()  # in at least one whole step
        self._forward: Counter[int] = Counter()
        self._backward: Counter[int] = Counter()

    def forward(self, unit: int) -> None:
        self._forward[unit] += 1

    def backward(self, unit: int) -> None:
        """Backward reached a unit from another one."""
        self._backward[unit] += 1

    def outside(self, buckets: Iterable[int]) -> None:
        """Parameters were used outside their unit: a graph may need them at any time."""
        self._often.update(self._unit_of[b] for b in buckets if b in self._unit_of)

    def is_done(self, unit: int) -> bool:
        """Whether this step is expected not to need the unit's weights again."""
        known = unit in self._once and unit not in self._often
        return known and self._forward[unit] == self._backward[unit] == 1

    def end(self) -> None:
        """End a step: learn from its visits."""
        for unit in self._forward.keys() | self._backward.keys():
            if self._forward[unit] == self._backward[unit] == 1:
                self._once.add(unit)
            elif self._forward[unit] > 1 or self._backward[unit] > 1:
                self._often.add(unit)
        self._forward.clear()
        self._backward.clear()


class EarlyUpdates:
    """Follows a step and begins each unit's update when it may (see [Note: early updates]).

    Args:
        needs: the buckets of each unit.
        complete: whether all gradients of a unit are at home.
        begin: begins those updates of a unit that may be early.
    """

    def __init__(
        self,
        needs: Sequence[Sequence[int]],
        *,
        complete: Callable[[int], bool],
        begin: Callable[[int], None],
    ) -> None:
        self._visits = Visits(needs)
        self._complete = complete
        self._begin = begin
        self._at = NOWHERE  # the unit that backward has reached
        self._left: list[int] = []  # units left by backward, gradients under way

    def entered(self, unit: int) -> None:
        self._visits.forward(unit)

    def reached(self, unit: int) -> None:
        """Backward has reached a unit and left the one before, whose gradients go home."""
        if unit == self._at:
            return
        self._leave()
        self._at = unit
        self._visits.backward(unit)

    def outside(self, buckets: Iterable[int]) -> None:
        """Parameters of these buckets are used outside their unit."""
        self._visits.outside(buckets)

    def pass_ended(self) -> None:
        self._leave()
        self._at = NOWHERE

    def step_ended(self) -> None:
        self._left.clear()
        self._at = NOWHERE
        self._visits.end()

    def _leave(self) -> None:
        if self._at != NOWHERE and self._visits.is_done(self._at):
            self._left.append(self._at)
        ready = [unit for unit in self._left if self._complete(unit)]
        for unit in ready:
            self._left.remove(unit)
            self._begin(unit)


class NoEarlyUpdates:
    """Leaves all updates to `step`."""

    def entered(self, unit: int) -> None: ...

    def reached(self, unit: int) -> None: ...

    def outside(self, buckets: Iterable[int]) -> None: ...

    def pass_ended(self) -> None: ...

    def step_ended(self) -> None: ...
