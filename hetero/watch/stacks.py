"""Where in the user's program an operation was called (floor 4)."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

OURS = str(Path(__file__).resolve().parent.parent)
TORCH = str(Path(torch.__file__).resolve().parent)
NOT_THEIRS = (TORCH, OURS, contextlib.__file__, "<frozen ")
MAIN = runpy.run_path.__code__.co_filename  # it ran the program: what called it is ours
DEEPEST = 8  # frames of the user's that are kept, the innermost
FARTHEST = 200  # frames that are looked at

Place = tuple[CodeType, int]


class Line(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


class Stacks:
    """Stacks of the user's own lines, the innermost first; equal ones are one number."""

    def __init__(self) -> None:
        self._known: dict[CodeType, bool] = {}
        self._numbers: dict[tuple[Place, ...], int] = {(): 0}
        self._all: list[tuple[Place, ...]] = [()]

    def here(self, frame: FrameType | None) -> int:
        """Return the number of the stack that ends in ``frame``."""
        found: list[Place] = []
        for _ in range(FARTHEST):
            if frame is None or len(found) == DEEPEST:
                break
            code = frame.f_code
            if code.co_filename == MAIN:
                break
            if self._is_theirs(code):
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(found)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._all)
            self._all.append(key)
        return number

    def lines(self, number: int) -> tuple[Line, ...]:
        """Return the lines of a stack, the innermost first."""
        return tuple(Line(code.co_filename, line, code.co_name) for code, line in self._all[number])

    def _is_theirs(self, code: CodeType) -> bool:
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = is_theirs(code.co_filename)
        return known


def is_theirs(file: str) -> bool:
    """Whether a file is the user's, or of a library that is neither torch nor hetero."""
    if file.startswith(OURS):
        return file.startswith(f"{OURS}/recipes")  # models, as a user's own
    return not file.startswith(NOT_THEIRS)


def lines_of(error: BaseException) -> tuple[Line, ...]:
    """Return the user's lines in an error's traceback, the innermost first."""
    found = [
        Line(frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if is_theirs(frame.filename)
    ]
    return tuple(found[::-1][:DEEPEST])


def present() -> tuple[Line, ...]:
    """Return the user's lines that run now, the innermost first."""
    stacks = Stacks()
    return stacks.lines(stacks.here(sys._getframe(1)))
