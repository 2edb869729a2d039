"""Every mutant can be planted, and the tests that are to find it exist."""

from __future__ import annotations

import re

import pytest

from tests.draw import ROOT
from tests.mutants.mutant import DoesNotApply, Edit, Mutant, applied, edits, mutants

ALL = mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_changes_something(mutant: Mutant) -> None:
    assert mutant.bug and mutant.edits
    for edit in mutant.edits:
        text = (ROOT / edit.path).read_text()
        assert applied(edit, text) != text


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    named = [each for each in mutant.tests if each.startswith("tests/")]

    assert named
    for each in named:
        path, _, rest = each.partition("::")
        text = (ROOT / path).read_text()
        assert not rest or re.search(rf"^def {re.escape(rest.partition('[')[0])}\(", text, re.M)


def test_there_are_sixty_of_them() -> None:
    assert len(ALL) >= 60


PATCH = ["--- a.py", "@@", " one", "-two", "+2", "@@", "-four"]


def test_a_patch_is_lines_that_stand_together() -> None:
    first, second = edits(PATCH)

    assert first == Edit("a.py", "one\ntwo\n", "one\n2\n")
    assert second == Edit("a.py", "four\n", "")
    assert applied(first, "one\ntwo\nfour\n") == "one\n2\nfour\n"
    assert applied(second, "one\ntwo\nfour\n") == "one\ntwo\n"


@pytest.mark.parametrize(
    "text", ["", "one\n", "one\nthree\ntwo\n", "one\ntwo\none\ntwo\n", "xone\ntwo\n"]
)
def test_lines_that_stand_nowhere_or_twice_are_refused(text: str) -> None:
    with pytest.raises(DoesNotApply):
        applied(edits(PATCH)[0], text)
