"""Every optimizer with every flag: fp32 bit by bit, bf16 against masters that torch steps."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.optimization import Adafactor

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.jobs import Worker
from hetero.optim import LAMB, LARS, AdamW8bit, Lion
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients import store as gradients
from hetero.train.update import arithmetic, draft, kernel
from hetero.train.update.rules import ELEMENTWISE, WHOLE_TENSOR
from tests.campaigns import optimizers
from tests.equivalence.harness import grads, same, values
from tests.train.test_precision import rounded

O = torch.optim
Kind = type[O.Optimizer]
CHUNK_BYTES = 256
BLOCKS, STEPS = 2, 6
TOLERANCE = 1e-5
INF = float("inf")
# Groups of a block's parameters, in its order: all three meet in the first chunk of 64 elements,
# and neighbours of one group are stepped together, unless one of them missed a step.
GROUPS = (0, 1, 2, 0, 0, 2, 1, 1)
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
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, *, spare: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, spare=spare)
        return x


class Case(NamedTuple):
    """An optimizer and its flags; ``make`` gives it three groups with settings of their own."""

    kind: Kind
    flags: dict[str, Any]

    def __str__(self) -> str:
        shown = ",".join(f"{name}={value!r}" for name, value in self.flags.items())
        return f"{self.kind.__name__}({shown})"

    def net(self) -> Net:
        torch.manual_seed(5)
        net = Net()
        for param in net.parameters():
            param.requires_grad_(param.ndim == 2 or self.kind is not O.Muon)
        return net

    @property
    def steps(self) -> int:
        return STEPS + 2 * (self.kind is O.RAdam)  # it rectifies from its sixth step on

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


def richest(found: list[Case]) -> list[Case]:
    """Return the cases with most flags, one that torch fuses and one that it does not."""
    fused, other = ([c for c in found if ("fused" in c.flags) is f] for f in (True, False))
    return [max(some, key=lambda case: len(case.flags)) for some in (fused, other) if some]


RICHEST = [case for found in RULES.values() for case in richest(found)]
FEW = [
    Case(O.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    Case(O.AdamW, {"lr": 0.02, "amsgrad": True}),
    Case(O.Adam, {"lr": tensor(0.02), "fused": True}),
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
    hbm: int | None = 7_000,
    tuning: Tuning | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    model = case.net()
    settings = {"chunk_bytes": CHUNK_BYTES, "activations": "keep", **settings}
    config = Config.load(device=device, hbm=hbm, **settings)
    return prepare_tuned(model, case.make(model.parameters()), config, tuning)


def plain(case: Case) -> tuple[Any, Any]:
    model = case.net()
    return model, case.make(model.parameters())


def backward(case: Case, model: nn.Module, number: int, micro: int = 1) -> list[Tensor]:
    losses = []
    for part in range(micro):
        loss = loss_of(model, number, part, spare=case.uses_spare(number, part))
        (loss / micro).backward()
        losses.append(loss.detach())
    return losses


def step(optimizer: O.Optimizer, number: int) -> None:
    optimizer.step()
    if number == 3:
        halve_lr(optimizer)
    optimizer.zero_grad()


def evicted(model: nn.Module) -> int:
    """How often the last step dropped a copy to make room; the model must be paged."""
    engine = engine_of(model)
    assert engine.residence.name == "paged" and engine.setup.blueprint.layout.n_chunks >= 5
    return engine.setup.stats.counts["evict"] + engine.setup.stats.counts["discard"]


def train_both(case: Case, theirs: Any, ours: Any, way: Way, steps: range) -> None:
    """Train two (model, optimizer) side by side, bit by bit; ours evicts in every step."""
    for number in steps:
        losses = [backward(case, model, number, way.micro) for model, _ in (theirs, ours)]
        same(*losses, f"losses of step {number}")
        if way.clip is not None:
            clip_both(theirs, ours, way.clip, f"step {number}")
        if way.look:
            same(grads(theirs[0]), grads(ours[0]), f"gradients of step {number}")
        step(theirs[1], number)
        step(ours[1], number)
        if way.look:
            same(values(theirs[0]), values(ours[0]), f"weights after step {number}")
        assert evicted(ours[0]) >= 3
    same(values(theirs[0]), values(ours[0]), "weights")
    same_states(theirs[1].state_dict(), ours[1].state_dict())


def clip_both(theirs: Any, ours: Any, clip: Clip, what: str) -> None:
    """Clip torch's way and ours: the norms are equal, and larger than what is clipped to."""
    expected = nn.utils.clip_grad_norm_(theirs[0].parameters(), clip.max_norm, clip.norm_type)
    if clip.by_torch:
        norm = nn.utils.clip_grad_norm_(ours[0].parameters(), clip.max_norm, clip.norm_type)
    else:
        norm = ours[1].clip_grad_norm_(clip.max_norm, clip.norm_type)
    assert float(expected) > clip.max_norm, f"{what}: nothing to clip"
    same([expected], [norm], f"{what}: norms")


