"""Ctrl-C anywhere: a step counts or it does not, the next has the right bits, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero import interrupts
from hetero.errors import StorageError
from hetero.interrupts import Deferring
from hetero.jobs import Job, Worker
from hetero.memory.manager import ChunkManager
from hetero.train.update.draft import Drafts
from tests.conftest import RUNS
from tests.faults.interrupted import TIERS, WAYS, interrupt

N_EACH = 38  # of eight campaigns: 304
SECONDS = 300


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_training_that_is_interrupted_again_and_again_goes_on_bit_for_bit(
    tier: str, way: str
) -> None:
    RUNS.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.interrupted", tier, way, "0", str(N_EACH), "280"],
        env={**os.environ, "INTERRUPTED_DISK": str(RUNS)},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("tier", "way"), [("resident", "line"), ("cpu", "line"), ("sim", "time"), ("disk", "line")]
)
def test_a_sample_of_these_interrupts(tier: str, way: str, disk: Path) -> None:
    outcomes = interrupt(tier, way, seed=1, n=3, disk=disk)
    assert outcomes.total() == 3


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """Models that other tests left behind hold no signal of these."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- who handles it, and where -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def handlers_are_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    found = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert found is before


def prepared(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    settings = {"device": "cpu", "hbm": 6000, "chunk_bytes": 256, "units": ["[0-9]"], **settings}
    return hetero.prepare(model, torch.optim.Adam(model.parameters()), **settings)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def press_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let Ctrl-C be pressed once, inside a method of ours."""
    plain = getattr(owner, name)

    def pressed(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, pressed)


def test_ctrl_c_inside_a_step_comes_out_of_the_step_that_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = prepared()
    step(model, optimizer)
    press_in(monkeypatch, Drafts, "close")
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert hetero.status(model).steps == 2
    hetero.release(model, optimizer)


def test_ctrl_c_inside_an_access_comes_out_of_the_training_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = prepared()
    press_in(monkeypatch, ChunkManager, "pin")
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            model(torch.ones(2, 16))
    step(model, optimizer)
    hetero.release(model, optimizer)


def test_ctrl_c_in_what_is_the_users_comes_out_at_once() -> None:
    model, optimizer = prepared()
    calls = []

    def press(*_: Any) -> None:
        calls.append(1)
        signal.raise_signal(signal.SIGINT)
        calls.append(2)

    handle = model[2].register_forward_hook(press)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 16))
    handle.remove()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(press)
    assert calls == [1, 1]
    step(model, optimizer)
    assert hetero.status(model).steps == 1
    hetero.release(model, optimizer)


def test_a_handler_of_the_users_own_is_called_once_for_each_time_it_is_pressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        assert not interrupts.is_closed(frame) or hetero.status(model).steps == 2
        seen.append(number)

    before = signal.signal(signal.SIGINT, mine)
    model, optimizer = prepared()
    step(model, optimizer)
    press_in(monkeypatch, Drafts, "close")
    step(model, optimizer)
    assert seen == [signal.SIGINT]
    signal.raise_signal(signal.SIGINT)
    assert len(seen) == 2
    hetero.release(model, optimizer)
    assert signal.signal(signal.SIGINT, before) is mine


def test_presses_that_waited_together_are_each_handled() -> None:
    seen: list[int] = []
    deferring = interrupts.Deferring(lambda number, frame: seen.append(number))
    deferring.waiting = 3

    deferring.handle(None)

    assert seen == [signal.SIGINT] * 3
    assert deferring.waiting == 0


def test_a_handler_that_is_set_while_a_model_is_prepared_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    model, optimizer = prepared()
    ours = signal.signal(signal.SIGINT, mine)
    assert isinstance(ours, Deferring)
    press_in(monkeypatch, Drafts, "close")
    step(model, optimizer)  # which lets Ctrl-C wait for its end again
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, ours)  # as a notebook does behind each cell
    step(model, optimizer)
    hetero.release(model, optimizer)
    assert signal.getsignal(signal.SIGINT) is ours.handler


def test_the_handler_from_before_is_back_behind_the_last_model() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = prepared(), prepared()
    hetero.release(*first)
    assert isinstance(signal.getsignal(signal.SIGINT), Deferring)
    hetero.release(*second)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(hetero.BudgetError):
        prepared(hbm=10)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_python_does_not_handle_is_left_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    model, optimizer = prepared()
    step(model, optimizer)
    assert signal.signal(signal.SIGINT, before) is handler
    hetero.release(model, optimizer)


def test_a_model_that_another_thread_prepares_leaves_the_handler_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: found.append(prepared()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    hetero.release(*found[0])


def pressing_until(done: threading.Event) -> threading.Thread:
    """Press Ctrl-C twice, and say so."""

    def press() -> None:
        for _ in range(2):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        done.wait()

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["settle", "join"])
def test_the_second_ctrl_c_ends_a_wait_that_does_not_end(how: str) -> None:
    stuck, begun, told = threading.Event(), threading.Event(), threading.Event()
    worker = Worker(1)

    def slow() -> None:
        begun.set()
        stuck.wait()

    job = worker.submit(worker.job([slow], 1))
    begun.wait()

    thread = pressing_until(told)
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        job.wait() if how == "settle" else worker.close()
    told.set()
    thread.join()
    stuck.set()
    job.wait()
    worker.close()


class Missed(threading.Condition):
    """Something happens, and is told, just as the first wait has run out of time."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._acts = [act]

    def wait(self, timeout: float | None = None) -> bool:
        assert self._acts, "it waits for what has happened"
        self.release()
        self._acts.pop()()
        self.acquire()
        return False


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_what_happens_as_a_wait_runs_out_of_time_is_seen(seconds: float | None) -> None:
    happened: list[bool] = []
    changed = Missed(lambda: happened.append(True))
    with changed:
        assert interrupts.wait(changed, lambda: bool(happened), seconds)


def test_a_job_that_ends_as_a_wait_for_it_runs_out_of_time_is_done() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait()

    def end() -> None:
        go.set()
        thread.join()

    job = Job([slow])
    thread = threading.Thread(target=job.help)
    job._changed = Missed(end)
    thread.start()
    begun.wait()
    job.wait()
    assert job.done


def test_what_failed_on_another_thread_is_tried_again_by_who_waits() -> None:
    begun, go = threading.Event(), threading.Event()
    done: list[threading.Thread] = []

    def work() -> None:
        if threading.current_thread() is thread:
            begun.set()
            go.wait()
            raise StorageError("the drive failed then", advice="")
        done.append(threading.current_thread())

    def end() -> None:
        go.set()
        thread.join()

    job = Job([work])
    thread = threading.Thread(target=job.help)
    job._changed = Missed(end)
    thread.start()
    begun.wait()
    job.wait()
    assert done == [threading.current_thread()]


def test_what_was_given_up_for_ctrl_c_is_done_by_the_next_who_waits() -> None:
    done: list[str] = []

    def impatient() -> None:
        if not done:
            done.append("given up")
            raise KeyboardInterrupt
        done.append("done")

    job = Job([impatient])
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    assert not job.done
    job.wait()
    assert done == ["given up", "done"]
