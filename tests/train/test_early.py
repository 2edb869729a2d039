"""Updates that begin in backward: the numbers of plain torch, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import ConfigError, StateError, StorageError
from hetero.events import What
from hetero.jobs import Worker
from hetero.train.access.early import EarlyUpdates, Visits
from hetero.train.engine.tuning import Tuning
from tests.campaigns.harness import Net, loss_of_tokens
from tests.equivalence.harness import MakeOptimizer, adamw, compare, measure, same, sgd, values
from tests.equivalence.test_disk import WORDS, Wide
from tests.equivalence.zoo import BY_NAME

HBM = 110_000
SETTINGS: dict[str, Any] = {"device": "cpu", "chunk_bytes": 256, "updates": "backward"}
WRITERS = (  # between backward and step, to gradients or to weights
    *("channels_last", "clip_value", "clip_norm_by_torch", "clip_norm", "grads_edited"),
    *("unscaled", "written_outside"),
)
LATE = ("accumulate", "several_losses", "penalty", "failing", "ema")  # no unit is needed but once


def net(make: MakeOptimizer = adamw, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    return hetero.prepare(model, make(model), **{**SETTINGS, "hbm": HBM, **settings})


def backward(model: nn.Module, number: int = 0) -> None:
    loss_of_tokens(model, number).backward()


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def begun(model: nn.Module) -> int:
    """Return how many updates were begun in the backward pass that was just made."""
    stepper = engine_of(model).steps.stepper
    return 0 if stepper is None else len(stepper.early)


def between(**settings: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer after a backward pass in which updates have begun."""
    model, optimizer = net(**settings)
    train(model, optimizer, 2)
    backward(model, 2)
    assert begun(model) >= 4
    return model, optimizer


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count, step by step, the updates that were begun early."""
    from hetero.train.update.step import Stepper

    found: list[int] = []
    seal = Stepper.seal

    def counted(self: Stepper) -> Any:
        found.append(len(self.early))
        return seal(self)

    monkeypatch.setattr(Stepper, "seal", counted)
    return found


# -- the numbers of plain torch ------------------------------------------------------------------


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {*WRITERS, *LATE, "create_graph"}))
def test_updates_that_begin_in_backward_change_no_bit(
    name: str, make: MakeOptimizer, early: list[int]
) -> None:
    case = BY_NAME[name]
    hbm = measure(case, make, 256).of(0.4)
    seen = compare(case, make, hbm=hbm, updates="backward", steps=6)
    assert seen.mode == "paged" and seen.evictions >= 3
    assert sum(early) >= 5 and early[0] == 0, "a step is watched before anything is early"


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("name", LATE)
def test_units_that_are_needed_again_wait_for_the_step(name: str, early: list[int]) -> None:
    case = BY_NAME[name]
    compare(case, sgd, hbm=measure(case, sgd, 256).of(0.4), updates="backward", steps=4)
    assert sum(early) == 0


@pytest.mark.parametrize("name", WRITERS)
def test_loops_that_write_between_backward_and_step_are_refused(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(StateError, match="updates='backward'"):
        compare(case, sgd, hbm=measure(case, sgd, 256).of(0.4), updates="backward", steps=6)


TUNINGS: dict[str, Callable[[], Tuning]] = {
    "in the pass itself": lambda: Tuning(worker=Worker(0)),
    "on three threads": lambda: Tuning(worker=Worker(3)),
    "last first": lambda: Tuning(worker=Worker(1, pick=lambda n: n - 1)),
}


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("how", TUNINGS)
def test_threads_and_policies_change_no_bit(how: str, activations: str, early: list[int]) -> None:
    case = BY_NAME["dropout"]
    hbm = measure(case, adamw, 256, devices=("cpu:sim",)).of(0.4 if activations == "keep" else 0.0)
    settings = {"activations": activations, "updates": "backward"}
    compare(case, adamw, hbm=hbm, device=SimDevice(), tuning=TUNINGS[how](), **settings)
    assert sum(early) >= 5


@pytest.mark.parametrize("make", [adamw, sgd])
def test_homes_on_disk_are_read_and_written_in_backward(
    make: MakeOptimizer, disk: Path, early: list[int]
) -> None:
    class Case:
        name = "wide"
        build = staticmethod(Wide)

        @staticmethod
        def data(generator: torch.Generator) -> Tensor:
            return torch.randint(WORDS, (4, 7), generator=generator)

        @staticmethod
        def step(loop: Any) -> list[Tensor]:
            loss = loop.model(loop.data).float().pow(2).mean()
            loss.backward()
            return [loss]

    seen = compare(
        Case(),
        make,
        hbm=700_000,
        host=1_500_000,
        nvme=disk,
        chunk_bytes=4096,
        updates="backward",
    )
    assert seen.extents > 0 and seen.write_bytes > 0
    assert sum(early) >= 4


def test_working_weights_with_masters_are_updated_in_backward(early: list[int]) -> None:
    found = []
    for updates in ("step", "backward"):
        model, optimizer = net(precision="bf16", updates=updates)
        train(model, optimizer, 5)
        found.append((values(model), optimizer.state_dict()))
    same(found[0][0], found[1][0], "weights")
    for key in ("state", "masters"):
        left, right = (part[1][key] for part in found)
        assert left.keys() == right.keys()
        for number in left:
            pairs = [left[number], right[number]]
            if key == "state":
                pairs = [[state[k] for k in sorted(state)] for state in pairs]
                same(*pairs, key)
            else:
                same([pairs[0]], [pairs[1]], key)
    assert sum(early) >= 15


def test_schedules_of_the_learning_rate_act_as_in_torch() -> None:
    sides = []
    for prepared in (False, True):
        torch.manual_seed(0)
        model: Any = Net()
        optimizer: Any = adamw(model)
        if prepared:
            model, optimizer = hetero.prepare(model, optimizer, **SETTINGS, hbm=HBM)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
        for number in range(6):
            backward(model, number)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        sides.append(values(model))
    same(*sides, "weights")


def test_an_update_runs_while_backward_does() -> None:
    model, _ = between()
    events = list(engine_of(model).setup.log)
    (*_, last) = [e for e in events if e.what == What.PHASE.value and e.why == "backward"]
    end = last.t_ns + last.dur_ns
    began = [e.t_ns for e in events if e.what == What.UPDATE.value]
    assert any(last.t_ns <= t <= end for t in began)


def test_a_save_that_goes_on_has_the_values_of_its_step(tmp_path: Path) -> None:
    model, optimizer = net()
    train(model, optimizer, 2)
    expected = values(model)
    saved = hetero.save_checkpoint(tmp_path, model, optimizer, step=2, asynchronous=True)
    train(model, optimizer, 2)
    saved.wait()
    other, its = net()
    hetero.load_checkpoint(tmp_path, other, its)
    same(values(other), expected, "weights")


def test_gradients_can_be_read_and_copied_before_the_step() -> None:
    model, optimizer = between()
    norms = [p.grad.norm() for p in model.parameters()]
    views = [p.grad.detach() for p in model.parameters()]
    assert all(torch.equal(v.norm(), n) for v, n in zip(views, norms, strict=True))
    optimizer.step()


# -- what cannot be exact is an error ------------------------------------------------------------


def forward_again(model: Any, optimizer: Any) -> None:
    loss_of_tokens(model, 3)


def evaluate(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        loss_of_tokens(model, 3)


def call_a_block(model: Any, optimizer: Any) -> None:
    model.blocks[5](torch.zeros(1, 2, 32))


def read_a_weight(model: Any, optimizer: Any) -> None:
    model.blocks[5].up.weight.sum()


def gather(model: Any, optimizer: Any) -> None:
    with hetero.gathered(model.blocks[5].up.weight):
        pass


def clip(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def write_a_gradient(model: Any, optimizer: Any) -> None:
    model.blocks[5].up.weight.grad.zero_()


def change_the_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()


def drop_gradients(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.step()


def put_another_gradient(model: Any, optimizer: Any) -> None:
    weight = model.blocks[5].up.weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def write_through_a_view(model: Any, optimizer: Any) -> None:
    model.blocks[5].up.weight.grad.view(-1)[0] = 3.0
    optimizer.step()


def take_out_of_the_group(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][-10:]
    optimizer.step()


BETWEEN: tuple[Callable[[Any, Any], Any], ...] = (
    *(forward_again, evaluate, call_a_block, read_a_weight, gather, clip, write_a_gradient),
    *(change_the_rate, drop_gradients, put_another_gradient, write_through_a_view),
    take_out_of_the_group,
    lambda model, optimizer: model.state_dict(),
    lambda model, optimizer: copy.deepcopy(model),
    lambda model, optimizer: optimizer.state_dict(),
    lambda model, optimizer: optimizer.state[next(model.parameters())],
    lambda model, optimizer: hetero.release(model, optimizer),
)


@pytest.mark.parametrize("act", BETWEEN, ids=lambda act: act.__name__)
def test_what_would_see_or_miss_an_early_update_is_refused(
    act: Callable[[Any, Any], Any],
) -> None:
    model, optimizer = between()
    with pytest.raises(StateError, match="updates='backward'"):
        act(model, optimizer)


def test_a_save_before_the_step_is_refused(tmp_path: Path) -> None:
    model, optimizer = between()
    with pytest.raises(StateError, match="updates='backward'"):
        hetero.save_checkpoint(tmp_path, model, optimizer, step=1)


def test_what_was_put_right_again_is_stepped() -> None:
    """An error changes nothing: the step can still be made, with the numbers of plain torch."""
    torch.manual_seed(0)
    plain = Net()
    stepped = adamw(plain)
    train(plain, stepped, 3)
    model, optimizer = between()
    optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(StateError, match="settings of the group"):
        optimizer.step()
    with pytest.raises(StateError, match="used again"):
        forward_again(model, optimizer)
    optimizer.param_groups[0]["lr"] /= 2
    optimizer.step()
    optimizer.zero_grad()
    same(values(plain), values(model), "weights")


def test_a_second_pass_through_a_unit_is_refused_once_its_update_has_begun() -> None:
    model, optimizer = net()
    train(model, optimizer, 2)
    loss = loss_of_tokens(model, 2)
    loss.backward(retain_graph=True)
    assert begun(model)
    with pytest.raises(StateError, match="updates='backward'"):
        loss.backward()


class Failing(torch.autograd.Function):
    """An identity whose backward fails when it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.fails:
            raise ValueError("told to")
        return grad


