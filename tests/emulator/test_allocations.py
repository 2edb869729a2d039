"""Allocations of a recorded step on CUDA, where nothing else looks at operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.internals import current_mode
from hetero.report.profile import profile
from tests.emulator import fake

WIDTH, DEPTH, TIMES = 64, 8, 4
BATCH = 16
LOGITS = TIMES * BATCH * WIDTH * 4
HBM = 2 * DEPTH * (WIDTH + 1) * WIDTH * 4
CHUNK = 4096


def logits_of(out: Tensor) -> Tensor:
    return torch.cat([out] * TIMES, 1)


LINE = f"test_allocations.py:{logits_of.__code__.co_firstlineno + 1} logits_of"


def trained(folder: Path | None, settings: dict[str, Any] | None) -> list[Tensor]:
    """Return the losses and the weights of a training, recorded if there is a folder."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if settings is None:
        fake.on_device(model)
    else:
        model, optimizer = hetero.prepare(model, optimizer, device=fake.device(), **settings)
    losses, modes = [], []

    def step(number: int) -> None:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = logits_of(model(x.to(fake.PLACE))).square().mean()
        modes.append(current_mode() is not None)
        loss.backward()
        assert current_mode() is None
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()

    if folder is None:
        for number in range(5):
            step(number)
    else:
        with profile(model, folder):
            for number in range(5):
                step(number)
    assert modes == [folder is not None and number == 2 for number in range(5)]
    return [*losses, *(value.cpu() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hbm": HBM, "chunk_bytes": CHUNK},
        {"hbm": HBM, "chunk_bytes": CHUNK, "activations": "offload"},
    ],
    ids=["stays", "paged", "offload"],
)
def test_a_line_of_the_loop_is_shown_and_no_bit_changes(
    watched: None, settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = trained(None, None)
    recorded = trained(tmp_path / "run", settings)
    summary = hetero.report(tmp_path / "run", tmp_path / "page.html")
    (row,) = (r for r in summary.allocations.rows if str(r["where"]).startswith(LINE))

    assert all(map(torch.equal, plain, recorded))
    assert (row["module"], row["n_bytes"]) == ("", LOGITS)
    assert any(str(r["module"])[:1].isdigit() for r in summary.allocations.rows)
    assert row["where"] in (tmp_path / "page.html").read_text().replace("&lt;", "<")
