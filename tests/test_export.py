"""An export is what other loaders read; a directory holds a whole one or none, come what may."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from benchmarks.memory import memory_of_this_process, reset_peak
from hetero import tensorfile
from hetero.errors import CheckpointError, ConfigError, DiskFull, HeteroError, StorageError
from hetero.exchange import NEW, OLD
from hetero.export import PIECE, write
from hetero.io import IO
from hetero.tensorfile import DTYPES, INDEX, ITEM_BYTES, SINGLE
from hetero.testing.faults import FaultPlan
from hetero.weights import Weights, dtype_named
from tests.faults.saves import Quick

safetensors = pytest.importorskip("safetensors.torch")
State = dict[str, torch.Tensor]
EVERYTHING = 10**9


class Net(nn.Module):
    """Tied weights, an odd layout, a scalar, an empty tensor and a buffer."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width).bfloat16())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, width).t())
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(seed))


def state_of(model: nn.Module) -> State:
    """Return what an export of `Net` should hold."""
    return {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}


def load(directory: Path) -> State | None:
    """Return what a loader of the format reads, None where it finds nothing to load.

    A file that an index names and that is not there raises.
    """
    if (directory / SINGLE).exists():
        return dict(safetensors.load_file(directory / SINGLE))
    if not (directory / INDEX).exists():
        return None
    where = json.loads((directory / INDEX).read_text())["weight_map"]
    files = {name: safetensors.load_file(directory / name) for name in set(where.values())}
    return {name: files[file][name] for name, file in where.items()}


def equal(left: State | None, right: State) -> bool:
    return left is not None and left.keys() == right.keys() and all(map(same, *both(left, right)))


def both(left: State, right: State) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [left[name] for name in right], list(right.values())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# -- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["5GB", 700, 1])
def test_a_plain_model_is_read_by_the_library_bit_for_bit(tmp_path: Path, limit: Any) -> None:
    model = Net(0)

    assert hetero.export(model, tmp_path, max_shard_bytes=limit) == tmp_path
    assert equal(load(tmp_path), state_of(model))