def test_after_a_pass_that_failed_the_model_is_loaded_or_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = net()
    model.blocks[0].register_forward_hook(lambda module, args, output: Failing.apply(output))
    train(model, optimizer, 2)
    hetero.save_checkpoint(tmp_path, model, optimizer, step=2)
    expected = values(model)
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(ValueError, match="told to"):
        backward(model, 2)
    assert begun(model)
    with pytest.raises(StateError, match="updates='backward'"):
        backward(model, 2)
    monkeypatch.setattr(Failing, "fails", False)
    optimizer.zero_grad()
    hetero.load_checkpoint(tmp_path, model, optimizer)
    same(values(model), expected, "weights")
    train(model, optimizer, 2)


def test_a_second_release_gives_back_what_there_is() -> None:
    model, optimizer = between()
    with pytest.raises(StateError, match="released"):
        hetero.release(model, optimizer)
    plain, _ = hetero.release(model, optimizer)
    assert all(p.isfinite().all() for p in plain.parameters())


def test_a_release_that_failed_before_says_nothing_of_updates_that_begin_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = net()
    train(model, optimizer, 3)

    def fail(*_: Any) -> None:
        raise StorageError("told to", advice="", path="", op="read")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="told to"):
        patch.setattr("hetero.train.engine.handover.Handover.fetch", fail)
        hetero.release(model, optimizer)
    train(model, optimizer, 1)
    backward(model)
    assert begun(model) > 0
    with pytest.raises(StateError, match="released"):
        hetero.release(model, optimizer)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 1.0}, {"precision": "fp16"}])
