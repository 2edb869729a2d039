"""Before a rank says in shared memory that something is there, it is: a fence stands between."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetero.device.comm import Comm
from hetero.memory.layout import Layout, ParamSpec, build_layout
from hetero.parallel import board, node
from hetero.parallel.board import ENTRY_BYTES, HEAD_BYTES, SAID_BYTES, Entries, RankWatch
from hetero.parallel.news import News
from hetero.parallel.node import Control, SharedNode

ROW = b"row " * 50


def at_fences(monkeypatch: pytest.MonkeyPatch, module: Any, look: Callable[[], Any]) -> list[Any]:
    """Return what ``look`` sees at each fence of a module from now on."""
    seen: list[Any] = []
    monkeypatch.setattr(module, "fence", lambda: seen.append(look()))
    return seen


def layout() -> Layout:
    value = torch.empty(4)
    spec = ParamSpec("p", 0, (4,), value.stride(), torch.float32, True)
    return build_layout([spec], ["u"], 4096)


def shared_node() -> tuple[SharedNode, Control]:
    control = Control(mmap.mmap(-1, Control.size_bytes(2)), os.getpid(), 2)
    news = cast("News", SimpleNamespace(number=0))
    comm = cast("Comm", SimpleNamespace(rank=0, n_shares=1))
    watch = RankWatch({0: os.getpid()}, news, 1.0)
    return SharedNode(comm, layout(), {0: control}, watch), control


def test_a_call_is_counted_when_all_of_its_entry_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = mmap.mmap(-1, Entries.size_bytes())
    entries = Entries(memory, 0)

    def look() -> tuple[int, bytes]:
        entry = memory[8 + ENTRY_BYTES : 8 + 2 * ENTRY_BYTES]
        return entries.n_calls, entry[HEAD_BYTES + SAID_BYTES :][: len(ROW)]

    seen = at_fences(monkeypatch, board, look)
    entries.write(1, b"a call", ROW, len(ROW))
    assert seen == [(0, ROW)]
    assert entries.n_calls == 1 and entries.read(1) == (1, "a call", len(ROW), ROW)


def test_what_was_waited_for_is_read_after_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, _ = shared_node()
    answers = iter([False, False, True])
    asked: list[bool] = []

    def is_true() -> bool:
        asked.append(next(answers))
        return asked[-1]

    seen = at_fences(monkeypatch, board, lambda: [*asked])
    shared._watch.until(is_true, 0, "an answer")
    assert seen == [[False, False, True]]
    shared.close()


def test_a_change_is_counted_after_it_and_read_after_it_was_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, control = shared_node()
    asked: list[int] = []
    monkeypatch.setattr(Control, "has_made", lambda *_: not asked.append(1))
    seen = at_fences(monkeypatch, node, lambda: (int(control.counts[1]), len(asked)))
    shared.begin(1)
    shared.changed(1)
    assert seen == [(0, 0)] and control.counts.tolist() == [0, 1]
    assert shared.is_current(1)
    assert seen[1:] == [(1, 1)]
    shared.close()


def test_a_file_has_its_name_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, control = shared_node()
    seen = at_fences(monkeypatch, node, lambda: control.files[0].tolist())
    control.add("home p", 7)
    assert seen == [[node.number_of("home p"), 0]]
    assert control.file("home p") == 7
    shared.close()
