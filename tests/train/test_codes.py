"""A model whose frozen matrices are at home in code: who reads, writes, saves and refuses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import hetero
from hetero.api import engine_of
from hetero.checkpoint.reader import CheckpointReader
from hetero.device import SimDevice
from hetero.errors import CheckpointMismatch, ConfigError, StateError
from hetero.events import What
from hetero.io import IO
from hetero.memory.codec import CODECS
from hetero.types import Kind
from tests.equivalence.harness import same

SIM: dict[str, Any] = {"device": "cpu:sim", "hbm": 50_000, "chunk_bytes": 512}
CODES = ["int8", "nf4"]


class Block(nn.Module):
    """A frozen matrix of odd sizes, a frozen norm, and an adapter that trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.base = nn.Linear(width, width + 3).requires_grad_(False)
        self.small = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.down = nn.Linear(width + 3, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(self.norm(x))
        return x + h[..., : x.shape[-1]] * self.small.mean() + self.up(self.down(h))


def build(n: int = 5, width: int = 37) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(n)]
    return nn.Sequential(nn.Linear(9, width).requires_grad_(False), *blocks, nn.Linear(width, 2))


def through(codec: str, value: torch.Tensor) -> torch.Tensor:
    """Return a value as it comes back from a home."""
    found = torch.empty_like(value).view(-1)
    CODECS[codec].decode(CODECS[codec].encode(value.detach().reshape(-1), value.dtype), found)
    return found.view(value.shape)


def rounded(model: nn.Module, codec: str) -> nn.Module:
    for param in model.parameters():
        if not param.requires_grad and param.dim() >= 2:
            param.data = through(codec, param)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)  # frozen ones are listed, too


def prepared(codec: str = "nf4", model: nn.Module | None = None, **options: Any) -> Any:
    model = build() if model is None else model
    options = {**SIM, "activations": "keep", **options}
    return hetero.prepare(model, adamw(model), frozen=codec, **options)


def train(
    model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0, place: str = "cpu"
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).to(place)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


# -- what is coded -------------------------------------------------------------------------------


def test_matrices_that_are_frozen_are_coded_and_nothing_else_is() -> None:
    model, _ = prepared()
    buckets = engine_of(model).setup.blueprint.layout.buckets
    coded = {s.spec.name for b in buckets if not b.codec.exact for s in b.segments}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad and p.dim() >= 2}
    assert coded == frozen and "1.small" in coded
    exact = dict(build().state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value.clone(), exact[name]) == (name not in coded), name


def test_modules_that_are_named_are_kept_exactly() -> None:
    model, _ = prepared(keep_exact=["0", "*.base"])
    buckets = engine_of(model).setup.blueprint.layout.buckets
    coded = {s.spec.name for b in buckets if not b.codec.exact for s in b.segments}
    assert coded == {f"{i}.small" for i in range(1, 6)}
    with pytest.raises(ConfigError, match="keep_exact: 'head' matches no module"):
        prepared(keep_exact=["head"])


def test_a_tied_matrix_has_one_code() -> None:
    def tied() -> nn.Module:
        model = build()
        model[2].base.weight = model[1].base.weight
        return model

    plain = rounded(tied(), "nf4")
    optimizer = adamw(plain)
    model, ours = prepared(model=tied())
    assert train(plain, optimizer) == train(model, ours)
    same(values(plain), values(model), "weights")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_working_precision_codes_become_working_weights(precision: str) -> None:
    """They are coded of the fp32 weights; norms are rounded as ever."""
    model, _ = prepared("int8", precision=precision)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    state, exact = model.state_dict(), build().state_dict()
    found = torch.empty(exact["1.base.weight"].numel(), dtype=dtype)
    items = CODECS["int8"].encode(exact["1.base.weight"].view(-1), dtype)
    CODECS["int8"].decode(items, found)
    assert torch.equal(state["1.base.weight"].clone().view(-1), found)
    assert torch.equal(state["1.norm.weight"].clone(), exact["1.norm.weight"].to(dtype))


# -- bit for bit ---------------------------------------------------------------------------------


