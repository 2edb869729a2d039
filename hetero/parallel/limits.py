"""Time limits of torch's own groups while prepared models compute in them (floor 3).

What torch waits for ends when its rank answers, when that one's connection closes, or at the limit
of the group, which is half an hour if nothing is said. Aborting the group wakes no wait of gloo. A
rank that hangs keeps its connections, so the limit has to be that of our own waits. What one rank
sends another, as stages do, keeps the limit that the group was made with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from hetero.internals import limits_of, set_limits


class Lowered(NamedTuple):
    own: Mapping[Any, timedelta]
    """The group's own limits, by device."""
    asked: list[timedelta]
    """By prepared models."""


_lowered: weakref.WeakKeyDictionary[Any, Lowered] = weakref.WeakKeyDictionary()


def lower(groups: Iterable[Any], seconds: float) -> Callable[[], None]:
    """Let the collectives of groups end after so many seconds, where their limit is longer; return
    what takes this back. A collective that has begun keeps the limit that there was."""
    asked = timedelta(seconds=seconds)
    held = weakref.WeakSet(groups)
    for group in held:
        _lowered.setdefault(group, Lowered(limits_of(group), [])).asked.append(asked)
        apply(group)

    def take_back() -> None:
        for group in list(held):
            _lowered[group].asked.remove(asked)
            apply(group)
            if not _lowered[group].asked:
                del _lowered[group]
        held.clear()

    return take_back


def apply(group: Any) -> None:
    """Set the shortest of a group's limits."""
    own, asked = _lowered[group]
    set_limits(
        group, {device: min(limit, *asked) if asked else limit for device, limit in own.items()}
    )
