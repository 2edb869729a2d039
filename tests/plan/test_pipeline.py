"""The order of a pipeline's micro-batches, and the time that all stages take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hetero.errors import ConfigError
from hetero.plan.pipeline import INTERLEAVED, Pass, most_in_flight, order_of, played

TORCHS: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
TURNS = [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 10, 2), (4, 3, 3), (3, 12, 4)]
"""Ranks, micro-batches, and stages of a rank."""
SIZES = [(1, 1), (1, 5), (2, 2), (4, 8), (5, 3), (8, 8), (3, 16)]


class Recorded:
    """A stage of torch's that notes what it is told to do, and sends nothing."""

    def __init__(self, index: int) -> None:
        self.stage_index = index
        self.passes: list[Pass] = []

    def forward_one_chunk(self, batch: int, *args: Any, **kwargs: Any) -> None:
        self.passes.append(Pass(batch, forward=True))

    def backward_one_chunk(self, batch: int, **kwargs: Any) -> None:
        self.passes.append(Pass(batch, forward=False))

    def perform_reduce_grad(self, scale: int) -> None: ...

    def _nothing(self, batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing


def torchs_order(schedule: str, n_stages: int, n_batches: int, stage: int) -> list[Pass]:
    """Return the order in which torch's own schedule runs a stage."""
    recorded, batches = Recorded(stage), [None] * n_batches
    own = SimpleNamespace(
        _stage=recorded,
        _num_stages=n_stages,
        _n_microbatches=n_batches,
        scale_grads=False,
        _check_inputs=lambda args, kwargs, *others: (args, kwargs),
        _initialize_stage=lambda *given: None,
        _maybe_compute_loss=lambda *given: None,
        _maybe_get_loss=lambda *given: None,
        _update_losses=lambda *given: None,
    )
    TORCHS[schedule]._step_microbatches(own, batches, batches)
    return recorded.passes


def torchs_turns(n_ranks: int, n_batches: int, rank: int, n_turns: int) -> list[Pass]:
    """Return the order of torch's interleaved schedule."""
    rounds = max(1, n_batches // n_ranks)
    own = SimpleNamespace(
        n_local_stages=n_turns,
        microbatches_per_round=n_batches // rounds,
        pp_group_size=n_ranks,
        _n_microbatches=n_batches,
    )
    calculate: Any = ScheduleInterleaved1F1B._calculate_single_rank_operations
    actions = [action for action in calculate(own, rank) if action is not None]
    return [
        Pass(a.microbatch_index, a.computation_type.name == "FORWARD", a.stage_index // n_ranks)
        for a in actions
    ]


@pytest.mark.parametrize("schedule", TORCHS)
@pytest.mark.parametrize(("n_stages", "n_batches"), SIZES)
def test_a_stage_has_the_order_of_torchs_schedule(
    schedule: str, n_stages: int, n_batches: int
) -> None:
    for stage in range(n_stages):
        ours = order_of(schedule, n_stages, n_batches, stage)
        assert ours == torchs_order(schedule, n_stages, n_batches, stage)


@pytest.mark.parametrize(("n_ranks", "n_batches", "n_turns"), TURNS)
def test_a_rank_of_several_stages_has_the_order_of_torchs_schedule(
    n_ranks: int, n_batches: int, n_turns: int
) -> None:
    for rank in range(n_ranks):
        ours = order_of(INTERLEAVED, n_ranks, n_batches, rank, n_turns)
        assert ours == torchs_turns(n_ranks, n_batches, rank, n_turns)


@pytest.mark.parametrize(
    ("n_ranks", "n_batches", "n_turns"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (3, 12, 4)]
)
def test_more_stages_a_rank_wait_for_less(n_ranks: int, n_batches: int, n_turns: int) -> None:
    """(p - 1) / (v m + p - 1) of the step."""
    turns = n_ranks, n_batches, n_turns
    orders = [order_of(INTERLEAVED, *turns[:2], rank, n_turns) for rank in range(n_ranks)]

    run = played(orders, lambda rank, at: 2.0 if orders[rank][at].forward else 3.0)

    passes = n_turns * n_batches
    assert run.seconds == 5.0 * (passes + n_ranks - 1)
    assert run.bubble == pytest.approx((n_ranks - 1) / (passes + n_ranks - 1))


@pytest.mark.parametrize("schedule", TORCHS)
@pytest.mark.parametrize(("n_stages", "n_batches"), SIZES)
def test_equal_stages_wait_for_as_long_as_the_formula_says(
    schedule: str, n_stages: int, n_batches: int
) -> None:
    """(p - 1) / (m + p - 1) of the step, for one forward and backward per micro-batch."""
    orders = [order_of(schedule, n_stages, n_batches, stage) for stage in range(n_stages)]

    run = played(orders, lambda stage, at: 2.0 if orders[stage][at].forward else 3.0)

    assert run.seconds == 5.0 * (n_batches + n_stages - 1)
    assert run.bubble == pytest.approx((n_stages - 1) / (n_batches + n_stages - 1))
    assert run.busy == (5.0 * n_batches,) * n_stages


def test_the_slowest_stage_sets_the_pace() -> None:
    orders = [order_of("1f1b", 3, 10, stage) for stage in range(3)]

    run = played(orders, lambda stage, at: 4.0 if stage == 1 else 1.0)

    assert run.seconds == 2 * 4.0 * 10 + 1.0 + 1.0  # until it begins, and after its last backward
    assert run.ends[:2] == (82.0, 81.0)


def test_what_is_sent_arrives_later() -> None:
    orders = [order_of("gpipe", 2, 1, stage) for stage in range(2)]

    run = played(orders, lambda stage, at: 1.0, lambda stage: 0.25)

    assert run.seconds == 4.0 + 2 * 0.25


def test_early_stages_hold_more_micro_batches() -> None:
    assert [most_in_flight(order_of("1f1b", 4, 9, stage)) for stage in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(order_of("gpipe", 4, 9, stage)) for stage in range(4)] == [9] * 4


@pytest.mark.parametrize(
    ("schedule", "n_batches", "n_turns", "said"),
    [
        ("zbv", 2, 1, "zbv"),
        (INTERLEAVED, 9, 2, "no equal rounds of 9"),
        (INTERLEAVED, 8, 1, "with 1 stages a rank"),
        ("1f1b", 8, 2, "with 2 stages a rank"),
    ],
)
def test_a_schedule_without_an_order_is_refused(
    schedule: str, n_batches: int, n_turns: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        order_of(schedule, 4, n_batches, 0, n_turns)


def test_stages_that_wait_for_each_other_are_no_step() -> None:
    stuck = [[Pass(0, forward=False), Pass(0, forward=True)]]

    with pytest.raises(ValueError, match="wait for each other"):
        played(stuck, lambda stage, at: 1.0)
