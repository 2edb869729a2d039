"""Models cut into stages: the stages in their order are the model, and train as it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import hetero
from hetero.errors import ConfigError, RankLost, StateError
from hetero.parallel.anatomy import Call, Products, examine, result_of
from hetero.parallel.splitting import RankStages, call_of, kind_of, ranks_of, sample_of, split
from hetero.parallel.stages import Cut, ModelStage, cut_model
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.rehearse.named import machine
from hetero.rehearse.split import MachineClock
from hetero.status import status
from hetero.testing.ranks import Died, outcomes, run_ranks

WORDS, WIDTH, BLOCKS, LENGTH = 64, 32, 6, 16
MICRO_BATCHES, STEPS = 4, 3
HBM = 130 * 1024
"""Of a rank, whose weights are of 230 KiB on two."""


SETTINGS = {
    "device": "cpu:sim",
    "chunk_bytes": 1024,
    "timeout_seconds": 20,
    "activations": "offload",
}


def gpt(checkpoint_blocks: bool = True) -> nn.Module:
    return GPT(
        GPTConfig(
            vocab=WORDS,
            width=WIDTH,
            layers=BLOCKS,
            heads=4,
            context=LENGTH,
            checkpoint_blocks=checkpoint_blocks,
        )
    )


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """In fp32, as models are made: torch multiplies by experts without bytes in bf16 alone."""
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=4,
        **{"n_positions": LENGTH, "tie_word_embeddings": False, **ends, **none},
    )
    return GPT2LMHeadModel(config)


def sequential() -> nn.Module:
    block = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
    blocks = (nn.TransformerEncoderLayer(WIDTH, 4, **block) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


MODELS = {each.__name__: each for each in (gpt, llama, mixtral, gpt2, sequential)}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def words(number: int, length: int = 4) -> torch.Tensor:
    torch.manual_seed(100 + number)
    return torch.randint(0, WORDS, (MICRO_BATCHES, length))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def all_stages(model: nn.Module, n_stages: int, batch: Any = None) -> tuple[Cut, list[ModelStage]]:
    """Cut a model in one process, which has all stages."""
    bound = call_of(model)
    anatomy = examine(model, sample_of(model, batch, bound), Products())
    found = cut_model(anatomy, range(n_stages), is_timed=False)
    return found, [ModelStage(model, anatomy, each.own, bound) for each in found.stages]


def in_order(stages: list[ModelStage], x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    for stage in stages:
        x = stage(x, **kwargs)
    return x


# -- the stages in their order -------------------------------------------------------------------


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize(  # of seven stages the last one has what comes after the blocks
    ("kind", "n_stages"), [("gpt", 2), ("gpt", 7), ("llama", 7), ("gpt2", 3), ("sequential", 8)]
)
def test_stages_in_order_have_the_bits_of_the_model(kind: str, n_stages: int) -> None:
    model = made(kind)
    whole, ids = copy.deepcopy(model), words(0)
    _, stages = all_stages(model, n_stages, ids)

    mine, theirs = in_order(stages, ids), result_of(whole(ids, **call_of(whole)))
    for each in (mine, theirs):
        loss_of(each, ids).backward()

    assert torch.equal(mine, theirs)
    found = {s.in_whole(n): p.grad for s in stages for n, p in s.named_parameters()}
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(found[n], p.grad) for n, p in whole.named_parameters())


def test_a_stage_keeps_no_module_of_another_one() -> None:
    model = made("llama")
    _, (first, last) = all_stages(model, 2)

    names = [{n.removeprefix("model.") for n in s.state_dict()} for s in (first, last)]

    assert not names[0] & names[1]
    assert names[0] | names[1] == set(model.state_dict())
    assert dict(last.named_parameters())["model.lm_head.weight"] is model.lm_head.weight


def test_a_mask_for_all_stages_is_passed_by_name() -> None:
    model = made("llama")
    whole, ids = copy.deepcopy(model), words(0)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    _, stages = all_stages(model, 3, {"input_ids": ids, "attention_mask": mask})

    mine = in_order(stages, ids, attention_mask=mask)

    assert torch.equal(mine, whole(ids, attention_mask=mask, use_cache=False).logits)
    assert not torch.equal(mine, whole(ids, use_cache=False).logits)


def test_dropout_outside_of_blocks_draws_once() -> None:
    model = made("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    whole, ids = copy.deepcopy(model), words(0)
    _, stages = all_stages(model, 3)

    torch.manual_seed(5)
    mine = in_order(stages, ids)
    torch.manual_seed(5)

    assert torch.equal(mine, whole(ids, use_cache=False).logits)


# -- the cut -------------------------------------------------------------------------------------


def test_a_cut_prints_as_a_table_with_embedding_and_head_counted() -> None:
    found, _ = all_stages(made("llama"), 3)
    lines = str(found).splitlines()

    assert lines[0].split() == ["stage", "rank", "modules", "Gflop", "weights"]
    assert "model.embed_tokens, model.layers.0-1" in lines[1]
    assert "model.layers.4-5, model.norm, lm_head" in lines[3]
    assert f"{found.imbalance:.1%} more than the mean" in lines[4]
    model = made("llama")
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert sum(stage.weight.n_bytes for stage in found.stages) == n_bytes


def test_on_the_clock_of_a_machine_the_head_weighs_in_seconds() -> None:
    model = made("llama")
    clock = MachineClock(machine(hetero.Config.load(profile="h100-sxm")))
    call = sample_of(model, None, call_of(model))

    weights = examine(model, call, clock, lambda y: y.logits.square().mean()).weights

    blocks = [weights[f"model.layers.{n}"].seconds for n in range(BLOCKS)]
    assert all(seconds == pytest.approx(blocks[0]) for seconds in blocks)
    assert 0 < weights["lm_head"].seconds < blocks[0]
    assert weights["loss"].seconds > 0


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("GPipe", [0, 1, 2]),
        ("Interleaved1F1B", [0, 1, 2] * 2),
        ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_ranks_have_the_stages_that_a_schedule_wants(schedule: str, ranks: list[int]) -> None:
    assert ranks_of(kind_of(schedule), 3, None) == ranks


class Scaled(nn.Module):
    """A block that adds less than what its first part returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        return x + self.second(x)


