"""Products of groups of rows, each by a matrix of its own, on tensors without bytes (floor 3).

Experts are computed so. torch's kernel for tensors without bytes takes bf16 alone; the others take
any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NAME = "_grouped_mm"


@contextmanager
def of_any_dtype() -> Iterator[None]:
    """Let `torch.nn.functional.grouped_mm` take tensors without bytes of any dtype inside."""
    library = torch.library.Library("aten", "IMPL")
    try:
        if hasattr(torch.ops.aten, NAME):
            library.impl(NAME, product, "Meta", allow_override=True)
        yield
    finally:
        library._destroy()


def product(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what products have room in; groups of a 2-d factor end at ``offs``."""
    shape = [rows.shape[-2], matrices.shape[-1]]
    if rows.dim() == matrices.dim():  # a product for each group
        n_groups = rows.shape[0] if rows.dim() == 3 else (0 if offs is None else offs.numel())
        shape.insert(0, n_groups)
    return rows.new_empty(shape, dtype=out_dtype or rows.dtype)
