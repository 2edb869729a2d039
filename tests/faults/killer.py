"""Kills savers and looks at what they leave; a process of its own, because it forks.

    python -m tests.faults.killer DIRECTORY each       SIGKILL in place of every operation
    python -m tests.faults.killer DIRECTORY random N   SIGKILL at N random moments

The last line is JSON: how many kills, and every loss found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.reader import State, steps
from hetero.checkpoint.writer import retain
from hetero.errors import HeteroError
from hetero.io import IO, Folder
from tests.faults.saves import SMALL, Quick, contents, load, save, unfinished

LARGE = tuple(SavedTensor("tensor", str(n), "", "uint8", (300_000 * n,)) for n in range(5))
MAX_DELAY_SECONDS = 0.06


class Diary:
    """What savers reported as done, in a file that no checkpoint code knows."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def note(self, step: int) -> None:
        os.write(self._fd, b"%d\n" % step)

    def newest(self) -> int:
        return max(map(int, os.pread(self._fd, 2**24, 0).split()), default=-1)


def killed(child: Callable[[], None], after_seconds: float | None = None) -> bool:
    """Run a function in a forked child; whether it died of SIGKILL, its own or ours."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    if after_seconds is not None:
        time.sleep(after_seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def problems(path: Path, newest: int, entries: tuple[SavedTensor, ...]) -> list[str]:
    """Return what is wrong with what a kill left, where ``newest`` was reported as done."""
    found = [
        f"{each} is visible and damaged" for each in steps(path) if each.state is State.DAMAGED
    ]
    try:
        loaded = load(path)
    except HeteroError as error:
        return [*found, f"step {newest} was reported and nothing loads: {error}"]
    if loaded != contents(loaded[0], entries):
        found.append(f"step {loaded[0]} loads with other bytes")
    if loaded[0] < newest:
        found.append(f"step {newest} was reported, step {loaded[0]} loads")
    return found


def save_next(path: Path, entries: tuple[SavedTensor, ...]) -> list[str]:
    """Save after a kill: it works, and what the killed one left is gone."""
    step = load(path)[0] + 1
    with Folder.open(path, Quick()) as root:
        save(root, step, entries)
    found = [] if load(path) == contents(step, entries) else [f"step {step} after a kill is wrong"]
    return found + [f"{name} stays" for name in unfinished(path)]


def each(path: Path) -> dict[str, Any]:
    """Kill a save over two older ones, which removes the first, in place of each operation."""
    wrong: list[str] = []
    k = 0
    while True:
        here = path / str(k)
        here.mkdir()
        diary = Diary(path / f"{k}.diary")
        with Folder.open(here, Quick()) as root:
            save(root, 0)
        plan = Quick()
        plan.kill_at(k)

        def saver(here: Path = here, diary: Diary = diary, plan: Quick = plan) -> None:
            with Folder.open(here, plan) as root:
                save(root, 1)
                diary.note(1)
                retain(root, keep_last=1)

        if not killed(saver):
            return {"kills": k, "wrong": wrong}
        wrong += [f"kill {k}: {p}" for p in problems(here, max(0, diary.newest()), SMALL)]
        wrong += [f"kill {k}: {p}" for p in save_next(here, SMALL)]
        k += 1


def at_random(path: Path, count: int) -> dict[str, Any]:
    """Kill a process that saves in a loop, with real syncs, at random moments."""
    seeded, wrong, kills = random.Random(0), list[str](), 0
    diary = Diary(path / "diary")
    (path / "root").mkdir()

    def saver() -> None:
        with Folder.open(path / "root", IO()) as root:
            step = max([0, *(found.step + 1 for found in steps(root))])
            while True:
                save(root, step, LARGE)
                diary.note(step)
                retain(root, keep_last=2)
                step += 1

    while diary.newest() < 0:  # the first save has nothing to fall back to
        killed(saver, 1.0)
    for _ in range(count):
        kills += killed(saver, seeded.uniform(0, MAX_DELAY_SECONDS))
        wrong += problems(path / "root", diary.newest(), LARGE)
    wrong += save_next(path / "root", LARGE)
    return {"kills": kills, "saves": diary.newest(), "wrong": wrong}


if __name__ == "__main__":
    place, mode, *rest = sys.argv[1:]
    found = each(Path(place)) if mode == "each" else at_random(Path(place), int(rest[0]))
    print(json.dumps(found))
