"""Stages of a pipeline whose ranks have parts of its sequences: the bits of plain stages under the
same block on the same ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import hetero
from hetero.parallel.context import context_parallel
from hetero.testing.ranks import run_ranks
from tests.ranks.context_models import LENGTH, LM, WORDS
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import rounded

SAMPLES = 4
BUDGETS = {"bf16": 39_000, "offload": 77_000}
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class First(nn.Module):
    def __init__(self, model: LM) -> None:
        super().__init__()
        self.embed, self.places, self.blocks = model.embed, model.places, model.blocks[:2]

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.places(places)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = x
        return found


class Last(nn.Module):
    def __init__(self, model: LM) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[2:], model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True)
class StagesRun:
    """What a run does, on ranks that are two stages of two parts."""

    how: str = "zigzag"
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    steps: int = 5
    micro_batches: int = 2
    precision: str = "fp32"
    activations: str = "auto"


class Averaged:
    """Adds up the mean of each gradient of both ranks of a sequence, pass by pass, rank by rank, in
    the dtype of the weight that is updated."""

    def __init__(self, params: list[nn.Parameter], group: Any, *, in_fp32: bool) -> None:
        self._group, self._in_fp32 = group, in_fp32
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        for param in params:
            param.register_post_accumulate_grad_hook(self._add)

    def _add(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        rows = [torch.empty_like(param.grad) for _ in range(2)]
        dist.all_gather(rows, param.grad.contiguous(), group=self._group)
        for row in (each.float() if self._in_fp32 else each for each in rows):
            total = self._sums.get(param)
            self._sums[param] = row * 0.5 if total is None else total.add_(row * 0.5)
        param.grad = None

    def hand_over(self, params: list[nn.Parameter], to: list[nn.Parameter]) -> None:
        for param, updated in zip(params, to, strict=True):
            updated.grad = self._sums.pop(param)


class Momentum:
    """SGD as `OPTIMIZERS` has it, with each product and sum rounded by itself."""

    def __init__(self, masters: nn.Module) -> None:
        self._moments = {master: torch.zeros_like(master) for master in masters.parameters()}

    @torch.no_grad()
    def step(self) -> None:
        for master, moment in self._moments.items():
            moment.mul_(0.9).add_(master.grad)
            master.add_(moment * -0.1)

    def zero_grad(self) -> None:
        for master in self._moments:
            master.grad = None


def trained(rank: int, run: StagesRun, is_prepared: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    torch.manual_seed(0)
    model = LM()
    stage: nn.Module = Last(model) if rank // 2 else First(model)
    optimizer: Any = OPTIMIZERS[run.optimizer](stage.parameters())
    if is_prepared:
        hbm = BUDGETS.get(run.precision, BUDGETS.get(run.activations, 66_000))
        given = {"device": "cpu:sim", "hbm": hbm, "chunk_bytes": 1024, "mesh": {"pp": 2, "cp": 2}}
        given |= {"precision": run.precision, "activations": run.activations}
        stage, optimizer = hetero.prepare(stage, optimizer, **given)
    else:
        has_masters = run.precision == "bf16"
        masters, updated = (copy.deepcopy(stage) if has_masters else stage), optimizer
        if has_masters:
            updated = Momentum(masters)
            stage.to(torch.bfloat16)
        params, homes = list(stage.parameters()), list(masters.parameters())
        means = Averaged(params, mesh["cp"].get_group(), in_fp32=has_masters)
    place = PipelineStage(stage, rank // 2, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule: Any = SCHEDULES[run.schedule](
        place, run.micro_batches, loss_fn=loss_of, scale_grads=False
    )
    losses: list[torch.Tensor] = []
    for step in range(run.steps):
        if not is_prepared and has_masters:
            with torch.no_grad():
                for param, master in zip(params, homes, strict=True):
                    param.copy_(rounded(master))
        source = torch.Generator().manual_seed(step)
        words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=source)
        buffers = [words[:, :-1].clone(), words[:, 1:].clone()]
        buffers.append(torch.arange(LENGTH).expand(SAMPLES, -1).clone())
        with context_parallel(mesh["cp"], run.how, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            if rank // 2:
                schedule.step(target=buffers[1], losses=losses)
            else:
                schedule.step(buffers[0], buffers[2])
        if is_prepared:
            optimizer.step()
            optimizer.zero_grad()
        else:
            means.hand_over(params, homes)
            updated.step()
            updated.zero_grad()
    if is_prepared:
        assert hetero.status(stage).evictions
        hetero.release(stage, optimizer)
    kept = stage if is_prepared else masters
    weights = {name: value.detach().clone() for name, value in kept.state_dict().items()}
    weights["losses"] = torch.stack([each.detach() for each in losses] or [torch.zeros(())])
    return weights


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["zigzag", "ring", "ulysses"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stages_with_parts_of_sequences_have_the_bits_of_plain_ones(
    optimizer: str, how: str, schedule: str
) -> None:
    check(StagesRun(how, schedule, optimizer))


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("how", ["zigzag", "ulysses"])
@pytest.mark.parametrize(
    ("precision", "activations"),
    [("bf16", "auto"), ("bf16", "recompute"), ("fp32", "recompute"), ("fp32", "offload")],
)
def test_masters_and_other_activations_of_such_stages_have_these_bits_too(
    precision: str, activations: str, how: str
) -> None:
    check(StagesRun(how, "1f1b", "sgd", precision=precision, activations=activations))


def check(run: StagesRun) -> None:
    plain = run_ranks(4, trained, run, False)
    paged = run_ranks(4, trained, run, True)
    for mine, theirs in zip(paged, plain, strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
