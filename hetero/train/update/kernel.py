"""Updates of an fp32 master: one compiled pass over memory, or torch's in blocks (floor 2).

Both give the same bits (formulas.py). Here is the pass on the CPU; device_kernel.py has CUDA's. A
master is kept with the working weight ``param``:

    bf16  ``low`` is int16. The bits of the master are (param's << 16) + low, so that param is the
          master rounded to nearest, ties away from zero. NaN is 0x7fc0 and 0.
    fp16  ``low`` is the fp32 master itself; param is it rounded to nearest, ties to even.

All tensors are 1-D, contiguous, of one length and on one device.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hetero.device import NoKernel
from hetero.errors import StateError
from hetero.train.update.formulas import Coefficients, Formula, Ops, States

ABI = 3  # of csrc/update.c
LIBRARY = Path(__file__).resolve().parents[2] / "_update.so"  # hatch_build.py puts it there
# Some 25 torch calls work on a block: 2**15 elements, which stay in L2, took 2.4 times as long as
# 2**18, which stay in L3 but hide what a call costs.
CPU_BLOCK_NUMEL = 2**18
SHARED_NUMEL = 2**18  # of a shared update, for a thread at a time: 1 ms, so that all end together
CUDA_BLOCK_NUMEL = 2**22
_LAYOUTS = {(torch.bfloat16, torch.int16): 0, (torch.float16, torch.float32): 1}
_GRADS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Operands(NamedTuple):
    """The tensors of one update, and the factors of its gradient."""

    param: torch.Tensor
    low: torch.Tensor
    grad: torch.Tensor
    states: States
    factors: Sequence[float]


class Native(Protocol):
    """A compiled pass over tensors of one kind of device."""

    def takes(self, place: torch.device) -> bool:
        """Whether it updates tensors there."""

    def update(self, c: Coefficients, run: Operands) -> None:
        """As `update`, on tensors that it has checked; NoKernel if this does nothing."""

    def sharing(self, place: torch.device) -> Library | None:
        """Return what threads can share an update of tensors there with; None if they cannot."""


class RunArgument(ctypes.Structure):
    """A run as update.c takes it: `job` there."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("layout", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("hi", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 3),
        ("factors", ctypes.c_float * 2),
        ("sign", ctypes.c_float),
        ("couple", ctypes.c_float),
        ("shrink", ctypes.c_float),
        ("own", ctypes.c_float * 16),
    )


def run_argument(c: Coefficients, run: Operands) -> RunArgument:
    """Return a run for a compiled pass; the tensors have to live until it is done."""
    return RunArgument(
        n=run.param.numel(),
        layout=_LAYOUTS[run.param.dtype, run.low.dtype],
        kind=_GRADS[run.grad.dtype],
        hi=run.param.data_ptr(),
        low=run.low.data_ptr(),
        grad=run.grad.data_ptr(),
        states=tuple(s.data_ptr() for s in run.states),
        factors=(*run.factors, 1.0, 1.0)[:2],
        sign=c.sign,
        couple=c.couple,
        shrink=c.shrink,
        own=c.own,
    )


class Library:
    """csrc/update.c, compiled. Calls release the GIL and run in the calling thread alone."""

    def __init__(self, path: Path) -> None:
        """Load it; OSError if that fails, or if it has another ABI."""
        self._dll = ctypes.CDLL(str(path.absolute()))
        try:
            abi = self._dll.hetero_abi()
        except AttributeError:
            abi = None
        if abi != ABI:
            raise OSError(f"{path} has ABI {abi}, {ABI} is wanted")

    @property
    def source_crc(self) -> int:
        """CRC-32 of the source it was compiled from."""
        crc = self._dll.hetero_source
        crc.restype = ctypes.c_uint32
        return int(crc())

    def takes(self, place: torch.device) -> bool:
        return place.type == "cpu"

    def sharing(self, place: torch.device) -> Library | None:
        return self if self.takes(place) else None

    def update(self, c: Coefficients, run: Operands) -> None:
        job = run_argument(c, run)
        self._rule(c)(ctypes.byref(job))

    def share(self, c: Coefficients, job: RunArgument, left: ctypes.c_int64) -> None:
        """Update what is ``left`` of a run, from 0 on: threads that call this at once share it."""
        size = ctypes.c_int64(SHARED_NUMEL)
        self._dll.hetero_share(self._rule(c), ctypes.byref(job), size, ctypes.byref(left))

    def _rule(self, c: Coefficients) -> Any:
        function = getattr(self._dll, f"hetero_{c.rule}")
        function.restype = None
        return function


class SharedUpdate:
    """An update that any number of threads do together: each calls this once, and takes runs until
    none is left. They hold the interpreter for a call, not for a run: the thread that launches the
    next forward waits for it each time.

    Args:
        make: returns the numbers and tensors; called by the first thread.
    """

    def __init__(self, library: Library, make: Callable[[], tuple[Coefficients, Operands]]) -> None:
        self._library = library
        self._make = make
        self._made: tuple[Coefficients, RunArgument] | None = None
        self._left = ctypes.c_int64(0)
        self._making = threading.Lock()

    def __call__(self) -> None:
        with self._making:
            if self._made is None:
                numbers, run = self._make()
                _check(run)
                self._made = numbers, run_argument(numbers, run)
        self._library.share(*self._made, self._left)


