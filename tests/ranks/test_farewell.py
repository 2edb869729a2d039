"""What ranks read of one that left: which it was, and its error, its end, or that it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint.verify import verify
from hetero.checkpoint.writer import Writer
from hetero.config import Config
from hetero.errors import DivergenceError, OutOfMemory, RankLost
from hetero.parallel import farewell, node
from hetero.parallel.farewell import AT_ITS_END
from hetero.parallel.gloo import Talks
from hetero.parallel.launch import launch
from hetero.parallel.news import HEARING_SECONDS
from hetero.recipes.endings import exit_status
from hetero.testing.ranks import Died, free_port, outcomes
from hetero.train.engine.setup import Setup
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import Net, Run, built, loss_of
from tests.ranks.test_copies import WAYS

RUN = Run(steps=2, settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})
TIMEOUT = 20.0
DAMAGED = "ValueError: a batch of this rank is damaged"


def prepared(rank: int, way: str, timeout_seconds: float = TIMEOUT) -> tuple[Net, Any]:
    """Share a model between four ranks; where they are apart, on two machines."""
    if way == "apart":
        node.machine = lambda: f"machine {rank // 2}"
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    model, plain = built(RUN)
    config = Config.load(mesh=mesh, timeout_seconds=timeout_seconds, **RUN.settings)
    return prepare_tuned(model, plain, config, Tuning(one_sided=way != "gathered"))


class Leaving(NamedTuple):
    """How a rank leaves in its second step, and what the others read of it."""

    rank: int
    where: str
    act: Callable[[], None]
    told: str


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trains(rank: int, way: str, leaving: Leaving, late: int | None = None) -> None:
    """Train two steps; one rank leaves in the second, and a late one comes when others are gone."""
    model, optimizer = prepared(rank, way)
    act = leaving.act if rank == leaving.rank else lambda: None
    for step in range(2):
        if step == 1 and rank == late:
            time.sleep(1.5 * HEARING_SECONDS)
        if step == 1 and leaving.where == "forward":
            act()
        if step == 1 and leaving.where == "backward":
            model.blocks[1][0].weight.register_post_accumulate_grad_hook(lambda param: act())
        loss_of(model, RUN, step, rank).backward()
        if step == 1 and leaving.where == "step":
            act()
        optimizer.step()
        optimizer.zero_grad()


def assert_lost(end: Any, leaving: Leaving) -> None:
    """Assert that a rank names the one that left, and none that left after it."""
    assert isinstance(end, Died) and isinstance(end.error, RankLost), end
    assert f"in vain: rank {leaving.rank} left ({leaving.told}" in str(end.error), end.text
    assert str(end.error).count("in vain") == 1, end.text


LEAVINGS = {
    "first rank": Leaving(
        0, "forward", raises(ValueError("a batch of this rank is damaged")), DAMAGED
    ),
    "last rank": Leaving(
        3, "backward", raises(ValueError("a batch of this rank is damaged")), DAMAGED
    ),
    "interrupt": Leaving(1, "step", raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "memory": Leaving(
        2,
        "forward",
        raises(OutOfMemory("planted", tier="HBM")),
        "OutOfMemory: HBM out of memory. planted",
    ),
    "killed": Leaving(2, "backward", be_killed, "it was killed"),
    "first is killed": Leaving(0, "step", be_killed, "it was killed"),
}


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", list(LEAVINGS))
def test_all_others_read_which_rank_left_and_why(case: str, way: str) -> None:
    leaving = LEAVINGS[case]
    ends = outcomes(4, trains, way, leaving)

    for rank, end in enumerate(ends):
        if rank != leaving.rank:
            assert_lost(end, leaving)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["last rank", "killed"])
def test_a_rank_that_comes_late_reads_the_first_cause(case: str, way: str) -> None:
    leaving = LEAVINGS[case]
    late = 0 if leaving.rank > 1 else 2
    ends = outcomes(4, trains, way, leaving, late)

    assert_lost(ends[late], leaving)


def gives_up(rank: int, fails: bool) -> None:
    """Leave by another error than the first rank that left."""
    leaving = LEAVINGS["killed"]
    if fails:
        failed = raises(DivergenceError("planted") if rank == 0 else ValueError("planted"))
        leaving = Leaving(rank if rank in (0, 3) else 3, "forward", failed, "")
    try:
        trains(rank, "gathered", leaving, late=1)
    except RankLost:
        if rank == 1:
            raise
        raise OSError("what was to be saved at the end") from None


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("fails", [True, False], ids=["failed", "killed"])
def test_an_error_that_follows_does_not_hide_the_first_cause(fails: bool) -> None:
    end = outcomes(4, gives_up, fails)[1]
    assert isinstance(end, Died) and isinstance(end.error, RankLost), end
    assert ("rank 3 left (ValueError" if fails else "rank 2 left (it was killed") in str(end.error)


def goes_on(rank: int, way: str, folder: Path) -> int:
    """Say that this rank fails, and end only after the others: something keeps its process."""
    model, optimizer = prepared(rank, way, timeout_seconds=60.0)
    loss_of(model, RUN, 0, rank).backward()
    if rank == 3:
        farewell.tell_error(ValueError("a batch of this rank is damaged"))
    else:
        try:
            optimizer.step()
        except RankLost as error:
            (folder / str(rank)).write_text(str(error))
    deadline = time.monotonic() + 20.0
    while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(list(folder.iterdir()))


@pytest.mark.parametrize("way", ["read", "gathered"])
def test_a_rank_that_failed_is_not_waited_for_until_its_process_ends(
    way: str, tmp_path: Path
) -> None:
    assert outcomes(4, goes_on, way, tmp_path) == [3] * 4
    for file in tmp_path.iterdir():
        assert f"rank 3 left ({DAMAGED})" in file.read_text()


def stops(rank: int, n_ranks: int) -> None:
    model, plain = built(RUN)
    config = Config.load(mesh="world", timeout_seconds=2.0, **RUN.settings)
    prepare_tuned(model, plain, config, Tuning(one_sided=False))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    loss_of(model, RUN, 0, rank).backward()


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_that_stops_between_machines_is_lost_after_the_timeout(n_ranks: int) -> None:
    first, second, *others = outcomes(n_ranks, stops, n_ranks)

    assert isinstance(second, Died) and second.error is None
    for end in (first, *others):
        assert isinstance(end.error, RankLost), end
        assert "had no answer for 2 s" in str(end.error) or n_ranks == 2
        assert "rank 1 said nothing for 2 s" in str(end.error) or n_ranks == 3


def blocks(rank: int) -> None:
    talks = Talks([range(2)], 1.0)
    if rank == 0:
        call = dist.all_reduce(torch.zeros(1), group=talks.meetings.group, async_op=True)
        talks.waits.finish(call, "a sum")
    time.sleep(4.0)  # and says nothing


def test_a_rank_that_says_nothing_is_named_by_whichever_clock_is_first() -> None:
    first, _ = outcomes(2, blocks)

    assert isinstance(first.error, RankLost), first
    assert "a sum in vain: rank 1 said nothing for 1 s" in str(first.error)


def cannot_prepare(rank: int) -> None:
    """Fail at the end of `prepare` on one rank, which goes on without the model."""

    def fail(self: Setup) -> None:
        raise ValueError("a module of this rank is damaged")

    if rank == 1:
        Setup.rewrite = fail
        with pytest.raises(ValueError, match="damaged"):
            prepared(rank, "read")
        return
    model, _ = prepared(rank, "read")
    loss_of(model, RUN, 0, rank).backward()


def test_a_rank_that_could_not_prepare_says_why() -> None:
    for rank, end in enumerate(outcomes(4, cannot_prepare)):
        if rank != 1:
            assert isinstance(end.error, RankLost), end
            assert "rank 1 left (ValueError: a module of this rank is damaged" in str(end.error)


def saves(rank: int, folder: Path) -> None:
    """Fail while a save is under way, which this rank's thread makes slowly."""
    model, optimizer = prepared(rank, "gathered")
    if rank == 1:
        finish = Writer._finish

        def late(self: Writer, *args: Any) -> Any:
            time.sleep(2 * HEARING_SECONDS)
            return finish(self, *args)

        Writer._finish = late
    loss_of(model, RUN, 0, rank).backward()
    optimizer.step()
    hetero.save_checkpoint(folder, model, optimizer, asynchronous=True)
    try:
        if rank == 1:
            raise ValueError("a batch of this rank is damaged")
        loss_of(model, RUN, 1, rank).backward()
    except (ValueError, RankLost) as error:
        farewell.tell_error(error)
        engine_of(model).setup.saver.join()  # as the interpreter waits for threads
        raise


