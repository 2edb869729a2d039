"""Every state that a crash can leave of an export: the old directory or the new one, whole.

The log of a real export is cut at every place, the model of `crash` says what the drive may hold
then, and it is asked three things: what a loader finds there; what a next export leaves that fails
before it has written anything; and what one leaves that succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero.errors import DiskFull, DiskWriteError, StorageError
from hetero.exchange import NEW, OLD
from hetero.export import write
from hetero.tensorfile import INDEX, PART, SINGLE
from hetero.testing.faults import FileCall
from tests.faults.crash import Model, Recorder, Tree, as_tree, crash_states, frozen, lay_out
from tests.faults.saves import Quick

MODELS: tuple[Model, ...] = ("prefix", "subset")
LIMITS = {"one": 10**9, "two": 1}
PAIRS = [(old, new) for old in ("none", *LIMITS) for new in LIMITS]
HERE = "export"
THEIRS: Tree = {"README.md": b"mine", "logs": {"a": b"1"}}
CONFIG = "config.json"


class Seeded:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def to_json_file(self, path: str) -> None:
        Path(path).write_text(str(self.seed))


def net(seed: int) -> nn.Module:
    """Return a model of two tensors, with a config: both are of its seed alone."""
    made: Any = nn.Module()
    seeded = torch.Generator().manual_seed(seed)
    for name in "ab":
        made.register_parameter(name, nn.Parameter(torch.randn(3, generator=seeded)))
    made.config = Seeded(seed)
    return made


class NoExchange(Recorder):
    """On a system that cannot exchange directories."""

    def call(self, op: str, act: Callable[..., Any], *args: Any, **where: Any) -> Any:
        if op == "exchange":
            raise OSError(errno.EINVAL, "no exchange here")
        return super().call(op, act, *args, **where)


KINDS = [Recorder, NoExchange]


# -- stories ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """An export that replaces another: what was on the drive, what was done, when it returned."""

    before: Tree
    log: list[FileCall]
    after: Tree
    """What the directory holds in the end."""
    at_once: bool
    """Whether directories can be exchanged: no state between them then."""

    def without(self, position: int) -> Story:
        """Return the story as it would be had the code left one operation out."""
        return replace(self, log=self.log[:position] + self.log[position + 1 :])


def tell(path: Path, old: str, new: str, *plans: Recorder) -> Story:
    """Replace an export under each plan in turn; the last one lets it succeed."""
    before: Tree = {HERE: whole(path / "old", 1, old)}
    log: list[FileCall] = []
    lay_out(before, path / "real")
    for plan in plans:
        with contextlib.suppress(StorageError):
            write(net(2), path / "real" / HERE, LIMITS[new], plan)
        log += told(path, plan)
    assert as_tree(path / "real") == {HERE: whole(path / "new", 2, new)}
    return Story(before, log, whole(path / "new", 2, new), not isinstance(plans[0], NoExchange))


def told(path: Path, *plans: Recorder) -> list[FileCall]:
    """Return what was done under some plans; paths begin in the directory of a story."""
    root = f"{path / 'real'}/"
    return [op for plan in plans for op in plan.told(lambda n: f"{n}/".removeprefix(root)[:-1])]


def whole(path: Path, seed: int, limit: str) -> Tree:
    """Return an export of a model beside what is the user's: without one, a config as well."""
    if limit != "none" and not path.exists():
        write(net(seed), path, LIMITS[limit], Quick())
    return {**THEIRS, **(as_tree(path) if limit != "none" else {CONFIG: b"mine"})}


# -- verdicts --------------------------------------------------------------------------------------


def loaded(tree: Tree) -> Tree:
    """Return the files that a loader reads in a directory, by name; none where it finds nothing."""
    files = [SINGLE] if SINGLE in tree else []
    if not files and INDEX in tree:
        index = tree[INDEX]
        try:
            files = [INDEX, *json.loads(bytes(index))["weight_map"].values()]
        except ValueError:
            files = [INDEX]
    return {name: tree.get(name, b"") for name in (*files, CONFIG) if files}


