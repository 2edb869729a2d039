"""The state of a prepared model as named tensors, to be saved and loaded in pieces (floor 2).

Names and shapes are the model's own and bytes are in row-major order, whatever the chunks, tiers
or budgets; those of a tensor that ranks divide come box by box (`hetero.boxes`).

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

from hetero.boxes import Arrangement, Box, Order, common, numel_of, sizes_of, within
from hetero.errors import StorageError
from hetero.jobs import Job
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Segment, contiguous_stride, row
from hetero.train.model.parts import PartPlace

PIECE_BYTES = 8 * 2**20  # a multiple of every block of a checkpoint, and of every element

Read = Callable[[int, memoryview], None]
Write = Callable[[int, memoryview], None]


class Name(NamedTuple):
    """Which tensor of a model's state: its kind ("param", "state", ...), whose, and which one."""

    kind: str
    name: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a model's state, or this rank's part of one."""

    name: Name
    dtype: torch.dtype
    lies: Arrangement
    """The shape of the tensor, and in which order ``save`` gives its bytes."""
    bucket: int | None
    """The bucket whose update changes it; None if no update does."""
    save: Callable[[Write], None]
    """Gives all bytes, or those kept, to ``write(first byte of them, bytes)``, which may not keep
    them."""
    load: Callable[[Read, Arrangement], None]
    """Takes all bytes, or those that this rank has, from ``read(first byte, into)``, which gives
    the tensor in some order."""
    kept: slice | None = None
    """Elements, as they lie, that this rank's ``save`` gives, while others give the rest; None:
    every rank has all of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lies.shape


def of_home(
    name: Name,
    home: Home,
    segment: Segment,
    bucket: int,
    place: PartPlace | None = None,
    *,
    is_first: bool = True,
) -> Part:
    """Return a segment of a home as a part: bytes are read and written in place.

    One that is coded is saved in code, and decodes to the same bits. A share of one is saved in the
    order in which its elements lie.

    Args:
        place: where the segment is in a larger tensor; None if it is a whole one.
        is_first: of a whole one, whether no rank before this one has the same homes.
    """
    spec = segment.spec
    items = home.items(segment.offset, segment.end)
    saved = home.to_save(items)
    if not home.codec.exact:
        return _of_codes(name, home, items, bucket, place, is_first=is_first)
    order = order_of(spec.shape, spec.stride)
    save = partial(_save_run, home, saved)
    if not home.is_share and (home.device.type != "cpu" or order):
        save = partial(_save_whole, partial(home.read, segment))
    lies = arranged(spec.shape, place, order if home.is_share else ())
    box = lies.whole if place is None else place.box
    kept = _kept(home, items, lies.first_of(box), place, is_first=is_first)
    taken = partial(_load_home, home, segment, arranged(spec.shape, place, order), box)
    return Part(name, home.item_dtype, lies, bucket, save, taken, kept)


def arranged(shape: tuple[int, ...], place: PartPlace | None, order: Order = ()) -> Arrangement:
    """Return how a tensor is saved of which this rank has a part."""
    if place is None:
        return Arrangement(shape, order)
    return Arrangement(place.shape, order, place.cuts)


def _kept(
    home: Home, items: slice, first: int, place: PartPlace | None, *, is_first: bool
) -> slice | None:
    """Return what this rank saves of a tensor in which its own items begin at ``first``."""
    if place is None and is_first and not home.is_share:
        return None
    saved = home.to_save(items)
    if not (is_first if place is None else place.is_first):
        return slice(first, first)
    return slice(first + saved.start - items.start, first + saved.stop - items.start)


def _of_codes(
    name: Name,
    home: Home,
    items: slice,
    bucket: int,
    place: PartPlace | None,
    *,
    is_first: bool,
) -> Part:
    """Return items of codes as a part. Those of parts of one tensor follow each other: blocks begin
    with each part, so that only ranks that divide it alike can load them."""
    key, first, total = home.codec.name, 0, items.stop - items.start
    if place is not None and place.cuts:
        key += f" of parts cut at {[list(each) for each in place.cuts]}"
        parts = list(Arrangement(place.shape, (), place.cuts).boxes())
        before = [home.codec.items(numel_of(box)) for _, box in parts]
        total = sum(before)
        mine = next((n for n, (_, box) in enumerate(parts) if box == place.box), 0)
        first = sum(before[:mine])
    save = partial(_save_run, home, home.to_save(items))
    load = partial(_load_run, home, items, home.own(items), first)
    kept = _kept(home, items, first, place, is_first=is_first)
    named = name._replace(key=key)
    lies = Arrangement((total,))
    return Part(named, home.item_dtype, lies, bucket, save, lambda read, _: load(read), kept)


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


