"""`hetero train` on the stages of a pipeline is the run of one rank with the same passes."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.parallel.launch import launch
from hetero.plan.pipeline import HALVED
from hetero.recipes.options import TrainOptions, settings_of
from hetero.recipes.result import RunStart, TrainResult
from hetero.recipes.stages import staged
from hetero.recipes.task import demo
from hetero.recipes.train import train
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.test_train import by_rank, options, stopped


def same(result: TrainResult, alone: TrainResult) -> bool:
    """Whether a run came to another one's weights, losses and figures of the whole model."""
    names = ("weights_sha256", "losses", "evaluations", "parameters", "state_bytes", "steps")
    return all(getattr(result, name) == getattr(alone, name) for name in names)


def told(rank: int, folder: Path, fields: dict[str, Any]) -> tuple[TrainResult, list[RunStart]]:
    starts: list[RunStart] = []
    return train(options(folder, **fields), announce=starts.append), starts


def evaluated(tmp_path: Path) -> dict[str, Any]:
    """Return options of an evaluation whose last batch is smaller."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(7 * 16 + 3)))
    return {"eval_data": (str(text),), "eval_every": 2}


@pytest.mark.campaign(seconds=4)
def test_two_stages_train_as_one_rank(tmp_path: Path) -> None:
    fields = {"steps": 4, **evaluated(tmp_path)}
    alone = train(options(tmp_path / "alone", **fields))

    found = run_ranks(2, told, tmp_path / "ranks", {**fields, "mesh": "pp=2"})

    for result, _ in found:
        assert same(result, alone)
        assert result.status.ranks == {
            "pp": 2,
            "dp_replicate": 1,
            "dp_shard": 1,
            "cp": 1,
            "tp": 1,
        }
    ((first,), second) = (starts for _, starts in found)
    assert (first.parameters, first.state_bytes) == (alone.parameters, alone.state_bytes)
    assert not second


SLOW = [
    pytest.param(kind, n, marks=pytest.mark.slow)
    for kind, n in (
        *(("gpipe", None), ("interleaved", None), ("interleaved", 3), ("interleaved-zb", None)),
        ("dualpipev", None),
    )
]


def by_rank_within(rank: int, folder: Path, fields: dict[str, Any], hbm: int) -> TrainResult:
    given = options(folder, **fields)
    return train(dataclasses.replace(given, settings={**given.settings, "hbm": hbm}))


@pytest.mark.parametrize(("kind", "n_turns"), [("zbv", None), *SLOW])
def test_stages_under_any_schedule_train_as_one_rank(
    kind: str, n_turns: int | None, tmp_path: Path
) -> None:
    fields = {"steps": 3, "layers": 4, "save_every": 2, **evaluated(tmp_path)}
    alone = train(options(tmp_path / "alone", **fields))

    fields |= {"mesh": "pp=2", "pipeline": kind, "stages_per_rank": n_turns}
    # what waits for its second half stays there
    hbm = 760_000 if kind == "interleaved-zb" else 560_000 if kind in HALVED else 360_000
    for result in run_ranks(2, by_rank_within, tmp_path / "ranks", fields, hbm):
        assert same(result, alone)
        assert result.status.fetches > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_several_stages_of_divided_tensors_train_as_the_ranks_of_these(
    kind: str, tmp_path: Path
) -> None:
    fields = {"steps": 3, "layers": 4, **evaluated(tmp_path)}
    parts = run_ranks(2, by_rank, tmp_path / "parts", {**fields, "mesh": "tp=2"})[0]

    fields |= {"mesh": "pp=2,tp=2", "pipeline": kind}
    hbm = 760_000 if kind in HALVED else 360_000
    for result in run_ranks(4, by_rank_within, tmp_path / "ranks", fields, hbm):
        assert same(result, parts)


@pytest.mark.slow
def test_interleaved_pipelines_that_share_stages_train_as_ranks_that_share_the_model(
    tmp_path: Path,
) -> None:
    fields = {"steps": 3, "layers": 4, **evaluated(tmp_path)}
    shares = run_ranks(2, by_rank, tmp_path / "shares", {**fields, "mesh": "dp_shard=2"})[0]

    fields |= {"mesh": "pp=2,dp_shard=2", "pipeline": "interleaved"}
    for result in run_ranks(4, by_rank, tmp_path / "ranks", fields):
        assert same(result, shares)


@pytest.mark.slow
def test_two_pipelines_that_share_stages_train_as_two_ranks_that_share_the_model(
    tmp_path: Path,
) -> None:
    fields = {"steps": 4, **evaluated(tmp_path)}
    shares = run_ranks(2, by_rank, tmp_path / "shares", {**fields, "mesh": "dp_shard=2"})[0]

    fields["mesh"] = "pp=2,dp_shard=2"
    for result in run_ranks(4, by_rank, tmp_path / "ranks", fields):
        assert same(result, shares)


@pytest.mark.slow
def test_stages_of_divided_tensors_train_as_the_ranks_of_these(tmp_path: Path) -> None:
    fields = {"steps": 3, **evaluated(tmp_path)}
    parts = run_ranks(2, by_rank, tmp_path / "parts", {**fields, "mesh": "tp=2"})[0]

    for result in run_ranks(4, by_rank, tmp_path / "ranks", {**fields, "mesh": "pp=2,tp=2"}):
        assert same(result, parts)


@pytest.mark.slow
def test_a_transformers_model_trains_as_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = tmp_path / "words"
    text.write_text("the same words again and again, " * 40)
    fields = {"model": "tiny-llama", "data": (str(text),), "layers": 3, "steps": 3}
    alone = train(options(tmp_path / "alone", **fields))

    for result in run_ranks(2, by_rank, tmp_path / "ranks", {**fields, "mesh": "pp=2"}):
        assert same(result, alone)


@pytest.mark.slow
def test_a_run_goes_on_at_another_mesh_and_back(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"save_every": 2, "schedule": "constant", "warmup": 1}
    alone = train(options(tmp_path / "alone", **fields))

    folder, staged = tmp_path / "ranks", {**fields, "mesh": "pp=2"}
    run_ranks(2, by_rank, folder, {**staged, "steps": 2})
    train(options(folder, **fields, steps=3, resume=True))
    run_ranks(4, by_rank, folder, {**fields, "mesh": "pp=4", "steps": 4, "resume": True})
    for result in run_ranks(2, by_rank, folder, {**staged, "resume": True}):
        assert same(result, alone)

    out = train(options(folder, **fields, resume=True, out=str(tmp_path / "out")))
    assert out.weights_sha256 == alone.weights_sha256
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_stages_with_masters_train_as_one_rank_with_masters(tmp_path: Path) -> None:
    fields = {"steps": 3, "accumulate": 2}
    alone = train(in_bf16(tmp_path / "alone", fields))

    for result in run_ranks(2, by_rank_in_bf16, tmp_path / "ranks", {**fields, "mesh": "pp=2"}):
        assert same(result, alone)


def in_bf16(folder: Path, fields: dict[str, Any]) -> TrainOptions:
    given = options(folder, **fields)
    return dataclasses.replace(given, settings={**given.settings, "precision": "bf16"})


def by_rank_in_bf16(rank: int, folder: Path, fields: dict[str, Any]) -> TrainResult:
    return train(in_bf16(folder, fields))


def test_halves_of_gradients_add_up_in_bf16_and_are_refused(tmp_path: Path) -> None:
    for each in outcomes(2, by_rank_in_bf16, tmp_path, {"mesh": "pp=2", "pipeline": "zbv"}):
        assert isinstance(each.error, ConfigError), each.text
        assert "these add up in bf16" in str(each.error)


@pytest.mark.slow
def test_a_signal_to_one_stage_stops_all_after_the_same_step(tmp_path: Path) -> None:
    alone = train(options(tmp_path / "alone"))

    for result in run_ranks(2, stopped, tmp_path / "ranks", {"mesh": "pp=2"}):
        assert (result.steps, result.signal) == (3, signal.SIGTERM)
    for result in run_ranks(2, by_rank, tmp_path / "ranks", {"mesh": "pp=2", "resume": True}):
        assert same(result, alone)


def kept_after_the_cut(rank: int, folder: Path) -> list[str]:
    """Return the names of the whole model's parameters that are in memory once it is cut."""
    given = options(folder, mesh="pp=2")
    task = demo(given)
    known = {name: weakref.ref(param) for name, param in task.model.named_parameters()}
    with launch(20):
        cut = staged(task, given, settings_of(given))
        del task
        gc.collect()
        there = [name for name, param in known.items() if param() is not None]
        (stage,) = cut.found.stages
        assert {stage.in_whole(name) for name, _ in stage.named_parameters()} == {*there}
    return there


