"""Safetensors are read in pieces, as the real library reads them; damaged ones are refused."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import memory_of_this_process
from hetero.errors import (
    CheckpointCorrupt,
    ConfigError,
    DiskReadError,
    HeteroError,
    StateError,
    TruncatedChunk,
    UnsafeCheckpoint,
)
from hetero.tensorfile import DTYPES, INDEX, SINGLE
from hetero.testing.faults import FaultPlan
from hetero.weights import Weights, dtype_named

safetensors = pytest.importorskip("safetensors.torch")


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random distinct bytes as a tensor (0 and 1 for bools)."""
    numel = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def joined(weights: Weights, name: str, numel: int) -> bytes:
    """Return a tensor's bytes read in pieces, which have to cover it in order."""
    found, at = b"", 0
    for first, piece in weights.pieces(name, numel):
        assert first == at and piece.dim() == 1 and 0 < piece.numel() <= numel
        assert piece.dtype is weights.dtype(name) and piece.is_contiguous()
        found, at = found + raw(piece), at + piece.numel()
    return found


def agree(path: Path, tensors: dict[str, torch.Tensor], numel: int = 7) -> None:
    with Weights(path) as weights:
        assert sorted(weights.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert weights.shape(name) == tuple(tensor.shape)
            assert weights.dtype(name) is tensor.dtype
            assert joined(weights, name, numel) == raw(tensor), name


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return the bytes of a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_is_read_as_the_library_wrote_it(tmp_path: Path, code: str) -> None:
    dtype = dtype_named(DTYPES[code])
    tensors = {"a": random((3, 5), dtype), "b": random((2,), dtype)}
    safetensors.save_file(tensors, tmp_path / SINGLE)

    agree(tmp_path, tensors)


@pytest.mark.parametrize("numel", [1, 6, 7, 24, 10**9])
def test_pieces_cover_a_tensor_whatever_their_size(tmp_path: Path, numel: int) -> None:
    tensors = {"a": random((4, 6)), "scalar": random(()), "empty": random((0, 3))}
    safetensors.save_file(tensors, tmp_path / SINGLE)

    agree(tmp_path, tensors, numel)


def test_an_empty_tensor_has_no_piece_and_a_scalar_one_of_one_element(tmp_path: Path) -> None:
    safetensors.save_file({"s": torch.tensor(2.5), "e": torch.ones(0)}, tmp_path / SINGLE)
    with Weights(tmp_path) as weights:
        assert list(weights.pieces("e", 4)) == []
        assert [(first, piece.item()) for first, piece in weights.pieces("s", 4)] == [(0, 2.5)]


def test_a_file_can_be_named_itself(tmp_path: Path) -> None:
    tensors = {"a": random((4,))}
    safetensors.save_file(tensors, tmp_path / "other.safetensors")

    agree(tmp_path / "other.safetensors", tensors)


def test_an_index_says_which_files_and_tensors_there_are(tmp_path: Path) -> None:
    parts = [{"a": random((3,)), "more": random((2,))}, {"b": random((5,))}]
    for i, part in enumerate(parts):
        safetensors.save_file(part, tmp_path / f"model-{i}.safetensors")
    safetensors.save_file({"zzz": random((1,))}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))

    agree(tmp_path, {"a": parts[0]["a"], "b": parts[1]["b"]})


def test_the_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    tensors = {"a": random((3,))}
    safetensors.save_file(tensors, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))

    agree(tmp_path, tensors)


def test_several_files_without_an_index_are_taken_together(tmp_path: Path) -> None:
    tensors = {f"t{i}": random((i,)) for i in range(1, 5)}
    for i, (name, tensor) in enumerate(tensors.items(), 1):
        safetensors.save_file({name: tensor}, tmp_path / f"x-{i:05d}-of-00004.safetensors")

    agree(tmp_path, tensors)


def test_a_cache_of_links_to_blobs_is_read_through_the_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tensors = {"a": random((3,)), "b": random((4,))}
    for name in tensors:
        safetensors.save_file({name: tensors[name]}, blobs / name)
        os.symlink(f"../../blobs/{name}", snapshot / f"{name}.safetensors")
    (blobs / "i").write_text(json.dumps({"weight_map": {n: f"{n}.safetensors" for n in tensors}}))
    os.symlink("../../blobs/i", snapshot / INDEX)
    os.symlink(snapshot, tmp_path / "named")

    agree(snapshot, tensors)
    agree(tmp_path / "named", tensors)
    agree(snapshot / "a.safetensors", {"a": tensors["a"]})


