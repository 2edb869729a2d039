"""Weights that all ranks write alike, while each of them also reads and evaluates on its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Net
from tests.ranks.peers import InOneProcess, Loop, OnARank, adamw, batch, values

STEPS = 3
SECONDS = 20.0
"""After which a rank that waits for another one in vain says so."""
Settings = dict[str, Any]
Write = Callable[[Net], None]


class Ours(OnARank):
    """A rank that runs under settings."""

    def __init__(self, rank: int, *, one_sided: bool, settings: Settings) -> None:
        super().__init__(rank, 0, one_sided=one_sided)
        self.config = Config.load(
            **{"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024, **settings}
        )

    def prepared(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self.models.append(model)
        return prepare_tuned(model, optimizer, self.config, self._tuning)


class OneRank(Ours):
    """The only rank, with the micro-batches of two."""

    n_ranks = 2

    def backward(
        self, loss_of: Callable[[int], torch.Tensor], *, retain_graph: bool = False
    ) -> None:
        for rank in range(self.n_ranks):
            (loss_of(rank) / self.n_ranks).backward(retain_graph=retain_graph)


# -- how a program writes weights ------------------------------------------------------------------


def each_in_place(model: Net) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def with_the_same_numbers(model: Net) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.clone())


def some_in_one_call(model: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.last.parameters()), 0.9)
        torch.mul(model.norm.weight, 0.5, out=model.norm.weight)


def through_data(model: Net) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)
    model.last.weight.data[2] = 0.25


def through_data_that_is_held(model: Net) -> None:
    held = [param.data for param in model.last.parameters()]
    for value in held:
        value.mul_(0.9)
    held[0].add_(0.1)
    held[0].view(-1)[::2].mul_(0.5)


def through_detached(model: Net) -> None:
    model.last.weight.detach().mul_(0.9)
    model.first.weight.detach()[0].fill_(0.1)


def through_views(model: Net) -> None:
    with torch.no_grad():
        first, second = model.blocks[1][0].weight.chunk(2)
        first.mul_(0.5)
        second[0].zero_()
        model.first.weight.view(-1)[3:7] *= 0.5


def with_other_weights(model: Net) -> None:
    """Weights whose bytes are elsewhere, and lazy gradients, next to a view."""
    first, second = model.blocks[0][0].weight, model.blocks[1][0].weight
    first.data.copy_(second)
    with torch.no_grad():
        torch.add(first.data, model.blocks[2][0].weight, alpha=0.5, out=first.data)
        second.add_(first.data - model.blocks[3][0].weight, alpha=0.1)
        torch._foreach_add_([first.data], [second], alpha=0.1)
    for param in model.parameters():
        if param.grad is not None:
            param.data.add_(param.grad, alpha=-0.01)


def assigns_data(model: Net) -> None:
    model.first.weight.data = model.first.weight.data * 0.9
    model.last.bias.data = torch.full((7,), 0.125)


def begins_anew(model: Net) -> None:
    torch.manual_seed(5)
    model.last.reset_parameters()
    nn.init.constant_(model.first.bias, 0.0)


def swaps_averages(model: Net) -> None:
    params = list(model.parameters())
    with torch.no_grad():
        kept = [param.detach().clone() for param in params]
        for param, value in zip(params, kept, strict=True):
            param.copy_(value * 0.5)
        model(torch.ones(2, 10))
        for param, value in zip(params, kept, strict=True):
            param.copy_(value * 0.99)


def swaps_averages_through_data(model: Net) -> None:
    """Weights come back, so masters stay, on all ranks as on one."""
    kept = [param.data.clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.mul_(0.5)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(bool(value.isfinite().all()) for value in values.values())
    for param, value in zip(model.parameters(), kept, strict=True):
        param.data.copy_(value)
    model.last.weight.data[2] = 0.125


def by_a_state_dict(model: Net) -> None:
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
    model.last.bias.data.add_(0.1)


def nothing(model: Net) -> None: ...


WRITES: tuple[Write, ...] = (
    *(each_in_place, some_in_one_call, through_data, through_data_that_is_held, through_detached),
    *(
        through_views,
        with_other_weights,
        assigns_data,
        begins_anew,
        swaps_averages,
        by_a_state_dict,
    ),
)


def uses_it_alone(model: Net) -> None:
    with torch.no_grad():
        model(torch.zeros(3, 10))
    for param in model.parameters():
        param.data.norm().item()
        param.norm().item()
    {name: value.clone() for name, value in model.state_dict().items()}


def trains(loop: Loop, write: Write, before: Write = nothing, *, alone: bool = False) -> Any:
    """Write weights after each backward pass, and after each step; the first rank alone uses the
    model then, while the others wait for it at a barrier that is not ours."""
    torch.manual_seed(0)
    net = Net()
    before(net)
    model, optimizer = loop.prepared(net, adamw(p for p in net.parameters() if p.requires_grad))
    for step in range(STEPS):
        loop.backward(lambda rank: model(batch(step, rank, width=10)).pow(2).mean())  # noqa: B023
        write(model)
        optimizer.step()
        optimizer.zero_grad()
        write(model)
        if alone:
            if dist.get_rank() == 0:
                uses_it_alone(model)
            dist.barrier()
    return values(model, optimizer)


def on_a_rank(rank: int, write: Write, one_sided: bool, settings: Settings, before: Write) -> Any:
    settings = {"mesh": "world", "timeout_seconds": SECONDS, **settings}
    if one_sided and rank == 1:  # what is evicted when is its own matter
        settings["hbm"] = 2 * settings.get("hbm", 60_000)
    loop = Ours(rank, one_sided=one_sided, settings=settings)
    found = trains(loop, write, before, alone=one_sided)
    hetero.release(loop.models[0])
    return found


def assert_same(expected: Any, found: list[Any]) -> None:
    for each in found:
        wrong = [key for key in expected if not torch.equal(expected[key], each[key])]
        assert not wrong


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_ranks_that_write_weights_alike_are_one_rank(write: Write) -> None:
    expected = trains(InOneProcess(2), write)
    assert_same(expected, run_ranks(2, on_a_rank, write, True, {}, nothing))


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("write", [each_in_place, through_data, through_views, swaps_averages])
def test_ranks_that_gather_write_weights_alike(write: Write) -> None:
    expected = trains(InOneProcess(2), write)
    assert_same(expected, run_ranks(2, on_a_rank, write, False, {}, nothing))


def in_its_forward(net: Net) -> None:
    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    def clamp_data(module: nn.Module, args: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    net.blocks[0][0].register_forward_pre_hook(clamp)
    net.last.register_forward_pre_hook(clamp_data)


def test_ranks_write_weights_in_a_forward() -> None:
    expected = trains(InOneProcess(2), nothing, in_its_forward)
    found = run_ranks(2, written_in_a_forward)
    assert_same(expected, found)


def written_in_a_forward(rank: int) -> Any:
    settings = {"mesh": "world", "timeout_seconds": SECONDS, "hbm": 60_000 * (1 + rank)}
    loop = Ours(rank, one_sided=True, settings=settings)
    found = trains(loop, nothing, in_its_forward)
    hetero.release(loop.models[0])
    return found


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(
    "write",
    [with_the_same_numbers, through_detached, through_data, swaps_averages_through_data],
)
@pytest.mark.parametrize("one_sided", [True, False], ids=["shared", "gathered"])
def test_a_written_weight_is_its_own_master_on_all_ranks(write: Write, one_sided: bool) -> None:
    """Each rank keeps a part of a master; all parts follow, also those without the tensor's end."""
    settings = {"precision": "bf16"}
    expected = trains(OneRank(0, one_sided=True, settings=settings), write)
    assert_same(expected, run_ranks(2, on_a_rank, write, one_sided, settings, nothing))


