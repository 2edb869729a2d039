"""Context parallel: ranks that have parts of the same sequences (floor 3).

torch cuts tensors into parts, and on CUDA devices replaces attention by one over all of them. On
CPUs its templates of ring attention run inside of an autograd function of ours; Ulysses, which
torch lacks, is the same anywhere. The rest of a model sees each position by itself.

[Note: means over parts]  Gradients are the means of those of all ranks, so the mean of the ranks'
losses has to be that of the whole sequence. The mean over a rank's own tokens is, if each rank has
as many; labels that do not count may make that another. Inside a block each mean of cross
entropies is therefore weighed by its count, over the mean count of all parts: by 1.0 exactly where
all are alike.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from hetero.errors import ConfigError, DivergenceError, HeteroError, StateError
from hetero.functional.loss import weighing
from hetero.internals import (
    Place,
    Replacement,
    install,
    is_traceable_wrapper_subclass,
    ring_options,
    ring_templates,
)
from hetero.members import Members
from hetero.parallel.attention import Apply, Call, PartRanks, Ring, Ulysses
from hetero.parallel.gloo import Talks, Teams, own_of
from hetero.parallel.limits import lower
from hetero.parallel.mesh import CONTEXT, TENSOR, sizes_of, stage_ranks, world_size
from hetero.parallel.pipeline import Aside

RING, ZIGZAG, ULYSSES = "ring", "zigzag", "ulysses"
WAYS = (RING, ZIGZAG, ULYSSES)
ATTENTION = "scaled_dot_product_attention"
LOSSES = ("cross_entropy", "nll_loss")
IGNORED = -100
"""torch's default label that does not count."""
_open: list[SequenceParts] = []
"""The block that is open, if one is."""


# -- ranks -----------------------------------------------------------------------------------------


class PlainRanks:
    """Those of a model that is not prepared, whose waits are torch's."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self.group: Any = mesh.get_group()
        self._members = Members(dist.get_process_group_ranks(self.group), dist.get_world_size())

    def meet(self, what: str) -> None:
        rows: list[str] = [""] * self.size
        dist.all_gather_object(rows, what, group=self.group)
        if len(set(rows)) > 1:
            said = self._members.listed(rows)
            raise DivergenceError(
                f"ranks with parts of a sequence go different ways ({said})",
                advice="give the ranks of a sequence the same batch",
            )

    def running(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, work: Any) -> None:
        work.wait()


class PreparedRanks:
    """Those of a model that is prepared: they compare each call first, and a wait for a rank that
    is lost ends.

    Args:
        teams: ranks of the process group that have the same sequences, as all ranks know them.
        timeout_seconds: after which a rank that does not answer is lost.
    """

    def __init__(self, teams: Teams, timeout_seconds: float) -> None:
        self.ranks = tuple(own_of(teams))
        self.size = len(self.ranks)
        self._talks = Talks(teams, timeout_seconds)
        self._aside: Aside | None = None
        self._group: Any = None
        self._take_back: Callable[[], None] = lower((), timeout_seconds)
        self._close = weakref.finalize(self, install(guards()))
        _prepared.add(self)

    def on(self, mesh: DeviceMesh) -> PreparedRanks:
        """Let tensors go through a mesh's group."""
        group = mesh.get_group()
        if group is not self._group:
            self._take_back()
            self._group = group
            self._take_back = lower([group], self._talks.waits.timeout_seconds)
        return self

    @property
    def group(self) -> Any:
        return self._group

    def meet(self, what: str) -> None:
        rows = self._talks.agree(what.encode(), what)  # of which agree compares the beginning
        if len(set(rows)) > 1:
            said = self._talks.members.listed(row.decode() for row in rows)
            raise DivergenceError(
                f"ranks with parts of a sequence go different ways ({said})",
                advice="give them tensors of the same shapes and dtypes, and the same settings",
            )

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        if dist.get_backend(self.group) != "gloo":  # whose calls are queued: nothing is waited for
            yield
            return
        began = time.monotonic()
        self.meet(what)
        _running.append(self)
        try:
            yield
        except RuntimeError as error:
            self._ask_why(error, what, began)
            raise
        finally:
            _running.pop()

    def _ask_why(self, error: RuntimeError, what: str, began: float) -> None:
        """Raise RankLost if torch's error is that another rank has left, or does not answer."""
        if isinstance(error, HeteroError):
            return
        lost = self._talks.waits.explained(error, what, began)
        if lost is not None:
            raise lost from error

    def wait(self, work: Any) -> None:
        if not _running:
            work.wait()
            return
        self._aside = self._aside or Aside()
        waited = self._aside.begin(work)
        self._talks.waits.poll(waited.ended.is_set, "a part of a sequence")
        if waited.error is not None:
            raise waited.error

    def close(self) -> None:
        """Let go of the other ranks, which hear of the error that is being handled."""
        _prepared.discard(self)
        self._close()
        self._take_back()
        if self._aside is not None:
            self._aside.close()
        self._talks.close()


