"""`hetero.profile`: record what a training loop does with memory (floor 4)."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from hetero.api import update_place
from hetero.config import Config
from hetero.report.run import BucketMeta, Meta, Recorder, Run
from hetero.train.check import MARK
from hetero.train.engine import Engine
from hetero.version import __version__


class Profile:
    """A run that is, or was, recorded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where ``meta.json`` and ``events.jsonl.gz`` are."""

    def load(self) -> Run:
        """Return what was recorded; the block has to be over."""
        return Run.load(self.directory)


@contextmanager
def profile(model: nn.Module, directory: str | Path | None = None) -> Iterator[Profile]:
    """Record the steps that run inside a ``with`` block.

    Args:
        model: prepared with `hetero.prepare`.
        directory: for the run's files; None: a new one for temporary files.
    """
    engine: Engine = model.__dict__[MARK]
    folder = Path(directory or tempfile.mkdtemp(prefix="hetero-run-"))
    engine.device.watch(True)
    engine.restate()
    recorder = Recorder(engine.log, folder, meta_of(engine))
    try:
        yield Profile(folder)
    finally:
        recorder.close()
        recorder.write_meta(meta_of(engine))  # what a step made resident is so now
        engine.device.watch(False)


def meta_of(engine: Engine) -> Meta:
    """Return what an engine's run is."""
    layout = engine.blueprint.layout
    return Meta(
        model=type(engine.model).__name__,
        n_params=sum(p.numel() for p in engine.params),
        device=engine.device.name,
        mode=engine.mode,
        update_place=update_place(engine),
        precision=engine.config.precision,
        chunk_bytes=4 * layout.chunk_numel,
        budgets={tier.name: limit for tier, limit in engine.ledger.budgets.items()},
        units=list(layout.unit_names),
        buckets=[BucketMeta(b.unit, b.n_bytes, b.numel, b.trainable) for b in layout.buckets],
        versions=versions(),
        settings=given(engine.config),
    )


def given(config: Config) -> dict[str, object]:
    """Return the settings that say something, without the device, which may be an object."""
    values = ((f.name, getattr(config, f.name)) for f in fields(config) if f.name != "device")
    return {name: value for name, value in values if value}


def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    return {
        "hetero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