def reads_between(loop: Loop, rank: int) -> Any:
    """Put averages in the place of weights; the first rank alone reads masters meanwhile."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = loop.prepared(net, adamw(net.parameters()))
    for step in range(STEPS):
        loop.backward(lambda rank: model(batch(step, rank, width=10)).pow(2).mean())  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
        kept = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data.mul_(0.5)
        if rank == 0:
            copy.deepcopy(optimizer.state_dict())
        if dist.is_initialized():
            dist.barrier()
        for param, value in zip(model.parameters(), kept, strict=True):
            param.data.copy_(value)
    return values(model, optimizer)


def reads_between_alone(rank: int) -> Any:
    settings = {"mesh": "world", "timeout_seconds": SECONDS, "precision": "bf16"}
    loop = Ours(rank, one_sided=True, settings=settings)
    found = reads_between(loop, rank)
    hetero.release(loop.models[0])
    return found


def test_a_rank_that_reads_masters_alone_decides_nothing() -> None:
    expected = reads_between(OneRank(0, one_sided=True, settings={"precision": "bf16"}), 1)
    assert_same(expected, run_ranks(2, reads_between_alone))


def freeze(net: Net) -> None:
    net.blocks[1].requires_grad_(False)


def into_codes(model: Net) -> None:
    with torch.no_grad():
        model.blocks[1][0].weight.mul_(1.5)
    model.blocks[1][2].weight.data[0] = 0.125


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("nf4", marks=pytest.mark.campaign(seconds=2))]
)
def test_ranks_write_frozen_weights_into_codes(codec: str) -> None:
    settings = {"frozen": codec}
    expected = trains(OneRank(0, one_sided=True, settings=settings), into_codes, freeze)
    assert_same(expected, run_ranks(2, on_a_rank, into_codes, True, settings, freeze))


def sums_over_ranks(model: Net) -> None:
    """As programs average models: nothing of torch's tells of the sum."""
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data.div_(2)


