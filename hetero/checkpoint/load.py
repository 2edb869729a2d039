"""Loading into a prepared model (floor 4)."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hetero.api import engine_of
from hetero.checkpoint.manifest import MAX_STEP, Entry
from hetero.checkpoint.reader import Reader
from hetero.checkpoint.save import (
    KINDS,
    HasState,
    check_pair,
    decode_scalars,
    dtype_named,
    members_of,
    rng_state,
)
from hetero.checkpoint.values import decode
from hetero.checkpoint.verify import read_all
from hetero.device import check_accelerator_rng, checked_rng, set_accelerator_rng
from hetero.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from hetero.io import IO
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import PIECE_BYTES, Name, Part
from hetero.train.engine.state_dict import (
    begin_again,
    check_states,
    empty_states,
    loaded,
    parts_of,
    settle,
    take_scalars,
)
from hetero.train.update.masters import LossScaler
from hetero.train.update.optimizer import Optimizer

LOAD_THREADS = 2  # one reads while another checks
SHOWN = 10  # differences that a message lists
MAX_VALUE_BYTES = 2**30  # of one tensor that the user's own values hold


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    step: int | None = None,
) -> Any:
    """Load a checkpoint into a prepared model and optimizer; returns the ``extra`` it was given.

    Budgets, chunk size, tiers and device may be others than those of the save; training goes on bit
    for bit. The states of torch's, Python's and numpy's generators are set.

    Args:
        directory: of checkpoints, of which the newest is loaded, or one ``step-N`` itself.
        model, optimizer: as `hetero.prepare` returned them, at the precision of the checkpoint.
        scheduler, data: get the state that was saved of theirs.
        step: which checkpoint; None: the newest.

    Raises:
        NoCheckpoint: there is none; CheckpointCorrupt: it is damaged, and the advice names the
            newest good one; CheckpointMismatch: it is of another model, optimizer or precision, and
            nothing was changed; UnsafeCheckpoint, CheckpointTooNew, StorageError.
    """
    return load_through(
        IO(), directory, model, optimizer, scheduler=scheduler, data=data, step=step
    )


def load_through(
    io: IO,
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    step: int | None = None,
    kinds: Collection[str] = KINDS,
) -> Any:
    """Carry out `load_checkpoint` through an `IO` (tests let it go wrong), of some kinds of parts.

    Parts of other kinds stay as they are, whether or not the checkpoint has them.
    """
    engine = engine_of(model)
    check_pair(engine, optimizer)
    with Reader.open(directory, step, io) as reader:
        # 1. everything that can be refused is refused before anything is touched
        beside = understood(engine, reader)
        check_meta(engine, beside)
        adapting = None
        if "buffer" in kinds:
            with only_saved(reader):
                adapting = adapted(engine.setup.model, reader)
        check_entries(engine, reader.entries, kinds, adapting)
        check_given(beside, scheduler=scheduler, data=data)
        states = [(name_of(e), dtype_of(e), e.shape) for e in reader.entries if e.kind == "state"]
        with only_saved(reader):
            check_beside(engine, beside)
            check_states(engine, beside["groups"], states, beside["scalars"])
            check_schedule(engine, scheduler, beside["scheduler"])
        read_all(reader)
        if {"param", "state"} <= set(kinds):  # all that early updates have changed comes anew
            engine.void_early()
        settle(engine)
        empty = empty_states(engine, states)
        with only_saved(reader), all_or_none(scheduler, data):
            if scheduler is not None:
                scheduler.load_state_dict(beside["scheduler"])
            if data is not None:
                data.load_state_dict(beside["data"])
        # 2. the tensors; until all are there the model is of no use to anybody
        engine.broken.begin_load(reader.path)
        begin_again(engine, empty)
        given = [kind for kind in kinds if kind != "buffer" or adapting is None]
        todo = matched([p for p in parts_of(engine) if p.name.kind in given], reader)
        with ThreadPoolExecutor(LOAD_THREADS, "hetero-load") as executor:
            for _ in executor.map(lambda one: one[0].load(partial(reader.read, one[1])), todo):
                pass
        if "param" in kinds:
            loaded(engine)
        if adapting is not None:
            with engine.broken.loads_itself():
                adapt(engine, reader)
        # 3. what is beside them
        take_scalars(engine, beside["scalars"])
        restore(engine, beside)
        engine.broken.end_load()
    return beside["extra"]


OURS = ("extra", "scheduler", "data", "rng", "groups", "scaler")
WRONG = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError),
    *(ArithmeticError, AssertionError),  # numbers that overflow; what torch's rules assert
)


def understood(engine: Engine, reader: Reader) -> dict[str, Any]:
    """Return what a checkpoint says beside tensors; CheckpointCorrupt where no save wrote it."""
    meta, values = reader.meta, Values(reader, engine.setup.blueprint.layout.param_bytes).take
    with only_saved(reader):
        found = {key: decode(meta[key], values) for key in OURS}
        found["scalars"] = decode_scalars(meta["scalars"])
        found.update({key: meta[key] for key in ("precision", "optimizer", "members")})
        found["frozen"] = meta.get("frozen", "keep")  # older checkpoints do not say
        found["steps"] = count_of(meta["steps"])
        members = [len(names) for names in found["members"]]
        if len(members) != len(found["groups"]) or not all(found["groups"]):
            raise ValueError("as many groups as there are settings of groups")
        check_rng(engine, found["rng"])
    return found


def count_of(steps: Any) -> int:
    """Return a count of steps; ValueError for what is none."""
    if type(steps) is not int or not 0 <= steps <= MAX_STEP:
        raise ValueError(f"{steps!r} steps were made")
    return steps


@contextmanager
def only_saved(reader: Reader) -> Iterator[None]:
    """Raise CheckpointCorrupt where a block that looks at saved values goes wrong."""
    try:
        yield
    except CheckpointError:
        raise
    except WRONG as error:
        raise CheckpointCorrupt(
            f"{reader.path} says something that no save writes: {error!r}",
            advice="use another checkpoint; hetero verify lists them",
        ) from error


@contextmanager
def all_or_none(*things: HasState | None) -> Iterator[None]:
    """Give objects back the states they had where one of them does not take its new one."""
    before = [(thing, copy.deepcopy(thing.state_dict())) for thing in things if thing is not None]
    try:
        yield
    except BaseException:
        for thing, state in before:
            thing.load_state_dict(state)
        raise


def check_rng(engine: Engine, rng: Mapping[str, Any]) -> None:
    """Try generators' states on generators of our own; raises one of `WRONG`.

    Generators believe the position that a state names: beyond the state they would read memory
    of others.
    """
    torch.Generator().set_state(checked_rng(rng["torch"]))
    random.Random().setstate(rng["python"])
    *_, spare = rng["python"]
    if not isinstance(spare, (float, NoneType)):
        raise ValueError(f"Python's generator keeps a spare number {spare!r}")
    _, words, position, *_ = rng["numpy"]
    if type(position) is not int or not 0 <= position <= len(words):
        raise ValueError(f"numpy's generator is at number {position!r} of {len(words)}")
    numpy.random.RandomState().set_state(rng["numpy"])
    device = rng["device"]
    if device is not None and (device.dtype, device.ndim) != (torch.uint8, 1):
        raise ValueError("the device's generator has a state of bytes")
    if device is not None:
        check_accelerator_rng(engine.setup.device.torch_device, device)


def check_beside(engine: Engine, beside: Mapping[str, Any]) -> None:
    """Raise one of `WRONG` for values that an optimizer or a loss scaler would not have saved.

    They would be found out in the middle of a step.
    """
    if engine.scaler is not None and beside["scaler"] is not None:
        LossScaler().load_state_dict(beside["scaler"])
    if engine.optimizer is None:
        return
    for group, saved in zip(engine.optimizer.param_groups, beside["groups"], strict=True):
        for key, value in saved.items():
            if key == "params" or (key in group and not alike(group[key], value)):
                raise ValueError(f"the setting {key} is {value!r}")
    for name, state in beside["scalars"].items():
        for key, value in state.items():
            is_number = isinstance(value, (int, float)) or value_shape(value) == ()
            if not is_number or (isinstance(value, torch.Tensor) and value.is_complex()):
                raise ValueError(f"{key} of {name} is no number")


def check_schedule(engine: Engine, scheduler: HasState | None, saved: Any) -> None:
    """Raise one of `WRONG` for what torch's schedulers would take, and break on at their next step.

    A copy of the scheduler makes that step, with a copy of the groups.
    """
    if not isinstance(scheduler, LRScheduler):
        return
    if not alike(scheduler.state_dict(), saved):
        raise ValueError("the scheduler's state is of another scheduler")
    inside = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if any(
        hasattr(each, "lr_lambdas") or type(each).__module__ != lr_scheduler.__name__
        for each in inside
    ):
        return  # functions and classes of the user's own cannot be tried unseen
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    stand_in = SGD([torch.zeros(1)], lr=1.0)
    stand_in.param_groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups
    ]
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses the steps of an optimizer
        twin.load_state_dict(copy.deepcopy(saved))
        twin.step(0.0) if isinstance(twin, ReduceLROnPlateau) else twin.step()


def alike(mine: Any, saved: Any) -> bool:
    """Whether a setting is of the kind of another: what is off may have been on."""
    if mine is None or saved is None:
        return mine is saved or isinstance(saved if mine is None else mine, (bool, int, float))
    if isinstance(mine, Mapping):
        return isinstance(saved, Mapping) and all(
            alike(mine[key], saved[key]) for key in mine.keys() & saved.keys()
        )
    if isinstance(mine, (tuple, list)):
        return (
            isinstance(saved, (tuple, list))
            and len(mine) == len(saved)
            and all(alike(*pair) for pair in zip(mine, saved, strict=True))
        )
    number = isinstance(mine, (int, float)) or value_shape(mine) == ()
    return number == (isinstance(saved, (int, float)) or value_shape(saved) == ()) and (
        number or type(mine) is type(saved)
    )


def value_shape(value: Any) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for anything else."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def name_of(entry: Entry) -> Name:
    """Return what an entry is of."""
    return Name(entry.kind, entry.name, entry.key)


def dtype_of(entry: Entry) -> torch.dtype:
    """Return an entry's dtype."""
    return dtype_named(entry.dtype)


