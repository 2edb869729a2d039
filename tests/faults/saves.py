"""Small checkpoints with known bytes, and doors that make tests fast (no torch: it is forked)."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.writer import Writer
from hetero.io import IO, Folder
from hetero.tensorfile import BLOCK
from hetero.testing.faults import FaultPlan

T = TypeVar("T")

SMALL = (
    SavedTensor("param", "layers.0.weight", "", "bfloat16", (37, 41)),
    SavedTensor("state", "layers.0.weight", "exp_avg", "float32", (37, 41)),
    SavedTensor("buffer", "steps", "", "int64", ()),
    SavedTensor("state", "unused", "exp_avg", "float32", (0, 7)),
    SavedTensor("master", "layers.0.weight", "", "int16", (37, 41)),
)
META = {"lr": 0.1, "betas": [0.9, 0.999], "rng": [2**127 + 1, None, True], "name": "ü\ud800"}

Contents = tuple[int, dict[str, Any], tuple[bytes, ...]]


class Buffered(IO):
    """A drive without direct I/O: reads of bytes just written need not wait for it."""

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op in ("open", "create") and args[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().call(op, act, *args, where=where, offset=offset)


class Quick(FaultPlan):
    """A fault plan over the page cache, whose syncs reach no drive: what a crash leaves is not
    what its tests ask."""

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op in ("open", "create") and args[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        if op in ("sync", "sync_folder"):
            return super().call(op, lambda fd: None, *args, where=where, offset=offset)
        return super().call(op, act, *args, where=where, offset=offset)


def contents(step: int, entries: Sequence[SavedTensor] = SMALL) -> Contents:
    """Return what the checkpoint of a step holds: random bytes that its number alone decides."""
    seeded = random.Random(step)
    return step, {**META, "step": step}, tuple(seeded.randbytes(e.n_bytes) for e in entries)


def save(root: Folder, step: int, entries: Sequence[SavedTensor] = SMALL) -> Path:
    """Save the contents of a step, one call a block."""
    _, meta, data = contents(step, entries)
    with Writer(root, step, entries) as writer:
        for number, each in enumerate(data):
            for start in range(0, len(each), BLOCK):
                writer.write(number, start, memoryview(each)[start : start + BLOCK])
        return writer.commit(meta)


def everything(reader: CheckpointReader) -> Contents:
    """Return all that an open checkpoint holds."""
    data = [bytearray(entry.n_bytes) for entry in reader.entries]
    for number, each in enumerate(data):
        reader.read(number, 0, memoryview(each))
    return reader.step, reader.meta, tuple(bytes(each) for each in data)


def load(path: str | Path, step: int | None = None, io: IO | None = None) -> Contents:
    with CheckpointReader.open(path, step, io or Buffered()) as reader:
        return everything(reader)


def unfinished(path: Path) -> list[str]:
    return [each.name for each in path.iterdir() if each.name.endswith(".tmp")]
