"""Rendering of runs, checks and benchmarks in a terminal (the data is from their modules)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hetero.recipes.live import evaluated
from hetero.report.advice import SHORT_LIFE
from hetero.report.words import format_count, format_seconds, part_label
from hetero.types import Kind, format_bytes

if TYPE_CHECKING:  # these load torch, which rendering does not need
    from benchmarks.runner import Result
    from hetero.checkpoint.verify import Verification
    from hetero.plan.machine import MachineProfile
    from hetero.recipes.calibrate import Calibration
    from hetero.recipes.findings import Check, Examination
    from hetero.recipes.result import TrainResult
    from hetero.rehearse.plan import Plan
    from hetero.status import Status

AGAIN = re.compile(r"[,;:]? \d+ bytes short$")  # what the line says at its begin
WORTH_SAYING = 0.001  # of a planned step
COLOURS = {"green": "green", "yellow": "yellow", "red": "red"}


# -- a run when it is over -----------------------------------------------------------------------


def summary(console: Console, result: TrainResult) -> None:
    """Show the contents of the tiers, and the result."""
    if result.resumed_step == result.steps:  # nothing was left to do, as the banner has said
        console.print(facts(end_facts(result)))
        return
    console.print(what_was_where(result.status))
    console.print(facts(run_facts(result)))


def recorded(console: Console, result: TrainResult) -> None:
    """Show where the report is and how to open it, or why there is none."""
    lines = []
    if result.report_problem:
        lines.append(f"[yellow]no report[/yellow]: {escape(result.report_problem)}")
    if result.report is not None:
        which = f"its first {result.recorded_steps} steps"
        folder = shlex.quote(str(Path(result.report).parent))
        lines.append(f"[bold]report[/bold]: {escape(result.report)}, of {which}")
        lines.append(f"[bold]in this terminal[/bold]: hetero report {escape(folder)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def what_was_where(status: Status) -> Table:
    """Return the contents of each tier at the end, by kind, with its budget and peak."""
    table = Table(title="what was where", title_justify="left")
    table.add_column("")
    for tier in status.tiers:
        table.add_column(tier, justify="right")
    for name in (*(kind.value for kind in Kind), "used", "peak", "budget"):
        if name == "used":
            table.add_section()
        table.add_row(name, *(cell(row[name]) for row in status.tiers.values()))
    return table


def cell(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "no limit"
    return format_bytes(n_bytes) if n_bytes else "-"


def run_facts(result: TrainResult) -> list[tuple[str, str]]:
    """Return the rows below the tiers: units, traffic, speed, loss."""
    status, units = result.status, result.status.units
    resident = sum(where == "resident" for where in units.values())
    traffic = (
        f"H2D {format_bytes(status.h2d_bytes)}, D2H {format_bytes(status.d2h_bytes)},"
        f" {status.fetches} fetches, {status.evictions} evictions, {status.misses} misses"
    )
    return [
        ("model", f"{result.parameters:,} parameters"),
        ("states", format_bytes(result.state_bytes)),
        ("device", f"{status.device}, {status.mode}, updates {status.update_place}"),
        *rank_facts(status),
        ("activations", format_bytes(status.activation_bytes)),
        ("units", f"{resident} resident, {len(units) - resident} at home"),
        ("last step", traffic),
        *disk_facts(status),
        ("speed", f"{result.tokens_per_second:,.0f} tokens/s, {result.seconds:.1f} s of training"),
        *end_facts(result),
    ]


def end_facts(result: TrainResult) -> list[tuple[str, str]]:
    """Return the rows on what a run has learned and left."""
    return [
        ("loss", loss_line(result)),
        *[("evaluated", evaluated(e)) for e in result.evaluations[-1:]],
        ("checkpoint", f"{result.checkpoint}{went_on(result)}"),
        *([] if result.out is None else [("model", result.out)]),
        ("weights", f"sha256 {result.weights_sha256[:16]}; as many steps give it at any budget"),
    ]


def rank_facts(status: Status) -> list[tuple[str, str]]:
    """Return how many ranks there are along each axis of the mesh, if there are several."""
    axes = ", ".join(f"{name} {size}" for name, size in status.ranks.items())
    return [("ranks", axes)] if axes else []


def disk_facts(status: Status) -> list[tuple[str, str]]:
    """Return the bytes written to disk, and their part of the drive's life."""
    if "NVME" not in status.tiers:
        return []
    line = (
        f"read {format_bytes(status.read_bytes)}, wrote {format_bytes(status.write_bytes)};"
        f" written in all {format_bytes(status.written_bytes)}"
    )
    return [("disk", line)]


def went_on(result: TrainResult) -> str:
    """Return where a run resumed, and how to resume one that was stopped."""
    said = f", resumed from step {result.resumed_step}" if result.resumed_step else ""
    if result.steps < result.planned_steps:
        said += "; the same command with --resume goes on"
    return said


