"""Recomputing a unit in backward, from its inputs (floor 2).

Torch's non-reentrant checkpoint at the unit's border keeps the inputs. A `Moment` restores the
other state for the second forward and undoes its changes, so that it moves no buffer, draws from no
generator and adds to no container a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hetero.errors import BudgetError, DivergenceError, HeteroError, StateError, StorageError
from hetero.internals import in_backward
from hetero.interrupts import theirs
from hetero.train.activations.caches import is_cache, twin
from hetero.train.activations.later_writes import LaterWrites, digest
from hetero.train.activations.moment import Moment
from hetero.train.activations.proof import Digests
from hetero.train.activations.reach import Reach
from hetero.train.activations.saved import SavedTensors, hooks_change_tensors
from hetero.train.activations.structure import flatten, told_apart
from hetero.train.model.faults import hearing_of_aliases
from hetero.train.model.graph import versions
from hetero.train.model.parts import Parts, PlainTensors

Call = Callable[..., Any]
Access = Callable[[Call, Sequence[Any], dict[str, Any]], Any]
BeforeNode = Callable[[Any, Callable[..., None]], None]
"""Registers a call before a node of a graph runs."""
WRITES_WEIGHTS = "writes to its parameters in its forward"
ADVICE = (
    "use activations='auto', which computes again only what gave the same bits, or keep what such"
    " units save with activations='keep' or 'offload'"
)


class Forward:
    """One call of a unit, which can be repeated.

    Args:
        name: the unit's, for errors.
        call: the unit's own.
        access: makes a call inside an access of the unit; None: there is one already.
        saved: the owner of the saved-tensor hooks; None inside units, which have pushed them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        call: Call,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        place: torch.device,
        reach: Reach,
        saved: SavedTensors | None,
        access: Access | None = None,
    ) -> None:
        self.name = name
        self.advice = ADVICE
        """In place of repeating the call, if it cannot be."""
        self.broken: Callable[[str], object] = lambda _: None
        """Is told why a call could not be repeated that is known to give the same bits."""
        self._module = module
        self._call = call
        self._access = access or _at_once
        self._saved = saved
        self._parts = PlainTensors() if saved is None else saved.parts
        leaves, self._structure = flatten((tuple(args), kwargs))
        self.distinct, self._places = told_apart(leaves)
        self._caches = {
            at: twin(value) for at, value in enumerate(self.distinct) if is_cache(value)
        }
        self.written = ""
        """How the call changed its inputs or parameters, which forbids repeating it; else ""."""
        self._weights: tuple[Digests, Digests] | None = None  # before and after the first call
        self._later: LaterWrites | None = None  # if it is recomputed
        self._leaves_inputs = False  # alone, for backward
        tensors = enumerate(self.distinct)
        self._tensors_at = {at for at, leaf in tensors if isinstance(leaf, torch.Tensor)}
        given = [
            leaf for leaf in self.distinct if not (isinstance(leaf, torch.Tensor) or is_cache(leaf))
        ]
        self._moment = Moment(module, place, reach, given)

    @property
    def is_whole(self) -> bool:
        """Whether the call can be tried without side effects."""
        return self._moment.is_whole

    def path(self) -> list[Any]:
        """Return a key of this call's way through the unit's code."""
        kinds = [
            (leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.layout, leaf.is_nested)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if leaf is None or type(leaf) in (bool, str)
            else type(leaf)
            for leaf in self.distinct
        ]
        return [hooks_change_tensors(), *self._moment.path(), *kinds, *self._places]

    # -- the first time --------------------------------------------------------------------------

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], digests: Digests | None) -> Any:
        """Make the call, and note in ``written`` whether it changes its inputs or parameters."""
        weights = [] if digests is None else list(self._module.parameters())
        before = versions(self.distinct)
        call = self._call if digests is None else self._noted
        with self._watched(digests):
            found = theirs(self._access, call, args, kwargs)
        self._moment.close()
        _digest_outputs(found, digests, self._parts)
        if versions(self.distinct) != before:
            self.written = "writes to its inputs in place"
        elif (
            weights
            and not self.written
            and list(map(id, self._module.parameters())) != list(map(id, weights))
        ):
            self.written = "makes its parameters anew in its forward"
        return found

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        """Make the unit's own call, and digest what no version tells of: the parameters whose
        ``data`` it asks for, before and after; of a model that stays, all of them."""
        # the access has taken over what a state dict wrote before, which counts as writes
        counted = versions(list(self._module.parameters()))
        before, after = digests = Digests(), Digests()
        own = {id(p): p for p in self._module.parameters()}
        weights = {key: p for key, p in own.items() if type(p) is nn.Parameter}
        digest(list(weights.values()), before, self._parts)

        def aliased(param: Any) -> None:
            if id(param) in own and id(param) not in weights:
                weights[id(param)] = param
                digest([param], before, self._parts)

        with hearing_of_aliases(aliased):
            found = self._call(*args, **kwargs)
        digest(list(weights.values()), after, self._parts)
        self._weights = digests
        if versions(list(self._module.parameters())) != counted:
            self.written = WRITES_WEIGHTS
        return found

    def wrote_weights(self) -> bool:
        """Whether the first call wrote to the unit's parameters unseen; asked in backward, since on
        a device this waits."""
        noted, self._weights = self._weights, None
        return noted is not None and bool(noted[0].difference(noted[1]))

    def recomputed(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        conclude: Callable[[str | None], None] | None,
    ) -> Any:
        """Make the call so that only its inputs stay until backward.

        ``conclude`` gets the verdict on the second computation, if there is none yet. Raises
        StateError, before a gradient is used, if the call cannot be repeated.
        """
        digests = None if conclude is None else Digests()
        self._leaves_inputs = True
        later = self._later = LaterWrites(self._moment, self._parts, self.distinct)
        first = [(args, kwargs)]  # popped: backward must not hold these tensors

        def run(*distinct: Any) -> Any:
            if first:
                return self.run(*first.pop(), digests)
            return self._verified(distinct, digests, conclude, later)

        early = nullcontext() if digests is None else set_checkpoint_early_stop(False)
        with early:  # a proof digests the outputs, too
            found = checkpoint(run, *self.distinct, use_reentrant=False, preserve_rng_state=False)
        if self.written:
            if conclude is not None:
                conclude(self.written)
            raise self.refusal(f"{self.written}: what it was given is gone")
        later.begin()
        self._forget_tensors()
        return found

    def tried(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        saved: SavedTensors,
        before_node: BeforeNode,
        trials: set[ProofTrial],
        conclude: Callable[[str | None], None],
    ) -> Any:
        """Make the call, and repeat it when backward reaches it, to compare the bits.

        ``conclude`` gets "" or the difference, or None without room. No number depends on it.
        """
        inputs = [leaf for leaf in self.distinct if isinstance(leaf, torch.Tensor)]
        asks = [tensor.requires_grad for tensor in inputs]
        packed, digests = saved.pack(inputs), Digests()
        found = self.run(args, kwargs, digests)
        self._forget_tensors()
        if self.written:
            conclude(self.written)
            return found
        hook = due(weakref.ref(ProofTrial(self, digests, conclude, trials)), saved, packed, asks)
        leaves, _ = flatten(found)
        nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for node in nodes - {None}:
            before_node(node, hook)
        return found

    def _forget_tensors(self) -> None:
        """Leave the inputs to autograd, so that they can go down."""
        self.distinct = [None if isinstance(x, torch.Tensor) else x for x in self.distinct]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the distinct arguments, with these tensors among them."""
        given = iter(tensors)
        return [next(given) if at in self._tensors_at else x for at, x in enumerate(self.distinct)]

    # -- once more -------------------------------------------------------------------------------

    def again(self, distinct: Sequence[Any], digests: Digests | None) -> Any:
        """Repeat the call with the arguments ``distinct``."""
        given = [_apart(value, self._parts.kinds) for value in distinct]
        leaves = [
            twin(self._caches[at]) if at in self._caches else given[at] for at in self._places
        ]
        args, kwargs = self._structure.build(iter(leaves))
        call = self._call if self._later is None else self._looked
        with self._moment.again(), self._watched(digests):
            found = theirs(self._access, call, args, kwargs)
        _digest_outputs(found, digests, self._parts)
        return found

    def _looked(self, *args: Any, **kwargs: Any) -> Any:
        """Make the unit's own call, after a look at what others may have written."""
        if self._later is not None:
            self._later.look_at_data()
        return self._call(*args, **kwargs)

    def _verified(
        self,
        distinct: Sequence[Any],
        first: Digests | None,
        conclude: Callable[[str | None], None] | None,
        later: LaterWrites,
    ) -> Any:
        """Repeat the call; raise StateError if it saves other bits, or what it reads changed."""
        try:
            return self._repeated(distinct, first, conclude)
        finally:  # torch leaves the call once it has made all that backward needs
            changes = later.found(distinct)
            if changes:
                self.broken(changes)
                raise self.refusal(changes) from None

    def _repeated(
        self,
        distinct: Sequence[Any],
        first: Digests | None,
        conclude: Callable[[str | None], None] | None,
    ) -> Any:
        if first is None or conclude is None:
            return self.again(distinct, None)
        if self.wrote_weights():
            conclude(WRITES_WEIGHTS)
            raise self.refusal(f"{WRITES_WEIGHTS}: what it was given is gone")
        second = Digests()
        try:
            found = self.again(distinct, second)
        except HeteroError:
            raise
        except Exception as error:
            self._judge(f"raised {type(error).__name__}", conclude)
            raise
        self._judge(first.difference(second), conclude)
        return found

    def _judge(self, reason: str, conclude: Callable[[str | None], None]) -> None:
        conclude(reason)
        if reason:
            raise self.refusal(f"{reason} when it was computed again")

    def _watched(self, digests: Digests | None) -> AbstractContextManager[None]:
        if self._saved is None:
            return nullcontext()
        return self._saved.watched(digests, self if self._leaves_inputs else None)

    def refusal(self, what: str) -> StateError:
        kind = type(self._module).__name__
        return StateError(
            f"unit {self.name!r}, a {kind}, cannot be computed again: it {what}", advice=self.advice
        )


