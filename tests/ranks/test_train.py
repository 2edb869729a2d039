"""`hetero train` on several ranks is the run of one rank that makes all passes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from hetero.errors import ConfigError
from hetero.recipes.optimizers import factor_of, optimizer_of
from hetero.recipes.options import TrainOptions
from hetero.recipes.result import TrainResult
from hetero.recipes.task import demo
from hetero.recipes.train import train
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.tensor_models import torch_clip, whole

SETTINGS = {"device": "cpu:sim", "hbm": 360_000, "chunk_bytes": 4096}
SIZES: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "seq": 16}


def options(folder: Path, **fields: Any) -> TrainOptions:
    given = {"steps": 6, "lr": 1e-2, "accumulate": 4, "record": "none", **SIZES, **fields}
    mesh = {"mesh": given.pop("mesh")} if "mesh" in given else {}
    return TrainOptions(settings={**SETTINGS, **mesh}, save_dir=str(folder), **given)


def by_rank(rank: int, folder: Path, fields: dict[str, Any]) -> TrainResult:
    return train(options(folder, **fields))


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_divide_the_passes_of_a_step(n_ranks: int, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(200)))
    fields = {"eval_data": (str(text),), "eval_every": 2}
    alone = train(options(tmp_path / "alone", **fields))

    for result in run_ranks(n_ranks, by_rank, tmp_path / "ranks", fields):
        assert result.weights_sha256 == alone.weights_sha256
        assert result.losses == alone.losses
        assert result.evaluations == alone.evaluations
        assert result.checkpoint == str(tmp_path / "ranks" / "step-6")


def test_dropout_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = tmp_path / "text"
    text.write_text("the same words again and again, " * 40)
    fields = {
        "model": "tiny-llama",
        "data": (str(text),),
        "layers": 2,
        "steps": 3,
        "lora_rank": 4,
        "lora_dropout": 0.3,
    }
    # before ranks fork: its imports are theirs
    drops, drops_none = (
        by_rank(0, tmp_path / f"{rate}", {**fields, "lora_dropout": rate}) for rate in (0.3, 0.0)
    )
    two, four = (run_ranks(n, by_rank, tmp_path / str(n), fields) for n in (2, 4))

    assert len({result.weights_sha256 for result in (*two, *four)}) == 1
    assert drops.weights_sha256 != drops_none.weights_sha256


def stopped(rank: int, folder: Path, fields: dict[str, Any]) -> TrainResult:
    """One rank alone hears a signal after its third step."""
    heard: list[int] = []

    def stop() -> int | None:
        heard.append(0)
        return signal.SIGTERM if rank == 1 and len(heard) == 3 else None

    return train(options(folder, **fields), stop=stop)


@pytest.mark.campaign(seconds=5)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    for result in run_ranks(2, stopped, tmp_path / "ranks", {}):
        assert (result.steps, result.signal) == (3, signal.SIGTERM)

    alone = train(options(tmp_path / "alone"))
    for result in run_ranks(2, by_rank, tmp_path / "ranks", {"resume": True}):
        assert result.weights_sha256 == alone.weights_sha256


def test_an_error_of_the_first_rank_alone_is_raised_on_all(tmp_path: Path) -> None:
    for each in outcomes(2, by_rank, tmp_path / "none", {"resume": True}):
        assert isinstance(each.error, ConfigError), each.text
        assert "no checkpoint to go on from" in str(each.error)


def test_passes_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    for each in outcomes(2, by_rank, tmp_path, {"accumulate": 3}):
        assert isinstance(each.error, ConfigError), each.text
        assert "--accumulate 4" in str(each.error)


def gpt_by_torch(rank: int, folder: Path, fields: dict[str, Any]) -> tuple[list[float], str]:
    """Train the demo with torch alone; return the losses, and the sum of its whole weights."""
    given = options(folder, **fields)
    task = demo(given)
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(SIZES["layers"]):
        block = f"blocks.{number}"
        plan[f"{block}.attention.qkv"] = ColwiseParallel(output_layouts=Replicate())
        plan[f"{block}.attention.out"] = RowwiseParallel(input_layouts=Replicate())
        plan[f"{block}.mlp.up"] = ColwiseParallel()
        plan[f"{block}.mlp.down"] = RowwiseParallel()
    parallelize_module(task.model, init_device_mesh("cpu", (2,)), plan)
    optimizer = optimizer_of(task.model, given)
    scheduler = LambdaLR(optimizer, factor_of(given, given.steps))
    losses = []
    for _ in range(given.steps):
        loss = task.loss(next(task.batches), torch.device("cpu"))
        loss.backward()
        torch_clip(task.model.parameters(), given.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sha = hashlib.sha256()
    for value in task.model.state_dict().values():
        sha.update(whole(value).contiguous().numpy().tobytes())
    return losses, sha.hexdigest()


@pytest.mark.slow
def test_ranks_divide_the_tensors_of_the_demo_as_torch_does(tmp_path: Path) -> None:
    fields = {"accumulate": 1, "mesh": "tp=2"}
    expected = run_ranks(2, gpt_by_torch, tmp_path, fields)[0]

    for result in run_ranks(2, stopped, tmp_path / "ranks", fields):  # one of them hears it
        assert list(result.losses) == expected[0][:3]
    for result in run_ranks(2, by_rank, tmp_path / "ranks", {**fields, "resume": True}):
        assert (list(result.losses), result.weights_sha256) == expected
        assert result.status.ranks == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    for each in outcomes(2, by_rank, tmp_path / "ranks", {"accumulate": 2, "resume": True}):
        assert isinstance(each.error, ConfigError), each.text
        assert "tp was 2 and is 1" in str(each.error)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"mesh": "tp=4"}, "is of 4 ranks; there are 2"),
        (
            {"mesh": "tp=2", "width": 5, "heads": 1},
            "'blocks.0.attention.qkv' has 15 outputs",
        ),
    ],
)
def test_a_model_that_ranks_do_not_divide_is_refused_on_all(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for each in outcomes(2, by_rank, tmp_path, {"accumulate": 2, **fields}):
        assert isinstance(each.error, ConfigError), each.text
        assert said in str(each.error)


@pytest.mark.slow  # processes that import
@pytest.mark.parametrize("mesh", [[], ["--mesh=tp=2"]], ids=["shares", "parts"])
def test_torchrun_launches_it(mesh: list[str], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [f"--{name}={value}" for name, value in SIZES.items()] + mesh
    done = subprocess.run(
        [*launch, "-m", "hetero", "train", *given, "--steps=4", "--accumulate=2", "--hbm=360KB"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs" / "1" / "step-4").is_dir()
    assert not (tmp_path / "runs" / "2").exists()
