"""Where a chain of units is cut into stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from hetero.plan.cut import Chain, Weight, cut


def all_cuts(n: int, n_stages: int) -> Iterator[list[int]]:
    for borders in itertools.combinations(range(1, n), n_stages - 1):
        yield [0, *borders]


def key(units: Sequence[Weight], starts: Sequence[int]) -> tuple[float, int, float]:
    """Return what a cut is judged by, the most important first."""
    chain, ends = Chain.of(units), [*starts[1:], len(units)]
    stages = [chain.weight(start, end) for start, end in zip(starts, ends, strict=True)]
    seconds = [stage.seconds for stage in stages]
    return max(seconds), max(stage.n_bytes for stage in stages), sum(s * s for s in seconds)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_of_all_is_better(seed: int) -> None:
    dice = random.Random(seed)
    n = dice.randint(1, 9)
    # whole numbers and few of them: sums are exact, and many cuts are equally fast
    units = [Weight(float(dice.randint(0, 4)), dice.randint(0, 3)) for _ in range(n)]
    n_stages = dice.randint(1, n)

    found = cut(units, n_stages)

    assert key(units, found) == min(key(units, each) for each in all_cuts(n, n_stages))


def test_equal_units_are_spread_evenly() -> None:
    starts = cut([Weight(0.1, 7)] * 80, 16)

    assert starts == list(range(0, 80, 5))


def test_a_large_embedding_that_takes_no_time_gives_its_stage_fewer_bytes() -> None:
    units = [Weight(1.0, 30), *[Weight(1.0, 10)] * 4]  # 3 + 2 and 2 + 3 take equally long

    assert cut(units, 2) == [0, 2]


@pytest.mark.parametrize("n_stages", [0, 4])
def test_more_stages_than_units_and_none_are_refused(n_stages: int) -> None:
    with pytest.raises(ValueError, match="3 units"):
        cut([Weight(1.0, 1)] * 3, n_stages)
