"""Masters follow written weights alike at every budget: programs drawn, and compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hetero
from hetero.api import engine_of
from hetero.errors import OutOfMemory
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import stay_paged
from tests.train.test_precision import WORKING, Reference, data, loss_of, start, train

PLACES: dict[str, dict[str, Any]] = {
    "resident": {"hbm": None, "device": "cpu"},
    "paged": {"hbm": 40_000},
    "roomy": {"hbm": 60_000},
    "home": {"hbm": 70_000, "tuning": Tuning(homes_on_hbm=True)},
}


def begun(precision: str, place: str, **settings: Any) -> tuple[Reference, Any, Any]:
    """Return a model whose masters differ from its weights, and its reference."""
    settings = {**PLACES[place], **settings}
    reference, model, optimizer = start(precision, **settings)
    if place != "resident":
        stay_paged(engine_of(model))
    train(reference, model, optimizer, steps=2)
    return reference, model, optimizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_averages_take_the_place_of_weights_for_an_evaluation(precision: str, place: str) -> None:
    reference, model, optimizer = begun(precision, place)
    params = list(model.parameters())
    kept = [param.data.clone() for param in params]
    for param in params:
        param.data.copy_(param.data * 0.5)
    with torch.no_grad():
        loss_of(model, data(7, precision))
    for param, value in zip(params, kept, strict=True):
        param.data.copy_(value)
    train(reference, model, optimizer, steps=2)


@pytest.mark.parametrize("place", PLACES)
def test_masters_that_are_loaded_are_kept_after_a_weight_was_read(place: str) -> None:
    reference, model, optimizer = begun("bf16", place)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model.blocks[1].up.weight.data.sum()
    model.blocks[2].up.weight.data.mul_(2)
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)
    train(reference, model, optimizer, steps=2)


@pytest.mark.parametrize("place", PLACES)
def test_masters_are_loaded_after_what_was_written_before(place: str) -> None:
    _, model, optimizer = begun("bf16", place)
    states = copy.deepcopy(optimizer.state_dict())
    model.blocks[2].up.weight.data.mul_(2)
    optimizer.load_state_dict(states)
    found = optimizer.state_dict()["masters"]
    assert all(torch.equal(found[key], low) for key, low in states["masters"].items())


@pytest.mark.parametrize("place", PLACES)
def test_of_what_is_written_back_in_part_the_rest_is_its_own_master(place: str) -> None:
    reference, model, optimizer = begun("bf16", place)
    name = "blocks.2.up.weight"
    index = [name for name, _ in reference.model.named_parameters()].index(name)
    weight = model.blocks[2].up.weight
    kept = weight.data.clone()
    weight.data.mul_(-1)
    with torch.no_grad():
        loss_of(model, data(7, "bf16"))
    weight.data[:5] = kept[:5]
    reference.params[index].data[5:].mul_(-1)
    reference.masters[index][5:] = reference.params[index].detach()[5:].float()
    train(reference, model, optimizer, steps=2)


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_written_as_a_whole_is_so_until_the_next_step_alone(place: str) -> None:
    reference, model, optimizer = begun("bf16", place)
    index = [n for n, _ in reference.model.named_parameters()].index("blocks.2.up.bias")

    def write(values: slice) -> Tensor:
        return reference.params[index].data[values].add_(0.25)

    with torch.no_grad():
        model.state_dict()["blocks.2.up.bias"][:2].add_(0.25)
    write(slice(2))
    reference.masters[index] = reference.params[index].detach().float()
    train(reference, model, optimizer, steps=1)
    model.blocks[2].up.bias.data[:3].add_(0.25)
    reference.masters[index][:3] = write(slice(3)).float()
    train(reference, model, optimizer, steps=1)


# -- programs that are drawn -----------------------------------------------------------------------

Program = list[tuple[str, int, bool, bool]]
"""What is done, to which parameter or all, and whether to a part of it."""


class Run:
    """A prepared model, and what a program does to its weights between steps."""

    def __init__(self, precision: str, folder: Path, **settings: Any) -> None:
        self.precision, self.folder = precision, folder
        _, self.model, self.optimizer = start(precision, **settings)
        self.params = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.seen: list[Tensor] = []  # what the program has read
        self.held: list[Tensor] = []
        self.stored: dict[int, Tensor] = {}
        self.kept: tuple[dict[str, Any], dict[str, Any]] | None = None

    def step(self, number: int, part: bool) -> None:
        hetero.backward(loss_of(self.model, data(number, self.precision), spare=part))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def store(self, number: int, part: bool) -> None:
        self.stored[number] = self.params[number].data.clone()
        self.params[number].data.mul_(0.5)

    def restore(self, number: int, part: bool) -> None:
        for at, value in self.stored.items():
            self.params[at].data.copy_(value)
        self.stored.clear()

    def add(self, number: int, part: bool) -> None:
        self.params[number].data.view(-1)[: 3 if part else None].add_(0.25)

    def write_the_same(self, number: int, part: bool) -> None:
        self.params[number].data.mul_(1.0)

    def scale(self, number: int, part: bool) -> None:
        with torch.no_grad():
            (self.params[number].view(-1)[:3] if part else self.params[number]).mul_(0.5)

    def evaluate(self, number: int, part: bool) -> None:
        with torch.no_grad():
            if part:
                self.model.blocks[number % 4](torch.ones(2, 9, dtype=WORKING[self.precision]))
            else:
                loss_of(self.model, data(number, self.precision))

    def hold(self, number: int, part: bool) -> None:
        self.held.append(self.params[number].data if part else self.params[number].detach())

    def drop(self, number: int, part: bool) -> None:
        self.held.clear()

    def write_what_is_held(self, number: int, part: bool) -> None:
        for view in self.held[-1:]:
            view.view(-1)[:5].mul_(-1)

    def write_a_state_dict(self, number: int, part: bool) -> None:
        self.model.state_dict()[self.names[number]].view(-1)[:2].add_(1)

    def write_by_numpy(self, number: int, part: bool) -> None:
        if self.precision == "fp16":  # numpy has no bf16
            self.params[number].data.numpy()[..., :2] += 1

    def keep(self, number: int, part: bool) -> None:
        """Keep what a checkpoint of torch's would have."""
        self.kept = (
            copy.deepcopy(self.model.state_dict()),
            copy.deepcopy(self.optimizer.state_dict()),
        )

    def load(self, number: int, part: bool) -> None:
        if self.kept is not None:
            model, optimizer = self.kept
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
            if part:
                self.model.load_state_dict(model)

    def read(self, number: int, part: bool) -> None:
        self.seen.append(self.params[number].data.clone())

    def read_states(self, number: int, part: bool) -> None:
        found = self.model.state_dict() if part else self.optimizer.state_dict()["masters"]
        self.seen += [value.clone() for value in found.values()]

    def save(self, number: int, part: bool) -> None:
        hetero.save_checkpoint(self.folder / str(len(self.seen)), self.model, self.optimizer)
        self.seen.append(torch.zeros(()))

    def results(self, program: Program) -> list[Tensor]:
        for number in range(2):
            self.step(number, False)
        for what, number, part, every in program:
            each = what in ("store", "add", "write_the_same", "scale") and every
            for at in range(len(self.params)) if each else (number % len(self.params),):
                getattr(self, what)(at, part)
        self.step(99, True)
        self.held.clear()
        hetero.release(self.model, self.optimizer)
        return [*self.seen, *(param.detach() for param in self.params)]


