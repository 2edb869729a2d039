"""Hardware profiles: read and written number for number, checked rule by rule, and what follows."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.plan import hardware
from hetero.plan.figures import Figure, Table
from hetero.plan.hardware import dump, find, lint, load, names, parse
from hetero.plan.lint import BROKEN, DOUBTFUL, card_of, entries
from hetero.plan.machine import MachineProfile
from hetero.plan.rates import curve_seconds, grid_rate, interpolated
from hetero.types import Lane

GPUS = [
    *("v100-sxm2-32", "rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "h100-sxm"),
    *("h200-sxm", "h200-16c", "gh200-96", "b200-sxm", "gb10"),
]
LAPTOPS = ["laptop-8c-avx2-ddr5", "laptop-4c-avx2-ddr4"]
LANES = [Lane.H2D, Lane.D2H]
CURVE = "[[65536, 0.25], [1048576, 0.75], [16777216, 0.97]]"
FACTS = '\narch = "sm_89"\ncount = 1\nsm = 128\nhbm_bytes = { v = '
GRID = "[[512, 512, 512, 60], [512, 512, 2048, 80], [2048, 512, 512, 90], [2048, 512, 2048, 120]]"


shipped = functools.cache(find)


def text_of(name: str) -> str:
    return dump(find(name))


def planted(name: str, old: str, new: str) -> str:
    """Return a shipped profile's text with one passage replaced."""
    text = text_of(name)
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def with_grid(rows: str = GRID) -> MachineProfile:
    return parse(
        planted(
            "rtx4090", "bf16_eff = ", f'bf16_grid = {{ rows = {rows}, src = "est" }}\nbf16_eff = '
        )
    )


# -- the profiles that come with hetero ----------------------------------------------------------


def test_the_shipped_profiles_are_those_of_the_reference() -> None:
    assert set(names()) >= {*GPUS, *LAPTOPS}


@pytest.mark.parametrize("name", [*GPUS, *LAPTOPS])
def test_a_shipped_profile_has_no_problem_and_survives_writing(name: str) -> None:
    text = (hardware.folder() / f"{name}.toml").read_text()

    profile = parse(text)
    assert lint(text) == []
    assert profile == parse(dump(profile))
    assert profile.name == name
    assert profile.kind == "reference"
    assert "/home" not in text and "/work" not in text


@pytest.mark.parametrize("name", GPUS)
def test_a_reference_gpu_is_one_whose_datasheet_is_known(name: str) -> None:
    gpu = find(name).gpu

    assert gpu is not None
    assert card_of(gpu.name) is not None


def test_every_source_of_a_shipped_profile_is_cited() -> None:
    for name in [*GPUS, *LAPTOPS]:
        profile = find(name)
        cited = {entry.item.source for entry in entries(profile)}

        assert cited == {source.key for source in profile.sources}, name


def test_the_digest_is_of_the_canonical_text() -> None:
    profile = find("rtx4090")
    comment = parse("# a comment\n" + text_of("rtx4090"))

    assert hardware.sha256(profile) == hardware.sha256(comment)
    assert hardware.sha256(profile) != hardware.sha256(dataclasses.replace(profile, name="other"))


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean rtx4090") as caught:
        find("rtx-4090")

    assert "h200-sxm" in caught.value.advice


def test_a_profile_is_found_by_path_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text_of("h200-sxm"))

    assert find(path) == find(str(path)) == find("h200-sxm")


def test_a_package_with_profiles_of_its_own_looks_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in (("package", "a"), ("checkout", "b")):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{name}.toml").write_text(text_of("rtx4090"))
    monkeypatch.setattr(hardware, "FOLDERS", (tmp_path / "package", tmp_path / "checkout"))
    assert names() == ("a",)

    monkeypatch.setattr(hardware, "FOLDERS", (tmp_path / "missing", tmp_path / "checkout"))
    assert names() == ("b",)


# -- reading and writing -------------------------------------------------------------------------


def test_numbers_are_kept_in_bytes_and_seconds_exactly_rounded() -> None:
    profile = find("rtx4090")

    assert profile.gpu is not None and profile.link is not None
    assert profile.gpu.hbm_bytes_per_second.value == 1.008e12
    assert profile.gpu.tflops.bf16 == Figure(165.2e12, "hmc")
    assert profile.link.h2d.latency_seconds.value == 1e-5
    assert profile.host.update_per_second.value == 2e9
    assert profile.link.h2d.size_curve is not None
    assert profile.link.h2d.size_curve.rows[0] == (65536, 0.25)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(0, 1), st.text(max_size=8))
