"""Operations of updates without bytes run once for arguments of some geometry."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hetero.internals import DispatchMode
from hetero.rehearse.made import Made
from hetero.rehearse.rehearsal import set_apart

META = torch.device("meta")


class Ran(DispatchMode):
    """Notes what runs below."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def adam(param: torch.Tensor) -> torch.optim.Optimizer:
    param.grad = torch.empty_like(param)
    return torch.optim.AdamW([param], lr=0.1, foreach=False)


def blank(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, device=META))


def test_a_step_of_a_known_geometry_runs_nothing_without_bytes() -> None:
    first, second, wider = (adam(blank(n, 8)) for n in (4, 4, 5))
    with Ran() as ran, Made():
        first.step()
        n_first = ran.names.count("addcdiv_.default")
        second.step()
        n_second = ran.names.count("addcdiv_.default")
        wider.step()

    assert (n_first, n_second) == (1, 1)
    assert ran.names.count("addcdiv_.default") == 2


def test_results_have_the_geometry_and_the_memory_of_their_own_that_they_have_otherwise() -> None:
    x = torch.empty(4, 8, device=META).t()

    def results() -> list[torch.Tensor]:
        return [x.exp(), x.bfloat16(), x.sum(0), torch.where(x > 0, x, -x), x[1:].add_(1)]

    plain = results()
    with Made():
        results()
        found = results()

    for one, other in zip(found, plain, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    places = {t.untyped_storage()._cdata for t in (x, *found[:4])}
    assert len(places) == 5
    assert found[4].untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_write_counts_in_the_version_of_its_tensor_each_time() -> None:
    x = torch.empty(4, device=META)
    with Made():
        versions = [x.mul_(2)._version for _ in range(3)]

    assert versions == [1, 2, 3]


def test_tensors_with_bytes_are_computed() -> None:
    count = torch.zeros(())
    with Made():
        for _ in range(3):
            count += 1
        double = [(count * 2).item() for _ in range(2)]

    assert count.item() == 3 and double == [6, 6]


def test_a_memory_that_grows_does_so_each_time() -> None:
    small, other = torch.empty(0, device=META), torch.empty(0, device=META)
    with Made():
        small.resize_(16)
        other.resize_(16)

    assert other.shape == (16,) and other.untyped_storage().nbytes() == 64


def test_what_is_refused_is_refused_again() -> None:
    x, y = torch.empty(4, device=META), torch.empty(3, device=META)
    with Made():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"size|shape|broadcast"):
                x.add_(y)
            with pytest.raises(RuntimeError, match="meta"):
                x.sum().item()


def test_a_plan_freezes_what_was_before_it_and_leaves_what_others_froze() -> None:
    with set_apart():
        assert gc.get_freeze_count()  # by the plugin of all tests
    assert gc.get_freeze_count()
    gc.unfreeze()
    try:
        with set_apart():
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()