def _apart(value: Any, wrappers: tuple[type, ...]) -> Any:
    """Return an input detached from its graph: a hook on it would be there twice."""
    if type(value) not in (torch.Tensor, *wrappers) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _at_once(call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def _digest_outputs(found: Any, digests: Digests | None, parts: Parts) -> None:
    """Digest a call's outputs: state may show there alone."""
    if digests is not None:
        digest(flatten(found)[0], digests, parts)


class ProofTrial:
    """A unit's call, to be repeated once, when backward reaches it.

    It may lead to the graph that it waits for, so the graph must not hold it: ``waiting`` does,
    until it has run or that set is cleared. See `due`.
    """

    def __init__(
        self,
        forward: Forward,
        digests: Digests,
        conclude: Callable[[str | None], None],
        waiting: set[ProofTrial],
    ) -> None:
        self._forward = forward
        self._first = digests
        self._conclude = conclude
        self._waiting = waiting
        waiting.add(self)

    @property
    def is_due(self) -> bool:
        """Whether it has not run, and is still wanted."""
        return self in self._waiting

    def run(self, saved: SavedTensors, packed: Sequence[Any], asks: Sequence[bool]) -> None:
        """Repeat the call with the packed inputs, and conclude."""
        self._waiting.discard(self)
        self._conclude(self._reason(saved, packed, asks))

    def _reason(
        self, saved: SavedTensors, packed: Sequence[Any], asks: Sequence[bool]
    ) -> str | None:
        """Return the difference, "" if there is none, None if memory did not suffice."""
        if self._forward.wrote_weights():
            return WRITES_WEIGHTS
        second = Digests(keeps=False)
        try:
            given = saved.unpack(packed)
            for tensor, of in zip(given, asks, strict=True):
                tensor.requires_grad_(of)
            with torch.enable_grad():
                self._forward.again(self._forward.with_tensors(given), second)
        except (DivergenceError, StorageError):  # of ranks or disks, and no fault of the call
            raise
        except (BudgetError, torch.OutOfMemoryError):
            return None
        except Exception as error:  # by the call, which did not raise in forward
            return f"raised {type(error).__name__}"
        return self._first.difference(second)


def due(
    trial: weakref.ref[ProofTrial], saved: SavedTensors, packed: list[Any], asks: list[bool]
) -> Callable[..., None]:
    """Return a hook for the nodes of a unit's outputs that runs the trial if it is due.

    It holds only the inputs, see [Note: out of gc's sight].
    """

    def hook(*_: Any) -> None:
        found = trial()
        if found is None or not found.is_due or not in_backward():
            return
        found.run(saved, packed, asks)
        packed.clear()

    return hook
