"""Disks that fail, lie and are interrupted while a model trains on them: typed, whole, bitwise."""

from __future__ import annotations

import errno
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import (
    BudgetError,
    ChunkCorrupt,
    ConfigError,
    HeteroError,
    StateError,
    StorageError,
)
from hetero.io import ALIGN, IO
from hetero.jobs import Worker
from hetero.testing.faults import FaultPlan
from hetero.train.engine.tuning import Tuning
from hetero.types import Tier
from tests.conftest import RUNS

WIDE = 128  # features: a layer has four extents of each kind
HBM = 7 * 4 * WIDE * WIDE
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS", "EINTR", "short", "nothing"]
MICRO = 2


# -- a model on disk, beside plain torch's -------------------------------------------------------


def build(n_layers: int = 4) -> nn.Module:
    torch.manual_seed(3)
    layers = [(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(0.1)) for _ in range(n_layers)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def compute(model: nn.Module, number: int) -> float:
    """Run forward and backward of a step, in micro-steps; returns the sum of the losses."""
    torch.manual_seed(number)
    total = 0.0
    for _ in range(MICRO):
        loss = model(torch.randn(4, WIDE)).square().mean() / MICRO
        loss.backward()
        total += loss.item()
    return total


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Reference:
    """What plain torch computes: losses[n] of step n, weights[n] before it."""

    def __init__(self, n_layers: int) -> None:
        self._model = build(n_layers)
        self._optimizer = adamw(self._model)
        self.losses: list[float] = []
        self.weights = [values(self._model)]

    def until(self, step: int) -> None:
        """Compute up to the weights before a step."""
        while len(self.losses) < step:
            self.losses.append(compute(self._model, len(self.losses)))
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.weights.append(values(self._model))


@functools.cache
def reference(n_layers: int = 4) -> Reference:
    return Reference(n_layers)


@functools.cache
def least_host() -> int:
    """Return the least HOST with which the model trains."""
    with pytest.raises(BudgetError) as failure:
        prepare(build(), RUNS, host=1)
    return failure.value.needed_bytes


def prepare(
    model: nn.Module,
    disk: Path,
    *,
    io: IO | None = None,
    io_threads: int = 2,
    worker: Worker | None = None,
    pause: Callable[[], None] | None = None,
    **settings: Any,
) -> Any:
    if "host" not in settings:
        settings["host"] = least_host()
    settings = {"device": "cpu", "hbm": HBM, "chunk_bytes": 4096, "nvme": disk, **settings}
    tuning = Tuning(extent_numel=ALIGN, io=io, io_threads=io_threads, worker=worker, pause=pause)
    return prepare_tuned(model, adamw(model), Config.load(**settings), tuning)


def prepare_empty() -> Any:
    """Prepare a model of zeros in memory, for a checkpoint to be loaded into."""
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return hetero.prepare(model, adamw(model), device="cpu")


@dataclass
class Run:
    """Training on a disk that may fail, compared with plain torch at every step."""

    disk: Path
    plan: FaultPlan = field(default_factory=FaultPlan)
    settings: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    number: int = 0

    def __post_init__(self) -> None:
        self.model, self.optimizer = prepare(build(), self.disk, io=self.plan, **self.settings)
        self.reference = reference()

    def step(self) -> None:
        """Make one step, whatever comes in between: it is made whole or not at all."""
        self.reference.until(self.number + 1)
        while self.number == self.steps_made:
            if not self.went_well("compute", self.try_compute):
                self.check_whole(self.number)
                self.optimizer.zero_grad()
                continue
            if not self.went_well("step", self.optimizer.step):
                self.check_whole(self.steps_made)
                self.optimizer.zero_grad()
        if not self.went_well("zero_grad", self.optimizer.zero_grad):
            self.optimizer.zero_grad()
        self.number += 1

    def try_compute(self) -> None:
        assert compute(self.model, self.number) == self.reference.losses[self.number]

    def went_well(self, what: str, act: Any) -> bool:
        """Whether an act succeeded; all that else there may be is a StorageError."""
        try:
            act()
        except StorageError as error:
            assert error.advice and error.op and error.path
            self.outcomes[f"{type(error).__name__} in {what}"] += 1
            self.check_typed_or_whole()
            self.plan.clear()
            return False
        return True

    @property
    def steps_made(self) -> int:
        return hetero.status(self.model).steps

    def check_typed_or_whole(self) -> None:
        """Before the disk is well again, weights can be read as a whole or not at all."""
        try:
            found = values(self.model)
        except StorageError:
            return
        assert any(equal(found, self.reference.weights[n]) for n in (self.number, self.number + 1))

    def check_whole(self, step: int) -> None:
        """The weights are those before a step, all of them."""
        assert equal(values(self.model), self.reference.weights[step]), "weights are mixed"

    def until_fired(self, limit: int = 4) -> None:
        """Train until the fault that was planned has happened."""
        before = self.plan.fired
        for _ in range(limit):
            self.step()
            if self.plan.fired > before:
                return
        raise AssertionError(f"the fault did not fire in {limit} steps")

    def check_end(self) -> None:
        """Training goes on, a checkpoint can be saved and loaded, and the disk was used."""
        self.plan.clear()
        self.step()
        self.check_whole(self.number)
        engine, status = engine_of(self.model), hetero.status(self.model)
        assert engine.setup.store.pool.spills and status.read_bytes > 0 and status.write_bytes > 0
        assert 0 < engine.setup.store.pool.cache.peak <= engine.setup.store.pool.n_bytes
        assert engine.setup.ledger.peak(Tier.HOST) <= (engine.setup.config.host or 0)
        gc.collect()
        assert (
            engine.residence.runtime.saved.footprint.live_bytes == 0
        )  # of steps that were given up
        hetero.save_checkpoint(self.disk / "saves", self.model, self.optimizer)
        model, optimizer = prepare_empty()
        hetero.load_checkpoint(self.disk / "saves", model, optimizer)
        assert equal(values(model), self.reference.weights[self.number])
        for _ in range(2):
            self.reference.until(self.number + 1)
            assert compute(model, self.number) == self.reference.losses[self.number]
            optimizer.step()
            optimizer.zero_grad()
            self.step()
            assert equal(values(model), self.reference.weights[self.number])
        self.check_whole(self.number)
        hetero.release(self.model, self.optimizer)


def plan_fault(plan: FaultPlan, op: str, k: int, what: str, times: int | None) -> None:
    """Let the ``k``-th call of ``op`` from now on go wrong."""
    at = plan.seen[op] + k
    if what == "short":
        plan.short_at(op, at, ALIGN, times)
    elif what == "nothing":  # a direct transfer that never moves a whole block
        plan.short_at(op, at, 1, times)
    else:
        plan.fail_at(op, at, getattr(errno, what), times)


@functools.cache
def calls_of_a_step(op: str) -> int:
    """Return how many calls of an op a step makes once states are there."""
    with tempfile.TemporaryDirectory(dir=RUNS) as disk:
        run = Run(Path(disk))
        for _ in range(2):
            run.step()
        before = run.plan.seen[op]
        run.step()
        run.check_whole(3)
        calls = run.plan.seen[op] - before
        hetero.release(run.model, run.optimizer)
    return calls


ONCE, FOR_EVER = 1, None
CAMPAIGN = [(op, what, times) for op in ("read", "write") for what in ERRORS for times in (1, None)]
in_every_way = pytest.mark.parametrize(
    ("op", "what", "times"),
    CAMPAIGN,
    ids=[f"{op}-{what}-{'once' if times else 'forever'}" for op, what, times in CAMPAIGN],
)


def fail_at_each(disk: Path, op: str, what: str, times: int | None, indices: list[int]) -> Counter:
    run = Run(disk)
    run.step()
    for k in indices:
        plan_fault(run.plan, op, k, what, times)
        run.until_fired()
        if times is None:  # what failed may have been ahead of its use
            run.step()
        run.plan.clear()
    run.check_end()
    return run.outcomes


@pytest.mark.campaign(seconds=3)
@in_every_way
def test_a_transfer_that_fails_leaves_the_weights_before_or_after_the_step(
    disk: Path, op: str, what: str, times: int | None
) -> None:
    rng = random.Random(f"{op} {what} {times}")
    calls = calls_of_a_step(op)
    assert calls > 20
    outcomes = fail_at_each(disk, op, what, times, [rng.randrange(calls) for _ in range(4)])
    print(dict(outcomes))
    if what == "short" or (times == ONCE and what in ("EINTR", "nothing")):
        assert not outcomes
    elif times is FOR_EVER:  # what fails once may be tried again before anybody needs it
        assert outcomes


@pytest.mark.slow
@in_every_way
def test_every_transfer_of_a_step_may_fail(
    disk: Path, op: str, what: str, times: int | None
) -> None:
    calls = calls_of_a_step(op)
    outcomes = fail_at_each(disk, op, what, times, list(range(calls)))
    print(f"{calls} faults, {dict(outcomes)}")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.campaign(seconds=2)) for n in (1, 2))]
)
def test_a_disk_on_which_anything_may_fail_at_any_time_trains_bitwise(
    disk: Path, seed: int
) -> None:
    """Faults of all kinds, several at once, with threads that update and threads that read."""
    rng = random.Random(seed)
    workers = [Worker(0), Worker(1), Worker(2, pick=rng.randrange)]
    run = Run(disk, settings={"worker": workers[seed], "io_threads": 1 + 3 * seed})
    run.step()
    for _ in range(12):
        for _ in range(rng.randint(1, 3)):
            op, what = rng.choice(["read", "write"]), rng.choice(ERRORS)
            plan_fault(run.plan, op, rng.randrange(60), what, rng.choice([1, 2, 5, None]))
        run.until_fired()
    assert run.plan.fired >= 12
    run.check_end()
    print(run.plan.fired, dict(run.outcomes))
    assert run.outcomes  # most of what fails is tried again before anybody needs it


