"""`hetero watch SCRIPT` (floor 4; no torch until it runs)."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from hetero.errors import HeteroError
from hetero.recipes.flags import DEVICE, option

if TYPE_CHECKING:
    from hetero.watch.face import WatchBlock

UNUSABLE = 2
PAGE = "hetero-watch.html"
HOST_DEFAULT = "what is free, with the program's own on a CPU"
NVME_DEFAULT = "on a CPU, hetero-states where RAM is too small"


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Say what held the memory of a script of yours.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    default=PAGE,
    help=f"The page.  [default: {PAGE}]",
)
@option("--profile", str, "Hardware profile of the rehearsal.", "the one most like this machine")
@option("--device", DEVICE, "Device of the rehearsal.", "the program's")
@option("--hbm", str, "Device budget of the rehearsal, as 20GiB.", "what the program had")
@option("--host", str, "RAM budget of the rehearsal, as 64GiB.", HOST_DEFAULT)
@option("--nvme", str, "Directory for what RAM does not hold.", NVME_DEFAULT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON as the last line.")
def watch(
    script: str,
    args: tuple[str, ...],
    module: bool,
    output: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Run SCRIPT with its ARGS as python would, and say what held its memory.

    SCRIPT is any torch program; no number that it computes changes. At an out-of-memory error, any
    other error, SIGTERM, Ctrl-C or the end, one page is written: memory by module, use and Python
    stack, how CUDA's memory is cut, and the settings with which hetero.prepare would have run it,
    rehearsed. Options of hetero stand before SCRIPT. The exit status is the script's.
    """
    from hetero.watch.face import watch as make

    if not module and not os.path.isfile(script):
        raise click.UsageError(f"there is no script {script}")
    settings = {key: value for key, value in given.items() if value is not None}
    try:
        watched = make(output, program=script, **settings)
    except HeteroError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(UNUSABLE)
    status = run(watched, script, args, module=module)
    if as_json:
        click.echo(json.dumps({"script": script, "exit_status": status, **figures(watched)}))
    sys.exit(status)


def run(watched: WatchBlock, script: str, args: tuple[str, ...], *, module: bool) -> int:
    """Run a program; return the interpreter's exit status for it, after its error is printed."""
    from hetero.integrations.run import started_as

    try:
        names: dict[str, Any] = {}  # the program's, as it ends: until its page is written
        with started_as(script, args, module=module), watched:
            if module:
                names = runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                names = runpy.run_path(script, run_name="__main__")
        del names
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        click.echo(error.code, err=True)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        traceback.print_exception(type(error), error, from_script(error.__traceback__))
    else:
        return 0
    return 1


def from_script(whole: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that ran the script."""
    runner = runpy.run_path.__code__.co_filename
    after, trace = whole, whole
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == runner:
            after = trace.tb_next
        trace = trace.tb_next
    return after


def figures(watched: WatchBlock) -> dict[str, Any]:
    """Return what was seen, as plain data."""
    report = watched.report
    if report is None:
        return {"page": None}
    return {
        "page": str(watched.path),
        "ending": report.ending.name.lower(),
        "said": report.said,
        "steps": report.steps,
        "when": report.picture.when,
        "uses": {use.value: n for use, n in report.picture.by_use().items()},
        "modules": {
            name: {use.value: n for use, n in row.items()}
            for name, row in report.picture.by_module()
        },
        "proposal": report.proposal.line,
        "notes": [*report.proposal.said, *report.notes()],
    }
