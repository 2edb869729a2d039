"""An accelerate script for several processes: stock and under hetero; each writes its numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetero
from hetero.integrations.accelerate import HeteroAccelerator

HBM = 64_000


class Model(nn.Module):
    """Blocks, and a norm with running means."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        blocks = (nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in "abcd")
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x.mean(1)))


def train(accelerator: Any, folder: Path) -> dict[str, Any]:
    """Train, save in the middle, load it, and go on; returns every number that is to be equal."""
    torch.manual_seed(10 + accelerator.process_index)  # ranks begin with different weights
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 32, (52, 5), generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(tokens), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses, norms, seen = [], [], []
    for epoch in range(2):
        for (batch,) in batches:
            with accelerator.accumulate(model):
                made = model(batch)
                loss = nn.functional.cross_entropy(made, batch[:, 0])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(accelerator.gather_for_metrics(batch[:, 0]))
        if epoch == 0:
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder))
    evictions = hetero.status(model).evictions if hasattr(accelerator, "hetero_config") else 0
    state = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    found = {"losses": losses, "norms": norms, "seen": torch.cat(seen), "state": state}
    return {**found, "evictions": evictions}


def main(out: str) -> None:
    """Run both, and write what this rank found."""
    folder, options = Path(out), {"cpu": True, "gradient_accumulation_steps": 2}
    stock = Accelerator(**options)
    found = {"stock": train(stock, folder / "stock")}
    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = {"device": "cpu:sim", "hbm": HBM}
    found["ours"] = train(HeteroAccelerator(hetero_plugin=plugin, **options), folder / "ours")
    torch.save(found, folder / f"{stock.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
