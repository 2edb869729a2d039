"""Settings: parsed once, checked together, frozen (floor 0, no torch)."""

from __future__ import annotations

import dataclasses
import difflib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hetero.errors import ConfigError
from hetero.parse import Unparsable, json_of, read_text, toml_of, yaml_of
from hetero.types import format_bytes

PREFIXES = "KMGTPE"
UNITS = {  # in any case: 20GiB, 20Gi and 20G are binary, as in docker's and ulimit's; 20GB is not
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{f"{p}b".lower(): 1000**power for power, p in enumerate(PREFIXES, 1)},
    **{
        f"{p}{tail}".lower(): 1024**n for n, p in enumerate(PREFIXES, 1) for tail in ("", "i", "ib")
    },
}
SIZE = re.compile(r"(\d{1,40}(?:\.\d{1,40})?(?:e\d{1,2})?) ?([a-z]*)", re.IGNORECASE | re.ASCII)
SIZE_FORMS = "text as '20GiB' or '20G' (2^30 each), '20GB' (10^9 each), or a number of bytes"
MOST_BYTES = 2**62  # of anything
FEW_BYTES = 1024  # below which a number without a unit is taken for one whose unit was forgotten
DEVICES = ("cuda", "cpu", "cpu:sim")
PRECISIONS = ("fp32", "bf16", "fp16")
ACTIVATIONS = ("auto", "keep", "recompute", "offload")
FROZEN = ("keep", "int8", "nf4")
UPDATES = ("step", "backward")
Check = Callable[[str, Any], Any]


