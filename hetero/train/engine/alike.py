"""What ranks that share a model must have in common, checked and made so by `prepare` (floor 2)."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hetero.config import Config
from hetero.crc import crc32
from hetero.device import Device, n_accelerators
from hetero.device.comm import Comm, Company
from hetero.errors import ConfigError, DivergenceError
from hetero.members import Members
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.lacking import lacking, refuse_lacking
from hetero.train.gradients.slot import NONE, LazyGrad
from hetero.train.model.parts import Parts
from hetero.train.update.rules import Group, bytes_of
from hetero.version import __version__

OF_ALL_STAGES = ("precision", "max_grad_norm")
"""Settings that all stages of a pipeline have."""
MEMBERS = ("params", "param_names")
"""Of an optimizer's group: what is in it, which is no setting."""
OWN = ("hbm", "host", "profile", "timeout_seconds")
"""Settings that ranks may have of their own."""


def check_alike(
    comm: Comm,
    plan: Blueprint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
) -> None:
    """Raise DivergenceError on all ranks unless they would train the same model in the same way.

    Equal devices, releases and thread counts are a condition of equal bits: kernels differ.
    """
    compare(
        *(comm, facts_of(plan, model, optimizer, config), "what is prepared"),
        advice="build the same model and optimizer on every rank, with the same settings, on equal"
        " machines; a Python set of parameters has another order in each process",
    )


def check_parts_alike(
    everyone: Company,
    model: nn.Module,
    parts: Parts,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
) -> None:
    """Raise DivergenceError on all ranks unless those of a tensor would train it in the same way:
    their next calls are collective."""
    named = (f"{name} {tuple(p.shape)} {parts.shown(p)}" for name, p in model.named_parameters())
    compare(
        everyone,
        {"parameters": digest_of(named), **settings_facts(model, optimizer, config)},
        "what is prepared",
        advice="build the same model and optimizer on every rank of a tensor, with the same"
        " settings and placements; a Python set of parameters has another order in each process",
    )


