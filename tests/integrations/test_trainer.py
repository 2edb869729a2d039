"""Trainer with hetero against Trainer without: every number and every file is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import Trainer

import hetero
from tests.integrations.trainers import (
    SETTINGS,
    built,
    evictions,
    llama,
    same_files,
    same_run,
)

HeteroTrainer = hetero.trainer(Trainer)

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated, the last step smaller": ({}, {"gradient_accumulation_steps": 4}),
    "without clipping": ({}, {"max_grad_norm": 0.0}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "reentrant checkpointing": (
        {},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    "label smoothing": ({}, {"label_smoothing_factor": 0.1}),
    "SGD, cosine": ({}, {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "autocast": ({}, {"bf16": True, "max_steps": 2}),
    "evaluated as it trains": ({}, {"eval_strategy": "steps", "eval_steps": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    of_model, arguments = RUNS[name]
    expected = built(Trainer, tmp_path / "stock", llama(**of_model), **arguments)
    expected.train()

    found = built(
        HeteroTrainer, tmp_path / "ours", llama(**of_model), hetero=SETTINGS, **arguments
    )
    found.train()

    same_run(found, expected)
    assert evictions(found) > 3
    assert hetero.status(found.model).mode == "paged"


def test_checkpoints_are_the_same_files_and_rotate(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 4}
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    expected = built(Trainer, tmp_path / "stock", llama(), **saving, **best)
    expected.train()

    found = built(HeteroTrainer, tmp_path / "ours", llama(), hetero=SETTINGS, **saving, **best)
    found.train()

    same_run(found, expected)
    folders = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == folders
    for name in folders:
        same_files(tmp_path / "ours" / name, tmp_path / "stock" / name)
    assert evictions(found) > 3
