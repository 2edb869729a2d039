"""Checkpoints made to harm: refused by a typed error, before anything is opened or allocated.

Every crafted manifest has a right CRC, so that the checks behind it are the ones that refuse.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, SHARD, SavedTensor
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.writer import Writer
from hetero.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointTooNew,
    UnsafeCheckpoint,
)
from hetero.io import ALIGN, Folder
from tests.faults.crafted import Record, body_of, record_of, sealed, text_of
from tests.faults.saves import Quick, contents, load, save

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with Folder.open(tmp_path, Quick()) as root:
        return save(root, 1)


def refusal(checkpoint: Path, raw: bytes) -> CheckpointError:
    """Return the error of a load where the manifest has these bytes."""
    (checkpoint / MANIFEST).write_bytes(raw)
    with pytest.raises(CheckpointError) as failure:
        CheckpointReader.open(checkpoint.parent)
    return failure.value


# -- what a manifest declares --------------------------------------------------------------------


def put(*way: Any) -> Callable[[Record], None]:
    """Return a change: put(..., key, value) sets a value deep in a record."""
    *path, key, value = way

    def change(record: Record) -> None:
        home: Any = record
        for step in path:
            home = home[step]
        home[key] = value

    return change


def entry(number: int, key: str, value: Any) -> Callable[[Record], None]:
    return put("index", number, key, value)


def piece(number: int, key: str, value: Any) -> Callable[[Record], None]:
    return put("index", number, "slices", 0, key, value)


def drop(key: str) -> Callable[[Record], None]:
    return lambda record: record.pop(key)


def twice(record: Record) -> None:
    record["index"][1] |= {key: record["index"][0][key] for key in ("kind", "name", "key")}


def many(record: Record) -> None:
    record["index"] = [0] * (2**17 + 1)


def two_slices(record: Record) -> None:
    record["index"][0]["slices"] *= 2


def huge_shard(record: Record) -> None:
    """Declare 2^40 bytes with digits for all of them missing."""
    record["index"][0]["shape"] = [2**40]
    record["index"][0]["slices"][0]["slice"] = f"0:{2**40}"
    record["shards"][0]["bytes"] = 2**41


FILES = ["../x", "/etc/passwd", "a/b", "a\0b", "x" * 300, "", ".", "..", MANIFEST, "R00000.BIN"]
CHANGES: list[tuple[str, Callable[[Record], None], str]] = [
    *((f"file {name[:20]!r}", put("shards", 0, "file", name), "names are ours") for name in FILES),
    ("2^60 elements", entry(0, "shape", [2**60]), "no number from 0"),
    ("2^60 elements in two dimensions", entry(0, "shape", [2**30, 2**30]), "larger than"),
    ("a product that overflows 64 bits", entry(0, "shape", [2**33, 2**33]), "larger than"),
    ("an empty tensor of overflowing strides", entry(0, "shape", [0, 2**49, 2**49]), "larger than"),
    ("2^40 bytes without CRCs", huge_shard, "hexadecimal digits"),
    ("a negative size", entry(0, "shape", [-1]), "no number from 0"),
    ("a size that is true", entry(0, "shape", [True]), "no number from 0"),
    ("a size that is a fraction", entry(0, "shape", [1.5]), "no number from 0"),
    ("a size that is text", entry(0, "shape", ["7"]), "no number from 0"),
    ("rank 10^6", entry(0, "shape", [1] * 10**6), "dimensions"),
    ("another shape", entry(0, "shape", [37]), "is not all of it"),
    ("an unknown dtype", entry(0, "dtype", "object"), "no dtype"),
    ("a dtype that is a path", entry(0, "dtype", "os.system"), "no dtype"),
    ("a larger dtype", entry(0, "dtype", "complex128"), "hexadecimal digits|hole|overlap"),
    ("a kind that is no word", entry(0, "kind", "../param"), "lower-case word"),
    ("a long name", entry(0, "name", "n" * 5000), "longer than"),
    ("a long key", entry(0, "key", "k" * 300), "longer than"),
    ("the same entry twice", twice, "twice"),
    ("too many entries", many, "entries are more than"),
    ("an overlap", piece(1, "offset", 0), "overlaps"),
    ("a negative offset", piece(0, "offset", -ALIGN), "overlaps"),
    ("a hole", piece(1, "offset", 2**20), "hole"),
    ("an offset of a thousand bits", piece(1, "offset", 10**300), r"about 2\^996"),
    ("another shard", piece(0, "shard", 1), "not there"),
    ("no slice", entry(0, "slices", []), "0 slices"),
    ("two slices", two_slices, "2 slices"),
    ("a part of a slice", piece(0, "slice", "0:1,0:41"), "not all of it"),
    ("CRCs too few", piece(0, "crcs", ""), "hexadecimal digits"),
    ("CRCs in capitals", piece(0, "crcs", "ABCDEF01"), "hexadecimal digits"),
    ("CRCs of other digits", piece(0, "crcs", "٠١٢٣٤٥٦٧"), "hexadecimal digits"),
    ("no shard", put("shards", []), "0 shards"),
    ("a shard of 2^60 bytes", put("shards", 0, "bytes", 2**60), r"about 2\^60|1152921504606846976"),
    ("a shard of -1 bytes", put("shards", 0, "bytes", -1), "declared with -1"),
    ("an index that is an object", put("index", {}), "type dict"),
    ("an entry that is text", put("index", 0, "x"), "no object"),
    ("meta that is a list", put("meta", []), "type list"),
    ("a step that is text", put("step", "1"), "type str"),
    ("a step that is true", put("step", True), "type bool"),
    ("a step that is null", put("step", None), "type NoneType"),
    ("a negative step", put("step", -1), "negative"),
    ("an unknown field", put("hook", "x"), "unknown"),
    ("a missing field", drop("meta"), "lacks"),
    ("another format", put("format", "pickle"), "does not say"),
    ("no format", drop("format"), "does not say"),
    ("version 0", put("version", 0), "no positive number"),
    ("a version that is text", put("version", "1"), "no positive number"),
    ("no version", drop("version"), "no positive number"),
]


@pytest.mark.parametrize(("change", "said"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_manifest_that_declares_what_no_save_declares_is_refused(
    checkpoint: Path, change: Callable[[Record], None], said: str
) -> None:
    record = record_of(checkpoint)
    change(record)
    raw = sealed(text_of(record))
    tracemalloc.start()

    error = refusal(checkpoint, raw)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert type(error) is UnsafeCheckpoint
    assert MANIFEST in error.args[0]
    assert len(error.args[0]) < 1000
    assert peak < 2 * MIB + 20 * len(raw)
    assert re.search(said, error.args[0]), error.args[0]


# -- what the text of a manifest is --------------------------------------------------------------

DEEP = 100_000
LARGE = MAX_MANIFEST_BYTES - MIB
TEXTS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("a key twice", lambda b: b.replace(b'"step"', b'"step": 1, "step"'), "'step' is there twice"),
    ("a key twice, deep", lambda b: b[:-2] + b',"a":{"b":1,"b":1}}}', "'b' is there twice"),
    ("arrays 100,000 deep", lambda b: b[:-2] + b',"a":' + b"[" * DEEP, "nested deeper"),
    ("closed ones", lambda b: b[:-2] + b',"a":' + b"[" * DEEP + b"]" * DEEP + b"}}", "deeper"),
    ("objects 100,000 deep", lambda b: b[:-2] + b"," + b'"a":{' * DEEP, "nested deeper"),
    ("17 deep", lambda b: b[:-2] + b',"a":' + b"[" * 15 + b"]" * 15 + b"}}", "deeper"),
    ("brackets that do not match", lambda b: b[:-1], "brackets do not match"),
    ("an open string", lambda b: b[:-2] + b',"a":"', "brackets do not match"),
    ("marks that do not match", lambda b: b[:-2] + b',"a":[}}', "no JSON|brackets"),
    ("no JSON", lambda b: b"x" + b, "no JSON"),
    ("a second text", lambda b: b + b"[]", "no JSON"),
    ("bytes that are no text", lambda b: b.replace(b"exp_avg", b"exp_\xff\xfe"), "no JSON"),
    ("a number of 5000 digits", lambda b: b[:-2] + b',"a":1' + b"0" * 5000 + b"}}", "5001 digits"),
    ("60 MB of arrays", lambda b: b[:-2] + b"," + b"[]," * (LARGE // 3), "too many"),
    ("60 MB of objects", lambda b: b[:-2] + b"," + b"{}," * (LARGE // 3), "too many"),
    ("60 MB of numbers", lambda b: b[:-2] + b',"a":[' + b"0," * (LARGE // 2), "too many"),
    ("60 MB of open arrays", lambda b: b[:-2] + b"," + b"[" * LARGE, "too many"),
    ("60 MB of quotes", lambda b: b[:-2] + b"," + b'"' * (LARGE | 1), "brackets do not match"),
    ("60 MB of escapes", lambda b: b[:-2] + b',"a":"' + b"\\" * (LARGE | 1), "do not match"),
]


@pytest.mark.parametrize(("change", "said"), [t[1:] for t in TEXTS], ids=[t[0] for t in TEXTS])
def test_a_manifest_that_is_no_plain_json_is_refused(
    checkpoint: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    raw = sealed(change(body_of(checkpoint)))
    tracemalloc.start()

    error = refusal(checkpoint, raw)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert type(error) is UnsafeCheckpoint
    assert re.search(said, error.args[0]), error.args[0]
    assert peak < 2 * MIB + 4 * len(raw)


@pytest.mark.parametrize("name", ['"', "\\", '\\"', '"[{', "]}]}" * 50, "[" * 4000, 'a\\"]['])
def test_marks_in_strings_are_no_nesting(tmp_path: Path, name: str) -> None:
    with Folder.open(tmp_path) as root:
        save(root, 1, [SavedTensor("param", name, name[:200], "int8", (3,))])

    with CheckpointReader.open(tmp_path) as reader:
        assert reader.entries[0].name == name


def test_a_manifest_of_200_mb_is_refused_without_reading_it(checkpoint: Path) -> None:
    os.truncate(checkpoint / MANIFEST, 200 * MIB)
    tracemalloc.start()

    with pytest.raises(UnsafeCheckpoint, match="200 MiB of 64 MiB"):
        CheckpointReader.open(checkpoint)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"{}", b"null", b'{"crc32":"', b"\0" * 4096, b"\xff" * 99]
)
def test_what_is_no_manifest_is_corrupt(checkpoint: Path, raw: bytes) -> None:
    assert type(refusal(checkpoint, raw)) is CheckpointCorrupt


def test_a_later_format_says_what_it_is_and_what_to_do(checkpoint: Path) -> None:
    record = record_of(checkpoint) | {"version": 5, "what": "else"}

    error = refusal(checkpoint, sealed(text_of(record)))

    assert type(error) is CheckpointTooNew
    assert "version 5; this hetero reads up to 4" in error.args[0]
    assert "version of hetero that wrote it" in error.advice


# -- what lies in the directory ------------------------------------------------------------------


def symlink(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".moved")))


def hard_link(path: Path) -> None:
    path.with_suffix(".other").hardlink_to(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes device nodes")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (symlink, "symbolic link"),
        (hard_link, "2 names"),
        (pipe, "pipe"),
        (device, "device"),
        (directory, "a directory"),
    ],
)
def test_what_is_no_file_of_its_own_is_refused_before_it_is_opened(
    checkpoint: Path, name: str, change: Callable[[Path], None], said: str
) -> None:
    change(checkpoint / name)
    plan = Quick()

    with pytest.raises(UnsafeCheckpoint, match=f"{name} .*{said}"):
        CheckpointReader.open(checkpoint.parent, io=plan)

    opened = [Path(op.where).name for op in plan.log if op.op == "open"]
    assert name not in opened


def test_a_step_that_is_a_link_is_refused(checkpoint: Path) -> None:
    symlink(checkpoint)

    with pytest.raises(UnsafeCheckpoint, match="symbolic link"):
        CheckpointReader.open(checkpoint.parent)


def test_files_that_are_not_ours_are_never_opened(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "a pipe")
    (checkpoint / "a link").symlink_to("/dev/zero")
    (checkpoint / "data.pkl").write_bytes(b"cos\nsystem\n")
    (checkpoint.parent / "model.pt").write_bytes(b"PK")
    plan = Quick()

    assert load(checkpoint.parent, io=plan) == contents(1)

    opened = {Path(op.where).name for op in plan.log if op.op == "open"}
    assert opened == {checkpoint.parent.name, "step-1", MANIFEST, SHARD}


def test_a_shard_that_is_mostly_holes_is_refused(tmp_path: Path) -> None:
    entry = SavedTensor("tensor", "a", "", "uint8", (200 * MIB,))
    with Folder.open(tmp_path, Quick()) as root, Writer(root, 1, [entry]) as writer:
        for start in range(0, entry.n_bytes, 50 * MIB):
            writer.write(0, start, memoryview(bytes(50 * MIB)))
        shard = writer.commit({}) / SHARD
    os.truncate(shard, 0)
    os.truncate(shard, ALIGN + entry.n_bytes)

    with pytest.raises(UnsafeCheckpoint, match="holes"):
        CheckpointReader.open(tmp_path)


# -- what other programs write -------------------------------------------------------------------


def torch_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def safetensors(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("write", "said"),
    [(torch_zip, "zip archive"), (pickled, "pickle"), (safetensors, "safetensors")],
)
def test_a_file_of_another_program_is_named_and_not_loaded(
    tmp_path: Path, write: Callable[[Path], None], said: str
) -> None:
    write(tmp_path / "model.any")

    with pytest.raises(CheckpointError, match=f"is a .*{said}.*, not a directory"):
        CheckpointReader.open(tmp_path / "model.any")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([".metadata", "__0_0.distcp"], "DCP"),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], "safetensors"),
        (["pytorch_model.bin"], "torch.save"),
        (["epoch=1.ckpt", "notes.txt"], "torch.save"),
    ],
)
@pytest.mark.parametrize("under", ["", "step-7"])
def test_a_directory_of_another_program_is_named_and_not_loaded(
    tmp_path: Path, names: list[str], said: str, under: str
) -> None:
    (tmp_path / under).mkdir(exist_ok=True)
    for name in names:
        (tmp_path / under / name).write_bytes(b"\x80\x04.")
    plan = Quick()

    with pytest.raises(CheckpointError, match=re.escape(said)) as failure:
        CheckpointReader.open(tmp_path, io=plan)

    assert type(failure.value) is CheckpointError
    assert not [op for op in plan.log if op.op == "read"]


@pytest.mark.parametrize("write", [torch_zip, pickled, safetensors])
def test_another_programs_file_under_our_name_is_corrupt(
    checkpoint: Path, write: Callable[[Path], None]
) -> None:
    write(checkpoint / MANIFEST)

    with pytest.raises(CheckpointCorrupt, match="does not begin as a manifest does"):
        CheckpointReader.open(checkpoint)


# -- many at once --------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=3)
def test_thousands_of_crafted_manifests_run_nothing_and_open_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.fuzzer", str(tmp_path), "5000"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["bad"] == {}
    assert "SILENT" not in found["outcomes"]
    assert found["outcomes"]["UnsafeCheckpoint"] > 3000
    assert found["grown_kib"] < 64 * 1024
