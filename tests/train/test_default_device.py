"""torch's default device is the user's: nothing of ours is made there by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from tests.equivalence.harness import same, values

Make = Callable[[Any], torch.optim.Optimizer]


class Own(torch.optim.SGD):
    """A rule that is not known to us."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    seen = self.state[param].setdefault("seen", torch.zeros_like(param))
                    seen.add_(param.grad)
                    param.data.add_(seen, alpha=-group["lr"])


RULES: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "own": lambda params: Own(params, lr=0.01),
}


@pytest.fixture
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def net() -> nn.Sequential:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def train(make: Make, folder: Path, **settings: Any) -> list[Tensor]:
    model: Any = net()
    model, optimizer = hetero.prepare(model, make(model.parameters()), chunk_bytes=256, **settings)
    losses = []
    for number in range(4):
        if number == 2:
            hetero.save_checkpoint(folder, model, optimizer)
            hetero.load_checkpoint(folder, model, optimizer)
            with hetero.gathered(model):
                losses.append(torch.stack([param.norm() for param in model.parameters()]))
        generator = torch.Generator("cpu").manual_seed(number)
        for _ in range(2):
            x = torch.randn(4, 16, generator=generator, device="cpu")
            loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
            hetero.backward(loss)
            losses.append(loss.detach())
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    saved = values(model)
    hetero.release(model, optimizer)
    return [*losses, *saved]


SETTINGS: dict[str, dict[str, Any]] = {
    "paged": {"device": "cpu:sim", "hbm": 20_000},
    "masters": {"device": "cpu:sim", "hbm": 20_000, "precision": "bf16"},
    "scaled": {"device": "cpu", "precision": "fp16"},
}


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("place", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_default_device_changes_nothing(
    rule: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = train(RULES[rule], tmp_path / "plain", **SETTINGS[place])
    request.getfixturevalue("on_meta")
    found = train(RULES[rule], tmp_path / "meta", **SETTINGS[place])
    same(expected, found, f"{rule}, {place}")
