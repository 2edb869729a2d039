"""The command line: ``hetero train | run | watch | plan | calibrate | report | doctor | ...``.

Commands import what they need when they run, so that ``hetero --help`` is fast and loads no torch.
Each returns its exit status.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from hetero.config import Config, parse_bytes
from hetero.parallel.started import launch_rank, launched
from hetero.recipes.endings import exit_status, failures, open_console, print_json, stopping
from hetero.recipes.flags import (
    DEVICE,
    POSITIVE,
    PRECISION,
    SCHEDULE,
    SIZE,
    RunCommand,
    fields_as_options,
    option,
    unit_options,
)
from hetero.recipes.guide import (
    PLAN_EXAMPLES,
    TRAIN_EXAMPLES,
    TRAIN_GROUPS,
    Commands,
    GroupedCommand,
    ModelName,
)
from hetero.recipes.options import asks_for_mesh, mesh_sizes
from hetero.version import __version__
from hetero.watch.command import watch

if TYPE_CHECKING:
    from rich.console import Console

    from hetero.recipes.calibrate import CalibrateOptions
    from hetero.recipes.options import TrainOptions
    from hetero.recipes.result import StepReport
    from hetero.rehearse.plan import Plan

DISAPPOINTED = 1  # exit status: a check is red, or a benchmark does not hold
NOT_USED = (
    "hetero run: {} built no Accelerator and no Trainer, so hetero had nothing to do. In a loop of"
    " your own, call model, optimizer = hetero.prepare(model, optimizer, hbm=...)"
)
BUDGET_OF = {"HBM": "hbm", "HOST": "host", "NVME": "nvme-bytes"}
POSITIONS = 1024  # of a planned sample
LAST_LINE = "Print JSON as the last line."
EACH_STEP = "Print a line of JSON for each step, and one at the end."


class Result(Protocol):
    """The result of a command."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""


Found = TypeVar("Found", bound=Result)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="hetero")
def main() -> None:
    """Virtual memory for training: any nn.Module trains inside a byte budget."""


def answers(text: str = LAST_LINE) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Give a command --json, and exit with its status, or 2 after a HeteroError."""

    def decorate(command: Callable[..., int]) -> Callable[..., None]:
        @click.option("--json", "as_json", is_flag=True, help=text)
        @functools.wraps(command)
        def answer(as_json: bool, **given: Any) -> None:
            with failures(as_json):
                status = command(as_json=as_json, **given)
            sys.exit(status)

        return answer

    return decorate


@main.command(
    cls=GroupedCommand,
    groups=TRAIN_GROUPS,
    examples=TRAIN_EXAMPLES,
    short_help="Train a language model inside byte budgets.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="TOML, YAML or JSON file of options.",
)
@click.option("--dry-run", is_flag=True, help="Plan this run (see hetero plan), and train nothing.")
@fields_as_options
@answers(EACH_STEP)
def train(config: str | None, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Train a language model inside byte budgets of HBM, RAM and disk.

    Without options a byte-level GPT learns real text, in budgets that its states exceed. Ctrl-C, or
    SIGTERM, finishes the step and saves it; the same command with --resume goes on bit for bit.

    Options in a file have the same names; those on the command line go on top. The exit status is 0
    for a whole run, 2 for a request that cannot be honoured, 130 after Ctrl-C, 143 after SIGTERM;
    with --dry-run 1 where it does not fit.
    """
    from hetero.recipes.options import command_options

    options = command_options(config, said(given))
    check_early(options, dry_run)
    with stopping() as stop:
        return plan_run(options, as_json) if dry_run else train_run(options, stop, as_json)


def check_early(options: TrainOptions, dry_run: bool) -> None:
    """Refuse what can be refused before torch is imported, which takes seconds."""
    from hetero.recipes.folders import folder_of
    from hetero.recipes.hub import check_reach
    from hetero.recipes.options import check_paths_of, settings_of
    from hetero.rehearse.named import machine

    config = settings_of(options)
    if dry_run or config.profile is not None:
        machine(config)
    check_paths_of(options)
    if launched() == 1:  # else all ranks hear of it, when they have joined
        folder_of(options)
    check_reach(options.model)


