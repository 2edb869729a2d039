"""Checks of a checkpoint against a model, before anything changes (floor 4)."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import numpy
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hetero.checkpoint.manifest import MAX_STEP, SavedTensor
from hetero.checkpoint.names import Names, OwnEntries, all_values, own_groups, own_values
from hetero.checkpoint.own_buffers import Buffers, sources
from hetero.checkpoint.rank_places import Division
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.save import (
    HasState,
    members_of,
    stage_ranks,
    tensor_ranks,
)
from hetero.checkpoint.values import decode, decode_inside, decode_scalars, dtype_named
from hetero.device import check_accelerator_rng, checked_rng
from hetero.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from hetero.train.engine.alike import MEMBERS
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Name, read_box
from hetero.train.engine.state_dict import Scalars, parts_of
from hetero.train.update.masters import LossScaler

SHOWN = 10  # differences listed in a message
MAX_VALUE_BYTES = 2**30  # of one tensor among the user's own values
WRONG = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError),
    *(ArithmeticError, AssertionError),  # overflows; assertions of torch's rules
)


@dataclass(frozen=True, slots=True)
class SavedValues:
    """The values of a checkpoint, apart from the model's tensors."""

    extra: Any
    scheduler: Any
    data: Any
    rng: Mapping[str, Any]
    groups: Sequence[dict[str, Any]]
    scaler: Any
    scalars: Scalars
    precision: str
    frozen: str
    sum_group: int
    threads: int | None
    """Of torch; None: older checkpoints do not say."""
    optimizer: str | None
    members: Sequence[Sequence[str]]
    steps: int
    own_rng: Mapping[str, Any] | None
    """Of the rank with this one's place; None if that was the first, or there was none."""
    own_buffers: Buffers
    """Of the rank nearest to this one's place, where they are not those of the entries."""


DECODED = ("extra", "scheduler", "data", "rng", "groups", "scaler")


def understood(engine: Engine, reader: CheckpointReader, names: Names) -> SavedValues:
    """Return the values of a checkpoint; CheckpointCorrupt if no save wrote them."""
    meta, take = reader.meta, Values(reader, engine.setup.blueprint.layout.param_bytes).take
    with only_saved(reader):
        there, here = saved_division(reader), division_of(engine)
        rank = engine.setup.everyone.rank
        same = there.exactly(here, rank)
        told = {} if same is None else reader.of_ranks[same]
        found = SavedValues(
            **{key: decode(meta[key], take) for key in DECODED},
            **{key: meta[key] for key in ("precision", "optimizer", "members")},
            frozen=meta.get("frozen", "keep"),  # older checkpoints have no such keys
            sum_group=count_of(meta.get("sum_group", 1)),
            threads=count_of(meta["threads"]) if "threads" in meta else None,
            scalars=own_values(decode_scalars(dict(all_values(reader, "scalars"))), names),
            steps=count_of(meta["steps"]),
            own_rng=decode_inside(told["rng"]) if "rng" in told else None,
            own_buffers=sources(reader, there, there.seen_from(here, rank)),
        )
        members = [len(names) for names in found.members]
        if len(members) != len(found.groups) or not all(found.groups):
            raise ValueError("as many groups as there are settings of groups")
        check_rng(engine, found.rng)
        if found.own_rng is not None:
            check_rng(engine, found.own_rng)
    return found


def saved_division(reader: CheckpointReader) -> Division:
    """Return how the ranks that saved divided the model; older checkpoints are of one axis."""
    stages, tensor = (count_of(reader.meta.get(key, 1)) for key in ("stage_ranks", "tensor_ranks"))
    return Division(len(reader.of_ranks), stages, tensor)


def division_of(engine: Engine) -> Division:
    """Return how the ranks of a model divide it."""
    return Division(engine.setup.everyone.size, stage_ranks(engine), tensor_ranks(engine))


def count_of(steps: Any) -> int:
    """Return a count of steps; ValueError for anything else."""
    if type(steps) is not int or not 0 <= steps <= MAX_STEP:
        raise ValueError(f"{steps!r} steps were made")
    return steps


@contextmanager
def only_saved(reader: CheckpointReader) -> Iterator[None]:
    """Raise CheckpointCorrupt if a block that reads saved values fails."""
    try:
        yield
    except CheckpointError:
        raise
    except WRONG as error:
        raise CheckpointCorrupt(
            f"{reader.path} says something that no save writes: {error!r}",
            advice="use another checkpoint; hetero verify lists them",
        ) from error


def check_rng(engine: Engine, rng: Mapping[str, Any]) -> None:
    """Load generators' states into spare generators; raises one of `WRONG`.

    Generators trust the position in a state: one beyond its end would make them read other memory.
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


def check_values(engine: Engine, saved: SavedValues) -> None:
    """Raise one of `WRONG` for values that an optimizer or a loss scaler would not have saved."""
    if engine.scaler is not None and saved.scaler is not None:
        LossScaler().load_state_dict(saved.scaler)
    if engine.optimizer is None:
        return
    for group, settings in zip(engine.optimizer.param_groups, saved.groups, strict=True):
        for key, value in settings.items():
            other = key in group and key not in MEMBERS and not alike(group[key], value)
            if key == "params" or other:
                raise ValueError(f"the setting {key} is {value!r}")
    for name, state in saved.scalars.items():
        for key, value in state.items():
            is_number = isinstance(value, (int, float)) or value_shape(value) == ()
            if not is_number or (isinstance(value, torch.Tensor) and value.is_complex()):
                raise ValueError(f"{key} of {name} is no number")


def check_schedule(engine: Engine, scheduler: HasState | None, saved: Any) -> None:
    """Raise one of `WRONG` for a scheduler's state if a copy of the scheduler fails to step."""
    if not isinstance(scheduler, LRScheduler):
        return
    if not alike(scheduler.state_dict(), saved):
        raise ValueError("the scheduler's state is of another scheduler")
    inside = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if any(
        hasattr(each, "lr_lambdas") or type(each).__module__ != lr_scheduler.__name__
        for each in inside
    ):
        return  # functions and classes of the user's own may have side effects
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    stand_in = SGD([torch.zeros(1, device="cpu")], lr=1.0)
    stand_in.param_groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups
    ]
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it expects steps of an optimizer
        twin.load_state_dict(copy.deepcopy(saved))
        twin.step(0.0) if isinstance(twin, ReduceLROnPlateau) else twin.step()


