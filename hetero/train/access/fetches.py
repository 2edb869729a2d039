"""Fetches: those that an access needs now, and those that the plan expects (floor 2)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from hetero.memory.manager import ChunkManager
from hetero.plan.schedule import Op
from hetero.plan.trace import Access, Trace
from hetero.train.access.cursor import Cursor
from hetero.train.model.host_work import host_work
from hetero.types import Phase, noop


class Late:
    """Planned fetches whose homes are not ready yet, in order, and their buckets."""

    def __init__(self) -> None:
        self.ops: deque[Op] = deque()
        self._of: Counter[int] = Counter()

    def __contains__(self, bucket: int) -> bool:
        return self._of.get(bucket, 0) > 0

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self._of[op.bucket] += 1

    def pop(self) -> Op:
        op = self.ops.popleft()
        self._of[op.bucket] -= 1
        return op

    def clear(self) -> None:
        self.ops.clear()
        self._of.clear()


class Fetches:
    """Brings buckets to HBM: on demand, and ahead of demand along the plan.

    Args:
        train: the cursor of steps; if nothing is trained, of forwards with gradients.
        evaluate: the cursor of forwards without gradients.
        stepped: whether an optimizer's step ends a trace.
    """

    def __init__(
        self, manager: ChunkManager, *, train: Cursor, evaluate: Cursor, stepped: bool
    ) -> None:
        self.train = train
        self.evaluate = evaluate
        self.active = train
        self.stepped = stepped
        self.late = Late()
        self.before_pin: Callable[[], None] = noop
        """Called where an access pins, or anything else that all ranks do alike."""
        self._manager = manager

    def pin(
        self,
        buckets: Sequence[int],
        why: str,
        spare: Callable[[], int] = lambda: 0,
        *,
        in_frames: bool = False,
    ) -> None:
        """Pin buckets; if their fetches are late, issue those up to theirs first, as planned."""
        self.before_pin()
        late, replicas = self.late, self._manager.replicas
        missing = [b for b in buckets if b not in replicas] if late.ops else []
        with host_work():  # meters must count neither frames nor buffers on HOST
            while missing and any(bucket in late for bucket in missing):
                op = late.pop()
                self._manager.prefetch(op.bucket, op.start, op.evict)
            self._manager.pin(buckets, why, spare, in_frames=in_frames)

    def follow(
        self, phase: Phase, unit: int, buckets: tuple[int, ...], calls: Sequence[Phase] = ()
    ) -> None:
        """Follow the plan, unless the access is outside a step: reading weights between forwards
        that train nothing (to average them under `no_grad`) is not planned. ``calls``: phases of
        the open calls of the whole model."""
        stepped = self.stepped and phase is not Phase.EVAL
        if stepped or calls or phase is Phase.BACKWARD:
            self.active = self.evaluate if phase is Phase.EVAL else self.train
            self._issue(self.active.observe(Access(phase, unit, buckets)))

    def expect(self, trace: Trace) -> None:
        """Follow a trace that the first step is expected to make, and begin to prefetch for it."""
        self._issue(self.train.expect(trace))

    def is_step(self, phase: Phase) -> bool:
        """Whether a forward is a step of its own, with a border before it."""
        return phase is Phase.EVAL or not self.stepped

    def forward_begins(self, phase: Phase) -> None:
        """Begin a forward that is a step of its own."""
        cursor = self.evaluate if phase is Phase.EVAL else self.train
        self._issue(cursor.border())

    def step_ends(self) -> None:
        """End a step: drop its late fetches and begin to prefetch for the next."""
        self.late.clear()
        self._issue(self.train.border())

    def replan(self) -> None:
        """The frames changed: drop late fetches and plan anew."""
        self.late.clear()
        self.train.replan()
        self.evaluate.replan()

    def _issue(self, ops: Sequence[Op]) -> None:
        """Carry out planned ops; one that no longer fits is skipped (it is advice).

        A fetch whose home is still being updated or read from disk is late, and so are those after
        it: the addresses of a plan are right only in its own order.
        """
        late, manager = self.late, self._manager
        for op in ops:
            if not op.demand:
                late.add(op)
        while late.ops and not manager.is_busy(late.ops[0].bucket):
            op = late.pop()
            with host_work():  # eviction may encode the bytes, on HOST
                manager.prefetch(op.bucket, op.start, op.evict)
