"""Weights as Hugging Face sharded safetensors, streamed into a directory (floor 4).

[Note: the switch]  A directory without an export gets new files under names that nothing loads
(`NEW`), and their own names once all are written; what loaders look for (`SINGLE`, else `INDEX`)
comes last. An export is replaced as a whole: the new one is written into a hidden directory beside
it, all else that lies in the old one is linked there, and the two directories change places in one
call. So a crash leaves the old directory or the new one, configs included. `MARKER` lies in the new
one: where it is in the export's place, the hidden one is what was replaced, and the next export
clears it.

Where the system cannot exchange directories (and for a mount point, the working directory, one of
another user), files change hands in place: what loaders look for is set aside first (`OLD`),
configs, then index and weights, so that between the renames nothing loads; a failure undoes them,
and what a killed process left, the next export undoes or clears. Names of one stage are durable
before those of the next, and what loaders look for comes last both ways.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero import interrupts
from hetero.config import parse_bytes
from hetero.errors import ConfigError, DiskFull, StateError, StorageError
from hetero.io import IO, MAX_NAME_BYTES, Folder, is_mount_point
from hetero.types import format_bytes
from hetero.weights import CODES, INDEX, PART, SINGLE

PIECE = 8 * 2**20  # bytes of a tensor that are copied at once where they have to be
NEW, OLD = ".hetero-new-", ".hetero-old-"
MARKER = ".hetero-exchanged"
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBUSY, errno.EXDEV)
NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS)


def export(model: nn.Module, directory: str | Path, *, max_shard_bytes: int | str = "5GB") -> Path:
    """Write a model's weights as Hugging Face safetensors, for any loader of that format.

    The tensors are those of ``model.state_dict()``, with their dtypes, in row-major order; at most
    one of them is in memory beyond what was there. Tied weights are written once, under their
    first name. ``config.json`` and ``generation_config.json`` come along where the model has such
    objects. A directory that is missing is made; an export that is in it is replaced, and stays
    as it is until the new one is complete.

    Names and layout are the model's own. Where transformers changes them as it loads (experts that
    it merges), ``model.save_pretrained`` writes what was loaded: it works on a prepared model too,
    and holds a shard, and all that it converts.

    Args:
        model: a prepared model, or any ``nn.Module``.
        directory: where ``model.safetensors`` goes, or ``model-00001-of-0000N.safetensors`` with
            ``model.safetensors.index.json``.
        max_shard_bytes: bytes of tensors a file, or "5GB"; a larger tensor has a file of its own.

    Returns the directory. Use it by one process at a time, and from the thread that trains.

    Raises:
        ConfigError: part of the state is no plain tensor (it is named), or a config is invalid.
        StorageError: the drive is full or failed; nothing of the new export is left.
    """
    limit_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
    return write(model, Path(directory), limit_bytes, IO())


def write(model: nn.Module, directory: Path, limit_bytes: int, io: IO) -> Path:
    """Carry out `export` through a given door to files."""
    # 1. all that can be refused is refused before a file is touched
    items = items_of(model)
    notes = configs_of(model, items)
    parts = cut(items, limit_bytes)
    if SINGLE not in parts:
        notes[INDEX] = index_of(parts, sum(p.numel() for p in model.parameters()))
    with ExitStack() as undo:
        folder = undo.enter_context(open_or_make(directory, io, undo))
        sibling = Sibling.of(directory, folder, io)
        recover(folder, sibling)
        exchanges = sibling is not None and not set(folder.names()).isdisjoint((SINGLE, INDEX))
        # 2. the new files, where nothing loads them
        undo.callback(remove, folder, NEW)
        if sibling is not None and exchanges:
            place, prefix = sibling.make(folder, undo), ""
        else:
            place, prefix = folder, NEW
        check_room(place, sum(item.n_bytes for item in items))
        for name, part in parts.items():
            n_bytes = sum(i.n_bytes for i in part)
            stage(place, prefix + name, n_bytes, header_of(part), bytes_of(part))
        for name, data in notes.items():
            stage(place, prefix + name, 0, data, ())
        # 3. the directory changes hands
        with interrupts.held():
            if sibling is None or not exchanges or not sibling.exchange(folder, place, notes):
                switch(folder, list(parts), list(notes))
                place = folder
            undo.pop_all()
    # 4. what nothing refers to any more
    with folder, place:
        place.sync()
        if place is not folder and sibling is not None:
            sibling.retire(folder, place)
        sweep(place, parts)
        place.sync()
    return directory


# -- what is written -----------------------------------------------------------------------------


class Item(NamedTuple):
    """One tensor to be written."""

    name: str
    tensor: torch.Tensor

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.dtype.itemsize


def items_of(model: nn.Module) -> list[Item]:
    """Return the tensors of a model's state, tied ones once; ConfigError names what is none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}", advice="pass an nn.Module")
    params = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    items: list[Item] = []
    seen: set[object] = set()
    for name, value in model.state_dict().items():
        check_item(name, value)
        tensor = value.detach() if is_plain(value) else value
        # only parameters are tied: a loader asks for every buffer
        marks = {params[name], memory_of(tensor) or name} if name in params else set()
        if not marks & seen:
            items.append(Item(name, tensor))
        seen |= marks
    return items


