"""Kernels from their text to a device: the calls of NVRTC and the driver, and every way to fail."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
import hetero.device.nvrtc as room
from hetero.device import NoKernel, Toolchain, open_toolchain
from hetero.device.nvrtc import ARITHMETIC, open_nvrtc
from hetero.errors import StateError
from hetero.train.update import device_kernel, kernel
from hetero.train.update.device_kernel import SOURCE, DeviceLibrary, Natives, conditions
from tests.nvrtc import host
from tests.train.test_formulas import rule
from tests.train.test_kernel import assert_same, masters, train

O = torch.optim
CPU = torch.device("cpu")
LINE = "KERNEL(sgd, split, int16_t, float, float, 0)"
NAME = "sgd_split_float"
TEXT = f"{SOURCE.read_text(encoding='utf-8')}\n{LINE}\n"


@pytest.fixture(autouse=True)
def calls_work_again() -> Iterator[None]:
    """Leave the fakes, which the process has once, to other tests as they were."""
    yield
    host.fake().fake_reset()


class Run:
    """An SGD step on a few elements, by a pass or without one."""

    def __init__(self, n: int = 9) -> None:
        self.value = torch.linspace(-1, 1, n)
        self.grad = torch.linspace(2, -2, n)

    def by(self, native: kernel.Native | None, **flags: Any) -> list[torch.Tensor]:
        settings: dict[str, Any] = {"layout": torch.bfloat16, "factors": (0.5,), "native": native}
        return train(O.SGD, {"lr": 0.1, **flags}, self.value, [self.grad], **settings)


def names() -> list[str]:
    return [call.split()[0] for call in host.calls()]


# -- what is called ------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=4)
def test_a_kernel_is_compiled_loaded_and_launched_in_this_order() -> None:
    library = host.library()
    Run(1025).by(library)

    options = " ".join(("--gpu-architecture=sm_90", *room.OPTIONS))
    assert host.calls() == [
        "nvrtcGetNumSupportedArchs",
        "nvrtcGetSupportedArchs",
        "nvrtcCreateProgram update.cu",
        f"nvrtcCompileProgram {options}",
        "nvrtcGetCUBINSize",
        "nvrtcGetCUBIN",
        "nvrtcDestroyProgram",
        "cuDevicePrimaryCtxRetain 1",
        "cuCtxPushCurrent_v2",
        "cuModuleLoadData CUBIN",
        f"cuModuleGetFunction {NAME}",
        "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2",
        f"cuLaunchKernel {NAME} 2x256 stream {host.STREAM + 1} device 1",
        "cuCtxPopCurrent_v2",
    ]


def test_every_operation_is_told_to_round_by_itself() -> None:
    assert set(ARITHMETIC) == {"--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"}
    assert not any("fast" in option for option in room.OPTIONS)


def test_a_kernel_is_compiled_once_for_each_device_and_layout() -> None:
    library = host.library()
    for _ in range(3):
        Run().by(library)
    Run().by(library, momentum=0.9)

    assert names().count("nvrtcCompileProgram") == 2
    assert names().count("cuLaunchKernel") == 4
    assert library.condition == "compiled"


def test_threads_that_need_a_kernel_at_once_compile_it_once() -> None:
    library, run = host.library(), Run()
    found: list[list[torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(run.by(library))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert names().count("nvrtcCompileProgram") == 1
    for each in found:
        assert_same(each, run.by(None))


def test_an_empty_run_launches_nothing() -> None:
    Run(0).by(host.library())

    assert "cuLaunchKernel" not in names()


def test_a_thread_keeps_the_context_that_it_had() -> None:
    library = host.library()
    Run().by(library)
    host.fail("cuLaunchKernel", 719)
    Run().by(library)

    assert host.fake().fake_current() == 0


# -- a device that is newer or older than NVRTC --------------------------------------------------


def test_for_a_newer_device_the_driver_compiles() -> None:
    library, run = host.library(capability=120), Run()

    assert_same(run.by(library), run.by(None))
    assert (
        f"nvrtcCompileProgram --gpu-architecture=compute_90 {' '.join(room.OPTIONS)}"
        in host.calls()
    )
    assert "cuModuleLoadData PTX" in host.calls()
    assert library.condition == "compiled"


def test_an_older_device_is_updated_by_torch() -> None:
    library, run = host.library(capability=70), Run()

    assert_same(run.by(library), run.by(None))
    assert "NVRTC compiles for sm_75 on, not sm_70" in library.condition
    assert "cuLaunchKernel" not in names()


# -- failures ------------------------------------------------------------------------------------

CALLS = (
    *("nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "nvrtcCreateProgram"),
    *("nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcDestroyProgram"),
    *("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuModuleLoadData"),
    *("cuModuleGetFunction", "cuLaunchKernel"),
)


@pytest.mark.parametrize("name", CALLS)
def test_whatever_call_fails_torch_updates_with_the_same_bits(name: str) -> None:
    library, run = host.library(), Run()
    host.fail(name, 6)
    said: list[str] = []
    natives = Natives([library], said.append)

    for _ in range(3):
        assert_same(run.by(natives), run.by(None))
    assert len(said) == 1
    assert said[0].startswith("updates on cpu run as torch's operations, with the same bits: ")
    assert name in said[0]
    assert name in library.problem
    assert name in library.condition


def test_a_text_that_does_not_compile_says_the_first_error() -> None:
    with pytest.raises(NoKernel, match=r"COMPILATION \(6\): update.cu\(3\): error: no such kernel"):
        host.toolchain().build("int x = ;", NAME, CPU)
    assert names()[-1] == "nvrtcDestroyProgram"


def test_what_cannot_be_compiled_is_not_tried_again() -> None:
    library = host.library()
    host.fail("nvrtcCompileProgram", 6)
    for _ in range(3):
        Run().by(library)

    assert names().count("nvrtcCompileProgram") == 1


def test_a_library_without_a_function_is_no_kernel() -> None:
    libc = ctypes.CDLL(None)
    with pytest.raises(NoKernel, match="has no nvrtcGetNumSupportedArchs"):
        Toolchain(libc, libc, target=lambda place: room.Target(0, 90)).build(TEXT, NAME, CPU)


def test_without_nvrtc_updates_are_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_toolchain.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoKernel, match="built without CUDA"):
        open_toolchain()
    monkeypatch.setattr(torch.version, "cuda", "999.1")
    library, run = DeviceLibrary(kind="cpu"), Run()

    assert_same(run.by(library), run.by(None))
    assert "libnvrtc.so.999" in library.condition


def test_nvrtc_is_found_among_torchs_own_wheels(tmp_path: Path) -> None:
    """Its second part is loaded first: NVRTC looks for it by its bare name."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc-builtins.so.13.0"):
        (folder / name).write_bytes(b"not a library")
    with pytest.raises(OSError, match="builtins"):
        open_nvrtc(tmp_path, "13")
    (folder / "libnvrtc-builtins.so.13.0").unlink()
    with pytest.raises(OSError, match=r"libnvrtc\.so\.13: file too short|libnvrtc\.so\.13"):
        open_nvrtc(tmp_path, "13")


