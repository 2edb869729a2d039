"""What hetero costs under accelerate where everything fits."""

from __future__ import annotations

import copy
import statistics
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.engine import Figure, Figures, adamw, timed
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status


def plugin(device: str | None = None, pairs: int = 21) -> Figures:
    """An accelerate loop, everything fits: hetero's step over stock accelerate's, paired."""
    from accelerate import Accelerator  # an extra

    from hetero.integrations.accelerate import HeteroAccelerator

    device = device or "cpu"
    torch.manual_seed(0)
    plain = GPT(GPTConfig(width=480, layers=8, heads=8, context=128, checkpoint_blocks=False))
    # more than is taken: who comes to the end of a loader tells all accelerators of the process
    tokens = TensorDataset(torch.randint(0, 256, (8 * (pairs + 4), 128)))
    options: dict[str, Any] = {"cpu": device == "cpu", "gradient_accumulation_steps": 2}
    accelerators = [
        Accelerator(**options),
        HeteroAccelerator(hetero_plugin={"device": device}, **options),
    ]
    loops = []
    for accelerator in accelerators:
        model = copy.deepcopy(plain)
        optimizer = adamw(model)
        parts = (model, optimizer, DataLoader(tokens, 8), LambdaLR(optimizer, decay))
        model, optimizer, batches, schedule = accelerator.prepare(*parts)
        loops.append((accelerator, model, optimizer, schedule, iter(batches)))
    ratios = []
    for pair in range(pairs + 2):
        order = (0, 1) if pair % 2 else (1, 0)
        took = {side: timed(partial(step, *loops[side]), device) for side in order}
        if pair >= 2:  # the first pairs allocate states and warm up
            ratios.append(took[1] / took[0])
    states = [loop[1].state_dict().values() for loop in loops]
    equal = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    rows = [
        Figure("hetero / stock accelerate", statistics.median(ratios), "ratio", "<=", 1.05),
        Figure("all weights equal, bit by bit", float(equal), "", "==", 1.0),
    ]
    return Figures(rows, {"ratios": ratios, "mode": status(loops[1][1]).mode})


def decay(step: int) -> float:
    """Return the learning rate's factor."""
    return 1 / (1 + step)


def step(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batches: Any) -> None:
    """Take the next batch as a script of accelerate's does."""
    (tokens,) = next(batches)
    with accelerator.accumulate(model):
        accelerator.backward(model(tokens, tokens))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