# -- faults of prepare ---------------------------------------------------------------------------


DEEP = 8  # layers whose parameters alone are more than the pool


class Preparing(NamedTuple):
    op: str
    k: int
    what: str
    times: int | None


def faults_of_prepare(disk: Path) -> list[Preparing]:
    """Return the faults that prepare may meet: at each call, of each kind, once and for ever.

    How much is written while homes are filled depends on how fast that goes: about half at least.
    Writes that fail for ever have a test of their own.
    """
    plan = FaultPlan()
    model, optimizer = prepare(build(DEEP), disk, io=plan)
    seen = Counter({op: count for op, count in plan.seen.items() if op != "any"})
    hetero.release(model, optimizer)
    assert min(seen[op] for op in ("open", "stat", "private", "reserve", "write")) >= 1
    for op in ("read", "write"):
        seen[op] //= 2
    return [
        Preparing(op, k, what, times)
        for op, count in seen.items()
        for k in range(count)
        for what in (ERRORS if op in ("read", "write") else ERRORS[:5])
        for times in ((1,) if op == "write" and what != "short" else (1, None))
    ]


def check_a_fault_of_prepare(disk: Path, fault: Preparing) -> str:
    """Prepare with a fault; a model that was refused trains in plain torch as if nothing was."""
    plan, model, expected = FaultPlan(), build(DEEP), reference(DEEP)
    plan_fault(plan, *fault)
    params, outcome = list(model.parameters()), "success"
    try:
        model, optimizer = prepare(model, disk, io=plan)
    except (StorageError, ConfigError) as error:  # a directory that cannot be used
        assert error.advice, fault
        outcome, optimizer = type(error).__name__, adamw(model)
    if not plan.fired:  # so few reads or writes were made this time
        assert outcome == "success" and fault.op in ("read", "write"), fault
    plan.clear()
    if outcome != "success":
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True)), fault
        assert all(type(param) is nn.Parameter for param in params), fault
    assert equal(values(model), expected.weights[0]), fault
    expected.until(2)
    for number in range(2):
        assert compute(model, number) == expected.losses[number], fault
        optimizer.step()
        optimizer.zero_grad()
    assert equal(values(model), expected.weights[2]), fault
    if outcome == "success":
        hetero.release(model, optimizer)
    return outcome if plan.fired else "not reached"


