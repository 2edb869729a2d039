"""Homes on disk come to RAM that others leave, and go back: the same bits as with all in RAM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hetero
from hetero.errors import BudgetError, DiskReadError
from hetero.memory.home import Home, MovableHome, Pinned
from hetero.memory.homestore import HomeStore
from hetero.train.engine.rehoming import Part
from hetero.types import Kind, Tier
from tests.equivalence.blocks import EACH, SOME, Run, check_save_under_way, sim_run

UNITS = 24
HBM = 2 * SOME
LARGE = {"fp32": 50, "bf16": 110, "fp16": 110}
"""Rows of a batch for which all homes leave HBM."""
EIGHTHS = [0, 2, 4, 6]
"""Of the homes, that RAM holds."""


def least_host(precision: str, nvme: Path, *, units: int = UNITS, hbm: int = HBM) -> int:
    with pytest.raises(BudgetError) as found:
        sim_run(hbm, units=units, precision=precision, nvme=nvme, host=4096)
    return found.value.needed_bytes


def on_disk(folder: Path, precision: str = "bf16", eighths: int = 6, **settings: object) -> Run:
    """Return a run of which HBM and RAM hold a part, and a disk the rest."""
    host = least_host(precision, folder) + eighths * UNITS * EACH // 8
    settings = {"precision": precision, "nvme": folder, "host": host, **settings}
    return sim_run(HBM, units=UNITS, **settings)


def in_ram(precision: str = "bf16", **settings: object) -> Run:
    return sim_run(HBM, units=UNITS, homes_on_hbm=False, precision=precision, **settings)


def store(run: Run) -> HomeStore:
    return run.engine.setup.store


def lifted(run: Run) -> set[Part]:
    return set(store(run).places.lifted)


def check_places(run: Run) -> None:
    """Homes are charged where places say, and those on disk take what they did."""
    setup = run.engine.setup
    for tier in (Tier.HBM, Tier.HOST):
        budget = setup.ledger.budgets.get(tier)
        assert budget is None or setup.ledger.used(tier) <= budget
    for bucket in setup.buckets:
        assert not setup.store.misplaced(bucket)
    assert setup.ledger.used(Tier.NVME) <= setup.budget.disk_bytes
    for kind, number in setup.store.places.lifted:
        if kind is not Kind.GRAD:
            homes = [home for name, home in setup.store.of_bucket(number) if name == kind.value]
            assert all(isinstance(home, MovableHome) for home in homes)


def both(train: Callable[[Run], None], ours: Run, theirs: Run) -> None:
    for run in (ours, theirs):
        train(run)
    assert ours.bits() == theirs.bits()


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("eighths", EIGHTHS)
@pytest.mark.parametrize("precision", LARGE)
def test_they_move_as_batches_and_sums_come_and_go(
    precision: str, eighths: int, tmp_path: Path
) -> None:
    seen: list[tuple[int, set[Part]]] = []

    def train(run: Run) -> None:
        for number in range(16):
            large, parts = number in (4, 5, 11), 2 if number in (7, 8, 13) else 1
            run.step(number, LARGE[precision] if large else 2, parts=parts, clip=0.5)
            if run is ours:
                check_places(run)
                seen.append((len(run.on_hbm), lifted(run)))

    ours = on_disk(tmp_path, precision, eighths)
    both(train, ours, in_ram(precision))

    homes, parts = zip(*seen, strict=True)
    assert max(homes) > min(homes) and len(store(ours).places.on_disk) > UNITS // 2
    assert not eighths or len({frozenset(found) for found in parts}) > 1


def test_ram_for_sums_holds_homes_until_gradients_add_up(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for number in range(13):
            run.step(number, parts=2 if number in (3, 7) else 1)
            run.engine.finish()  # homes of sums are dropped
            if run is ours:
                check_places(run)
                seen.append(len(lifted(run)))

    seen: list[int] = []
    ours = on_disk(tmp_path, homes_on_hbm=False)
    both(train, ours, in_ram())

    # after a step with sums they come back later each time: to move them takes as long as steps
    assert [bool(n) for n in seen] == [*[True] * 3, *[False] * 3, True, *[False] * 5, True]


def test_what_the_user_holds_and_writes_goes_with_them(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def train(run: Run) -> None:
        for number in range(3):
            run.step(number)
        params = list(run.model.parameters())
        states = run.optimizer.state_dict()["state"]
        views = [states[n]["exp_avg"].view(-1)[1:] for n in range(len(params))]
        kept.extend(views)
        for number in range(3, 7):
            views[2 * number].mul_(0.5)
            run.optimizer.state[params[number]]["exp_avg_sq"].add_(0.01)
            run.step(number)
            views[-number][:3] += 1.0
        for index, view in enumerate(views):
            now = run.optimizer.state[params[index]]["exp_avg"].view(-1)[1:]
            assert torch.equal(now, view), index
        run.step(7)

    both(train, on_disk(tmp_path), in_ram())
    assert kept


@pytest.mark.parametrize("grows", ["activations", "sums"])
def test_homes_leave_hbm_whatever_the_user_holds(grows: str, tmp_path: Path) -> None:
    precision, kept = {"activations": "fp32", "sums": "bf16"}[grows], list[object]()

    def train(run: Run) -> None:
        for number in range(7):
            if number == 4:
                kept.append(run.optimizer.state_dict())
                kept.append(run.model.state_dict())
                kept.extend(state["exp_avg"].view(-1) for state in run.optimizer.state.values())
                before = len(run.on_hbm)
            rows = 30 if number == 5 and grows == "activations" else 2
            run.step(number, rows, parts=2 if number == 5 and grows == "sums" else 1)
            if number == 5 and run is ours:
                check_places(run)
                assert len(run.on_hbm) < before

    host = least_host(precision, tmp_path, units=12, hbm=SOME) + 3 * EACH
    disk = {"nvme": tmp_path, "host": host}
    ours = sim_run(SOME, units=12, precision=precision, **disk)
    both(train, ours, sim_run(SOME, units=12, precision=precision, homes_on_hbm=False))


def test_homes_move_between_disk_and_ram_whatever_the_user_holds(tmp_path: Path) -> None:
    """They leave RAM for sums, come back after them, and leave again."""
    there: list[bool] = []

    def train(run: Run) -> None:
        for number in range(3):
            run.step(number)
        states = [run.optimizer.state[param] for param in run.model.parameters()]
        shown = [state["exp_avg_sq"] for state in states]
        views = [state["exp_avg"].view(-1)[1:] for state in states]
        for number in range(3, 10):
            for view in views[number::3]:
                view.mul_(0.5)
            run.step(number, parts=2 if number in (3, 8) else 1)
            run.engine.finish()
            shown[number].mul_(1.5)
            for view in views[number::5]:
                view.add_(0.1)
            if run is ours:
                there.append(bool(lifted(run)))
        for state, view, whole in zip(states, views, shown, strict=True):
            assert torch.equal(state["exp_avg"].view(-1)[1:], view)
            assert torch.equal(state["exp_avg_sq"].view(-1), whole.view(-1))
        run.step(10)

    ours = on_disk(tmp_path, homes_on_hbm=False)
    assert {kind for kind, _ in store(ours).places.on_disk} == {Kind.STATE}
    both(train, ours, in_ram())
    assert there == [*[False] * 3, *[True] * 2, *[False] * 2]


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("eighths", EIGHTHS)
def test_updates_in_backward_are_the_same_wherever_homes_are(eighths: int, tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for number in range(9):
            run.step(number, LARGE["bf16"] if number == 4 else 2)

    settings = {"updates": "backward"}
    ours = on_disk(tmp_path, eighths=eighths, **settings)
    both(train, ours, in_ram(**settings))
    assert ours.most and (lifted(ours) or not eighths)


def test_a_checkpoint_reads_them_where_they_are(tmp_path: Path) -> None:
    def prepared(name: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        return on_disk(folder, eighths=6)

    run = prepared("first")
    for number in range(5):
        run.step(number)
    assert run.on_hbm and lifted(run)
    check_save_under_way(run, prepared("second"), tmp_path)


def test_places_on_disk_are_taken_once(tmp_path: Path) -> None:
    run = on_disk(tmp_path, eighths=3)
    used, moved = [], set[Part]()
    for number in range(24):
        run.step(number, LARGE["bf16"] if number % 4 == 3 else 2)
        used.append(run.engine.setup.ledger.used(Tier.NVME))
        moved |= lifted(run)
    assert moved and max(used) == used[7] == used[-1]


def test_release_gives_them_back(tmp_path: Path) -> None:
    run, plain = on_disk(tmp_path, eighths=6), in_ram()
    for each in (run, plain):
        for number in range(4):
            each.step(number)
    assert lifted(run)
    found = []
    for each in (run, plain):
        _, inner = hetero.release(each.model, each.optimizer)
        found.append([s["exp_avg_sq"] for s in inner.state.values()])
        found[-1] += [param.detach() for param in each.model.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    "after",
    [
        0,
        pytest.param(1, marks=pytest.mark.campaign(seconds=2)),
        pytest.param(4, marks=pytest.mark.campaign(seconds=2)),
    ],
)
def test_a_drive_that_fails_while_they_come_leaves_them_on_disk(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [after]
    real = MovableHome.take_over

    def take_over(home: MovableHome, other: Home) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DiskReadError("it fails", advice="none", path="", op="read")
        real(home, other)

    monkeypatch.setattr(MovableHome, "take_over", take_over)

    def train(run: Run) -> None:
        for number in range(6):
            run.step(number)
            if run is ours:
                check_places(run)

    ours = on_disk(tmp_path, "fp32", eighths=2)
    both(train, ours, in_ram("fp32"))
    assert left[0] < 0


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("after", [0, 1, 3, 6, 11])
def test_homes_of_which_some_cannot_be_copied_stay_where_all_are(
    after: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy succeeds any more, not even one that would undo others."""
    left = [after]
    failed = 0

    def failing(real: Callable[[Any, Home], None]) -> Callable[[Any, Home], None]:
        def take_over(home: Home, other: Home) -> None:
            nonlocal failed
            left[0] -= 1
            if left[0] < 0:
                failed += 1
                raise DiskReadError("it fails", advice="none", path="", op="read")
            real(home, other)

        return take_over

    for kind in (Home, Pinned):
        monkeypatch.setattr(kind, "take_over", failing(kind.take_over))

    def train(run: Run) -> None:
        for number in range(8):
            if number == 5:
                left[0] = 10**6
            run.step(number)
            if run is ours:
                check_places(run)

    ours = on_disk(tmp_path, precision, eighths=2)
    both(train, ours, in_ram(precision))
    assert failed and lifted(ours)
