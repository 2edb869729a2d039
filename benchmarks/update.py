"""The updater: bandwidth, what a peer's passes cost, overlap, bytes a parameter."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.engine import Figure, Figures, adamw, timed
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import CpuDevice, Ticket
from hetero.jobs import Worker
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.work import Split
from hetero.train.engine.engine import Engine
from hetero.train.engine.tuning import Tuning
from hetero.train.update.device_kernel import conditions, native_on
from hetero.types import Lane, Tier

NUMEL = 32 * 2**20
SPLIT_BYTES = (
    26  # read and written a parameter: gradient 2, weight 2 + 2, rest 2 + 2, moments 8 + 8
)
AXPY_BYTES = 12
ROUNDS = 7
PAUSE_SECONDS = 0.02  # OpenMP's threads spin for a while after their last work


class Casts:
    """AdamW in fp32 by torch's fused kernel, with a cast up and a cast down around it."""

    def __init__(self, numel: int, device: str) -> None:
        self.master = nn.Parameter(torch.randn(numel, device=device))
        self.master.grad = torch.zeros(numel, device=device)
        self.working = self.master.detach().bfloat16()
        self.grad = torch.randn(numel, device=device).bfloat16()
        self.optimizer = torch.optim.AdamW([self.master], fused=True)

    def step(self) -> None:
        """Cast the gradient up, update, cast the weights down."""
        with torch.no_grad():
            if self.master.grad is not None:
                self.master.grad.copy_(self.grad)
            self.optimizer.step()
            self.working.copy_(self.master)


