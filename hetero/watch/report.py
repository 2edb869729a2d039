"""What was seen of a program, as one value, and in ten lines (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from hetero.device import Fragments
from hetero.report.words import format_seconds
from hetero.types import format_bytes
from hetero.watch.observer import Shortage
from hetero.watch.picture import Holding, Picture
from hetero.watch.proposal import Proposal
from hetero.watch.stacks import Line
from hetero.watch.steps import StepRow

FEW = 3  # modules, and lines of a stack, in the terminal


class ProgramEnd(Enum):
    """How a program ended."""

    ENDED = "ended"
    RAISED = "raised an error"
    SHORT = "ran out of memory"
    SIGNAL = "was ended by a signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A watched program."""

    program: str
    ending: ProgramEnd
    said: str
    """The error's message, or the signal's name; empty for an end without either."""
    stack: tuple[Line, ...]
    """Where it ended, the innermost first."""
    seconds: float
    place: str
    steps: int
    n_optimizers: int
    """That made them."""
    rows: tuple[StepRow, ...]
    n_samples: int
    peak: Picture | None
    """Of the steps whose allocations were seen."""
    last: Picture
    """At the end."""
    shortage: Shortage | None
    fragments: Fragments | None
    proposal: Proposal
    why_off: str

    @property
    def picture(self) -> Picture:
        """The one to look at first: of the moment without memory, else the peak."""
        if self.shortage is not None:
            return self.shortage.picture
        return self.peak or self.last

    @property
    def verdict(self) -> str:
        """Return how the program ended, in one sentence."""
        by = f" of {self.n_optimizers} optimizers" if self.n_optimizers > 1 else ""
        after = f"after {self.steps} whole steps{by} and {format_seconds(self.seconds)}"
        said = f": {self.said}" if self.said else ""
        return f"{self.program} {self.ending.value} {after}, on {self.place}{said}"

    def notes(self) -> Iterator[str]:
        """Yield what limits these figures."""
        if self.why_off:
            yield f"The program was followed no further after an error of hetero's: {self.why_off}."
        if self.peak is None and not self.shortage_has_stacks:
            yield (
                "No step's allocations were seen: no model with parameters was called, its code is"
                " compiled, hetero manages it, or the program has a dispatch mode of its own."
            )
        if not self.picture.has_stacks:
            yield "Here only what has an owner is known: parameters, gradients, states, buffers."
        yield "Counted are bytes as requested, of operations of torch; not libraries, nor rounding."

    @property
    def shortage_has_stacks(self) -> bool:
        return self.shortage is not None and self.shortage.picture.has_stacks


def lines(report: Report, page: str) -> Iterator[str]:
    """Yield the lines for a terminal, ten at most."""
    shown, fragments = report.picture, report.fragments
    yield f"hetero watch: {first_line(report.verdict)}"
    stack = report.shortage.stack if report.shortage is not None else report.stack
    if stack:
        yield f"  at {' < '.join(str(line) for line in stack[:FEW])}"
    if shown.n_bytes:
        uses = ", ".join(f"{use.value} {format_bytes(n)}" for use, n in shown.by_use().items())
        yield f"  {format_bytes(shown.n_bytes)} {shown.when}: {uses}"
        modules = ((name, sum(row.values())) for name, row in shown.by_module()[:FEW])
        yield f"  most in {', '.join(f'{name} {format_bytes(n)}' for name, n in modules)}"
    made = [holding for holding in shown.holdings if holding.stack]
    if made:
        yield f"  largest: {described(made[0])}"
    if report.peak is not None and report.peak is not shown:
        yield f"  {format_bytes(report.peak.n_bytes)} {report.peak.when}"
    if fragments is not None:
        yield f"  {cut(fragments)}"
    if report.proposal.line:
        yield f"  with hetero: {report.proposal.line}"
    yield f"  {report.proposal.said[0]}"
    yield f"  page: {page}"


def described(holding: Holding) -> str:
    """Return a holding in words."""
    times = f" in {holding.n_tensors} tensors" if holding.n_tensors > 1 else ""
    at = f", at {holding.stack[0]}" if holding.stack else ""
    return (
        f"{format_bytes(holding.n_bytes)}{times} of {holding.operation or 'before'},"
        f" {holding.use.value} of {holding.module}{at}"
    )


def cut(found: Fragments) -> str:
    """Return how a device's memory is cut, in words."""
    retries = f"; it had to give back blocks {found.n_retries} times" if found.n_retries else ""
    return (
        f"torch reserved {format_bytes(found.reserved_bytes)} of the device;"
        f" {format_bytes(found.unused_bytes)} of it are in no tensor, in {found.n_free} pieces, the"
        f" largest {format_bytes(found.largest_free_bytes)}{retries}"
    )


def first_line(text: str) -> str:
    return text.partition("\n")[0]
