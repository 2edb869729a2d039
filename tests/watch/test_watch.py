"""`hetero.watch` and `hetero watch`: what held the memory of a program that is not hetero's."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.cli import main
from hetero.config import HostLimit
from hetero.device import process
from hetero.train.activations.meter import LiveBytes
from hetero.watch import face, proposal
from hetero.watch.face import WatchBlock
from hetero.watch.observer import Observer
from hetero.watch.picture import MemoryUse
from hetero.watch.report import ProgramEnd, Report, lines
from hetero.watch.sample import Sample
from hetero.watch.sampler import is_due
from hetero.watch.stacks import Stacks

IMPOSSIBLE = 1 << 46  # floats: more than addresses


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(squared(self.up(x))))


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


class Net(nn.Module):
    def __init__(self, width: int = 16, n_blocks: int = 3, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.head = nn.Linear(width, 5)
        self.out_of_memory_from = 10**9
        """Samples of a batch for which there is no memory, in the last block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if len(x) >= self.out_of_memory_from and number == len(self.blocks) - 1:
                torch.empty(IMPOSSIBLE)
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Twisted(nn.Module):
    """A model with derivatives of its own, hooks of its own, and a fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            x = self.layer(x[:, None])[:, 0]
        slope = torch.func.grad(lambda y: y.square().sum())(x.detach())
        return self.head(x + slope)


class Cast(nn.Module):
    """A model under autocast, which casts in C++ what a bilinear layer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.layer(x, x)).float()


def train(model: nn.Module, steps: int = 5, rows: int = 8) -> list[torch.Tensor]:
    """Train a while, and return all that could differ: losses, weights, generator."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = torch.randn(rows + step, 16), torch.randint(0, 5, (rows + step,))
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
        (loss + slope.square().sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(model.eval()(torch.randn(4, 16)))
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of something else: a rehearsal takes a second."""
    monkeypatch.setattr(WatchBlock, "_proposal", lambda self, report, patience: report.proposal)


def seen(watched: WatchBlock) -> Report:
    assert watched.report is not None
    return watched.report


def out_of_memory() -> None:
    torch.empty(IMPOSSIBLE)


# -- the program does not change -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [Net, lambda: Net(recompute=True), Twisted, Cast],
    ids=["plain", "recomputed", "twisted", "cast"],
)
def test_a_watched_program_computes_the_same_bits(
    make: Callable[[], nn.Module], page: Path, unrehearsed: None
) -> None:
    torch.manual_seed(7)
    plain = train(make())
    torch.manual_seed(7)
    with hetero.watch(page) as watched:
        ours = train(make())

    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert seen(watched).why_off == ""
    assert seen(watched).n_samples > 2  # each step has a larger batch than the one before


def test_a_rehearsal_leaves_the_generator_and_the_model_alone(page: Path) -> None:
    torch.manual_seed(7)
    model = Net()
    plain = train(copy.deepcopy(model))
    torch.manual_seed(7)
    Net()
    with hetero.watch(page) as watched:
        train(model)
    after = torch.get_rng_state()

    assert seen(watched).proposal.line
    assert torch.equal(after, plain[-1])
    assert all(
        torch.equal(a, b) for a, b in zip(plain[6:-1], model.state_dict().values(), strict=True)
    )


