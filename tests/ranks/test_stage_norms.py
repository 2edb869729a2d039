"""A clip on stages is of the whole model's norm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hetero
from hetero.api import engine_of
from hetero.errors import DivergenceError, RankLost
from hetero.parallel.anatomy import result_of
from hetero.parallel.splitting import call_of, split
from hetero.parallel.tensor import parallelize
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.tensor_models import torch_clip
from tests.ranks.test_split import LENGTH, SETTINGS, WORDS, in_whole, loss_of, made, stepped

pytestmark = pytest.mark.usefixtures("one_anatomy")
MICRO_BATCHES, STEPS, MOST = 4, 3, 0.3
Norms = list[float]
Values = dict[str, torch.Tensor]


def words(number: int, copy: int) -> torch.Tensor:
    torch.manual_seed(100 * number + copy)
    return torch.randint(0, WORDS, (MICRO_BATCHES, 4))


def model_of(kind: str) -> nn.Module:
    if kind != "tied":
        return made(kind)
    torch.manual_seed(0)
    sizes = {"vocab": WORDS, "width": 32, "layers": 6, "heads": 4, "context": LENGTH}
    return GPT(GPTConfig(**sizes, tied_head=True, checkpoint_blocks=False))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_stages(
    rank: int, kind: str, schedule: str, sizes: dict[str, int], given: dict[str, Any]
) -> tuple[Values, Norms]:
    """Train this rank's stages; return its weights, by their names in the whole model, and norms.

    With "max_grad_norm" in ``given`` the step clips.
    """
    found = split(model_of(kind), sizes, schedule, batch=words(0, 0)[:1])
    settings = {**SETTINGS, "hbm": 300 * 1024, "mesh": sizes, **given}
    stages, optimizer = hetero.prepare(found.stages, optimizer_of(found.stages), **settings)
    running = found.schedule(MICRO_BATCHES, loss_of)
    norms = []
    for number in range(STEPS):
        stepped(found, running, words(number, rank % sizes.get("dp_shard", 1)))
        if "max_grad_norm" not in given:
            norms.append(optimizer.clip_grad_norm_(MOST).item())
        optimizer.step()
        optimizer.zero_grad()
    return in_whole(stages), norms


def in_one(kind: str, n_copies: int = 1) -> tuple[Values, Norms]:
    """Train the whole model by plain torch, micro-batch after micro-batch, then copy after copy."""
    model = model_of(kind)
    optimizer, params, norms = optimizer_of(model), list(model.parameters()), []
    for number in range(STEPS):
        parts = [words(number, copy).chunk(MICRO_BATCHES) for copy in range(n_copies)]
        for i, copy in itertools.product(range(MICRO_BATCHES), range(n_copies)):
            loss = loss_of(result_of(model(parts[copy][i], **call_of(model))), parts[copy][i])
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                grad = grad * (1 / n_copies)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        for param in params:
            param.grad.div_(MICRO_BATCHES)  # as schedules do
        norms.append(nn.utils.clip_grad_norm_(params, MOST).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms


def check(n_ranks: int, kind: str, schedule: str, sizes: dict[str, int], **given: Any) -> None:
    theirs, norms = in_one(kind, sizes.get("dp_shard", 1))
    assert all(norm > MOST for norm in norms)
    seen = set()
    for mine, told in run_ranks(n_ranks, on_stages, kind, schedule, sizes, given):
        assert told == ([] if "max_grad_norm" in given else norms)
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        seen |= mine.keys()
    assert seen == theirs.keys()


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("given", [{}, {"max_grad_norm": MOST}], ids=["called", "set"])
def test_stages_are_clipped_by_the_norm_of_the_whole_model(given: dict[str, Any]) -> None:
    check(2, "gpt", "1F1B", {"pp": 2}, **given)


def told_in_order(rank: int) -> list[int]:
    """Tell, in place of norms, where in the whole model each parameter is."""
    model = model_of("gpt")
    places = {name: at for at, (name, _) in enumerate(model.named_parameters())}
    found = split(model, {"pp": 2}, "Interleaved1F1B", batch=words(0, 0)[:1])
    stages = hetero.prepare(found.stages, **{**SETTINGS, "hbm": 300 * 1024, "mesh": {"pp": 2}})
    mine = {p: places[s.in_whole(n)] for s in stages for n, p in s.named_parameters()}
    told = [torch.tensor(float(at)) for at in mine.values()]
    norms = engine_of(stages).norms.everywhere(list(mine), told, "alike")
    return [int(each) for each in norms]


def test_norms_of_stages_come_in_the_order_of_the_whole_model() -> None:
    n = len(list(model_of("gpt").parameters()))

    assert run_ranks(2, told_in_order) == [list(range(n))] * 2


@pytest.mark.slow
def test_stages_out_of_order_are_clipped_in_the_order_of_the_model() -> None:
    check(2, "llama", "Interleaved1F1B", {"pp": 2})


@pytest.mark.slow
def test_shares_of_stages_are_clipped_by_the_norm_of_the_whole_model() -> None:
    check(4, "gpt", "1F1B", {"pp": 2, "dp_shard": 2})


def in_a_v(rank: int, is_prepared: bool) -> tuple[Values, Norms]:
    """Train stages of which the first rank has an embedding and the head that is tied to it."""
    if is_prepared:
        return on_stages(rank, "tied", "ZBVZeroBubble", {"pp": 2}, {})
    found = split(model_of("tied"), {"pp": 2}, "ZBVZeroBubble", batch=words(0, 0)[:1])
    stages, norms = found.stages, []
    optimizer, running = optimizer_of(stages), found.schedule(MICRO_BATCHES, loss_of)
    for number in range(STEPS):
        stepped(found, running, words(number, 0))
        norms.append(told_norm(found))
        nn.utils.clip_grads_with_norm_(stages.parameters(), MOST, torch.tensor(norms[-1]))
        optimizer.step()
        optimizer.zero_grad()
    return {s.in_whole(n): v.clone() for s in stages for n, v in s.state_dict().items()}, norms


def told_norm(found: Any) -> float:
    """Return the norm that one process takes, which gets every gradient by its name."""
    mine = {s.in_whole(n): p.grad for s in found.stages for n, p in s.named_parameters()}
    rows: list[Any] = [None, None]
    torch.distributed.all_gather_object(rows, mine)
    model = model_of("tied")
    for name, param in model.named_parameters():
        param.grad = next(row[name] for row in rows if name in row)
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def both_in_a_v(rank: int) -> bool:
    (plain, norms), (ours, told) = in_a_v(rank, False), in_a_v(rank, True)
    assert told == norms
    return plain.keys() == ours.keys() and all(torch.equal(plain[n], ours[n]) for n in plain)


@pytest.mark.slow
def test_a_tied_weight_counts_once() -> None:
    assert run_ranks(2, both_in_a_v) == [True, True]


# -- stages that were cut by hand ------------------------------------------------------------------


def layers() -> nn.ModuleList:
    """Return three layers with gradients."""
    torch.manual_seed(0)
    found = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for number, param in enumerate(found.parameters()):
        param.grad = torch.randn(param.shape) * (number + 1)
    return found


def by_hand(rank: int, clips: Sequence[int]) -> tuple[list[torch.Tensor], Norms]:
    """Step one of three ranks' layers, of which some ranks clip."""
    model: Any = layers()[rank : rank + 1]
    settings = {**SETTINGS, "hbm": 64 * 1024, "mesh": {"pp": 3}}
    model, optimizer = hetero.prepare(model, optimizer_of(model), **settings)
    norms = [optimizer.clip_grad_norm_(MOST).item()] if rank in clips else []
    optimizer.step()
    return [value.clone() for value in model.state_dict().values()], norms


