"""DTensors are paged: a tensor parallel model has plain torch's bits on the same ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import hetero
from hetero.api import engine_of
from hetero.errors import ConfigError, DivergenceError, HeteroError, StateError
from hetero.parallel import tensor
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import (
    LM,
    TIGHT,
    WIDTH,
    WORDS,
    LossScale,
    TensorRun,
    Trained,
    around,
    built,
    by_hetero,
    by_torch,
    difference,
    differing,
    found_in,
    loss_of,
    masters_by_torch,
    mesh_of,
    micro_batches_by_torch,
    tiny_llama,
    tiny_mixtral,
    torch_clip,
    train,
    train_masters,
    weights_of,
    whole,
)


def compared(rank: int, run: TensorRun, settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    expected = by_torch(run)
    found = by_hetero(run, **settings)
    return difference(found, expected), found.status


def check(run: TensorRun, n_ranks: int = 2, *, evictions: int = 3, **settings: Any) -> None:
    for odd, status in run_ranks(n_ranks, compared, run, settings):
        assert not odd
        assert status.evictions >= evictions


ROOMY: dict[str, Any] = {"hbm": 40_000}
PLACES: dict[str, tuple[dict[str, Any], int]] = {  # settings, evictions
    "few": ({}, 3),
    "keep": ({**ROOMY, "activations": "keep"}, 3),
    "recompute": ({"activations": "recompute"}, 3),
    "offload": ({**ROOMY, "activations": "offload"}, 3),
    "ram": ({**ROOMY, "device": "cpu"}, 3),
    "stays": ({"hbm": 400_000}, 0),  # paged at first
    "resident": ({"hbm": None, "device": "cpu"}, 0),
}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("settings, evictions", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
def test_a_paged_tensor_parallel_model_is_plain_torchs(
    style: str,
    passes: int,
    clip: float | None,
    optimizer: str,
    settings: dict[str, Any],
    evictions: int,
) -> None:
    if (style, optimizer) == ("tp", "fused"):
        optimizer = "sgd"  # torch's fused rules refuse plain parameters next to DTensors
    run = TensorRun(style, optimizer, passes=passes, clip=clip)
    check(run, evictions=evictions, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("place", ["pages", "stays"])
def test_masters_are_those_of_a_plain_loop(style: str, passes: int, place: str) -> None:
    """Working weights are bf16; gradients add up, and are summed over ranks, in fp32."""
    run = TensorRun(style, "sgd", passes=passes, clip=0.05)
    settings = {"precision": "bf16", "hbm": 26_000 if place == "pages" else 400_000}
    for odd in run_ranks(2, compared_masters, run, settings):
        assert not odd


def compared_masters(rank: int, run: TensorRun, settings: dict[str, Any]) -> list[str]:
    expected = masters_by_torch(run)
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **{**run.settings, **settings})
    found = train(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most))
    hetero.release(model, optimizer)
    found.weights, found.states = weights_of(model), {}  # masters
    return difference(found, expected)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("style", ["tp", "sequence"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_all_ranks_skip_a_step_that_overflows_on_one(
    style: str, passes: int, clip: float | None
) -> None:
    run = TensorRun(style, "sgd", passes=passes, clip=clip)
    for odd, scale, evictions in run_ranks(2, compared_halves, run):
        assert not odd
        assert scale == 2.0**15  # once
        assert evictions >= 3


def skipped(rank: int) -> list[bool]:
    run, found = TensorRun("tp", "sgd"), []
    model, optimizer = hetero.prepare(*built(run), **HALF)
    for micro in range(2):
        hook = None
        if rank == micro == 1:
            hook = model.norm.weight.register_hook(lambda grad: grad * float("inf"))
        hetero.backward(loss_of(model, run, micro))
        if hook is not None:
            hook.remove()
        optimizer.step()
        found.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return found


def test_all_ranks_skip_a_step_in_which_what_they_do_not_divide_overflows_on_one() -> None:
    assert run_ranks(2, skipped) == [[False, True]] * 2


HALF = {**TIGHT, "hbm": 18_000, "precision": "fp16"}


def compared_halves(rank: int, run: TensorRun) -> tuple[list[str], float, int]:
    """Compare fp16 with a plain loop; in the third step a gradient of one rank overflows."""
    (model, _), (masters, _), (prepared, plain) = built(run), built(run), built(run)
    overflows = range(2 * run.passes, 3 * run.passes)

    def backward(each: nn.Module, micro: int, scaled: Callable[[torch.Tensor], None]) -> Any:
        hook = None
        if rank and micro in overflows:
            hook = each.blocks[1].up.weight.register_hook(lambda grad: grad * float("inf"))
        loss = loss_of(each, run, micro)
        scaled(loss)
        if hook is not None:
            hook.remove()
        return loss

    scale = LossScale()
    expected = train_masters(
        *(masters, model),
        lambda micro: backward(model, micro, lambda loss: (loss * scale.value).backward()),
        *(run.steps, run.passes, run.clip, scale),
    )
    prepared, optimizer = hetero.prepare(prepared, plain, **HALF)
    losses, norms = [], []
    for step in range(run.steps):
        for micro in range(step * run.passes, (step + 1) * run.passes):
            losses.append(float(whole(backward(prepared, micro, hetero.backward).detach())))
        if run.clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(run.clip)))
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 2)
        optimizer.zero_grad()
    found_scale, evictions = optimizer.loss_scale, hetero.status(prepared).evictions
    hetero.release(prepared, optimizer)
    found = Trained(losses, norms, weights_of(prepared), {})
    for each in (found, expected):
        each.norms = [norm for norm in each.norms if math.isfinite(norm)]
    return difference(found, expected), found_scale, evictions


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_updates_begin_in_backward(style: str, optimizer: str) -> None:
    """Where gradients are complete then: not those of norms that wait for a sum over ranks."""
    for odd, begun in run_ranks(2, compared_early, TensorRun(style, optimizer)):
        assert not odd
        assert begun >= (8 if style == "tp" else 1)


def compared_early(rank: int, run: TensorRun) -> tuple[list[str], int]:
    (plain, its_own), (model, inner) = built(run), built(run)
    mesh = None if run.style == "tp" else {"tp": 2}  # which says the same
    model, optimizer = hetero.prepare(model, inner, **TIGHT, updates="backward", mesh=mesh)
    stepper = engine_of(model).steps.stepper
    assert stepper is not None
    begun = 0
    losses = []
    for step in range(run.steps):
        with around(run):
            loss = loss_of(model, run, step)
            loss.backward()
        begun += len(stepper.early)
        losses.append(float(whole(loss.detach())))
        optimizer.step()
        optimizer.zero_grad()
    found = found_in(model, optimizer)
    found.losses = losses
    return difference(found, train(plain, its_own, run)), begun


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["int8", "nf4"])
@pytest.mark.parametrize("style", ["tp", "vocabulary"])
def test_frozen_parts_lie_at_home_in_code(style: str, frozen: str) -> None:
    """As a plain model trains whose frozen weights are what the codes say."""
    for odd in run_ranks(2, compared_codes, TensorRun(style, frozen=(1, 2)), frozen):
        assert not odd


def compared_codes(rank: int, run: TensorRun, frozen: str) -> list[str]:
    model, plain = built(run)
    model, optimizer = hetero.prepare(
        model, plain, **{**run.settings, "hbm": 30_000}, frozen=frozen
    )
    twin, its_own = built(run)
    twin.load_state_dict(model.state_dict())
    found = train(model, optimizer, run)
    assert hetero.status(model).evictions >= 3
    return difference(found, train(twin, its_own, run))


# -- what users see ------------------------------------------------------------------------------


@pytest.mark.slow
def test_states_go_to_and_from_plain_torch_and_its_checkpoints(tmp_path: Path) -> None:
    for odd in run_ranks(2, exchange_states, str(tmp_path)):
        assert not any(odd.values()), odd


def exchange_states(rank: int, folder: str) -> dict[str, list[str]]:
    run = TensorRun("sequence", steps=3)
    expected = by_torch(run)
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **TIGHT)
    train(model, optimizer, run)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
    odd = {}

    # 1. torch's checkpoint of it loads into a whole model, and into a prepared one
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    saved = LM().state_dict()
    dcp.load({"model": saved}, checkpoint_id=folder)
    odd["whole"] = differing(saved, expected.weights)
    again, its_own = built(run)
    again, its_own = hetero.prepare(again, its_own, **TIGHT)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    blank = again.state_dict()
    dcp.load({"model": blank}, checkpoint_id=folder)
    again.load_state_dict(blank)
    odd["again"] = differing(weights_of(again), expected.weights)

    # 2. states of both go to plain torch, and back
    twin, its_plain = built(run)
    twin.load_state_dict(model.state_dict())
    its_plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    its_own.load_state_dict(its_plain.state_dict())
    after = train(twin, its_plain, run)
    odd["prepared"] = difference(train(model, optimizer, run), after)
    odd["loaded"] = difference(train(again, its_own, run), after)
    return odd


@pytest.mark.campaign(seconds=3)
def test_gradients_and_writes_are_as_in_torch() -> None:
    for odd in run_ranks(2, use_as_torch):
        assert not odd


def use_as_torch(rank: int) -> list[str]:
    run = TensorRun("sequence", steps=2)
    (plain, its_own), (model, optimizer) = built(run), built(run)
    model, optimizer = hetero.prepare(model, optimizer, **TIGHT)
    odd: list[str] = []
    for step in range(3):
        for each in (plain, model):
            loss_of(each, run, step).backward()
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert isinstance(other.grad, DTensor)
            assert isinstance(param.grad, DTensor)
            cut = name == "embed.weight"  # of which each rank has the whole in torch
            if other.grad.placements != (param if cut else param.grad).placements:
                odd.append(f"{name}: {other.grad.placements}")
            if not torch.equal(whole(param.grad), whole(other.grad)):
                odd.append(f"gradient of {name}")
        norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.05)) for m in (plain, model)]
        odd += ["norms"] if norms[0] != norms[1] else []
        with torch.no_grad():
            for each, its in ((plain, its_own), (model, optimizer)):
                its.step()
                its.zero_grad()
                each.head.weight.mul_(0.5)
                each.embed.weight.data.add_(0.25)
                each.norm.weight.to_local().add_(0.5)
                each.blocks[0].up.weight.copy_(each.blocks[1].up.weight)
    with pytest.raises(StateError, match="torch keeps"):
        model.head.weight.data = plain.head.weight.detach()
    twin = copy.deepcopy(model)
    odd += differing(weights_of(twin), weights_of(plain))
    return odd + differing(weights_of(model), weights_of(plain))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(64, 48)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(words)
        return out


def test_the_norm_of_a_cut_gradient_is_that_of_the_whole() -> None:
    for norms, expected in run_ranks(2, norms_of_words):
        assert norms == expected


def norms_of_words(rank: int) -> list[list[float]]:
    """Return the norms of sums of two passes, by hetero and by torch."""
    found: list[list[float]] = []
    for paged in (True, False):
        plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
        model: nn.Module = parallelize_module(Words(), mesh_of(TensorRun()), plan)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if paged:
            model, optimizer = hetero.prepare(model, optimizer, **{**TIGHT, "hbm": 200_000})
        norms = []
        for step in range(16):
            for micro in (2 * step, 2 * step + 1):
                source = torch.Generator().manual_seed(micro)
                words = torch.randint(0, 64, (40,), generator=source)
                (model(words) * torch.randn(40, 48, generator=source)).sum().backward()
            clip = optimizer.clip_grad_norm_ if paged else partial(torch_clip, model.parameters())
            norms.append(float(clip(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(norms)
    return found


# -- more axes -----------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("passes, clip", [(1, None), (2, 0.05)])
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
def test_shares_lie_on_top_of_parts(
    style: str, passes: int, clip: float | None, optimizer: str
) -> None:
    """Two ranks have each part; they are one rank with two micro-batches."""
    run = TensorRun(style, optimizer, dp=2, passes=passes, clip=clip, steps=3)
    for odd, evictions in run_ranks(4, compared_shares, run):
        assert not odd
        assert evictions >= 3


def compared_shares(rank: int, run: TensorRun) -> tuple[list[str], int]:
    expected = micro_batches_by_torch(run)
    model, plain = built(run)
    mesh = {"dp_replicate": 1, "dp_shard": run.dp, "cp": 1, "tp": 2}
    model, optimizer = hetero.prepare(model, plain, **TIGHT, mesh=mesh)
    found = train(
        *(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most)), dp=rank // 2
    )
    found.losses = []
    evictions = hetero.status(model).evictions
    hetero.release(model, optimizer)
    return difference(found, expected), evictions


class Grid(nn.Module):
    """Layers whose weights are cut along both axes of a mesh."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mesh = mesh
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))
        for layer in self.layers:
            cut = distribute_tensor(layer.weight.detach(), mesh, [Shard(1), Shard(0)])
            layer.weight = nn.Parameter(cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole_rows, sharded = [Shard(0), Replicate()], [Replicate(), Shard(0)]
        y = distribute_tensor(x, self.mesh, [Shard(0), Shard(-1)])
        for layer in self.layers:
            weight = layer.weight.redistribute(placements=sharded)
            y = torch.tanh(nn.functional.linear(y.redistribute(placements=whole_rows), weight))
        return y.full_tensor()


@pytest.mark.slow
def test_weights_are_cut_along_two_axes_of_a_mesh() -> None:
    for odd, evictions in run_ranks(4, compared_grids):
        assert not odd
        assert evictions >= 3


def compared_grids(rank: int) -> tuple[list[str], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    found: list[Trained] = []
    status: Any = None
    for paged in (False, True):
        model: nn.Module = Grid(mesh)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if paged:
            settings = {"device": "cpu:sim", "hbm": 17_500, "chunk_bytes": 256}
            model, optimizer = hetero.prepare(model, optimizer, **settings, mesh={"tp": 4})
        losses = []
        for step in range(5):
            source = torch.Generator().manual_seed(step)
            loss = model(torch.randn(4, 32, generator=source)).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(Trained(losses, [], weights_of(model), {}))
        status = hetero.status(model) if paged else None
    return difference(found[1], found[0]), status.evictions


@pytest.mark.slow  # transformers is imported, and loads the model three times on each rank
@pytest.mark.parametrize(
    "kind, sizes, settings",
    [
        ("llama", {"tp_size": 2}, {"hbm": 92_000}),
        ("mixtral", {"tp_size": 2, "ep_size": 2}, {"hbm": 180_000}),
        ("mixtral", {"tp_size": 2, "ep_size": 2}, {"hbm": 180_000, "activations": "recompute"}),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_models_of_transformers_are_paged_under_their_own_plans(
    kind: str, sizes: dict[str, int], settings: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    """Experts are on a mesh of their own, of the same ranks."""
    made = {"llama": tiny_llama, "mixtral": tiny_mixtral}[kind]()
    made.save_pretrained(tmp_path)
    given = {**TIGHT, "device": "cpu", **settings}
    for odd, n_parts, evictions in run_ranks(
        2, compared_pretrained, str(tmp_path), sizes, given, optimizer
    ):
        assert not odd
        assert n_parts > 18
        assert evictions >= 3


def compared_pretrained(
    rank: int, folder: str, sizes: dict[str, int], settings: dict[str, Any], rule: str
) -> tuple[list[str], int, int]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def trained(is_paged: bool) -> tuple[Trained, nn.Module]:
        plan = DistributedConfig(**sizes)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
        model = model.float().train()
        optimizer: Any = OPTIMIZERS[rule](model.parameters())
        clip: Any = partial(torch_clip, list(model.parameters()))
        if is_paged:
            model, optimizer = hetero.prepare(model, optimizer, **settings)
            clip = optimizer.clip_grad_norm_
        losses, norms = [], []
        for step in range(5):
            words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            norms.append(float(clip(0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return Trained(losses, norms, weights_of(model), {}), model

    expected, plain = trained(False)
    found, model = trained(True)
    n_parts = sum(isinstance(param, DTensor) for param in plain.parameters())
    return difference(found, expected), n_parts, hetero.status(model).evictions


# -- bad input -----------------------------------------------------------------------------------


def test_what_parts_cannot_have_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, refused, str(tmp_path))


def refused(rank: int, folder: str) -> None:
    run = TensorRun("sequence")

    def prepare(kind: type[HeteroError], match: str, **settings: Any) -> None:
        with pytest.raises(kind, match=match):
            model, plain = built(run)
            hetero.prepare(model, plain, **{**TIGHT, **settings})

    prepare(ConfigError, "are DTensors on ranks 0, 1", mesh="world")
    prepare(ConfigError, '"tp" is of 1', mesh={"dp_shard": 2})
    prepare(ConfigError, "there are 2", mesh={"tp": 4})
    prepare(ConfigError, "are DTensors on ranks 0, 1", mesh={"cp": 2})
    prepare(ConfigError, "there are 2", mesh={"cp": 2, "tp": 2})
    with mock.patch.object(tensor, "LEAST_TORCH", "99.1"):
        prepare(ConfigError, "tensor parallel models under torch")
    model, _ = built(run)
    for rule in (hetero.optim.AdamW8bit, torch.optim.Adafactor):  # of which torch fails as well
        with pytest.raises(ConfigError, match=f"{rule.__name__} may need whole tensors"):
            hetero.prepare(model, rule(model.parameters()), **TIGHT)
    with pytest.raises(ConfigError, match="no parameter of the model is a DTensor"):
        hetero.prepare(LM(), mesh={"tp": 2}, **TIGHT)

    addends = DTensor.from_local(torch.ones(3, 3), mesh_of(run), [Partial()], run_check=False)
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = nn.Parameter(addends)
    with pytest.raises(ConfigError, match="'weight' is placed as"):
        hetero.prepare(layer, **TIGHT)

    model, _ = built(TensorRun("tp"))
    other = DeviceMesh("cpu", [1, 0])
    cut = distribute_tensor(torch.ones(WORDS, WIDTH), other, [Shard(0)])
    model.embed.weight = nn.Parameter(cut)
    with pytest.raises(ConfigError, match=r"'blocks.0.up.weight' is a DTensor on ranks \[0, 1\]"):
        hetero.prepare(model, **TIGHT)

    model, plain = built(TensorRun("tp"))
    model, _ = hetero.prepare(model, plain, **{**TIGHT, "hbm": 400_000})
    mesh = model.blocks[0].up.weight.device_mesh

    def largest(grad: torch.Tensor) -> torch.Tensor:
        local = grad.to_local()  # of a DTensor
        return DTensor.from_local(local, mesh, [Partial("max")], run_check=False)

    model.blocks[0].down.bias.register_hook(largest)
    with pytest.raises(StateError, match=r"'blocks.0.down.bias' is P\(max\), which is no sum"):
        loss_of(model, TensorRun("tp"), 0).backward()

    model, plain = built(run)
    model, _ = hetero.prepare(model, plain, **TIGHT)
    with pytest.raises(ConfigError, match="no plain tensor"):
        hetero.export(built(run)[0], folder)  # which no rank has told the others of
    assert not any(Path(folder).iterdir())
    with pytest.raises(RuntimeError, match="to become the value of a DTensor"):
        model.load_state_dict(LM().state_dict())


def unlike(rank: int, what: str) -> None:
    run = TensorRun("tp")
    model, plain = built(run)
    if rank and what == "placements":
        mesh: Any = model.blocks[0].up.weight.device_mesh
        copied = model.norm.weight.detach()
        copied = DTensor.from_local(copied, mesh, [Replicate()], run_check=False)
        model.norm.weight = nn.Parameter(copied)
        plain = torch.optim.AdamW(model.parameters())
    if rank and what == "rate":
        plain.param_groups[0]["lr"] = 0.5
    more = {"activations": "recompute"} if rank and what == "settings" else {}
    hetero.prepare(model, plain, **TIGHT, **more)


@pytest.mark.parametrize(
    "what, said",
    [
        ("settings", "the setting activations="),
        ("rate", "the setting 'lr' of group 0"),
        ("placements", "parameters"),
    ],
)
def test_ranks_of_a_tensor_that_would_go_apart_are_refused(what: str, said: str) -> None:
    for each in outcomes(2, unlike, what):
        assert isinstance(each.error, DivergenceError), each.text
        assert f"differ in {said}" in str(each.error)


def test_parts_on_some_ranks_alone_need_a_mesh() -> None:
    run_ranks(4, alone_in_pairs)


def alone_in_pairs(rank: int) -> None:
    model, plain = built(TensorRun("tp", dp=2))
    with pytest.raises(ConfigError, match="on 2 of 4 ranks") as error:
        hetero.prepare(model, plain, **TIGHT)
    assert "{'dp_shard': 2, 'tp': 2}" in str(error.value.advice)
