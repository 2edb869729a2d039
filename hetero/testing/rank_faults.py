"""Ranks of which one is killed, stopped or failed on purpose while they train (for tests)."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint.save import newest_step
from hetero.checkpoint.writer import Writer
from hetero.config import Config
from hetero.errors import CheckpointError, DivergenceError, OutOfMemory, RankLost
from hetero.testing.ranks import Died, outcomes, run_ranks
from hetero.train.engine.tuning import Tuning

STEPS = 3
TIMEOUT_SECONDS = 1.5
HOWS = ("killed", "stopped", "error", "memory", "interrupt")
SAID = ("killed", "memory", "interrupt")
"""Of these, all other ranks know which rank left, if they lost one."""
CALLS = ("gather", "exchange", "agree", "complete")
WRITES = {"write": "write", "parts": "_finish", "commit": "_publish"}
"""Places in a save, and the methods of its writer."""
PLACES = (
    *((True, where) for where in ("exchange", "agree", "update", "forward", "backward")),
    *((False, where) for where in (*CALLS, "update", "forward", "backward")),
    *((one_sided, where) for one_sided in (True, False) for where in ("save", *WRITES)),
)
"""Whether ranks read each other's shares, and what they do then."""
KINDS = tuple(itertools.product((2, 3), HOWS, PLACES))
N_KINDS = len(KINDS)
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


@dataclass(frozen=True)
class Fault:
    """What happens to one of several ranks, at the ``number``-th event of a place."""

    n_ranks: int
    rank: int
    how: str
    where: str
    number: int
    one_sided: bool


class Planted(DivergenceError):
    """The error of a rank that fails on purpose, as calls between ranks do."""


class Trained(NamedTuple):
    """What a rank returns that trained to the end."""

    counts: Counter[str]
    """How often it came to each place."""
    weights: list[torch.Tensor]


def drawn(number: int) -> Fault:
    """Return a fault: those of all numbers below `N_KINDS` differ in kind."""
    dice = Random(number)
    n_ranks, how, (one_sided, where) = KINDS[number % N_KINDS]
    at = dice.randrange(events(n_ranks, one_sided)[where])
    return Fault(n_ranks, dice.randrange(n_ranks), how, where, at, one_sided)


@cache
def events(n_ranks: int, one_sided: bool) -> Counter[str]:
    """Return how often every rank comes to each place in a run without a fault."""
    never = Fault(n_ranks, -1, "", "", -1, one_sided)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(n_ranks, trained, never, Path(folder))
    return Counter({where: min(each.counts[where] for each in found) for where in found[0].counts})


class Planter:
    """Counts events of this rank, and brings about a fault at one of them."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._fault = fault if fault.rank == rank else None
        self._folder = folder

    def at(self, where: str) -> None:
        number = self.counts[where]
        self.counts[where] += 1
        fault = self._fault
        if fault is not None and (fault.where, fault.number) == (where, number):
            (self._folder / "began").write_text(str(time.monotonic()))
            happen(fault.how)

    def around(self, where: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            self.at(where)
            return call(*args, **kwargs)

        return heard


def happen(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif how == "memory":
        raise OutOfMemory("planted", tier="HBM")
    else:
        raise Planted("planted")


class Heard(torch.autograd.Function):
    """Tells a planter when backward comes to a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, planter: Planter) -> torch.Tensor:
        ctx.planter = planter
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.planter.at("backward")
        return grad, None


