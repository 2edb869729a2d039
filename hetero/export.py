"""Weights as Hugging Face sharded safetensors, streamed into a directory (floor 4)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from hetero.api import company_of
from hetero.checkpoint.together import ONE_RANK, Ranks, together
from hetero.config import parse_bytes
from hetero.errors import ConfigError
from hetero.exchange import StagedFiles
from hetero.io import IO
from hetero.tensorfile import CODES, INDEX, SINGLE, header, header_bytes, header_room

PIECE = 8 * 2**20  # bytes copied at once of a tensor that needs a copy


def export(model: nn.Module, directory: str | Path, *, max_shard_bytes: int | str = "5GB") -> Path:
    """Write a model's weights as Hugging Face safetensors, for any loader of that format.

    The tensors are those of ``model.state_dict()``, with their dtypes, in row-major order; at most
    one of them is copied to memory at a time. Tied weights are written once, under their first
    name. ``config.json`` and ``generation_config.json`` are written if the model has such objects.
    A missing directory is made; an export in it is replaced, and stays as it is until the new one
    is complete.

    Names and layout are the model's own. If transformers changed them while loading (it merges
    experts), ``model.save_pretrained`` writes the original form: it works on a prepared model too,
    and holds a shard, and all that it converts, in memory.

    Args:
        model: a prepared model, or any ``nn.Module``.
        directory: where ``model.safetensors`` goes, or ``model-00001-of-0000N.safetensors`` with
            ``model.safetensors.index.json``.
        max_shard_bytes: bytes of tensors a file, or "5GB"; a larger tensor has a file of its own.

    Returns the directory. Use it from the thread that trains. If several ranks share the model, all
    of them call this with the same directory: the first one writes, the others return when it has.
    For any other model, one process at a time may use a directory.

    Raises:
        ConfigError: part of the state is not a plain tensor (it is named), or a config is invalid.
        StorageError: the drive is full or failed; nothing of the new export is left. Other ranks
            raise a CheckpointError that names the rank.

    Example:
        >>> import torch, hetero
        >>> model = hetero.prepare(torch.nn.Linear(4, 1), device="cpu:sim", hbm="64KiB")
        >>> _ = hetero.export(model, "exported")
        >>> import safetensors.torch
        >>> sorted(safetensors.torch.load_file("exported/model.safetensors"))
        ['bias', 'weight']
    """
    limit_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
    comm = company_of(model)
    return write(model, Path(directory), limit_bytes, IO(), comm, gathers=comm.node is None)


def write(
    model: nn.Module,
    directory: Path,
    limit_bytes: int,
    io: IO,
    ranks: Ranks = ONE_RANK,
    *,
    gathers: bool = False,
    writes: bool | None = None,
) -> Path:
    """Carry out `export` through a given door to files.

    Args:
        ranks: those that share the model; they meet after each file.
        gathers: whether each of several has to read what one of them writes.
        writes: whether this rank writes; None: the first one does.
    """
    # 1. refuse before any file is touched
    items = items_of(model)
    if ranks.size == 1:
        check_alone(items)
    notes = configs_of(model, items)
    parts = cut(items, limit_bytes)
    if SINGLE not in parts:
        notes[INDEX] = index_of(parts, sum(p.numel() for p in model.parameters()))
    reads = gathers and ranks.size > 1
    with ExitStack() as undo:
        opened: list[StagedFiles | Unwritten] = []

        def begin() -> bytes:
            files: StagedFiles | Unwritten
            is_writer = ranks.rank == 0 if writes is None else writes
            files = StagedFiles(directory, io) if is_writer else Unwritten(reads)
            undo.enter_context(files)
            opened.append(files)
            files.check_room(sum(item.n_bytes for item in items))
            return b""

        together(ranks, "an export", begin)
        # 2. write the new files, hidden from loaders
        (files,) = opened
        for name, part in parts.items():
            write_part = partial(fill, files, name, part, reads)
            together(ranks, f"{name} of an export", write_part)
        # 3. switch
        together(ranks, "the end of an export", partial(finish, files, notes, parts))
    return directory


class Unwritten:
    """The files of an export, on a rank that does not write them."""

    def __init__(self, reads: bool) -> None:
        self._reads = reads

    def check_room(self, n_bytes: int) -> None: ...

    def write(self, name: str, n_bytes: int, pieces: Iterable[Any]) -> None:
        for _ in pieces if self._reads else ():
            pass

    def commit(self, files: Sequence[str], notes: Sequence[str]) -> None: ...

    def __enter__(self) -> Unwritten:
        return self

    def __exit__(self, *_: object) -> None: ...


def fill(files: StagedFiles | Unwritten, name: str, part: Sequence[Item], reads: bool) -> bytes:
    """Write one file; with ``reads``, read all of its tensors even if that fails, as others do."""
    head = header((item.row for item in part), notes={"format": "pt"})
    n_bytes = len(head) + sum(item.n_bytes for item in part)
    pieces = bytes_of(part, gathers=reads)
    try:
        files.write(name, n_bytes, chain([head], pieces))
    except Exception:  # of any kind: the others read on, and hear of it after this file
        for _ in pieces if reads else ():
            pass
        raise
    return b""


def finish(
    files: StagedFiles | Unwritten, notes: Mapping[str, bytes], parts: Mapping[str, Any]
) -> bytes:
    """Write what goes with the tensors, and let loaders see all of it."""
    for name, data in notes.items():
        files.write(name, len(data), [data])
    files.commit(list(parts), list(notes))
    return b""


# -- tensors and shards --------------------------------------------------------------------------


class Item(NamedTuple):
    """One tensor to be written."""

    name: str
    tensor: torch.Tensor

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def row(self) -> tuple[str, str, Sequence[int]]:
        """Name, dtype and shape, for a header."""
        return self.name, dtype_name(self.tensor), self.tensor.shape


def items_of(model: nn.Module) -> list[Item]:
    """Return the tensors of a model's state, tied ones once; ConfigError names other state."""
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


