"""The fault table: the effects of access to an unbound parameter (floor 2).

Metadata never fetches, nor does autograd's question for a graph node. ``grad`` reaches the gradient
and never the weight. Detaching the parameter from its home is refused. Any other access pins the
bytes and runs again; by then the class is that of a bound parameter, whose ``__torch_function__``
is switched off.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hetero.errors import StateError
from hetero.internals import (
    SCRIPT_CALL,
    WRAPPERS,
    Replacement,
    adds_gradients,
    asks_for_node,
    break_graphs_at,
    functorch_level,
    is_faking,
    no_torch_function,
    tracing_state,
    tree_iter,
)
from hetero.train.model.binding import read_data, without_faults

FUNCTORCH = (
    "functorch transforms (torch.func.grad, vmap, ...) do not see paged parameters",
    "use plain autograd; transform a copy.deepcopy of the model, which is plain; or, inside"
    " hetero.gathered(...), a function of the weights that calls none of its modules",
)
TRACING = (
    "a tracer (torch.jit.trace, make_fx) of a paged model would keep the memory of this moment for"
    " its weights",
    "hetero.release the model first, or trace a copy that has loaded model.state_dict()",
)


class Faults(Protocol):
    """The runtime, as its parameter classes call it; ``param`` is an instance of one."""

    def fault(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Pin every unbound parameter among the arguments and call ``func``."""

    def alias(self, param: Any) -> torch.Tensor:
        """Return ``param.data`` of a bound parameter, noting that it is exposed."""

    def assign(self, param: Any, value: torch.Tensor) -> None:
        """Carry out ``param.data = value``."""

    def assign_grad(self, param: Any, *, adds: bool) -> None:
        """Code has set ``param.grad``; ``adds``: as autograd does."""

    def geometry(self, param: Any) -> torch.Tensor:
        """Return a meta tensor with the parameter's own shape and strides."""

    def name(self, param: Any) -> str:
        """Return the parameter's name in its model."""


T = torch.Tensor
_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "ndim",
    "names",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_meta",
    "is_mps",
    "is_xpu",
    "is_nested",
    "is_mkldnn",
    "is_vulkan",
    "is_ipu",
    "is_xla",
    "is_mtia",
    "is_maia",
    "output_nr",
    "retains_grad",
    "_version",
    "_backward_hooks",
    "name",
    "nbytes",
    "itemsize",
    "_post_accumulate_grad_hooks",
    "grad_dtype",
]
_METHODS = [
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_conj",
    "is_neg",
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__hash__",
    "__len__",
    "has_names",
    "_is_view",
]


def metadata_functions() -> frozenset[Any]:
    """Return every function that needs a parameter but not its bytes."""
    found: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed}
    for name in _PROPERTIES:
        descriptor = getattr(T, name, None)
        for part in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, part):
                found.add(getattr(descriptor, part))
    found.update(getattr(T, name) for name in _METHODS if hasattr(T, name))
    return frozenset(found)


METADATA = metadata_functions()
GEOMETRY = frozenset({T.stride, T.is_contiguous})
_DATA = getattr_static(T, "data")
_get_data, _set_data = _DATA.__get__, _DATA.__set__
_set_grad = getattr_static(T, "grad").__set__


def _refuse_to_leave(param: Prepared, *_: Any, **__: Any) -> NoReturn:
    raise StateError(
        f"this would take parameter {param.hetero_runtime.name(param)!r} off its home",
        advice="call hetero.release(model, optimizer) first",
    )


