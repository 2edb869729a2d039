"""The lines of the program that an allocation comes from, as a report shows them (floor 4)."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from hetero.watch.stacks import Stacks

SHOWN = 2  # lines of a stack, the innermost


class ProgramLines:
    """Says where in the user's program a frame was called; equal places are one string."""

    def __init__(self) -> None:
        self._stacks = Stacks()
        self._texts: dict[int, str] = {}

    def here(self, frame: FrameType | None) -> str:
        """Return the innermost lines that led to ``frame``, without torch's and ours; empty if
        there are none."""
        number = self._stacks.here(frame)
        text = self._texts.get(number)
        if text is None:
            shown = self._stacks.lines(number)[:SHOWN]
            text = " < ".join(f"{Path(at.file).name}:{at.line} {at.function}" for at in shown)
            self._texts[number] = text
        return text
