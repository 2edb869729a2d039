"""Stages of torch's pipelines, of which each rank has prepared its own."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import Trainer, TrainingArguments

import hetero
from hetero.errors import BudgetError, ConfigError, HeteroError, RankLost, StateError
from hetero.integrations.accelerate import HeteroAccelerator
from hetero.internals import stages_of
from hetero.status import status
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.equivalence.blocks import OneMatrix

D, RANKS, MICRO_BATCHES, STEPS = 32, 2, 4, 4
HBM = {1: 36 * 1024, 2: 58 * 1024}
"""By the stages of a rank; their weights are of 28 to 64 KiB."""
ONE, LOOPED, V = [[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
STAGES_OF = {
    "ScheduleGPipe": ONE,
    "Schedule1F1B": ONE,
    "ScheduleInterleaved1F1B": LOOPED,
    "ScheduleLoopedBFS": LOOPED,
    "ScheduleInterleavedZeroBubble": LOOPED,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}
"""Of each rank."""
BLOCKS = (7, 9, 8, 6)
"""Of each stage."""
UPDATES = ("sgd", "adamw", "clipped")
SETTINGS = {"device": "cpu:sim", "chunk_bytes": 1024, "timeout_seconds": 20, "mesh": {"pp": RANKS}}


def stage_of(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(*(OneMatrix(D) for _ in range(BLOCKS[index])))


class Case(NamedTuple):
    """A pipeline's run."""

    kind: str
    activations: str
    updates: str


class Outcome(NamedTuple):
    """What a rank came to."""

    weights: list[torch.Tensor]
    losses: list[torch.Tensor]
    evictions: int
    misses: int


def scheduled(kind: str, stages: nn.ModuleList, rank: int, group: Any = None) -> Any:
    """Return the schedule of a rank's stages."""
    of_rank = STAGES_OF[kind]
    n_stages = sum(map(len, of_rank))
    there = [
        PipelineStage(stage, index, n_stages, torch.device("cpu"), group=group)
        for stage, index in zip(stages, of_rank[rank], strict=True)
    ]
    one = there[0] if of_rank is ONE else there
    return getattr(schedules, kind)(one, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)