class WholeSequences:
    """The ranks of a model that were prepared to have whole ones."""

    def __init__(self, n_ranks: int) -> None:
        if n_ranks > 1:
            _whole.add(self)

    def close(self) -> None:
        _whole.discard(self)


_prepared: weakref.WeakSet[PreparedRanks] = weakref.WeakSet()
_whole: weakref.WeakSet[WholeSequences] = weakref.WeakSet()
_running: list[PreparedRanks] = []
"""Whose calls are under way."""


def open_context(mesh: Any, timeout_seconds: float) -> PreparedRanks | WholeSequences:
    """Join the ranks along a mesh's axis of parts of sequences; collective."""
    world = world_size()
    if mesh is None or not world:
        return WholeSequences(1)
    sizes = sizes_of(mesh, world)
    if sizes[CONTEXT] == 1:
        return WholeSequences(len(stage_ranks(mesh, world)))
    inner, each = sizes[TENSOR], sizes[CONTEXT] * sizes[TENSOR]
    firsts = (first + at for first in range(0, world, each) for at in range(inner))
    return PreparedRanks([range(at, at + each, inner) for at in firsts], timeout_seconds)


def ranks_of(mesh: DeviceMesh) -> PlainRanks | PreparedRanks:
    """Return the ranks of a mesh; StateError if they share a model that does not know of parts."""
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh of {mesh.ndim} axes: which one has parts of sequences?",
            advice=f"give that axis alone: mesh[{CONTEXT!r}]",
        )
    ranks = tuple(mesh.mesh.flatten().tolist())
    found = next((each for each in _prepared if each.ranks == ranks), None)
    if found is not None:
        return found.on(mesh)
    if _whole or _prepared:
        axes = f"{{'{CONTEXT}': {mesh.size()}}}"
        raise StateError(
            f"ranks {', '.join(map(str, ranks))} would have parts of a sequence, and a model was"
            " prepared for other ranks, or for whole ones: ranks could choose alone to compute a"
            " unit again, and wait in it",
            advice=f"name the axis in hetero.prepare, as in mesh={axes}; ranks of a sequence follow"
            " each other",
        )
    return PlainRanks(mesh)


# -- a block ---------------------------------------------------------------------------------------