class Remembers(Scaled):
    """A block whose second part goes back to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x)
        return x + self.second(y)


class Minus(nn.Module):
    """Keeps a zero with a minus what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.weight * x.abs())


class Waisted(Scaled):
    """A block of two parts in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Minus(), Minus()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.parametrize(("block", "n_halved"), [(Waisted, 3), (Scaled, 0), (Remembers, 0)])
def test_a_block_is_cut_in_two_where_one_sum_goes_on(block: type, n_halved: int) -> None:
    model = nn.Sequential(*(block() for _ in range(4)))
    x = torch.randn(2, WIDTH)
    x[0, 0], x[1, 1] = -0.0, float("nan")

    anatomy = examine(model, Call((x,)), Products())
    n_items = 4 + n_halved
    cut = cut_model(anatomy, range(n_items), is_timed=False)
    stages = [ModelStage(model, anatomy, each.own, {}) for each in cut.stages]

    assert len(anatomy.waists) == n_halved
    mine, theirs = in_order(stages, x), model(x)
    assert torch.signbit(theirs[0, 0]) or not n_halved
    assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


# -- what is refused -----------------------------------------------------------------------------


class Chained(nn.Module):
    """A model to spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(Chained):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


class Adds(Chained):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + 1
        return self.head(x)


class Sum(nn.Linear):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + other


class TakesTwo(Chained):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sum(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


class Reverses(Chained):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class AsksItsInput(Chained):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids if ids[0, 0] else ids + 1)


