"""Checkpoints from the outside: what goes on behind a save, and where a load may go."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint.manifest import MANIFEST, SHARD, decode, encode
from hetero.checkpoint.save import KINDS, WEIGHTS
from hetero.config import Config
from hetero.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    DiskReadError,
    StateError,
)
from hetero.io import IO
from hetero.jobs import Worker
from hetero.status import status
from hetero.testing.faults import FaultPlan
from hetero.train.engine.snapshot import Saving
from hetero.train.engine.tuning import Tuning
from tests.campaigns.optimizers import Base

WIDTH = 128
TUNING = {"extent_numel": 4096}
WHERE: dict[str, dict[str, Any]] = {
    "resident": {},
    "paged": {"hbm": "1200KiB"},
    "disk": {"hbm": "1200KiB", "host": "4400KiB", "nvme": True},
    "sim": {"device": "cpu:sim", "hbm": "900KiB", "host": "4400KiB", "nvme": True},
}


class Factored(Base):
    """States as those of transformers' Adafactor: means of rows and of columns, as vectors."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        square = param.grad.square() + 1e-8
        if param.dim() < 2:
            mean = state.setdefault("square", torch.zeros_like(param)).lerp_(square, 0.1)
        else:
            dims = {"row": -1, "column": -2}
            for key, dim in dims.items():
                found = square.mean(dim)
                state.setdefault(key, torch.zeros_like(found)).lerp_(found, 0.1)
            row = state["row"] / state["row"].mean(-1, keepdim=True)
            mean = row.unsqueeze(-1) * state["column"].unsqueeze(-2)
        param.addcdiv_(param.grad, mean.sqrt(), value=-group["lr"])


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "factored": Factored,
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.float()).to(x.dtype) * self.scale
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.2)
        return self.head(x)


