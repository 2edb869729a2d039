"""Checkpoints of stages: by the names of the whole model, for any split and any mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.verify import verify
from hetero.errors import CheckpointMismatch, DivergenceError
from hetero.parallel.splitting import call_of, split
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.test_split import (
    HBM,
    MICRO_BATCHES,
    loss_of,
    made,
    result_of,
    stepped,
    trained_in_one,
    words,
)

pytestmark = pytest.mark.usefixtures("one_anatomy")
N_RANKS = {"one": 1, "shares": 2, "1F1B": 2, "Interleaved1F1B": 2, "1F1B x 2": 4}
BEFORE, STEPS = 2, 3
SETTINGS = {"device": "cpu:sim", "chunk_bytes": 1024, "timeout_seconds": 20, "hbm": HBM}


class Trainer:
    """A whole model, or this rank's stages, on a mesh that a word names."""

    def __init__(self, rank: int, how: str, model: nn.Module) -> None:
        name, _, shares = how.partition(" x ")
        self.rank, self.n_ranks = rank, N_RANKS[how]
        self.n_shares = int(shares or 1)
        self.found = None
        mesh: Any = "world" if how == "shares" else None
        if name not in ("one", "shares"):
            mesh = {"pp": 2, "dp_shard": self.n_shares}
            self.found = split(model, mesh, name, batch=words(0)[:1])
            model = self.found.stages
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = {**SETTINGS, "activations": "offload", "mesh": mesh}
        self.model, self.optimizer = hetero.prepare(model, optimizer, **settings)
        if self.found is not None:
            self.schedule = self.found.schedule(MICRO_BATCHES // self.n_shares, loss_of)

    def step(self, number: int) -> None:
        ids = words(number)
        if self.found is None:
            for each in ids.chunk(MICRO_BATCHES)[self.rank :: self.n_ranks]:
                loss = loss_of(result_of(self.model(each, **call_of(self.model))), each)
                (loss * (self.n_ranks / MICRO_BATCHES)).backward()  # a power of two: exact
        else:
            stepped(self.found, self.schedule, ids[self.rank % self.n_shares :: self.n_shares])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """Return weights by their names in the whole model."""
        if self.found is None:
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        return {
            stage.in_whole(name): value.clone()
            for stage in self.model
            for name, value in stage.state_dict().items()
        }


def begins(rank: int, how: str, kind: str, folder: str) -> None:
    trainer = Trainer(rank, how, made(kind))
    for number in range(BEFORE):
        trainer.step(number)
    hetero.save_checkpoint(folder, trainer.model, trainer.optimizer, {"from": how})


def goes_on(rank: int, how: str, kind: str, folder: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    trainer = Trainer(rank, how, made(kind).apply(other_weights))
    extra = hetero.load_checkpoint(folder, trainer.model, trainer.optimizer)
    for number in range(BEFORE, STEPS):
        trainer.step(number)
    return extra, trainer.values()


def other_weights(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param)


WAYS = [
    ("1F1B", "one"),
    ("one", "1F1B"),
    ("1F1B", "Interleaved1F1B"),
    ("Interleaved1F1B", "shares"),
    ("1F1B x 2", "1F1B"),
    ("one", "1F1B x 2"),
]


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_training_goes_on_bit_for_bit_at_another_split_or_mesh(
    before: str, after: str, tmp_path: Path
) -> None:
    kind = "gpt"
    theirs = trained_in_one(kind)
    run_ranks(N_RANKS[before], begins, before, kind, str(tmp_path))
    assert verify(tmp_path).ok

    seen = set()
    for extra, mine in run_ranks(N_RANKS[after], goes_on, after, kind, str(tmp_path)):
        assert extra == {"from": before}
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        seen |= mine.keys()
    assert seen == theirs.keys()


def backwards(rank: int, folder: str, is_new: bool) -> float:
    """Save, or load, with an optimizer that lists parameters from the last one on."""
    found = split(made("gpt"), {"pp": 2}, "1F1B", batch=words(0)[:1])
    optimizer = torch.optim.AdamW([*found.stages.parameters()][::-1], lr=1e-2)
    stages, optimizer = hetero.prepare(found.stages, optimizer, **SETTINGS, mesh={"pp": 2})
    if is_new:
        stepped(found, found.schedule(MICRO_BATCHES, loss_of), words(0))
        optimizer.step()
        hetero.save_checkpoint(folder, stages, optimizer)
    else:
        hetero.load_checkpoint(folder, stages, optimizer)
    states = (state["exp_avg"] for state in optimizer.state.values())
    return math.fsum(float(state.double().abs().sum()) for state in states)


def test_an_optimizer_may_list_parameters_in_another_order(tmp_path: Path) -> None:
    """As the ranks of a V do, whose stages are not in the order of the model."""
    saved, loaded = (run_ranks(2, backwards, str(tmp_path), is_new) for is_new in (True, False))
    assert saved == loaded and all(saved)


# -- what is refused -----------------------------------------------------------------------------


def of_more_blocks(rank: int, how: str, folder: str) -> None:
    config = {"vocab": 64, "width": 32, "heads": 4, "context": 16}
    model = GPT(GPTConfig(**config, layers=7 if how == "one" else 6))
    trainer = Trainer(rank, how, model)
    if how == "one":
        hetero.save_checkpoint(folder, trainer.model, trainer.optimizer)
    else:
        hetero.load_checkpoint(folder, trainer.model, trainer.optimizer)


def test_a_checkpoint_of_a_longer_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(1, of_more_blocks, "one", str(tmp_path))

    for each in outcomes(2, of_more_blocks, "1F1B", str(tmp_path)):
        assert isinstance(each, Died)
        assert isinstance(each.error, CheckpointMismatch), each.text
        assert "groups hold" in str(each.error) or "no rank's stages" in str(each.error)


def other_groups(rank: int, folder: str) -> None:
    found = split(made("gpt"), {"pp": 2}, batch=words(0)[:1])
    groups = [{"params": [p]} for p in found.stages.parameters()][: 2 + rank]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for param in found.stages.parameters():
        param.requires_grad_(any(param is each["params"][0] for each in groups))
    settings = {**SETTINGS, "mesh": {"pp": 2}}
    stages, optimizer = hetero.prepare(found.stages, optimizer, **settings)
    hetero.save_checkpoint(folder, stages, optimizer)


def test_optimizers_with_other_groups_are_told_before_anything_is_written(tmp_path: Path) -> None:
    for each in outcomes(2, other_groups, str(tmp_path)):
        assert isinstance(each, Died)
        assert isinstance(each.error, DivergenceError), each.text
        assert "3 groups, not 2" in str(each.error)
    assert not list(tmp_path.glob("step-*"))


def other_rates(rank: int, folder: str) -> None:
    found = split(made("gpt"), {"pp": 2}, batch=words(0)[:1])
    plain = torch.optim.SGD(found.stages.parameters(), lr=0.1)
    stages, optimizer = hetero.prepare(found.stages, plain, **{**SETTINGS, "mesh": {"pp": 2}})
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)  # as a plateau that the last stage sees
    hetero.save_checkpoint(folder, stages, optimizer)


def test_settings_of_one_stage_alone_are_told_before_anything_is_written(tmp_path: Path) -> None:
    """A checkpoint has them once: a load gave the first stage's to all."""
    for each in outcomes(2, other_rates, str(tmp_path)):
        assert isinstance(each, Died) and isinstance(each.error, DivergenceError), each
        assert "rank 1 saves 0.05 as the setting 'lr' of group 0, not 0.1" in str(each.error)
    assert not list(tmp_path.glob("step-*"))


def of_named_parameters(rank: int, folder: str) -> bool:
    found = split(made("gpt"), {"pp": 2}, batch=words(0)[:1])
    plain = torch.optim.SGD(found.stages.named_parameters(), lr=0.1)
    stages, optimizer = hetero.prepare(found.stages, plain, **{**SETTINGS, "mesh": {"pp": 2}})
    names = list(optimizer.param_groups[0]["param_names"])
    hetero.save_checkpoint(folder, stages, optimizer)
    hetero.load_checkpoint(folder, stages, optimizer)
    return names == optimizer.param_groups[0]["param_names"]


def test_names_of_parameters_are_each_stage_s_own(tmp_path: Path) -> None:
    assert run_ranks(2, of_named_parameters, str(tmp_path)) == [True, True]


def another_class(rank: int) -> None:
    found = split(made("gpt"), {"pp": 2}, batch=words(0)[:1])
    make = torch.optim.AdamW if rank else torch.optim.SGD
    plain = make(found.stages.parameters(), lr=0.1)
    hetero.prepare(found.stages, plain, **{**SETTINGS, "mesh": {"pp": 2}})


def test_stages_have_one_kind_of_optimizer() -> None:
    for each in outcomes(2, another_class):
        assert isinstance(each, Died) and isinstance(each.error, DivergenceError), each
        assert "differ in the optimizer (rank 0: SGD; rank 1: AdamW)" in str(each.error)


def numbers(rank: int, folder: str, seed: int) -> torch.Tensor:
    trainer = Trainer(rank, "1F1B", made("gpt"))
    torch.manual_seed(seed + rank)
    if seed:
        hetero.save_checkpoint(folder, trainer.model, trainer.optimizer)
    else:
        hetero.load_checkpoint(folder, trainer.model, trainer.optimizer)
    return torch.rand(2)


def test_each_rank_draws_on_from_its_own_numbers(tmp_path: Path) -> None:
    before = run_ranks(2, numbers, str(tmp_path), 5)
    after = run_ranks(2, numbers, str(tmp_path), 0)

    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(*before)
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.meta["stage_ranks"] == 2


def placed(rank: int, how: str, folder: str, load: bool) -> tuple[dict[str, float], float]:
    """Return a rank's buffers by their names in the whole model, and a number that it draws."""
    model = made("gpt")
    model.register_buffer("seen", torch.zeros(3))
    for block in (model.blocks[0], model.blocks[5]):
        block.register_buffer("mine", torch.zeros(2))
    trainer = Trainer(rank, how, model)
    if load:
        hetero.load_checkpoint(folder, trainer.model, trainer.optimizer)
    else:
        torch.manual_seed(rank)
        for buffer in trainer.model.buffers():
            buffer.fill_(1.0 + rank)
        hetero.save_checkpoint(folder, trainer.model, trainer.optimizer)
    found = trainer.values().items()
    named = {name: float(value[0]) for name, value in found if name.endswith(("seen", "mine"))}
    return named, float(torch.rand(()))


@pytest.mark.filterwarnings("ignore:the checkpoint is of fewer ranks")
def test_buffers_and_generators_are_those_of_the_same_stage_and_copy(tmp_path: Path) -> None:
    """They were matched by numbers of ranks, which mean other stages where copies are fewer."""
    saved = run_ranks(4, placed, "1F1B x 2", str(tmp_path), False)
    assert [each["seen"] for each, _ in saved] == [1.0, 2.0, 3.0, 4.0]

    assert run_ranks(2, placed, "1F1B", str(tmp_path), True) == [saved[0], saved[2]]
    copies = run_ranks(2, placed, "shares", str(tmp_path), True)
    assert [{**each} for each, _ in copies] == [
        {"seen": 1.0, "blocks.0.mine": 1.0, "blocks.5.mine": 3.0},
        {"seen": 2.0, "blocks.0.mine": 2.0, "blocks.5.mine": 4.0},
    ]
    assert copies[0][1] == saved[0][1]


def with_buffer(rank: int, how: str, folder: str) -> torch.Tensor:
    model = made("gpt")
    model.register_buffer("seen", torch.zeros(3))
    model.blocks[5].register_buffer("mine", torch.zeros(2))
    trainer = Trainer(rank, how, model)
    if how == "one":
        hetero.load_checkpoint(folder, trainer.model, trainer.optimizer)
        return torch.cat([model.seen, model.blocks[5].mine])
    for name, buffer in trainer.model.named_buffers():
        buffer.fill_(1.0 + rank + name.endswith("mine"))
    hetero.save_checkpoint(folder, trainer.model, trainer.optimizer)
    return torch.empty(0)


def test_a_buffer_that_stages_have_is_the_first_rank_s_and_their_own_stay_theirs(
    tmp_path: Path,
) -> None:
    run_ranks(2, with_buffer, "1F1B", str(tmp_path))

    (found,) = run_ranks(1, with_buffer, "one", str(tmp_path))

    assert found.tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]