def assert_trains_as_rounded(
    codec: str, make: Callable[[], nn.Module], steps: int, **options: Any
) -> int:
    """Train beside plain torch over rounded weights; returns the buckets that came and went."""
    plain = rounded(make(), codec)
    model, ours = prepared(codec, make(), **options)
    theirs, gone = adamw(plain), 0
    for step in range(steps):
        assert train(plain, theirs, 1, step) == train(model, ours, 1, step)
        gone += hetero.status(model).evictions
    same(values(plain), values(model), "weights")
    model, _ = hetero.release(model, ours)
    same(values(plain), values(model), "released weights")
    return gone


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("seed", range(3))
def test_copies_that_are_late_on_purpose_change_nothing(codec: str, seed: int) -> None:
    """With every reuse of bytes that a copy still reads or writes an error."""
    device = SimDevice(seed=seed, checked=True, lazy=seed / 2)
    assert assert_trains_as_rounded(codec, build, 4, device=device) >= 3


@settings(max_examples=6, deadline=None)
@given(
    codec=st.sampled_from(CODES),
    width=st.integers(3, 60),
    n=st.integers(1, 5),
    chunk=st.sampled_from([512, 1024, 4096]),
    share=st.floats(0.0, 1.5),
)
def test_any_sizes_under_any_budget(
    codec: str, width: int, n: int, chunk: int, share: float
) -> None:
    check_any(codec, width, n, chunk, share)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    codec=st.sampled_from(CODES),
    width=st.integers(3, 150),
    n=st.integers(1, 7),
    chunk=st.sampled_from([512, 1024, 2560, 4096, 16384]),
    share=st.floats(0.0, 1.5),
)
def test_many_sizes_under_any_budget(
    codec: str, width: int, n: int, chunk: int, share: float
) -> None:
    check_any(codec, width, n, chunk, share)


def check_any(codec: str, width: int, n: int, chunk: int, share: float) -> None:
    whole = sum(p.nbytes for p in build(n, width).parameters())
    least = 3 * 4 * (width + 32) * (width + 3) + 8 * chunk + 20_000
    hbm = int(least + share * whole)
    assert_trains_as_rounded(codec, lambda: build(n, width), 3, hbm=hbm, chunk_bytes=chunk)


# -- who reads and writes ------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODES)
def test_whoever_looks_sees_what_computes_and_changes_nothing(codec: str) -> None:
    model, optimizer = prepared(codec)
    expected = values(rounded(build(), codec))
    same(expected, values(model), "state dict")
    weight = model[2].base.weight
    with hetero.gathered(model[2]):
        assert torch.equal(weight, expected[list(model.state_dict()).index("2.base.weight")])
    held = weight.data  # an alias, through which somebody might write
    assert torch.equal(held, weight.detach())
    train(model, optimizer, 1)
    del held
    train(model, optimizer, 1)
    names = [n for n in model.state_dict() if "base" in n or "small" in n]
    after = model.state_dict()
    for name, value in zip(model.state_dict(), expected, strict=True):
        assert name not in names or torch.equal(after[name].clone(), value)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("hbm", [50_000, 400_000])
@pytest.mark.parametrize(
    "how", ["gathered", "in place", "data", "copied", "alias", "shown", "assigned"]
)
def test_a_write_is_rounded_the_same_whether_or_not_the_frames_were_given_up(
    how: str, hbm: int, codec: str
) -> None:
    """Law: placement never changes arithmetic; what computes next is what a home can hold."""
    model, optimizer = prepared(codec, hbm=hbm)
    plain = rounded(build(), codec)
    theirs = adamw(plain)
    assert train(plain, theirs, 1) == train(model, optimizer, 1)
    new = torch.randn(40, 37, generator=torch.Generator().manual_seed(5))
    plain[1].base.weight.data = through(codec, new)
    weight = model[1].base.weight
    with torch.no_grad():
        if how == "gathered":
            with hetero.gathered(weight, write=True):
                weight.copy_(new)
        elif how == "in place":
            weight.copy_(new)
        elif how == "data":
            weight.data.copy_(new)
        elif how == "copied":
            model.load_state_dict({**model.state_dict(), "1.base.weight": new})
        elif how == "alias":
            alias = weight.data
            alias.copy_(new)
            del alias
        elif how == "shown":
            model.state_dict()["1.base.weight"].view(-1)[:].copy_(new.view(-1))
        else:
            weight.data = new.clone()
    assert train(plain, theirs, 2, first=1) == train(model, optimizer, 2, first=1)
    same(values(plain), values(model), "weights")


