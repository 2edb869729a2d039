"""What `hetero train` can be told, on the command line or in a file (no torch)."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hetero.config import Config, read_settings
from hetero.errors import ConfigError

# `model` and an option of the run's own say the first two; a run clips, so that updates wait
NOT_TAKEN = ("weights", "max_grad_norm", "updates")
SETTINGS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in NOT_TAKEN)
ANY_NUMBER = ("seed",)
FROM_ZERO = ("warmup", "weight_decay", "lora_dropout")  # every other number is above zero


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, on what, for how long and under which budget."""

    model: str = "gpt"
    """A preset (gpt, on bytes and without transformers; tiny-llama; tiny-gpt2), a directory with
    config.json and safetensors, or a name on the Hub."""
    data: tuple[str, ...] = ()
    """Text files, .jsonl files, directories of them, or a directory that datasets saved; repeat it
    for several. None: Python's reference manual."""
    tokenizer: str | None = None
    """A directory, a name on the Hub, or "bytes". None: the model's, and bytes for a preset."""
    task: Literal["pretrain", "sft"] = "pretrain"
    """pretrain: all of the text, in blocks without padding. sft: rows with prompt and completion,
    or with messages; the loss is of what is answered."""
    seq: int = 256
    """Tokens of a sequence; the longest one that sft keeps."""
    width: int | None = None
    """Features of a preset.  [default: gpt 512, others 64]"""
    layers: int | None = None
    """Blocks of a preset.  [default: gpt 10, others 2]"""
    heads: int | None = None
    """Attention heads of a preset's blocks.  [default: gpt 8, others 4]"""
    checkpoint_blocks: bool = True
    """Let gpt compute each block again in backward."""
    lora_rank: int | None = None
    """Train low-rank adapters of this rank (PEFT), and leave the model frozen. None: train it."""
    lora_alpha: int | None = None
    """Scale of the adapters.  [default: twice the rank]"""
    lora_targets: tuple[str, ...] = ()
    """Names of the modules that get adapters; repeat it for several. None: all linear ones."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    optimizer: Literal["adamw", "adam", "sgd", "adafactor", "lion", "adamw8bit"] = "adamw"
    """Its class: of torch.optim, or of hetero.optim."""
    lr: float = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """From the peak: along a cosine to a tenth, in a line to zero, or not at all."""
    warmup: int | None = None
    """Steps up to the peak.  [default: a tenth of all]"""
    weight_decay: float = 0.01
    """Decay of the weights."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to."""
    batch: int = 2
    """Sequences of a pass."""
    accumulate: int = 1
    """Passes of a step."""
    steps: int = 64
    """Steps of the run and of its schedule."""
    epochs: float | None = None
    """Steps as passes over the data, in place of steps."""
    minutes: float | None = None
    """Stop after this much training, wherever the schedule is.  [default: never; 3.5 for gpt where
    neither steps nor epochs are given]"""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    eval_data: tuple[str, ...] = ()
    """Data to evaluate on, in any form of data."""
    eval_every: int | None = None
    """Steps between evaluations.  [default: at the end only]"""
    save_dir: str | None = None
    """Directory of checkpoints.  [default: the next of runs/1, runs/2 ...]"""
    save_every: int = 20
    """Steps between checkpoints; one is written at the end, too."""
    keep: int = 2
    """Checkpoints that stay."""
    resume: bool = False
    """Go on from the newest checkpoint, exactly."""
    out: str | None = None
    """Directory for the trained model as Hugging Face has it (adapters as PEFT has them), and its
    tokenizer."""
    track: tuple[str, ...] = ()
    """Trackers of accelerate (tensorboard, wandb, trackio ...), or jsonl; repeat it for several."""
    record: str | None = None
    """Directory for a recording of the first 32 steps and the report on it; "none" for none.
    [default: run, beside the checkpoints]"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `hetero.prepare`; hbm="all" means no budget at all."""

    def __post_init__(self) -> None:
        problems = [
            p for f in dataclasses.fields(self) for p in wrong(f.name, getattr(self, f.name))
        ]
        problems += [unknown(key) for key in self.settings if key not in SETTINGS]
        if problems:
            raise ConfigError("; ".join(problems), advice="hetero train --help lists every option")

    @property
    def is_demo(self) -> bool:
        """Whether the model is the one that needs nothing but torch."""
        return self.model == "gpt"


# -- where they come from ------------------------------------------------------------------------


def gathered(file: str | Path | None, given: Mapping[str, Any]) -> TrainOptions:
    """Return the options in a TOML or YAML file, with ``given`` on top; settings among them.

    Raises ConfigError that names every problem, with the closest option for an unknown one.
    """
    found = {} if file is None else read_settings(Path(file))
    found = {key.replace("-", "_"): value for key, value in found.items()}
    found.update(given)
    own = {f.name for f in dataclasses.fields(TrainOptions)} - {"settings"}
    settings = {key: value for key, value in found.items() if key not in own}
    options = {key: tidy(key, value) for key, value in found.items() if key in own}
    return TrainOptions(settings=settings, **options)


def tidy(name: str, value: Any) -> Any:
    """Return a value in the form of its field: a list for several, one for one of several."""
    if name in several():
        return (value,) if isinstance(value, (str, Path)) else tuple(value or ())
    return float(value) if types()[name] is float and isinstance(value, int) else value


def unknown(name: str) -> str:
    """Say that an option is unknown, and which one may be meant."""
    known = [f.name for f in dataclasses.fields(TrainOptions) if f.name != "settings"]
    near = difflib.get_close_matches(name, [*known, *SETTINGS], n=1)
    return f"unknown option {name!r}" + (f", did you mean {near[0]}?" if near else "")


# -- what they may be ----------------------------------------------------------------------------


def wrong(name: str, value: Any) -> list[str]:
    """Return what is wrong with a value, one line or none."""
    if (value is None and optional(name)) or name == "settings":
        return []
    kind = types()[name]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return [] if value in choices else [f"{name}={value!r} is none of {', '.join(choices)}"]
    if name in several():
        good = isinstance(value, tuple) and all(isinstance(each, (str, Path)) for each in value)
    elif kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif kind is str:
        good = isinstance(value, (str, Path))
    else:
        good = type(value) is kind
    if not good:
        return [f"{name}={value!r} is no {'list' if name in several() else kind.__name__}"]
    return out_of_range(name, value) if kind in (int, float) else []


def out_of_range(name: str, value: float) -> list[str]:
    """Return what is wrong with a number."""
    if name in ANY_NUMBER or value > 0 or (value == 0 and name in FROM_ZERO):
        return []
    return [f"{name}={value!r} has to be {'0 or more' if name in FROM_ZERO else 'above 0'}"]


@cache
def hints() -> dict[str, Any]:
    return get_type_hints(TrainOptions)


@cache
def types() -> dict[str, Any]:
    """Return the type of each option, without None."""
    return {
        name: next((t for t in get_args(hint) if t is not type(None)), hint)
        if optional(name)
        else hint
        for name, hint in hints().items()
    }


def optional(name: str) -> bool:
    """Whether an option may be None."""
    return type(None) in get_args(hints()[name])


@cache
def several() -> frozenset[str]:
    """Return the options that take several values."""
    return frozenset(name for name, hint in hints().items() if get_origin(hint) is tuple)


def documented(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, as its source has it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found: dict[str, str] = {}
    body = getattr(tree, "body", [])
    for here, after in itertools.pairwise(body):
        said = getattr(getattr(after, "value", None), "value", None)
        if isinstance(here, ast.AnnAssign) and isinstance(said, str):
            found[getattr(here.target, "id", "")] = " ".join(said.split())
    return found
