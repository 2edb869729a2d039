"""Homes on HBM of an emulated CUDA device: the same bits as on HOST, and every access ordered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane, Tier
from tests.emulator import fake
from tests.equivalence.harness import raw

UNITS, WIDTH = 6, 48
EACH = WIDTH * (WIDTH + 1) * 16
SOME = 3 * EACH + 6 * 4 * WIDTH * (WIDTH + 1)


@pytest.fixture(autouse=True)
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a digest of a home, the host would wait for compute each time it was written."""
    monkeypatch.setenv("HETERO_PARANOID", "0")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Run:
    """A prepared model on the emulated device, and what its steps need."""

    def __init__(self, homes_on_hbm: bool | None, **settings: Any) -> None:
        torch.manual_seed(5)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = {"precision": "bf16", "activations": "keep", "chunk_bytes": 4096, **settings}
        config = Config.load(device=fake.device(), hbm=SOME, **settings)
        tuning = Tuning(homes_on_hbm=homes_on_hbm)
        self.model, self.optimizer = prepare_tuned(model, optimizer, config, tuning)
        self.most = 0  # buckets with homes on HBM

    @property
    def on_hbm(self) -> frozenset[int]:
        residence = engine_of(self.model).residence
        assert isinstance(residence, Paged)
        return residence.hbm.rehoming.on_hbm

    def backward(self, number: int, rows: int = 2) -> None:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        out = self.model(x.bfloat16().to(fake.PLACE))
        hetero.backward(out.float().square().sum())

    def step(self, number: int, rows: int = 2, parts: int = 1, clip: bool = True) -> None:
        for part in range(parts):
            self.backward(10 * number + part, rows)
        if clip:
            self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.most = max(self.most, len(self.on_hbm))

    def bits(self) -> bytes:
        state = self.optimizer.state_dict()
        found = [raw(v.detach().cpu().clone()) for v in self.model.state_dict().values()]
        for kept in state["state"].values():
            found += [raw(torch.as_tensor(kept[k]).detach().cpu().clone()) for k in sorted(kept)]
        found += [raw(v.detach().cpu().clone()) for v in state["masters"].values()]
        return b"".join(t.numpy().tobytes() for t in found)


def six_steps(run: Run) -> None:
    for number in range(6):
        run.step(number)


def sums(run: Run) -> None:
    for number in range(5):
        run.step(number, parts=1 if number == 2 else 3, clip=False)


def sums_after_single_gradients(run: Run) -> None:
    for number in range(6):
        run.step(number, parts=1 if number < 3 else 3)


def a_larger_batch(run: Run) -> None:
    for number in range(6):
        run.step(number, rows=90 if number == 3 else 2)


def reads_between_steps(run: Run) -> None:
    params = list(run.model.parameters())
    for number in range(6):
        run.step(number)
        run.optimizer.state[params[0]]["exp_avg"].mul_(0.5)
        with hetero.gathered(run.model, write=True), torch.no_grad():
            params[3].add_(0.01)
        with torch.no_grad():
            params[4].mul_(1.5)


@pytest.mark.parametrize(
    "train",
    [six_steps, sums, sums_after_single_gradients, a_larger_batch, reads_between_steps],
    ids=lambda f: f.__name__,
)
def test_bits_do_not_depend_on_where_homes_are(train: Callable[[Run], None], watched: None) -> None:
    up, down = Run(None), Run(False)
    for run in (up, down):
        train(run)
    assert up.bits() == down.bits()
    assert up.most and not down.most


def test_a_steady_step_waits_for_no_copy_of_homes_on_hbm(watched: None) -> None:
    run = Run(None)
    for number in range(12):
        run.step(number)
    assert run.on_hbm
    stats = engine_of(run.model).setup.stats
    assert stats.n_bytes[Lane.D2D] and stats.counts["miss"] == 0


def test_a_save_reads_them_while_training_goes_on(tmp_path: Path, watched: None) -> None:
    run = Run(None)
    six_steps(run)
    expected = run.bits()
    saving = hetero.save_checkpoint(tmp_path / "c", run.model, run.optimizer, asynchronous=True)
    run.step(6)
    saving.wait()
    again = Run(None)
    hetero.load_checkpoint(tmp_path / "c", again.model, again.optimizer)
    assert again.bits() == expected
    again.step(6)
    assert again.bits() == run.bits()


def test_release_leaves_nothing_on_the_device(watched: None) -> None:
    run = Run(None)
    six_steps(run)
    expected = [v.detach().cpu().clone() for v in run.model.state_dict().values()]
    model, _ = hetero.release(run.model, run.optimizer)
    found = [p.detach().bfloat16().cpu() for p in model.parameters()]
    assert len(found) == len(expected)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_homes_begin_on_hbm_where_host_is_too_small(watched: None) -> None:
    host = 5 * EACH  # of six units
    run = Run(None, host=host)
    on_hbm = engine_of(run.model).setup.store.places.on_hbm
    assert on_hbm
    plain = Run(False)
    for each in (run, plain):
        six_steps(each)
    assert run.bits() == plain.bits()
    ledger = engine_of(run.model).setup.ledger
    assert ledger.peak(Tier.HOST) <= host and on_hbm
    assert hetero.status(run.model).division["homes"] >= len(on_hbm) * EACH // 2


def test_memory_that_neither_tier_has_is_said_before_anything_is_touched(watched: None) -> None:
    with pytest.raises(BudgetError, match="HOST must hold") as caught:
        Run(None, host=EACH)
    assert caught.value.needed_bytes > EACH
