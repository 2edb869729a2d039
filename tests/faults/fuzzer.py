"""Loads thousands of crafted manifests under an audit hook; a process of its own, for the hook.

    python -m tests.faults.fuzzer DIRECTORY N

The last line is JSON: outcomes by name, events that should not be, growth of memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hetero.checkpoint.manifest import MANIFEST, SHARD, layout
from hetero.checkpoint.reader import CheckpointReader
from hetero.errors import CheckpointError
from hetero.io import ALIGN, Folder
from tests.faults.crafted import Record, head_of, record_of, sealed, text_of
from tests.faults.saves import Buffered, Quick, contents, everything, save

WARM = 200  # loads before the hook, which let Python import what it imports late
NEVER = (
    "exec",
    "compile",
    "import",
    "marshal.",
    "pickle.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
NEVER += ("os.fork", "subprocess.", "socket.", "urllib.", "ctypes.dlopen", "os.remove", "os.rename")
NEVER += ("os.mkdir", "os.link", "os.symlink", "os.chmod", "shutil.", "code.__new__", "glob.")
SHARD_BYTES = b"".join(d + bytes(-len(d) % ALIGN) for d in contents(1)[2])
VALUES: list[Any] = [
    *(0, 1, -1, 2, 7, 4095, 4096, 2**31, 2**32, 2**53, 2**60, 2**63, 2**64, 10**30, 0.5, 1e308),
    *(float("nan"), float("inf"), True, False, None, "", "a", "../x", "/etc/passwd", "a/b", "\0"),
    *(
        "r00000.bin",
        "model-0.safetensors",
        "MANIFEST.json",
        "step-2",
        "x" * 300,
        "\ud800",
        "0" * 8,
        "0:1",
    ),
    *(
        "float32",
        "uint8",
        "complex128",
        "__import__('os').system('true')",
        "cos\nsystem\n(S'x'\ntR.",
    ),
    *([], {}, [[]], [{}], {"a": {}}, [0] * 100, [2**40] * 3, {"__class__": "os.system"}),
]


class Watch:
    """Notes every event that content must not cause."""

    def __init__(self, path: Path) -> None:
        self.allowed = {str(path), "step-1", MANIFEST, SHARD}
        self.bad: Counter[str] = Counter()
        self.active = True

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open" and args[0] not in self.allowed:
            self.bad[f"open {args[0]!r}"] += 1
        elif event.startswith(NEVER):
            self.bad[event] += 1


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value in a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [(*path, key) for key, _ in inner]
    for key in [place[-1] for place in found]:
        if isinstance(value[key], (dict, list)):
            found += places(value[key], (*path, key))
    return found


def mutate(record: Record, seeded: random.Random) -> None:
    """Change one place of a record."""
    *way, key = seeded.choice(places(record))
    home: Any = record
    for step in way:
        home = home[step]
    act = seeded.randrange(6)
    if act == 0:
        del home[key]
    elif act == 1 and isinstance(home[key], int):
        home[key] += seeded.choice([-1, 1, -4096, 4096, 2**32])
    elif act == 2 and isinstance(home, list):
        home.insert(key, home[seeded.randrange(len(home))])
    elif act == 3 and isinstance(home, dict):
        home[seeded.choice(["a", "kind", "shards", "__proto__"])] = seeded.choice(VALUES)
    elif act == 4:
        *other_way, other = seeded.choice(places(record))
        donor: Any = record
        for step in other_way:
            donor = donor[step]
        home[key] = json.loads(json.dumps(donor[other]))
    else:
        home[key] = seeded.choice(VALUES)


def scramble(body: bytes, seeded: random.Random) -> bytes:
    """Change the text: cut, repeat, insert marks, nest."""
    raw = bytearray(body)
    for _ in range(seeded.randrange(1, 4)):
        a, b = sorted(seeded.randrange(len(raw) + 1) for _ in range(2))
        act = seeded.randrange(5)
        if act == 0:
            del raw[a : min(b, a + 20)]
        elif act == 1:
            raw[a:a] = raw[a : min(b, a + 200)]
        elif act == 2:
            raw[a:a] = seeded.choice(
                [b"[", b"]", b"{", b"}", b'"', b",", b"\\", b":", b"\xff", b"\0"]
            )
        elif act == 3:
            raw[a:a] = b"[" * seeded.choice([1, 20, 10_000])
        else:
            raw[a:a] = str(seeded.choice([10**50, 2**63, -5, 1e300])).encode()
    return bytes(raw)


def main(path: Path, count: int) -> dict[str, Any]:
    with Folder.open(path, Quick()) as root:
        checkpoint = save(root, 1)
    good, seeded = record_of(checkpoint), random.Random(0)
    manifest, shard = (os.open(checkpoint / name, os.O_RDWR) for name in (MANIFEST, SHARD))
    outcomes: Counter[str] = Counter()
    watch, slowest, before = Watch(path), 0.0, 0
    for n in range(count + WARM):
        if n == WARM:
            sys.addaudithook(watch)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        raw = crafted(good, seeded)
        put(manifest, raw)
        put(shard, head_of(raw) + SHARD_BYTES)
        began = time.monotonic()
        outcomes[outcome(path)] += 1
        slowest = max(slowest, time.monotonic() - began) if n >= WARM else 0.0
    watch.active = False
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"outcomes": outcomes, "bad": watch.bad, "grown_kib": grown, "slowest_seconds": slowest}


def put(fd: int, data: bytes) -> None:
    """Let an open file have these bytes."""
    os.ftruncate(fd, len(data))
    os.pwrite(fd, data, 0)


def crafted(good: Record, seeded: random.Random) -> bytes:
    record = json.loads(json.dumps(good))
    if seeded.random() < 0.3:
        return sealed(scramble(text_of(record), seeded))
    for _ in range(seeded.randrange(1, 4)):
        mutate(record, seeded)
    return sealed(text_of(record))


def outcome(path: Path) -> str:
    """Return what a load ends with; what it accepts are bytes of the shard, in their place."""
    try:
        with CheckpointReader.open(path, io=Buffered()) as reader:
            _, _, data = everything(reader)
            starts = layout(reader.entries)
    except CheckpointError as error:
        return type(error).__name__
    right = all(SHARD_BYTES[at : at + len(d)] == d for at, d in zip(starts, data, strict=False))
    return "accepted" if right else "SILENT"


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
