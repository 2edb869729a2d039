"""The geometry of pictures: pieces of bars, rectangles of treemaps (floor 4).

``templates/macros.html`` draws them as SVG, in per cent: they fit any width and need no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDE = 1000.0  # of a treemap's plane, in which shapes are judged
HIGH, LOW = 300.0, 120.0  # with many rectangles, and with few
FEW = 6
LABEL_HEIGHT = 24.0  # the least room for a line of a label
LETTER, MARGIN = 7.6, 12.0  # pixels of a letter, and at both ends of a line
SCREEN, PHONE = 1160, 340  # pixels of a treemap's width that labels are judged by


class BarPiece(NamedTuple):
    begin: float
    """As a part of the whole, as is ``length``."""
    length: float
    colour: str
    """A name of `html.palette`."""
    title: str
    part: str = ""
    """Name of a part of a step."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a treemap, on a plane that is `WIDE` wide."""

    index: int
    x: float
    y: float
    width: float
    height: float

    @property
    def lines(self) -> int:
        """Lines of text that fit in it."""
        if self.height < LABEL_HEIGHT:
            return 0
        return 2 if self.height >= 2 * LABEL_HEIGHT else 1


def fits(text: str, cell: Rectangle) -> str:
    """Return where a line fits into a rectangle: ``always``, on a ``roomy`` screen, or nowhere."""
    pixels = len(text) * LETTER + MARGIN
    if pixels <= cell.width / WIDE * PHONE:
        return "always"
    return "roomy" if pixels <= cell.width / WIDE * SCREEN else ""


def squarify(sizes: Sequence[float], high: float = HIGH) -> list[Rectangle]:
    """Return a rectangle per size, largest first, with areas in proportion (Bruls et al., 2000).

    Rows are filled along the shorter side as long as their rectangles become squarer.
    """
    scale = WIDE * high / (sum(sizes) or 1)
    x, y, width, height = 0.0, 0.0, WIDE, high
    cells: list[Rectangle] = []
    at = 0
    while at < len(sizes):
        side = min(width, height)
        count = row_length([size * scale for size in sizes[at:]], side)
        areas = [size * scale for size in sizes[at : at + count]]
        depth = sum(areas) / side
        offset = 0.0
        for i, area in enumerate(areas):
            length = area / depth if depth else 0.0
            across = width <= height
            place = (x + offset, y, length, depth) if across else (x, y + offset, depth, length)
            cells.append(Rectangle(at + i, *place))
            offset += length
        if width <= height:
            y, height = y + depth, height - depth
        else:
            x, width = x + depth, width - depth
        at += count
    return cells


def row_length(areas: Sequence[float], side: float) -> int:
    """Return the number of rectangles that make the squarest row."""
    best, total = float("inf"), 0.0
    for count, area in enumerate(areas, 1):
        total += area
        worst = max(side * side * areas[0] / total**2, total**2 / (side * side * area))
        if worst > best:
            return count - 1
        best = worst
    return len(areas)


class Leaf(NamedTuple):
    """The content of one rectangle of a treemap."""

    size: float
    colour: str
    label: str
    detail: str
    light: bool
    """Whether its colour is light enough to need dark text."""
    category: str = ""


def plane_height(leaves: Sequence[Leaf]) -> float:
    return HIGH if len(leaves) > FEW else LOW


def placed(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Rectangle]]:
    """Return each leaf, the largest first, with its rectangle."""
    cells = squarify([leaf.size for leaf in leaves], plane_height(leaves))
    return [(leaves[cell.index], cell) for cell in cells]
