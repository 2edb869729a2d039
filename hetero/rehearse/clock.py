"""How long operations take on a machine: the clock of a dry device (floor 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.flop_counter import flop_registry

from hetero.dry import META
from hetero.plan.machine import Dtype, MachineProfile
from hetero.plan.rates import attention_flops, side_of
from hetero.rehearse.kernels import as_on_cpu, note_writes
from hetero.rehearse.layers import SUMMED
from hetero.train.activations.meter import tensors_in
from hetero.train.model.looking import Unguarded
from hetero.types import Lane, noop

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_aten = torch.ops.aten
NUMBER = _aten._local_scalar_dense.default
FREE = {  # neither compute nor touch bytes; results that are given a storage must not be reused
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten._unsafe_view.default),
    *(_aten.lift_fresh.default, *(getattr(_aten.set_, name) for name in _aten.set_.overloads())),
}
FUNCTIONS = {  # of each element, with more arithmetic than a processor does while it waits
    *(_aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward, _aten.exp, _aten.log),
    *(_aten.sigmoid, _aten.sigmoid_backward, _aten.tanh, _aten.tanh_backward, _aten.erf),
    *(_aten._softmax, _aten._softmax_backward_data, _aten._log_softmax),
    *(_aten._log_softmax_backward_data, _aten.mish, _aten.elu, _aten.softplus),
}
ATTENTION = "_scaled_dot_product_"
GROUPED = "_grouped_mm"  # rows of groups, each times its own matrix, or products of such rows


class Clocked(Protocol):
    """A device whose time is modelled."""

    torch_device: torch.device
    is_cuda: bool

    def compute(self, seconds: float) -> None:
        """Let compute work for ``seconds``."""

    def is_busy(self, lane: Lane) -> bool:
        """Whether a lane copies now."""


class Product(NamedTuple):
    """Matrix products of an operation, those that attention computes again left out of flops."""

    flops: float = 0.0
    seconds: float = 0.0


class Known(NamedTuple):
    """The cost of an operation with arguments of some geometry, and its result."""

    flops: float
    seconds: float
    makes: Callable[[], Any] | None
    """Makes its result; None: the operation has to run."""


class Costs:
    """What operations cost: steps and rehearsals of one plan do the same ones again and again.

    Which of two kinds of device computes decides kernels, and the profile their times.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bool, MachineProfile], dict[Any, Known]] = {}

    def on(self, device: Clocked, profile: MachineProfile) -> dict[Any, Known]:
        return self._known.setdefault((device.is_cuda, profile), {})


