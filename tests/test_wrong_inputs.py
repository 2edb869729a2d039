"""Eighty-two wrong inputs: each ends with 2, and with what was wrong, and what to do, in flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hetero.cli import main

DEMO = "train --width 32 --layers 2 --heads 2 --seq 16 --batch 2 --steps 2 --device cpu:sim"
PLAN = "plan llama-3-8b"
ON = f"{PLAN} --profile rtx4090"
CASES: dict[str, list[tuple[str, str]]] = {
    "typos": [
        ("trian", "Did you mean 'train'"),
        ("train --hmb 20GiB", "--hbm"),
        ("train --stpes 3", "--steps"),
        ("plan llama-3-8b --profil rtx4090", "--profile"),
        ("reprot runs/1", "report"),
    ],
    "sizes": [
        ("train --hbm 20Q", "20Q is not a size"),
        ("train --hbm lots", "lots is not a size"),
        ("train --hbm -1", "-1"),
        ("train --hbm 0", "0"),
        ("train --host 1.5.2G", "1.5.2G is not a size"),
        ("calibrate --nvme-burnin 5Q", "is not a size"),
        (f"{ON} --hbm 24gigs", "24gigs is not a size"),
    ],
    "budgets": [
        (f"{DEMO} --hbm 1KB", "--hbm"),
        (f"{DEMO} --hbm 90KB", "--hbm"),
        (f"{DEMO} --host 1KB", "--host"),
        (f"{DEMO} --nvme . --nvme-bytes 4096 --host 800KB", "--nvme-bytes"),
        ("plan llama-3-8b --profile rtx4090 --hbm 0", "is not a size"),
    ],
    "data": [
        (f"{DEMO} --data nowhere.txt", "nowhere.txt"),
        (f"{DEMO} --data empty.txt", "empty.txt"),
        (f"{DEMO} --data empty", "empty"),
        (f"{DEMO} --data short.txt", "the text has 3 bytes"),
        (f"{DEMO} --eval-data nowhere.txt --eval-every 1", "nowhere.txt"),
        ("train --model tiny-llama --data badrows.jsonl", "badrows.jsonl:2"),
        ("train --model tiny-llama --data nokeys.jsonl", "a row has other and no text"),
    ],
    "config": [
        ("train --config nowhere.toml", "nowhere.toml"),
        ("train --config bad.toml", "line 1"),
        ("train --config typo.toml", "hbm"),
        ("train --config options.json", "did you mean hbm"),
        ("train --config list.yaml", "list.yaml"),
        ("train --config bad.yaml", "bad.yaml"),
        ("train --config values.toml", "steps"),
    ],
    "folders": [
        ("train --resume --save-dir nothing", "nothing"),
        (f"{DEMO} --save-dir taken.txt", "taken.txt"),
        ("train --resume nowhere", "nowhere"),
        (f"{DEMO} --keep 0", "--keep"),
    ],
    "dtype and device": [
        ("train --precision bf61", "bf16"),
        ("train --device tpu", "cuda"),
        ("train --device cuda:0", "CUDA_VISIBLE_DEVICES"),
        (f"{DEMO} --device cuda", "CUDA"),
    ],
    "model": [
        ("train --task sft", "sft"),
        ("train --lora-rank 4", "adapters"),
        ("train --model tiny-lama --data short.txt", "tiny-llama"),
        ("train --model nowhere/at/all --data short.txt", "nowhere/at/all"),
        ("train --heads 3 --width 32", "heads"),
        ("train --optimizer adamm", "adamw"),
        ("train --lr 0", "--lr"),
        ("train --steps many", "--steps"),
        ("train --frozen nf5", "nf4"),
    ],
    "disk": [
        (f"{DEMO} --nvme nowhere/at/all --host 100KB", "nowhere/at/all"),
        (f"{DEMO} --nvme taken.txt --host 100KB", "taken.txt"),
    ],
    "plan": [
        ("plan", "llama-3-8b"),
        (f"{PLAN}", "--profile"),
        (f"{PLAN} --profile rtx409", "rtx4090"),
        ("plan llama-3-8 --profile rtx4090", "llama-3-8b"),
        (f"{ON} --batch 0", "--batch"),
        (f"{ON} --sequence 0", "--sequence"),
        (f"{ON} --optimizer adamm", "adamw"),
        (f"{ON} --frozen nf5", "nf4"),
        ("plan nothing:here --profile rtx4090", "nothing"),
    ],
    "report": [
        ("report nowhere", "nowhere"),
        ("report empty", "empty"),
        ("report taken.txt", "taken.txt"),
        ("report runs/1 --assert misses==0", "fetch.misses"),
        ("report runs/1 --assert hbm.peak_bytes<<1", "hbm.peak_bytes"),
        ("report runs/1 -o taken.txt/page.html", "taken.txt"),
        ("verify nowhere", "nowhere"),
        ("verify empty", "empty"),
        ("report runs/1 nowhere", "nowhere"),
    ],
    "run": [
        ("run", "SCRIPT"),
        ("run nowhere.py", "nowhere.py"),
        ("run --hmb 1G model.py", "--hbm"),
        ("run --hbm 20Q model.py", "20Q is not a size"),
        ("run --device tpu model.py", "cuda"),
        ("watch nowhere.py", "nowhere.py"),
    ],
    "calibrate and bench": [
        ("calibrate --lint", "FILES"),
        ("calibrate --qick", "--quick"),
        ("bench --lst", "--list"),
        ("calibrate bad.toml", "--lint"),
        ("verify", "DIRECTORY"),
        ("calibrate --nvme-burnin lots", "is not a size"),
        ("bench", "NAME"),
        ("bench overheda", "overhead"),
    ],
}

FILES = {
    "empty.txt": "",
    "short.txt": "abc",
    "taken.txt": "x",
    "badrows.jsonl": '{"text": "a"}\n{text\n',
    "nokeys.jsonl": '{"other": "a"}\n',
    "bad.toml": "hbm = = 3\n",
    "typo.toml": 'hmb = "1GiB"\n',
    "options.json": '{"hmb": "1GiB"}',
    "list.yaml": "- a\n",
    "bad.yaml": "a: [\n",
    "values.toml": 'steps = "many"\n',
    "model.py": "print(1)\n",
}
TRAINS = (DEMO, "train --model", "train --nvme")  # begins to, which takes seconds
LINES = [
    pytest.param(*case, id=case[0], marks=[pytest.mark.slow] * case[0].startswith(TRAINS))
    for cases in CASES.values()
    for case in cases
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that lines name, and with a run."""
    made = tmp_path_factory.mktemp("wrong")
    (made / "empty").mkdir()
    for name, text in FILES.items():
        (made / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert CliRunner().invoke(main, DEMO.split()).exit_code == 0
    return made


def test_there_are_eighty_two() -> None:
    assert len(LINES) == len({line for cases in CASES.values() for line, _ in cases}) == 82


@pytest.mark.parametrize(("line", "said"), LINES)
def test_a_wrong_input_ends_with_what_was_wrong_and_what_to_do(
    line: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    result = CliRunner().invoke(main, line.split())

    text = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert said in text
    assert "Traceback" not in result.output and "[Errno" not in text
    assert "Usage:" in text or text.count("Advice:") == 1
    assert not re.search(r"\b[a-z]\w*=", text.replace("misses==0", "")), "advice in Python"