def train_run(options: TrainOptions, stop: Callable[[], int | None], as_json: bool) -> int:
    """Train, and show it; returns the exit status."""
    from hetero.recipes import show
    from hetero.recipes.live import watching
    from hetero.recipes.train import train as run

    if launch_rank():  # the first rank shows the run
        signal = run(options, stop=stop).signal
        return 0 if signal is None else 128 + signal
    console = open_console(as_json)
    with watching(console) as watcher:

        def tell_step(report: StepReport) -> None:
            watcher.watch(report)
            if as_json:
                print_json({"step": report.step, **report.figures()})

        result = run(options, tell_step, stop, watcher.announce)
    show.summary(console, result)
    show.recorded(console, result)
    if as_json:
        print_json(result.as_json())
    return 0 if result.signal is None else 128 + result.signal


def plan_run(options: TrainOptions, as_json: bool) -> int:
    """Show the plan of a run; returns the exit status."""
    from hetero.recipes import show
    from hetero.recipes.train import dry_run

    def shown(console: Console, plan: Plan) -> None:
        show.planned(console, plan, f"the same command without --dry-run{as_options(plan)}")

    return 0 if tell(dry_run(options), as_json, shown).fits else DISAPPOINTED


def as_options(plan: Plan) -> str:
    """Return the budgets that a plan had to raise, as options to add."""
    raised = {BUDGET_OF[row.tier]: row.needed_bytes for row in plan.shortfalls}
    return "".join(f", with --{name} {n_bytes}" for name, n_bytes in raised.items())


@main.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script of yours under byte budgets, without an edit.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@option("--config", click.Path(), "TOML file of hetero settings.", "the one HETERO_CONFIG names")
@option("--device", DEVICE, "Where to compute.", "as the script does")
@option("--hbm", SIZE, "Device budget, as 20GiB.", "all of it")
@option("--host", SIZE, "RAM budget, as 64GiB.", "what is free")
@click.option("--nvme", multiple=True, help="Directory for what RAM does not hold; repeatable.")
@option("--nvme-bytes", SIZE, "Budget of those directories, as 1TiB.", "what is free there")
@option("--pinned", SIZE, "RAM that CUDA may page-lock, as 512MiB.", "what it takes")
@option("--precision", PRECISION, "Of working weights.", "as the model has them")
@unit_options
@option("--chunk-bytes", SIZE, "Bytes of a chunk, as 4MiB.", "chosen")
@answers()
def run(script: str, args: tuple[str, ...], module: bool, as_json: bool, **given: Any) -> int:
    """Run SCRIPT with its ARGS as python would; what it trains, trains under byte budgets.

    Every Accelerator of accelerate and every Trainer (of Transformers, TRL ...) that it builds is
    hetero's; it needs no edit. Options of hetero stand before SCRIPT, and budgets may stand
    right after it: -- ends them, and all that follows is the script's. The exit status is the
    script's. Launchers start it as a module: accelerate launch -m hetero run SCRIPT.
    """
    from hetero.integrations.run import Session

    if not module and not os.path.isfile(script):
        raise click.UsageError(f"there is no script {script}")
    settings = said(given)
    file = settings.pop("config", None) or os.environ.get("HETERO_CONFIG") or None
    session = Session(Config.load(file, **settings))
    status = exit_status(lambda: session.run(script, args, module=module))
    if status == 0 and session.accelerators == 0:
        click.echo(NOT_USED.format(script), err=True)
    if as_json:
        built = {"accelerators": session.accelerators, "trainers": session.trainers}
        print_json({"script": script, "exit_status": status, **built})
    return status


