"""What is done for an access, a step or a read does not grow with all units: counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetero
from hetero.api import engine_of
from hetero.plan.activations import KEEP, LEAST, OFFLOAD, RECOMPUTE
from hetero.plan.schedule import Op, Schedule
from hetero.plan.trace import Access, Trace
from hetero.train.access.cursor import Cursor
from hetero.train.access.fetches import Late
from hetero.train.activations.policy import Policies
from hetero.types import Phase
from tests.campaigns.harness import Net, adamw, tokens_of
from tests.counting import lines_of
from tests.equivalence.harness import stay_paged


class ByMethod(Net):
    """Trained by a method: its forward is never called."""

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, tokens)


def prepared(model: nn.Module, **settings: Any) -> tuple[Any, Any]:
    settings = {"device": "cpu", "hbm": 180_000, "chunk_bytes": 256, **settings}
    return hetero.prepare(model, adamw(model), **settings)


def step(model: Any, optimizer: Any, number: int, length: int = 7) -> None:
    tokens = tokens_of(number, length=length)
    logits = model.run(tokens) if isinstance(model, ByMethod) else model(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_trains_by_a_method_is_forecast_by_its_units_once() -> None:
    model, optimizer = prepared(ByMethod())
    for number in range(30):
        step(model, optimizer, number)

    engine = engine_of(model)
    forecast = engine.residence.fitting.forecast
    assert engine.residence.name == "paged"
    assert len(forecast._now) + len(forecast._order) <= len(engine.setup.blueprint.units)
    assert sorted(forecast._order) == sorted(forecast.rows)


def traced(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """Return what is planned for from here on."""
    planned: list[Trace] = []
    planner = hetero.train.engine.paged.Planner

    def noting(trace: Trace, *args: Any) -> Any:
        planned.append(trace)
        return planner(trace, *args)

    monkeypatch.setattr(hetero.train.engine.paged, "Planner", noting)
    return planned


def average(copies: list[torch.Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for copy, param in zip(copies, model.parameters(), strict=True):
            copy.lerp_(param, 0.1)


def test_an_average_of_weights_is_no_part_of_what_an_evaluation_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = prepared(Net(), activations="keep")
    copies = [p.detach().clone() for p in model.parameters()]
    planned = traced(monkeypatch)
    for number in range(7):
        step(model, optimizer, number)
        average(copies, model)
        assert not engine_of(model).residence.runtime.fetches.evaluate._seen
    with torch.no_grad():
        for number in range(3):
            model(tokens_of(number))

    evaluations = [len(t.accesses) for t in planned if Phase.EVAL in {a.phase for a in t.accesses}]
    assert engine_of(model).residence.name == "paged" and evaluations
    assert max(evaluations) <= len(engine_of(model).setup.blueprint.units)


def test_reading_weights_between_forwards_that_nobody_trains_is_no_part_of_their_trace() -> None:
    model = hetero.prepare(Net(), device="cpu", hbm=120_000, chunk_bytes=256)
    for number in range(3):
        model(tokens_of(number))
        for param in model.parameters():
            param.sum()
        engine = engine_of(model)
        n_units = len(engine.setup.blueprint.units)
        assert len(engine.residence.runtime.fetches.train._seen) <= n_units
        assert len(engine.residence.runtime.fetches.evaluate._seen) <= n_units


def test_whether_anything_goes_down_is_counted_and_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies = Policies(dict.fromkeys(range(8), KEEP))
    for number, policy in enumerate((KEEP, OFFLOAD, LEAST, RECOMPUTE) * 16):
        policies.update({(5 * number) % 8: policy})
        assert policies.n_offload == sum(policy.offload for policy in policies.values())

    model, optimizer = prepared(Net())
    for number in range(4):
        step(model, optimizer, number)
    looked: list[int] = []
    monkeypatch.setattr(Policies, "__iter__", lambda self: looked.append(0) or iter(self.data))
    model(tokens_of(5))
    assert not looked


def chain(n: int) -> Trace:
    return Trace(tuple(Access(Phase.FORWARD, unit, (unit,)) for unit in range(n)))


def planned(cursor: Cursor, trace: Trace) -> None:
    for access in trace.accesses:
        cursor.observe(access)
    cursor.border()


def test_a_schedule_is_planned_anew_once_it_is_followed_however_often_limits_changed() -> None:
    built: list[Trace] = []

    def build(trace: Trace) -> Schedule:
        built.append(trace)
        return Schedule(trace, ((),) * (len(trace.accesses) + 1), 0)

    cursor = Cursor(build)
    planned(cursor, chain(5))
    for _ in range(3):
        cursor.replan()
    assert len(built) == 1
    cursor.observe(chain(1).accesses[0])
    cursor.observe(chain(2).accesses[1])
    assert len(built) == 2 and cursor.deviations == 0


def test_an_access_out_of_turn_is_found_without_a_search() -> None:
    def work(n: int) -> int:
        cursor = Cursor(lambda trace: Schedule(trace, ((),) * (len(trace.accesses) + 1), 0))
        planned(cursor, chain(n))
        cursor.observe(chain(n).accesses[n // 2])  # the first one finds all places
        cursor.observe(chain(1).accesses[0])
        return lines_of(lambda: cursor.observe(chain(1).accesses[0]))

    assert work(400) <= work(40) + 5


def test_a_miss_looks_for_its_own_fetch_alone_among_those_that_are_late() -> None:
    model, optimizer = prepared(Net(), activations="keep")
    for number in range(3):
        step(model, optimizer, number)
    engine_of(model).finish()
    runtime = engine_of(model).residence.runtime
    fetches, manager = runtime.fetches, engine_of(model).residence.manager

    def work(n_late: int) -> int:
        runtime.quiesce()
        fetches.late.clear()
        for bucket in list(manager.replicas):
            manager.evict(bucket)
        for _ in range(n_late):
            fetches.late.add(Op(1, 0))
        try:
            return lines_of(lambda: fetches.pin((0,), "test"))
        finally:
            manager.unpin((0,))
            assert len(fetches.late.ops) == n_late
            fetches.late.clear()

    work(1)  # views of a new place are made
    assert work(400) <= work(40) + 5


def test_late_fetches_are_made_in_order_up_to_the_last_of_what_is_missing() -> None:
    late = Late()
    for op in (Op(3, 0), Op(5, 4), Op(3, 8), Op(7, 12)):
        late.add(op)
    assert 3 in late and 5 in late and 4 not in late and late.ops[0] == Op(3, 0)
    made = []
    while 3 in late:
        made.append(late.pop())
    assert made == [Op(3, 0), Op(5, 4), Op(3, 8)] and len(late.ops) == 1
    late.clear()
    assert 7 not in late and not late.ops


class Many(nn.Module):
    """One unit of so many parameters."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def border_lines(n_params: int) -> dict[str, int]:
    """Return lines of Python of a step's border, for a model of so many parameters."""
    model = nn.Sequential(Many(n_params), Many(1))
    settings = {"device": "cpu:sim", "hbm": 40_000, "chunk_bytes": 256, "units": ["0", "1"]}
    model, optimizer = hetero.prepare(model, adamw(model), activations="keep", **settings)
    engine = engine_of(model)
    stay_paged(engine)
    found: dict[str, int] = {}
    for _ in range(5):
        engine.finish()
        model(torch.ones(4)).sum().backward()
        found["clip"] = lines_of(lambda: optimizer.clip_grad_norm_(1.0))
        found["step"] = lines_of(optimizer.step)
        found["zero_grad"] = lines_of(optimizer.zero_grad)
    return found


def test_the_border_of_a_step_takes_few_lines_of_python_a_parameter() -> None:
    """On a fast device the launch of the next forward waits for them."""
    few, many = border_lines(20), border_lines(120)

    lines = {what: (many[what] - few[what]) / 100 for what in few}
    assert lines["clip"] <= 35 and lines["step"] <= 140 and lines["zero_grad"] <= 6, lines
