"""Homes on HBM of an emulated CUDA device: the same bits as on HOST, and every access ordered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.memory.link import Link
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from hetero.train.update.kernel import join
from hetero.types import Kind, Lane, Tier
from tests.emulator import fake
from tests.emulator.stalls import SHOWN
from tests.equivalence.blocks import EACH, SOME, UNITS, OneMatrix, Run, check_save_under_way
from tests.equivalence.meddling import BLOCKS, Meddles, nine_steps


@pytest.fixture(autouse=True)
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a digest of a home, the host would wait for compute each time it was written."""
    monkeypatch.setenv("HETERO_PARANOID", "0")


def run_on(homes_on_hbm: bool | None, **settings: Any) -> Run:
    settings = {"precision": "bf16", **settings}
    return Run(fake.device(), homes_on_hbm=homes_on_hbm, **settings)


def six_steps(run: Run) -> None:
    for number in range(6):
        run.step(number, clip=1.0)


def sums(run: Run) -> None:
    for number in range(5):
        run.step(number, parts=1 if number == 2 else 3)


def sums_after_single_gradients(run: Run) -> None:
    for number in range(6):
        run.step(number, parts=1 if number < 3 else 3, clip=1.0)


def clipped_sums(run: Run) -> None:
    for number in range(6):
        run.step(number, parts=1 if number == 3 else 2, clip=0.5)


def a_larger_batch(run: Run) -> None:
    for number in range(6):
        run.step(number, rows=90 if number == 3 else 2, clip=1.0)