def alike(mine: Any, saved: Any) -> bool:
    """Whether two settings are of one kind; one that is off (None) matches a number."""
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


def name_of(entry: SavedTensor) -> Name:
    return Name(entry.kind, entry.name, entry.key)


def dtype_of(entry: SavedTensor) -> torch.dtype:
    return dtype_named(entry.dtype)


class Values:
    """The tensors among a checkpoint's values, each read once.

    So they take no more memory than the shard has bytes, and `check_size` bounds its holes.
    """

    def __init__(self, reader: CheckpointReader, limit_bytes: int) -> None:
        self._reader = reader
        self._limit_bytes = max(limit_bytes, MAX_VALUE_BYTES)
        self._taken: set[int] = set()

    def take(self, path: str) -> torch.Tensor:
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


def tensor_at(reader: CheckpointReader | OwnEntries, number: int) -> torch.Tensor:
    """Return an entry as a tensor of its own."""
    entry = reader.entries[number]
    read = partial(reader.read, number)
    return read_box(entry.lies.whole, dtype_of(entry), read, entry.lies).contiguous()


def check_meta(engine: Engine, saved: SavedValues, names: Names) -> None:
    """Refuse a checkpoint of another precision, other codes, or another optimizer."""
    kind = None if engine.setup.inner is None else type(engine.setup.inner).__name__
    config = engine.setup.config
    ours = {"precision": config.precision, "frozen": config.frozen, "optimizer": kind}
    for key, here in ours.items():
        there = getattr(saved, key)
        if there != here and not (key == "optimizer" and here is None):
            raise CheckpointMismatch(
                f"the checkpoint was saved with {key} {there}; this model has {here}",
                advice=f"prepare the model with {key} {there}, or export the weights and start"
                " afresh with weights=",
            )
    if engine.optimizer is None:
        return
    warn_of_other_bits(engine, saved)
    groups, members = members_of(engine), own_groups(saved.members, names)
    # in any order: a rank's stages need not list parameters as the whole model does
    if [sorted(m, key=repr) for m in groups] != [sorted(m, key=repr) for m in members]:
        raise CheckpointMismatch(
            f"the checkpoint's parameter groups hold"
            f" {[len(m) for m in members]} parameters, this optimizer's"
            f" {[len(m) for m in groups]}, or others",
            advice="build the optimizer with the groups it had when it was saved",
        )


def warn_of_other_bits(engine: Engine, saved: SavedValues) -> None:
    """Say what makes a run go on with other bits than it would have had."""
    grouped, threads = engine.setup.comm.sum_group, torch.get_num_threads()
    if saved.sum_group != grouped:
        warnings.warn(
            f"gradients added up in groups of {saved.sum_group} ranks until this checkpoint, and go"
            f" on in groups of {grouped}, which gives other bits",
            stacklevel=6,
        )
    if saved.threads not in (None, threads):
        warnings.warn(
            f"torch computed on {saved.threads} threads until this checkpoint, and goes on with"
            f" {threads}: its sums on CPUs depend on that, so bits may differ from a run that was"
            f" never cut off; set OMP_NUM_THREADS={saved.threads} to have the same",
            stacklevel=6,
        )


def check_entries(
    engine: Engine,
    entries: Sequence[SavedTensor],
    kinds: Collection[str],
    adapting: Collection[str] | None = None,
) -> None:
    """Refuse tensors whose names, shapes or dtypes differ from the model's, listing the first.

    Args:
        adapting: names of buffers whose shapes the model itself will change.
    """
    fixed = [kind for kind in kinds if kind != "state"]
    here = {p.name: (p.shape, p.dtype) for p in parts_of(engine) if p.name.kind in fixed}
    there = {name_of(e): (e.shape, dtype_of(e)) for e in entries if e.kind in fixed}
    taken = {s.spec.name for _, s in engine.setup.blueprint.layout.home}
    problems = [f"{called(n)} is not in the checkpoint" for n in here if n not in there]
    problems += [f"{called(n)} is not in the model" for n in there if n not in here]
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


def called(name: Name) -> str:
    """Return a name in messages, with the code that a parameter is in."""
    code = f" in {name.key}" if name.key else ""
    return f"{name.kind} {name.name!r}{code}"


def check_given(saved: SavedValues, **given: HasState | None) -> None:
    """Refuse to restore objects that were not saved."""
    for name, thing in given.items():
        if thing is not None and getattr(saved, name) is None:
            raise CheckpointMismatch(
                f"the checkpoint has no state of {name}=",
                advice=f"pass {name}= to save_checkpoint as well, or do not pass it here",
            )
