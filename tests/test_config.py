"""Settings are parsed once, checked together, and bounded by what the container really allows."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from pathlib import Path

import psutil
import pytest

import hetero
from hetero.config import (
    CHECKS,
    Config,
    HostLimit,
    describe_limit,
    gpu_nodes_free,
    host_limit,
    paranoid,
    parse_bytes,
    read_number,
)

MIB = 2**20
UNLIMITED_V1 = 2**63 - 4096

# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        (1, 1),
        (2**40, 2**40),
        ("7B", 7),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("2MB", 2_000_000),
        ("512MiB", 512 * MIB),
        ("8GB", 8 * 10**9),
        ("20GiB", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5KiB", 512),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("155453444", 155_453_444),
        ("155453444 bytes", 155_453_444),
        ("1e9", 10**9),
        ("1.5e3MB", 1_500_000_000),
        *((f"20{unit}", 20 * 2**30) for unit in ("G", "g", " Gi", "gib", "GIB", " GiB")),
        *((f"20{unit}", 20 * 10**9) for unit in ("GB", "gb", " Gb")),
        *((f"2{unit}", 2 * 1024**n) for n, unit in enumerate("kmgt", 1)),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(given: object, n_bytes: int) -> None:
    assert parse_bytes(given) == n_bytes


@pytest.mark.parametrize(
    "given",
    [
        *("8gb ", "8 GiBB", "8gig", "8  GiB", " 8GiB", "-8GiB", "+8GiB", "", "GiB", "8ib", "e9"),
        *("nan", "inf", "infGiB", ".5GiB", "1_000B", "0", "0.4", "0B", "0.4B", "1,5GiB", "8GiB\n"),
        *("8K\u0130B", "\u0668GiB", "8\u212a", "1e999", "9e99", "1e-3GB"),
        *(2**63, 10**400, "9" * 400 + "B", "9" * 5000 + "B"),  # figures of no machine
        *(0, -1, True, False, 1.5, float("nan"), float("inf"), None, b"8GiB", [8], (8, "GiB")),
    ],
    ids=lambda given: repr(given)[:20],
)
def test_anything_else_is_not_a_size(given: object) -> None:
    with pytest.raises(hetero.ConfigError, match="is not a size") as caught:
        parse_bytes(given, "hbm")

    assert "hbm" in str(caught.value)
    assert "'20G' (2^30 each), '20GB' (10^9 each), or a number of bytes" in caught.value.advice


@pytest.mark.parametrize("digits", ["9007199254740993", "9" * 18], ids=len)
def test_a_size_beyond_the_precision_of_floats_is_taken_exactly(digits: str) -> None:
    assert parse_bytes(f"{digits}B") == int(digits)


def test_a_refused_size_says_how_many_bytes_were_understood() -> None:
    with pytest.raises(hetero.ConfigError, match="understood 0 bytes"):
        parse_bytes("0GiB")
    with pytest.raises(hetero.ConfigError, match="no bytes understood"):
        parse_bytes("many")


# -- settings ------------------------------------------------------------------------------------


def test_sizes_are_ints_once_loaded() -> None:
    config = Config.load(hbm="1GiB", host="2GB", chunk_bytes="64KiB")

    assert (config.hbm, config.host, config.chunk_bytes) == (2**30, 2 * 10**9, 65536)


def test_every_setting_may_be_left_out() -> None:
    assert Config.load() == Config()


def test_settings_given_by_name_win_over_the_source() -> None:
    base = Config.load(hbm="1GiB", units=["a"])

    assert Config.load(base, hbm="2GiB") == Config(hbm=2**31, units=("a",))
    assert Config.load({"hbm": "1GiB"}, hbm=None) == Config()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.load().hbm = 1


@pytest.mark.parametrize(
    ("key", "meant"),
    [("chunk_bytse", "chunk_bytes"), ("hmb", "hbm"), ("hosts", "host"), ("unit", "units")],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(key: str, meant: str) -> None:
    with pytest.raises(hetero.ConfigError, match=f"'{key}', did you mean {meant}"):
        Config.load({key: 1})


def test_an_unknown_key_like_no_other_gets_no_guess() -> None:
    with pytest.raises(hetero.ConfigError, match="unknown setting 'qqq'") as caught:
        Config.load(qqq=1)

    assert "did you mean" not in str(caught.value)
    assert "chunk_bytes" in caught.value.advice


def test_a_key_that_is_no_string_is_an_unknown_setting() -> None:
    with pytest.raises(hetero.ConfigError, match=r"unknown setting .5"):
        Config.load({5: 1})


def test_every_setting_has_a_check() -> None:
    assert set(CHECKS) == {field.name for field in dataclasses.fields(Config)}


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(hetero.ConfigError) as caught:
        Config.load(hmb="1GiB", qqq=2, hbm=-1, chunk_bytes=100, precision="fp12", device="tpu")

    message = str(caught.value)
    for part in ("'hmb', did you mean hbm", "'qqq'", "hbm=-1", "chunk_bytes=100", "fp12", "tpu"):
        assert part in message


@pytest.mark.parametrize("given", [0, -64, 63, 65, "100B", True])
def test_a_chunk_size_that_is_no_positive_multiple_of_64_is_refused(given: object) -> None:
    with pytest.raises(hetero.ConfigError, match="chunk_bytes"):
        Config.load(chunk_bytes=given)


@pytest.mark.parametrize(("given", "near"), [(100, 128), (1, 64), (65, 64), (1000, 1024)])
def test_a_misaligned_chunk_size_names_the_nearest_right_one(given: int, near: int) -> None:
    with pytest.raises(hetero.ConfigError, match=f"nearest value is {near}"):
        Config.load(chunk_bytes=given)


@pytest.mark.parametrize("device", ["cuda", "cpu", "cpu:sim", None])
def test_a_known_device_is_kept_as_it_is(device: str | None) -> None:
    assert Config.load(device=device).device == device


@pytest.mark.parametrize("given", ["rtx4090", "profiles/mine.toml", Path("mine.toml")])
def test_a_profile_is_a_name_or_a_path(given: str | Path) -> None:
    assert Config.load(profile=given).profile == str(given)


@pytest.mark.parametrize("given", ["", 4090, True, ["a.toml"], b"a.toml", "a\0b"], ids=repr)
def test_a_profile_that_is_neither_name_nor_path_is_refused(given: object) -> None:
    with pytest.raises(hetero.ConfigError, match="profile="):
        Config.load(profile=given)


def test_units_are_kept_as_a_tuple_of_names() -> None:
    assert Config.load(units=["layers.*", "head"]).units == ("layers.*", "head")


@pytest.mark.parametrize("units", ["layers.*", ["a", 3], 5, 1.5], ids=repr)
def test_units_that_are_no_list_of_names_are_refused(units: object) -> None:
    with pytest.raises(hetero.ConfigError, match="units"):
        Config.load(units=units)


@pytest.mark.parametrize("source", [5, ["hbm"], b"x.toml", object()], ids=type)
def test_a_config_that_is_no_mapping_is_refused(source: object) -> None:
    with pytest.raises(hetero.ConfigError, match=type(source).__name__):
        Config.load(source)


def test_a_mapping_is_left_as_it_was() -> None:
    given = {"hbm": "1GiB"}
    Config.load(given, host="1GiB")

    assert given == {"hbm": "1GiB"}


# -- TOML ----------------------------------------------------------------------------------------


def test_a_toml_file_gives_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('hbm = "1GiB"\ndevice = "cpu"\nunits = ["größe.*"]\n', encoding="utf-8")
    right = Config(hbm=2**30, device="cpu", units=("größe.*",))

    assert Config.load(path) == right
    assert Config.load(str(path)) == right


def test_a_toml_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('hbm = "1GiB"\nhost = = 3\n')

    with pytest.raises(hetero.ConfigError, match="line 2") as caught:
        Config.load(path)
    assert "run.toml" in str(caught.value)


def test_a_key_given_twice_in_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("hbm = 1\nhbm = 2\n")

    with pytest.raises(hetero.ConfigError, match=r"run\.toml"):
        Config.load(path)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing here\n"])
def test_an_empty_toml_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)

    with pytest.raises(hetero.ConfigError, match="is empty"):
        Config.load(path)


@pytest.mark.parametrize("name", ["run.yaml", "run.yml"])
def test_a_yaml_file_gives_the_settings(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("hbm: 20GiB\nunits: [layers.*]\n")

    assert Config.load(path) == Config.load(hbm="20GiB", units=["layers.*"])
    as_json = tmp_path / "hetero.json"
    as_json.write_text('{"hbm": "20GiB", "units": ["layers.*"]}')
    assert Config.load(as_json) == Config.load(path)


def test_a_yaml_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("hbm: 20GiB\nhost: [\n")

    with pytest.raises(hetero.ConfigError, match=r"run.yaml(.|\n)*line 3"):
        Config.load(path)


def test_a_yaml_file_that_is_a_list_names_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("- hbm\n")

    with pytest.raises(hetero.ConfigError, match="names no settings"):
        Config.load(path)


def test_a_missing_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(hetero.ConfigError, match=r"none\.toml.*No such file"):
        Config.load(tmp_path / "none.toml")


def test_a_toml_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"hbm = \xff\xfe\n")

    with pytest.raises(hetero.ConfigError, match=r"run\.toml"):
        Config.load(path)


def test_a_directory_is_no_toml_file(tmp_path: Path) -> None:
    with pytest.raises(hetero.ConfigError, match="config file"):
        Config.load(tmp_path)


def test_wrong_values_of_a_toml_file_are_found_together(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('hbm = "lots"\n[table]\nx = 1\n')

    with pytest.raises(hetero.ConfigError, match=r"(?s)hbm='lots'.*'table'"):
        Config.load(path)


# -- the container's limit -----------------------------------------------------------------------
# Every fixture is a fake root. Limits are far below what any machine has free.

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
V1_LINE = "12:cpu,cpuacct:/x\n9:memory:{}\n1:name=systemd:/x\n"

LIMITED: dict[str, tuple[str, str, int, str]] = {  # lines of the process, files, MiB left, limit
    "version 2 with pages that the kernel would give back": (
        "0::/job\n",
        "2/job/max=64M; 2/job/current=40M; 2/job/stat=anon 1M, inactive_file 24M, active_file 1M",
        48,
        "2/job/max",
    ),
    "version 1 with pages that the kernel would give back": (
        V1_LINE.format("/job"),
        "1/job/limit=64M; 1/job/usage=40M; 1/job/stat=inactive_file 1M, total_inactive_file 24M",
        48,
        "1/job/limit",
    ),
    "version 2": ("0::/job\n", "2/job/max=64M; 2/job/current=24M", 40, "2/job/max"),
    "version 2 in a namespace": ("0::/\n", "2/max=64M; 2/current=1M", 63, "2/max"),
    "version 2, the parent is tighter": (
        "0::/pod/job/task\n",
        "2/pod/max=32M; 2/pod/current=2M; 2/pod/job/max=64M; 2/pod/job/current=1M; "
        "2/pod/job/task/max=max",
        30,
        "2/pod/max",
    ),
    "version 2, the parent is fuller": (
        "0::/pod/job\n",
        "2/pod/max=96M; 2/pod/current=90M; 2/pod/job/max=16M; 2/pod/job/current=1M",
        6,
        "2/pod/max",
    ),
    "version 2, only the throttling limit is set": (
        "0::/job\n",
        "2/job/max=max; 2/job/high=48M; 2/job/current=8M",
        40,
        "2/job/high",
    ),
    "version 2, no usage file": ("0::/job\n", "2/job/max=64M", 64, "2/job/max"),
    "version 2, usage is garbage": (
        "0::/job\n",
        "2/job/max=64M; 2/job/current=a lot",
        64,
        "2/job/max",
    ),
    "version 2, over its limit": ("0::/job\n", "2/job/max=64M; 2/job/current=65M", 0, "2/job/max"),
    "version 2, a colon and a space in the name": (
        "0::/kube:pod 7/job\n",
        "2/kube:pod 7/max=64M",
        64,
        "2/kube:pod 7/max",
    ),
    "version 2, the name leaves the namespace": ("0::/../job\n", "2/max=64M", 64, "2/max"),
    "version 1": (V1_LINE.format("/job"), "1/job/limit=64M; 1/job/usage=4M", 60, "1/job/limit"),
    "version 1, nested, the job itself has no limit": (
        V1_LINE.format("/pod/job"),
        "1/limit=none; 1/pod/limit=64M; 1/pod/usage=8M; 1/pod/job/limit=none; 1/pod/job/usage=8M",
        56,
        "1/pod/limit",
    ),
    "version 1, the container mounts its own group at the root": (
        V1_LINE.format("/docker/0123abcd"),
        "1/limit=64M; 1/usage=1M",
        63,
        "1/limit",
    ),
    "version 1, memory is mounted with another controller": (
        "4:hugetlb,memory:/job\n",
        "1/job/limit=64M",
        64,
        "1/job/limit",
    ),
    "hybrid, memory is under version 1": (
        V1_LINE.format("/job") + "0::/init.scope\n",
        "1/job/limit=64M; 1/job/usage=0; 2/unified/init.scope/cgroup.procs=1",
        64,
        "1/job/limit",
    ),
    "hybrid, both limit": (
        V1_LINE.format("/job") + "0::/job\n",
        "1/job/limit=64M; 2/job/max=48M",
        48,
        "2/job/max",
    ),
    "one line of garbage among good ones": (
        "\n:::\nnonsense\n0::/job\n",
        "2/job/max=64M",
        64,
        "2/job/max",
    ),
}

UNLIMITED: dict[str, tuple[str | None, str]] = {
    "no such file": (None, ""),
    "an empty cgroup file": ("", ""),
    "a cgroup without files": ("0::/job\n", ""),
    "version 2 says max everywhere": (
        "0::/pod/job\n",
        "2/max=max; 2/pod/max=max; 2/pod/job/max=max; 2/pod/job/current=1M",
    ),
    "version 1 says 2^63 - 4096": (
        V1_LINE.format("/job"),
        "1/limit=none; 1/job/limit=none; 1/job/usage=1M",
    ),
    "version 1 rounds to 64 KiB pages": (V1_LINE.format("/job"), "1/job/limit=9223372036854710272"),
    "a limit of minus one": (V1_LINE.format("/job"), "1/job/limit=-1"),
    "another controller only": ("3:cpuset:/job\n2:memoryless:/job\n", "1/job/limit=64M"),
    "limits are garbage": ("0::/job\n", "2/max=; 2/job/max=64 megabytes"),
    "another job's limit": ("0::/job\n", "2/jobs/max=64M; 2/job/child/max=64M"),
}
NAMES = {"limit": "limit_in_bytes", "usage": "usage_in_bytes"}  # of version 1


def path_of(short: str) -> str:
    """Return the path of a file of a cgroup: ``1/job/limit``, ``2/job/max``."""
    folder, _, name = short.rpartition("/")
    file = name if "." in name else f"memory.{NAMES.get(name, name)}"
    return f"{V1 if folder[0] == '1' else V2}{folder[1:]}/{file}"


def laid(folder: Path, cgroup: str | None, files: str) -> Path:
    """Make a root whose process is in these cgroups, with ``files`` such as ``2/job/max=64M``."""
    found = {} if cgroup is None else {"proc/self/cgroup": cgroup}
    for name, _, value in (file.partition("=") for file in files.split("; ") if file):
        value = re.sub(r"(\d+)M\b", lambda size: str(int(size[1]) * MIB), value)
        found[path_of(name)] = value.replace("none", str(UNLIMITED_V1)).replace(", ", "\n") + "\n"
    return fake_root(folder, found)


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("case", LIMITED)
def test_the_tightest_cgroup_above_the_process_bounds_the_host(tmp_path: Path, case: str) -> None:
    cgroup, files, n_mib, source = LIMITED[case]

    limit = HostLimit(n_mib * MIB, str(tmp_path / path_of(source)))
    assert host_limit(laid(tmp_path, cgroup, files)) == limit


@pytest.mark.parametrize("case", UNLIMITED)
def test_without_a_cgroup_limit_the_machine_bounds_the_host(tmp_path: Path, case: str) -> None:
    limit = host_limit(laid(tmp_path, *UNLIMITED[case]))

    assert limit.source == "free memory of the machine"
    assert 0 < limit.n_bytes <= psutil.virtual_memory().total


def node(number: int, cpus: str, free_kib: int) -> dict[str, str]:
    place = f"sys/devices/system/node/node{number}"
    lines = f"Node {number} MemTotal: 9999 kB\nNode {number} MemFree:  {free_kib} kB\n"
    return {f"{place}/cpulist": f"{cpus}\n", f"{place}/meminfo": lines}


def test_memory_of_a_coherent_gpu_is_no_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GH200 the kernel has nodes for HBM, without processors, and counts them as free."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    files = {**node(0, "0-71", 3000), **node(1, "", 1024), **node(2, "", 512)}
    assert gpu_nodes_free(fake_root(tmp_path / "cxl", files)) == 0  # a machine without such a GPU
    files["proc/driver/nvidia/version"] = "NVRM version"
    files["sys/devices/system/node/node3/cpulist"] = "\n"  # and nothing else
    root = fake_root(tmp_path / "gh200", files)
    assert gpu_nodes_free(root) == 1536 * 1024
    before, with_gpu = (host_limit(tmp_path / name).n_bytes for name in ("cxl", "gh200"))
    assert before - with_gpu < 2**30  # of a machine that is in use
    huge = fake_root(root, node(1, "", 2**40))
    assert host_limit(huge).n_bytes == 0
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")  # a node of a CXL expander is RAM
    assert gpu_nodes_free(huge) == 0


def test_a_cgroup_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    root = fake_root(tmp_path, {"proc/self/cgroup": "0::/pod/job\n"})
    (root / V2 / "pod/job/memory.max").mkdir(parents=True)  # EISDIR, as root may read anything
    fake_root(root, {f"{V2}/pod/memory.max": f"{64 * MIB}\n"})

    assert host_limit(root) == HostLimit(64 * MIB, str(root / V2 / "pod/memory.max"))


def test_a_list_of_cgroups_that_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)

    assert host_limit(tmp_path).source == "free memory of the machine"


def test_a_limit_file_of_bytes_that_are_no_text_is_passed_over(tmp_path: Path) -> None:
    root = fake_root(tmp_path, {"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": ""})
    (root / V2 / "job/memory.max").write_bytes(b"\xff\xfe\x00")

    assert read_number(root / V2 / "job/memory.max") is None
    assert host_limit(root).source == "free memory of the machine"


def test_a_cgroup_whose_name_is_no_utf8_is_followed_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / V2 / os.fsdecode(b"job\xff")
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{64 * MIB}\n")
    fake_root(tmp_path, {"proc/self/cgroup": ""})
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/job\xff\n")

    assert host_limit(tmp_path).n_bytes == 64 * MIB


def test_the_limit_of_this_very_process_is_found() -> None:
    limit = host_limit()

    assert limit.n_bytes > 0
    assert limit.source


def test_a_limit_is_described_with_its_source() -> None:
    assert describe_limit(HostLimit(3 * 2**29, "/x/memory.max")) == "1.5 GiB (/x/memory.max)"


@pytest.mark.parametrize(
    ("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_paranoia_is_asked_for_by_one_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    if value is None:
        monkeypatch.delenv("HETERO_PARANOID", raising=False)
    else:
        monkeypatch.setenv("HETERO_PARANOID", value)

    assert paranoid() is asked
