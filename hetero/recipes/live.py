"""A run while it runs: a banner before it, then a bar that fits the terminal, or plain lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from hetero.types import format_bytes

if TYPE_CHECKING:  # this loads torch, which rendering does not need
    from hetero.recipes.result import EvalLoss, RunStart, StepReport

PLAIN_LINES = 10  # reports of a run on a console that is no terminal
MEASURING_STEPS = 2  # of a process; they are slow, and say nothing about those to come
WINDOW = 10  # steps whose mean is the pace
BAR = 20  # columns, where there is room for all else
LEAST_BAR = 5
HEAVY_LIGHT = "\N{BOX DRAWINGS HEAVY HORIZONTAL}\N{BOX DRAWINGS LIGHT HORIZONTAL}"
SIMULATED = " (simulated: its memory is limited; no CUDA)"
STATES = "weights, gradients, what the optimizer keeps"
FIRST_STEPS = "the first two steps measure, and are slow"


# -- before it -----------------------------------------------------------------------------------


def banner(console: Console, start: RunStart) -> None:
    """Say what is about to run, where, within what, and what it leaves."""
    rows = [
        ("model", f"{start.model}, {start.parameters:,} parameters"),
        ("states", f"{format_bytes(start.state_bytes)}: {STATES}"),
        ("device", f"{start.device}{SIMULATED * (start.device == 'cpu:sim')}, {start.mode}"),
        *((each.tier, f"{size(each.n_bytes)} ({each.why})") for each in start.budgets),
        ("saves", f"in {start.folder}, every {start.save_every} steps; {start.keep} stay"),
        *([("writes", writes(start))] if may_write(start) else []),
        ("steps", steps(start)),
        *([] if start.is_over else [("", FIRST_STEPS)]),
    ]
    for name, text in rows:
        console.print(f"[bold]{name:7}[/bold] {escape(text)}", highlight=False, soft_wrap=True)


def size(n_bytes: int | None) -> str:
    return "no limit" if n_bytes is None else format_bytes(n_bytes)


def may_write(start: RunStart) -> bool:
    """Whether steps are to come that write states to a drive, as far as is known."""
    return bool(start.disks) and not start.is_over and start.step_write_bytes != 0


def writes(start: RunStart) -> str:
    """Return what a run writes to the drives that hold states."""
    where, n_steps = ", ".join(start.disks), max(0, start.steps - start.resumed)
    if start.step_write_bytes is None:
        return f"states to {where}, anew in each step; a larger --host keeps more in RAM"
    each, total = (format_bytes(n * start.step_write_bytes) for n in (1, n_steps))
    return f"{each} a step to {where}, {total} in all; --host {host_enough(start)} ends that"


def host_enough(start: RunStart) -> str:
    """Return a budget of RAM, to paste, that holds all states and more."""
    return f"{-(-2 * start.state_bytes // 2**20)}MiB"


def steps(start: RunStart) -> str:
    """Return how many steps there are, and when it ends."""
    made = start.ended_steps or start.resumed
    if start.is_over:
        return f"none: this run had ended after {made}; --resume with more --steps goes on"
    said = f"{start.steps}"
    if start.ended_steps is not None:
        said += f"; it had ended after {made}, and its schedule is that of all now"
    elif start.resumed:
        said += f", {made} of them made before"
    return said + ("" if start.minutes is None else f", or {start.minutes:g} minutes")


# -- its pace ------------------------------------------------------------------------------------


class StepEnd(NamedTuple):
    """The end of a step."""

    step: int
    seconds: float
    tokens: int


class StepPace:
    """How fast the last steps were; the first ones of a process count until others are there."""

    def __init__(self) -> None:
        self._seen: deque[StepEnd] = deque(maxlen=WINDOW + 1)
        self._steps = 0

    def saw(self, report: StepReport) -> None:
        """Take a step into account."""
        self._steps += 1
        if self._steps == MEASURING_STEPS + 1:
            self._seen = deque([self._seen[-1]], maxlen=WINDOW + 1)
        self._seen.append(StepEnd(report.step, report.seconds, report.tokens))

    @property
    def is_known(self) -> bool:
        """Whether there is a step that did not measure."""
        return self._steps > MEASURING_STEPS

    def tokens_per_second(self) -> float:
        """Return the rate of the last steps, or of all if there was but one."""
        first, last = self._seen[0], self._seen[-1]
        if first is last:
            return last.tokens / last.seconds
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9)

    def seconds_left(self, planned: int, minutes: float | None) -> float:
        """Return the seconds to the last step, or to the end of the run's minutes."""
        first, last = self._seen[0], self._seen[-1]
        left = (planned - last.step) * (last.seconds - first.seconds) / (last.step - first.step)
        limit = float("inf") if minutes is None else 60 * minutes - last.seconds
        return max(0.0, min(left, limit))


