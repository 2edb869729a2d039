"""Options of `hetero train`, on the command line or in a file (no torch)."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from hetero.config import Config, read_settings
from hetero.errors import ConfigError

# `model` and the option of that name replace the first two; a run clips, so updates wait
NOT_TAKEN = ("weights", "max_grad_norm", "updates")
SETTINGS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in NOT_TAKEN)
ANY_NUMBER = ("seed",)
FROM_ZERO = ("warmup", "weight_decay", "lora_dropout")  # every other number is above zero
DEMO_MINUTES = 3.5  # a demo of default length ends by then, even on a slow machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a training run: its model, data, length and budgets."""

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
    exchange: Literal["pass", "step"] = "pass"
    """When ranks exchange gradients: in each pass, which has the bits of one rank; or once a step,
    after those of a rank have added up on its device."""
    pipeline: Literal["1f1b", "gpipe", "interleaved", "interleaved-zb", "zbv", "dualpipev"] = "1f1b"
    """The order of a step's passes through stages (pp in mesh)."""
    stages_per_rank: int | None = None
    """Stages of a rank, in an interleaved pipeline.  [default: 2]"""
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
    [default: run, next to the checkpoints]"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `hetero.prepare`; hbm="all" means no budget at all."""

    def __post_init__(self) -> None:
        problems = [p for name in forms(TrainOptions) for p in wrong(name, getattr(self, name))]
        problems += [unknown(key) for key in self.settings if key not in SETTINGS]
        if self.record is not None and self.record.isdigit():
            problems.append(f"--record {self.record} is a number: it takes a directory, or none")
        if problems:
            raise ConfigError("; ".join(problems), advice="hetero train --help lists every option")

    @property
    def is_demo(self) -> bool:
        """Whether the model is the one that needs only torch."""
        return self.model == "gpt"


# -- reading them --------------------------------------------------------------------------------


def gathered(file: str | Path | None, given: Mapping[str, Any]) -> TrainOptions:
    """Return the options in a TOML or YAML file, with ``given`` on top; settings among them.

    Raises ConfigError that names every problem, with the closest option for an unknown one.
    """
    found = {} if file is None else read_settings(Path(file))
    found = {key.replace("-", "_"): value for key, value in found.items()}
    found.update(given)
    own = forms(TrainOptions)
    settings = {key: value for key, value in found.items() if key not in own}
    options = {key: tidy(own[key], value) for key, value in found.items() if key in own}
    return TrainOptions(settings=settings, **options)


