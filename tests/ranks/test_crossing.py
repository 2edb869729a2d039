"""Gradients that cross between ranks on a thread: what fails there is told at once, everywhere."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from hetero import DivergenceError, StateError
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.errors import RankLost
from hetero.testing.ranks import Died, outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.crossing import Crossings
from hetero.train.gradients.exchange import Exchange
from tests.ranks.models import Run, assert_same, built, by_ranks, by_torch, loss_of

pytestmark = pytest.mark.usefixtures("short_parts")
ROOM = {"cpu": "1GiB", "cpu:sim": "10MB"}
PLACES = [("cpu", True), ("cpu:sim", True), ("cpu:sim", False)]
TIMEOUT = 20.0


def prepared(device: str, one_sided: bool = True, **settings: Any) -> tuple[Any, Any, Run]:
    given = {"device": device, "hbm": ROOM[device], "chunk_bytes": 1024, **settings}
    run = Run(settings=given, one_sided=one_sided)
    model, plain = built(run)
    config = Config.load(mesh="world", timeout_seconds=TIMEOUT, **given)
    return *prepare_tuned(model, plain, config, Tuning(one_sided=one_sided)), run


class Planted(OSError):
    """What a crossing fails with on purpose."""


def planted(monkeypatch: pytest.MonkeyPatch, at: int, act: Any) -> None:
    """Call ``act`` before the ``at``-th sum of a part."""
    whole, count = Crossings._sum, iter(range(10**9))

    def counted(self: Crossings, *args: Any) -> None:
        if next(count) == at:
            act()
        whole(self, *args)

    monkeypatch.setattr(Crossings, "_sum", counted)


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Come to what ranks agree on when the other one waits there, and may have failed meanwhile:
    this one hears of that first, and may try again."""
    begin = Exchange._begin

    def begin_late(self: Exchange, bucket: Any) -> None:
        time.sleep(0.02)
        begin(self, bucket)

    monkeypatch.setattr(Exchange, "_begin", begin_late)


def fails(rank: int, device: str, one_sided: bool, at: int, tries: int) -> Any:
    """Return what passes of a rank end with, the second one failing on rank 1, and when."""
    model, optimizer, run = prepared(device, one_sided, activations="keep")
    loss_of(model, run, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()

    def fail() -> None:
        raise Planted("planted")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            planted(patch, at, fail)
        else:
            late(patch)
        began, ends = time.monotonic(), []
        for _ in range(tries):
            try:
                loss_of(model, run, 1, rank).backward()
                optimizer.step()
                ends.append("made")
            except Exception as error:
                ends.append(type(error).__name__)
                optimizer.zero_grad()
    return ends, time.monotonic() - began


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("tries", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(("device", "one_sided"), PLACES)
def test_a_crossing_that_fails_on_one_rank_fails_on_all_at_once(
    device: str, one_sided: bool, at: int, tries: int
) -> None:
    first, second = run_ranks(2, fails, device, one_sided, at, tries)

    assert max(first[1], second[1]) < TIMEOUT / 2
    assert second[0][0] == "Planted"
    assert (first[0][-1] == "made") == (second[0][-1] == "made")
    assert first[0][0] in (DivergenceError.__name__, RankLost.__name__)


def reads(rank: int) -> str:
    """Read gradients, of which addends are on their way, in a hook of a second pass."""
    slow_sums(0.05)
    model, optimizer, run = prepared("cpu:sim")
    is_second = False

    def look(param: torch.Tensor) -> None:
        if is_second and rank == 0:
            grads = [p.grad for block in model.blocks[1:] for p in block.parameters()]
            sum(float(grad.abs().sum()) for grad in grads)

    model.blocks[0][0].weight.register_post_accumulate_grad_hook(look)
    for step in range(4):  # gradients of the first ones wait until they have left
        for micro in range(2):
            is_second = step > 1 and micro == 1
            loss_of(model, run, 2 * step + micro, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return "made"


def test_a_gradient_whose_sum_is_on_its_way_is_not_read() -> None:
    first, second = outcomes(2, reads)

    assert isinstance(first, Died) and isinstance(first.error, StateError), first
    assert "before its backward pass is over" in str(first.error)
    assert isinstance(second, Died)


def interrupted(rank: int, device: str) -> tuple[str, float]:
    model, optimizer, run = prepared(device)
    loss_of(model, run, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        planted(patch, 2, lambda: time.sleep(1.0))
        if rank == 1:
            for delay in (0.4, 0.6):
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            loss_of(model, run, 1, rank).backward()
            optimizer.step()
        except BaseException as error:
            return type(error).__name__, time.monotonic() - began
    return "made", 0.0


@pytest.mark.parametrize("device", list(ROOM))
def test_a_second_interrupt_comes_out_of_a_crossing(device: str) -> None:
    _, (end, seconds) = run_ranks(2, interrupted, device)
    assert end == "KeyboardInterrupt"
    assert seconds < TIMEOUT / 2


def child_fails(rank: int) -> str:
    model, optimizer, run = prepared("cpu")
    loss_of(model, run, 0, rank).backward()
    optimizer.step()
    if rank == 1:
        pid = os.fork()
        if not pid:
            try:
                raise ValueError("of a helper process")
            except ValueError:
                sys.stderr = io.StringIO()
                sys.excepthook(*sys.exc_info())  # as the interpreter does
            os._exit(1)
        os.waitpid(pid, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    loss_of(model, run, 1, rank).backward()
    return ""


def test_a_child_of_a_rank_does_not_speak_for_it() -> None:
    first, _ = outcomes(2, child_fails)
    assert isinstance(first.error, RankLost), first.text
    assert "it was killed" in str(first.error) and "helper" not in str(first.error)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(("device", "one_sided"), PLACES)
def test_slow_sums_change_no_bit(device: str, one_sided: bool) -> None:
    run = Run(passes=2, settings={"device": device, "hbm": ROOM[device]}, one_sided=one_sided)
    expected = by_torch(run, 3)
    for each in run_ranks(3, slowly, run):
        assert_same(each, expected)


def slowly(rank: int, run: Run) -> Any:
    slow_sums(0.002 * rank)
    return by_ranks(rank, run)


def slow_sums(seconds: float) -> None:
    """Make sums of this process take longer: it is a test's own."""
    whole = Crossings._sum

    def late(self: Crossings, *args: Any) -> None:
        time.sleep(seconds)
        whole(self, *args)

    Crossings._sum = late


def has_lost(rank: int, device: str, one_sided: bool) -> tuple[list[str], float]:
    """Fail in backward, and go on without zero_grad: sums of that pass lack addends."""
    model, optimizer, run = prepared(device, one_sided)
    loss_of(model, run, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, run, 1, rank).backward()

    def fail(param: torch.Tensor) -> None:
        raise Planted("planted")

    hook = model.first.weight.register_post_accumulate_grad_hook(fail)
    began, ends = time.monotonic(), []
    for _ in range(3):
        try:
            loss_of(model, run, 2, rank).backward()
            optimizer.step()
            ends.append("made")
        except Exception as error:
            ends.append(type(error).__name__)
        hook.remove()
    return ends, time.monotonic() - began


@pytest.mark.parametrize(("device", "one_sided"), PLACES)
def test_sums_that_lack_addends_are_refused_on_all_ranks(device: str, one_sided: bool) -> None:
    for ends, seconds in run_ranks(2, has_lost, device, one_sided):
        assert seconds < TIMEOUT / 2
        assert ends[0] == "Planted" and "made" not in ends
