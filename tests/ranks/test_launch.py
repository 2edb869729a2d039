"""Processes that a launcher started tell each other what they make, and what went wrong."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hetero.errors import ConfigError, RankLost
from hetero.parallel.launch import Launch, launch
from hetero.testing.ranks import outcomes, run_ranks


class Unpicklable(RuntimeError):
    """An error that no other process can build."""

    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(number)
        self.why = why


def made(rank: int) -> tuple[list[int], str, str]:
    with launch(60) as ranks:
        numbers = ranks.each(lambda: rank + 10, "numbers")
        word = ranks.first(lambda: f"of {rank}", "a word")
        return numbers, word, ranks.ready(lambda: f"mine, {rank}", "a word of each")


def test_all_know_what_each_makes_and_what_the_first_one_makes() -> None:
    assert run_ranks(2, made) == [([10, 11], "of 0", f"mine, {rank}") for rank in range(2)]


def failing(rank: int, make: Callable[[], object]) -> object:
    with launch(60) as ranks:
        return ranks.ready(make if rank == 1 else int, "a thing")


def refused() -> None:
    raise ConfigError("no such thing", advice="ask for another")


def strange() -> None:
    raise Unpicklable(7, why="odd")


@pytest.mark.parametrize(
    ("make", "told"), [(refused, "rank 1: no such thing"), (strange, "rank 1: Unpicklable: 7")]
)
def test_an_error_of_one_is_raised_on_all(make: Callable[[], object], told: str) -> None:
    first, second = outcomes(2, failing, make)

    assert told in str(first.error)
    assert "rank 1:" not in second.text  # its own error, as it was raised
    assert second.text.splitlines()[-1].startswith(("Advice: ask for another", f"{__name__}.Unp"))
    if make is refused:
        assert isinstance(first.error, ConfigError) and first.error.advice == "ask for another"


def test_one_that_dies_at_work_leaves_no_other_waiting() -> None:
    first, _ = outcomes(2, failing, lambda: os._exit(3))

    assert isinstance(first.error, RankLost), first.text


def test_a_process_that_is_alone_makes_all() -> None:
    alone = Launch()

    assert alone.each(lambda: 3, "a number") == [3]
    assert alone.first(lambda: 4, "a number") == alone.ready(lambda: 4, "a number") == 4
    with pytest.raises(ConfigError, match=r"^no such thing"):
        alone.first(refused, "a thing")