def check_item(name: str, value: Any) -> None:
    """Refuse state that safetensors cannot hold."""
    kind = ""
    if not isinstance(value, torch.Tensor):
        kind = f"a {type(value).__name__}, not a tensor"
    elif value.is_meta:
        kind = "on the meta device: it has no values"
    elif value.layout is not torch.strided or value.is_quantized or value.is_nested:
        kind = f"not a dense tensor ({value.dtype}, {value.layout})"
    elif value.dtype not in CODES:
        kind = f"of {value.dtype}, which the format does not have"
    elif name == "__metadata__":
        kind = "called like a part of the format"
    if kind:
        raise ConfigError(
            f"{name!r} of the model's state is {kind}",
            advice="safetensors holds plain tensors: keep it out of state_dict(), or torch.save it",
        )


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is memory and no more; others are materialised when they are written."""
    return type(value) in (torch.Tensor, nn.Parameter)


def memory_of(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are the same bytes; None where not known."""
    if not is_plain(tensor) or not tensor.numel():
        return None
    view = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), view


def cut(items: Iterable[Item], limit_bytes: int) -> dict[str, list[Item]]:
    """Return ``{file name: tensors}``, in order, each file within the limit where it can be."""
    parts: list[list[Item]] = [[]]
    room = limit_bytes
    for item in items:
        if parts[-1] and item.n_bytes > room:
            parts.append([])
            room = limit_bytes
        parts[-1].append(item)
        room -= item.n_bytes
    for part in parts:  # largest elements first: every tensor is aligned to its dtype
        part.sort(key=lambda item: -item.tensor.dtype.itemsize)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    n = len(parts)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index_of(parts: Mapping[str, Sequence[Item]], n_parameters: int) -> bytes:
    """Return the index of several files, as Hugging Face writes it."""
    where = {item.name: file for file, part in parts.items() for item in part}
    total = sum(item.n_bytes for part in parts.values() for item in part)
    totals = {"total_parameters": n_parameters, "total_size": total}
    found = {"metadata": totals, "weight_map": where}
    return json.dumps(found, indent=2, sort_keys=True).encode() + b"\n"


def header_of(part: Sequence[Item]) -> bytes:
    """Return the beginning of a file, up to its first tensor."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in part:
        end = at + tensor.numel() * tensor.dtype.itemsize
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        found[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(part: Iterable[Item]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one tensor at a time."""
    for name, tensor in part:
        whole = tensor if is_plain(tensor) else materialised(name, tensor)
        if whole.numel():
            for piece in pieces_of(whole.resolve_conj().resolve_neg()):
                yield memoryview(piece.cpu().view(torch.uint8).numpy())


