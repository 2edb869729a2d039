"""Activations: what is held for backward, and what slices and fused heads save."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.engine import Figure, Figures, adamw, timed, virtual
from benchmarks.paging import paged_of
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import BudgetError
from hetero.functional.loss import linear_cross_entropy
from hetero.recipes.gpt import GPT, Block, GPTConfig
from hetero.train.activations.meter import LiveBytes
from hetero.types import Lane

ROUNDS = 3
BLOCKS, CONTEXT, SAMPLES = 12, 256, 4
TOKENS, VOCABULARY, WIDTH = 8192, 32768, 512


def peak_of(act: Callable[[], Any], known: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that an act's operations have alive at once, at most."""
    tracer = LiveBytes(known)
    with tracer:
        act()
    return tracer.peak


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and gradients, which are there before a step and after it."""
    return [t for p in model.parameters() for t in (p, p.grad) if t is not None]


def activations(device: str | None = None) -> Figures:
    """Peak bytes of a 12-block GPT's forward and backward under each policy."""
    shape = GPTConfig(width=256, layers=BLOCKS, heads=8, context=CONTEXT, checkpoint_blocks=False)
    tokens = torch.randint(0, 256, (SAMPLES, CONTEXT))
    torch.manual_seed(0)
    plain = GPT(shape)
    peaks, seconds = {}, {}
    moved = {}
    for policy in ("keep", "recompute", "offload"):
        model: Any = copy.deepcopy(plain)
        config = Config.load(device="cpu", activations=policy)
        model, _ = prepare_tuned(model, adamw(model), config, None)
        step = partial(forward_backward, model, tokens)
        step()
        counts = engine_of(model).setup.offload.store.link.n_bytes
        counts.clear()
        peaks[policy] = peak_of(step, held(model))
        moved[policy] = counts[Lane.D2H]
        seconds[policy] = statistics.median(timed(step) for _ in range(2 * ROUNDS))
    # what recomputation cannot do without: the input of each block and of the head, the state of
    # the generator at each block, and one block
    border = SAMPLES * CONTEXT * shape.width * 4 + torch.get_rng_state().nbytes
    one = unit_bytes(Block(shape), torch.randn(SAMPLES, CONTEXT, shape.width))
    bound = (BLOCKS + 1) * border + one
    # offload has nothing else on the device than one unit and the one on its way beside it
    rows = [
        Figure("recompute / (border inputs + one unit)", peaks["recompute"] / bound, "", "<=", 1.0),
        Figure("offload / two units", peaks["offload"] / (2 * one), "", "<=", 1.0),
    ]
    detail = {
        "peak_bytes": peaks,
        "border_bytes": (BLOCKS + 1) * border,
        "unit_bytes": one,
        "offloaded_bytes": moved["offload"],
        "step, recompute / keep": seconds["recompute"] / seconds["keep"],
        "step, offload / keep": seconds["offload"] / seconds["keep"],
    }
    return Figures(rows, detail)


def forward_backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens, tokens).backward()


def unit_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Return the peak of one block's forward and backward."""
    x.requires_grad_()

    def act() -> None:
        block(x).sum().backward()
        x.grad = None

    act()
    return peak_of(act, [*held(block), x])


# -- micro-batches -------------------------------------------------------------------------------


UNITS, SLICES, FEATURES = 12, 16, 64
UNIT_BYTES = 4 * FEATURES * FEATURES
SLOWNESS = 4.0  # a unit's transfer over its forward on one micro-batch


class Computes(torch.autograd.Function):
    """Advances the modelled clock by a second a sample, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: SimDevice) -> torch.Tensor:
        ctx.device = device
        device.compute(len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.device.compute(len(grads[0]))
        return grads[0], None


class Modelled(nn.Module):
    """A linear unit on a modelled device."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = Computes.apply(x, self.device)  # type: ignore[no-untyped-call]
        return torch.tanh(self.linear(computed))


class Stepped(NamedTuple):
    """Seconds of a step on the virtual clock, and how often each weight was fetched."""

    seconds: float
    fetches: float


def micro_batch(device: str | None = None) -> Figures:
    """A slow modelled link and 16 micro-batches: layer-major over plain gradient accumulation."""
    sliced, classic = stepped(sliced=True), stepped(sliced=False)
    ratio = sliced.seconds / classic.seconds
    rows = [
        Figure("step, sliced / accumulated", ratio, "ratio", "<=", 0.5),
        Figure("fetches of a weight in a step", sliced.fetches, "", "<=", 2.0),
    ]
    detail = {
        "clock": "virtual",
        "transfer / forward of one micro-batch": SLOWNESS,
        "sliced": sliced._asdict(),
        "accumulated": classic._asdict(),
    }
    return Figures(rows, detail)


def stepped(*, sliced: bool) -> Stepped:
    """Return a planned step with frames for a quarter of the weights."""
    rate = UNIT_BYTES / SLOWNESS
    place = SimDevice(
        seed=1, h2d_bytes_per_second=rate, d2h_bytes_per_second=rate, shared_link=True
    )
    step = partial(modelled_step, torch.randn(SLICES, FEATURES), sliced=sliced)
    size = 1 if sliced else None
    wide = SimDevice()
    probe, optimizer = modelled_model(wide, size, 1 << 30)
    model_bytes = UNITS * UNIT_BYTES
    run_backward(probe, torch.randn(SLICES, FEATURES), sliced=sliced)
    hbm = model_bytes // 4 + paged_of(probe).hbm.activations_seen()
    model, optimizer = modelled_model(place, size, hbm)
    engine = engine_of(model)
    seen = []
    for _ in range(6):
        start = place.now()
        step(model, optimizer)
        fetched = engine.setup.stats.n_bytes[Lane.H2D] / model_bytes
        seen.append((place.now() - start, fetched))
    return Stepped(*(statistics.median(column) for column in zip(*seen[2:], strict=True)))