class Values:
    """The tensors that stand among the values beside the model's own, each read once.

    So they take no more memory than the shard has bytes, most of which are no holes.
    """

    def __init__(self, reader: Reader, limit_bytes: int) -> None:
        self._reader = reader
        self._limit_bytes = max(limit_bytes, MAX_VALUE_BYTES)
        self._taken: set[int] = set()

    def take(self, path: str) -> torch.Tensor:
        """Return the tensor that was saved under a path."""
        reader, number = self._reader, self._reader.find("extra", path)
        if number is None or number in self._taken:
            problem = "that is not there" if number is None else "twice"
            raise CheckpointCorrupt(
                f"{reader.path} names a tensor {path[:200]!r} {problem}",
                advice="use another checkpoint; hetero verify lists them",
            )
        self._taken.add(number)
        entry = reader.entries[number]
        if entry.n_bytes > self._limit_bytes:
            raise CheckpointMismatch(
                f"{path[:200]!r} is a tensor of {entry.n_bytes} bytes, beside a model of fewer",
                advice="save it in a file of its own",
            )
        return tensor_at(reader, number)


def tensor_at(reader: Reader, number: int) -> torch.Tensor:
    """Return an entry as a tensor of its own."""
    entry = reader.entries[number]
    value = torch.empty(entry.shape, dtype=dtype_of(entry))
    view = memoryview(value.view(-1).view(torch.uint8).numpy())
    for start in range(0, len(view), PIECE_BYTES):
        reader.read(number, start, view[start : start + PIECE_BYTES])
    return value