class Judge:
    """Says what a state breaks; tries the next exports there, once where only bytes differ."""

    def __init__(self, place: Path, story: Story) -> None:
        self.place = place
        self.story = story
        self.old, self.new = loaded(story.before[HERE]), loaded(story.after)
        self._seen: dict[Hashable, str] = {}

    def __call__(self, tree: Tree, *, returned: bool) -> str:
        """Return "" where nothing is wrong."""
        return self._shown(tree, returned=returned) or self._theirs(tree) or self._next(tree)

    def _shown(self, tree: Tree, *, returned: bool) -> str:
        found = loaded(tree[HERE])
        if found == self.new or (found == self.old and not returned):
            return ""
        if found == self.old:
            return "ACK-LOST"
        between = not self.story.at_once and not returned
        aside = {CONFIG: tree[HERE].get(OLD + CONFIG, b"")}
        # weights whose config is set aside already: loaders of models find none there
        if between and (not found or {**found, **aside} in (self.old, self.new)):
            return ""
        return "MIXED" if found else "LOST"

    def _theirs(self, tree: Tree) -> str:
        places = [tree[HERE], tree.get(NEW + HERE, {})]
        readme = tree[HERE].get("README.md") == THEIRS["README.md"]
        logs = any(place.get("logs") == THEIRS["logs"] for place in places)
        return "" if readme and logs else "THEIRS"

    def _next(self, tree: Tree) -> str:
        key = frozen(shape(tree))
        if key not in self._seen:
            shutil.rmtree(self.place, ignore_errors=True)
            lay_out(tree, self.place)
            try:
                self._seen[key] = self._failed() or self._succeeded()
            except DiskWriteError:
                self._seen[key] = "STUCK"
        return self._seen[key]

    def _failed(self) -> str:
        """Let the next export find no room: it has cleared up, and is as if it never was."""
        plan = Quick()
        plan.fail_at("reserve", 0, errno.ENOSPC)
        with contextlib.suppress(DiskFull):
            write(net(3), self.place / HERE, LIMITS["two"], plan)
        tree = as_tree(self.place)
        ends = (self.story.before[HERE], self.story.after)
        whole = any(covers(tree[HERE], each) for each in ends)
        return "" if plan.fired and whole and tree.keys() == {HERE} else "UNDONE"

    def _succeeded(self) -> str:
        limit = "one" if SINGLE in self.story.after else "two"
        write(net(2), self.place / HERE, LIMITS[limit], Quick())
        return "" if as_tree(self.place) == {HERE: self.story.after} else "UNCLEAN"


def covers(tree: Tree, wanted: Tree) -> bool:
    """Whether a directory holds all of another; files that no index names may lie there too."""
    more = tree.keys() - wanted.keys()
    return all(PART.fullmatch(name) for name in more) and {**tree, **wanted} == tree


def shape(tree: Tree) -> Tree:
    """Return a state without the bytes of files that the next export only removes."""
    return {
        name: {
            each: b"" if each.startswith(NEW) or (name != HERE and each not in THEIRS) else data
            for each, data in sorted(folder.items())
        }
        for name, folder in tree.items()
    }


def crashes(story: Story, model: Model, judge: Judge, since: int = 0) -> Counter[str]:
    """Count the states that crashes of a story may leave, by what is wrong with them."""
    counts: Counter[str] = Counter(states=0)
    met = set()
    for position, tree in crash_states(story.before, story.log, model, since):
        key = (frozen(tree), returned := position == len(story.log))
        if key not in met:
            met.add(key)
            counts["states"] += 1
            counts[judge(tree, returned=returned)] += 1
    del counts[""]
    return counts


# -- what is asked of them -------------------------------------------------------------------------


@pytest.mark.campaign(seconds=0.5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_crash_of_an_export_leaves_the_old_directory_or_the_new_one(
    tmp_path: Path, old: str, new: str, kind: type[Recorder]
) -> None:
    story = tell(tmp_path, old, new, kind())

    counts = crashes(story, "prefix", Judge(tmp_path / "after", story))

    assert counts.keys() == {"states"}
    assert counts["states"] > 20


def cases() -> list[Any]:
    """Return what is exported over what; the gate tries the smallest of each kind."""
    small = [("none", "two", Recorder), ("two", "one", Recorder), ("one", "one", NoExchange)]
    all = [(old, new, kind) for old, new in PAIRS for kind in KINDS]
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each not in small)) for each in all]


@pytest.mark.parametrize(("old", "new", "kind"), cases())
def test_so_it_does_where_every_name_is_kept_or_lost_on_its_own(
    tmp_path: Path, old: str, new: str, kind: type[Recorder]
) -> None:
    story = tell(tmp_path, old, new, kind())

    counts = crashes(story, "subset", Judge(tmp_path / "after", story))

    print(f"{old} -> {new}, {kind.__name__}: {dict(counts)}")
    assert counts.keys() == {"states"}
    assert counts["states"] > 30


REPLACED = [(old, new, kind) for old, new in PAIRS if old != "none" for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, None], ids=["once", "killed"])
@pytest.mark.parametrize(("old", "new", "kind"), REPLACED)
@pytest.mark.parametrize("model", MODELS)
def test_so_does_every_crash_of_what_follows_on_an_export_that_failed(
    tmp_path: Path, old: str, new: str, kind: type[Recorder], times: int | None, model: Model
) -> None:
    """An operation fails once, and what is made of it is undone; or none succeeds any more, as
    after a kill, and the next export clears up."""
    total: Counter[str] = Counter()
    clean, counting = tell(tmp_path / "clean", old, new, kind()), kind()
    tell(tmp_path / "counting", old, new, counting)
    judge = Judge(tmp_path / "after", clean)
    for k in range(counting.seen["any"]):
        failing = kind()
        failing.fail_at("any", k, errno.EIO, times)
        story = tell(tmp_path / str(k), old, new, failing, kind())
        same = takewhile(lambda pair: pair[0] == pair[1], zip(clean.log, story.log, strict=False))
        total += crashes(story, model, judge, since=len(list(same)))

    print(f"{old} -> {new}, {kind.__name__}, {times}, {model}: {dict(total)}")
    assert total.keys() == {"states"}