def modelled_model(place: SimDevice, size: int | None, hbm: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Modelled(place) for _ in range(UNITS)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = Config.load(
        device=place, hbm=hbm, chunk_bytes=4096, micro_batch=size, activations="keep"
    )
    model, optimizer = prepare_tuned(model, optimizer, config, virtual())
    return model, optimizer


def modelled_step(x: torch.Tensor, model: nn.Module, optimizer: Any, *, sliced: bool) -> None:
    run_backward(model, x, sliced=sliced)
    optimizer.step()
    optimizer.zero_grad()


def run_backward(model: nn.Module, x: torch.Tensor, *, sliced: bool) -> None:
    for part in [x] if sliced else x.split(1):
        model(part.clone().requires_grad_()).sum().backward()


# -- the head ------------------------------------------------------------------------------------


def loss(device: str | None = None) -> Figures:
    """Peak memory and time of the fused head over an eager one: 8k tokens, 32k vocabulary."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,))

    def eager() -> None:
        logits = F.linear(hidden, weight)
        F.cross_entropy(logits, labels).backward()
        hidden.grad = weight.grad = None

    def fused() -> None:
        linear_cross_entropy(hidden, weight, labels).backward()
        hidden.grad = weight.grad = None

    known = [hidden, weight, labels]
    peaks = [peak_of(act, known) for act in (fused, eager)]
    ratios = []
    for number in range(ROUNDS):
        sides = (fused, eager)
        took = {s: timed(sides[s]) for s in ((0, 1) if number % 2 else (1, 0))}
        ratios.append(took[0] / took[1])
    rows = [
        Figure("peak memory, fused / eager", peaks[0] / peaks[1], "ratio", "<=", 0.15),
        Figure("time, fused / eager", statistics.median(ratios), "ratio", "<=", 1.15),
    ]
    detail = {
        "peak_bytes": {"fused": peaks[0], "eager": peaks[1]},
        "ratios": ratios,
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "width": WIDTH,
    }
    return Figures(rows, detail)


# -- context -------------------------------------------------------------------------------------


DEEP, STATES = 8, 1.25  # the budget, over the bytes that plain torch keeps of states
TILE = 256
GRID = 64  # positions; contexts are multiples of it
CONTEXT_STEPS = 3
HOPED = 8.0  # times plain torch's longest context


def context(device: str | None = None) -> Figures:
    """The longest sequence of a small GPT in a fixed budget: hetero over plain torch, which
    checkpoints its blocks."""
    shape = GPTConfig(width=128, layers=DEEP, heads=4, context=GRID)
    budget = int(STATES * 16 * sum(p.numel() for p in GPT(shape).parameters()))
    # 1. plain torch: parameters, gradients and two moments, and what a step makes besides
    plain = longest(lambda length: fits_plain(replace(shape, context=length), budget), GRID, GRID)
    # 2. hetero, on a device that counts every allocation and refuses what passes the budget
    step = max(GRID, plain // 2 // GRID * GRID)
    ours = longest(
        lambda length: fits_ours(replace(shape, context=length), budget),
        step,
        int(HOPED * plain),
    )
    rows = [Figure("longest context, hetero / plain", ours / plain, "", ">=", HOPED)]
    detail = {
        "budget_bytes": budget,
        "plain": plain,
        "hetero": ours,
        "settings": {"activations": "auto", "tile": TILE},
        "seconds of a step at hetero's": timed(
            partial(fits_ours, replace(shape, context=ours), budget)
        )
        / CONTEXT_STEPS,
    }
    return Figures(rows, detail)


def longest(fits: Callable[[int], bool], step: int, first: int) -> int:
    """Return the largest multiple of ``step`` that fits, looking up or down from ``first`` on."""
    found = first // step
    if fits(found * step):
        while fits((found + 1) * step):
            found += 1
        return found * step
    while found > 1:
        found -= 1
        if fits(found * step):
            return found * step
    return 0


def fits_plain(shape: GPTConfig, budget: int) -> bool:
    """Whether a step of plain torch stays within a budget, its states included."""
    model = GPT(shape)
    optimizer = adamw(model)
    tokens = torch.randint(0, 256, (1, shape.context))
    forward_backward(model, tokens)
    optimizer.step()
    states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    known = [*held(model), *states]
    peak = peak_of(partial(forward_backward, model, tokens), known)
    return bool(sum(t.nbytes for t in known) + peak <= budget)


def fits_ours(shape: GPTConfig, budget: int) -> bool:
    """Whether a few steps pass on a simulated device of this size."""
    model: Any = GPT(replace(shape, checkpoint_blocks=False))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = Config.load(device=SimDevice(), hbm=budget, tile=TILE)
    model, optimizer = prepare_tuned(model, optimizer, config, None)
    tokens = torch.randint(0, 256, (1, shape.context))
    try:
        for _ in range(CONTEXT_STEPS):
            forward_backward(model, tokens)
            optimizer.step()
            optimizer.zero_grad()
    except BudgetError:
        return False
    return True
