"""The arithmetic of elementwise optimizers on an fp32 master, one rounding at a time (floor 2).

Every rule follows torch's single-tensor function of the class: the same operations in the same
order, with the same scalars, which are computed in Python floats and rounded to fp32 when they
meet the array. Where torch may fuse (`add` with alpha, `lerp`, `addcmul`, `addcdiv`), here each
multiplication, addition, division and square root is rounded by itself:

    add(alpha)  p + (alpha * g)                 addcmul  a + (value * x) * y
    lerp        a + w * (b - a), or             addcdiv  a + (value * x) / y
                b - (1 - w) * (b - a) where w >= 1/2

So the bits depend neither on the processor nor on how a run is cut, and ``csrc/update.c`` computes
them too: `Coefficients` names the function there, and holds what it takes.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Group = Mapping[str, Any]
Scalars = dict[str, float]
Numbers = Sequence[float]
States = Sequence[Tensor]


class Coefficients(NamedTuple):
    """One update: the numbers are representable in fp32, flags are 0 or 1."""

    rule: str
    """The function of csrc/update.c, after its prefix."""
    sign: float
    """-1 where the objective is maximized."""
    couple: float
    """Weight decay that joins the gradient: g + couple * p."""
    shrink: float
    """Then p * shrink, before the rule."""
    own: tuple[float, ...]
    """The numbers of the rule itself."""


Update = tuple[Coefficients, Scalars]


class Ops:
    """IEEE operations on fp32 blocks that torch lacks, or rounds otherwise, and two scratch blocks.

    ``t`` and ``u`` are as long as the block. Methods overwrite ``t``, and `add_quotient_` ``u``.
    """

    __slots__ = ("_cpu", "t", "u")

    def __init__(self, t: Tensor, u: Tensor) -> None:
        self.t = t
        self.u = u
        self._cpu = t.device.type == "cpu"

    def sqrt(self, x: Tensor, *, out: Tensor) -> Tensor:
        """torch's square root on CPU is off by one unit in the last place here and there."""
        if self._cpu:
            np.sqrt(x.numpy(), out=out.numpy())
            return out
        return torch.sqrt(x, out=out)

    def divide(self, x: Tensor, by: float, *, out: Tensor) -> Tensor:
        """CUDA multiplies by the reciprocal of a number, but divides by a tensor."""
        number = by if self._cpu else torch.full((), by, device=x.device)
        return torch.div(x, number, out=out)

    def lerp(self, a: Tensor, b: Tensor, k: float, far: float, *, out: Tensor) -> None:
        """``k`` and ``far`` are of `_lerp`; ``out`` may be ``a``."""
        torch.sub(b, a, out=self.t).mul_(k)
        torch.add(b if far else a, self.t, out=out)

    def mean_square_(self, mean: Tensor, x: Tensor, keep: float, rest: float) -> None:
        """Take one more square into a running mean of them: mean * keep + (rest * x) * x."""
        torch.mul(x, rest, out=self.t).mul_(x)
        mean.mul_(keep).add_(self.t)

    def add_scaled_(self, p: Tensor, scale: float, x: Tensor) -> None:
        """p + (scale * x)."""
        p.add_(torch.mul(x, scale, out=self.t))

    def add_quotient_(self, p: Tensor, scale: float, x: Tensor, by: Tensor) -> None:
        """p + (scale * x) / by, where ``by`` may be ``t``: what torch's CPU addcdiv computes."""
        if self._cpu:
            p.addcdiv_(x, by, value=scale)
        else:  # CUDA has scale * (x / by) in it
            p.add_(torch.mul(x, scale, out=self.u).div_(by))


class Formula(ABC):
    """One rule, without state: the caller keeps its states per element and per parameter."""

    states: tuple[str, ...] = ()
    """torch's keys of the states with one number per element, in the order of the kernel."""

    def arrays(self, group: Group) -> dict[str, float]:
        """Return first values of the states with one number per element, in `apply`'s order."""
        return dict.fromkeys(self.states, 0.0)

    def scalars(self, group: Group) -> Scalars:
        """Return torch's keys of the states with one number per parameter, and their first values.

        All of them are fp32 in torch, and stay representable in it.
        """
        return {"step": 0.0}

    @abstractmethod
    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        """Return one update's coefficients, and the scalars after it.

        ``fresh``: the parameter had no state before; its arrays are filled already.
        """

    @abstractmethod
    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        """Update fp32 blocks ``p`` and ``states`` in place; ``g`` is scratch afterwards.

        ``own`` is that of the coefficients; their other fields have been applied.
        """


