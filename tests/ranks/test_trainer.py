"""A Trainer whose ranks share one model makes the steps of one that accumulates; and what ranks
write of a model for other loaders."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import SequentialSampler

pytest.importorskip("transformers")

import transformers

import hetero
from hetero import CheckpointError, ConfigError
from hetero.api import company_of
from hetero.errors import CheckpointMismatch, DiskFull
from hetero.export import write
from hetero.integrations.trainable import check_states
from hetero.integrations.transformers import trainer as trainer_of
from hetero.parallel.tensor import parallelize
from hetero.status import status
from hetero.testing.faults import FaultPlan
from hetero.testing.ranks import outcomes, run_ranks
from tests.integrations.trainers import SETTINGS, arguments, evictions, llama, tokens
from tests.ranks.models import Values
from tests.ranks.peers import SIZES, Body, OnARank, adamw, batch
from tests.ranks.tensor_models import differing, whole
from tests.ranks.test_accelerate import started

STEPS = 4


def trained(cls: type, folder: Path, resume: bool = False, **given: Any) -> Any:
    """Return a Trainer after some steps, of which the second is saved."""
    own = {"hetero": given.pop("hetero")} if "hetero" in given else {}
    model = given.pop("model", None) or llama()
    args = arguments(
        folder,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=2,
        max_grad_norm=0.5,
        **{"logging_steps": 2, **given},
    )
    made = cls(model=model, args=args, train_dataset=tokens(24, seed=1), **own)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return made


def on_ranks(rank: int, folder: Path, resume: bool) -> tuple[Values, int]:
    started()
    cls = trainer_of(transformers.Trainer)
    found = trained(cls, folder, resume, hetero={**SETTINGS, "mesh": "world"})
    weights = {k: v.clone() for k, v in found.model.state_dict().items()}
    return weights, company_of(found.model).size


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer_on_ranks_makes_the_steps_of_one_that_accumulates(
    resume: bool, tmp_path: Path
) -> None:
    expected = trained(transformers.Trainer, tmp_path / "one", gradient_accumulation_steps=2)
    for goes_on in (False, True) if resume else (False,):
        for weights, size in run_ranks(2, on_ranks, tmp_path / "ranks", goes_on):
            assert size == 2
            for name, value in expected.model.state_dict().items():
                assert torch.equal(weights[name], value), name
    one, ranks = (tmp_path / name / "checkpoint-4" for name in ("one", "ranks"))
    assert (
        one.joinpath("model.safetensors").read_bytes() == (ranks / "model.safetensors").read_bytes()
    )


def adapted_on_ranks(rank: int, folder: Path, resume: bool) -> tuple[dict[str, bytes], int]:
    from peft import LoraConfig, get_peft_model

    started()
    torch.manual_seed(0)
    lora = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
    disk = {"nvme": str(folder / "nvme"), "host": 700_000}
    found = trained(
        *(trainer_of(transformers.Trainer), folder, resume),
        model=get_peft_model(llama(), lora),
        hetero={**SETTINGS, **disk, "hbm": 400_000, "mesh": "world", "timeout_seconds": 60},
    )
    weights = found.model.state_dict().items()
    values = {k: v.clone().numpy().tobytes() for k, v in weights if "lora" in k}
    return values, status(found.model).tiers["NVME"]["used"]


@pytest.mark.campaign(seconds=6)
def test_ranks_save_states_of_adapters_that_are_on_disk(tmp_path: Path) -> None:
    """One rank alone read them, and waited for the others until the timeout."""
    pytest.importorskip("peft")
    (tmp_path / "nvme").mkdir()
    whole = run_ranks(2, adapted_on_ranks, tmp_path, False)
    resumed = run_ranks(2, adapted_on_ranks, tmp_path, True)
    assert all(values == whole[0][0] and on_disk for values, on_disk in whole + resumed)


# -- tensor parallel -------------------------------------------------------------------------------


def parted_llama() -> Any:
    model = llama(layers=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(model, mesh)
    return model


def mean_loss(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )


def by_torch(rank: int) -> list[Values]:
    """Train in a plain loop; return whole weights after each step."""
    model = parted_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for words in torch.stack([row["input_ids"] for row in tokens(24, seed=1)]).split(4)[:STEPS]:
        mean_loss(model(input_ids=words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({k: whole(v).clone() for k, v in model.state_dict().items()})
    return found


class InOrder(transformers.Trainer):
    """Takes samples as they come."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Worse:
    """A metric that falls with each evaluation."""

    def __init__(self) -> None:
        self.score = 0.0

    def __call__(self, _: Any) -> dict[str, float]:
        self.score -= 1
        return {"score": self.score}


