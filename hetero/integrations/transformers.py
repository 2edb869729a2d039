"""hetero under Transformers' `Trainer` and its subclasses (floor 4).

No method here moves a byte or computes a number: each passes Trainer's call on to
`HeteroAccelerator` or to hetero.

[Note: checkpoints]  A directory ``checkpoint-N`` has stock Trainer's files, but instead of
``optimizer.pt`` a checkpoint of hetero in ``hetero/``: model, masters and states, streamed and
checksummed. Resuming loads it when the model is prepared, and nothing before. If both exist, stock
Trainer wrote last. A model with adapters is saved as stock Trainer saves it: its states are small,
and its frozen base is not saved.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from hetero.api import company_of, engine_of
from hetero.checkpoint.save import save_checkpoint
from hetero.config import Config, Settings
from hetero.errors import CheckpointMismatch, ConfigError, HeteroError, StateError
from hetero.export import is_plain, trained_values
from hetero.integrations.accelerate import (
    SETTINGS,
    HeteroAccelerator,
    HeteroPlugin,
)
from hetero.integrations.losses import Losses
from hetero.integrations.optimizers import HeteroOptimizer
from hetero.integrations.parallelism import LAUNCHED, launched_axes, without
from hetero.integrations.prepared import is_prepared, load_states, plain_again
from hetero.integrations.sequences import (
    KNOWN,
    check_attention,
    check_losses,
    refuse_logits,
    whole_inputs,
    whole_loss,
)
from hetero.integrations.trainable import (
    STATES,
    check_adapters,
    check_states,
    check_trainable,
    has_adapters,
)
from hetero.integrations.whole import (
    exported_state,
    has_plain_state,
    take_part,
    whole_values,
)
from hetero.parallel.mesh import CONTEXT
from hetero.status import status
from hetero.types import Tier

if TYPE_CHECKING:
    from transformers import Trainer as Stock
else:
    Stock = object  # the user's class follows it in the method resolution order

FOLDER = "hetero"  # in a checkpoint's directory
SCHEDULE = "scheduler.pt"
NEEDED = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "training_step",
    "log",
    "_move_model_to_device",
    "_load_from_checkpoint",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
SUPPORTED = "4.55 to 5.x"


def trainer(cls: Any) -> type:
    """Return a subclass of a Trainer class whose models train under byte budgets.

    Its constructor takes one more argument, ``hetero=``: a `Config`, a mapping of its fields, or
    the path of a TOML or YAML file; by default the file that the environment variable HETERO_CONFIG
    names, if set. Numbers, logs and files are those of ``cls``; logs also have ``hetero/*``. A
    class of hetero's is returned as it is.

    Raises ConfigError for a class that is no Trainer, or of a release that is not supported.

    Example:
        >>> import hetero, transformers
        >>> HeteroTrainer = hetero.trainer(transformers.Trainer)
        >>> issubclass(HeteroTrainer, transformers.Trainer)
        True
    """
    check_class(cls)
    return cls if issubclass(cls, HeteroTrainer) else made(cls)


def enable(live: Any, config: Settings = None, **settings: Any) -> Any:
    """Let an existing Trainer train under byte budgets from now on; returns it.

    Args:
        live: a Trainer; one that has trained goes on with its optimizer's states.
        config: a `Config`, a mapping, or the path of a TOML or YAML file; ``settings`` go on top.
        settings: fields of `Config`, as ``hbm="20GiB"``.

    Raises ConfigError if the Trainer, its model or a setting cannot be honoured.

    Example:
        >>> import hetero, torch, transformers
        >>> live = transformers.Trainer(torch.nn.Linear(4, 1))
        >>> _ = hetero.enable(live, device="cpu:sim", hbm="1MiB")
        >>> isinstance(live, hetero.trainer(transformers.Trainer))
        True
    """
    found = trainer(type(live))
    if isinstance(live, HeteroTrainer):
        raise StateError("the Trainer is one of hetero's", advice="pass hetero= where it is built")
    taken = settings_of(live.args, Config.load(config, **settings))
    check_args(live.args)
    check_trainable(live.model)
    check_adapters(live.model, live.args)
    kept = [model for model in live.accelerator._models if model is not live.model]
    live.accelerator.free_memory()
    live.optimizer = getattr(live.optimizer, "optimizer", live.optimizer)
    live.__class__ = found
    live._hetero_take(taken)
    for model in kept:
        model.__dict__.pop("_is_accelerate_prepared", None)
        live.accelerator.prepare_model(model, evaluation_mode=True)
    return live


@functools.cache
def made(cls: Any) -> type:
    """Return the subclass of HeteroTrainer and ``cls``."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        self.hetero_given = kwargs.pop("hetero", None)
        cls.__init__(self, *args, **kwargs)

    own = inspect.signature(cls.__init__)
    more = inspect.Parameter("hetero", inspect.Parameter.KEYWORD_ONLY, default=None)
    rest = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    last = [p for p in own.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    shown: Any = functools.wraps(cls.__init__)(build)
    shown.__signature__ = own.replace(parameters=[*rest, more, *last])
    names = {"__init__": shown, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Hetero{cls.__name__}", (HeteroTrainer, cls), names)


class HeteroTrainer(Stock):
    """The methods that `trainer` puts before those of a Trainer class."""

    hetero_given: Settings = None
    """The argument ``hetero=``; None: the file that HETERO_CONFIG names, or no settings."""

    # -- set-up ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Build the Accelerator that Trainer builds, and make it hetero's."""
        check_args(self.args)
        if self.model is not None:
            check_trainable(self.model)
            check_adapters(self.model, self.args)
        given = self.hetero_given or os.environ.get(SETTINGS) or None
        taken = settings_of(self.args, Config.load(given))
        self._hetero_axes = None
        with without(LAUNCHED) as launched:
            super().create_accelerator_and_postprocess()
        self._hetero_take(taken, self._hetero_axes or launched_axes(launched))

    def _build_accelerator_args(self: Any, **kwargs: Any) -> dict[str, Any]:
        """Keep the axes of ranks from accelerate, which would place parameters by them."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._hetero_axes = found.pop("parallelism_config", None)
        return found

    def _hetero_take(self: Any, config: Config, axes: Any = None) -> None:
        """Prepare models with these settings from now on."""
        self.args._n_gpu = min(1, self.args.n_gpu)  # more would wrap models in DataParallel
        ours = HeteroAccelerator.adopt(self.accelerator, HeteroPlugin(config), axes)
        if ours._n_alike > 1:  # the method that Trainer has bound is not ours
            self.gather_function = functools.partial(
                ours.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )
        self._hetero_losses = Losses()

    @property
    def _hetero_n_parts(self: Any) -> int:
        """The ranks that have parts of the same sequences."""
        return int(self.accelerator._sizes.get(CONTEXT, 1))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model in its tiers: its parameters are fetched when needed."""

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the optimizer, or keep one released with its model, and its states."""
        if isinstance(self.optimizer, HeteroOptimizer):
            self.optimizer = self.optimizer.optimizer.inner
        plain_again(self.model)  # another Trainer may have trained it and takes it back plain
        held = list(vars(self).values())
        if any(is_prepared(model) for model in held if model is not self.model):
            warnings.warn(
                "another model of this Trainer (a reference model) has a budget of its own, of the"
                " same size: together they take hbm= and host= twice. Give half of the memory",
                stacklevel=2,
            )
        return super().create_optimizer(*args, **kwargs)

    # -- steps -----------------------------------------------------------------------------------

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make a step, and count a loss that Trainer's filter hides."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self.args.logging_nan_inf_filter:
            self._hetero_losses.saw(loss, self.state.global_step)
        return loss

    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: Any) -> Any:
        """Return the block in which this rank has parts of a batch, and the batch, to be cut."""
        if self._hetero_n_parts == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)
        check_losses(self.args.label_smoothing_factor, self.compute_loss_func)
        check_attention(model)
        whole = whole_inputs(model, inputs)
        cut = [value for name, value in whole.items() if name in KNOWN]
        block = functools.partial(
            self.accelerator.maybe_context_parallel,
            buffers=cut,
            buffer_seq_dims=[1] * len(cut),
            no_restore_buffers=set(cut),
        )
        return block, whole

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a step of an evaluation: the loss of whole sequences, where ranks have parts."""
        n_parts = self._hetero_n_parts
        if n_parts == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        if not prediction_loss_only:
            refuse_logits()
        loss, *rest = super().prediction_step(model, inputs, True, *args, **kwargs)
        if loss is not None:
            sizes = n_parts, self.accelerator._n_alike // n_parts
            loss = whole_loss(self.accelerator, loss, sizes)
        return loss, *rest

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and add hetero's figures of the last step."""
        if "loss" in logs:
            logs = self._hetero_losses.told(logs)
            if is_prepared(self.model):
                logs = {**logs, **metrics(self.model)}
        super().log(logs, *args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_model(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save as Trainer does, which lets one rank write; those that share its model take part."""
        if company_of(self.model).size > 1 and not self.args.should_save:
            read_along(self.model, self._hetero_folder(output_dir))
        super().save_model(output_dir, *args, **kwargs)

    def _hetero_folder(self: Any, output_dir: str | None) -> Path:
        return Path(self.args.output_dir if output_dir is None else output_dir)

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save as Trainer does; if homes are on disk, save from exported files."""
        folder = self._hetero_folder(output_dir)
        reads = state_dict is None and self.args.should_save
        with plain_state(self.model, folder) if reads else nullcontext() as plain:
            super()._save(output_dir, state_dict if plain is None else plain)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """See [Note: checkpoints]."""
        writes, comm = self.args.should_save, company_of(self.model)
        if not writes and comm.size == 1:
            return  # another rank has the same model and states
        folder = Path(output_dir)
        if writes:
            shutil.rmtree(folder / FOLDER, ignore_errors=True)  # of an earlier run
        optimizer = engine_of(self.model).optimizer
        if has_adapters(self.model):
            states = plain_states(self.optimizer.state_dict())  # all ranks read those on disk
            if writes:
                torch.save(states, folder / STATES)
        else:
            if writes:
                (folder / STATES).unlink(missing_ok=True)
            save_checkpoint(folder / FOLDER, self.model, optimizer, step=self.state.global_step)
        if writes:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULE)

    def _load_from_checkpoint(
        self: Any, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load a stock Trainer's checkpoint; hetero's is loaded when the model is prepared."""
        if not is_ours(resume_from_checkpoint):
            with mismatches(resume_from_checkpoint), whole_values(model or self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self: Any) -> None:
        """Load the weights that were best, from files that have whole tensors."""
        with whole_values(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Load model and states from hetero's checkpoint, or states from stock Trainer's files."""
        if checkpoint is None or not is_ours(checkpoint):
            check_states(checkpoint, self.model)
            with mismatches(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        load_states(folder / FOLDER, self.model)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))


def metrics(model: nn.Module) -> dict[str, float]:
    """Return figures of `hetero.status`: bytes held now, bytes moved in the last step."""
    now = status(model)
    found: dict[str, float] = {}
    for tier, row in now.tiers.items():
        found[f"hetero/{tier.lower()}_bytes"] = row["used"] or 0
    traffic = ["h2d_bytes", "d2h_bytes"]
    if Tier.NVME.name in now.tiers:
        traffic += ["read_bytes", "write_bytes"]
    for name in (*traffic, "misses", "evictions"):
        found[f"hetero/{name}"] = getattr(now, name)
    return found


def is_ours(checkpoint: str) -> bool:
    """Whether hetero wrote a Trainer's checkpoint; see [Note: checkpoints]."""
    folder = Path(checkpoint)
    return (folder / FOLDER).is_dir() and not (folder / STATES).exists()


@contextmanager
def plain_state(model: nn.Module, folder: Path) -> Iterator[dict[str, torch.Tensor] | None]:
    """Yield a state dict of plain tensors, or None if the model's own is one."""
    if has_plain_state(model):
        yield None
    elif has_adapters(model):  # only these are written
        own = model.state_dict()
        yield {**own, **trained_values(model, own)}
    else:
        with exported_state(model, folder) as plain:
            yield plain


def plain_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with copies of tensors that are not in memory."""

    def plain(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and not is_plain(value) else value

    return {
        **states,
        "state": {
            param: {name: plain(value) for name, value in state.items()}
            for param, state in states["state"].items()
        },
    }


def read_along(model: nn.Module, folder: Path) -> None:
    """Read what `plain_state` reads, on a rank that shares the model of the one that writes."""
    if has_plain_state(model):
        return
    if has_adapters(model):
        trained_values(model, model.state_dict())
    else:
        take_part(model, folder)


@contextmanager
def mismatches(checkpoint: str | None) -> Iterator[None]:
    """Turn torch's errors about different shapes and groups into a typed one."""
    try:
        yield
    except HeteroError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CheckpointMismatch(
            f"{checkpoint} cannot be resumed from: {error}",
            advice="resume from a checkpoint of this very model and optimizer, or load its weights"
            " with from_pretrained and start afresh",
        ) from error


# -- refusals ------------------------------------------------------------------------------------


def check_class(cls: type) -> None:
    """Refuse a class that is no Trainer, or lacks a method that hetero overrides."""
    if not (isinstance(cls, type) and issubclass(cls, transformers.Trainer)):
        raise ConfigError(
            f"{cls!r} is no subclass of transformers.Trainer",
            advice="pass a class, as hetero.trainer(Trainer)(model=..., hetero=dict(hbm=...))",
        )
    missing = [name for name in NEEDED if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(
            f"Trainer of transformers {transformers.__version__} has no {', '.join(missing)}",
            advice=f"use transformers {SUPPORTED}",
        )


def check_args(args: Any) -> None:
    """Refuse Trainer's arguments that place parameters, or convert the whole model."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name}={getattr(args, name)!r} together with hetero: both would place"
                " the parameters",
                advice=f"drop {name} from the TrainingArguments",
            )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise ConfigError(
                f"{name}=True would convert the whole model",
                advice=f"drop {name}, or train with hetero's precision={name[:4]!r}",
            )
    if not hasattr(args, "_n_gpu") and args.n_gpu > 1:
        raise ConfigError(
            f"TrainingArguments of transformers {transformers.__version__} has no _n_gpu",
            advice=f"show one GPU to the process, or use transformers {SUPPORTED}",
        )


def settings_of(args: Any, config: Config) -> Config:
    """Return the settings, on Trainer's device; ConfigError if they contradict Trainer's own."""
    if config.max_grad_norm is not None:
        raise ConfigError(
            f"max_grad_norm={config.max_grad_norm} of hetero together with Trainer's own"
            f" {args.max_grad_norm}",
            advice="set TrainingArguments(max_grad_norm=...) alone",
        )
    if config.updates == "backward" and (
        args.max_grad_norm or args.gradient_accumulation_steps > 1
    ):
        raise ConfigError(
            f"updates='backward' of hetero together with max_grad_norm={args.max_grad_norm} and"
            f" gradient_accumulation_steps={args.gradient_accumulation_steps} of Trainer: it clips"
            " when all gradients are there, and they are whole after the last pass",
            advice="set TrainingArguments(max_grad_norm=0, gradient_accumulation_steps=1), or leave"
            " updates= at 'step'",
        )
    kind = args.device.type
    if config.device is None:
        return Config.load(config, device=kind)
    ours = config.device if isinstance(config.device, str) else config.device.torch_device.type
    if ours.split(":")[0] != kind:
        raise ConfigError(
            f"device={ours!r} of hetero, and Trainer computes on {kind}",
            advice="set TrainingArguments(use_cpu=True) for the CPU, or drop device=",
        )
    return config