def check_stages_alike(
    everyone: Company, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> None:
    """Raise DivergenceError on all ranks unless stages are prepared for the same model, and
    ConfigError for what none of them has."""
    settings = {f"the setting {key}=": repr(getattr(config, key)) for key in OF_ALL_STAGES}
    settings["what is prepared"] = f"stages with {'no' if optimizer is None else 'an'} optimizer"
    if optimizer is not None:
        settings["the optimizer"] = type(optimizer).__name__
    compare(
        *(everyone, settings, "settings of stages"),
        advice="give all stages of a pipeline the same settings, and an optimizer each, where all"
        " parameters are frozen, too",
    )
    rows = everyone.agree(pickle.dumps(lacking(model, optimizer, config)), "parts of stages")
    refuse_lacking([pickle.loads(row) for row in rows])  # of this very program


def compare(comm: Company, facts: Mapping[str, str], what: str, *, advice: str) -> None:
    """Raise DivergenceError on all ranks, naming the first fact in which they differ."""
    told: list[dict[str, str]] = [
        pickle.loads(row)  # of this very program
        for row in comm.agree(pickle.dumps(dict(facts)), what)
    ]
    for key in dict.fromkeys(key for row in told for key in row):
        values = [row.get(key, "nothing") for row in told]
        if len(set(values)) > 1:
            said = comm.members.listed(values)
            raise DivergenceError(
                f"ranks that share a model differ in {key} ({said})", advice=advice
            )


def facts_of(
    plan: Blueprint, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> dict[str, str]:
    """Return what must be equal, by name."""
    segments = [segment for bucket in plan.layout.buckets for segment in bucket.segments]
    laid = (
        f"{s.spec.name} {s.spec.shape} {s.spec.stride} {s.spec.dtype} {s.spec.trainable} {s.offset}"
        for s in segments
    )
    return {"parameters": digest_of(laid), **settings_facts(model, optimizer, config)}


def digest_of(lines: Iterable[str]) -> str:
    """Return how many lines there are, and their CRC."""
    found = list(lines)
    return f"{len(found)}, {crc32(memoryview(chr(10).join(found).encode())):08x}"


def settings_facts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> dict[str, str]:
    """Return what must be equal apart from the model, by name."""
    found = {
        "the release of hetero": __version__,
        "the release of torch": torch.__version__,
        "threads of torch": str(torch.get_num_threads()),
        "the optimizer": "none" if optimizer is None else type(optimizer).__name__,
    }
    groups = [] if optimizer is None else optimizer.param_groups
    found.update(settings_of(groups), **members_of(groups, model.named_parameters()))
    for name in Config.__dataclass_fields__:
        if name not in OWN and name != "device":
            found[f"the setting {name}="] = repr(getattr(config, name))
    return found


def settings_of(groups: Sequence[Group]) -> dict[str, str]:
    """Return the settings of an optimizer's groups, by name."""
    return {
        f"the setting {key!r} of group {number}": repr(plain(value))
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key not in MEMBERS
    }


def members_of(
    groups: Sequence[Group], named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, str]:
    """Return which parameters an optimizer's groups have, in which order, by the group's name.

    Rules that need whole tensors step them in that order, in which ranks make calls then.
    """
    names = {id(param): name for name, param in named}
    found = {}
    for number, group in enumerate(groups):
        members = [names.get(id(param), "one of no name") for param in group["params"]]
        first = f", from {members[0]!r} on" if members else ""
        found[f"the parameters of group {number}"] = digest_of(members) + first
    return found


def states_of(
    params: Iterable[tuple[str, nn.Parameter]], states: Mapping[torch.Tensor, Mapping[str, Any]]
) -> dict[str, str]:
    """Return what of each parameter's state every rank has for itself: which entries there are, and
    its numbers. Of the others each rank has a share."""
    found = {}
    for name, param in params:
        state = states.get(param)
        if state:
            entries = (said(key, state[key]) for key in sorted(state))
            found[f"the state of {name!r}"] = ", ".join(entries)
    return found


def said(key: str, value: Any) -> str:
    """Return an entry of a state, with its value if that is a number."""
    if isinstance(value, torch.Tensor):
        is_number = type(value) is torch.Tensor and value.dim() == 0 and value.device.type == "cpu"
        return f"{key} {value.item()!r}" if is_number else key
    return f"{key} {value!r}" if isinstance(value, (int, float)) else key


def plain(value: Any) -> Any:
    """Return a setting with all its digits."""
    return value.tolist() if isinstance(value, torch.Tensor) and not value.is_meta else value


def gradients_of(params: Iterable[tuple[str, nn.Parameter]], parts: Parts) -> dict[str, str]:
    """Return what an update would read of each gradient that is not a sum over ranks as it is."""
    found = {}
    for name, param in params:
        grad = parts.grad(param)
        if grad is None:
            found[f"the gradient of {name!r}"] = "none"
        elif not isinstance(grad, LazyGrad):
            found[f"the gradient of {name!r}"] = digest(grad)
        elif grad.slot.value is not None:
            found[f"the gradient of {name!r}"] = digest(grad.slot.value)
        elif grad.slot.factors != NONE:
            factors = [plain(factor) for factor in grad.slot.factors]
            found[f"the gradient of {name!r}"] = f"a sum, times {factors}"
    return found


def digest(tensor: torch.Tensor) -> str:
    return f"a tensor of the user's, CRC {crc32(memoryview(bytes_of(tensor))):08x}"


def check_device(device: Device, comm: Comm) -> None:
    """Refuse ranks that gather in frames of one CUDA device: NCCL takes a rank a device."""
    facts = device.facts() if device.is_cuda else None
    if facts is None or comm.size == 1 or comm.node is not None:
        return
    rows = comm.agree(facts.uuid.encode(), "devices of ranks that gather")
    for first in range(0, comm.size, comm.n_shares):
        copy = rows[first : first + comm.n_shares]
        twice = next((row for row in copy if copy.count(row) > 1), None)
        if twice is not None:
            ranks = comm.members.names(first + at for at, row in enumerate(copy) if row == twice)
            raise ConfigError(
                f"{ranks} compute on one CUDA device and gather shares: NCCL does that for one rank"
                " a device",
                advice="start a rank a device, and call torch.cuda.set_device("
                "int(os.environ['LOCAL_RANK'])) before hetero.prepare; or let them read each"
                " other's shares, without gather_shares=, on one machine with Linux, in containers"
                " that see each other's processes",
            )


def check_places(comm: Comm, device: Device) -> None:
    """Refuse ranks that compute on one CUDA device while there is one for each of them."""
    if comm.size == 1:
        return
    here = device.torch_device.type, str(device.torch_device), n_accelerators()
    rows = comm.agree(pickle.dumps(here), "where ranks compute")
    kinds, names, numbers = zip(*(pickle.loads(row) for row in rows), strict=True)
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"ranks that share a model compute on {', '.join(names)}",
            advice="pass the same kind of device= on every rank",
        )
    n_here = min(comm.n_local, comm.size)
    if device.is_cuda and len(set(names)) < n_here <= min(numbers):
        raise ConfigError(
            f"ranks compute on {', '.join(names)}, and there are {min(numbers)} devices",
            advice="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before"
            " hetero.prepare",
        )


def share_values(comm: Comm, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give every rank the first one's values, as DDP does; bytes move only where they differ."""
    real = [
        (name, tensor)
        for name, tensor in tensors
        if not tensor.is_meta and tensor.layout is torch.strided
    ]
    mine = [
        (f"{name} {list(tensor.shape)} {tensor.dtype}", crc32(memoryview(bytes_of(tensor))))
        for name, tensor in real
    ]
    told: list[Any] = [pickle.loads(row) for row in comm.agree(pickle.dumps(mine), "first values")]
    check_names([[said for said, _ in row] for row in told], comm.members)
    for number, (name, tensor) in enumerate(real):
        if len({row[number] for row in told}) == 1:
            continue
        value = tensor.detach().cpu().contiguous().clone()
        flat = value.view(-1).view(torch.uint8)
        comm.complete(flat, [0, *[flat.numel()] * comm.n_shares], f"the first value of {name!r}")
        with torch.no_grad():
            tensor.copy_(value)


def check_names(told: Sequence[Sequence[str]], members: Members) -> None:
    """Raise DivergenceError unless all ranks have tensors of the same names and shapes."""
    for each in zip_longest(*told, fillvalue="nothing"):
        if len(set(each)) > 1:
            raise DivergenceError(
                "ranks that share a model have other parameters or buffers"
                f" ({members.listed(each)})",
                advice="build the same model on every rank",
            )


def values_of(model: nn.Module, parts: Parts) -> list[tuple[str, torch.Tensor]]:
    """Return what parameters and buffers have inside, by name."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [(name, parts.local(tensor)) for name, tensor in named]
