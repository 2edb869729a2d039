"""Homes on HBM: the same numbers wherever homes are, and while they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import BudgetError, OutOfMemory
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Lane, Tier
from tests.equivalence.blocks import (
    EACH,
    SOME,
    UNIT,
    UNITS,
    WIDTH,
    Run,
    check_save_under_way,
    pair,
    sim_run,
)
from tests.equivalence.harness import adamw, compare, measure, sgd
from tests.equivalence.meddling import BLOCKS, Meddles, nine_steps
from tests.equivalence.zoo import BY_NAME, CASES, Case


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_zoo_trains_as_plain_torch_with_some_homes_on_hbm(case: Case) -> None:
    hbm = measure(case, adamw, 256, devices=("cpu", "cpu:sim")).of(2.2)
    device = SimDevice(seed=3, checked=True)
    compare(case, adamw, hbm=hbm, device=device, tuning=Tuning(homes_on_hbm=True))


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_read_at_home_for_units_whose_activations_are_not_kept(
    case: Case, policy: str
) -> None:
    hbm = measure(case, sgd, 256, devices=("cpu", "cpu:sim")).of(2.2)
    device = SimDevice(seed=3, checked=True)
    tuning = Tuning(homes_on_hbm=True)
    compare(case, sgd, hbm=hbm, device=device, tuning=tuning, activations=policy)


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


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kept", [1, 2])
def test_sums_that_begin_and_end_have_room_where_they_are(kept: int, clip: float | None) -> None:
    """Gradients that are zeroed, and not taken away, make sums of the next ones."""

    def train(run: Run) -> None:
        setup = run.engine.setup
        for number in range(6):
            run.backward(number)
            if clip is not None:
                run.optimizer.clip_grad_norm_(clip)
            run.optimizer.step()
            division = setup.budget.division
            assert division is not None
            assert division.home_bytes >= setup.store.hbm_bytes.total()
            run.optimizer.zero_grad(set_to_none=number >= kept)

    run = pair(SOME, train, precision="bf16")
    assert run.on_hbm


class Adapted(nn.Module):
    """A frozen layer with adapters."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.down, self.up = nn.Linear(n, n // 2, bias=False), nn.Linear(n // 2, m, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("share", [0.65, 0.7, 0.8])
