"""A recorded run on disk, in files that any tool can read (floor 4).

A directory holds ``meta.json`` (`Meta`) and ``events.jsonl.gz``: one JSON array per event, with the
columns of `hetero.events.Event`. A thread writes it during the run, so that a killed run loses only
its last moments.
"""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hetero.errors import ConfigError, StorageError
from hetero.events import Event, EventLog, What
from hetero.io import failed, make_folder
from hetero.parse import Unparsable, json_of, read_text
from hetero.report.timing import WARMUP
from hetero.report.values import VALUES, Value, append_values, read_values
from hetero.report.words import COPY_LANES

SCHEMA = 1
META, EVENTS, EARLIER = "meta.json", "events.jsonl.gz", "earlier"
PERIOD_SECONDS = 0.05  # between two reads of the ring
COLUMNS = Event._fields
TYPES = tuple(get_type_hints(Event).values())
MAX_META_BYTES = 2**24
MAX_ROW_BYTES = 2**16
MIN_TEXT_BYTES, MAX_RATIO = 2**21, 16  # of rows, and per byte of their file, where 5 are usual
MAX_NUMBER = 2**62
T = TypeVar("T")
encode = json.JSONEncoder(separators=(",", ":")).encode  # made once, not per row


@dataclass(frozen=True, slots=True)
class BucketMeta:
    """A bucket of a run: parameters of one unit with one treatment."""

    unit: int
    n_bytes: int
    """Bytes of its parameters in frames."""
    numel: int
    trainable: bool
    home_bytes: int | None = None
    """Bytes at home and on the link; None: as in frames."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Bytes at home by kind, but for its parameters: gradients, masters, states."""
    names: list[str] = field(default_factory=list)
    """Of its parameters, without the name of the unit that begins them."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that a fetch moves."""
        return self.n_bytes if self.home_bytes is None else self.home_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes on the device that one place of the program made."""

    module: str
    """The innermost module that computed; empty outside of the model."""
    where: str
    """The innermost lines of the program; empty if there were none."""
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Allocations:
    """What lived when most bytes did, between a step's begin and its backward."""

    step: int = -1
    """Number of the step that was seen; -1: none was."""
    rows: list[Allocation] = field(default_factory=list)
    """The largest first."""

    @property
    def n_bytes(self) -> int:
        return sum(row.n_bytes for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The description of a run."""

    schema: int = SCHEMA
    kind: str = "measured"
    """Or ``predicted``."""
    model: str = ""
    """Name of the model's class."""
    n_params: int = 0
    device: str = ""
    mode: str = ""
    """``paged``, ``resident``, or ``plain`` for a model that hetero does not manage."""
    update_place: str = ""
    precision: str = ""
    chunk_bytes: int = 0
    locked_bytes: int = 0
    """Of HOST, page-locked; 0 also if nothing is page-locked, as on a CPU."""
    budgets: dict[str, int | None] = field(default_factory=dict)
    """By tier; None: no limit."""
    units: list[str] = field(default_factory=list)
    buckets: list[BucketMeta] = field(default_factory=list)
    """By id."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Measured bytes per second, by lane."""
    profile: str = ""
    """Name of the hardware profile, if there is one."""
    profile_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS
    warmup: int = WARMUP
    """Steps left out of steady figures, from the beginning."""
    step_tokens: int = 0
    """Tokens of a step, samples if there are none; 0: unknown."""
    rated_write_bytes: int | None = None
    """Bytes that the drives are rated to take in their life; None: unknown."""
    made_at_peak: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of HBM's peak, what no module made: by category, bytes by lines of the program."""
    allocations: Allocations = field(default_factory=Allocations)
    """Of one step of a prepared model."""
    rank: int = 0
    n_ranks: int = 1
    """That have the model together."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Ranks along each axis; empty for one rank."""
    began: str = ""
    """When recording began, as ``2026-11-25 02:10 UTC``; empty: unknown, or nothing ran."""
    program: str = ""
    """File name of the script, or the module, that ran; without its arguments."""
    state_bytes: int = 0
    """Of all parameters' weights, gradients, masters and states, without padding; 0: unknown."""
    first_seq: int | None = None
    """Number of the first event, so that its loss is noticed; None: unknown."""

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Meta:
        """Return the result of `as_json`, also of a later version; Unparsable for other data."""
        rows = data.get("buckets", [])
        buckets = [known(BucketMeta, row) for row in rows] if isinstance(rows, list) else rows
        columns = data.get("columns", COLUMNS)
        columns = tuple(columns) if isinstance(columns, list) else columns
        made = allocations_of(data.get("allocations", {}))
        found = known(cls, {**data, "buckets": buckets, "columns": columns, "allocations": made})
        if any(not -1 <= bucket.unit < len(found.units) for bucket in found.buckets):
            raise Unparsable("a bucket is of a unit that is not there")
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run; events in the order of their begin."""

    meta: Meta
    events: list[Event]
    dropped: int = 0
    """Events that the ring lost before they were drained."""
    values: tuple[Value, ...] = ()
    """What the loop told: its loss, its tokens."""

    @classmethod
    def of(cls, meta: Meta, events: Iterable[Event], values: Iterable[Value] = ()) -> Run:
        """Return a run of these events, in any order."""
        rows = list(events)
        seqs = {row.seq for row in rows}
        first = min(seqs, default=0) if meta.first_seq is None else meta.first_seq
        seqs = {seq for seq in seqs if seq >= first}  # an access may be older than the log
        missing = max(seqs) + 1 - first - len(seqs) if seqs else 0
        rows.sort(key=lambda row: (row.t_ns, row.seq))
        return cls(meta, rows, missing, tuple(values))

    @classmethod
    def load(cls, directory: str | Path) -> Run:
        """Read a run's directory; ConfigError if it is none, or of a newer schema."""
        folder = Path(directory)
        try:
            data = json_of(read_text(folder / META, MAX_META_BYTES).encode())
            if not isinstance(data, dict):
                raise Unparsable(f"{META} is no object")
            schema = data.get("schema", 0)
            if type(schema) is int and schema > SCHEMA:
                raise ConfigError(
                    f"{folder} has schema {schema}, this hetero reads up to {SCHEMA}",
                    advice="install a newer hetero",
                )
            meta = Meta.parse(data)
        except (OSError, Unparsable) as error:
            why = f"{META}: {error.strerror}" if isinstance(error, OSError) else error
            raise ConfigError(
                f"{folder} is no run: {why}",
                advice="name the directory that hetero.profile wrote, or a run of hetero train, as"
                f" runs/1: there are {META} and {EVENTS} in it",
            ) from error
        return cls.of(meta, read_events(folder / EVENTS, meta), read_values(folder))


def read_events(path: Path, meta: Meta) -> Iterator[Event]:
    """Yield the events of a file; one that a kill cut off ends at the cut.

    Raises ConfigError for rows that no recording has, and for too many rows for the size of the
    file: a few bytes may decompress to a gigabyte.
    """
    try:
        places = [meta.columns.index(name) for name in COLUMNS]
    except ValueError as error:
        raise ConfigError(f"{path}: a column is missing: {error}", advice="record again") from error
    texts: dict[str, str] = {}  # each word is kept once, in however many rows it is
    left = MIN_TEXT_BYTES + MAX_RATIO * (path.stat().st_size if path.exists() else 0)
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(MAX_ROW_BYTES):
                left -= len(line)
                if left < 0:
                    raise wrong_row(path, "there are more rows than its size is of")
                row = json.loads(line)
                if not is_row(row, places, meta):
                    raise wrong_row(path, f"no recording has the row {str(row)[:200]}")
                found = (row[place] for place in places)
                values: Any = [texts.setdefault(v, v) if type(v) is str else v for v in found]
                yield Event(*values)
    except ConfigError:
        raise
    except (EOFError, ValueError, RecursionError, zlib.error):
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error}", advice="check the run's directory") from error