def parted(rank: int, folder: Path, resume: bool, **settings: Any) -> tuple[Values, int]:
    """Train, save, and load the best weights, which are those of the second step."""
    started()
    model = parted_llama()
    options = {
        "max_steps": STEPS,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 2),
        "metric_for_best_model": "score",
        "load_best_model_at_end": True,
    }
    run = trainer_of(InOrder)(
        model=model,
        args=arguments(folder, **options),
        train_dataset=tokens(24, seed=1),
        eval_dataset=tokens(8, seed=2),
        compute_loss_func=mean_loss,
        compute_metrics=Worse(),
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-2), None),
        hetero={**SETTINGS, "hbm": 112_000, "mesh": {"tp": 2}, **settings},
    )
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return {k: whole(v).clone() for k, v in run.model.state_dict().items()}, evictions(run)


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer_takes_a_tensor_parallel_model(resume: bool, tmp_path: Path) -> None:
    expected = run_ranks(2, by_torch)[0]
    for goes_on in (False, True) if resume else (False,):
        for weights, n_evictions in run_ranks(2, parted, tmp_path, goes_on):
            assert not differing(weights, expected[1])
            assert n_evictions >= 3
        saved = load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors")
        assert not differing(saved, expected[-1])


def refuses(rank: int, folder: Path) -> None:
    """What a Trainer cannot do with parts is refused by name."""
    started()
    model = parted_llama()
    build = partial(trainer_of(transformers.Trainer), train_dataset=tokens(8, seed=1))
    alone = build(model=model, args=arguments(folder), hetero=SETTINGS)
    with pytest.raises(ConfigError, match="to average whole models"):
        alone.train()
    model.peft_config = {}
    with pytest.raises(ConfigError, match="adapters on a tensor parallel model"):
        build(model=model, args=arguments(folder, save_strategy="steps"), hetero=SETTINGS)
    model._tp_size = 2
    with pytest.raises(ConfigError, match="transformers has divided the model"):
        build(model=model, args=arguments(folder), hetero=SETTINGS)
    folder.joinpath("optimizer.pt").touch()
    with pytest.raises(CheckpointMismatch, match="states of whole tensors"):
        check_states(str(folder), model)


def test_what_a_trainer_cannot_do_with_parts_is_refused(tmp_path: Path) -> None:
    run_ranks(2, refuses, tmp_path)


# -- export ----------------------------------------------------------------------------------------


def model_on(rank: int, one_sided: bool) -> Any:
    torch.manual_seed(0)
    model = Body(*SIZES)
    model, optimizer = OnARank(rank, 12_000, one_sided=one_sided).prepared(
        model, adamw(model.parameters())
    )
    for step in range(2):
        model(batch(step, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def exports(rank: int, folder: Path, one_sided: bool) -> Values:
    model = model_on(rank, one_sided)
    hetero.export(model, folder, max_shard_bytes=1500)
    model(batch(9, rank)).pow(2).mean().backward()  # calls of ranks are in step
    there = [load_file(path) for path in folder.glob("*.safetensors")]
    assert len(there) > 3
    whole = {name: value for part in there for name, value in part.items()}
    for name, value in model.state_dict().items():
        assert torch.equal(whole[name], value), name
    return whole


@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
def test_ranks_export_one_model(one_sided: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, exports, tmp_path, one_sided)
    assert first.keys() == second.keys() and (tmp_path / "model.safetensors.index.json").exists()


def fails_to_export(rank: int, folder: Path, one_sided: bool, at: int) -> None:
    model = model_on(rank, one_sided)
    io = FaultPlan()
    if rank == 0:
        io.fail_at("write", at, errno.ENOSPC)
    comm = company_of(model)
    try:
        write(model, folder, 1500, io, comm, gathers=comm.node is None)
    finally:
        model(batch(9, rank)).pow(2).mean().backward()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
def test_an_export_that_the_first_rank_cannot_write_fails_on_all(
    one_sided: bool, at: int, tmp_path: Path
) -> None:
    first, second = outcomes(2, fails_to_export, tmp_path, one_sided, at)
    assert isinstance(first.error, DiskFull), first.text
    assert isinstance(second.error, CheckpointError) and "rank 0" in str(second.error)
    assert not list(tmp_path.iterdir())
