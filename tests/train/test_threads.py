"""Two threads at once are told, and disturb nothing; one that another waits for is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import StateError
from hetero.train.access import backward
from tests.equivalence.harness import same, values

WIDTH = 24


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def prepared(device: str) -> tuple[Any, Any]:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    return hetero.prepare(model, optimizer, device=device, hbm="26KiB", chunk_bytes=256)


Use = Callable[[Any, torch.Tensor], Any]


def calls(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def calls_a_unit(model: Any, x: torch.Tensor) -> Any:
    return model[4](x)


def reads(model: Any, x: torch.Tensor) -> Any:
    return float(model[5][0].weight.norm())


def gathers(model: Any, x: torch.Tensor) -> Any:
    with hetero.gathered(model):
        return x


@pytest.mark.parametrize("use", [calls, calls_a_unit, reads, gathers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_a_thread_for_which_the_first_one_waits_may_use_the_model(device: str, use: Use) -> None:
    plain = net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = prepared(device)
    x = torch.randn(3, WIDTH)
    with ThreadPoolExecutor(1) as other:

        def meanwhile(*_: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                other.submit(use, model, x).result(30)

        for number in range(4):
            hook = model[2][0].register_forward_hook(meanwhile)
            for m, o in ((plain, reference), (model, optimizer)):
                m(x).square().mean().backward()
                o.step()
                o.zero_grad()
            hook.remove()
            same(values(plain), values(model), f"step {number}")


def test_a_pass_that_failed_is_nobodys_though_autograd_lets_go_of_it_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As its threads of devices do, after the caller has got the error."""
    kept, at_end = [], backward.at_end_of_backward

    def keep(ending: Callable[[], None]) -> None:
        kept.append(ending)
        at_end(ending)

    def fail(param: torch.Tensor) -> None:
        raise ValueError

    monkeypatch.setattr(backward, "at_end_of_backward", keep)
    plain, x = net(), torch.randn(3, WIDTH)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = prepared("cpu:sim")
    hook = model[1][0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError):
        model(x).square().mean().backward()
    hook.remove()
    optimizer.zero_grad()
    for m, o in ((plain, reference), (model, optimizer)):
        m(x).square().mean().backward()
        o.step()
    assert kept
    same(values(plain), values(model), "after a pass that failed")


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_two_threads_at_once_are_refused(device: str) -> None:
    model, _ = prepared(device)
    x, inside, go_on = torch.randn(3, WIDTH), threading.Event(), threading.Event()
    right, first = calls(model, x), threading.get_ident()
    with ThreadPoolExecutor(1) as other:
        under_way: list[Any] = []

        def meet(*_: Any) -> None:
            if threading.get_ident() == first:
                under_way.append(other.submit(calls, model, x))
                assert inside.wait(30)
            else:
                inside.set()
                assert go_on.wait(30)

        hook = model[2][0].register_forward_hook(meet)
        try:
            with pytest.raises(StateError, match="two threads use the model"):
                calls(model, x)
        finally:
            go_on.set()
        assert torch.equal(under_way[0].result(30), right)
        hook.remove()
    assert torch.equal(calls(model, x), right)


@pytest.mark.parametrize("use", [calls, calls_a_unit, reads, gathers], ids=lambda f: f.__name__)
def test_a_thread_that_comes_during_backward_is_refused(use: Use) -> None:
    model, _ = prepared("cpu:sim")
    x, told = torch.randn(3, WIDTH), list[BaseException | None]()
    with ThreadPoolExecutor(1) as other:

        def meanwhile(grad: torch.Tensor) -> None:
            told.append(other.submit(use, model, x).exception(30))

        model[2][0].weight.register_hook(meanwhile)
        model(x).square().mean().backward()
        assert isinstance(told[0], StateError) and "two threads" in str(told[0])
        other.submit(use, model, x).result(30)


def test_threads_that_take_turns_train_as_one() -> None:
    plain = net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = prepared("cpu:sim")
    turn = threading.Lock()

    def step(m: Any, o: Any) -> None:
        with turn:
            m(torch.ones(3, WIDTH)).square().mean().backward()
            o.step()
            o.zero_grad()

    with ThreadPoolExecutor(3) as threads:
        for m, o in ((plain, reference), (model, optimizer)):
            for done in [threads.submit(step, m, o) for _ in range(6)]:
                done.result()
    same(values(plain), values(model), "weights")
