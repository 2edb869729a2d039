"""Optimizers as other libraries, and users, write them: hetero knows none of these classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Make = Callable[[Any], torch.optim.Optimizer]


class Base(torch.optim.Optimizer):
    """One update for each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group, param in self.ready():
            self.update(group, param, self.state[param])
        return loss

    def ready(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])


class Lamb(Base):
    """timm's: a step count in the group, and (by default) one norm over all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2, max_grad_norm: float | None = 1.0) -> None:
        super().__init__(params, lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm, decay=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = None
        if self.defaults["max_grad_norm"]:
            norms = [param.grad.norm() for _, param in self.ready()]
            if norms:
                norm = (torch.stack(norms).norm() / self.defaults["max_grad_norm"]).clamp_(min=1.0)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad if norm is None else param.grad.div_(norm)
                self.adapt(group, param, grad, self.state[param])

    def adapt(self, group: Any, param: Tensor, grad: Tensor, state: Any) -> None:
        (beta1, beta2), step = group["betas"], group["step"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step)).add_(1e-6)
        update = (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(param, alpha=group["decay"])
        trust = param.norm() / update.norm().clamp(min=1e-6)
        param.add_(update.mul_(trust.clamp_(max=10.0)), alpha=-group["lr"])


class AdamP(Base):
    """Projects an update of a scale-invariant weight; writes to the gradient it was given."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        grad = param.grad.add_(param, alpha=1e-3)
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
            )
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-8)
        if param.dim() > 1:
            rows = param.reshape(param.shape[0], -1)
            cosine = torch.nn.functional.cosine_similarity(grad.view_as(rows), rows, dim=1)
            if float(cosine.abs().max()) < 0.9:
                unit = param / param.norm().add(1e-8)
                update = update - unit * (unit * update).sum()
        param.add_(update, alpha=-group["lr"] / math.sqrt(state["step"]))


class Lion(Base):
    """A group at a time, by foreach."""

    dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param]["m"] = torch.zeros_like(param, dtype=self.dtype)
            means = [self.state[param]["m"] for param in params]
            grads = [param.grad.to(self.dtype) for param in params]
            if params:
                updates = torch._foreach_lerp(means, grads, 0.1)
                torch._foreach_sign_(updates)
                torch._foreach_lerp_(means, grads, 0.01)
                updates = [
                    update.to(param.dtype) for update, param in zip(updates, params, strict=True)
                ]
                torch._foreach_add_(params, updates, alpha=-group["lr"])


class WideLion(Lion):
    """torch's load_state_dict makes its momentum fp32, which this step cannot work with."""

    dtype = torch.float64


class Slow(Base):
    """Keeps slow weights, which appear with a parameter's third step."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state["seen"] = state.get("seen", 0) + 1
        param.add_(param.grad, alpha=-group["lr"])
        if state["seen"] % 3 == 0:
            slow = state.setdefault("slow", param.clone())
            param.copy_(slow.lerp_(param, 0.5))


class Renamed(torch.optim.SGD):
    """Nothing of its own but a default and a method that no step asks for."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, momentum=0.9)

    def lowest_rate(self) -> float:
        return min(group["lr"] for group in self.param_groups)


class Remembering(Base):
    """Knows the model's parameters, for what it does besides steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [param for group in self.param_groups for param in group["params"]]


class Clipping(torch.optim.AdamW):
    """Clips each gradient by its own norm, then steps as its parent."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(param.grad.norm().clamp(min=1.0))
        return super().step(closure)


class MeetsLate(Base):
    """From a parameter's twentieth step on, parameters are drawn to the mean of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        late = [param for _, param in self.ready() if self.state[param]["step"] >= 20]
        for param in late:
            param.add_(torch.stack([other.mean() for other in late]).mean(), alpha=0.1)

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        param.add_(param.grad, alpha=-group["lr"])


# -- what cannot be stepped one at a time --------------------------------------------------------


class Noisy(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.add_(param.grad + torch.randn_like(param), alpha=-group["lr"])


class Counting(Base):
    """Does something every thousand steps."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group, param in self.ready():
            param.add_(param.grad, alpha=-group["lr"] * (1 + (self.calls % 1000 == 0)))


class CountingElsewhere(Base):
    """Counts in an object that it holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.meter = Meter()

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        self.meter.sum += 1
        param.add_(param.grad, alpha=-group["lr"])


class Meter:
    sum = 0


class OwnStates(Base):
    """Keeps momentum beside ``state``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.means: dict[Tensor, Tensor] = {}

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        mean = self.means.setdefault(param, torch.zeros_like(param))
        param.sub_(mean.lerp_(param.grad, 0.1), alpha=group["lr"])


class NewMemory(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.data = param.data - group["lr"] * param.grad


class TakesGradients(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"])
        param.grad = None


class KeepsGradient(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        if "last" in state:
            param.sub_(param.grad + state["last"], alpha=group["lr"])
        state["last"] = param.grad


class Nested(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("history", []).append(param.grad.clone())
        param.sub_(state["history"][0], alpha=group["lr"])


class Dropping(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        if state.pop("mean", None) is None:
            state["mean"] = param.grad.clone()
        param.sub_(param.grad, alpha=group["lr"])


class Flagged(Base):
    """Asks what the user wrote on a parameter."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] * getattr(param, "lr_scale", 1.0))


class Adaptive(Base):
    """Learns its rate, which is in the group, from all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            group["d"] = group.get("d", 0.0) + sum(float(grad.sum()) for grad in grads)
        return super().step(closure)


class FirstGroupRules(Base):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class AllOrNone(Base):
    """Leaves all parameters alone where one gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if all(bool(param.grad.isfinite().all()) for _, param in self.ready()):
            super().step(closure)


class Wrapper(Base):
    """As Lookahead and SAM: another optimizer steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(self.param_groups, lr=1e-2)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Hidden(Base):
    """Reaches parameters through a list of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.all:
            param.mul_(0.9)


class OwnStateDict(Base):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


REFUSED: list[tuple[Make, str]] = [
    (Lamb, "other numbers among others than alone"),
    (AllOrNone, "other numbers among others than alone"),
    (FirstGroupRules, "other numbers among others than alone"),
    (OwnStates, "changes an attribute of the optimizer"),
    (Counting, "changes an attribute of the optimizer"),
    (CountingElsewhere, "changes an attribute of the optimizer"),
    (WideLion, "after load_state_dict raised RuntimeError"),
    (Noisy, "draws random numbers"),
    (NewMemory, r"other memory, as p\.data = "),
    (TakesGradients, "replaces or drops gradients"),
    (KeepsGradient, "'last' is a view of something else"),
    (Nested, "'history' is a list"),
    (Dropping, "drops the state 'mean'"),
    (Flagged, "attribute 'lr_scale'"),
    (Adaptive, "changes the setting 'd' by what the parameters are"),
    (Wrapper, "attribute 'base' is a SGD"),
    (Hidden, "reaches parameters of the model"),
    (OwnStateDict, r"its state_dict\(\) is its own"),
    (torch.optim.LBFGS, "required positional argument: 'closure'"),
    (torch.optim.SparseAdam, "does not support dense gradients"),
]
