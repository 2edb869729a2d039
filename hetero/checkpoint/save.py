"""Saving a prepared model (floor 4)."""

from __future__ import annotations

import atexit
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from hetero import interrupts
from hetero.api import engine_of
from hetero.checkpoint import own_buffers
from hetero.checkpoint.folders import STEP
from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.names import Names, in_whole, names_of, told, union
from hetero.checkpoint.reader import open_folder
from hetero.checkpoint.slices import Slice
from hetero.checkpoint.together import Ranks, together
from hetero.checkpoint.values import encode, encode_inside, encode_scalars
from hetero.checkpoint.writer import Writer, retain
from hetero.crc import crc32
from hetero.device import accelerator_rng
from hetero.errors import ConfigError, DivergenceError, StateError
from hetero.io import IO, Folder, make_folder
from hetero.members import Members
from hetero.memory.layout import Bucket
from hetero.train.engine.alike import MEMBERS, settings_of
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Name, Part, Saving, of_tensor
from hetero.train.engine.state_dict import Scalars, counted_at_close, parts_of, scalars_of
from hetero.train.update.optimizer import Optimizer, unwrapped
from hetero.version import __version__

SAVE_THREADS = 2  # one checksums and copies while the other writes
KINDS = ("param", "master", "state", "buffer")  # of a model's parts
WEIGHTS = ("param", "master", "buffer")  # the model's own, without its optimizer
STATES = ("state",)  # the optimizer's alone, for a script that saves the weights itself


class HasState(Protocol):
    """A scheduler, a dataloader, a sampler: any object with torch's two methods."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state that ``state_dict`` returned."""


class Save:
    """Checkpoint ``step``, written or about to be; a path-like of its future directory ``path``."""

    def __init__(self, step: int, path: Path, done: Future[Path]) -> None:
        self.step = step
        self.path = path
        self.told = False  # whether the caller knows the result
        self._done = done

    def wait(self) -> Path:
        """Return the directory once the checkpoint is durable; raises the save's error."""
        try:
            return interrupts.finished(self._done)
        finally:
            self.told = self._done.done()  # not if the wait was interrupted

    def join(self) -> None:
        """Return when it is over; its error is left for `wait`."""
        futures.wait([self._done])

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.done()

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Save(step={self.step}, path={str(self.path)!r}, done={self.done})"


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
    kinds: Collection[str] = KINDS,
    io: IO | None = None,
) -> Save:
    """Write ``directory/step-N``: parameters, masters, states, buffers, loss scale, RNG states.

    A checkpoint reported as saved is loadable after any crash, and loads bit for bit at any budget,
    chunk size, set of tiers and device. Gradients are not saved: save between steps.

    All ranks that share a model, or divide its tensors, call this; each writes what it has, copies
    are written once, and all succeed or none does.
    Of values that are not the model's the first rank's count; random generators are each rank's.

    Args:
        directory: made where it is missing; holds one ``step-N`` for each checkpoint. All ranks
            have to see it.
        model, optimizer: as `hetero.prepare` returned them.
        extra: numbers, strings, bytes, lists, tuples, dicts, tensors; `load_checkpoint` returns it.
        scheduler, data: objects with ``state_dict`` and ``load_state_dict``: a learning-rate
            scheduler, a dataloader that keeps its place (torchdata's ``StatefulDataLoader``).
        step: N; None: the optimizer steps made.
        keep_last: number of checkpoints to keep in ``directory``; None: all of them.
        asynchronous: return at once, and write while training goes on; errors come from `wait`.
            One save runs at a time: another begins when it is done.
        kinds: the kinds of parts to save, of `KINDS`.
        io: the access to files; tests pass one that fails.

    Raises CheckpointError if ``step-N`` exists, DiskFull and other StorageErrors; older checkpoints
    are then unchanged. ConfigError for an ``extra`` of other types, and a ``scheduler`` or ``data``
    without the two methods.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> save = hetero.save_checkpoint("checkpoints", model, optimizer)
        >>> save.path.name
        'step-0'
    """
    engine = engine_of(model)
    check_pair(engine, optimizer)
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last={keep_last}", advice="keep_last takes a positive number")
    engine.refuse_broken()
    number = engine.setup.steps if step is None else step
    comm = engine.setup.everyone
    plan = Plan(comm, names_of(engine))

    def prepare() -> bytes:
        check_keepers(scheduler=scheduler, data=data)
        engine.residence.quiesce()  # updates may go on
        engine.setup.masters.follow_for_now()
        # 1. take all small values now, and list the tensors
        plan.list_parts(engine, kinds)
        if comm.rank == 0:
            plan.meta = meta_of(engine, extra, scheduler, data, plan.extras)
            plan.root = make_folder(Path(directory), io)
        groups = [] if engine.optimizer is None else engine.optimizer.param_groups
        return plan.told_others(members_of(engine), settings_of(groups))

    together(comm, "the save before", partial(end_of_last, engine))
    try:
        plan.settle(together(comm, saving(number), prepare))
        tells = comm.size > 1 and "buffer" in kinds
        begin = partial(plan.open, engine, Path(directory), io, tells=tells)
        rows = together(comm, saving(number), begin)
        if tells:
            plan.add_own_buffers(rows)
        # 2. read the tensors bucket by bucket, each after its update and before its next one
        writing = Writing(engine, plan, Path(directory), number)
    except BaseException:
        if plan.root is not None:
            plan.root.close()
        raise
    save = engine.setup.saver.last = begun(writing, keep_last)
    if asynchronous:
        before_exit(partial(finish_at_exit, weakref.ref(save)))
    else:
        save.wait()
    return save


