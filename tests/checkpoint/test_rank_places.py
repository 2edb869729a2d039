"""Which saved rank one of now goes on from."""

from __future__ import annotations

import pytest

from hetero.checkpoint.rank_places import Division, RankPlace

THREE_D = Division(n_ranks=8, n_stages=2, n_tensor=2)
"""Two stages of two copies of two parts of tensors."""


def test_ranks_of_a_tensor_follow_each_other_within_a_stage() -> None:
    places = [THREE_D.place(rank) for rank in range(8)]
    assert places[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert places[5] == RankPlace(stage=1, copy=0, tensor=1)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (THREE_D, [*range(8)]),
        (Division(4, 2, 2), [0, 1, 4, 5]),
        (Division(12, 2, 2), [0, 1, 2, 3, None, None, 4, 5, 6, 7, None, None]),
        (Division(4, 1, 2), [None] * 4),  # other stages
        (Division(4, 2, 1), [None] * 4),  # other parts
    ],
)
def test_generators_are_those_of_the_same_place(here: Division, expected: list[int | None]) -> None:
    assert [THREE_D.exactly(here, rank) for rank in range(here.n_ranks)] == expected


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (Division(12, 2, 2), [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 4, 5]),
        (Division(6, 1, 2), [0, 1, 2, 3, 0, 1]),
        (Division(6, 2, 1), [0, 2, 0, 4, 6, 4]),
    ],
)
def test_buffers_are_those_of_the_first_copy_where_there_were_fewer(
    here: Division, expected: list[int]
) -> None:
    seen = [THREE_D.seen_from(here, rank) for rank in range(here.n_ranks)]
    assert [THREE_D.nearest(range(8), place) for place in seen] == expected
