"""Rows of a plan for several GPUs in its machine: one of the ranks is rehearsed (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.parallel.mesh import SHARD
from hetero.rehearse.attempts import in_words, until_it_fits
from hetero.rehearse.mirror import ranks_of
from hetero.rehearse.rehearsal import Scene
from hetero.report.views import REHEARSED, WhatIf
from hetero.types import Tier

RANKS = (2, 8)
OF_THE_MACHINE = ("host", "nvme_bytes", "pinned")  # settings of bytes that its ranks divide


def several_gpus(scene: Scene, tokens: float) -> Iterator[WhatIf]:
    """Yield rows for each number of GPUs of one machine that share the model, each with a batch of
    its own of so many ``tokens``: ranks read each other's shares in RAM, or gather them, if there
    are masters, whose homes may then be on HBM. Bytes of RAM and disk that were given are those of
    all ranks."""
    if scene.profile.gpu is None or scene.profile.has_one_ram:  # which has one GPU
        return
    ways = (False,) if scene.config.precision == "fp32" else (False, True)
    for n_ranks in RANKS:
        config = shared(scene.config, n_ranks)
        if ranks_of(config.mesh, scene.profile).is_near:
            for gathers in ways:
                config = replace(config, gather_shares=gathers)
                yield row_of(replace(scene, config=config), n_ranks, tokens)


def row_of(scene: Scene, n_ranks: int, tokens: float) -> WhatIf:
    """Return the row of one of the ranks; of all of them are its tokens a second."""
    gathers = scene.config.gather_shares
    label = f"{n_ranks} GPUs{', gather_shares' if gathers else ' in this machine'}"
    try:
        found, _, shortfalls = until_it_fits(scene)
    except ConfigError as error:
        return WhatIf(label, False, 0, 0.0, f"refused: {error.args[0]}", 0.0, REHEARSED)
    said = f"{n_ranks} times the tokens a step, by a plan with --ranks {n_ranks}"
    if gathers:
        said = "the same ranks with gather_shares=True: homes may be on HBM"
    seconds = found.step_seconds
    speed = n_ranks * tokens / seconds if seconds else 0.0
    change = in_words(shortfalls) or said
    return WhatIf(label, not shortfalls, found.peaks[Tier.HBM], seconds, change, speed, REHEARSED)


def shared(config: Config, n_ranks: int) -> Config:
    """Return the settings of one of the ranks that share a model and a machine."""
    given: dict[str, Any] = {name: getattr(config, name) for name in OF_THE_MACHINE}
    parts = {name: max(1, n // n_ranks) for name, n in given.items() if n is not None}
    # ranks refuse updates in backward: a gradient is the sum of all of them
    return Config.load(config, mesh={SHARD: n_ranks}, updates="step", **parts)