def make(
    disk: Path, where: str, *, rule: str = "adamw", precision: str = "fp32", **tuning: Any
) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    settings = {"device": "cpu", "precision": precision, "keep_fp32": ["norm"], **WHERE[where]}
    if settings.pop("nvme", False):
        settings["nvme"] = str(disk)
    if precision == "fp32":
        del settings["keep_fp32"]
    config = Config.load(chunk_bytes=16384, **settings)
    optimizer = RULES[rule](model.parameters())
    model, optimizer = prepare_tuned(model, optimizer, config, Tuning(**TUNING, **tuning))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    dtype = next(p for p in model.blocks.parameters()).dtype
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH).to(dtype)).float().pow(2).mean()
        hetero.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Return what the safetensors library finds in a checkpoint, padding left out."""
    with safe_open(path / SHARD, "torch") as file:
        names = [name for name in file.offset_keys() if not name.startswith("__")]
        return {name: file.get_tensor(name) for name in names}


@pytest.mark.parametrize("where", WHERE)
def test_any_tool_opens_a_checkpoint_by_the_names_of_parameters_and_states(
    disk: Path, where: str
) -> None:
    model, optimizer, scheduler = make(disk, where)
    train(model, optimizer, scheduler, 2)

    found = stored(hetero.save_checkpoint(disk / "saved", model, optimizer).path)

    kinds = {name: "param" for name, _ in model.named_parameters()}
    expected = {f"{kinds.get(n, 'buffer')}/{n}": v for n, v in values(model).items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if key != "step":
                expected[f"state/{name}/{key}"] = value.clone()
    assert same({name: found[name] for name in expected}, expected)
    assert {name.split("/")[0] for name in found.keys() - expected.keys()} == {"extra"}
    assert len(expected) > 50


def first_moments(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state
    named = ((name, state.get(param)) for name, param in model.named_parameters())
    return {name: found["exp_avg"].clone() for name, found in named if found}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


WHAT = [("adamw", "fp32"), ("adafactor", "fp32"), ("factored", "fp32"), ("adamw", "bf16")]


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("rule", "precision"), WHAT)
@pytest.mark.parametrize("where", WHERE)
def test_a_run_goes_on_bit_for_bit_anywhere(
    disk: Path, where: str, rule: str, precision: str, asynchronous: bool
) -> None:
    whole = make(disk, where, rule=rule, precision=precision)
    torch.manual_seed(3)
    train(*whole, 3)
    save = hetero.save_checkpoint(
        disk / "saved", *whole[:2], {"a": 1}, scheduler=whole[2], asynchronous=asynchronous
    )
    losses = train(*whole, 3)
    save.wait()

    for other in WHERE:
        again = make(disk, other, rule=rule, precision=precision)
        extra = hetero.load_checkpoint(disk / "saved", *again[:2], scheduler=again[2])
        assert extra == {"a": 1}
        assert status(again[0]).steps == 3
        assert train(*again, 3) == losses, other
        assert same(values(again[0]), values(whole[0])), other


@pytest.mark.parametrize("where", ["resident", "paged", "disk"])
@pytest.mark.parametrize("saved", [KINDS, WEIGHTS], ids=["saved whole", "saved without"])
def test_a_load_without_states_leaves_the_optimizer_as_it_is(
    disk: Path, where: str, saved: tuple[str, ...]
) -> None:
    model, optimizer, scheduler = make(disk, where)
    train(model, optimizer, scheduler, 2)
    hetero.save_checkpoint(disk / "saved", model, optimizer, kinds=saved)
    weights = values(model)
    train(model, optimizer, scheduler, 1)
    moments, rates = first_moments(model, optimizer), [g["lr"] for g in optimizer.param_groups]

    hetero.load_checkpoint(disk / "saved", model, optimizer, kinds=WEIGHTS)

    assert same(values(model), weights)
    assert same(first_moments(model, optimizer), moments)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_checkpoint_without_states_loads_whole_into_a_fresh_optimizer(disk: Path) -> None:
    first = make(disk, "paged")
    train(*first, 2)
    hetero.save_checkpoint(disk / "saved", *first[:2], kinds=WEIGHTS)

    again = make(disk, "paged")
    hetero.load_checkpoint(disk / "saved", *again[:2])

    assert same(values(again[0]), values(first[0]))
    assert not first_moments(*again[:2])
    train(*again, 1)


class Slow(IO):
    """A drive that takes its time with every write."""

    def call(self, op: str, act: Any, *args: Any, **named: Any) -> Any:
        if op == "write":
            time.sleep(0.01)
        return super().call(op, act, *args, **named)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("where", ["paged", "disk"])
def test_training_goes_on_while_a_slow_save_runs_and_the_save_is_of_its_own_step(
    disk: Path, where: str, threads: int
) -> None:
    model, optimizer, scheduler = make(disk, where, worker=Worker(threads))
    train(model, optimizer, scheduler, 3)
    optimizer.state  # noqa: B018  # waits for the updates
    then = values(model)

    save = hetero.save_checkpoint(disk / "saved", model, optimizer, asynchronous=True, io=Slow())
    train(model, optimizer, scheduler, 3)
    with hetero.gathered(model.head, write=True), torch.no_grad():
        model.head.weight.zero_()
    save.wait()

    other = make(disk, "resident")
    hetero.load_checkpoint(disk / "saved", *other[:2])
    assert same(values(other[0]), then)


def write_aliases(model: nn.Module, optimizer: Any) -> None:
    for value in model.state_dict().values():
        value.zero_()


def write_states(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def write_data(model: nn.Module, optimizer: Any) -> None:
    for param in model.blocks.parameters():
        param.data.zero_()


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("write", [write_aliases, write_states, write_data])
@pytest.mark.parametrize("where", ["resident", "paged", "disk"])
def test_what_a_user_writes_behind_a_save_is_not_in_it(
    disk: Path, where: str, write: Callable[[nn.Module, Any], None]
) -> None:
    model, optimizer, scheduler = make(disk, where)
    train(model, optimizer, scheduler, 2)
    then = values(model)
    moments = first_moments(model, optimizer)

    save = hetero.save_checkpoint(disk / "saved", model, optimizer, asynchronous=True, io=Slow())
    write(model, optimizer)
    save.wait()

    other = make(disk, "resident")
    hetero.load_checkpoint(disk / "saved", *other[:2])
    assert same(values(other[0]), then)
    assert same(first_moments(*other[:2]), moments)


def test_generators_are_set_as_they_were(disk: Path) -> None:
    model, optimizer, scheduler = make(disk, "paged")
    train(model, optimizer, scheduler, 1)
    hetero.save_checkpoint(disk / "saved", model, optimizer)
    drawn = torch.rand(3), random.random(), numpy.random.rand()

    torch.manual_seed(9), random.seed(9), numpy.random.seed(9)
    hetero.load_checkpoint(disk / "saved", model, optimizer)

    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), numpy.random.rand()) == drawn[1:]


def test_what_is_extra_comes_back_as_it_was(disk: Path) -> None:
    model, optimizer, _ = make(disk, "paged")
    extra = {"t": (1, [2.5, None]), 3: b"bytes", "x": torch.arange(3), "nan": float("inf")}

    hetero.save_checkpoint(disk / "saved", model, optimizer, extra)
    found = hetero.load_checkpoint(disk / "saved", model, optimizer)

    assert torch.equal(found.pop("x"), extra.pop("x"))
    assert found == extra
    with pytest.raises(hetero.ConfigError, match=r"extra\.f is a function"):
        hetero.save_checkpoint(disk / "other", model, optimizer, {"f": train})


def loops() -> list[tuple[Any, str]]:
    """Return values without an end, and the words that refuse each."""
    inside: list[Any] = [1]
    inside.append({"again": inside})
    pairs: dict[Any, Any] = {}
    pairs[3] = (pairs,)
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    return [
        (inside, r"extra\.x\[1\]\.again is a list that contains itself"),
        (pairs, r"extra\.x\[3\]\[0\] is a dict that contains itself"),
        (deep, r"extra\.x\[0\].* is nested deeper than 16"),
    ]


def test_what_is_extra_and_has_no_end_is_refused_by_its_path(disk: Path) -> None:
    model, optimizer, _ = make(disk, "paged")
    for value, words in loops():
        with pytest.raises(hetero.ConfigError, match=words) as caught:
            hetero.save_checkpoint(disk / "saved", model, optimizer, {"x": value})
        assert caught.value.advice
    twice = [1]  # in two places, and not inside of itself
    hetero.save_checkpoint(disk / "saved", model, optimizer, {"x": [twice, twice]})
    assert hetero.load_checkpoint(disk / "saved", model, optimizer) == {"x": [[1], [1]]}


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(disk: Path) -> None:
    model, optimizer, scheduler = make(disk, "disk")
    train(model, optimizer, scheduler, 2)
    hetero.save_checkpoint(disk / "saved", model, optimizer)
    others = {
        "optimizer": make(disk, "paged", rule="adafactor"),
        "precision": make(disk, "paged", precision="bf16"),
    }
    small = nn.Linear(4, 4)
    pair = hetero.prepare(small, RULES["adamw"](small.parameters()), device="cpu")

    for what, (other, its, _) in others.items():
        before = values(other)
        with pytest.raises(CheckpointMismatch, match=what):
            hetero.load_checkpoint(disk / "saved", other, its)
        assert same(values(other), before)
    with pytest.raises(CheckpointMismatch, match="groups"):
        hetero.load_checkpoint(disk / "saved", *pair)
    with pytest.raises(CheckpointError, match="step-2"):
        hetero.save_checkpoint(disk / "saved", model, optimizer)


def test_a_checkpoint_of_other_shapes_is_refused_with_both_and_changes_nothing(disk: Path) -> None:
    def prepared(width: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(width, 4)
        return hetero.prepare(model, RULES["adamw"](model.parameters()), device="cpu")

    hetero.save_checkpoint(disk / "saved", *prepared(8))
    model, optimizer = prepared(6)
    before = values(model)

    with pytest.raises(CheckpointMismatch, match=r"float32 \[4, 6\] here and .* \[4, 8\] there"):
        hetero.load_checkpoint(disk / "saved", model, optimizer)
    assert same(values(model), before)


def lie(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite what a checkpoint says beside tensors, with a manifest that is valid."""
    file = path / MANIFEST
    manifest = decode(file.read_bytes(), str(file))
    meta = dict(manifest.meta)
    change(meta)
    file.write_bytes(encode(replace(manifest, meta=meta)))