def test_prepare_on_a_disk_that_fails_leaves_a_plain_model(disk: Path) -> None:
    every = faults_of_prepare(disk)
    faults = [fault for fault in every if fault.op not in ("read", "write")]
    faults += random.Random(0).sample([f for f in every if f.op in ("read", "write")], 10)
    outcomes = Counter(check_a_fault_of_prepare(disk, fault) for fault in faults)
    print(f"{len(faults)} of {len(every)} faults, {dict(outcomes)}")
    assert outcomes["DiskFull"] >= 3 and len(outcomes) >= 3


def test_prepare_on_a_disk_that_stops_writing_leaves_a_plain_model(disk: Path) -> None:
    assert check_a_fault_of_prepare(disk, Preparing("write", 0, "EIO", None)) == "DiskWriteError"


@pytest.mark.slow
def test_every_call_of_prepare_may_fail(disk: Path) -> None:
    every = faults_of_prepare(disk)
    outcomes = Counter(check_a_fault_of_prepare(disk, fault) for fault in every)
    print(f"{len(every)} faults, {dict(outcomes)}")
    assert outcomes["not reached"] < len(every) // 4


# -- disks that lie ------------------------------------------------------------------------------


def numbers_after_a_lie(disk: Path, how: Literal["drop", "misdirect", "flip"], k: int) -> str:
    """Train after a write that was lost, misplaced or damaged: an error, or the right numbers."""
    run = Run(disk)
    for _ in range(2):
        run.step()
    run.plan.lie_at(run.plan.seen["write"] + k, how)
    try:
        for number in range(2, 6):
            run.reference.until(number + 1)
            loss = compute(run.model, number)
            assert loss == run.reference.losses[number], f"write {k}: a wrong number"
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.check_whole(6)
    except ChunkCorrupt as error:
        assert error.advice and error.path.startswith(str(disk))
        return "ChunkCorrupt"
    finally:
        assert run.plan.fired == 1
    return "right numbers"


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("how", ["drop", "misdirect", "flip"])
def test_a_disk_that_lies_is_found_out_before_a_number_is_wrong(
    disk: Path, how: Literal["drop", "misdirect", "flip"]
) -> None:
    rng = random.Random(how)
    outcomes = Counter(numbers_after_a_lie(disk, how, rng.randrange(80)) for _ in range(8))
    print(dict(outcomes))
    assert outcomes["ChunkCorrupt"] >= 4  # some slots are written again before they are read


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "misdirect", "flip"])
def test_no_lie_is_believed(disk: Path, how: Literal["drop", "misdirect", "flip"]) -> None:
    calls = calls_of_a_step("write")
    outcomes = Counter(numbers_after_a_lie(disk, how, k) for k in range(calls))
    print(dict(outcomes))


