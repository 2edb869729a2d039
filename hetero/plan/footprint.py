"""Memory in closed form: what a step of a `Decoder` holds on a device, and when (floor 1, policy).

The letters: b micro-batch, s sequence, T = b·s tokens, h hidden, L layers, a heads, g key heads, d
head size, f inside the MLP, V vocabulary, e bytes of an activation. A unit is what a matrix of T
rows and h columns takes: e·T·h. E1 to E15 are the planner's equations; E1 is `Decoder.numel`.

The peak is a maximum over moments of a step, not a sum of maxima (E14): `footprint` returns what
lives at the largest moment of each phase, term by term. Every moment of a phase grows by the same
bytes with each layer, so two traced models give any third.

Agreement with traces of operations proves the equations and not a device: see `NOT_COUNTED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hetero.errors import ConfigError
from hetero.plan.shape import Decoder, Norm
from hetero.types import format_bytes

NOT_COUNTED = (
    "weights and optimizer states (state_bytes)",
    "token ids and labels, 16 bytes a token",
    "temporaries of rotary embeddings",
    "workspaces inside kernels",
    "CUDA context, loaded kernels, cuBLAS workspaces and NCCL: measure the change of free memory",
    "rounding of the caching allocator",
)


class Attention(Enum):
    """How attention is computed."""

    FLASH = "flash"
    """One kernel that keeps its inputs, its output and one fp32 number for each row."""
    MATH = "math"
    """Operation by operation, in fp32 for bf16 inputs, as torch's own fallback does."""


class NormCode(Enum):
    """How an RMS norm is computed; LayerNorm is one kernel everywhere."""

    FUSED = "fused"
    """One kernel that keeps its input."""
    WRITTEN = "written"
    """Operation by operation with an fp32 copy, as in most model code."""
    COMPOSITE = "composite"
    """``F.rms_norm`` where it has no kernel, as on CPU: all of it in fp32."""


class OptimizerCode(Enum):
    """How an Adam of torch goes through its parameters."""

    FOREACH = "foreach"
    SINGLE = "single tensor"
    FUSED = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step is given, and how it computes."""

    micro_batch: int
    """Sequences that go through the model at once."""
    sequence: int
    """Tokens of each."""
    activation_bytes: int = 2
    """Bytes of an element of activations and of the gradients that backward makes."""
    attention: Attention = Attention.FLASH
    norm: NormCode = NormCode.FUSED
    checkpoint: bool = False
    """Whether each layer keeps its input only, and is computed again in backward."""
    upcast_logits: bool = True
    """Whether the loss is computed of an fp32 copy of the logits."""
    returns_logits: bool = False
    """Whether the program holds the logits through backward, as model outputs do."""
    keeps_gradients: bool = True
    """Whether gradients stay until the optimizer's turn; else they leave unit by unit."""
    optimizer: OptimizerCode = OptimizerCode.FUSED
    """How the update goes through the gradients that stayed."""

    @property
    def tokens(self) -> int:
        """T = b·s."""
        return self.micro_batch * self.sequence

    @property
    def row_bytes(self) -> int:
        """Bytes of one feature of all tokens: e·T."""
        return self.activation_bytes * self.tokens


# --- states of parameters -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class States:
    """Bytes that one parameter takes between and in steps, part by part (E2)."""

    weight: int
    gradient: int
    master: int
    exp_avg: int
    exp_avg_sq: int

    @property
    def resting(self) -> int:
        """Bytes between steps, without a gradient."""
        return self.weight + self.master + self.exp_avg + self.exp_avg_sq

    @property
    def total(self) -> int:
        return self.resting + self.gradient


FP32 = States(4, 4, 0, 4, 4)
"""Plain fp32: 16."""
MIXED = States(2, 2, 4, 4, 4)
"""A whole fp32 master beside the weight: 2 + 2 + 12 (arXiv 1910.02054)."""


def state_bytes(decoder: Decoder, states: States) -> int:
    """Return what all parameters take at once, gradients included: N·(2 + ... + 4) (E2)."""
    return decoder.numel * states.total


# --- activations of a layer -----------------------------------------------------------------------


class Saved(NamedTuple):
    """Bytes that a layer's forward leaves for its backward, by the part that saved them (E5)."""

    attention_norm: int
    attention: int
    mlp_norm: int
    mlp: int