class SGD(Formula):
    def arrays(self, group: Group) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] != 0 else {}

    def scalars(self, group: Group) -> Scalars:
        return {}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        minus_lr, momentum = -float(group["lr"]), float(group["momentum"])
        own = [minus_lr]
        if momentum:
            own += [momentum, 1 - group["dampening"], bool(group["nesterov"]), fresh]
        rule = "sgd_momentum" if momentum else "sgd"
        return _coefficients(rule, group, own, couple=group["weight_decay"]), {}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        minus_lr, *more = own
        if more:
            momentum, rest, nesterov, fresh = more
            (buffer,) = states
            if fresh:
                buffer.copy_(g)
            else:
                ops.add_scaled_(buffer.mul_(momentum), rest, g)
            if nesterov:
                ops.add_scaled_(g, momentum, buffer)
            else:
                g = buffer
        ops.add_scaled_(p, minus_lr, g)


class Adam(Formula):
    def arrays(self, group: Group) -> dict[str, float]:
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return dict.fromkeys(keys if group["amsgrad"] else keys[:2], 0.0)

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, beta1, beta2 = _rates(group)
        step = _fp32(scalars["step"] + 1)
        step_size = lr / (1 - beta1**step)
        own = (
            *(*_lerp(1 - beta1), beta2, 1 - beta2),
            *((1 - beta2**step) ** 0.5, group["eps"], -step_size),
        )
        rule = "adam_amsgrad" if group["amsgrad"] else "adam"
        return _coefficients(rule, group, own, **_decay(group, lr)), {"step": step}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        k, far, beta2, rest2, root, eps, minus_step = own
        mean, square, *largest = states
        ops.lerp(mean, g, k, far, out=mean)
        ops.mean_square_(square, g, beta2, rest2)
        if largest:
            square = torch.maximum(largest[0], square, out=largest[0])
        denominator = ops.divide(ops.sqrt(square, out=ops.t), root, out=ops.t).add_(eps)
        ops.add_quotient_(p, minus_step, mean, denominator)


class NAdam(Formula):
    states = ("exp_avg", "exp_avg_sq")

    def scalars(self, group: Group) -> Scalars:
        return {"step": 0.0, "mu_product": 1.0}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, beta1, beta2 = _rates(group)
        step, decay = _fp32(scalars["step"] + 1), group["momentum_decay"]
        mu = beta1 * (1.0 - 0.5 * (0.96 ** (step * decay)))
        mu_next = beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * decay)))
        mu_product = _fp32(scalars["mu_product"] * _fp32(mu))
        own = (
            *(*_lerp(1 - beta1), beta2, 1 - beta2, 1 - beta2**step, group["eps"]),
            -lr * (1.0 - mu) / (1.0 - mu_product),
            (-lr * mu_next) / (1.0 - mu_product * mu_next),
        )
        after = {"step": step, "mu_product": mu_product}
        return _coefficients("nadam", group, own, **_decay(group, lr)), after

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        k, far, beta2, rest2, correction2, eps, minus_step_g, minus_step_m = own
        mean, square = states
        ops.lerp(mean, g, k, far, out=mean)
        ops.mean_square_(square, g, beta2, rest2)
        ops.divide(square, correction2, out=ops.t)
        denominator = ops.sqrt(ops.t, out=ops.t).add_(eps)
        ops.add_quotient_(p, minus_step_g, g, denominator)
        ops.add_quotient_(p, minus_step_m, mean, denominator)


class RAdam(Formula):
    states = ("exp_avg", "exp_avg_sq")

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, beta1, beta2 = _rates(group)
        step = _fp32(scalars["step"] + 1)
        correction2 = 1 - beta2**step
        longest = 2 / (1 - beta2) - 1  # rho_inf and rho_t of the paper, arXiv:1908.03265
        length = longest - 2 * step * (beta2**step) / correction2
        rect = _rectification(longest, length) if length > 5.0 else 1.0
        own = (
            *(*_lerp(1 - beta1), beta2, 1 - beta2, 1 - beta1**step, lr, group["eps"]),
            *(correction2**0.5, length > 5.0, rect),
        )
        return _coefficients("radam", group, own, **_decay(group, lr)), {"step": step}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        k, far, beta2, rest2, correction1, lr, eps, root, rectified, rect = own
        mean, square = states
        ops.lerp(mean, g, k, far, out=mean)
        ops.mean_square_(square, g, beta2, rest2)
        update = ops.divide(mean, correction1, out=ops.u).mul_(lr)
        if rectified:
            adaptive = ops.sqrt(square, out=ops.t).add_(eps).reciprocal_().mul_(root)
            update.mul_(adaptive).mul_(rect)
        p.sub_(update)