def read_weights(directory: str | Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the newest checkpoint's parameters and buffers by name, and its ``extra``.

    They are in RAM as a whole, and are what `model.state_dict` showed when they were saved: working
    weights without what these leave of masters. Raises CheckpointError for weights in code.
    """
    with Reader.open(directory) as reader:
        weights: dict[str, torch.Tensor] = {}
        for number, entry in enumerate(reader.entries):
            if entry.kind not in ("param", "buffer"):
                continue
            if entry.key:
                raise CheckpointError(
                    f"{entry.name!r} in {reader.path} is {entry.key} code, and no tensor",
                    advice="load it into a model that is prepared with the same frozen=",
                )
            weights[entry.name] = tensor_at(reader, number)
        with only_saved(reader):
            extra = decode(reader.meta["extra"], Values(reader, MAX_VALUE_BYTES).take)
    return weights, extra


def matched(parts: Sequence[Part], reader: Reader) -> Iterator[tuple[Part, int]]:
    """Yield every part of the model with the number of its entry."""
    for part in parts:
        number = reader.find(*part.name)
        if number is None:
            raise CheckpointMismatch(
                f"{part.name} is not in {reader.path}",
                advice="build the model as it was when it was saved",
            )
        yield part, number


def check_meta(engine: Engine, beside: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another precision, other codes, or another optimizer."""
    kind = None if engine.setup.inner is None else type(engine.setup.inner).__name__
    config = engine.setup.config
    ours = {"precision": config.precision, "frozen": config.frozen, "optimizer": kind}
    for key, here in ours.items():
        there = beside[key]
        if there != here and not (key == "optimizer" and here is None):
            raise CheckpointMismatch(
                f"the checkpoint was saved with {key} {there}; this model has {here}",
                advice=f"prepare the model with {key} {there}, or export the weights and start"
                " afresh with weights=",
            )
    if engine.optimizer is None:
        return
    groups = members_of(engine)
    if groups != beside["members"]:
        raise CheckpointMismatch(
            f"the checkpoint's parameter groups hold"
            f" {[len(m) for m in beside['members']]} parameters, this optimizer's"
            f" {[len(m) for m in groups]}, or others in another order",
            advice="build the optimizer with the groups it had when it was saved",
        )


def adapted(model: nn.Module, reader: Reader) -> set[str] | None:
    """Return the buffers whose shapes a model's own methods of loading may change, by name.

    None where it has none of its own: its buffers are read where they are. A ``load_state_dict`` of
    the model's is called as stock loops do, that of a module for its own buffers.
    """
    own = overrides(model, "load_state_dict")
    found: set[str] = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        number = reader.find("buffer", name)
        if number is not None and tuple(buffer.shape) != reader.entries[number].shape:
            owner = model.get_submodule(name.rpartition(".")[0])
            if own or overrides(owner, "_load_from_state_dict"):
                found.add(name)
    return found if own or found else None


def overrides(module: nn.Module, method: str) -> bool:
    """Whether a module's class has a method of its own in place of torch's."""
    return getattr(type(module), method) is not getattr(nn.Module, method)


def adapt(engine: Engine, reader: Reader) -> None:
    """Let the model's own methods load the buffers; its parameters are loaded, and shown as well.

    Raises CheckpointMismatch where they leave a buffer of another shape.
    """
    numbered = enumerate(reader.entries)
    buffers = {e.name: tensor_at(reader, n) for n, e in numbered if e.kind == "buffer"}
    model = engine.setup.model
    model.load_state_dict({**model.state_dict(), **buffers}, strict=False)
    check_entries(engine, reader.entries, ("buffer",))


def check_entries(
    engine: Engine,
    entries: Sequence[Entry],
    kinds: Collection[str],
    adapting: Collection[str] | None = None,
) -> None:
    """Refuse tensors of other names, shapes or dtypes than the model has, listing the first.

    Args:
        adapting: names of buffers whose shapes the model itself will change.
    """
    fixed = [kind for kind in kinds if kind != "state"]
    here = {p.name: (p.shape, p.dtype) for p in parts_of(engine) if p.name.kind in fixed}
    there = {name_of(e): (e.shape, dtype_of(e)) for e in entries if e.kind in fixed}
    taken = {s.spec.name for _, s in engine.setup.blueprint.layout.home}
    problems = [f"{n.kind} {n.name!r} is not in the checkpoint" for n in here if n not in there]
    problems += [f"{n.kind} {n.name!r} is not in the model" for n in there if n not in here]
    for name in here:
        if name.kind == "buffer" and name.name in (adapting or ()):
            continue
        if name in there and there[name] != here[name]:
            (shape, dtype), (their_shape, their_dtype) = here[name], there[name]
            problems.append(
                f"{name.kind} {name.name!r} is {dtype} {list(shape)} here and {their_dtype}"
                f" {list(their_shape)} there"
            )
    for entry in entries:
        if entry.kind == "state" and entry.name not in taken:
            problems.append(f"state {entry.key!r} is of {entry.name!r}, which is not in the model")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointMismatch(
            f"the checkpoint is of another model: {'; '.join(problems[:SHOWN])}{more}",
            advice="build the model as it was when it was saved",
        )


def check_given(beside: Mapping[str, Any], **given: HasState | None) -> None:
    """Refuse to restore what was not saved."""
    for name, thing in given.items():
        if thing is not None and beside[name] is None:
            raise CheckpointMismatch(
                f"the checkpoint has no state of {name}=",
                advice=f"pass {name}= to save_checkpoint as well, or do not pass it here",
            )


def restore(engine: Engine, beside: Mapping[str, Any]) -> None:
    """Set the groups' settings, the loss scale, the generators and the count of steps."""
    engine.setup.steps = beside["steps"]
    if engine.scaler is not None and beside["scaler"] is not None:
        engine.scaler.load_state_dict(beside["scaler"])
    if engine.optimizer is not None:
        for group, saved in zip(engine.optimizer.param_groups, beside["groups"], strict=True):
            for key, value in saved.items():
                mine = group.get(key)
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                    mine.copy_(value)  # a schedule may hold it
                else:
                    group[key] = value
    set_generators(engine, beside["rng"])


def set_generators(engine: Engine, states: Mapping[str, Any]) -> None:
    """Set the generators that a training loop draws from to what `rng_state` returned."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        set_accelerator_rng(engine.setup.device.torch_device, states["device"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])


@contextmanager
def same_generators(engine: Engine) -> Iterator[None]:
    """Leave the generators as they were, whatever a load in the block sets them to."""
    states = rng_state(engine)
    try:
        yield
    finally:
        set_generators(engine, states)
