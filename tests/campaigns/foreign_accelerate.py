"""Scripts of accelerate: what hooks of save_state see, and what a directory holds after two."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hetero.errors import StateError
from hetero.integrations.accelerate import HeteroAccelerator, HeteroPlugin
from tests.campaigns.harness import Case, Net, Side, adamw, loss_of_tokens

HBM = 60_000


def accelerator(side: Side) -> Any:
    """Return the stock Accelerator, or ours under the side's budget."""
    if side.settings is None:
        return Accelerator(cpu=True)
    plugin = HeteroPlugin(chunk_bytes=256, **side.settings)
    return HeteroAccelerator(cpu=True, hetero_plugin=plugin)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net(3, d=16)


def steps(side: Side, ours: Any, model: Any, optimizer: Any, first: int, last: int) -> None:
    """Train, and write down losses and, at the end, everything."""
    for number in range(first, last):
        loss = loss_of_tokens(model, number)
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        side.record(f"loss {number}", loss)
    side.record_all(f"step {last}", model, getattr(optimizer, "optimizer", optimizer))


def saves(weights_go: bool, models: Any, weights: list[Any], folder: str) -> None:
    """A hook as scripts of diffusers have it: each model into a folder of its own."""
    for number in reversed(range(len(models))):
        torch.save(dict(weights[number]), Path(folder) / f"unet-{number}.pt")
        if weights_go:
            weights.pop()


def loads(models_go: bool, models: list[Any], folder: str) -> None:
    for number in reversed(range(len(models))):
        model = models.pop() if models_go else models[number]
        found = torch.load(Path(folder) / f"unet-{number}.pt")
        scaled = {name: value * 2.0 for name, value in found.items()}  # so that who wins is seen
        model.load_state_dict(scaled)


def hooks_that(go: bool, side: Side) -> None:
    """Save through a hook, train on, load through the other, train again."""
    ours = accelerator(side)
    model = net()
    model, optimizer = ours.prepare(model, adamw(model))
    frozen = ours.prepare(net(1).requires_grad_(False))
    seen: list[str] = []
    ours.register_save_state_pre_hook(lambda models, weights, _: seen.append(f"{len(models)}"))
    ours.register_save_state_pre_hook(partial(saves, go))
    ours.register_load_state_pre_hook(partial(loads, go))
    with tempfile.TemporaryDirectory() as folder:
        steps(side, ours, model, optimizer, 0, 3)
        ours.save_state(folder)
        side.record("models seen", *map(int, seen))
        for path in sorted(Path(folder).glob("unet-*")):
            side.record(path.name, *torch.load(path).values())
        steps(side, ours, model, optimizer, 3, 5)
        ours.load_state(folder)
    side.record_all("loaded", model, optimizer.optimizer)
    side.record("frozen", *frozen.state_dict().values())
    steps(side, ours, model, optimizer, 3, 6)
    ours.free_memory()


def hooks_that_keep_weights_to_themselves(side: Side) -> None:
    hooks_that(True, side)


def hooks_that_only_look(side: Side) -> None:
    hooks_that(False, side)


def a_second_save_into_one_directory(side: Side) -> None:
    """It replaces the first, also when no step was made between them."""
    ours = accelerator(side)
    model = net()
    model, optimizer = ours.prepare(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for last in (1, 2, 2, 4):
            steps(side, ours, model, optimizer, 0, last)
            ours.save_state(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            sizes.append(sum(path.stat().st_size for path in files))
        assert max(sizes) < 1.1 * min(sizes), f"{sizes} bytes: saves pile up"
        steps(side, ours, model, optimizer, 4, 6)
        ours.load_state(folder)
    steps(side, ours, model, optimizer, 4, 6)
    ours.free_memory()


def a_hook_that_changes_what_is_saved(side: Side) -> None:
    """hetero saves the model and not the dict: it cannot honour another one."""
    ours = accelerator(side)
    model = net()
    model, _ = ours.prepare(model, adamw(model))
    ours.register_save_state_pre_hook(lambda _models, weights, _: weights[0].popitem())
    with tempfile.TemporaryDirectory() as folder:
        ours.save_state(folder)


class Draws:
    """Something registered for checkpointing that draws a number when it is loaded."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(1)


def generators_after_a_load(side: Side) -> None:
    """They are what accelerate's own file and what is loaded after it leave."""
    ours = accelerator(side)
    model = net()
    model, _ = ours.prepare(model, adamw(model))
    ours.register_for_checkpointing(Draws())
    with tempfile.TemporaryDirectory() as folder:
        ours.save_state(folder)
        side.record("drawn", torch.rand(3))
        ours.load_state(folder)
    side.record("drawn again", torch.rand(3))
    ours.free_memory()


SIM = {"device": "cpu:sim", "hbm": HBM}
CASES = [
    Case(hooks_that_keep_weights_to_themselves, SIM),
    Case(hooks_that_only_look, SIM),
    Case(a_second_save_into_one_directory, SIM),
    Case(generators_after_a_load, SIM),
    Case(a_hook_that_changes_what_is_saved, SIM, (StateError, "changed the weights")),
]
