"""Every optimizer with every flag: fp32 bit by bit, bf16 against masters that torch steps."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.optim import LAMB, LARS, AdamW8bit, Lion
from hetero.train import grads as gradients
from hetero.train import updater
from hetero.train.engine import Tuning
from hetero.train.rules import ELEMENTWISE, WHOLE_TENSOR
from hetero.train.worker import Worker
from tests.equivalence.harness import grads, same, values

O = torch.optim
Kind = type[O.Optimizer]
CHUNK_BYTES = 256
STEPS = 8
INF = float("inf")
# Groups of a block's parameters, in its order: most of them lie in one chunk of 64 elements.
GROUPS = (0, 1, 2, 0, 1, 2, 0, 0)
LR_FACTORS, DECAYS = (1.0, 0.5, 2.0), (None, 0.0, 0.05)


class Block(nn.Module):
    """Parameters of odd sizes: some share a chunk, some straddle three."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.shift = nn.Parameter(torch.randn(1))
        self.gate = nn.Parameter(torch.randn(3))
        self.spare = nn.Parameter(torch.randn(17, 1))  # used in some steps only
        self.table = nn.Parameter(torch.randn(5, 7) / 3)
        self.up = nn.Parameter(torch.randn(19, 7) / 3)
        self.down = nn.Parameter(torch.randn(7, 19) / 4)
        self.tail = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor, *, spare: bool) -> Tensor:
        y = torch.tanh(F.linear(x, self.up))
        if spare:
            y = torch.cat([y[:, :17] * self.spare.view(17), y[:, 17:]], 1)
        z = F.linear(y, self.down, self.tail) + F.linear(x, self.table) @ self.table
        z = torch.cat([z[:, :3] * self.gate, z[:, 3:]], 1)
        return x + (z * self.scale + self.shift) / 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, *, spare: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, spare=spare)
        return x


class Case(NamedTuple):
    """An optimizer and its flags; ``make`` gives it three groups with settings of their own."""

    kind: Kind
    flags: dict[str, Any]

    def __str__(self) -> str:
        shown = ",".join(f"{name}={value}" for name, value in self.flags.items())
        return f"{self.kind.__name__}({shown})"

    def net(self) -> Net:
        torch.manual_seed(5)
        net = Net()
        for param in net.parameters():
            param.requires_grad_(param.ndim == 2 or self.kind is not O.Muon)
        return net

    @property
    def misses(self) -> bool:
        """Whether parameters may miss steps: torch's fused SGD cannot begin a buffer later."""
        return not (self.kind is O.SGD and {"fused", "momentum"} <= set(self.flags))

    def uses_spare(self, number: int, part: int) -> bool:
        return not self.misses or (number % 3 == 1 and part != 1)

    def make(self, params: Iterator[nn.Parameter]) -> O.Optimizer:
        """``params`` are the net's, or what stands for them, in the net's order."""
        members: list[list[nn.Parameter]] = [[], [], []]
        for group, param in zip(itertools.cycle(GROUPS), params, strict=False):
            if param.requires_grad:
                members[group].append(param)
        groups: list[dict[str, Any]] = [{"params": m} for m in members if m]
        lr, decays = self.flags["lr"], "weight_decay" in inspect.signature(self.kind).parameters
        for group, factor, decay in zip(groups, LR_FACTORS, DECAYS, strict=True):
            group["lr"] = lr * factor  # a tensor of its own where it is one
            if decays and decay is not None:
                group["weight_decay"] = decay
        return self.kind(groups, **self.flags)


def tensor(value: float) -> Tensor:
    return torch.tensor(value)


def cases(kind: Kind, lr: float | None, *flag_sets: dict[str, Any]) -> list[Case]:
    return [Case(kind, {"lr": lr, **flags}) for flags in flag_sets]


