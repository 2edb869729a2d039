"""Budgets grow until a rehearsal fits: RAM first where homes fill a card."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hetero.errors import BudgetError
from hetero.rehearse.attempts import Fitted, Shortfall, best, until_it_fits
from hetero.rehearse.raises import EXACT_RAISES, MOST_INSTEAD, Raises
from hetero.types import Tier

HBM, HOST = 24, 64


def short(tier: str, needed_bytes: int) -> BudgetError:
    return BudgetError("short", advice="", tier=tier, needed_bytes=needed_bytes)


def test_a_card_whose_ram_suffices_has_to_be_larger() -> None:
    assert Raises().asked(short("HBM", 30), HBM, HOST) == ("HBM", 30)


def test_where_ram_was_short_it_grows_by_what_activations_lack_on_the_card() -> None:
    raises = Raises()
    assert raises.asked(short("HOST", 90), HBM, HOST) == ("HOST", 90)
    assert raises.raised("HOST", HOST, 90) == 90

    found = [raises.asked(short("HBM", 30), HBM, 90) for _ in range(MOST_INSTEAD + 1)]

    assert found == [("HOST", 96)] * MOST_INSTEAD + [("HBM", 30)]


def test_a_budget_grows_as_asked_and_then_faster() -> None:
    raises = Raises()
    found = [raises.raised("HBM", 6400, 6401) for _ in range(EXACT_RAISES + 3)]
    assert found == [6401] * EXACT_RAISES + [6500, 6600, 6800]


class Card(NamedTuple):
    """A card on which a model stays, or is paged, as its budget says."""

    stays_from: int
    stays_in: int
    """Bytes that it takes if it stays."""
    again_in: int
    """Bytes that it takes if it stays, and computes again."""
    pages_in: int
    """Bytes with which it is paged; as far as an error sees."""
    pages_seconds: float = 2.0
    """Of a step that is paged; one that computes again takes 1."""

    def rehearse(self, scene: SimpleNamespace, asked: list[tuple[int, bool]]) -> SimpleNamespace:
        asked.append((scene.hbm, scene.again))
        stays = scene.hbm >= self.stays_from
        here = self.again_in if scene.again else self.stays_in
        return SimpleNamespace(
            units=() if stays else (1,),
            error=None if stays or scene.hbm >= self.pages_in else short("HBM", self.pages_in),
            peaks={Tier.HBM: here if stays else scene.hbm},
            blueprint=self.stays_from,
            step_seconds=1.0 if stays else self.pages_seconds,
        )


def changed(scene: SimpleNamespace, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(scene), **given})


def other_ways(scene: SimpleNamespace, stays_from: int) -> Iterator[SimpleNamespace]:
    yield changed(scene, again=True)
    yield changed(scene, hbm=stays_from - 1)


def started(monkeypatch: pytest.MonkeyPatch, card: Card, asked: list[tuple[int, bool]]) -> Any:
    """Return a scene on a card, whose rehearsals note what they were asked for."""
    for name, made in {
        "rehearse": lambda scene: card.rehearse(scene, asked),
        "ways": other_ways,
        "budget": lambda scene, field: getattr(scene, field),
        "with_budget": lambda scene, field, n: changed(scene, **{field: n}),
        "overflows": lambda scene, found: not found.units and found.peaks[Tier.HBM] > scene.hbm,
    }.items():
        monkeypatch.setattr(f"hetero.rehearse.attempts.{name}", made)
    return SimpleNamespace(hbm=HBM, host=HOST, again=False, config=None)


@pytest.mark.parametrize(
    ("card", "tried", "needed"),
    [
        (Card(8, 20, 10, 30), [(24, False)], None),  # stays
        (Card(8, 34, 20, 21), [(24, False), (24, True), (7, False)], None),  # and computes again
        (Card(8, 34, 30, 7), [(24, False), (24, True), (7, False)], None),  # is paged
        (Card(8, 34, 30, 21), [(24, False), (24, True), (7, False), (30, True)], 30),
    ],
)
def test_a_model_that_neither_stays_nor_pages_needs_a_card_on_which_it_stays(
    monkeypatch: pytest.MonkeyPatch,
    card: Card,
    tried: list[tuple[int, bool]],
    needed: int | None,
) -> None:
    asked: list[tuple[int, bool]] = []
    fitted = until_it_fits(started(monkeypatch, card, asked))

    assert asked == tried
    found = [(row.have_bytes, row.needed_bytes) for row in fitted.shortfalls]
    assert found == ([] if needed is None else [(HBM, needed)])


@pytest.mark.parametrize(("pages_seconds", "pages"), [(0.5, True), (1.0, False), (2.0, False)])
def test_of_computing_again_and_paging_the_faster_is_taken_where_both_fit(
    monkeypatch: pytest.MonkeyPatch, pages_seconds: float, pages: bool
) -> None:
    card = Card(8, 34, 20, 7, pages_seconds)

    fitted = until_it_fits(started(monkeypatch, card, []))

    assert bool(fitted.found.units) is pages
    assert fitted.found.step_seconds == min(1.0, pages_seconds)
    assert not fitted.shortfalls


def test_a_way_that_lacks_nothing_is_taken_before_a_faster_one_that_lacks_something() -> None:
    quick, slow = (SimpleNamespace(step_seconds=seconds) for seconds in (1.0, 2.0))
    lacks = Shortfall("HOST", 64, 65, "")
    found: Any = [Fitted(quick, None, (lacks,)), Fitted(slow, None, ())]

    assert best(found).found is slow
