"""Which model trains on which card: a table of the docs (`python -m benchmarks.cards`).

Every cell is what `hetero plan` says with the card's profile; nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hetero.errors import HeteroError
from hetero.rehearse.plan import plan

BATCH, SEQUENCE = 4, 2048
GIB = 2**30
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


@dataclass(frozen=True, slots=True)
class Cell:
    """What a plan says, or why there is none."""

    fits: bool = False
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    host_bytes: int = 0
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        ram = f"{self.host_bytes / GIB:.0f} GiB RAM"
        return f"{self.step_seconds:.3g} s, {self.tokens_per_second:,.0f} tokens/s, {ram}"


def cell(model: str, card: str, way: str) -> Cell:
    """Plan a step of a model on the machine of a profile, without a disk."""
    settings: dict[str, Any] = {"profile": card, **COMMON, **WAYS[way]}
    try:
        found = plan(model, (BATCH, SEQUENCE), estimates=False, **settings)
    except HeteroError as error:
        return Cell(problem=str(error).splitlines()[0])
    peaks = {tier.tier: tier.peak_bytes for tier in found.tiers}
    if not found.fits:
        short = ", ".join(
            f"{row.needed_bytes / GIB:,.0f} GiB {'RAM' if row.tier == 'HOST' else row.tier}"
            for row in found.shortfalls
        )
        return Cell(problem=f"needs {short}")
    host = peaks.get("HOST", 0)
    return Cell(True, found.step_seconds, found.tokens_per_second, host)


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


def table(cells: Mapping[tuple[str, str, str], Cell]) -> list[str]:
    """Return Markdown: a row for each model and way, a column for each card."""
    cards = list(dict.fromkeys(card for _, card, _ in cells))
    rows = list(dict.fromkeys((model, way) for model, _, way in cells))
    lines = [
        f"| model | trained | {' | '.join(CARDS[card] for card in cards)} |",
        f"|---|---|{'---|' * len(cards)}",
    ]
    for model, way in rows:
        found = " | ".join(str(cells[model, card, way]) for card in cards)
        lines.append(f"| {model} | {way} | {found} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan all cells, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--cards", nargs="*", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    given = parser.parse_args(arguments)
    cells: dict[tuple[str, str, str], Cell] = {}
    for model, way, card in product(given.models, given.ways, given.cards):
        cells[model, card, way] = cell(model, card, way)
        print(f"{model} {way} {card}: {cells[model, card, way]}", file=sys.stderr, flush=True)
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
