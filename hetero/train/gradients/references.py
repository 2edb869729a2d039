"""References to autograd's gradients by other code (floor 2).

[Note: gradient leases]  A gradient that the user's code holds, as an object or through a view (a
preset flat buffer), stays where it is, so that writes through the alias count; the step copies it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hetero.device import ALONE, use_count
from hetero.internals import make_wrapper, storage_uses
from hetero.train.model.binding import get_grad
from hetero.train.model.parts import Parts

_aten = torch.ops.aten


class References:
    """Tells a user's references from autograd's own, which differ by release of torch."""

    def __init__(self) -> None:
        probe = torch.zeros((), device="cpu")
        probe.grad = torch.zeros((), device="cpu")
        self._of_object = _holders(probe)
        self._of_tensor = _uses(get_grad(probe))
        self._of_addend = _lone_uses()
        self._of_slot = _slot_uses(SimpleNamespace(slot=object()))
        self._of_base = _holders_of_base(torch.zeros(1, 2, device="cpu").clone().t())

    def is_held(self, param: torch.Tensor, storage: int, n_siblings: int) -> bool:
        """Whether the user's code refers to ``param.grad``, or a collective of its own that is
        under way, or something to its storage, which ``n_siblings`` gradients share."""
        if self._has_others(param):
            return True
        uses, objects = _holders_of_base(get_grad(param))
        if not uses:
            return storage_uses(storage) > ALONE - 1 + n_siblings
        # a transposed product, say, which its views alone keep
        most, most_objects = self._of_base
        if uses > most - 1 + n_siblings or objects > most_objects:
            return True
        return storage_uses(storage) > ALONE + n_siblings

    def is_shown(self, param: torch.Tensor, parts: Parts) -> bool:
        """Whether the user's code, or another parameter, refers to ``param.grad``, a gradient at
        home, or to another object that shows it (`p.grad.data`)."""
        return self._has_others(param) or _slot_uses(parts.grad(param)) > self._of_slot

    def _has_others(self, param: torch.Tensor) -> bool:
        """Whether more than the parameter refers to the object ``param.grad``."""
        return _holders(param) > self._of_object or _uses(get_grad(param)) > self._of_tensor

    def may_change(self, addend: torch.Tensor) -> bool:
        """Whether autograd or a user may still write to an addend."""
        return _uses(addend) > self._of_addend or use_count(addend) > ALONE


def storage_of(grad: torch.Tensor | None) -> int | None:
    """Return the id of a gradient's storage; None without strided bytes."""
    if grad is None or grad.layout is not torch.strided:
        return None
    return int(grad.untyped_storage()._cdata)


class _Counting(torch.Tensor):
    """A gradient that counts the references to autograd's addend."""

    uses = 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # mypy: torch's own takes no class
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.add_.Tensor:
            args[0].uses = _uses(args[1])
            return args[0]
        return make_wrapper(cls, args[0].shape)  # detach: as good as any


def _lone_uses() -> int:
    """Return the number of references to an addend that only autograd holds."""
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros(2, requires_grad=True, device="cpu")
        grad = make_wrapper(_Counting, probe.shape)
        probe.grad = grad
        (probe * 2).sum().backward()
    return int(grad.uses)


def _holders_of_base(grad: Any) -> tuple[int, int]:
    """Return the numbers of references to the tensor that a gradient is a view of, from C++ and in
    Python; none if it is no view."""
    base = None if grad is None else grad._base
    return (0, 0) if base is None else (_uses(base), sys.getrefcount(base))


def _uses(tensor: torch.Tensor | None) -> int:
    """Return a tensor's references from C++ and its Python object; many if torch cannot tell."""
    count = getattr(tensor, "_use_count", None)
    return 2**31 if count is None else int(count())


def _slot_uses(grad: Any) -> int:
    """Return the number of references to what a gradient at home shows."""
    return sys.getrefcount(grad.slot)


def _holders(param: torch.Tensor) -> int:
    """Return the number of references to the object ``param.grad``."""
    grad = get_grad(param)
    return sys.getrefcount(grad)
