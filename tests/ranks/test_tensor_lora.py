"""Adapters of a tensor parallel model: its own weights are frozen, in code if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks.tensor_models import (
    LM,
    TIGHT,
    TensorRun,
    Trained,
    difference,
    differing,
    found_in,
    loss_of,
    mesh_of,
    tiny_llama,
    weights_of,
)
from tests.ranks.tensor_models import train as train_lm


def built(folder: Path) -> tuple[Any, Any]:
    """Return a Llama that transformers divides, with PEFT's adapters, and their optimizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=torch.distributed.get_world_size())
    model: Any = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan).float()
    torch.manual_seed(1)
    targets = [
        "q_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
    ]  # for others see docs
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)  # no zeros
    model = get_peft_model(model, config).train()
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def train(model: Any, optimizer: Any, steps: int = 4) -> Trained:
    losses = []
    for step in range(steps):
        words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = found_in(model, optimizer)
    found.losses = losses
    return found


def compared(rank: int, folder: Path, saved: Path, frozen: str) -> tuple[list[str], int, int]:
    model, plain = built(folder)
    settings = {**TIGHT, "hbm": 110_000, "frozen": frozen}
    model, optimizer = hetero.prepare(model, plain, **settings)
    twin, its_own = built(folder)
    twin.load_state_dict(model.state_dict())  # what codes say
    odd = difference(train(model, optimizer), train(twin, its_own))
    evictions = hetero.status(model).evictions
    n_parts = sum(isinstance(param, DTensor) for param in model.parameters() if param.requires_grad)

    hetero.save_checkpoint(saved, model, optimizer)
    again, plain = built(folder)
    again, optimizer = hetero.prepare(again, plain, **settings)
    hetero.load_checkpoint(saved, again, optimizer)
    odd += differing(weights_of(again), weights_of(model))
    return odd + difference(train(again, optimizer), train(twin, its_own)), n_parts, evictions


@pytest.mark.slow  # transformers loads the model three times on each rank
@pytest.mark.parametrize("frozen", ["keep", "nf4"])
def test_adapters_of_a_divided_model_train_as_in_torch(frozen: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    found = run_ranks(2, compared, tmp_path / "model", tmp_path / "saved", frozen)
    for odd, n_parts, evictions in found:
        assert not odd
        assert n_parts > 6
        assert evictions >= 3


class Adapted(nn.Module):
    """A layer whose weights are frozen, with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


def adapted(dp: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model cut in columns and in rows; an adapter's half next to the cut is, too."""
    torch.manual_seed(0)
    model = LM()
    plan: dict[str, Any] = {}
    for number, block in enumerate(model.blocks):
        block.up, block.down = Adapted(block.up), Adapted(block.down)
        at = f"blocks.{number}"
        plan |= {f"{at}.up.base": ColwiseParallel(), f"{at}.up.b": ColwiseParallel()}
        plan |= {f"{at}.down.base": RowwiseParallel(), f"{at}.down.a": RowwiseParallel()}
    model.embed.requires_grad_(False)
    parallelize_module(model, mesh_of(TensorRun(dp=dp)), plan)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def compared_own(rank: int, frozen: str) -> tuple[list[str], int]:
    run = TensorRun(passes=2)
    model, plain = adapted()
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "hbm": 34_000, "frozen": frozen})
    twin, its_own = adapted()
    twin.load_state_dict(model.state_dict())
    odd = difference(train_lm(model, optimizer, run), train_lm(twin, its_own, run))
    return odd, hetero.status(model).evictions


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["keep", "int8"])
def test_adapters_in_rows_and_columns_train_as_in_torch(frozen: str) -> None:
    for odd, evictions in run_ranks(2, compared_own, frozen):
        assert not odd
        assert evictions >= 3


def compared_shares(rank: int, frozen: str) -> tuple[list[str], int]:
    """Ranks 0 and 1 have one tensor, 2 and 3 another batch; a share of everything is on each."""
    run = TensorRun(dp=2)
    model, plain = adapted(run.dp)
    given = {**TIGHT, "hbm": 34_000, "frozen": frozen, "mesh": {"dp_shard": 2, "tp": 2}}
    model, optimizer = hetero.prepare(model, plain, **given)
    twin, its_own = adapted(run.dp)
    twin.load_state_dict(model.state_dict())
    found = train_lm(model, optimizer, run, dp=rank // 2)
    for step in range(run.steps):
        for dp in range(run.dp):
            (loss_of(twin, run, step, dp) * (1 / run.dp)).backward()
        its_own.step()
        its_own.zero_grad()
    expected = found_in(twin, its_own)
    expected.losses = found.losses
    return difference(found, expected), hetero.status(model).evictions


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["keep", "int8", "nf4"])
def test_adapters_with_shares_of_parts_train_as_micro_batches(frozen: str) -> None:
    for odd, evictions in run_ranks(4, compared_shares, frozen):
        assert not odd
        assert evictions >= 3
