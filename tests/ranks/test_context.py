"""Ranks have parts of the same sequences: the bits of plain torch on the same ranks, and the
numbers of whole sequences on one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import hetero
from hetero.errors import ConfigError, DivergenceError, HeteroError, RankLost, StateError
from hetero.parallel.context import PreparedRanks, context_parallel
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.context_models import (
    HEADS,
    SAMPLES,
    TIGHT,
    ContextRun,
    Trained,
    averaged,
    batch,
    built,
    by_hetero,
    by_torch,
    clip_of,
    difference,
    mesh_of,
)

WAYS = ("zigzag", "ring", "ulysses")
DIVERGENCES = ("shapes", "ways", "parts", "backward")
ROOMY = {2: 116_000, 4: 84_000}
"""By ranks, which have the less of a sequence: HBM for all that a step saves, and a few units."""
PLACES: dict[str, dict[str, Any]] = {
    "few": TIGHT,
    "keep": {"activations": "keep"},
    "recompute": {**TIGHT, "activations": "recompute"},
    "offload": {"activations": "offload"},
    "ram": {"device": "cpu"},
    "stays": {"hbm": 1_000_000},
}
FORMS = {
    "ignores": ContextRun(ignores=True),
    "linear": ContextRun(ignores=True, loss="linear"),
    "own": ContextRun(ignores=True, loss="own"),
    "rows": ContextRun(rows=1),
    "tile": ContextRun(tile=3),
}


def compared(rank: int, run: ContextRun, settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    expected = by_torch(run)
    found = by_hetero(run, **settings)
    if run.rows < SAMPLES:  # plain torch has a loss of each slice
        expected.losses = found.losses
    return difference(found, expected), found.status


def check(run: ContextRun, n_ranks: int = 2, *, evictions: int = 3, **settings: Any) -> None:
    for odd, status in run_ranks(n_ranks, compared, run, settings):
        assert not odd
        assert status.evictions >= evictions
        axes = {"dp_replicate": 1, "dp_shard": run.dp, "cp": n_ranks // run.dp, "tp": 1}
        assert status.ranks == axes


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("optimizer, clip", [("sgd", None), ("adamw", 0.05)])
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", WAYS)
def test_a_paged_model_of_parts_is_plain_torchs(
    how: str, place: str, n_ranks: int, optimizer: str, clip: float | None
) -> None:
    settings = {"hbm": ROOMY[n_ranks], **PLACES[place]}
    evictions = 0 if place == "stays" else 3
    check(ContextRun(how, optimizer, clip=clip), n_ranks, evictions=evictions, **settings)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("activations", ["auto", "recompute", "offload"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", WAYS)
def test_slices_tiles_and_losses_of_parts_are_plain_torchs(
    how: str, form: str, activations: str
) -> None:
    run = replace(FORMS[form], how=how, clip=0.05)
    check(run, hbm=80_000, activations=activations)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("optimizer, clip", [("sgd", None), ("adamw", 0.05)])
@pytest.mark.parametrize("how", WAYS)
def test_sequences_are_cut_next_to_samples(how: str, optimizer: str, clip: float | None) -> None:
    """Two sequences at a time, each of two ranks; all four share the weights."""
    check(ContextRun(how, optimizer, clip=clip, dp=2, ignores=True), 4)


class Divided(NamedTuple):
    """What a rank of a model came to whose tensors are divided, too."""

    weights: list[torch.Tensor]
    evictions: int
    axes: dict[str, int]


def divided(rank: int, how: str, is_prepared: bool) -> Divided:
    """Train on 2 x 2 ranks: parts of sequences, and parts of MLPs, the head and the logits."""
    run, n_context = ContextRun(how, ignores=True), 2
    mesh = init_device_mesh("cpu", (n_context, 2), mesh_dim_names=("cp", "tp"))
    model, optimizer = built(run)
    plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if is_prepared:
        given = {**TIGHT, "mesh": {"cp": n_context, "tp": 2}, "hbm": 54_000}
        model, optimizer = hetero.prepare(model, optimizer, **given)
    for step in range(run.steps):
        buffers = batch(run, step, 0)
        with (
            context_parallel(mesh["cp"], how, buffers=buffers, buffer_seq_dims=[1, 1, 1]),
            loss_parallel(),
        ):
            words, labels, places = buffers
            F.cross_entropy(model(words, places).flatten(0, 1), labels.flatten()).backward()
        for param in () if is_prepared else model.parameters():
            grad = inside(param.grad)
            rows = [torch.empty_like(grad) for _ in range(n_context)]
            dist.all_gather(rows, grad.contiguous(), group=mesh["cp"].get_group())
            grad.copy_(rows[0] * 0.5).add_(rows[1] * 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = [inside(value).clone() for value in model.state_dict().values()]
    seen = hetero.status(model) if is_prepared else None
    return Divided(weights, seen.evictions if seen else 0, seen.ranks if seen else {})


def inside(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def both_divided(rank: int, how: str) -> tuple[Divided, Divided]:
    return divided(rank, how, False), divided(rank, how, True)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_sequences_and_tensors_are_divided_by_axes_of_one_mesh(how: str) -> None:
    for plain, ours in run_ranks(4, both_divided, how):
        assert all(torch.equal(a, b) for a, b in zip(plain.weights, ours.weights, strict=True))
        assert ours.evictions >= 3
        assert ours.axes == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2}


# -- against whole sequences -----------------------------------------------------------------------


def by_one(run: ContextRun) -> Trained:
    """Plain torch on one rank, which has whole sequences, and those of all ``run.dp``."""
    model, optimizer = built(run)
    losses, norms = [], []
    for step in range(run.steps):
        total = torch.zeros(())
        for dp_rank in range(run.dp):
            words, labels, places = batch(run, step, dp_rank)
            total = total + F.cross_entropy(model(words, places).flatten(0, 1), labels.flatten())
        (total / run.dp).backward()
        norms.append(float(clip_of(model)(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / run.dp)
    return Trained(losses, norms, dict(model.state_dict()), [])


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("loss, dp", [("mean", 1), ("linear", 1), ("own", 1), ("mean", 2)])
@pytest.mark.parametrize("how", WAYS)
def test_parts_come_to_the_numbers_of_whole_sequences(how: str, loss: str, dp: int) -> None:
    """Labels that do not count are on few ranks: means over parts alone would differ by tenths.
    Attention over blocks, and sums over ranks, round otherwise than over a whole sequence."""
    run = ContextRun(how, "sgd", clip=1.0, ignores=True, loss=loss, dp=dp)
    expected = by_one(run)
    ranks = run_ranks(2 * dp, by_one_of_many, run)
    assert torch.tensor([each.losses for each in ranks]).mean(0).tolist() == pytest.approx(
        expected.losses, rel=1e-5
    )
    for each in ranks:
        assert each.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, value in each.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-4, atol=1e-6)


def by_one_of_many(rank: int, run: ContextRun) -> Trained:
    return replace(by_hetero(run), status=None)


# -- what a block leaves ---------------------------------------------------------------------------


def backward_after(rank: int, how: str, settings: dict[str, Any]) -> tuple[list[float], int]:
    """Go backward after the block; returns norms."""
    run = ContextRun(how, steps=3)
    model, optimizer = built(run)
    if settings:
        mesh = {"cp": dist.get_world_size()}
        model, optimizer = hetero.prepare(model, optimizer, **{**TIGHT, "mesh": mesh, **settings})
    norms = []
    for step in range(run.steps):
        given = batch(run, step, 0)
        with context_parallel(mesh_of(run), how, buffers=given, buffer_seq_dims=[1, 1, 1]):
            words, labels, places = (each.clone() for each in given)
            loss = F.cross_entropy(model(words, places).flatten(0, 1), labels.flatten())
        loss.backward()
        if not settings:
            averaged(model)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    evictions = hetero.status(model).evictions if settings else 0
    return norms, evictions


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_units_are_computed_again_after_a_block_as_in_it(how: str) -> None:
    plain = run_ranks(2, backward_after, how, {})
    settings = {"activations": "recompute"}
    for (mine, evictions), (theirs, _) in zip(
        run_ranks(2, backward_after, how, settings), plain, strict=True
    ):
        assert mine == theirs
        assert evictions >= 3


# -- bad input -------------------------------------------------------------------------------------


def prepared(**settings: Any) -> Any:
    run = ContextRun()
    return hetero.prepare(*built(run), **{**TIGHT, "mesh": {"cp": 2}, **settings})[0]


def refusals(is_prepared: bool) -> Iterator[tuple[type[HeteroError], str, Callable[[], Any]]]:
    """Yield what is refused: how, and a call that is."""
    mesh = mesh_of(ContextRun())
    heads = [torch.randn(1, 3, 4, 8) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)

    def block(length: int, how: str, dim: int = 1) -> None:
        buffers = [torch.zeros(1, length), torch.zeros(1, 16)]
        with context_parallel(mesh, how, buffers=buffers[:dim], buffer_seq_dims=[1] * dim):
            raise AssertionError("inside")

    def attend(how: str, *tensors: torch.Tensor, **options: Any) -> None:
        with context_parallel(mesh, how):
            F.scaled_dot_product_attention(*tensors, **options)

    def over(dim: int) -> None:
        with context_parallel(mesh, buffers=[torch.zeros(1, 16)], buffer_seq_dims=[dim]):
            raise AssertionError("inside")

    def view() -> None:
        words = torch.zeros(2, 17)
        with context_parallel(mesh, buffers=[words[:, 1:]], buffer_seq_dims=[1]):
            raise AssertionError("inside")

    def twice() -> None:
        with context_parallel(mesh):
            block(16, "ring")

    yield ConfigError, "15 positions, and how='ring' cuts them in 2", lambda: block(15, "ring")
    yield ConfigError, "14 positions, .* in 4", lambda: block(14, "zigzag")
    yield ConfigError, "0 positions", lambda: block(0, "ulysses")
    yield ConfigError, "has no dimension 2", lambda: over(2)
    yield ConfigError, "buffers of 8, 16 positions", lambda: block(8, "ring", 2)
    yield ConfigError, "how='circle'", lambda: block(16, "circle")
    yield ConfigError, "is a view of other memory", view
    yield StateError, "inside of context_parallel", twice
    yield ConfigError, "3 heads of queries, which 2 ranks", lambda: attend("ulysses", *heads)
    yield ConfigError, "with a mask", lambda: attend("ring", *heads, attn_mask=mask)
    yield ConfigError, "with a mask", lambda: attend("ulysses", *heads, attn_mask=mask)
    yield ConfigError, "not causal", lambda: attend("zigzag", *heads)
    yield ConfigError, "dropout_p=0.5", lambda: attend("ring", *heads, dropout_p=0.5)
    yield ConfigError, "four dimensions", lambda: attend("ring", *(each[0] for each in heads))


def refused(rank: int, is_prepared: bool) -> bool:
    model = prepared() if is_prepared else None
    before = F.scaled_dot_product_attention, F.cross_entropy
    for kind, match, call in refusals(is_prepared):
        with pytest.raises(kind, match=match) as caught:
            call()
        assert caught.value.advice
    assert before == (F.scaled_dot_product_attention, F.cross_entropy)
    if model is not None:
        hetero.release(model)
    return True


@pytest.mark.parametrize("is_prepared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_parts_cannot_have_is_refused_on_all_ranks(is_prepared: bool) -> None:
    assert run_ranks(2, refused, is_prepared) == [True, True]


def other_axes(rank: int) -> bool:
    """Try parts of sequences with models that were prepared for whole ones, or for other ranks."""
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    with pytest.raises(ConfigError, match="a mesh of 2 axes"), context_parallel(square):
        pass
    model = prepared(mesh="world")
    with (
        pytest.raises(StateError, match="for whole ones") as caught,
        context_parallel(square["cp"]),
    ):
        pass
    assert "{'cp': 2}" in str(caught.value.advice)
    hetero.release(model)
    with context_parallel(square["cp"]):  # of a plain model
        return True


def test_a_model_that_knows_nothing_of_parts_is_refused_in_a_block() -> None:
    assert run_ranks(2, other_axes) == [True, True]


# -- ranks that go different ways, and ranks that are lost -----------------------------------------


def cuts(rank: int) -> None:
    mesh = mesh_of(ContextRun())
    prepared()
    one, other = torch.arange(32).view(2, 16), torch.arange(32).view(2, 16)
    with context_parallel(mesh, buffers=[one, other], buffer_seq_dims=[1, -1]):
        assert one.shape == (2, 8) and torch.equal(one, other)


def test_the_dimension_of_positions_may_count_from_the_end() -> None:
    run_ranks(2, cuts)


def stepped(model: Any, mesh: Any, step: int, how: str = "zigzag", rows: int = SAMPLES) -> None:
    given = [each[:rows].clone() for each in batch(ContextRun(), step, 0)]
    with context_parallel(mesh, how, buffers=given, buffer_seq_dims=[1, 1, 1]):
        words, labels, places = given
        F.cross_entropy(model(words, places).flatten(0, 1), labels.flatten()).backward()


def ends(n_ranks: int, body: Callable[..., Any], *args: Any) -> list[HeteroError]:
    """Return the errors with which ranks left."""
    found = outcomes(n_ranks, body, *args)
    for each in found:
        assert isinstance(each, Died), each
        assert isinstance(each.error, HeteroError), each.text
        assert each.error.advice
    return [each.error for each in found]


CALLS = ("dtype", "value", "scale")
"""What is unlike in one call of attention."""


def goes_another_way(rank: int, way: str) -> None:
    """Make steps, of which one rank makes another one."""
    mesh = mesh_of(ContextRun())
    model = prepared(timeout_seconds=3 if way == "backward" else 20)
    stepped(model, mesh, 0)
    if way == "shapes":
        stepped(model, mesh, 1, rows=2 - rank)
    elif way == "ways":
        stepped(model, mesh, 1, how="zigzag" if rank else "ring")
    elif way == "blocks":
        if rank:
            model.blocks[1].forward = lambda x: x
        stepped(model, mesh, 1)
    elif way == "parts":  # that ranks cut themselves
        with context_parallel(mesh, "ring"):
            one = torch.randn(1, HEADS, 4 + 4 * rank, 8)
            F.scaled_dot_product_attention(one, one, one)
    elif way in CALLS:
        with context_parallel(mesh, "ring"):
            dtype = torch.bfloat16 if rank and way == "dtype" else torch.float32
            one = torch.randn(1, HEADS, 4, 8, dtype=dtype)
            value = one[..., : 4 if rank and way == "value" else 8]
            scale = 0.5 if rank and way == "scale" else None
            F.scaled_dot_product_attention(one, one, value, scale=scale)
    else:  # no backward
        words, _, places = batch(ContextRun(), 1, 0)
        with context_parallel(mesh, buffers=[words, places], buffer_seq_dims=[1, 1]):
            out = model(words, places).sum()
            if rank:
                out.backward()
        stepped(model, mesh, 2)


@pytest.mark.parametrize(
    "way",
    ["blocks", *CALLS, *(pytest.param(way, marks=pytest.mark.slow) for way in DIVERGENCES)],
)
def test_ranks_of_a_sequence_that_go_different_ways_are_an_error_on_all(way: str) -> None:
    for error in ends(2, goes_another_way, way):
        if way == "backward":  # one exchanges gradients, the other one begins a block
            assert isinstance(error, RankLost)
        else:
            assert isinstance(error, DivergenceError)
            assert "different ways" in str(error)


def fails(rank: int, way: str, how: str) -> None:
    """Leave in the middle of the second step's exchange."""
    mesh = mesh_of(ContextRun())
    model = prepared(mesh={"cp": dist.get_world_size()}, timeout_seconds=2.0)
    stepped(model, mesh, 0, way)
    if rank == 1:
        own, waits = PreparedRanks.wait, [0]

        def wait(self: PreparedRanks, work: Any) -> None:
            waits[0] += 1
            if waits[0] == 2:
                fail(how)
            own(self, work)

        PreparedRanks.wait = wait  # of this process alone
    stepped(model, mesh, 1, way)


def fail(how: str) -> None:
    if how == "error":
        raise OSError("no more data")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


FAILURES = [("zigzag", "killed", 4), ("ulysses", "error", 2)]
RARER = [
    *(("zigzag", "error", 4), ("zigzag", "stopped", 2), ("ring", "stopped", 4)),
    *(("ulysses", "killed", 4), ("ulysses", "stopped", 4), ("ring", "killed", 2)),
]


@pytest.mark.parametrize(
    "way, how, n_ranks",
    [*FAILURES, *(pytest.param(*each, marks=pytest.mark.slow) for each in RARER)],
)
def test_a_rank_that_is_lost_in_an_exchange_ends_all_ranks(
    way: str, how: str, n_ranks: int
) -> None:
    began = time.monotonic()
    found = outcomes(n_ranks, fails, way, how)
    assert all(isinstance(each, Died) for each in found)
    said = {"error": "no more data", "killed": "rank 1 left (it was killed", "stopped": "for 2 s"}
    for rank, each in enumerate(found):
        if rank != 1:
            assert isinstance(each.error, RankLost), each.text
            assert said[how] in str(each.error)
    assert time.monotonic() - began < 60  # torch's own time limit is of half an hour