def test_collectives_of_a_program_write_weights() -> None:
    expected = trains(InOneProcess(2), nothing)
    assert_same(expected, run_ranks(2, on_a_rank, sums_over_ranks, True, {}, nothing))


def by_numpy(model: Net) -> None:
    """No function of torch's sees it: it is found at the next access."""
    model.last.weight.data.numpy()[1] = 0.25
    model.first.bias.sum()


def test_writes_by_numpy_are_found_at_the_next_access() -> None:
    expected = trains(InOneProcess(2), by_numpy)
    assert_same(expected, run_ranks(2, on_a_rank, by_numpy, True, {}, nothing))


def uses_views(rank: int) -> None:
    torch.manual_seed(0)
    net = Net()
    loop = Ours(rank, one_sided=True, settings={"mesh": "world", "timeout_seconds": SECONDS})
    model, _ = loop.prepared(net, adamw(net.parameters()))
    view = model.last.weight.data
    kept = io.BytesIO()
    torch.save(view, kept)
    kept.seek(0)
    plain = [copy.deepcopy(view), torch.load(kept), view.clone(), view * 2, view.sum()]
    assert all(type(each) is torch.Tensor for each in plain)
    assert torch.equal(plain[0], view) and torch.equal(plain[1], view)
    assert repr(view).startswith("tensor(") and f"{view[0, 0]:.3f}" == f"{view.tolist()[0][0]:.3f}"
    same = view.clone()
    assert isinstance(copy.deepcopy(nn.Parameter(view)), nn.Parameter)
    mapped, expected = (torch.func.vmap(lambda row, x=x: x @ row)(x) for x in (view, same))
    assert torch.equal(mapped, expected)
    assert torch.equal(torch.compile(lambda x: x * 2, backend="eager")(view), 2 * same)
    assert all(type(each) is type(view) for each in (view[0], *view.chunk(2)))
    hetero.release(model)
    view.add_(1)  # no weight's any more


def test_views_of_shared_weights_compute_as_plain_tensors() -> None:
    run_ranks(2, uses_views)
