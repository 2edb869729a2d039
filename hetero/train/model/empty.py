"""Building a model without memory for its parameters (floor 2)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hetero.device import large_blocks_apart
from hetero.internals import make_subclass

PATCHING = threading.Lock()
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
PLACE = "hetero_place"  # attribute of an empty parameter: the place of its value


class FilePlace(NamedTuple):
    """A tensor of a safetensors file."""

    path: str
    name: str


def promise(param: nn.Parameter, place: FilePlace) -> None:
    """Note on an empty parameter where its value is, for `prepare`."""
    setattr(param, PLACE, place)


def promised(param: nn.Parameter) -> FilePlace | None:
    """Return where an empty parameter's value is; None if unknown."""
    place: FilePlace | None = getattr(param, PLACE, None) if param.is_meta else None
    return place


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Let this thread's modules register meta parameters: see `hetero.empty_init`."""
    build = Build()
    build.patch()
    try:
        with BeyondMemory(), large_blocks_apart():
            yield
    finally:
        build.undo()


class Build:
    """One open context: its thread, and the parameters that it replaced."""

    def __init__(self) -> None:
        self.open = True
        self.before: Callable[..., None] = nn.Module.register_parameter
        self._thread = threading.get_ident()
        # by identity: a parameter registered twice stays one
        self._known: Any = WeakIdKeyDictionary()

    def patch(self) -> None:
        """Wrap `nn.Module.register_parameter`."""
        with PATCHING:
            self.before = before = nn.Module.register_parameter
            if outer := self._outer(before):  # the same build: parameters stay tied across both
                self._known = outer._known

            @functools.wraps(before)
            def register_parameter(module: nn.Module, name: str, param: Any) -> None:
                before(module, name, self.emptied(param))

            vars(register_parameter)["hetero_build"] = self
            replace(register_parameter)

    def undo(self) -> None:
        """Close; overlapping threads close in any order, so the last one removes all wrappers."""
        self.open = False
        with PATCHING:
            while (top := _build_of(nn.Module.register_parameter)) and not top.open:
                replace(top.before)

    def emptied(self, param: Any) -> Any:
        """Return the meta parameter in place of ``param``, or ``param`` if it is not replaced."""
        if not self.open or threading.get_ident() != self._thread or not _holds_memory(param):
            return param
        if param not in self._known:
            self._known[param] = _on_meta(param)
        return self._known[param]

    def _outer(self, function: Callable[..., None]) -> Build | None:
        found = _build_of(function)
        return found if found and found.open and found._thread == self._thread else None


def replace(method: Any) -> None:
    """Let all modules register parameters by ``method``."""
    nn.Module.register_parameter = method  # type: ignore[method-assign]  # constructors call it


def _build_of(function: Callable[..., None]) -> Build | None:
    return getattr(function, "hetero_build", None)


def _holds_memory(param: Any) -> bool:
    """Whether a value is a plain dense parameter off meta, and not of a prepared model."""
    return (
        isinstance(param, nn.Parameter)
        and not isinstance(param, nn.parameter.UninitializedParameter)
        and not hasattr(type(param), "hetero_runtime")
        and not param.is_meta
        and param.layout is torch.strided
        and not param.is_quantized
        and type(param.data) is torch.Tensor
    )


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same class, geometry and attributes without memory."""
    data = torch.empty_like(param.data, device="meta")
    empty: nn.Parameter = make_subclass(type(param), data, param.requires_grad)
    empty.__dict__.update(param.__dict__)
    return empty


class BeyondMemory(TorchFunctionMode):
    """Makes a new tensor on meta if the machine lacks the address space for it.

    Only a parameter is that large, and it would go to meta when registered.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            refused = "DefaultCPUAllocator" in str(error)
            if not refused or func not in FACTORIES or kwargs.get("out") is not None:
                raise
            return func(*args, **{**kwargs, "device": "meta"})