def begun(writing: Writing, keep_last: int | None) -> Save:
    """Begin to write on a thread."""
    executor = ThreadPoolExecutor(1, "hetero-save")
    done = executor.submit(writing.run, keep_last)
    executor.shutdown(wait=False)
    return Save(writing.step, writing.path, done)


def end_of_last(engine: Engine) -> bytes:
    """Wait for the save before, one at a time; raises its error unless `Save.wait` did."""
    last = engine.setup.saver.last
    if last is not None and not last.told:
        last.wait()
    return b""


def check_alike(digests: Sequence[bytes], members: Members) -> None:
    """Raise DivergenceError unless ranks are about to save the same tensors."""
    odd = next((at for at, each in enumerate(digests) if each != digests[0]), None)
    if odd is not None:
        raise DivergenceError(
            f"{members.name(odd)} saves other tensors than the first rank",
            advice="call save_checkpoint with the same kinds= on every rank, at the same step",
        )


def saving(step: int) -> str:
    return f"a save of step {step}"


def save_latest(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any = None,
    *,
    kinds: Collection[str] = KINDS,
) -> Save:
    """Save the only checkpoint of a directory; it replaces the others once it is durable."""
    comm = engine_of(model).setup.everyone
    newest = comm.agree(str(newest_step(directory)).encode(), "the newest checkpoint")[0]
    step = int(newest) + 1  # as the first rank, which writes, sees them
    return save_checkpoint(directory, model, optimizer, extra, step=step, keep_last=1, kinds=kinds)


def newest_step(directory: str | Path) -> int:
    """Return the number of the newest checkpoint in a directory, or -1."""
    names = (path.name for path in Path(directory).glob("step-*"))
    return max((int(found[1]) for name in names if (found := STEP.fullmatch(name))), default=-1)


def before_exit(call: Callable[[], None]) -> None:
    """Make a call when the interpreter ends, while its threads still run; from Python 3.12 on none
    can be started by then."""
    getattr(threading, "_register_atexit", atexit.register)(call)


def finish_at_exit(reference: weakref.ref[Save]) -> None:
    """Wait for a save that was never waited for, and warn if it failed."""
    save = reference()
    if save is not None and not save.told:
        try:
            save.wait()
        except BaseException as error:
            warnings.warn(f"the checkpoint {save.path} was not written: {error}", stacklevel=1)


def check_pair(engine: Engine, optimizer: Optimizer | None) -> None:
    """Refuse any optimizer but the one prepared with the model, and a missing one."""
    if unwrapped(optimizer) is not engine.optimizer:
        raise StateError(
            "the optimizer was not prepared with this model"
            if optimizer is not None
            else "the model was prepared with an optimizer, which is not given",
            advice="pass both as hetero.prepare returned them",
        )


def check_keepers(**given: Any) -> None:
    """Refuse a scheduler or a dataloader without the two methods of `HasState`."""
    for name, each in given.items():
        lacking = [
            method
            for method in ("state_dict", "load_state_dict")
            if not callable(getattr(each, method, None))
        ]
        if each is not None and lacking:
            advice = f"pass an object with state_dict and load_state_dict, or leave {name}= out"
            if name == "data":
                advice += (
                    ": torchdata's StatefulDataLoader has them, and accelerate's loaders do with"
                    " use_stateful_dataloader=True"
                )
            raise ConfigError(
                f"{name}= has no {' and no '.join(lacking)}: it is a {type(each).__name__}",
                advice=advice,
            )


