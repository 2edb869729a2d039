"""Checkpoints with a right CRC that no save wrote, and damaged ones: what loads trains on."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from hetero.checkpoint.manifest import MANIFEST, SHARD
from hetero.errors import CheckpointError, StorageError
from hetero.io import Folder
from tests.campaigns.fuzz import Attempt, Parser, changed
from tests.faults.crafted import Record, plant, record_of, sealed, text_of
from tests.faults.fuzzer import crafted, outcome
from tests.faults.saves import Quick, contents, load, save

ROWS, WIDTH = 5, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.down(self.up(x).relu())


Rule = Callable[[Any], torch.optim.Optimizer]


def made(rule: Rule, **settings: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = hetero.prepare(
            net, rule(net.parameters()), device="cpu", chunk_bytes=64, **settings
        )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def step(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    dtype = next(model.parameters()).dtype
    hetero.backward(model(torch.randn(ROWS, WIDTH, dtype=dtype)).float().pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def bits(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return all that a refused load must leave as it was."""
    states = optimizer.state_dict()["state"].values()
    tensors = [v for s in states for v in s.values() if isinstance(v, Tensor)]
    return [t.clone() for t in (*model.state_dict().values(), *tensors)]


def tampered(record: Record, seeded: random.Random) -> Record:
    """Return a manifest with a place changed: of its entries, or of what is said beside them."""
    for _ in range(seeded.choice([1, 1, 2])):
        meta = record["meta"]
        inside = [("meta", key) for key, value in meta.items() if value and not plain(value)]
        record = changed(record, seeded, seeded.choice([("index",), ("meta",), *inside]))
    return record


def plain(value: Any) -> bool:
    return not isinstance(value, (dict, list))


def loading(rule: Rule, **settings: Any) -> Callable[[Path], Attempt]:
    """Return how a model loads a manifest that was tampered with, and goes on."""

    def prepare(directory: Path) -> Attempt:
        run = made(rule, **settings)
        for _ in range(2):
            step(*run)
        extra = {"a": [1, (2.5, None)], "t": torch.arange(5.0), b"key": {1, "x"}}
        saved = hetero.save_checkpoint(
            directory / "saved", run[0], run[1], extra, scheduler=run[2]
        ).path
        good = record_of(saved)
        fresh: list[Any] = []

        def attempt(seeded: random.Random) -> str:
            body = text_of(tampered(copy.deepcopy(good), seeded))
            plant(saved, sealed(body))
            model, optimizer, scheduler = fresh.pop() if fresh else made(rule, **settings)
            before = bits(model, optimizer)
            try:
                hetero.load_checkpoint(saved.parent, model, optimizer, scheduler=scheduler)
            except (CheckpointError, StorageError):
                after = bits(model, optimizer)
                if len(after) != len(before) or not all(map(torch.equal, after, before)):
                    raise AssertionError("a refused load changed the model") from None
                fresh.append((model, optimizer, scheduler))
                raise
            step(model, optimizer, scheduler)
            hetero.save_checkpoint(directory / "again", model, optimizer, keep_last=1, step=0)
            (directory / "again" / "step-0" / MANIFEST).unlink()
            (directory / "again" / "step-0" / SHARD).unlink()
            (directory / "again" / "step-0").rmdir()
            hetero.release(model, optimizer)
            return "trained on"

        return attempt

    return prepare


def manifest(directory: Path) -> Attempt:
    with Folder.open(directory, Quick()) as root:
        path = save(root, 1)
    good = record_of(path)

    def attempt(seeded: random.Random) -> str:
        plant(path, crafted(good, seeded))
        found = outcome(directory)
        if found == "SILENT":
            raise AssertionError("other bytes than the shard's")
        return found

    return attempt


def shard(directory: Path) -> Attempt:
    with Folder.open(directory, Quick()) as root:
        path = save(root, 1) / SHARD
    good = path.read_bytes()

    def attempt(seeded: random.Random) -> str:
        raw = bytearray(good)
        act = seeded.randrange(5)
        at, end = sorted(seeded.randrange(len(raw)) for _ in range(2))
        if act == 0:
            raw[at] ^= 1 << seeded.randrange(8)
        elif act == 1:
            del raw[at : end + seeded.choice([0, 1])]
        elif act == 2:
            raw[at:end] = bytes(end - at)
        elif act == 3:
            raw[at:at] = seeded.randbytes(seeded.choice([0, 1, 4096]))
        else:
            raw[at:end], raw[: end - at] = raw[: end - at], raw[at:end]
        path.write_bytes(raw)
        if load(directory) != contents(1):
            raise AssertionError("damaged bytes were given out")
        return "read"

    return attempt


PAGED = {"hbm": 9000}
PARSERS = [
    Parser("manifest", manifest, 0.01),
    Parser("shard", shard, 0.005),
    Parser("load adamw paged", loading(lambda p: torch.optim.AdamW(p, lr=1e-2), **PAGED)),
    Parser("load adamw resident", loading(lambda p: torch.optim.AdamW(p, lr=1e-2))),
    Parser(
        "load adamw bf16",
        loading(lambda p: torch.optim.AdamW(p, lr=1e-2), precision="bf16", **PAGED),
    ),
    Parser("load sgd", loading(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), **PAGED)),
    Parser("load adafactor", loading(lambda p: torch.optim.Adafactor(p, lr=1e-2), **PAGED)),
    Parser("load nadam", loading(lambda p: torch.optim.NAdam(p, lr=1e-2), **PAGED)),
    Parser("load adamw8bit", loading(lambda p: hetero.optim.AdamW8bit(p, lr=1e-2), **PAGED)),
    Parser("load rprop", loading(lambda p: torch.optim.Rprop(p, lr=1e-2), **PAGED)),
]
