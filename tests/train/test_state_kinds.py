"""Kinds of state that a forward may change: each comes back, in place, as it was read."""

from __future__ import annotations

import operator
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hetero
from hetero.train.activations.moment import Moment
from hetero.train.activations.reach import Attributes, Reach
from hetero.train.activations.state_kinds import (
    ARRAY,
    CELL,
    NAMES,
    SETTING,
    SPACE,
    TABLE,
    TINY,
    Buffer,
    Switch,
    absent,
    common_sources,
    stand_in,
    switches,
    ways_of_fp32,
)

LIMIT = 3


@pytest.mark.parametrize(
    "table",
    [[1, 2, 3], {1, 2, 3}, deque([1, 2]), {"a": 1, "b": 2}, OrderedDict(a=1, b=2), [], {}],
    ids=lambda table: f"{type(table).__name__} of {len(table)}",
)
def test_a_container_has_its_contents_and_their_order_again(table: Any) -> None:
    was = TABLE.read(table)
    before = list(table)
    table.clear()
    if isinstance(table, dict):
        table.update(z=9, b=2)
    else:
        (table.add if isinstance(table, set) else table.append)(9)
    TABLE.write(table, was)
    assert list(table) == before


def test_attributes_that_came_meanwhile_are_gone_and_those_that_went_are_back() -> None:
    class Thing:
        __slots__ = ("one", "two")

    thing = Thing()
    thing.one = 1
    space = Attributes(thing, Thing.__slots__)
    was = SPACE.read(space)
    del thing.one
    thing.two = 2
    SPACE.write(space, was)
    assert thing.one == 1 and not hasattr(thing, "two")


def test_names_and_cells_may_have_no_value() -> None:
    space: dict[str, Any] = {"a": 1, "z": 0}
    names = space, ("a", "b")
    was = NAMES.read(names)
    assert was == {"a": 1, "b": absent}
    space.update(a=2, b=3, z=4)
    NAMES.write(names, was)
    assert space == {"a": 1, "z": 4}

    def outer() -> Any:
        def inner() -> int:
            return value

        if LIMIT < 0:
            value = 1
        return inner

    (cell,) = outer().__closure__
    was = CELL.read(cell)
    assert was is absent
    cell.cell_contents = 5
    CELL.write(cell, was)
    with pytest.raises(ValueError, match="empty"):
        _ = cell.cell_contents


def test_a_setting_is_set_where_it_differs_alone() -> None:
    now, calls = [1], []
    switch = Switch(lambda: now[0], lambda value: calls.append(value))
    SETTING.write(switch, 1)
    assert not calls
    SETTING.write(switch, 2)
    assert calls == [2]


@pytest.fixture
def settings() -> Iterator[None]:
    """Put torch's settings of fp32 products back."""
    before = [way.fp32_precision for way in ways_of_fp32()]
    yield
    torch.set_float32_matmul_precision("highest")
    for way, value in zip(ways_of_fp32(), before, strict=True):
        way.fp32_precision = "none"
        if way.fp32_precision != value:
            way.fp32_precision = value


def by_attribute(path: str, value: str) -> Callable[[], None]:
    return lambda: setattr(operator.attrgetter(path)(torch.backends), "fp32_precision", value)


def of_all() -> None:
    torch.backends.fp32_precision = "tf32"


