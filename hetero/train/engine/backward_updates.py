"""Updates that begin as backward leaves units (floor 2); see [Note: early updates]."""

from __future__ import annotations

from hetero.memory.layout import Bucket
from hetero.memory.manager import PARAM, ChunkManager
from hetero.train.access.early import EarlyUpdates
from hetero.train.engine.setup import Setup
from hetero.train.engine.trained import Trained
from hetero.train.gradients.homes import GRAD, WIDE
from hetero.train.model.graph import unless_gone
from hetero.train.model.host_work import host_work
from hetero.train.update.optimizer import Optimizer

NOT_STATES = (PARAM, GRAD, WIDE)  # homes whose holders are tracked elsewhere


class BackwardUpdates:
    """Begins a bucket's update before its step, if the step has nothing to check first."""

    def __init__(self, setup: Setup, trained: Trained, manager: ChunkManager) -> None:
        self.optimizer: Optimizer | None = None  # set once it is prepared
        self._setup = setup
        self._trained = trained
        self._manager = manager

    def follow(self) -> EarlyUpdates:
        """Return the tracker that tells when backward has left a unit; it refers here weakly."""
        buckets, grads = self._setup.buckets, self._trained.grads
        needs = self._setup.blueprint.needs
        trained = [[buckets[b] for b in need if buckets[b].trainable] for need in needs]
        begin_bucket = unless_gone(self.begin, None)

        def complete(unit: int) -> bool:
            return all(grads.landed(bucket) for bucket in trained[unit])

        def begin(unit: int) -> None:
            for bucket in trained[unit]:
                begin_bucket(bucket)

        return EarlyUpdates(needs, complete=complete, begin=begin)

    def begin(self, bucket: Bucket) -> None:
        """Begin a bucket's update, unless the user's code would see it before the step."""
        setup, optimizer, stepper = self._setup, self.optimizer, self._trained.stepper
        if optimizer is None or stepper is None or is_seen(setup, bucket, optimizer):
            return
        if optimizer.states_are_held or not self._manager.may_hand_over(bucket.id):
            return
        if self._manager.copies[bucket.id].home.on_device:  # the step updates it, at once
            return
        before = setup.saver.jobs_before(bucket.id)
        with host_work():  # updates allocate on HOST
            groups, states = optimizer.param_groups, optimizer.known_state
            early = stepper.open_early(bucket, groups, states, before)
            if early is None:
                return
            self._manager.let_write(bucket.id)
            self._manager.hand_over(bucket.id, early.job, early=True)
            setup.store.pool.ahead(early.update.requests)
            setup.worker.submit(early.job)


def is_seen(setup: Setup, bucket: Bucket, optimizer: Optimizer) -> bool:
    """Whether the user's code holds a state or a tensor of one, and would see it change."""
    for name, home in setup.store.of_bucket(bucket.id):
        if name not in NOT_STATES and (home.views.held or home.views.objects_held or home.copies):
            return True
    params = [setup.params[segment.index] for segment in bucket.segments]
    return optimizer.any_state_is_held(params)
