"""A Trainer whose ranks have parts of sequences makes the steps of a loop of ours that does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytest.importorskip("accelerate.parallelism_config")

import transformers
from accelerate.parallelism_config import ParallelismConfig

from hetero import ConfigError
from hetero.integrations.parallelism import drop_masks
from hetero.integrations.sequences import check_losses, check_mask, whole_inputs
from hetero.integrations.transformers import trainer as trainer_of
from hetero.parallel.context import context_parallel
from hetero.status import status
from hetero.testing.ranks import outcomes, run_ranks
from tests.integrations.trainers import SETTINGS, arguments, evictions, llama
from tests.ranks.tensor_models import differing
from tests.ranks.test_accelerate import started

Rows = list[dict[str, torch.Tensor]]
STEPS, PASSES, LENGTH = 5, 2, 16


def rows(n_rows: int, seed: int = 1) -> Rows:
    """Return texts of unlike numbers of words that count, at unlike places."""
    dice = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 64, (n_rows, LENGTH), generator=dice)
    labels = words.clone()
    for number, row in enumerate(labels):
        row[: number % 9] = -100
    return [{"input_ids": w, "labels": t} for w, t in zip(words, labels, strict=True)]


def given_to(folder: Path, **changes: Any) -> Any:
    return arguments(
        folder,
        **{
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": PASSES,
            "max_steps": STEPS,
            "max_grad_norm": 0.5,
            **changes,
        },
    )


def batches(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return what stock Trainer's loader gives on one rank."""
    data = rows(2 * PASSES * STEPS)
    stock = transformers.Trainer(model=llama(), args=given_to(folder), train_dataset=data)
    return list(stock.get_train_dataloader())


def by_trainer(rank: int, folder: Path, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    started()
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    if way == "launched":
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ["PARALLELISM_CONFIG_CP_SIZE"] = "2"
    elif way == "given":
        changes["parallelism_config"] = ParallelismConfig(cp_size=2)
    elif way == "mesh":
        settings = {**settings, "mesh": {"cp": 2}}
    data = rows(2 * PASSES * STEPS)
    found: dict[str, Any] = {}
    resumes = way == "given"
    for resumed in (None, str(folder / "checkpoint-3")) if resumes else (None,):
        made = trainer_of(transformers.Trainer)(
            model=llama(),
            args=given_to(folder, **changes),
            train_dataset=data,
            eval_dataset=rows(5, seed=2),
            hetero={**SETTINGS, **settings},
        )
        made.train(resume_from_checkpoint=resumed)
        weights = {k: v.clone() for k, v in made.model.state_dict().items()}
        assert not found or not differing(weights, found["weights"]), "resumed"
        found["weights"] = weights
        if not resumed:
            found["losses"] = [row["loss"] for row in made.state.log_history if "loss" in row]
            found["evictions"] = evictions(made)
            found["ranks"] = status(made.model).ranks
            found["eval"] = made.evaluate()["eval_loss"]
            found["samples"] = made._train_batch_size * made.get_cp_size()
        made.accelerator.free_memory()
    return found


def by_loop(rank: int, folder: Path, given: Any) -> dict[str, Any]:
    """Train with a plain loop under context parallel, by Trainer's optimizer and schedule."""
    started()
    model = llama()
    stock = transformers.Trainer(model=model, args=given_to(folder))
    stock.create_optimizer_and_scheduler(STEPS)
    drop_masks(model)
    losses = []
    for at in range(0, len(given), PASSES):
        passes = given[at : at + PASSES]
        n_words = sum((batch["labels"][:, 1:] != -100).sum() for batch in passes)
        total = 0.0
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for batch in passes:
            total += loss_of(model, batch, n_words)
            add_means(model, sums)
        for param, grad in sums.items():
            param.grad = grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stock.optimizer.step()
        stock.lr_scheduler.step()
        model.zero_grad()
        losses.append(total)
    return {"losses": losses, "weights": {k: v.clone() for k, v in model.state_dict().items()}}


def add_means(model: nn.Module, sums: dict[nn.Parameter, torch.Tensor]) -> None:
    """Add the addends of a pass, pass by pass, and rank by rank in each."""
    for param in model.parameters():
        assert param.grad is not None
        rows = [torch.empty_like(param.grad) for _ in range(2)]
        dist.all_gather(rows, param.grad)
        for row in rows:
            sums[param] = sums[param] + row / 2 if param in sums else row / 2
        param.grad = None


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], n_words: Any) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    words = batch["input_ids"].clone()
    then = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    places = torch.arange(LENGTH).expand(words.shape).clone()
    with context_parallel(mesh, buffers=[words, then, places], buffer_seq_dims=[1, 1, 1]):
        loss = model(
            input_ids=words,
            position_ids=places,
            labels=then,
            shift_labels=then,
            num_items_in_batch=n_words,
        ).loss
        loss = loss * 2  # of two ranks, of which gradients are averaged
        loss.backward()
    return float(loss.detach())