DOES: tuple[Callable[..., None], ...] = (
    *(Run.step, Run.step, Run.store, Run.restore, Run.restore, Run.add, Run.add),
    *(Run.write_the_same, Run.scale, Run.evaluate, Run.hold, Run.drop, Run.write_what_is_held),
    *(Run.write_a_state_dict, Run.read, Run.read_states, Run.save, Run.write_by_numpy),
    *(Run.keep, Run.load),
)


def drawn(seed: int) -> Program:
    choose = random.Random(seed)
    return [
        (choose.choice(DOES).__name__, choose.randrange(99), *choose.choices((False, True), k=2))
        for _ in range(choose.randint(6, 16))
    ]


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_drawn_programs_have_the_same_masters_at_every_budget(
    tmp_path: Path, disk: Path, precision: str, seed: int
) -> None:
    program = drawn(seed)
    on_disk = {"hbm": 60_000, "host": 200_000, "nvme": (str(disk),)}
    places = {**PLACES, "disk": on_disk}
    if precision == "bf16":
        places["in backward"] = {"hbm": 60_000, "updates": "backward"}
    expected = Run(precision, tmp_path / "0", **places.pop("resident")).results(program)
    for place, settings in places.items():
        try:
            found = Run(precision, tmp_path / place, **settings).results(program)
        except OutOfMemory as error:  # what the program holds leaves no room for a unit
            assert "held as leases" in str(error)
            continue
        assert len(found) == len(expected)
        wrong = [at for at, value in enumerate(found) if not torch.equal(value, expected[at])]
        assert not wrong, (place, wrong, program)