def check_alone(items: Iterable[Item]) -> None:
    """Refuse tensors whose parts other ranks have: none of these knows of the others."""
    for name, tensor in items:
        if is_divided(tensor):
            raise not_plain(name, tensor)


def check_item(name: str, value: Any) -> None:
    """Refuse state that safetensors cannot hold."""
    kind = ""
    if not isinstance(value, torch.Tensor):
        kind = f"a {type(value).__name__}, not a tensor"
    elif value.is_meta:
        kind = "on the meta device: it has no values"
    elif value.layout is not torch.strided or value.is_quantized or value.is_nested:
        kind = f"not a dense tensor ({value.dtype}, {value.layout})"
    elif dtype_name(value) not in CODES:
        kind = f"of {value.dtype}, which the format does not have"
    elif name == "__metadata__":
        kind = "called like a part of the format"
    if kind:
        raise ConfigError(
            f"{name!r} of the model's state is {kind}",
            advice="safetensors holds plain tensors: keep it out of state_dict(), or torch.save it",
        )


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is only memory; others are materialised when they are written."""
    return type(value) in (torch.Tensor, nn.Parameter)


def memory_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors on the same bytes; None if not known."""
    if not is_plain(tensor) or not tensor.numel():
        return None
    view = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), view


def cut(items: Iterable[Item], limit_bytes: int) -> dict[str, list[Item]]:
    """Return ``{file name: tensors}``, in order, each file within the limit if possible, and its
    header within what readers take."""
    parts: list[list[Item]] = [[]]
    room, named = limit_bytes, header_room()
    for item in items:
        own = header_bytes(*item.row)
        if parts[-1] and (item.n_bytes > room or own > named):
            parts.append([])
            room, named = limit_bytes, header_room()
        parts[-1].append(item)
        room, named = room - item.n_bytes, named - own
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


def bytes_of(part: Iterable[Item], *, gathers: bool = False) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one tensor at a time."""
    for name, tensor in part:
        whole = tensor if is_plain(tensor) else materialised(name, tensor, gathers=gathers)
        if whole.numel():
            for piece in pieces_of(whole.resolve_conj().resolve_neg()):
                yield memoryview(piece.cpu().view(torch.uint8).numpy())


def materialised(name: str, tensor: torch.Tensor, *, gathers: bool = False) -> torch.Tensor:
    """Return the values of a tensor subclass as a plain tensor; ``gathers``: all ranks that have
    parts of it do so."""
    value = tensor.detach()
    if gathers and is_divided(value):
        value = value.full_tensor()
    value = value.cpu()
    if not is_plain(value):  # it was on the CPU: a view makes its bytes, without a copy
        value = value.view(value.shape)
    if not is_plain(value):
        raise not_plain(name, tensor)
    return value


def is_divided(tensor: torch.Tensor) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor, which is not imported to ask."""
    return hasattr(tensor, "full_tensor")


def not_plain(name: str, tensor: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"{name!r} of the model's state is a {type(tensor).__name__}, no plain tensor",
        advice="gather or dequantize it first",
    )


def trained_values(model: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the trained tensors of a state dict, as plain ones; all ranks of the model do so."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    gathers = company_of(model).size > 1
    return {
        name: materialised(name, value, gathers=gathers)
        for name, value in own.items()
        if name in trained
    }


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
    """Return ``{file name: contents}`` of the model's configs, if it has such objects."""
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
    """Return the files that a config object writes of itself (also a remote model's code)."""
    with tempfile.TemporaryDirectory() as place:
        try:
            if callable(getattr(config, "save_pretrained", None)):
                config.save_pretrained(place)
            elif callable(getattr(config, "to_json_file", None)):
                config.to_json_file(os.path.join(place, name))
        except Exception as error:  # of any kind, from their own checks
            raise ConfigError(
                f"{name} cannot be saved: {error}",
                advice=f"correct the model's {name.removesuffix('.json')}, or set it to None",
            ) from error
        return {path.name: path.read_bytes() for path in Path(place).iterdir() if path.is_file()}


def true_of(text: bytes, model: nn.Module, items: Sequence[Item]) -> bytes:
    """Write the class and the dtype of these weights into a config of transformers."""
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