@pytest.mark.parametrize("codec", CODES)
def test_a_write_through_a_view_of_a_code_leaves_the_other_blocks_their_codes(codec: str) -> None:
    model, optimizer = prepared(codec)
    train(model, optimizer, 1)
    shown = model.state_dict()["1.base.weight"]
    before = shown.clone()
    row = shown[0]
    row[:3] = before[0, :3] * 0.5
    after = model.state_dict()["1.base.weight"].clone()
    assert torch.equal(after.view(-1)[37 * 4 :], before.view(-1)[37 * 4 :])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(row, after[0])  # what the code stands for
    row[0] = float("nan")
    with pytest.raises(StateError, match=r"1\.base\.weight"):
        train(model, optimizer, 1)
    train(model, optimizer, 1, first=1)
    assert torch.equal(model.state_dict()["1.base.weight"].clone(), after)


def test_a_write_inside_a_read_only_block_is_undone() -> None:
    model, _ = prepared()
    before = values(model)
    refused = pytest.raises(StateError, match="the write is undone")
    with refused, torch.no_grad(), hetero.gathered(model[1]):
        model[1].base.weight.mul_(3)
    same(before, values(model), "weights")


def test_a_write_of_nan_is_undone_and_named() -> None:
    model, optimizer = prepared()
    before = values(model)
    weight = model[1].base.weight
    refused = pytest.raises(StateError, match=r"1\.base\.weight.*NaN")
    with refused, torch.no_grad(), hetero.gathered(weight, write=True):
        weight[3, 2] = torch.inf
    same(before, values(model), "weights")
    with pytest.raises(RuntimeError, match=r"1\.base\.weight.*NaN"):  # torch wraps what it hears
        bad = torch.full((40, 37), torch.nan)
        model.load_state_dict({"1.base.weight": bad}, strict=False)
    train(model, optimizer, 1)


def test_what_is_released_is_what_computed() -> None:
    model, optimizer = prepared("int8")
    train(model, optimizer, 2)
    before = values(model)
    model, plain = hetero.release(model, optimizer)
    same(before, values(model), "weights")
    assert type(model[1].base.weight) is nn.Parameter
    assert type(plain) is torch.optim.AdamW


# -- checkpoints and files -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODES)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_of_codes(codec: str, tmp_path: Path) -> None:
    model, optimizer = prepared(codec)
    train(model, optimizer, 2)
    with torch.no_grad(), hetero.gathered(model[1].base.weight, write=True):
        model[1].base.weight.mul_(1.7)
    path = hetero.save_checkpoint(tmp_path, model, optimizer).wait()
    with CheckpointReader.open(path, None, IO()) as reader:
        (entry,) = [e for e in reader.entries if e.name == "1.base.weight"]
    assert (entry.key, entry.dtype) == (codec, "uint8")
    assert entry.n_bytes == CODECS[codec].n_bytes(40 * 37, torch.float32)
    expected = train(model, optimizer, 2, first=2)

    torch.manual_seed(9)
    other = build()
    for param in other.parameters():
        nn.init.normal_(param)
    again, ours = prepared(codec, other, hbm=400_000, chunk_bytes=1024, device="cpu")
    hetero.load_checkpoint(tmp_path, again, ours)
    assert train(again, ours, 2, first=2) == expected
    same(values(model), values(again), "weights")


def test_a_checkpoint_of_another_treatment_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    model, optimizer = prepared("nf4")
    hetero.save_checkpoint(tmp_path, model, optimizer)
    for codec in ("keep", "int8"):
        other, ours = prepared(codec)
        before = values(other)
        with pytest.raises(CheckpointMismatch, match=f"frozen nf4; this model has {codec}"):
            hetero.load_checkpoint(tmp_path, other, ours)
        same(before, values(other), "weights")
    kept, ours = prepared("nf4", keep_exact=["1"])
    with pytest.raises(CheckpointMismatch, match=r"1\.base\.weight"):
        hetero.load_checkpoint(tmp_path, kept, ours)


def test_weights_are_coded_as_they_stream_in(tmp_path: Path) -> None:
    path = str(tmp_path / "w.safetensors")
    save_file(build().state_dict(), path)
    with hetero.empty_init():
        empty = build()
    model, optimizer = prepared("nf4", empty, weights=path)
    direct, ours = prepared("nf4")
    same(values(direct), values(model), "weights")
    assert train(direct, ours) == train(model, optimizer)


