"""The state machine of copies: one table, and an exception with the last moves beside it."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from hetero.errors import StateError
from hetero.memory.chunk import LEGAL, CopyTable
from hetero.types import CopyState, Tier

ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState
REASONS = ("fetch", "ready", "write", "flush", "evict", "discard", "fail", "recode", "undo")

# How to bring the HBM copy of a chunk into a state, from ABSENT, and a HOST copy from CLEAN.
ON_HBM: dict[CopyState, list[tuple[CopyState, str]]] = {
    ABSENT: [],
    FILLING: [(FILLING, "fetch")],
    CLEAN: [(FILLING, "fetch"), (CLEAN, "ready")],
    DIRTY: [(FILLING, "fetch"), (CLEAN, "ready"), (DIRTY, "write")],
    FLUSHING: [(FILLING, "fetch"), (CLEAN, "ready"), (DIRTY, "write"), (FLUSHING, "flush")],
}
ON_HOST: dict[CopyState, list[tuple[CopyState, str]]] = {
    FILLING: [(FILLING, "fetch")],
    CLEAN: [],
    DIRTY: [(DIRTY, "write")],
    FLUSHING: [(DIRTY, "write"), (FLUSHING, "flush")],
}

# The table again, written out by hand from ARCHITECTURE.md, section 4.
RIGHT = {
    (ABSENT, FILLING, "fetch"),
    (FILLING, CLEAN, "ready"),
    (FILLING, CLEAN, "fail"),
    (FILLING, ABSENT, "fail"),
    (FLUSHING, DIRTY, "fail"),
    (CLEAN, DIRTY, "write"),
    (CLEAN, FILLING, "fetch"),
    (CLEAN, FILLING, "update"),
    (CLEAN, ABSENT, "evict"),
    (CLEAN, ABSENT, "discard"),
    (DIRTY, DIRTY, "write"),
    (DIRTY, FLUSHING, "flush"),
    (DIRTY, ABSENT, "discard"),
    (DIRTY, CLEAN, "recode"),
    (DIRTY, FILLING, "undo"),
    (FLUSHING, CLEAN, "ready"),
}
EVERY = list(product(CopyState, CopyState, REASONS))


def table_in(state: CopyState, tier: Tier) -> CopyTable:
    table = CopyTable(3)
    for new, why in (ON_HBM if tier is Tier.HBM else ON_HOST)[state]:
        table.transition(1, tier, new, why)
    return table


def label(value: object) -> str:
    return value.name if isinstance(value, CopyState) else str(value)


@pytest.mark.parametrize(("old", "new", "why"), sorted(RIGHT), ids=label)
def test_a_legal_transition_passes(old: CopyState, new: CopyState, why: str) -> None:
    table = table_in(old, Tier.HBM)
    table.transition(1, Tier.HBM, new, why)

    assert table.state(1, Tier.HBM) is new


@pytest.mark.parametrize(
    ("old", "new", "why"), [row for row in EVERY if row not in RIGHT], ids=label
)
def test_every_other_transition_is_refused_with_the_last_moves(
    old: CopyState, new: CopyState, why: str
) -> None:
    table = table_in(old, Tier.HBM)

    with pytest.raises(StateError, match=f"{old.name} -> {new.name} by {why}") as caught:
        table.transition(1, Tier.HBM, new, why)
    assert caught.value.moves[-1] == f"chunk 1 HBM: {old.name} -> {new.name} ({why})"
    assert table.state(1, Tier.HBM) is old


def test_the_table_holds_nothing_else() -> None:
    assert set(LEGAL) == RIGHT


@pytest.mark.parametrize("why", ["evict", "discard", "fetch", "fail"])
@pytest.mark.parametrize("state", list(ON_HOST), ids=label)
def test_a_home_is_never_absent(state: CopyState, why: str) -> None:
    table = table_in(state, Tier.HOST)

    with pytest.raises(StateError, match="on HOST"):
        table.transition(1, Tier.HOST, ABSENT, why)
    assert table.state(1, Tier.HOST) is state


def test_a_flush_fills_the_home_and_then_both_are_clean() -> None:
    table = table_in(DIRTY, Tier.HBM)
    table.transition(1, Tier.HBM, FLUSHING, "flush")
    table.transition(1, Tier.HOST, FILLING, "fetch")
    table.transition(1, Tier.HOST, CLEAN, "ready")
    table.transition(1, Tier.HBM, CLEAN, "ready")

    assert table.state(1, Tier.HOST) is table.state(1, Tier.HBM) is CLEAN


def test_a_failed_flush_leaves_the_home_clean() -> None:
    table = table_in(FILLING, Tier.HOST)
    table.transition(1, Tier.HOST, CLEAN, "fail")

    assert table.state(1, Tier.HOST) is CLEAN


def test_in_the_beginning_homes_are_clean_and_frames_empty() -> None:
    table = CopyTable(2)

    assert [table.state(c, Tier.HOST) for c in (0, 1)] == [CLEAN, CLEAN]
    assert [table.state(c, Tier.HBM) for c in (0, 1)] == [ABSENT, ABSENT]


def test_a_transition_concerns_one_chunk_on_one_tier() -> None:
    table = table_in(CLEAN, Tier.HBM)

    assert [table.state(c, Tier.HBM) for c in range(3)] == [ABSENT, CLEAN, ABSENT]
    assert [table.state(c, Tier.HOST) for c in range(3)] == [CLEAN] * 3


def test_the_moves_are_told_oldest_first() -> None:
    assert table_in(DIRTY, Tier.HBM).moves() == [
        "chunk 1 HBM: ABSENT -> FILLING (fetch)",
        "chunk 1 HBM: FILLING -> CLEAN (ready)",
        "chunk 1 HBM: CLEAN -> DIRTY (write)",
    ]


def test_only_the_last_thousand_moves_are_kept() -> None:
    table = table_in(DIRTY, Tier.HBM)
    for _ in range(2000):
        table.transition(1, Tier.HBM, DIRTY, "write")

    assert len(table.moves()) == 1000
    assert all(a == b for a, b in pairwise(table.moves()))


def test_the_message_shows_the_moves_that_led_there() -> None:
    table = table_in(FLUSHING, Tier.HBM)

    with pytest.raises(StateError) as caught:
        table.transition(1, Tier.HBM, DIRTY, "write")
    assert "Last moves:" in str(caught.value)
    assert "chunk 1 HBM: DIRTY -> FLUSHING (flush)" in str(caught.value)
