"""What ranks compare, and what one of them fails in, names ranks of the world."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hetero.checkpoint.names import union
from hetero.checkpoint.save import check_alike
from hetero.checkpoint.together import FAILED, together
from hetero.errors import HeteroError
from hetero.members import Members, all_of
from hetero.parallel.board import check_calls
from hetero.train.engine.alike import check_names, compare

HERE = Path(__file__).resolve().parent.parent / "hetero"
SECOND_STAGE = Members((2, 3), 4)
OF_FILES = ("members.py", "report/ranks.py", "testing/")
"""Where "rank" may stand in front of a number: one that a run recorded is the world's."""


class Told:
    """Two ranks of the world's four, who tell each other rows that are known."""

    rank, size, node, members = 0, 2, None, SECOND_STAGE

    def __init__(self, *rows: bytes) -> None:
        self._rows = list(rows)

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return self._rows

    agree_aside = agree

    def close(self) -> None: ...


def test_members_have_names_in_the_world() -> None:
    assert SECOND_STAGE.name_in_world(1) == "rank 3 of 4"
    assert SECOND_STAGE.names([0, 1]) == "ranks 2, 3"
    assert SECOND_STAGE.listed(["this", "that"]) == "rank 2: this; rank 3: that"
    assert all_of(4).listed(["this", "that"], 2) == "rank 2: this; rank 3: that"


def compared() -> None:
    rows = [pickle.dumps({"lr": each}) for each in ("this", "that")]
    compare(Told(*rows), {"lr": "this"}, "settings", advice="")


def failed() -> None:
    told = json.dumps(["DiskFull", "no room", ""]).encode()
    together(Told(b"+", FAILED + told), "a save", lambda: b"")


def saved() -> None:
    rows = [json.dumps([[], groups, {}]).encode() for groups in ([], [[]])]
    union(rows, SECOND_STAGE)


BOTH = "rank 2: .*this; rank 3: .*that"


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (compared, BOTH),
        (lambda: check_names([["this"], ["that"]], SECOND_STAGE), BOTH),
        (lambda: check_calls([(1, "this"), (1, "that")], SECOND_STAGE), BOTH),
        (lambda: check_alike([b"this", b"that"], SECOND_STAGE), "rank 3 saves other tensors"),
        (saved, "rank 3 saves an optimizer of 1 groups"),
        (failed, "a save failed on rank 3: no room"),
    ],
    ids=["facts", "tensors", "calls", "saves", "groups", "failures"],
)
def test_an_error_of_some_ranks_names_ranks_of_the_world(
    act: Callable[[], None], said: str
) -> None:
    with pytest.raises(HeteroError, match=said):
        act()


def test_one_module_writes_names_of_ranks() -> None:
    assert not numbered(sorted(HERE.rglob("*.py")))


def numbered(paths: Sequence[Path]) -> list[str]:
    """Return where modules write a number of their own as a rank's name."""
    found = {str(path.relative_to(HERE)): path.read_text() for path in paths}
    return [
        f"{name}: {line.strip()}"
        for name, text in found.items()
        if not name.startswith(OF_FILES)
        for line in text.splitlines()
        if re.search(r"\brank \{", line)
    ]
