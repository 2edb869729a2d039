"""Every state that a crash can leave of a save: the old checkpoint or the new one, whole.

The log of a real save is cut at every place, the model of `crash` says what the drive may hold
then, and the real CheckpointReader looks at it.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from hetero.checkpoint.reader import State, steps
from hetero.checkpoint.shard import ShardReader
from hetero.checkpoint.writer import retain
from hetero.errors import HeteroError, NoCheckpoint
from hetero.io import Folder
from hetero.testing.faults import FileCall
from tests.faults.crash import Model, Recorder, Tree, as_tree, crash_states, frozen, lay_out
from tests.faults.saves import Quick, contents, load, save, unfinished

ID = re.compile("[0-9a-f]{32}")
MODELS: tuple[Model, ...] = ("prefix", "subset")


@dataclass
class Story:
    """What was on the drive, what was done, and which saves had returned by when."""

    before: Tree
    log: list[FileCall]
    returned: list[tuple[int, int]]
    """(operations in the log, step)"""

    def acknowledged(self, position: int) -> int:
        """Return the newest step that was reported done before a crash, -1 for none."""
        return max((step for at, step in self.returned if at <= position), default=-1)

    def without(self, position: int) -> Story:
        """Return the story as it would be had the code left one operation out."""
        log = self.log[:position] + self.log[position + 1 :]
        returned = [(at - (at > position), step) for at, step in self.returned]
        return Story(self.before, log, returned)


class Verdict(NamedTuple):
    """What a load found: a step, -1 for no checkpoint, None for an error."""

    step: int | None
    silent: bool
    half: bool


class Judge:
    """Lays trees out in a directory and lets the real reader look; remembers what it said."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._seen: dict[Hashable, Verdict] = {}

    def __call__(self, tree: Tree) -> Verdict:
        key = frozen(tree)
        if key not in self._seen:
            shutil.rmtree(self.place, ignore_errors=True)
            lay_out(tree, self.place)
            self._seen[key] = self._look()
        return self._seen[key]

    def _look(self) -> Verdict:
        half = any(found.state is State.DAMAGED for found in steps(self.place))
        try:
            found = load(self.place)
        except NoCheckpoint:
            return Verdict(-1, False, half)
        except HeteroError:
            return Verdict(None, False, half)
        return Verdict(found[0], found != contents(found[0]), half)


def crashes(story: Story, model: Model, judge: Judge) -> Counter[str]:
    """Count the states that every crash of a story may leave, by what is wrong with them."""
    counts: Counter[str] = Counter(states=0)
    met = set()
    for position, tree in crash_states(story.before, story.log, model):
        key = (frozen(tree), acknowledged := story.acknowledged(position))
        if key not in met:
            met.add(key)
            counts["states"] += 1
            counts[wrong(judge(tree), acknowledged)] += 1
    del counts[""]
    return counts


def wrong(verdict: Verdict, acknowledged: int) -> str:
    """Return what a state breaks, "" for nothing."""
    if verdict.step is None:
        return "LOST"
    if verdict.silent:
        return "SILENT"
    if verdict.step < acknowledged:
        return "LOST" if verdict.step < 0 else "ACK-LOST"
    return "HALF" if verdict.half else ""  # a visible checkpoint that is not whole


# -- stories -------------------------------------------------------------------------------------


class Teller:
    """Runs a scenario on real files and keeps its story."""

    def __init__(self, path: Path, saved: int = 0) -> None:
        path.mkdir()
        self.path = path
        with Folder.open(path, Quick()) as root:
            for step in range(saved):
                save(root, step)
        self.before, self.first = as_tree(path), saved - 1
        self.plan = Recorder()
        self.root = Folder.open(path, self.plan)
        self.returned: list[tuple[int, int]] = []

    def save(self, step: int, keep_last: int = 0) -> None:
        save(self.root, step)
        self.returned.append((len(self.log()), step))
        if keep_last:
            retain(self.root, keep_last)

    def log(self) -> list[FileCall]:
        """Return what was done: paths begin in the root, and names are the same again."""
        ids = {name: name for name in ID.findall(" ".join(self.before))}

        def told(path: str) -> str:
            path = f"{path}/".removeprefix(f"{self.path}/").rstrip("/")
            return ID.sub(lambda found: ids.setdefault(found[0], f"{len(ids) + 1:032x}"), path)

        return self.plan.told(told)

    def story(self) -> Story:
        return Story(self.before, self.log(), [(0, self.first), *self.returned])


def first_save(path: Path) -> Story:
    teller = Teller(path)
    teller.save(0)
    return teller.story()


def second_save(path: Path) -> Story:
    teller = Teller(path, saved=1)
    teller.save(1)
    return teller.story()


def save_and_retain(path: Path) -> Story:
    teller = Teller(path, saved=1)
    teller.save(1, keep_last=1)
    return teller.story()


def three_saves_that_keep_one(path: Path) -> Story:
    teller = Teller(path, saved=1)
    for step in (1, 2, 3):
        teller.save(step, keep_last=1)
    return teller.story()


def save_after_a_kill(path: Path) -> Story:
    teller = Teller(path, saved=1)
    shutil.copytree(path / "step-0", path / f"step-1.{'0' * 32}.tmp")
    teller.before = as_tree(path)
    teller.save(1)
    assert not unfinished(path)
    return teller.story()


