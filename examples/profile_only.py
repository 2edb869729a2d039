"""What a plain torch loop does with memory and time: python examples/profile_only.py [DIRECTORY]

Nothing is prepared and no number changes: two lines record the loop and write its report.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import hetero


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def main(directory: Path) -> None:
    torch.manual_seed(0)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = (block(256) for _ in range(6))
    model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 1)).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with hetero.profile(model, directory, optimizer=optimizer) as run:  # the first line
        for _ in range(10):
            x = torch.randn(32, 64, device=place)
            loss = (model(x) - x[:, :3].prod(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    summary = hetero.report(run, directory / "report.html")  # the second line
    tier = "hbm" if place == "cuda" else "host"
    peak_bytes = summary.as_json()[tier]["peak_bytes"]
    print(f"{tier} held {peak_bytes:,} bytes at most; see {directory / 'report.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/profile_only"))
