"""Forked processes joined by gloo on 127.0.0.1, and what they must agree with."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.errors import RankLost
from hetero.parallel import farewell

SECONDS = 120.0
N_THREADS = 1
"""Of torch, in each rank: other numbers may give other bits."""


@dataclass(frozen=True)
class Died:
    """How a rank ended that did not return: its error, or the signal that killed it, with what its
    threads did then if the signal is one of a fault."""

    error: BaseException | None
    text: str


def run_ranks(n_ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``body(rank, *args)`` returned on each of ``n_ranks`` processes.

    Raises an error of a rank, with its traceback; if there are several, not one of a rank that
    only lost another.
    """
    found = outcomes(n_ranks, body, *args)
    died = [(rank, each) for rank, each in enumerate(found) if isinstance(each, Died)]
    for rank, each in sorted(died, key=lambda one: isinstance(one[1].error, RankLost)):
        raise AssertionError(f"rank {rank}: {each.text}") from each.error
    return found


def outcomes(n_ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, with `Died` in place of what a rank did not return."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        children = [_fork(rank, n_ranks, port, Path(folder), body, args) for rank in range(n_ranks)]
        ends = _wait_for(children)
        return [_outcome(Path(folder), rank, ends[pid]) for rank, pid in enumerate(children)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(
    rank: int, n_ranks: int, port: int, folder: Path, body: Callable[..., Any], args: Sequence[Any]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        # Garbage of the parent's is not this process's to destroy: a process group of torch, say,
        # whose end waits for threads that are not here.
        gc.freeze()
        faulthandler.disable()  # else it takes its handlers for its own that a library has replaced
        faulthandler.enable((folder / f"{rank}.fault").open("wb"))  # until the process ends
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank))
        torch.set_num_threads(N_THREADS)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=n_ranks,
            timeout=timedelta(seconds=SECONDS),
        )
        found = body(rank, *args)
        dist.destroy_process_group()
        status = 0
    except BaseException as error:
        found = Died(_pickled(error), traceback.format_exc())
        farewell.tell_error(error)  # as of an error that nothing catches
    finally:
        try:
            (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
        finally:
            os._exit(status)


def _pickled(error: BaseException) -> BaseException | None:
    """Return what another process gets of an error; None if it cannot be pickled."""
    try:
        found: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's own class may raise anything; its text goes along
        return None
    return found


def _wait_for(children: Sequence[int]) -> dict[int, int]:
    """Return each child's status; kill those that take too long, and stopped ones at the end."""
    ends: dict[int, int] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + SECONDS
    while len(ends) < len(children):
        for pid in children:
            if pid in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif done:
                ends[pid] = status
            elif time.monotonic() > deadline or len(ends) + len(stopped) == len(children):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return ends


def _outcome(folder: Path, rank: int, status: int) -> Any:
    path = folder / f"{rank}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    fault = folder / f"{rank}.fault"
    threads = fault.read_text(errors="replace") if fault.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    ended = f"killed: {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
    return Died(None, f"{ended}\n{threads}".rstrip())
