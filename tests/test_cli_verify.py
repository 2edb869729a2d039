"""``hetero verify``: what it says of checkpoints, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hetero.checkpoint.manifest import SHARD, SavedTensor
from hetero.checkpoint.writer import Writer
from hetero.cli import main
from hetero.io import Folder
from hetero.report.run import META

ENTRIES = (
    SavedTensor("param", "a [red]", "", "uint8", (5000,)),
    SavedTensor("state", "a", "m", "int8", (9,)),
)


def call(line: Sequence[str]) -> Result:
    return CliRunner().invoke(main, ["verify", *line])


def last_json(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with the checkpoints of steps 5 and 10."""
    for step in (5, 10):
        with Folder.open(tmp_path) as folder, Writer(folder, step, ENTRIES) as writer:
            for number, entry in enumerate(ENTRIES):
                writer.write(number, 0, memoryview(bytes([step]) * entry.n_bytes))
            writer.commit({})
    return tmp_path


def damage(path: Path, offset: int = 4096 + 100) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_good_checkpoints_end_with_status_0(root: Path) -> None:
    result = call([str(root)])

    assert result.exit_code == 0
    assert "newest good: step 10" in result.stdout


def test_one_flipped_bit_ends_with_status_1_and_names_the_newest_good_one(root: Path) -> None:
    damage(root / "step-10" / SHARD)

    result = call([str(root)])

    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert "newest good: step 5" in result.stdout


def test_everything_is_told_in_json(root: Path) -> None:
    damage(root / "step-5" / SHARD, 2 * 4096 + 4095)  # padding counts too
    (root / f"step-11.{'0' * 32}.tmp").mkdir()

    result = call([str(root), "--json"])

    data = last_json(result)
    assert result.exit_code == 1
    assert [(c["step"], c["ok"], c["bytes"]) for c in data["checkpoints"]] == [
        (5, False, 16384),
        (10, True, 16384),
    ]
    assert "block 0 of entry 0 ('param a [red]')" in data["checkpoints"][0]["problem"]
    assert data["unfinished"] == [f"step-11.{'0' * 32}.tmp"]
    assert data["newest_good"] == 10
    assert data["ok"] is False


def test_one_checkpoint_is_checked_by_its_own_name(root: Path) -> None:
    damage(root / "step-5" / SHARD)

    assert call([str(root / "step-10")]).exit_code == 0
    assert call([str(root / "step-5")]).exit_code == 1


def test_a_damaged_manifest_is_a_damaged_checkpoint(root: Path) -> None:
    damage(root / "step-10" / "MANIFEST.json", 100)

    data = last_json(call([str(root), "--json"]))

    assert [(c["ok"], c["bytes"]) for c in data["checkpoints"]] == [(True, 16384), (False, 0)]
    assert "MANIFEST.json is damaged" in data["checkpoints"][1]["problem"]


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_to_check_ends_with_status_2_and_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    result = call([str(tmp_path / name), "--json"])

    assert result.exit_code == 2
    assert last_json(result)["error"] == "NoCheckpoint"
    assert "Advice" in result.stderr


def test_checkpoints_of_other_programs_end_with_status_2_and_their_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")

    result = call([str(tmp_path)])

    assert result.exit_code == 2
    assert "safetensors" in result.stderr


def test_verifying_does_not_load_torch(root: Path) -> None:
    code = (
        "import sys\n"
        "from hetero.cli import main\n"
        "try:\n"
        f"    main(['verify', {str(root)!r}])\n"
        "except SystemExit as end:\n"
        "    print('ended', end.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "ended 0 False False"


def in_order(said: str, *names: str) -> bool:
    places = [said.find(name) for name in names]
    return -1 not in places and places == sorted(places)


def test_a_folder_of_runs_leads_to_the_checkpoints_of_each(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("2", "10"):
        shutil.copytree(root / "step-5", runs / name / "step-5")
    (runs / "2" / "run").mkdir()
    (runs / "2" / "run" / META).write_text("{}")
    (runs / "3" / "run").mkdir(parents=True)  # a run that ended before it saved

    good = call([str(runs)])
    damage(runs / "2" / "step-5" / SHARD)
    damaged, told = call([str(runs)]), call([str(runs), "--json"])

    assert (good.exit_code, damaged.exit_code, told.exit_code) == (0, 1, 1)
    assert in_order(good.stdout, "runs/2", "newest good: step 5", "runs/10")
    assert [json.loads(line)["ok"] for line in told.stdout.splitlines()] == [False, True]
    for recording in (runs / "2" / "run", runs / "2" / "run" / META):
        assert call([str(recording)]).exit_code == 1


def test_a_folder_without_any_checkpoint_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = call([str(tmp_path)])

    said = " ".join(result.output.split())  # a long name breaks lines anywhere
    assert result.exit_code == 2
    assert "holds no checkpoint" in said and "Traceback" not in said