def test_any_figure_survives_writing(rate: float, spread: float, text: str) -> None:
    profile = shipped("laptop-4c-avx2-ddr4")
    dram = Figure(rate * 1e9 / 7, "est", spread)
    host = dataclasses.replace(profile.host, dram_bytes_per_second=dram)
    changed = dataclasses.replace(profile, host=host, name=text)

    again, problems = hardware.read(dump(changed))

    assert problems == []
    assert again == changed


def test_a_file_that_is_missing_or_wrong_is_named_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"mine\.toml: No such file"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"mine\.toml: not text"):
        load(path)
    path.write_text(planted("rtx4090", "GBps = { v = 25,", "GBps = { v = -25,"))
    with pytest.raises(ConfigError, match=r"mine\.toml: link\.h2d\.GBps: -2.5e\+10 is negative"):
        load(path)


def test_what_is_no_toml_is_one_problem() -> None:
    (problem,) = lint("schema = ")

    assert problem.startswith("not TOML")


# -- the linter ----------------------------------------------------------------------------------

PLANTED = {
    "another schema": ("schema = 1", "schema = 2", "schema: 2 is not 1"),
    "another kind": ('kind = "reference"', 'kind = "guess"', "kind: 'guess' is not"),
    "no src": (
        'sm = 128\nhbm_bytes = { v = 25757220864, src = "est" }',
        "sm = 128\nhbm_bytes = { v = 25757220864 }",
        "gpu.hbm_bytes: has no src",
    ),
    "no devices": (
        "[overlap]",
        '[net.inter]\nGBps = { v = 40, src = "est" }\ndevices_per_node = 0\n\n[overlap]',
        "net.inter.devices_per_node: a machine of 0 devices",
    ),
    "unknown src": (
        'bf16 = { v = 165.2, src = "hmc" }',
        'bf16 = { v = 165.2, src = "hmm" }',
        "gpu.tflops.bf16: src 'hmm' is not under [src]",
    ),
    "a bare number": (
        'hbm_eff = { v = 0.88, src = "est" }',
        "hbm_eff = 0.88",
        "gpu.hbm_eff: 0.88 has no source",
    ),
    "a bare table": (
        f'size_curve = {{ rows = {CURVE}, src = "est" }}',
        "size_curve = [[65536, 0.25]]",
        "link.h2d.size_curve: has no source",
    ),
    "a table without rows": (
        f"rows = {CURVE}",
        "rows = []",
        "link.h2d.size_curve.rows: takes rows of 2 numbers",
    ),
    "a number that is none": (
        "v = 165.2",
        "v = nan",
        "tflops.bf16: NaN is not a finite number",
    ),
    "a number beyond all": ("v = 165.2", "v = 1e999999", "1E+999999 is not a finite number"),
    "a string for a number": ("v = 165.2", 'v = "165.2"', "'165.2' is not a finite number"),
    "a string for a count": ("sm = 128", 'sm = "128"', "gpu.sm: '128' is not a whole number"),
    "a missing key": ("sm = 128\n", "", "gpu.sm: missing"),
    "an unknown key": (
        "hbm_eff =",
        "hbm_efficiency = 1\nhbm_eff =",
        "gpu.hbm_efficiency: unknown key, did you mean hbm_eff?",
    ),
    "an unknown section": ("[nvme]", "[disk]\n[nvme]", "disk: unknown key"),
    "an unknown part of a number": (
        'v = 0.88, src = "est"',
        'v = 0.88, src = "est", sparse = 2',
        "gpu.hbm_eff.sparse: unknown key",
    ),
    "an efficiency above 1": (
        "bf16_eff = { v = 0.85",
        "bf16_eff = { v = 85",
        "gpu.matmul.bf16_eff: 85 is above 1",
    ),
    "a factor above 1": (
        "mixed_factor = { v = 0.6",
        "mixed_factor = { v = 1.2",
        "nvme.mixed_factor: 1.2 is above 1",
    ),
    "a slowdown below 1": (
        "gemm_under_h2d = { v = 1.02",
        "gemm_under_h2d = { v = 0.98",
        "overlap.gemm_under_h2d: 0.98 is below 1",
    ),
    "a rate above its peak": (
        "GBps = { v = 25, src",
        "GBps = { v = 31.6, src",
        "link.h2d.GBps: 31.6 is above its peak, 31.5",
    ),
    "a duplex rate above the one alone": (
        "h2d_GBps = { v = 15",
        "h2d_GBps = { v = 26",
        "link.duplex.h2d_GBps: 26 is above its peak, 25",
    ),
    "memory above its wires": (
        "dram_GBps = { v = 63",
        "dram_GBps = { v = 90",
        "host.dram_GBps: 90 is above its peak, 89.6",
    ),
    "writing on above writing first": (
        "write_sustained_GBps = { v = 1.4",
        "write_sustained_GBps = { v = 14",
        "nvme.write_sustained_GBps: 14 is above its peak, 6",
    ),
    "an fp16-accumulate rate": (
        "fp16 = { v = 165.2",
        "fp16 = { v = 330",
        "gpu.tflops.fp16: 330 is a sparse or fp16-accumulate rate",
    ),
    "a sparse rate": ("fp8 = { v = 330.3", "fp8 = { v = 660.6", "it is 330.3"),
    "bits for bytes on a link": (
        "GBps = { v = 25, src",
        "GBps = { v = 200, src",
        "200 is above the 31.504 GB/s that pcie4x16 can move: gigabits?",
    ),
    "bits for bytes in a peak": (
        "peak_GBps = { v = 31.5",
        "peak_GBps = { v = 252",
        "link.h2d.peak_GBps: 252 is above the 31.504 GB/s",
    ),
    "bits for bytes of HBM": (
        "hbm_GBps = { v = 1008",
        "hbm_GBps = { v = 8064",
        "gpu.hbm_GBps: 8064 is above",
    ),
    "bits for bytes of a drive": (
        "read_GBps = { v = 7",
        "read_GBps = { v = 56",
        "nvme.read_GBps: 56 is above the 16 GB/s of its kind",
    ),
    "a link of no known type": (
        'type = "pcie4x16"',
        'type = "pci"',
        "link.h2d.type: 'pci' is no type of link",
    ),
    "GB for GiB": (
        "hbm_bytes = { v = 25757220864",
        "hbm_bytes = { v = 24000000000",
        "gpu.hbm_bytes: 24000000000 is 22.35 GiB",
    ),
    "another card's memory": (
        "hbm_bytes = { v = 25757220864",
        "hbm_bytes = { v = 34190917632",
        "has about 24 GiB",
    ),
    "GB of a card that nobody knows": (
        f'name = "NVIDIA GeForce RTX 4090"{FACTS}25757220864',
        f'name = "Card X"{FACTS}24000000000',
        "24000000000 is round in GB",
    ),
    "a negative rate": (
        "dram_GBps = { v = 63",
        "dram_GBps = { v = -63",
        "host.dram_GBps: -6.3e+10 is negative",
    ),
    "a rate of zero": (
        "adam_Gparam_s = { v = 2,",
        "adam_Gparam_s = { v = 0,",
        "host.adam_Gparam_s: 0 is zero",
    ),
    "a negative spread": (
        'v = 0.88, src = "est"',
        'v = 0.88, src = "est", spread = -0.1',
        "gpu.hbm_eff: a spread of -0.1 is negative",
    ),
    "a curve that goes back": (
        "[65536, 0.25], [1048576, 0.75]",
        "[1048576, 0.75], [65536, 0.25]",
        "link.h2d.size_curve: rows are not in ascending order",
    ),
    "a curve that falls": ("[1048576, 0.75]", "[1048576, 0.2]", "the share falls from 0.25 to 0.2"),
    "a curve above 1": ("[16777216, 0.97]", "[16777216, 1.01]", "a share of the rate is above 1"),
    "a curve steeper than the size": (
        "[65536, 0.25]",
        "[65536, 0.01]",
        "bytes would be faster than one of 65536",
    ),
    "a grid above the peak": (
        "bf16_eff =",
        'bf16_grid = { rows = [[512, 512, 512, 170]], src = "est" }\nbf16_eff =',
        "gpu.matmul.bf16_grid: 512 x 512 x 512 at 170 TFLOPS is above the peak, 165.2",
    ),
    "a grid with a hole": (
        "bf16_eff =",
        'bf16_grid = { rows = [[1, 1, 1, 1], [2, 2, 1, 1]], src = "est" }\nbf16_eff =',
        "gpu.matmul.bf16_grid: 2 rows, and 4 different (m, n, k) make a grid",
    ),
    "a peak without efficiency": (
        'bf16_eff = { v = 0.85, src = "est" }\n',
        "",
        "gpu.matmul.bf16_eff: missing",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_linter_names_the_key_and_the_reason(case: str) -> None:
    old, new, said = PLANTED[case]

    problems = lint(planted("rtx4090", old, new))

    assert any(said in problem for problem in problems), problems


def test_a_dtype_that_a_card_has_not_is_a_problem() -> None:
    old = "[gpu.tflops]\n"
    text = planted("v100-sxm2-32", old, f'{old}bf16 = {{ v = 125, src = "nv" }}\n')
    text = text.replace("fp16_eff", 'bf16_eff = { v = 0.8, src = "est" }\nfp16_eff', 1)

    assert lint(text) == ["gpu.tflops.bf16: Tesla V100-SXM2-32GB has no bf16 matmuls"]


def test_a_host_that_is_to_compute_needs_a_matmul_rate() -> None:
    text = "\n".join(x for x in text_of("laptop-8c-avx2-ddr5").splitlines() if "gemm" not in x)

    (problem,) = lint(text)
    assert problem.startswith("host.gemm_fp32_GFLOPS: without [gpu] the host computes")


def test_a_host_matmul_above_the_peak_is_a_problem() -> None:
    text = planted(
        "laptop-8c-avx2-ddr5", "gemm_fp32_GFLOPS = { v = 627", "gemm_fp32_GFLOPS = { v = 900"
    )

    assert lint(text) == ["host.gemm_fp32_GFLOPS: 900 is above its peak, 896"]
    grid = '\n[host.matmul]\nlaunch_us = { v = 3, src = "est" }\n'
    grid += 'fp32_grid = { rows = [[64, 64, 64, 0.9]], src = "est" }\n'
    (problem,) = lint(text_of("laptop-8c-avx2-ddr5") + grid)
    assert problem.startswith("host.matmul.fp32_grid: 64 x 64 x 64 at 0.9 TFLOPS is above")


def test_a_net_that_is_given_in_bits_is_a_problem() -> None:
    text = planted("h200-sxm", "GBps = { v = 450", "GBps = { v = 3600")

    assert lint(text) == ["net.GBps: 3600 is above the 900 GB/s of its kind: gigabits?"]

    text = planted("h200-sxm", "GBps = { v = 42", "GBps = { v = 400")

    assert lint(text) == [
        "net.inter.GBps: 400 is above the 100 GB/s of one network card: gigabits?"
    ]


def test_what_the_formulas_cannot_use_is_not_loaded_and_what_is_doubtful_is() -> None:
    with pytest.raises(ConfigError, match="is zero"):
        parse(planted("rtx4090", "adam_Gparam_s = { v = 2,", "adam_Gparam_s = { v = 0,"))

    assert parse(planted("rtx4090", "bf16_eff = { v = 0.85", "bf16_eff = { v = 85")).gpu is not None


def test_every_rule_of_the_linter_has_a_planted_violation() -> None:
    texts = [planted("rtx4090", old, new) for old, new, _ in PLANTED.values()]
    texts.append(planted("gb10", "hbm_bytes = { v = 1", "hbm_bytes = { v = 2"))
    profiles = [profile for profile, _ in map(hardware.read, texts) if profile is not None]

    for rule in BROKEN + DOUBTFUL:
        assert any(list(rule(profile)) for profile in profiles), rule.__name__


def test_a_device_in_one_ram_has_no_more_than_that() -> None:
    assert shipped("gb10").has_one_ram
    assert not any(shipped(name).has_one_ram for name in (*GPUS, *LAPTOPS) if name != "gb10")
    with pytest.raises(ConfigError, match="a device in one RAM"):
        parse(planted("gb10", "hbm_bytes = { v = 1", "hbm_bytes = { v = 2"))


# -- times ---------------------------------------------------------------------------------------


def test_a_matmul_takes_its_operations_over_the_peak_and_its_efficiency() -> None:
    seconds = find("rtx4090").matmul_seconds(2048, 1024, 4096)

    assert seconds == pytest.approx(2 * 2048 * 1024 * 4096 / (165.2e12 * 0.85))


def test_one_tile_more_than_the_multiprocessors_costs_a_wave_more() -> None:
    profile = find("rtx4090")
    full, over = (profile.matmul_seconds(128 * n, 128, 4096) for n in (128, 129))

    assert over == pytest.approx(2 * full)


def test_a_measured_grid_is_met_at_its_points_and_level_beyond() -> None:
    profile = with_grid()

    assert profile.matmul_seconds(512, 512, 2048) == pytest.approx(2 * 512 * 512 * 2048 / 80e12)
    assert profile.matmul_seconds(8192, 512, 8192) == pytest.approx(2 * 8192 * 512 * 8192 / 120e12)
    between = 2 * 1024 * 512 * 512 / profile.matmul_seconds(1024, 512, 512)
    assert between == pytest.approx(math.sqrt(60e12 * 90e12))


def test_a_dtype_without_matmuls_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        find("v100-sxm2-32").matmul_seconds(1, 1, 1, "bf16")
    with pytest.raises(ConfigError, match="fp8"):
        find("laptop-4c-avx2-ddr4").matmul_seconds(1, 1, 1, "fp8")


def test_without_a_gpu_the_host_computes() -> None:
    profile = find("laptop-8c-avx2-ddr5")

    assert profile.compute is profile.host
    assert profile.matmul_seconds(1000, 1000, 1000, "fp32") == pytest.approx(2e9 / 627e9)
    assert profile.memory_seconds(65e9) == 1.0
    assert profile.copy_seconds(Lane.H2D, 65e9) == 2.0
    assert profile.op_seconds(3.0, 2.0) == 3.0


def test_an_operation_takes_the_longer_of_both_and_its_launch() -> None:
    profile = find("rtx4090")

    assert profile.memory_seconds(1008e9 * 0.88) == pytest.approx(1.0)
    assert profile.op_seconds(1e-3, 2e-3) == pytest.approx(2e-3 + 5e-6)


def test_a_copy_follows_its_size_curve_and_its_latency() -> None:
    profile = find("rtx4090")
    at = {n: profile.copy_seconds(Lane.H2D, n) for n in (0, 1, 65536, 2**20, 2**30)}

    assert at[0] == 0
    assert at[1] == pytest.approx(1e-5, rel=0.01)
    assert at[65536] == pytest.approx(65536 / (25e9 * 0.25))
    assert at[2**20] == pytest.approx(2**20 / (25e9 * 0.75))
    assert at[2**30] == pytest.approx(2**30 / 25e9, rel=0.001)
    assert find("rtx5090").copy_seconds(Lane.D2H, 50e9) == pytest.approx(1 + 1e-5)


def test_the_other_direction_and_other_devices_slow_a_copy_down() -> None:
    profile = find("a100-40")

    def rate(both_ways: bool = False, devices: int = 1) -> float:
        n_bytes = 1e12
        return n_bytes / profile.copy_seconds(Lane.H2D, n_bytes, both_ways, devices=devices)

    assert rate() == pytest.approx(24.8e9, rel=1e-3)
    assert rate(both_ways=True) == pytest.approx(18.6e9, rel=1e-3)
    assert rate(devices=8) == pytest.approx(17.3875e9, rel=1e-3)


def test_an_update_is_bound_by_its_kernel_or_by_the_memory() -> None:
    profile = find("rtx4090")

    assert profile.update_seconds(2 * 10**9, 1) == 1.0
    assert profile.update_seconds(1, 63e9) == 1.0


def test_writing_slows_down_when_the_fast_cache_is_full() -> None:
    profile = find("rtx4090")

    assert profile.write_seconds(6e9) == 1.0
    assert profile.write_seconds(1.4e9, 2e11) == pytest.approx(1.0)
    assert profile.write_seconds(6e9 + 1.4e9, 2e11 - 6e9) == pytest.approx(2.0)
    assert find("h200-sxm").write_seconds(5e9, 1e15) == 1.0  # nobody knows of a cliff


def test_reading_and_writing_at_once_slow_each_other_down() -> None:
    profile = find("rtx4090")

    assert profile.read_seconds(7e9) == 1.0
    assert profile.read_seconds(7e9, both_ways=True) == pytest.approx(1 / 0.6)
    assert profile.write_seconds(6e9, both_ways=True) == pytest.approx(1 / 0.6)


def test_a_transfer_takes_its_latency_besides() -> None:
    profile = find("rtx4090")
    late = Figure(1e-3, "run")
    nvme = dataclasses.replace(
        profile.drive(), read_latency_seconds=late, write_latency_seconds=late
    )
    slower = dataclasses.replace(profile, nvme=nvme)

    assert slower.read_seconds(7e9) == pytest.approx(1.001)
    assert slower.write_seconds(6e9) == pytest.approx(1.001)
    assert slower.read_seconds(7e9, both_ways=True) == pytest.approx(1.001 / 0.6)


def test_a_profile_without_a_drive_says_so() -> None:
    profile = dataclasses.replace(find("rtx4090"), nvme=None)

    with pytest.raises(ConfigError, match=r"has no \[nvme\]") as caught:
        profile.read_seconds(1)
    assert "--nvme" in caught.value.advice


sizes = st.integers(1, 2**34)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*GPUS, *LAPTOPS]), st.sampled_from(LANES), st.booleans(), sizes, sizes)
def test_a_larger_copy_never_takes_less_nor_beats_the_rate(
    name: str, lane: Lane, both_ways: bool, a: int, b: int
) -> None:
    profile = shipped(name)
    less, more = (profile.copy_seconds(lane, n, both_ways) for n in sorted((a, b)))

    assert less <= more * (1 + 1e-12)
    if profile.link is not None:
        way = profile.link.h2d if lane is Lane.H2D else profile.link.d2h
        assert a / profile.copy_seconds(lane, a, both_ways) <= way.bytes_per_second.value * (
            1 + 1e-9
        )