def interleaved(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    """Return seconds of each call, ``ROUNDS`` times in turn, after two rounds that warm up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 2):
        for name, call in calls.items():
            time.sleep(PAUSE_SECONDS)
            seconds = timed(call, device)
            if number >= 2:
                found[name].append(seconds)
    return found


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of paired ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def optimizer(device: str | None = None) -> Figures:
    """AdamW on bf16 gradients and split masters: bytes a second over the machine's axpy."""
    place = "cuda" if device == "cuda" else "cpu"
    split, native = Split(NUMEL, place), native_on(place)
    x, y = torch.randn(NUMEL, device=place), torch.randn(NUMEL, device=place)
    worker = Worker(torch.get_num_threads() - 1)
    alone = Worker(0)  # torch's operations bring threads of their own
    calls: dict[str, Callable[[], Any]] = {
        "axpy": lambda: y.add_(x, alpha=0.5),
        "torch": lambda: split.step(None, alone),
    }
    if native is not None:
        threads = worker if place == "cpu" else alone
        calls["kernel"] = lambda: split.step(native, threads)
    seconds = interleaved(calls, place)
    worker.close()
    rows = []
    for name, reach in (("kernel", 0.85), ("torch", 0.30)):
        if name in seconds:
            share = ratio(seconds["axpy"], seconds[name]) * SPLIT_BYTES / AXPY_BYTES
            rows.append(Figure(f"{name}: bandwidth / axpy's", share, "ratio", ">=", reach))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    detail = {
        "parameters": NUMEL,
        "threads": torch.get_num_threads(),
        "seconds": median,
        "axpy_bytes_per_second": AXPY_BYTES * NUMEL / median["axpy"],
        "kernel": conditions(torch.device(place))[place],
    }
    return Figures(rows, detail)


def optimizer_peer(device: str | None = None) -> Figures:
    """Fused fp32 AdamW of torch with separate casts, over ours on a split master."""
    place = "cuda" if device == "cuda" else "cpu"
    split, casts, native = Split(NUMEL, place), Casts(NUMEL, place), native_on(place)
    worker = Worker(torch.get_num_threads() - 1 if place == "cpu" else 0)
    seconds = interleaved({"peer": casts.step, "ours": lambda: split.step(native, worker)}, place)
    worker.close()
    detail = {
        "parameters": NUMEL,
        "kernel": conditions(torch.device(place))[place],
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
    }
    share = ratio(seconds["peer"], seconds["ours"])
    return Figures([Figure("torch with casts / ours", share, "ratio", ">=", 1.8)], detail)


def fp32_step(device: str | None = None) -> Figures:
    """Optimizer step of a model that fits, fused on both sides: hetero's over torch's."""
    place = device or "cpu"
    torch.manual_seed(0)
    plain = GPT(GPTConfig(width=480, layers=8, heads=8, context=128)).to(place)
    twin = copy.deepcopy(plain)
    theirs = adamw(plain)
    model, ours = prepare_tuned(twin, adamw(twin), Config.load(device=place), None)
    for m in (plain, model):
        for p in m.parameters():
            p.grad = torch.randn_like(p)
    rounds = [interleaved({"torch": theirs.step, "hetero": ours.step}, place) for _ in range(3)]
    seconds = {k: [s for found in rounds for s in found[k]] for k in rounds[0]}
    detail = {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "mode": engine_of(model).residence.name,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
    }
    share = ratio(seconds["hetero"], seconds["torch"])
    return Figures([Figure("hetero / torch", share, "ratio", "<=", 1.05)], detail)


def bytes_a_parameter(device: str | None = None) -> Figures:
    """Ledger bytes a parameter, bf16 AdamW: at rest, gradients held, gradients adding up."""
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(width=768, layers=8, heads=4, context=32))
    params = sum(p.numel() for p in model.parameters())
    hbm = 6 * params  # room for weights and activations, not for all states: it stays paged
    config = Config.load(device=device or "cpu:sim", hbm=hbm, precision="bf16", activations="keep")
    model, opt = prepare_tuned(model, adamw(model), config, None)
    engine = engine_of(model)
    place = "cuda" if device == "cuda" else "cpu"
    tokens = torch.randint(0, 256, (1, 4), device=place)
    used: dict[str, float] = {}

    def note(name: str) -> None:
        used[name] = engine.setup.ledger.used(Tier.HOST) / params

    for _ in range(2):
        model(tokens, tokens).backward()
        engine.residence.quiesce()
        note("gradients held")
        opt.step()
        opt.zero_grad()
        engine.finish()
        note("at rest")
    for _ in range(2):
        model(tokens, tokens).backward()
    engine.residence.quiesce()
    note("adding up")
    rows = [
        Figure(name, used[name], "bytes", "<=", reach * 1.01)
        for name, reach in (("at rest", 12.0), ("gradients held", 14.0), ("adding up", 16.0))
    ]
    return Figures(rows, {"parameters": params, "mode": engine.residence.name})


class PacedDevice(CpuDevice):
    """A device in real time, whose compute takes its time and no core.

    The host runs ahead of it as it does of a GPU: `compute` extends its queue, a copy lands when
    what it waits for is over, and only `sync` blocks.
    """

    name = "paced"
    same_ram = False

    def __init__(self) -> None:
        super().__init__()
        self.busy_until = 0.0
        self.computed_seconds = 0.0

    def compute(self, seconds: float) -> None:
        """Queue modelled compute."""
        self.busy_until = max(self.busy_until, self.now()) + seconds
        self.computed_seconds += seconds

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        dst.copy_(src)
        return Ticket(lane, max([self.now(), *(t.end for t in after)]))

    def mark(self) -> Ticket:
        return Ticket(Lane.COMPUTE, max(self.busy_until, self.now()))

    def wait(self, ticket: Ticket) -> None:
        self.busy_until = max(self.busy_until, ticket.end)

    def sync(self, ticket: Ticket) -> None:
        while (left := ticket.end - self.now()) > 0:
            time.sleep(left)

    def query(self, ticket: Ticket) -> bool:
        return self.now() >= ticket.end


