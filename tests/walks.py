"""Which modules are entered when something is done: `python -m tests.walks` prints it.

Four walks: a step of a paged model, one whose activations go down, a save, and a plan. It counts
the modules of the `hetero` that is imported, their functions, and the calls of these. Figures to
look at before and after a change; none of them is asserted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hetero

PACKAGE = str(Path(hetero.__file__).parent)
WARM = 4  # steps until plans are made and states are there


class Entered:
    """Counts the functions of hetero that the main thread runs."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[code.co_filename, code.co_qualname] += 1

    def said(self) -> str:
        files = {name for name, _ in self.calls}
        return f"{len(files)} modules, {len(self.calls)} functions, {self.calls.total()} calls"


def entered(work: Callable[[], Any]) -> Entered:
    """Return what runs while ``work`` does."""
    found = Entered()
    sys.setprofile(found)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def trained(**settings: Any) -> tuple[nn.Module, Any, Callable[[], None]]:
    """Return a model of eight units on the simulator after a few steps, and a further step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(block() for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(
        model, optimizer, device="cpu:sim", hbm="400KiB", chunk_bytes="4KiB", **settings
    )
    batch = torch.randn(16, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    return model, optimizer, step


def main() -> None:
    """Print the four walks."""
    model, optimizer, step = trained(activations="keep")
    print("a step:", entered(step).said())
    with tempfile.TemporaryDirectory() as folder:
        print("a save:", entered(lambda: hetero.save_checkpoint(folder, model, optimizer)).said())
    _, _, step = trained(activations="offload")
    print("a step whose activations go down:", entered(step).said())
    plain = nn.Sequential(*(block() for _ in range(8)))
    adamw = torch.optim.AdamW(plain.parameters())
    batch = torch.randn(16, 64)

    def planned() -> None:
        settings = {"profile": "rtx4090", "hbm": "400KiB"}
        hetero.plan(plain, batch, optimizer=adamw, loss=lambda out: out.mean(), **settings)

    planned()
    print("a plan:", entered(planned).said())


if __name__ == "__main__":
    main()