shares = st.lists(
    st.tuples(st.integers(1, 2**30), st.floats(1e-3, 1)),
    min_size=1,
    max_size=6,
    unique_by=lambda r: r[0],
)


@settings(max_examples=60, deadline=None)
@given(shares, st.floats(0, 1), sizes, sizes)
def test_no_curve_makes_a_larger_copy_faster_or_beats_the_rate(
    rows: list[tuple[int, float]], latency: float, a: int, b: int
) -> None:
    curve = tuple(sorted(rows))
    less, more = (curve_seconds(curve, n, 1e9, latency) for n in sorted((a, b)))

    assert less <= more * (1 + 1e-9)
    assert a <= 1e9 * curve_seconds(curve, a, 1e9, latency) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_no_matmul_beats_the_peak(m: int, n: int, k: int) -> None:
    for profile in (shipped("rtx4090"), with_grid()):
        assert 2 * m * n * k / profile.matmul_seconds(m, n, k) <= 165.2e12


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(1, 10_000)] * 3), st.tuples(*[st.integers(0, 5_000)] * 3))
def test_a_larger_matmul_never_takes_less(
    shape: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    profile = shipped("h200-sxm")
    larger = [a + b for a, b in zip(shape, more, strict=True)]

    assert profile.matmul_seconds(*shape) <= profile.matmul_seconds(*larger) * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 1e12), min_size=8, max_size=8), st.tuples(*[st.floats(1, 1e5)] * 3))
