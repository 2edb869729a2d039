"""The door to torch's private names: looked up once, replaced while needed, put back."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import HeteroError, UnknownTorch
from hetero.internals import (
    RUN_BACKWARD,
    SAVED_HOOKS_ENTER,
    SCRIPT_CALL,
    WRAPPERS,
    LookingMode,
    Place,
    carried_out,
    find,
    install,
)
from tests.campaigns.harness import Net, loss_of_tokens

PLACES = (RUN_BACKWARD, SAVED_HOOKS_ENTER, SCRIPT_CALL, *WRAPPERS)
TORCHS_OWN = [vars(place.owner).get(place.name) for place in PLACES]


@pytest.fixture(autouse=True)
def models_of_other_tests_are_gone() -> None:
    """What torch compiled holds classes of parameters, and these the runtime of their model."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()


def now() -> list[Any]:
    return [vars(place.owner).get(place.name) for place in PLACES]


def paged() -> tuple[nn.Module, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hetero.prepare(model, optimizer, device="cpu", hbm=110_000, chunk_bytes=256)


def replaced(found: list[Any]) -> list[bool]:
    return [a is not b for a, b in zip(found, TORCHS_OWN, strict=True)]


def test_torchs_functions_are_its_own_again_when_the_last_model_is_released() -> None:
    assert now() == TORCHS_OWN
    first, second = paged(), paged()
    assert all(replaced(now()))
    loss_of_tokens(first[0], 0).backward()
    first[1].step()
    hetero.release(*first)
    assert all(replaced(now()))
    hetero.release(*second)
    assert now() == TORCHS_OWN


def test_torchs_functions_are_its_own_again_when_a_model_is_dropped() -> None:
    gc.collect()
    held = paged()
    assert all(replaced(now()))
    del held
    gc.collect()
    assert now() == TORCHS_OWN


def test_torchs_functions_are_its_own_again_when_prepare_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("told to")

    gc.collect()
    monkeypatch.setattr("hetero.train.access.hooks.Hooks.watch", fail)
    with pytest.raises(RuntimeError, match="told to"):
        paged()
    assert now() == TORCHS_OWN


def test_torchs_functions_are_its_own_again_when_a_profile_is_not_found() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(HeteroError):
        hetero.prepare(model, optimizer, device="cpu:sim", hbm=110_000, profile="/no.toml")
    assert now() == TORCHS_OWN


def test_a_plan_that_is_kept_replaces_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    settings = {"profile": "rtx4090", "hbm": 200_000, "device": "cpu"}
    plan = hetero.plan(model, torch.randn(2, 16), loss=torch.sum, **settings)
    assert plan.fits
    assert now() == TORCHS_OWN


def test_a_model_that_stays_replaces_nothing() -> None:
    gc.collect()
    model = Net()
    held = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    assert now() == TORCHS_OWN
    hetero.release(*held)


def owner() -> Any:
    return SimpleNamespace(f=lambda: ["own"])


def test_what_other_code_put_over_ours_stays_and_ours_is_used_again() -> None:
    it = owner()
    ours = Place(it, "f").replaced(lambda plain: lambda: [*plain(), "ours"])
    ours.install()
    before = it.f
    it.f = lambda: [*before(), "theirs"]
    ours.uninstall()
    assert it.f() == ["own", "ours", "theirs"]
    ours.install()
    assert it.f() == ["own", "ours", "theirs"]


def test_what_takes_replacements_off_does_so_once() -> None:
    it = owner()
    ours = Place(it, "f").replaced(lambda plain: lambda: [*plain(), "ours"])
    first, second = install((ours,)), install((ours,))
    first()
    first()
    assert it.f() == ["own", "ours"]
    second()
    assert it.f() == ["own"]


def test_a_name_that_this_torch_has_not_is_a_typed_error() -> None:
    for module, name in (("torch._C", "_no_such_name"), ("torch._nowhere", "f")):
        with pytest.raises(UnknownTorch, match="which hetero needs") as caught:
            find(module, name)
        assert isinstance(caught.value, (HeteroError, ImportError))
        assert "2.9 to 2.13" in caught.value.advice


@pytest.mark.parametrize("casts", [False, True])
def test_a_mode_that_looks_leaves_bilinear_layers_their_bits(casts: bool) -> None:
    class Looking(LookingMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return carried_out(func, args, kwargs)

    layer, x = nn.Bilinear(16, 16, 16), torch.randn(3, 5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        expected = layer(x, x)
        with Looking():
            found = layer(x, x)
    assert torch.equal(expected, found)
    assert torch.equal(layer(x, x), found) is not casts