def test_a_damaged_model_does_not_go_on_and_a_new_one_resumes_from_its_checkpoint(
    disk: Path,
) -> None:
    run = Run(disk)
    for _ in range(2):
        run.step()
    hetero.save_checkpoint(disk / "saves", run.model, run.optimizer)
    for k in range(3):
        run.plan.lie_at(run.plan.seen["write"] + k, "drop")
    for _ in range(2):  # again and again, and never a number
        with pytest.raises(ChunkCorrupt):
            for number in range(2, 6):
                run.reference.until(number + 1)
                assert compute(run.model, number) == run.reference.losses[number]
                run.optimizer.step()
                run.optimizer.zero_grad()
    fresh = Run(disk)
    hetero.load_checkpoint(disk / "saves", fresh.model, fresh.optimizer)
    fresh.number = 2
    fresh.step()
    fresh.check_whole(3)


# -- disks that do not come back ----------------------------------------------------------------


MOMENTS = ["forward", "first step", "step"]


def stuck(disk: Path, moment: str) -> Run:
    """Return a training whose disk failed for good, before a forward or a step."""
    run = Run(disk)
    for _ in range(0 if moment == "first step" else 2):
        run.step()
    run.reference.until(run.number + 4)
    if moment != "forward":
        run.try_compute()
    for op in ("read", "write"):
        plan_fault(run.plan, op, 0, "EIO", None)
    with pytest.raises(StorageError):
        for number in range(4):
            if number or moment != "forward":
                run.optimizer.step()
                run.optimizer.zero_grad()
            compute(run.model, run.number)
    return run


def things_of(disk: Path) -> tuple[set[str], list[str]]:
    """Return the threads of ours that are alive, and the files that are open on a disk."""
    links = Path("/proc/self/fd")
    files = [os.readlink(link) for link in links.iterdir() if link.is_symlink()]
    alive = (t for t in threading.enumerate() if t.name.startswith("hetero-io"))
    threads = {f"{t.name} {t.ident}" for t in alive}
    return threads, [file for file in files if file.startswith(str(disk))]


