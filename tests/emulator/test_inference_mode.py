"""As on the CPU, what is made in inference mode outlives it, where threads of ours bring copies
about in stages, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.train.engine.tuning import Tuning
from tests.emulator import fake
from tests.train.test_inference_mode import check


@pytest.mark.parametrize(
    ("settings", "homes_on_hbm"),
    [({"pinned": 40_000}, False), ({"precision": "bf16"}, None)],
    ids=["in stages", "homes on HBM"],
)
def test_what_is_made_in_inference_mode_outlives_it(
    watched: None, settings: dict[str, Any], homes_on_hbm: bool | None, tmp_path: Path
) -> None:
    tuning = Tuning(homes_on_hbm=homes_on_hbm)
    given = {"activations": "offload", "hbm": 150_000, **settings}
    check(fake.PLACE, tmp_path, fake.device(), tuning, **given)
