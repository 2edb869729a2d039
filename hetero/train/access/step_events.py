"""What the runtime tells of a step, and asks in between (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Calls at points of a step; they keep no module alive (see [Note: out of gc's sight])."""

    before_use: Callable[[], None]
    """The model is used; raises where it must not be."""
    before_load: Callable[[], None]
    """A state dict replaces a value at home, or shows it so that it may be written."""
    backward_begins: Callable[[], None]
    """A backward pass comes to the model."""
    forward_ended: Callable[[], None]
    """A forward ended that is a step of its own."""
    spare: Callable[[], int]
    """Returns how many frames there may be apart from the others, between steps."""
    resume: Callable[[], None]
    """Gives those frames back: the model computes."""
