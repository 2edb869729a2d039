"""Numbered calls of the ranks of one machine, compared before any goes on (floor 3).

A rank writes each call, with a row for the others, on its own board and reads theirs. It cannot get
so far ahead that what others still read is overwritten: a call that all join ends when all made it.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from hetero import interrupts
from hetero.errors import DivergenceError, RankLost
from hetero.forks import Owner
from hetero.members import Members
from hetero.parallel.farewell import Parting
from hetero.parallel.fence import fence
from hetero.parallel.news import HEARING_SECONDS, KILLED, Left, News

CALLS = "the ranks' calls, which its parent makes"
SAID_BYTES, ROW_BYTES, HEAD_BYTES = 96, 400, 16
ENTRY_BYTES = HEAD_BYTES + SAID_BYTES + ROW_BYTES
N_ENTRIES = 64
GATHER = re.compile(r"bucket \d+ to HBM")
"""What a call for a gather in frames begins with."""
PAUSES_SECONDS = (0.0, 0.0001, 0.001)
"""Between looks at another rank's memory; the last one repeats."""
LOOKS = 64
"""At it, before the pause grows, and between looks whether its rank lives."""


class RankWatch:
    """Waits for what other ranks write, as long as they live and the timeout has not passed."""

    def __init__(self, pids: Mapping[int, int], news: News, timeout_seconds: float) -> None:
        self._owner = Owner(CALLS)
        self._number = news.number
        self._news = news
        self._awaited = threading.local()  # member that came last
        self._timeout = timeout_seconds
        self._lives = {other: os.pidfd_open(pid) for other, pid in pids.items()}

    @property
    def members(self) -> Members:
        return self._news.members

    def until(
        self, is_true: Callable[[], bool], number: int, what: str, *, is_call: bool = False
    ) -> None:
        """Block until something is true that a member brings about, and what it wrote before can be
        read; else raise RankLost: of a call, also if a member said that it failed, which makes no
        more of them, however long its process stays."""
        self._owner.check()
        looks, began = 0, 0.0
        while not is_true():
            self._awaited.number = number
            looks += 1
            began = began or time.monotonic()
            if looks % LOOKS == 0:
                dead = self._dead()
                if dead is not None and not is_true():
                    raise self.died(dead, what)
                failed = self._news.overdue(HEARING_SECONDS) if is_call else None
                if failed is not None and not is_true():
                    raise self._lost(number, what, failed)
                if time.monotonic() - began > self._timeout:
                    why = f"did nothing for {self._timeout:.0f} s"
                    late = self._left(number, Parting.SILENT, why)
                    raise self._lost(number, what, self._news.known() or late)
            interrupts.point(2)
            time.sleep(PAUSES_SECONDS[min(looks // LOOKS, len(PAUSES_SECONDS) - 1)])
        fence()

    def awaited(self) -> int | None:
        """Return the member of the last wait that this thread did not ask for yet."""
        number, self._awaited.number = getattr(self._awaited, "number", None), None
        return number

    def _dead(self) -> int | None:
        gone = select.poll()  # of this thread alone: a save waits too
        for other, handle in self._lives.items():
            if other != self._number:
                gone.register(handle, select.POLLIN)
        ended = {handle for handle, _ in gone.poll(0)}
        return next((other for other, handle in self._lives.items() if handle in ended), None)

    def died(self, number: int, what: str) -> RankLost:
        """Return the error of a wait for a member whose process ended."""
        cause = self._news.cause(self._left(number, Parting.KILLED, KILLED))
        return self._lost(number, what, cause)

    def _left(self, number: int, how: Parting, why: str) -> Left:
        return Left(how, self.members.ranks[number], why)

    def _lost(self, number: int, what: str, left: Left) -> RankLost:
        return self._news.lost(f"{what} of {self.members.name(number)}", left)

    def close(self) -> None:
        for handle in self._lives.values():
            with suppress(OSError):
                os.close(handle)
        self._lives.clear()


class Entries:
    """One rank's board: how many calls it has made, and the last of them."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._first = start + 8
        self._made: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, 1, start)

    @staticmethod
    def size_bytes() -> int:
        return 8 + N_ENTRIES * ENTRY_BYTES

    @property
    def n_calls(self) -> int:
        return int(self._made[0])

    def has_made(self, call: int) -> bool:
        return self.n_calls >= call

    def write(self, call: int, said: bytes, row: bytes, n_bytes: int) -> None:
        at = self._first + call % N_ENTRIES * ENTRY_BYTES
        head = call.to_bytes(8, "little") + n_bytes.to_bytes(8, "little")
        entry = head + said.ljust(SAID_BYTES) + row
        self._memory[at : at + len(entry)] = entry
        fence()  # also after all that this rank has read, and others may overwrite now
        self._made[0] = call

    def read(self, call: int) -> tuple[int, str, int, bytes]:
        """Return an entry: its call, what was said, the row's bytes, and the row if it is short."""
        at = self._first + call % N_ENTRIES * ENTRY_BYTES
        entry = self._memory[at : at + ENTRY_BYTES]
        number, n_bytes = (int.from_bytes(entry[i : i + 8], "little") for i in (0, 8))
        said = entry[HEAD_BYTES : HEAD_BYTES + SAID_BYTES].rstrip().decode(errors="replace")
        row = entry[HEAD_BYTES + SAID_BYTES :][: min(n_bytes, ROW_BYTES)]
        return number, said, n_bytes, row


class Board:
    """The boards of all ranks.

    Args:
        mail: returns the memory of a rank's long rows, by the rank and the number of its letter.
    """

    def __init__(
        self,
        rank: int,
        entries: Sequence[Entries],
        watch: RankWatch,
        mail: Callable[[int, int], memoryview],
    ) -> None:
        self._rank = rank
        self._entries = entries
        self._watch = watch
        self._mail = mail
        self._owner = Owner(CALLS)
        self._n_letters = 0
        self._letters: dict[int, int] = {}  # by call

    @property
    def n_calls(self) -> int:
        """Calls that this rank has made."""
        return self._entries[self._rank].n_calls

    def post(self, what: str, row: bytes) -> int:
        """Make a call; return its number, to `join` it."""
        self._owner.check()
        mine = self._entries[self._rank]
        call = mine.n_calls + 1
        self._letters[call] = self._n_letters
        self._n_letters += 1
        if len(row) > ROW_BYTES:
            self._mail(self._rank, self._letters[call])[: len(row)] = row
            mine.write(call, what.encode()[:SAID_BYTES], b"", len(row))
        else:
            mine.write(call, what.encode()[:SAID_BYTES], row, len(row))
        return call

    def join(self, call: int) -> list[bytes]:
        """Return the rows of all ranks once they have made a call; DivergenceError if they made
        another one."""
        letter = self._letters.pop(call)
        _, said, _, _ = self._entries[self._rank].read(call)
        found: list[tuple[int, str, int, bytes]] = []
        for rank, entries in enumerate(self._entries):
            made = partial(entries.has_made, call)
            self._watch.until(made, rank, said or "a call", is_call=True)
            found.append(entries.read(call))
        check_calls([(number, what) for number, what, _, _ in found], self._watch.members)
        return [
            row if n_bytes <= ROW_BYTES else bytes(self._mail(rank, letter)[:n_bytes])
            for rank, (_, _, n_bytes, row) in enumerate(found)
        ]


def check_calls(calls: Sequence[tuple[int, str]], members: Members) -> None:
    """Raise DivergenceError unless all members are about to do the same thing."""
    if len(set(calls)) == 1:
        return
    said = members.listed(f"call {number}, {what}" for number, what in calls)
    if any(GATHER.match(what) for _, what in calls):
        advice = (
            "ranks that gather shares have to use the model alike: call the same lines on every"
            " rank, and let all go through the same modules"
        )
    else:
        advice = (
            "all ranks must step, clip, save, load, export and write weights alike: call the same"
            " lines on every rank; with reentrant checkpointing each block is a pass of its own, of"
            " which all have to make as many"
        )
    raise DivergenceError(f"ranks that share a model go different ways ({said})", advice=advice)