def same_states(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """State dicts key by key, in torch's order; a state without entries may be left out."""
    state = {number: entries for number, entries in theirs["state"].items() if entries}
    assert list(theirs) == list(ours) and list(state) == list(ours["state"])
    for number, entries in state.items():
        assert list(entries) == list(ours["state"][number]), number
        for key, value in entries.items():
            other = ours["state"][number][key]
            assert type(value) is type(other), (number, key)
            if isinstance(value, Tensor):
                same([value], [other], f"state {key!r} of parameter {number}")
            else:
                assert value == other, (number, key)
    for left, right in zip(theirs["param_groups"], ours["param_groups"], strict=True):
        assert left == right and list(left) == list(right)


def compare(case: Case, way: Way, *, seed: int = 3) -> None:
    """Train plain and prepared; the spare parameters' steps count only where they were used."""
    ours, steps = prepared(case, device=SimDevice(seed=seed)), range(case.steps)
    train_both(case, plain(case), ours, way, steps)
    used = [any(case.uses_spare(n, part) for part in range(way.micro)) for n in steps]
    state = ours[1].state[ours[0].blocks[1].spare]
    assert all(used) is not case.misses
    assert float(state.get("step", sum(used))) == sum(used)


CLIPS = [Clip(n, m, t) for n, m in ((2.0, 0.05), (INF, 0.01), (1.5, 0.1)) for t in (False, True)]


every_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[str(c) for c in CASES])
PIECES = [1, 256, 1024]  # elements; the first cuts at every chunk border


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("numel", PIECES)
@every_case
def test_every_flag_set_steps_bitwise_cut_at_chunk_borders(
    number: int, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "RULE_NUMEL", numel)
    way = Way(micro=2, clip=CLIPS[number % len(CLIPS)])
    compare(CASES[number], way, seed=number)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("case", RICHEST, ids=str)
def test_steps_that_nobody_looks_at_are_the_same(case: Case) -> None:
    compare(case, Way(micro=2, clip=Clip(), look=False))


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("way", [Way(), Way(micro=3), *(Way(clip=clip) for clip in CLIPS)], ids=str)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_micro_steps_alone_and_clips_alone_change_no_bit(case: Case, way: Way) -> None:
    compare(case, way)


def test_every_supported_optimizer_is_tried() -> None:
    assert set(RULES) == {*ELEMENTWISE, *WHOLE_TENSOR}


@pytest.mark.parametrize(
    "kind", [k for k in RULES if "capturable" in inspect.signature(k).parameters]
)
def test_capturable_is_refused_on_a_cpu_in_torchs_words(kind: Kind) -> None:
    case = Case(kind, {"lr": 0.01, "capturable": True})
    model, optimizer = plain(case)
    backward(case, model, 0)
    for refused in (optimizer.step, lambda: prepared(case)):
        with pytest.raises(AssertionError, match="If capturable=True, params"):
            refused()


# -- state dicts ---------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("into", ["hetero", "torch"])
@pytest.mark.parametrize("case", RICHEST, ids=str)
def test_a_state_dict_goes_on_bitwise_on_the_other_side(case: Case, into: str) -> None:
    sides = {"torch": plain(case), "hetero": prepared(case)}
    theirs, ours = sides["torch"], sides["hetero"]
    model, optimizer = theirs if into == "hetero" else ours
    for number in range(3):
        backward(case, model, number)
        step(optimizer, number)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for part, state in zip(sides[into], saved, strict=True):
        part.load_state_dict(state)
    same(values(theirs[0]), values(ours[0]), "loaded weights")
    same_states(theirs[1].state_dict(), ours[1].state_dict())
    train_both(case, theirs, ours, Way(clip=Clip()), range(3, case.steps))