def test_a_rate_between_the_points_of_a_grid_is_between_their_rates(
    rates: list[float], point: tuple[float, float, float]
) -> None:
    corners = [(m, n, k) for m in (8.0, 512.0) for n in (16.0, 64.0) for k in (1.0, 4096.0)]
    rows = tuple((*corner, rate) for corner, rate in zip(corners, rates, strict=True))

    found = grid_rate(rows, *point)

    assert min(rates) * (1 - 1e-9) <= found <= max(rates) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 4e11))
def test_writing_twice_takes_as_long_as_writing_all_of_it(
    a: float, b: float, before: float
) -> None:
    profile = shipped("rtx4090")
    at_once = profile.write_seconds(a + b, before)

    assert profile.write_seconds(a, before) + profile.write_seconds(b, before + a) == pytest.approx(
        at_once, rel=1e-9, abs=1e-6
    )


def test_interpolation_is_geometric_and_level_beyond_the_ends() -> None:
    rows = ((1.0, 10.0), (100.0, 1000.0))

    assert interpolated(rows, 10) == pytest.approx(100)
    assert interpolated(rows, 0.1) == 10
    assert interpolated(rows, 1e9) == 1000


def test_a_table_is_written_with_its_source_and_spread() -> None:
    profile = shipped("rtx4090")
    assert profile.link is not None
    curve = Table(((1.0, 0.5), (2.0, 0.75)), "est", 0.25)
    h2d = dataclasses.replace(profile.link.h2d, size_curve=curve)
    changed = dataclasses.replace(profile, link=dataclasses.replace(profile.link, h2d=h2d))

    text = dump(changed)

    assert 'size_curve = { rows = [[1, 0.5], [2, 0.75]], src = "est", spread = 0.25 }' in text
    assert parse(text) == changed