def test_names_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {**one(offsets=(4, 8)), "b": one()["a"], "e": one(shape=(0,), offsets=(4, 4))["a"]}
    (tmp_path / SINGLE).write_bytes(file_of(header, bytes(range(8))))
    with Weights(tmp_path) as weights:
        assert weights.names() == ["b", "e", "a"]
        assert joined(weights, "a", 3) == bytes([4, 5, 6, 7])


def test_one_buffer_serves_all_pieces_and_two_readers_do_not_share_it(tmp_path: Path) -> None:
    tensors = {"a": random((64,)), "b": random((64,))}
    safetensors.save_file(tensors, tmp_path / SINGLE)
    with Weights(tmp_path) as weights:
        places = {p.data_ptr() for _ in range(3) for _, p in weights.pieces("a", 16)}
        assert len(places) == 1
        pairs = zip(weights.pieces("a", 16), weights.pieces("b", 16), strict=True)
        found = [raw(a) + raw(b) for (_, a), (_, b) in pairs]
    left, right = raw(tensors["a"]), raw(tensors["b"])
    assert found == [left[i : i + 64] + right[i : i + 64] for i in range(0, 256, 64)]


# -- what is wrong with a name -------------------------------------------------------------------


def test_a_wrong_name_is_answered_with_near_ones(tmp_path: Path) -> None:
    safetensors.save_file({"layers.0.weight": random((3,))}, tmp_path / SINGLE)
    with Weights(tmp_path) as weights:
        for ask in (weights.shape, weights.dtype, lambda name: weights.pieces(name, 4)):
            with pytest.raises(ConfigError, match=r"layer\.0\.weight.*(?s:.*)layers\.0\.weight"):
                ask("layer.0.weight")
        with pytest.raises(ConfigError, match="0 elements"):
            weights.pieces("layers.0.weight", 0)


def test_closed_weights_say_so(tmp_path: Path) -> None:
    safetensors.save_file({"a": random((3,))}, tmp_path / SINGLE)
    weights = Weights(tmp_path)
    weights.close()
    weights.close()

    with pytest.raises(StateError, match="closed"):
        weights.pieces("a", 4)


def test_what_there_is_instead_of_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    (tmp_path / ".hidden.safetensors").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        Weights(tmp_path)
    with pytest.raises(ConfigError, match="not called"):
        Weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="there is no"):
        Weights(tmp_path / "missing")
    with pytest.raises(ConfigError, match="there is no"):
        Weights("a\0b")


def test_a_tensor_that_two_files_have_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        safetensors.save_file({"twice": random((3,))}, tmp_path / name)

    with pytest.raises(ConfigError, match=r"'twice' is in .*x\.safetensors and in .*y\.safe"):
        Weights(tmp_path)


# -- what is wrong with a directory --------------------------------------------------------------


def test_a_set_of_parts_that_lacks_one_is_refused(tmp_path: Path) -> None:
    for i in (1, 3):
        name = tmp_path / f"model-{i:05d}-of-00003.safetensors"
        safetensors.save_file({f"t{i}": random((3,))}, name)
    with pytest.raises(CheckpointCorrupt, match="2 of the 3 files"):
        Weights(tmp_path)

    names = {f"t{i}": f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointCorrupt, match="model-00002-of-00003"):
        Weights(tmp_path)