def test_a_save_that_is_under_way_when_a_rank_fails_is_committed(tmp_path: Path) -> None:
    ends = outcomes(4, saves, tmp_path)
    assert all(f"rank 1 left ({DAMAGED}" in ends[rank].text for rank in (0, 2, 3)), ends
    assert verify(tmp_path).ok


def is_a_program(rank: int, as_command: bool, port: int) -> int:
    """Fail in a program that turns errors into exit statuses."""

    def work() -> None:
        trains(rank, "gathered", LEAVINGS["first rank"])

    if as_command:
        return exit_status(work)
    dist.destroy_process_group()
    given = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(given)
    try:
        with launch(TIMEOUT):
            work()
    except ValueError:
        os._exit(1)
    return 0


@pytest.mark.parametrize("as_command", [True, False], ids=["hetero run", "hetero train"])
def test_a_program_that_catches_its_error_says_why(
    as_command: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = outcomes(4, is_a_program, as_command, free_port())
    said = capfd.readouterr().err if as_command else "".join(end.text for end in ends[1:])
    assert ends[0] == 1 or not as_command
    assert said.count(f"rank 0 left ({DAMAGED})") >= 3


# -- as the interpreter ends a process ---------------------------------------------------------

SCRIPT = """
import sys
import torch
import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint.verify import verify
from hetero.checkpoint.writer import Writer
from hetero.config import Config
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import Net

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = Net()
plain = torch.optim.AdamW(model.parameters())
config = Config.load(mesh="world", device="cpu", timeout_seconds=60)
model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=sys.argv[2] == "read"))
try:
    for step in range(2 + (rank == 1)):
        model(torch.randn(3, 10)).sum().backward()
        if rank == 0 and step == 1 and sys.argv[1] == "error":
            raise ValueError("a batch of this rank is damaged")
        optimizer.step()
finally:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(
    ("end", "way", "told"),
    [("error", "gathered", DAMAGED), ("uneven", "read", AT_ITS_END)],
    ids=["error", "uneven"],
)
def test_a_process_that_ends_says_why(end: str, way: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    _, last = ends_of([sys.executable, str(script), end, way])

    assert "RankLost" in last
    assert f"rank 0 left ({told})" in last


def ends_of(command: list[str]) -> list[str]:
    """Return what two ranks, of which the first holds the group's store, print of their end."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **given, **place, "PYTHONPATH": os.pathsep.join(sys.path)}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    return [process.communicate(timeout=120)[1] for process in ranks]
