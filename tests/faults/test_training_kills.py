"""Trainers that are killed: what was acknowledged loads, and training ends as if nothing had been.

Run as a program it is the parent that kills: it forks trainers, and must never have a thread.

    python -m tests.faults.test_training_kills DIRECTORY random N    SIGKILL at N random moments
    python -m tests.faults.test_training_kills DIRECTORY each SHARE  SIGKILL in place of operations
                                                                     of a save: of one in SHARE

The last line is JSON: how many kills, and every loss found.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import NoCheckpoint
from hetero.io import ALIGN
from hetero.jobs import Worker
from hetero.testing.faults import FaultPlan
from hetero.train.engine.tuning import Tuning

WIDE, N_LAYERS = 128, 3
LAYER_BYTES = 4 * WIDE * (WIDE + 1)
STEPS, EVERY, KEEP = 24, 2, 2
LAST = 15  # operations of a save that are all killed: the commit, and the removal of an old one
NEVER = 10**6  # operations: no save has so many
TICKS = 9.0  # at most, until a trainer is killed: of its first three it makes no step


# -- what is trained -----------------------------------------------------------------------------


class Training(NamedTuple):
    model: nn.Module
    optimizer: Any
    scheduler: Any


def plain() -> Training:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(0.2)) for _ in range(N_LAYERS)]
    model = nn.Sequential(*(module for layer in layers for module in layer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))


def prepared(spill: Path, seed: int, *, on_disk: bool) -> Training:
    """Prepare the model at budgets, chunks and tiers that a seed draws."""
    rng, training = random.Random(seed), plain()
    sim = rng.random() < 0.5
    settings: dict[str, Any] = {"chunk_bytes": rng.choice([512, 4096])}
    if on_disk or rng.random() < 0.4:  # of 24 extents of 16 KiB and of 8 stages of 64 KiB
        settings |= {"nvme": spill, "host": rng.choice([920_000, 930_000, 950_000])}
    if on_disk or sim or rng.random() < 0.5:
        settings["hbm"] = rng.choice([4, 5, 6]) * LAYER_BYTES
    tuning = Tuning(
        extent_numel=ALIGN, io_threads=rng.randint(1, 4), worker=Worker(rng.randint(0, 2))
    )
    config = Config.load(device="cpu:sim" if sim else "cpu", **settings)
    model, optimizer = prepare_tuned(training.model, training.optimizer, config, tuning)
    if on_disk:
        assert engine_of(model).setup.store.pool.spills
    return Training(model, optimizer, training.scheduler)


def step(training: Training) -> float:
    """Data and dropout come from torch's generator, which a checkpoint has to bring back."""
    model, optimizer, scheduler = training
    loss = model(torch.randn(4, WIDE)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def digest(training: Training) -> str:
    """Return a hash of weights, states and learning rates."""
    found = hashlib.sha256()
    for value in training.model.state_dict().values():
        found.update(value.clone().numpy().tobytes())
    state = training.optimizer.state_dict()
    for number in sorted(state["state"]):
        for key, value in sorted(state["state"][number].items()):
            found.update(key.encode() + value.clone().numpy().tobytes())
    found.update(repr([group["lr"] for group in state["param_groups"]]).encode())
    return found.hexdigest()


class Expected(NamedTuple):
    """An uninterrupted run in plain torch: digests before each step and losses."""

    digests: list[str]
    losses: list[float]


def uninterrupted() -> Expected:
    training = plain()
    torch.manual_seed(1)
    found = Expected([digest(training)], [])
    for _ in range(STEPS):
        found.losses.append(step(training))
        found.digests.append(digest(training))
    return found


# -- children ------------------------------------------------------------------------------------


class Place:
    """Directories of one chain of trainers, and the diary that no code of hetero's knows."""

    def __init__(self, root: Path) -> None:
        self.saves, self.spill, self.diary = root / "saves", root / "spill", root / "diary"
        self.saves.mkdir(parents=True)
        self.spill.mkdir()
        self.diary.touch()

    def note(self, made: int, sha: str) -> None:
        """A save was acknowledged."""
        fd = os.open(self.diary, os.O_WRONLY | os.O_APPEND)
        os.write(fd, f"{made} {sha}\n".encode())
        os.close(fd)

    def noted(self) -> dict[int, str]:
        rows = (line.split() for line in self.diary.read_text().splitlines())
        return {int(made): sha for made, sha in rows}


def resume(place: Place, training: Training) -> int:
    """Load the newest checkpoint, or begin where none was ever made; returns the steps made."""
    model, optimizer, scheduler = training
    try:
        extra = hetero.load_checkpoint(place.saves, model, optimizer, scheduler=scheduler)
    except NoCheckpoint:
        assert not place.noted(), "a checkpoint was acknowledged, and there is none"
        torch.manual_seed(1)
        return 0
    assert extra == {"steps": hetero.status(model).steps}
    return extra["steps"]


def tick() -> None:
    """Tell the parent that a trainer got on."""
    os.write(1, b".")


def train(place: Place, expected: Expected, seed: int) -> None:
    """Train to the end on the disk tier, saving now and then, in one of two ways."""
    tick()
    training, asynchronous = prepared(place.spill, seed, on_disk=True), seed % 3 != 0
    tick()
    made, saving = resume(place, training), None
    tick()
    while made < STEPS:
        assert step(training) == expected.losses[made], f"loss of step {made}"
        made += 1
        tick()
        if made % EVERY == 0 or made == STEPS:
            if saving is not None:
                saving[0].wait()
                place.note(*saving[1:])
            sha = digest(training)
            model, optimizer, scheduler = training
            save = hetero.save_checkpoint(
                *(place.saves, model, optimizer, {"steps": made}),
                scheduler=scheduler,
                keep_last=KEEP,
                asynchronous=asynchronous,
            )
            saving = save, made, sha
    if saving is not None:
        saving[0].wait()
        place.note(*saving[1:])
    assert digest(training) == expected.digests[STEPS]


def check(place: Place, expected: Expected, seed: int, steps: int) -> None:
    """Resume at other budgets: newest is what was acknowledged or newer, and goes on bitwise."""
    assert os.listdir(place.spill) == [], "files were left where homes were"
    noted = place.noted()
    assert all(expected.digests[made] == sha for made, sha in noted.items())
    training = prepared(place.spill, seed, on_disk=False)
    made = resume(place, training)
    assert made >= max(noted, default=0), f"{noted} were acknowledged, {made} loads"
    assert digest(training) == expected.digests[made], f"step {made} is a mixture"
    for number in range(made, min(made + steps, STEPS)):
        assert step(training) == expected.losses[number], f"loss of step {number}"
        assert digest(training) == expected.digests[number + 1], f"weights after {number}"


def save_and_die(place: Place, k: int, seed: int) -> None:
    """Make a step and save, SIGKILLed in place of the ``k``-th operation of the save."""
    training = prepared(place.spill, seed, on_disk=True)
    made, plan = resume(place, training) + 1, FaultPlan()
    step(training)
    sha = digest(training)
    plan.kill_at(k)
    model, optimizer, scheduler = training
    save = hetero.save_checkpoint(
        *(place.saves, model, optimizer, {"steps": made}),
        io=plan,
        scheduler=scheduler,
        keep_last=1,
        asynchronous=k % 2 == 1,
    )
    if k % 2 == 1 and made < STEPS:
        step(training)
    save.wait()
    place.note(made, sha)
    print(plan.seen["any"], flush=True)


# -- the parent ----------------------------------------------------------------------------------


def heard(reading: int, ticks: float) -> bytes:
    """Return what a child said, after so many of its ticks, or at its end.

    A part of a tick is one of their mean time, however busy the machine is.
    """
    began, said = time.monotonic(), b""
    while said.count(b".") < int(ticks):
        more = os.read(reading, 1)
        if not more:
            return said
        said += more
    time.sleep(ticks % 1 * (time.monotonic() - began) / int(ticks))
    return said


def forked(child: Callable[[], object], ticks: float | None = None) -> tuple[bool, str]:
    """Run a function in a child, SIGKILLed after so many ticks.

    Return whether that ended it, and what it said.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would copy locks that threads hold"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        try:
            child()
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {str(error)[:2000]}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    first = b""
    if ticks is not None:
        first = heard(reading, ticks)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        said = (first + pipe.read()).decode()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"a child ended with {os.waitstatus_to_exitcode(status)}: {said}")
    return killed, said


def wrong(act: Callable[[], object]) -> Iterator[str]:
    """Yield what a check in a child found wrong."""
    try:
        forked(act)
    except RuntimeError as error:
        yield str(error)


def expected_of(root: Path) -> Expected:
    """Compute the uninterrupted run in a child, so that this process stays without threads."""
    file = root / "expected"
    forked(lambda: file.write_text(json.dumps(uninterrupted())))
    return Expected(*json.loads(file.read_text()))


def at_random(root: Path, count: int) -> dict[str, Any]:
    """Kill trainers at random moments, each of which goes on where the last one was killed."""
    expected, rng = expected_of(root), random.Random(0)
    problems: list[str] = []
    kills = chains = saves = 0
    while kills < count:
        place, chains, finished = Place(root / str(chains)), chains + 1, False
        while kills < count and not finished:
            seed = rng.randrange(10**6)
            killed, _ = forked(partial(train, place, expected, seed), rng.uniform(1, TICKS))
            kills += killed
            finished = not killed
            steps = STEPS if kills % 5 == 0 else 1
            look = partial(check, place, expected, seed + 1, steps)
            problems += [f"kill {kills}: {what}" for what in wrong(look)]
        problems += wrong(partial(train, place, expected, rng.randrange(10**6)))
        problems += wrong(partial(check, place, expected, 0, STEPS))
        saves += len(place.noted())
    return {"kills": kills, "runs": chains, "saves": saves, "wrong": problems}


def save_twice(place: Place) -> None:
    """Make the checkpoints that a killed save comes after."""
    training = prepared(place.spill, 1, on_disk=True)
    resume(place, training)
    model, optimizer, scheduler = training
    for made in (1, 2):
        step(training)
        hetero.save_checkpoint(
            *(place.saves, model, optimizer, {"steps": made}), scheduler=scheduler
        )


def each(root: Path, share: int) -> dict[str, Any]:
    """Kill a save over older ones, which it removes, in place of one in ``share`` operations."""
    expected, problems = expected_of(root), list[str]()
    first = Place(root / "first")
    forked(partial(save_twice, first))

    def again(name: str) -> Place:
        place = Place(root / name)
        shutil.copytree(first.saves, place.saves, dirs_exist_ok=True)
        place.note(2, expected.digests[2])
        return place

    _, said = forked(partial(save_and_die, again("whole"), NEVER, 0))
    total = int(said.split()[-1])
    kills = newer = 0
    for k in sorted({*range(0, total, share), *range(max(0, total - LAST), total)}):
        place = again(str(k))
        killed, _ = forked(partial(save_and_die, place, k, k))
        kills += killed
        newer += (place.saves / "step-3").exists()
        found = wrong(partial(check, place, expected, k + 1, 2))
        problems += [f"operation {k}: {what}" for what in found]
        shutil.rmtree(place.saves)
    return {"operations": total, "kills": kills, "newer": newer, "wrong": problems}


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain()  # what torch imports when an optimizer is first made, is imported once
    here, mode, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    print(json.dumps(at_random(here, number) if mode == "random" else each(here, number)))


# -- tests ---------------------------------------------------------------------------------------


def run(disk: Path, mode: str, number: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_training_kills", str(disk), mode, str(number)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print({key: value for key, value in found.items() if key != "wrong"})
    assert found["wrong"] == []
    return found


@pytest.mark.campaign(seconds=4)
def test_trainers_that_are_killed_at_any_moment_lose_nothing_that_was_acknowledged(
    disk: Path,
) -> None:
    found = run(disk, "random", 6)
    assert found["kills"] >= 6 and found["saves"] >= 3


@pytest.mark.slow
def test_three_hundred_kills_lose_nothing_that_was_acknowledged(disk: Path) -> None:
    found = run(disk, "random", 300)
    assert found["kills"] >= 300 and found["runs"] >= 3


@pytest.mark.slow  # `test_kills` asks this of every operation of a save without a model
@pytest.mark.parametrize("share", [1])
def test_a_save_that_is_killed_at_any_operation_leaves_the_older_one_or_itself(
    disk: Path, share: int
) -> None:
    found = run(disk, "each", share)
    assert found["operations"] >= 24 and found["kills"] >= LAST + (found["operations"] - LAST) // 2
    assert share > 1 or found["kills"] == found["operations"]
    older = found["kills"] - found["newer"]  # of kills before the commit, each leaves the older one
    assert found["newer"] > LAST / 3 and older >= (found["operations"] - LAST) // 3
