"""The ledger: bytes are charged before they move, and never beyond a budget."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import BudgetError, HeteroError, StateError
from hetero.memory.ledger import Ledger
from hetero.types import Kind, Tier

TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)


def test_a_charge_is_used_and_a_credit_gives_it_back() -> None:
    ledger = Ledger({Tier.HBM: 100})
    ledger.charge(Tier.HBM, Kind.PARAM, 70, "a")
    assert (ledger.used(Tier.HBM), ledger.free(Tier.HBM)) == (70, 30)
    ledger.credit(Tier.HBM, Kind.PARAM, 30)
    assert (ledger.used(Tier.HBM), ledger.free(Tier.HBM)) == (40, 60)


def test_a_budget_can_be_used_to_the_last_byte() -> None:
    ledger = Ledger({Tier.HBM: 100})
    ledger.charge(Tier.HBM, Kind.PARAM, 100, "a")

    assert ledger.free(Tier.HBM) == 0


def test_one_byte_too_many_is_refused_and_charges_nothing() -> None:
    ledger = Ledger({Tier.HBM: 100})
    ledger.charge(Tier.HBM, Kind.PARAM, 60, "a")

    with pytest.raises(BudgetError):
        ledger.charge(Tier.HBM, Kind.PARAM, 41, "b")
    assert ledger.used(Tier.HBM) == ledger.peak(Tier.HBM) == 60


def test_a_refusal_names_what_the_tier_the_shortfall_and_the_remedy() -> None:
    ledger = Ledger({Tier.HOST: 100})
    ledger.charge(Tier.HOST, Kind.PARAM, 60, "a")

    with pytest.raises(BudgetError) as caught:
        ledger.charge(Tier.HOST, Kind.STATE, 50, "exp_avg of bucket 3")
    error = caught.value
    for part in ("exp_avg of bucket 3", "50 B", "HOST", "40 B", "100 B", "10 bytes short"):
        assert part in str(error)
    assert error.advice == "raise host= to at least 110 bytes"
    assert (error.tier, error.needed_bytes) == ("HOST", 110)
    assert isinstance(error, HeteroError)
    assert isinstance(error, MemoryError)


def test_the_bytes_that_a_refusal_asks_for_would_have_been_enough() -> None:
    ledger = Ledger({Tier.HBM: 100})
    ledger.charge(Tier.HBM, Kind.PARAM, 60, "a")
    with pytest.raises(BudgetError) as caught:
        ledger.charge(Tier.HBM, Kind.GRAD, 55, "b")

    enough = Ledger({Tier.HBM: caught.value.needed_bytes})
    enough.charge(Tier.HBM, Kind.PARAM, 60, "a")
    enough.charge(Tier.HBM, Kind.GRAD, 55, "b")
    assert enough.free(Tier.HBM) == 0


def test_all_kinds_of_a_tier_share_its_budget() -> None:
    ledger = Ledger({Tier.HBM: 100})
    ledger.charge(Tier.HBM, Kind.PARAM, 50, "a")
    ledger.charge(Tier.HBM, Kind.ACTIVATION, 50, "b")

    with pytest.raises(BudgetError):
        ledger.charge(Tier.HBM, Kind.BUFFER, 1, "c")
    assert ledger.used(Tier.HBM, Kind.PARAM) == ledger.used(Tier.HBM, Kind.ACTIVATION) == 50


def test_tiers_have_budgets_of_their_own() -> None:
    ledger = Ledger({Tier.HBM: 10, Tier.HOST: 100})
    ledger.charge(Tier.HOST, Kind.PARAM, 100, "a")

    assert ledger.free(Tier.HBM) == 10


@pytest.mark.parametrize("budgets", [{}, {Tier.HBM: None}])
def test_a_tier_without_a_budget_is_only_counted(budgets: dict[Tier, int | None]) -> None:
    ledger = Ledger(budgets)
    ledger.charge(Tier.HBM, Kind.PARAM, 2**50, "a")

    assert ledger.used(Tier.HBM) == ledger.peak(Tier.HBM) == 2**50
    assert ledger.free(Tier.HBM) is None


def test_more_than_was_charged_cannot_be_given_back() -> None:
    ledger = Ledger({})
    ledger.charge(Tier.HBM, Kind.PARAM, 10, "a")

    with pytest.raises(StateError, match="HBM param: gave back 11 bytes"):
        ledger.credit(Tier.HBM, Kind.PARAM, 11)
    assert ledger.used(Tier.HBM) == 10


def test_what_one_kind_was_charged_another_cannot_give_back() -> None:
    ledger = Ledger({})
    ledger.charge(Tier.HBM, Kind.PARAM, 10, "a")

    with pytest.raises(StateError, match="grad"):
        ledger.credit(Tier.HBM, Kind.GRAD, 1)


def test_the_peak_is_what_was_held_at_once() -> None:
    ledger = Ledger({})
    for _ in range(3):
        ledger.charge(Tier.HBM, Kind.PARAM, 10, "a")
        ledger.charge(Tier.HBM, Kind.GRAD, 5, "b")
        ledger.credit(Tier.HBM, Kind.PARAM, 10)
        ledger.credit(Tier.HBM, Kind.GRAD, 5)

    assert ledger.peak(Tier.HBM) == 15
    assert ledger.used(Tier.HBM) == 0


def test_every_kind_has_a_peak_of_its_own() -> None:
    ledger = Ledger({})
    ledger.charge(Tier.HBM, Kind.PARAM, 10, "a")
    ledger.credit(Tier.HBM, Kind.PARAM, 10)
    ledger.charge(Tier.HBM, Kind.GRAD, 5, "b")

    assert ledger.peak(Tier.HBM, Kind.PARAM) == ledger.peak(Tier.HBM) == 10
    assert ledger.peak(Tier.HBM, Kind.GRAD) == 5


def test_the_ledger_keeps_its_own_budgets() -> None:
    budgets: dict[Tier, int | None] = {Tier.HBM: 10}
    ledger = Ledger(budgets)
    budgets[Tier.HBM] = 1000

    assert ledger.free(Tier.HBM) == 10


MOVES = st.lists(
    st.tuples(
        st.sampled_from(("charge", "credit")),
        st.sampled_from(TIERS),
        st.sampled_from(list(Kind)),
        st.integers(0, 60),
    ),
    max_size=60,
)


@settings(derandomize=True, deadline=None)
@given(MOVES)
def test_any_sequence_adds_up_and_stays_within_the_budgets(
    moves: list[tuple[str, Tier, Kind, int]],
) -> None:
    budgets = {Tier.HBM: 100, Tier.HOST: 200, Tier.NVME: None}
    ledger, model, peak = Ledger(budgets), Counter[tuple[Tier, Kind]](), Counter[Tier]()

    def total(tier: Tier) -> int:
        return sum(n for (t, _), n in model.items() if t is tier)

    for verb, tier, kind, n_bytes in moves:
        if verb == "charge":
            budget = budgets[tier]
            fits = budget is None or total(tier) + n_bytes <= budget
            try:
                ledger.charge(tier, kind, n_bytes, "x")
            except BudgetError:
                assert not fits
            else:
                assert fits
                model[tier, kind] += n_bytes
        else:
            try:
                ledger.credit(tier, kind, n_bytes)
            except StateError:
                assert n_bytes > model[tier, kind]
            else:
                model[tier, kind] -= n_bytes
        for each in TIERS:
            peak[each] = max(peak[each], total(each))
            assert ledger.used(each) == total(each)
            assert ledger.peak(each) == peak[each]
        assert all(ledger.used(t, k) == model[t, k] for t in TIERS for k in Kind)
