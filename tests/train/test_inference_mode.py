"""What hetero makes while a program is in `torch.inference_mode` outlives the mode: torch refuses
to write such tensors later, and to save them for backward."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import StateError
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import adamw, paged, same, values

STEPS = 2
WIDTH = 32


class Side(NamedTuple):
    """A model with its optimizer, plain or prepared, and where it computes."""

    model: nn.Module
    optimizer: Any
    place: str | torch.device
    folder: Path

    @property
    def is_plain(self) -> bool:
        return type(self.optimizer) is not hetero.Optimizer

    def forward(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, WIDTH, generator=generator)
        out: Tensor = self.model(x.to(self.place, next(self.model.parameters()).dtype))
        return out

    def backward(self, number: int, look: Callable[[], None] = lambda: None) -> None:
        loss = self.forward(number).float().square().mean()
        look()
        loss.backward() if self.is_plain else hetero.backward(loss)

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


Look = Callable[[Side], Any]


def evaluate(side: Side) -> Any:
    return [side.forward(100), side.forward(101)]


def read_norms(side: Side) -> Any:
    return [grad.norm() for grad in side.grads()]


def read_gradients(side: Side) -> Any:
    return [grad + 1 for grad in side.grads()]


def keep_a_gradient(side: Side) -> Any:
    return [grad.detach().view(-1) for grad in side.grads()[:2]]


def scale_gradients(side: Side) -> Any:
    for grad in side.grads():
        grad.mul_(0.5)


def add_to_gradients(side: Side) -> Any:
    for grad in side.grads():
        grad.add_(0.001)


def clip(side: Side) -> Any:
    return [nn.utils.clip_grad_norm_(side.model.parameters(), 1.0, foreach=False)]


def read_states(side: Side) -> Any:
    states = side.optimizer.state_dict()["state"]
    return [states[number][key] for number in sorted(states) for key in sorted(states[number])]


def read_weights(side: Side) -> Any:
    return [*side.model.state_dict().values(), *(p + 1 for p in side.model.parameters())]


def load_states(side: Side) -> Any:
    side.optimizer.load_state_dict(side.optimizer.state_dict())


def load_weights(side: Side) -> Any:
    side.model.load_state_dict({n: v * 0.5 for n, v in side.model.state_dict().items()})


def write_weights(side: Side) -> Any:
    for param in side.model.parameters():
        param.data.mul_(0.5)
        param.mul_(2)


def gather(side: Side) -> Any:
    with contextlib.nullcontext() if side.is_plain else hetero.gathered(side.model, write=True):
        for param in side.model.parameters():
            param.mul_(2)


def checkpoint(side: Side) -> Any:
    if not side.is_plain:
        hetero.save_checkpoint(side.folder, side.model, side.optimizer)
        hetero.load_checkpoint(side.folder, side.model, side.optimizer)
        hetero.status(side.model)


def step(side: Side) -> Any:
    side.optimizer.step()


NOW: dict[str, tuple[Look, ...]] = {
    "before backward": (evaluate, read_weights),
    "before step": (
        *(evaluate, read_norms, read_gradients, scale_gradients, clip, add_to_gradients),
        *(keep_a_gradient, read_norms, clip, step),
    ),
    "after step": (
        *(evaluate, read_states, load_states, read_weights, load_weights, write_weights),
        *(evaluate, gather, checkpoint),
    ),
}


def train(side: Side) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Train, look at everything in inference mode, and return what was seen."""
    found = []

    def look(when: str) -> None:
        for action in NOW[when]:
            with torch.inference_mode():
                seen = action(side)
            arrays = [each.float().cpu().numpy().copy() for each in seen or ()]
            found.extend((action.__name__, array) for array in arrays)

    side.backward(STEPS)
    side.optimizer.step()  # torch's own states would be of the mode in which they are made
    side.optimizer.zero_grad()
    for number in range(STEPS):
        side.backward(number, lambda: look("before backward"))
        look("before step")
        side.optimizer.zero_grad()
        look("after step")
    return found


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
    )


def born_in_the_mode(before: set[int]) -> list[str]:
    """Describe the inference tensors of this process that are not among those of ``before``."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and id(t) not in before]
    return [
        f"{type(t).__name__} {list(t.shape)} {t.dtype} in {[type(r) for r in gc.get_referrers(t)]}"
        for t in found
        if t.is_inference()
    ]


def check(
    place: str | torch.device,
    folder: Path,
    device: Any,
    tuning: Tuning | None = None,
    **settings: Any,
) -> None:
    """Train plain and prepared, both in and out of the mode."""
    model = build()
    twin = copy.deepcopy(model).to(place)
    plain = train(Side(twin, adamw(twin), place, folder))
    before = {id(t) for t in gc.get_objects() if issubclass(type(t), Tensor)}
    with paged():
        config = Config.load(device=device, chunk_bytes=256, **settings)
        prepared = prepare_tuned(model, adamw(model), config, tuning)
    seen = train(Side(*prepared, place, folder))
    assert born_in_the_mode(before) == []
    if "precision" not in settings:
        pairs = zip(plain, seen, strict=True)
        assert [name for (name, x), (_, y) in pairs if not np.array_equal(x, y)] == []
    assert engine_of(model).setup.stats.counts["fetch"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "keep"},
        {"activations": "offload"},
        {"activations": "offload", "host": "400KiB"},
        {"activations": "keep", "precision": "bf16"},
        {"activations": "keep", "precision": "fp16"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_is_made_in_inference_mode_outlives_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    if "host" in settings:
        settings = {**settings, "nvme": tmp_path}
    check("cpu", tmp_path / "saved", "cpu:sim", hbm=100_000, **settings)


@pytest.mark.parametrize("frozen", ["keep", "int8"])
def test_what_evaluations_alone_make_outlives_their_mode(frozen: str) -> None:
    """Frames are divided anew as batches grow, at the ends of forwards."""
    model = build().requires_grad_(False)
    before = {id(t) for t in gc.get_objects() if issubclass(type(t), Tensor)}
    model = hetero.prepare(model, device="cpu:sim", hbm=120_000, chunk_bytes=512, frozen=frozen)
    with torch.inference_mode():
        for rows in (1, 2, 16, 1, 1, 40):
            model(torch.ones(rows, WIDTH))
            next(iter(model.state_dict().values())).sum()
            model[0][0].weight.data[0].mul_(2)
    assert born_in_the_mode(before) == []
    with torch.no_grad():
        model(torch.ones(40, WIDTH))
        model[0][0].weight.mul_(2)
    hetero.release(model)


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_a_backward_in_inference_mode_is_refused_and_training_goes_on(activations: str) -> None:
    """torch's own step refuses such gradients, and so does its next backward."""
    plain = build()
    model = copy.deepcopy(plain)
    sides = [
        (plain, adamw(plain)),
        hetero.prepare(
            *(model, adamw(model)),
            device="cpu:sim",
            chunk_bytes=256,
            hbm=100_000,
            activations=activations,
        ),
    ]
    for number in range(STEPS):
        loss = model(torch.ones(8, WIDTH)).square().mean()
        with torch.inference_mode(), pytest.raises(StateError, match=r"torch\.inference_mode"):
            loss.backward()
        for each, optimizer in sides:
            each(torch.full((8, WIDTH), number + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(values(plain), values(model), "weights")
