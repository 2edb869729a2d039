"""What ranks that gather agree upon as a forward begins (floor 2).

Frames decide which weights are fetched, and policies which ones backward needs: the embedding's
only if it is computed again. A batch that is larger on one rank asks for fewer frames and other
policies there. So as the first unit of a forward has seen its inputs, all ranks take the fewest
frames, and the policies of the rank that needs most of those that chose anew. Later in the forward
a rank may ask for fewer frames still (`AskedFrames`), and policies stay.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from hetero.plan.activations import Policy
from hetero.train.engine.choice import Choice
from hetero.train.engine.room import Frames


class Wish(NamedTuple):
    """One rank's row."""

    n_bytes: int
    """That the forward is expected to take, if more than before."""
    policies: dict[int, Policy] | None
    """If they were chosen anew."""


_bytes_of: Callable[[Wish], int] = attrgetter("n_bytes")


class Meeting:
    """Of a forward; ranks that gather nothing never wait for each other in it."""

    def __init__(self, frames: Frames, choice: Choice) -> None:
        self.wanted_bytes = 0
        """That the forward is expected to take, if more than before."""
        self.is_due = False
        """Whether no unit has begun."""
        self._frames = frames
        self._choice = choice
        self._before: dict[int, Policy] = {}

    def begin(self) -> None:
        """A forward begins."""
        self.wanted_bytes, self.is_due = 0, True
        self._before = dict(self._choice.policies)

    @property
    def may_choose(self) -> bool:
        """Whether this rank may choose policies now."""
        return self._choice.may_change and (self.is_due or not self._frames.is_common)

    def hold(self) -> bool:
        """Hear from all ranks; returns whether this one's policies are others now."""
        self.is_due, policies = False, self._choice.policies
        changed = dict(policies) if policies != self._before else None
        rows = self._frames.meet(pickle.dumps(Wish(self.wanted_bytes, changed)))
        wishes: list[Wish] = [pickle.loads(row) for row in rows]  # from ranks of this very program
        most = max((wish for wish in wishes if wish.policies), key=_bytes_of, default=None)
        if most is None or most.policies is None or most.policies == policies:
            return False
        policies.update(most.policies)
        return True