@pytest.mark.parametrize("moment", MOMENTS)
def test_release_gives_up_what_a_failed_disk_holds_and_says_so(disk: Path, moment: str) -> None:
    threads, files = things_of(disk)  # some of which other tests left, and may end
    run = stuck(disk, moment)
    params = list(run.model.parameters())
    assert things_of(disk)[1]
    with pytest.raises(StateError, match="a drive took along") as caught:
        hetero.release(run.model, run.optimizer)
    assert isinstance(caught.value.__cause__, StorageError)
    found = things_of(disk)
    assert found[0] <= threads and found[1] == files
    for param in params:
        assert type(param) is nn.Parameter and bool(param.isnan().all())
    with pytest.raises(StateError, match="not prepared"):
        hetero.release(run.model, run.optimizer)
    with torch.no_grad():
        assert bool(run.model(torch.randn(4, WIDE)).isnan().all())


def test_release_on_a_disk_that_fails_once_changes_nothing_and_succeeds_later(disk: Path) -> None:
    run = Run(disk)
    for _ in range(2):
        run.step()
    for op in ("read", "write"):
        plan_fault(run.plan, op, 0, "EIO", None)
    with pytest.raises(StorageError):
        hetero.release(run.model, run.optimizer)
    run.plan.clear()
    run.step()
    run.check_whole(3)
    model, optimizer = hetero.release(run.model, run.optimizer)
    assert equal(values(model), run.reference.weights[3])
    run.reference.until(4)
    assert compute(model, 3) == run.reference.losses[3]
    optimizer.step()
    assert equal(values(model), run.reference.weights[4])


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_model_that_is_dropped_takes_its_threads_and_files_along(disk: Path, moment: str) -> None:
    gc.collect()
    threads, files = things_of(disk)  # some of which other tests left, and may end
    run = stuck(disk, moment)
    del run
    for _ in range(100):  # threads end by themselves, when they have seen it
        gc.collect()
        found = things_of(disk)
        if found[0] <= threads and found[1] == files:
            break
        time.sleep(0.01)
    assert found[0] <= threads and found[1] == files


# -- Ctrl-C --------------------------------------------------------------------------------------


class Interrupting(FaultPlan):
    """Lets Ctrl-C arrive in the middle of the ``left``-th transfer from now on, which waits until
    the training has nothing to do but wait for it."""

    left = -1
    sending = False

    def call(self, op: str, act: Any, *args: Any, where: str, offset: int = 0) -> Any:
        if op in ("read", "write"):
            self.left -= 1
            if self.left == 0:
                self.sending = True
                time.sleep(0.05)
                self.sending = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.01)
        return super().call(op, act, *args, where=where, offset=offset)

    def disarm(self) -> None:
        """Return when no Ctrl-C is to come any more; the last one may come now."""
        self.left = -1
        while self.sending:
            time.sleep(0.001)


def interrupted_steps(
    run: Run, moments: Iterable[Any], arm: Callable[[Any], None], disarm: Callable[[], None]
) -> int:
    """Train while Ctrl-C comes in; every interrupted step is found whole, and made again if it
    was not made. Returns how many there were."""
    count = 0
    for moment in moments:
        step = run.number
        run.reference.until(step + 2)
        try:
            arm(moment)
            run.step()
            disarm()
        except KeyboardInterrupt:
            count += 1
            run.number = run.steps_made
            assert run.number in (step, step + 1)
            run.check_whole(run.number)
            run.optimizer.zero_grad()
    run.step()
    run.check_end()
    return count


def test_an_interrupt_during_a_transfer_leaves_a_step_that_can_be_made_again(disk: Path) -> None:
    plan, rng = Interrupting(), random.Random(0)
    run = Run(disk, plan=plan, settings={"io_threads": 1})
    run.step()

    def arm(moment: int) -> None:
        plan.left = moment

    moments = [rng.randint(1, 80) for _ in range(20)]
    assert interrupted_steps(run, moments, arm, plan.disarm) >= 10


def test_a_step_that_was_interrupted_when_it_was_begun_is_counted(disk: Path) -> None:
    asked = [signal.SIGINT]

    def pause() -> None:
        if run.number == 2 and asked:
            signal.raise_signal(asked.pop())

    run = Run(disk, settings={"worker": Worker(0), "pause": pause})
    for _ in range(2):
        run.step()
    run.reference.until(3)
    run.try_compute()
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    run.check_whole(3)
    assert hetero.status(run.model).steps == 3


