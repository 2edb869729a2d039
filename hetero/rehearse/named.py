"""What a plan names: a machine by its profile, a model by its configuration (no torch)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.parse import json_of, read_text
from hetero.plan.hardware import find
from hetero.plan.machine import MachineProfile
from hetero.plan.presets import PRESETS

MAX_CONFIG_BYTES = 2**22


class HubConfig(Protocol):
    """A configuration as Transformers has it."""

    def to_dict(self) -> dict[str, Any]: ...


ModelConfig = Mapping[str, Any] | HubConfig | str | Path
"""A model's configuration, or its name, file or directory."""


def machine(config: Config) -> MachineProfile:
    """Return the profile that settings name."""
    if config.profile is None:
        raise ConfigError(
            "no profile says what the machine is",
            advice="measure this one with `hetero calibrate` and pass profile='profiles/<host>"
            ".toml', or name one that comes with hetero, as profile='rtx4090'",
        )
    return find(config.profile)


def is_factory(what: object) -> TypeGuard[str]:
    """Whether a text names a function, as mymodels:small."""
    return isinstance(what, str) and ":" in what and not Path(what).exists()


def config_of(what: ModelConfig) -> tuple[Mapping[str, Any], str]:
    """Return a configuration, and a name for it."""
    if not isinstance(what, (Mapping, str, Path)):
        if not callable(getattr(what, "to_dict", None)):
            raise ConfigError(
                f"{type(what).__name__} is no model, and no configuration",
                advice="give a module, a model's name or directory, or a configuration",
            )
        what = what.to_dict()
    if isinstance(what, Mapping):
        return what, str(what.get("_name_or_path") or what.get("model_type") or "model")
    if str(what) in PRESETS:
        return PRESETS[str(what)], str(what)
    path = Path(what)
    file = path / "config.json" if path.is_dir() else path
    if path.suffix == ".py":
        raise ConfigError(
            f"{what} is a file of Python, and a plan is of a function in it",
            advice=f"name the function, as {path.stem}:small, in the file's directory",
        )
    if path.is_dir() and not file.exists():
        raise ConfigError(
            f"the directory {what} has no config.json",
            advice="name the directory of a model as Transformers saves it, or a published name",
        )
    try:
        mapping = json_of(read_text(file, MAX_CONFIG_BYTES).encode())
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(str(what), PRESETS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else f": {error}"
        raise ConfigError(
            f"{what} is no model that hetero knows, and no configuration{hint}",
            advice=f"known models: {', '.join(PRESETS)}; or name a directory with config.json",
        ) from error
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{file} is no JSON object", advice="name a model's directory, or its config.json"
        )
    return mapping, path.resolve().name
