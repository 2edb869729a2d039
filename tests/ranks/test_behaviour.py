"""What ranks may do differently, and what they may not: right bits, or the same error on all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import hetero
from hetero import ConfigError, DivergenceError, StateError
from hetero.api import engine_of
from hetero.errors import OutOfMemory, RankLost
from hetero.jobs import thread_budget
from hetero.testing.ranks import Died, outcomes, run_ranks
from hetero.train.engine import alike
from hetero.weights import Weights
from tests.ranks.models import OPTIMIZERS, Net, Run, assert_same, built, by_ranks, by_torch, found
from tests.ranks.models import loss_of as loss_at

TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
RUN = Run(settings=TIGHT)
Act = Callable[[int, Net, Any, int], None]
"""Called with (rank, model, optimizer, step) between backward and step."""


def prepared(**settings: Any) -> tuple[Net, Any]:
    model, plain = built(RUN)
    return hetero.prepare(model, plain, mesh="world", **{**TIGHT, **settings})


def trained(rank: int, act: Act, settings: dict[str, Any] | None = None) -> Any:
    model, optimizer = prepared(**(settings or {}))
    norms = []
    for step in range(RUN.steps):
        loss_at(model, RUN, step, rank).backward()
        act(rank, model, optimizer, step)
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


# -- right bits ----------------------------------------------------------------------------------


def prints_a_weight(rank: int, model: Net, optimizer: Any, step: int) -> None:
    if rank == 1:
        str(model.last.weight), model.first.weight.sum().item()


def reads_a_gradient(rank: int, model: Net, optimizer: Any, step: int) -> None:
    if rank == step % 2:
        assert model.blocks[1][0].weight.grad is not None
        model.blocks[1][0].weight.grad.abs().max().item()


def reads_everything(rank: int, model: Net, optimizer: Any, step: int) -> None:
    if rank == 0:
        {name: value.clone() for name, value in model.state_dict().items()}
        [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]


HELD: list[Any] = []


def holds_a_view(rank: int, model: Net, optimizer: Any, step: int) -> None:
    if rank == 1 and step == 1:
        HELD.append(model.blocks[2][0].weight.detach())


def is_slow(rank: int, model: Net, optimizer: Any, step: int) -> None:
    time.sleep(0.1 * (rank == step % 2))


def evaluates(rank: int, model: Net, optimizer: Any, step: int) -> None:
    if rank == 0:
        with torch.no_grad():
            model(torch.zeros(3, 10))


ACTS = (
    *(prints_a_weight, reads_a_gradient, reads_everything),
    *(holds_a_view, is_slow, evaluates),
)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_one_rank_does_alone_changes_no_bit(act: Act) -> None:
    expected = by_torch(RUN, 2)
    for each in run_ranks(2, trained, act, {"hbm": 90_000 if act is holds_a_view else 60_000}):
        assert_same(each, expected)


def of_wide_batches(rank: int, host: int | None) -> Any:
    """Train in bf16 where activations go to RAM; return what homes and budget take, and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8))
    )
    model, optimizer = hetero.prepare(
        *(model, torch.optim.AdamW(model.parameters(), lr=1e-2)),
        **{**TIGHT, "hbm": 400_000, "host": host, "precision": "bf16", "mesh": "world"},
    )
    for step in range(3):
        batch = torch.randn(300, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    setup = engine_of(model).setup
    taken = sum(map(setup.store.bytes_of, setup.buckets))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = setup.blueprint.home_bytes, taken, setup.budget.host_bytes
    hetero.release(model, optimizer)
    return sizes, weights


def test_activations_leave_homes_of_shares_their_room_in_ram() -> None:
    """Gradients of ranks are sums in fp32 from the first pass on."""
    (sizes, roomy), _ = run_ranks(2, of_wide_batches, None)
    expected, taken, least = sizes
    assert taken == expected
    for _, tight in run_ranks(2, of_wide_batches, least):
        for name, value in roomy.items():
            assert torch.equal(value, tight[name]), name


def reads_in_backward(rank: int) -> Any:
    """A hook reads weights whose gradients are being summed."""
    model, optimizer = prepared(timeout_seconds=20.0)

    def read(grad: torch.Tensor) -> None:
        model.last.weight.sum().item()
        model.blocks[3][0].weight.sum().item()

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(read)

    for block in model.blocks[:3]:
        block.register_forward_hook(watch)
    norms = []
    for step in range(RUN.steps):
        loss_at(model, RUN, step, rank).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


def test_weights_can_be_read_while_their_gradients_are_summed() -> None:
    expected = by_torch(RUN, 2)
    for each in run_ranks(2, reads_in_backward):
        assert_same(each, expected)


def reads_late(rank: int) -> None:
    model, optimizer = prepared()
    for step in range(3):
        loss_at(model, RUN, step, rank).backward()
        if rank == 0:
            before = [value.clone() for value in model.state_dict().values()]
            time.sleep(0.2)
            now = [value.clone() for value in model.state_dict().values()]
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        optimizer.step()
        optimizer.zero_grad()


def test_no_rank_updates_before_all_have_come_to_the_step() -> None:
    run_ranks(2, reads_late)


@pytest.mark.parametrize(
    "one_sided",
    [True, pytest.param(False, marks=pytest.mark.campaign(seconds=2))],
    ids=["read", "gathered"],
)
def test_slow_updates_of_one_rank_change_no_bit(one_sided: bool) -> None:
    run = replace(RUN, slow=1, one_sided=one_sided)
    expected = by_torch(run, 2)
    for each in run_ranks(2, by_ranks, run):
        assert_same(each, expected)


def batches_differ(rank: int) -> Any:
    """Larger batches on one rank, from the second step on: other frames, other policies."""
    model, optimizer = prepared(hbm=80_000, activations="auto")
    for step in range(4):
        rows = 5 if rank == 0 or step == 0 else 12
        data = torch.randn(rows, 10, generator=torch.Generator().manual_seed(step * 10 + rank))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


def test_larger_activations_on_one_rank_change_no_bit() -> None:
    torch.manual_seed(0)
    model, optimizer = built(RUN)
    params = list(model.parameters())
    for step in range(4):
        for rank in range(2):
            rows = 5 if rank == 0 or step == 0 else 12
            data = torch.randn(rows, 10, generator=torch.Generator().manual_seed(step * 10 + rank))
            grads = torch.autograd.grad(model(data).pow(2).mean(), params)
            for param, grad in zip(params, grads, strict=True):
                grad = grad * (1 / 2)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad()
    expected = found(model, optimizer, [])
    for each in run_ranks(2, batches_differ):
        assert_same(each, expected)


def begins_otherwise(rank: int) -> Any:
    torch.manual_seed(rank)
    model = Net()
    model, optimizer = hetero.prepare(
        model, OPTIMIZERS["adamw"](model.parameters()), mesh="world", **TIGHT
    )
    values = found(model, optimizer, [])
    hetero.release(model, optimizer)  # together: the other rank reads this one's shares until then
    return values


def test_the_first_ranks_values_count() -> None:
    torch.manual_seed(0)
    expected = dict(Net().state_dict())
    for each in run_ranks(2, begins_otherwise):
        assert all(torch.equal(value, expected[name]) for name, value in each.weights.items())


class Backwards(Net):
    """Registers its modules in an order that is not that of their use."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "last", "norm", "blocks"):
            self._modules[name] = self._modules.pop(name)


def exchanges(rank: int, run: Run) -> list[str]:
    model = Backwards()
    plain = OPTIMIZERS["adamw"](model.parameters())
    model, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    said = []
    comm = engine_of(model).setup.comm
    exchange, now = comm.exchange, 0

    def heard(what: str) -> Any:
        said.append(f"{now} {what}")
        return exchange(what)

    comm.exchange = heard
    for now in range(3):
        loss_at(model, run, now, rank).backward()
        optimizer.step()
    names = {b.id: b.segments[0].spec.name for b in engine_of(model).setup.buckets}
    begun = [what.split() for what in said if what.endswith(" from 0")]
    return [f"{words[0]} {names[int(words[4])]}" for words in begun]


def test_from_the_second_step_on_gradients_leave_in_the_order_in_which_they_are_complete() -> None:
    for said in run_ranks(2, exchanges, RUN):
        second = [name for name in said if name.startswith("1 ")]
        assert second[0] == "1 last.weight" and second[-1] == "1 first.weight"
        assert said[0] != "0 last.weight"


def test_a_pass_in_which_the_first_rank_left_out_a_block_says_no_order() -> None:
    for said in run_ranks(2, exchanges, replace(RUN, skips={(0, 0): 1})):
        third = [name for name in said if name.startswith("2 ")]
        assert third[0] == "2 last.weight" and third[-1] == "2 first.weight"


# -- an error on all -----------------------------------------------------------------------------


def another_model(rank: int) -> None:
    model = Net(width=24 + 8 * rank)
    hetero.prepare(model, OPTIMIZERS["adamw"](model.parameters()), mesh="world", **TIGHT)


def another_rate(rank: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    hetero.prepare(model, optimizer, mesh="world", **TIGHT)


def another_group(rank: int) -> None:
    model = Net()
    groups = [{"params": list(part.parameters())} for part in (model.first, model.blocks)]
    optimizer = torch.optim.SGD(groups[: 1 + rank], lr=0.1)
    hetero.prepare(model, optimizer, mesh="world", **TIGHT)


def other_members(rank: int) -> None:
    model = Net()
    first, second = (list(part.parameters()) for part in (model.first, model.last))
    rates = (0.1, 0.0) if rank == 0 else (0.0, 0.1)
    groups = [{"params": first, "lr": rates[0]}, {"params": second, "lr": rates[1]}]
    optimizer = torch.optim.SGD(groups if rank == 0 else groups[::-1], lr=0.1)
    hetero.prepare(model, optimizer, mesh="world", **TIGHT)


def another_order(rank: int) -> None:
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params if rank == 0 else params[::-1], lr=0.1)
    hetero.prepare(model, optimizer, mesh="world", **TIGHT)


def moves_a_parameter(rank: int) -> None:
    model = Net()
    optimizer: Any = torch.optim.SGD(model.first.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, mesh="world", **TIGHT)
    part = model.last if rank == 0 else model.norm
    optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.5})
    loss_at(model, RUN, 0, rank).backward()
    optimizer.step()


def begins_anew(rank: int) -> None:
    """One rank drops what it has, as a guard against NaN may."""
    model, optimizer = prepared()
    loss_at(model, RUN, 0, rank).backward()
    if rank == 1:
        optimizer.zero_grad()
    loss_at(model, RUN, 1, rank).backward()


def begins_one_anew(rank: int) -> None:
    model, _ = prepared()
    loss_at(model, RUN, 0, rank).backward()
    if rank == 0:
        model.last.weight.grad = None
    loss_at(model, RUN, 1, rank).backward()


def another_buffer(rank: int) -> None:
    model = Net()
    if rank == 1:
        model.register_buffer("seen", torch.zeros(3))
    hetero.prepare(model, OPTIMIZERS["adamw"](model.parameters()), mesh="world", **TIGHT)


def other_threads(rank: int) -> None:
    torch.set_num_threads(1 + rank)
    prepared()


def another_setting(rank: int) -> None:
    prepared(max_grad_norm=1.0 + rank)


def writes_alone(rank: int) -> None:
    model, _ = prepared()
    if rank == 0:
        with torch.no_grad(), hetero.gathered(model.last, write=True):
            model.last.weight.zero_()
    loss_at(model, RUN, 0, rank).backward()


def loads_alone(rank: int) -> None:
    model, _ = prepared()
    if rank == 1:
        model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    loss_at(model, RUN, 0, rank).backward()


def steps_alone(rank: int) -> None:
    model, optimizer = prepared()
    loss_at(model, RUN, 0, rank).backward()
    if rank == 0:
        optimizer.step()
    loss_at(model, RUN, 1, rank).backward()


def clips_alone(rank: int) -> None:
    model, optimizer = prepared()
    loss_at(model, RUN, 0, rank).backward()
    if rank == 0:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()


DIVERGENCES = {
    another_model: "differ in parameters",
    another_rate: "differ in the setting 'lr' of group 0 (rank 0: ",
    another_group: "differ in the setting 'lr' of group 1 (rank 0: nothing; ",
    other_members: "differ in the parameters of group 0 (rank 0: ",
    another_order: "differ in the parameters of group 0 (rank 0: ",
    moves_a_parameter: "differ in the parameters of group 1 (rank 0: ",
    begins_anew: "(rank 0: adds to an earlier pass; rank 1: begins anew)",
    begins_one_anew: "'last.weight' (rank 0: begins anew; rank 1: adds to an earlier pass)",
    another_buffer: "other parameters or buffers (rank 0: nothing; rank 1: seen [3]",
    other_threads: "differ in threads of torch",
    another_setting: "differ in the setting max_grad_norm=",
    writes_alone: "a write of",
    loads_alone: "a write of",
    steps_alone: "the division of HBM",
    clips_alone: "norms of order 2",
}


@pytest.mark.parametrize("body", list(DIVERGENCES), ids=lambda body: body.__name__)
def test_ranks_that_go_different_ways_are_all_told(body: Callable[[int], None]) -> None:
    for each in outcomes(2, body):
        assert isinstance(each, Died) and isinstance(each.error, RuntimeError), each
        assert isinstance(each.error, DivergenceError) or body is loads_alone  # torch wraps it
        assert DIVERGENCES[body] in str(each.error)


def no_mesh(rank: int) -> None:
    model = Net()
    hetero.prepare(model, **TIGHT)


def another_size(rank: int) -> None:
    hetero.prepare(Net(), mesh={"dp_shard": 3}, **TIGHT)


def has_no_averaging(rank: int) -> None:
    hetero.prepare(Net(), mesh={"dp_replicate": 2}, **TIGHT)


def early(rank: int) -> None:
    prepared(updates="backward")


def all_ram_for_each(rank: int) -> None:
    prepared(host=int(0.8 * psutil.virtual_memory().total))


REFUSALS = {
    all_ram_for_each: "more than this process may take",
    no_mesh: "each would train alone",
    another_size: "is of 3 ranks; there are 2",
    has_no_averaging: "nothing would average",
    early: "gradients are summed when backward is over",
}


@pytest.mark.parametrize("body", list(REFUSALS), ids=lambda body: body.__name__)
def test_what_ranks_cannot_do_is_refused(body: Callable[[int], None]) -> None:
    for each in outcomes(2, body):
        assert isinstance(each, Died) and isinstance(each.error, ConfigError), each
        assert REFUSALS[body] in str(each.error)


def hooks_a_gradient(rank: int) -> None:
    model, _ = prepared()

    def look(param: nn.Parameter) -> None:
        first = model.blocks[0][2].weight.grad  # on its way
        assert first is not None
        first.sum().item()

    model.blocks[0][0].weight.register_post_accumulate_grad_hook(look)
    loss_at(model, RUN, 0, rank).backward()


def test_a_gradient_that_is_read_before_its_pass_is_over_is_an_error() -> None:
    for each in outcomes(2, hooks_a_gradient):
        assert isinstance(each.error, StateError), each.text
        assert "summed over ranks" in str(each.error)


# -- a rank that dies ----------------------------------------------------------------------------


def dies(rank: int, at: str) -> None:
    model, optimizer = prepared(timeout_seconds=3600.0)  # longer than the test may last
    for step in range(3):
        if rank == 1 and step == 1 and at == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss_at(model, RUN, step, rank)
        if rank == 1 and step == 1 and at == "backward":
            model.blocks[1][0].weight.register_post_accumulate_grad_hook(
                lambda param: os.kill(os.getpid(), signal.SIGKILL)
            )
        loss.backward()
        if rank == 1 and step == 1 and at == "step":
            raise KeyboardInterrupt
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("at", ["forward", "backward", "step"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_when_a_rank_dies_the_others_hear_of_it_at_once(n_ranks: int, at: str) -> None:
    ends = outcomes(n_ranks, dies, at)

    for rank, each in enumerate(ends):
        assert isinstance(each, Died)
        assert rank == 1 or isinstance(each.error, RankLost), each.text
        why = "KeyboardInterrupt" if at == "step" else "killed"
        assert rank == 1 or why in str(each.error)


def stops(rank: int) -> None:
    model, optimizer = prepared(timeout_seconds=2.0)
    loss_at(model, RUN, 0, rank).backward()
    optimizer.step()
    if rank == 1:
        signal.alarm(5)  # ends this process: the handler's default
        time.sleep(60)
    optimizer.zero_grad()
    loss_at(model, RUN, 1, rank).backward()


def test_a_rank_that_hangs_is_lost_after_the_timeout() -> None:
    first, second = outcomes(2, stops)

    assert isinstance(first.error, RankLost), first.text
    assert "gradients of bucket" in str(first.error) or "share of bucket" in str(first.error)
    assert isinstance(second, Died)


def comes_late(rank: int) -> None:
    time.sleep(5.0 * rank)
    prepared(timeout_seconds=1.0)


def test_a_rank_that_does_not_come_to_prepare_is_lost() -> None:
    first, second = outcomes(2, comes_late)

    assert isinstance(first.error, RankLost), first.text
    assert "in hetero.prepare in vain" in str(first.error)
    assert isinstance(second.error, RankLost), second.text


def test_a_launched_rank_without_a_group_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="launched as one of 2 ranks"):
        hetero.prepare(Net(), **TIGHT)


def test_a_run_on_one_rank_of_a_group_is_that_run() -> None:
    run = replace(RUN, steps=2)
    (each,) = run_ranks(1, by_ranks, run)
    assert_same(each, by_torch(run, 1))


@pytest.mark.parametrize("n_devices", [1, 2])
def test_ranks_take_a_cuda_device_each_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, n_devices: int
) -> None:
    comm: Any = SimpleNamespace(size=2, n_local=2, agree=lambda row, what: [row, row])
    device: Any = SimpleNamespace(is_cuda=True, torch_device=torch.device("cuda:0"))
    monkeypatch.setattr(alike, "n_accelerators", lambda: n_devices)
    with nullcontext() if n_devices == 1 else pytest.raises(ConfigError, match="set_device"):
        alike.check_places(comm, device)


def test_ranks_of_a_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [thread_budget(n_local) for n_local in (1, 4, 16)] == [15, 3, 1]


# -- weights from files --------------------------------------------------------------------------


def reads_weights(rank: int, folder: str, settings: dict[str, Any]) -> tuple[float, Any]:
    """Return the share of a file's elements that a rank read, and the weights it has then."""
    n_read, pieces = 0, Weights.pieces

    def counted(self: Weights, name: str, numel: int, run: slice | None = None) -> Any:
        nonlocal n_read
        for start, piece in pieces(self, name, numel, run):
            n_read += piece.numel()
            yield start, piece

    Weights.pieces = counted
    with hetero.empty_init():
        model = Net(96)
    mesh = None if dist.get_world_size() == 1 else "world"
    hetero.prepare(model, mesh=mesh, weights=folder, **{**TIGHT, "hbm": 1_000_000, **settings})
    state = {name: value.float().clone() for name, value in model.state_dict().items()}
    if mesh is not None:
        dist.barrier()  # the other one may still read this rank's homes
    return n_read / sum(p.numel() for p in model.parameters()), state


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_each_rank_reads_its_shares_of_a_file(settings: dict[str, Any], tmp_path: Path) -> None:
    save_file(Net(96).state_dict(), tmp_path / "model.safetensors")
    ((whole, right),) = run_ranks(1, reads_weights, str(tmp_path), settings)
    assert settings == {} or whole == 1.0  # fp32 values need no pieces

    for part, state in run_ranks(2, reads_weights, str(tmp_path), settings):
        assert 0.4 < part < 0.6
        assert all(torch.equal(state[name], value) for name, value in right.items())


def cannot_be_coded(rank: int, folder: str) -> None:
    with hetero.empty_init():
        model = Net(96)
    model.blocks.requires_grad_(False)
    settings = {**TIGHT, "hbm": 1_000_000, "frozen": "int8"}
    hetero.prepare(model, mesh="world", weights=folder, **settings)


def test_what_one_rank_cannot_prepare_is_told_to_all(tmp_path: Path) -> None:
    state = Net(96).state_dict()
    state["blocks.0.2.weight"][-1, -1] = float("nan")  # in the last share
    save_file(state, tmp_path / "model.safetensors")

    first, last = outcomes(2, cannot_be_coded, str(tmp_path))

    assert isinstance(last.error, ConfigError) and "NaN" in str(last.error), last.text
    assert isinstance(first.error, DivergenceError), first.text
    assert "rank 1 could not prepare its shares: ConfigError" in str(first.error)


def sends_down(rank: int) -> list[str]:
    """Train on a batch that is too large for RAM on the last rank in one of three steps."""
    given = {"device": "cpu:sim", "hbm": 60_000, "host": 260_000, "chunk_bytes": 1024}
    model, plain = built(Run())
    model, optimizer = hetero.prepare(model, plain, mesh="world", activations="offload", **given)
    found = []
    for step in range(3):
        try:
            model(torch.ones(120 if step == rank == 1 else 4, 10)).pow(2).mean().backward()
            optimizer.step()
            found.append("made")
        except OutOfMemory as error:
            found.append(f"{error.tier}: {error.what}")
        optimizer.zero_grad()
    return found


def test_a_step_that_sent_too_much_down_on_one_rank_is_refused_on_all() -> None:
    first, last = run_ranks(2, sends_down)
    assert first[0] == last[0] == first[2] == last[2] == "made"
    assert first[1].startswith("HOST: on rank 1: ") and last[1].startswith("HOST: ")
