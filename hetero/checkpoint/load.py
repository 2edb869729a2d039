"""Loading into a prepared model (floor 4)."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from hetero.api import engine_of
from hetero.checkpoint import own_buffers
from hetero.checkpoint.checks import (
    MAX_VALUE_BYTES,
    SavedValues,
    Values,
    check_entries,
    check_given,
    check_meta,
    check_schedule,
    check_values,
    dtype_of,
    name_of,
    only_saved,
    tensor_at,
    understood,
)
from hetero.checkpoint.names import Names, OwnEntries, check_taken, names_of
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.save import KINDS, HasState, check_keepers, check_pair, rng_state
from hetero.checkpoint.together import together
from hetero.checkpoint.values import decode
from hetero.checkpoint.verify import read_all
from hetero.crc import crc32
from hetero.device import set_accelerator_rng
from hetero.device.comm import Company
from hetero.errors import CheckpointError, CheckpointMismatch, DivergenceError
from hetero.io import IO
from hetero.members import Members
from hetero.modes import in_own_mode
from hetero.train.engine.alike import MEMBERS
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Part
from hetero.train.engine.state_dict import (
    Make,
    begin_again,
    check_states,
    empty_states,
    loaded,
    own_makes,
    parts_of,
    settle,
    take_scalars,
)
from hetero.train.update.optimizer import Optimizer

LOAD_THREADS = 2  # one reads while the other checks


@in_own_mode
def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    step: int | None = None,
    kinds: Collection[str] = KINDS,
    io: IO | None = None,
) -> Any:
    """Load a checkpoint into a prepared model and optimizer; returns the ``extra`` it was given.

    Budgets, chunk size, tiers and device may differ from those of the save; training goes on bit
    for bit. All ranks that share a model call this; there may be more or fewer than at the save.
    The states of torch's, Python's and numpy's generators are set.

    Args:
        directory: a directory of checkpoints, whose newest is loaded, or one ``step-N`` itself.
        model, optimizer: as `hetero.prepare` returned them, at the precision of the checkpoint.
        scheduler, data: get their saved states.
        step: which checkpoint; None: the newest.
        kinds: the kinds of parts to load, of `KINDS`; others stay as they are. Without "state" that
            is all of the optimizer, with the settings of its groups.
        io: the access to files; tests pass one that fails.

    Raises:
        NoCheckpoint: there is none; CheckpointCorrupt: it is damaged, and the advice names the
            newest good one; CheckpointMismatch: it is of another model, optimizer or precision, and
            nothing was changed; UnsafeCheckpoint, CheckpointTooNew, StorageError.
        ConfigError: a ``scheduler`` or ``data`` has no ``load_state_dict``.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> _ = hetero.save_checkpoint("checkpoints", model, optimizer, {"epoch": 2})
        >>> hetero.load_checkpoint("checkpoints", model, optimizer)
        {'epoch': 2}
    """
    engine = engine_of(model)
    check_pair(engine, optimizer)
    comm, names = engine.setup.everyone, names_of(engine)
    with ExitStack() as files:
        found: list[Checked] = []

        def check() -> bytes:
            check_keepers(scheduler=scheduler, data=data)
            reader = files.enter_context(CheckpointReader.open(directory, step, io))
            found.append(checked(engine, reader, scheduler, data, kinds, names))
            read_all(reader, comm.rank, comm.size)  # ranks share the work
            same = [reader.step, f"{reader.digest:08x}", sorted(set(kinds))]
            return json.dumps([same, own_numbers(found[0].own)]).encode()

        # 1. refuse before anything changes, on all ranks
        rows = [json.loads(row) for row in together(comm, "a load", check)]
        check_alike([same for same, _ in rows], comm.members)
        reader, own, saved, adapting, states = found[0]
        if not names.is_whole:
            check_taken(reader, [numbers for _, numbers in rows])
        if {"param", "state"} <= set(kinds):  # the load replaces all that early updates changed
            engine.void_early()
        settle(engine)
        empty = empty_states(engine, states)
        give = partial(give_back, reader, saved, scheduler, data)
        together(comm, "a load", give)
        # 2. load the tensors; until all are loaded the model is unusable
        engine.broken.begin_load(reader.path)
        if "state" in kinds:
            begin_again(engine, empty)
        given = [kind for kind in kinds if kind != "buffer" or adapting is None]
        todo = matched([p for p in parts_of(engine) if p.name.kind in given], own)
        with engine.setup.store.writing_shares("the beginning of a load"):
            together(comm, "the end of a load", partial(load_parts, own, todo))
        if "param" in kinds:
            loaded(engine)
        if adapting is not None:
            with engine.broken.loads_itself():
                adapt(engine, own)
        if "buffer" in kinds:
            put = partial(own_buffers.put, engine, names, saved.own_buffers)
            together(comm, "the end of a load", put)
        # 3. load all other values
        if "state" in kinds:
            take_scalars(engine, saved.scalars)
            restore_groups(engine, saved)
        restore(engine, saved)
        engine.broken.end_load()
    return saved.extra


class Checked(NamedTuple):
    """A checkpoint that a model can load."""

    reader: CheckpointReader
    own: CheckpointReader | OwnEntries
    """Its entries, by the names of this rank's model."""
    saved: SavedValues
    adapting: set[str] | None
    """Names of buffers that the model itself loads; None if it loads none."""
    states: list[Make]