@functools.cache
def load(path: Path = LIBRARY) -> Library | None:
    """Return the compiled kernel, or None if there is none that this version can call."""
    try:
        return Library(path)
    except OSError:
        return None


def update(
    formula: Formula,
    c: Coefficients,
    *,
    param: torch.Tensor,
    low: torch.Tensor,
    grad: torch.Tensor,
    states: States,
    factors: Sequence[float],
    native: Native | None,
) -> None:
    """Update ``param``, ``low`` and ``states`` (fp32, in the order of `Formula.arrays`) in place.

    ``grad`` (bf16, fp16 or fp32) is converted to fp32 and multiplied by each of at most two
    ``factors`` in turn. Runs in the calling thread: cut a long run into slices for several, the
    bits are the same. StateError if the tensors are not as the module says.
    """
    run = Operands(param, low, grad, states, factors)
    _check(run)
    if native is not None and native.takes(param.device):
        try:
            native.update(c, run)
            return
        except NoKernel:  # torch's operations have the same bits
            pass
    with np.errstate(all="ignore"):  # a bad gradient gives a bad parameter, without a warning
        for block in _blocks(run):
            _update_block(formula, c, block, factors)


def split_(value: torch.Tensor, param: torch.Tensor, low: torch.Tensor) -> None:
    """Write an fp32 master as ``param`` and ``low``; ``value`` is only read."""
    run = Operands(param, low, value, (), ())
    _check(run)
    for block in _blocks(run):
        _pack(block.p.copy_(block.grad), block)


def join(param: torch.Tensor, low: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fp32 master, in ``out`` if given; of fp16 it is ``low`` itself otherwise."""
    if low.dtype is torch.float32:
        return low if out is None else out.copy_(low)
    master = torch.empty_like(param, dtype=torch.float32) if out is None else out
    master.copy_(param).view(torch.int32).add_(low)
    return master


class _Block(NamedTuple):
    """Equally long pieces of the tensors of one run, and scratch of their length."""

    param: torch.Tensor
    low: torch.Tensor
    grad: torch.Tensor
    states: States
    p: torch.Tensor
    """The master in fp32: scratch for bf16, ``low`` for fp16."""
    g: torch.Tensor
    ops: Ops


def _check(run: Operands) -> None:
    """Raise StateError for wrong tensors: the kernel trusts addresses and lengths."""
    param, low, grad, states, factors = run
    given = (param, low, grad, *states)
    right = (param.dtype, low.dtype) in _LAYOUTS and grad.dtype in _GRADS and len(factors) <= 2
    n, place = param.numel(), param.device
    for t in given:  # a loop, without generators: a slice holds the interpreter meanwhile
        right = right and t.dim() == 1 and t.numel() == n and t.is_contiguous()
        right = right and t.device == place
    for state in states:
        right = right and state.dtype is torch.float32
    if not right:
        seen = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in given)
        raise StateError(f"an update takes 1-D tensors of one length and 2 factors, not {seen}")


def _blocks(run: Operands) -> Iterator[_Block]:
    param, low, grad, states, _ = run
    if param.is_meta:  # without bytes there is nothing to do
        return
    size = CPU_BLOCK_NUMEL if param.device.type == "cpu" else CUDA_BLOCK_NUMEL
    size = min(size, max(1, param.numel()))
    p, g, t, u = torch.empty(4, size, device=param.device).unbind()
    ops = Ops(t, u)
    for cuts in zip(*(x.split(size) for x in (param, low, grad, *states)), strict=True):
        n = cuts[0].numel()
        if n < size:
            p, g, ops = p[:n], g[:n], Ops(t[:n], u[:n])
        master = cuts[1] if low.dtype is torch.float32 else p
        yield _Block(cuts[0], cuts[1], cuts[2], cuts[3:], master, g, ops)


def _update_block(
    formula: Formula, c: Coefficients, block: _Block, factors: Sequence[float]
) -> None:
    p, g, ops = block.p, block.g, block.ops
    g.copy_(block.grad)
    for factor in (*factors, c.sign):
        if factor != 1:
            g.mul_(factor)
    _unpack(block)
    if c.couple:
        ops.add_scaled_(g, c.couple, p)
    if c.shrink != 1:
        p.mul_(c.shrink)
    formula.apply(c.own, p, g, block.states, ops)
    _pack(p, block)


def _unpack(block: _Block) -> None:
    if block.p is not block.low:
        block.p.copy_(block.param)
        block.p.view(torch.int32).add_(block.ops.t.view(torch.int32).copy_(block.low))


def _pack(p: torch.Tensor, block: _Block) -> None:
    if block.low.dtype is torch.float32:
        block.param.copy_(p)
        return
    torch.nan_to_num(p, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=p)
    bits, high = p.view(torch.int32), block.ops.t.view(torch.int32)
    torch.add(bits, 0x8000, out=high).bitwise_right_shift_(16)
    block.param.view(torch.int16).copy_(high)
    block.low.copy_(bits)
