"""A rehearsal does what the runtime does: the same moves, at the same times, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetero.config import Config
from hetero.device import SimDevice, Ticket
from hetero.dry import DryDevice
from hetero.internals import run_backward
from hetero.jobs import Worker
from hetero.plan.hardware import find
from hetero.plan.machine import MachineProfile
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.rehearse.clock import OpClock
from hetero.rehearse.kernels import AsOn
from hetero.rehearse.twin import batch_twin, twin_of
from hetero.rehearse.worker import DryWorker
from hetero.train.engine.assemble import assemble
from hetero.train.engine.blueprint import draw
from hetero.train.engine.tuning import Tuning
from hetero.train.model.host_work import host_work
from hetero.types import Kind, Tier
from tests.equivalence.zoo import BY_NAME

RATE = 1e9  # bytes a second of both lanes
STEPS = 5
PROFILE: MachineProfile = find("laptop-4c-avx2-ddr4")
ZOO = (  # that compute without looking at their numbers
    *("tied", "untied", "reused", "functional", "attention", "encoder_decoder", "convolutional"),
    *("dict_out", "dataclass_out", "in_place_views", "escaped_views", "frozen", "tables"),
    *("checkpoint", "checkpoint_reentrant", "checkpoint_inside", "checkpoint_shared"),
    *("custom_function", "double", "dropout"),
)


@dataclass(frozen=True)
class Play:
    """What is trained."""

    model: nn.Module
    batch: torch.Tensor
    settings: dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What came of it."""

    events: list[tuple[Any, ...]]
    peaks: dict[tuple[Tier, Kind | None], int]
    seconds: float
    evictions: int


class Simulated(SimDevice):
    """Moves bytes and poisons them without taking an operation's time."""

    def _step(self, queue: Any) -> None:
        with host_work():
            super()._step(queue)

    def copy(self, *args: Any, **kwargs: Any) -> Ticket:
        with host_work():
            return super().copy(*args, **kwargs)

    def poison(self, dst: torch.Tensor) -> None:
        with host_work():
            super().poison(dst)


def trained(play: Play, *, dry: bool) -> Seen:
    torch.manual_seed(0)
    model, optimizer = play.model, torch.optim.AdamW(play.model.parameters(), lr=1e-3)
    data = play.batch
    device: Any
    if dry:
        model, twin = twin_of(model, optimizer)
        assert twin is not None
        optimizer, data = twin, batch_twin(data)
        device = DryDevice(ram_bytes=2**33, copy_seconds=lambda lane, n, both: n / RATE)
        worker: Worker = DryWorker(device, lambda numel: 0.0)
    else:
        device = Simulated(h2d_bytes_per_second=RATE, d2h_bytes_per_second=RATE, lazy=0.0)
        worker = Worker(0)
    config = Config.load(device=device, host=2**33, **play.settings)
    blueprint = draw(model, optimizer, config)
    engine = assemble(model, optimizer, config, device, blueprint, Tuning(worker=worker))
    evictions = 0
    with AsOn(is_cuda=False):
        for _ in range(STEPS):
            with OpClock(device, PROFILE):
                run_backward(loss_of(model(data), data))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            evictions += engine.setup.stats.counts["evict"] + engine.setup.stats.counts["discard"]
    seen = Seen(
        [event[1:] for event in engine.setup.log],
        {(t, k): engine.setup.ledger.peak(t, k) for t in Tier for k in (None, *Kind)},
        device.clock(),
        evictions,
    )
    if not dry:
        engine.release()
    return seen


def loss_of(output: Any, data: torch.Tensor) -> torch.Tensor:
    """Return a scalar of what a model of the zoo returns."""
    output = getattr(output, "logits", output)
    output = output["logits"] if isinstance(output, dict) else output
    if output.dim() == 0:
        return output
    target = data if data.dtype is torch.long else data.new_zeros(len(data), dtype=torch.long)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def assert_the_same(play: Play) -> Seen:
    real, dry = trained(play, dry=False), trained(play, dry=True)
    assert dry.peaks == real.peaks
    for number, (there, here) in enumerate(zip(dry.events, real.events, strict=False)):
        assert there == here, f"event {number}"
    assert len(dry.events) == len(real.events)
    assert dry.seconds == real.seconds > 0
    return real


def gpt(**shape: Any) -> GPT:
    return GPT(GPTConfig(**{"width": 32, "layers": 6, "heads": 4, "context": 16, **shape}))


TOKENS = torch.zeros(2, 16, dtype=torch.long)


class WithTargets(nn.Module):
    """The GPT with its own loss."""

    def __init__(self, **shape: Any) -> None:
        super().__init__()
        self.gpt = gpt(**shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, tokens)


WAYS = [  # by default every way in fp32, and those that move most in bf16
    *(("fp32", way) for way in ("auto", "keep", "recompute", "offload")),
    *(("bf16", way) for way in ("auto", "offload")),
    *(pytest.param("bf16", way, marks=pytest.mark.slow) for way in ("keep", "recompute")),
]


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(("precision", "activations"), WAYS)
def test_the_runtime_moves_what_a_rehearsal_moved(precision: str, activations: str) -> None:
    model = WithTargets(checkpoint_blocks=False)
    settings = {"precision": precision, "activations": activations, "chunk_bytes": 1024}
    play = Play(model, TOKENS, {"hbm": 560_000, **settings})

    assert assert_the_same(play).evictions >= 3


@pytest.mark.parametrize(
    "frozen", ["int8", pytest.param("nf4", marks=pytest.mark.campaign(seconds=2))]
)
def test_codes_are_moved_as_they_were_rehearsed(frozen: str) -> None:
    model = WithTargets(checkpoint_blocks=False)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or "blocks.3" in name)
    play = Play(model, TOKENS, {"hbm": 560_000, "chunk_bytes": 1024, "frozen": frozen})

    assert assert_the_same(play).evictions >= 3


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("hbm", [190_000, 230_000, 300_000])
def test_at_any_budget(hbm: int) -> None:
    play = Play(WithTargets(), TOKENS, {"hbm": hbm, "chunk_bytes": 512})

    assert_the_same(play)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_rehearsed_as_it_runs(name: str) -> None:
    case = BY_NAME[name]
    torch.manual_seed(0)
    data = case.data(torch.Generator().manual_seed(0))

    assert_the_same(Play(case.build(), data, {"hbm": 200_000, "chunk_bytes": 256}))


def test_what_batch_norm_writes_is_kept_for_backward_in_a_rehearsal_too() -> None:
    case = BY_NAME["convolutional"]
    data = case.data(torch.Generator().manual_seed(0))
    settings = {"hbm": 200_000, "chunk_bytes": 256, "activations": "recompute"}

    assert_the_same(Play(case.build(), data, settings))
