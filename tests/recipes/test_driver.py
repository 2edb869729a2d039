"""What NVML tells of devices, by a library of that name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hetero.device import Accelerator
from hetero.recipes import doctor, facts
from hetero.recipes.doctor import DriverGpu
from hetero.recipes.findings import Level
from hetero.recipes.probes import QUICK, Rig

GIB = 2**30


class Nvml(ModuleType):
    """Devices by number: (name, UUID, total and free bytes or None)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *rows: tuple[Any, Any, tuple[int, int] | None]) -> None:
        super().__init__("pynvml")
        self.rows = rows
        for name in ("nvmlInit", "nvmlShutdown"):
            setattr(self, name, lambda: None)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.rows)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> Any:
        return b"580.95.05" if isinstance(self.rows[0][0], bytes) else "580.95.05"

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self.rows[handle][0]

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return self.rows[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        found = self.rows[handle][2]
        if found is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=found[0], free=found[1])

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4 + handle


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*rows: tuple[Any, Any, tuple[int, int] | None]) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(*rows))

    return install


def test_a_device_in_ram_is_one_although_its_driver_counts_no_memory(nvml: Any) -> None:
    nvml(("NVIDIA GB10", "GPU-10", None))
    driver, (gpu,), problem = doctor.ask_driver()
    assert (driver, problem) == ("580.95.05", "")
    assert gpu == DriverGpu("NVIDIA GB10", None, None, "PCIe 4 x16", "10")
    check = doctor.check_gpu(0, gpu)
    assert check.level is Level.GREEN and "HBM is a part of RAM" in check.found
    assert facts.used_bytes() == {"10": 0}


def test_older_bindings_say_bytes(nvml: Any) -> None:
    nvml((b"Tesla T4", b"GPU-4", (15 * GIB, 14 * GIB)))
    assert doctor.ask_driver() == (
        *("580.95.05", [DriverGpu("Tesla T4", 15 * GIB, 14 * GIB, "PCIe 4 x16", "4")]),
        "",
    )


class Second:
    """Stands for a CUDA device that is the driver's second one."""

    name = "cuda:0"
    shares_ram = False
    memory = SimpleNamespace(
        total_bytes=lambda: 80 * GIB, free_bytes=lambda: 66 * GIB, reserved_bytes=lambda: GIB
    )

    def facts(self) -> Accelerator:
        return Accelerator("NVIDIA A100", "sm_80", 108, 80 * GIB, uuid="b")


def test_a_device_is_found_among_the_drivers_by_its_uuid(nvml: Any) -> None:
    """CUDA_VISIBLE_DEVICES and `torch.cuda.set_device` choose one; NVML lists all."""
    nvml(("A", "GPU-a", (80 * GIB, 20 * GIB)), ("B", "GPU-b", (80 * GIB, 68 * GIB)))
    device: Any = Second()
    found = facts.look(Rig(device, QUICK, None), facts.used_bytes())
    assert found.link_type == "pcie5x16"
    assert found.context_bytes == GIB  # 14 in use, 12 before, 1 of torch's

    device.shares_ram = True
    assert facts.look(Rig(device, QUICK, None), {}).context_bytes is None
