"""Operations of a step in closed form (floor 1, policy).

T1 is the planner's equation; the letters are those of `hetero.plan.footprint`.
"""

from __future__ import annotations

from hetero.plan.shape import Decoder

BACKWARD = 2
"""Forwards that a backward takes: one for the gradients of inputs, one for those of weights."""
ATTENTION_BACKWARD = 2.5
"""The same of fused attention: of the two products of its forward, scores again and four more."""


def layer_flops(decoder: Decoder, *, tokens: int, sequence: int, causal: bool = True) -> int:
    """Return the operations of a layer's forward: 2·T·N_l + 4·T·s·a·d, the latter halved if causal.

    N_l are the weights a token is multiplied with (T1). Kernels of causal attention skip what is
    masked; most papers' formulas count it, so name the convention beside a utilisation.
    """
    scores = 4 * tokens * sequence * decoder.query_dim
    return 2 * tokens * decoder.layer_matmul_numel + (scores // 2 if causal else scores)


def head_flops(decoder: Decoder, *, tokens: int) -> int:
    """Return the operations of the head's forward: 2·T·h·V (T1)."""
    return 2 * tokens * decoder.head_matmul_numel


def step_flops(
    decoder: Decoder, *, tokens: int, sequence: int, causal: bool = True, checkpoint: bool = False
) -> int:
    """Return the operations of forward and backward (T1); checkpointed layers run forward twice.

    Without causal and checkpoint this is 72·b·L·s·h²·(1 + s/(6·h) + V/(12·h·L)) for a GPT.
    """
    layers = decoder.layers * layer_flops(decoder, tokens=tokens, sequence=sequence, causal=causal)
    head = head_flops(decoder, tokens=tokens)
    return (1 + BACKWARD) * (layers + head) + checkpoint * layers


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, widths: int, *, causal: bool, backward: bool
) -> float:
    """Return the operations of a fused attention: 2·b·a·s·s'·(d + d'), times 2.5 in backward.

    ``widths`` is d + d', of a key and of a value. A causal one computes half the scores.
    """
    forward = 2.0 * batch * heads * queries * keys * widths
    return forward * (ATTENTION_BACKWARD if backward else 1.0) * (0.5 if causal else 1.0)


def side_of(flops: float) -> int:
    """Return the side of the square matmul of as many operations."""
    side: float = (flops / 2) ** (1 / 3)
    return max(1, round(side))