def test_stages_without_names_are_clipped_in_the_order_of_their_ranks() -> None:
    model = layers()
    norm, optimizer = nn.utils.clip_grad_norm_(model.parameters(), MOST), optimizer_of(model)
    optimizer.step()

    found = run_ranks(3, by_hand, range(3))

    assert [told for _, told in found] == [[norm.item()]] * 3
    mine = [value for values, _ in found for value in values]
    theirs = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_rank_that_clips_alone_hears_that_others_have_left() -> None:
    assert isinstance(outcomes(3, by_hand, [1])[1].error, RankLost)


# -- stages whose tensors ranks divide -------------------------------------------------------------


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def along_both(rank: int, n_stages: int) -> tuple[Values, Norms]:
    """Train as one of two ranks of a stage's tensors: of one stage, by torch."""
    mesh = init_device_mesh("cpu", (n_stages, 2), mesh_dim_names=("pp", "tp"))
    model: Any = made("gpt")
    if n_stages == 1:
        parallelize(model, mesh["tp"])
        optimizer, norms = optimizer_of(model), []
        for number in range(STEPS):
            for ids in words(number, 0).chunk(MICRO_BATCHES):
                loss_of(model(ids), ids).backward()
            for param in model.parameters():
                if isinstance(param, DTensor):
                    param.grad = param.grad.redistribute(placements=param.placements)
                param.grad.div_(MICRO_BATCHES)
            norms.append(torch_clip(model.parameters(), MOST).item())
            optimizer.step()
            optimizer.zero_grad()
        return {name: local(value) for name, value in model.state_dict().items()}, norms
    found = split(model, mesh, "1F1B", batch=words(0, 0)[:1])
    parallelize(found.stages, mesh["tp"])
    settings = {**SETTINGS, "mesh": mesh, "hbm": 300 * 1024}
    stages, prepared = hetero.prepare(found.stages, optimizer_of(found.stages), **settings)
    running, norms = found.schedule(MICRO_BATCHES, loss_of), []
    for number in range(STEPS):
        stepped(found, running, words(number, 0))
        norms.append(prepared.clip_grad_norm_(MOST).item())
        prepared.step()
        prepared.zero_grad()
    (stage,) = stages
    return {stage.in_whole(n): local(value) for n, value in stage.state_dict().items()}, norms


@pytest.mark.slow
def test_divided_tensors_of_stages_are_clipped_as_those_of_the_model() -> None:
    theirs = run_ranks(2, along_both, 1)

    for rank, (mine, norms) in enumerate(run_ranks(4, along_both, 2)):
        values, told = theirs[rank % 2]
        assert norms == told
        assert all(torch.equal(value, values[name]) for name, value in mine.items())


def clips_alone(rank: int, how: str) -> None:
    """Clip otherwise than the other rank does."""
    found = split(model_of("gpt"), {"pp": 2}, "1F1B", batch=words(0, 0)[:1])
    settings = {**SETTINGS, "hbm": 300 * 1024, "mesh": {"pp": 2}}
    if how == "settings":
        settings["max_grad_norm"] = MOST * (1 + rank)
    _, optimizer = hetero.prepare(found.stages, optimizer_of(found.stages), **settings)
    stepped(found, found.schedule(MICRO_BATCHES, loss_of), words(0, 0))
    optimizer.clip_grad_norm_(MOST * (1 + rank * (how == "limits")), 1.0 + rank * (how == "orders"))


@pytest.mark.parametrize("how", ["settings", "limits", "orders"])
def test_ranks_that_clip_in_different_ways_are_all_told(how: str) -> None:
    for each in outcomes(2, clips_alone, how):
        assert isinstance(each, Died) and isinstance(each.error, DivergenceError), each.text
        assert ("max_grad_norm" if how == "settings" else "clip in different") in str(each.error)
