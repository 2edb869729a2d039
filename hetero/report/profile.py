"""`hetero.profile`: record the memory events of a training loop (floor 4)."""

from __future__ import annotations

import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hetero.config import Config
from hetero.errors import ConfigError, StateError
from hetero.events import EventLog
from hetero.memory.layout import Bucket
from hetero.plan.hardware import find, sha256
from hetero.plan.machine import MachineProfile
from hetero.report.allocations import StepAllocations
from hetero.report.plain import watch
from hetero.report.run import BucketMeta, Meta, Recorder, Run
from hetero.status import axes_of, update_place
from hetero.train.engine.engine import Engine
from hetero.train.model.units import MARK
from hetero.types import Kind
from hetero.version import __version__

_one = threading.Lock()  # held while a block is open: two blocks would count each other's bytes


class Profile:
    """A run being recorded, or recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.directory = recorder.directory
        """Directory of ``meta.json`` and ``events.jsonl.gz``."""
        self._recorder = recorder

    def note(self, **values: float) -> None:
        """Tell what a step came to, for the report to show next to the tiers.

        Each name is a curve: ``run.note(loss=loss.item(), tokens=batch.numel())``. Of ``tokens``
        the report shows the rate, and their mean over steady steps.
        """
        self._recorder.note(values)

    def load(self) -> Run:
        """Return the recorded run, after the block."""
        return Run.load(self.directory)


class Planned(Protocol):
    """A prediction of a run."""

    def write_beside(self, directory: Path) -> None:
        """Write the prediction into the run's directory."""


@contextmanager
def profile(
    model: nn.Module,
    directory: str | Path | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Planned | None = None,
) -> Iterator[Profile]:
    """Record the steps that run inside a ``with`` block; no number that they compute changes.

    A model that was prepared with `hetero.prepare` is recorded by its engine. Any other is watched:
    every operation of the block's thread and of its backward passes is inspected, at tens of
    microseconds each, until the block ends. A step ends with the step of a torch optimizer over any
    of the model's parameters (of several in a row, with the first).

    Counted are bytes as requested, on the model's device alone:

    - ``param``, ``buffer``: storages of the model's; tied ones once.
    - ``grad``: storages of ``p.grad``, from the moment autograd has accumulated it.
    - ``state``: tensors in the optimizer's state, from the end of the step that made them; the
      states of an optimizer that was not given are ``other`` until its first step.
    - ``activation``: results of operations in the model's forward and in backward passes, and
      results computed from them outside while gradients are recorded (the loss).
    - ``other``: every other storage that an operation in the block touches: batches, temporaries of
      an optimizer. A dataset that is one tensor counts whole.

    Their sum is all storages known to be alive. Left out are storages that no operation in the
    block touches, other threads' operations, memory inside libraries and compiled functions, and
    the rounding of allocators. On CUDA the allocator's own count is recorded at the end of every
    access and phase, and ``unattributed`` is the rest of it; times there are those of the launching
    thread.

    Args:
        model: any module on one device, not compiled, not wrapped for several devices.
        directory: for the run's files, made where it is missing; None: a new one for temporary
            files. A recording that is there moves to a directory inside, ``earlier-1``.
        optimizer: the model's, so that states it has already are counted from the beginning.
        plan: the result of `hetero.plan`, which the report compares with the measurement.

    Raises:
        ConfigError: for a model or an optimizer that cannot be watched.
        StateError: inside another such block.
        StorageError: the files cannot be written; a later failure is raised when the block ends.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> with hetero.profile(model, "run") as run:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> run.load().meta.model
        'Linear'
    """
    with _alone(), _watching(model, optimizer) as (log, described):
        folder = Path(directory or tempfile.mkdtemp(prefix="hetero-run-"))
        began = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"

        def meta() -> Meta:
            return replace(described(), began=began, program=program())

        recorder = Recorder(log, folder, meta())
        if plan is not None:
            plan.write_beside(folder)
        try:
            yield Profile(recorder)
        finally:
            recorder.close()
            recorder.write_meta(meta())  # a step may have made more of it resident


@contextmanager
def _alone() -> Iterator[None]:
    if not _one.acquire(blocking=False):
        raise StateError(
            "a block of hetero.profile is open already", advice="end it before the next one"
        )
    try:
        yield
    finally:
        _one.release()


