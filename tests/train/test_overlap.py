"""Updates behind the forward: slowed, reordered or synchronous, they change nothing."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.jobs import Job, Worker
from hetero.train.engine.steps import HomeSteps
from hetero.train.engine.tuning import Tuning
from hetero.train.update.rules import Rule
from tests.equivalence.harness import adamw, compare, measure, same, sgd, values
from tests.equivalence.zoo import BY_NAME, Stack, loss_of, tokens

HBM = 120_000


def data(number: int = 0) -> torch.Tensor:
    return tokens(torch.Generator().manual_seed(number))


def slowed(seed: int) -> Callable[[], None]:
    draw = random.Random(seed)
    return lambda: time.sleep(draw.choice((0.0, 0.0, 0.002)))


def shuffled(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange


TUNINGS: dict[str, Callable[[], Tuning]] = {
    "synchronous": lambda: Tuning(worker=Worker(0)),
    "streamed through the device": lambda: Tuning(update_on_device=True),
    "slowed": lambda: Tuning(pause=slowed(1)),
    "three threads": lambda: Tuning(worker=Worker(3), pause=slowed(2)),
    "reordered": lambda: Tuning(worker=Worker(2, pick=shuffled(3)), pause=slowed(3)),
    "reordered again": lambda: Tuning(worker=Worker(1, pick=shuffled(4)), pause=slowed(4)),
}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("how", TUNINGS)
@pytest.mark.parametrize("name", ["tied", "checkpoint", "layer_drop", "accumulated"])
def test_when_and_where_updates_run_changes_no_bit(name: str, how: str) -> None:
    case = BY_NAME.get(name) or BY_NAME["tied"]
    make = adamw if name != "accumulated" else sgd
    budget = measure(case, make, 256)
    device = SimDevice(seed=7)
    compare(case, make, hbm=budget.of(0.4), device=device, tuning=TUNINGS[how]())


def prepared(tuning: Tuning | None = None, make: Any = adamw, **settings: Any) -> Any:
    torch.manual_seed(3)
    model = Stack()
    plain = copy.deepcopy(model)
    config = Config.load(hbm=HBM, chunk_bytes=256, device="cpu:sim", **settings)
    return plain, make(plain), *prepare_tuned(model, make(model), config, tuning)


def one_step(model: nn.Module, optimizer: Any, number: int) -> None:
    loss_of(model, data(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


class Gate:
    """Holds every slice until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.held = 0

    def __call__(self) -> None:
        self.held += not self.open.is_set()
        assert self.open.wait(30), "nobody opened the gate"


def test_step_returns_before_its_updates_are_done_and_readers_see_them_done() -> None:
    gate = Gate()
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=gate))
    for number in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
    loss_of(plain, data(9)).backward()
    loss_of(model, data(9)).backward()
    gate.open.clear()
    theirs.step()
    ours.step()  # returns although nothing can be updated
    assert any(not job.done for job in engine_of(model).steps.stepper._jobs)
    threading.Timer(0.05, gate.open.set).start()
    same(values(plain), values(model), "state dict in the middle of an update")
    for key, state in ours.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, theirs.state_dict()["state"][key][name])


READERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "state_dict": lambda model, optimizer: list(model.state_dict().values()),
    "parameter": lambda model, optimizer: [p.detach().clone() for p in model.parameters()],
    "gathered": lambda model, optimizer: gathered_values(model),
    "evaluation": lambda model, optimizer: [model.eval()(data(5))],
    "optimizer state": lambda model, optimizer: [
        optimizer.state[p]["exp_avg"].clone() for p in model.parameters()
    ],
}


def gathered_values(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        with hetero.gathered([p]):
            found.append(p.detach().clone())
    return found


@pytest.mark.parametrize("what", READERS)
def test_whoever_reads_waits_for_the_update(what: str) -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(5)))
    with torch.no_grad():
        for number in range(4):
            with torch.enable_grad():
                one_step(plain, theirs, number)
                one_step(model, ours, number)
            read = READERS[what]
            same(read(plain, theirs), read(model, ours), f"{what} after step {number}")
            plain.train(), model.train()


def test_settings_are_those_of_the_moment_of_the_step() -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(6)))
    for number in range(5):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
            for group in o.param_groups:  # at once after step, as a scheduler does
                group["lr"] *= 0.5
                group["betas"] = (0.5 + 0.1 * number, 0.9)
    same(values(plain), values(model), "weights")