class Paced(torch.autograd.Function):
    """A unit's modelled compute: forward takes one share of time, backward two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unit: PacedUnit) -> torch.Tensor:
        ctx.unit = unit
        ctx.save_for_backward(weight)
        unit.device.compute(unit.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (_,) = ctx.saved_tensors  # backward needs the weights, as a matmul's does
        ctx.unit.device.compute(2 * ctx.unit.seconds)
        return grads[0], ctx.unit.grad, None


class PacedUnit(nn.Module):
    """Parameters that cost what they cost to update, in a unit that computes nothing."""

    def __init__(self, numel: int, device: PacedDevice, grad: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))
        self.device, self.grad, self.seconds = device, grad, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Paced.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return out


PACED_UNITS, PACED_NUMEL, MICRO, PACED_STEPS = 24, 2**21, 2, 13


def update_overlap(device: str | None = None) -> Figures:
    """Step over its compute alone, with clipping and accumulation, updates behind forwards."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {"micro_steps": MICRO, "units": PACED_UNITS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the host's share of the work is not torch's to divide
    for share in (0.5, 0.9):
        lazy, serial = paced(share, Tuning()), paced(share, Tuning(worker=Worker(0)))
        name = f"update {share:g}x a forward"
        rows.append(Figure(name, lazy["ratio"], "ratio", "<=", 1.05))
        detail[name] = {
            "overlapped": lazy,
            "inside step": serial["ratio"],
            "same bits": lazy["crc"] == serial["crc"],
        }
    torch.set_num_threads(threads)
    return Figures(rows, detail)


def paced(share: float, tuning: Tuning) -> dict[str, Any]:
    """Train the paced model; an update takes ``share`` of a forward, as measured alone."""
    device = PacedDevice()
    torch.manual_seed(0)
    grad = torch.randn(PACED_NUMEL).bfloat16()
    units = [PacedUnit(PACED_NUMEL, device, grad) for _ in range(PACED_UNITS)]
    model: nn.Module = nn.Sequential(*units)
    hbm = 5 * PACED_NUMEL * PACED_UNITS // 2  # frames for all weights: updates alone move them
    config = Config.load(device=device, hbm=hbm, precision="bf16", activations="keep")
    model, opt = prepare_tuned(model, torch.optim.AdamW(model.parameters()), config, tuning)
    engine = engine_of(model)
    for _ in range(3):  # states appear, the plan settles
        paced_step(model, opt, device)
    forward = update_seconds(model, opt, engine) / share
    for unit in units:
        unit.seconds = forward / PACED_UNITS
    ratios = []
    for number in range(PACED_STEPS):
        start, computed = device.now(), device.computed_seconds
        paced_step(model, opt, device)
        took, compute = device.now() - start, device.computed_seconds - computed
        if number >= 2:
            ratios.append(took / compute)
    engine.finish()
    weights = torch.cat([v.view(torch.int16) for v in model.state_dict().values()])
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "forward_seconds": forward,
        "update_seconds": forward * share,
        "misses": engine.setup.stats.counts["miss"],
        "crc": int(weights.long().sum()),
    }


def paced_step(model: nn.Module, opt: Any, device: PacedDevice) -> None:
    for _ in range(MICRO):
        x = torch.zeros(1, requires_grad=True)
        model(x).sum().backward()
    opt.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    # A loss that is looked at: the host does not run into the next step.
    device.sync(device.mark())


def update_seconds(model: nn.Module, opt: Any, engine: Engine) -> float:
    """Return what the updates of one step take on the threads of the worker alone."""
    found = []
    for _ in range(3):
        for _ in range(MICRO):
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        opt.clip_grad_norm_(1.0)
        start = time.perf_counter()
        opt.step()
        opt.zero_grad()
        for job in engine.steps.stepper._jobs if engine.steps.stepper else ():
            while not job.done:  # a waiter would help, with a core that training needs
                time.sleep(0.0005)
        found.append(time.perf_counter() - start)
        engine.finish()
    return statistics.median(found)
