"""Checkpoints of format 1, written by hetero 0.1 before format 2 was made: they still load.

`FILES` holds what was saved then: ``bytes`` with the entries of `saves.SMALL`, ``fp32`` and
``bf16`` with `Small` after three steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.checkpoint.manifest import MANIFEST
from hetero.checkpoint.reader import CheckpointReader, State, steps
from hetero.checkpoint.verify import verify
from hetero.errors import CheckpointCorrupt
from tests.faults.saves import contents, load

FILES = Path(__file__).parent / "format1"
BIN = "r00000.bin"


class Small(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.head(torch.tanh(self.inner(self.table(x))))


Run = tuple[nn.Module, Any, Any]


def plain(seed: int) -> Run:
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def prepared(seed: int, precision: str) -> Run:
    model, optimizer, _ = plain(seed)
    model, wrapped = hetero.prepare(model, optimizer, device="cpu", precision=precision)
    return model, wrapped, torch.optim.lr_scheduler.StepLR(wrapped, 2, 0.5)


def train(run: Run, n_steps: int) -> None:
    model, optimizer, scheduler = run
    for _ in range(n_steps):
        model(torch.randint(11, (4, 3))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def written(path: Path) -> dict[tuple[str, str, str], torch.Tensor]:
    """Return the tensors of a checkpoint, read as its format says and by nothing of hetero's."""
    raw = (path / BIN).read_bytes()
    found = {}
    for row in json.loads((path / MANIFEST).read_bytes())["index"]:
        dtype, at = getattr(torch, row["dtype"]), row["slices"][0]["offset"]
        value = torch.frombuffer(bytearray(raw), dtype=dtype, offset=at, count=numel(row["shape"]))
        found[row["kind"], row["name"], row["key"]] = value.reshape(row["shape"])
    return found


def numel(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())


def moved(name: str, to: Path) -> Path:
    return shutil.copytree(FILES / name, to / name)


def test_every_byte_of_format_1_comes_back() -> None:
    assert load(FILES / "bytes") == contents(1)
    assert [found.state for found in steps(FILES / "bytes")] == [State.COMPLETE]


@pytest.mark.parametrize("name", ["bytes", "fp32", "bf16"])
def test_verifying_reads_format_1_and_finds_its_damage(tmp_path: Path, name: str) -> None:
    root = moved(name, tmp_path)
    (found,) = verify(root).checkpoints
    file = root / found.name / BIN
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # padding counts too
    file.write_bytes(raw)

    assert (found.ok, found.bytes) == (True, len(raw))
    assert "CheckpointCorrupt" in verify(root).checkpoints[0].problem
    with pytest.raises(CheckpointCorrupt, match=BIN):
        load(root)


def test_a_run_of_format_1_goes_on_as_plain_torch_would() -> None:
    found = written(FILES / "fp32/step-3")
    reference = plain(5)
    train(reference, 3)  # counts, for schedule and optimizer
    reference[0].load_state_dict({n: v for (k, n, _), v in found.items() if k in PARTS})
    for name, param in reference[0].named_parameters():
        keys = ("exp_avg", "exp_avg_sq")
        state = {key: found["state", name, key].clone() for key in keys}
        reference[1].state[param] = {"step": torch.tensor(3.0), **state}
    run = prepared(7, "fp32")

    extra = hetero.load_checkpoint(FILES / "fp32", *run[:2], scheduler=run[2])
    train(run, 3)
    torch.set_rng_state(found["extra", "rng.torch", ""])
    train(reference, 3)

    assert extra["note"] == "format 1"
    assert torch.equal(extra["t"], torch.arange(5.0))
    for name, value in reference[0].state_dict().items():
        assert torch.equal(run[0].state_dict()[name], value), name


PARTS = ("param", "buffer")
VERSIONS = dict.fromkeys(("hetero", "torch", "threads"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_format_1_held_is_saved_again_bit_for_bit(tmp_path: Path, precision: str) -> None:
    run = prepared(7, precision)
    extra = hetero.load_checkpoint(FILES / precision, *run[:2], scheduler=run[2])

    hetero.save_checkpoint(tmp_path, *run[:2], extra, scheduler=run[2])

    for (kind, name, key), value in written(FILES / precision / "step-3").items():
        assert torch.equal(read(tmp_path, kind, name, key), value), (kind, name, key)
    with CheckpointReader.open(tmp_path) as new, CheckpointReader.open(FILES / precision) as old:
        assert new.entries == old.entries
        since = dict.fromkeys(("sum_group", "tensor_ranks", "stage_ranks"), 1)  # not in format 1
        assert {**new.meta, **VERSIONS} == {**since, **old.meta, **VERSIONS}


def read(root: Path, kind: str, name: str, key: str) -> torch.Tensor:
    """Return a tensor of the newest checkpoint in a directory."""
    with CheckpointReader.open(root) as reader:
        number = reader.find(kind, name, key)
        assert number is not None
        entry = reader.entries[number]
        raw = bytearray(entry.n_bytes)
        reader.read(number, 0, memoryview(raw))
        return torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)


def test_an_older_checkpoint_of_format_1_goes_as_any_other(tmp_path: Path) -> None:
    root = moved("fp32", tmp_path)
    run = prepared(7, "fp32")
    hetero.load_checkpoint(root, *run[:2], scheduler=run[2])
    train(run, 1)

    hetero.save_checkpoint(root, *run[:2], keep_last=1)

    assert [found.name for found in steps(root)] == ["step-4"]
    assert not (root / "step-3").exists()