def test_an_error_of_the_caller_is_no_reason_for_torchs_operations() -> None:
    formula, group = rule(O.SGD, {})
    c, _ = formula.coefficients(group, {}, True)
    param, low = masters(torch.ones(8), torch.bfloat16)
    tensors: dict[str, Any] = {"param": param, "low": low, "grad": torch.ones(7), "states": []}
    with pytest.raises(StateError, match="one length"):
        kernel.update(formula, c, **tensors, factors=(), native=host.library())


# -- which pass ----------------------------------------------------------------------------------


def test_a_pass_takes_tensors_of_its_kind_of_device_alone() -> None:
    natives = device_kernel.natives(print)

    assert DeviceLibrary().takes(torch.device("cuda", 3))
    assert not DeviceLibrary().takes(CPU)
    assert natives.takes(torch.device("cuda"))
    assert not natives.takes(torch.device("meta"))
    assert natives.takes(CPU) == (kernel.load() is not None)


def test_how_updates_run_is_said_for_each_kind_of_device() -> None:
    assert set(conditions(CPU)) == {"cpu"}
    assert set(conditions(torch.device("cuda"))) == {"cpu", "cuda"}


def test_a_wheel_carries_the_source_that_is_compiled_on_a_device() -> None:
    root = Path(hetero.__file__).parent.parent
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(root))
    names = {file.distribution_path for file in builder.recurse_included_files()}

    assert SOURCE.is_file()
    assert str(SOURCE.relative_to(root)) in names
