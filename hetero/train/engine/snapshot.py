"""The state of a prepared model as named tensors, to be saved and loaded in pieces (floor 2).

Names and shapes are the model's own and bytes are in row-major order, whatever the chunks, tiers
or budgets.

[Note: copy on update]  A save reads a bucket's homes in a job of its own, and the next update of
that bucket comes after it. An update that starts before its bucket is saved performs that save
first: nothing is copied aside, and training waits only when it has caught up with the drive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from hetero.errors import StorageError
from hetero.jobs import Job
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Segment, contiguous_stride, row

PIECE_BYTES = 8 * 2**20  # a multiple of every block of a checkpoint, and of every element

Read = Callable[[int, memoryview], None]
Write = Callable[[int, memoryview], None]
Order = tuple[int, ...]
"""Of a tensor's elements: its dimensions, slowest first; () is row-major."""


class Name(NamedTuple):
    """Which tensor of a model's state: its kind ("param", "state", ...), whose, and which one."""

    kind: str
    name: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a model's state."""

    name: Name
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int | None
    """The bucket whose update changes it; None if no update does."""
    save: Callable[[Write], None]
    """Gives all bytes, or those kept, to ``write(first byte of them, bytes)``, which may not keep
    them."""
    load: Callable[[Read, Order], None]
    """Takes all bytes, or those kept, from ``read(first byte, into)``, which gives the tensor in
    some order."""
    kept: slice | None = None
    """Elements, in ``order``, that this rank's ``save`` gives, while others give the rest; None:
    every rank has all of them."""
    order: Order = ()
    """In which ``save`` gives bytes."""


def of_home(name: Name, home: Home, segment: Segment, bucket: int) -> Part:
    """Return a segment of a home as a part: bytes are read and written in place.

    One that is coded is saved in code, and decodes to the same bits. A share of one is saved in the
    order in which its elements lie.
    """
    spec, dtype = segment.spec, home.item_dtype
    items = home.items(segment.offset, segment.end)
    mine, saved = home.own(items), home.to_save(items)
    kept = slice(saved.start - items.start, saved.stop - items.start) if home.is_share else None
    save = partial(_save_run, home, saved)
    if not home.codec.exact:
        name, shape = name._replace(key=home.codec.name), (items.stop - items.start,)
        load = partial(_load_run, home, items, mine)
        return Part(name, dtype, shape, bucket, save, lambda read, _: load(read), kept)
    order = order_of(spec.shape, spec.stride)
    if not home.is_share and (home.device.type != "cpu" or order):
        save = partial(_save_whole, partial(home.read, segment))
    lies = order if home.is_share else ()
    taken = partial(_load_home, home, segment, order)
    return Part(name, dtype, spec.shape, bucket, save, taken, kept, lies)


def order_of(shape: Sequence[int], stride: Sequence[int]) -> Order:
    """Return the dimensions of a dense tensor, slowest first; () if it is in row-major order."""
    if tuple(stride) == contiguous_stride(shape):
        return ()
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim])))