def meta_of(
    engine: Engine,
    extra: Any,
    scheduler: HasState | None,
    data: HasState | None,
    extras: list[Part],
) -> dict[str, Any]:
    """Return a checkpoint's values; the tensors among them are added to ``extras``."""

    def keep(path: str, tensor: torch.Tensor) -> None:
        extras.append(of_tensor(Name("extra", path), tensor.detach().cpu().clone()))

    optimizer = engine.optimizer
    groups = optimizer.param_groups if optimizer is not None else []
    beside: Mapping[str, Any] = {
        "extra": extra,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "data": None if data is None else data.state_dict(),
        "rng": rng_state(engine),
        "groups": [{k: v for k, v in group.items() if k not in MEMBERS} for group in groups],
        "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
    }
    return {
        "hetero": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": engine.setup.config.precision,
        "frozen": engine.setup.config.frozen,
        "sum_group": engine.setup.comm.sum_group,
        "tensor_ranks": tensor_ranks(engine),
        "stage_ranks": stage_ranks(engine),
        "optimizer": None if engine.setup.inner is None else type(engine.setup.inner).__name__,
        "steps": engine.setup.steps,
        "members": members_of(engine),
        **{key: encode(value, key, keep) for key, value in beside.items()},
    }


def members_of(engine: Engine) -> list[list[str]]:
    """Return the names of each group's parameters, without those no longer in the model."""
    names = {id(param): name for name, param in engine.setup.model.named_parameters()}
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]


def tensor_ranks(engine: Engine) -> int:
    """Return how many ranks divide a tensor of the model."""
    return max(1, len(engine.setup.parts.ranks))


def stage_ranks(engine: Engine) -> int:
    """Return how many ranks have stages of the model, of their own."""
    company, shared = engine.setup.company, engine.setup.comm.everyone
    return 1 if company is None else company.size // shared.size