# -- forks ---------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """Batches of the reference, which forked workers make; ``model`` is looked at where given."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Tensor:
        if self.model is not None:
            return self.model(torch.zeros(1, WIDE))
        torch.manual_seed(number)
        return torch.stack([torch.randn(4, WIDE) for _ in range(MICRO)])


def loader(rows: Rows) -> Any:
    return torch.utils.data.DataLoader(
        rows, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )


def test_dataloaders_that_fork_while_the_disk_works_change_nothing(disk: Path) -> None:
    model, optimizer = prepare(build(), disk, io_threads=4, worker=Worker(2))
    plain = build()
    theirs = adamw(plain)
    for _ in range(2):  # a pass forks: updates and transfers of the last step are under way
        for number, batch in enumerate(loader(Rows())):
            losses = []
            for side, stepper in ((plain, theirs), (model, optimizer)):
                torch.manual_seed(number)
                loss = sum(side(x).square().mean() for x in batch)
                loss.backward()
                stepper.step()
                stepper.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
    assert equal(values(plain), values(model))
    assert hetero.status(model).written_bytes > 0
    hetero.release(model, optimizer)


@pytest.mark.filterwarnings("ignore")
def test_a_forked_worker_that_uses_the_model_is_told_so(disk: Path) -> None:
    model, optimizer = prepare(build(), disk)
    compute(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    batches = iter(loader(Rows(model)))
    with pytest.raises(HeteroError, match="forked process"):
        next(batches)
    batches._shutdown_workers()
    reference().until(2)
    assert compute(model, 1) == reference().losses[1]
    optimizer.step()
    assert equal(values(model), reference().weights[2])


# -- the end of the process ----------------------------------------------------------------------

ENDINGS = {"return": "pass", "sys.exit": "sys.exit(7)", "exception": "raise LookupError('end')"}
CODES = {"return": 0, "sys.exit": 7, "exception": 1}
ENDING = """
import sys, time
from pathlib import Path
import torch
from hetero.checkpoint.save import save_checkpoint
from hetero.io import IO
from tests.faults.test_training_faults import build, compute, prepare

class Slow(IO):
    def call(self, op, act, *args, where, offset=0):
        if op in ("write", "read"):
            time.sleep({delay})
        return super().call(op, act, *args, where=where, offset=offset)

torch.set_num_threads(1)
disk = Path({disk!r})
model, optimizer = prepare(build(), disk, host={host}, io=Slow())
for number in range(3):
    compute(model, number)
    optimizer.step()
    optimizer.zero_grad()
    if number == 1:
        save_checkpoint(disk / "saves", model, optimizer, io=IO()).wait()
save = save_checkpoint(disk / "saves", model, optimizer, asynchronous=True, io=Slow())
assert not save.done
print("saving", flush=True)
{ending}
"""


class Ended(NamedTuple):
    """What a process left that ended during a save."""

    names: list[str]
    said: str


def end(disk: Path, ending: str, delay: float) -> Ended:
    code = ENDING.format(disk=str(disk), delay=delay, ending=ENDINGS[ending], host=least_host())
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "saving" in done.stdout, done.stderr
    assert done.returncode == CODES[ending], done.stderr
    assert "Fatal" not in done.stderr and ("LookupError" in done.stderr) == (ending == "exception")
    return Ended(sorted(path.name for path in (disk / "saves").iterdir()), done.stderr)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize(
    ("ending", "delay"), [("return", 0.0), ("sys.exit", 0.0), ("exception", 0.003)]
)
def test_a_process_that_ends_during_a_save_completes_it_or_leaves_none(
    disk: Path, ending: str, delay: float
) -> None:
    ended = end(disk, ending, delay)
    assert set(ended.names) <= {"step-2", "step-3"} and "step-2" in ended.names
    model, optimizer = prepare_empty()
    hetero.load_checkpoint(disk / "saves", model, optimizer)
    step = hetero.status(model).steps
    assert f"step-{step}" == ended.names[-1]
    reference().until(step + 1)
    assert equal(values(model), reference().weights[step])
    assert compute(model, step) == reference().losses[step]


@pytest.mark.campaign(seconds=3)
def test_a_save_that_the_end_of_the_process_cut_off_is_reported(disk: Path) -> None:
    ended = end(disk, "return", 0.003)
    assert "step-3" in ended.names or "step-3" in ended.said