def _load_home(
    home: Home, segment: Segment, mine: Arrangement, box: Box, read: Read, given: Arrangement
) -> None:
    items = home.items(segment.offset, segment.end)
    if given == mine and (home.is_share or home.device.type == "cpu"):
        _load_run(home, items, home.own(items), mine.first_of(box), read)
    else:
        home.write(segment, read_box(box, home.item_dtype, read, given))


def of_tensor(
    name: Name,
    tensor: torch.Tensor,
    bucket: int | None = None,
    place: PartPlace | None = None,
    *,
    current: Callable[[], torch.Tensor] | None = None,
) -> Part:
    """Return a plain tensor as a part; ``current`` returns it where updates may replace it.

    Args:
        place: where it is in a larger tensor; None if it is a whole one.
    """

    def put(value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(value)

    def load(read: Read, given: Arrangement) -> None:
        put(read_box(box, tensor.dtype, read, given))

    lies = arranged(tuple(tensor.shape), place)
    box = lies.whole if place is None else place.box
    save = partial(_save_whole, current or tensor.detach)
    kept = None
    if place is not None:
        first = lies.first_of(box)
        kept = slice(first, first + (tensor.numel() if place.is_first else 0))
    return Part(name, tensor.dtype, lies, bucket, save, load, kept)


def _pieces(n_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n_bytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, n_bytes)


def _save_run(home: Home, items: slice, write: Write) -> None:
    for start, piece in _flat_pieces(home, items):
        write(start, _bytes(home.load_own(piece)))


def _load_run(home: Home, items: slice, mine: slice, before: int, read: Read) -> None:
    """Read those of the items that are mine, of a tensor in which ``before`` others come first."""
    first = (before + mine.start - items.start) * home.item_dtype.itemsize
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


def read_box(box: Box, dtype: torch.dtype, read: Read, given: Arrangement) -> torch.Tensor:
    """Return a box of a tensor that is saved in some order, as a new tensor in RAM."""
    for first, there in given.boxes():
        if there == box:
            value = empty_in(given.order, sizes_of(box), dtype)
            _read_flat(value, first, read)
            return value
    value = torch.empty(sizes_of(box), dtype=dtype, device="cpu")
    for first, there in given.boxes():
        both = common(there, box)
        if both is not None:
            for some, piece in _slabs(first, there, both, dtype, read, given):
                value[within(some, box)] = piece
    return value


def _slabs(
    first: int, there: Box, wanted: Box, dtype: torch.dtype, read: Read, given: Arrangement
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield what is wanted of a saved box, in pieces along its slowest dimension: whole rows are
    read, which follow each other."""
    slow = given.order[0] if given.order else 0
    begin, (start, end) = there[slow][0], wanted[slow]
    row_numel = numel_of(there) // (there[slow][1] - begin)
    step = max(1, PIECE_BYTES // (row_numel * dtype.itemsize))
    for at in range(start, end, step):
        side = at, min(at + step, end)
        rows, some = ((*box[:slow], side, *box[slow + 1 :]) for box in (there, wanted))
        value = empty_in(given.order, sizes_of(rows), dtype)
        _read_flat(value, first + (at - begin) * row_numel, read)
        yield some, value[within(some, rows)]


def _read_flat(value: torch.Tensor, first: int, read: Read) -> None:
    """Fill a dense tensor with elements from ``first`` on."""
    view, before = _bytes(value), first * value.element_size()
    for start, end in _pieces(len(view)):
        read(before + start, view[start:end])


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

    def begin(self, saving: Saving, store: HomeStore, *, paged: bool, bound: Iterable[int]) -> None:
        """Begin a save: homes change only after it has read them.

        Plain parameters, and homes that a state dict shows, or of buckets ``bound`` there, may
        change unseen: read them at once.
        """
        self.finish()
        self._saving = saving
        if not paged:
            self.finish()
            return
        for bucket_id in bound:
            saving.wait_for(bucket_id)
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

    def has_yet_to_read(self, bucket_id: int) -> bool:
        """Whether a save has yet to read a bucket's homes."""
        return bool(self.jobs_before(bucket_id))

    def wait_for(self, bucket_id: int) -> None:
        """Return when a bucket's homes may change: a user's write comes home."""
        if self._saving is not None:
            self._saving.wait_for(bucket_id)
