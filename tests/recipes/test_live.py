"""What a run shows while it runs: a banner, a bar that fits the terminal, or plain lines."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from hetero.recipes.live import FIRST_STEPS, RunProgress, StepPace, banner, clock, watching
from hetero.recipes.result import EvalLoss, RunBudget, RunStart, StepReport

START = RunStart(
    model="gpt",
    parameters=31_918_080,
    state_bytes=510_689_280,
    device="cpu:sim",
    mode="paged",
    budgets=(
        RunBudget("HBM", 127_672_320, "a quarter of the states"),
        RunBudget("HOST", 255_344_640, "what a rehearsal of this batch needs"),
        RunBudget("NVME", None, "what is free there"),
    ),
    folder="runs/1",
    steps=64,
    resumed=0,
    ended_steps=None,
    minutes=3.5,
    disks=("runs",),
    step_write_bytes=294_060_032,
    save_every=20,
    keep=2,
)


@dataclasses.dataclass(frozen=True)
class FakeStatus:
    """What a line needs of a status."""

    tiers: dict[str, dict[str, int | None]]
    h2d_bytes: int = 2**27
    d2h_bytes: int = 2**27
    read_bytes: int = 2**28
    write_bytes: int = 2**28
    misses: int = 3


TIERS: dict[str, dict[str, int | None]] = {
    "HBM": {"used": 127_000_000, "budget": 127_672_320},
    "HOST": {"used": 2**27, "budget": 2**28},
    "NVME": {"used": 2**28, "budget": None},
}


def report(step: int, seconds: float, **more: Any) -> StepReport:
    """Return the report of a step that made 512 tokens, as all before it."""
    return StepReport(
        step=step,
        planned=64,
        loss=5.678,
        seconds=seconds,
        tokens=512 * step,
        lr=1e-3,
        norm=1.0,
        evaluation=more.get("evaluation"),
        status=FakeStatus(TIERS),  # has what lines are made of
    )


def progress(n_steps: int, **more: Any) -> RunProgress:
    """Return one after two steps of ten seconds and others of half a second."""
    made = RunProgress()
    for step in range(1, n_steps + 1):
        made.saw(report(step, min(step, 2) * 10 + max(0, step - 2) / 2, **more))
    return made


# -- the bar -------------------------------------------------------------------------------------


def test_on_80_columns_a_bar_step_time_loss_and_rate_are_seen() -> None:
    first, second = progress(12).lines(80, ascii_only=True)

    assert first == "###----------------- 12/64  0:26 left  loss 5.678  1,024 tokens/s"
    assert second.startswith("HBM 121.1 MiB/121.8 MiB  HOST 128 MiB/256 MiB  NVME 256 MiB  moved ")


@pytest.mark.parametrize("width", [*range(10, 100, 3), 200])
def test_no_line_is_wider_than_its_terminal_and_the_step_is_always_there(width: int) -> None:
    lines = progress(12, evaluation=EvalLoss(12, 1.0)).lines(width)

    assert all(len(line) <= width for line in lines)
    assert "12/64" in lines[0]
    assert ("left" in lines[0]) == (width >= len("12/64  0:26 left"))


def test_a_terminal_shows_the_bar_and_a_file_gets_plain_lines_without_colour() -> None:
    shown = {}
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
        with watching(console) as watcher:
            watcher.announce(START)
            for step in range(1, 65):
                watcher.watch(report(step, float(step)))
        shown[terminal] = file.getvalue()

    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 20 + " 64/64  0:00 left" in shown[True]
    lines = [line for line in shown[False].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{n}/64" for n in (1, *range(6, 65, 6))]
    assert "\x1b" not in shown[False]


# -- the pace ------------------------------------------------------------------------------------


def test_the_first_two_steps_of_a_process_say_nothing_about_the_others() -> None:
    assert "measuring" in progress(2).lines(80)[0]
    assert "2:04" not in progress(3).lines(80)[0]
    assert "  0:30 left  " in progress(3).lines(80)[0]  # 61 steps of half a second


def test_minutes_that_end_a_run_end_the_wait_too() -> None:
    short = progress(12)
    short.minutes = 0.5

    assert "0:05 left" in short.lines(80)[0]  # of 30 seconds, 25 are over


def test_a_resumed_run_has_a_pace_of_its_own() -> None:
    pace = StepPace()
    for step, seconds in ((41, 1000.0), (42, 1010.0), (43, 1011.0), (44, 1012.0)):
        pace.saw(report(step, seconds))

    assert pace.tokens_per_second() == 512.0
    assert pace.seconds_left(64, None) == 20.0


def test_times_are_said_as_clocks_do() -> None:
    assert [clock(s) for s in (0.4, 65, 3599.6, 7265)] == ["0:00", "1:05", "1:00:00", "2:01:05"]


# -- the banner ----------------------------------------------------------------------------------


def told(**changed: Any) -> list[str]:
    file = io.StringIO()
    banner(Console(file=file, width=80), dataclasses.replace(START, **changed))
    return file.getvalue().splitlines()


def test_the_banner_says_what_runs_where_in_what_and_what_it_writes() -> None:
    assert told() == [
        "model   gpt, 31,918,080 parameters",
        "states  487 MiB: weights, gradients, what the optimizer keeps",
        "device  cpu:sim (simulated: its memory is limited; no CUDA), paged",
        "HBM     121.8 MiB (a quarter of the states)",
        "HOST    243.5 MiB (what a rehearsal of this batch needs)",
        "NVME    no limit (what is free there)",
        "saves   in runs/1, every 20 steps; 2 stay",
        "writes  280.4 MiB a step to runs, 17.53 GiB in all; --host 975MiB ends that",
        "steps   64, or 3.5 minutes",
        f"        {FIRST_STEPS}",
    ]
    assert all(len(line) <= 80 for line in told())


def test_a_banner_without_disks_writes_nothing_but_checkpoints() -> None:
    said = told(disks=(), device="cuda", mode="resident")

    assert "device  cuda, resident" in said
    assert not any(line.startswith("writes") for line in said)
    assert told(disks=("x",), step_write_bytes=0) == told(disks=())
    assert "states to x, y, anew in each step" in told(disks=("x", "y"), step_write_bytes=None)[7]


def test_a_run_that_had_ended_says_so_and_how_to_go_on() -> None:
    over = told(resumed=64, ended_steps=64, minutes=None)
    longer = told(resumed=64, ended_steps=64, steps=100, minutes=None)
    cut = told(resumed=40, minutes=None)

    assert over[-1] == (
        "steps   none: this run had ended after 64; --resume with more --steps goes on"
    )
    assert longer[-2].startswith("steps   100; it had ended after 64")
    assert cut[-2] == "steps   64, 40 of them made before"
    assert "6.573 GiB in all" in cut[-3]