class OwnParameter(Chained):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class NoList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "a skip": (Skips, "takes more than what its last block returns"),
    "arithmetic between blocks": (Adds, "not given what 'blocks.0' returns"),
    "two tensors": (TakesTwo, "more than one tensor that is computed"),
    "another order": (Reverses, "'blocks.3' is called out of order"),
    "its input": (AsksItsInput, "asks for numbers of what it is given"),
    "a parameter of its own": (OwnParameter, "a parameter 'scale' of its own"),
    "no list": (NoList, "no list of blocks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_is_no_chain_is_refused_by_what_it_does(what: str) -> None:
    make, said = REFUSED[what]
    call = Call((torch.zeros(2, 4, dtype=torch.long),))

    with pytest.raises(ConfigError, match=said) as error:
        examine(make(), call, Products())

    assert "prepare those of a rank" in error.value.advice


class Reentrant(Chained):
    """A chain whose blocks are computed again from their inputs, by torch's older way."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("n_stages", [2, 3])
def test_blocks_that_leave_no_graph_are_refused(n_stages: int) -> None:
    """Gradients would end where a checkpointed block is cut, and most weights stay as they are."""
    ids = torch.zeros(2, 4, dtype=torch.long)
    model = Reentrant()
    _, stages = all_stages(model, n_stages, ids)

    with pytest.raises(StateError, match="use_reentrant=True"):
        in_order(stages, ids)
    with torch.no_grad():
        assert torch.equal(in_order(stages, ids), model(ids))


class Sums(nn.Linear):
    """A block that leaves a number for the model's loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.apart = x.square().sum()
        return super().forward(x)


class LossOfBlocks(Chained):
    """A chain whose own loss takes what its blocks make apart from what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sums(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = super().forward(ids)
        apart = sum(block.apart for block in self.blocks if hasattr(block, "apart"))
        loss = None if labels is None else loss_of(logits, labels) + apart
        return SimpleNamespace(logits=logits, apart=(apart,), loss=loss)


def test_a_loss_of_what_blocks_make_apart_is_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    _, stages = all_stages(LossOfBlocks(), 3, ids)

    in_order(stages, ids)  # without labels, a schedule's loss takes logits
    with pytest.raises(ConfigError, match="apart from what they return"):
        in_order(stages, ids, labels=ids)


class AsksABlock(Chained):
    """A chain whose code looks at a tensor of a block, which another stage has."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.blocks[0].weight.shape[0] == WIDTH
        out: torch.Tensor = super().forward(ids)
        return out


def asks_a_block(rank: int) -> None:
    scheduled(AsksABlock(), 2, "1F1B", torch.zeros(1, 4, dtype=torch.long))


def test_a_stage_that_does_not_run_alone_is_refused_when_the_model_is_cut() -> None:
    for each in outcomes(2, asks_a_block):
        assert isinstance(each, Died) and isinstance(each.error, ConfigError), each.text
        assert "stage 1 does not run without the others" in str(each.error)


def test_the_model_that_is_spoilt_is_a_chain() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    model = Chained()

    _, stages = all_stages(model, 5, ids)

    assert torch.equal(in_order(stages, ids), model(ids))


def test_a_model_shorter_than_its_pipeline_is_refused() -> None:
    # a first block that is whole, five of two halves, and what comes after
    with pytest.raises(ConfigError, match="11 modules in a row are not cut into 13 stages"):
        all_stages(made("gpt"), 13)


def test_a_model_of_numbers_needs_a_batch() -> None:
    with pytest.raises(ConfigError, match="what a Sequential is called with"):
        all_stages(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)


# -- on several ranks ----------------------------------------------------------------------------


def scheduled(model: nn.Module, n_ranks: int, schedule: Any, batch: Any) -> RankStages:
    return split(model, {"pp": n_ranks}, schedule, batch=batch)


def stepped(found: RankStages, schedule: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    given = {"target": ids, "losses": losses} if found.is_last else {}
    schedule.step(*[ids] * found.is_first, **given)
    return losses


def in_whole(stages: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a rank's stages by their names in the whole model."""
    return {
        stage.in_whole(name): value.clone()
        for stage in stages
        for name, value in stage.state_dict().items()
    }


def trained(rank: int, n_ranks: int, kind: str, name: Any, settings: dict[str, Any]) -> Any:
    """Train this rank's stages within a budget; return weights by their names in the whole model,
    and how often they were evicted."""
    found = scheduled(made(kind), n_ranks, name, words(0)[:1])
    optimizer = torch.optim.AdamW(found.stages.parameters(), lr=1e-2)
    stages, optimizer = hetero.prepare(
        *(found.stages, optimizer),
        mesh={"pp": n_ranks},
        device="cpu:sim",
        chunk_bytes=1024,
        **{"timeout_seconds": 20, **settings},
    )
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    for number in range(STEPS):
        stepped(found, schedule, words(number))
        optimizer.step()
        optimizer.zero_grad()
    return in_whole(stages), status(stages).evictions


def trained_in_one(kind: str) -> dict[str, torch.Tensor]:
    """Train the whole model in one process of plain torch, micro-batch after micro-batch."""
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        for ids in words(number).chunk(MICRO_BATCHES):
            loss_of(result_of(model(ids, **call_of(model))), ids).backward()
        for param in model.parameters():
            param.grad.div_(MICRO_BATCHES)  # as schedules do
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def check(n_ranks: int, kind: str, name: Any, least: int = 3, **settings: Any) -> None:
    theirs = trained_in_one(kind)
    seen = set()
    given = {"hbm": HBM, **settings}
    for mine, evictions in run_ranks(n_ranks, trained, n_ranks, kind, name, given):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert evictions >= least
        seen |= mine.keys()
    assert seen == theirs.keys()


def evaluates_between(rank: int, name: str) -> bool:
    """Evaluate while gradients wait for the step; return whether they are as they were."""
    found = scheduled(made("gpt"), 2, name, words(0)[:1])
    optimizer = torch.optim.AdamW(found.stages.parameters(), lr=1e-2)
    given = {**SETTINGS, "mesh": {"pp": 2}, "hbm": 2 * HBM}
    stages, optimizer = hetero.prepare(found.stages, optimizer, **given)
    stepped(found, found.schedule(MICRO_BATCHES, loss_of), words(0))
    before = [param.grad.clone() for param in stages.parameters()]
    with torch.no_grad():
        evaluation, ids = found.evaluation(MICRO_BATCHES, loss_of), words(1)
        evaluation.eval(*[ids] * found.is_first, **({"target": ids} if found.is_last else {}))
    after = [param.grad.clone() for param in stages.parameters()]
    return all(map(torch.equal, before, after))


@pytest.mark.usefixtures("one_anatomy")
@pytest.mark.parametrize(
    "name", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.campaign(seconds=2))]
)
def test_an_evaluation_leaves_gradients_alone(name: str) -> None:
    assert all(run_ranks(2, evaluates_between, name))


def steps_twice(rank: int) -> None:
    """Zeros of `zero_grad` may stay; gradients may not."""
    found = scheduled(made("gpt"), 2, "1F1B", words(0)[:1])
    optimizer = torch.optim.SGD(found.stages.parameters(), lr=0.1)
    given = {**SETTINGS, "mesh": {"pp": 2}, "hbm": 2 * HBM}
    _, optimizer = hetero.prepare(found.stages, optimizer, **given)
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    stepped(found, schedule, words(0))
    optimizer.zero_grad(set_to_none=False)
    stepped(found, schedule, words(0))
    stepped(found, found.schedule(MICRO_BATCHES, loss_of, scale_grads=False), words(0))
    stepped(found, schedule, words(0))


@pytest.mark.usefixtures("one_anatomy")
def test_gradients_are_not_divided_by_micro_batches_twice() -> None:
    """torch's schedules would divide what waits for the optimizer's step again."""
    first, last = outcomes(2, steps_twice)
    assert isinstance(last, Died)
    assert isinstance(last.error, StateError), last.text
    assert "would divide it by the number of micro-batches a second time" in str(last.error)
    assert isinstance(first, Died)
    assert isinstance(first.error, (StateError, RankLost)), first.text


@pytest.mark.usefixtures("one_anatomy")
@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(
    ("kind", "name", "hbm"),
    [("gpt", "1F1B", HBM), ("llama", "Interleaved1F1B", HBM), ("mixtral", "1F1B", 160 * 1024)],
)
def test_split_and_prepared_stages_train_as_the_model_in_one_process(
    kind: str, name: str, hbm: int
) -> None:
    check(2, kind, name, hbm=hbm)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
def test_halves_of_blocks_train_as_the_model_in_one_process(activations: str) -> None:
    found, _ = all_stages(made("llama"), 4, words(0)[:1])
    assert any("self_attn" in name for stage in found.stages for name in stage.names)

    check(2, "llama", "Interleaved1F1B", least=0, activations=activations, hbm=3 * HBM)


@pytest.mark.slow
def test_the_stages_of_a_v_train_as_the_model_in_one_process() -> None:
    check(2, "gpt2", ScheduleZBVZeroBubble, least=0, hbm=2 * HBM)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_four_ranks_with_a_stage_each_train_as_one_process(name: str) -> None:
    check(4, "gpt", name)


# -- masters ---------------------------------------------------------------------------------------


def with_masters(rank: int, n_ranks: int, name: str) -> dict[str, torch.Tensor]:
    """Train in bf16 with fp32 masters: this rank's stages, or on one rank the whole model."""
    model, mesh = made("gpt"), {"pp": n_ranks} if n_ranks > 1 else None
    found = scheduled(model, n_ranks, name, words(0)[:1]) if n_ranks > 1 else None
    whole: Any = model if found is None else found.stages
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    settings = {**SETTINGS, "mesh": mesh, "precision": "bf16", "hbm": HBM}
    whole, optimizer = hetero.prepare(whole, optimizer, **settings)
    schedule = found.schedule(MICRO_BATCHES, loss_of) if found is not None else None
    for number in range(2):
        if found is not None:
            stepped(found, schedule, words(number))
        else:
            for ids in words(number).chunk(MICRO_BATCHES):
                (loss_of(whole(ids), ids) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    if found is None:
        return {name: value.clone() for name, value in whole.state_dict().items()}
    return {s.in_whole(n): v.clone() for s in whole for n, v in s.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_stages_with_masters_train_as_the_model_with_masters(name: str) -> None:
    # that one rank's masters have the bits of plain fp32 masters is proved in tests/equivalence
    (theirs,) = run_ranks(1, with_masters, 1, name)

    for mine in run_ranks(2, with_masters, 2, name):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


# -- tied weights --------------------------------------------------------------------------------


def test_a_second_positional_argument_is_refused() -> None:
    """A schedule would give it to the first stage alone."""
    with pytest.raises(ConfigError, match="2 positional arguments"):
        sample_of(made("gpt"), (words(0), words(0)), {})


def tied_split(rank: int, schedule: str) -> None:
    config = {"vocab": WORDS, "width": WIDTH, "layers": BLOCKS, "heads": 4, "context": LENGTH}
    split(GPT(GPTConfig(**config, tied_head=True)), {"pp": 2}, schedule)


def test_an_embedding_that_a_head_on_another_rank_uses_is_refused_on_all_ranks() -> None:
    for each in outcomes(2, tied_split, "Interleaved1F1B"):
        assert isinstance(each, Died)
        assert isinstance(each.error, ConfigError), each.text
        assert "'tokens.weight' and 'head.weight' are one weight" in str(each.error)
        assert "ranks 0 and 1" in str(each.error)


def tied_in_a_v(rank: int, is_prepared: bool) -> dict[str, torch.Tensor]:
    """Train the stages of a V, of which the first rank has embedding and head."""
    found = split(tied_model(), {"pp": 2}, "ZBVZeroBubble", batch=words(0)[:1])
    stages, optimizer = found.stages, torch.optim.AdamW(found.stages.parameters(), lr=1e-2)
    if is_prepared:
        settings = {**SETTINGS, "mesh": {"pp": 2}, "hbm": 2 * HBM}
        stages, optimizer = hetero.prepare(stages, optimizer, **settings)
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    for number in range(STEPS):
        stepped(found, schedule, words(number))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in stages.state_dict().items()}


def tied_model() -> GPT:
    torch.manual_seed(0)
    config = {"vocab": WORDS, "width": WIDTH, "layers": BLOCKS, "heads": 4, "context": LENGTH}
    return GPT(GPTConfig(**config, tied_head=True, checkpoint_blocks=False))


def gradients_in_a_v(rank: int, kind: str, is_prepared: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of two steps, the first of which came to nothing."""
    found = split(tied_model(), {"pp": 2}, kind, batch=words(0)[:1])
    stages, optimizer = found.stages, torch.optim.SGD(found.stages.parameters(), lr=0.1)
    if is_prepared:
        settings = {**SETTINGS, "mesh": {"pp": 2}, "hbm": 2 * HBM}
        stages, optimizer = hetero.prepare(stages, optimizer, **settings)
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    for number in range(2):
        optimizer.zero_grad()
        stepped(found, schedule, words(number))
    return {
        stage.in_whole(name): param.grad.clone()
        for stage in stages
        for name, param in stage.named_parameters()
    }


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("kind", ["ZBVZeroBubble", "DualPipeV"])
def test_the_gradient_of_a_tied_weight_is_the_mean_over_micro_batches(
    kind: str, is_prepared: bool
) -> None:
    model = tied_model()
    for ids in words(1):
        (loss_of(model(ids[None]), ids[None]) / MICRO_BATCHES).backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    ranks = run_ranks(2, gradients_in_a_v, kind, is_prepared)
    found = {name: grad for rank in ranks for name, grad in rank.items() if name in expected}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def both_in_a_v(rank: int) -> bool:
    plain, ours = tied_in_a_v(rank, False), tied_in_a_v(rank, True)
    if rank == 0:
        embedding, head = "0.model.tokens.weight", "1.model.head.weight"
        assert torch.equal(ours[embedding], ours[head])
    return plain.keys() == ours.keys() and all(torch.equal(plain[n], ours[n]) for n in plain)


@pytest.mark.slow
def test_a_tied_weight_whose_stages_one_rank_has_trains_as_in_plain_stages() -> None:
    assert run_ranks(2, both_in_a_v) == [True, True]
