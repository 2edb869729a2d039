"""Part III: faults and hostile files. The tables lie beside this file, one for each subject."""

from __future__ import annotations

import gzip
import importlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.config import Config
from hetero.errors import HeteroError
from hetero.report.run import EVENTS, Run
from hetero.weights import Weights
from tests.campaigns.faults_recording import recorded
from tests.campaigns.fuzz import Parser, check

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("faults_*.py"))
PARSERS: list[Parser] = [
    parser
    for table in TABLES
    for parser in getattr(importlib.import_module(f"{__package__}.{table}"), "PARSERS", [])
]
SAMPLE, ALL = 25, 2000


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_file_that_was_tampered_with_is_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    check(parser, tmp_path, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_thousands_of_such_files_are_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    check(parser, tmp_path, ALL)


# -- small files that ask for much ---------------------------------------------------------------

MIB = 2**20


def dotted_keys(folder: Path) -> None:
    (folder / "a.toml").write_text("a." * 100_000 + "b = 1\n")
    Config.load(folder / "a.toml")


def a_dotted_key_on_each_line(folder: Path) -> None:
    lines = (f"k{n}." + "a." * 1000 + "b = 1" for n in range(100))
    (folder / "a.toml").write_text("\n".join(lines))
    Config.load(folder / "a.toml")


def aliases_that_double(folder: Path) -> None:
    rows = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
    (folder / "a.yaml").write_text("\n".join(["a0: &a0 [1]", *rows]))
    Config.load(folder / "a.yaml")


def an_endless_device(folder: Path) -> None:
    (folder / "a.toml").symlink_to("/dev/zero")
    Config.load(folder / "a.toml")


def a_header_of_brackets(folder: Path) -> None:
    text = b'{"a":[' + b"[]," * MIB + b"[]]}"
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    Weights(folder)


def rows_that_compress_well(folder: Path) -> None:
    recorded(folder / "run")
    log = folder / "run" / EVENTS
    first, *_ = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    log.write_bytes(gzip.compress(first * 60_000, 1))
    Run.load(folder / "run")


@pytest.mark.parametrize(
    ("read", "most_bytes"),
    [
        (dotted_keys, 4 * MIB),
        (a_dotted_key_on_each_line, 4 * MIB),
        (aliases_that_double, 4 * MIB),
        (an_endless_device, 4 * MIB),
        (a_header_of_brackets, 32 * MIB),
        (rows_that_compress_well, 32 * MIB),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_small_file_that_asks_for_much_is_refused(
    tmp_path: Path, read: Callable[[Path], None], most_bytes: int
) -> None:
    tracemalloc.start()
    with pytest.raises(HeteroError) as refused:
        read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert refused.value.advice
    assert peak < most_bytes