@pytest.mark.campaign(seconds=2)
def test_a_rank_keeps_the_weights_of_its_own_stage_alone(tmp_path: Path) -> None:
    first, last = run_ranks(2, kept_after_the_cut, tmp_path)

    assert "tokens.weight" in first and "head.weight" in last
    assert not {*first} & {*last}


REFUSED = [
    ({"accumulate": 1}, "--accumulate 1 on 1 pipelines of 2 stages", "--accumulate 2"),
    ({"task": "sft", "model": "tiny-llama"}, "answers differ in length", "--task pretrain"),
    ({"out": "out"}, "each has some layers of it", "--resume"),
    ({"lora_rank": 2, "model": "tiny-llama"}, "adapters is not cut", "dp_shard=N"),
    ({"model": "tiny-gpt2", "data": (__file__,)}, "drops out", "dropout to 0"),
    ({"layers": 1, "accumulate": 6, "mesh": "pp=3"}, "is of 3 ranks; there are 2", "is 2"),
    ({"pipeline": "zbv", "mesh": "pp=1,dp_shard=2"}, "not cut into stages", "--mesh pp=N"),
    ({"pipeline": "dualpipev", "accumulate": 3}, "at least as many microbatches", "use 4"),
    ({"pipeline": "1f1b", "stages_per_rank": 2}, "Schedule1F1B takes 1", "interleaved"),
    ({"pipeline": "zbv", "stages_per_rank": 3}, "ScheduleZBVZeroBubble takes 2", "leave"),
]