def rng_state(engine: Engine) -> dict[str, Any]:
    """Return the states of the generators of a training loop."""
    return {
        "torch": torch.get_rng_state(),
        "device": accelerator_rng(engine.setup.device.torch_device),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


class Plan:
    """What is saved: the parts of the model and, on the first rank, all other values."""

    def __init__(self, comm: Ranks, names: Names) -> None:
        self.comm = comm
        self.names = names
        self.numbered: list[tuple[int, Part]] = []
        """The model's parts, by their numbers in the checkpoint."""
        self.meta: dict[str, Any] = {}
        self.extras: list[Part] = []
        """The tensors among other values."""
        self.told: dict[str, Any] = {}
        """What this rank says of itself."""
        self._model: list[SavedTensor] = []
        """The entries of the whole model."""
        self._first: set[int] = set()
        """Numbers of those that no rank before this one has."""
        self.root: Folder | None = None
        self.has_states = True

    def list_parts(self, engine: Engine, kinds: Collection[str]) -> None:
        given = (part for part in parts_of(engine, as_now=True) if part.name.kind in kinds)
        found, self.has_states = in_whole(given, self.names), "state" in kinds
        if self.comm.size > 1:  # ranks need not have seen the same forward
            found.sort(key=lambda part: part.name)
        self.numbered = list(enumerate(found))
        self._model = [entry_of(part) for part in found]
        self._first = set() if self.comm.rank else set(range(len(found)))
        if self.comm.rank:
            self.told = {"rng": encode_inside(rng_state(engine))}

    def parts(self) -> list[tuple[int, Part]]:
        """Return what this rank saves."""
        after, first = len(self._model), self._first
        mine = [(n, p) for n, p in self.numbered if (n in first if p.kept is None else has(p.kept))]
        return mine + [(after + i, extra) for i, extra in enumerate(self.extras)]

    def entries(self) -> list[SavedTensor]:
        return [*self._model, *map(entry_of, self.extras)]

    def slices(self) -> list[Slice]:
        """Return the runs of entries that this rank saves."""
        entries = self.entries()

        def cut(number: int, part: Part) -> Slice:
            kept = slice(0, entries[number].numel) if part.kept is None else part.kept
            return Slice(number, entries[number], kept.start, kept.stop)

        return [cut(number, part) for number, part in self.parts()]

    def told_others(self, members: list[list[str]], settings: Mapping[str, str]) -> bytes:
        """Return what this rank tells the others of its model and its optimizer's groups."""
        if self.names.is_whole:
            return b"%08x" % crc32(memoryview(repr(self._model).encode()))
        whole = [[self.names.whole(name) for name in group] for group in members]
        return told(self._model, whole, settings, self.names)

    def settle(self, rows: Sequence[bytes]) -> None:
        """Number the entries as all ranks do; raises DivergenceError if their models do not fit."""
        if self.names.is_whole:
            check_alike(rows, self.comm.members)
            return
        found = union(rows, self.comm.members)
        numbers = {entry: number for number, entry in enumerate(found.entries)}
        self.numbered = [(numbers[entry_of(part)], part) for _, part in self.numbered]
        self._model = found.entries
        first = (numbers[entry] for entry, rank in found.first.items() if rank == self.comm.rank)
        self._first = set(first)
        if self.meta:
            self.meta["members"] = found.members

    def add_own_buffers(self, rows: Sequence[bytes]) -> None:
        """Add entries of buffers that ranks have of their own; ``rows``: what they told of them."""
        entries = {entry.name: entry for entry in self._model if entry.kind == "buffer"}
        parts = {part.name.name: part for _, part in self.numbered if part.name.kind == "buffer"}
        for name, ranks in own_buffers.rows_of(rows).items():
            if self.comm.rank in ranks:
                row = own_buffers.row_of(parts[name], ranks.index(self.comm.rank), len(ranks))
                self.numbered.append((len(self._model), row))
            self._model.append(own_buffers.entry_of_rows(entries[name], len(ranks)))

    def open(self, engine: Engine, directory: Path, io: IO | None, *, tells: bool) -> bytes:
        """Open the directory that the first rank has made; returns what this rank ``tells`` of its
        buffers."""
        if self.root is None:
            self.root = open_folder(directory, io)
        return own_buffers.digests(engine, self.names) if tells else b""


def entry_of(part: Part) -> SavedTensor:
    dtype = str(part.dtype).removeprefix("torch.")
    return SavedTensor(*part.name, dtype, part.lies.shape, part.lies.order, part.lies.cuts)


def has(kept: slice) -> bool:
    return bool(kept.start < kept.stop)


class Writing:
    """One save: the reading of its parts, then the commit."""

    def __init__(self, engine: Engine, plan: Plan, directory: Path, step: int) -> None:
        assert plan.root is not None
        self.path = directory / f"step-{step}"
        self.step = step
        self._plan = plan
        self._root = plan.root
        buckets = engine.setup.buckets
        self._scalars: Scalars = {}
        for bucket in buckets:
            self._scalars.update(scalars_of(engine, bucket))
        self._writer = Writer(self._root, step, plan.entries(), plan.slices(), plan.comm)
        self._saving = Saving(
            plan.parts(),
            [bucket.id for bucket in buckets],
            self._writer.write,
            pending=engine.residence.update_of,
            noted=partial(self._note, engine, buckets),
        )
        self._readers = interrupts.running(SAVE_THREADS, "hetero-save")
        try:
            engine.save(self._saving)
        except BaseException:
            self._readers.shutdown()
            self._writer.abandon()
            raise

    def _note(self, engine: Engine, buckets: Sequence[Bucket], bucket: int) -> None:
        if not counted_at_close(engine, buckets[bucket]):
            self._scalars.update(scalars_of(engine, buckets[bucket]))

    def run(self, keep_last: int | None) -> Path:
        """Read everything, commit, and remove all but the last ``keep_last``."""
        with self._root, self._writer:
            self._read()
            plan, failed = self._plan, self._saving.error
            kept = self._scalars if plan.has_states else {}
            named = {plan.names.whole(name): each for name, each in kept.items()}
            scalars = {"scalars": encode_scalars(named)}
            own = plan.told if plan.names.is_whole else {**plan.told, **scalars}
            path = self._writer.commit({**plan.meta, **scalars}, own, failed)
            if keep_last is not None and plan.comm.rank == 0:
                retain(self._root, keep_last, self.step)
        return path

    def _read(self) -> None:
        """Read everything, on enough threads to keep a drive busy."""
        with self._readers as executor:
            readers = [executor.submit(self._saving.run) for _ in range(SAVE_THREADS)]
        errors = [reader.exception() for reader in readers]
        self._saving.error = self._saving.error or next(filter(None, errors), None)
