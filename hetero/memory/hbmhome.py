"""Homes on the device, of a model that pages (floor 1, mechanism)."""

from __future__ import annotations

import torch

from hetero.crc import crc32
from hetero.device import Device, Slab, Ticket
from hetero.memory.codec import Codec
from hetero.memory.home import Fill, Home
from hetero.memory.layout import Bucket, Segment
from hetero.types import Lane

HOST_PLACE = torch.device("cpu")


class OnDevice(Home):
    """Of homes on the device, of a model that pages: compute updates them, and reads weights there
    ([Note: read at home]) or in frames filled within HBM. State dicts and saves get copies of them
    on HOST, as of homes on disk."""

    __slots__ = ()
    on_device = True
    lane = way_home = Lane.D2D
    _device: Device
    _written: Ticket

    def _begin(self, device: Device) -> None:
        self._device = device
        self._flat.zero_()
        self._written = device.mark()

    @property
    def shows(self) -> bool:
        return False

    @property
    def shown_on(self) -> torch.device:
        return HOST_PLACE if self.device.type != "meta" else self.device

    @property
    def written_at(self) -> tuple[Ticket, ...]:
        return (self._written,)

    def rewritten(self) -> None:
        self._written = self._device.mark()

    def empty(self, segment: Segment, dtype: torch.dtype | None = None) -> torch.Tensor:
        spec = segment.spec
        return torch.empty_strided(
            spec.shape, spec.stride, dtype=dtype or self.dtype, device=self.shown_on
        )

    def load(self, items: slice) -> torch.Tensor:
        return self._device.bring_down(self.part(items), self._written)

    def store(self, items: slice, fill: Fill) -> None:
        stage = torch.empty(items.stop - items.start, dtype=self.item_dtype, device=self.shown_on)
        fill(stage)
        self._put(items.start, stage)

    def _put(self, start: int, items: torch.Tensor) -> None:
        super()._put(start, items)
        self.rewritten()


class DeviceHome(OnDevice):
    """All of a home on the device."""

    __slots__ = ("_device", "_written")

    def __init__(
        self, device: Device, slab: Slab, bucket: Bucket, dtype: torch.dtype, codec: Codec
    ) -> None:
        super().__init__(slab, bucket, dtype, codec)
        self._begin(device)

    @property
    def is_readable(self) -> bool:
        return self.codec.exact

    def value(self, segment: Segment) -> torch.Tensor:
        return self.view(segment)

    def blank(self, segment: Segment) -> torch.Tensor:
        return self.view(segment)

    def write(self, segment: Segment, value: torch.Tensor) -> None:
        self.view(segment).copy_(value)
        self.rewritten()
        if segment in self.copies:
            self.copies[segment].show(self.read(segment))

    def crc(self) -> int | None:
        whole = self.load(slice(0, self._flat.numel()))
        return crc32(memoryview(whole.view(torch.uint8).numpy()))
