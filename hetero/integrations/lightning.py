"""hetero under `lightning`: strategies of Trainer and Fabric whose models are prepared (floor 4).

No method here moves a byte or computes a number: each passes Lightning's call on to hetero.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies as pytorch
import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from hetero.api import company_of, empty_init, engine_of, prepare
from hetero.checkpoint.load import read_weights
from hetero.checkpoint.save import KINDS, WEIGHTS, newest_step, save_latest
from hetero.config import Config, Settings
from hetero.errors import ConfigError, StateError
from hetero.integrations.lightning_devices import (
    ExplicitNoSync,
    OneDevice,
    SeveralRanks,
    names_ranks,
)
from hetero.integrations.prepared import Told, is_prepared, load_states, plain_again, trains
from hetero.train.update.optimizer import Optimizer

NAME = "hetero"  # of both strategies
TIED = "hetero_tied"  # entry of a checkpoint: further names of tied weights
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
"""Entries of a checkpoint whose tensors hetero writes."""


def step_in(context: str, name: str) -> Callable[..., Any]:
    """Return a method that computes a step of the module in its precision's context."""

    def compute(self: TrainerPart, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, context)():
            return self._call(name, *args, **kwargs)

    return compute


class TrainerPart(pytorch.Strategy):
    """What the Trainer's strategies do with a LightningModule, on one device and on ranks."""

    strategy_name = NAME
    accelerator: Any
    config: Config
    for_file: Callable[..., dict[str, Any]]

    def __init__(self, config: Settings = None, **settings: Any) -> None:
        place: Any = super()  # one device, or ranks
        place.__init__(config, **settings)
        self._step: StepForward | None = None
        self._directory = False  # whether the checkpoint to load was one of hetero's
        self._told = Told()

    # -- setting up ------------------------------------------------------------------------------

    @property
    def _module(self) -> Any:
        """The LightningModule; nothing is wrapped around it."""
        return self.lightning_module

    def setup(self, trainer: Any) -> None:
        """Prepare the model, and its optimizer if it is to be fitted."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting or self._step is None or self._step.module is not self._module:
            plain_again(self._module)
            self.model = self.precision_plugin.convert_module(self._module)
        if fitting:
            self.setup_optimizers(trainer)
        self._prepare(fitting)
        self.setup_precision_plugin()

    def _prepare(self, fitting: bool) -> None:
        if is_prepared(self._module):  # it was fitted, and is now validated or tested
            return
        move_metrics(self._module, self.root_device)
        self._step = StepForward(self._module)
        if fitting and self.optimizers:
            _, optimizer = prepare(self._module, only(self.optimizers), config=self.config)
            self.optimizers = [optimizer]
        else:
            prepare(self._module, config=self.config)
        self.config = dataclasses.replace(self.config, weights=None)  # they are in the model now

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Build a model in RAM, or without memory if ``empty_init`` is set."""
        return building(self.precision_plugin.tensor_init_context(), bool(empty_init))

    def teardown(self) -> None:
        """Tear down all but the model, which stays prepared."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:  # it calls backward and step itself
                return self._module.training_step(*args, **kwargs)
            return self._call("training_step", *args, **kwargs)

    validation_step = step_in("val_step_context", "validation_step")
    test_step = step_in("test_step_context", "test_step")
    predict_step = step_in("predict_step_context", "predict_step")

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            raise StateError("the model is not set up", advice="let the Trainer call the strategy")
        return step.instead(name, *args, **kwargs)

    # -- states ----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: states are loaded into a prepared model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the optimizer's states: only from a file of its own."""
        return not self._directory

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return {} for a prepared optimizer: `save_checkpoint` writes its states in pieces."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        return {} if isinstance(inner, Optimizer) else super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, which callbacks and hooks may change before it is saved."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        return self._told.tell(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a directory; for weights alone, or a model that is not prepared, one file.

        A directory has the model as it trains; a ``state_dict`` that a callback or hook put in
        place of that, or changed, is next to it, and is what a load gives.
        """
        told, self._told = self._told, Told()
        ties, whole = second_names(self._module), trains(self._module) and OPTIMIZERS in checkpoint
        hidden: tuple[str, ...] = ()
        if whole:
            hidden = (
                (OPTIMIZERS, MODEL) if told.is_as_told(checkpoint.get(MODEL)) else (OPTIMIZERS,)
            )
        rest = {
            key: self.for_file(value, ties) if key == MODEL or told.is_in(value) else value
            for key, value in checkpoint.items()
            if key not in hidden
        }
        if whole:
            save(filepath, self._module, rest)
        else:
            super().save_checkpoint(rest, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a directory of `save_checkpoint`, or a stock Trainer's file."""
        path = first_path(checkpoint_path, self._module)
        self._directory = is_ours(path)
        if not self._directory:
            found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            return found
        rest = load(path, self._module, *args, **kwargs)
        if MODEL not in rest:  # hooks may read it, and change what is to be loaded
            rest[MODEL] = self._told.tell(self._module.state_dict())
        return {**rest, OPTIMIZERS: [{} for _ in self.optimizers]}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state from Lightning's file, or as hooks made it; a directory's is
        loaded already."""
        told, self._told = self._told, Told()
        if self._directory and told.is_as_told(checkpoint.get(MODEL)):
            return
        super().load_model_state_dict({**checkpoint, MODEL: told.apart(checkpoint[MODEL])}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state from Lightning's file."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


class HeteroStrategy(TrainerPart, OneDevice, pytorch.SingleDeviceStrategy):
    """A Trainer's strategy under which the model trains in byte budgets.

    The LightningModule is prepared when ``fit`` (or ``validate``, ``test``, ``predict``) sets it
    up, and stays prepared afterwards, so that ``trainer.save_checkpoint`` and ``trainer.test`` work
    at the same budgets; `hetero.release` makes it plain. A checkpoint is a directory without
    pickled tensors of the model, which ``ckpt_path=`` takes; with ``save_weights_only=True`` it is
    Lightning's own file.

    With ``mesh=`` it is a `HeteroRanksStrategy`.

    Args:
        config: a `Config`, a mapping, or the path of a TOML file; ``settings`` go on top.
        settings: fields of `Config`, as ``hbm="20GiB"``.

    Raises ConfigError for a setting that cannot be honoured.
    """

    def __new__(cls, config: Settings = None, **settings: Any) -> Any:
        if cls is HeteroStrategy and names_ranks(config, settings):
            return HeteroRanksStrategy(config, **settings)
        return super().__new__(cls)


class HeteroRanksStrategy(TrainerPart, SeveralRanks, pytorch.DDPStrategy):
    """A Trainer's strategy whose ranks share the model, each on a device of ``Trainer(devices=)``.

    Ranks are started as under ``strategy="ddp"``: by torchrun, by a cluster, or by the Trainer,
    which runs the script again for each further device of its machine. Every backward pass
    exchanges gradients, also where batches are accumulated. All ranks save and load.

    Arguments are those of `HeteroStrategy`.
    """

    def teardown(self) -> None:
        """Tear down all but the model, which stays prepared, and the process group."""
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        super().teardown()


class FabricPart(FabricStrategy):
    """What Fabric's strategies do with a model, on one device and on ranks."""

    config: Config
    for_file: Callable[..., dict[str, Any]]

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model in its tiers: its parameters are fetched when needed."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Build a model in RAM, or without memory if ``empty_init`` is set."""
        return building(self.precision.module_init_context(), bool(empty_init))

    def setup_module(self, module: nn.Module) -> Any:
        """Prepare a model for inference."""
        return prepare(module, config=self.config)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Prepare a model with its optimizer; a scheduler of the plain optimizer still works."""
        _, optimizer = prepare(module, only(optimizers), config=self.config)
        return module, [optimizer], scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refuse an optimizer without its model."""
        raise ConfigError(
            "hetero prepares a model together with its optimizer",
            advice="model, optimizer = fabric.setup(model, optimizer)",
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a model that is saved in a file of Fabric's own."""
        return self.for_file(module.state_dict(), second_names(module))

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Write a directory if a model in the state trains."""
        model = next((thing for thing in state.values() if trains(thing)), None)
        if model is None:
            super().save_checkpoint(path, state, *args, **kwargs)
            return
        hidden = (model, engine_of(model).optimizer)
        others = {k: v for k, v in state.items() if not any(v is each for each in hidden)}
        filters = kwargs.get("filter") or {}
        taken = next((key for key in filters if key in state and key not in others), None)
        if taken is not None:
            raise ConfigError(
                f"filter= of {taken!r}: a checkpoint of a prepared model is whole",
                advice="save what you filtered from its state_dict() under a name of its own",
            )
        rest = self._convert_stateful_objects_in_state(others, filters)
        save(path, model, rest, kinds_of(state, model))

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint into ``state``; returns the entries without a place in it."""
        things = state if isinstance(state, dict) else {}
        model = next((thing for thing in things.values() if trains(thing)), None)
        if model is not None:
            path = first_path(path, model)
        if model is None or not is_ours(path):
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, *args, **kwargs)
            return found
        rest = load(path, model, *args, kinds=kinds_of(things, model), **kwargs)
        for name in [name for name in things if name in rest]:
            if hasattr(things[name], "load_state_dict"):
                things[name].load_state_dict(rest.pop(name))
            else:
                things[name] = rest.pop(name)
        return rest


class HeteroFabricStrategy(FabricPart, OneDevice, FabricSingleDevice):
    """A Fabric's strategy under which ``fabric.setup(model, optimizer)`` prepares the model.

    With a prepared model and its optimizer in the state, ``fabric.save`` and ``fabric.load`` write
    and read a directory. With ``mesh=`` it is a `HeteroFabricRanksStrategy`. Arguments are those of
    `HeteroStrategy`.
    """

    def __new__(cls, config: Settings = None, **settings: Any) -> Any:
        if cls is HeteroFabricStrategy and names_ranks(config, settings):
            return HeteroFabricRanksStrategy(config, **settings)
        return super().__new__(cls)


class HeteroFabricRanksStrategy(FabricPart, SeveralRanks, FabricDDP):
    """A Fabric's strategy whose ranks share the model; as for DDP, ``fabric.launch()`` comes first.

    Every backward pass exchanges gradients but one in ``fabric.no_backward_sync``, which is
    `hetero.no_sync`. All ranks save and load. Arguments are those of `HeteroStrategy`.
    """

    def __init__(self, config: Settings = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._backward_sync_control: Any = ExplicitNoSync()


class StepForward:
    """The forward of a LightningModule, which can compute one of its steps instead.

    hetero hooks the whole model's forward, but Lightning computes in ``training_step``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] | None = None
        found = module.forward
        self.forward: Callable[..., Any] = (
            found.forward if isinstance(found, StepForward) else found
        )
        functools.update_wrapper(self, self.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, self.call = self.call or self.forward, None
        return call(*args, **kwargs)

    def instead(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a step inside the hooks of the forward."""
        self.call = getattr(self.module, name)
        try:
            return self.module.forward(*args, **kwargs)
        finally:
            self.call = None


# -- shared by both strategies ---------------------------------------------------------------------


def only(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    if len(optimizers) != 1:
        raise ConfigError(
            f"{len(optimizers)} optimizers for one model",
            advice="give hetero one optimizer, with a group of parameters for each kind",
        )
    return optimizers[0]


@contextmanager
def building(precision: AbstractContextManager[Any], empty: bool) -> Iterator[None]:
    with precision, empty_init() if empty else nullcontext():
        yield


def move_metrics(model: nn.Module, place: torch.device) -> None:
    """Move modules without parameters, such as metrics, and set the model's device property."""
    for module in model.modules():
        if not any(True for _ in module.parameters()):
            module.to(place)
    _update_properties(model, device=place)


# -- checkpoints -----------------------------------------------------------------------------------


def first_path(path: str | Path, model: nn.Module) -> str:
    """Return the path that the first of the ranks that share a model has; collective.

    A file's name may tell a metric, which each rank computes of its own batches.
    """
    told = company_of(model).agree(os.fsencode(path), "the path of a checkpoint")
    return os.fsdecode(told[0])


def kinds_of(state: Mapping[str, Any], model: nn.Module) -> Sequence[str]:
    """Return the kinds of parts that a state of Fabric's names: its optimizer's, or none of it."""
    optimizer = engine_of(model).optimizer
    return KINDS if any(thing is optimizer for thing in state.values()) else WEIGHTS


def save(
    path: str | Path, model: nn.Module, rest: dict[str, Any], kinds: Sequence[str] = KINDS
) -> None:
    """Write a model, its optimizer and the rest; replace an existing checkpoint."""
    path = first_path(path, model)
    written = io.BytesIO()
    torch.save({**rest, TIED: second_names(model)}, written)
    extra = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    save_latest(path, model, engine_of(model).optimizer, extra, kinds=kinds)


def load(
    path: str | Path, model: nn.Module, *args: Any, kinds: Sequence[str] = KINDS, **kwargs: Any
) -> dict[str, Any]:
    """Load a model and its optimizer; returns the rest of the checkpoint."""
    rest = opened(load_states(path, model, kinds), *args, **kwargs)
    rest.pop(TIED, None)
    return rest


def opened(
    extra: torch.Tensor, weights_only: bool | None = None, map_location: Any = None
) -> dict[str, Any]:
    """Return the rest that `save` wrote."""
    found: dict[str, Any] = torch.load(
        io.BytesIO(extra.numpy().tobytes()), map_location, weights_only=weights_only
    )
    return found


def second_names(model: nn.Module) -> dict[str, str]:
    """Return {another name: first name} of tensors with several names in a state dict."""
    first: dict[int, str] = {}
    params = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    named = {name: first.setdefault(id(t), name) for name, t in (*params, *buffers)}
    return {name: origin for name, origin in named.items() if name != origin}


def read(
    path: Any, map_location: Any = None, weights_only: bool | None = None, **kwargs: Any
) -> Any:
    """Read a checkpoint for ``load_from_checkpoint``: hetero's directory, or a file."""
    if not (isinstance(path, (str, Path)) and is_ours(path)):
        return plain_read(path, map_location=map_location, weights_only=weights_only, **kwargs)
    weights, extra = read_weights(path)
    found = opened(extra, weights_only, map_location)
    weights.update({name: weights[first] for name, first in found.pop(TIED, {}).items()})
    if isinstance(map_location, (str, torch.device)):
        weights = {name: value.to(map_location) for name, value in weights.items()}
    return {MODEL: weights, OPTIMIZERS: [{}], **found}  # a hook may have saved another model


def is_ours(path: str | Path) -> bool:
    """Whether a path is a checkpoint of `save`."""
    return newest_step(path) >= 0


pytorch.StrategyRegistry.register(
    NAME, HeteroStrategy, description="virtual memory for training", override=True
)
stock: Any = saving  # its reader has a private name
plain_read, stock.pl_load = stock.pl_load, read