def materialised(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that makes them when it is used."""
    value = tensor.detach().cpu()
    if not is_plain(value):  # it is on the CPU as it was: a view of it needs the bytes, and no copy
        value = value.view(value.shape)
    if not is_plain(value):
        raise ConfigError(
            f"{name!r} of the model's state is a {type(tensor).__name__}, no plain tensor",
            advice="gather or dequantize it first",
        )
    return value


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in row-major order, as flat pieces; copies are of `PIECE` bytes at most."""
    n_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(PIECE // tensor.element_size())
    elif n_bytes <= PIECE:
        yield tensor.contiguous().reshape(-1)
    else:
        rows = PIECE // (n_bytes // len(tensor))
        for part in tensor.split(rows) if rows else tensor:
            yield from pieces_of(part)


# -- configs -------------------------------------------------------------------------------------


def configs_of(model: nn.Module, items: Sequence[Item]) -> dict[str, bytes]:
    """Return ``{file name: contents}`` of the model's configs, where it has such objects."""
    found: dict[str, bytes] = {}
    for name, attribute in (
        ("config.json", "config"),
        ("generation_config.json", "generation_config"),
    ):
        found.update(saved(getattr(model, attribute, None), name))
    if "config.json" in found:
        found["config.json"] = true_of(found["config.json"], model, items)
    return found


def saved(config: Any, name: str) -> dict[str, bytes]:
    """Return what a config object writes of itself (code of a remote model included)."""
    with tempfile.TemporaryDirectory() as place:
        try:
            if callable(getattr(config, "save_pretrained", None)):
                config.save_pretrained(place)
            elif callable(getattr(config, "to_json_file", None)):
                config.to_json_file(os.path.join(place, name))
        except Exception as error:  # whatever their own checks raise
            raise ConfigError(
                f"{name} cannot be saved: {error}",
                advice=f"correct the model's {name.removesuffix('.json')}, or set it to None",
            ) from error
        return {path.name: path.read_bytes() for path in Path(place).iterdir() if path.is_file()}


def true_of(text: bytes, model: nn.Module, items: Sequence[Item]) -> bytes:
    """Let a config of transformers name the class and the dtype of these weights."""
    found = json.loads(text)
    if not isinstance(found, dict) or "transformers_version" not in found:
        return text
    if getattr(type(model), "config_class", None) is not None:
        found["architectures"] = [type(model).__name__]
    dtypes = [item.tensor.dtype for item in items if item.tensor.dtype.is_floating_point]
    if dtypes:
        key = "torch_dtype" if "torch_dtype" in found else "dtype"  # older releases, newer ones
        found[key] = str(dtypes[0]).removeprefix("torch.")
    return json.dumps(found, indent=2, sort_keys=True).encode() + b"\n"


# -- files ---------------------------------------------------------------------------------------


def open_or_make(path: Path, io: IO, undo: ExitStack) -> Folder:
    """Open a directory, made with its parents where missing; ``undo`` takes away what was made."""
    try:
        return Folder.open(path, io)
    except StorageError as error:
        if error.errno != errno.ENOENT or path == path.parent:
            raise
    parent = open_or_make(path.parent, io, undo)
    folder = parent.make(path.name)
    undo.callback(quietly, parent.rmdir, path.name)
    parent.sync()
    return folder


def check_room(folder: Folder, n_bytes: int) -> None:
    """Raise DiskFull before hours of writing rather than after them."""
    have = folder.space()
    if have < n_bytes:
        raise DiskFull(
            f"{folder.path} has {format_bytes(have)} left; {format_bytes(n_bytes)} are needed",
            advice="free some space there, or name another directory",
            path=folder.path,
            op="reserve",
            wanted=n_bytes,
            got=have,
            errno=errno.ENOSPC,
        )


def stage(
    folder: Folder, name: str, n_bytes: int, head: bytes, pieces: Iterable[memoryview]
) -> None:
    """Write a new file of ``head`` and ``n_bytes`` more, durably."""
    end = len(head) + n_bytes
    with folder.create(name) as file:
        file.reserve(end)
        file.write(0, memoryview(head))
        at = len(head)
        for piece in pieces:
            file.write(at, piece)
            at += len(piece)
        if at != end:
            raise StateError(
                f"{name} came to {at} bytes instead of {end}",
                advice="do not change the model while it is exported",
            )
        file.sync()


class Sibling:
    """A hidden directory beside an export's own, which takes its place: see [Note: the switch]."""

    def __init__(self, parent: Folder, name: str) -> None:
        self._parent = parent
        self._name = name
        self._hidden = NEW + name

    @classmethod
    def of(cls, directory: Path, folder: Folder, io: IO) -> Sibling | None:
        """Return what may change places with a directory; None where nothing may."""
        real = os.path.realpath(directory)
        above, name = os.path.split(real)
        if not name or len(os.fsencode(NEW + name)) > MAX_NAME_BYTES or is_mount_point(real):
            return None
        if os.path.samefile(real, ".") or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
            return None
        if folder.stat(".").st_uid != os.geteuid():
            return None
        return cls(Folder.open(above, io), name)

    def make(self, folder: Folder, undo: ExitStack) -> Folder:
        """Return the hidden directory, with the mode of the other; ``undo`` takes it away."""
        made = self._parent.make(self._hidden)
        undo.callback(quietly, self.clear, made)
        made.permit(stat.S_IMODE(folder.stat(".").st_mode))
        made.create(MARKER).close()
        return made

    def recover(self, folder: Folder) -> None:
        """Clear what an export that was killed left beside the directory."""
        if self._parent.has(self._hidden):
            with self._parent.folder(self._hidden) as other:
                if folder.has(MARKER):
                    self.retire(other, folder)
                else:
                    self.clear(other)
        elif folder.has(MARKER):
            folder.unlink(MARKER)

    def exchange(self, folder: Folder, made: Folder, notes: Mapping[str, object]) -> bool:
        """Let the hidden directory be the export's; False where the system cannot.

        The new files are in the directory itself then, under their temporary names.
        """
        new = made.names()
        for name in folder.names():
            if not is_ours(name) and name not in notes:
                link(folder, name, made)
        made.sync()
        self._parent.sync()
        try:
            self._parent.exchange(self._name, self._hidden)
        except StorageError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            for name in new:
                if name != MARKER:
                    made.rename(name, NEW + name)
                    made.move(NEW + name, folder)
            self.clear(made)
            return False
        return True

    def retire(self, old: Folder, new: Folder) -> None:
        """Remove the directory that was replaced; what else has come into it moves to the new."""
        self._parent.sync()
        for name in old.names():
            if is_ours(name) or new.has(name):
                old.unlink(name)
            else:
                old.move(name, new)
        new.sync()
        self._parent.rmdir(self._hidden)
        self._parent.sync()
        new.unlink(MARKER)

    def clear(self, made: Folder) -> None:
        """Remove the hidden directory of an export that did not come to its end."""
        for name in made.names():
            made.unlink(name)
        self._parent.rmdir(self._hidden)


def link(folder: Folder, name: str, to: Folder) -> None:
    """Give a file its name in another directory too; what has no second name moves there later."""
    try:
        folder.link(name, to)
    except StorageError as error:
        if error.errno not in NO_LINK:
            raise


def is_ours(name: str) -> bool:
    """Whether an export writes files of a name, configs aside."""
    part = PART.fullmatch(name)
    whole = name in (SINGLE, INDEX, MARKER) or name.startswith((NEW, OLD))
    return whole or (part is not None and part[1] == "model")


def switch(folder: Folder, parts: Sequence[str], notes: Sequence[str]) -> None:
    """Make the staged files the live ones, or leave all as it was: see [Note: the switch]."""
    there = set(folder.names())
    last = SINGLE if SINGLE in parts else INDEX
    others = [name for name in (*parts, *notes) if name != last]
    moved: list[tuple[str, str]] = []

    def move(name: str, to: str) -> None:
        folder.rename(name, to)
        moved.append((name, to))

    # 1. what tells `recover` that this did not come to its end
    folder.sync()
    try:
        # 2. nothing loads what is there: configs, the index, whole weights, then parts
        for name in dict.fromkeys((*notes, INDEX, SINGLE, *parts)):
            if name in there:
                move(name, OLD + name)
                if name in (INDEX, SINGLE):
                    folder.sync()
        folder.sync()
        # 3. parts and configs
        for name in others:
            move(NEW + name, name)
        folder.sync()
        # 4. what loaders look for
        move(NEW + last, last)
    except BaseException:
        undo(folder, moved)
        raise


def undo(folder: Folder, moved: Sequence[tuple[str, str]]) -> None:
    """Give files their names back; what loaders look for comes after the files it names."""
    for name, to in reversed(moved):
        if name in (INDEX, SINGLE):
            quietly(folder.sync)
        quietly(folder.rename, to, name)
    quietly(folder.sync)  # before the new files go, which say that there is something to undo


def recover(folder: Folder, sibling: Sibling | None) -> None:
    """Clear up after an export that was killed; one that had not got to its switch is undone."""
    if sibling is not None:
        sibling.recover(folder)
    there = set(folder.names())
    undone = any(NEW + name in there for name in (SINGLE, INDEX)) or not there & {SINGLE, INDEX}
    aside = sorted(name for name in there if name.startswith(OLD))
    if aside and undone:
        put_back(folder, aside)
    for name in sorted(there):
        if name.startswith(NEW) or (name in aside and not undone):
            folder.unlink(name)


def put_back(folder: Folder, aside: Sequence[str]) -> None:
    """Give what a killed export set aside its names again, in the order of `undo`."""
    last = {OLD + INDEX, OLD + SINGLE}
    for names in (set(aside) - last, last & set(aside)):
        for name in sorted(names):
            folder.rename(name, name.removeprefix(OLD))
        folder.sync()


def sweep(folder: Folder, parts: Mapping[str, object]) -> None:
    """Remove the files of the export that was replaced."""
    for name in folder.names():
        part = PART.fullmatch(name)
        surplus = part is not None and part[1] == "model" and name not in parts
        stale = name == INDEX and SINGLE in parts
        if surplus or stale or name.startswith(OLD):
            folder.unlink(name)


def remove(folder: Folder, prefix: str) -> None:
    """Remove the files whose names begin so, as far as the drive lets us."""
    with contextlib.suppress(StorageError):
        for name in folder.names():
            if name.startswith(prefix):
                quietly(folder.unlink, name)


def quietly(act: Any, *args: Any) -> None:
    """Undo one thing; that this fails too is no news."""
    with contextlib.suppress(StorageError):
        act(*args)
