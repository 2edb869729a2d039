"""LAMB, LARS and Muon step the parts of tensors that ranks divide as torch does on these ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import hetero
from hetero import ConfigError
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import ADDING, WHOLE
from tests.ranks.tensor_models import (
    LM,
    TIGHT,
    TensorRun,
    Trained,
    around,
    built,
    by_torch,
    difference,
    found_in,
    loss_of,
    micro_batches_by_torch,
    train,
)

RULES = ("lamb", "lars", "muon")
ROOM: dict[str, int | None] = {"pages": 26_000, "borders": 400_000, "stays": None}
"""HBM: "borders" has the model paged for a step, after which it stays."""
PLACES: dict[str, tuple[int | None, ...]] = {  # HBM of each part of a run
    **{name: (room,) for name, room in ROOM.items()},
    "pages, stays": (ROOM["pages"], ROOM["stays"]),
    "stays, pages": (ROOM["stays"], ROOM["pages"]),
}


def clipped(optimizer: Any, _: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    found: torch.Tensor = optimizer.clip_grad_norm_(most)
    return found


def by_parts(run: TensorRun, rooms: tuple[int | None, ...], **settings: Any) -> Trained:
    """Train under one budget after the other; the plain model in between has the numbers."""
    model, plain = built(run)
    losses: list[float] = []
    norms: list[float] = []
    ends = [run.steps * (n + 1) // len(rooms) for n in range(len(rooms))]
    begin = 0
    for hbm, end in zip(rooms, ends, strict=True):
        given = {**run.settings, "hbm": hbm, **settings}
        if hbm is None:
            given["device"] = "cpu"
        model, optimizer = hetero.prepare(model, plain, **given)
        clip = partial(clipped, optimizer)
        for step in range(begin, end):
            found = train(model, optimizer, replace(run, steps=1), clip, first=step)
            losses, norms = losses + found.losses, norms + found.norms
        evictions = hetero.status(model).evictions
        assert (evictions >= 3) == (hbm == ROOM["pages"])
        _, plain = hetero.release(model, optimizer)
        begin = end
    last = found_in(model, plain)
    last.losses, last.norms = losses, norms
    return last


def compared(rank: int, run: TensorRun, place: str, settings: dict[str, Any]) -> list[str]:
    return difference(by_parts(run, PLACES[place], **settings), by_torch(run))


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("place", ["pages", "stays", "pages, stays"])
@pytest.mark.parametrize("style", ["sequence", "vocabulary"])
@pytest.mark.parametrize("optimizer", list(ADDING))
def test_what_a_rule_adds_to_addends_of_a_gradient_is_added_as_torch_does(
    optimizer: str, style: str, place: str
) -> None:
    """Of a norm on parts of a sequence each rank has an addend: torch adds a part of the decayed
    weight, or of the momentum, to each before it sums them."""
    run = TensorRun(style, optimizer, clip=0.05)
    for odd in run_ranks(2, compared, run, place, {}):
        assert not odd


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize(
    ("style", "optimizer"),
    [
        *(("tp", rule) for rule in RULES),
        *((style, rule) for style in ("sequence", "vocabulary") for rule in ("lamb", "lars")),
    ],
)
def test_rules_of_whole_tensors_step_parts_as_torch_does(
    style: str, optimizer: str, place: str, clip: float | None
) -> None:
    run = TensorRun(style, optimizer, clip=clip)
    for odd in run_ranks(2, compared, run, place, {}):
        assert not odd


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_so_they_do_over_several_passes(optimizer: str, activations: str) -> None:
    """Where ranks have an addend each, sums of passes are another matter (docs, Limits)."""
    run = TensorRun("tp", optimizer, passes=2)
    settings = {"activations": activations, "chunk_bytes": 512}
    for odd in run_ranks(2, compared, run, "borders", settings):
        assert not odd


# -- shares on top ---------------------------------------------------------------------------------


def compared_shares(rank: int, run: TensorRun) -> list[str]:
    expected = micro_batches_by_torch(run)
    model, plain = built(run)
    mesh = {"dp_shard": run.dp, "tp": 2}
    model, optimizer = hetero.prepare(model, plain, **{**run.settings, "mesh": mesh})
    found = train(model, optimizer, run, dp=rank // 2)
    found.losses = []
    assert hetero.status(model).evictions >= 3
    hetero.release(model, optimizer)
    return difference(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", RULES)
def test_ranks_with_shares_of_parts_step_them_alike(optimizer: str) -> None:
    """They are one rank with as many micro-batches."""
    for odd in run_ranks(4, compared_shares, TensorRun("tp", optimizer, dp=2)):
        assert not odd


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("optimizer", list(ADDING))
def test_so_they_do_with_addends_of_a_gradient(optimizer: str) -> None:
    for odd in run_ranks(4, compared_shares, TensorRun("sequence", optimizer, dp=2)):
        assert not odd


# -- masters ---------------------------------------------------------------------------------------


def masters(rank: int, optimizer: str, hbm: int) -> float:
    """Train bf16 weights with masters; return the largest distance from fp32's plain training."""
    run = TensorRun("tp", optimizer)
    expected = by_torch(run)
    model, plain = built(run)
    given = {**TIGHT, "hbm": hbm, "precision": "bf16"}
    model, optimizer_ = hetero.prepare(model, plain, **given)
    train(model, optimizer_, run)
    hetero.release(model, optimizer_)
    found = found_in(model, plain)
    assert found.states.keys() == expected.states.keys()
    return max(float((found.weights[k] - v).abs().max()) for k, v in expected.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", RULES)
def test_masters_of_parts_are_stepped(optimizer: str) -> None:
    """Gradients are of bf16 weights, so that numbers are near those of fp32 and not the same; a
    model that pages and one that stays have the same ones."""
    far = {hbm: run_ranks(2, masters, optimizer, hbm) for hbm in (26_000, 400_000)}
    assert far[26_000] == far[400_000]
    assert 0 < max(far[26_000]) < 0.1


# -- the rules themselves --------------------------------------------------------------------------


def whole(optimizer: str) -> Trained:
    torch.manual_seed(0)
    model, run = LM(), TensorRun("tp", optimizer)
    return train(model, WHOLE[optimizer](model.parameters()), run)


def plain_parts(rank: int, style: str, optimizer: str) -> Trained:
    return by_torch(TensorRun(style, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
def test_norms_are_of_whole_tensors_however_ranks_divide_them(style: str, optimizer: str) -> None:
    """In plain torch: of the unsplit model, but for the order of sums."""
    expected = whole(optimizer)
    for found in run_ranks(2, plain_parts, style, optimizer):
        for name, value in expected.weights.items():
            assert torch.allclose(found.weights[name], value, atol=1e-5, rtol=1e-4), name


def pending_and_summed(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Step weights whose gradients are addends of two ranks, and plain ones by the sums."""
    mesh = init_device_mesh("cpu", (2,))
    source = torch.Generator().manual_seed(0)
    found = []
    for _ in range(8):
        value, *addends = torch.randn(3, 64, generator=source)
        parted = nn.Parameter(DTensor.from_local(value.clone(), mesh, [Replicate()]))
        parted.grad = DTensor.from_local(addends[rank].clone(), mesh, [Partial()])
        plain = nn.Parameter(value.clone())
        plain.grad = addends[0] + addends[1]
        for param in (parted, plain):
            WHOLE["lars"]([param]).step()
        found.append((parted.detach().to_local(), plain.detach()))
    return found


def test_a_gradient_of_which_ranks_have_addends_is_summed_before_it_is_used() -> None:
    for pairs in run_ranks(2, pending_and_summed):
        assert all(torch.equal(one, other) for one, other in pairs)


# -- bad input -------------------------------------------------------------------------------------


def muon_of_an_embedding(rank: int, hbm: int | None) -> None:
    run = TensorRun("sequence", "muon")
    model, plain = built(run)
    given = {**TIGHT, "hbm": hbm} if hbm else {"device": "cpu"}
    model, optimizer = hetero.prepare(model, plain, **given)
    loss_of(model, run, 0).backward()
    before = model.embed.weight.full_tensor().clone()
    try:
        optimizer.step()
    finally:
        assert torch.equal(model.embed.weight.full_tensor(), before)


@pytest.mark.parametrize("place", ["pages", "stays"])
def test_muon_of_an_embedding_cut_by_words_is_refused_on_all_ranks(place: str) -> None:
    for each in outcomes(2, muon_of_an_embedding, ROOM[place]):
        assert isinstance(each.error, ConfigError), each.text
        assert "the gradient of 'embed.weight' lies on ranks otherwise" in str(each.error)
        assert "leave 'embed.weight' out of the groups of Muon" in each.error.advice


def muon_of_matrices(rank: int, place: str) -> list[str]:
    """Compare runs of Muon on all matrices but the embedding."""
    run = TensorRun("vocabulary", "muon")
    found = []
    for is_paged in (True, False):
        model, _ = built(run)
        assert isinstance(model.embed.weight, DTensor)
        kept = [p for p in model.parameters() if p is not model.embed.weight]
        optimizer: Any = WHOLE["muon"](kept)
        if is_paged:
            given = {**TIGHT, "hbm": ROOM[place]}
            model, optimizer = hetero.prepare(model, optimizer, **given)
        found.append(trained(model, optimizer, run))
    return difference(*found)


def trained(model: nn.Module, optimizer: Any, run: TensorRun) -> Trained:
    losses = []
    for step in range(run.steps):
        with around(run):
            loss = loss_of(model, run, step)
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        model.zero_grad()
    found = found_in(model, optimizer)
    found.losses = losses
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["pages", "borders"])
def test_muon_steps_the_other_matrices_of_such_a_model(place: str) -> None:
    for odd in run_ranks(2, muon_of_matrices, place):
        assert not odd
