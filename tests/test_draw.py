"""What the gate runs of campaigns, and what it writes about its own time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.draw import ALL_SECONDS, drawn, expected, file_of, record, share_of_all
from tests.times import Row, Seconds, by_file, now, read, write

CASES = [f"tests/test_a.py::test_many[{number}]" for number in range(20)]


def test_a_seed_draws_the_same_cases_in_every_process_whatever_the_order() -> None:
    assert drawn(CASES, 6, 1.0, "a seed") == drawn(CASES[::-1], 6, 1.0, "a seed")


@pytest.mark.parametrize(
    ("case_seconds", "least", "most"),
    [(1.0, 6, 6), (4.0, 1, 2), (6.0, 1, 1), (100.0, 0, 1), (0.01, 20, 20), (0.0, 20, 20)],
)
def test_what_is_drawn_fits_the_seconds_within_a_case(
    case_seconds: float, least: int, most: int
) -> None:
    found = {len(drawn(CASES, 6, case_seconds, str(seed))) for seed in range(200)}
    assert found == {least, most}


def test_over_many_seeds_a_campaign_takes_its_seconds() -> None:
    n_cases = sum(len(drawn(CASES, 6, 24.0, str(seed))) for seed in range(1000))
    assert 0.2 < n_cases / 1000 < 0.3


def test_all_campaigns_together_take_no_more_than_their_seconds() -> None:
    assert share_of_all([ALL_SECONDS / 4] * 2) == 1.0
    asked = [ALL_SECONDS, 2 * ALL_SECONDS, ALL_SECONDS]
    assert sum(asked) * share_of_all(asked) == pytest.approx(ALL_SECONDS)


def test_over_many_seeds_all_cases_are_drawn() -> None:
    taken = [drawn(CASES, 2, 1.0, str(seed)) for seed in range(100)]

    assert set().union(*taken) == set(CASES)


def test_two_campaigns_draw_different_places() -> None:
    others = [case.replace("many", "more") for case in CASES]

    places = [
        {case.partition("[")[2] for case in drawn(tests, 5, 1.0, "a seed")}
        for tests in (CASES, others)
    ]

    assert places[0] != places[1]


def test_the_mean_of_what_ran_is_recorded_and_the_rest_stays(tmp_path: Path) -> None:
    path, here = tmp_path / "seconds.tsv", "tests/test_draw.py::test"
    path.write_text(f"1.00\t{here}_a\n2.00\t{here}_b\n3.00\ttests/test_gone.py::test_c\n")
    ran = [
        Row(f"{here}_b[1]", Seconds(9.0, 4.0), True),
        Row(f"{here}_b[2]", Seconds(9.0, 5.0), True),
        Row(f"{here}_d", Seconds(1.0, 1.0), False),
    ]

    record(ran, path)

    assert expected(path) == {f"{here}_a": 1.0, f"{here}_b": 4.5}


def test_every_known_campaign_is_of_a_file_that_is_there() -> None:
    assert expected()
    assert all(file_of(name).exists() for name in expected())


def test_times_are_read_as_they_were_written_and_add_up(tmp_path: Path) -> None:
    rows = [
        Row("tests/a.py::test_a[x::y\t]", Seconds(2.0, 1.5), True),
        Row("tests/a.py::test_b", Seconds(1.0, 0.5), False),
        Row("tests/b.py::test_c", Seconds(0.5, 3.0), False),
    ]

    write(rows[::-1], tmp_path / "new" / "times.tsv")

    assert read(tmp_path / "new" / "times.tsv") == rows
    assert by_file(rows) == {"tests/b.py": Seconds(0.5, 3.0), "tests/a.py": Seconds(3.0, 2.0)}


def test_the_time_of_children_counts() -> None:
    before = now()

    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)

    assert now().cpu > before.cpu
