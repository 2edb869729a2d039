"""Which model trains on which card: tables of the docs (`python -m benchmarks.cards --write`).

Every cell is what `hetero plan` says with the card's profile; none was measured. Cells
are kept in a file as they are planned, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from hetero.errors import BudgetError, HeteroError
from hetero.rehearse.plan import Plan, TierPlan, plan
from hetero.types import Kind, Tier

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "runs" / "cards.jsonl"
PAGE, README = ROOT / "docs" / "start" / "will-it-fit.md", ROOT / "README.md"
MARKED = re.compile(r"(<!-- cards: .*? -->\n).*?(<!-- end of cards -->)", re.DOTALL)
BATCH, SEQUENCE = 4, 2048
GIB = 2**30
LONGER = 1.05  # than with all RAM, a step in little of it
LEAST_GIB = 0.5  # of RAM, below which it holds but what is on its way
MODELS = (
    "smollm2-135m",
    "tinyllama-1.1b",
    "gemma-2b",
    "llama-3-8b",
    "mixtral-8x7b",
    "llama-3-70b",
)
CARDS = {
    "rtx3090": "RTX 3090, 24 GB; 64 GiB RAM",
    "rtx4090": "RTX 4090, 24 GB; 64 GiB RAM",
    "a100-80": "A100, 80 GB; 512 GiB RAM",
    "h200-sxm": "H200, 141 GB; 1 TiB RAM",
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA": {"lora_rank": 16},
    "nf4": {"lora_rank": 16, "frozen": "nf4"},
}
COMMON: Mapping[str, Any] = {"precision": "bf16", "fused_loss": True}


SHORT = (
    ("tinyllama-1.1b", "full"),
    ("gemma-2b", "full"),
    ("llama-3-8b", "full"),
    ("llama-3-8b", "LoRA"),
    ("llama-3-8b", "nf4"),
    ("mixtral-8x7b", "nf4"),
    ("llama-3-70b", "LoRA"),
    ("llama-3-70b", "nf4"),
)
"""Rows of the README."""
Key = tuple[str, str, str]
"""Model, card and way."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a plan says, or why there is none."""

    fits: bool = False
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    host_bytes: int = 0
    problem: str = ""
    planning_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        gib = self.host_bytes / GIB
        ram = f"{gib:.0f} GiB RAM" if gib >= LEAST_GIB else "all on the card"
        return f"{self.step_seconds:.3g} s, {self.tokens_per_second:,.0f} tokens/s, {ram}"


def cell(model: str, card: str, way: str) -> Cell:
    """Plan a step of a model on the machine of a profile, without a disk, in little RAM."""
    began = time.monotonic()
    settings: dict[str, Any] = {"profile": card, **COMMON, **WAYS[way]}
    try:
        found = frugal(partial(plan, model, (BATCH, SEQUENCE), estimates=False, **settings))
    except HeteroError as error:
        return Cell(problem=str(error).splitlines()[0])
    spent = round(time.monotonic() - began, 1)
    if not found.fits:
        short = ", ".join(
            f"{row.needed_bytes / GIB:,.0f} GiB {'RAM' if row.tier == 'HOST' else row.tier}"
            for row in found.shortfalls
        )
        return Cell(problem=f"needs {short}", planning_seconds=spent)
    host = host_of(found).peak_bytes
    return Cell(True, found.step_seconds, found.tokens_per_second, host, "", spent)


def frugal(plan_with: Callable[..., Plan]) -> Plan:
    """Return a plan with hardly more RAM than homes take, if its step is not much longer than that
    with all RAM there is: activations go there in the first step, since there is room."""
    found = plan_with()
    if not found.fits:
        return found
    host = host_of(found)
    kept = host.peak_bytes - host.at_peak.get(Kind.ACTIVATION.value, 0)
    budget = math.ceil(1.05 * kept / GIB + 1) * GIB
    while budget < host.peak_bytes:
        try:
            less = plan_with(host=budget)
        except BudgetError:
            return found
        if less.fits and less.step_seconds < LONGER * found.step_seconds:
            return less
        budget *= 2
    return found


def host_of(found: Plan) -> TierPlan:
    return next(tier for tier in found.tiers if tier.tier == Tier.HOST.name)


def known_cells(path: Path) -> dict[Key, Cell]:
    """Return the cells that a file has."""
    found: dict[Key, Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        key = row.pop("model"), row.pop("card"), row.pop("way")
        found[key] = Cell(**row)
    return found


def keep(path: Path, key: Key, found: Cell) -> None:
    """Add a cell to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model, card, way = key
    row = {"model": model, "card": card, "way": way, **asdict(found)}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def command(model: str, card: str, way: str) -> str:
    """Return the line that says the same, and more."""
    flags = {"lora_rank": "--lora-rank", "frozen": "--frozen"}
    given = [part for key, value in WAYS[way].items() for part in (flags[key], str(value))]
    return " ".join(
        (
            f"hetero plan {model} --profile {card} --batch {BATCH} --sequence {SEQUENCE}",
            "--precision bf16 --fused-loss",
            *given,
        )
    )


def table(cells: Mapping[Key, Cell]) -> list[str]:
    """Return Markdown: a row for each model and way, a column for each card."""
    cards = [card for card in CARDS if any(key[1] == card for key in cells)]
    known = {(model, way) for model, _, way in cells}
    rows = [row for row in product(MODELS, WAYS) if row in known]
    lines = [
        f"| model | trained | {' | '.join(CARDS[card] for card in cards)} |",
        f"|---|---|{'---|' * len(cards)}",
    ]
    for model, way in rows:
        found = " | ".join(str(cells.get((model, card, way), "not planned")) for card in cards)
        lines.append(f"| {model} | {way} | {found} |")
    return lines


def write(page: Path, lines: Sequence[str]) -> None:
    """Put a table between the marks of a page."""
    text, n = MARKED.subn(lambda m: "\n".join((m[1], *lines, "", m[2])), page.read_text())
    if n != 1:
        raise SystemExit(f"{page} has {n} places for a table of cards, not one")
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the cells that are not known yet, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--cards", nargs="*", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--cells", type=Path, default=CELLS, help="file of cells; delete: all anew")
    parser.add_argument("--write", action="store_true", help="put the tables into README and docs")
    given = parser.parse_args(arguments)
    cells = known_cells(given.cells)
    for model, way, card in product(given.models, given.ways, given.cards):
        key = model, card, way
        if key not in cells:
            cells[key] = cell(*key)
            keep(given.cells, key, cells[key])
            print(f"{model} {way} {card}: {cells[key]}", file=sys.stderr, flush=True)
    print("\n".join(table(cells)))
    if given.write:
        write(PAGE, table(cells))
        write(README, table({key: found for key, found in cells.items() if key[::2] in SHORT}))


if __name__ == "__main__":
    main()