def test_a_tensor_learning_rate_changed_after_the_step_is_not_seen() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))

    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(7)), make)
    for number in range(4):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
            o.param_groups[0]["lr"].mul_(0.5)
    same(values(plain), values(model), "weights")


def test_gradients_kept_and_zeroed_in_place_behind_a_step_are_right() -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(8)), sgd)
    for number in range(4):
        for m, o in ((plain, theirs), (model, ours)):
            loss_of(m, data(number)).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            o.step()
        seen = [[p.grad.clone() for p in m.parameters()] for m in (plain, model)]
        same(*seen, f"gradients after step {number}")
        for o in (theirs, ours):
            o.zero_grad(set_to_none=number % 2 == 0)
    same(values(plain), values(model), "weights")


def test_gradients_that_are_never_zeroed_go_on_adding_up() -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(2), pause=slowed(9)), sgd)
    for number in range(4):
        for m, o in ((plain, theirs), (model, ours)):
            loss_of(m, data(number)).backward()
            o.step()
    same(values(plain), values(model), "weights")


def test_a_held_state_dict_is_never_seen_half_updated() -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(10)))
    one_step(plain, theirs, 0)
    one_step(model, ours, 0)
    shown = [m.state_dict() for m in (plain, model)]
    states = [o.state_dict()["state"] for o in (theirs, ours)]
    for number in range(1, 4):
        one_step(plain, theirs, number)
        one_step(model, ours, number)
        same(*[list(s.values()) for s in shown], f"step {number}")
        moments = [[s["exp_avg"] for s in held.values()] for held in states]
        same(*moments, f"moments of step {number}")


@pytest.mark.parametrize("view", [torch.Tensor.detach, lambda step: step.view(1)])
def test_a_step_count_that_is_held_by_an_alias_counts_with_the_step(view: Any) -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(5)))
    for number in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
    aliases = [view(ours.state[p]["step"]) for p in model.parameters()]
    loss_of(model, data(9)).backward()
    ours.step()
    assert {float(alias) for alias in aliases} == {4.0}


def test_a_state_that_somebody_kept_is_never_seen_half_updated() -> None:
    plain, theirs, model, ours = prepared(Tuning(worker=Worker(1), pause=slowed(11)))
    one_step(plain, theirs, 0)
    one_step(model, ours, 0)
    kept = [
        [o.state[p]["exp_avg"] for p in m.parameters()] for m, o in ((plain, theirs), (model, ours))
    ]
    for number in range(1, 4):
        one_step(plain, theirs, number)
        one_step(model, ours, number)
        same(*kept, f"moments of step {number}")


class Broken(RuntimeError):
    """What the rule of the next test raises."""


@pytest.mark.parametrize("where", ["step", "forward", "state_dict", "state", "release"])
def test_an_error_in_an_update_surfaces_at_the_next_call(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    _, _, model, ours = prepared(Tuning(worker=Worker(2), pause=gate))
    one_step(model, ours, 0)
    loss_of(model, data(1)).backward()
    calls, run = iter(range(1000)), Rule.run

    def broken(*args: Any) -> Any:
        if next(calls) == 3:
            raise Broken("in the rule")
        return run(*args)

    monkeypatch.setattr(Rule, "run", broken)
    gate.open.clear()
    ours.step()
    threading.Timer(0.05, gate.open.set).start()
    with pytest.raises(Broken, match="in the rule") as caught:
        {
            "step": ours.step,
            "forward": lambda: loss_of(model, data(2)),
            "state_dict": model.state_dict,
            "state": lambda: ours.state,
            "release": lambda: hetero.release(model, ours),
        }[where]()
    names = [entry.name for entry in caught.traceback]
    assert "broken" in names, "the traceback shows where it went wrong"
    with pytest.raises(Broken):  # nothing trains on with parameters of two steps
        ours.step()
    plain, _ = hetero.release(model, ours)
    assert all(torch.isfinite(p).all() for p in plain.parameters())


def updating_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("hetero-update")}


def test_threads_end_with_their_model() -> None:
    others = updating_threads()
    _, _, model, ours = prepared()
    for number in range(3):
        one_step(model, ours, number)
    threads = updating_threads() - others
    assert threads
    hetero.release(model, ours)
    assert not any(t.is_alive() for t in threads)
    _, _, model, ours = prepared()
    for number in range(3):
        one_step(model, ours, number)
    threads = updating_threads() - others
    gone = weakref.ref(engine_of(model).setup.worker)
    del model, ours
    for _ in range(200):  # a thread may be just about to let the last job go
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.05)
    assert gone() is None
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_job_that_is_done_keeps_nothing_it_worked_on() -> None:
    """Who waits for a copy may count the memory of the device at once."""
    worked_on = torch.zeros(4)
    gone, job = weakref.ref(worked_on), Job([worked_on.zero_], finish=worked_on.zero_)
    del worked_on
    seen: list[object] = []
    job.then = lambda _: seen.append(gone())  # its thread is still in `help`
    assert job.help()
    assert seen == [None]


