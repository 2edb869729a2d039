"""Weights and activations that ranks divide along two or three axes: the whole model's numbers
within rounding, and, paged, the bits of the same parts unpaged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hetero
from benchmarks.tensors import Attention
from hetero.errors import ConfigError, RankLost
from hetero.parallel.tensor import parallelize
from hetero.testing.rank_faults import happen
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import (
    Trained,
    difference,
    found_in,
    tiny_llama,
    torch_clip,
    train_masters,
    whole,
)

WORDS, WIDTH, HEAD, TOKENS = 24, 16, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(WIDTH, HEAD)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        out: torch.Tensor = x + self.mlp["down"](F.gelu(self.mlp["up"](self.second(x))))
        return out


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tokens(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True)
class GridRun:
    """What a run does."""

    dims: str
    optimizer: str = "adamw"
    passes: int = 1
    clip: float | None = 0.05
    dp: int = 1
    """Ranks with the same parts, and other batches."""


SIZES = {"1d": (2,), "2d": (2, 2), "2.5d": (2, 2, 2), "3d": (2, 2, 2)}
NAMES = {"1d": ("tp",), "2d": ("x", "y"), "2.5d": ("x", "y", "d"), "3d": ("i", "j", "k")}
TIGHT = {"device": "cpu", "hbm": 30_000, "chunk_bytes": 512}
STEPS = 5


def ranks_of(run: GridRun) -> int:
    return run.dp * int(torch.tensor(SIZES[run.dims]).prod())


def model_of(dims: str, dp: int = 1) -> LM:
    torch.manual_seed(0)
    model, names = LM(), NAMES[dims]
    mesh = init_device_mesh("cpu", (dp, *SIZES[dims]), mesh_dim_names=("dp_shard", *names))
    parallelize(model, mesh[names], dims)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(number)
    return (
        torch.randint(0, WORDS, (4, TOKENS), generator=source),
        torch.randint(0, WORDS, (4, TOKENS), generator=source),
    )


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    words, then = batch(number)
    return F.cross_entropy(model(words).flatten(0, 1), then.flatten())


# -- against the whole model ---------------------------------------------------------------------


def far(rank: int, dims: str) -> float:
    """Return how far outputs and gradients are from those of the whole model."""
    torch.manual_seed(0)
    plain, model = LM(), model_of(dims)
    for number in range(2):
        for each in (plain, model):
            loss_of(each, number).backward()
    off = [model(batch(0)[0]) - plain(batch(0)[0])]
    for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert param.grad is not None, name
        assert other.grad is not None, name
        assert other.grad.placements == other.placements, name
        off.append(whole(other.grad) - param.grad)
    return max(float(each.detach().abs().max()) for each in off)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("dims", ["2d", "2.5d", "3d"])
def test_divided_layers_compute_what_whole_ones_do(dims: str) -> None:
    """Gradients are near 1, and sums are of parts, in another order: some ulps of fp32."""
    for off in run_ranks(ranks_of(GridRun(dims)), far, dims):
        assert off < 2e-6


# -- paged against unpaged -----------------------------------------------------------------------


def by_torch(run: GridRun) -> Trained:
    """Train unpaged parts with the micro-batches of all ranks that have other ones."""
    model = model_of(run.dims, run.dp)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())

    def micro(number: int) -> float:
        losses = [loss_of(model, 100 * number + dp) for dp in range(run.dp)]
        for loss in losses:
            (loss * (1 / run.dp)).backward()
        return float(losses[0].detach())

    def clip(most: float) -> torch.Tensor:
        return torch_clip(model.parameters(), most)

    return train(model, optimizer, run, micro, clip)


def by_hetero(run: GridRun, rank: int, settings: Mapping[str, Any]) -> tuple[Trained, int]:
    """Train prepared parts; returns what they came to, and evictions."""
    model = model_of(run.dims, run.dp)
    n_tensor = ranks_of(run) // run.dp
    prepared, optimizer = hetero.prepare(
        *(model, OPTIMIZERS[run.optimizer](model.parameters())),
        **{**TIGHT, **settings},
        mesh={"dp_shard": run.dp, "tp": n_tensor},
    )

    def micro(number: int) -> float:
        loss = loss_of(prepared, 100 * number + rank // n_tensor)
        loss.backward()
        return float(loss.detach())

    found = train(prepared, optimizer, run, micro, optimizer.clip_grad_norm_)
    evictions = hetero.status(prepared).evictions
    _, plain = hetero.release(prepared, optimizer)
    after = found_in(model, plain)
    after.losses, after.norms = found.losses, found.norms
    return after, evictions


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: GridRun,
    micro: Callable[[int], float],
    clip: Callable[[float], torch.Tensor],
) -> Trained:
    losses, norms = [], []
    for step in range(STEPS):
        losses += [micro(number) for number in range(step * run.passes, (step + 1) * run.passes)]
        if run.clip is not None:
            norms.append(float(clip(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    found = found_in(model, optimizer)
    found.losses, found.norms = losses, norms
    return found


def compared(rank: int, run: GridRun, settings: Mapping[str, Any]) -> tuple[list[str], int]:
    expected = by_torch(run)
    found, evictions = by_hetero(run, rank, settings)
    if run.dp > 1:  # each rank has losses of its own
        found.losses = expected.losses
    return difference(found, expected), evictions


def check(run: GridRun, **settings: Any) -> None:
    for odd, evictions in run_ranks(ranks_of(run), compared, run, settings):
        assert not odd
        assert evictions >= 3


PLACES: dict[str, dict[str, Any]] = {
    "few": {},
    "keep": {"activations": "keep", "hbm": 34_000},
    "recompute": {"activations": "recompute", "hbm": 26_000},
    "offload": {"activations": "offload", "hbm": 31_000},
}


@pytest.mark.campaign(seconds=2.5)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("passes, clip", [(1, None), (2, 0.05)])
@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_paged_parts_are_trained_to_the_bits_of_unpaged_ones(
    optimizer: str, passes: int, clip: float | None, settings: dict[str, Any]
) -> None:
    check(GridRun("2d", optimizer, passes, clip), **settings)


@pytest.mark.slow  # eight processes
@pytest.mark.parametrize(
    "dims, optimizer, settings",
    [
        ("2.5d", "sgd", {"hbm": 26_000}),
        ("2.5d", "adamw", {"hbm": 26_000, "activations": "recompute"}),
        ("3d", "sgd", {"hbm": 22_000, "activations": "offload"}),
        ("3d", "adamw", {"hbm": 22_000}),
    ],
)
def test_so_are_those_of_three_axes(dims: str, optimizer: str, settings: dict[str, Any]) -> None:
    check(GridRun(dims, optimizer, passes=2), **settings)


@pytest.mark.slow  # eight processes
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_shares_lie_on_top_of_a_square(optimizer: str) -> None:
    """Two squares of ranks are one, with two micro-batches."""
    check(GridRun("2d", optimizer, dp=2), hbm=34_000)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_masters_of_a_square_are_those_of_a_plain_loop(passes: int) -> None:
    for odd, evictions in run_ranks(4, compared_masters, GridRun("2d", "sgd", passes)):
        assert not odd
        assert evictions >= 3


def compared_masters(rank: int, run: GridRun) -> tuple[list[str], int]:
    model = model_of(run.dims)

    def backward(number: int) -> torch.Tensor:
        loss = loss_of(model, 100 * number)
        loss.backward()
        return loss

    masters = model_of(run.dims)
    expected = train_masters(masters, model, backward, STEPS, run.passes, run.clip)
    found, evictions = by_hetero(run, rank, {"precision": "bf16", "hbm": 17_200})
    found.states = {}
    return difference(found, expected), evictions


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["int8", "nf4"])
def test_frozen_parts_of_a_square_lie_at_home_in_code(frozen: str) -> None:
    """As a plain model trains whose frozen weights are what the codes say."""
    for odd, evictions in run_ranks(4, compared_codes, GridRun("2d"), frozen):
        assert not odd
        assert evictions >= 3


def compared_codes(rank: int, run: GridRun, frozen: str) -> tuple[list[str], int]:
    model, twin = model_of(run.dims), model_of(run.dims)
    plain, its_own = (adamw_of_trained(each) for each in (model, twin))
    settings = {**TIGHT, "hbm": 36_000, "frozen": frozen}
    prepared, optimizer = hetero.prepare(model, plain, **settings)
    twin.load_state_dict(prepared.state_dict())

    def micro(each: nn.Module) -> Callable[[int], float]:
        def run_one(number: int) -> float:
            loss = loss_of(each, number)
            loss.backward()
            return float(loss.detach())

        return run_one

    found = train(prepared, optimizer, run, micro(prepared), optimizer.clip_grad_norm_)
    evictions = hetero.status(prepared).evictions
    trained = [param for param in twin.parameters() if param.requires_grad]
    expected = train(twin, its_own, run, micro(twin), lambda most: torch_clip(trained, most))
    return difference(found, expected), evictions


def adamw_of_trained(model: LM) -> torch.optim.Optimizer:
    for number in (1, 2):
        model.blocks[number].requires_grad_(False)
    return OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_of_a_square_loads_on_a_line_and_back(tmp_path: Path) -> None:
    for odd in run_ranks(4, moved, str(tmp_path)):
        assert not odd


def moved(rank: int, folder: str) -> list[str]:
    """Save weights and states of a square, load them on a line, and the line's on a square."""
    found: list[Trained] = []
    for number, dims in enumerate(("2d", "1d", "2d")):
        torch.manual_seed(number)
        model, sizes = LM(), (2, 2) if dims == "2d" else (4,)
        parallelize(model, init_device_mesh("cpu", sizes), dims)
        plain = OPTIMIZERS["adamw"](model.parameters())
        prepared, optimizer = hetero.prepare(model, plain, **{**TIGHT, "hbm": 60_000})
        if number:
            hetero.load_checkpoint(f"{folder}/{number - 1}", prepared, optimizer)
        else:
            for step in range(2):
                loss_of(prepared, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        hetero.save_checkpoint(f"{folder}/{number}", prepared, optimizer)
        found.append(found_in(prepared, optimizer))
    return [odd for each in found[1:] for odd in difference(each, found[0])]


# -- bad input -----------------------------------------------------------------------------------


def test_what_a_mesh_does_not_divide_is_refused_on_all_ranks() -> None:
    run_ranks(4, refused)


def refused(rank: int) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    flat = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("x", "y", "d"))

    def refuse(said: str, dims: str = "2d", mesh: Any = square, **changed: nn.Module) -> None:
        model = LM()
        for name, module in changed.items():
            path, _, last = name.replace("__", ".").rpartition(".")
            setattr(model.get_submodule(path), last, module)
        with pytest.raises(ConfigError, match=said):
            parallelize(model, mesh, dims)
        assert not any(isinstance(param, DTensor) for param in model.parameters())

    # 1. meshes
    refuse("dims='4d'", "4d")
    refuse(r"dims='2d' on a mesh of 4 ranks: it takes q x q", mesh=line)
    refuse(r"dims='1d' on a mesh of 2 x 2 ranks: it takes one axis", "1d")
    refuse(r"dims='3d' on a mesh of 2 x 2 x 1 ranks: it takes q x q x q", "3d", flat)
    refuse(r"dims='2.5d' on a mesh of 2 x 2 ranks", "2.5d")

    # 2. sizes
    refuse("'tokens' has 7 words, which 2 ranks", tokens=nn.Embedding(7, WIDTH))
    refuse("'head' has 25 words, which 2 ranks", head=nn.Linear(WIDTH, 25))
    refuse("'norm' has 15 features, which 2 ranks", norm=nn.LayerNorm(15))
    name = "blocks__0__attention__"
    refuse(r"q_proj' has 3 heads of 4", **{f"{name}q_proj": nn.Linear(WIDTH, 12)})
    refuse(r"down' has 31 inputs", blocks__1__mlp__down=nn.Linear(31, WIDTH))

    # 3. what is not known to work on parts
    refuse("drops features", blocks__0__first=nn.Sequential(nn.Dropout(0.1)))
    refuse("whose name says nothing", blocks__2__first=nn.Linear(WIDTH, WIDTH))
    refuse("whose name says nothing", **{f"{name}norm": nn.LayerNorm(4)})
    refuse("embedding of words' is not found", tokens=nn.Identity())
    refuse("max_norm", tokens=nn.Embedding(WORDS, WIDTH, max_norm=1.0))
    tied = LM()
    tied.head.weight = tied.tokens.weight
    with pytest.raises(ConfigError, match=r"'tokens.weight' is tied"):
        parallelize(tied, square, "2d")

    # 4. a model that is divided already, and a batch that is not divisible
    model = LM()
    parallelize(model, square, "2d")
    for mesh, dims in ((square, "2d"), (line, "1d")):
        with pytest.raises(ConfigError, match=r"is a DTensor already, on ranks \[0, 1, 2, 3\]"):
            parallelize(model, mesh, dims)
    with pytest.raises(ConfigError, match="a batch of 3 samples, which 2 parts"):
        model(batch(0)[0][:3])


