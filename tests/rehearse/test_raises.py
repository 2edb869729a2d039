"""Budgets grow until a rehearsal fits: RAM first where homes fill a card."""

from __future__ import annotations

from hetero.errors import BudgetError
from hetero.rehearse.raises import EXACT_RAISES, MOST_INSTEAD, Raises

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
