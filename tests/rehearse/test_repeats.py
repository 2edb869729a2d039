"""Slices that are played do what slices that run do: to the event, the byte and the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero.config import Config
from hetero.errors import BudgetError
from hetero.events import Event
from hetero.rehearse import rehearsal, repeats
from hetero.rehearse.models import describe
from hetero.rehearse.named import machine
from hetero.rehearse.plan import scene_of
from hetero.rehearse.rehearsal import Rehearsal, Scene, rehearse
from hetero.rehearse.variants import adapted
from hetero.train.activations.slices import Sliced, one_by_one
from tests.equivalence.zoo import BY_NAME, Case
from tests.rehearse.test_identity import loss_of

BATCH = 7  # two and three samples leave a last slice that is smaller
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 96,
}
TOKENS = torch.zeros(BATCH, 16, dtype=torch.long)
SMALL = {"profile": "rtx4090", "precision": "bf16", "host": 2**30, "fused_loss": True}


class AllRun:
    """In place of `Repeats`: every slice runs."""

    log = offload = None

    def __init__(self, device: object) -> None: ...

    def __call__(self, job: Sliced) -> AbstractContextManager[Any]:
        return one_by_one(job)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of items of the slices that were played."""
    found: list[int] = []
    own = repeats.play

    def counted(stage: repeats.Stage, items: Any) -> None:
        found.append(len(items))
        own(stage, items)

    monkeypatch.setattr(repeats, "play", counted)
    yield found


def outcome(scene: Scene) -> Rehearsal | str:
    try:
        return rehearse(scene)
    except BudgetError as error:
        return str(error)


def assert_the_same(make: Callable[[], Scene]) -> Rehearsal:
    """Rehearse with slices that are played, and with all of them run."""
    here = outcome(make())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "Repeats", AllRun)
        there = outcome(make())
    assert isinstance(here, Rehearsal) and isinstance(there, Rehearsal)
    for first, second in zip(here.steps, there.steps, strict=True):
        for field in fields(first):  # those that are not compared, too
            assert getattr(first, field.name) == getattr(second, field.name), field.name
    assert str(here.error) == str(there.error)
    assert (here.peaks, here.kinds) == (there.peaks, there.kinds)
    assert (here.policies, here.units) == (there.policies, there.units)
    assert (here.working_bytes, here.end_bytes) == (there.working_bytes, there.end_bytes)
    assert (here.buffer_bytes, here.locked_bytes) == (there.buffer_bytes, there.locked_bytes)
    assert shown(here) == shown(there)
    return here


def shown(found: Rehearsal) -> list[Event]:
    """Return the events; gradients of a model that stays go down by the clock on the wall."""
    stays = found.steps and found.steps[0].mode == "resident"
    return [
        event._replace(t_ns=0, dur_ns=0) if stays and event.what == "move" else event
        for event in found.run.events
    ]


def llama(
    shape: Mapping[str, Any] = LLAMA,
    batch: tuple[int, int] = (BATCH, 16),
    lora_rank: int = 0,
    **settings: Any,
) -> Scene:
    described = describe(shape, batch)
    if lora_rank:
        described = replace(described, model=adapted(described.model, lora_rank, None))
    config = Config.load(**{**SMALL, **settings})
    return scene_of(described, None, None, config, machine(config))


def of(model: nn.Module, tokens: torch.Tensor = TOKENS, **settings: Any) -> Scene:
    config = Config.load(profile="rtx4090", host=2**30, **settings)
    meta = tokens.to("meta")
    return Scene(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        args=(meta,),
        kwargs={},
        loss=lambda output: loss_of(output, meta),
        config=config,
        profile=machine(config),
    )


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("activations", ["auto", "keep", "recompute", "offload"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_slices_of_any_size_under_any_policy(
    played: list[int], micro_batch: int, activations: str
) -> None:
    found = assert_the_same(
        lambda: llama(hbm=700_000, micro_batch=micro_batch, activations=activations)
    )
    assert found.error is None
    assert {step.mode for step in found.steps} == {"paged"}
    assert played if micro_batch < 3 else not played  # of three slices, one is smaller


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize(
    "settings",
    [
        {"hbm": 450_000},  # hardly a unit
        {"hbm": 2_000_000},
        {},  # all of it stays
        {"hbm": 700_000, "updates": "backward"},
        {"hbm": 700_000, "frozen": "nf4", "lora_rank": 4, "fused_loss": False},
        {"hbm": 1_000_000, "precision": "fp32"},
        {"hbm": 700_000, "tile": 8},
        {"hbm": 700_000, "pinned": 200_000},
        {"device": "cpu:sim", "hbm": 700_000},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_other_settings(played: list[int], settings: dict[str, Any]) -> None:
    found = assert_the_same(lambda: llama(**settings, micro_batch=1))
    assert found.error is None
    assert played


@pytest.mark.slow
def test_gradients_that_land_while_slices_are_played(played: list[int]) -> None:
    """Those of the head, of 128 MiB, are let go of when a pass through a slice ends."""
    wide = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 65536}
    found = assert_the_same(
        lambda: llama(wide, (12, 2048), hbm="1500MiB", host="16GiB", micro_batch=1)
    )
    assert found.error is None and {step.mode for step in found.steps} == {"paged"}
    assert played


@pytest.mark.campaign(seconds=2)
def test_with_homes_on_disk(played: list[int], tmp_path: Path) -> None:
    found = assert_the_same(
        lambda: llama(hbm=500_000, host=2_500_000, nvme=tmp_path, micro_batch=1)
    )
    assert "write" in dict(found.steps[-1].lane_bytes)
    assert played


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(
    "name",
    ["tied", "dropout", "untied", "reused", "frozen", "attention"],
)
@pytest.mark.parametrize("hbm", [60_000, None])
def test_other_models(played: list[int], name: str, hbm: int | None) -> None:
    case = BY_NAME[name]
    assert_the_same(lambda: of(case.build(), data_of(case), hbm=hbm, micro_batch=1))
    assert played


def data_of(case: Case) -> torch.Tensor:
    """Return four times as many samples as a case has."""
    found = case.data(torch.Generator().manual_seed(0))
    return torch.cat([found] * 4)


class Odd(nn.Module):
    """Units that do something besides what they compute."""

    def __init__(self, unit: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(unit() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = x + unit(x)
        return x.unsqueeze(1)


class Counting(nn.Module):
    """Does something else with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls % 4):
            x = x + 1
        return self.inner(x)


class Writing(nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        return self.inner(x)


class Drawing(nn.Module):
    """Draws numbers that its computations depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(random.randrange(4)):
            x = x + 1
        return self.inner(x)


class Remembering(nn.Module):
    """Keeps what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x).detach()
        return self.inner(x)


def hooked() -> nn.Module:
    """Return a unit with a hook."""
    unit = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    unit[0].register_forward_hook(lambda module, args, output: output + 1)
    return unit


def plain() -> nn.Module:
    """Return a unit that does nothing else."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("unit", [Counting, Writing, Drawing, Remembering, hooked, plain])
def test_units_that_do_anything_else_run(played: list[int], unit: Callable[[], nn.Module]) -> None:
    def scene() -> Scene:
        random.seed(0)
        return of(Odd(unit), torch.zeros(BATCH, 8), hbm=20_000, micro_batch=1)

    assert_the_same(scene)
    assert bool(played) is (unit is plain)
