"""hetero under `accelerate`: an Accelerator whose models are prepared in place (floor 4).

No method here moves a byte or computes a number: each passes a script's call on to hetero.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hetero.api import backward, engine_of, prepare_tuned, release
from hetero.checkpoint.save import KINDS, STATES, save_latest
from hetero.config import Config, Settings
from hetero.errors import ConfigError, StateError
from hetero.integrations.local_steps import LocalSteps
from hetero.integrations.optimizers import HeteroOptimizer, is_unprepared
from hetero.integrations.parallelism import (
    LAUNCHED,
    axes_of_sizes,
    drop_masks,
    launched_axes,
    mesh_of_sizes,
    without,
)
from hetero.integrations.prepared import (
    AVERAGED,
    UnpairedModel,
    is_in,
    is_prepared,
    kinds_left,
    load_states,
    newest,
    plain_again,
    trains,
)
from hetero.integrations.refusals import (
    even_inputs,
    refuse_early,
    refuse_hook,
    refuse_parts,
    refuse_plugins,
    refuse_type,
)
from hetero.integrations.sequences import each_batch_once
from hetero.integrations.whole import for_files
from hetero.parallel.context import context_parallel
from hetero.parallel.mesh import (
    CONTEXT,
    REPLICATE,
    SHARD,
    TENSOR,
    device_mesh,
    refuse_stages,
    sizes_of,
)
from hetero.train.engine.replicas import Replicas, one_pass, open_group
from hetero.train.update.optimizer import Optimizer

SETTINGS = "HETERO_CONFIG"
PART = "hetero_{}"  # a model's checkpoint, in a directory of accelerate's


class HeteroPlugin:
    """Settings of `hetero.prepare`, or a file of them.

    Args:
        config: a `Config`, a mapping, or the path of a TOML or YAML file; ``settings`` go on top.
        settings: fields of `Config`, as ``hbm="20GiB"``.
    """

    def __init__(
        self,
        config: Settings = None,
        **settings: Any,
    ) -> None:
        self.config = Config.load(config, **settings)


class HeteroAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An `Accelerator` whose models train under byte budgets.

    Models and optimizers may come to `prepare` in any order and in several calls. A trainable model
    waits for its optimizer; if it computes before that, it is prepared for inference meanwhile, and
    graphs of those forwards end when the optimizer comes.

    Args:
        hetero_plugin: a `HeteroPlugin`, or its settings. None: the file named by the environment
            variable HETERO_CONFIG, if set; `accelerate launch` passes it on.
        args, kwargs: as for `Accelerator`. A ``parallelism_config`` of dp_replicate, dp_shard, cp
            and tp is the mesh, if the settings name none.

    Raises ConfigError if a plug-in of DeepSpeed, FSDP or Megatron is given as well, or a
    ``parallelism_config`` with other sizes.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    _axes: Any = None
    """A ParallelismConfig of the mesh, if ranks of it have the same batches."""

    def __init__(
        self,
        *args: Any,
        hetero_plugin: HeteroPlugin | Settings = None,
        **kwargs: Any,
    ) -> None:
        # before they are built: they leave variables in the environment
        refuse_plugins(kwargs)
        given = kwargs.pop("parallelism_config", None)  # accelerate takes none on CPUs
        with without(LAUNCHED) as launched:
            super().__init__(*args, **kwargs)
        self._take(hetero_plugin, given or launched_axes(launched))

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        hetero_plugin: HeteroPlugin | Settings = None,
        axes: Any = None,
    ) -> HeteroAccelerator:
        """Turn a live Accelerator that has prepared nothing into one of hetero's; returns it.

        ``axes``: a ParallelismConfig that is the mesh, if the settings name none.
        """
        if accelerator._models:
            raise StateError(
                "the accelerator has prepared models already",
                advice="adopt it before accelerator.prepare",
            )
        own = type(accelerator)
        plain = own is Accelerator or issubclass(own, cls)
        accelerator.__class__ = cls if plain else type(f"Hetero{own.__name__}", (cls, own), {})
        adopted: HeteroAccelerator = accelerator
        adopted._take(hetero_plugin, axes)
        return adopted

    def _take(self, plugin: HeteroPlugin | Settings, axes: Any = None) -> None:
        refuse_type(self.distributed_type)
        if plugin is None:
            plugin = os.environ.get(SETTINGS)
        taken = plugin if isinstance(plugin, HeteroPlugin) else HeteroPlugin(plugin)
        self.hetero_config = taken.config
        axes = axes or getattr(self, "parallelism_config", None)
        if axes is not None and taken.config.mesh is None:
            mesh = mesh_of_sizes(axes)
            self.hetero_config = dataclasses.replace(taken.config, mesh=mesh)
        elif self.num_processes > 1 and taken.config.mesh is None:  # as torch's DDP
            whole = {REPLICATE: self.num_processes}
            self.hetero_config = dataclasses.replace(taken.config, mesh=whole)
        refuse_stages(self.hetero_config.mesh, "accelerate")
        self._axes = axes_of_sizes(self._sizes) if self._n_alike > 1 else None
        refuse_hook(self.ddp_handler, self.num_processes)
        refuse_early(self.hetero_config, self.gradient_accumulation_steps, self.num_processes)
        self._waiting: dict[int, UnpairedModel] = {}
        self._replicas: dict[int, Replicas] = {}
        shares = self.num_processes > 1 and not self._averages
        self._local_steps = LocalSteps(self.hetero_config, self.no_sync, shares=shares)
        self._data_mesh: Any = None
        self._group = open_group() if self._averages else None
        if self._scales:
            self.scaler = None  # hetero scales the loss itself

    # -- prepare ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order."""
        for model in (arg for arg in args if isinstance(arg, nn.Module)):
            self._meet(model)
        ours = tuple(self._paired(arg) if is_unprepared(arg) else arg for arg in args)
        return super().prepare(*ours, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model, which stays in its tiers; in ``evaluation_mode`` at once."""
        self._meet(model)
        if evaluation_mode and id(model) in self._waiting:
            self._waiting[id(model)].computes()
        # evaluation_mode adds autocast and compilation, and no other wrapper
        if not any(known is model for known in self._models):
            super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer with the model that waits for it."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        ours = optimizer if isinstance(optimizer, Optimizer) else self._paired(optimizer)
        wrapped = HeteroOptimizer(ours, self.scaler)
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler of the plain optimizer or of hetero's."""
        prepared = super().prepare_scheduler(scheduler)
        plain = getattr(scheduler, "optimizer", None)
        for wrapped in self._optimizers:
            inner = getattr(getattr(wrapped, "optimizer", None), "inner", None)
            if inner is not None and inner is plain:
                prepared.optimizers = [wrapped]
        return prepared

    def _meet(self, model: nn.Module) -> None:
        """Let a trainable model wait for its optimizer; prepare any other at once."""
        if id(model) in self._waiting or model in self._models:
            return
        to_train = any(p.requires_grad for p in model.parameters())
        if to_train and not trains(model):
            plain_again(model)  # prepared for inference until now
        if is_prepared(model):
            self._refuse_alone(model)
            return
        if self._sizes.get(CONTEXT, 1) > 1:
            drop_masks(model)
        if self._averages and id(model) not in self._replicas:
            refuse_parts(model, self.num_processes)
            shares = self.ddp_handler is None or self.ddp_handler.broadcast_buffers
            self._replicas[id(model)] = Replicas(model, self._group, buffers=shares)
        if to_train:
            if self.distributed_type.value != "NO":
                self._local_steps.offer(model)
            self._waiting[id(model)] = UnpairedModel(self, model)
        else:
            prepare_tuned(model, None, self.hetero_config, AVERAGED)

    @property
    def _averages(self) -> bool:
        """Whether each process keeps a whole model, whose gradients are averaged here."""
        sizes = self._sizes
        if not sizes:
            return bool(self.num_processes > 1)
        return sizes[SHARD] * sizes[CONTEXT] == 1 and sizes[REPLICATE] > 1

    @property
    def _sizes(self) -> dict[str, int]:
        """Of the axes of the mesh; empty without one."""
        mesh, world = self.hetero_config.mesh, self.num_processes
        return {} if mesh is None or world == 1 else sizes_of(mesh, world)

    @property
    def _n_alike(self) -> int:
        """The ranks that have the same batches: those of a tensor, and of a sequence."""
        return self._sizes.get(TENSOR, 1) * self._sizes.get(CONTEXT, 1)

    @property
    def parallelism_config(self) -> Any:
        """The axes of the mesh, for those who ask which ranks have the same batches."""
        return self._axes or super().parallelism_config

    def _prepare_tp(self, *args: Any) -> Any:
        return args  # whose tensors are divided before they come here

    def _prepare_cp(self, *args: Any) -> Any:
        return args

    def _prepare_device_mesh(self) -> Any:
        """Return the mesh by which accelerate deals out batches."""
        if self._n_alike == 1:
            return super()._prepare_device_mesh()
        if self._data_mesh is None:
            self._data_mesh = device_mesh(self.device.type, self._sizes)
        return self._data_mesh

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what ranks have of batches, and each batch once."""
        if use_gather_object and self.process_index % self._n_alike:
            input_data = []
        with each_batch_once(self, self._n_alike):
            return super().gather_for_metrics(input_data, use_gather_object)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Let this rank have a part of each sequence inside the block, cut in a zigzag, if the mesh
        has such ranks; labels have to be shifted before."""
        if self._sizes.get(CONTEXT, 1) == 1:
            yield
            return
        dims, kept = buffer_seq_dims or (), no_restore_buffers
        mesh = self._prepare_device_mesh()[CONTEXT]
        with context_parallel(
            mesh, buffers=buffers or (), buffer_seq_dims=dims, no_restore_buffers=kept
        ):
            yield

    def _refuse_alone(self, model: nn.Module) -> None:
        """Refuse a model that trains on several processes unless this Accelerator averages it."""
        known = id(model) in self._replicas or not trains(model)
        if self._averages and not known:
            raise StateError(
                "the model was prepared by hetero.prepare: its gradients would not be averaged over"
                f" {self.num_processes} processes",
                advice="give the plain model and optimizer to accelerator.prepare",
            )

    def _paired(self, optimizer: torch.optim.Optimizer) -> Optimizer:
        """Prepare an optimizer with the model whose parameters it has: one that waits for it, or
        that has computed meanwhile and was prepared for inference."""
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        alone = [model for model in self._models if is_prepared(model) and not trains(model)]
        for model in (*(waiting.model for waiting in self._waiting.values()), *alone):
            if params & {id(p) for p in model.parameters()}:
                if id(model) in self._waiting:
                    self._waiting[id(model)].over()
                plain_again(model)
                prepared: Optimizer
                _, prepared = prepare_tuned(model, optimizer, self.hetero_config, AVERAGED)
                return prepared
        raise ConfigError(
            "the optimizer is of no model that was given to prepare",
            advice="pass model and optimizer to accelerator.prepare, together or the model first",
        )

    # -- steps -----------------------------------------------------------------------------------

    @property
    def _scales(self) -> bool:
        """Whether hetero scales losses, and accelerate does not."""
        return self.hetero_config.precision == "fp16"

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Divide by the accumulation steps and run backward, scaled under precision="fp16"."""
        with one_pass(self._replicas.values()):
            if self._scales and not kwargs:
                backward(loss / self.gradient_accumulation_steps)
            else:
                super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip gradients to a global norm, and return the norm before.

        If ``max_norm`` is infinite, as in a Trainer that only logs the norm, write nothing: an
        update that began in backward has read the gradients.
        """
        if self.hetero_config.updates == "backward" and max_norm == math.inf:
            params = list(parameters)
            grads = [p.grad for p in params if p.grad is not None]
            norm: torch.Tensor = nn.utils.get_total_norm(grads, norm_type)
            if norm.isfinite():  # else torch makes all of them NaN
                return norm
            parameters = params
        clipped: torch.Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return clipped

    join_uneven_inputs = even_inputs

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients; hetero's own scale is never in them."""
        if not self._scales:
            super().unscale_gradients(optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let gradients of the forwards inside add up; ranks average them later."""
        replicas = self._replicas.get(id(model))
        with nullcontext() if replicas is None else replicas.accumulating():
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Average gradients in the backward pass inside, even of a forward in `no_sync`."""
        replicas = self._replicas.get(id(model))
        if replicas is not None:
            replicas.is_due = True
        yield

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, **kwargs: Any
    ) -> nn.Module:
        """Return the model itself; without the fp32 wrapper it computes outside autocast."""
        if is_prepared(model) and not keep_fp32_wrapper:
            plain = model.__dict__.pop("_original_forward", None)
            if plain is not None:
                model.forward = plain
            return model
        unwrapped: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, **kwargs)
        return unwrapped

    # -- states ----------------------------------------------------------------------------------

    @contextmanager
    def _hidden(self, hooks: str, *shown: list[Any]) -> Iterator[list[nn.Module]]:
        """Hide models and optimizers from accelerate, which would hold all their bytes at once.

        The script's ``hooks`` see them, and get ``shown`` instead of accelerate's own lists.
        """
        kept, own = (self._models, self._optimizers), getattr(self, hooks)
        hidden: tuple[list[Any], list[Any]] = [], []

        def call(hook: Callable[..., None], *args: Any) -> None:
            self._models, self._optimizers = kept
            try:
                hook(*shown, args[-1])
            finally:
                self._models, self._optimizers = hidden

        self._models, self._optimizers = hidden
        setattr(self, hooks, {number: partial(call, hook) for number, hook in own.items()})
        try:
            yield kept[0]
        finally:
            self._models, self._optimizers = kept
            setattr(self, hooks, own)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save everything; each model with its optimizer as a checkpoint of hetero.

        Hooks get the models and their state dicts. If a hook removes a state dict from the list, it
        saves those weights itself, and only the optimizer's states are saved here.
        """
        hooked = bool(self._save_model_state_pre_hook)
        weights = [self.get_state_dict(m, unwrap=False) for m in self._models if hooked]
        shown = [(each, dict(each)) for each in weights]
        with self._hidden("_save_model_state_pre_hook", self._models, weights) as models:
            folder: str = super().save_state(output_dir, *args, **kwargs)
        kinds_of = kinds_left(shown, weights) if hooked else [KINDS] * len(models)
        for number, (model, kinds) in enumerate(zip(models, kinds_of, strict=True)):
            optimizer = self._settled(model)
            saves = self.is_main_process or not self._averages  # ranks that share save together
            if saves and (kinds is KINDS or optimizer is not None):
                save_latest(Path(folder) / PART.format(number), model, optimizer, kinds=kinds)
        self.wait_for_everyone()
        return folder

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save weights in the files of stock accelerate; all ranks that share the model call this.

        Weights whose homes are on disk, or shared, pass through files in the directory.
        """
        each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if each_node else self.is_main_process
        with for_files(model, Path(save_directory), writes=writes) as shown:
            if shown is not None:
                super().save_model(shown, save_directory, max_shard_size, safe_serialization)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a directory of `save_state`, by default the newest.

        If a hook removes a model from its list, it loads those weights itself, and only the
        optimizer's states are loaded here.
        """
        if input_dir is None:
            input_dir = newest(Path(self.project_dir) / "checkpoints")
        shown = list(self._models)
        with self._hidden("_load_model_state_pre_hook", shown) as models:
            super().load_state(input_dir, *args, **kwargs)
        for number, model in enumerate(models):
            optimizer = self._settled(model)
            kinds = KINDS if is_in(model, shown) else STATES
            if kinds is KINDS or optimizer is not None:
                load_states(Path(input_dir) / PART.format(number), model, kinds)

    def _settled(self, model: nn.Module) -> Optimizer | None:
        """Return a model's optimizer; prepare a model that still waits for one without it."""
        if id(model) in self._waiting:
            self._waiting[id(model)].computes()
        return engine_of(model).optimizer

    def free_memory(self, *objects: Any) -> Any:
        """Release everything; trained models become plain, others stay as they are."""
        for model in self._models:
            if trains(model):
                release(model)
            model.__dict__.pop("_is_accelerate_prepared", None)
        for waiting in list(self._waiting.values()):
            waiting.over()
        self._local_steps.close()
        while self._replicas:
            self._replicas.popitem()[1].close()
        return super().free_memory(*objects)
