"""The updates of a step, closed at once and carried out later (floor 2).

`Drafts.close` checks every gradient, takes the groups' settings as they are at that moment, and
cuts each bucket's update into slices. Nothing is updated yet: the engine gives the buckets to the
worker in the order in which the next forward needs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from hetero.cores import Cores
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout
from hetero.train.gradients.slot import GradSlot
from hetero.train.gradients.store import GradStore
from hetero.train.update import kernel
from hetero.train.update.arithmetic import (
    Bench,
    Update,
    draft_flat,
    draft_formula,
    draft_shared,
    draft_whole,
)
from hetero.train.update.masters import Masters
from hetero.train.update.passage import Passage
from hetero.train.update.rules import Group, Rule, State, frozen, kinds_of, same
from hetero.train.update.states import Ready, StateHomes, numbers_of
from hetero.train.update.together import draft_together
from hetero.train.update.trial import Trials
from hetero.train.update.whole_parts import check_placed, draft_parts

_POSITION = attrgetter("segment.position")


class Settings(NamedTuple):
    """A group's settings at one moment."""

    group: Group
    kinds: str


class Drafts:
    """Updates homes from gradients at home, and keeps the states torch would keep.

    ``states`` passed to `close` maps a parameter to the dict torch has in ``state[p]``, which
    updates fill in place.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Sequence[torch.nn.Parameter],
        layout: Layout,
        *,
        grads: GradStore,
        store: HomeStore,
        masters: Masters,
        native: kernel.Native | None,
        cores: Cores,
        passage: Passage,
        stream_to: torch.device | None = None,
    ) -> None:
        self.rule = Rule(inner)
        self.formula = self.rule.formula
        self.states = StateHomes(self.rule, layout, store)
        self._bench = Bench(
            *(self.rule, self.states, store, grads.homes, masters, cores, native),
            passage=passage,
            stream_to=stream_to,
        )
        self._trials = Trials(self.rule, inner)
        self._params = params
        self._layout = layout
        self._index = {id(p): i for i, p in enumerate(params)}
        self._grads = grads
        self._masters = masters
        self._stepped: dict[int, str] = {}  # the kind of settings a parameter was stepped with
        self._kept: set[int] = set()  # parameters that had states when they were stepped last

    def close(
        self,
        groups: Sequence[Group],
        states: defaultdict[torch.Tensor, State],
        begun: Collection[int] = (),
    ) -> list[Update]:
        """Return the updates of all buckets that have gradients; nothing is updated yet.

        Those of the ``begun`` parameters are under way. All gradients are brought home and checked
        before the first state is made: a gradient that cannot be stepped, or settings that the rule
        refuses (ConfigError), leave everything as it was.
        """
        self._masters.follow()
        self._trials.admit(groups)
        if self._grads.parts.kinds:
            params = (self._params[index] for index in self.turns(groups))
            check_placed(self.rule, params, self._name, self._grads.is_placed)
        ready = [(group, self._ready(group, states, begun)) for group in groups]
        updates: dict[int, Update] = {}
        try:
            for group, rows in ready:
                settings = settings_of(group)
                for bucket, members in self._by_bucket(rows):
                    update = updates.setdefault(bucket.id, Update(bucket))
                    self._draft(update, settings, members)
        except BaseException:
            for update in updates.values():
                update.undo()
            raise
        for update in updates.values():
            update.settle()
        for group, rows in ready if self.rule.known is None else ():
            _count(group, self.rule.settings_after(group, stepped=bool(rows)))
        self._masters.settle()
        return list(updates.values())

    def open(
        self,
        bucket: Bucket,
        slots: Sequence[GradSlot],
        settings: Mapping[int, Settings],
        states: defaultdict[torch.Tensor, State],
    ) -> Update | None:
        """Return the update of one bucket whose gradients have all come, before the step.

        ``settings`` are of the parameters' groups, by index. None if the step has to check first: a
        parameter in no group, a state that is about to appear, or a rule that is not known, or that
        ranks of a tensor follow together.
        """
        if any(slot.segment.index not in settings for slot in slots) or self.rule.known is None:
            return None
        if self._grads.parts.kinds and not self.rule.elementwise:
            return None
        self._masters.follow([bucket.id])
        for segment in bucket.segments:
            self._masters.not_written(segment)
        update = Update(bucket, may_pass=False)
        found: dict[int, tuple[Settings, list[Ready]]] = {}
        for slot in slots:
            now = settings[slot.segment.index]
            row = self.states.ready(slot, states[self._params[slot.segment.index]], ())
            if not self._is_settled(row, now.kinds):
                return None
            found.setdefault(id(now), (now, []))[1].append(row)
        for now, rows in found.values():
            self._draft(update, now, rows)
        update.settle()
        return update

    def param(self, bucket: Bucket) -> Home:
        """Return the home of a bucket's parameters."""
        return self._bench.param(bucket)

    def settings(self, groups: Sequence[Group]) -> dict[int, Settings]:
        """Return the present settings of each parameter's group, by its index."""
        found: dict[int, Settings] = {}
        for group in groups:
            found.update(dict.fromkeys(self._indices(group), settings_of(group)))
        return found

    def _name(self, param: torch.Tensor) -> str:
        return self._layout.home[self._index[id(param)]][1].spec.name

    def turns(self, groups: Sequence[Group]) -> dict[int, int]:
        """Return the place of each parameter in the order of torch's step, by its index."""
        indices = [index for group in groups for index in self._indices(group)]
        return {index: turn for turn, index in enumerate(indices)}

    def _indices(self, group: Group) -> list[int]:
        """Return the indices of a group's parameters, those of other models left out."""
        known = self._index
        return [known[id(param)] for param in group["params"] if id(param) in known]

    def _is_settled(self, row: Ready, kinds: str) -> bool:
        """Whether a parameter was stepped with such settings before, and still has its states."""
        index = row.segment.index
        return self._stepped.get(index) == kinds and bool(row.state or index not in self._kept)

    def _ready(
        self,
        group: Group,
        states: defaultdict[torch.Tensor, State],
        begun: Collection[int],
    ) -> list[Ready]:
        indices = [i for i in self._indices(group) if i not in begun]
        slots = self._grads.closed(indices, partial(self._steps_addends, group))
        numbers = numbers_of([slot.factors for slot in slots])
        own = [states[self._params[slot.segment.index]] for slot in slots]
        return [self.states.ready(*row) for row in zip(slots, own, numbers, strict=True)]

    def _steps_addends(self, group: Group, index: int) -> bool:
        """Whether ranks step a parameter from addends of its gradient, as torch does."""
        bucket = self._layout.buckets[self._layout.home[index][0]]
        is_torchs = self.rule.elementwise and not bucket.has_master
        return is_torchs and self.rule.adds_to_gradients(group)

    def _by_bucket(self, rows: Sequence[Ready]) -> Iterator[tuple[Bucket, list[Ready]]]:
        found: dict[int, list[Ready]] = {}
        for row in rows:
            found.setdefault(self._layout.home[row.segment.index][0], []).append(row)
        for bucket_id, members in found.items():
            members.sort(key=_POSITION)
            yield self._layout.buckets[bucket_id], members

    def _draft(self, update: Update, now: Settings, rows: list[Ready]) -> None:
        bucket, bench = update.bucket, self._bench
        stepped, fresh = self._stepped, self.rule.known is None
        for row in rows:
            index = row.segment.index
            if self._lost_state(row) or stepped.get(index) != now.kinds:
                stepped[index], fresh = now.kinds, True
        update.touched.extend(row.segment.index for row in rows)
        if bucket.has_master and self.formula is not None:  # it makes its states here
            draft_formula(bench, self.formula, update, now.group, rows)
            return
        update.fresh |= fresh
        if self._grads.parts.kinds:
            rows = draft_parts(bench, update, now.group, rows, self._grads)
            if not rows:
                return
        draft = draft_together if bucket.n_shares > 1 else draft_whole
        if not bucket.has_master and self.rule.elementwise:
            draft = draft_shared if bucket.n_shares > 1 else draft
            draft = draft_flat if self.rule.may_flatten(now.group, bucket.dtype) else draft
        draft(bench, update, now.group, rows)

    def _lost_state(self, row: Ready) -> bool:
        """Whether a parameter's states were cleared, and appear again."""
        index = row.segment.index
        if row.state:
            self._kept.add(index)
            return False
        lost = index in self._kept
        self._kept.discard(index)
        return lost


def settings_of(group: Group) -> Settings:
    """Return a group's present settings."""
    now = frozen(group)
    return Settings(now, kinds_of(now))


def _count(group: Group, after: Group) -> None:
    """Change the settings that a step changes, in the user's own group."""
    for key, value in after.items():
        if not same(value, group.get(key)):
            group[key] = value