def test_every_crash_of_what_undoes_a_killed_switch_leaves_the_old_export(tmp_path: Path) -> None:
    counting, killed, full = NoExchange(), NoExchange(), NoExchange()
    clean = tell(tmp_path / "clean", "two", "two", counting)
    active = [op.op for op in counting.log if op.op not in counting.PASSIVE]
    last = max(k for k, op in enumerate(active) if op == "rename")
    killed.fail_at("any", last, errno.EIO, None)
    full.fail_at("reserve", 0, errno.ENOSPC)
    story = tell(tmp_path / "killed", "two", "two", killed, full, NoExchange())
    judge, end = Judge(tmp_path / "after", clean), len(told(tmp_path / "killed", killed, full))

    log = story.log[:end]
    states = crash_states(story.before, log, "subset", since=len(told(tmp_path, killed)))
    found = Counter(judge(tree, returned=False) for _, tree in states)

    assert found.keys() == {""}
    assert found[""] > 20


@pytest.mark.parametrize("last", [1, 2, 4], ids=["sync", "removal", "switch"])
def test_an_export_killed_in_its_last_operations_does_not_come_back_over_the_next_one(
    tmp_path: Path, last: int
) -> None:
    """Its switch, or the removal of what it set aside, was not synced."""
    counting, killed = NoExchange(), NoExchange()
    clean = tell(tmp_path / "clean", "one", "one", counting)
    killed.fail_at("any", counting.seen["any"] - last, errno.EIO, None)

    story = tell(tmp_path / "killed", "one", "one", killed, NoExchange())
    since = len(told(tmp_path / "killed", killed))
    found = crashes(story, "subset", Judge(tmp_path / "after", clean), since)

    assert found.keys() == {"states"}
    assert found["states"] > 100


# -- the enumerator itself: what is left out has to be missed --------------------------------------


def syncs(story: Story) -> dict[str, int]:
    """Return where names are synced in a story, by what was done just before."""
    found, last = dict[str, int](), "nothing"
    for n, op in enumerate(story.log):
        if op.op == "sync_folder":
            found[f"{op.where.replace(NEW, 'new ') or 'above'} after {last}"] = n
        elif op.op != "open":
            last = f"{op.op} {op.where.replace(NEW, 'new ').replace(OLD, 'old ')}"
    return found


MISSED = {  # what a crash does where a sync is left out of an exchange, and of the way without
    "export after nothing": set(),  # nothing was left there to remove
    "new export after link export/README.md": {"LOST", "MIXED", "STUCK", "THEIRS"},
    "above after link export/README.md": set(),  # a name that is exchanged needs no other
    "above after exchange export": {"LOST", "MIXED", "STUCK", "THEIRS"},
    "new export after exchange export": set(),  # it is synced before
    "new export after unlink export/model.safetensors.index.json": {"THEIRS"},
    "above after rmdir new export": set(),  # the next export clears up
    "new export after unlink new export/.hetero-exchanged": set(),
}


def test_each_sync_that_is_left_out_is_missed(tmp_path: Path) -> None:
    story = tell(tmp_path, "two", "two", Recorder())
    judge = Judge(tmp_path / "after", story)

    found = {
        name: crashes(story.without(n), "subset", judge).keys() - {"states"}
        for name, n in syncs(story).items()
    }

    assert found == MISSED


def test_an_exchange_before_the_new_directory_is_durable_is_missed(tmp_path: Path) -> None:
    story = tell(tmp_path, "one", "two", Recorder())
    (exchange,) = (n for n, op in enumerate(story.log) if op.op == "exchange")
    names = syncs(story)["new export after link export/README.md"]
    files = max(n for n, op in enumerate(story.log[:exchange]) if op.op == "sync")

    for late in (names, files):
        log = [*story.log]
        log.insert(exchange, log.pop(late))  # just after the exchange
        wrong = crashes(replace(story, log=log), "subset", Judge(tmp_path / f"{late}", story))
        assert wrong.keys() & {"LOST", "MIXED"}


SWITCH = {  # the same of the switch in place, whose syncs are all of one directory
    "export after rmdir new export": {"UNDONE"},
    "export after rename export/model.safetensors.index.json": {"MIXED"},
}


@pytest.mark.slow
def test_each_sync_that_is_left_out_of_a_switch_in_place_is_missed(tmp_path: Path) -> None:
    story = tell(tmp_path, "two", "two", NoExchange())
    judge = Judge(tmp_path / "after", story)

    found = {
        name: crashes(story.without(n), "subset", judge).keys() - {"states"}
        for name, n in syncs(story).items()
    }

    print(found)
    assert found.items() >= SWITCH.items()