def layer_saved(decoder: Decoder, load: Workload) -> Saved:
    """Return U = e·T·(n·h + 2·a·d + 2·g·d + 4·f), and statistics (E5).

    Two norms keep n of `norm_bytes`; attention q, k, v and its output; a gated MLP gate, up,
    silu(gate) and their product, another one (2·f) what is before and after its nonlinearity.
    """
    _check_dense(decoder)
    norm = norm_bytes(decoder, load, load.tokens, decoder.hidden)
    mlp = (4 if decoder.gated else 2) * load.row_bytes * decoder.ffn
    return Saved(norm, attention_bytes(decoder, load), norm, mlp)


def _check_dense(decoder: Decoder) -> None:
    if decoder.experts:
        raise ConfigError(
            "what experts save depends on how tokens are sent to them; no closed form is known",
            advice="trace two and three layers of the model and extrapolate",
        )


def norm_bytes(decoder: Decoder, load: Workload, rows: int, width: int) -> int:
    """Return what a norm of a matrix saves, its output included: n units and statistics (E5).

    FUSED: input and output, n = 2. WRITTEN, at e = 2: the fp32 copy, the normalised and the
    output, n = 4; the input itself is not kept. COMPOSITE: the normalised in fp32 too, n = 5.
    Statistics are one fp32 for each row, LayerNorm's two.
    """
    e = load.activation_bytes
    code = norm_code(decoder, load)
    inside = {NormCode.FUSED: e, NormCode.WRITTEN: 4 + e, NormCode.COMPOSITE: 8}[code]
    return (inside + e) * rows * width + 4 * rows * decoder.norm


def norm_code(decoder: Decoder, load: Workload) -> NormCode:
    """Return how the model's norms are computed: LayerNorm is always one kernel."""
    return NormCode.FUSED if decoder.norm is Norm.LAYER else load.norm


def attention_bytes(decoder: Decoder, load: Workload) -> int:
    """Return what attention saves: q, k, v, its output, and FLASH 4·T·a of log-sum-exps (E5).

    MATH keeps no bf16 q, k and v but fp32 ones, with as many heads for k and v as for q, and the
    probabilities, 4·b·a·s². At a 16, g 16, s 2048, b 2, h 2048 that is 560 MiB a layer more.
    """
    queries, keys = decoder.query_dim, decoder.kv_dim
    kept = load.row_bytes * queries  # the output
    if load.attention is Attention.MATH:
        kept += 4 * load.tokens * (3 * queries + decoder.heads * load.sequence)
    else:
        kept += load.row_bytes * (queries + 2 * keys) + 4 * load.tokens * decoder.heads
    if decoder.head_norms:
        kept += _head_norm_bytes(decoder, load, decoder.heads)
        kept += _head_norm_bytes(decoder, load, decoder.kv_heads)
    return kept


def _head_norm_bytes(decoder: Decoder, load: Workload, heads: int) -> int:
    """Return what a norm of heads saves besides its output, which attention takes."""
    output = load.row_bytes * heads * decoder.head_dim
    return norm_bytes(decoder, load, load.tokens * heads, decoder.head_dim) - output


def layer_bytes(decoder: Decoder, load: Workload) -> int:
    """Return U in bytes: all that a layer saves when nothing is computed again (E5)."""
    return sum(layer_saved(decoder, load))


def stored_bytes(decoder: Decoder, load: Workload) -> int:
    """Return what a layer holds from its forward to its backward: U, or one unit (E6)."""
    unit_bytes = load.row_bytes * decoder.hidden
    return unit_bytes if load.checkpoint else layer_bytes(decoder, load)


# --- moments of a step ----------------------------------------------------------------------------


class Term(NamedTuple):
    """Bytes with a name."""

    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """What lives at the largest moment of a phase."""

    phase: str
    """The part of a step: forward, loss, ..."""
    terms: tuple[Term, ...]
    at: str = ""
    """The moment in it."""

    @property
    def n_bytes(self) -> int:
        return sum(term.n_bytes for term in self.terms)

    def __str__(self) -> str:
        at = f" (at {self.at})" if self.at else ""
        head = f"{format_bytes(self.n_bytes):>10}  {self.phase}{at}"
        return "\n".join([head, *(f"{format_bytes(n):>14}  {name}" for name, n in self.terms)])


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peaks of a step's phases, in their order."""

    peaks: tuple[Peak, ...]

    @property
    def peak(self) -> Peak:
        """The phase with the most bytes: where the step peaks."""
        return max(self.peaks, key=lambda peak: peak.n_bytes)

    def __str__(self) -> str:
        left_out = "\n".join(f"    not counted: {text}" for text in NOT_COUNTED)
        return "\n".join([*map(str, self.peaks), left_out])


