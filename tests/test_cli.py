"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from hetero.cli import main
from hetero.config import HostLimit
from hetero.device import CpuDevice, Slab
from hetero.errors import ConfigError
from hetero.plan.presets import PRESETS
from hetero.recipes import doctor
from hetero.recipes.endings import stopping
from hetero.recipes.findings import Check, Examination, Level
from hetero.recipes.folders import recorded_in
from hetero.recipes.guide import ORDER, TRAIN_EXAMPLES, TRAIN_GROUPS
from hetero.recipes.options import DEMO_MINUTES, TrainOptions, command_options
from hetero.recipes.record import MOST_STEPS

SHAPE = "--width 32 --layers 2 --heads 2 --seq 16 --batch 2 --lr 0.01"
TINY = f"train {SHAPE} --steps 6 --device cpu --hbm 300KB --host 700KB"


@pytest.fixture(autouse=True)
def elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves its checkpoints, and what is on disk, in the working directory."""
    monkeypatch.chdir(disk)


def call(line: str | Sequence[str]) -> Result:
    return CliRunner().invoke(main, line.split() if isinstance(line, str) else line)


def last_json(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


# -- help ----------------------------------------------------------------------------------------


def test_help_names_the_commands_and_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys\n"
        "from hetero.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print('loaded', 'torch' in sys.modules, 'rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert all(name in done.stdout for name in ("train", "doctor", "bench"))
    assert done.stdout.splitlines()[-1] == "loaded False False"


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_has_help_and_json(command: str) -> None:
    result = call([command, "--help"])

    assert result.exit_code == 0
    assert "--json" in result.stdout


EARLY = (  # what is wrong is told before torch is imported
    "train --lr 0",
    "train --hbm 20Q",
    "train --data /nowhere/at/all",
    "train --model ./nowhere",
    "train --resume",
    "train --dry-run",
    "train --profile rtx409",
    "run --hbm 20Q {script}",
    "plan",
    "plan llama-3-8b",
    "plan lama-3-8b --profile rtx4090",
    "plan llama-3-8b --profile rtx4090 --host many",
    "report nowhere",
    "verify nowhere",
)


def test_what_is_wrong_with_options_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from hetero.cli import main\n"
        f"for line in {[line.format(script=script) for line in EARLY]!r}:\n"
        "    done = CliRunner().invoke(main, line.split())\n"
        "    print(line, done.exit_code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        f"{line.format(script=script)} 2 False False" for line in EARLY
    ]


def test_help_lists_commands_in_the_order_of_use_and_says_all_of_each() -> None:
    said = call("--help").stdout.partition("Commands:\n")[2].splitlines()

    assert [line.split()[0] for line in said] == [*ORDER]
    assert all(line.endswith(".") and "..." not in line and len(line) <= 80 for line in said)


def test_help_of_train_has_every_option_in_a_group_and_examples_that_parse() -> None:
    command = main.commands["train"]
    said = call("train --help").stdout
    grouped = [name for names in TRAIN_GROUPS.values() for name in names]

    assert sorted(grouped) == sorted(
        param.name or "" for param in command.params if param.name != "as_json"
    )
    titles = [line for line in said.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert titles == [*(f"{title}:" for title in TRAIN_GROUPS), "Others:", "Examples:"]
    for line in TRAIN_EXAMPLES:
        assert f"  {line}\n" in said
        words = shlex.split(line, comments=True)
        assert words[:2] == ["hetero", "train"]
        command.make_context("train", words[2:], resilient_parsing=True)


@pytest.mark.parametrize("command", ["train", "run", "plan", "calibrate"])
def test_help_says_what_a_size_is(command: str) -> None:
    said = " ".join(call([command, "--help"]).stdout.split())

    assert "20G for short (2^30 bytes each), 20GB (10^9 each), or a number of bytes" in said
    assert "SIZE" in said


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hetero tr", ["train"]),
        ("hetero train --nv", ["--nvme", "--nvme-bytes"]),
        ("hetero train --frozen ", ["keep", "int8", "nf4"]),
        ("hetero plan llama-3-4", ["llama-3-405b"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(typed: str, offered: list[str]) -> None:
    *args, last = typed.split(" ")[1:]

    found = ShellComplete(main, {}, "hetero", "_HETERO_COMPLETE").get_completions(args, last)

    assert [item.value for item in found] == offered


def test_a_plan_of_nothing_lists_the_published_names() -> None:
    result = call("plan --profile rtx4090")

    assert result.exit_code == 2
    assert all(name in result.stderr for name in PRESETS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --hbm 20Q --lr 1", "ConfigError: --hbm 20Q is not a size"),
        ("train --lr 0 --steps 0", "--lr 0.0 has to be above 0; --steps 0 has to be above 0"),
        ("train --dry-run", "as --profile rtx4090"),
        ("plan llama-3-8b --profile rtx409", "--profile rtx409 is no file"),
    ],
)
def test_errors_of_commands_name_flags_and_give_one_advice(line: str, said: str) -> None:
    found = " ".join(call(line).stderr.split())

    assert said in found
    assert found.count("Advice:") == 1
    assert not re.search(r"\b\w+=", found)


def test_help_states_the_defaults_that_the_recipe_has() -> None:
    fields = dataclasses.fields(TrainOptions)
    defaults = {f.name: f.default for f in fields if type(f.default) in (int, float)}
    shown = {
        p.name: p.help or "" for p in main.commands["train"].params if isinstance(p, click.Option)
    }

    checked = [name for name in shown if name in defaults]

    assert set(checked) >= {"steps", "batch", "seq", "lr", "seed", "keep", "accumulate"}
    assert str(MOST_STEPS) in shown["record"]
    for name in checked:
        assert shown[name].endswith(f"[default: {defaults[name]}]"), name


def test_the_version_is_told() -> None:
    assert "hetero, version" in call("--version").stdout


# -- train ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_train_prints_a_json_object_for_each_step_and_one_at_the_end(device: str) -> None:
    result = call(f"{TINY} --device {device} --json")

    data = last_json(result)
    assert result.exit_code == 0
    *steps, _ = map(json.loads, result.stdout.splitlines())
    assert [line["loss"] for line in steps] == data["losses"]
    assert data["steps"] == len(data["losses"]) == 6
    assert data["status"]["device"] == device
    assert data["status"]["evictions"] > 0


def test_train_says_what_was_where() -> None:
    result = call(TINY)

    assert result.exit_code == 0
    for word in ("what was where", "HBM", "HOST", "activation", "resident", "sha256", "nats"):
        assert word in result.stdout
    assert "step 6/6" in result.stdout


def test_train_writes_a_report_and_says_what_shows_it() -> None:
    result = call(TINY)

    *_, first, second = result.stdout.splitlines()
    assert first == "report: runs/1/run/report.html, of its first 6 steps"
    assert Path("runs/1/run/report.html").exists()
    command = second.removeprefix("in this terminal: hetero ")
    assert "6 steps" in call(command).stdout
    assert call("report runs/1").stdout == call(command).stdout  # finds its run


def test_a_report_on_a_folder_of_checkpoints_is_of_its_newest_recording() -> None:
    for name in ("run", "run-2"):
        Path("runs/1", name).mkdir(parents=True)
        Path("runs/1", name, "meta.json").write_text("{}")
    os.utime("runs/1/run-2/meta.json", ns=(0, 2**60))
    os.utime("runs/1/run/meta.json", ns=(0, 2**50))

    assert recorded_in("runs/1") == Path("runs/1/run-2")
    assert recorded_in("runs/1/run") == Path("runs/1/run")
    assert recorded_in("runs/2") == Path("runs/2")


@pytest.mark.parametrize("path", ["runs", "runs/2", "runs/2/step-6", "runs/2/run/report.html"])
def test_a_report_of_a_page_a_checkpoint_or_all_runs_is_of_the_run_that_it_leads_to(
    path: str,
) -> None:
    for n in (1, 2):
        Path(f"runs/{n}/run").mkdir(parents=True)
        Path(f"runs/{n}/step-6").mkdir()
        Path(f"runs/{n}/run/report.html").write_text("")
        Path(f"runs/{n}/run/meta.json").write_text("{}")
        os.utime(f"runs/{n}/run/meta.json", ns=(0, 2**50 + n))

    assert recorded_in(path) == Path("runs/2/run")


def test_the_runs_of_ranks_stay_together() -> None:
    for rank in range(2):
        Path(f"all/rank-{rank}").mkdir(parents=True)
        Path(f"all/rank-{rank}/meta.json").write_text("{}")

    assert recorded_in("all") == Path("all")


def test_train_records_where_it_is_told_to_or_not_at_all() -> None:
    there, nowhere = (last_json(call(f"{TINY} --json --record {name}")) for name in ("a/b", "none"))

    assert (there["report"], nowhere["report"]) == ("a/b/report.html", None)
    assert there["weights_sha256"] == nowhere["weights_sha256"]
    assert [path.name for path in Path("runs/2").iterdir()] == ["step-6"]


def test_a_report_that_cannot_be_written_is_a_line_and_no_failure() -> None:
    Path("file").write_text("in the way")

    result = call(f"{TINY} --record file/run")

    assert result.exit_code == 0
    assert "no report: DiskReadError" in result.stdout.splitlines()[-1]


def test_train_reads_texts_and_a_settings_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    settings = tmp_path / "hetero.toml"
    settings.write_text('hbm = "8MB"\nhost = "16MB"\n')

    line = f"train {SHAPE} --steps 2 --device cpu --hbm 360KB --json --config {settings}"
    data = last_json(call(f"{line} --data {tmp_path}/one.txt --data {tmp_path}/two.txt"))

    assert data["data_tokens"] == 601
    assert data["status"]["tiers"]["HBM"]["budget"] == 360_000
    assert data["status"]["tiers"]["HOST"]["budget"] == 16_000_000


def test_a_run_is_cut_short_only_when_nobody_said_how_long() -> None:
    assert command_options(None, {}).minutes == DEMO_MINUTES
    assert command_options(None, {"steps": 5}).minutes is None
    assert command_options(None, {"steps": 5, "minutes": 1.0}).minutes == 1.0
    assert command_options(None, {"model": "tiny-llama"}).minutes is None


def test_train_can_keep_activations_and_do_without_a_budget() -> None:
    data = last_json(call(f"{TINY} --hbm all --host 8MB --no-checkpoint-blocks --json"))

    assert data["status"]["mode"] == "resident"


@functools.cache
def uninterrupted(line: str) -> Any:
    """Return what a run tells at its end, which is the same for every signal."""
    return last_json(call(f"{line} --json --save-dir whole"))


@pytest.mark.campaign(seconds=1)  # each takes 15 s
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_a_run_behind_its_step_and_resume_goes_on_bit_for_bit(
    name: str, status: int
) -> None:
    line = TINY.replace("--steps 6", "--steps 24")
    command = [sys.executable, "-c", "from hetero.cli import main; main()", *line.split()]
    threads = {"OMP_NUM_THREADS": "1"}  # as here: another number has other bits in torch's sums
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
    )
    assert run.stdout is not None
    assert any("step 1/24" in line for line in iter(run.stdout.readline, ""))  # it is under way

    run.send_signal(getattr(signal, name))
    said, _ = run.communicate(timeout=60)

    assert run.returncode == status
    assert "stopped" in said
    assert "--resume goes on" in said
    whole = uninterrupted(line)
    resumed = last_json(call(f"{line} --json --resume --save-dir runs/1 --hbm 500KB"))
    assert 0 < resumed["resumed_step"] < resumed["steps"] == 24
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert Path("runs/1/run/report.html").exists()
    assert resumed["report"] == "runs/1/run-2/report.html"
    verdict = last_json(call("verify runs/1 --json"))
    assert verdict["newest_good"] == 24


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--hbm 100KB", "OutOfMemory"),
        ("--hbm 1KB", "BudgetError"),
        ("--hbm lots", "ConfigError"),
        ("--heads 3", "ConfigError"),
        ("--steps 0", "ConfigError"),
        ("--lr 0", "ConfigError"),
        ("--task sft", "ConfigError"),
        ("--data /nowhere/at/all", "ConfigError"),
    ],
)
def test_what_cannot_be_honoured_ends_with_status_2_and_advice(given: str, said: str) -> None:
    result = call(f"{TINY} {given}")

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Advice" in result.stderr
    assert "Traceback" not in result.output


def test_a_failure_is_told_in_json_too() -> None:
    result = call(f"{TINY} --hbm 100KB --json")

    data = last_json(result)
    assert result.exit_code == 2
    assert data["error"] == "OutOfMemory"
    assert "raise --hbm to " in data["advice"]


@pytest.mark.parametrize("given", ["--steps x", "--device tpu", "--config nowhere.toml"])
def test_an_option_out_of_range_is_a_usage_error(given: str) -> None:
    result = call(f"{TINY} {given}")

    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_a_script_that_fails_shows_its_own_frames_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def deep():\n    return 1 / 0\n\ndeep()\n")

    result = call(["run", str(script)])

    assert result.exit_code == 1
    assert re.findall(r'File "([^"]+)"', result.stderr) == [str(script)] * 2
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_dry_run_ends_with_a_command_and_the_budgets_that_it_needs() -> None:
    few, enough = (
        call(f"{TINY} --dry-run --profile laptop-4c-avx2-ddr4 --hbm {hbm}")
        for hbm in ("90KB", "1MB")
    )

    last = few.stdout.splitlines()[-1]
    assert (few.exit_code, enough.exit_code) == (1, 0)
    assert re.fullmatch(r"the same command without --dry-run, with --hbm \d{6}", last)
    assert enough.stdout.splitlines()[-1] == "the same command without --dry-run"


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_tells_everything_in_json() -> None:
    result = call("doctor --json")

    data = last_json(result)
    found = {check["name"]: check for check in data["checks"]}
    assert {"python", "torch", "ram", "ram limit", "cores", "omp settings", "disk"} <= set(found)
    assert all(check["fix"] for check in found.values() if check["level"] != "green")
    assert result.exit_code == (0 if data["healthy"] else 1)


@pytest.mark.parametrize("broken", [ImportError, OSError])
def test_doctor_answers_where_torch_is_missing_or_broken(broken: type[Exception]) -> None:
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        f"            raise {broken.__name__}('libcudart.so.12: not found')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from hetero.cli import main\n"
        "main(['doctor', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert found["torch"]["level"] == "red"
    assert found["torch"]["found"] == "cannot be imported: libcudart.so.12: not found"
    assert found["python"]["level"] == "green"


def test_doctor_shows_every_check_and_a_block_to_paste() -> None:
    result = call("doctor")

    block = result.stdout.split("```")[1]
    assert "torch: " in block
    assert "ram limit: " in block


def test_a_red_check_ends_the_doctor_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = Examination((Check("torch", Level.RED, "1.0 [old]", "update"),))
    monkeypatch.setattr(doctor, "examine", lambda: sick)

    result = call("doctor")

    assert result.exit_code == 1
    assert "1.0 [old]" in result.stdout


class FakeCuda(CpuDevice):
    """Stands for a CUDA device: locks four blocks, copies in RAM."""

    n_locked = 0

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        slab = super().slab(n_bytes)
        if self.n_locked < 4:
            self.n_locked += 1
            slab.unlock = self._unlock
        return slab

    def _unlock(self) -> None:
        self.n_locked -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = doctor.DriverGpu("Fake 1", 80 * doctor.GIB, 70 * doctor.GIB, "PCIe 5 x16")
    monkeypatch.setattr(doctor, "PROBE_BYTES", 4096)
    monkeypatch.setattr(doctor, "open_cuda", FakeCuda)
    monkeypatch.setattr(doctor, "ask_driver", lambda: ("1.2", [gpu], ""))


@pytest.mark.usefixtures("cuda")
def test_doctor_measures_links_and_page_locking_where_there_is_cuda() -> None:
    found = {check.name: check for check in doctor.check_cuda(HostLimit(2**20, "a test"))}

    assert list(found) == [
        *("driver", "gpu 0", "h2d rate", "d2h rate", "device update kernel", "memlock limit"),
        "page-locking",
    ]
    assert "70 GiB free of 80 GiB" in found["gpu 0"].found
    assert "GB/s" in found["h2d rate"].found
    assert found["device update kernel"].level is Level.YELLOW
    assert "torch does its work, same bits (" in found["device update kernel"].found
    assert found["page-locking"].level is Level.YELLOW
    assert found["page-locking"].fix.startswith("set pinned=0MiB")
    assert found["page-locking"].found.startswith("16 KiB of RAM")


def test_a_gpu_that_torch_cannot_use_is_red_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise ConfigError("cuda:0 is busy", advice="end others")

    gpu = doctor.DriverGpu("Fake 1", 1, 1, "PCIe unknown")
    monkeypatch.setattr(doctor, "CudaDevice", refuse)
    monkeypatch.setattr(doctor, "ask_driver", lambda: ("1.2", [gpu], ""))

    (check,) = doctor.check_cuda(HostLimit(2**20, "a test"))

    assert check.level is Level.RED
    assert "Fake 1" in check.found and "cuda:0 is busy" in check.found


# -- bench ---------------------------------------------------------------------------------------


class FakeRunner:
    """Stands for the runner of benchmarks: one benchmark that holds and one that does not."""

    NAMES: ClassVar = [("fast", "is fast"), ("slow", "is slow")]

    @dataclasses.dataclass(frozen=True)
    class Case:
        name: str
        value: float
        unit: str
        op: str
        reach: float
        holds: bool

    @dataclasses.dataclass(frozen=True)
    class Result:
        bench: str
        cases: tuple[Any, ...]
        machine: dict[str, Any]
        detail: dict[str, Any]

        def as_json(self) -> dict[str, Any]:
            return dataclasses.asdict(self)

    def names(self) -> list[tuple[str, str]]:
        return self.NAMES

    def run_bench(self, name: str, device: str | None) -> Any:
        case = self.Case("time", 2.0, "s", "<=", 3.0 if name == "fast" else 1.0, name == "fast")
        return self.Result(name, (case,), {"device": device}, {})


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.bench.runner", FakeRunner)


def test_without_a_checkout_the_error_says_where_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hetero.bench.CHECKOUT", tmp_path)
    result = call("bench --list")
    assert result.exit_code != 0 and "clone of the repository" in result.output


@pytest.mark.usefixtures("runner")
class TestBench:
    def test_the_list_names_every_benchmark(self) -> None:
        assert "is slow" in call("bench --list").stdout
        assert last_json(call("bench --list --json")) == {"fast": "is fast", "slow": "is slow"}

    def test_one_that_holds_ends_well(self) -> None:
        result = call("bench fast --device cpu --json")

        assert result.exit_code == 0
        assert set(last_json(result)) == {"bench", "cases", "machine", "detail"}
        assert last_json(result)["machine"] == {"device": "cpu"}

    def test_one_that_does_not_hold_ends_with_status_1(self) -> None:
        result = call("bench slow")

        assert result.exit_code == 1
        assert "does not hold" in result.stdout

    def test_all_of_them_print_a_line_each(self) -> None:
        result = call("bench --all --json")

        assert [json.loads(line)["bench"] for line in result.stdout.splitlines()] == [
            "fast",
            "slow",
        ]
        assert result.exit_code == 1

    @pytest.mark.parametrize("line", ["bench", "bench quick"])
    def test_an_unknown_name_is_a_usage_error_that_lists_the_names(self, line: str) -> None:
        result = call(line)

        assert result.exit_code == 2
        assert "fast, slow" in result.stderr


def test_a_second_ctrl_c_ends_a_run_at_once_with_its_status() -> None:
    with pytest.raises(SystemExit) as ended, stopping():
        raise KeyboardInterrupt

    assert ended.value.code == 130
