"""The run in a prepared model's memory: the last events of its log (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hetero.errors import ConfigError
from hetero.events import Event, What
from hetero.report.profile import meta_of
from hetero.report.run import Run
from hetero.train.engine.engine import Engine
from hetero.train.model.units import MARK
from hetero.types import Kind


def kept_run(model: nn.Module) -> Run:
    """Return a prepared model's last events as a run; ConfigError if it is not prepared."""
    engine: Engine | None = getattr(model, "__dict__", {}).get(MARK)
    if engine is None:
        raise ConfigError(
            f"{type(model).__name__} is neither a run nor a prepared model",
            advice="give a run's directory, or record one: with hetero.profile(model, directory):",
        )
    kept = list(engine.setup.log)
    return Run.of(meta_of(engine), [*constant(engine, kept), *kept])


def constant(engine: Engine, kept: list[Event]) -> Iterator[Event]:
    """Yield the levels that did not change during these events."""
    if not kept:
        return
    first_seq, first = min(e.seq for e in kept), kept[0]
    changed = {(e.tier, e.category) for e in kept if e.what == What.LEVEL.value}
    for tier in engine.setup.ledger.budgets:
        for kind in Kind:
            n_bytes = engine.setup.ledger.used(tier, kind)
            if n_bytes and (tier.name, kind.value) not in changed:
                first_seq -= 1
                at = (first_seq, first.t_ns, 0, What.LEVEL.value, first.step, first.phase)
                yield Event(*at, "", tier.name, -1, -1, n_bytes, kind.value, "", -1)
