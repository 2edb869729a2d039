"""Pieces of a page that every view uses: sizes with their bytes, tables, figures (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from hetero.report.words import format_seconds
from hetero.types import format_bytes

LONGEST = 400  # rows of a table


class Cell(NamedTuple):
    """A table's cell; ``html`` is safe already."""

    html: str
    number: bool = False


class View(NamedTuple):
    """A section of the page."""

    name: str
    """Of its anchor."""
    title: str
    body: str


def text(value: object) -> Cell:
    return Cell(escape(str(value)))


def number(value: object) -> Cell:
    return Cell(escape(str(value)), number=True)


def size(n_bytes: float | None) -> str:
    """Return a size for people that shows its bytes when pointed at."""
    if n_bytes is None:
        return "no limit"
    whole = round(n_bytes)
    return f'<data value="{whole}" title="{whole:,} bytes">{format_bytes(n_bytes)}</data>'


def sized(n_bytes: float | None) -> Cell:
    return Cell(size(n_bytes), number=True)


def timed(seconds: float) -> Cell:
    return Cell(f'<data value="{seconds:.9f}">{format_seconds(seconds)}</data>', number=True)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str = "",
    total: Sequence[Cell] = (),
    style: str = "",
) -> str:
    """Return a table; its first column heads the rows. What is too long says how much is left."""
    shown = list(rows)
    left = len(shown) - LONGEST
    body = "".join(row_html(row) for row in shown[:LONGEST])
    if left > 0:
        body += f'<tr><td colspan="{len(heads)}">and {left} more in summary and log</td></tr>'
    body += row_html(total, "sum") if total else ""
    numbers = [cell.number for cell in shown[0]] if shown else [False] * len(heads)
    head = "".join(
        f'<th scope="col"{" class=num" if right else ""}>{escape(name)}</th>'
        for name, right in zip(heads, numbers, strict=True)
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = f' class="{style}"' if style else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}>{named}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def row_html(cells: Sequence[Cell], style: str = "") -> str:
    first, *others = cells
    body = "".join(f"<td{' class=num' if cell.number else ''}>{cell.html}</td>" for cell in others)
    kind = f' class="{style}"' if style else ""
    return f'<tr{kind}><th scope="row">{first.html}</th>{body}</tr>'


def numbers(title: str, content: str) -> str:
    """Return the numbers behind a picture, folded away."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def figure(title: str, picture: str, behind: str, note: str = "") -> str:
    """Return a picture with its numbers; ``note`` is safe already."""
    said = f"<figcaption>{note}</figcaption>" if note else ""
    return f"<figure><h3>{escape(title)}</h3>{said}{picture}{behind}</figure>"


def keys(rows: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (colour, meaning)."""
    items = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="2"'
        f' fill="var(--{colour})"/></svg>{escape(meaning)}</li>'
        for colour, meaning in rows
    )
    return f'<ul class="keys">{items}</ul>'


def paragraph(words: str, style: str = "") -> str:
    """Return a paragraph of words that are safe already."""
    return f"<p{f' class={style}' if style else ''}>{words}</p>"