@main.command(cls=GroupedCommand, short_help="Measure this machine for plans.")
@click.option("--quick/--full", default=True, help="Under a minute, or minutes.  [default: quick]")
@option("--output", click.Path(dir_okay=False), "File to write.", "profiles/<host>.toml")
@option("--nvme", click.Path(file_okay=False), "Directory on the drive to measure.", "this one")
@option("--nvme-burnin", SIZE, "Write so much, as 400GB, to find where the drive slows down.", "no")
@option("--device", DEVICE, "What to measure.", "cuda when there is one, else cpu")
@click.option("--lint", "linting", is_flag=True, help="Check profiles in FILES, measure nothing.")
@click.argument("files", nargs=-1, type=click.Path())
@answers()
def calibrate(
    quick: bool, linting: bool, files: tuple[str, ...], as_json: bool, **given: Any
) -> int:
    """Measure this machine and write its hardware profile.

    Under torchrun the first rank measures its machine, then all measure what joins them. With
    --lint, check profiles instead; the exit status is 1 when one has a problem.
    """
    if bool(files) != linting:
        raise click.UsageError("--lint takes FILES, and FILES need --lint")
    problems = lint_files(files, as_json) if linting else measure_machine(quick, given, as_json)
    return DISAPPOINTED if problems else 0


def measure_machine(quick: bool, given: dict[str, Any], as_json: bool) -> bool:
    """Calibrate, show the figures; returns whether the linter finds something in them."""
    from hetero.recipes import show
    from hetero.recipes.calibrate import calibrate as run

    options = calibrate_options(quick, given)
    if launch_rank():  # the first rank shows the figures
        return bool(run(options).problems)
    console = open_console(as_json)
    with show.calibrating(console) as watch:
        result = run(options, watch)
    show.calibration(console, result)
    if as_json:
        print_json(result.as_json())
    return bool(result.problems)


def calibrate_options(quick: bool, given: dict[str, Any]) -> CalibrateOptions:
    """Return the options of a calibration from those of the command line."""
    from pathlib import Path

    from hetero.recipes.calibrate import CalibrateOptions
    from hetero.recipes.probes import FULL, QUICK

    paths = {key: Path(given[key]) for key in ("output", "nvme") if given[key] is not None}
    burn_in = given["nvme_burnin"]
    return CalibrateOptions(
        pace=QUICK if quick else FULL,
        device=given["device"],
        burn_in_bytes=None if burn_in is None else parse_bytes(burn_in, "nvme_burnin"),
        **paths,
    )


def lint_files(files: tuple[str, ...], as_json: bool) -> bool:
    """Show the problems of each profile; returns whether there are any."""
    from hetero.plan.hardware import lint_file
    from hetero.recipes import show

    found = {name: lint_file(name) for name in files}
    if as_json:
        print_json(found)
    else:
        show.problems(open_console(), found)
    return any(found.values())


@main.command(short_help="Report what a run did with memory and time.")
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the report as HTML.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write its pictures as PNG.")
@click.option(
    "--perfetto", type=click.Path(dir_okay=False), help="Write a trace, as trace.json.gz."
)
@click.option(
    "--assert", "claims", multiple=True, help="Check a claim, as 'hbm.peak <= 23GiB'; repeatable."
)
@answers()
def report(
    run: str, other: str | None, claims: tuple[str, ...], as_json: bool, **files: str | None
) -> int:
    """Report what a recorded RUN did with memory and time.

    RUN is its directory, that of a run's checkpoints, as runs/1, or one with the run of each rank
    inside. With an OTHER run, both are shown side by side; claims are on OTHER.

    The exit status is 1 when a claim does not hold.
    """
    from hetero.recipes.folders import recorded_in
    from hetero.report import terminal
    from hetero.report.claims import judge
    from hetero.report.make import examined
    from hetero.report.measure import figures

    made = examined(recorded_in(run), recorded_in(other) if other else None)
    found = made.as_json()
    verdicts = judge(claims, figures(found))
    written = made.write_files(**files)
    if as_json:
        print_json({**found, "claims": [verdict.as_json() for verdict in verdicts]})
    else:
        console = open_console()
        made.show(console)
        terminal.show_verdicts(console, verdicts)
        terminal.show_written(console, written)
    return 0 if all(verdict.holds for verdict in verdicts) else DISAPPOINTED


