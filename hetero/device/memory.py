"""A device's memory, as its driver and torch's allocator count it (floor 0)."""

from __future__ import annotations

import itertools
import weakref

import torch

from hetero.config import host_limit
from hetero.device.lanes import CudaLanes
from hetero.device.process import counts, first_line, keeps_segments
from hetero.errors import BudgetError
from hetero.types import format_bytes

EXPAND = (
    "or start the program with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which keeps free"
    " memory in one piece"
)


class UncountedMemory:
    """RAM, which no allocator of a device counts; or HBM that is only described."""

    def __init__(self, total_bytes: int | None = None) -> None:
        self._total_bytes = total_bytes

    def total_bytes(self) -> int | None:
        return self._total_bytes

    def free_bytes(self) -> int | None:
        return self._total_bytes

    def reserved_bytes(self) -> int:
        return 0

    def hold_for_compute(self, memory: torch.Tensor) -> None: ...

    def reset_peak(self) -> None: ...

    def allocated_peak(self) -> int | None:
        return None

    def allocated_bytes(self) -> int | None:
        return None


class CudaMemory:
    """The HBM of a CUDA device, on which lanes copy.

    Args:
        is_ram: whether it is a part of RAM.
    """

    def __init__(self, place: torch.device, lanes: CudaLanes, *, is_ram: bool = False) -> None:
        self._place = place
        self._is_ram = is_ram
        self._lanes = lanes
        self._computing: dict[int, torch.cuda.Stream] = {}
        self._blocks: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def computes_on(self, stream: torch.cuda.Stream) -> None:
        """Compute uses the memory on a stream: what goes back to the allocator serves others when
        that is done, too. A program may prepare a model on one stream and train it on another."""
        if stream.cuda_stream not in self._computing:
            self._computing[stream.cuda_stream] = stream
            for block in list(self._blocks.values()):
                block.record_stream(stream)

    def hold_for_compute(self, memory: torch.Tensor) -> None:
        if len(self._computing) > 1:  # else it is the one on which it was made
            for stream in list(self._computing.values()):
                memory.record_stream(stream)

    def take(self, n_bytes: int) -> torch.Tensor:
        """Return device memory for the lanes, too.

        torch's allocator orders its memory by compute's stream alone: the lanes have to come after
        what is queued there now, and the memory may serve others when they are done with it.
        """
        try:
            block = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=self._place)
        except torch.OutOfMemoryError as error:
            free = self.free_bytes() + self.reserved_bytes()
            unused = free - int(torch.cuda.memory_allocated(self._place))
            pieces = unused >= n_bytes and not self._expands()
            raise BudgetError(
                f"{format_bytes(n_bytes)} of frames and homes are not free"
                f"{' in one piece' * pieces} on {self._place}: {first_line(error)}",
                advice=f"end other processes on the device, or set hbm= below {free} bytes"
                + f"; {EXPAND}" * pieces,
                tier="HBM",
            ) from error
        taken = torch.cuda.Event()
        taken.record(torch.cuda.current_stream(self._place))
        for stream in self._lanes.streams.values():
            stream.wait_event(taken)
            block.record_stream(stream)
        for stream in list(self._computing.values()):
            block.record_stream(stream)
        self._blocks[next(self._numbers)] = block
        return block

    def _expands(self) -> bool:
        """Whether torch's allocator has segments that grow, so that free memory is in one piece."""
        if not keeps_segments():
            return True
        return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._place).total_memory)

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._place)
        if self._is_ram:  # the driver takes cached files for used, which the kernel gives up
            free = min(total, max(free, host_limit().n_bytes))
        share = torch.cuda.get_per_process_memory_fraction(self._place)  # above it torch refuses
        return max(0, min(free, int(share * total) - self.reserved_bytes()))

    def reserved_bytes(self) -> int:
        return counts(self._place).reserved_bytes

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._place)

    def allocated_peak(self) -> int:
        return counts(self._place).peak_bytes

    def allocated_bytes(self) -> int:
        return counts(self._place).now_bytes