class Blocks(nn.Sequential):
    """A model that is paged under `SETTINGS`."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(32, 67), nn.GELU(), nn.Linear(67, 32)) for _ in range(3))
        super().__init__(nn.Linear(8, 32), *blocks, nn.Linear(32, 5))


def trained(rank: int, fault: Fault, folder: Path) -> Trained:
    """Train, and save after each step."""
    planter = Planter(fault, rank, folder)
    torch.manual_seed(0)
    model = Blocks()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = Config.load(mesh="world", timeout_seconds=TIMEOUT_SECONDS, **SETTINGS)
    tuning = Tuning(one_sided=fault.one_sided, pause=partial(planter.at, "update"))
    _, optimizer = prepare_tuned(model, plain, config, tuning)
    comm: Any = engine_of(model).setup.comm
    for name in CALLS:
        setattr(comm, name, planter.around(name, getattr(comm, name)))
    for where, method in WRITES.items():  # of this process, which is a fork
        setattr(Writer, method, planter.around(where, getattr(Writer, method)))
    for step in range(STEPS):
        planter.at("forward")
        dice = torch.Generator().manual_seed(10 * step + rank)
        out = model(torch.randn(4, 8, generator=dice, device="cpu"))
        hear: Any = Heard.apply
        hear(out, planter).pow(2).mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        planter.at("save")
        hetero.save_checkpoint(folder, model, optimizer)
    hetero.release(model, optimizer)
    return Trained(planter.counts, [param.detach().clone() for param in model.parameters()])


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    seconds: float
    """From the fault until the last process was gone."""
    wrong: str
    """What should not be so; empty if all is well."""


def outcome_of(fault: Fault) -> Outcome:
    """Bring about a fault, and look whether each rank ended as it should."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = outcomes(fault.n_ranks, trained, fault, folder)
        ended = time.monotonic()
        if not (folder / "began").exists():
            texts = [end.text for end in ends if isinstance(end, Died)]
            return Outcome(0.0, "; ".join(["the fault did not come", *texts]))
        seconds = ended - float((folder / "began").read_text())
        wrong = [*_wrong_ends(fault, ends), *_wrong_checkpoints(fault, folder)]
    return Outcome(seconds, "; ".join(wrong))


def _wrong_ends(fault: Fault, ends: list[Any]) -> Iterator[str]:
    """The others must all be told; or, if they needed nothing more of that rank, all be right."""
    others = {rank: end for rank, end in enumerate(ends) if rank != fault.rank}
    died = {rank: end for rank, end in others.items() if isinstance(end, Died)}
    for rank, end in died.items():
        if not isinstance(end.error, (DivergenceError, CheckpointError)):
            yield f"rank {rank}: {end.text}"
        named = f"rank {fault.rank} left"
        if fault.how in SAID and isinstance(end.error, RankLost) and named not in str(end.error):
            yield f"rank {rank} does not know that {named}: {end.text}"
    if died and len(died) < len(others):
        yield f"ranks {sorted(set(others) - set(died))} went on to the end, {sorted(died)} did not"
    right = expected(fault.n_ranks)[STEPS].values()
    for rank in set(others) - set(died):
        if not all(map(torch.equal, right, others[rank].weights)):
            yield f"rank {rank} went on with wrong weights"


def _wrong_checkpoints(fault: Fault, folder: Path) -> Iterator[str]:
    """Load the newest checkpoint, if there is one, and compare it with a run without a fault."""
    step = newest_step(folder)
    if step >= 0:
        weights = loaded(folder)
        if any(
            not torch.equal(value, weights[name])
            for name, value in expected(fault.n_ranks)[step].items()
        ):
            yield f"the checkpoint of step {step} is not what a run without a fault saves"


@cache
def expected(n_ranks: int) -> dict[int, dict[str, torch.Tensor]]:
    """Return the weights after each step of a run without a fault."""
    with tempfile.TemporaryDirectory() as name:
        run_ranks(n_ranks, trained, Fault(n_ranks, -1, "", "", -1, True), Path(name))
        return {step: loaded(Path(name), step) for step in range(1, STEPS + 1)}


def loaded(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, loaded into a model of one process."""
    model = Blocks()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = hetero.prepare(model, plain, **SETTINGS)
    hetero.load_checkpoint(folder, model, optimizer, step=step)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    hetero.release(model, optimizer)
    return weights
