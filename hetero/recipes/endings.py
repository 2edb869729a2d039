"""How commands end: signals, exit statuses, errors in their own words, JSON (no torch)."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from hetero.errors import HeteroError
from hetero.parallel.farewell import tell_error
from hetero.parallel.started import launch_rank
from hetero.recipes.flags import as_flags

if TYPE_CHECKING:
    from rich.console import Console

PACKAGE = str(Path(__file__).parents[1])
UNUSABLE = 2  # exit status: the request cannot be honoured as given


@contextmanager
def stopping() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the first SIGINT or SIGTERM; a second one ends the process."""
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: asked[0] if asked else None
    except KeyboardInterrupt:  # click would end with status 1
        click.echo("Interrupted again: what came after the last checkpoint is not saved.", err=True)
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        restore()


def exit_status(call: Callable[[], None]) -> int:
    """Run a user's program; return the interpreter's exit status for it, and print an error."""
    try:
        call()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        click.echo(error.code, err=True)
    except KeyboardInterrupt as error:
        tell_error(error)
        return 128 + signal.SIGINT
    except Exception as error:  # the user's program: as the interpreter ends it
        tell_error(error)
        traceback.print_exception(error.with_traceback(of_the_user(error.__traceback__)))
    else:
        return 0
    return 1


def of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the user's program on; all of it without one."""
    at = trace
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if not name.startswith(PACKAGE) and "runpy" not in name:
            return at
        at = at.tb_next
    return trace


@contextmanager
def failures(as_json: bool) -> Iterator[None]:
    """Turn a typed failure into a short message with its advice, and exit status 2."""
    try:
        yield
    except HeteroError as error:
        from hetero.recipes import show

        speak_flags(error, click.get_current_context().command)
        show.failure(open_console(to_stderr=True), error)
        if as_json and not launch_rank():
            kind = type(error).__name__
            print_json({"error": kind, "message": error.args[0], "advice": error.advice})
        sys.exit(UNUSABLE)


def speak_flags(error: HeteroError, command: click.Command) -> None:
    """Let an error name options of the command, where it has named settings of Python."""
    error.args = (as_flags(error.args[0], command), *error.args[1:])
    error.advice = as_flags(error.advice, command)


def open_console(to_stderr: bool = False) -> Console:
    """Return the console for people: standard error if standard output is for JSON."""
    from rich.console import Console

    return Console(stderr=to_stderr)


def print_json(data: Any) -> None:
    """Print one JSON object on one line of standard output."""
    click.echo(json.dumps(data))
