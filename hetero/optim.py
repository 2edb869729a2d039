"""Rules that torch.optim lacks: Lion, LAMB, LARS and AdamW with 8-bit moments (floor 0).

Each is a torch optimizer that needs nothing of hetero, so the same class in plain torch is the
bitwise reference of a prepared run. Lion is elementwise: any flat cut of a tensor gives the same
bits. The others look at whole tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

SLICE_NUMEL = 2**20  # AdamW8bit: elements whose moments are fp32 at once
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill [0, 1) most evenly

CHECKS: dict[str, Callable[[Any], bool]] = {
    "lr": lambda lr: getattr(lr, "numel", lambda: 1)() == 1 and bool(lr >= 0),
    "betas": lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "block_size": lambda numel: isinstance(numel, int) and numel > 0,
    "max_trust_ratio": lambda ratio: ratio is None or ratio > 0,
    "dampening": lambda part: 0 <= part <= 1,
    **dict.fromkeys(("eps", "weight_decay", "momentum", "trust_coefficient"), lambda x: x >= 0),
}


def _check(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name in CHECKS and not CHECKS[name](value):
            raise ValueError(f"Invalid {name}: {value}")
    if settings.get("nesterov") and (not settings["momentum"] or settings["dampening"]):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


class _Rule(torch.optim.Optimizer, ABC):
    """Base of all four: checks groups, and updates each parameter that has a gradient."""

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        """Take the settings from a constructor's ``locals()``, which are its arguments."""
        others = ("self", "params", "__class__")
        defaults = {name: value for name, value in given.items() if name not in others}
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        _check(group)
        if any(p.is_complex() for p in group["params"]):
            raise ValueError(f"{type(self).__name__} does not support complex parameters")
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; ``closure``, if given, is evaluated first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        there = [
            [(p, p.grad) for p in group["params"] if p.grad is not None]
            for group in self.param_groups
        ]
        if any(grad.layout is not torch.strided for rows in there for _, grad in rows):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        # of all groups before the first update: ranks that divide tensors sum in one order
        ready = [[(p, _placed(grad, p)) for p, grad in rows] for rows in there]
        for group, rows in zip(self.param_groups, ready, strict=True):
            for p, grad in rows:
                self._update(p, -grad if group["maximize"] else grad, self.state[p], group)
        return loss

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place from the gradient to descend along."""


def _placed(grad: Tensor, p: Tensor) -> Tensor:
    """Return a gradient that lies on ranks as its parameter, if these are DTensors.

    A pending sum is made: norms of its addends are not those of the gradient.
    """
    placements: Any = getattr(p, "placements", None)
    if placements is None or getattr(grad, "placements", placements) == placements:
        return grad
    return cast("Tensor", cast("Any", grad).redistribute(placements=placements))


def _zero_step() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


class Lion(_Rule):
    """Step by the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675).

    p *= 1 - lr * weight_decay;  p -= lr * sign(m + (1 - b1) (g - m));  m += (1 - b2) (g - m).
    Every element moves by ``lr`` whatever its gradient, so ``lr`` is 3 to 10 times smaller and
    ``weight_decay`` as much larger than for AdamW. State: ``exp_avg`` only.

    Args:
        params: parameters or groups; real floating point.
        lr: step length, >= 0; a number or a tensor of one element.
        betas: in [0, 1): weight of the momentum in the step, and its decay per step.
        weight_decay: decoupled decay, >= 0, in units of 1 / lr per step.
        maximize: ascend instead of descending.

    Raises:
        ValueError: a setting is out of range, or a parameter is complex.
        RuntimeError: a gradient is sparse.

    A NaN gradient leaves its element unchanged (torch's sign of NaN is 0) and its momentum NaN.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        lr, (beta1, beta2), exp_avg = float(group["lr"]), group["betas"], state["exp_avg"]
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(exp_avg.lerp(g, 1 - beta1).sign_(), alpha=-lr)
        exp_avg.lerp_(g, 1 - beta2)


class LAMB(_Rule):
    """Adam scaled per tensor to the parameter's norm (You et al. 2020, arXiv:1904.00962).

    r = m^ / (sqrt(v^) + eps) + weight_decay * p;  p -= lr * ||p|| / ||r|| * r, over each whole
    tensor; the ratio is 1 if either norm is 0. All tensors are adapted, biases too: give those a
    group of another rule's lr if they should not be. State as Adam's: ``step``, ``exp_avg``,
    ``exp_avg_sq``.

    Args:
        params: parameters or groups; real floating point.
        lr: step length relative to the parameter's norm, >= 0; a number or a one-element tensor.
        betas: decay per step of the two moments, in [0, 1).
        eps: added to sqrt(v^), in units of the gradient, >= 0.
        weight_decay: decay inside the adapted step, >= 0, in units of 1 / parameter.
        bias_correction: divide the moments by 1 - beta ** step.
        max_trust_ratio: upper limit of ||p|| / ||r||, > 0; None for none.
        maximize: ascend instead of descending.

    Raises:
        ValueError: a setting is out of range, or a parameter is complex.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        max_trust_ratio: float | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = _zero_step()
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        else:
            correction1 = correction2 = 1.0
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / correction1).div_(denominator)
        update.add_(p, alpha=group["weight_decay"])
        p_norm, update_norm = _norm(p), _norm(update)
        ratio = torch.where((p_norm > 0) & (update_norm > 0), p_norm / update_norm, 1.0)
        if group["max_trust_ratio"] is not None:
            ratio.clamp_(max=group["max_trust_ratio"])
        p.add_(update.mul_(ratio), alpha=-float(group["lr"]))


class LARS(_Rule):
    """SGD scaled per tensor to the parameter's norm (You et al. 2017, arXiv:1708.03888).

    d = ratio * (g + weight_decay * p), ratio = trust_coefficient * ||p|| / (||g|| + weight_decay
    * ||p|| + eps) over each whole tensor, 1 where either norm is 0; then torch.optim.SGD's
    momentum on d. So lr multiplies the buffer, where the paper's multiplies its input: the
    two differ only in the steps after lr changed. State: ``momentum_buffer``, with a momentum.

    Args:
        params: parameters or groups; real floating point.
        lr: global step length, >= 0, as for SGD; a number or a tensor of one element.
        momentum: share of the buffer that a step keeps, >= 0; 0 keeps no state.
        weight_decay: L2 penalty, >= 0, in units of gradient per parameter (0.0005 in the paper).
        trust_coefficient: length of an adapted step relative to the parameter's norm, >= 0.
        eps: added to the ratio's denominator, in units of the gradient's norm, >= 0.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        dampening: in [0, 1]; from the second step on, the buffer's input shrinks by it.
        exclude_1d: leave tensors of less than two dimensions (biases, norms) at ratio 1. On by
            default, as in the recipes since: a bias near zero could hardly leave it otherwise.
        maximize: ascend instead of descending.

    Raises:
        ValueError: a setting is out of range, or a parameter is complex.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        dampening: float = 0.0,
        *,
        exclude_1d: bool = True,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        step = g.add(p, alpha=decay)
        if p.ndim > 1 or not group["exclude_1d"]:
            p_norm, g_norm = _norm(p), _norm(g)
            ratio = group["trust_coefficient"] * p_norm / (g_norm + decay * p_norm + group["eps"])
            step.mul_(torch.where((p_norm > 0) & (g_norm > 0), ratio, 1.0))
        if momentum:
            if not state:
                state["momentum_buffer"] = step.clone()
            else:
                state["momentum_buffer"].mul_(momentum).add_(step, alpha=1 - group["dampening"])
            buffer = state["momentum_buffer"]
            step = step.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
        p.add_(step, alpha=-float(group["lr"]))


def _norm(x: Tensor) -> Tensor:
    """Return the 2-norm over all elements, summed in fp32 at least, without leaving the device."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=_wide(x.dtype))
    return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class AdamW8bit(_Rule):
    """AdamW with moments in 8 bits, block by block: NOT exact, a choice for memory.

    The arithmetic is torch.optim.AdamW's (Loshchilov and Hutter 2019, arXiv:1711.05101) on
    decoded moments; the first step has its bits. Moments in 8 bits with a scale per block are
    from Dettmers et al. 2021 (arXiv:2110.02861); the companding is our own. With A a block's
    largest magnitude, kept in fp32, and t the step:

        exp_avg_q     int8    q = round(127 sign(m) sqrt(|m| / A))      decoded A sign(q) (q/127)^2
        exp_avg_sq_q  uint8   q = floor(255 (v / A)^(1/8) + dither(t))  decoded A (q/255)^8

    Bounds per element: |m' - m| <= sqrt(|m| A) / 127 + A / 64516, and (v' / A)^(1/8) is within
    1 / 255 of (v / A)^(1/8), v' > 0 where v > 0 (while A > 1e-25). v changes by far less than
    one code per step: rounding up would let it only climb, to nearest forgets changes below half
    a code; the dither, t times the golden ratio modulo 1, makes codes right on average over
    steps, the same on every device. Blocks are runs of ``block_size`` elements in row-major
    order, whatever the strides. A block with a non-finite moment decodes to NaN, so its
    parameters are NaN from the next step on.

    State: ``step``, the two code tensors in the parameter's shape and strides, and
    ``exp_avg_absmax``, ``exp_avg_sq_absmax`` (fp32, one per block): 2 + 8 / block_size bytes a
    parameter. At most 2^20 elements (or one block) have fp32 moments at once; parameters,
    gradients and codes that are not contiguous are copied for the time of the step.

    Args:
        params: parameters or groups; real floating point. Arithmetic is in fp32 at least.
        lr: step length, >= 0; a number or a tensor of one element.
        betas: decay per step of the two moments, in [0, 1).
        eps: added to sqrt(v^), in units of the gradient, >= 0.
        weight_decay: decoupled decay, >= 0, in units of 1 / lr per step.
        block_size: elements that share a scale, > 0; constant once stepped.
        maximize: ascend instead of descending.

    Raises:
        ValueError: a setting is out of range, or a parameter is complex.
        RuntimeError: a gradient is sparse.
    """

    PER_BLOCK = ("exp_avg_absmax", "exp_avg_sq_absmax")
    """States of one number per block."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; unlike torch's, codes and scales keep their dtypes."""
        super().load_state_dict(state_dict)  # casts every state but `step` to the parameter's dtype
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if key.endswith(("_q", "_absmax")):
                    self.state[p][key] = value.to(p.device)

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        block = group["block_size"]
        if not state:
            state["step"] = _zero_step()
            for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                state[f"{name}_q"] = torch.zeros_like(p, dtype=dtype)
                state[f"{name}_absmax"] = torch.zeros(
                    -(-p.numel() // block), dtype=torch.float32, device=p.device
                )
        state["step"] += 1
        step = int(state["step"])
        kept = (p, state["exp_avg_q"], state["exp_avg_sq_q"])
        flat = [x.reshape(-1) for x in (*kept, g)]
        scales = (state["exp_avg_absmax"], state["exp_avg_sq_absmax"])
        for start, end in _slices(p.numel(), block):
            rows = -(-(end - start) // block)
            m_scale, v_scale = (
                scale[start // block : start // block + rows].view(rows, 1) for scale in scales
            )
            values, m_codes, v_codes, grad = (x[start:end].view(rows, -1) for x in flat)
            m = decode_signed(m_codes, m_scale).to(_wide(p.dtype))
            v = decode_positive(v_codes, v_scale).to(_wide(p.dtype))
            _adamw(values, grad, m, v, step, group)
            encode_signed(m, m_codes, m_scale)
            encode_positive(v, v_codes, v_scale, step)
        for tensor, changed in zip(kept, flat[:3], strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(changed.view(tensor.shape))


def _slices(numel: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut [0, numel) into slices of whole blocks; a short last block is a slice of its own."""
    whole = numel // block * block
    size = max(1, SLICE_NUMEL // block) * block
    for start in range(0, whole, size):
        yield start, min(whole, start + size)
    if whole < numel:
        yield whole, numel


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """Update a parameter and its wide moments in place, in torch's order of operations."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    wide, g = p.to(m.dtype), g.to(m.dtype)  # themselves in fp32
    wide.mul_(1 - lr * group["weight_decay"])
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    wide.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
    p.copy_(wide)


def decode_signed(codes: Tensor, absmax: Tensor) -> Tensor:
    """Return the fp32 first moments of int8 codes [blocks, block] and scales [blocks, 1]."""
    m = codes.float()
    return m.mul_(m.abs()).mul_(absmax / 127**2)


def encode_signed(m: Tensor, codes: Tensor, absmax: Tensor) -> None:
    """Write the codes and scales of first moments."""
    absmax.copy_(_absmax(m))
    roots = (m.abs() / absmax).sqrt_().mul_(127).round_().copysign_(m)
    codes.copy_(roots.nan_to_num_(0.0))  # blocks of zeros, and those whose scale is NaN


def decode_positive(codes: Tensor, absmax: Tensor) -> Tensor:
    """Return the fp32 second moments of uint8 codes [blocks, block] and scales [blocks, 1]."""
    return codes.float().div_(255).square_().square_().square_().mul_(absmax)


def encode_positive(v: Tensor, codes: Tensor, absmax: Tensor, step: int) -> None:
    """Write the codes and scales of second moments, dithered by the step."""
    absmax.copy_(_absmax(v))
    roots = (v / absmax).sqrt_().sqrt_().sqrt_().mul_(255)
    roots.add_(step * GOLDEN % 1).floor_().clamp_(1, 255).mul_(v.sign())
    codes.copy_(roots.nan_to_num_(0.0))


def _absmax(x: Tensor) -> Tensor:
    """Return the largest magnitude of every row, NaN for a row with a non-finite value."""
    top = x.abs().amax(1, keepdim=True)
    return top + 0 * top  # inf * 0 is NaN