def empty_in(order: Order, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor in RAM whose elements lie in an order."""
    if not order:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    lies = torch.empty([shape[dim] for dim in order], dtype=dtype, device="cpu")
    return lies.permute(sorted(range(len(order)), key=order.__getitem__))


def _load_home(home: Home, segment: Segment, order: Order, read: Read, given: Order) -> None:
    items = home.items(segment.offset, segment.end)
    if given == order and (home.is_share or home.device.type == "cpu"):
        _load_run(home, items, home.own(items), read)
    else:
        put = partial(home.write, segment)
        _load_whole(segment.spec.shape, home.item_dtype, put, read, given)


def of_tensor(
    name: Name,
    tensor: torch.Tensor,
    bucket: int | None = None,
    *,
    current: Callable[[], torch.Tensor] | None = None,
) -> Part:
    """Return a plain tensor as a part; ``current`` returns it where updates may replace it."""

    def put(value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(value)

    save = partial(_save_whole, current or tensor.detach)
    load = partial(_load_whole, tuple(tensor.shape), tensor.dtype, put)
    return Part(name, tensor.dtype, tuple(tensor.shape), bucket, save, load)


def _pieces(n_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n_bytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, n_bytes)


def _save_run(home: Home, items: slice, write: Write) -> None:
    for start, piece in _flat_pieces(home, items):
        write(start, _bytes(home.load_own(piece)))


def _load_run(home: Home, items: slice, mine: slice, read: Read) -> None:
    first = (mine.start - items.start) * home.item_dtype.itemsize
    for start, piece in _flat_pieces(home, mine):
        home.store(piece, partial(_read_into, read, first + start))


def _read_into(read: Read, start: int, items: torch.Tensor) -> None:
    read(start, _bytes(items))


def _flat_pieces(home: Home, items: slice) -> Iterator[tuple[int, slice]]:
    """Yield (byte from the first of the items, some of the items) piece by piece."""
    size = home.item_dtype.itemsize
    for start, end in _pieces((items.stop - items.start) * size):
        yield start, slice(items.start + start // size, items.start + end // size)


def _save_whole(value: Callable[[], torch.Tensor], write: Write) -> None:
    view = _bytes(value().cpu().contiguous())
    for start, end in _pieces(len(view)):
        write(start, view[start:end])


def _load_whole(
    shape: Sequence[int],
    dtype: torch.dtype,
    put: Callable[[torch.Tensor], None],
    read: Read,
    given: Order,
) -> None:
    value = empty_in(given, shape, dtype)
    view = _bytes(value)
    for start, end in _pieces(len(view)):
        read(start, view[start:end])
    put(value)


def _bytes(value: torch.Tensor) -> memoryview:
    """Return a dense tensor's bytes, in the order in which they lie."""
    return memoryview(row(value).view(torch.uint8).numpy())


class Saving:
    """One save under way: a job for each bucket, after its last update.

    Args:
        parts: everything that this rank saves, each with its number in the checkpoint.
        buckets: those that are noted, even if this rank saves nothing of them.
        write: takes (number, first byte, bytes); its error ends the save, not the training.
        pending: returns the update of a bucket that is under way, if there is one.
        noted: called after a bucket's tensors were read, for the data saved with them.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, Part]],
        buckets: Iterable[int],
        write: Callable[[int, int, memoryview], None],
        *,
        pending: Callable[[int], Any],
        noted: Callable[[int], None],
    ) -> None:
        self.error: BaseException | None = None
        self._write = write
        self._noted = noted
        grouped: dict[int | None, list[tuple[int, Part]]] = {}
        for number, part in parts:
            grouped.setdefault(part.bucket, []).append((number, part))
        for bucket in buckets:
            grouped.setdefault(bucket, [])
        self._jobs = {
            bucket: Job(
                [partial(self._save, number, part) for number, part in members],
                finish=partial(self._note, bucket),
                after=() if bucket is None or pending(bucket) is None else (pending(bucket),),
            )
            for bucket, members in grouped.items()
        }

    def run(self) -> None:
        """Read everything; returns when the last bucket is read."""
        for job in self._jobs.values():
            job.wait()

    def before_writing(self, bucket: int | None) -> Sequence[Job]:
        """Return the jobs to be done before a bucket's homes may change."""
        job = self._jobs.get(bucket)
        return () if job is None or job.done else (job,)

    def wait_for(self, bucket: int) -> None:
        """Return when a bucket's homes may change."""
        for job in self.before_writing(bucket):
            job.wait()

    def _save(self, number: int, part: Part) -> None:
        if self.error is None:
            try:
                part.save(partial(self._write, number))
            except BaseException as error:
                # another thread's refused write may come before the failure that caused it
                if self.error is None or isinstance(error, StorageError):
                    self.error = error

    def _note(self, bucket: int | None) -> None:
        if bucket is not None and self.error is None:
            try:
                self._noted(bucket)
            except BaseException as error:
                self.error = error


class Waitable(Protocol):
    """A save that goes on while the model trains."""

    told: bool

    def wait(self) -> Any:
        """Return when it is done; raises what it raised."""

    def join(self) -> None:
        """Return when it is over."""


class Saver:
    """Holds the save that changes of homes wait for: one at a time."""

    def __init__(self) -> None:
        self.last: Waitable | None = None
        """That may not be durable yet."""
        self._saving: Saving | None = None

    def begin(self, saving: Saving, store: HomeStore, *, paged: bool) -> None:
        """Begin a save: homes change only after it has read them.

        Plain parameters, and homes that a state dict shows, may change unseen: read them at once.
        """
        self.finish()
        self._saving = saving
        if not paged:
            self.finish()
            return
        for (_, bucket_id), home in list(store.homes.items()):
            if home.stays and (home.views.held or home.views.objects_held):
                saving.wait_for(bucket_id)

    def finish(self) -> None:
        """Wait until a save that is under way has read everything."""
        if self._saving is not None:
            self._saving.run()  # it keeps its own error, for the caller that waits for the save
            self._saving = None

    def join(self) -> None:
        """Wait until the last save is over: ranks need what joins them until then."""
        if self.last is not None:
            self.last.join()

    def jobs_before(self, bucket_id: int) -> Sequence[Job]:
        """Return the jobs that an update of a bucket has to come after."""
        return () if self._saving is None else self._saving.before_writing(bucket_id)

    def wait_for(self, bucket_id: int) -> None:
        """Return when a bucket's homes may change: a user's write comes home."""
        if self._saving is not None:
            self._saving.wait_for(bucket_id)
