"""Plans of meshes and searches for them on the command line (floor 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hetero.errors import ConfigError
from hetero.recipes.options import mesh_sizes
from hetero.recipes.show import facts
from hetero.report.words import format_count, format_seconds

if TYPE_CHECKING:
    from hetero.rehearse.meshes import MeshPlan, StagePlan
    from hetero.rehearse.search import FoundMesh, MeshSearch

NOT_TAKEN = ("lora_rank", "optimizer", "output", "frozen", "device", "sum_group", "gather_shares")


def planned(model: str, given: Mapping[str, Any], positions: int) -> MeshPlan | MeshSearch:
    """Return the plan, or the search, that options ask for."""
    options = {key: value for key, value in given.items() if value not in (None, False)}
    others = [name for name in NOT_TAKEN if name in options]
    if others:
        raise ConfigError(
            f"--{others[0].replace('_', '-')}: a plan of a mesh does not take it",
            advice="leave it out, or plan one rank without stages and divided tensors",
        )
    searching, ranks = options.pop("search", False), options.pop("ranks", None)
    samples, sequence = options.pop("batch", None), options.pop("sequence", positions)
    if "gpu_memory" in options:
        options["hbm"] = options.pop("gpu_memory")
    if searching:
        return searched(model, ranks, (samples, sequence), options)
    from hetero.rehearse.meshes import plan_mesh

    options["mesh"] = mesh_sizes(options["mesh"])
    return plan_mesh(model, (samples or 1, sequence), **options)


def searched(
    model: str, ranks: int | None, batch: tuple[int | None, int], options: Mapping[str, Any]
) -> MeshSearch:
    """Return the best meshes; ConfigError if it is not said for how many ranks."""
    from hetero.rehearse.search import search

    if ranks is None:
        raise ConfigError("--search needs --ranks", advice="say how many, as --ranks 64")
    return search(model, ranks, (batch[0] or ranks, batch[1]), **options)


def show(console: Console, found: MeshPlan | MeshSearch) -> None:
    """Show a plan of a mesh, or the meshes of a search."""
    from hetero.rehearse.meshes import MeshPlan

    if isinstance(found, MeshPlan):
        show_mesh(console, found)
    else:
        show_search(console, found)


def show_mesh(console: Console, plan: MeshPlan) -> None:
    """Show the stages, then the step of all ranks."""
    verdict = "[green]fits[/green]" if plan.fits else "[red]does not fit[/red]"
    console.print(
        f"[bold]{escape(plan.model)}[/bold], {format_count(plan.n_params)} parameters, on"
        f" {plan.n_ranks} ranks of {escape(plan.profile)} ({mesh_text(plan.mesh)}): {verdict}"
    )
    heads = ("stage", "layers", "has", "HBM", "RAM", "forward", "backward", "in flight")
    table = Table(*heads, box=SIMPLE, padding=(0, 1, 0, 0))
    for stages in alike(plan.stages):
        table.add_row(*stage_row(stages))
    console.print(table)
    short = next((stage for stage in plan.stages if stage.shortfall), None)
    if short is not None:
        console.print(f"stage {short.stage}: {escape(short.shortfall)}")
        return
    console.print(facts(mesh_facts(plan)))
    console.print(f"[bold]{escape(plan.paste)}[/bold]", soft_wrap=True)


def alike(stages: tuple[StagePlan, ...]) -> list[list[StagePlan]]:
    """Return stages in a row that were rehearsed as one."""
    rows: list[list[StagePlan]] = []
    for stage in stages:
        kind = stage.layers, stage.numel
        if rows and (rows[-1][0].layers, rows[-1][0].numel) == kind:
            rows[-1].append(stage)
        else:
            rows.append([stage])
    return rows


def stage_row(stages: list[StagePlan]) -> list[str]:
    first, last = stages[0], stages[-1]
    name = f"{first.stage}" if first is last else f"{first.stage}-{last.stage}"
    peaks = [f"{first.peaks.get(tier, 0) / 2**30:.1f} GiB" for tier in ("HBM", "HOST")]
    seconds = [format_seconds(s) for s in (first.forward_seconds, first.backward_seconds)]
    numel = format_count(first.numel)
    return [name, str(first.layers), numel, *peaks, *seconds, str(first.in_flight)]


WHEN = {
    "step": "exchanged once a step (--exchange step of hetero train)",
    "pass": "exchanged after every pass",
}
"""By a plan's exchange: what is said of it."""


def mesh_facts(plan: MeshPlan) -> list[tuple[str, str]]:
    """Return what is said of a step on a mesh."""
    worst = max(plan.stages, key=lambda stage: stage.forward_seconds + stage.backward_seconds)
    rows = [
        ("step", f"{format_seconds(plan.step_seconds)}, {plan.n_passes} micro-batches"),
        ("tokens/s", f"{plan.tokens_per_second:,.0f} of all ranks"),
        ("TFLOP/s", f"{plan.tflops:.0f} a rank, what is computed again among them"),
        ("bubble", f"{plan.bubble:.1%} of the pipeline"),
        ("limited by", plan.limit),
    ]
    if worst.summed_seconds:
        said = f"{format_seconds(worst.summed_seconds)} of sums a micro-batch"
        rows.append(("over tp", said))
    if plan.send_seconds:
        rows.append(("over pp", f"{format_seconds(plan.send_seconds)} a micro-batch"))
    if plan.mesh.get("dp_shard", 1) > 1:
        rest = max(stage.rest_seconds for stage in plan.stages)
        said = f"{format_seconds(rest)} a step of exchanges and updates that it waits for"
        rows.append(("over dp", said))
        rows.append(("gradients", WHEN[plan.exchange]))
    return rows


def show_search(console: Console, found: MeshSearch) -> None:
    """Show the best meshes as a table, and the line of the first one."""
    console.print(
        f"[bold]{escape(found.model)}[/bold] on {found.n_ranks} ranks of {escape(found.profile)}:"
        f" {found.n_candidates} meshes and settings may fit, {found.n_rehearsed} were rehearsed"
    )
    heads = ("pp x dp x tp", "pass", "activations", "step", "tokens/s", "HBM", "RAM", "bubble")
    table = Table(*heads, box=SIMPLE, padding=(0, 1, 0, 0))
    for row in found.rows:
        table.add_row(*search_row(row))
    console.print(table)
    console.print(f"[bold]{escape(found.rows[0].plan.paste)}[/bold]", soft_wrap=True)


def search_row(row: FoundMesh) -> list[str]:
    """Return what is said of a mesh; a pass is of so many samples."""
    plan, here = row.plan, row.candidate
    settings = f"{here.pp} x {here.dp} x {here.tp}", str(here.micro_batch), here.activations
    if not plan.fits:
        return [*settings, "no room", *[""] * 4]
    peaks = [max(s.peaks.get(tier, 0) for s in plan.stages) for tier in ("HBM", "HOST")]
    memory = [f"{peak / 2**30:.1f} GiB" for peak in peaks]
    speed = f"{plan.tokens_per_second:,.0f}"
    return [*settings, format_seconds(plan.step_seconds), speed, *memory, f"{plan.bubble:.0%}"]


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return sizes as an option has them."""
    return ",".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one rank"
