"""What the tests of Trainers share: tiny models and data, and the comparison of two runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hetero.errors import BudgetError

HBM = 200_000  # a few units of the model below beside a batch's activations
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": HBM, "chunk_bytes": 1024}
NOT_COMPARED = ("runtime", "per_second", "hetero/", "preparation_time")


def llama(layers: int = 4, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, **heads, "num_hidden_layers": layers, **config})
    )


def tokens(samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 64, (samples, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, cls: type = TrainingArguments, **changes: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **changes,
    }
    return cls(**given)


def built(cls: type, folder: Path, model: nn.Module, **given: Any) -> Any:
    """Return a Trainer over the tiny data; ``given`` beyond its own arguments are Trainer's."""
    own = ("hetero", "callbacks", "model_init", "optimizers", "compute_loss_func")
    for_trainer = {key: given.pop(key) for key in own if key in given}
    return cls(
        model=model,
        args=arguments(folder, **given),
        train_dataset=tokens(24, seed=1),
        eval_dataset=tokens(8, seed=2),
        **for_trainer,
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return a log without timings and without what hetero says of itself."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in NOT_COMPARED)}
        for row in trainer.state.log_history
    ]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_weights(found: nn.Module, expected: nn.Module) -> None:
    left, right = weights(found), weights(expected)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def same_run(found: Any, expected: Any) -> None:
    """Every number that two Trainers logged is the same, and so is every weight."""
    assert history(found) == history(expected)
    same_weights(found.model, expected.model)


def evictions(trainer: Any) -> int:
    return sum(row.get("hetero/evictions", 0) for row in trainer.state.log_history)


def same_files(found: Path, expected: Path, *, states: str = "hetero") -> None:
    """Two checkpoints hold the same names, weights and state of the Trainer."""
    names = {path.name for path in expected.iterdir()} - {"optimizer.pt"} | {states}
    assert {path.name for path in found.iterdir()} == names
    for path in expected.glob("*.safetensors"):
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
        assert load_file(path).keys() == load_file(found / path.name).keys()
    ours, theirs = (json.loads((f / "trainer_state.json").read_text()) for f in (found, expected))
    for row in ours["log_history"] + theirs["log_history"]:
        for key in [key for key in row if any(part in key for part in NOT_COMPARED)]:
            del row[key]
    for key in ("best_model_checkpoint",):
        assert (ours.pop(key) is None) == (theirs.pop(key) is None)
    assert ours == theirs


def within(hbm: int, run: Callable[[dict[str, Any]], Any]) -> Any:
    """Run with settings of the smallest budget that works, as errors name it."""
    for _ in range(8):
        try:
            return run({**SETTINGS, "hbm": hbm})
        except BudgetError as error:
            assert error.needed_bytes > hbm
            hbm = error.needed_bytes
    raise AssertionError(f"{hbm} bytes do not do either")