def save_after_the_last_sync_failed(path: Path, times: int = 1) -> Story:
    """The first attempt is visible when its sync fails; then, perhaps, so does taking it back."""
    teller = Teller(path, saved=1)
    teller.plan.fail_at("sync_folder", 1, errno.EIO, times)
    with pytest.raises(HeteroError):
        teller.save(1)
    assert len(unfinished(path)) == times - 1
    teller.save(1)
    assert not unfinished(path)
    return teller.story()


def save_after_the_last_sync_failed_twice(path: Path) -> Story:
    return save_after_the_last_sync_failed(path, times=2)


STORIES = [
    first_save,
    second_save,
    save_and_retain,
    three_saves_that_keep_one,
    save_after_a_kill,
    save_after_the_last_sync_failed,
    save_after_the_last_sync_failed_twice,
]


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tell", STORIES)
def test_every_crash_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, tell: Callable[[Path], Story], model: Model
) -> None:
    counts = crashes(tell(tmp_path / "real"), model, Judge(tmp_path / "after"))

    print(f"{tell.__name__}, {model}: {dict(counts)}")
    assert counts.keys() == {"states"}
    assert counts["states"] > 20


FAILING = ("write", "sync", "sync_folder", "rename", "create", "reserve", "unlink")


@pytest.mark.campaign(seconds=2)
@pytest.mark.filterwarnings("ignore:an older checkpoint was not removed")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("op", FAILING)
def test_every_crash_of_a_save_that_failed_and_of_the_next_one_leaves_one_of_them(
    tmp_path: Path, op: str, model: Model
) -> None:
    judge, total = Judge(tmp_path / "after"), Counter[str]()
    for story in failures(tmp_path, op):
        total += crashes(story, model, judge)

    print(f"after {op} failed, {model}: {dict(total)}")
    assert total.keys() == {"states"}
    assert total["states"] > 20


def failures(path: Path, op: str) -> Iterator[Story]:
    """Yield what happens when any one such operation fails and the save is tried again."""
    told: list[Story] = []
    for k in range(20):
        teller = Teller(path / f"{op}-{k}", saved=1)
        teller.plan.fail_at(op, k, errno.EIO)
        try:
            teller.save(1, keep_last=1)
        except HeteroError:
            teller.save(1, keep_last=1)
        if not teller.plan.fired:
            break
        if teller.story() not in told:  # the log has no failures, so some are the same
            told.append(teller.story())
    yield from told


# -- the enumerator itself: what is left out has to be missed ------------------------------------


def named_syncs(story: Story) -> dict[str, int]:
    """Return the syncs of `save_and_retain` by what they are for, in their order."""
    names = ("bytes", "manifest", "names in the attempt", "name of the checkpoint")
    positions = [n for n, op in enumerate(story.log) if op.op in ("sync", "sync_folder")]
    return dict(zip((*names, "hiding the old one"), positions, strict=True))


MISSED = {  # what a crash does where a sync is left out; a journal needs two of them less
    ("bytes", "prefix"): {"LOST"},
    ("bytes", "subset"): {"LOST"},
    ("manifest", "prefix"): {"LOST"},
    ("manifest", "subset"): {"LOST"},
    ("names in the attempt", "prefix"): set(),
    ("names in the attempt", "subset"): {"LOST"},
    ("name of the checkpoint", "prefix"): {"ACK-LOST"},
    ("name of the checkpoint", "subset"): {"ACK-LOST", "LOST"},
    ("hiding the old one", "prefix"): set(),
    ("hiding the old one", "subset"): {"HALF"},
}


def test_each_sync_that_is_left_out_is_missed(tmp_path: Path) -> None:
    story, judge = save_and_retain(tmp_path / "real"), Judge(tmp_path / "after")

    found = {}
    for name, position in named_syncs(story).items():
        for model in MODELS:
            counts = crashes(story.without(position), model, judge)
            print(f"without the sync of {name}, {model}: {dict(counts)}")
            found[name, model] = counts.keys() - {"states"}

    assert found == MISSED


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize(
    "tell", [save_after_the_last_sync_failed, save_after_the_last_sync_failed_twice]
)
def test_each_sync_of_names_around_a_save_that_failed_is_missed_too(
    tmp_path: Path, tell: Callable[[Path], Story]
) -> None:
    story, judge = tell(tmp_path / "real"), Judge(tmp_path / "after")
    roots = [n for n, op in enumerate(story.log) if op.op == "sync_folder" and not op.where]

    for position in roots:
        counts = crashes(story.without(position), "subset", judge)
        print(f"{tell.__name__} without operation {position}: {dict(counts)}")
        assert counts.keys() & {"LOST", "ACK-LOST"}


def test_removing_the_old_checkpoint_before_the_new_one_is_durable_is_missed(
    tmp_path: Path,
) -> None:
    story, judge = save_and_retain(tmp_path / "real"), Judge(tmp_path / "after")
    durable = named_syncs(story)["name of the checkpoint"]
    late = [*story.log[:durable], *story.log[durable + 1 :], story.log[durable]]
    late.remove(story.log[named_syncs(story)["hiding the old one"]])

    counts = crashes(Story(story.before, late, [(0, 0)]), "subset", judge)

    print(f"removal before the last sync, subset: {dict(counts)}")
    assert counts["LOST"] > 0


def test_a_load_that_checks_no_bytes_is_seen_to_accept_mixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardReader, "_verify", lambda *_: None)
    story, judge = second_save(tmp_path / "real"), Judge(tmp_path / "after")
    (data, *_) = (n for n, op in enumerate(story.log) if op.op == "sync")

    counts = crashes(story.without(data), "prefix", judge)

    print(f"without CRCs and the sync of bytes: {dict(counts)}")
    assert counts["SILENT"] > 0