def first_scalars(meta: dict[str, Any]) -> dict[str, Any]:
    scalars: dict[str, Any] = next(iter(meta["scalars"].values()))
    return scalars


def numpy_state(meta: dict[str, Any]) -> list[Any]:
    found: list[Any] = meta["rng"]["numpy"]["items"]
    return found


def python_words(meta: dict[str, Any]) -> list[Any]:
    found: list[Any] = meta["rng"]["python"]["items"][1]["items"]
    return found


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a rate that is a string": lambda m: m["groups"][0].update(lr="fast"),
    "a rate that is a list": lambda m: m["groups"][0].update(lr=[0.1]),
    "a rate that is nothing": lambda m: m["groups"][0].update(lr={"a": 1}),
    "betas that are one number": lambda m: m["groups"][0].update(betas=0.9),
    "betas of another length": lambda m: m["groups"][0].update(betas=[0.9]),
    "betas that are strings": lambda m: m["groups"][0].update(betas=["a", "b"]),
    "more groups": lambda m: m["groups"].append(m["groups"][0]),
    "members that are numbers": lambda m: m.update(members=[3]),
    "groups that are a number": lambda m: m.update(groups=3),
    "no generators": lambda m: m.update(rng=None),
    "a device's generator": lambda m: m["rng"].update(device=[1, 2]),
    "a count that is a list": lambda m: first_scalars(m)["step"].update(value=[1.0, 2.0]),
    "a count that is a string": lambda m: m["scalars"].update(
        {k: {"step": {"value": "one"}} for k in m["scalars"]}
    ),
    "a count of no dtype": lambda m: first_scalars(m)["step"].update(dtype="Tensor"),
    "steps that are a list": lambda m: m.update(steps=[1]),
    "members that are a number": lambda m: m.update(members=1),
    "a marked value of no kind": lambda m: m.update(extra={"__hetero__": "eval", "items": []}),
    "a tensor that is not there": lambda m: m.update(
        extra={"__hetero__": "tensor", "entry": "../../x"}
    ),
    "a tensor twice": lambda m: m.update(extra=[m["rng"]["torch"]] * 2),
    "steps that are a fraction": lambda m: m.update(steps=1.5),
    "steps below none": lambda m: m.update(steps=-1),
    "a word of Python's generator that is too long": lambda m: python_words(m).insert(0, 2**70),
    "a spare number of Python's generator": lambda m: m["rng"]["python"]["items"].__setitem__(
        2, "x"
    ),
    "no count of steps": lambda m: m["scalars"].pop(next(iter(m["scalars"]))),
    "a count of steps before the first": lambda m: first_scalars(m)["step"].update(value=-1.0),
    "a moment that is a number": lambda m: first_scalars(m).update(exp_avg={"value": 1.0}),
    "a flag that the rule does not take": lambda m: m["groups"][0].update(capturable=True),
    "states of what no group has": lambda m: m["scalars"].update(
        table={"step": {"dtype": "float32", "value": 1.0}}
    ),
}
HOSTILE |= {
    f"numpy's generator at {place}": lambda m, place=place: numpy_state(m).__setitem__(2, place)
    for place in (-1, 625, 10**6, 10**9, 2**31 - 1, -(2**31), 2**40, 1.5, True)
}


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("what", HOSTILE)
def test_values_that_no_save_writes_are_refused_and_change_nothing(disk: Path, what: str) -> None:
    model, optimizer, scheduler = make(disk, "paged")
    train(model, optimizer, scheduler, 1)
    save = hetero.save_checkpoint(disk / "saved", model, optimizer)
    train(model, optimizer, scheduler, 1)
    before = values(model)
    lie(save.path, HOSTILE[what])

    with pytest.raises(CheckpointError):
        hetero.load_checkpoint(disk / "saved", model, optimizer)

    assert same(values(model), before)
    train(model, optimizer, scheduler, 1)


