"""What integrations leave behind, and tests do not pass on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_precision_of_others() -> Iterator[None]:
    """Before Transformers 5 ``bf16=True`` is said in the environment, to whatever follows."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