class Prepared:
    """A parameter of a prepared model, bound or not, with the operations it refuses."""

    hetero_runtime: Faults

    def __reduce_ex__(self, *_: Any) -> NoReturn:
        raise StateError(
            f"parameter {self.hetero_runtime.name(self)!r} cannot be pickled while its model is"
            " prepared",
            advice="use model.state_dict(), or hetero.release(model, optimizer) first",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.hetero_runtime.fault(self.hetero_copied, (self,), {})
        return memo[id(self)]

    def _shown(self, **_: Any) -> str:
        return str(self.hetero_runtime.fault(self.hetero_shown, (self,), {}))

    __repr__: Any = _shown  # classes below differ in its signature

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and args[0] is self and not kwargs:
            return self  # a parametrization without a right inverse sets its original to itself
        return _refuse_to_leave(self)

    resize_ = resize_as_ = share_memory_ = _refuse_to_leave

    @staticmethod
    def hetero_shown(param: Any) -> str:
        """Return torch's repr of a bound parameter."""
        with without_faults():
            return repr(nn.Parameter(read_data(param), param.requires_grad))

    @staticmethod
    def hetero_copied(param: Any) -> nn.Parameter:
        """Return a plain parameter, in RAM, with a bound one's value."""
        with without_faults(), torch.no_grad():
            value = read_data(param).to("cpu", copy=True)
            return nn.Parameter(value, param.requires_grad)


class BoundPage(Prepared):
    """A parameter whose ``data`` lies in a pinned frame."""

    __torch_function__ = no_torch_function

    @property
    def data(self) -> torch.Tensor:
        for about_to_leave in _listeners:
            about_to_leave(self)
        tell_of_alias(self)
        return self.hetero_runtime.alias(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.hetero_runtime.assign(self, value)


class UnboundPage(Prepared):
    """A parameter whose bytes are fetched when needed."""

    hetero_paged = True
    hetero_metadata: frozenset[Any] = METADATA

    def as_subclass(self, cls: Any) -> Any:  # the C++ method asks no __torch_function__
        return self.hetero_runtime.fault(T.as_subclass, (self, cls), {})

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in cls.hetero_metadata:
            with without_faults():
                found = func(*args, **kwargs) if kwargs else func(*args)
            if func == _set_grad and isinstance(args[0], cls):
                cls.hetero_runtime.assign_grad(args[0], adds=adds_gradients())
            return found
        kwargs, owner = kwargs or {}, cls.hetero_runtime
        if args and isinstance(args[0], cls):
            if func in GEOMETRY:
                return func(owner.geometry(args[0]), *args[1:], **kwargs)
            if func == _set_data:
                return owner.assign(args[0], args[1])
            if func == _get_data and any(each.hears_of(args[0]) for each in list(_waiting)):
                owner.fault(tell_of_alias, (args[0],), {})
            if func == T.view_as and asks_for_node():
                with without_faults():
                    return func(*args)
            if func == T.type and len(args) == 1 and not kwargs:
                with without_faults():
                    param: Any = args[0]
                    return param.type()
        return owner.fault(func, args, kwargs)


class BoundParameter(BoundPage, nn.Parameter):
    """A plain tensor in a pinned frame."""


class UnboundParameter(UnboundPage, nn.Parameter):
    """A plain tensor whose bytes are elsewhere."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # mypy: torch's own takes no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never called. Its presence keeps torch.compile from tracing the class and guarding the
        placeholder's geometry: the graph breaks at an unbound parameter."""
        return func(*args, **(kwargs or {}))


def paged_classes(owner: Faults) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Return the classes of ``owner``'s unbound and bound parameters."""

    class PagedParameter(UnboundParameter):
        hetero_runtime = owner

    class PinnedParameter(BoundParameter):
        hetero_runtime = owner

    return PagedParameter, PinnedParameter


@contextmanager
def hearing_of_aliases(call: Callable[[Any], None]) -> Iterator[None]:
    """Inside a block, call ``call`` with each bound parameter whose ``data`` is about to be read:
    no version tells of writes to that."""
    _listeners.append(call)
    try:
        yield
    finally:
        _listeners.remove(call)


_listeners: list[Callable[[Any], None]] = []


class AliasListener(Protocol):
    """Hears of bound parameters whose ``data`` is about to be read."""

    def hears_of(self, param: Any) -> bool: ...

    def about_to_alias(self, param: Any) -> None: ...


def listen_to_aliases(listener: AliasListener) -> None:
    """Tell a listener as long as it lives."""
    _waiting.add(listener)


def tell_of_alias(param: Any) -> None:
    """Tell listeners that code is about to get a bound parameter's ``data``."""
    for listener in list(_waiting):
        if listener.hears_of(param):
            listener.about_to_alias(param)


_waiting: weakref.WeakSet[AliasListener] = weakref.WeakSet()


def is_unbound(value: Any) -> bool:
    """Whether a value is a parameter whose bytes are elsewhere."""
    return getattr(type(value), "hetero_paged", False)


def refuse_transforms() -> None:
    """Raise StateError inside transforms and tracers, which do not see paged parameters."""
    if functorch_level() is not None:
        raise StateError(FUNCTORCH[0], advice=FUNCTORCH[1])
    traces_real = get_proxy_mode() is not None and not is_faking()  # torch.export's are fake
    if traces_real or tracing_state() is not None:
        raise StateError(TRACING[0], advice=TRACING[1])


@functools.cache
def guard_compiler(module: str = __name__) -> None:
    """Keep the compiler from a module's code: compiled functions break their graph there, as they
    have to at an unbound parameter."""
    break_graphs_at(module)


def _for_scripts(plain: Any) -> Any:
    """Make script functions, which ask no ``__torch_function__``, see the parameters' bytes."""

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in tree_iter((args, kwargs)):
            if is_unbound(value):
                return type(value).hetero_runtime.fault(plain, (self, *args), kwargs)
        return plain(self, *args, **kwargs)

    return guarded


def _for_transforms(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.func refuse an unbound parameter that is passed to a transform as an argument.

    A transform wraps its arguments in C++, past ``__torch_function__``, and would compute with the
    placeholder's NaN. Wrapping goes through one Python name per family; each gets a check.
    """

    def guarded(tensor: Any, *args: Any) -> Any:
        if is_unbound(tensor):
            raise StateError(FUNCTORCH[0], advice=FUNCTORCH[1])
        return wrap(tensor, *args)

    return guarded


GUARDS: tuple[Replacement, ...] = (
    SCRIPT_CALL.replaced(_for_scripts),
    *(place.replaced(_for_transforms) for place in WRAPPERS),
)
"""Replaced functions of torch while parameters are pages."""