def checked(
    engine: Engine,
    reader: CheckpointReader,
    scheduler: HasState | None,
    data: HasState | None,
    kinds: Collection[str],
    names: Names,
) -> Checked:
    """Refuse a checkpoint that a model cannot load; nothing changes."""
    saved = understood(engine, reader, names)
    own = reader if names.is_whole else OwnEntries(reader, names)
    check_meta(engine, saved, names)
    adapting = None
    if "buffer" in kinds:
        with only_saved(reader):
            adapting = adapted(engine.setup.model, own)
    check_entries(engine, own.entries, kinds, adapting)
    check_given(saved, scheduler=scheduler, data=data)
    saved_states = [e for e in own.entries if e.kind == "state"] if "state" in kinds else []
    states = own_makes(engine, ((name_of(e), dtype_of(e), e.shape) for e in saved_states))
    with only_saved(reader):
        check_values(engine, saved)
        if "state" in kinds:
            check_states(engine, saved.groups, states, saved.scalars)
        check_schedule(engine, scheduler, saved.scheduler)
    return Checked(reader, own, saved, adapting, states)


def own_numbers(own: CheckpointReader | OwnEntries) -> list[int]:
    """Return the numbers of a checkpoint's entries that this rank's stages have."""
    return own.numbers if isinstance(own, OwnEntries) else []


def check_alike(told: Sequence[Sequence[Any]], members: Members) -> None:
    """Raise DivergenceError unless all ranks load the same: ``told`` are each one's step, digest
    and kinds."""
    in_words = (
        ("steps", "name one with step=, in a directory that the machines of all ranks see"),
        ("checkpoints of one step", "name a directory that the machines of all ranks see"),
        ("kinds of parts", "call load_checkpoint with the same kinds= on every rank"),
    )
    for (what, advice), values in zip(in_words, zip(*told, strict=True), strict=True):
        if any(value != values[0] for value in values):
            raise DivergenceError(
                f"ranks load different {what} ({members.listed(values)})", advice=advice
            )


def give_back(
    reader: CheckpointReader, saved: SavedValues, scheduler: HasState | None, data: HasState | None
) -> bytes:
    """Give objects their saved states, or none of them."""
    with only_saved(reader), all_or_none(scheduler, data):
        if scheduler is not None:
            scheduler.load_state_dict(saved.scheduler)
        if data is not None:
            data.load_state_dict(saved.data)
    return b""


def load_parts(reader: CheckpointReader | OwnEntries, parts: Iterable[tuple[Part, int]]) -> bytes:
    """Read what this rank keeps."""

    def load(one: tuple[Part, int]) -> None:
        part, number = one
        part.load(partial(reader.read, number), reader.entries[number].lies)

    with ThreadPoolExecutor(LOAD_THREADS, "hetero-load") as executor:
        for _ in executor.map(load, parts):
            pass
    return b""