def command_options(file: str | None, given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a command; a demo without a limit ends after `DEMO_MINUTES`."""
    options, default = gathered(file, given), TrainOptions()
    said = "steps" in given or options.minutes is not None
    long = (options.steps, options.epochs) == (default.steps, default.epochs)
    if options.is_demo and long and not said:
        return dataclasses.replace(options, minutes=DEMO_MINUTES)
    return options


def settings_of(options: TrainOptions) -> Config:
    """Return the given settings; hbm="all" means no budget."""
    given = dict(options.settings)
    if is_unlimited(options):
        given["hbm"] = None
    if isinstance(given.get("mesh"), str) and "=" in given["mesh"]:  # of the command line
        given["mesh"] = mesh_sizes(given["mesh"])
    return Config.load(None, **given)


def is_unlimited(options: TrainOptions) -> bool:
    return options.settings.get("hbm") == "all"


def check_paths_of(options: TrainOptions) -> None:
    """Refuse data that is not there, and directories that are written as such and are none."""
    missing = [path for path in (*options.data, *options.eval_data) if not Path(path).exists()]
    if missing:
        raise ConfigError(
            f"data: no such file or directory: {missing[0]}",
            advice="--data takes files and directories",
        )
    for given in (options.data, options.eval_data):
        if given and not any(map(has_bytes, given)):
            raise ConfigError(
                f"data: there is no text in {', '.join(map(str, given))}",
                advice="name files with text in them, or directories of such files",
            )
    if options.model.startswith((".", "/", "~")) and not Path(options.model).is_dir():
        raise ConfigError(
            f"--model {options.model} is no directory", advice="name one, a preset or a Hub name"
        )


def has_bytes(path: str) -> bool:
    """Whether a file, or one below a directory, is not empty."""
    inside = [Path(path), *Path(path).rglob("*")]
    return any(each.is_file() and each.stat().st_size > 0 for each in inside)


def mesh_sizes(given: str) -> dict[str, int]:
    """Return sizes by axis from text as dp_replicate=2,dp_shard=4.

    dp is short for dp_shard: ranks that have batches of their own, and share the model.
    """
    pairs = [part.partition("=") for part in given.split(",")]
    wrong = [name for name, _, size in pairs if not size.isdecimal() or not int(size)]
    if wrong:
        raise ConfigError(
            f"--mesh {given}: no size of {wrong[0]!r}", advice="write --mesh dp_shard=4"
        )
    names = {"dp": "dp_shard"}
    return {names.get(name.strip(), name.strip()): int(size) for name, _, size in pairs}


def asks_for_mesh(given: Mapping[str, Any]) -> bool:
    """Whether options of a plan ask for stages, for divided tensors, or for a search of meshes."""
    mesh = mesh_sizes(given["mesh"]) if given.get("mesh") else {}
    return bool(given.get("search")) or any(mesh.get(axis, 1) > 1 for axis in ("pp", "tp"))


def tidy(form: FieldForm, value: Any) -> Any:
    """Return a value in its form: a list of one in place of one, a float of an int."""
    if form.is_list:
        return (value,) if isinstance(value, (str, Path)) else tuple(value or ())
    return float(value) if form.kind is float and isinstance(value, int) else value


def unknown(name: str) -> str:
    """Return the problem of an unknown option, with the closest known one."""
    near = difflib.get_close_matches(name, [*forms(TrainOptions), *SETTINGS], n=1)
    return f"unknown option {name!r}" + (f", did you mean {near[0]}?" if near else "")


# -- checking them -------------------------------------------------------------------------------


class FieldForm(NamedTuple):
    """The values of a field, from its type."""

    kind: type
    """Of the value, or of each in a list."""
    choices: tuple[str, ...] = ()
    """The only values; empty for all of the kind."""
    is_list: bool = False
    is_optional: bool = False
    """Whether None is a value."""

    @classmethod
    def of(cls, hint: Any) -> FieldForm:
        """Return the form of a type."""
        parts = get_args(hint)
        if get_origin(hint) is Literal:
            return cls(str, choices=parts)
        if get_origin(hint) is tuple:
            return cls(str, is_list=True)
        if type(None) in parts:
            return cls.of(parts[0])._replace(is_optional=True)
        return cls(hint if isinstance(hint, type) else str)

    def takes(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        if self.is_list:
            return isinstance(value, tuple) and all(isinstance(v, (str, Path)) for v in value)
        if self.kind is str:
            return isinstance(value, (str, Path))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number if self.kind is float else type(value) is self.kind


@cache
def forms(cls: type) -> dict[str, FieldForm]:
    """Return the form of each field of a dataclass of options."""
    hints = get_type_hints(cls)
    return {
        f.name: FieldForm.of(hints[f.name]) for f in dataclasses.fields(cls) if f.name != "settings"
    }


def wrong(name: str, value: Any) -> Iterator[str]:
    """Yield the problem with the value of an option, if any."""
    form = forms(TrainOptions)[name]
    if value is None and form.is_optional:
        return
    if form.choices:
        if value not in form.choices:
            yield f"{name}={value!r} is none of {', '.join(form.choices)}"
    elif not form.takes(value):
        yield f"{name}={value!r} is no {'list' if form.is_list else form.kind.__name__}"
    elif form.kind in (int, float) and name not in ANY_NUMBER:
        zero = name in FROM_ZERO
        if not (value > 0 or (zero and value == 0)):  # NaN is neither
            yield f"{name}={value!r} has to be {'0 or more' if zero else 'above 0'}"


@contextmanager
def installed(
    need: str, package: str = "'hetero[integrations]'", other: str = ""
) -> Iterator[None]:
    """Turn a failed import in the block into a ConfigError with the package to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{need}: {error}", advice=f"pip install {package}{other}") from error


def documented(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, from its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found: dict[str, str] = {}
    body = getattr(tree, "body", [])
    for here, after in itertools.pairwise(body):
        said = getattr(getattr(after, "value", None), "value", None)
        if isinstance(here, ast.AnnAssign) and isinstance(said, str):
            found[getattr(here.target, "id", "")] = " ".join(said.split())
    return found