class SequenceParts:
    """A block in which this rank has a part of each sequence."""

    def __init__(self, ranks: PartRanks) -> None:
        self._ranks = ranks

    def mean(self, total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
        """Return this rank's loss, so that the mean over ranks is the mean of all parts' tokens.

        Args:
            total: the sum of this rank's losses.
            count: of this rank's tokens that are in the sum, or of their weights.
        """
        return total / self._mean_count(torch.as_tensor(count, device=total.device))

    def weigh(self, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """As `mean`, of a mean: NaN where this rank has no token that counts."""
        share = (count / self._mean_count(count)).to(mean.dtype)
        with among_wrappers(mean):
            return torch.where(count > 0, mean, 0.0) * share

    def _mean_count(self, count: torch.Tensor) -> torch.Tensor:
        total = count.detach().clone()
        with self._ranks.running("tokens of a loss"):
            work = dist.all_reduce(total, group=self._ranks.group, async_op=True)
            self._ranks.wait(work)
        return total / self._ranks.size


def among_wrappers(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a block in which plain tensors may meet a DTensor, if it is one."""
    if not is_traceable_wrapper_subclass(tensor):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    block: AbstractContextManager[None] = implicit_replication()
    return block


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    how: str = ZIGZAG,
    *,
    buffers: Sequence[torch.Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[SequenceParts]:
    """Let each rank of a mesh have a part of the same sequences inside a ``with`` block.

    Tensors become this rank's parts of themselves, as under torch's function of this name, and
    ``scaled_dot_product_attention`` is over all parts. Gradients are averaged over the ranks by a
    model that was prepared with this axis, as over those that have other samples; a mean of
    ``cross_entropy``, ``nll_loss`` and `hetero.linear_cross_entropy` is weighed so that this gives
    the mean over the whole sequence. Forward, loss and backward belong inside.

    Args:
        mesh: of one axis, as ``init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))``.
        how: "zigzag" and "ring" pass keys and values from rank to rank; in a zigzag each rank has
            an early and a late half of its part, so that a causal mask leaves all as much to do.
            "ulysses" gives each rank whole sequences of some heads.
        buffers: tensors to cut: inputs, labels (shifted before), position ids. Whole again after
            the block.
        buffer_seq_dims: the dimension of positions in each.
        no_restore_buffers: those that may stay cut.

    Raises on all ranks: ConfigError for sequences or heads that the ranks do not divide, and for
    attention with a mask; DivergenceError where ranks have other shapes.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from hetero.parallel.context import context_parallel
        >>> def loss_of(model, mesh, ids, labels, positions):
        ...     given = [ids, labels, positions]
        ...     with context_parallel(mesh, buffers=given, buffer_seq_dims=[1, 1, 1]):
        ...         logits = model(ids, positions)
        ...         F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    """
    if _open:
        raise StateError(
            "context_parallel inside of context_parallel", advice="open one block at a time"
        )
    if how not in WAYS:
        raise ConfigError(f"how={how!r}", advice=f"one of {', '.join(WAYS)}")
    ranks, lengths = ranks_of(mesh), lengths_of(buffers, buffer_seq_dims)
    ranks.meet(f"{how} over {', '.join(map(str, lengths)) or 'parts as given'}")
    check_divides(lengths, ranks.size * (2 if how == ZIGZAG else 1), how)
    parts = SequenceParts(ranks)
    with ExitStack() as stack:
        plain = getattr(F, ATTENTION)  # before torch replaces it
        stack.enter_context(ring_options(is_balanced=how == ZIGZAG))
        dims = [d % b.dim() for b, d in zip(buffers, buffer_seq_dims, strict=True)]  # as torch asks
        stack.enter_context(cut(mesh, buffers, dims, no_restore_buffers))
        if mesh.size() == 1:
            stack.enter_context(replaced(ATTENTION, lambda _: plain))
        elif how == ULYSSES:
            stack.enter_context(replaced(ATTENTION, calling(Ulysses(ranks, plain))))
        elif mesh.device_type == "cpu":
            ring = Ring(ranks, is_balanced=how == ZIGZAG)
            stack.enter_context(replaced(ATTENTION, calling(ring)))
        stack.enter_context(without_fast_path())
        for name in LOSSES:
            stack.enter_context(replaced(name, functools.partial(counting, parts)))
        stack.enter_context(weighing(parts.weigh))
        _open.append(parts)
        stack.callback(_open.remove, parts)
        yield parts


def lengths_of(buffers: Sequence[torch.Tensor], dims: Sequence[int]) -> list[int]:
    """Return the positions of each buffer; ConfigError for one that cannot be cut in place."""
    if len(buffers) != len(dims):
        raise ConfigError(
            f"{len(buffers)} buffers, and buffer_seq_dims= of {len(dims)}",
            advice="give the dimension of positions of each buffer",
        )
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise ConfigError(
                f"buffer {number}, of {list(buffer.shape)}, has no dimension {dim}",
                advice="give the dimension of positions of each buffer",
            )
    for number, buffer in enumerate(buffers):
        own = buffer.is_contiguous() and buffer.untyped_storage().nbytes() == buffer.nbytes
        if not own or buffer.requires_grad:
            raise ConfigError(
                f"buffer {number}, of {list(buffer.shape)}, is a view of other memory, or requires"
                " a gradient: it cannot be cut in place",
                advice="give buffer.clone(), made without a gradient",
            )
    return [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]


def check_divides(lengths: Sequence[int], n_pieces: int, how: str) -> None:
    """Raise ConfigError for sequences that ranks do not divide, or of several lengths."""
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"buffers of {', '.join(map(str, lengths))} positions",
            advice="give sequences of one length; another dimension may be that of positions",
        )
    for length in lengths:
        if length % n_pieces or not length:
            more = -(-max(length, 1) // n_pieces) * n_pieces
            raise ConfigError(
                f"{length} positions, and how={how!r} cuts them in {n_pieces}",
                advice=f"pad sequences to {more}, with labels of {IGNORED}",
            )


def cut(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    kept: set[torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Return torch's own block."""
    from torch.distributed.tensor import experimental  # of seconds, which only users of it pay

    if not buffers:  # torch takes no less than one
        spare = torch.empty(2 * mesh.size(), device=mesh.device_type)
        buffers, dims = [spare], [0]
    block: AbstractContextManager[None] = experimental.context_parallel(
        mesh,
        buffers=list(buffers),
        buffer_seq_dims=list(dims),
        no_restore_buffers=kept,
    )
    return block


@contextmanager
def replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of `torch.nn.functional` inside a block."""
    replacement: Replacement = Place(F, name).replaced(make)
    replacement.install()
    try:
        yield
    finally:
        replacement.uninstall()


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let torch's own layers call attention inside a block, when they evaluate too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def calling(attention: Callable[[Call], torch.Tensor]) -> Callable[[Apply], Apply]:
    """Return what makes a function of torch's arguments of attention."""

    def make(own: Apply) -> Apply:
        @functools.wraps(own)
        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            return attention(Call(*args, **kwargs))

        return attend

    return make


def counting(parts: SequenceParts, own: Apply) -> Apply:
    """Return a loss of torch's whose means are weighed."""
    inside: list[bool] = []  # subclasses of tensors make it call itself

    @functools.wraps(own)
    def weighed(
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        given = (weight, size_average, ignore_index, reduce, reduction)
        is_mean = reduction == "mean" and reduce is not False and size_average is not False
        if inside or not is_mean or target.is_floating_point():
            return own(input, target, *given, *rest, **options)
        inside.append(True)
        try:
            mean = own(input, target, *given, *rest, **options)
        finally:
            inside.pop()
        counts = target != ignore_index
        if weight is None:
            return parts.weigh(mean, counts.sum())
        return parts.weigh(mean, weight.detach()[target[counts]].sum())

    return weighed


# -- torch's own waits -----------------------------------------------------------------------------


def _polling(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the wait of torch's ring attention, so that it ends where a rank is lost."""

    @functools.wraps(wait)
    def polled(tensor: Any) -> Any:
        if _running and hasattr(tensor, "wait"):
            _running[-1].wait(tensor)
        return wait(tensor)

    return polled


@functools.cache
def guards() -> tuple[Replacement, ...]:
    """Return the functions of torch that are replaced while a model with parts is prepared."""
    return (ring_templates().wait.replaced(_polling),)