# -- bf16 ----------------------------------------------------------------------------------------

# Flags that name another implementation in torch name the same formula here.
ARITHMETIC = [
    case for kind in ELEMENTWISE for case in RULES[kind] if not {"foreach", "fused"} & {*case.flags}
]
WHOLE = [case for kind in WHOLE_TENSOR for case in RULES[kind]]
SMALL_BYTES = 4_000
CLIP = 0.05


class Reference:
    """A bf16 net whose fp32 masters and fp32 sums torch's optimizer steps."""

    def __init__(self, case: Case) -> None:
        self.case, self.net = case, case.net()
        self.params = list(self.net.parameters())
        self.masters = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.params]
        self.optimizer = case.make(iter(self.masters))
        self.round()

    def round(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            param.data = rounded(master.view(-1), "bf16").view(master.shape)

    def backward(self, number: int, micro: int) -> list[Tensor]:
        """Sum the gradients of the micro-steps in fp32."""
        losses = []
        for part in range(micro):
            spare = self.case.uses_spare(number, part)
            loss = loss_of(self.net, number, part, spare=spare)
            (loss / micro).backward()
            losses.append(loss.detach())
            for param, master in zip(self.params, self.masters, strict=True):
                if param.grad is not None:
                    grad = param.grad.float()
                    master.grad = grad if master.grad is None else master.grad + grad
                    param.grad = None
        return losses

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.masters, CLIP)


def masters_of(model: nn.Module) -> list[Tensor]:
    """What training keeps exactly: fp32 masters, the weights themselves without."""
    engine = engine_of(model)
    engine.finish()
    if not engine.setup.has_masters:
        return values(model)
    return [
        engine.setup.masters.value(segment) for _, segment in engine.setup.blueprint.layout.home
    ]


def train_beside(reference: Reference, ours: Any, *, steps: int, follow: bool) -> None:
    """Losses and norms are equal; with ``follow`` the reference takes our working weights."""
    case, micro = reference.case, 2
    for number in range(steps):
        if follow:
            for param, value in zip(reference.params, values(ours[0]), strict=True):
                param.data = value
        losses = [reference.backward(number, micro), backward(case, ours[0], number, micro)]
        same(*losses, f"losses of step {number}")
        same([reference.clip()], [ours[1].clip_grad_norm_(CLIP)], f"norms of step {number}")
        step(reference.optimizer, number)
        step(ours[1], number)
        reference.round()
        assert evicted(ours[0]) >= 3


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("case", ARITHMETIC, ids=str)
def test_bf16_masters_stay_close_to_those_torch_steps(case: Case) -> None:
    """Both start from the same gradients; torch fuses here and there what the formulas round.

    A rounding is 2^-24 of its operands: ten of them in each of at most eight steps are under 1e-5
    of the largest element, also where terms cancel in a small one. The largest measured is 2e-6,
    in a centered RMSprop, whose variance is a difference.
    """
    reference, ours = Reference(case), prepared(case, hbm=SMALL_BYTES, precision="bf16")
    train_beside(reference, ours, steps=case.steps, follow=True)
    start = case.net().parameters()
    for first, ours_now, theirs in zip(start, masters_of(ours[0]), reference.masters, strict=True):
        close(ours_now, theirs.detach())
        assert not torch.equal(ours_now, first)
    left, right = reference.optimizer.state_dict()["state"], ours[1].state_dict()["state"]
    assert {k: list(v) for k, v in left.items() if v} == {k: list(v) for k, v in right.items()}
    for number, key in ((n, k) for n, state in right.items() for k in state):
        close(right[number][key], left[number][key])


def close(ours: Tensor, theirs: Tensor) -> None:
    atol = TOLERANCE * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=atol)


