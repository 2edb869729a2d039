"""The public face: prepare and friends (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from hetero.config import Config, Settings
from hetero.device import open_device
from hetero.device.comm import ALONE_COMM, Company
from hetero.errors import StateError
from hetero.interrupts import theirs
from hetero.modes import own_mode
from hetero.parallel.context import open_context
from hetero.parallel.lost import follow_tensors
from hetero.parallel.mesh import open_comm, parts_of
from hetero.parallel.pipeline import open_pipeline
from hetero.train.engine.alike import (
    check_alike,
    check_parts_alike,
    check_places,
    check_stages_alike,
    share_values,
    values_of,
)
from hetero.train.engine.assemble import assemble
from hetero.train.engine.blueprint import draw
from hetero.train.engine.check import check_codes, check_model, check_pair
from hetero.train.engine.engine import Engine
from hetero.train.engine.lacking import lacking, refuse_lacking
from hetero.train.engine.parted import check_parted
from hetero.train.engine.tuning import Tuning
from hetero.train.model.empty import empty_parameters
from hetero.train.model.graph import leaves_of
from hetero.train.model.units import MARK
from hetero.train.update.optimizer import Optimizer, unwrapped

M = TypeVar("M", bound=nn.Module)


@overload
def prepare(
    model: M, optimizer: torch.optim.Optimizer, *, config: Settings = None, **settings: Any
) -> tuple[M, Optimizer]: ...


@overload
def prepare(model: M, optimizer: None = None, *, config: Settings = None, **settings: Any) -> M: ...


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    config: Settings = None,
    **settings: Any,
) -> Any:
    """Make ``model`` train, or run, inside a byte budget; it is hooked in place.

    Args:
        model: any ``nn.Module`` of plain dense parameters.
        optimizer: over the model's parameters, of any class that steps them one at a time. Without
            one the model is for inference.
        config: a `Config`, a mapping, or the path of a TOML or YAML file; ``settings`` go on top.
        settings: fields of `Config`, as ``hbm="20GiB"``.

    Returns:
        ``(model, optimizer)``, the same model and a `hetero.Optimizer`; without an optimizer, the
        model alone.

    Raises:
        ConfigError: a setting, the model or the optimizer cannot be honoured.
        BudgetError: the budgets cannot hold the states; it names the smallest that can. The need of
            activations is known when the first step ends.
        StateError: the model or the optimizer is prepared already.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = hetero.prepare(model, optimizer, device="cpu:sim", hbm="400KiB")
        >>> model(torch.ones(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> hetero.status(model).steps
        1
    """
    return prepare_tuned(model, optimizer, Config.load(config, **settings), None)


def prepare_tuned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    tuning: Tuning | None,
) -> Any:
    """Carry out `prepare` with choices that change no result (tests and benchmarks)."""
    with ExitStack() as undo:
        pipeline = open_pipeline(model, config.mesh, config.timeout_seconds)
        undo.callback(pipeline.close)
        context = undo.enter_context(closing(open_context(config.mesh, config.timeout_seconds)))
        engine = _engine(model, optimizer, config, tuning or Tuning(), pipeline.company)
        undo.callback(engine.release)
        pipeline.meet("prepare")
        undo.pop_all()
    setup = engine.setup
    norms = pipeline.norms(setup.parts, setup.device.torch_device)
    tensors = follow_tensors(setup.comm.everyone, engine.parts)
    setup.before_step = tensors.meet
    setup.joins(pipeline.company, norms, pipeline.close, context.close, tensors.close)
    return model if optimizer is None else (model, engine.optimizer)


def _engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    tuning: Tuning,
    stages: Company | None,
) -> Engine:
    """Return the engine of this rank's model; ``stages``: all ranks, if each has stages of it."""
    parts = parts_of(model)
    check_model(model, weights=config.weights is not None, parts=parts)
    inner = check_pair(model, optimizer)
    if stages is None:
        refuse_lacking([lacking(model, inner, config)])
    else:
        check_stages_alike(stages, model, inner, config)
    check_parted(model, inner, parts)
    device = open_device(config.device)
    comm = open_comm(
        *(config.mesh, config.timeout_seconds, config.sum_group),
        one_sided=tuning.one_sided,
        gather_shares=config.gather_shares,
        averages=tuning.averages,
        tensor_ranks=parts.ranks,
    )
    if parts.kinds:
        check_parts_alike(comm.everyone, model, parts, inner, config)
    blueprint = draw(model, inner, config, device, comm.n_shares, comm.n_copies, parts)
    check_codes(model, blueprint.layout, parts)
    if comm.size > 1:
        check_places(comm, device)
        check_alike(comm, blueprint, model, inner, config)
        share_values(comm, values_of(model, parts))
    with own_mode():
        return assemble(model, inner, config, device, blueprint, tuning, comm, parts)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a prepared model, or raise StateError."""
    found = model.__dict__.get(MARK) if isinstance(model, nn.Module) else None
    engine: Engine | None = found
    if engine is None:
        raise StateError(
            "the model is not prepared", advice="call hetero.prepare(model, ...) first"
        )
    return engine


def company_of(model: nn.Module) -> Company:
    """Return the ranks that have a prepared model together, or one inside of ``model``."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = (module.__dict__[MARK] for module in modules if MARK in module.__dict__)
    companies = (engine.setup.comm.everyone for engine in found)
    return next((each for each in companies if each.size > 1), ALONE_COMM)


def backward(loss: torch.Tensor) -> None:
    """Run backward from a scalar loss, scaled under precision="fp16".

    Otherwise the same as ``loss.backward()``. The scale is that of the prepared model whose
    parameters the loss depends on; visible gradients are always unscaled. Raises StateError if the
    loss also depends on parameters outside the models of precision="fp16".

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> hetero.backward(model(torch.ones(2, 4)).sum())
        >>> model.bias.grad.item()
        2.0
    """
    if loss.numel() != 1 or not loss.requires_grad:
        raise StateError(
            f"backward needs a scalar loss with a graph; this one has shape {list(loss.shape)} and"
            f" requires_grad={loss.requires_grad}",
            advice="reduce the loss, and compute it with gradients enabled",
        )
    first = next((_owner(p) for p in _parameters_of(loss) if _owner(p) is not None), None)
    if first is None or first.scaling is None:
        theirs(loss.backward)
        return
    owners = dict.fromkeys(_owner(p) for p in _parameters_of(loss))
    if any(owner is None or owner.scaling is None for owner in owners):
        raise StateError(
            "the loss depends on parameters outside the models of precision='fp16'; their"
            " gradients would come out multiplied by the loss scale",
            advice="prepare them with precision='fp16' too, or compute a loss for each model",
        )
    scale = first.scaling.scale
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(owner.scaling.scaled(scale))
        theirs((loss * torch.full((), scale, device=loss.device)).backward)  # no copy, no wait


def _owner(param: torch.Tensor) -> Any:
    return getattr(type(param), "hetero_runtime", None)


def _parameters_of(loss: torch.Tensor) -> Iterator[nn.Parameter]:
    return (leaf for leaf in leaves_of([loss]) if isinstance(leaf, nn.Parameter))


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Exchange no gradients between ranks in backward passes inside a ``with`` block.

    On each rank torch adds them up on the device, in the parameters' dtype, as under DDP's
    ``no_sync``; the next pass outside exchanges the sums. That is another order of additions than
    that of passes which all exchange. On one rank, and for whole models, it changes nothing.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with hetero.no_sync(model):
        ...     model(torch.ones(2, 4)).sum().backward()
    """
    return engine_of(model).no_sync()


def gathered(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False
) -> AbstractContextManager[None]:
    """Hold parameters full and current inside a ``with`` block.

    Args:
        what: a prepared model, one of its modules, a parameter, or several parameters.
        write: in-place writes go home on exit; without it a write is undone and a StateError.

    Raises BudgetError if they do not fit the device at once: gather fewer.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> model = hetero.prepare(model, device="cpu:sim", hbm="64KiB")
        >>> with hetero.gathered(model, write=True):
        ...     _ = model.weight.data.fill_(2.0)
        >>> model(torch.ones(1, 4)).item()
        8.0
    """
    if isinstance(what, nn.Module):
        engine = what.__dict__.get(MARK)
        if engine is not None:
            engine.refuse_broken()
        params = list(what.parameters())
    else:
        params = [what] if isinstance(what, nn.Parameter) else list(what)
    return _gathered(params, write)


@contextmanager
def _gathered(params: list[nn.Parameter], write: bool) -> Iterator[None]:
    owners = {id(o): o for p in params if (o := getattr(type(p), "hetero_runtime", None))}
    if len(owners) > 1:
        raise StateError(
            "the parameters are of several prepared models", advice="gather each alone"
        )
    if not owners:
        yield  # plain and resident parameters are always gathered
        return
    (runtime,) = owners.values()
    with runtime.gathered([p for p in params if id(p) in runtime.index], write=write):
        yield


def empty_init() -> AbstractContextManager[None]:
    """Build models of any size inside a ``with`` block without memory for their parameters.

    A parameter that a module registers becomes a meta parameter of the same class, dtype, strides,
    ``requires_grad`` and attributes; one that is registered twice stays one. Buffers (rotary
    frequencies, masks, running means) are real, with their values. Initialisation of parameters
    (``nn.init``, ``reset_parameters``) runs on meta: it costs nothing and draws no random numbers,
    so buffers made of random numbers differ from those of a plain build.

    ``nn.Parameter(torch.empty(n))`` touches no memory on its way, ``nn.Parameter(torch.randn(n))``
    does for a moment. Tensors that a constructor computes from registered parameters are on meta
    too, and a constructor that asks for their values (``.item()``) fails. A reference to a
    parameter from before it was registered is to the original. Sparse, quantized, lazy and
    subclassed tensors, and entries that bypass ``register_parameter``, stay as they are. Loading
    weights inside (as ``from_pretrained`` does) would lose them: build from a config.

    ``nn.Module.register_parameter`` is replaced inside the block, for the thread that entered it:
    others build as ever. Blocks nest.

    Example:
        >>> import torch, hetero
        >>> with hetero.empty_init():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> model.weight.device.type, model.weight.numel()
        ('meta', 10000000000)
    """
    return empty_parameters()


@overload
def release(model: M, optimizer: None = None) -> M | tuple[M, torch.optim.Optimizer]: ...


@overload
def release(model: M, optimizer: torch.optim.Optimizer) -> tuple[M, torch.optim.Optimizer]: ...


def release(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Turn a prepared model back into a plain one.

    Args:
        optimizer: as `prepare` returned it, or in a wrapper (``trainer.optimizer``, accelerate's).

    Returns ``(model, plain optimizer with its states)``, or the model if it was prepared alone.
    Raises StateError for a model that a failed load left with values of two checkpoints.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model, optimizer = hetero.release(model, optimizer)
        >>> type(optimizer)
        <class 'torch.optim.sgd.SGD'>
    """
    engine = engine_of(model)
    if optimizer is not None and unwrapped(optimizer) is not engine.optimizer:
        raise StateError(
            "the optimizer was not prepared with this model",
            advice="pass the optimizer that prepare returned with it",
        )
    engine.refuse_broken()
    engine.release()
    return model if engine.setup.inner is None else (model, engine.setup.inner)
