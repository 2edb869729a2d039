"""`hetero.watch`: what held the memory of a program that is not hetero's (floor 4)."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from hetero.config import Config, Settings, host_limit
from hetero.device import allocated, fragments
from hetero.parallel.started import launch_rank
from hetero.watch.observer import Observer, is_shortage
from hetero.watch.page import write
from hetero.watch.proposal import ProgramMemory, Proposal, propose
from hetero.watch.report import ProgramEnd, Report, lines
from hetero.watch.signals import Terminations
from hetero.watch.stacks import Line, lines_of, present

PAGE = "hetero-watch.html"
PATIENCE = 120.0  # seconds for a rehearsal
HURRY = 10.0  # the same after a signal: what sent it may not wait long
NOT_YET = Proposal("", ("the rehearsal was not over when this was written",))
BROKEN = "hetero watch: no page was written: {}: {}"


class WatchBlock:
    """A ``with`` block of `watch`."""

    def __init__(self, path: Path, config: Config, program: str) -> None:
        self.path = path
        """Of the page."""
        self.report: Report | None = None
        """After the block."""
        self._config = config
        self._program = program
        self._pid = os.getpid()
        self._observer = Observer()
        self._signals = Terminations(self._terminated)
        self._began = time.monotonic()

    def __enter__(self) -> WatchBlock:
        self._began = time.monotonic()
        self._observer.install()
        self._signals.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._observer.failed(error)
        ending, said = ending_of(error)
        if self._signals.received and ending is not ProgramEnd.SHORT:
            ending, said = ProgramEnd.SIGNAL, self._signals.received
        self._finish(ending, said, () if error is None else lines_of(error))

    def _terminated(self, name: str) -> None:
        self._finish(ProgramEnd.SIGNAL, name, present())

    def _finish(self, ending: ProgramEnd, said: str, stack: tuple[Line, ...]) -> None:
        """Stop to follow the program, and tell of it; an error here ends nothing."""
        try:
            self.report = self._seen(ending, said, stack)
        except Exception as error:
            tell(BROKEN.format(type(error).__name__, error))
        finally:
            self._observer.remove()
            self._signals.remove()
        if self.report is None or os.getpid() != self._pid:  # a fork's end is not the program's
            return
        try:
            self._write(self.report)
        except Exception as error:
            tell(BROKEN.format(type(error).__name__, error))
        for line in lines(self.report, str(self.path)):
            tell(line)

    def _write(self, report: Report) -> None:
        if report.ending is ProgramEnd.SIGNAL:
            write(report, self.path)  # before the sender loses patience
        patience = HURRY if report.ending is ProgramEnd.SIGNAL else PATIENCE
        self.report = replace(report, proposal=self._proposal(report, patience))
        write(self.report, self.path)

    def _seen(self, ending: ProgramEnd, said: str, stack: tuple[Line, ...]) -> Report:
        observer = self._observer
        last = observer.now("at the end")
        observer.sampler.end()
        return Report(
            program=self._program,
            ending=ending,
            said=said,
            stack=stack,
            seconds=time.monotonic() - self._began,
            place=str(observer.place),
            steps=observer.steps.count,
            n_optimizers=observer.program.n_optimizers,
            rows=tuple(observer.steps.rows),
            n_samples=observer.sampler.n_samples,
            peak=observer.sampler.peak,
            last=last,
            shortage=observer.shortage,
            fragments=fragments(observer.place),
            proposal=NOT_YET,
            why_off=observer.why_off or observer.sampler.why_not,
        )

    def _proposal(self, report: Report, patience: float) -> Proposal:
        counts = allocated(self._observer.place)
        pictures = (report.picture, report.peak or report.last)
        most = max(picture.n_bytes for picture in pictures)
        if counts is not None:
            most = max(most, counts.peak_bytes)
        cut = report.shortage.fragments if report.shortage is not None else None
        place = self._observer.place
        ram = host_limit().n_bytes + (report.last.n_bytes if place.type == "cpu" else 0)
        had = ProgramMemory(place, most, ram, cut or report.fragments)
        return propose(self._observer.program, had, self._config, report.shortage, patience)


def ending_of(error: BaseException | None) -> tuple[ProgramEnd, str]:
    """Return how a program ended that raised this."""
    if error is None:
        return ProgramEnd.ENDED, ""
    if isinstance(error, SystemExit):
        return ProgramEnd.ENDED, f"exit status {error.code}" if error.code else ""
    if isinstance(error, KeyboardInterrupt):
        return ProgramEnd.SIGNAL, "SIGINT"
    ending = ProgramEnd.SHORT if is_shortage(error) else ProgramEnd.RAISED
    said = error.args[0] if error.args else ""
    return ending, f"{type(error).__name__}: {said}"


def tell(line: str) -> None:
    """Print a line for people, if there is still where to."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr)


def watch(
    path: str | Path = PAGE,
    *,
    program: str | None = None,
    config: Settings = None,
    **settings: Any,
) -> WatchBlock:
    """Follow the torch program inside a ``with`` block, and write one page about its memory.

    The page, and ten lines on standard error, come at the end of the block, at an error (running
    out of memory above all), or at a SIGTERM that would end the process. They say what held the
    memory by use, module and place in the program, with Python stacks; how CUDA's memory is cut;
    and the settings with which `hetero.prepare` would have run the largest step, rehearsed.

    The first two steps, later ones at doubling distances, and each with a larger batch than all
    before are seen allocation by allocation; in the others a call of a module costs a test of an
    attribute. No number that the program computes changes, and no generator. Only the thread that
    enters the block is followed.

    Args:
        path: of the page, an HTML file that needs no network; ranks that a launcher started, but
            the first, add their number to its name.
        program: its name on the page; None: the script's.
        config: as for `hetero.prepare`: where the rehearsal begins; ``settings`` go on top.
        settings: as ``hbm="20GiB"``; ``profile`` names the machine. None: budgets of what the
            program had, and the profile of hetero's own that is most like this machine.

    Raises:
        ConfigError: a setting cannot be honoured.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(8, 8)
        >>> with hetero.watch("runs/page.html", program="an example") as watched:
        ...     model(torch.ones(4, 8)).sum().backward()
        >>> watched.report.ending.value
        'ended'
    """
    name = program or os.path.basename(sys.argv[0]) or "the program"
    page, rank = Path(path), launch_rank()
    if rank:  # the first rank's has the name as given
        page = page.with_stem(f"{page.stem}-rank{rank}")
    return WatchBlock(page, Config.load(config, **settings), name)