def test_a_file_that_lacks_what_the_index_places_in_it_is_refused(tmp_path: Path) -> None:
    safetensors.save_file({"a": random((3,))}, tmp_path / "x.safetensors")
    names = {"a": "x.safetensors", "b": "x.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))

    with pytest.raises(CheckpointCorrupt, match="lacks 'b'"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "", ".x.safetensors"]
    + ["x.bin", "x\0.safetensors", "passwd"],
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    for place in (tmp_path, inside, inside / "sub"):
        safetensors.save_file({"a": random((3,))}, place / "x.safetensors")
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    plan = FaultPlan()

    with pytest.raises(UnsafeCheckpoint, match="names the file"):
        Weights(inside, io=plan)
    opened = {os.path.basename(op.where) for op in plan.log if op.op == "open"}
    assert opened == {"inside", INDEX}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", '{"a":1,"a":2}']
    + ["[" * 100_000, "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)

    with pytest.raises(CheckpointCorrupt):
        Weights(tmp_path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(DiskReadError, match="not a regular file"):
        Weights(tmp_path)


# -- what is wrong with a file -------------------------------------------------------------------

HUGE = 2**62
HOSTILE: dict[str, tuple[bytes, type[HeteroError]]] = {
    "nothing": (b"", CheckpointCorrupt),
    "seven bytes": (b"1234567", CheckpointCorrupt),
    "a header longer than the file": (file_of({}, length=100), CheckpointCorrupt),
    "a header of 200 MB": (file_of({}, length=200_000_000), UnsafeCheckpoint),
    "a header of 2^64 - 1": (file_of({}, length=2**64 - 1), UnsafeCheckpoint),
    "a pointer of LFS": (b"version https://git-lfs.github.com/spec/v1\n", CheckpointCorrupt),
    "a zip": (b"PK\x03\x04\x00\x00\x00\x00" + bytes(100), CheckpointCorrupt),
    "no JSON": (file_of(b"{not json"), CheckpointCorrupt),
    "no UTF-8": (file_of(b'{"\xff": 1}'), CheckpointCorrupt),
    "no object": (file_of([1]), CheckpointCorrupt),
    "NaN": (file_of(b'{"a": NaN}'), CheckpointCorrupt),
    "a deep one": (file_of(b'{"a":' * 50_000), CheckpointCorrupt),
    "a number of 10,000 digits": (file_of(b'{"a":' + b"9" * 10_000 + b"}"), CheckpointCorrupt),
    "a name twice": (
        file_of(b'{"a":' + json.dumps(one()["a"]).encode() + b',"a":{}}', bytes(4)),
        CheckpointCorrupt,
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), UnsafeCheckpoint),
    "an entry that is a list": (file_of({"a": []}), UnsafeCheckpoint),
    "no offsets": (file_of({"a": {"dtype": "U8", "shape": [1]}}), UnsafeCheckpoint),
    "three offsets": (file_of(one(offsets=[0, 2, 4]), bytes(4)), UnsafeCheckpoint),
    "offsets of text": (file_of(one(offsets=["0", "4"]), bytes(4)), UnsafeCheckpoint),
    "offsets of floats": (file_of(one(offsets=[0.0, 4.0]), bytes(4)), UnsafeCheckpoint),
    "offsets of bools": (file_of(one(shape=[1], offsets=[False, True]), b"1"), UnsafeCheckpoint),
    "a negative offset": (file_of(one(offsets=[-4, 0]), bytes(4)), UnsafeCheckpoint),
    "offsets backwards": (file_of(one(offsets=[4, 0]), bytes(4)), UnsafeCheckpoint),
    "a negative shape": (file_of(one(shape=[-2, -2]), bytes(4)), UnsafeCheckpoint),
    "a size of 2^63": (file_of(one(shape=[0, 2**63], offsets=[0, 0])), UnsafeCheckpoint),
    "a product of 2^64": (file_of(one(shape=[2**32, 2**32], offsets=[0, 0])), UnsafeCheckpoint),
    "2^62 elements": (file_of(one(shape=[HUGE], offsets=[0, HUGE])), CheckpointCorrupt),
    "a million huge sizes": (file_of(one(shape=[HUGE] * 10**5, offsets=[0, 4])), UnsafeCheckpoint),
    "a shape of other bytes": (file_of(one(shape=[5]), bytes(4)), UnsafeCheckpoint),
    "a dtype of other bytes": (file_of(one("F32"), bytes(4)), UnsafeCheckpoint),
    "an unknown dtype": (file_of(one("F4")), ConfigError),
    "a gap at the beginning": (file_of(one(offsets=[4, 8]), bytes(8)), UnsafeCheckpoint),
    "bytes of nobody": (file_of(one(), bytes(5)), UnsafeCheckpoint),
    "too few bytes": (file_of(one(), bytes(3)), CheckpointCorrupt),
    "an overlap": (
        file_of({**one(), "b": one(offsets=[2, 6])["a"]}, bytes(6)),
        UnsafeCheckpoint,
    ),
    "the same bytes twice": (file_of({**one(), "b": one()["a"]}, bytes(4)), UnsafeCheckpoint),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_file_is_refused_and_names_itself(tmp_path: Path, case: str) -> None:
    data, error = HOSTILE[case]
    (tmp_path / SINGLE).write_bytes(data)

    with pytest.raises(error, match=SINGLE) as caught:
        Weights(tmp_path)
    assert isinstance(caught.value, HeteroError) and caught.value.advice
    assert len(str(caught.value)) < 1000


def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_of(one("F4")))
    with pytest.raises(ConfigError, match=r"'F4'(?s:.*)BF16"):
        Weights(tmp_path)


def test_every_file_cut_short_is_refused(tmp_path: Path) -> None:
    safetensors.save_file({"a": random((3,)), "b": random((2, 2))}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    for n in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:n])
        with pytest.raises(CheckpointCorrupt):
            Weights(tmp_path)


def test_what_the_library_refuses_is_refused_and_nothing_raises_untyped(tmp_path: Path) -> None:
    safetensors.save_file({"a": random((3,)), "b": random((2, 2))}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    for at, bit in itertools.product(range(head), range(8)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        (tmp_path / SINGLE).write_bytes(flipped)
        ours = as_we_read(tmp_path)
        assert ours is None or ours == as_the_library_reads(tmp_path)


Read = dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]


def as_we_read(path: Path) -> Read | None:
    try:
        with Weights(path) as w:
            return {n: (w.shape(n), w.dtype(n), joined(w, n, 3)) for n in w.names()}
    except HeteroError:
        return None


def as_the_library_reads(path: Path) -> Read | None:
    try:
        found = safetensors.load_file(path / SINGLE)
    except Exception:  # it raises what comes
        return None
    return {name: (tuple(t.shape), t.dtype, raw(t)) for name, t in found.items()}


# -- what goes wrong on the way ------------------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    safetensors.save_file({"a": random((64,))}, tmp_path / SINGLE)
    with Weights(tmp_path) as weights:
        os.truncate(tmp_path / SINGLE, 200)
        with pytest.raises(TruncatedChunk):
            list(weights.pieces("a", 16))


def test_short_reads_and_interruptions_are_made_up_for(tmp_path: Path) -> None:
    tensors = {"a": random((64,))}
    safetensors.save_file(tensors, tmp_path / SINGLE)
    plan = FaultPlan()
    plan.short_at("read", 0, 5, None)
    plan.fail_at("read", 3, errno.EINTR)
    with Weights(tmp_path, io=plan) as weights:
        assert joined(weights, "a", 16) == raw(tensors["a"])
    assert plan.fired > 2


def test_any_failing_call_is_a_typed_error_and_closes_the_files(tmp_path: Path) -> None:
    tensors = {"a": random((64,)), "b": random((3,))}
    for name in tensors:
        safetensors.save_file({name: tensors[name]}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {n: f"{n}.safetensors" for n in tensors}})
    )
    before = len(os.listdir("/proc/self/fd"))
    for op in ("open", "stat", "list", "read"):
        clean = FaultPlan()
        read_all(tmp_path, clean)
        for k in range(clean.seen[op]):
            plan = FaultPlan()
            plan.fail_at(op, k, errno.EACCES)
            with pytest.raises(DiskReadError if op != "list" else OSError):
                read_all(tmp_path, plan)
    assert len(os.listdir("/proc/self/fd")) == before


def read_all(path: Path, plan: FaultPlan) -> None:
    with Weights(path, io=plan) as weights:
        for name in weights.names():
            joined(weights, name, 16)


def test_reading_holds_one_piece_of_memory_and_not_the_tensor(tmp_path: Path) -> None:
    mib = 2**20
    safetensors.save_file({"a": torch.ones(16 * mib)}, tmp_path / SINGLE)
    with Weights(tmp_path) as weights:
        before = memory_of_this_process("VmRSS")
        grown = [memory_of_this_process("VmRSS") - before for _ in weights.pieces("a", mib)]
    assert len(grown) == 16 and max(grown) < 16 * mib
