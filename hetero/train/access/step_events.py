"""Events of a step that the runtime reports, and its questions in between (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Calls at points of a step; they keep no module alive (see [Note: out of gc's sight])."""

    before_use: Callable[[], None]
    """Before a use of the model; raises if it must not be used."""
    before_load: Callable[[], None]
    """Before a state dict writes a value at home, or shows it writably."""
    backward_begins: Callable[[], None]
    """A backward pass reaches the model."""
    backward_ended: Callable[[], None]
    """It is over."""
    forward_ended: Callable[[], None]
    """A forward that is a step of its own ended."""
    spare: Callable[[], int]
    """Returns how many extra frames there may be between steps."""
    resume: Callable[[], None]
    """Gives the extra frames back: the model computes."""