UNKNOWN = [
    Case(optimizers.Lamb, {"lr": 0.02, "max_grad_norm": None}),
    Case(optimizers.AdamP, {"lr": 0.02}),
    Case(optimizers.Clipping, {"lr": 0.02}),
    Case(Adafactor, {"lr": 0.02, "relative_step": False, "beta1": 0.9}),
]


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_rules_that_hetero_does_not_know_step_fp32_masters_bitwise(case: Case) -> None:
    check_whole_on_masters(case)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole_tensor_rules_step_fp32_masters_bitwise(case: Case) -> None:
    check_whole_on_masters(case)


def check_whole_on_masters(case: Case) -> None:
    reference, ours = Reference(case), prepared(case, hbm=SMALL_BYTES, precision="bf16")
    train_beside(reference, ours, steps=case.steps, follow=False)
    same([p.detach() for p in reference.params], values(ours[0]), "working weights")
    pairs = zip(reference.masters, masters_of(ours[0]), strict=True)
    kept = [(m.detach(), own) for m, own in pairs if m.requires_grad]  # frozen ones are rounded
    same(*(list(side) for side in zip(*kept, strict=True)), "masters")
    state = ours[1].state_dict()
    assert len(state.pop("masters")) == len(kept)
    same_states(reference.optimizer.state_dict(), state)


PLACEMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cpu": lambda: {"device": "cpu"},
    "sim": lambda: {"device": SimDevice(seed=1)},
    "checked": lambda: {"device": SimDevice(seed=2, checked=True)},
    "becomes resident": lambda: {"hbm": 100_000},
    "blocks": lambda: {"tuning": Tuning(native=False)},
    "synchronous": lambda: {"tuning": Tuning(worker=Worker(0))},
    "smallest chunks": lambda: {"chunk_bytes": 64},
    "smallest chunks of blocks": lambda: {"chunk_bytes": 64, "tuning": Tuning(native=False)},
    "one chunk a bucket": lambda: {"chunk_bytes": 4096, "hbm": 7_000},
}


def outcome(case: Case, **settings: Any) -> tuple[list[Tensor], dict[str, Any], int]:
    """Train in bf16; return weights and masters, the state dict, and the evictions."""
    settings = {"hbm": SMALL_BYTES, **settings}
    model, optimizer = prepared(case, precision="bf16", **settings)
    evictions = 0
    for number in range(5):
        backward(case, model, number, 2)
        optimizer.clip_grad_norm_(CLIP)
        step(optimizer, number)
        counts = engine_of(model).setup.stats.counts
        evictions += counts["evict"] + counts["discard"]
    state = copy.deepcopy(optimizer.state_dict())
    return [*values(model), *masters_of(model)], state, evictions