def reads_between_steps(run: Run) -> None:
    params = list(run.model.parameters())
    for number in range(6):
        run.step(number, clip=1.0)
        run.optimizer.state[params[0]]["exp_avg"].mul_(0.5)
        with hetero.gathered(run.model, write=True), torch.no_grad():
            params[3].add_(0.01)
        with torch.no_grad():
            params[4].mul_(1.5)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(
    "train",
    [
        *(six_steps, sums, sums_after_single_gradients, clipped_sums),
        *(a_larger_batch, reads_between_steps),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_bits_do_not_depend_on_where_homes_are(
    train: Callable[[Run], None], activations: str, watched: None
) -> None:
    up, down = (run_on(homes, activations=activations) for homes in (None, False))
    for run in (up, down):
        train(run)
    assert up.bits() == down.bits()
    assert up.most and not down.most


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_writes_inside_of_units_are_in_order_where_weights_are_read_at_home(
    block: type[Meddles], tmp_path: Path, watched: None
) -> None:
    up, down = (run_on(homes, block=block) for homes in (None, False))
    for run in (up, down):
        nine_steps(run)
    assert up.bits() == down.bits() and up.on_hbm
    check_save_under_way(up, run_on(None, block=block), tmp_path)


def test_a_steady_step_waits_for_no_copy_of_homes_on_hbm(watched: None) -> None:
    run = run_on(None)
    for number in range(12):
        run.step(number, clip=1.0)
    assert run.on_hbm
    stats = engine_of(run.model).setup.stats
    assert not stats.n_bytes[Lane.D2D] and stats.counts["miss"] == 0


def test_clipped_sums_keep_their_homes_on_hbm_and_only_others_come_up_for_their_norm(
    watched: None,
) -> None:
    """A sum's norm is taken on the device, whichever tier it is on."""
    up: Any
    down: Any
    up, down = run_on(None), run_on(False)
    for run in (up, down):
        for number in range(5):
            run.step(number, parts=2, clip=0.5)
    assert up.on_hbm and up.bits() == down.bits()
    for run in (up, down):
        for part in range(2):
            run.backward(50 + part)
        link = run.engine.residence.link
        before = link.n_bytes[Lane.H2D]
        run.optimizer.clip_grad_norm_(0.5)
        segments = run.engine.setup.blueprint.layout.home
        sums = [4 * s.spec.numel for bucket, s in segments if bucket not in run.on_hbm]
        assert link.n_bytes[Lane.H2D] - before == sum(sums)


def test_frames_that_were_filled_and_never_read_are_rewritten_after_that(watched: None) -> None:
    """Their copy came from HBM, the next one comes from HOST, on another lane."""
    run: Any = run_on(None)
    six_steps(run)
    manager = run.engine.residence.manager
    manager.evict_all()
    first = min(run.on_hbm)
    second = next(bucket for bucket in range(UNITS) if bucket not in run.on_hbm)
    assert manager.prefetch(first, 0)
    manager.evict(first)
    assert manager.prefetch(second, 0)
    manager.evict(second)


def test_a_save_reads_them_while_training_goes_on(tmp_path: Path, watched: None) -> None:
    run = run_on(None)
    six_steps(run)
    check_save_under_way(run, run_on(None), tmp_path)


def written_unseen_by_torch(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def loaded_with_their_masters(model: nn.Module) -> None:
    model.load_state_dict({name: w.float() / 3 for name, w in model.state_dict().items()})


@pytest.mark.parametrize(
    "write", [written_unseen_by_torch, loaded_with_their_masters], ids=lambda f: f.__name__
)
def test_masters_that_a_write_makes_on_hbm_come_down_after_it(
    write: Callable[[nn.Module], None], watched: None
) -> None:
    up, down = run_on(None), run_on(False)
    for run in (up, down):
        six_steps(run)
        write(run.model)
        for low in run.optimizer.state_dict()["masters"].values():
            low.clone()
    assert up.on_hbm and up.bits() == down.bits()


def test_release_leaves_nothing_on_the_device(watched: None) -> None:
    run = run_on(None)
    six_steps(run)
    weights, lows = run.model.state_dict(), run.optimizer.state_dict()["masters"]
    expected = [
        join(weight.cpu(), low.cpu()).clone()
        for weight, low in zip(weights.values(), lows.values(), strict=True)
    ]
    model, _ = hetero.release(run.model, run.optimizer)
    found = [p.detach() for p in model.parameters()]
    assert all(p.device.type == "cpu" for p in found)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_homes_begin_on_hbm_where_host_is_too_small(watched: None) -> None:
    host = 5 * EACH  # of six units
    run = run_on(None, host=host)
    on_hbm = engine_of(run.model).setup.store.places.on_hbm
    assert on_hbm
    plain = run_on(False)
    for each in (run, plain):
        six_steps(each)
    assert run.bits() == plain.bits()
    ledger = engine_of(run.model).setup.ledger
    assert ledger.peak(Tier.HOST) <= host and on_hbm
    assert hetero.status(run.model).division["homes"] >= len(on_hbm) * EACH // 2


@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_sums_of_homes_that_stay_on_hbm_take_the_room_of_frames(
    watched: None, activations: str
) -> None:
    up = run_on(None, hbm=SOME + 8192, host=6 * EACH, activations=activations)
    assert engine_of(up.model).setup.store.places.on_hbm
    down = run_on(False)
    for each in (up, down):
        for number in range(6):
            each.step(number, parts=2 if number in (2, 4) else 1)
    assert up.bits() == down.bits()
    assert engine_of(up.model).setup.ledger.peak(Tier.HBM) <= SOME + 8192


def test_homes_do_not_come_down_into_the_ram_of_sums(watched: None) -> None:
    """A batch that is too large is refused, and the steps after it are made."""
    up = run_on(None, hbm=200_000, host=305_152, activations="recompute", precision="bf16")
    down = run_on(False, precision="bf16")
    for number in range(6):
        if number == 3:
            with pytest.raises(BudgetError) as caught:
                for part in range(2):
                    up.backward(part, 160)
                up.optimizer.step()
            assert "HBM out of memory" in str(caught.value)
            caught.value.__traceback__ = None
            up.optimizer.zero_grad()
        for each in (up, down):
            each.step(number, parts=2)
    assert up.bits() == down.bits() and up.on_hbm


def run_on_disk(folder: Path, n_homes: int = UNITS, **settings: Any) -> Run:
    """Return a run of which RAM holds some of the homes, and a disk the rest."""
    given = {"nvme": folder, "units": 4 * UNITS, **settings}
    with pytest.raises(BudgetError) as caught:
        run_on(None, **given, host=EACH)
    return run_on(None, **given, host=caught.value.needed_bytes + n_homes * EACH)


@pytest.mark.parametrize("updates", ["step", "backward"])
def test_homes_on_disk_go_up_and_come_to_ram_and_back(
    watched: None, updates: str, tmp_path: Path
) -> None:
    run = run_on_disk(tmp_path, updates=updates)
    plain = run_on(False, units=4 * UNITS)
    places, lifted = engine_of(run.model).setup.store.places, []
    assert not places.on_hbm and len(places.on_disk) > 2 * UNITS
    adds_up = updates == "step"
    for number in range(8):
        for each in (run, plain):
            parts = 2 if adds_up and number == 6 else 1
            each.step(number, rows=30 if number == 3 else 2, parts=parts)
        lifted.append(len(places.lifted))
    assert run.bits() == plain.bits()
    assert run.most and lifted[2] > lifted[3] and lifted[5] and bool(lifted[6]) != adds_up


def test_homes_begin_on_hbm_where_host_and_disk_are_too_small(
    watched: None, tmp_path: Path
) -> None:
    free = run_on_disk(tmp_path)
    disk, ledger = engine_of(free.model).setup.budget.disk_bytes, engine_of(free.model).setup.ledger
    assert not free.on_hbm and not engine_of(free.model).setup.store.places.on_hbm
    limited = run_on_disk(tmp_path, nvme_bytes=disk - 1)
    on_hbm = engine_of(limited.model).setup.store.places.on_hbm
    assert on_hbm
    for each in (free, limited):
        for number in range(8):
            each.step(number, rows=20 if number == 3 else 2, parts=2 if number == 5 else 1)
    assert free.bits() == limited.bits()
    assert ledger.peak(Tier.NVME) <= disk
    assert engine_of(limited.model).setup.ledger.peak(Tier.NVME) < disk and on_hbm


def test_memory_that_neither_tier_has_is_said_before_anything_is_touched(watched: None) -> None:
    with pytest.raises(BudgetError, match="HOST must hold") as caught:
        run_on(None, host=EACH)
    assert caught.value.needed_bytes > EACH


def test_a_sum_that_comes_up_for_its_norm_is_within_hbm(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as two units: frames, which have all that activations leave, give way."""
    width, hbm = 128, 110_000
    model: Any = nn.Sequential(*(OneMatrix(width) for _ in range(3)))
    given: Any = {"precision": "bf16", "activations": "keep", "chunk_bytes": 4096, "hbm": hbm}
    config, tuning = Config.load(device=fake.device(), **given), Tuning(homes_on_hbm=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare_tuned(model, optimizer, config, tuning)
    residence, ledger = cast(Paged, engine_of(model).residence), engine_of(model).setup.ledger
    charged: list[int] = []
    moved = Link.move

    def move(link: Link, lane: Lane, target: Tensor, *args: Any, why: str, **named: Any) -> Any:
        if why == "norm":
            kinds = (Kind.ACTIVATION, Kind.GRAD)
            charged.append(sum(ledger.used(Tier.HBM, kind) for kind in kinds) - target.nbytes)
        return moved(link, lane, target, *args, why=why, **named)

    monkeypatch.setattr(Link, "move", move)
    x = torch.ones(2, width, dtype=torch.bfloat16, device=fake.PLACE)
    for number in range(5):
        for _ in range(2):
            hetero.backward(model(x).float().square().sum())
        frames = residence.frames.limit
        optimizer.clip_grad_norm_(0.5)
        assert number < 3 or residence.frames.limit == frames  # it has room, since the last border
        optimizer.step()
        optimizer.zero_grad()
    assert len(charged) == 15 and min(charged) >= 0
    assert ledger.peak(Tier.HBM) <= hbm


def test_a_save_brings_homes_down_next_to_compute(tmp_path: Path, watched: None) -> None:
    """Not in compute's order, nor to pageable memory: both would stop the steps meanwhile."""
    run = run_on(None)
    six_steps(run)
    assert run.on_hbm
    fake.forget_stalls()
    before = fake.copies()
    hetero.save_checkpoint(tmp_path / "c", run.model, run.optimizer, asynchronous=True).wait()
    made = fake.copies() - before
    assert made["asynchronous copy down"] > len(run.on_hbm)
    assert not any("pageable" in what or "blocking" in what for what in made)
    again = run_on(False)
    hetero.load_checkpoint(tmp_path / "c", again.model, again.optimizer)
    assert again.bits() == run.bits()


def test_weights_stay_until_the_program_s_copies_of_them_are_made(watched: None) -> None:
    """A state dict shows page-locked memory, and such copies do not wait for themselves."""
    run = run_on(False)
    six_steps(run)
    shown = run.model.state_dict()
    run.backward(7)
    wanted = {name: value.clone() for name, value in shown.items()}
    there = {name: value.to(fake.PLACE, non_blocking=True) for name, value in shown.items()}
    fake.forget_stalls()
    run.optimizer.step()
    assert any(SHOWN.is_in(stall) for stall in fake.stalls())
    for name, value in there.items():
        assert torch.equal(value.cpu(), wanted[name])
