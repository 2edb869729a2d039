"""What the suites of peers check on several ranks: right bits, or a typed error on all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero import ConfigError, StateError
from hetero.api import engine_of
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import Values
from tests.ranks.peers import HBM_BYTES, SIZES, Body, InOneProcess, Loop, OnARank, adamw, batch

Program = Callable[[Loop], Values]


def on_a_rank(rank: int, program: Program, one_sided: bool) -> tuple[Values, int]:
    torch.manual_seed(0)
    loop = OnARank(rank, HBM_BYTES[program], one_sided=one_sided)
    found = program(loop)
    torch.distributed.barrier()  # a slower rank may still read this one's states
    return found, sum(hetero.status(model).evictions for model in loop.models)


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", HBM_BYTES, ids=lambda program: program.__name__)
def test_a_program_gives_the_bits_of_one_process(
    program: Program, n_ranks: int, one_sided: bool
) -> None:
    torch.manual_seed(0)
    expected = program(InOneProcess(n_ranks))
    for found, evictions in run_ranks(n_ranks, on_a_rank, program, one_sided):
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert found.keys() == expected.keys() and not wrong, f"{wrong} differ"
        assert evictions >= 3


# -- 7: passes that exchange nothing ---------------------------------------------------------------


def looks_at_pending_gradients(rank: int) -> int:
    model, _ = prepared(rank)
    said = exchanges_of(model)
    param = dict(model.named_parameters())["layers.2.weight"]
    expected = torch.zeros(())
    for number in range(3):
        with hetero.no_sync(model):
            loss_of(model, number, rank).backward()
        if number == 0:
            pending = param.grad
        assert param.grad is pending
        alone = twin()
        loss_of(alone, number, rank).backward()
        expected = expected + alone.layers[2].weight.grad
        assert pending is not None and torch.equal(pending.clone(), expected)
    model.layers[2].zero_grad()
    assert param.grad is None and model.layers[1].weight.grad is not None
    n_exchanges = len(said)
    loss_of(model, 3, rank).backward()
    assert len(said) > n_exchanges
    return n_exchanges


def test_pending_gradients_are_seen_stay_themselves_and_cost_no_exchange() -> None:
    assert run_ranks(2, looks_at_pending_gradients) == [0, 0]


# -- 15, 16, 20: what changes a prepared model -----------------------------------------------------


def casts(rank: int) -> None:
    model, _ = prepared(rank)
    model.to(torch.bfloat16)


def maps(rank: int) -> None:
    model, _ = prepared(rank)
    params = {name: param.detach() for name, param in model.named_parameters()}
    engine_of(model).setup.comm.agree(b"", "all have read")  # a rank that has left is not read
    torch.func.grad(lambda p: torch.func.functional_call(model, p, batch(0, rank)).sum())(params)


REFUSALS = {
    casts: (ConfigError, "moving or converting a prepared model"),
    maps: (StateError, "do not see paged parameters"),
}


@pytest.mark.parametrize("body", list(REFUSALS), ids=lambda body: body.__name__)
def test_what_a_prepared_model_cannot_do_is_said_on_every_rank(body: Callable[[int], None]) -> None:
    kind, text = REFUSALS[body]
    for each in outcomes(2, body):
        assert isinstance(each.error, kind) and text in str(each.error), each.text


def attaches(rank: int) -> list[torch.Tensor]:
    model, optimizer = prepared(rank)
    torch.manual_seed(1)
    model.extra = nn.Linear(7, 7)
    for step in range(3):
        (loss_of(model, step, rank) + model.extra(batch(step, rank)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def test_a_module_that_is_attached_later_is_the_programs_own() -> None:
    """Its parameters are in no optimizer, and each rank keeps its own."""
    alone, extra = twin(), nn.Linear(7, 7)
    optimizer = adamw(alone.parameters())
    torch.manual_seed(1)
    extra.reset_parameters()
    for step in range(3):
        for rank in range(2):
            (0.5 * loss_of(alone, step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [*alone.state_dict().values(), *extra.state_dict().values()]
    for found in run_ranks(2, attaches):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- 19: skipped steps -----------------------------------------------------------------------------


def overflows(rank: int) -> tuple[list[bool], list[float]]:
    """The loss of one rank is infinite in the second step."""
    model = twin()
    config = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024, "precision": "fp16"}
    model, optimizer = hetero.prepare(model, adamw(model.parameters()), mesh="world", **config)
    skipped = []
    for step in range(4):
        loss = model(batch(step, rank).half()).float().pow(2).mean()
        hetero.backward(loss * (1e30 if (step, rank) == (1, 1) else 1.0))
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return skipped, [float(state["step"]) for state in optimizer.state.values()]


def test_a_step_that_one_rank_has_to_skip_is_counted_on_none() -> None:
    for skipped, counts in run_ranks(2, overflows):
        assert skipped == [False, True, False, False]
        assert counts and set(counts) == {3.0}


# -- 29, 30: saves, memory and traffic -------------------------------------------------------------


def saves_in_the_middle(rank: int, folder: Path) -> list[torch.Tensor]:
    """Save between two passes of a step; load, save at once, load that."""
    model, optimizer = prepared(rank)
    for number in range(4):
        loss_of(model, number, rank).backward()
        if number == 2:
            hetero.save_checkpoint(folder / "middle", model, optimizer)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    hetero.load_checkpoint(folder / "middle", model, optimizer)
    hetero.save_checkpoint(folder / "again", model, optimizer)
    loss_of(model, 7, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    hetero.load_checkpoint(folder / "again", model, optimizer)
    for number in (2, 3):
        loss_of(model, number, rank).backward()
    optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def test_a_save_in_the_middle_of_a_step_is_of_the_step_before(tmp_path: Path) -> None:
    alone = twin()
    optimizer = adamw(alone.parameters())
    for number in range(4):
        for rank in range(2):
            (0.5 * loss_of(alone, number, rank)).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(2, saves_in_the_middle, tmp_path):
        expected = alone.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def shared_names() -> list[str]:
    """Return the names of memory that ranks share and this process maps."""
    maps = Path("/proc/self/maps").read_text()
    return [line.split("memfd:")[1] for line in maps.splitlines() if "memfd:" in line]


def accounts(rank: int) -> None:
    model, optimizer = prepared(rank)
    said, counts = exchanges_of(model), []
    for step in range(4):
        before = len(said)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(said) - before)
    buckets = [bucket for bucket in engine_of(model).setup.buckets if bucket.trainable]
    assert counts == [len(buckets)] * 4  # each is less than a part
    with hetero.gathered(model):
        loss_of(model, 4, rank)
    assert shared_names()
    kept = weakref.ref(model)
    hetero.release(model, optimizer)
    del model, optimizer, buckets, said
    gc.collect()
    assert kept() is None and not shared_names()


def test_exchanges_are_one_a_bucket_and_nothing_stays_after_release() -> None:
    run_ranks(2, accounts)


def prepared(rank: int) -> tuple[Any, Any]:
    model = twin()
    return OnARank(rank, 40_000, one_sided=True).prepared(model, adamw(model.parameters()))


def twin() -> Any:
    torch.manual_seed(0)
    return Body(*SIZES)


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, rank)).pow(2).mean()  # untyped model


def exchanges_of(model: nn.Module) -> list[str]:
    """Return the list of the exchanges that this rank makes from here on."""
    said: list[str] = []
    comm = engine_of(model).setup.comm
    exchange = comm.exchange

    def heard(what: str) -> Any:
        said.append(what)
        return exchange(what)

    comm.exchange = heard  # this process is a fork
    return said
