"""Optimizers and flavours, at four budgets and two chunk sizes, on both CPU backends."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import nn

from hetero.device import SimDevice
from hetero.train.update import arithmetic
from tests.equivalence.harness import MakeOptimizer, Seen, compare, measure, smallest
from tests.equivalence.zoo import BY_NAME

O = torch.optim
FLAVOURS = {
    "sgd": partial(O.SGD, lr=0.05, momentum=0.9),
    "sgd_nesterov": partial(O.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_fused": partial(O.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam": partial(O.Adam, lr=1e-2),
    "adam_amsgrad": partial(O.Adam, lr=1e-2, amsgrad=True, maximize=True),
    "adamw_single": partial(O.AdamW, lr=1e-2, foreach=False),
    "adamw_foreach": partial(O.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(O.AdamW, lr=1e-2, fused=True),
    "rmsprop": partial(O.RMSprop, lr=1e-3, centered=True, momentum=0.5),
}
OTHERS = {
    "nadam": partial(O.NAdam, lr=1e-3),
    "radam": partial(O.RAdam, lr=1e-3),
    "adamax": partial(O.Adamax, lr=1e-3),
    "adagrad": partial(O.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": partial(O.Adadelta, lr=1.0),
    "asgd": partial(O.ASGD, lr=1e-2, t0=2),
    "rprop": partial(O.Rprop, lr=1e-3),
    "adafactor": partial(O.Adafactor, lr=1e-2),
    "tensor_lr": partial(O.Adam, lr=torch.tensor(1e-2), foreach=False),
    "capturable": partial(
        O.Adam, lr=1e-2, foreach=False, weight_decay=0.1, decoupled_weight_decay=True
    ),
}


@cache
def over(make: partial[O.Optimizer]) -> MakeOptimizer:
    """Return a maker with two groups that share buckets."""

    def build(model: nn.Module) -> O.Optimizer:
        plain = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
        norms = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
        return make([{"params": plain}, {"params": norms, "lr": 3e-3}])

    return build


SHARES = {"smallest": 0.0, "25%": 0.25, "50%": 0.5, "all": None}
SCENES = [
    ("tied", 256, "cpu"),
    ("attention", 256, "cpu:sim"),
    ("mixture", 1024, "cpu"),
    ("convolutional", 1024, "cpu:sim"),
]


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("scene", SCENES, ids=[name for name, *_ in SCENES])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_optimizer_steps_bitwise_at_every_budget(
    flavour: str, share: str, scene: tuple[str, int, str]
) -> None:
    make, part = over(FLAVOURS[flavour]), SHARES[share]
    name, chunk_bytes, backend = scene
    device = SimDevice(seed=3, checked=True) if backend == "cpu:sim" else backend
    case = BY_NAME[name]
    if part is None:
        seen = compare(case, make, hbm=1 << 24, chunk_bytes=chunk_bytes, device=device)
        assert seen.mode == "resident"
        return
    budget = measure(case, make, chunk_bytes)

    def run(hbm: int) -> Seen:
        return compare(case, make, hbm=hbm, chunk_bytes=chunk_bytes, device=device)

    seen = run(budget.of(part)) if part else smallest(case, budget, run)
    assert seen.mode == "paged" and seen.chunks >= 5 and seen.evictions >= 3


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("flavour", ["sgd", "adam_amsgrad", "adamw_foreach", "rmsprop"])
def test_a_run_cut_at_every_chunk_border_steps_bitwise(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "RULE_NUMEL", 64)
    make, case = over(FLAVOURS[flavour]), BY_NAME["tied"]
    budget = measure(case, make, 256)
    assert compare(case, make, hbm=budget.of(0.3), chunk_bytes=256).mode == "paged"


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("flavour", OTHERS)
def test_every_other_rule_steps_bitwise_while_paged(flavour: str) -> None:
    make = over(OTHERS[flavour])
    case = BY_NAME["mixture"]
    budget = measure(case, make, 256)
    seen = compare(case, make, hbm=budget.of(0.3), chunk_bytes=256)
    assert seen.mode == "paged" and seen.evictions >= 3


@pytest.mark.parametrize("name", ["untied", "layer_drop", "clip_norm", "thawing"])
def test_a_model_without_budget_is_resident_and_bitwise(name: str) -> None:
    seen = compare(BY_NAME[name], over(FLAVOURS["adam"]), hbm=None)
    assert seen.mode == "resident" and seen.misses == 0