@main.command(
    cls=GroupedCommand,
    examples=PLAN_EXAMPLES,
    short_help="Say whether a model fits, and how fast it trains.",
)
@click.argument("model", type=ModelName())
@option("--profile", str, "Hardware profile: a file, or a name as rtx4090; needed.")
@option("--gpu-memory", "--hbm", SIZE, "Device budget, as 24GiB.", "all of it")
@option("--host", SIZE, "RAM budget, as 64GiB.", "what the profile's machine has")
@option("--nvme", str, "Directory for what RAM does not hold.", "no disk")
@option("--nvme-bytes", SIZE, "Budget of that directory, as 1TiB.", "no limit")
@option("--pinned", SIZE, "RAM that CUDA may page-lock, as 512MiB.", "what it takes")
@option("--batch", POSITIVE, "Samples of a step.", "1")
@option("--sequence", POSITIVE, "Positions of a sample.", "1024")
@option("--ranks", POSITIVE, "Ranks that share the model; plans one.", "1")
@option("--mesh", str, "Instead, sizes as dp_replicate=2,dp_shard=4.", "shares for all ranks")
@click.option("--search", is_flag=True, help="Find the ten best meshes of --ranks.")
@option("--schedule", SCHEDULE, "Of a pipeline (pp in --mesh).", "1f1b")
@option("--stages-per-rank", POSITIVE, "Of an interleaved one.", "2")
@option("--exchange", click.Choice(["step", "pass"]), "Of gradients, after each.", "step")
@option("--sum-group", POSITIVE, "Ranks in a row whose gradients add up first.", "1")
@click.option("--gather-shares", is_flag=True, help="Ranks of a machine gather, as machines do.")
@option("--precision", PRECISION, "Of working weights.", "fp32")
@unit_options
@option("--lora-rank", POSITIVE, "Plan adapters of this rank, the model frozen.", "train it all")
@option("--frozen", click.Choice(["keep", "int8", "nf4"]), "Of frozen weights, at rest.", "keep")
@option("--optimizer", str, "By name, as adamw8bit, sgd.", "adamw")
@option("--device", DEVICE, "What to plan for.", "cuda where the profile has a GPU, else cpu:sim")
@click.option("--fused-loss", is_flag=True, help="Compute the loss without all logits at once.")
@click.option("--no-estimates", is_flag=True, help="Leave out what else would fit.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write a report as HTML.")
@answers()
def plan(model: str, as_json: bool, no_estimates: bool, output: str | None, **given: Any) -> int:
    """Say whether training MODEL fits, how fast it is, and what limits it, before it runs.

    With pp or tp in --mesh one rank of each kind of stage is planned, and with --search the best
    meshes of --ranks are found, for a --batch of all of them.

    MODEL is a published one by name (llama-3-8b), a config.json or its directory, or a function of
    a module here, as mymodels:small, which returns model and batch (then --batch and --sequence say
    nothing). The exit status is 1 when it does not fit, 2 when that cannot be planned.
    """
    from hetero.recipes import mesh_plans, show

    if asks_for_mesh(given):
        mesh = mesh_plans.planned(model, {**given, "output": output}, POSITIONS)
        return 0 if tell(mesh, as_json, mesh_plans.show).fits else DISAPPOINTED
    found = planned(model, not no_estimates, given)
    if output is not None:
        found.write(output)
    return 0 if tell(found, as_json, show.planned).fits else DISAPPOINTED