def parse_bytes(value: object, key: str = "size") -> int:
    """Return a byte count from an int or from text, in any case: see `SIZE_FORMS`.

    Raises ConfigError for anything else, zero, negative numbers and more than any machine has.
    """
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = UNITS.get(match[2].lower()) if match else None
    n_bytes = int(Fraction(match[1]) * unit) if match and unit else 0
    if isinstance(value, int) and not isinstance(value, bool):
        n_bytes = value
    if match and not match[2] and 0 < n_bytes < FEW_BYTES:
        raise ConfigError(
            f"{key}={value!r} would be {n_bytes} bytes", advice=f"for GiB write '{value}GiB'"
        )
    if 0 < n_bytes <= MOST_BYTES:
        return n_bytes
    understood = f"understood {n_bytes} bytes" if match and unit else "no bytes understood"
    raise ConfigError(
        f"{key}={value!r} is not a size; {understood}", advice=f"a size is {SIZE_FORMS}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of `hetero.prepare`; sizes are ints here, whatever form they were given in."""

    device: Any = None
    """"cuda", "cpu", "cpu:sim", a device object, or None: CUDA when there is one, else CPU."""
    hbm: int | None = None
    """Budget in bytes for everything on the device; None: all of it, which on "cpu" is `host`."""
    host: int | None = None
    """Budget in bytes for RAM; None: what the machine or the container leaves free."""
    pinned: int | None = None
    """Bytes of RAM that CUDA may page-lock, of parameters first, then of activations and gradients.
    The rest is copied by threads through a ring of page-locked stages, which counts in. None: as
    many as CUDA takes. WSL and containers may take less than 1 GiB; `hetero doctor` finds out."""
    precision: str = "fp32"
    """What parameters are while the model computes: "fp32" keeps every parameter's own dtype;
    "bf16" and "fp16" train 2-byte working weights with an exact fp32 master for each."""
    keep_fp32: tuple[str, ...] = ()
    """Names (or glob patterns) of modules whose parameters stay fp32 under "bf16" and "fp16"."""
    frozen: str = "keep"
    """What frozen weights are at rest, on HOST, on disk and on the link: "keep" leaves them as they
    are; "int8" (1.02 bytes a parameter) and "nf4" (0.53, the 4 bits of QLoRA) code those of two or
    more dimensions in blocks. They are decoded to their own dtype in frames, and computed with as
    such: training is that of a model whose frozen weights were rounded before."""
    keep_exact: tuple[str, ...] = ()
    """Names (or glob patterns) of modules whose frozen weights stay as they are under "int8" and
    "nf4". bitsandbytes codes no head and no embedding: ["*lm_head", "*embed_tokens"]."""
    max_grad_norm: float | None = None
    """Global 2-norm that `step` clips gradients to; None: it does not clip."""
    updates: str = "step"
    """When updates begin: "step", in `optimizer.step()`; "backward", as soon as backward has left a
    unit and its gradients are at home, with the learning rates of that moment. For loops that call
    `step` once after each backward pass and write to nothing in between: what does is an error."""
    activations: str = "auto"
    """What a unit's forward leaves for backward: "keep" all that autograd saves; "recompute" its
    inputs only, at the cost of a second forward; "offload" all, on HOST (or NVME) until backward
    comes to it; "auto" keeps what fits."""
    micro_batch: int | None = None
    """Samples that a unit takes at once of a larger batch; weights cross the link twice a step all
    the same. Without gradients (evaluation, `generate`) a forward fetches them once; a unit that
    writes to a cache other than a plain `DynamicCache` takes the whole batch there. None: the whole
    batch."""
    tile: int | None = None
    """Positions of a sequence that the MLPs of recognised blocks take at once (see `hetero.tile`);
    sums over tiles round otherwise than one product, so that no plan makes this choice by itself.
    None: all."""
    fused_loss: bool = False
    """Whether a causal language model of transformers computes its loss without its logits."""
    chunk_bytes: int | None = None
    """Bytes of a chunk of 4-byte elements, a multiple of 64; None: chosen for under 1 % waste."""
    nvme: tuple[str, ...] = ()
    """Directories on local drives for what `host` does not hold, striped over all of them; private
    files are made there and go with the process, however it ends. None: nothing goes to disk."""
    nvme_bytes: int | None = None
    """Budget in bytes for those files, all together; None: what is free there."""
    weights: str | None = None
    """Directory of safetensors (or one file) to read parameters and buffers from, piece by piece;
    a model from `hetero.empty_init` needs it."""
    units: tuple[str, ...] | None = None
    """Names (or glob patterns) of the modules fetched as a whole; None: found in the model."""
    mesh: Any = None
    """The ranks that train one model together, as torchrun and `accelerate launch` start them:
    "world", a mapping of sizes ({"dp_shard": 4}; {"dp_replicate": 4} for ranks that each keep a
    whole model; {"pp": 2} for ranks that each have stages of a pipeline, in one nn.ModuleList; "tp"
    for those that divide its tensors, "cp" for those that have parts of its sequences; on the
    command line dp_shard=2,tp=2), or a DeviceMesh with such axes. None: this process trains
    alone."""
    sum_group: int = 1
    """Consecutive ranks of the mesh whose addends of a gradient add up first, in their order; the
    sums of groups then add up in theirs. With the ranks of a machine fewer bytes cross between
    machines. Other sizes give other bits, so that no plan makes this choice; 1: the order in which
    one rank would add up as many micro-batches."""
    gather_shares: bool = False
    """Whether ranks of one machine, too, get each other's shares by collectives (NCCL on CUDA
    devices), not where they lie in RAM: homes may then be on HBM. All ranks have to make the same
    forwards and reads of weights (one that makes one alone waits for the others); their batches may
    be of unlike sizes."""
    timeout_seconds: float = 600.0
    """After which a rank of the mesh that does not answer is lost: all others raise RankLost."""
    profile: str | None = None
    """Hardware profile that plans go by: a TOML file that `hetero calibrate` wrote, or the name of
    one that comes with hetero."""

    @classmethod
    def load(cls, source: Settings = None, **settings: Any) -> Config:
        """Build a Config from another one, a mapping or a file (TOML or YAML), ``settings`` on top.

        Raises one ConfigError that lists every problem found.
        """
        given: dict[str, Any] = {}
        if isinstance(source, Config):
            given.update({f.name: getattr(source, f.name) for f in dataclasses.fields(cls)})
        elif isinstance(source, (str, Path)):
            given.update(read_settings(Path(source)))
        elif isinstance(source, Mapping):
            given.update(source)
        elif source is not None:
            raise ConfigError(
                f"config={source!r} is a {type(source).__name__}",
                advice="pass a hetero.Config, a mapping, or the path of a TOML or YAML file",
            )
        given.update(settings)
        return cls(**checked(given, [f.name for f in dataclasses.fields(cls)]))


Settings = Config | Mapping[str, Any] | str | Path | None
"""The forms of settings: a Config, a mapping of its fields, or the path of a file."""


def json_text(text: str) -> Any:
    """Return the value of a text of JSON."""
    return json_of(text.encode())


PARSERS: dict[str, Callable[[str], Any]] = {".yaml": yaml_of, ".yml": yaml_of, ".json": json_text}
"""By the end of a file's name; any other file is TOML."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML, YAML or JSON file; ConfigError names the line of a mistake."""
    parse: Callable[[str], Any] = PARSERS.get(path.suffix, toml_of)
    try:
        settings = parse(read_text(path))
    except ImportError as error:
        raise ConfigError(
            "YAML files need PyYAML", advice="pip install pyyaml, or write the settings as TOML"
        ) from error
    except Unparsable as error:
        raise ConfigError(f"config file {path}: {error}", advice="fix its syntax") from error
    except (OSError, ValueError) as error:  # a path with a NUL in it
        raise ConfigError(f"config file {path}: {error}", advice="check the path") from error
    if not isinstance(settings, dict) or not settings:
        raise ConfigError(
            f"config file {path} {'names no settings' if settings else 'is empty'}",
            advice='write settings, as hbm = "20GiB" in TOML or hbm: 20GiB in YAML',
        )
    return settings


def checked(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return clean settings, or raise one ConfigError with all problems."""
    known = list(known)
    problems: list[str] = []
    advised: list[str] = []
    clean: dict[str, Any] = {}
    for key, value in given.items():
        try:
            clean[key] = checked_one(key, value, known)
        except ConfigError as error:
            problems.append(error.args[0])
            advised.append(error.advice)
    for problem in contradictions(clean):
        problems.append(problem)
        advised.append("leave one of the two out")
    if problems:
        raise ConfigError("; ".join(problems), advice="; ".join(dict.fromkeys(advised)))
    return clean


def checked_one(key: str, value: Any, known: list[str]) -> Any:
    """Return the clean value of a setting; ConfigError for a wrong one, or an unknown name."""
    if key not in known:
        raise ConfigError(
            unknown_key(str(key), known), advice=f"known settings: {', '.join(known)}"
        )
    return CHECKS[key](key, value)


def contradictions(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield each pair of settings that exclude each other."""
    if given.get("updates") == "backward":
        if given.get("mesh") is not None and not divides_tensors_alone(given["mesh"]):
            yield "mesh= with updates='backward': gradients are summed when backward is over"
        whole = " needs all gradients before the first update, and updates='backward' does not wait"
        if given.get("max_grad_norm") is not None:
            yield "max_grad_norm=" + whole
        if given.get("precision") == "fp16":
            yield "precision='fp16', which skips steps whose gradients are not finite," + whole


def divides_tensors_alone(mesh: Any) -> bool:
    """Whether each rank of a mesh has a part of every tensor, and all else as one process has."""
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = dict(zip(names, mesh.shape, strict=False)) if names else mesh
    return isinstance(sizes, Mapping) and all(
        size == 1 for axis, size in sizes.items() if axis != "tp"
    )


def unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"unknown setting {key!r}{hint}"


def check_paths(key: str, value: Any) -> tuple[str, ...]:
    """Return one path or several as a tuple; empty for None."""
    given = [value] if isinstance(value, (str, os.PathLike)) else value
    given = () if given is None else given
    found: list[str] = []
    for path in given if isinstance(given, (list, tuple)) else [given]:
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not text or any(c in text for c in "\0\n") or not is_encodable(text):
            raise ConfigError(f"{key}={path!r} is no path", advice=f"{key} takes a path")
        found.append(text)
    if len(set(found)) < len(found):
        raise ConfigError(f"{key}={value!r} names a directory twice", advice="name each once")
    return tuple(found)


def is_encodable(text: str) -> bool:
    """Whether the file system can encode a text (no half of a surrogate pair)."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def takes(
    fits: Callable[[Any], bool],
    what: str,
    said: str = "",
    then: Callable[[Any], Any] = lambda value: value,
) -> Check:
    """Return a check that refuses values unless ``fits``, and returns ``then`` of the others."""

    def check(key: str, value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"{key}={value!r}{said}", advice=f"{key} takes {what}")
        return then(value)

    return check


def one_of(choices: tuple[str, ...]) -> Check:
    return takes(lambda value: value in choices, f"one of {choices}", " is unknown")


def count_of(what: str) -> Check:
    return takes(is_count, f"a number of {what}, 1 or more")


def optional(check: Check, absent: Any = None) -> Check:
    """Return a check that also takes None, and returns ``absent`` for it."""
    return lambda key, value: absent if value is None else check(key, value)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_norm(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def is_mesh(value: Any) -> bool:
    """Whether a value may be a mesh; an object is checked when its groups are opened."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_count, value.values()))
    return value is None or value == "world" or hasattr(value, "mesh_dim_names")


def is_device(value: Any) -> bool:
    """Whether a value is a device's name, or an object, which is checked when it is opened."""
    return not isinstance(value, str) or value in DEVICES


def are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def check_chunk_bytes(key: str, value: Any) -> int:
    n_bytes = parse_bytes(value, key)
    if n_bytes % 64:
        near = max(64, round(n_bytes / 64) * 64)
        raise ConfigError(
            f"{key}={n_bytes} is not a multiple of 64",
            advice=f"a chunk holds a multiple of 16 elements; the nearest value is {near}",
        )
    return n_bytes


sized = optional(lambda key, value: parse_bytes(value, key))
one_path = optional(lambda key, value: check_paths(key, [value])[0])
named = takes(are_names, "a list of module names", then=tuple)
SIZES = ("hbm", "host", "nvme_bytes", "pinned")
CHECKS: dict[str, Check] = {
    "device": takes(
        is_device, f"one of {DEVICES}; CUDA_VISIBLE_DEVICES=1 chooses a GPU", " is unknown"
    ),
    **dict.fromkeys(SIZES, sized),
    "chunk_bytes": optional(check_chunk_bytes),
    "nvme": check_paths,
    **dict.fromkeys(("weights", "profile"), one_path),
    "precision": one_of(PRECISIONS),
    "frozen": one_of(FROZEN),
    "updates": one_of(UPDATES),
    "activations": one_of(ACTIVATIONS),
    **dict.fromkeys(
        ("fused_loss", "gather_shares"),
        takes(lambda value: isinstance(value, bool), "True or False"),
    ),
    "micro_batch": optional(count_of("samples")),
    "tile": optional(count_of("positions")),
    "sum_group": count_of("ranks"),
    "max_grad_norm": optional(takes(is_norm, "a positive number", " is not a norm", float)),
    **dict.fromkeys(("keep_fp32", "keep_exact"), optional(named, absent=())),
    "units": optional(named),
    "timeout_seconds": takes(is_norm, "a positive number of seconds", then=float),
    "mesh": takes(is_mesh, "'world', a mapping of sizes, or a DeviceMesh"),
}
"""The check of each setting; it returns the clean value, or raises ConfigError."""


class HostLimit(NamedTuple):
    """The RAM that this process may use, and the source of the limit."""

    n_bytes: int
    source: str


def host_limit(root: Path = Path("/")) -> HostLimit:
    """Return the RAM this process may still take: the least of free memory and cgroup limits.

    ``psutil`` reports the whole machine inside a container, so every ancestor cgroup is read, in
    version 2 (``memory.max``, ``memory.high``) and version 1 (``memory.limit_in_bytes``) form; file
    pages that the kernel would reclaim do not count as used. Memory of a GPU that the kernel takes
    for RAM (GH200) is not. ``root`` holds /proc and /sys.
    """
    free = max(0, psutil.virtual_memory().available - gpu_nodes_free(root))
    best = HostLimit(free, "free memory of the machine")
    for folder, limit_name, used_name in cgroup_folders(root):
        limit = read_number(folder / limit_name)
        if limit is None or not 0 <= limit < 2**62:  # version 1 writes 2^63 - 4096 for "no limit"
            continue
        used = (read_number(folder / used_name) or 0) - read_inactive_file(folder)
        left = max(0, limit - max(0, used))
        if left < best.n_bytes:
            best = HostLimit(left, str(folder / limit_name))
    return best


def gpu_nodes_free(root: Path) -> int:
    """Return the free bytes of memory nodes without processors, on an ARM with NVIDIA's driver: the
    HBM of a coherent GPU, unless the driver keeps it to itself (CDMM). Elsewhere such nodes are RAM
    on another bus."""
    free = 0
    if platform.machine() != "aarch64" or not (root / "proc/driver/nvidia").is_dir():
        return free
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            if (node / "cpulist").read_text().strip():
                continue
            for line in (node / "meminfo").read_text().splitlines():
                words = line.split()  # Node 1 MemFree: 1024 kB
                if words[2:3] == ["MemFree:"]:
                    free += int(words[3]) * 1024
        except (OSError, ValueError, IndexError):
            continue
    return free


def cgroup_folders(root: Path) -> list[tuple[Path, str, str]]:
    """Return (folder, limit file, usage file) of every memory cgroup above this process."""
    found: list[tuple[Path, str, str]] = []
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return found
    limits: tuple[str, ...]
    for line in lines:
        _, controllers, name = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base = root / "sys/fs/cgroup"
            limits, used = ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limits, used = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            found.extend((base.joinpath(*parts[:depth]), limit, used) for limit in limits)
    return found


def read_inactive_file(folder: Path) -> int:
    """Return the bytes of a cgroup's page cache that the kernel reclaims first."""
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def read_number(path: Path) -> int | None:
    """Return the integer in a small file, or None if there is none ("max", missing)."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def paranoid() -> bool:
    """Return whether HETERO_PARANOID asks for poison, digests and invariants."""
    return os.environ.get("HETERO_PARANOID", "0") not in ("", "0")


def describe_limit(limit: HostLimit) -> str:
    """Return a limit for people: ``"23.5 GiB (free memory of the machine)"``."""
    return f"{format_bytes(limit.n_bytes)} ({limit.source})"