@contextmanager
def all_or_none(*things: HasState | None) -> Iterator[None]:
    """Give objects back their former states if one of them refuses its new one."""
    before = [(thing, copy.deepcopy(thing.state_dict())) for thing in things if thing is not None]
    try:
        yield
    except BaseException:
        for thing, state in before:
            thing.load_state_dict(state)
        raise


def read_weights(directory: str | Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the newest checkpoint's parameters and buffers by name, and its ``extra``.

    They are in RAM as a whole, as `model.state_dict` showed them when saved: working weights,
    without the remainder of their masters. Raises CheckpointError for weights in code.
    """
    with CheckpointReader.open(directory) as reader:
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


def matched(
    parts: Sequence[Part], reader: CheckpointReader | OwnEntries
) -> Iterator[tuple[Part, int]]:
    """Yield each part of the model with the number of its entry."""
    for part in parts:
        number = reader.find(*part.name)
        if number is None:
            raise CheckpointMismatch(
                f"{part.name} is not in {reader.path}",
                advice="build the model as it was when it was saved",
            )
        yield part, number


def adapted(model: nn.Module, reader: CheckpointReader | OwnEntries) -> set[str] | None:
    """Return the names of buffers whose shapes a model's own methods of loading may change.

    None: the buffers are read in place. A ``load_state_dict`` of the model's own is always called
    and may change any buffer; a ``_load_from_state_dict`` of a module's own, that module's.
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
    return getattr(type(module), method) is not getattr(nn.Module, method)


def adapt(engine: Engine, reader: CheckpointReader | OwnEntries) -> None:
    """Let the model's own methods load the buffers; CheckpointMismatch if a shape differs then."""
    numbered = enumerate(reader.entries)
    buffers = {e.name: tensor_at(reader, n) for n, e in numbered if e.kind == "buffer"}
    model = engine.setup.model
    model.load_state_dict({**model.state_dict(), **buffers}, strict=False)
    check_entries(engine, reader.entries, ("buffer",))


def restore_groups(engine: Engine, saved: SavedValues) -> None:
    """Set the settings of the optimizer's groups."""
    if engine.optimizer is None:
        return
    for group, settings in zip(engine.optimizer.param_groups, saved.groups, strict=True):
        for key, value in settings.items():
            mine = group.get(key)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                mine.copy_(value)  # a scheduler may hold it
            elif key not in MEMBERS:  # of which older checkpoints have names
                group[key] = value


def restore(engine: Engine, saved: SavedValues) -> None:
    """Set the loss scale, the generators and the count of steps."""
    engine.setup.steps = saved.steps
    if engine.scaler is not None and saved.scaler is not None:
        engine.scaler.load_state_dict(saved.scaler)
    comm = engine.setup.comm  # of which all ranks of a tensor have one number: they draw the same
    if comm.rank and saved.own_rng is None:
        seed_generators(saved.rng, comm)
    else:
        set_generators(engine, saved.own_rng or saved.rng)


def seed_generators(states: Mapping[str, Any], comm: Company) -> None:
    """Seed the generators of a rank that the checkpoint has no states of: by the first rank's, and
    its own number."""
    raw = memoryview(states["torch"].numpy().tobytes() + comm.rank.to_bytes(8, "little"))
    seed = crc32(raw)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    warnings.warn(
        "the checkpoint is of fewer ranks, or of others:"
        f" {comm.members.name(comm.rank)} draws other random numbers than any rank did before;"
        " seed its generators after the load if it matters which",
        stacklevel=4,
    )


def set_generators(engine: Engine, states: Mapping[str, Any]) -> None:
    """Set the generators of a training loop to the result of `rng_state`."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        set_accelerator_rng(engine.setup.device.torch_device, states["device"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])


@contextmanager
def same_generators(engine: Engine) -> Iterator[None]:
    """Restore the generators after a block, whatever a load in it sets them to."""
    states = rng_state(engine)
    try:
        yield
    finally:
        set_generators(engine, states)