@pytest.mark.parametrize("scale", ["nan", "inf", 0.0, -1.0, None, [1]])
def test_a_loss_scale_that_no_step_leaves_is_refused(disk: Path, scale: Any) -> None:
    model, optimizer, _ = make(disk, "paged", precision="fp16")
    save = hetero.save_checkpoint(disk / "saved", model, optimizer)
    lie(save.path, lambda meta: meta["scaler"].update(scale=scale))

    with pytest.raises(CheckpointCorrupt, match="no save writes"):
        hetero.load_checkpoint(disk / "saved", model, optimizer)


def two_saves(disk: Path, where: str) -> tuple[nn.Module, Any, Any]:
    """Return a model with checkpoints of steps 1 and 2 in ``saved``."""
    model, optimizer, scheduler = make(disk, where)
    for _ in range(2):
        train(model, optimizer, scheduler, 1)
        hetero.save_checkpoint(disk / "saved", model, optimizer)
    return model, optimizer, scheduler


def damage(shard: Path, at: float) -> None:
    """Flip a bit of a file, ``at`` of the way through it."""
    damaged = bytearray(shard.read_bytes())
    damaged[int(len(damaged) * at)] ^= 1
    shard.write_bytes(damaged)


@pytest.mark.parametrize("where", ["resident", "paged", "disk"])
def test_a_damaged_checkpoint_is_refused_before_the_model_is_touched(
    disk: Path, where: str
) -> None:
    model, optimizer, scheduler = two_saves(disk, where)
    train(model, optimizer, scheduler, 1)
    before = values(model)
    damage(disk / "saved" / "step-2" / SHARD, 0.9)

    with pytest.raises(CheckpointCorrupt, match="CRC") as refused:
        hetero.load_checkpoint(disk / "saved", model, optimizer)

    assert "step 1 is the newest good one" in refused.value.advice
    assert same(values(model), before)
    train(model, optimizer, scheduler, 1)


