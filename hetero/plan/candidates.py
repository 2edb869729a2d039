"""Meshes and settings that are worth a rehearsal, by closed forms of memory and time (floor 1; no
torch).

The forms leave out all that overlaps and all that waits. They are to put the best ones among the
first, not to predict a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hetero.errors import ConfigError
from hetero.plan.machine import MachineProfile
from hetero.plan.network import far_seconds, node_size, send_seconds, sum_seconds
from hetero.plan.shape import LLAMAS, DecoderShape, StageShare, check_divides, even_cut

MICRO_BATCHES = (1, 2, 4, 8)
ACTIVATIONS = ("keep", "recompute")
WEIGHT, STATES = 2, 12
"""Bytes of a parameter: of a working weight, and of all homes with AdamW and masters."""
BACKWARD = 2.0  # time of a backward, in forwards
WHOLE = {"gpt2": 10, "bloom": 10}
"""Bytes of a token and a feature that a layer keeps on each rank; of Llamas, with norms in fp32,
`NORMS` (rehearsed, all of them)."""
NORMS = 24
DIVIDED = {"gpt2": 64, "bloom": 24}
"""Those of which a rank keeps its part."""
SCORES = 8  # bytes of a score, in fp32 and in bf16, where no kernel is fused
EFFICIENCY = 0.8  # of the best rate of matrix products, in a whole layer


class MeshCandidate(NamedTuple):
    """A mesh and its settings."""

    pp: int
    tp: int
    dp: int
    micro_batch: int
    activations: str

    @property
    def mesh(self) -> dict[str, int]:
        """The setting."""
        return {"pp": self.pp, "dp_shard": self.dp, "tp": self.tp}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What closed forms say of a candidate."""

    candidate: MeshCandidate
    seconds: float
    hbm_bytes: int
    host_bytes: int


class SearchWork(NamedTuple):
    """A step that any mesh makes."""

    shape: DecoderShape
    samples: int
    """Of all ranks together."""
    sequence: int
    n_ranks: int
    profile: MachineProfile


def candidates(work: SearchWork) -> Iterator[MeshCandidate]:
    """Yield every mesh of so many ranks that divides the model and the batch."""
    devices = node_size(work.profile, work.n_ranks)
    for tp in range(1, devices + 1):
        if devices % tp or work.n_ranks % tp or not divides(work.shape, tp):
            continue
        for pp in range(1, work.shape.layers + 1):
            if work.n_ranks % (tp * pp):
                continue
            dp = work.n_ranks // (tp * pp)
            if work.samples % dp:
                continue
            for micro_batch in MICRO_BATCHES:
                if work.samples // dp % micro_batch == 0:
                    for activations in ACTIVATIONS:
                        yield MeshCandidate(pp, tp, dp, micro_batch, activations)


def divides(shape: DecoderShape, n_ranks: int) -> bool:
    """Whether ranks divide the tensors of a layer."""
    try:
        check_divides(shape, n_ranks)
    except ConfigError:
        return False
    return True


def estimate(work: SearchWork, here: MeshCandidate) -> Estimate | None:
    """Return what closed forms say; None of stages that layers do not make."""
    try:
        cut = even_cut(work.shape, here.pp, here.tp)
    except ConfigError:
        return None
    n_passes = work.samples // here.dp // here.micro_batch
    first = max(cut, key=lambda share: sum(work.shape.share_numel(share)))
    seconds = max(pass_seconds(work, here, share) for share in cut)
    numel = sum(work.shape.share_numel(first))
    layer, left = activation_bytes(work, here)
    in_flight = min(n_passes, here.pp)
    grads = WEIGHT * numel * (here.dp > 1)  # they add up on the device before they are exchanged
    # the last layer of each micro-batch keeps what it made: it is needed first
    waiting = in_flight * (left * first.n_layers + layer * (here.activations == "recompute"))
    homes = STATES * numel // here.dp
    own = work.profile.gpu.hbm_bytes.value if work.profile.gpu else 0.0
    exchanged = here.dp > 1 and far_seconds(work.profile, 2 * WEIGHT * numel, 2)
    update = numel / here.dp * node_size(work.profile, work.n_ranks)
    update_seconds = update / work.profile.host.update_per_second.value
    hbm = WEIGHT * numel + grads + waiting + layer
    if hbm + homes < own:
        update_seconds = 0.0  # homes are on HBM
    total = (n_passes + here.pp - 1) * seconds + exchanged + update_seconds
    return Estimate(here, total, int(hbm), int(homes))


def pass_seconds(work: SearchWork, here: MeshCandidate, share: StageShare) -> float:
    """Return the time of a micro-batch of a stage, forward and backward."""
    tokens = here.micro_batch * work.sequence
    flops = work.shape.flops(share, here.micro_batch, work.sequence)
    rate = rate_of(work, here)
    again = here.activations == "recompute"
    sums = 2 * share.n_layers * (2 + again)
    n_bytes = WEIGHT * tokens * work.shape.width
    summed = sums * sum_seconds(work.profile, here.tp, n_bytes)
    sends = 2 * send_seconds(work.profile, n_bytes, near=False) * (here.pp > 1)
    return (1 + BACKWARD + again) * flops / rate + summed + sends


def rate_of(work: SearchWork, here: MeshCandidate) -> float:
    """Return the operations a second of a layer's products of the size that a rank has."""
    tokens = here.micro_batch * work.sequence
    inner = work.shape.inner // here.tp
    seconds = work.profile.matmul_seconds(tokens, inner, work.shape.width)
    return EFFICIENCY * 2.0 * tokens * inner * work.shape.width / seconds


def activation_bytes(work: SearchWork, here: MeshCandidate) -> tuple[int, int]:
    """Return the bytes that a layer makes for its backward, and those that it leaves until then."""
    tokens, shape = here.micro_batch * work.sequence, work.shape
    whole = WHOLE.get(shape.kind, NORMS) * tokens * shape.width
    parts = DIVIDED.get(shape.kind, 0) * tokens * shape.width
    if shape.kind in LLAMAS:
        mlps = max(1, shape.chosen) * shape.inner
        parts = 2 * tokens * (2 * shape.heads * shape.head_width + 4 * mlps)
    if shape.kind == "bloom":
        parts += SCORES * shape.heads * tokens * work.sequence
    made = whole + parts // here.tp
    return int(made), int(made if here.activations == "keep" else WEIGHT * tokens * shape.width)


def fitting(work: SearchWork) -> list[Estimate]:
    """Return the candidates that closed forms let fit, the fastest first; if none does, all, those
    that need least first."""
    found = [e for each in candidates(work) if (e := estimate(work, each)) is not None]
    profile = work.profile
    hbm = profile.gpu.hbm_bytes.value if profile.gpu else profile.host.ram_bytes.value
    ram = profile.host.ram_bytes.value / node_size(profile, work.n_ranks)
    fit = [e for e in found if e.hbm_bytes <= hbm and e.host_bytes <= ram]
    if not fit:
        return sorted(found, key=lambda e: e.hbm_bytes + e.host_bytes)
    return sorted(fit, key=lambda e: e.seconds)