# -- while it runs -------------------------------------------------------------------------------


class RunProgress:
    """Two lines of a terminal: a bar with step, time left, loss and rate; then the tiers.

    What does not fit is left out, the last first; a line is never wider than the terminal.
    """

    def __init__(self) -> None:
        self.report: StepReport | None = None
        self.minutes: float | None = None
        self.pace = StepPace()

    def saw(self, report: StepReport) -> None:
        self.report = report
        self.pace.saw(report)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width, options.ascii_only):
            yield Text(line, no_wrap=True, overflow="ellipsis")

    def lines(self, width: int, ascii_only: bool = False) -> list[str]:
        """Return the lines for a terminal of ``width`` columns."""
        report = self.report
        if report is None:
            return ["the first step is under way"[:width]]
        parts = [f"{report.step}/{report.planned}", *head(report, self.pace, self.minutes)]
        first = fitting(parts, width)
        room = min(BAR, width - len(first) - 1)
        if room >= LEAST_BAR:
            first = f"{drawn(report.step / report.planned, room, ascii_only)} {first}"
        second = fitting(tiers(report), width)
        return [first, second] if second else [first]


def head(report: StepReport, pace: StepPace, minutes: float | None) -> list[str]:
    """Return what follows the step, the most important first."""
    left = pace.seconds_left(report.planned, minutes) if pace.is_known else None
    return [
        "measuring" if left is None else f"{clock(left)} left",
        f"loss {report.loss:.3f}",
        f"{pace.tokens_per_second():,.0f} tokens/s",
    ]


def fitting(parts: list[str], width: int) -> str:
    """Return as many parts as fit, from the first on."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line


def drawn(share: float, room: int, ascii_only: bool) -> str:
    done = int(share * room)
    marks = "#-" if ascii_only else HEAVY_LIGHT
    return marks[0] * done + marks[1] * (room - done)


def clock(seconds: float) -> str:
    """Return a time as 1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def tiers(report: StepReport) -> list[str]:
    """Return the figures of a step's tiers, traffic and misses."""
    status = report.status
    moved, disk = status.h2d_bytes + status.d2h_bytes, status.read_bytes + status.write_bytes
    return [
        *([] if report.evaluation is None else [f"evaluated {evaluated(report.evaluation)}"]),
        *(f"{name} {fill(row)}" for name, row in status.tiers.items()),
        f"moved {format_bytes(moved)}/step",
        *([f"disk {format_bytes(disk)}/step"] if disk else []),
        f"{status.misses} misses",
    ]


def evaluated(found: EvalLoss) -> str:
    return f"loss {found.loss:.3f}, perplexity {found.perplexity:,.2f}"


def fill(row: dict[str, int | None]) -> str:
    """Return how full a tier is: ``98 MiB/120 MiB``, or without a budget its use."""
    used = format_bytes(row["used"] or 0)
    return used if row["budget"] is None else f"{used}/{format_bytes(row['budget'])}"


class RunWatcher(NamedTuple):
    """What shows a run: before its first step, and after each one."""

    announce: Callable[[RunStart], None]
    watch: Callable[[StepReport], None]


@contextmanager
def watching(console: Console) -> Iterator[RunWatcher]:
    """Show a banner, then a bar on a terminal, else a line now and then; yields the watcher."""
    progress = RunProgress()

    def announce(start: RunStart) -> None:
        banner(console, start)
        progress.minutes = start.minutes

    if not console.is_terminal:
        yield RunWatcher(announce, lambda report: plain_line(console, progress, report))
        return
    with Live(progress, console=console, refresh_per_second=4):
        yield RunWatcher(announce, progress.saw)


def plain_line(console: Console, progress: RunProgress, report: StepReport) -> None:
    progress.saw(report)
    every = max(1, report.planned // PLAIN_LINES)
    if report.step == 1 or report.step % every == 0 or report.evaluation is not None:
        parts = head(report, progress.pace, progress.minutes)
        line = "  ".join([f"step {report.step}/{report.planned}", *parts, *tiers(report)])
        console.print(line, highlight=False, soft_wrap=True)