WAYS_OUT: dict[str, Callable[[Path, nn.Module, Any], Any]] = {
    "forward": lambda disk, model, optimizer: model(torch.randn(8, WIDTH)),
    "a unit's forward": lambda disk, model, optimizer: model.blocks[1](torch.randn(8, WIDTH)),
    "step": lambda disk, model, optimizer: optimizer.step(),
    "save": lambda disk, model, optimizer: hetero.save_checkpoint(disk / "x", model, optimizer),
    "export": lambda disk, model, optimizer: hetero.export(model, disk / "x"),
    "state_dict": lambda disk, model, optimizer: model.state_dict(),
    "load_state_dict": lambda disk, model, optimizer: model.load_state_dict(
        Net().state_dict(), strict=False
    ),
    "the optimizer's": lambda disk, model, optimizer: optimizer.state_dict(),
    "gathered": lambda disk, model, optimizer: hetero.gathered(model).__enter__(),
    "release": lambda disk, model, optimizer: hetero.release(model, optimizer),
}


@pytest.mark.parametrize("where", ["resident", "paged", "disk"])
def test_a_model_that_was_loaded_in_part_gives_nothing_out_until_a_whole_load(
    disk: Path, where: str
) -> None:
    model, optimizer, scheduler = two_saves(disk, where)
    plan = FaultPlan()
    hetero.load_checkpoint(disk / "saved", model, optimizer, io=plan)
    reads = plan.seen["read"]
    failing = FaultPlan()
    failing.fail_at("read", reads - 3, errno.EIO, None)  # the last of the pass that writes

    with pytest.raises(DiskReadError):
        hetero.load_checkpoint(disk / "saved", model, optimizer, io=failing)

    for use in WAYS_OUT.values():
        with pytest.raises(StateError, match="loaded in part"):
            use(disk, model, optimizer)
    assert not (disk / "x").exists()
    hetero.load_checkpoint(disk / "saved", model, optimizer, step=1)
    twin, its, _ = make(disk, where)
    hetero.load_checkpoint(disk / "saved", twin, its, step=1)
    assert same(values(model), values(twin))
    assert train(model, optimizer, scheduler, 1)
    hetero.release(model, optimizer)


@pytest.mark.parametrize("where", ["resident", "paged"])
def test_after_a_load_forwards_run_as_before_it(disk: Path, where: str) -> None:
    """What is wrapped around them pages, slices and recomputes; a load refuses them meanwhile."""
    model, optimizer, _ = two_saves(disk, where)

    def forwards() -> dict[str, Any]:
        found = ((name, module.__dict__.get("forward")) for name, module in model.named_modules())
        return {name: forward for name, forward in found if forward is not None}

    before = forwards()
    assert before or where == "resident"
    hetero.load_checkpoint(disk / "saved", model, optimizer)
    assert forwards() == before
    hetero.release(model, optimizer)
    assert not forwards()


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("op", ["create", "reserve", "write", "sync", "rename", "sync_folder"])
def test_a_save_that_fails_says_so_and_training_and_the_next_save_go_on(
    disk: Path, op: str, number: int
) -> None:
    plain = make(disk, "disk")
    torch.manual_seed(3)
    losses = train(*plain, 4)
    model, optimizer, scheduler = make(disk, "disk")
    torch.manual_seed(3)
    seen = train(model, optimizer, scheduler, 2)
    plan = FaultPlan()
    (disk / "saved").mkdir()
    plan.fail_at(op, 0, number, None)

    with pytest.raises(hetero.StorageError):
        hetero.save_checkpoint(disk / "saved", model, optimizer, asynchronous=True, io=plan).wait()
    assert plan.fired
    seen += train(model, optimizer, scheduler, 2)
    plan.clear()
    hetero.save_checkpoint(disk / "saved", model, optimizer, io=plan)

    assert seen == losses
    assert [path.name for path in (disk / "saved").iterdir()] == ["step-4"]
    again = make(disk, "paged")
    hetero.load_checkpoint(disk / "saved", *again[:2])
    assert same(values(again[0]), values(plain[0]))


