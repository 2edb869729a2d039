"""Accesses that have to be in order, one by one, on the emulated device."""

from __future__ import annotations

from typing import Any

import torch

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.clip import read_together
from tests.campaigns.harness import Net
from tests.emulator import fake
from tests.emulator.harness import sgd
from tests.equivalence.harness import paged

HBM = 2_000_000


def prepared(tuning: Tuning | None = None, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    given = {"device": fake.device(), "hbm": HBM, "chunk_bytes": 256, **settings}
    with paged():
        return prepare_tuned(model, sgd(model), Config.load(**given), tuning)


def backward(model: Any, number: int = 0) -> None:
    tokens = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(number))
    logits = model(tokens.to(fake.PLACE))
    logits.square().mean().backward()


def train(model: Any, optimizer: Any, steps: int = 4) -> None:
    for number in range(steps):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def test_an_update_begins_after_the_fetch_that_still_reads_its_home(watched: None) -> None:
    """What the border has prefetched is on its way when a second step follows at once."""
    model, optimizer = prepared()
    train(model, optimizer)
    backward(model)
    optimizer.step()
    optimizer.step()
    hetero.release(model, optimizer)


def test_a_state_dict_is_loaded_after_the_fetches_that_still_read_homes(watched: None) -> None:
    model, optimizer = prepared()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer)
    model.load_state_dict(saved)
    train(model, optimizer, 1)
    hetero.release(model, optimizer)


def test_numbers_on_two_devices_are_read_in_their_order(watched: None) -> None:
    """A norm of a sum is taken on HOST, that of a gradient with its home on HBM there."""
    numbers = [torch.tensor(float(i)) for i in range(5)]
    there = [number.to(fake.PLACE) if i % 2 else number for i, number in enumerate(numbers)]
    fake.forget_stalls()
    assert read_together(there) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert sum(fake.stalls().values()) == 1


def test_backward_waits_for_activations_that_come_up(watched: None) -> None:
    """Weights stay in frames: no wait for one of them orders activations by chance."""
    model, optimizer = prepared(activations="offload", tuning=Tuning(homes_on_hbm=False))
    train(model, optimizer)
    assert fake.copies()["asynchronous copy up"] > 0
    hetero.release(model, optimizer)


def test_activations_come_up_after_torch_has_filled_their_memory(watched: None) -> None:
    """In deterministic mode new memory is filled by a kernel."""
    torch.use_deterministic_algorithms(True)
    try:
        model, optimizer = prepared(activations="offload", tuning=Tuning(homes_on_hbm=False))
        train(model, optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert fake.copies()["asynchronous copy up"] > 0
    hetero.release(model, optimizer)