def stepped(schedule: Any, rank: int, data: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a schedule on a step's inputs and targets; return its losses, where the last stage is."""
    losses: list[torch.Tensor] = []
    given: dict[str, Any] = {}
    if any(stage.is_last for stage in stages_of(schedule)):
        given = {"target": data[1], "losses": losses}
    schedule.step(*[data[0]] * (rank == 0), **given)
    return losses


def optimizer_of(model: nn.Module, updates: str) -> torch.optim.Optimizer:
    if updates == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(rank: int, case: Case, is_prepared: bool) -> Outcome:
    """Train this rank's stages."""
    model: Any = nn.ModuleList(stage_of(index) for index in STAGES_OF[case.kind][rank])
    optimizer: Any = optimizer_of(model, case.updates)
    clip = torch.nn.utils.clip_grad_norm_
    if is_prepared:
        settings = {"activations": case.activations, **SETTINGS}
        model, optimizer = hetero.prepare(model, optimizer, hbm=HBM[len(model)], **settings)
    schedule = scheduled(case.kind, model, rank)
    losses = []
    for number in range(STEPS):
        losses += stepped(schedule, rank, batch(number, 0))
        if case.updates == "clipped":
            clip(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    weights = [value.clone() for value in model.state_dict().values()]
    seen = status(model) if is_prepared else None
    evictions, misses = (seen.evictions, seen.misses) if seen is not None else (0, 0)
    if is_prepared:
        hetero.release(model, optimizer)
    return Outcome(weights, losses, evictions, misses)


def both(rank: int, case: Case) -> tuple[Outcome, Outcome]:
    return trained(rank, case, False), trained(rank, case, True)


def check(case: Case) -> None:
    for plain, ours in run_ranks(RANKS, both, case):
        for theirs, mine in ((plain.weights, ours.weights), (plain.losses, ours.losses)):
            assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
        assert ours.evictions >= 3


def cases() -> Iterator[Case]:
    for each in itertools.product(STAGES_OF, ("keep", "recompute", "offload"), UPDATES):
        yield Case(*each)


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("case", list(cases()), ids="-".join)
def test_prepared_stages_give_the_bits_of_plain_ones(case: Case) -> None:
    check(case)


def evaluated(rank: int, is_prepared: bool) -> list[torch.Tensor]:
    """Train a rank's only stage, and evaluate between steps; return weights and results."""
    model: Any = stage_of(rank)
    optimizer: Any = optimizer_of(model, "sgd")
    if is_prepared:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        settings = {**SETTINGS, "hbm": HBM[1], "mesh": mesh}
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    schedule = scheduled("ScheduleGPipe", nn.ModuleList([model]), rank)
    found = []
    for number in range(2):
        x, target = batch(number, 0)
        found += stepped(schedule, rank, (x, target))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            given: dict[str, Any] = {"target": target} if rank else {}
            found.append(schedule.eval(*[x] * (rank == 0), **given))
    return [*model.state_dict().values(), *(each for each in found if each is not None)]


def both_evaluated(rank: int) -> bool:
    pairs = zip(*(evaluated(rank, is_prepared) for is_prepared in (False, True)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_only_stage_of_a_rank_is_prepared_as_it_is_and_evaluated_between_steps() -> None:
    assert run_ranks(RANKS, both_evaluated) == [True, True]


# -- stages of which several ranks keep shares -----------------------------------------------------


def batch(number: int, copy: int) -> list[torch.Tensor]:
    """Return the inputs and targets of a step, of one of two pipelines."""
    torch.manual_seed(100 * number + copy)
    return [torch.randn(4 * MICRO_BATCHES, D) for _ in range(2)]


def trained_with_shares(rank: int, kind: str) -> tuple[list[torch.Tensor], int]:
    """Train as one of four ranks: two pipelines, whose ranks of a stage keep a share each."""
    at, copy = divmod(rank, RANKS)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model: Any = nn.ModuleList(stage_of(index) for index in STAGES_OF[kind][at])
    optimizer: Any = optimizer_of(model, "adamw")
    settings = {**SETTINGS, "hbm": HBM[len(model)], "mesh": {"pp": 2, "dp_shard": 2}}
    model, optimizer = hetero.prepare(model, optimizer, **settings)
    schedule = scheduled(kind, model, at, groups[copy])
    for number in range(STEPS):
        stepped(schedule, at, batch(number, copy))
        optimizer.step()
        optimizer.zero_grad()
    found = [value.clone() for value in model.state_dict().values()], status(model).evictions
    hetero.release(model, optimizer)
    return found


def trained_in_one(kind: str) -> list[list[torch.Tensor]]:
    """Train all stages in one process of plain torch, in the order of micro-batches, then ranks."""
    model = nn.ModuleList(stage_of(index) for index in range(sum(map(len, STAGES_OF[kind]))))
    optimizer, params = optimizer_of(model, "adamw"), list(model.parameters())
    for number in range(STEPS):
        parts = [[t.chunk(MICRO_BATCHES) for t in batch(number, copy)] for copy in range(2)]
        for i, copy in itertools.product(range(MICRO_BATCHES), range(2)):
            x, target = (each[i] for each in parts[copy])
            for stage in model:
                x = stage(x)
            loss = nn.functional.mse_loss(x, target)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                grad = grad * (1 / 2)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        for param in params:  # as schedules do
            param.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return [list(stage.state_dict().values()) for stage in model]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_two_pipelines_that_share_stages_are_one_process_with_their_micro_batches(
    kind: str,
) -> None:
    theirs = trained_in_one(kind)
    for rank, (mine, evictions) in enumerate(run_ranks(4, trained_with_shares, kind)):
        expected = [value for at in STAGES_OF[kind][rank // 2] for value in theirs[at]]
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
        assert evictions >= 3


@pytest.mark.slow
def test_shares_of_stages_and_a_zero_bubble_are_refused() -> None:
    for each in outcomes(4, trained_with_shares, "ScheduleZBVZeroBubble"):
        assert isinstance(each.error, StateError | RankLost), each.text
        assert "zero bubble" in str(each.error) or "left (StateError" in str(each.error)


# -- what is refused, and ranks that are lost ------------------------------------------------------


def prepared(rank: int, **settings: Any) -> tuple[Any, Any]:
    """Return the stages of a rank, and a schedule of them."""
    model = nn.ModuleList(stage_of(index) for index in LOOPED[rank])
    optimizer = optimizer_of(model, "adamw")
    model, optimizer = hetero.prepare(model, optimizer, **{"hbm": HBM[2], **SETTINGS, **settings})
    return scheduled("ScheduleInterleaved1F1B", model, rank), optimizer


def ends(body: Callable[..., Any], *args: Any) -> list[HeteroError]:
    """Return the errors with which ranks left."""
    found = outcomes(RANKS, body, *args)
    assert all(isinstance(each, Died) for each in found), found
    for each in found:
        assert isinstance(each.error, HeteroError), each.text
        assert each.error.advice
    return [each.error for each in found]


def stage_too_large(rank: int) -> None:
    prepared(rank, hbm=HBM[2] if rank else 3 * 1024)


def test_a_stage_larger_than_the_budget_is_an_error_on_all_ranks() -> None:
    small, other = ends(stage_too_large)

    assert isinstance(small, BudgetError)
    assert isinstance(other, RankLost)
    assert "rank 0 left (BudgetError" in str(other)


def apart(rank: int) -> None:
    models = [stage_of(index) for index in LOOPED[rank]]
    for index, model in enumerate(models):
        optimizer = optimizer_of(model, "adamw")
        models[index], _ = hetero.prepare(model, optimizer, hbm=HBM[2], **SETTINGS)
    stepped(scheduled("ScheduleInterleaved1F1B", nn.ModuleList(models), rank), rank, batch(0, 0))


def test_stages_that_were_prepared_apart_are_an_error_on_all_ranks() -> None:
    for error in ends(apart):
        assert isinstance(error, StateError)
        assert "prepared apart" in str(error)


class Named(nn.Module):
    """A stage whose output has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OneMatrix(D)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": self.block(x)}


def named_output(rank: int) -> None:
    model: Any = nn.ModuleList([OneMatrix(D) if rank else Named()])
    model, _ = hetero.prepare(model, optimizer_of(model, "sgd"), hbm=HBM[2], **SETTINGS)
    stepped(scheduled("Schedule1F1B", model, rank), rank, batch(0, 0))


def test_an_output_that_is_no_tensor_is_an_error_on_all_ranks() -> None:
    stage, other = ends(named_output)

    assert isinstance(stage, ConfigError)
    assert "stage 0 returns dict" in str(stage)
    assert isinstance(other, RankLost)
    assert "rank 0 left (ConfigError" in str(other)


def saves(rank: int, folder: str) -> None:
    model: Any = stage_of(rank)
    model, optimizer = hetero.prepare(model, optimizer_of(model, "sgd"), hbm=HBM[1], **SETTINGS)
    hetero.save_checkpoint(folder, model, optimizer)


def test_a_checkpoint_of_one_ranks_stages_is_refused(tmp_path: Path) -> None:
    for error in ends(saves, str(tmp_path)):
        assert isinstance(error, ConfigError)
        assert "one rank's stages" in str(error)


def too_few(rank: int, is_interleaved: bool) -> None:
    """Build a schedule of torch's with a number of micro-batches that it does not take."""
    mine = (LOOPED if is_interleaved else ONE)[rank]
    model: Any = nn.ModuleList(stage_of(index) for index in mine)
    model, _ = hetero.prepare(model, optimizer_of(model, "sgd"), hbm=HBM[len(model)], **SETTINGS)
    there = [
        PipelineStage(stage, index, RANKS * len(model), torch.device("cpu"))
        for stage, index in zip(model, mine, strict=True)
    ]
    if is_interleaved:
        schedules.ScheduleInterleaved1F1B(there, 5, loss_fn=nn.functional.mse_loss)
    else:
        schedules.Schedule1F1B(there[0], 1, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_micro_batches_that_a_schedule_does_not_take_are_an_error_on_all_ranks(
    is_interleaved: bool,
) -> None:
    for error in ends(too_few, is_interleaved):
        assert isinstance(error, ConfigError)
        assert f"{5 if is_interleaved else 1} micro-batches through" in str(error)
        assert f"use {4 if is_interleaved else 2} micro-batches or more" in error.advice


class Words(nn.Module):
    """A stage that begins, or ends, with a matrix of words."""

    def __init__(self, rank: int, weight: torch.Tensor) -> None:
        super().__init__()
        self.block = OneMatrix(D)
        self.embed = nn.Embedding(*weight.shape) if rank == 0 else None
        self.head = nn.Linear(*reversed(weight.shape), bias=False) if rank else None
        with torch.no_grad():
            (self.embed or self.head).weight.copy_(weight)


def tied(rank: int, differs: bool) -> bool:
    torch.manual_seed(1)
    weight = torch.randn(50, D)
    weight[0, 0] += rank * differs
    model: Any = nn.ModuleList([Words(rank, weight)])
    hetero.prepare(model, optimizer_of(model, "sgd"), hbm=HBM[2], **SETTINGS)
    return True


def test_a_tied_embedding_across_stages_is_an_error_on_all_ranks() -> None:
    for error in ends(tied, False):
        assert isinstance(error, ConfigError)
        assert "'0.embed' of rank 0 and '0.head' of rank 1" in str(error)
        assert "a weight of its own" in error.advice


def test_an_embedding_and_a_head_that_differ_are_two_weights() -> None:
    assert run_ranks(RANKS, tied, True) == [True, True]


def fails(rank: int, how: str) -> None:
    """Train until one rank does not."""
    schedule, optimizer = prepared(rank, timeout_seconds=2.0)
    stepped(schedule, rank, batch(0, 0))
    optimizer.step()
    if rank == 1:
        stage = stages_of(schedule)[0].submod
        stage[0].register_forward_pre_hook(lambda *_: fail(how))
    stepped(schedule, rank, batch(1, 0))


def fail(how: str) -> None:
    if how == "error":
        raise OSError("no more data")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


@pytest.mark.parametrize(
    "how", ["error", "killed", pytest.param("stopped", marks=pytest.mark.slow)]
)
def test_a_stage_that_fails_ends_all_ranks(how: str) -> None:
    mine, other = outcomes(RANKS, fails, how)

    assert isinstance(mine, Died)
    assert isinstance(mine.error, RankLost), mine.text
    said = {"error": "no more data", "killed": "it was killed", "stopped": "said nothing for 2 s"}
    assert said[how] in str(mine.error)
    assert isinstance(other, Died)


# -- who knows no pipelines ------------------------------------------------------------------------


def accelerated(rank: int) -> None:
    HeteroAccelerator(hetero_plugin={"mesh": {"pp": RANKS}})


def by_trainer(rank: int, folder: str) -> None:
    arguments = TrainingArguments(folder, use_cpu=True, report_to="none")
    hetero.trainer(Trainer)(stage_of(0), arguments, hetero={"mesh": {"pp": RANKS}})


def test_those_that_know_no_pipelines_say_what_does(tmp_path: Path) -> None:
    for who, body, args in (
        ("accelerate", accelerated, ()),
        ("accelerate", by_trainer, (str(tmp_path),)),
    ):
        for error in ends(body, *args):
            assert isinstance(error, ConfigError)
            assert f"{who} knows no pipelines" in str(error)
            assert "hetero.split" in error.advice
            assert "examples/three_d.py" in error.advice