def test_a_step_moves_what_is_on_disk_once_each_way(disk: Path) -> None:
    model, optimizer, scheduler = make(disk, "disk")
    train(model, optimizer, scheduler, 4)
    optimizer.state  # noqa: B018
    train(model, optimizer, scheduler, 1)
    engine, now = engine_of(model), status(model)
    spill = engine.setup.budget.spill

    assert spill is not None
    assert 0 < now.read_bytes <= spill.disk_bytes + spill.pool_bytes
    assert 0 < now.write_bytes <= spill.disk_bytes + spill.pool_bytes


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("starts", [True, False], ids=["", "no thread starts by then"])
def test_a_save_at_the_very_end_of_a_script_is_written(starts: bool, disk: Path) -> None:
    """From Python 3.12 on, no thread can be started while the interpreter ends."""
    script = """
        import sys, threading, torch, hetero

        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        def end():
            threading.Thread.start = refuse

        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = hetero.prepare(model, optimizer, device="cpu", hbm="64KiB")
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        hetero.save_checkpoint(sys.argv[1], model, optimizer, asynchronous=True)
        if len(sys.argv) > 2:
            threading._register_atexit(end)  # comes before what was registered earlier
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk / "saved")]
    command += [] if starts else ["no"]

    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (disk / "saved").iterdir()] == ["step-1"]


class Longest(nn.Module):
    """Keeps the rows that it saw, as observers of ranges do, and takes as many as were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.detach().clone()
        return x

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.rows.resize_(state[prefix + "rows"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("takes", [True, False])
def test_a_buffer_of_another_length_is_loaded_by_the_module_that_can(
    takes: bool, tmp_path: Path
) -> None:
    def prepared() -> tuple[Any, Any]:
        torch.manual_seed(0)
        seen = Longest() if takes else nn.Module()
        seen.register_buffer("rows", torch.empty(0))
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        model.seen = seen
        return hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")

    model, optimizer = prepared()
    model.seen.rows = torch.arange(5.0)
    hetero.save_checkpoint(tmp_path, model, optimizer)
    again, optimizer = prepared()
    if takes:
        hetero.load_checkpoint(tmp_path, again, optimizer)
        assert torch.equal(again.seen.rows, model.seen.rows)
        return
    with pytest.raises(CheckpointMismatch, match=r"seen\.rows"):
        hetero.load_checkpoint(tmp_path, again, optimizer)


def test_a_bucket_of_which_nothing_is_saved_is_noted_all_the_same() -> None:
    noted: list[int] = []
    saving = Saving([], [3, 5], lambda *_: None, pending=lambda _: None, noted=noted.append)

    saving.run()

    assert noted == [3, 5] and saving.error is None


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [("data", [1, 2], "StatefulDataLoader"), ("scheduler", 3, "leave scheduler= out")],
)
def test_what_has_no_state_is_refused_before_anything_is_written(
    name: str, given: Any, says: str, tmp_path: Path
) -> None:
    if name == "data":
        given = torch.utils.data.DataLoader(given)
    model = nn.Linear(3, 4)
    model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters()), device="cpu")

    with pytest.raises(hetero.ConfigError, match=f"{name}= has no state_dict") as saving:
        hetero.save_checkpoint(tmp_path / "saved", model, optimizer, **{name: given})
    assert says in saving.value.advice and not (tmp_path / "saved").exists()
    hetero.save_checkpoint(tmp_path / "saved", model, optimizer)
    with pytest.raises(hetero.ConfigError, match=f"{name}= has no state_dict") as loading:
        hetero.load_checkpoint(tmp_path / "saved", model, optimizer, **{name: given})
    assert says in loading.value.advice
    hetero.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)  # nothing is broken