def loss_line(result: TrainResult) -> str:
    early = result.steps < result.planned_steps
    why = "time was up" if result.signal is None else "stopped"
    steps = f"{result.steps} of {result.planned_steps}, {why}" if early else result.steps
    return (
        f"{result.first_loss:.3f} -> {result.last_loss:.3f} nats a {result.unit} in steps: {steps}"
        f" (without context: {result.unigram_entropy:.3f})"
    )


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return names and values as a table without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


# -- the doctor ----------------------------------------------------------------------------------


def examination(console: Console, report: Examination) -> None:
    """Show every check with its fix, and the block to paste in issues."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        table.add_row(mark(check), check.name, escape(check.found), escape(check.fix))
    console.print(table)
    console.print("\nTo paste in issues:\n")
    console.print(paste_block(report), markup=False, highlight=False, soft_wrap=True)


def mark(check: Check) -> str:
    colour = COLOURS[check.level.value]
    return f"[{colour}]{check.level.value}[/{colour}]"


def paste_block(report: Examination) -> str:
    """Return the examination as Markdown."""
    rows = [f"{check.name}: {check.found} [{check.level.value}]" for check in report.checks]
    return "\n".join(["```", *rows, "```"])


# -- calibration ---------------------------------------------------------------------------------


@contextmanager
def calibrating(console: Console) -> Iterator[Callable[[str, str, int, int], None]]:
    """Show the progress of measuring: a bar on a terminal, else a line per group."""
    if not console.is_terminal:
        yield lambda group, probe, done, groups: plain_group(console, group, probe)
        return
    with bar(console) as progress:
        task = progress.add_task("calibrate", total=None, line="opening the device")

        def watch(group: str, probe: str, done: int, groups: int) -> None:
            line = f"{group}  {probe}"
            progress.update(task, completed=done, total=groups, line=escape(line))

        yield watch


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[line]}"),
        console=console,
    )


def plain_group(console: Console, group: str, probe: str) -> None:
    if group and not probe:
        console.print(f"measuring: {group}", highlight=False)


def calibration(console: Console, result: Calibration) -> None:
    """Show every figure with its spread, failed measurements, and the profile's path."""
    table = Table(title=escape(f"profile {result.profile.name}"), title_justify="left")
    for name in ("key", "value", "spread", ""):
        table.add_column(name, justify="right" if name in ("value", "spread") else "left")
    for row in result.rows():
        mark = "[yellow]varies[/yellow]" if row.noisy else ""
        table.add_row(escape(row.key), row.value, row.spread, mark)
    console.print(table)
    quality = result.profile.quality
    if quality.noisy:
        line = f"{len(quality.noisy)} figures vary by more than 5 %: measure on a quiet machine"
        console.print(f"[yellow]{line}[/yellow]", highlight=False)
    rows = [("not measured", note) for note in quality.notes]
    rows += [("problem", problem) for problem in result.problems]
    rows += [("measured", rates(result.profile))]
    rows += [("written", f"{result.path}, in {quality.seconds:.0f} s")]
    console.print(facts([*rows, ("next", f"hetero plan MODEL --profile {result.path}")]))


def rates(machine: MachineProfile) -> str:
    """Return a machine's memory, link and drive in a few words."""
    host, link, nvme = machine.host, machine.link, machine.nvme
    found = [("RAM", host.dram_bytes_per_second)]
    if link is not None:
        found += [("up", link.h2d.bytes_per_second), ("down", link.d2h.bytes_per_second)]
    if nvme is not None:
        found += [("read", nvme.read_bytes_per_second), ("write", nvme.write_bytes_per_second)]
    said = ", ".join(f"{name} {figure.value / 1e9:.3g} GB/s" for name, figure in found)
    return f"{format_bytes(int(host.ram_bytes.value))} of RAM; {said}"


def problems(console: Console, found: Mapping[str, Sequence[str]]) -> None:
    """Show the problems of each profile, one per line."""
    for name, lines in found.items():
        for line in lines or ["good"]:
            console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)


# -- checkpoints ---------------------------------------------------------------------------------


def verification(console: Console, report: Verification) -> None:
    """Show each checkpoint with its verdict, and which one to load."""
    table = Table(title=escape(report.path), title_justify="left")
    for name in ("checkpoint", "bytes", "", "problem"):
        table.add_column(name, overflow="fold", justify="right" if name == "bytes" else "left")
    for found in report.checkpoints:
        verdict = "[green]good[/green]" if found.ok else "[red]damaged[/red]"
        size = format_bytes(found.bytes) if found.bytes else "-"
        table.add_row(escape(found.name), size, verdict, escape(found.problem))
    for name in report.unfinished:
        table.add_row(escape(name), "-", "unfinished", "")
    console.print(table)
    newest = "none" if report.newest_good is None else f"step {report.newest_good}"
    console.print(f"newest good: {newest}", highlight=False)


# -- benchmarks ----------------------------------------------------------------------------------


