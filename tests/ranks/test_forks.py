"""Children of a rank, as a DataLoader's workers, which end nothing that is their parent's."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import ForkedProcessError
from hetero.testing.ranks import run_ranks
from hetero.train.engine.tuning import Tuning
from tests.children import in_child
from tests.ranks.models import Run, built, loss_of
from tests.ranks.tensor_models import TensorRun
from tests.ranks.tensor_models import built as tensor_parallel
from tests.ranks.tensor_models import loss_of as tensor_loss_of

RUN = Run(steps=2, settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})


def ends(rank: int, way: str) -> list[int]:
    """Return how children ended that collect while the model lives, and after it was released."""
    if way == "tensors":
        run = TensorRun("tp", "adamw")
        model, optimizer = hetero.prepare(*tensor_parallel(run), **run.settings)
        loss = tensor_loss_of(model, run, 0)
    else:
        model, plain = built(RUN)
        model, optimizer = hetero.prepare(model, plain, mesh={"dp_shard": 2}, **RUN.settings)
        loss = loss_of(model, RUN, 0, rank)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    kept = [model, optimizer]
    del model, optimizer

    def drop() -> None:
        kept.clear()
        gc.collect()

    gc.collect()
    gc.disable()
    found = [in_child(gc.collect), in_child(drop)]
    hetero.release(*kept)
    kept.clear()
    found.append(in_child(gc.collect))  # which finds what was prepared
    gc.collect()
    return [*found, in_child(gc.collect)]


@pytest.mark.parametrize("way", ["shares", "tensors"])
def test_a_child_that_collects_or_drops_the_model_ends_well(way: str) -> None:
    assert run_ranks(2, ends, way) == [[0] * 4] * 2


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index * index


def loads(rank: int) -> list[int]:
    """Load batches by workers, after a model was released and while another one is prepared."""
    gc.disable()
    found: list[int] = []
    for _ in range(2):
        model, plain = built(RUN)
        model, optimizer = hetero.prepare(model, plain, mesh={"dp_shard": 2}, **RUN.settings)
        batches = DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
        for number, batch in enumerate(batches):
            found.append(int(batch))
            if number < 2:
                loss_of(model, RUN, number, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        hetero.release(model, optimizer)
        del model, optimizer, plain
    return found


def test_workers_load_while_ranks_train() -> None:
    assert run_ranks(2, loads) == [[n * n for n in range(8)] * 2] * 2


def test_a_rank_of_which_children_were_forked_trains_on() -> None:
    def trains(rank: int) -> float:
        model, plain = built(RUN)
        model, optimizer = hetero.prepare(model, plain, mesh={"dp_shard": 2}, **RUN.settings)
        losses = []
        for number in range(3):
            loss = loss_of(model, RUN, number, rank)
            assert in_child(gc.collect) == 0
            loss.backward()
            assert in_child(gc.collect) == 0
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        hetero.release(model, optimizer)
        return float(torch.stack(losses).sum())

    assert all(torch.isfinite(torch.tensor(run_ranks(2, trains))))


USES = ("reads", "writes", "loads", "steps", "saves", "agrees", "releases")


def in_the_child(rank: int, use: str, way: str, folder: str) -> list[str]:
    """Let children of a rank use its model; return losses that are others than without."""
    tuning = Tuning(one_sided=way == "seen")
    expected, losses = [], []
    for plays in (False, True):
        model, plain = built(RUN)
        config = Config.load(mesh={"dp_shard": 2}, timeout_seconds=20.0, **RUN.settings)
        model, optimizer = prepare_tuned(model, plain, config, tuning)
        for number in range(3):
            loss = loss_of(model, RUN, number, rank)
            loss.backward()
            (losses if plays else expected).append(float(loss))
            if plays and rank == 1:
                told = in_child(partial(says, use, model, optimizer, folder))
                assert told == REFUSED, (use, told)
            optimizer.step()
            optimizer.zero_grad()
        hetero.release(model, optimizer)
    return [] if losses == expected else [f"{losses} {expected}"]


REFUSED = 7


def says(use: str, model: Any, optimizer: Any, folder: str) -> None:
    try:
        if use == "reads":
            model.state_dict()["first.weight"].sum()
        elif use == "writes":
            with torch.no_grad():
                model.last.weight.copy_(torch.zeros(model.last.weight.shape))
        elif use == "loads":
            values = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
            model.load_state_dict(values)
        elif use == "waits":
            node = engine_of(model).setup.comm.node
            assert node is not None
            node.wait(0)
        elif use == "steps":
            optimizer.step()
        elif use == "saves":
            hetero.save_checkpoint(f"{folder}/c", model, optimizer)
        elif use == "agrees":
            optimizer.clip_grad_norm_(1.0)
        else:
            hetero.release(model, optimizer)
    except RuntimeError as error:  # torch puts those of a load into one of its own
        if isinstance(error, ForkedProcessError) or "a forked process uses" in str(error):
            os._exit(REFUSED)
        raise


WAYS = [*((use, way) for use in USES for way in ("seen", "gathered")), ("waits", "seen")]


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(("use", "way"), WAYS)
def test_a_child_is_told_that_the_model_is_its_parents(use: str, way: str, tmp_path: Path) -> None:
    """It would write to its parent's weights, or speak for it in the ranks' calls."""
    assert run_ranks(2, in_the_child, use, way, str(tmp_path)) == [[], []]
