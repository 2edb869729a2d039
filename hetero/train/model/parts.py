"""Parameters that are this rank's parts of larger tensors, as a DTensor is (floor 2).

Such a parameter is a wrapper: it shows the geometry of the larger tensor, and has a plain tensor of
this rank's own inside. Homes, frames and updates are of the plain tensors; the wrapper stays the
user's object, with its class, its version and its gradient. What knows of one kind of wrapper is
given by `prepare`; a model without any has `PlainTensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hetero.boxes import Box, Cuts
from hetero.internals import foreach_norm, version_of
from hetero.memory.layout import Layout
from hetero.train.model import binding
from hetero.train.model.binding import Binding
from hetero.train.model.faults import Faults, paged_classes

Parted = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where this rank's part of a larger tensor is."""

    shape: tuple[int, ...]
    """Of the larger tensor."""
    cuts: Cuts
    """As ranks divide it."""
    box: Box
    """This rank's."""
    is_first: bool
    """Whether no rank before this one has the same part."""


class Parts(Protocol):
    """What a model's parameters have inside, and how it is shown."""

    kinds: tuple[type, ...]
    """The classes of wrappers; none for a model of plain tensors."""
    ranks: tuple[int, ...]
    """The ranks that have the parts of a parameter, this one included."""
    groups: tuple[Any, ...]
    """Of torch's, in which these ranks exchange what they have."""
    is_first: bool
    """Whether this rank is the first of them."""
    device_type: str
    """Where these ranks exchange what they have; "" without any."""

    def check(self, name: str, param: nn.Parameter) -> None:
        """Raise ConfigError, with the name, for a wrapper that cannot be paged."""

    def inside(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the plain tensor in a wrapper; None if it is no wrapper."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor in a wrapper, or the tensor itself."""

    def wrapping(self, tensor: torch.Tensor) -> Parted:
        """Return a function that wraps plain tensors as one that is inside, without its bytes."""

    def place(self, name: str, tensor: torch.Tensor) -> PartPlace | None:
        """Return where the plain tensor in a wrapper is; None if it is no wrapper. Raises
        ConfigError, with the name, if nothing tells."""

    def shown(self, tensor: torch.Tensor) -> str:
        """Return how ranks divide a tensor, in words; "" for one that they do not."""

    def value(self, param: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor of a value that is to replace a parameter's; StateError if it is
        none of that parameter."""

    def data(self, param: nn.Parameter) -> torch.Tensor:
        """Return ``param.data`` of a bound or plain parameter."""

    def version(self, param: torch.Tensor) -> int:
        """Return how often a parameter was written, bound or not."""

    # -- binding ---------------------------------------------------------------------------------

    def bind_to(
        self, params: Sequence[nn.Parameter], layout: Layout, place: torch.device, owner: Faults
    ) -> Binding:
        """Return the binding of a model's parameters, whose accesses ``owner`` serves."""

    def pinned(self, owner: Faults) -> Callable[[nn.Parameter], type]:
        """Return the class of bound ones of each parameter, whose uses ``owner`` hears of."""

    def point(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Let a plain parameter show ``value``, a plain tensor that holds its numbers."""

    def plain(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Make any parameter plain, with ``value`` as its numbers."""

    def empty(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        """Make a parameter that came on meta plain, and put it back there."""

    # -- gradients -------------------------------------------------------------------------------

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the plain tensor of ``param.grad``, without a fault."""

    def as_grad(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient wrapped as the parameter's present one is, or as the parameter."""

    def fit(self, param: nn.Parameter, name: str) -> bool:
        """Cut ``param.grad`` to the parameter's own part if it is another; returns whether it was
        whole on every rank. May be collective. StateError for one that is no sum of addends."""

    def is_placed(self, param: nn.Parameter) -> bool:
        """Whether ``param.grad``, if there is one, lies on ranks as the parameter does."""

    def is_whole(self, param: nn.Parameter) -> bool:
        """Whether this rank has all of a parameter."""

    def is_pending(self, param: nn.Parameter) -> bool:
        """Whether ``param.grad`` is an addend, of which ranks have one each."""

    def summed(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Return the parameter's part of a pending gradient, given its plain tensor. Collective."""

    def addend(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Return a pending gradient as ``param.grad`` shows it, given its plain tensor."""

    def norms(
        self, params: Sequence[nn.Parameter], ord: float, whole: Callable[[nn.Parameter], bool]
    ) -> list[torch.Tensor]:
        """Return the norm that torch takes of each gradient; ``whole``: of gradients that `fit` has
        cut. Collective."""

    def total(self, norms: Sequence[torch.Tensor], ord: float) -> torch.Tensor:
        """Return torch's norm of norms, in which each gradient counts once, however many ranks have
        parts of it. Collective."""

    def sent(self, norm: torch.Tensor) -> Any:
        """Return a norm as a rank that has other layers can take it, to be pickled."""

    def taken(self, sent: Any, place: torch.device) -> torch.Tensor:
        """Return a norm that another rank has sent, as one of this rank's own."""


class PlainTensors:
    """Every parameter is a plain tensor."""

    kinds: tuple[type, ...] = ()
    ranks: tuple[int, ...] = ()
    groups: tuple[Any, ...] = ()
    is_first = True
    device_type = ""
    version = staticmethod(version_of)
    data = staticmethod(binding.read_data)
    point = staticmethod(binding.point)
    plain = staticmethod(binding.plain)
    empty = staticmethod(binding.empty)
    grad = staticmethod(binding.get_grad)

    def check(self, name: str, param: nn.Parameter) -> None: ...

    def inside(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def as_grad(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wrapping(self, tensor: torch.Tensor) -> Parted:
        raise AssertionError("a plain tensor wraps nothing")

    def place(self, name: str, tensor: torch.Tensor) -> PartPlace | None:
        return None

    def shown(self, tensor: torch.Tensor) -> str:
        return ""

    def value(self, param: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given

    def bind_to(
        self, params: Sequence[nn.Parameter], layout: Layout, place: torch.device, owner: Faults
    ) -> Binding:
        return Binding(params, layout, place, *paged_classes(owner))

    def pinned(self, owner: Faults) -> Callable[[nn.Parameter], type]:
        _, pinned = paged_classes(owner)
        return lambda _: pinned

    def fit(self, param: nn.Parameter, name: str) -> bool:
        return False

    def is_placed(self, param: nn.Parameter) -> bool:
        return True

    def is_whole(self, param: nn.Parameter) -> bool:
        return True

    def is_pending(self, param: nn.Parameter) -> bool:
        return False

    def summed(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def addend(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def norms(
        self, params: Sequence[nn.Parameter], ord: float, whole: Callable[[nn.Parameter], bool]
    ) -> list[torch.Tensor]:
        grads = [grad for grad in binding.get_grads(params) if grad is not None]
        if all(grad.device.type in ("cpu", "meta") for grad in grads):
            return [torch.linalg.vector_norm(grad, ord) for grad in grads]
        return [foreach_norm(grad, ord) for grad in grads]

    def total(self, norms: Sequence[torch.Tensor], ord: float) -> torch.Tensor:
        if not norms:
            return torch.zeros((), device="cpu")
        dtypes = dict.fromkeys(norm.dtype for norm in norms)  # by which torch groups them
        ordered = [norm for dtype in dtypes for norm in norms if norm.dtype is dtype]
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), ord)
        return found

    def sent(self, norm: torch.Tensor) -> torch.Tensor:
        return norm.cpu()

    def taken(self, sent: torch.Tensor, place: torch.device) -> torch.Tensor:
        return sent.to(place)