def benchmark(console: Console, result: Result) -> None:
    """Show the cases of a benchmark, with the required values and verdicts."""
    table = Table(title=f"bench {result.bench}", title_justify="left")
    for name in ("case", "value", "unit", "has to be", ""):
        table.add_column(name, justify="right" if name == "value" else "left")
    for case in result.cases:
        verdict = "[green]holds[/green]" if case.holds else "[red]does not hold[/red]"
        wanted = f"{case.op} {case.reach:g}"
        table.add_row(escape(case.name), f"{case.value:g}", escape(case.unit), wanted, verdict)
    console.print(table)
    for text in result.detail.get("wrong", ()):
        console.print(text, markup=False, highlight=False)


def bench_list(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Show the names of the benchmarks, one per line."""
    console.print(facts(rows))


# -- failures ------------------------------------------------------------------------------------


def failure(console: Console, error: Any) -> None:
    """Show an error and its advice, without a traceback."""
    name = type(error).__name__
    console.print(f"[bold red]{name}[/bold red]: {escape(error.args[0])}", highlight=False)
    if error.advice:
        console.print(f"[bold]Advice[/bold]: {escape(error.advice)}", highlight=False)
    for move in error.moves[-12:]:
        console.print(f"  {move}", markup=False)


# -- a plan --------------------------------------------------------------------------------------


def planned(console: Console, plan: Plan, line: str | None = None) -> None:
    """Show whether a plan fits, its needs, and alternatives; at the end ``line``, or that of
    Python to paste."""
    verdict = "[green]fits[/green]" if plan.fits else "[red]does not fit[/red]"
    console.print(
        f"[bold]{escape(plan.model)}[/bold], {format_count(plan.n_params)} parameters, on"
        f" {escape(plan.profile)}: {verdict}"
    )
    for row in plan.shortfalls:
        why = escape(AGAIN.sub("", row.why))
        console.print(f"  {row.tier} is {row.short_bytes:,} bytes short: {why}")
    console.print(plan_tiers(plan))
    console.print(facts(plan_facts(plan)))
    if plan.drive_life_steps is not None and plan.drive_life_steps < SHORT_LIFE:
        console.print(f"[red]the drive lasts {plan.drive_life_steps:,.0f} steps[/red]")
    if len(plan.what_if) > 1:
        console.print(plan_estimates(plan))
    if not plan.fits:
        console.print(f"These figures, and this line, are of {escape(larger(plan))}:")
    console.print(f"[bold]{escape(line or plan.paste)}[/bold]", soft_wrap=True)


def larger(plan: Plan) -> str:
    """Return the budgets with which a plan that does not fit would."""
    return ", ".join(
        f"{format_bytes(row.needed_bytes)} of {row.tier} (now {cell(row.have_bytes)})"
        for row in plan.shortfalls
    )


def plan_tiers(plan: Plan) -> Table:
    table = Table("tier", "budget", "peak", "most of it")
    for row in plan.tiers:
        kinds = sorted(row.at_peak.items(), key=lambda item: -item[1])
        said = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds[:4])
        table.add_row(row.tier, cell(row.budget_bytes), format_bytes(row.peak_bytes), said)
    return table


def plan_facts(plan: Plan) -> list[tuple[str, str]]:
    parts = sorted(plan.shares.items(), key=lambda item: -item[1])
    spent = ", ".join(
        f"{part_label(name.removesuffix('_seconds'))} {format_seconds(seconds)}"
        for name, seconds in parts
        if seconds >= WORTH_SAYING * plan.step_seconds
    )
    first = format_seconds(plan.first_step_seconds)
    rows = [
        ("step", f"{format_seconds(plan.step_seconds)} (the first one {first})"),
        ("tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("spent on", spent),
        ("units", ", ".join(f"{n} {policy}" for policy, n in plan.policies.items())),
    ]
    if plan.start_seconds:
        start = format_seconds(plan.start_seconds)
        rows.insert(1, ("start", f"{start} of page-locking and moving weights"))
    if plan.mfu is not None:
        rows.append(("MFU", f"{100 * plan.mfu:.3g} % (causal attention)"))
    if plan.disk_write_bytes:
        life = plan.drive_life_steps
        known = life is not None and life >= SHORT_LIFE  # a shorter one is said in red
        lasts = f"; the drive lasts {life:,.0f} steps" if known else ""
        rows.append(("written to disk", f"{format_bytes(plan.disk_write_bytes)} a step{lasts}"))
    return rows


def plan_estimates(plan: Plan) -> Table:
    table = Table("what if", "fits", "HBM", "step", "tokens/s", "")
    for name in ("HBM", "step", "tokens/s"):
        next(each for each in table.columns if each.header == name).justify = "right"
    for row in plan.what_if:
        fits, speed = "yes" if row.fits else "no", f"{row.tokens_per_second:,.0f}"
        figures = (format_bytes(row.peak_bytes), format_seconds(row.step_seconds), speed)
        table.add_row(row.label, fits, *figures, row.change)
    return table