class OpClock(Unguarded):
    """Advances a device's clock by the time of each operation there.

    An operation takes the longer of its products and its bytes, and its launch. A number that code
    asks of a tensor without bytes is 1, or true.

    Args:
        counted: whether each operation's bytes are counted, which takes time.
        n_sharing: processes that compute on the same processors at the same time.
        sum_seconds: of bytes that ranks which divide tensors add up, while compute waits.
        costs: known from other steps on such a device.
    """

    def __init__(
        self,
        device: Clocked,
        profile: MachineProfile,
        *,
        counted: bool = False,
        n_sharing: int = 1,
        sum_seconds: Callable[[float], float] = lambda n_bytes: 0.0,
        costs: Costs | None = None,
    ) -> None:
        super().__init__()
        self._sum_seconds = sum_seconds
        self.summed_bytes = 0
        self.summed_seconds = 0.0
        """Of sums of ranks."""
        self._is_cuda = device.is_cuda
        self._device = device
        self._profile = profile
        self.operations = 0
        """How many there were, views among them."""
        self.flops = 0.0
        """Multiplications and additions of all matrix products."""
        self._counted_seconds = profile.host.counted_seconds if counted else 0.0
        self._known = (costs or Costs()).on(device, profile)
        self._n_sharing = n_sharing
        overlap = profile.overlap
        slows = [(Lane.H2D, overlap.gemm_under_h2d), (Lane.D2H, overlap.gemm_under_d2h)]
        if not self._is_cuda:  # processors share their time with the threads of the updater
            threads = Lane.UPDATE, Lane.READ, Lane.WRITE
            slows += [(lane, overlap.gemm_under_update) for lane in threads]
        self._slows = [(lane, figure.value) for lane, figure in slows if figure is not None]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is NUMBER and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1
        if func is SUMMED:
            self.add_up(args[0].nbytes)
            return func(args[0])
        self.begin()
        if func.is_view or func in FREE:
            return func(*args, **kwargs) if kwargs else func(*args)
        note_writes(func, args)
        try:
            key = func, geometry(args), geometry(tuple(kwargs.items())) if kwargs else ()
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            key, known = None, None
        if known is not None and known.makes is not None:
            found = known.makes()
        else:
            found = func(*args, **kwargs) if kwargs else func(*args)
            if not self._is_cuda:
                found = as_on_cpu(func, args, found)
            if known is None:
                known = self._learn(func, args, kwargs, found)
                if key is not None:
                    self._known[key] = known
        self.spend(known)
        return found

    def begin(self) -> None:
        """Count an operation, before it runs."""
        self.operations += 1
        if self._counted_seconds:
            self._device.compute(self._counted_seconds)

    def spend(self, known: Known) -> None:
        """Let the time of an operation pass."""
        self.flops += known.flops
        self._device.compute(known.seconds * self._slowdown() * self._n_sharing)

    def add_up(self, n_bytes: int) -> None:
        """Let the time of a sum of ranks pass, which is an operation, too."""
        seconds = self._sum_seconds(n_bytes)
        self.operations += 1
        self.summed_bytes += n_bytes
        self.summed_seconds += seconds
        self._device.compute(seconds)

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any] | None, found: Any) -> Known:
        inputs = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
        outputs = list(tensors_in(found))
        makes, place = maker(func, inputs, outputs, found), self._device.torch_device
        here = [tensor for tensor in (*inputs, *outputs) if tensor.device == place]
        if not here:
            return Known(0.0, 0.0, makes)
        product = self._product(func, args, found, inputs)
        work = product.seconds
        if func.overloadpacket in FUNCTIONS:
            work = self._profile.compute.function_seconds(sum(t.numel() for t in outputs))
        memory = self._profile.memory_seconds(sum(map(touched_bytes, here)))
        return Known(product.flops, self._profile.op_seconds(work, memory), makes)

    def _product(self, func: Any, args: Any, found: Any, inputs: list[torch.Tensor]) -> Product:
        """Return the matrix products; others take as long as a square one of as many operations."""
        packet, name = func.overloadpacket, func.__name__
        if packet in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm):
            left, right = inputs[-2:] if packet in (_aten.mm, _aten.bmm) else inputs[1:3]
            batch = left.shape[0] if left.dim() == 3 else 1
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            seconds = batch * self._matmul_seconds(m, n, k, left.dtype)
            return Product(2.0 * batch * m * n * k, seconds)
        if name.startswith(GROUPED):
            (m, k), n = inputs[0].shape[-2:], inputs[1].shape[-1]
            return Product(2.0 * m * n * k, self._matmul_seconds(m, n, k, inputs[0].dtype))
        if name.startswith(ATTENTION):
            return self._attention(name, args, inputs)
        if packet not in flop_registry:
            return Product()
        flops = float(flop_registry[packet](*args, out_val=found))
        side = side_of(flops)
        return Product(flops, self._matmul_seconds(side, side, side, inputs[0].dtype))

    def _attention(self, name: str, args: Any, inputs: list[torch.Tensor]) -> Product:
        backward = "backward" in name
        query, key, value = inputs[1:4] if backward else inputs[:3]
        batch, heads, rows, width = query.shape
        widths, causal = width + value.shape[-1], any(arg is True for arg in args)
        sizes, dtype = (batch, heads, rows, key.shape[-2], widths), query.dtype
        flops = attention_flops(*sizes, causal=causal, backward=backward)
        products = (1 + backward) * attention_flops(*sizes, causal=causal, backward=False)
        if not flops or dtype not in DTYPES:
            return Product(products)
        seconds = self._profile.attention_seconds(flops, DTYPES[dtype], backward=backward)
        return Product(products, seconds)

    def _matmul_seconds(self, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        if not m * n * k or dtype not in DTYPES:
            return 0.0
        return self._profile.matmul_seconds(m, n, k, DTYPES[dtype])

    def _slowdown(self) -> float:
        """Return by how much other lanes slow compute down (T7)."""
        slow = 1.0
        for lane, times in self._slows:
            if times > slow and self._device.is_busy(lane):
                slow = times
        return slow


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; expanded elements are read once."""
    numel = math.prod(
        size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride or not size
    )
    return int(numel) * tensor.element_size()


def geometry(value: Any) -> Any:
    """Return the geometry of an operation's arguments, without the numbers of tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple([geometry(item) for item in value])
    return type(value), value


def maker(
    func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], found: Any
) -> Callable[[], Any] | None:
    """Return a call that makes an operation's result anew; None if the operation does more.

    An operation of the same arguments makes the same, and torch takes a hundred microseconds to
    find that out (measured).
    """
    schema = func._schema
    if any(part.alias_info is not None for part in (*schema.arguments, *schema.returns)):
        return None
    places = [t.untyped_storage()._cdata for t in (*inputs, *outputs)]
    alone = len(set(places)) == len(set(places[: len(inputs)])) + len(outputs)
    if not outputs or not alone or not all(map(is_blank, outputs)):
        return None
    blank = partial(torch.empty_strided, device=META)
    if isinstance(found, torch.Tensor):
        return partial(blank, found.shape, found.stride(), dtype=found.dtype)
    if type(found) is not tuple or any(not isinstance(t, torch.Tensor | None) for t in found):
        return None
    calls = [
        noop if t is None else partial(blank, t.shape, t.stride(), dtype=t.dtype) for t in found
    ]
    return lambda: tuple([call() for call in calls])


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that `torch.empty_strided` would make."""
    if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.storage_offset():
        return False
    ends = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    n_bytes = (1 + sum(ends)) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == n_bytes