class Adamax(Formula):
    states = ("exp_avg", "exp_inf")

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, beta1, beta2 = _rates(group)
        step = _fp32(scalars["step"] + 1)
        own = (*_lerp(1 - beta1), beta2, group["eps"], -(lr / (1 - beta1**step)))
        return _coefficients("adamax", group, own, couple=group["weight_decay"]), {"step": step}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        k, far, beta2, eps, minus_step = own
        mean, largest = states
        ops.lerp(mean, g, k, far, out=mean)
        torch.maximum(largest.mul_(beta2), g.abs_().add_(eps), out=largest)
        ops.add_quotient_(p, minus_step, mean, largest)


class Adagrad(Formula):
    def arrays(self, group: Group) -> dict[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        step = _fp32(scalars["step"] + 1)
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        own = (group["eps"], -lr)
        return _coefficients("adagrad", group, own, couple=group["weight_decay"]), {"step": step}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        eps, minus_lr = own
        (squares,) = states
        squares.add_(torch.mul(g, g, out=ops.t))
        ops.add_quotient_(p, minus_lr, g, ops.sqrt(squares, out=ops.t).add_(eps))


class Adadelta(Formula):
    states = ("square_avg", "acc_delta")

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        own = (group["rho"], 1 - group["rho"], group["eps"], -float(group["lr"]))
        common = _coefficients("adadelta", group, own, couple=group["weight_decay"])
        return common, {"step": _fp32(scalars["step"] + 1)}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        rho, rest, eps, minus_lr = own
        square, deltas = states
        ops.mean_square_(square, g, rho, rest)
        delta = ops.sqrt(torch.add(deltas, eps, out=ops.u), out=ops.u)
        delta.div_(ops.sqrt(torch.add(square, eps, out=ops.t), out=ops.t)).mul_(g)
        ops.mean_square_(deltas, delta, rho, rest)
        ops.add_scaled_(p, minus_lr, delta)


class RMSprop(Formula):
    def arrays(self, group: Group) -> dict[str, float]:
        keys = ["square_avg"]
        keys += ["momentum_buffer"] if group["momentum"] > 0 else []
        keys += ["grad_avg"] if group["centered"] else []
        return dict.fromkeys(keys, 0.0)

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        alpha, momentum = group["alpha"], float(group["momentum"])
        rule = "rmsprop" + "_momentum" * (momentum > 0) + "_centered" * bool(group["centered"])
        own = (-float(group["lr"]), alpha, 1 - alpha, group["eps"], momentum, *_lerp(1 - alpha))
        common = _coefficients(rule, group, own, couple=group["weight_decay"])
        return common, {"step": _fp32(scalars["step"] + 1)}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        minus_lr, alpha, rest, eps, momentum, k, far = own
        variance = square = states[0]
        buffers, means = states[1 : 1 + (momentum > 0)], states[1 + (momentum > 0) :]
        ops.mean_square_(square, g, alpha, rest)
        for mean in means:
            ops.lerp(mean, g, k, far, out=mean)
            variance = torch.sub(square, torch.mul(mean, mean, out=ops.t), out=ops.t)
        average = ops.sqrt(variance, out=ops.t).add_(eps)
        if buffers:
            buffers[0].mul_(momentum).add_(g.div_(average))
            ops.add_scaled_(p, minus_lr, buffers[0])
        else:
            ops.add_quotient_(p, minus_lr, g, average)


class ASGD(Formula):
    states = ("ax",)

    def scalars(self, group: Group) -> Scalars:
        return {"step": 0.0, "eta": _fp32(group["lr"]), "mu": 1.0}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, lambd = float(group["lr"]), group["lambd"]
        step, eta, mu = _fp32(scalars["step"] + 1), scalars["eta"], scalars["mu"]
        common = _coefficients(
            "asgd", group, (-eta, mu != 1, mu), couple=group["weight_decay"], shrink=1 - lambd * eta
        )
        eta_after = lr / ((1 + lambd * lr * step) ** group["alpha"])
        mu_after = 1 / max(1, step - group["t0"])
        return common, {"step": step, "eta": _fp32(eta_after), "mu": _fp32(mu_after)}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        minus_eta, averaging, mu = own
        (average,) = states
        ops.add_scaled_(p, minus_eta, g)
        if averaging:
            average.add_(torch.sub(p, average, out=ops.t).mul_(mu))
        else:
            average.copy_(p)


class Rprop(Formula):
    def arrays(self, group: Group) -> dict[str, float]:
        return {"prev": 0.0, "step_size": float(group["lr"])}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        own = (*group["etas"], *group["step_sizes"])
        return _coefficients("rprop", group, own), {"step": _fp32(scalars["step"] + 1)}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        shrink, grow, smallest, largest = own
        previous, size = states
        turn, factor = torch.mul(g, previous, out=ops.t), ops.u.fill_(1.0)
        turned = turn < 0
        factor.masked_fill_(turned, shrink).masked_fill_(turn > 0, grow)
        size.mul_(factor).clamp_(smallest, largest)
        previous.copy_(g.masked_fill_(turned, 0.0))
        p.sub_(g.sign_().mul_(size))


class LionFormula(Formula):
    """arXiv:2302.06675, algorithm 2, with its means written as torch's lerp."""

    states = ("exp_avg",)

    def scalars(self, group: Group) -> Scalars:
        return {}

    def coefficients(self, group: Group, scalars: Scalars, fresh: bool) -> Update:
        lr, beta1, beta2 = _rates(group)
        own = (*_lerp(1 - beta1), *_lerp(1 - beta2), -lr)
        return _coefficients("lion", group, own, shrink=1 - lr * group["weight_decay"]), {}

    def apply(self, own: Numbers, p: Tensor, g: Tensor, states: States, ops: Ops) -> None:
        k1, far1, k2, far2, minus_lr = own
        (mean,) = states
        ops.lerp(mean, g, k1, far1, out=ops.u)
        ops.add_scaled_(p, minus_lr, ops.u.sign_())
        ops.lerp(mean, g, k2, far2, out=mean)


def formula_of(kind: type[torch.optim.Optimizer]) -> Formula | None:
    """Return the rule of exactly this class, or None: a subclass may compute otherwise."""
    return _FORMULAS.get(f"{kind.__module__}.{kind.__qualname__}")


_FORMULAS: Mapping[str, Formula] = {
    "torch.optim.sgd.SGD": SGD(),
    "torch.optim.adam.Adam": Adam(),
    "torch.optim.adamw.AdamW": Adam(),  # its groups say decoupled_weight_decay
    "torch.optim.nadam.NAdam": NAdam(),
    "torch.optim.radam.RAdam": RAdam(),
    "torch.optim.adamax.Adamax": Adamax(),
    "torch.optim.adagrad.Adagrad": Adagrad(),
    "torch.optim.adadelta.Adadelta": Adadelta(),
    "torch.optim.rmsprop.RMSprop": RMSprop(),
    "torch.optim.asgd.ASGD": ASGD(),
    "torch.optim.rprop.Rprop": Rprop(),
    "hetero.optim.Lion": LionFormula(),
}


def _coefficients(
    rule: str, group: Group, own: Sequence[float], *, couple: float = 0.0, shrink: float = 1.0
) -> Coefficients:
    sign = -1.0 if group["maximize"] else 1.0
    return Coefficients(rule, sign, _fp32(couple), _fp32(shrink), tuple(_fp32(x) for x in own))


def _rates(group: Group) -> tuple[float, float, float]:
    beta1, beta2 = group["betas"]
    return float(group["lr"]), float(beta1), float(beta2)


def _decay(group: Group, lr: float) -> dict[str, float]:
    decay = float(group["weight_decay"])
    return {"shrink": 1 - lr * decay} if group["decoupled_weight_decay"] else {"couple": decay}


def _lerp(weight: float) -> tuple[float, float]:
    """Return (k, far) of a lerp: k * (b - a) is added to b where ``far``, else to a.

    torch counts from the nearer end, so that a weight of 1 gives exactly b.
    """
    w = _fp32(weight)
    return (w, 0.0) if abs(w) < 0.5 else (-(1 - w), 1.0)


def _rectification(longest: float, length: float) -> float:
    """Return torch's square root of the variance of the adaptive rate (RAdam, length > 5)."""
    product = (length - 4) * (length - 2) * longest
    rect: float = (product / ((longest - 4) * (longest - 2) * length)) ** 0.5
    return rect


def _fp32(x: float) -> float:
    """Return the nearest fp32, ties to even."""
    return ctypes.c_float(float(x)).value
