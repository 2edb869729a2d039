"""Facts of a machine that the system tells, without measuring (floor 4)."""

from __future__ import annotations

import platform
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.device import Accelerator, Device
from hetero.io import Folder
from hetero.plan.lint import physical_gbps
from hetero.plan.machine import ONE_RAM
from hetero.recipes.doctor import ask_driver
from hetero.recipes.probes import Rig

ISA = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "sve2")
COHERENT = ("GH200", "GB200", "GB300")  # connected to their host by C2C, not by PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of a machine that need no measuring."""

    name: str
    cores: int
    numa_nodes: int
    isa: tuple[str, ...]
    ram_bytes: int
    limit_bytes: int
    memlock_bytes: int | None
    """None: no limit."""
    device: str
    link_type: str
    accelerator: Accelerator | None = None
    accelerators: int = 0
    context_bytes: int | None = None
    driver: str = ""
    odirect: bool = False


def look(rig: Rig, used_before: Mapping[str, int]) -> MachineFacts:
    """Return the facts of this machine; ``used_before`` is what `used_bytes` returned before."""
    driver, gpus, _ = ask_driver()
    accelerator = rig.device.facts()
    uuid = "" if accelerator is None else accelerator.uuid.removeprefix("GPU-")
    apart = None if rig.device.shares_ram else accelerator  # from RAM
    ours = [gpu for gpu in gpus if gpu.uuid == uuid] or gpus  # a part of one (MIG) has its own UUID
    pcie = ours[0].pcie.lower().replace(" ", "") if ours else ""
    return MachineFacts(
        name=host_name(),
        cores=rig.cores,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        isa=instruction_sets(),
        ram_bytes=psutil.virtual_memory().total,
        limit_bytes=rig.limit_bytes,
        memlock_bytes=memlock_bytes(),
        device=rig.device.name,
        link_type=ONE_RAM if apart is None else link_type(apart.name, pcie),
        accelerator=accelerator,
        accelerators=len(gpus) if accelerator is not None else 0,
        context_bytes=context_bytes(rig.device, used_before.get(uuid, 0)),
        driver=driver,
        odirect=rig.folder is not None and is_direct(rig.folder),
    )


def host_name() -> str:
    """Return this machine's name in a form that a file name can have."""
    return re.sub(r"[^a-z0-9-]+", "-", platform.node().lower()).strip("-") or "machine"


def instruction_sets(path: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the vector extensions that matter to matmuls; none if they are unknown."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    has = set(line[1].split()) if line else set()
    return tuple(name for name in ISA if name in has)


def memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def link_type(gpu: str, pcie: str) -> str:
    """Return the type of a link, as profiles name it; a virtual device may not tell."""
    if any(name in gpu for name in COHERENT):
        return "c2c"
    return pcie if physical_gbps(pcie) is not None else "unknown"


def used_bytes() -> dict[str, int]:
    """Return the used bytes of each device's HBM, by its UUID; none without a driver."""
    _, gpus, _ = ask_driver()
    return {gpu.uuid: gpu.used_bytes for gpu in gpus}


def context_bytes(device: Device, used_before_bytes: int) -> int | None:
    """Return the HBM that the driver took for this process's context and kernels."""
    total, free = device.memory.total_bytes(), device.memory.free_bytes()
    if total is None or free is None or device.shares_ram:  # whose RAM others use, too
        return None
    return max(0, total - free - device.memory.reserved_bytes() - used_before_bytes)


def is_direct(path: Path) -> bool:
    with Folder.open(path) as folder, folder.private() as file:
        return file.direct
