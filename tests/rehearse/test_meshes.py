"""A plan of a mesh: what a rank has is what torch gives it, and all ranks together make the model's
step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import ConfigError
from hetero.internals import backward_of_inputs, backward_of_weights, run_backward
from hetero.parallel.recipe import parallelize
from hetero.plan.pipeline import HALVED, INTERLEAVED, order_of, played, ranks_of
from hetero.plan.shape import StageShare, even_cut, shape_of
from hetero.rehearse import meshes
from hetero.rehearse.decoders import decoder
from hetero.rehearse.mesh_work import halves_of, mesh_work
from hetero.rehearse.meshes import (
    MeshPlan,
    plan_mesh,
    scene_of_stage,
    sent_or_loss,
)
from hetero.rehearse.rehearsal import TIERS, rehearse
from hetero.rehearse.search import search

TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
SHAPE, DEEP = shape_of(TINY), shape_of({**TINY, "num_hidden_layers": 6})
assert SHAPE is not None and DEEP is not None
CPU = "laptop-4c-avx2-ddr4"


def planned(samples: int = 4, **given: Any) -> MeshPlan:
    given = {"profile": "a100-80", "precision": "bf16", "activations": "keep", **given}
    return plan_mesh(TINY, (samples, 16), **given)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Be the first of two ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_has_the_parts_of_tensors_that_torch_gives_it(two_ranks: None) -> None:
    whole = decoder(SHAPE)
    parallelize(whole, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

    parts = {
        name: tuple((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in whole.named_parameters()
    }
    share = decoder(SHAPE, StageShare(0, 2, opens=True, closes=True, n_ranks=2))
    assert parts == {name: tuple(p.shape) for name, p in share.named_parameters()}


@pytest.mark.campaign(seconds=2.5)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "interleaved-zb", "zbv", "dualpipev"])
@pytest.mark.parametrize("rank", range(3), ids=["first", "middle", "last"])
def test_a_rank_takes_the_bytes_that_it_takes_when_it_runs(rank: int, schedule: str) -> None:
    """The same passes of the same stages, in one process, with numbers."""
    hbm = "1400KB" if schedule in HALVED else "900KB"
    settings = {"hbm": hbm, "device": "cpu:sim", "profile": CPU, "chunk_bytes": 4096}
    given = {"mesh": {"pp": 3}, "schedule": schedule, **settings}
    work = mesh_work({**TINY, "num_hidden_layers": 6}, (6, 16), **given)
    cut = even_cut(DEEP, len(work.ranks))
    shares = [share for share, owner in zip(cut, work.ranks, strict=True) if owner == rank]
    order = work.order(rank)
    told = rehearse(scene_of_stage(work, shares, order))

    torch.manual_seed(0)
    stages = [decoder(DEEP, share).to_empty(device="cpu") for share in shares]
    model: Any = nn.ModuleList(stages) if len(stages) > 1 else stages[0]
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    model, optimizer = prepare_tuned(
        model, torch.optim.AdamW(model.parameters()), Config.load(**settings), None
    )
    tokens = torch.zeros(1, 16, dtype=torch.long)
    for _ in told.steps:
        sent: dict[tuple[int, int], torch.Tensor] = {}
        halves: dict[tuple[int, int], Any] = {}
        for stage in stages:
            stage.inbox = [] if schedule in HALVED else None
        for batch, is_forward, turn, half in order:
            came = stages[turn].inbox
            if is_forward:
                sent[batch, turn] = sent_or_loss(stages[turn](input_ids=tokens, labels=tokens))
            elif half == "I":
                assert came is not None
                made = backward_of_inputs(sent.pop((batch, turn)), came.pop(0), stages[turn])
                halves[batch, turn] = made
                del made
            elif half == "W":
                backward_of_weights(stages[turn], halves.pop((batch, turn)))
            else:
                run_backward(sent.pop((batch, turn)))
                if came:
                    came.pop(0)
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine_of(model).setup.ledger
    assert told.error is None and told.steps[-1].mode == "paged"
    assert told.peaks == {tier: ledger.peak(tier) for tier in TIERS}
    engine_of(model).release()


def test_all_ranks_together_make_the_products_of_the_model() -> None:
    alone = planned(mesh={"dp_shard": 1})
    meshed = planned(mesh={"pp": 2, "dp_shard": 2, "tp": 2}, samples=2)

    assert alone.flops > 0
    assert meshed.flops == pytest.approx(alone.flops, rel=1e-9)
    assert meshed.tokens == alone.tokens == 4 * 16
    assert meshed.n_ranks == 8
    numel = sum(stage.numel for stage in meshed.stages)
    assert alone.stages[0].numel < 2 * numel < 1.1 * alone.stages[0].numel  # norms are whole


def test_experts_make_the_products_of_the_tokens_that_choose_them() -> None:
    """Two of eight experts take a token: two MLPs, and a router."""
    mixture = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    alike = {"profile": "a100-80", "precision": "bf16", "activations": "keep"}
    many, one = (plan_mesh(c, (1, 16), mesh={"dp_shard": 1}, **alike) for c in (mixture, TINY))

    mlp, router = 3 * 64 * 128, 8 * 64
    assert many.flops - one.flops == 3 * 2 * 16 * 2 * (mlp + router)  # three passes, two layers


def test_a_step_of_many_passes_is_told_from_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    told = planned(mesh={"pp": 2}, samples=7)
    monkeypatch.setattr(meshes, "SPARE_PASSES", 7)
    whole = planned(mesh={"pp": 2}, samples=7)

    assert told.n_passes == whole.n_passes == 7
    assert told.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert [s.peaks for s in told.stages] == [s.peaks for s in whole.stages]


def test_the_pipeline_is_the_one_that_its_passes_make() -> None:
    found = planned(mesh={"pp": 2}, samples=6)

    slowest = max(s.forward_seconds + s.backward_seconds for s in found.stages)
    assert found.pipeline_seconds >= 6 * slowest
    assert 0 < found.bubble < 1
    assert found.step_seconds >= found.pipeline_seconds


def test_gpipe_holds_more_than_one_forward_one_backward() -> None:
    few, many = (planned(mesh={"pp": 2}, samples=3, schedule=s) for s in ("1f1b", "gpipe"))

    assert [s.in_flight for s in few.stages] == [2, 1]
    assert [s.in_flight for s in many.stages] == [3, 3]
    assert many.stages[0].kinds["activation"] > few.stages[0].kinds["activation"]


@pytest.mark.campaign(seconds=4)
def test_several_stages_a_rank_wait_less_and_hold_more() -> None:
    deep = {**TINY, "num_hidden_layers": 8}
    alike = {"profile": "a100-80", "precision": "bf16", "activations": "keep", "mesh": {"pp": 2}}
    plain, twice = (plan_mesh(deep, (8, 64), schedule=s, **alike) for s in ("1f1b", "interleaved"))

    assert twice.stages_per_rank == 2
    assert twice.flops == plain.flops
    assert [stage.numel for stage in twice.stages] == [stage.numel for stage in plain.stages]
    assert twice.bubble < plain.bubble
    assert [stage.in_flight for stage in twice.stages] == [5, 3]  # of half as many layers each
    assert twice.paste.endswith("found.schedule(8, loss_of)  # Interleaved1F1B")


@pytest.mark.parametrize("schedule", HALVED)
@pytest.mark.parametrize(("n_ranks", "n_batches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_equal_parts_of_a_micro_batch_leave_a_third_of_the_bubble(
    schedule: str, n_ranks: int, n_batches: int
) -> None:
    """(p - 1) t beyond the passes, for a forward and halves of t each; interleaved, (p - 1) 3 t.
    A rank of ZBV waits for its first micro-batch alone (zero bubble)."""
    ranks = ranks_of(schedule, n_ranks, 2)
    orders = [[*halves_of(schedule, ranks, n_batches, rank)] for rank in range(n_ranks)]
    plain = [order_of(INTERLEAVED, n_ranks, n_batches, rank, 2) for rank in range(n_ranks)]

    run = played(
        orders,
        lambda rank, at: 1.0 if orders[rank][at].forward or orders[rank][at].half else 2.0,
        ranks=ranks,
    )
    whole = played(plain, lambda rank, at: 1.0 if plain[rank][at].forward else 2.0)

    passes = 2 * 3.0 * n_batches
    assert run.busy == (passes,) * n_ranks
    assert run.seconds - passes == n_ranks - 1 == (whole.seconds - passes) / 3
    if schedule == "zbv":
        assert [end - passes for end in run.ends] == [*range(n_ranks)]


@pytest.mark.parametrize(
    ("schedule", "n_parts"),
    [("zbv", 1), *(pytest.param(s, 2, marks=pytest.mark.slow) for s in ("zbv", "dualpipev"))],
)
def test_halves_of_backwards_wait_for_less(schedule: str, n_parts: int) -> None:
    deep = {**TINY, "num_hidden_layers": 4}
    alike = {"profile": "a100-80", "precision": "bf16", "activations": "keep"}
    alike["mesh"] = {"pp": 2, "tp": n_parts}
    whole, halves = (plan_mesh(deep, (5, 64), schedule=s, **alike) for s in ("1f1b", schedule))

    assert halves.flops == whole.flops
    assert halves.bubble < whole.bubble
    assert halves.stages[0].numel + halves.stages[1].numel == sum(s.numel for s in whole.stages)
    name = {"zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}[schedule]
    assert halves.paste.endswith(f"found.schedule(5, loss_of)  # {name}")


@pytest.mark.slow
def test_many_passes_of_several_stages_are_told_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = {**TINY, "num_hidden_layers": 4}
    given = {"profile": "a100-80", "mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved"}
    told = plan_mesh(deep, (16, 16), **given)
    monkeypatch.setattr(meshes, "SPARE_PASSES", 16)
    whole = plan_mesh(deep, (16, 16), **given)

    assert told.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert [s.peaks for s in told.stages] == [s.peaks for s in whole.stages]


def test_gradients_of_every_pass_cost_more_than_those_of_a_step() -> None:
    mesh = {"pp": 2, "dp_shard": 16}
    once, every = (planned(mesh=mesh, samples=3, exchange=e) for e in ("step", "pass"))

    assert every.step_seconds > once.step_seconds


@pytest.mark.parametrize(
    ("exchange", "order"),
    [
        ("step", "F0 F0 F1 F1 F0 B1 F0 B1 F1 B0 F1 B0 B1 B1 B0 B0 R R"),
        ("pass", "F0 F0 F1 F1 F0 B1 R F0 B1 R F1 B0 R F1 B0 R B1 R B1 R B0 R B0 R"),
    ],
)
def test_ranks_exchange_with_the_last_pass_of_all_their_stages_or_with_each(
    exchange: str, order: str
) -> None:
    """Two stages of one unit each: if each exchanged with a last pass of its own, a sum (R) would
    stand before the last two backwards."""
    given = {"profile": "a100-80", "mesh": {"pp": 2, "dp_shard": 2}, "activations": "keep"}
    deep = {**TINY, "num_hidden_layers": 4}
    work = mesh_work(deep, (4, 16), schedule="interleaved", exchange=exchange, **given)
    shape = shape_of(deep)
    assert shape is not None
    found = rehearse(scene_of_stage(work, even_cut(shape, 4)[::2], work.order(0)))

    step = [e for e in found.run.events if e.step == len(found.steps) - 1]
    sums = [e for e in step if (e.what, e.lane) == ("move", "reduce")]
    units = [e for e in step if e.what == "access"]
    told = sorted([*sums, *units], key=lambda each: each.t_ns)
    assert order.split() == ["R" if e in sums else f"{e.phase[0].upper()}{e.unit}" for e in told]


def test_sums_over_tensors_take_the_time_of_the_wire() -> None:
    whole, divided = (planned(mesh={"pp": 2, "tp": n}).stages[0] for n in (1, 2))

    late = 20e-6  # of each sum: of the words, of attention and of the MLP
    assert whole.summed_seconds == 0.0
    assert divided.summed_seconds > (3 + 2) * late  # backward enters attention and the MLP
    assert divided.forward_seconds - whole.forward_seconds > 2.5 * late


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"pp": 2, "dp_replicate": 2}}, "nothing would average"),
        ({"mesh": {"pp": 5}}, "2 layers make no 5 stages"),
        ({"mesh": {"tp": 3}}, "do not divide 4 heads"),
        ({"mesh": {"cp": 2}}, "parts of sequences"),
        ({"mesh": {"rows": 2}}, "an axis 'rows'"),
        ({"mesh": {"pp": 2}, "micro_batch": 3}, "make no passes of 3"),
        ({"mesh": {"pp": 2}, "schedule": "zbv"}, "2 layers make no 4 stages"),
        ({"mesh": {"pp": 2}, "schedule": "zb"}, "schedule='zb'"),
        ({"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zbv"}, "schedule='zbv' with dp_shard"),
        ({"mesh": {"pp": 2}, "schedule": "zbv", "stages_per_rank": 3}, "with 3 stages a rank"),
        ({"mesh": {"pp": 2}, "schedule": "dualpipev", "samples": 3}, "as many microbatches"),
        ({"mesh": {"pp": 2}, "exchange": "never"}, "exchange='never'"),
        ({"mesh": {"pp": 2}, "schedule": "interleaved"}, "2 layers make no 4 stages"),
        ({"mesh": {"pp": 2}, "stages_per_rank": 2}, "schedule='1f1b' with 2 stages a rank"),
        ({"mesh": {"pp": 2}, "samples": 5, "schedule": "interleaved"}, "no equal rounds of 5"),
        ({"mesh": {"pp": 2}, "fused_loss": True}, "fused_loss with stages"),
        ({"mesh": {"pp": 2}, "gather_shares": True}, "gather_shares with stages"),
    ],
)
def test_what_cannot_be_planned_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**given)


def test_a_model_that_is_no_published_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="a published decoder"):
        plan_mesh({**TINY, "attention_bias": True}, profile="a100-80", mesh={"pp": 2})


def test_a_stage_that_does_not_fit_says_what_it_needs() -> None:
    found = planned(mesh={"pp": 2}, host="40KB", hbm="300KB")

    assert not found.fits
    assert any(stage.shortfall for stage in found.stages)
    assert (found.step_seconds, found.bubble, found.tflops) == (0.0, 0.0, 0.0)


def test_a_search_tells_the_fastest_meshes_first() -> None:
    found = search(TINY, 4, (8, 16), profile="a100-80", precision="bf16", seconds=4.0)

    seconds = [row.plan.step_seconds for row in found.rows]
    assert found.fits and seconds == sorted(seconds)
    assert all(row.plan.n_ranks == 4 and row.plan.tokens == 8 * 16 for row in found.rows)
    assert found.n_rehearsed >= len(found.rows) > 0


def test_a_search_ends_when_its_time_is_over() -> None:
    ticks = iter(range(0, 1000, 100))

    found = search(
        TINY, 4, (8, 16), profile="a100-80", seconds=150.0, clock=lambda: float(next(ticks))
    )

    assert found.n_rehearsed == 1 < found.n_candidates


def test_a_search_takes_no_setting_that_it_finds() -> None:
    with pytest.raises(ConfigError, match="a search finds that itself"):
        search(TINY, 4, (8, 16), profile="a100-80", micro_batch=2)