def wrong_row(path: Path, what: str) -> ConfigError:
    """Return the error for a log that no recording wrote."""
    return ConfigError(f"{path}: {what}", advice="record again")


def is_row(row: Any, places: Sequence[int], meta: Meta) -> bool:
    """Whether a row has the types of an event, and names existing units and buckets."""
    if type(row) is not list or len(row) <= max(places):
        return False
    event = Event(*(row[place] for place in places))
    return (
        tuple(map(type, event)) == TYPES
        and event.dur_ns >= 0
        and all(abs(value) < MAX_NUMBER for value in event if type(value) is int)
        and -1 <= event.unit < len(meta.units)
        and -1 <= event.bucket < len(meta.buckets)
        and (event.what != What.MOVE.value or event.lane in COPY_LANES)
    )


def allocations_of(data: Any) -> Allocations:
    """Return allocations from JSON; Unparsable for other data."""
    rows = data.get("rows", []) if isinstance(data, dict) else []
    parsed = [known(Allocation, row) for row in rows] if isinstance(rows, list) else rows
    return known(Allocations, {**data, "rows": parsed} if isinstance(data, dict) else data)


def known(kind: type[T], row: Any) -> T:
    """Return a dataclass from JSON, ignoring unknown keys; Unparsable if a value does not fit."""
    if not isinstance(row, dict):
        raise Unparsable(f"a {kind.__name__} is no object")
    given: dict[str, Any] = {}
    for key, hint in get_type_hints(kind).items():
        if key in row and not fits(row[key], hint):
            raise Unparsable(f"{key} is {str(row[key])[:80]!r}")
        if key in row:
            given[key] = row[key]
    try:
        return kind(**given)
    except TypeError as error:
        raise Unparsable(str(error)) from error


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: a class, a union, or a list, tuple or mapping of such."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin in (list, tuple):
        return isinstance(value, origin) and all(fits(each, parts[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, parts[1]) for each in value.values())
    if hint is float:
        return type(value) in (int, float) and abs(value) < MAX_NUMBER
    return type(value) is hint and (hint is not int or abs(value) < MAX_NUMBER)


@contextmanager
def storing(path: str | Path) -> Iterator[None]:
    """Raise a StorageError that names ``path`` if the block cannot write its files."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise failed("write", error, str(path)) from error


def put_aside(folder: Path) -> None:
    """Move the recording that a directory has to one of its own inside: no recording is lost to a
    script that runs twice."""
    found = [name for name in (META, EVENTS, VALUES) if (folder / name).exists()]
    if not found:
        return
    aside = next(p for n in itertools.count(1) if not (p := folder / f"{EARLIER}-{n}").exists())
    aside.mkdir()
    for name in found:
        (folder / name).replace(aside / name)


class Recorder:
    """Writes a log's events from a thread; opening and `close` raise StorageError."""

    def __init__(self, log: EventLog, directory: str | Path, meta: Meta) -> None:
        self.directory = Path(directory)
        self._log = log
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: OSError | None = None
        with storing(self.directory):
            make_folder(self.directory, mode=0o777).close()  # checkpoints may lie in it
            put_aside(self.directory)
            self.write_meta(meta)
            self._file = gzip.GzipFile(self.directory / EVENTS, "wb", compresslevel=1)
        self._thread = threading.Thread(target=self._go, name="hetero-events", daemon=True)
        self._thread.start()

    def write_meta(self, meta: Meta) -> None:
        """Write, or replace, the description of the run."""
        known = replace(meta, first_seq=self._log.first_seq)
        with storing(self.directory):
            (self.directory / META).write_text(json.dumps(known.as_json(), indent=1))

    def note(self, values: Mapping[str, float]) -> None:
        """Write what the loop tells, now."""
        with storing(self.directory):
            append_values(self.directory, round(self._log.clock() * 1e9), values)

    def _go(self) -> None:
        try:
            while not self._closed.wait(PERIOD_SECONDS):
                self.flush()
        except OSError as error:
            self._failed = error  # training goes on; `close` raises it

    def flush(self, *, last: bool = False) -> None:
        """Write the events in the ring whose times are known; the ``last`` time all of them."""
        with self._lock:
            lines = [encode(row) for row in self._log.drain(last=last)]
            if lines:
                self._file.write(("\n".join(lines) + "\n").encode())
                self._file.flush()  # else a kill would lose the compressor's buffer

    def close(self) -> None:
        """Write the rest and stop recording."""
        self._closed.set()
        self._thread.join()
        with storing(self.directory):
            try:
                if self._failed is not None:
                    raise self._failed
                self.flush(last=True)
            finally:
                self._file.close()
