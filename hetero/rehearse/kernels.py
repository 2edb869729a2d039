"""Kernels that meta tensors would choose otherwise than the device they stand for (floor 4).

``F.scaled_dot_product_attention`` chooses a kernel by the device of its inputs; for meta tensors it
is one that makes every score. The conditions here are those of ``sdp_utils_cpp.cpp`` and
``sdp_utils.cpp`` of torch 2.9 to 2.13, as far as they depend on shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F

from hetero.dry import META, write_unseen
from hetero.internals import AUTOCAST_INIT, install
from hetero.parallel.grouped import of_any_dtype

HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256  # of CUDA's flash kernels
_ops = torch.ops.aten
STATISTICS = (_ops.native_layer_norm.default, _ops.native_batch_norm.default)


class AsOn:
    """Computes attention of meta tensors as ``is_cuda``, or else a CPU, would, inside the block.

    The operation itself gets another kernel, so calls by any name are caught; a mode would see
    every call of torch. There autocast may be switched off for the meta device, as for any other.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._attend = attend_cuda if is_cuda else attend_cpu

    def __enter__(self) -> AsOn:
        library = torch.library.Library("aten", "IMPL")
        attention: Any = partial(attend, self._attend)
        with ExitStack() as stack:
            stack.callback(library._destroy)
            library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
            stack.callback(install((AUTOCAST_INIT.replaced(casts_none_of_meta),)))
            stack.enter_context(of_any_dtype())
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._undo.close()


def casts_none_of_meta(own: Callable[..., None]) -> Callable[..., None]:
    """Return `torch.autocast.__init__` that takes the meta device where nothing is to be cast.

    torch has no autocast for it, and refuses even to switch it off; to switch it on stays an error.
    """

    @wraps(own)
    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        casts = enabled or device_type != META.type
        own(self, device_type if casts else "cpu", dtype, enabled, cache_enabled)

    return init


def attend(
    fused: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the output of a fused kernel; if none takes these inputs, every score is made."""
    qkv = (query, key, value)
    widths = {t.shape[-1] for t in qkv}
    rows = all(t.dim() == 4 and t.numel() and t.stride(-1) == 1 for t in qkv)
    trained = attn_mask is not None and attn_mask.requires_grad
    found: torch.Tensor | None = None
    if rows and len(widths) == 1 and not trained:
        found = fused(qkv, attn_mask, dropout_p, is_causal, scale)
    if found is not None:
        return found
    mask = added(attn_mask, query)
    result: torch.Tensor = _ops._scaled_dot_product_attention_math(
        *(query, key, value, mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def attend_cpu(
    qkv: Any, mask: torch.Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor | None:
    if dropout:
        return None
    mask = added(mask, qkv[0])
    found: torch.Tensor = _ops._scaled_dot_product_flash_attention_for_cpu(
        *qkv, dropout, is_causal, attn_mask=mask, scale=scale
    )[0]
    return found


def attend_cuda(
    qkv: Any, mask: torch.Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor | None:
    query = qkv[0]
    found: torch.Tensor
    if mask is None and query.dtype in HALF and query.shape[-1] <= FLASH_HEAD_DIM:
        width = query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        if width % 8:  # torch pads heads to what the kernel takes, and cuts the output
            qkv = [F.pad(t, (0, 8 - width % 8)) for t in qkv]
        found = _ops._scaled_dot_product_flash_attention(*qkv, dropout, is_causal, scale=scale)[0]
        return found[..., :width] if width % 8 else found
    if query.shape[1] != qkv[1].shape[1]:  # heads that share keys
        return None
    needs = any(t.requires_grad for t in qkv) and torch.is_grad_enabled()
    found = _ops._scaled_dot_product_efficient_attention(
        *qkv, added(mask, query), needs, dropout, is_causal, scale=scale
    )[0]
    return found


def as_on_cpu(func: Any, args: Any, found: Any) -> Any:
    """Return the result of a CPU's kernel in place of the meta one.

    A CPU's norms keep their statistics in the 2-byte dtype that all tensors share, if they do, and
    make only the gradients asked for.
    """
    if func in STATISTICS and found[0].is_meta and (half := _one_half(args)) is not None:
        return (found[0], *(torch.empty_like(t, dtype=half) for t in found[1:]))
    if func is _ops.native_batch_norm_backward.default:
        return tuple(t if asked else None for t, asked in zip(found, args[-1], strict=True))
    return found


def note_writes(func: Any, args: Any) -> None:
    """Note what batch norm writes: its schema does not say so, hence versions do not either."""
    if func is _ops.native_batch_norm.default and args[5]:  # it trains
        for statistic in args[3:5]:
            if statistic is not None:
                write_unseen(statistic)


def _one_half(args: Any) -> torch.dtype | None:
    """Return the 2-byte dtype that all tensors among arguments have."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(HALF) else None


def added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of truth values as one that is added, as torch converts it."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    nothing, never = (
        torch.scalar_tensor(value, dtype=query.dtype, device=query.device)
        for value in (0.0, -torch.inf)
    )
    return torch.where(mask, nothing, never)