SETTERS = {
    "cuda.matmul": by_attribute("cuda.matmul", "tf32"),
    "cudnn.conv": by_attribute("cudnn.conv", "ieee"),  # and rnn is tf32: torch tells neither
    "mkldnn.matmul": by_attribute("mkldnn.matmul", "bf16"),
    "all": of_all,
    "older": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("name", SETTERS)
def test_any_way_to_set_fp32_products_is_lent_and_put_back(name: str, settings: None) -> None:
    """torch's older getters end in an error where the newer settings differ from them: units that
    were computed again did, under the default activations."""

    def now() -> list[str]:
        return [way.fp32_precision for way in ways_of_fp32()]

    forward, there = now(), [SETTING.read(switch) for switch in switches()]
    SETTERS[name]()
    backward, here = now(), [SETTING.read(switch) for switch in switches()]
    assert forward != backward

    for settled, states in ((forward, there), (backward, here)):
        for switch, state in zip(switches(), states, strict=True):
            SETTING.write(switch, state)
        assert now() == settled


def test_a_setting_follows_that_of_all_after_it_was_lent(settings: None) -> None:
    """It was set for itself, and later products were made otherwise than the program said."""
    of_all()
    forward = [SETTING.read(switch) for switch in switches()]
    torch.backends.fp32_precision = "ieee"
    backward = [SETTING.read(switch) for switch in switches()]
    for states in (forward, backward):
        for switch, state in zip(switches(), states, strict=True):
            SETTING.write(switch, state)
    of_all()
    assert {way.fp32_precision for way in ways_of_fp32()} == {"tf32"}


@pytest.mark.parametrize("name", SETTERS)
def test_units_are_computed_again_however_fp32_products_are_set(name: str, settings: None) -> None:
    SETTERS[name]()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(
        model, optimizer, device="cpu:sim", hbm="8KiB", chunk_bytes=256, activations="recompute"
    )
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


def test_an_array_keeps_its_memory() -> None:
    array = np.arange(4.0)
    was, where = ARRAY.read(array), array.ctypes.data
    array += 1
    ARRAY.write(array, was)
    assert array.tolist() == [0, 1, 2, 3] and array.ctypes.data == where


def test_what_is_lent_stands_in_for_tensors_and_for_tuples_of_them() -> None:
    tensor, other = torch.ones(2), torch.zeros(2)
    pair = (tensor, (1, tensor))
    lent: dict[int, Any] = {id(tensor): other}
    lent[id(pair)] = stand_in(pair, lent)
    assert lent[id(pair)][0] is other and lent[id(pair)][1][1] is other
    assert SPACE.lend({"a": tensor, "b": pair}, lent)["b"] is lent[id(pair)]
    assert TABLE.lend([tensor, 1], lent)[0] is other
    assert CELL.lend(tensor, lent) is other
    plain = {"a": 1}
    assert SPACE.lend(plain, lent) is plain


@pytest.mark.parametrize("numel", [3, TINY])
def test_a_buffer_that_was_written_unseen_keeps_its_value(numel: int) -> None:
    tensor = torch.ones(numel)
    written = Buffer(tensor)
    tensor.data.add_(1.0)
    written.close()
    assert torch.equal(written.copy(), torch.ones(numel))


def test_a_small_buffer_keeps_the_value_that_others_write_over_later() -> None:
    small, large = torch.ones(3), torch.ones(TINY)
    buffers = [Buffer(small), Buffer(large)]
    for buffer in buffers:
        buffer.close()
    assert not any(buffer.is_lost for buffer in buffers)
    for tensor in (small, large):
        tensor.add_(1.0)
    assert [buffer.is_lost for buffer in buffers] == [False, True]
    assert buffers[0].copy().tolist() == [1, 1, 1] and buffers[1]._before is None


def test_common_generators_can_be_set_to_where_they_were() -> None:
    draws = (random.random, np.random.rand, lambda: torch.rand(()).item())
    for source, draw in zip(common_sources(), draws, strict=True):
        state = source.get()
        first = draw()
        assert not source.same(state, source.get())
        source.set(state)
        assert draw() == first


def test_a_function_of_the_users_reaches_the_names_that_may_be_state() -> None:
    def code() -> int:
        return LIMIT + int(torch.pi) + np.int8(1)

    assert isinstance(code, FunctionType)
    reach = Reach()
    ((space, names),) = reach.named(code)
    assert space is code.__globals__ and names == ("LIMIT",)
    assert reach.named(code) is reach.named(code)
    assert reach.named(np.median.__wrapped__) == ()


def test_a_global_with_the_name_of_an_attribute_is_not_reached() -> None:
    """It may be the program's data set."""
    weight, shift, scale = torch.zeros(3), [1.0], [2.0]
    space = {"weight": weight, "shift": shift, "scale": scale}
    code = """
def forward(self, x):
    def shifted(y):
        global shift
        shift = shift[:]
        return y + shift[0]

    return [shifted(self.weight * x) * scale[0] for _ in range(2)]
"""
    exec(code, space)
    ((found, names),) = Reach().named(space["forward"])
    assert found is space and set(names) == {"shift", "scale"}


def test_tables_of_hooks_live_while_they_are_told_apart() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight.register_post_accumulate_grad_hook(lambda param: None)
    table = weakref.ref(module.weight._post_accumulate_grad_hooks)
    moment = Moment(module, torch.device("cpu"), Reach())
    with moment.again():
        module.weight._post_accumulate_grad_hooks = None
        module.weight.register_post_accumulate_grad_hook(lambda param: None)
        assert table() is not None  # else the new one could lie there, and pass for it
        assert table() is not module.weight._post_accumulate_grad_hooks
    assert not module.weight._post_accumulate_grad_hooks