# -- what users see ------------------------------------------------------------------------------


def shown(rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = LM()
    table = str(parallelize(model, init_device_mesh("cpu", (2, 2)), "2d"))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model).state_dict()))
    words = batch(0)[0]
    again = copy.deepcopy(model)
    same = torch.equal(again(words), model(words))
    return table, same and twin.keys() == model.state_dict().keys()


def test_a_table_says_what_became_of_each_layer_on_a_square() -> None:
    for table, same in run_ranks(4, shown):
        rows = [" ".join(line.split()) for line in table.splitlines()]
        assert "on each of 2 x 2 ranks" in rows[0]
        assert "tokens.weight x 1 S(0), S(1) 24 x 16 12 x 8" in rows
        assert "blocks.*.mlp.up.weight x 3 S(1), S(0) 32 x 16 16 x 8" in rows
        assert "blocks.*.mlp.up.bias x 3 R, S(0) 32 16" in rows
        assert "blocks.*.first.weight x 3 R, S(0) 16 8" in rows
        assert same


def llama(rank: int) -> tuple[list[str], float, int]:
    words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    found: list[Trained] = []
    off, evictions = 0.0, 0
    for paged in (False, True):
        model: Any = tiny_llama().train()
        with torch.no_grad():
            expected = model(input_ids=words).logits
        parallelize(model, init_device_mesh("cpu", (2, 2)), "2d")
        with torch.no_grad():
            off = float((model(input_ids=words).logits - expected).abs().max())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if paged:
            settings = {"device": "cpu", "hbm": 80_000, "chunk_bytes": 1024}
            model, optimizer = hetero.prepare(model, optimizer, **settings)
        for _ in range(STEPS):
            model(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(found_in(model, optimizer))
        evictions = hetero.status(model).evictions if paged else 0
    return difference(found[1], found[0]), off, evictions


@pytest.mark.slow  # transformers is imported
def test_a_llama_is_divided_over_a_square() -> None:
    for odd, off, evictions in run_ranks(4, llama):
        assert not odd
        assert off < 1e-5
        assert evictions >= 3


# -- a rank that is lost ---------------------------------------------------------------------------


def loses(rank: int, how: str) -> None:
    model = model_of("2d")
    plain = OPTIMIZERS["sgd"](model.parameters())
    settings = {**TIGHT, "timeout_seconds": 4.0, "mesh": {"tp": 4}}
    model, optimizer = hetero.prepare(model, plain, **settings)
    for step in range(2):
        if step == 1 and rank == 1:
            model.blocks[1].register_forward_hook(lambda *_: happen(how))
        loss_of(model, step).backward()
        optimizer.step()


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("how", ["error", "stopped"])
def test_a_rank_that_is_lost_between_the_collectives_of_a_grid_ends_all(how: str) -> None:
    for rank, end in enumerate(outcomes(4, loses, how)):
        assert isinstance(end, Died)
        if rank != 1:
            assert isinstance(end.error, RankLost), end.text
            assert how == "stopped" or "rank 1 left (Planted: planted)" in str(end.error)