def test_no_module_is_touched_and_torch_gets_its_functions_back(
    page: Path, unrehearsed: None
) -> None:
    call, backward = nn.Module.__call__, torch.autograd._engine_run_backward
    model = Net()
    attributes = {name: set(each.__dict__) for name, each in model.named_modules()}
    with hetero.watch(page):
        assert nn.Module.__call__ is not call
        train(model)
        assert {name: set(each.__dict__) for name, each in model.named_modules()} == attributes
        assert torch.equal(
            pickle.loads(pickle.dumps(model)).head.weight, copy.deepcopy(model).head.weight
        )
        torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))(torch.ones(2, 4))
        with pytest.raises(ZeroDivisionError), hetero.watch(page.with_name("inner.html")):
            raise ZeroDivisionError

    assert nn.Module.__call__ is call
    assert torch.autograd._engine_run_backward is backward
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mode_of_the_program_stays_its_own(page: Path, unrehearsed: None) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    def counted(model: nn.Module) -> list[int]:
        optimizer, mode, found = torch.optim.SGD(model.parameters(), lr=0.1), Counting(), []
        for step in range(3):
            loss = model(torch.ones(4 + step, 16)).sum()
            with mode:  # it begins in a sample, and ends after it
                loss.backward()
                optimizer.step()
            torch.ones(3).sum()
            found.append(mode.count)
        return found

    plain = counted(Net().eval())
    with hetero.watch(page) as watched:
        ours = counted(Net().eval())

    assert ours == plain
    assert seen(watched).n_samples and seen(watched).why_off == ""
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_error_of_our_own_ends_the_watching_and_not_the_program(
    page: Path, monkeypatch: pytest.MonkeyPatch, unrehearsed: None
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(Sample, "settle", broken)
    with hetero.watch(page) as watched:
        train(Net())

    assert seen(watched).ending is ProgramEnd.ENDED
    assert "KeyError" in seen(watched).why_off
    assert "KeyError" in page.read_text()


def test_an_operation_that_cannot_be_looked_at_ends_a_sample_and_not_the_program(
    page: Path, monkeypatch: pytest.MonkeyPatch, unrehearsed: None
) -> None:
    def broken(*_: Any) -> int:
        raise NotImplementedError("no storage")

    torch.manual_seed(7)
    plain = train(Net())
    monkeypatch.setattr(Stacks, "here", broken)
    torch.manual_seed(7)
    with hetero.watch(page) as watched:
        ours = train(Net())

    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert seen(watched).peak is None and "no storage" in seen(watched).why_off
    assert seen(watched).steps == 5


def test_modules_that_other_threads_call_are_left_alone(page: Path, unrehearsed: None) -> None:
    with hetero.watch(page) as watched:
        thread = threading.Thread(target=train, args=(Net(),))
        thread.start()
        thread.join()

    assert seen(watched).n_samples == 0


# -- what held it --------------------------------------------------------------------------------


def test_what_has_an_owner_is_counted_to_the_byte(page: Path, unrehearsed: None) -> None:
    model = Net()
    size = sum(p.nbytes for p in model.parameters())
    with hetero.watch(page) as watched:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
    uses = seen(watched).last.by_use()

    assert uses[MemoryUse.PARAMETERS] == uses[MemoryUse.GRADIENTS] == size
    assert uses[MemoryUse.STATES] == 2 * size + 4 * len(
        list(model.parameters())
    )  # their step counts
    by_module = dict(seen(watched).last.by_module())
    assert by_module["blocks.1.up"][MemoryUse.PARAMETERS] == model.blocks[1].up.weight.nbytes + 128


def test_the_peak_of_a_sample_is_that_of_an_independent_count(
    page: Path, unrehearsed: None
) -> None:
    def step(model: nn.Module) -> None:
        model(torch.randn(64, 16)).square().sum().backward()

    model = Net(recompute=True)
    size = sum(p.nbytes for p in model.parameters())
    with LiveBytes() as live:
        step(copy.deepcopy(model))  # parameters are made inside, and counted
    with hetero.watch(page) as watched:
        step(model)
    peak = seen(watched).peak

    assert peak is not None
    assert peak.n_bytes == live.peak
    assert peak.by_use()[MemoryUse.PARAMETERS] == size


def test_a_holding_has_its_module_and_its_lines(page: Path, unrehearsed: None) -> None:
    with hetero.watch(page) as watched:
        Net()(torch.randn(64, 16)).sum().backward()
    peak = seen(watched).peak
    assert peak is not None
    found = [h for h in peak.holdings if h.operation == "aten.relu"]

    assert {h.module for h in found} == {f"blocks.{n}" for n in range(3)}
    assert found[0].use is MemoryUse.ACTIVATIONS and found[0].n_bytes == 64 * 32 * 4
    assert [line.function for line in found[0].stack[:3]] == ["squared", "forward", "forward"]
    assert found[0].stack[0].file == __file__
    assert f"{Path(__file__).name}:{found[0].stack[0].line} in squared" in "".join(
        f"{h.stack[0]}" for h in found
    )


def test_a_larger_batch_is_seen_and_equal_ones_are_not(page: Path, unrehearsed: None) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetero.watch(page) as watched:
        for rows in (8, 8, 8, 8, 16, 8, 16):
            model(torch.randn(rows, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = seen(watched).rows

    assert [row.uses is not None for row in rows] == [1, 1, 0, 0, 1, 0, 0]
    assert seen(watched).peak is not None and seen(watched).peak.step == 4
    assert rows[4].batch_bytes == 2 * rows[3].batch_bytes == 16 * 16 * 4
    assert [n for n in range(200) if is_due(n)] == [0, 1, 16, 32, 64, 128]


def test_a_program_whose_modules_are_always_new_is_not_always_sampled(
    page: Path, unrehearsed: None
) -> None:
    with hetero.watch(page) as watched:
        for n in range(300):
            model = nn.Linear(2, 2)
            model(torch.ones(1 + n, 2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert 16 <= seen(watched).n_samples <= 16 + 300 // 16 + 8
    assert seen(watched).why_off == ""


@pytest.mark.slow
def test_compiled_code_stays_whole_and_has_no_samples(page: Path, unrehearsed: None) -> None:
    def results(model: nn.Module) -> list[torch.Tensor]:
        whole = torch.compile(model, backend="eager", fullgraph=True)
        whole(torch.ones(4, 16)).sum().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(1)
    plain = results(Net().eval())
    torch._dynamo.reset()
    torch.manual_seed(1)
    with hetero.watch(page) as watched:
        ours = results(Net().eval())

    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert seen(watched).n_samples == 0 and seen(watched).why_off == ""
    assert "its code is" in page.read_text()


def test_each_rank_has_a_page_of_its_own(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with hetero.watch(page):
        pass

    assert page.with_name("page-rank2.html").exists() and not page.exists()


def test_passes_of_one_step_are_one_step(page: Path, unrehearsed: None) -> None:
    model = Net()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with hetero.watch(page) as watched:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
            first.step()
            second.step()

    assert seen(watched).steps == 2


def test_a_long_run_keeps_some_of_its_steps(page: Path, unrehearsed: None) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetero.watch(page) as watched:
        for _ in range(1100):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    assert seen(watched).steps == 1100
    assert 256 <= len(seen(watched).rows) <= 520


# -- how it ended --------------------------------------------------------------------------------


def test_a_shortage_in_forward_shows_what_was_held_then(page: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="can't allocate"), hetero.watch(page) as watched:
        for rows in (8, 8, 8, 64):
            model.out_of_memory_from = 64
            model(torch.randn(rows, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = seen(watched)

    assert report.ending is ProgramEnd.SHORT and report.shortage is not None
    assert report.shortage.step == 3 and report.picture is report.shortage.picture
    held = {
        (h.module, h.operation) for h in report.picture.holdings if h.use is MemoryUse.ACTIVATIONS
    }
    assert ("blocks.1", "aten.relu") in held  # of the forward that failed
    assert ("blocks.2", "aten.relu") not in held
    assert report.shortage.stack[0].function == "forward"
    text = page.read_text()
    assert "when memory ran out" in text and "aten.relu" in text and "blocks.1" in text
    shown = list(lines(report, str(page)))
    assert len(shown) <= 10 and "ran out of memory" in shown[0] and str(page) in shown[-1]


def test_a_shortage_outside_of_modules_and_in_a_step_that_is_not_sampled_is_seen(
    page: Path, unrehearsed: None
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError), hetero.watch(page) as watched:
        for _ in range(4):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
        out_of_memory()
    report = seen(watched)

    assert report.ending is ProgramEnd.SHORT and report.shortage is not None
    assert report.shortage.stack[0].function == "out_of_memory"
    assert not report.picture.has_stacks and MemoryUse.GRADIENTS in report.picture.by_use()
    assert report.peak is not None and report.peak.has_stacks
    assert "only what has an owner" in page.read_text()


def test_a_shortage_that_the_program_survives_is_told(page: Path, unrehearsed: None) -> None:
    model = Net()
    model.out_of_memory_from = 32
    with hetero.watch(page) as watched:
        for rows in (64, 32, 16):
            try:
                model(torch.randn(rows, 16)).sum().backward()
                break
            except RuntimeError:
                continue
    report = seen(watched)

    assert report.ending is ProgramEnd.ENDED and report.shortage is not None
    assert "when memory ran out" in report.picture.when
    assert "Memory ran out in step 0" in page.read_text()


def test_a_budget_of_hetero_is_a_shortage_with_its_ledger(page: Path) -> None:
    model = Net()
    model, optimizer = hetero.prepare(
        model, torch.optim.AdamW(model.parameters()), device="cpu:sim", hbm="32KiB"
    )
    with pytest.raises(hetero.BudgetError) as raised, hetero.watch(page) as watched:
        for rows in (4, 4, 1000):
            model(torch.randn(rows, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = seen(watched)
    hetero.release(model, optimizer)

    assert report.ending is ProgramEnd.SHORT and report.shortage is not None
    assert report.shortage.tier == raised.value.tier == "HBM"
    assert {"Net on HBM", "Net on HOST"} <= {name for name, _ in report.picture.by_module()}
    assert report.picture.by_use()[MemoryUse.STATES] >= 2 * sum(
        p.nbytes for p in model.parameters()
    )  # on HOST
    assert str(raised.value.needed_bytes) in report.proposal.line
    assert raised.value.advice in report.proposal.said[0]


@pytest.mark.parametrize(
    ("error", "ending", "said"),
    [
        (ValueError("wrong"), ProgramEnd.RAISED, "ValueError: wrong"),
        (SystemExit(0), ProgramEnd.ENDED, ""),
        (SystemExit(3), ProgramEnd.ENDED, "exit status 3"),
        (KeyboardInterrupt(), ProgramEnd.SIGNAL, "SIGINT"),
        (MemoryError("no room"), ProgramEnd.SHORT, "MemoryError: no room"),
        (torch.OutOfMemoryError("CUDA out of memory."), ProgramEnd.SHORT, "CUDA out of memory"),
    ],
)
def test_every_end_has_a_page_and_goes_on_as_it_was(
    error: BaseException, ending: ProgramEnd, said: str, page: Path
) -> None:
    with pytest.raises(type(error)) as raised, hetero.watch(page) as watched:
        raise error

    assert raised.value is error
    assert seen(watched).ending is ending and said in seen(watched).said
    assert seen(watched).proposal.said == ("the program called no module with parameters",)
    assert "<!doctype html>" in page.read_text()


def test_a_page_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with hetero.watch(tmp_path / "file" / "page.html"):
        pass

    assert "no page was written: DiskWriteError" in capsys.readouterr().err


# -- signals -------------------------------------------------------------------------------------


def in_a_fork(program: Callable[[], None]) -> int:
    """Return the wait status of a forked process that runs a program."""
    pid = os.fork()
    if pid == 0:
        try:
            program()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_process_that_sigterm_ends_leaves_its_page(page: Path) -> None:
    class Killed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if len(x) == 9 and not x.is_meta:
                os.kill(os.getpid(), signal.SIGTERM)
            return x

    def program() -> None:
        with hetero.watch(page):
            train(Killed())

    status = in_a_fork(program)

    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    text = page.read_text()
    assert "was ended by a signal" in text and "SIGTERM" in text
    assert "in forward" in text and "aten.relu" in text
    assert "model, optimizer = hetero.prepare(" in text  # the rehearsal had its ten seconds


def test_a_forked_worker_that_is_ended_writes_no_page(page: Path) -> None:
    def program() -> None:
        with hetero.watch(page):
            inner = in_a_fork(lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert os.WTERMSIG(inner) == signal.SIGTERM
            assert not page.exists()

    assert in_a_fork(program) == 0
    assert page.exists()


def test_a_fork_that_goes_on_to_the_end_writes_no_page(page: Path) -> None:
    def program() -> None:
        with hetero.watch(page):
            pid = os.fork()
            if pid:  # the parent ends its block after the child has ended its own
                assert os.waitpid(pid, 0)[1] == 0
                assert not page.exists()
        if pid == 0:
            os._exit(0)

    assert in_a_fork(program) == 0
    assert page.exists()


def test_a_handler_of_the_programs_is_called_and_comes_back(page: Path) -> None:
    asked: list[int] = []

    def handler(number: int, frame: object) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with hetero.watch(page) as watched:
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked == [signal.SIGTERM]
            assert not page.exists()
        assert signal.getsignal(signal.SIGTERM) is handler
        with hetero.watch(page):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the program's last word
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)

    assert seen(watched).ending is ProgramEnd.SIGNAL and seen(watched).said == "SIGTERM"


# -- the rehearsal -------------------------------------------------------------------------------


def test_the_proposed_settings_train_the_program(page: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net(width=64)
    twin = copy.deepcopy(model)
    with hetero.watch(page, device="cpu:sim", hbm="400KiB") as watched:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model.eval()(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    line = seen(watched).proposal.line
    assert "hbm='400KiB'" in line and line in page.read_text().replace("&#39;", "'")
    found = {"model": twin, "optimizer": torch.optim.AdamW(twin.parameters())}
    exec(line, {"hetero": hetero}, found)
    ours, steps = found["model"], found["optimizer"]
    for _ in range(3):
        ours.eval()(torch.ones(32, 64)).sum().backward()
        steps.step()
        steps.zero_grad()

    assert hetero.status(ours).mode == "paged"
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.state_dict().values(), model.state_dict().values(), strict=True)
    )
    hetero.release(ours, steps)


def test_a_model_that_the_program_dropped_is_rehearsed(page: Path) -> None:
    with hetero.watch(page) as watched:
        train(Net(), steps=2)

    assert seen(watched).proposal.line


def on_a_cpu(page: Path) -> tuple[Report, Net]:
    """Watch a program on a CPU; return what was seen, and a model like the program's."""
    model = Net(width=256)
    twin = copy.deepcopy(model)
    with hetero.watch(page) as watched:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(32, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen(watched), twin


def pasted(line: str, model: nn.Module) -> hetero.Status:
    """Run a proposed line, and a step; return the status of the model."""
    found = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(line, {"hetero": hetero}, found)
    found["model"](torch.ones(32, 256)).sum().backward()
    found["optimizer"].step()
    status = hetero.status(found["model"])
    hetero.release(found["model"], found["optimizer"])
    return status


def test_where_ram_has_room_a_proposal_names_no_drive(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report, twin = on_a_cpu(page)

    assert "nvme=" not in report.proposal.line and "host=" not in report.proposal.line
    assert pasted(report.proposal.line, twin).mode == "resident"


def test_where_ram_is_too_small_a_proposal_says_to_make_the_directory_first(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(face, "host_limit", lambda: HostLimit(2**10, "a test"))
    report, twin = on_a_cpu(page)
    line = report.proposal.line

    assert f"nvme=({proposal.DRIVE!r},)" in line
    assert f"first make the directory {proposal.DRIVE}" in report.proposal.said[-1]
    (tmp_path / proposal.DRIVE).mkdir()
    assert pasted(line, twin).written_bytes > 0


def test_a_program_that_ran_out_of_ram_begins_with_a_drive() -> None:
    had = proposal.ProgramMemory(torch.device("cpu"), 2**30, 2**34, None)
    (only,) = proposal.ways_to_run(had, hetero.Config(), was_short=True)
    first, second = proposal.ways_to_run(had, hetero.Config(), was_short=False)

    assert only == second and only["nvme"] == (proposal.DRIVE,) and only["host"] == 2**29
    assert first["host"] == 2**34 and "nvme" not in first


def test_on_cuda_a_rehearsal_begins_with_what_the_program_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proposal, "accelerator_name", lambda: "NVIDIA GeForce RTX 4090")
    cut = process.Fragments(24 * 2**30, 2**30, 21 * 2**30, 0, 0, 0, 0, 0, False)
    had = proposal.ProgramMemory(torch.device("cuda", 0), 20 * 2**30, 2**36, cut)
    begun = proposal.settings_for(had, hetero.Config())

    assert begun["profile"] == "rtx4090" and begun["device"] == "cuda"
    assert begun["hbm"] == 22 * 2**30 and begun["host"] == 2**36
    given = hetero.Config.load(hbm="8GiB", profile="h100-sxm")
    assert proposal.settings_for(had, given)["hbm"] == 8 * 2**30
    assert proposal.settings_for(had, given)["profile"] == "h100-sxm"
    monkeypatch.setattr(proposal, "accelerator_name", lambda: "NVIDIA H100 80GB HBM3")
    assert proposal.profile_of(had.place) == "h100-sxm"
    monkeypatch.setattr(proposal, "accelerator_name", lambda: "NVIDIA H200")
    for cores, name in ((12, "h200-16c"), (60, "h200-sxm")):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        assert proposal.profile_of(had.place) == name
    there = proposal.settings_for(had._replace(place=torch.device("cpu")), given)
    assert there.keys() == {"hbm", "profile"}


def test_a_program_that_only_evaluates_has_no_proposal(page: Path) -> None:
    model = Net()
    with hetero.watch(page) as watched, torch.no_grad():
        model(torch.ones(4, 16))

    assert "without gradients alone" in seen(watched).proposal.said[0]
    assert seen(watched).peak is not None and seen(watched).peak.has_stacks


def test_a_server_that_keeps_its_results_is_told_how_to_call_its_model(page: Path) -> None:
    model, kept = Net(), []
    with hetero.watch(page) as watched:
        for _ in range(5):
            kept.append(model(torch.ones(4, 16)))
    said = seen(watched).proposal.said[0]

    assert seen(watched).proposal.line == ""  # there is nothing to train
    assert "called Net 5 times with gradients on and never went backward" in said
    assert "torch.inference_mode()" in said and said in page.read_text()


def test_of_several_models_the_proposal_says_which_it_is_of(page: Path) -> None:
    large, small = Net(width=64), Net(width=8)
    with hetero.watch(page) as watched:
        steps = [torch.optim.AdamW(each.parameters()) for each in (large, small)]
        for _ in range(3):
            for model, optimizer in zip((large, small), steps, strict=True):
                model(torch.ones(4, next(model.parameters()).shape[1])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    assert "6 whole steps of 2 optimizers" in seen(watched).verdict
    assert seen(watched).proposal.line
    assert "of Net alone: prepare the 1 other model" in seen(watched).proposal.said[0]


def test_a_wrong_setting_is_an_error_before_the_program_runs() -> None:
    with pytest.raises(hetero.ConfigError, match="hmb"):
        hetero.watch(hmb="1GiB")


# -- CUDA's allocator ----------------------------------------------------------------------------


def snapshot() -> list[dict[str, Any]]:
    """Return segments in the form of `torch.cuda.memory_snapshot`."""

    def block(size: int, state: str) -> dict[str, Any]:
        return {"size": size, "requested_size": size, "state": state, "frames": []}

    used, free = "active_allocated", "inactive"
    return [
        {"device": 0, "blocks": [block(60, used), block(30, free), block(10, used)]},
        {"device": 0, "blocks": [block(25, free)], "is_expandable": False},
        {"device": 1, "blocks": [block(999, free)], "is_expandable": True},
    ]


def test_fragments_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = process.torch.cuda
    counts = {"all": {"current": 70, "peak": 90}}
    nested = {"allocated_bytes": counts, "reserved_bytes": {"all": {"current": 125}}}
    monkeypatch.setattr(cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(cuda, "mem_get_info", lambda place: (500, 1000))
    monkeypatch.setattr(cuda, "memory_stats", lambda place: {"num_alloc_retries": 2})
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda place: nested)
    found = process.fragments(torch.device("cuda", 0))

    assert found == process.Fragments(1000, 500, 125, 70, 30, 2, 2, 2, False)
    assert found.unused_bytes == 55
    assert process.fragments(torch.device("cpu")) is None
    monkeypatch.setattr(cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert process.fragments(torch.device("cuda", 0)) is None


def test_the_page_says_how_memory_is_cut(
    page: Path, monkeypatch: pytest.MonkeyPatch, unrehearsed: None
) -> None:
    cut = process.Fragments(1000, 500, 125, 70, 30, 2, 2, 2, False)
    monkeypatch.setattr(face, "fragments", lambda place: cut)
    with hetero.watch(page) as watched:
        pass

    said = "125 B of the device; 55 B of it are in no tensor, in 2 pieces, the largest 30 B"
    assert said in page.read_text() and "expandable_segments" in page.read_text()
    assert any(said in line for line in lines(seen(watched), "page"))


# -- the command ---------------------------------------------------------------------------------


SCRIPT = """
    import sys, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(16, 8)).sum().backward()
        optimizer.step()
    print(sys.argv[1:], model[0].weight.sum().item())
    {last}
"""


def watched_script(tmp_path: Path, last: str, *options: str) -> Any:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(last=last))
    page = tmp_path / "page.html"
    given = ["watch", *options, "-o", str(page), str(script), "--lr", "3"]
    return CliRunner().invoke(main, given)


@pytest.mark.parametrize(
    ("last", "status", "ending"),
    [
        ("", 0, "ended"),
        ("sys.exit(5)", 5, "ended"),
        ("raise ValueError('<b>odd</b>')", 1, "raised"),
        (f"torch.empty({IMPOSSIBLE})", 1, "short"),
    ],
)
def test_the_command_runs_a_script_and_has_its_status(
    last: str, status: int, ending: str, tmp_path: Path
) -> None:
    done = watched_script(tmp_path, last, "--json", "--device", "cpu:sim", "--hbm", "4KiB")
    text = (tmp_path / "page.html").read_text()
    found = json.loads(done.stdout.splitlines()[-1])

    assert done.exit_code == found["exit_status"] == status, done.output
    assert found["ending"] == ending and found["steps"] == 3
    assert done.stdout.startswith("['--lr', '3'] ")
    assert found["uses"]["parameters"] == (8 * 32 + 32 + 32 * 8 + 8) * 4
    assert "hetero.prepare(model, optimizer" in found["proposal"]
    assert "<b>odd" not in text and not re.search(r"(src|href)=", text)
    if ending == "raised":
        trace = done.stderr[done.stderr.index("Traceback") :]
        assert "runpy" not in trace and "hetero" not in trace.replace(str(tmp_path), "")
        assert "&lt;b&gt;odd&lt;/b&gt;" in text


def test_a_script_or_a_profile_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    gone = CliRunner().invoke(main, ["watch", str(tmp_path / "gone.py")])
    typo = watched_script(tmp_path, "", "--hbm", "much")

    assert gone.exit_code == 2 and "there is no script" in gone.output
    assert typo.exit_code == 2 and "hbm" in typo.output
    assert not (tmp_path / "page.html").exists()


def test_an_observer_that_was_removed_tells_nothing() -> None:
    observer = Observer()
    observer.install()
    kept = nn.Module.__call__  # as code that patches torch might
    observer.remove()
    kept(nn.Linear(2, 2), torch.ones(1, 2))

    assert observer.program.models() == []


LIMITED = """
    import resource, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(64, 256)
    for step in range(40):
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 2:  # the threads' own memory is there by now
            now = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
            limit = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (now + 512 * 2**20, limit))
        if step >= 2:
            batch = torch.cat([batch, batch])
"""


@pytest.mark.slow
def test_a_process_whose_memory_is_limited_shows_what_filled_it(tmp_path: Path) -> None:
    script, page = tmp_path / "limited.py", tmp_path / "page.html"
    script.write_text(textwrap.dedent(LIMITED))
    command = [sys.executable, "-m", "hetero", "watch", "--json", "-o", str(page), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])

    assert done.returncode == 1, done.stderr
    assert found["ending"] == "short" and "can't allocate memory" in found["said"]
    assert sum(found["uses"].values()) > 128 * 2**20
    assert max(found["uses"], key=found["uses"].get) in ("activations", "other", "workspaces")
    assert "limited.py:" in page.read_text()