@contextmanager
def _watching(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[EventLog, Callable[[], Meta]]]:
    """Log a model's events; yields the log, and a function that describes the run."""
    engine: Engine | None = getattr(model, "__dict__", {}).get(MARK)
    if engine is None:
        watcher = watch(model, optimizer)
        with watcher.watching():
            yield watcher.log, lambda: replace(watcher.meta(), versions=versions())
        return
    if optimizer is not None and optimizer is not engine.optimizer:
        raise ConfigError(
            "the optimizer is not the one that was prepared with the model",
            advice="pass what hetero.prepare returned, or none",
        )
    engine.setup.device.watch(True)
    engine.setup.log.annotates = engine.setup.device.is_cuda  # ranges for the vendor's profiler
    made = StepAllocations(engine)
    try:
        engine.restate()
        with made.watching():
            yield engine.setup.log, lambda: replace(meta_of(engine), allocations=made.found)
    finally:
        engine.setup.device.watch(False)
        engine.setup.log.annotates = False


def program() -> str:
    """Return the name of what runs: a script's file, or a package that is run as one."""
    path = Path(sys.argv[0] if sys.argv else "")
    return path.parent.name if path.name == "__main__.py" else path.name


def meta_of(engine: Engine) -> Meta:
    """Return the description of an engine's run."""
    layout = engine.setup.blueprint.layout
    numels = [param.numel() for param in engine.setup.params]
    return Meta(
        model=type(engine.setup.model).__name__,
        n_params=sum(numels),
        state_bytes=engine.setup.blueprint.state_bytes(numels),
        device=engine.setup.device.name,
        mode=engine.residence.name,
        update_place=update_place(engine),
        precision=engine.setup.config.precision,
        chunk_bytes=4 * layout.chunk_numel,
        locked_bytes=engine.setup.device.locked_bytes(),
        budgets={tier.name: limit for tier, limit in engine.setup.ledger.budgets.items()},
        units=list(layout.unit_names),
        buckets=[bucket_meta(engine, bucket) for bucket in layout.buckets],
        rank=engine.setup.everyone.rank,
        n_ranks=engine.setup.everyone.size,
        mesh=axes_of(engine),
        versions=versions(),
        settings=given(engine.setup.config),
        **hardware(engine.setup.config.profile),
    )


def bucket_meta(engine: Engine, bucket: Bucket) -> BucketMeta:
    """Return the description of a bucket."""
    blueprint = engine.setup.blueprint
    costs, unit = blueprint.costs[bucket.id], blueprint.layout.unit_names[bucket.unit]
    sizes = {
        Kind.GRAD: bucket.dtype.itemsize if costs.grad else 0,
        Kind.MASTER: costs.master,
        Kind.STATE: costs.state,
    }
    kinds = {kind.value: bucket.share_numel * size for kind, size in sizes.items() if size}
    names = [segment.spec.name.removeprefix(f"{unit}.") for segment in bucket.segments]
    shape = (bucket.unit, bucket.n_bytes, bucket.numel, bucket.trainable, bucket.home_bytes)
    return BucketMeta(*shape, kinds, names)


def hardware(name: str | None) -> dict[str, Any]:
    """Return the fields of `Meta` for the hardware profile that the settings name."""
    if name is None:
        return {}
    profile = find(name)
    return {
        "profile": profile.name,
        "profile_sha256": sha256(profile),
        "ceilings": ceilings(profile),
        "rated_write_bytes": rated_write_bytes(profile),
    }


def ceilings(profile: MachineProfile) -> dict[str, float]:
    """Return the peak rates of lanes, in bytes per second."""
    found: dict[str, float] = {}
    if profile.link is not None:
        found["h2d"] = profile.link.h2d.bytes_per_second.value
        found["d2h"] = profile.link.d2h.bytes_per_second.value
    if profile.nvme is not None:
        found["read"] = profile.nvme.read_bytes_per_second.value
        found["write"] = profile.nvme.write_bytes_per_second.value
    return found


def rated_write_bytes(profile: MachineProfile) -> int | None:
    """Return the bytes that a machine's drives are rated to take; None: unknown."""
    rated = profile.nvme.tbw_bytes if profile.nvme is not None else None
    return None if rated is None else int(rated.value)


def given(config: Config) -> dict[str, object]:
    """Return the settings that are set, without the device, which may be an object."""
    values = ((f.name, getattr(config, f.name)) for f in fields(config) if f.name != "device")
    return {name: value for name, value in values if value}


def versions() -> dict[str, str]:
    return {
        "hetero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