SINGLE, FOREACH, FUSED, MAX = (
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"maximize": True},
)
DECAY, DECOUPLED = {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}
ADAM = (
    *({}, DECAY, MAX, {"amsgrad": True}, {"amsgrad": True, **MAX, **DECAY}, SINGLE, FOREACH, FUSED),
    *({**FUSED, "amsgrad": True, **MAX, **DECAY}, {**FOREACH, "amsgrad": True, **MAX, **DECAY}),
    *({"lr": tensor(0.02)}, {"lr": tensor(0.02), **FUSED}, {"betas": (0.0, 0.9), "eps": 1e-3}),
    {"lr": tensor(0.02), "betas": (tensor(0.8), tensor(0.9)), **SINGLE},
)
SCALED = ({}, DECAY, MAX, SINGLE, FOREACH, {**FOREACH, **DECAY, **MAX}, {"lr": tensor(0.02)})
RULES: dict[Kind, list[Case]] = {
    O.SGD: cases(
        *(O.SGD, 0.05, {}, DECAY, MAX, SINGLE, FOREACH, FUSED, {"momentum": 0.9}),
        *({"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True, **DECAY}),
        {"momentum": 0.9, "nesterov": True, **DECAY, **MAX, **FUSED},
        {"momentum": 0.9, "dampening": 0.3, **DECAY, **MAX, **FOREACH},
        *({"lr": tensor(0.05)}, {"lr": tensor(0.05), "momentum": 0.5, **FUSED}),
        *({"weight_decay": tensor(0.1), **SINGLE}, {"lr": tensor(0.05), **FOREACH}),
    ),
    O.Adam: cases(O.Adam, 0.02, *ADAM, DECOUPLED, {**DECOUPLED, **FUSED}),
    O.AdamW: cases(O.AdamW, 0.02, *ADAM),
    O.NAdam: cases(O.NAdam, 0.02, *SCALED, DECOUPLED, {"momentum_decay": 0.1, **FOREACH}),
    O.RAdam: cases(O.RAdam, 0.02, *SCALED, DECOUPLED, {"betas": (0.4, 0.6)}),
    O.Adamax: cases(O.Adamax, 0.02, *SCALED, {"betas": (0.2, 0.9), "eps": 1e-3}),
    O.Adagrad: cases(
        *(O.Adagrad, 0.05, *SCALED, FUSED, {"lr_decay": 0.1, **DECAY}),
        {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
        {"initial_accumulator_value": 0.5, "lr_decay": 0.1, **DECAY, **MAX, **FUSED},
    ),
    O.Adadelta: cases(O.Adadelta, 1.0, *SCALED, {"rho": 0.5, "eps": 1e-3}),
    O.RMSprop: cases(
        *(O.RMSprop, 5e-3, *SCALED, {"momentum": 0.9}, {"centered": True}),
        {"centered": True, "momentum": 0.5, "alpha": 0.6, **DECAY, **MAX},
        {"centered": True, "momentum": 0.5, "alpha": 0.3, **FOREACH},
    ),
    O.ASGD: cases(
        *(O.ASGD, 0.05, *SCALED, {"t0": 2.0, "lambd": 0.1}),
        *({"t0": 0.0, "alpha": 0.5, **DECAY, **MAX}, {"t0": 3.0, **FOREACH}),
    ),
    O.Rprop: cases(
        *(O.Rprop, 0.01, {}, MAX, SINGLE, FOREACH, {"lr": tensor(0.01)}),
        {"etas": (0.3, 1.7), "step_sizes": (5e-3, 2e-2)},
    ),
    Lion: cases(Lion, 0.01, {}, DECAY, MAX, {"betas": (0.2, 0.4)}, {"lr": tensor(0.01)}),
    O.Adafactor: cases(
        *(O.Adafactor, 0.02, *SCALED, {"d": 2.0}, {"beta2_decay": -0.5}),
        {"eps": (1e-6, 1e-2), **DECAY},
    ),
    O.Muon: cases(
        *(O.Muon, 0.02, {}, DECAY, {"nesterov": False}, {"momentum": 0.5, "ns_steps": 3}),
        *({"adjust_lr_fn": "match_rms_adamw"}, {"lr": tensor(0.02)}),
    ),
    LAMB: cases(
        *(LAMB, 0.02, {}, MAX, {"bias_correction": False}, {"max_trust_ratio": 0.5}),
        {"lr": tensor(0.02)},
    ),
    LARS: cases(
        *(LARS, 1.0, {}, MAX, {"momentum": 0.0}, {"nesterov": True, "trust_coefficient": 0.1}),
        *({"dampening": 0.3, "exclude_1d": False}, {"lr": tensor(1.0)}),
    ),
    AdamW8bit: cases(AdamW8bit, 0.02, {}, MAX, {"block_size": 7}, {"lr": tensor(0.02)}),
}
CASES = [case for found in RULES.values() for case in found]
RICHEST = [max(found, key=lambda case: len(case.flags)) for found in RULES.values()]
FEW = [
    Case(O.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    Case(O.AdamW, {"lr": 0.02, "amsgrad": True}),
    Case(O.Adam, {"lr": tensor(0.02), "fused": True}),
    Case(O.ASGD, {"lr": 0.05, "t0": 2.0}),
    Case(O.Adafactor, {"lr": 0.02}),
    Case(AdamW8bit, {"lr": 0.02, "block_size": 7}),
]


class Clip(NamedTuple):
    norm_type: float = 2.0
    max_norm: float = 0.05
    by_torch: bool = False
    """Whether torch's function clips ours, in place of the optimizer's method."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run goes about its steps."""

    micro: int = 1
    clip: Clip | None = None
    look: bool = True
    """Whether gradients, weights and states are looked at in every step."""


# -- fp32 ----------------------------------------------------------------------------------------


def data(number: int, part: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * number + part)).to(dtype)


def loss_of(model: nn.Module, number: int, part: int, *, spare: bool) -> Tensor:
    x = data(number, part, next(model.parameters()).dtype)
    return model(x, spare=spare).square().mean()


def halve_lr(optimizer: O.Optimizer) -> None:
    """As a scheduler does: tensors in place, while the update may still be to come."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5


def prepared(
    case: Case,
    *,
    device: Any = "cpu:sim",
    hbm: int | None = 14_000,
    tuning: Tuning | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    settings = {"chunk_bytes": CHUNK_BYTES, **settings}
    model = case.net()
    config = Config.load(device=device, hbm=hbm, **settings)
    return prepare_tuned(model, case.make(model.parameters()), config, tuning)


def train_both(plain: Any, ours: Any, way: Way, steps: range) -> int:
    """Train two (model, optimizer) side by side, bit by bit; return our evictions."""
    evictions = 0
    for number in steps:
        for part in range(way.micro):
            losses = [loss_of(model, number, part) for model, _ in (plain, ours)]
            same(*[[loss.detach()] for loss in losses], f"losses of step {number}")
            for loss in losses:
                (loss / way.micro).backward()
        if way.clip is not None:
            clip_both(plain, ours, way.clip, f"step {number}")
        if way.look:
            same(grads(plain[0]), grads(ours[0]), f"gradients of step {number}")
        for _, optimizer in (plain, ours):
            optimizer.step()
            if number == 3:
                halve_lr(optimizer)
            optimizer.zero_grad()
        if way.look:
            same(values(plain[0]), values(ours[0]), f"weights after step {number}")
        engine = engine_of(ours[0])
        assert engine.mode == "paged"
        evictions += engine.stats.counts["evict"] + engine.stats.counts["discard"]
    same(values(plain[0]), values(ours[0]), "weights")
    same_states(plain[1].state_dict(), ours[1].state_dict())
    return evictions


def clip_both(plain: Any, ours: Any, clip: Clip, what: str) -> None:
    """Clip torch's way and ours: the norms are equal, and larger than what is clipped to."""
    theirs = nn.utils.clip_grad_norm_(plain[0].parameters(), clip.max_norm, clip.norm_type)
    if clip.by_torch:
        norm = nn.utils.clip_grad_norm_(ours[0].parameters(), clip.max_norm, clip.norm_type)
    else:
        norm = ours[1].clip_grad_norm_(clip.max_norm, clip.norm_type)
    assert float(theirs) > clip.max_norm, f"{what}: nothing to clip"
    same([theirs], [norm], f"{what}: norms")


def same_states(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    """State dicts key by key, in torch's order; a state without entries may be left out."""
    state = {number: entries for number, entries in plain["state"].items() if entries}
    assert list(plain) == list(ours) and list(state) == list(ours["state"])
    for number, entries in state.items():
        assert list(entries) == list(ours["state"][number]), number
        for key, value in entries.items():
            other = ours["state"][number][key]
            assert type(value) is type(other), (number, key)
            if isinstance(value, Tensor):
                same([value], [other], f"state {key!r} of parameter {number}")
            else:
                assert value == other, (number, key)
    assert len(plain["param_groups"]) == len(ours["param_groups"])
    for left, right in zip(plain["param_groups"], ours["param_groups"], strict=True):
        assert left == right and list(left) == list(right)


def compare(case: Case, way: Way, *, seed: int = 3) -> None:
    """Train plain and prepared; the spare parameters' steps count only where they were used."""
    model = case.net()
    plain = (model, case.make(model.parameters()))
    ours = prepared(case, device=SimDevice(seed=seed))
    assert train_both(plain, ours, way, range(STEPS)) >= 3
    used = sum(any(uses_spare(n, part) for part in range(way.micro)) for n in range(STEPS))
    state = ours[1].state[ours[0].blocks[1].spare]
    assert used < STEPS and float(state.get("step", used)) == used


CLIPS = [Clip(n, m, t) for n, m in ((2.0, 0.05), (INF, 0.01), (1.5, 0.1)) for t in (False, True)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_every_flag_set_steps_bitwise_cut_at_every_chunk_border(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updater, "RULE_NUMEL", 1)
    way = Way(micro=3, clip=CLIPS[number % len(CLIPS)])
    compare(CASES[number], way, seed=number)


@pytest.mark.parametrize("case", RICHEST, ids=str)
def test_steps_that_nobody_looks_at_are_the_same(case: Case) -> None:
    compare(case, Way(micro=2, clip=Clip(), look=False))


@pytest.mark.parametrize("clip", [None, *CLIPS], ids=str)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_clips_and_micro_steps_change_no_bit(case: Case, micro: int, clip: Clip | None) -> None:
    compare(case, Way(micro=micro, clip=clip))


def test_every_supported_optimizer_is_tried() -> None:
    assert set(RULES) == {*ELEMENTWISE, *WHOLE_TENSOR}


@pytest.mark.parametrize(
    "kind", [k for k in RULES if "capturable" in inspect.signature(k).parameters]
)
def test_capturable_is_refused_on_a_cpu_as_torch_refuses_it(kind: Kind) -> None:
    case = Case(kind, {"lr": 0.01, "capturable": True})
    model = case.net()
    plain = case.make(model.parameters())
    loss_of(model, 0, 0).backward()
    with pytest.raises(AssertionError, match="capturable"):
        plain.step()
    with pytest.raises(AssertionError, match="capturable"):
        prepared(case)


# -- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RICHEST, ids=str)
def test_a_torch_run_goes_on_prepared_bitwise(case: Case) -> None:
    model = case.net()
    plain = (model, case.make(model.parameters()))
    for number in range(3):
        loss_of(model, number, 0).backward()
        plain[1].step()
        plain[1].zero_grad()
    saved = copy.deepcopy((model.state_dict(), plain[1].state_dict()))
    ours = prepared(case)
    ours[0].load_state_dict(saved[0])
    ours[1].load_state_dict(saved[1])
    same_states(plain[1].state_dict(), ours[1].state_dict())
    train_both(plain, ours, Way(clip=Clip()), range(3, STEPS))


@pytest.mark.parametrize("case", RICHEST, ids=str)
def test_a_prepared_run_goes_on_in_torch_bitwise(case: Case) -> None:
    ours = prepared(case)
    for number in range(3):
        loss_of(ours[0], number, 0).backward()
        ours[1].step()
        ours[1].zero_grad()
    saved = copy.deepcopy((ours[0].state_dict(), ours[1].state_dict()))
    model = case.net()
    plain = (model, case.make(model.parameters()))
    model.load_state_dict(saved[0])
    plain[1].load_state_dict(saved[1])
    same_states(plain[1].state_dict(), ours[1].state_dict())
    train_both(plain, ours, Way(clip=Clip()), range(3, STEPS))