def test_settings_that_look_at_all_gradients_first_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="updates='backward'"):
        Config.load(updates="backward", **settings)


def test_an_unknown_moment_is_refused() -> None:
    with pytest.raises(ConfigError, match="updates='never'"):
        Config.load(updates="never")


def test_a_model_that_stays_is_updated_by_its_step() -> None:
    torch.manual_seed(0)
    model = Net()
    model, optimizer = prepare_tuned(model, adamw(model), Config.load(**SETTINGS), None)
    train(model, optimizer, 2)
    backward(model)
    clip(model, optimizer)
    optimizer.step()
    assert engine_of(model).residence.name == "resident"


# -- what is known to be needed once -------------------------------------------------------------


def visited(visits: Visits, forward: list[int], backward: list[int]) -> None:
    for unit in forward:
        visits.forward(unit)
    for unit in backward:
        visits.backward(unit)


def test_a_unit_is_done_with_once_a_whole_step_has_shown_it() -> None:
    visits = Visits([(0,), (1,)])
    visited(visits, [0, 1], [1, 0])
    assert not visits.is_done(0) and not visits.is_done(1)
    visits.end()
    visited(visits, [0, 1], [1])
    assert visits.is_done(1) and not visits.is_done(0)


@pytest.mark.parametrize(("forward", "backward"), [([0, 0], [0]), ([0], [0, 0])])
def test_a_unit_that_was_needed_twice_is_never_done_with(
    forward: list[int], backward: list[int]
) -> None:
    visits = Visits([(0,)])
    visited(visits, forward, backward)
    visits.end()
    for _ in range(2):
        visited(visits, [0], [0])
        assert not visits.is_done(0)
        visits.end()


def test_units_that_share_a_bucket_are_never_done_with() -> None:
    visits = Visits([(0, 1), (1,), (2,)])
    for _ in range(2):
        visited(visits, [0, 1, 2], [2, 1, 0])
        visits.end()
    visited(visits, [0, 1, 2], [2, 1, 0])
    assert [visits.is_done(unit) for unit in range(3)] == [False, False, True]


def test_a_parameter_that_was_used_outside_keeps_its_unit_late() -> None:
    visits = Visits([(0,), (1,)])
    visited(visits, [0, 1], [1, 0])
    visits.outside([1])
    visits.end()
    visited(visits, [0, 1], [1, 0])
    assert visits.is_done(0) and not visits.is_done(1)


def test_an_update_begins_when_backward_has_left_its_unit_and_all_has_landed() -> None:
    landed, started = {1}, []
    updates = EarlyUpdates([(0,), (1,), (2,)], complete=landed.__contains__, begin=started.append)
    for unit in (0, 1, 2):
        updates.entered(unit)
    for unit in (2, 1, 0):
        updates.reached(unit)
    updates.pass_ended()
    updates.step_ended()
    for unit in (0, 1, 2):
        updates.entered(unit)
    updates.reached(2)
    updates.reached(1)
    assert started == []  # 2 is left, and under way
    landed.add(2)
    updates.reached(0)
    assert started == [2, 1]
    updates.pass_ended()
    assert started == [2, 1]  # 0 never came: the step looks at it
