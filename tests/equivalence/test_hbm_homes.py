"""Homes on HBM: the same numbers wherever homes are, and while they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import BudgetError, OutOfMemory
from hetero.train.engine.engine import Engine
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Lane, Tier
from tests.equivalence.harness import adamw, compare, measure, raw
from tests.equivalence.zoo import BY_NAME, CASES, Case

UNITS, WIDTH = 6, 48


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_zoo_trains_as_plain_torch_with_some_homes_on_hbm(case: Case) -> None:
    hbm = measure(case, adamw, 256, devices=("cpu", "cpu:sim")).of(2.2)
    device = SimDevice(seed=3, checked=True)
    compare(case, adamw, hbm=hbm, device=device, tuning=Tuning(homes_on_hbm=True))


class Blocks(nn.Module):
    """Units of equal size, of which some of the homes fit on HBM."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


UNIT = WIDTH * (WIDTH + 1)  # parameters
EACH = UNIT * 16  # bytes of a unit's homes in training


class Run:
    """A prepared model of blocks, and what its steps need."""

    def __init__(self, hbm: int, *, homes_on_hbm: bool = True, **settings: Any) -> None:
        torch.manual_seed(5)
        model = Blocks()
        settings = {"activations": "keep", "chunk_bytes": 4096, **settings}
        config = Config.load(device=SimDevice(seed=1, checked=True), hbm=hbm, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tuning = Tuning(homes_on_hbm=homes_on_hbm)
        self.model, self.optimizer = prepare_tuned(model, optimizer, config, tuning)

    @property
    def engine(self) -> Engine:
        return engine_of(self.model)

    @property
    def on_hbm(self) -> frozenset[int]:
        residence = self.engine.residence
        return residence.hbm.rehoming.on_hbm if isinstance(residence, Paged) else frozenset()

    def backward(self, number: int, rows: int = 2) -> None:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        precision = self.engine.setup.config.precision
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        hetero.backward(self.model(x.to(dtype)).float().square().sum())

    def step(self, number: int, rows: int = 2, clip: float | None = None) -> None:
        self.backward(number, rows)
        if clip is not None:
            self.optimizer.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> bytes:
        """Return weights, masters and states, bit for bit."""
        state = self.optimizer.state_dict()
        found = [raw(v.detach().clone()) for v in self.model.state_dict().values()]
        for kept in state["state"].values():
            found += [raw(torch.as_tensor(kept[k]).detach().clone()) for k in sorted(kept)]
        found += [raw(v.detach().clone()) for v in masters(state)]
        return b"".join(t.numpy().tobytes() for t in found)


def masters(state: dict[str, Any]) -> Iterator[Tensor]:
    yield from state.get("masters", {}).values()


def pair(hbm: int, train: Callable[[Run], None], **settings: Any) -> Run:
    """Train with homes on HBM and without; every bit must be the same."""
    with_homes, without = Run(hbm, **settings), Run(hbm, homes_on_hbm=False, **settings)
    for run in (with_homes, without):
        train(run)
    assert with_homes.bits() == without.bits()
    assert not without.on_hbm
    return with_homes


SOME = 3 * EACH + 6 * 4 * UNIT


def six_steps(run: Run) -> None:
    for number in range(6):
        run.step(number, clip=1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_masters_and_states_have_the_same_bits(precision: str) -> None:
    run = pair(SOME, six_steps, precision=precision)
    assert 0 < len(run.on_hbm) < UNITS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_of_gradients_stay_on_hbm(precision: str) -> None:
    def train(run: Run) -> None:
        for number in range(4):
            for micro in range(3):
                run.backward(10 * number + micro)
            run.optimizer.clip_grad_norm_(0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()

    run = pair(SOME, train, precision=precision)
    assert run.on_hbm


def test_what_is_on_hbm_crosses_no_link() -> None:
    run = Run(SOME)
    six_steps(run)
    stats = run.engine.setup.stats
    paged = UNITS - len(run.on_hbm)

    assert run.on_hbm
    assert stats.n_bytes[Lane.D2H] == paged * UNIT * 4  # gradients of the others
    assert stats.n_bytes[Lane.H2D] <= 2 * paged * UNIT * 4
    assert stats.n_bytes[Lane.D2D] >= len(run.on_hbm) * UNIT * 4


def test_homes_are_charged_where_they_are() -> None:
    run = Run(SOME)
    six_steps(run)
    ledger, homes = run.engine.setup.ledger, run.engine.setup.store.homes

    def at(tier: Tier, kind: Kind, name: str) -> bool:
        there = [
            h.part(slice(None)).nbytes
            for (n, b), h in homes.items()
            if n == name and h.on_device == (tier is Tier.HBM)
        ]
        return ledger.used(tier, kind) == sum(there)

    assert at(Tier.HOST, Kind.PARAM, "param") and at(Tier.HOST, Kind.GRAD, "grad")
    assert at(Tier.HBM, Kind.GRAD, "grad")
    assert ledger.peak(Tier.HBM) <= SOME


def test_homes_go_down_before_a_larger_batch_and_come_back() -> None:
    rows = SOME // (UNITS * WIDTH * 4) // 3
    seen = []

    def train(run: Run) -> None:
        for number in range(30):
            run.step(number, rows if number == 4 else 2)
            seen.append(len(run.on_hbm))

    run = pair(SOME, train)
    assert seen[3] > seen[4] and len(run.on_hbm) > seen[4]


def test_a_state_that_is_read_and_written_between_steps_counts() -> None:
    def train(run: Run) -> None:
        params = list(run.model.parameters())
        for number in range(6):
            run.step(number)
            if number >= 2:
                run.optimizer.state[params[0]]["exp_avg"].mul_(0.5)
                with hetero.gathered(run.model, write=True), torch.no_grad():
                    params[3].add_(0.01)
                with torch.no_grad():
                    params[4].mul_(1.5)

    run = pair(SOME, train, precision="bf16")
    assert run.on_hbm


def test_a_state_that_the_user_holds_stays_where_it_is() -> None:
    run = Run(SOME)
    run.step(0)
    before = run.on_hbm
    held = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    rows = SOME // (UNITS * WIDTH * 4) // 3
    run.step(1)
    assert run.on_hbm <= before
    values = [h.clone() for h in held]
    run.step(2, rows)
    assert all(not torch.equal(h, v) for h, v in zip(held, values, strict=True))
    now = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def test_a_checkpoint_is_the_same_wherever_homes_are(tmp_path: Any) -> None:
    run = Run(SOME, precision="bf16")
    six_steps(run)
    assert run.on_hbm
    hetero.save_checkpoint(tmp_path / "c", run.model, run.optimizer)
    again = Run(8 * UNIT * 4, precision="bf16")
    hetero.load_checkpoint(tmp_path / "c", again.model, again.optimizer)
    assert again.bits() == run.bits()
    for each in (run, again):
        each.step(7)
    assert again.bits() == run.bits()
    hetero.load_checkpoint(tmp_path / "c", run.model, run.optimizer)  # into homes on HBM
    run.step(7)
    assert again.bits() == run.bits()


def test_a_checkpoint_saved_while_it_trains_has_the_step_it_was_taken_at(tmp_path: Any) -> None:
    run = Run(SOME)
    six_steps(run)
    expected = run.bits()
    save = hetero.save_checkpoint(tmp_path / "c", run.model, run.optimizer, asynchronous=True)
    run.step(6)
    save.wait()
    again = Run(SOME)
    hetero.load_checkpoint(tmp_path / "c", again.model, again.optimizer)
    assert again.bits() == expected


def test_release_gives_back_weights_and_states() -> None:
    run = Run(SOME)
    plain = Run(8 * UNIT * 4, homes_on_hbm=False)
    six_steps(run)
    six_steps(plain)
    assert run.on_hbm
    weights = [v.clone() for v in run.model.state_dict().values()]
    hetero.release(run.model, run.optimizer)
    hetero.release(plain.model, plain.optimizer)
    for a, b, c in zip(run.model.parameters(), plain.model.parameters(), weights, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
        left, right = run.optimizer.inner.state[a], plain.optimizer.inner.state[b]
        assert all(torch.equal(left[k], right[k]) for k in right)


def test_some_of_the_zoo_had_homes_on_hbm() -> None:
    case = BY_NAME["clip_norm"]
    hbm = measure(case, adamw, 256, devices=("cpu", "cpu:sim")).of(2.2)
    seen = compare(case, adamw, hbm=hbm, device=SimDevice(), tuning=Tuning(homes_on_hbm=True))
    assert seen.mode == "paged"


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_move_that_the_device_refuses_half_way_is_undone(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = Run(SOME, precision="bf16"), Run(SOME, precision="bf16", homes_on_hbm=False)
    device, left = run.engine.setup.device, [after]
    real = device.arena

    def arena(n_bytes: int) -> Any:
        if n_bytes and n_bytes < 20_000 and run.engine.setup.steps:  # a home, and no frames
            left[0] -= 1
            if left[0] < 0:
                raise BudgetError("fragmented", advice="none")
        return real(n_bytes)

    monkeypatch.setattr(device, "arena", arena)
    for each in (run, plain):
        six_steps(each)
    assert not run.on_hbm and run.bits() == plain.bits()
    ledger = run.engine.setup.ledger
    assert ledger.used(Tier.HBM, Kind.STATE) == 0 and ledger.used(Tier.HBM, Kind.MASTER) == 0


def hold_states(run: Run) -> list[Tensor]:
    """Train until homes are on HBM, and hold views of all states."""
    for number in range(3):
        run.step(number)
    states = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    return [state.view(-1) for state in states]


def test_states_that_the_user_holds_leave_fewer_frames_to_a_larger_batch() -> None:
    kept: list[Tensor] = []

    def train(run: Run) -> None:
        kept.extend(hold_states(run))
        for number in range(3, 8):
            run.step(number, 29 if number == 4 else 2)

    run = pair(SOME, train)
    assert run.on_hbm and len(kept) == 4 * UNITS


def test_a_batch_too_large_beside_held_states_is_refused_before_an_update() -> None:
    run = Run(SOME)
    kept = hold_states(run)
    before = run.bits()
    run.backward(3, 33)
    with pytest.raises(OutOfMemory, match="raise hbm="):
        run.optimizer.step()
    assert run.bits() == before
    del kept
    run.backward(3, 33)
    run.optimizer.step()
    assert run.bits() != before