def test_a_waiter_does_the_work_that_no_thread_has_begun() -> None:
    done: list[int] = []
    job = Job([lambda i=i: done.append(i) for i in range(5)], finish=lambda: done.append(9))
    job.wait()
    assert done == [0, 1, 2, 3, 4, 9] and job.done


def test_a_job_waits_for_those_before_it_in_any_order() -> None:
    for seed in range(20):
        worker = Worker(3, pick=shuffled(seed))
        seen: list[int] = []
        jobs: list[Job] = []
        for number in range(12):
            after = (jobs[-1],) if jobs else ()
            jobs.append(worker.submit(Job([partial(seen.append, number)], after=after)))
        jobs[-1].wait()
        assert seen == list(range(12))
        worker.close()


def test_errors_pass_to_the_jobs_behind() -> None:
    def broken() -> None:
        raise Broken("first")

    worker = Worker(1)
    first = worker.submit(Job([broken, lambda: None]))
    second = worker.submit(Job([lambda: None], after=(first,)))
    for job in (second, first, second):
        with pytest.raises(Broken, match="first"):
            job.wait()
    worker.close()


def test_an_added_group_is_stepped_as_in_torch() -> None:
    plain, theirs, model, ours = prepared()
    extra = {}
    for m, o in ((plain, theirs), (model, ours)):
        last = list(m.parameters())[-1]
        o.param_groups[0]["params"] = [p for p in m.parameters() if p is not last]
        extra[o] = last
    for number in range(5):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
            if number == 2:
                o.add_param_group({"params": [extra[o]], "lr": 0.5})
    same(values(plain), values(model), "weights")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_that_are_not_watched_go_on_after_the_step(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[set[int]] = []
    seen = HomeSteps._seen

    def watching(self: HomeSteps, optimizer: Any) -> set[int]:
        watched.append(seen(self, optimizer))
        return watched[-1]

    monkeypatch.setattr(HomeSteps, "_seen", watching)
    torch.manual_seed(0)
    model: Any = Stack()
    settings = {"device": "cpu", "hbm": HBM, "chunk_bytes": 256, "precision": precision}
    model, optimizer = hetero.prepare(model, adamw(model), **settings)
    for number in range(4):
        loss_of(model, data(number)).backward()
        held = optimizer.state[next(model.parameters())] if number == 3 else None
        optimizer.step()
        optimizer.zero_grad()
        del held
    assert engine_of(model).residence.name == "paged"
    assert watched[:3] == [set(), set(), set()] and len(watched[3]) == 1


def test_early_updates_go_on_in_the_order_of_the_next_forward() -> None:
    gate, worker = Gate(), Worker(1)
    plain, theirs, model, ours = prepared(Tuning(worker=worker, pause=gate), updates="backward")
    for number in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            one_step(m, o, number)
    engine = engine_of(model)
    engine.finish()
    gate.open.clear()
    loss_of(model, data(9)).backward()
    before = [id(job) for job in worker._queue.jobs]
    ours.step()
    after = [id(job) for job in worker._queue.jobs]
    order = engine.residence.in_order(engine.setup.buckets)
    jobs = [engine.residence.update_of(bucket.id) for bucket in order]
    forward = [id(job) for job in jobs if job is not None and job.began is None]
    gate.open.set()
    loss_of(plain, data(9)).backward()
    theirs.step()

    assert len(before) >= 3 and after != before
    assert [job for job in after if job in forward] == forward
    same(values(plain), values(model), "after updates in another order")


DROPS_ITS_WORKER = """
import gc, threading, torch
from hetero.jobs import Worker

begun, worker = threading.Event(), Worker(1)
values = torch.rand(4_000_000)

def is_inside_torch(*_):
    begun.set()
    values.sort()

worker.submit(worker.job([is_inside_torch], 1))
begun.wait()
del worker
gc.collect()
"""


def test_a_program_ends_after_the_update_of_a_model_that_is_gone() -> None:
    subprocess.run([sys.executable, "-c", DROPS_ITS_WORKER], check=True)