def test_sums_that_begin_in_a_later_step_find_room_next_to_coded_weights(share: float) -> None:
    """The unit that computes has its frames at the end: those of others make room."""

    def trained(homes_on_hbm: bool) -> dict[str, Tensor]:
        torch.manual_seed(5)
        model: nn.Module = nn.Sequential(*(Adapted(WIDTH, WIDTH) for _ in range(UNITS)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        settings = {"precision": "bf16", "frozen": "nf4", "chunk_bytes": 4096}
        device = SimDevice(seed=1, checked=True)
        config = Config.load(device=device, hbm=int(share * SOME), activations="keep", **settings)
        model, prepared = prepare_tuned(model, optimizer, config, Tuning(homes_on_hbm=homes_on_hbm))
        for number in range(5):
            for part in range(1 if number < 3 else 2):
                generator = torch.Generator().manual_seed(10 * number + part)
                x = torch.randn(2, WIDTH, generator=generator)
                hetero.backward(model(x.bfloat16()).float().square().sum())
            prepared.step()
            prepared.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    there, home = trained(True), trained(False)
    assert all(torch.equal(there[name], home[name]) for name in home)


def test_what_is_on_hbm_crosses_no_link_and_is_read_where_it_is() -> None:
    run = sim_run(SOME)
    six_steps(run)
    stats = run.engine.setup.stats
    paged = UNITS - len(run.on_hbm)

    assert run.on_hbm
    assert stats.n_bytes[Lane.D2H] == paged * UNIT * 4  # gradients of the others
    assert stats.n_bytes[Lane.H2D] <= 2 * paged * UNIT * 4
    assert stats.n_bytes[Lane.D2D] == 0


def test_homes_are_charged_where_they_are() -> None:
    run = sim_run(SOME)
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


def test_homes_move_after_gradients_that_were_taken_away_have_landed() -> None:
    """Their copies are under way, and nothing of theirs is left to wait for."""
    rows = SOME // (UNITS * WIDTH * 4) // 3
    runs = [
        Run(SimDevice(seed=1, checked=True, lazy=0.0), SOME, homes_on_hbm=up)
        for up in (True, False)
    ]
    for run in runs:
        for number in range(25):  # homes come back after the largest of 16 steps
            run.backward(number, rows if number == 4 else 2)
            for param in [] if number == 4 else [*run.model.parameters()][::2]:
                param.grad = None
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert runs[0].on_hbm and runs[0].bits() == runs[1].bits()


def test_homes_go_down_before_a_larger_batch_and_come_back() -> None:
    rows = SOME // (UNITS * WIDTH * 4) // 3
    seen = []

    def train(run: Run) -> None:
        for number in range(30):
            run.step(number, rows if number == 4 else 2)
            seen.append(len(run.on_hbm))

    run = pair(SOME, train)
    assert seen[3] > seen[4] and len(run.on_hbm) > seen[4]


def test_ram_that_homes_left_for_hbm_is_kept_for_their_way_back() -> None:
    """Activations that went down there would keep them up, where a step's activations grow."""
    run = sim_run(SOME, host=16 * UNITS * UNIT * 4)
    six_steps(run)
    setup = run.engine.setup
    free = setup.ledger.free(Tier.HOST)
    above = sum(setup.store.bytes_of(setup.buckets[bucket]) for bucket in run.on_hbm)

    assert free is not None and 0 < above <= free
    assert setup.offload.store.room_bytes() <= free - above


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
    run = sim_run(SOME)
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
    run = sim_run(SOME, precision="bf16")
    six_steps(run)
    assert run.on_hbm
    hetero.save_checkpoint(tmp_path / "c", run.model, run.optimizer)
    again = sim_run(8 * UNIT * 4, precision="bf16")
    hetero.load_checkpoint(tmp_path / "c", again.model, again.optimizer)
    assert again.bits() == run.bits()
    for each in (run, again):
        each.step(7)
    assert again.bits() == run.bits()
    hetero.load_checkpoint(tmp_path / "c", run.model, run.optimizer)  # into homes on HBM
    run.step(7)
    assert again.bits() == run.bits()


def test_a_checkpoint_saved_while_it_trains_has_the_step_it_was_taken_at(tmp_path: Any) -> None:
    run = sim_run(SOME)
    six_steps(run)
    check_save_under_way(run, sim_run(SOME), tmp_path)


def test_release_gives_back_weights_and_states() -> None:
    run = sim_run(SOME)
    plain = sim_run(8 * UNIT * 4, homes_on_hbm=False)
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
    run, plain = (
        sim_run(SOME, precision="bf16"),
        sim_run(SOME, precision="bf16", homes_on_hbm=False),
    )
    device, left = run.engine.setup.device, [after]
    real, weights = device.arena, run.engine.setup.buckets[0].n_bytes

    def arena(n_bytes: int) -> Any:
        of_homes = n_bytes and n_bytes % weights == 0  # and not of frames
        if of_homes and run.engine.setup.log.phase == "step":
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


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("until", ["forward", "backward", "step"])
@pytest.mark.parametrize("more", [8, 12, 16])
def test_homes_give_way_to_views_of_all_weights(more: int, until: str) -> None:
    """They need not be dropped before the model computes, as without homes on HBM."""
    hbm = 3 * EACH + more * UNIT

    def train(run: Run) -> None:
        for number in range(9):
            run.step(number)
            if number in (3, 4, 6):
                views = [block.weight.detach() for block in run.model.blocks]
                for view in views:
                    view.mul_(1.01)
                if until == "forward":
                    del view, views
                run.backward(100 + number)
                if until == "backward":
                    del view, views
                run.optimizer.step()
                run.optimizer.zero_grad()

    run = pair(hbm, train)
    assert run.most


def test_a_batch_too_large_beside_held_states_is_refused_before_an_update() -> None:
    run = sim_run(SOME)
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


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_writes_to_weights_that_are_read_at_home_are_those_of_frames(
    block: type[Meddles], precision: str
) -> None:
    run = pair(SOME, nine_steps, precision=precision, block=block)
    assert run.on_hbm


def test_weights_that_a_save_has_yet_to_read_are_read_in_frames() -> None:
    """A write inside of a unit would come before the save, and is noticed after it was made."""
    run = sim_run(SOME)
    six_steps(run)
    residence: Any = run.engine.residence
    at_home = residence.manager._at_home
    events = at_home._events
    at_home._events = events._replace(saving=lambda bucket: True)
    run.step(6)
    assert run.engine.setup.stats.n_bytes[Lane.D2D] >= len(run.on_hbm) * UNIT * 4 > 0
    at_home._events = events
    for number in (7, 8):  # the border had prefetched for the first
        run.step(number)
    assert run.engine.setup.stats.n_bytes[Lane.D2D] == 0


class Keeps(Meddles):
    """A view of its weights outlives its sixth access."""

    turns = (7,)

    def meddle(self) -> None:
        if self.keeps:
            self.kept = (self.weight.detach(),)


@pytest.mark.parametrize("spare", [0, UNIT * 4])
def test_a_copy_of_weights_that_a_view_may_write_is_charged_with_their_home(spare: int) -> None:
    run = sim_run(SOME + spare, block=Keeps)
    six_steps(run)
    setup, manager = run.engine.setup, run.engine.residence.manager
    first, ledger = min(run.on_hbm), setup.ledger
    at_home = setup.store.hbm_bytes[first]

    def charged() -> bool:
        frames = sum(replica.n_bytes for replica in manager.replicas.values())
        homes = setup.store.hbm_bytes.total() - ledger.used(Tier.HBM, Kind.GRAD)
        homes -= ledger.used(Tier.HBM, Kind.STATE) + ledger.used(Tier.HBM, Kind.MASTER)
        return ledger.used(Tier.HBM, Kind.PARAM) == frames + homes

    blocks: Any = run.model.blocks
    for number, block in enumerate(blocks):
        block.keeps = number == first
    run.backward(6)
    assert setup.store.hbm_bytes[first] == at_home + UNIT * 4 and charged()
    blocks[first].kept = ()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step(7)
    assert setup.store.hbm_bytes[first] == at_home and charged()
    assert ledger.peak(Tier.HBM) <= SOME + spare


class Looks(Meddles):
    """It notes what is bound at home while it computes."""

    turns = (7,)
    residence: Any = None

    def meddle(self) -> None:
        self.bound = self.residence.bound_at_home()


def test_weights_that_a_unit_computes_with_at_home_are_bound_there_until_it_ends() -> None:
    """A save reads these at once, and they do not move down."""
    run = sim_run(SOME, block=Looks)
    six_steps(run)
    blocks: Any = run.model.blocks
    for block in blocks:
        block.residence = run.engine.residence
    on_hbm = run.on_hbm
    run.step(6)
    assert [block.bound for block in blocks] == [[b] if b in on_hbm else [] for b in range(UNITS)]
    assert blocks[0].residence.bound_at_home() == [] and on_hbm
