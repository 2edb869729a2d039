"""Training that Ctrl-C strikes at moments drawn from a seed, beside plain torch (see `main`)."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.io import ALIGN
from hetero.train.engine.tuning import Tuning

WIDE, LAYERS, MICRO = 128, 4, 2
HBM = 7 * 4 * WIDE * WIDE
TIERS: dict[str, dict[str, Any]] = {
    "resident": {"device": "cpu"},
    "cpu": {"device": "cpu", "hbm": HBM, "activations": "recompute"},
    "sim": {"device": "cpu:sim", "hbm": HBM, "activations": "offload"},
    "disk": {"device": "cpu", "hbm": HBM},
}
WAYS = ("time", "line")
PATIENCE = 4  # steps within which Ctrl-C has come out


def build() -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def run_step(model: nn.Module, optimizer: Any, number: int, clip: Callable[[float], Any]) -> float:
    """Make a step as a user's loop does; returns the sum of its losses."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    total = 0.0
    for _ in range(MICRO):
        loss = model(torch.randn(4, WIDE)).square().mean() / MICRO
        loss.backward()
        total += loss.item()
    clip(0.05)
    optimizer.step()
    return total


class Reference:
    """What plain torch computes: losses[n] of step n, weights[n] before it."""

    def __init__(self) -> None:
        self._model = build()
        self._optimizer = adamw(self._model)
        self.losses: list[float] = []
        self.weights = [values(self._model)]

    def until(self, step: int) -> None:
        """Compute up to the weights before a step."""
        clip = partial(nn.utils.clip_grad_norm_, list(self._model.parameters()))
        while len(self.losses) < step:
            number = len(self.losses)
            self.losses.append(run_step(self._model, self._optimizer, number, clip))
            self.weights.append(values(self._model))


def prepare(tier: str, disk: Path) -> Any:
    """Return a model and its optimizer on a tier; ``disk`` is used where homes go there."""
    settings = {"chunk_bytes": 4096, **TIERS[tier]}
    tuning = Tuning(extent_numel=ALIGN, io_threads=2)
    if tier == "disk":
        settings["nvme"] = disk
        model = build()
        try:
            prepare_tuned(model, adamw(model), Config.load(**settings, host=1), tuning)
        except BudgetError as error:
            settings["host"] = error.needed_bytes
    model = build()
    return prepare_tuned(model, adamw(model), Config.load(**settings), tuning)


class Training:
    """One model on one tier, which goes on however often it is interrupted."""

    def __init__(self, tier: str, disk: Path) -> None:
        self._threads = set(threading.enumerate())
        self.model, self.optimizer = prepare(tier, disk)
        self.reference = Reference()
        self.outcomes: Counter[str] = Counter()

    @property
    def made(self) -> int:
        """The steps that were made, as hetero counts them."""
        return hetero.status(self.model).steps

    def step(self) -> None:
        number = self.made
        loss = run_step(self.model, self.optimizer, number, self.optimizer.clip_grad_norm_)
        assert loss == self.reference.losses[number], f"loss of step {number}"
        assert self.made == number + 1, f"step {number} was made and not counted"

    def check(self) -> None:
        """What there is are the weights of the steps that are counted."""
        weights = self.reference.weights[self.made]
        assert equal(values(self.model), weights), f"weights behind {self.made} steps"

    def check_pins(self) -> None:
        """Nothing is pinned behind a whole step."""
        engine = engine_of(self.model)
        if engine.residence.name == "paged":
            assert not any(replica.pins for replica in engine.residence.manager.replicas.values())

    def interrupted(self, arm: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Train until Ctrl-C comes out, check what it left, and make the next step."""
        before = self.made
        self.reference.until(before + PATIENCE + 2)
        try:
            with arm():
                for _ in range(PATIENCE):
                    self.step()
            raise AssertionError("Ctrl-C never came out")
        except KeyboardInterrupt as error:
            self.outcomes[place_of(error)] += 1
        self.check()
        self.step()
        self.check()
        self.check_pins()

    def close(self) -> None:
        """Release the model: it is whole, and nothing of it goes on."""
        made = self.made
        model, _ = hetero.release(self.model, self.optimizer)
        assert equal(values(model), self.reference.weights[made])
        assert set(threading.enumerate()) <= self._threads


def place_of(error: BaseException) -> str:
    """Return the module in which Ctrl-C came out."""
    frames = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    return [name for name in frames if name != "hetero.interrupts"][-1]


# -- moments ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def after(seconds: float) -> Iterator[None]:
    """Let SIGINT come from another thread, that much later, wherever this one is then."""

    def press() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Lines:
    """Counts the lines that are run, and raises SIGINT at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.left = at
        self.seen = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.seen += 1
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def moments(way: str, training: Training, rng: random.Random) -> Iterator[Any]:
    """Yield what interrupts the next two steps at a moment that a seed draws."""
    training.reference.until(training.made + 3)
    began = time.perf_counter()
    for _ in range(2):
        training.step()
    seconds = time.perf_counter() - began
    with Lines() as lines:
        training.step()
    while True:
        if way == "time":
            later = rng.uniform(0, seconds)
            yield partial(after, later)
        else:
            at = rng.randint(1, lines.seen)
            yield partial(Lines, at)


def interrupt(tier: str, way: str, seed: int, n: int, disk: Path) -> Counter[str]:
    """Interrupt a training ``n`` times; returns where Ctrl-C came out, and how often."""
    training = Training(tier, disk)
    training.reference.until(2)
    for _ in range(2):
        training.step()
    rng = random.Random(f"{tier} {way} {seed}")
    for _, arm in zip(range(n), moments(way, training, rng), strict=False):
        training.interrupted(arm)
    training.close()
    return training.outcomes


def main() -> None:
    """Run ``interrupt`` as the arguments say, in a process that must end within the given time."""
    tier, way, seed, n, seconds = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("INTERRUPTED_DISK")) as disk:
        outcomes = interrupt(tier, way, int(seed), int(n), Path(disk))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