def footprint(decoder: Decoder, load: Workload) -> Footprint:
    """Return what a step holds besides weights and states, phase by phase (E5 to E9, E14).

    Raises ConfigError for models whose activations have no closed form here.
    """
    _check_dense(decoder)
    other = [
        why
        for why, found in [
            ("attention operation by operation", load.attention is Attention.MATH),
            ("layers that are normed behind", decoder.embedding_norm),
            ("a model without a head over a vocabulary", decoder.headless),
        ]
        if found
    ]
    if other:
        raise ConfigError(
            f"the moments of a step have no closed form here for {' and '.join(other)}",
            advice="trace two and three layers of the model and extrapolate",
        )
    peaks = [
        forward_peak(decoder, load),
        loss_peak(decoder, load),
        backward_peak(decoder, load, layer=decoder.layers),
        backward_peak(decoder, load, layer=1),
        embedding_peak(decoder, load),
    ]
    return Footprint((*peaks, *[optimizer_peak(decoder, load)] * load.keeps_gradients))


def _largest(peaks: Iterable[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.n_bytes)


def _stored(decoder: Decoder, load: Workload, layers: int) -> Term:
    what = "inputs" if load.checkpoint else "activations"
    return Term(f"{what} of layers", layers * stored_bytes(decoder, load))


def _keeps_input(decoder: Decoder, load: Workload) -> bool:
    """Whether a norm saves its very input: else the residual stream is held by nobody."""
    return norm_code(decoder, load) is NormCode.FUSED or load.activation_bytes == 4


def forward_peak(decoder: Decoder, load: Workload) -> Peak:
    """Return the largest moment of the layers' forward: in the last one.

    All kept: L·U, the MLP's output and the residual stream with it added, and where no norm saves
    them the two sums before. Checkpoints: L inputs, and what one layer holds at once without
    autograd: x, normed x and the MLP's inside (gated 3·f, else 2·f), or q, k, v and two outputs, or
    the fp32 copies of a written norm.
    """
    unit, row = load.row_bytes * decoder.hidden, load.row_bytes
    stored = _stored(decoder, load, decoder.layers)
    if not load.checkpoint:
        stream = 2 if _keeps_input(decoder, load) else 4
        return Peak("forward", (stored, Term("residual stream", stream * unit)), "the last sum")
    copies = _norm_forward_bytes(decoder, load)
    inside = {
        "the MLP": 2 * unit + (3 if decoder.gated else 2) * row * decoder.ffn,
        "attention": 2 * unit + 2 * row * (decoder.query_dim + decoder.kv_dim),
        "a norm": unit + copies * decoder.hidden,
    }
    if decoder.head_norms:
        inside["the norms of heads"] = unit + _head_norms_bytes(decoder, load, copies or row)
    return _largest(
        Peak("forward", (stored, Term("inside the last layer", n_bytes)), at)
        for at, n_bytes in inside.items()
    )


def _norm_forward_bytes(decoder: Decoder, load: Workload) -> int:
    """Return what a written norm's forward makes at once, for each column of its input.

    Two fp32 matrices, COMPOSITE three; one of those is the input itself where that is fp32.
    """
    n_copies = {NormCode.FUSED: 0, NormCode.WRITTEN: 2, NormCode.COMPOSITE: 3}
    n = n_copies[norm_code(decoder, load)]
    return 4 * load.tokens * (min(n, 2) if load.activation_bytes == 4 else n)


def _head_norms_bytes(decoder: Decoder, load: Workload, column_bytes: int) -> int:
    """Return q, k and v with what a norm makes of q, or then of k beside the normed q."""
    row, queries, keys = load.row_bytes, decoder.query_dim, decoder.kv_dim
    forgotten = norm_code(decoder, load) is NormCode.WRITTEN and load.activation_bytes == 4
    statistics = 0 if forgotten else 4 * load.tokens
    of_queries = column_bytes * queries + statistics * decoder.heads
    of_keys = row * queries + column_bytes * keys + statistics * decoder.kv_heads
    return row * (queries + 2 * keys) + max(of_queries, of_keys)


def loss_peak(decoder: Decoder, load: Workload) -> Peak:
    """Return the largest moment of the last norm, the head and the loss, forward and backward (E8).

    The loss of fp32 logits peaks at 12·T·V: 4 saved, 8 of two gradients; forward has 10. Without
    the copy 3·e·T·V and 2·e·T·V. Then the head's backward holds the gradients of the logits, of the
    head and of its input; then a written norm works in fp32.
    """
    logits = load.row_bytes * decoder.vocab
    unit = load.row_bytes * decoder.hidden
    norm = norm_bytes(decoder, load, load.tokens, decoder.hidden)
    head = load.activation_bytes * decoder.vocab * decoder.hidden
    stored = (_stored(decoder, load, decoder.layers), _returned(decoder, load))
    loss = 12 * load.tokens * decoder.vocab if load.upcast_logits else 3 * logits
    moments = [
        Peak("loss", (*stored, Term("last norm", norm), Term("loss", loss)), "its backward"),
        Peak(
            "loss",
            (
                *stored,
                Term("last norm", norm),
                Term("gradients of logits and normed x", logits + unit),
                Term("gradient of the head", head),
            ),
            "the head's backward",
        ),
    ]
    if (temporary := _norm_backward_bytes(decoder, load)) > 0:
        terms = (Term("last norm", temporary), Term("gradient of the head", head))
        moments.append(Peak("loss", (*stored, *terms), "the last norm's backward"))
    return _largest(moments)


def _returned(decoder: Decoder, load: Workload) -> Term:
    held = load.row_bytes * decoder.vocab if load.returns_logits else 0
    return Term("logits that the program holds", held)


def loss_forward_bytes(decoder: Decoder, load: Workload) -> int:
    """Return the peak of forward in the loss: stored, last norm, 10·T·V or 2·e·T·V (E8).

    The exactness vectors of E5 to E10 are of this moment, with logits that are not copied.
    """
    stored = _stored(decoder, load, decoder.layers).n_bytes
    norm = norm_bytes(decoder, load, load.tokens, decoder.hidden)
    logits = load.row_bytes * decoder.vocab
    copied = load.upcast_logits and load.activation_bytes < 4
    loss = logits + 8 * load.tokens * decoder.vocab if copied else 2 * logits
    return stored + norm + loss


def _norm_backward_bytes(decoder: Decoder, load: Workload) -> int:
    """Return what backward of a written norm holds at once: 24·T·h, and of a fused one nothing.

    The fp32 copy, its gradient through the product, and four fp32 matrices of the mean of squares.
    E9 allots two of an MLP's matrices to a layer; below about f = 4/3·h these six are more.
    """
    fused = norm_code(decoder, load) is NormCode.FUSED
    return 0 if fused else 24 * load.tokens * decoder.hidden


def backward_peak(decoder: Decoder, load: Workload, *, layer: int) -> Peak:
    """Return the largest moment of a layer's backward (E9, E14): layers are counted from 1.

    At any time there is what earlier layers stored, the gradient of the layer's output (one unit),
    and gradients of later units; for the rest see the moments.
    """
    unit, e = load.row_bytes * decoder.hidden, load.activation_bytes
    own_input = load.checkpoint and not _keeps_input(decoder, load)
    later = decoder.tail_numel + (decoder.layers - layer) * decoder.layer_numel
    tied = decoder.tied * decoder.vocab * decoder.hidden  # autograd holds it for the embedding's
    held = (
        _stored(decoder, load, layer - 1),
        _returned(decoder, load),
        Term("the layer's input and its output's gradient", unit * (1 + own_input)),
        Term("gradients of later units", e * (later * load.keeps_gradients + tied)),
    )
    name = f"backward of the {'first' if layer == 1 else 'last'} layer"
    return _largest(
        Peak(
            name,
            (
                *held,
                Term("activations of the layer", moment.left_bytes),
                Term("temporaries", moment.temporary_bytes),
                Term("the layer's gradients", e * moment.gradients_numel),
            ),
            moment.at,
        )
        for moment in _backward_moments(decoder, load)
    )


class _Moment(NamedTuple):
    """A moment of a layer's backward."""

    at: str
    left_bytes: int
    """Of what the layer saved."""
    temporary_bytes: int
    gradients_numel: int
    """Parameters of the layer that have their gradients."""


def _backward_moments(decoder: Decoder, load: Workload) -> Iterator[_Moment]:
    """Yield the moments at which a layer's backward may be at its largest, in their order."""
    unit, row = load.row_bytes * decoder.hidden, load.row_bytes
    saved = layer_saved(decoder, load)
    before_mlp = saved.attention_norm + saved.attention
    n_inside = 2 if decoder.gated else 1
    in_norm = _norm_backward_bytes(decoder, load)
    if _keeps_input(decoder, load):  # its fp32 copy is the residual stream: two gradients are one
        in_norm -= unit
    # 1. gradients of the product and of its factors, less the product, that is used up
    down = (decoder.ffn + decoder.mlp_bias) * decoder.hidden
    yield _Moment("the MLP", sum(saved), n_inside * row * decoder.ffn, down)
    # 2. of what its first matrices are given, one from each, and of what the last of them gave
    into = n_inside * unit + row * decoder.ffn
    yield _Moment("the MLP's input", before_mlp + saved.mlp_norm, into, decoder.mlp_numel)
    # 3. a norm that is written out
    if in_norm > 0:
        yield _Moment("the MLP's norm", before_mlp, in_norm, decoder.mlp_numel)
    # 4. gradients of attention's output, q, k and v
    out = (decoder.query_dim + decoder.out_bias) * decoder.hidden
    mixing = 2 * row * (decoder.query_dim + decoder.kv_dim)
    behind = decoder.mlp_numel + decoder.norm_numel + out
    yield _Moment("attention", before_mlp, mixing, behind)
    # 5. norms of heads that are written out: of k, and then of q
    if decoder.head_norms and in_norm > 0:
        queries, keys = row * decoder.query_dim, row * decoder.kv_dim
        kept = _head_norm_bytes(decoder, load, decoder.heads)
        normed = 24 * load.tokens * decoder.kv_dim + queries + keys
        yield _Moment("the norm of k", saved.attention_norm + kept, normed, behind)
        normed = 24 * load.tokens * decoder.query_dim + 2 * keys
        yield _Moment("the norm of q", saved.attention_norm, normed, behind)
    # 6. of q, and two of what the projections are given
    own = decoder.layer_numel - decoder.norm_numel
    into = 2 * unit + row * decoder.query_dim
    yield _Moment("the projections", saved.attention_norm, into, own)
    if in_norm > 0:
        yield _Moment("attention's norm", 0, in_norm, own)


def embedding_peak(decoder: Decoder, load: Workload) -> Peak:
    """Return the end of backward: all gradients, the embedding's dense one (V·h), and dx.

    A tied weight's gradient from the head waits since the loss; autograd adds the embedding's to it
    out of place, and there are three of V·h until dx is gone.
    """
    own = load.activation_bytes * decoder.vocab * decoder.hidden
    output = load.row_bytes * decoder.hidden
    others = (decoder.tail_numel + decoder.layers * decoder.layer_numel) * load.activation_bytes
    held = (
        _returned(decoder, load),
        Term("gradients of later units", others * load.keeps_gradients),
    )
    made = Term("gradient of the embedding", own * (1 + decoder.tied))
    dx = Term("gradient of the embedding's output", output)
    moments = [Peak("end of backward", (*held, made, dx), "the embedding")]
    if decoder.tied:
        parts = Term("gradients of the embedding and the head, and their sum", 3 * own)
        moments.append(Peak("end of backward", (*held, parts), "the tied weight"))
    return _largest(moments)


def optimizer_peak(decoder: Decoder, load: Workload) -> Peak:
    """Return what an update of gradients that stayed holds: N of them, and temporaries (E10).

    States have the dtype of their parameters. A loop over tensors holds most at the embedding, or
    at an MLP's last matrix behind the one before it, or behind the bias of that.
    """
    e, matrix = load.activation_bytes, decoder.ffn * decoder.hidden
    groups = [[decoder.numel]]
    if load.optimizer is OptimizerCode.SINGLE:
        before = decoder.ffn if decoder.mlp_bias else matrix
        groups = [[decoder.vocab * decoder.hidden], [before, matrix]]
    temporary = max(optimizer_temporary_bytes(load.optimizer, sizes) for sizes in groups)
    terms = (Term("gradients", e * decoder.numel), Term("temporaries of the update", e * temporary))
    return Peak("optimizer", terms)


# --- what others take -----------------------------------------------------------------------------


def optimizer_temporary_bytes(code: OptimizerCode, tensor_bytes: Sequence[int]) -> int:
    """Return what an AdamW step takes besides states, on the device that runs it (E10).

    ``tensor_bytes`` are the states of one kind, in the order of the group. FOREACH takes all of
    them once more, FUSED nothing. SINGLE takes two of one tensor, and meanwhile its variable holds
    what it made of the tensor before: max(2·n_i + n_{i-1}), not twice the largest.
    """
    if code is OptimizerCode.FUSED:
        return 0
    if code is OptimizerCode.FOREACH:
        return sum(tensor_bytes)
    before = (0, *tensor_bytes[:-1])
    return max((2 * n + last for n, last in zip(tensor_bytes, before, strict=True)), default=0)
