"""An accelerate script with hetero against the same script without: every number is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from hetero.errors import ConfigError  # noqa: E402
from hetero.integrations.accelerate import HeteroAccelerator, HeteroPlugin  # noqa: E402

HBM = 60_000
ORDERS = ["model first", "optimizer first", "three calls"]


@pytest.fixture(autouse=True)
def afresh() -> Any:
    """Every test has accelerate's state for itself."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def tied() -> nn.Module:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 24)
            blocks = (nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in "abc")
            self.blocks = nn.ModuleList(blocks)
            self.head = nn.Linear(24, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Model()


def loader() -> DataLoader[Any]:
    tokens = torch.randint(0, 32, (24, 9), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=3, shuffle=False)


def ours(**kwargs: Any) -> HeteroAccelerator:
    return HeteroAccelerator(
        cpu=True, hetero_plugin=HeteroPlugin(device="cpu:sim", hbm=HBM), **kwargs
    )


def stock(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def prepared(accelerator: Any, order: str) -> tuple[Any, ...]:
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if order == "three calls":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        return model, optimizer, *accelerator.prepare(loader(), schedule)
    if order == "optimizer first":
        optimizer, model, *rest = accelerator.prepare(optimizer, model, loader(), schedule)
        return model, optimizer, *rest
    return accelerator.prepare(model, optimizer, loader(), schedule)


def steps(accelerator: Any, parts: tuple[Any, ...], epochs: int = 1) -> list[Any]:
    """Train; returns losses and norms."""
    model, optimizer, batches, schedule = parts
    seen = []
    for _ in range(epochs):
        for (tokens,) in batches:
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.append(loss.item())
    return seen


def weights(accelerator: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_script_gives_the_same_numbers(order: str, accumulation: int) -> None:
    plain = stock(gradient_accumulation_steps=accumulation)
    parts = prepared(plain, order)
    expected = steps(plain, parts)
    values = weights(plain, parts[0])
    AcceleratorState._reset_state()
    GradientState._reset_state()

    accelerator = ours(gradient_accumulation_steps=accumulation)
    parts = prepared(accelerator, order)

    assert steps(accelerator, parts) == expected
    assert accelerator.unwrap_model(parts[0]) is parts[0]
    assert_equal(weights(accelerator, parts[0]), values)
    accelerator.free_memory()


def test_a_saved_run_goes_on_as_the_stock_one_does(tmp_path: Path) -> None:
    plain = stock()
    parts = prepared(plain, "model first")
    expected = steps(plain, parts, epochs=3)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    first = ours()
    parts = prepared(first, "model first")
    begun = steps(first, parts)
    first.save_state(str(tmp_path / "state"))
    first.free_memory()

    second = ours()
    parts = prepared(second, "model first")
    second.load_state(str(tmp_path / "state"))

    assert begun + steps(second, parts, epochs=2) == expected
    second.free_memory()


def test_a_model_without_an_optimizer_computes_under_the_budget() -> None:
    accelerator = ours()
    model = accelerator.prepare(tied())
    tokens = torch.zeros(1, 4, dtype=torch.long)

    with torch.no_grad():
        found = model(tokens)

    assert torch.equal(found, tied()(tokens))
    accelerator.free_memory()


def test_a_live_accelerator_is_adopted() -> None:
    accelerator = HeteroAccelerator.adopt(stock(), {"device": "cpu:sim", "hbm": HBM})
    parts = prepared(accelerator, "model first")

    assert type(accelerator) is HeteroAccelerator
    assert len(steps(accelerator, parts)) == 16
    accelerator.free_memory()


def test_an_optimizer_of_no_model_is_refused() -> None:
    accelerator = ours()
    optimizer = torch.optim.AdamW(tied().parameters())

    with pytest.raises(ConfigError, match="of no model"):
        accelerator.prepare(optimizer)


def test_a_plugin_of_somebody_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_plugin"):
        ours(fsdp_plugin=object())
