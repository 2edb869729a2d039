"""The nouns of an access: fetches along a plan, the access of backward, pages and their writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of
from hetero.errors import StateError
from hetero.plan.schedule import Op, Schedule
from hetero.plan.trace import Access, Trace
from hetero.train.access.cursor import Cursor
from hetero.train.access.fetches import Fetches
from hetero.types import Phase


class Frames:
    """A manager that notes what is fetched; homes that are not ``ready`` are busy."""

    def __init__(self, ready: Iterable[int]) -> None:
        self.ready = set(ready)
        self.replicas: dict[int, Any] = {}
        self.moves: list[tuple[str, int]] = []

    def is_busy(self, bucket: int) -> bool:
        return bucket not in self.ready

    def prefetch(self, bucket: int, start: int, evict: Any) -> None:
        self.moves.append(("prefetch", bucket))
        self.replicas[bucket] = None

    def pin(self, buckets: Iterable[int], why: str, spare: Any, *, in_frames: bool) -> None:
        self.moves += [("pin", bucket) for bucket in buckets]


def fetches_of(*, ready: Iterable[int], stepped: bool = True) -> tuple[Fetches, Frames]:
    """Return fetches that issue everything before the first access of a chain, and their frames."""

    def build(trace: Trace) -> Schedule:
        first = tuple(Op(access.buckets[0], 0) for access in trace.accesses)
        return Schedule(trace, (first, *((),) * len(trace.accesses)), 0)

    frames: Any = Frames(ready)
    train, evaluate = Cursor(build), Cursor(build)
    return Fetches(frames, train=train, evaluate=evaluate, stepped=stepped), frames


def run(fetches: Fetches, n_units: int) -> None:
    for unit in range(n_units):
        fetches.follow(Phase.FORWARD, unit, (unit,))
    fetches.step_ends()


def test_a_home_that_is_not_ready_holds_up_the_fetches_after_it_and_none_before() -> None:
    fetches, frames = fetches_of(ready={0, 2, 3})
    run(fetches, 4)
    assert frames.moves == [("prefetch", 0)]

    frames.ready.add(1)
    fetches.follow(Phase.FORWARD, 0, (0,))
    assert frames.moves == [("prefetch", bucket) for bucket in range(4)]


def test_a_pin_issues_what_is_late_up_to_its_own_fetch() -> None:
    fetches, frames = fetches_of(ready=())
    run(fetches, 4)
    fetches.pin((1,), "test")
    assert frames.moves == [("prefetch", 0), ("prefetch", 1), ("pin", 1)]
    assert [op.bucket for op in fetches.late.ops] == [2, 3]


def test_the_end_of_a_step_and_a_new_plan_forget_what_is_late() -> None:
    fetches, _ = fetches_of(ready=())
    run(fetches, 3)
    assert fetches.late.ops
    fetches.replan()
    assert not fetches.late.ops


def test_only_accesses_of_a_step_or_of_a_call_of_the_model_are_followed() -> None:
    fetches, _ = fetches_of(ready=(), stepped=False)
    fetches.follow(Phase.FORWARD, 0, (0,))
    assert not fetches.train._seen
    fetches.follow(Phase.FORWARD, 0, (0,), [Phase.FORWARD])
    fetches.follow(Phase.BACKWARD, 0, (0,))
    fetches.follow(Phase.EVAL, 1, (1,), [Phase.EVAL])
    assert [access.phase for access in fetches.train._seen] == [Phase.FORWARD, Phase.BACKWARD]
    assert fetches.evaluate._seen == [Access(Phase.EVAL, 1, (1,))]
    assert fetches.active is fetches.evaluate


def chain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hetero.prepare(model, optimizer, device="cpu", hbm=12_000, chunk_bytes=256)


def test_backward_holds_the_buckets_of_the_unit_that_it_is_at_and_of_no_other() -> None:
    model, _ = chain()
    runtime = engine_of(model).residence.runtime
    held: list[tuple[int, ...]] = []
    x = torch.ones(2, 16)
    for layer in model:
        x = layer(x)
        x.register_hook(lambda grad: held.append(runtime.backward.buckets))
    x.sum().backward()

    assert held == [(), *runtime.needs[:0:-1]]
    assert runtime.backward.buckets == () and not runtime.is_running
    assert not any(replica.pins for replica in engine_of(model).residence.manager.replicas.values())


def test_an_error_in_backward_leaves_an_access_that_the_next_forward_closes() -> None:
    model, _ = chain()
    runtime = engine_of(model).residence.runtime

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    x = model[1](model[0](torch.ones(2, 16)))
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model[2](x).sum().backward()
    assert runtime.backward.buckets == runtime.needs[2]
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert runtime.backward.buckets == () and not runtime.is_running


def test_a_step_inside_nested_blocks_that_hold_the_same_parameter_is_a_write_in_neither() -> None:
    model, optimizer = chain()
    model(torch.ones(2, 16)).sum().backward()
    with hetero.gathered(model[1]):
        with hetero.gathered(model[1]):
            pass
        optimizer.step()
    with pytest.raises(StateError, match="the write is undone"), hetero.gathered(model[1]):
        model[1].weight.detach().add_(1.0)


def test_a_state_dict_view_takes_two_functions_while_it_is_open() -> None:
    model, _ = chain()
    view = engine_of(model).residence.runtime.state_dicts
    assert not view.takes(torch.Tensor.detach)
    with view.open(), view.open():
        pass
    with view.open():
        assert view.takes(torch.Tensor.detach) and view.takes(torch.Tensor.copy_)
        assert not view.takes(torch.Tensor.add_)