RICH = [sorted(RULES[kind], key=lambda c: len(c.flags))[-2:] for kind in ELEMENTWISE]


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("number", range(len(RICH)), ids=[str(pair[1]) for pair in RICH])
def test_bf16_bits_do_not_depend_on_placement(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the placements each: every placement meets a third of the optimizers."""
    check_placements(RICH[number][1], [*PLACEMENTS][number % 3 :: 3], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for pair in RICH for case in pair], ids=str)
def test_bf16_bits_do_not_depend_on_any_placement(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_placements(case, [*PLACEMENTS], monkeypatch)


def check_placements(case: Case, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, state, _ = outcome(case, device="cpu", hbm=None)
    monkeypatch.setattr(arithmetic, "KERNEL_NUMEL", 1)  # a slice ends at every chunk border
    monkeypatch.setattr(kernel, "SHARED_NUMEL", 7)
    for name in names:
        found, states, evictions = outcome(case, **PLACEMENTS[name]())
        same(expected, found, name)
        lows = [list(s.pop("masters").values()) for s in (copy.copy(state), states)]
        same(*lows, f"{name}: what weights leave of masters")
        same_states({k: v for k, v in state.items() if k != "masters"}, states)
        assert evictions >= 3, name


# -- factors -------------------------------------------------------------------------------------


class Slopes(nn.Module):
    """Its loss is linear in its parameters, which are zero: gradients and updates are exact."""

    sizes = ((), (1,), (3,), (17,), (5, 7), (19, 7))

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.ParameterList(torch.zeros(s) for s in self.sizes) for _ in range(3))
        self.blocks = nn.ModuleList(Slope(block) for block in blocks)

    def forward(self, slopes: list[Tensor]) -> Tensor:
        rest = iter(slopes)
        return torch.stack([block(rest) for block in self.blocks]).sum()


class Slope(nn.Module):
    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, slopes: Iterator[Tensor]) -> Tensor:
        return torch.stack([(p * next(slopes)).sum() for p in self.params]).sum()


def slopes_of(number: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(s, generator=generator).to(dtype) for _ in range(3) for s in Slopes.sizes]


def check_factors(
    precision: str, *, micro: int, max_norm: float | None, hbm: int | None, divisor: int = 0
) -> None:
    """Gradients and steps of SGD with lr=1 are the slopes times 1/micro and the clip's factor."""
    model = Slopes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = hetero.prepare(  # a unit that draws from an iterator cannot run twice
        *(model, optimizer),
        device="cpu:sim",
        hbm=hbm,
        precision=precision,
        chunk_bytes=256,
        activations="keep",
    )
    dtype = next(model.parameters()).dtype
    if precision == "fp16":
        engine_of(model).scaler.scale = 2.0**8
    for number in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        scale = optimizer.loss_scale
        expected = [torch.zeros(s) for _ in range(3) for s in Slopes.sizes]
        for part in range(micro):
            slopes = slopes_of(10 * number + part, dtype)
            hetero.backward(model(slopes) / (divisor or micro))
            for total, slope in zip(expected, slopes, strict=True):
                total += (slope * torch.tensor(scale / micro, dtype=dtype)).float() / scale
        if max_norm is not None:
            norms = torch.stack([torch.linalg.vector_norm(total) for total in expected])
            norm = torch.linalg.vector_norm(norms)
            assert norm > max_norm
            assert torch.equal(optimizer.clip_grad_norm_(max_norm), norm), "norm"
            for total in expected:
                total *= max_norm / (norm + 1e-6)
        shown = [p.grad.clone() for p in model.parameters()]
        same([total.to(dtype) for total in expected], shown, "gradients")
        optimizer.step()
        optimizer.zero_grad()
        same(expected, [0.0 - after for after in masters_of(model)], "updates")


BUDGETS = {"paged": 9_000, "resident": None}
scenes = pytest.mark.parametrize(
    ("micro", "max_norm"), [(1, None), (1, 0.5), (3, None), (4, 0.5), (3, 0.5)]
)


@pytest.mark.campaign(seconds=1.5)
@scenes
@pytest.mark.parametrize("place", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_is_the_gradient_times_its_factors(
    precision: str, place: str, micro: int, max_norm: float | None
) -> None:
    check_factors(precision, micro=micro, max_norm=max_norm, hbm=BUDGETS[place])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_forgotten_clip_would_be_noticed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "numbers_of", lambda factors: [() for _ in factors])
    with pytest.raises(AssertionError, match="updates"):
        check_factors(precision, micro=1, max_norm=0.5, hbm=BUDGETS["paged"])


def test_a_forgotten_loss_scale_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "numbers_of", lambda factors: [() for _ in factors])
    with pytest.raises(AssertionError, match="updates"):
        check_factors("fp16", micro=1, max_norm=None, hbm=BUDGETS["paged"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_forgotten_micro_step_would_be_noticed(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients.GradStore, "accumulate", lambda *_: True)
    with pytest.raises(AssertionError, match="gradients"):
        check_factors(precision, micro=3, max_norm=None, hbm=BUDGETS["paged"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_forgotten_division_by_micro_steps_would_be_noticed(precision: str) -> None:
    with pytest.raises(AssertionError, match="gradients"):
        check_factors(precision, micro=3, max_norm=None, hbm=BUDGETS["paged"], divisor=1)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [O.LBFGS, O.SparseAdam])
def test_other_optimizers_are_refused_by_name_with_the_alternatives(kind: Kind) -> None:
    model = Net()
    before = values(model)
    with pytest.raises(hetero.ConfigError, match=f"{kind.__name__} is not supported") as found:
        hetero.prepare(model, kind(model.parameters()), device="cpu")
    assert all(alternative.__name__ in str(found.value) for alternative in RULES)
    same(before, values(model), "a refused model")
    assert all(type(p) is nn.Parameter for p in model.parameters())