@pytest.mark.parametrize("hbm", [None, 2**15])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prepared_model_is_exported_with_its_current_values(
    tmp_path: Path, hbm: int | None, precision: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    model[7].weight = model[0].weight
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"hbm": hbm, "precision": precision, "chunk_bytes": 1024}
    _, optimizer = hetero.prepare(model, optimizer, device="cpu:sim", **settings)
    x = torch.ones(2, 32, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    hetero.export(model, tmp_path / "before", max_shard_bytes=9000)
    for _ in range(2):
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hetero.export(model, tmp_path / "after", max_shard_bytes=9000)

    assert hetero.status(model).mode == ("resident" if hbm is None else "paged")
    expected = {n: t.clone() for n, t in model.state_dict().items() if n != "7.weight"}
    assert equal(load(tmp_path / "after"), expected)
    assert not equal(load(tmp_path / "before"), expected)
    hetero.release(model, optimizer)


def test_files_and_index_are_named_as_hugging_face_names_them(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    hetero.export(model, tmp_path, max_shard_bytes=128)
    index = json.loads((tmp_path / INDEX).read_text())

    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path) == [*files, INDEX]
    assert index["metadata"]["total_size"] == 5 * 64
    assert index["weight_map"] == {f"{i}.weight": files[i // 2] for i in range(5)}


def test_a_model_that_fits_one_file_has_no_index(tmp_path: Path) -> None:
    hetero.export(nn.Linear(3, 3), tmp_path)

    assert names(tmp_path) == [SINGLE]
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    model = nn.ParameterDict({k: torch.randn(n) for k, n in (("a", 2), ("b", 50), ("c", 2))})
    hetero.export(model, tmp_path, max_shard_bytes=40)

    where = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(where.values())) == 3


def test_headers_are_padded_and_every_tensor_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    model = nn.Module()
    for i, dtype in enumerate(map(dtype_named, DTYPES.values())):
        model.register_buffer(
            f"b{i}", torch.zeros(3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        )
    hetero.export(model, tmp_path)

    data = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % ITEM_BYTES[DTYPES[entry["dtype"]]] == 0, name


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_of_the_format_is_written(tmp_path: Path, code: str) -> None:
    dtype = dtype_named(DTYPES[code])
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    model = nn.Module()
    model.register_buffer("b", raw.view(dtype).reshape(2, 3).t())
    hetero.export(model, tmp_path)

    assert equal(load(tmp_path), {"b": model.b})


BIG = PIECE // 4 + 1000  # elements of fp32: more than one piece
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(BIG),
    "transposed": lambda: torch.randn(BIG // 1000, 1000).t(),
    "rows above a piece": lambda: torch.randn(BIG, 2).t(),
    "one row": lambda: torch.randn(2 * BIG)[::2][None],
    "channels last": lambda: torch.randn(64, 65, 32, 33).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(BIG // 1000, 1).expand(-1, 1000),
    "offset": lambda: torch.randn(BIG + 5)[5:],
    "negated": lambda: torch.imag(torch.randn(100, dtype=torch.complex64).conj()),
    "conjugated": lambda: torch.randn(100, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_written_in_row_major_order(tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.register_buffer("b", LAYOUTS[layout]())
    hetero.export(model, tmp_path)

    assert equal(load(tmp_path), {"b": model.b})


def test_weights_tied_by_storage_are_written_once_and_buffers_always(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(3))
    model.b = nn.Parameter(model.a.detach())
    model.part = nn.Parameter(model.a.detach()[:2])
    shared = torch.randn(2)
    model.register_buffer("c", shared)
    model.register_buffer("d", shared)
    hetero.export(model, tmp_path)

    assert equal(load(tmp_path), {"a": model.a, "part": model.part, "c": shared, "d": shared})


class Lazy(torch.Tensor):
    """A tensor without bytes until something computes with it; it counts how often that is."""

    value: torch.Tensor
    fetched: list[int]

    @staticmethod
    def __new__(cls, value: torch.Tensor, fetched: list[int]) -> Lazy:
        self = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        self.value, self.fetched = value, fetched
        return self

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Lazy(args[0].value, args[0].fetched)
        args[0].fetched.append(1)
        return func(args[0].value.clone(), *args[1:], **(kwargs or {}))


class OnDisk(nn.Module):
    """A module whose state dict gives tensors that are fetched when they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self.w = nn.Parameter(torch.randn(4, 3).t())
        self.v = nn.Parameter(torch.randn(5))
        self.w2 = self.w

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {name: Lazy(tensor, self.fetched) for name, tensor in found.items()}


def test_tensors_that_are_made_when_used_are_made_once_and_one_by_one(tmp_path: Path) -> None:
    model = OnDisk()
    hetero.export(model, tmp_path, max_shard_bytes=1)

    assert equal(load(tmp_path), {"w": model.w, "v": model.v})
    assert len(model.fetched) == 2


def test_exporting_holds_a_piece_of_memory_and_not_a_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))  # 64 MiB each
    model[1].weight = nn.Parameter(model[1].weight.detach().t())
    hetero.export(nn.Linear(2, 2), tmp_path)  # imports and heaps are there
    reset_peak()
    before = memory_of_this_process("VmRSS")
    hetero.export(model, tmp_path)

    assert memory_of_this_process("VmHWM") - before < 4 * PIECE


# -- what is refused -----------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}


def with_buffer(tensor: torch.Tensor, name: str = "b") -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer(name, tensor)
    return model


class Odd(torch.Tensor):
    pass


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.Sequential(Extra(2, 2)), "0._extra_state.*dict"),
    (lambda: with_buffer(torch.eye(2).to_sparse()), "'b'.*not a dense"),
    (lambda: with_buffer(torch.zeros(2, dtype=torch.complex128)), "'b'.*complex128"),
    (lambda: with_buffer(torch.zeros(2), "__metadata__"), "__metadata__.*format"),
    (lambda: with_buffer(torch.zeros(2).as_subclass(Odd)), "'b'.*Odd"),
    (lambda: nn.Linear(2, 2, device="meta"), "'weight'.*meta"),
    (lambda: [nn.Linear(2, 2)], "model is a list"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[w for _, w in REFUSED])
def test_what_the_format_cannot_hold_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}") as caught:
        hetero.export(make(), tmp_path / "new")
    assert caught.value.advice and names(tmp_path) == []


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        hetero.export(nn.Linear(2, 2), tmp_path, max_shard_bytes="much")


# -- configs and transformers --------------------------------------------------------------------


class Config:
    """As a user may write one."""

    def to_json_file(self, path: str) -> None:
        Path(path).write_text('{"width": 3}')


class Directory:
    def save_pretrained(self, directory: str) -> None:
        Path(directory, "generation_config.json").write_text("{}")
        Path(directory, "configuration_mine.py").write_text("x = 1")


def test_configs_that_can_write_themselves_come_along(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    model.config, model.generation_config = Config(), Directory()
    hetero.export(model, tmp_path)

    assert (tmp_path / "config.json").read_text() == '{"width": 3}'
    others = ["config.json", "configuration_mine.py", "generation_config.json"]
    assert names(tmp_path) == sorted([*others, SINGLE])


def test_a_config_that_is_none_is_left_out_and_one_that_fails_is_named(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    model.config = {"width": 3}
    hetero.export(model, tmp_path / "a")
    assert names(tmp_path / "a") == [SINGLE]

    model.config = Config()
    model.config.to_json_file = lambda path: int("x")
    with pytest.raises(ConfigError, match=r"config\.json cannot be saved"):
        hetero.export(model, tmp_path / "b")
    assert names(tmp_path) == ["a"]


def llama(transformers: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("limit", ["5GB", 8000])
def test_transformers_loads_an_export_bit_for_bit(tmp_path: Path, limit: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = llama(transformers).bfloat16()
    hetero.prepare(model, device="cpu:sim", hbm=2**17, chunk_bytes=1024)
    hetero.export(model, tmp_path, max_shard_bytes=limit)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert (tmp_path / "generation_config.json").exists()
    assert not any(report.values())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    hetero.release(model)


def test_an_export_has_the_tensors_of_save_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = llama(transformers)
    hetero.export(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")

    theirs = load(tmp_path / "theirs")
    assert theirs is not None and equal(load(tmp_path / "ours"), theirs)
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours = json.loads((tmp_path / "ours" / name).read_text())
        assert ours == json.loads((tmp_path / "theirs" / name).read_text())


def test_an_export_is_read_back_by_hetero_itself(tmp_path: Path) -> None:
    model = Net(0)
    hetero.export(model, tmp_path, max_shard_bytes=300)
    expected = state_of(model)
    with Weights(tmp_path) as weights:
        assert sorted(weights.names()) == sorted(expected)
        for name, tensor in expected.items():
            pieces = [piece.clone() for _, piece in weights.pieces(name, 7)]
            flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=tensor.dtype)
            assert same(flat.reshape(weights.shape(name)), tensor)


# -- directories ---------------------------------------------------------------------------------

LIMITS = {"one": EVERYTHING, "two": 800, "three": 500}
PAIRS = [(old, new) for old in ("none", *LIMITS) for new in LIMITS]


def parts_of(model: nn.Module, limit: int, tmp_path: Path) -> int:
    hetero.export(model, tmp_path, max_shard_bytes=limit)
    return len([n for n in names(tmp_path) if n.endswith(".safetensors")])


def test_the_limits_of_these_tests_make_as_many_files_as_they_say(tmp_path: Path) -> None:
    assert parts_of(Net(0), LIMITS["one"], tmp_path / "a") == 1
    assert parts_of(Net(0), LIMITS["two"], tmp_path / "b") == 2
    assert parts_of(Net(0), LIMITS["three"], tmp_path / "c") == 3


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_an_export_replaces_another_and_leaves_none_of_its_files(
    tmp_path: Path, old: str, new: str
) -> None:
    (tmp_path / "fresh").mkdir()
    hetero.export(configured(2), tmp_path / "fresh", max_shard_bytes=LIMITS[new])
    here = tmp_path / "here"
    here.mkdir()
    (here / "README.md").write_text("mine")
    if old != "none":
        hetero.export(configured(1), here, max_shard_bytes=LIMITS[old])
    hetero.export(configured(2), here, max_shard_bytes=LIMITS[new])

    assert names(here) == sorted([*names(tmp_path / "fresh"), "README.md"])
    assert equal(load(here), state_of(Net(2)))
    assert (here / "config.json").read_text() == "2"


class Seeded:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def to_json_file(self, path: str) -> None:
        Path(path).write_text(str(self.seed))


def configured(seed: int) -> nn.Module:
    model: Any = Net(seed)
    model.config = Seeded(seed)
    return model


def test_a_missing_directory_is_made_with_its_parents_and_unmade_after_a_failure(
    tmp_path: Path,
) -> None:
    plan = FaultPlan()
    plan.fail_at("sync", 0, errno.EIO)
    with pytest.raises(StorageError):
        write(Net(0), tmp_path / "a" / "b" / "c", EVERYTHING, plan)
    assert names(tmp_path) == []

    hetero.export(Net(0), tmp_path / "a" / "b" / "c")
    assert equal(load(tmp_path / "a" / "b" / "c"), state_of(Net(0)))


def test_a_directory_that_cannot_be_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(StorageError):
            hetero.export(Net(0), place)


def test_a_full_drive_is_told_before_anything_is_written(tmp_path: Path) -> None:
    class Small(IO):
        def call(self, op: str, act: Any, *args: Any, **kwargs: Any) -> Any:
            found = act(*args)
            if act is os.fstatvfs:
                return type("S", (), {"f_bavail": 1, "f_frsize": 512})
            return found

    with pytest.raises(DiskFull, match="512 B left"):
        write(Net(0), tmp_path / "x", EVERYTHING, Small())
    assert names(tmp_path) == []


# -- faults --------------------------------------------------------------------------------------


class NoExchange(Quick):
    """A fault plan on a system that cannot exchange directories."""

    def call(self, op: str, act: Any, *args: Any, **kwargs: Any) -> Any:
        if op == "exchange":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().call(op, act, *args, **kwargs)


PLANS = [Quick, NoExchange]


def run(directory: Path, old: str, new: str, plan: FaultPlan) -> StorageError | None:
    """Export once as ``old``, then as ``new`` under a fault plan; return what that raised."""
    directory.mkdir()
    if old != "none":
        write(configured(1), directory, LIMITS[old], Quick())
    try:
        write(configured(2), directory, LIMITS[new], plan)
    except StorageError as error:
        return error
    return None


def as_hetero_reads(directory: Path) -> State | None:
    """Return what `Weights` reads; None where it refuses."""
    try:
        with Weights(directory) as w:
            return {
                name: torch.cat(
                    [torch.empty(0, dtype=w.dtype(name))]
                    + [piece.clone() for _, piece in w.pieces(name, 1000)]
                ).reshape(w.shape(name))
                for name in w.names()
            }
    except HeteroError as error:
        assert isinstance(error, (ConfigError, CheckpointError))
        return None


def calls(directory: Path, old: str, new: str, kind: type[Quick] = Quick) -> int:
    plan = kind()
    assert run(directory, old, new, plan) is None
    return plan.seen["any"]


# every way to replace an export: none, one file and several, of the same names and of others
FAULTS = [(old, new) for old in ("none", "one", "two") for new in ("one", "two")]
FAULTS.append(("two", "three"))
OLD_STATE, NEW_STATE = state_of(Net(1)), state_of(Net(2))


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(("old", "new"), FAULTS)
def test_after_any_one_failure_the_old_export_or_the_new_one_is_whole(
    tmp_path: Path, old: str, new: str, kind: type[Quick]
) -> None:
    for k in range(calls(tmp_path / "clean", old, new, kind)):
        plan = kind()
        plan.fail_at("any", k, errno.ENOSPC if k % 2 else errno.EIO)
        here = tmp_path / str(k)
        error = run(here, old, new, plan)

        assert plan.fired == 1
        seed = 2 if equal(load(here), NEW_STATE) else 1
        if seed == 1 and old != "none":
            assert equal(load(here), OLD_STATE), k
        elif seed == 1:
            assert names(here) == [], k
        if names(here):
            assert (here / "config.json").read_text() == str(seed), k
            assert equal(as_hetero_reads(here), [OLD_STATE, NEW_STATE][seed - 1]), k
        assert error is None or (error.advice and error.errno), k
        if seed == 1:  # nothing is left of what failed
            assert error is not None and not any(n.startswith(NEW) for n in names(here)), k


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(("old", "new"), FAULTS)
def test_killed_anywhere_a_directory_loads_as_one_whole_export_or_not_at_all(
    tmp_path: Path, old: str, new: str, kind: type[Quick]
) -> None:
    dark = 0
    for k in range(calls(tmp_path / "clean", old, new, kind)):
        plan = kind()
        plan.fail_at("any", k, errno.EIO, None)  # nothing changes the disk any more: a kill
        here = tmp_path / str(k)
        run(here, old, new, plan)

        found = load(here)
        assert found is None or equal(found, OLD_STATE) or equal(found, NEW_STATE), k
        again = as_hetero_reads(here)
        assert again is None or equal(again, OLD_STATE) or equal(again, NEW_STATE), k
        if found is not None and (here / "config.json").exists():
            seed = 2 if equal(found, NEW_STATE) else 1
            assert (here / "config.json").read_text() == str(seed), k
        dark += found is None and old != "none"
        # and the next export goes through, and clears up
        write(configured(2), here, LIMITS[new], Quick())
        assert names(here) == names(tmp_path / "clean"), k
        assert equal(load(here), NEW_STATE), k
        assert names(tmp_path) == sorted(["clean", *map(str, range(k + 1))]), k
    # only where directories cannot be exchanged is there a moment without any
    assert bool(dark) == (old != "none" and kind is NoExchange)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(("old", "new"), [("two", "two"), ("one", "two"), ("two", "one")])
def test_an_export_that_was_killed_in_its_switch_is_undone_by_the_next_though_that_fails(
    tmp_path: Path, old: str, new: str, kind: type[Quick]
) -> None:
    for k in range(calls(tmp_path / "clean", old, new, kind)):
        killed, fails = kind(), Quick()
        killed.fail_at("any", k, errno.EIO, None)
        fails.fail_at("reserve", 0, errno.ENOSPC)
        here = tmp_path / str(k)
        run(here, old, new, killed)
        with pytest.raises(DiskFull):
            write(configured(3), here, LIMITS[new], fails)

        assert equal(load(here), OLD_STATE) or equal(load(here), NEW_STATE), k
        assert not any(n.startswith((NEW, OLD)) for n in (*names(here), *names(tmp_path))), k


def test_what_else_is_in_a_directory_stays_when_the_export_is_replaced(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write(configured(1), here, LIMITS["two"], IO())
    (here / "README.md").write_text("mine")
    (here / "link").symlink_to("README.md")
    (here / "logs").mkdir()
    (here / "logs" / "a").write_text("1")
    here.chmod(0o755)

    write(configured(2), here, LIMITS["one"], IO())

    assert (here / "link").read_text() == (here / "README.md").read_text() == "mine"
    assert (here / "logs" / "a").read_text() == "1"
    assert here.stat().st_mode & 0o777 == 0o755
    assert names(here) == ["README.md", "config.json", "link", "logs", "model.safetensors"]
    assert names(tmp_path) == ["here"]


def test_the_working_directory_stays_the_directory_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(configured(1), tmp_path, LIMITS["two"], IO())
    monkeypatch.chdir(tmp_path)

    write(configured(2), Path(), LIMITS["two"], IO())

    assert equal(load(Path()), NEW_STATE)
    assert os.path.samefile(Path(), tmp_path)


def test_short_writes_and_interruptions_are_made_up_for(tmp_path: Path) -> None:
    plan = FaultPlan()
    plan.short_at("write", 0, 11, None)
    for k in (2, 5, 9):
        plan.fail_at("any", k, errno.EINTR)

    assert run(tmp_path / "x", "none", "two", plan) is None
    assert equal(load(tmp_path / "x"), NEW_STATE)


def test_an_error_of_another_kind_removes_what_was_made_too(tmp_path: Path) -> None:
    class Interrupted(IO):
        n = 0

        def call(self, op: str, act: Any, *args: Any, **kwargs: Any) -> Any:
            self.n += op == "write"
            if op == "write" and self.n == 5:
                raise KeyboardInterrupt
            return act(*args)

    with pytest.raises(KeyboardInterrupt):
        write(Net(0), tmp_path / "x", 300, Interrupted())
    assert names(tmp_path) == []


def test_files_are_synced_before_they_are_named_and_the_index_is_named_last(
    tmp_path: Path,
) -> None:
    plan = FaultPlan()
    run(tmp_path / "x", "none", "two", plan)
    log = [(op.op, os.path.basename(op.where).removeprefix(NEW)) for op in plan.log]

    renames = [name for op, name in log if op == "rename"]
    assert renames[-1] == INDEX
    for name in renames:
        made, synced, named = (log.index((op, name)) for op in ("create", "sync", "rename"))
        assert made < synced < named
    folder = os.path.basename(tmp_path / "x")
    last = log.index(("rename", INDEX))
    assert log[last - 1] == ("sync_folder", folder) == log[last + 1]


def test_a_header_that_readers_would_not_take_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile, "MAX_HEADER", 1200)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))
    hetero.export(model, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        with path.open("rb") as file:
            assert int.from_bytes(file.read(8), "little") <= 1200
    found = {name: value for path in files for name, value in safetensors.load_file(path).items()}
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_checkpoint_whose_header_readers_would_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))
    model, optimizer = hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hetero.save_checkpoint(tmp_path, model, optimizer)
    before = sorted(tmp_path.rglob("*"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(tensorfile, "MAX_HEADER", 1200)
    with pytest.raises(ConfigError, match="has a header of") as caught:
        hetero.save_checkpoint(tmp_path, model, optimizer)
    assert caught.value.advice
    assert sorted(tmp_path.rglob("*")) == before
