"""Pictures as SVG: bars, a step's waterfall, a peak's treemap (floor 4).

They are part of the page, need no script, and place everything in per cent: they fit any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDE = 1000.0  # of a treemap's plane, in which shapes are judged
HIGH, LOW = 300.0, 120.0  # of one with many rectangles, and with a few
FEW = 6
LABEL_WIDTH, LABEL_HEIGHT = 55.0, 24.0  # of the plane that a label takes at least


class Piece(NamedTuple):
    """A part of a bar."""

    begin: float
    """As parts of the whole, as is ``length``."""
    length: float
    colour: str
    """A name of `html.palette`."""
    title: str


def bar(pieces: Sequence[Piece], height: int = 16, mark: float | None = None) -> str:
    """Return a bar of pieces; ``mark`` is where a line stands."""
    rects = "".join(
        f'<rect x="{100 * p.begin:.3f}%" width="{100 * p.length:.3f}%" height="{height}"'
        f' fill="var(--{p.colour})"><title>{escape(p.title)}</title></rect>'
        for p in pieces
    )
    line = (
        ""
        if mark is None
        else f'<rect class="mark" x="{100 * mark:.3f}%" width="2" height="100%"/>'
    )
    return f'<svg class="bar" width="100%" height="{height}" aria-hidden="true">{rects}{line}</svg>'


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of a treemap, on a plane that is `WIDE` wide."""

    index: int
    x: float
    y: float
    width: float
    height: float


def squarify(sizes: Sequence[float], high: float = HIGH) -> list[Cell]:
    """Return a rectangle for each size, largest first, in areas in proportion (Bruls et al., 2000).

    Rows are filled along the shorter side as long as that makes their rectangles squarer.
    """
    scale = WIDE * high / (sum(sizes) or 1)
    x, y, width, height = 0.0, 0.0, WIDE, high
    cells: list[Cell] = []
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
            cells.append(Cell(at + i, *place))
            offset += length
        if width <= height:
            y, height = y + depth, height - depth
        else:
            x, width = x + depth, width - depth
        at += count
    return cells


def row_length(areas: Sequence[float], side: float) -> int:
    """Return how many rectangles make the squarest row."""
    best, total = float("inf"), 0.0
    for count, area in enumerate(areas, 1):
        total += area
        worst = max(side * side * areas[0] / total**2, total**2 / (side * side * area))
        if worst > best:
            return count - 1
        best = worst
    return len(areas)


class Leaf(NamedTuple):
    """What a rectangle of a treemap shows."""

    size: float
    colour: str
    label: str
    detail: str
    light: bool
    """Whether its colour is so light that words on it have to be dark."""


def treemap(leaves: Sequence[Leaf], label: str) -> str:
    """Return a treemap of leaves, the largest first."""
    high = HIGH if len(leaves) > FEW else LOW
    cells = squarify([leaf.size for leaf in leaves], high)
    body = "".join(cell_svg(cell, leaves[cell.index], high) for cell in cells)
    return (
        f'<svg class="treemap" width="100%" height="{high:.0f}" role="img"'
        f' aria-label="{escape(label)}">{body}</svg>'
    )


def cell_svg(cell: Cell, leaf: Leaf, high: float) -> str:
    x, width = 100 * cell.x / WIDE, 100 * cell.width / WIDE
    y, height = 100 * cell.y / high, 100 * cell.height / high
    said = ""
    if cell.width >= LABEL_WIDTH and cell.height >= LABEL_HEIGHT:
        said = f'<text x="6" y="17">{escape(leaf.label)}</text>'
        if cell.height >= 2 * LABEL_HEIGHT:
            said += f'<text x="6" y="34" class="detail">{escape(leaf.detail)}</text>'
    kind = "on-light" if leaf.light else "on-dark"
    return (
        f'<svg class="{kind}" x="{x:.3f}%" y="{y:.3f}%" width="{width:.3f}%"'
        f' height="{height:.3f}%"><rect width="100%" height="100%" fill="var(--{leaf.colour})"/>'
        f"<title>{escape(leaf.label)}: {escape(leaf.detail)}</title>{said}</svg>"
    )