@pytest.mark.parametrize(("fields", "said", "advice"), REFUSED, ids=lambda each: str(each)[:24])
def test_what_stages_cannot_have_is_refused_on_all_ranks(
    fields: dict[str, Any], said: str, advice: str, tmp_path: Path
) -> None:
    for each in outcomes(2, by_rank, tmp_path / "ranks", {"mesh": "pp=2", **fields}):
        assert isinstance(each.error, ConfigError), each.text
        assert said in str(each.error)
        assert advice in each.error.advice


def test_stages_with_parts_of_sequences_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for each in outcomes(4, by_rank, tmp_path / "ranks", {"mesh": "pp=2,cp=2"}):
        assert isinstance(each.error, ConfigError), each.text
        assert "hetero train knows no parts of sequences" in str(each.error)
        assert "docs/context-parallel.md" in each.error.advice


def in_fp16(rank: int, folder: Path) -> None:
    given = options(folder)
    settings = {**given.settings, "mesh": {"pp": 2}, "precision": "fp16"}
    train(dataclasses.replace(given, settings=settings))


def test_loss_scaling_on_stages_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for each in outcomes(2, in_fp16, tmp_path):
        assert isinstance(each.error, ConfigError), each.text
        assert "does not scale the loss" in str(each.error)


def launched(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["--width=32", "--layers=2", "--heads=2", "--seq=16", "--steps=2", "--hbm=360KB"]
    return subprocess.run(
        [*launch, "-m", "hetero", "train", *given, "--mesh=pp=2", *more],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=300,
    )


@pytest.mark.slow  # processes that import
def test_torchrun_launches_stages(tmp_path: Path) -> None:
    done = launched(tmp_path, "--accumulate=2", "--json")

    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(each["loss"] > 0 for each in steps if "loss" in each)
    assert (tmp_path / "runs" / "1" / "step-2").is_dir()


@pytest.mark.slow  # processes that import
def test_a_request_that_stages_cannot_honour_ends_with_status_2(tmp_path: Path) -> None:
    done = launched(tmp_path, "--accumulate=1")

    assert done.returncode
    assert "--accumulate 1 on 1 pipelines of 2 stages" in done.stderr
    assert "exitcode  : 2" in done.stderr