def test_weights_that_stream_in_and_are_no_numbers_leave_an_empty_model(tmp_path: Path) -> None:
    state = build().state_dict()
    state["3.base.weight"][1, 1] = torch.nan
    save_file(state, tmp_path / "w.safetensors")
    with hetero.empty_init():
        empty = build()
    with pytest.raises(ConfigError, match=r"3\.base\.weight.*NaN"):
        prepared("nf4", empty, weights=str(tmp_path / "w.safetensors"))
    assert all(param.is_meta for param in empty.parameters())


def test_codes_are_decoded_under_every_mode_of_torch() -> None:
    model, optimizer = prepared()
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = rounded(build(), "nf4")(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    train(model, optimizer, 2)
    assert hetero.status(model).evictions >= 3


def test_an_export_holds_what_computes(tmp_path: Path) -> None:
    model, _ = prepared("nf4")
    hetero.export(model, tmp_path / "ours")
    hetero.export(rounded(build(), "nf4"), tmp_path / "theirs")
    ours, theirs = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("ours", "theirs"))
    assert ours == theirs


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name_and_left_alone(value: float) -> None:
    model = build()
    with torch.no_grad():
        model[4].base.weight[39, 36] = value
    before = values(model)
    with pytest.raises(ConfigError, match=r"4\.base\.weight.*frozen='nf4'"):
        prepared("nf4", model)
    same(before, values(model), "weights")
    prepared("nf4", model, keep_exact=["4.base"])


def test_a_model_without_frozen_matrices_is_told_to_freeze_some() -> None:
    model = build().requires_grad_(True)
    with pytest.raises(ConfigError, match="no matrix of the model is frozen"):
        prepared("nf4", model)


def test_an_unknown_treatment_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match="frozen='fp4' is unknown"):
        prepared("fp4")


def test_what_was_coded_cannot_train() -> None:
    model, _ = prepared()
    model[1].base.weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"1\.base\.weight.*at home as nf4"):
        model(torch.randn(2, 9)).sum().backward()


@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_what_bitsandbytes_has_quantised_is_refused_with_advice(name: str) -> None:
    kind = type(name, (nn.Parameter,), {})
    model = build()
    weight = torch.zeros(40, 37, dtype=torch.uint8)
    model[1].base.weight = kind(weight, requires_grad=False)
    with pytest.raises(ConfigError, match="bitsandbytes") as caught:
        prepared("nf4", model)
    assert "frozen='nf4'" in caught.value.advice


def test_a_table_with_a_quant_state_is_one_of_bitsandbytes() -> None:
    model = build()
    weight = nn.Parameter(torch.zeros(40, 37, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = object()
    model[1].base.weight = weight
    with pytest.raises(ConfigError, match="bitsandbytes"):
        prepared("keep", model)


# -- budgets -------------------------------------------------------------------------------------


def test_the_ledger_holds_codes_at_home_whole_weights_in_frames_and_the_workspace() -> None:
    model, optimizer = prepared(hbm=400_000)
    train(model, optimizer)
    engine, status = engine_of(model), hetero.status(model)
    buckets = engine.setup.blueprint.layout.buckets
    assert status.tiers["HOST"]["param"] == sum(b.home_bytes for b in buckets)
    here = engine.residence.manager.replicas
    assert status.tiers["HBM"]["param"] == sum(b.n_bytes for b in buckets if b.id in here)
    assert (
        status.tiers["HBM"]["buffer"] == engine.setup.blueprint.workspace_bytes(is_cuda=False) > 0
    )
    assert status.mode == "paged"


@pytest.mark.parametrize("codec", CODES)
def test_a_fetch_moves_the_bytes_of_codes_and_no_more(codec: str) -> None:
    model, optimizer = prepared(codec)
    train(model, optimizer, 2)
    engine = engine_of(model)
    moves = [e for e in engine.setup.log.drain() if e.what == What.MOVE.value and e.lane == "h2d"]
    found = {(e.bucket, e.n_bytes) for e in moves if e.category == Kind.PARAM.value}
    coded = [b for b in engine.setup.blueprint.layout.buckets if not b.codec.exact]
    whole = {(b.id, b.codec.n_bytes(b.segments[-1].end, b.dtype)) for b in coded}
    ids = {b.id for b in coded}
    assert {(bucket, n_bytes) for bucket, n_bytes in found if bucket in ids} == whole
    assert hetero.status(model).evictions >= 3