def whole_run(folder: Path) -> Any:
    """Train with stock Trainer on one rank, with whole sequences."""
    made = transformers.Trainer(
        model=llama(),
        args=given_to(folder),
        train_dataset=rows(2 * PASSES * STEPS),
        eval_dataset=rows(5, seed=2),
    )
    made.train()
    return made


@pytest.mark.slow  # transformers and accelerate are imported by each rank
@pytest.mark.parametrize("way", ["given", "launched", "mesh"])
def test_ranks_of_a_sequence_train_by_a_trainer(way: str, tmp_path: Path) -> None:
    """Bits of a plain loop on the same ranks. On one rank with whole sequences sums round
    otherwise, and so does a head that leaves its logits to the loss."""
    expected = run_ranks(2, by_loop, tmp_path / "loop", batches(tmp_path / "one"))
    stock = whole_run(tmp_path / "stock")
    for settings in ({}, {"fused_loss": True}) if way == "given" else ({},):
        ours = run_ranks(2, by_trainer, tmp_path / f"ours{len(settings)}", way, settings)
        means = [sum(step) / 2 for step in zip(*(e["losses"] for e in expected), strict=True)]
        for mine, theirs in zip(ours, expected, strict=True):
            assert mine["evictions"] >= 3 and mine["samples"] == 4
            assert mine["ranks"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
            assert settings or not differing(mine["weights"], theirs["weights"])
            assert mine["losses"] == pytest.approx(means, rel=1e-5)
            logged = [row["loss"] for row in stock.state.log_history if "loss" in row]
            assert mine["losses"] == pytest.approx(logged, rel=1e-4)
            assert mine["eval"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-4)


# -- what is refused -------------------------------------------------------------------------------


def refused(rank: int, folder: Path, changes: dict[str, Any], data: Rows) -> None:
    started()
    config = changes.pop("config", {})
    measure = changes.pop("compute_metrics", None)
    axes = ParallelismConfig(cp_size=2)
    made = trainer_of(transformers.Trainer)(
        model=llama(**config),
        args=given_to(folder, parallelism_config=axes, **changes),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=measure,
        hetero=SETTINGS,
    )
    if measure is not None:
        made.evaluate()
    made.train()


def metric(_: Any) -> dict[str, float]:
    raise AssertionError("logits of parts are measured")


LEFT_OUT = torch.tensor([0] * 3 + [1] * (LENGTH - 3))


@pytest.mark.slow  # as above
@pytest.mark.parametrize(
    ("changes", "more", "says"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1"),
        ({"config": {"attn_implementation": "eager"}}, {}, "'eager'"),
        ({"compute_metrics": metric}, {}, "logits"),
        ({}, {"attention_mask": LEFT_OUT}, "pad on the right"),
        ({}, {"position_ids": torch.arange(LENGTH) % 8}, "several texts"),
        ({"remove_unused_columns": False}, {"token_type_ids": LEFT_OUT}, "token_type_ids"),
    ],
    ids=["smoothing", "eager", "metrics", "mask", "texts", "others"],
)
def test_what_parts_cannot_know_is_refused_on_all_ranks(
    changes: dict[str, Any], more: dict[str, torch.Tensor], says: str, tmp_path: Path
) -> None:
    data = [{**row, **more} for row in rows(8)]
    for each in outcomes(2, refused, tmp_path, changes, data):
        assert isinstance(each.error, ConfigError), each.text
        assert says in str(each.error)


def test_a_batch_is_given_what_parts_cannot_know() -> None:
    one = {k: v[None] for k, v in rows(1)[0].items()}
    found = whole_inputs(llama(), {**one, "attention_mask": torch.ones(1, LENGTH)})
    assert "attention_mask" not in found
    assert torch.equal(found["shift_labels"][0, :-1], one["labels"][0, 1:])
    assert found["shift_labels"][0, -1] == -100
    assert found["position_ids"].tolist() == [list(range(LENGTH))]
    assert all(value.is_contiguous() for value in found.values())
    assert "shift_labels" not in whole_inputs(nn.Linear(1, 1), one)  # whose loss is its own


def test_a_mask_may_leave_out_the_ends_of_sequences() -> None:
    mask, labels = torch.ones(2, 8), torch.zeros(2, 8)
    mask[1, 5:], labels[1, 5:] = 0, -100
    check_mask(mask, labels)
    with pytest.raises(ConfigError, match="labels are -100"):
        check_mask(mask, labels.abs())
    with pytest.raises(ConfigError, match="parts attend without masks"):
        check_mask(torch.ones(2, 1, 8, 8), labels)


def test_losses_of_a_trainers_own_are_refused_with_parts() -> None:
    check_losses(0.0, None)
    with pytest.raises(ConfigError, match="compute_loss_func"):
        check_losses(0.0, metric)