def planned(model: str, estimates: bool, given: dict[str, Any]) -> Plan:
    from hetero.rehearse.named import config_of, is_factory, machine

    given = {key: value for key, value in given.items() if value not in (None, False)}
    samples, positions = given.pop("batch", 1), given.pop("sequence", POSITIONS)
    ranks = given.pop("ranks", 1)
    for name in ("schedule", "stages_per_rank", "exchange"):  # of pipelines
        given.pop(name, None)
    if "mesh" in given:
        given["mesh"] = mesh_sizes(given["mesh"])
    elif ranks > 1:
        given["mesh"] = {"dp_shard": ranks}
    if "gpu_memory" in given:
        given["hbm"] = given.pop("gpu_memory")
    variant = {name: given.pop(name) for name in ("lora_rank", "optimizer") if name in given}
    machine(Config.load(None, **given))  # before torch is imported, which takes seconds
    if not is_factory(model):
        config_of(model)

    from hetero.rehearse.plan import plan as make

    sys.path.insert(0, "")  # a console script does not search the working directory by itself
    return make(model, (samples, positions), estimates=estimates, **variant, **given)


@main.command(short_help="Check this machine, and say how to fix it.")
@answers()
def doctor(as_json: bool) -> int:
    """Check this machine, and say how to fix what slows hetero down."""
    from hetero.recipes import show
    from hetero.recipes.findings import without_torch

    try:
        from hetero.recipes.doctor import examine
    except (ImportError, OSError) as error:  # a library that torch is linked to may be missing
        found = without_torch(error)
    else:
        found = examine()
    return 0 if tell(found, as_json, show.examination).healthy else DISAPPOINTED


@main.command(short_help="Check every byte of checkpoints.")
@click.argument("directory", type=click.Path())
@answers()
def verify(directory: str, as_json: bool) -> int:
    """Check every byte of the checkpoints in DIRECTORY or in the runs in it, or of the one it is.

    The exit status is 1 when one is damaged, 2 when there is nothing to check.
    """
    from hetero.checkpoint.verify import verify as examine
    from hetero.recipes import show
    from hetero.recipes.folders import saved_in

    found = [tell(examine(each), as_json, show.verification) for each in saved_in(directory)]
    return 0 if all(each.ok for each in found) else DISAPPOINTED


@main.command(short_help="Run a benchmark, from a clone.")
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="List the benchmarks.")
@click.option("--all", "every", is_flag=True, help="Run all of them.")
@option("--device", DEVICE, "Where to compute.", "as each benchmark says")
@answers()
def bench(name: str | None, listing: bool, every: bool, device: str | None, as_json: bool) -> int:
    """Run a benchmark NAME; the exit status is 1 when one of its cases does not hold."""
    from hetero.bench import runner
    from hetero.recipes import show

    benches = runner()
    known = dict(benches.names())
    if listing:
        if as_json:
            print_json(known)
        else:
            show.bench_list(open_console(), known.items())
        return 0
    chosen = list(known) if every else [chosen_bench(name, known)]
    results = [tell(benches.run_bench(each, device), as_json, show.benchmark) for each in chosen]
    return 0 if all(case.holds for result in results for case in result.cases) else DISAPPOINTED


def chosen_bench(name: str | None, known: dict[str, str]) -> str:
    """Return the name of a benchmark; a usage error lists the names there are."""
    if name is not None and name in known:
        return name
    problem = "give a NAME, --all or --list" if name is None else f"there is no benchmark {name!r}"
    raise click.UsageError(f"{problem}; benchmarks: {', '.join(known)}")


main.add_command(watch)


# -- shared by commands --------------------------------------------------------------------------


def said(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value not in (None, ())}


def tell(found: Found, as_json: bool, show: Callable[[Console, Found], None]) -> Found:
    """Print a result as JSON, or show it to people; returns it."""
    if as_json:
        print_json(found.as_json())
    else:
        show(open_console(), found)
    return found
