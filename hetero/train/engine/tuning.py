"""Settings that tests vary and planning chooses (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetero.device import Device
from hetero.events import CAPACITY
from hetero.io import IO
from hetero.jobs import Slice, Worker
from hetero.memory.pool import Pool, open_pool
from hetero.plan.schedule import Schedule, Shape
from hetero.plan.trace import Trace
from hetero.train.activations.allocator import DeviceBytes
from hetero.train.activations.slices import Each, one_by_one


@dataclass(slots=True)
class Tuning:
    """None of these changes a number."""

    depth: int | None = None
    """Accesses to look ahead; None: as many as frames allow."""
    victim: Callable[[int], float] | None = None
    """Overrides next use in eviction: bucket id -> distance (larger leaves first)."""
    schedule: Callable[[Trace, Mapping[int, Shape], int], Schedule] | None = None
    """Overrides planning: (trace, shapes, limit) -> Schedule."""
    worker: Worker | None = None
    """Overrides the threads that update; one with 0 threads updates inside `step`."""
    pause: Slice | None = None
    """Called before each slice of an update."""
    update_on_device: bool = False
    """Whether paged updates are streamed through the device, inside `step`."""
    passing: float | None = None
    """Share of updates of homes on HOST that may pass through HBM; None: as planned."""
    homes_on_hbm: bool | None = None
    """Whether homes of a paged model may be on HBM; None: on CUDA they may."""
    counted: DeviceBytes | None = None
    """Counts what is on the device, for a model that stays; None: the device's allocator does."""
    activation_share: float | None = None
    """Share of the HBM for both that activations may take from homes; None: the best one."""
    averages: bool = False
    """Whether the caller averages the gradients of ranks that each keep a whole model."""
    one_sided: bool = True
    """Whether ranks of one machine read each other's shares; if not, they gather them."""
    native: bool = True
    """Whether the compiled kernel may be used; the blocks of torch have the same bits."""
    extent_numel: int | None = None
    """Elements of an extent, a multiple of 4096; None: chosen from the model's size."""
    io: IO | None = None
    """The door to the files of the NVME tier; tests make it fail."""
    open_pool: Callable[..., Pool] = open_pool
    """Opens the pool that keeps homes on disk."""
    n_events: int | None = CAPACITY
    """Events that the log keeps until they are drained; None: all."""
    slices: Each = one_by_one
    """Which slices of a unit's forward or backward have to run."""
    io_threads: int | None = None
    """Threads that read and write the NVME tier; None: chosen by measuring the drive."""
    checked: bool = True
    """Whether bytes on disk are checksummed (benchmarks measure the cost)."""

    def may_rise(self, device: Device) -> bool:
        """Whether homes of a paged model may be on HBM."""
        wanted = device.is_cuda if self.homes_on_hbm is None else self.homes_on_hbm
        return wanted and not device.same_ram
