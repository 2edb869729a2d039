"""How good the choice between activations and homes on HBM is, on a modelled machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.engine import Figure, Figures
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.rehearse.models import describe
from hetero.rehearse.named import machine
from hetero.rehearse.plan import scene_of
from hetero.rehearse.rehearsal import Scene, rehearse

MACHINE = "h200-sxm"
GRID = 24  # shares of HBM that activations may take from homes
LAYERS = {  # of a model of 8 B parameters, as many as are planned in seconds
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}


class Shape(NamedTuple):
    """A step, and the HBM for it."""

    tokens: int
    hbm: str
    settings: dict[str, Any]


SHAPES = (
    Shape(4096, "24GiB", {}),
    Shape(4096, "12GiB", {}),
    Shape(16384, "24GiB", {}),
    Shape(16384, "24GiB", {"updates": "backward"}),
)


def placement(device: str | None = None) -> Figures:
    """A step by the automatic placement against the best of a grid of 24 placements."""
    rows, detail = [], {}
    for shape in SHAPES:
        scene = scene_for(shape)
        auto = rehearse(scene).step_seconds
        grid = [seconds(scene, (i + 1) / GRID) for i in range(GRID)]
        extra = "".join(f", {key}={value}" for key, value in shape.settings.items())
        name = f"automatic / best, {shape.tokens} tokens, {shape.hbm}{extra} (modelled)"
        best = min(found for found in grid if found is not None)
        rows.append(Figure(name, auto / best, "x", "<=", 1.05))
        detail[name] = {"automatic": auto, "grid": grid}
    return Figures(rows, detail)


def scene_for(shape: Shape) -> Scene:
    """Return a step of the model on the machine."""
    config = Config.load(
        profile=MACHINE, precision="bf16", fused_loss=True, hbm=shape.hbm, **shape.settings
    )
    described = describe(LAYERS, (1, shape.tokens))
    return scene_of(described, None, None, config, machine(config))


def seconds(scene: Scene, share: float) -> float | None:
    """Return a step's time if activations get a share of HBM; None if they do not fit."""
    try:
        found = rehearse(replace(scene, activation_share=share))
    except BudgetError:
        return None
    return None if found.error else found.step_seconds
