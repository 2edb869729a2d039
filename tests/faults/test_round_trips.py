"""What is saved comes back: every byte, every name, every number."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import threading
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hetero.checkpoint.manifest import (
    ITEM_BYTES,
    MAX_DEPTH,
    SHARD,
    Manifest,
    SavedTensor,
    decode,
    encode,
)
from hetero.checkpoint.reader import CheckpointReader, State, steps
from hetero.checkpoint.shard import PIECE
from hetero.checkpoint.slices import header_of, whole
from hetero.checkpoint.writer import Writer
from hetero.errors import CheckpointError, NoCheckpoint
from hetero.io import ALIGN, Folder, aligned_buffer
from hetero.tensorfile import BLOCK
from tests.faults.saves import SMALL, Buffered, contents, everything, load, save


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    return Folder.open(tmp_path)


def there_and_back(root: Folder, entries: list[SavedTensor]) -> None:
    wanted = contents(3, entries)
    path = save(root, 3, entries)
    with CheckpointReader.open(path) as reader:
        assert reader.entries == tuple(entries)
        assert everything(reader) == wanted


# -- bytes ---------------------------------------------------------------------------------------


def test_every_dtype_comes_back(root: Folder) -> None:
    there_and_back(root, [SavedTensor("tensor", name, "", name, (3, 5, 7)) for name in ITEM_BYTES])


def test_scalars_and_empty_tensors_come_back_and_empty_ones_take_no_bytes(root: Folder) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (0, 2**40), (4, 0, 3), ()]
    entries = [
        SavedTensor("tensor", str(n), "", "float64", shape) for n, shape in enumerate(shapes)
    ]

    there_and_back(root, entries)

    assert (Path(root.path) / "step-3" / SHARD).stat().st_size == ALIGN + 3 * ALIGN


def test_a_checkpoint_without_any_bytes_comes_back(root: Folder) -> None:
    there_and_back(root, [])
    assert steps(root)[0].state is State.COMPLETE


@pytest.mark.parametrize("around", [ALIGN, BLOCK, PIECE, PIECE + BLOCK, 2 * PIECE])
def test_sizes_around_a_border_come_back(root: Folder, around: int) -> None:
    sizes = [around - 1, around, around + 1, around + ALIGN]

    there_and_back(root, [SavedTensor("tensor", str(n), "", "uint8", (n,)) for n in sizes])


def test_calls_of_any_number_of_blocks_in_any_order_give_the_same_file(tmp_path: Path) -> None:
    entries = [SavedTensor("tensor", str(n), "", "uint8", (n * BLOCK + 77,)) for n in (11, 3, 0, 9)]
    _, meta, data = contents(3, entries)
    seeded = random.Random(0)
    files = []
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        calls = [c for n, e in enumerate(entries) for c in cut(seeded, n, e.n_bytes)]
        seeded.shuffle(calls)
        with Folder.open(tmp_path / str(k)) as root, Writer(root, 3, entries) as writer:
            for number, start, end in calls:
                writer.write(number, start, memoryview(data[number])[start:end])
            writer.commit(meta)
        files.append((tmp_path / str(k) / "step-3" / SHARD).read_bytes())

    assert files[0] == files[1] == files[2]
    assert load(tmp_path / "0") == (3, meta, data)


def cut(seeded: random.Random, number: int, n_bytes: int) -> list[tuple[int, int, int]]:
    """Return calls that write an entry: (its number, first byte, last byte)."""
    inner = [at for at in range(BLOCK, n_bytes, BLOCK) if seeded.random() < 0.3]
    borders = [0, *inner, n_bytes]
    return [(number, *pair) for pair in pairwise(borders)]


@pytest.mark.parametrize("aligned", [True, False])
def test_any_memory_is_written_and_read(root: Folder, aligned: bool) -> None:
    entry = SavedTensor("tensor", "a", "", "uint8", (3 * BLOCK,))
    memory = aligned_buffer(4 * BLOCK)[0 if aligned else 1 :][: 3 * BLOCK]
    memory[:] = random.Random(0).randbytes(3 * BLOCK)

    with Writer(root, 1, [entry]) as writer:
        writer.write(0, 0, memory)
        writer.commit({})
    back = aligned_buffer(4 * BLOCK)[0 if aligned else 1 :][: 3 * BLOCK]
    with CheckpointReader.open(root.path) as reader:
        reader.read(0, 0, back)

    assert back == memory


def test_memory_of_any_type_and_shape_is_bytes(root: Folder) -> None:
    numbers = memoryview(struct.pack("<6d", *range(6))).cast("d", (2, 3))
    with Writer(root, 1, [SavedTensor("tensor", "a", "", "float64", (2, 3))]) as writer:
        writer.write(0, 0, numbers)
        writer.commit({})

    back = memoryview(bytearray(48)).cast("d", (2, 3))
    with CheckpointReader.open(root.path) as reader:
        reader.read(0, 0, back)

    assert back == numbers


def test_several_threads_write_and_read_one_checkpoint(root: Folder) -> None:
    entries = [SavedTensor("tensor", str(n), "", "uint8", (2 * PIECE + n,)) for n in range(4)]
    _, meta, data = contents(3, entries)
    writer = Writer(root, 3, entries)
    together([lambda n=n: writer.write(n, 0, memoryview(data[n])) for n in range(4)])
    writer.commit(meta)

    back = [bytearray(entry.n_bytes) for entry in entries]
    with CheckpointReader.open(root.path) as reader:
        together([lambda n=n: reader.read(n, 0, memoryview(back[n])) for n in range(4)])

    assert tuple(bytes(each) for each in back) == data


def together(tasks: list[Any]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_drive_without_direct_io_holds_the_same_bytes(tmp_path: Path) -> None:
    with Folder.open(tmp_path, Buffered()) as root:
        there_and_back(root, [SavedTensor("tensor", "a", "", "uint8", (PIECE + 5,))])


def test_an_entry_is_found_by_kind_name_and_key(root: Folder) -> None:
    save(root, 1)
    with CheckpointReader.open(root.path) as reader:
        assert reader.find("state", "layers.0.weight", "exp_avg") == 1
        assert reader.find("param", "layers.0.weight") == 0
        assert reader.find("param", "layers.1.weight") is None


# -- what other tools find -----------------------------------------------------------------------


def shard_of(root: Folder, entries: list[SavedTensor]) -> Path:
    return save(root, 1, entries) / SHARD


def tensors_in(path: Path) -> dict[str, bytes]:
    """Return the tensors of a file as the safetensors library finds them, padding left out."""
    with safe_open(path, "torch") as file:
        found = {name: file.get_tensor(name) for name in file.offset_keys() if name[0] != "_"}
    flat = {name: value.contiguous().view(-1) for name, value in found.items()}
    return {name: value.view(torch.uint8).numpy().tobytes() for name, value in flat.items()}


def test_the_library_of_safetensors_finds_every_dtype_by_its_name(root: Folder) -> None:
    known = [name for name in ITEM_BYTES if name != "float8_e8m0fnu"]  # which it does not read
    entries = [SavedTensor("state", name, "exp_avg", name, (3, 5)) for name in known]

    found = tensors_in(shard_of(root, entries))

    data = contents(1, entries)[2]
    assert found == {f"state/{e.name}/exp_avg": d for e, d in zip(entries, data, strict=True)}


def test_numbers_that_safetensors_does_not_have_are_pairs(root: Folder) -> None:
    entries = [
        SavedTensor("param", "c", "", "complex128", (3,)),
        SavedTensor("param", "h", "", "complex32", ()),
    ]
    with safe_open(shard_of(root, entries), "torch") as file:
        pairs = [file.get_slice(f"param/{name}") for name in "ch"]
        assert [(pair.get_dtype(), pair.get_shape()) for pair in pairs] == [
            ("F64", [3, 2]),
            ("F16", [2]),
        ]


def test_names_that_clash_or_are_no_text_are_told_apart(root: Folder) -> None:
    named = [("a/b", "c"), ("a", "b/c"), ("a/b/c", ""), ("\ud800", ""), ("\\ud800", ""), ("", "")]
    entries = [SavedTensor("state", name, key, "uint8", (3,)) for name, key in named]

    found = tensors_in(shard_of(root, entries))

    assert list(found.values()) == list(contents(1, entries)[2])
    assert [*found][:3] == ["state/a/b/c", "state/a/b/c#1", "state/a/b/c#2"]


def test_the_header_of_a_shard_is_these_very_bytes() -> None:
    """A load compares them, so other bytes are another version of the format."""
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"param/w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"__padding__/0":{"dtype":"U8","shape":[4084],"data_offsets":[12,4096]},'
        b'"state/w/m":{"dtype":"F32","shape":[1024],"data_offsets":[4096,8192]},'
        b'"state/\\u00fc/m":{"dtype":"F32","shape":[0],"data_offsets":[8192,8192]}}'
    )
    entries = [
        SavedTensor("param", "w", "", "bfloat16", (2, 3)),
        SavedTensor("state", "w", "m", "float32", (1024,)),
        SavedTensor("state", "ü", "m", "float32", (0,)),
    ]

    assert header_of(whole(entries)) == (4088).to_bytes(8, "little") + text.ljust(4088)


# -- what is asked of a writer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "start", "n_bytes"),
    [
        (0, 1, 10),
        (0, 0, BLOCK - 1),
        (0, BLOCK, BLOCK + 1),
        (0, 2 * BLOCK, 1),
        (5, 0, 1),
        (-1, 0, 1),
    ],
)
def test_what_is_not_whole_blocks_of_an_entry_ends_the_save(
    root: Folder, entry: int, start: int, n_bytes: int
) -> None:
    writer = Writer(root, 1, [SavedTensor("tensor", "a", "", "uint8", (BLOCK + 10,))])

    with pytest.raises(CheckpointError):
        writer.write(entry, start, memoryview(bytes(n_bytes)))

    assert root.names() == []
    with pytest.raises(CheckpointError, match="abandoned"):
        writer.commit({})


def test_any_bytes_of_an_entry_are_read_and_no_others(root: Folder) -> None:
    entries = [SavedTensor("tensor", "a", "", "uint8", (9 * BLOCK + 10,))]
    path = save(root, 1, entries)
    with CheckpointReader.open(path) as reader:
        data = everything(reader)[2][0]
        ends = [0, 1, 10, BLOCK - 1, BLOCK, BLOCK + 7, 8 * BLOCK, 9 * BLOCK, len(data)]
        for start, end in combinations(ends, 2):
            into = bytearray(end - start)
            reader.read(0, start, memoryview(into))
            assert into == data[start:end]
        for entry, start, n_bytes in ((0, 9 * BLOCK, 11), (0, -1, 5), (1, 0, 1), (-1, 0, 1)):
            with pytest.raises(CheckpointError):
                reader.read(entry, start, memoryview(bytearray(n_bytes)))


def test_a_block_that_is_written_twice_ends_the_save(root: Folder) -> None:
    writer = Writer(root, 1, [SavedTensor("tensor", "a", "", "uint8", (10,))])
    writer.write(0, 0, memoryview(bytes(10)))

    with pytest.raises(CheckpointError, match="twice"):
        writer.write(0, 0, memoryview(bytes(10)))

    assert root.names() == []


def test_a_block_that_is_not_written_is_named_and_ends_the_save(root: Folder) -> None:
    writer = Writer(root, 1, [SavedTensor("tensor", n, "", "uint8", (2 * BLOCK,)) for n in "ab"])
    writer.write(0, 0, memoryview(bytes(2 * BLOCK)))
    writer.write(1, 0, memoryview(bytes(BLOCK)))

    with pytest.raises(CheckpointError, match=f"'tensor b' was not written from byte {BLOCK} on"):
        writer.commit({})

    assert root.names() == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (SavedTensor("Param!", "a", "", "uint8", ()), "short lower-case word"),
        (SavedTensor("param", "a" * 5000, "", "uint8", ()), "longer than"),
        (SavedTensor("param", "a", "", "float7", ()), "no dtype"),
        (SavedTensor("param", "a", "", "uint8", (-1,)), "no number from 0"),
        (SavedTensor("param", "a", "", "uint8", (2**49, 4)), "larger than"),
        (SavedTensor("param", "a", "", "uint8", (1,) * 65), "dimensions"),
    ],
)
def test_an_entry_that_no_load_would_accept_is_refused_before_anything_is_made(
    root: Folder, entry: SavedTensor, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Writer(root, 1, [entry])

    assert root.names() == []


def test_the_same_entry_twice_is_refused(root: Folder) -> None:
    with pytest.raises(CheckpointError, match="twice"):
        Writer(root, 1, [SMALL[0], SMALL[0]])


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_is_no_directory_name_is_refused(root: Folder, step: int) -> None:
    with pytest.raises(CheckpointError, match="step"):
        Writer(root, step, SMALL)


def test_a_committed_save_is_over(root: Folder) -> None:
    writer = Writer(root, 1, [])
    writer.commit({})

    writer.abandon()

    with pytest.raises(CheckpointError, match="committed"):
        writer.commit({})
    assert root.names() == ["step-1"]


# -- meta and names ------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
STRINGS = st.text(st.characters(codec=None, exclude_categories=())).filter(
    lambda s: s.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") == s
)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(STRINGS, PLAIN, max_size=5), STRINGS, STRINGS.filter(lambda s: len(s) < 99))
def test_any_json_and_any_name_come_back_as_they_were(
    meta: dict[str, Any], name: str, key: str
) -> None:
    entry = SavedTensor("state", name, key, "uint8", (3,))

    found = decode(encode(Manifest(7, (entry,), ("01234567",), meta)), "here")

    assert found == Manifest(7, (entry,), ("01234567",), meta)
    assert repr(found.meta) == repr(meta)  # -0.0 and True are not 0.0 and 1


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(meta=st.dictionaries(STRINGS, PLAIN, max_size=5), name=STRINGS)
def test_any_json_and_any_name_go_through_files_too(
    tmp_path: Path, meta: dict[str, Any], name: str
) -> None:
    found = steps(tmp_path)
    step = found[-1].step + 1 if found else 0
    with (
        Folder.open(tmp_path) as root,
        Writer(root, step, [SavedTensor("a", name, "", "int8", ())]) as w,
    ):
        w.write(0, 0, memoryview(b"x"))
        w.commit(meta)

    with CheckpointReader.open(tmp_path) as reader:
        assert (reader.step, reader.meta, reader.entries[0].name) == (step, meta, name)


def test_numbers_outside_json_come_back(root: Folder) -> None:
    Writer(root, 1, []).commit({"all": [math.nan, math.inf, -math.inf, -0.0, 5e-324]})
    with CheckpointReader.open(root.path) as reader:
        assert repr(reader.meta["all"]) == "[nan, inf, -inf, -0.0, 5e-324]"


def test_tuples_come_back_as_lists(root: Folder) -> None:
    Writer(root, 1, []).commit({"betas": (0.9, (0.999,))})
    with CheckpointReader.open(root.path) as reader:
        assert reader.meta == {"betas": [0.9, [0.999]]}


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"a": {1: 2}}, "keys are strings"),
        ({"a": b"bytes"}, "has a bytes"),
        ({"a": {1, 2}}, "has a set"),
        ({"a": 10**5000}, "digits"),
        ({"a": nested(MAX_DEPTH)}, "nested deeper"),
        ({"a": "\ud83d" + "\ude00"}, "surrogates"),
    ],
)
def test_meta_that_would_not_come_back_ends_the_save(
    root: Folder, meta: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Writer(root, 1, []).commit(meta)

    assert root.names() == []


# -- which checkpoint ----------------------------------------------------------------------------


def test_the_highest_step_is_the_newest_whatever_order_they_were_saved_in(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as root:
        for step in (9, 100, 20):
            save(root, step)

    assert load(tmp_path) == contents(100)
    assert load(tmp_path, 20) == contents(20)
    assert load(tmp_path / "step-9") == contents(9)
    assert [found.step for found in steps(tmp_path)] == [9, 20, 100]


def test_what_there_is_is_told_where_nothing_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / f"step-3.{'a' * 32}.tmp").mkdir()
    (tmp_path / "notes").mkdir()

    with pytest.raises(NoCheckpoint, match=rf"'notes', 'step-3\.{'a' * 32}\.tmp'") as failure:
        CheckpointReader.open(tmp_path)

    assert "did not finish" in failure.value.advice


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as root:
        save(root, 4)

    with pytest.raises(NoCheckpoint, match="no checkpoint of step 5; found: 'step-4'"):
        CheckpointReader.open(tmp_path, 5)
    with pytest.raises(NoCheckpoint, match="is of step 4, not 5"):
        CheckpointReader.open(tmp_path / "step-4", 5)


def test_a_finished_but_unnamed_save_is_no_candidate(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as root:
        path = save(root, 4)
    hidden = path.rename(tmp_path / f"step-4.{'0' * 32}.tmp")

    for name in (tmp_path, hidden):
        with pytest.raises(NoCheckpoint):
            CheckpointReader.open(name)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as root:
        save(root, 4).rename(tmp_path / "step-8")

    with pytest.raises(CheckpointError, match="holds step 4"):
        CheckpointReader.open(tmp_path)


def test_a_missing_directory_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", f"{tmp_path}/a\0b"):
        with pytest.raises(NoCheckpoint):
            CheckpointReader.open(path)


def test_the_byte_level_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, hetero.checkpoint.writer, hetero.checkpoint.verify\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "False"]
