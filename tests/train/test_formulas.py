"""The written formulas are torch's optimizers, up to how an operation is rounded."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from hetero.optim import Lion
from hetero.train.update import kernel
from hetero.train.update.formulas import Formula, formula_of

O = torch.optim
STEPS = 8
# Every rule with at least three sets of flags; tests/train/test_kernel.py runs them too.
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.3}),
    (O.Adam, {"lr": 1e-2}),
    (O.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (O.Adam, {"lr": 1e-2, "betas": (0.0, 0.9)}),
    (O.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.AdamW, {"lr": 1e-2}),
    (O.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "amsgrad": True}),
    (O.AdamW, {"lr": 1e-2, "betas": (0.3, 0.5), "maximize": True, "eps": 1e-3}),
    (O.NAdam, {"lr": 1e-2}),
    (O.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (O.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.RAdam, {"lr": 1e-2}),
    (O.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (O.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.RAdam, {"lr": 1e-2, "betas": (0.4, 0.6)}),  # never long enough to rectify
    (O.Adamax, {"lr": 1e-2}),
    (O.Adamax, {"lr": 1e-2, "weight_decay": 0.1}),
    (O.Adamax, {"lr": 1e-2, "maximize": True, "betas": (0.2, 0.9), "eps": 1e-3}),
    (O.Adagrad, {"lr": 1e-2}),
    (O.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}),
    (O.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "maximize": True}),
    (O.Adadelta, {"lr": 1.0}),
    (O.Adadelta, {"lr": 0.5, "rho": 0.5, "weight_decay": 0.1}),
    (O.Adadelta, {"lr": 1.0, "eps": 1e-3, "maximize": True}),
    (O.RMSprop, {"lr": 1e-2}),
    (O.RMSprop, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (O.RMSprop, {"lr": 1e-2, "centered": True, "maximize": True, "eps": 1e-2}),
    (O.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5, "alpha": 0.3, "eps": 1e-2}),
    (O.ASGD, {"lr": 0.1}),
    (O.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.1, "weight_decay": 0.1}),
    (O.ASGD, {"lr": 0.1, "t0": 0.0, "alpha": 0.5, "maximize": True}),
    (O.Rprop, {"lr": 1e-2}),
    (O.Rprop, {"lr": 1e-2, "etas": (0.3, 1.7)}),
    (O.Rprop, {"lr": 1e-2, "step_sizes": (5e-3, 2e-2), "maximize": True}),
    (Lion, {"lr": 1e-2}),
    (Lion, {"lr": 1e-2, "weight_decay": 0.3, "maximize": True}),
    (Lion, {"lr": 1e-2, "betas": (0.2, 0.4)}),
]
IDS = [f"{kind.__name__}-{'-'.join(flags)}" for kind, flags in CASES]
cases = pytest.mark.parametrize(("kind", "flags"), CASES, ids=IDS)


def rule(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any]
) -> tuple[Formula, dict[str, Any]]:
    """Return the formula of a class, and a group with these flags."""
    formula = formula_of(kind)
    assert formula is not None
    return formula, kind([torch.zeros(1)], **flags).param_groups[0]


def gradients(numel: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Return one distinct fp32 gradient a step; their signs turn now and then."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(STEPS)]


class Run:
    """A parameter that a formula updates alone, as fp16 so that its master is a plain tensor."""

    def __init__(self, formula: Formula, group: dict[str, Any], value: torch.Tensor) -> None:
        self.formula, self.group = formula, group
        self.master = value.clone()
        self.arrays = {k: torch.full_like(value, x) for k, x in formula.arrays(group).items()}
        self.scalars = formula.scalars(group)
        self.fresh = True

    def step(self, grad: torch.Tensor) -> None:
        c, self.scalars = self.formula.coefficients(self.group, self.scalars, self.fresh)
        self.fresh = False
        kernel.update(
            self.formula,
            c,
            param=self.master.half(),
            low=self.master,
            grad=grad,
            states=list(self.arrays.values()),
            factors=(),
            native=None,
        )


@cases
def test_a_formula_stays_close_to_torchs_optimizer(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any]
) -> None:
    """Each operation differs from a fused one by at most a rounding, 2^-24 of its operands.

    Rounding where terms cancel makes the relative error unbounded, so the absolute tolerance is
    1e-5 of the largest element; eight steps of some ten roundings stay well inside both.
    """
    value = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    p = torch.nn.Parameter(value.clone())
    optimizer = kind([p], foreach=False, **flags) if kind is not Lion else kind([p], **flags)
    run = Run(*rule(kind, flags), value)
    for grad in gradients(1001):
        p.grad = grad.clone()
        optimizer.step()
        run.step(grad)
    state = optimizer.state[p]
    assert not torch.equal(p.detach(), value)
    for ours, theirs in [(run.master, p.detach())] + [
        (run.arrays[k], state[k]) for k in run.arrays
    ]:
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), msg=str
        )


@cases
def test_states_have_torchs_keys_fills_and_scalars(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any]
) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([p], **flags)
    formula, group = rule(kind, flags)
    run = Run(formula, group, torch.ones(5))
    for step, grad in enumerate(gradients(5)):
        p.grad = grad
        optimizer.step()
        run.step(grad)
        state = optimizer.state[p]
        assert list(state) == [*run.scalars, *run.arrays], step
        assert {k: state[k].item() for k in run.scalars} == run.scalars, step


def test_states_are_filled_first_as_torch_fills_them() -> None:
    for kind, flags in CASES:
        if kind in (O.SGD, Lion):  # their buffers begin as the gradient, or as zeros in a step
            continue
        formula, group = rule(kind, flags)
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([p], **flags)
        p.grad = torch.zeros(3)
        first = _initial_state(optimizer, group)
        assert {k: v.unique().item() for k, v in first.items() if v.dim()} == {
            k: torch.tensor(v).item() for k, v in formula.arrays(group).items()
        }, (kind, flags)
        scalars = {k: v.item() for k, v in first.items() if not v.dim()}
        assert scalars == formula.scalars(group), (kind, flags)


def _initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return what torch's own `_init_group` fills in, before any step."""
    lists: int = len(inspect.signature(optimizer._init_group).parameters) - 1
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))
    return dict(optimizer.state[optimizer.param_groups[0]["params"][0]])


def test_steps_are_counted_as_far_as_fp32_counts() -> None:
    formula, group = rule(O.Adam, {})
    _, after = formula.coefficients(group, {"step": 2.0**24 - 1}, False)
    assert after == {"step": 2.0**24}
    _, after = formula.coefficients(group, after, False)
    assert after == {"step": 2.0**24}  # torch's fp32 step stays there too


def test_a_tensor_learning_rate_is_taken_as_a_number() -> None:
    formula, group = rule(O.AdamW, {"lr": torch.tensor(0.25)})
    plain = rule(O.AdamW, {"lr": 0.25})[1]
    state = formula.scalars(group)
    assert formula.coefficients(group, state, True) == formula.coefficients(plain, state, True)


def test_only_the_very_classes_have_a_formula() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert formula_of(Own) is None
    assert formula_of(torch.optim.LBFGS) is None
    assert {formula_of(kind) is not None for kind, _ in CASES} == {True}
