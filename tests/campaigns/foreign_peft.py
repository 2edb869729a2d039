"""Adapters of PEFT that are more than a Linear beside a Linear."""

from __future__ import annotations

import copy
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import hetero
from hetero.errors import ConfigError, StateError
from tests.campaigns.harness import Case, Net, Side, loss_of_tokens

D = 16


class Experts(nn.Module):
    """Experts as gpt-oss and Qwen's have them: stacked into two parameters of three dimensions."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.gate = nn.Linear(D, n, bias=False)
        self.up_proj = nn.Parameter(0.1 * torch.randn(n, D, 2 * D))
        self.down_proj = nn.Parameter(0.1 * torch.randn(n, 2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(self.norm(x)).softmax(-1)
        inner = torch.relu(torch.einsum("bti,eih->bteh", x, self.up_proj))
        return x + torch.einsum("bteh,ehi,bte->bti", inner, self.down_proj, weights)


def trained(side: Side, config: LoraConfig, block: type[nn.Module]) -> None:
    """Train adapters alone, then look at the model without them and with them merged."""
    torch.manual_seed(0)
    model = get_peft_model(Net(4, d=D, block=block), config)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    model, optimizer = side.prepare(model, optimizer)
    side.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        side.record("evaluated", loss_of_tokens(model, 99))
        with model.disable_adapter():
            side.record("without adapters", loss_of_tokens(model, 99))
        model.merge_adapter()
        side.record("merged", loss_of_tokens(model, 99))
        model.unmerge_adapter()
    model.train()
    side.train(model, optimizer, steps=2)
    assert side.is_plain or hetero.status(model).mode == "paged"


def lora_by_target_parameters(side: Side) -> None:
    """PEFT puts a parametrization on the module for the length of each forward."""
    names = ["up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=["gate", "head"], target_parameters=names)
    trained(side, config, Experts)


class Attends(nn.Module):
    """A block of torch's own attention, as open_clip's and the first ViTs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


def lora_on_multihead_attention(side: Side) -> None:
    """PEFT registers other frozen weights whenever modules are listed, and in each forward.

    What it computes for them drifts by rounding, in each forward: so it does here.
    """
    trained(side, LoraConfig(r=2, target_modules=["attn", "up", "head"]), Attends)


def all_its_parameters_are_given_to_the_optimizer(side: Side) -> None:
    """Those that were frozen when the optimizer was built are no parameters of the model now."""
    torch.manual_seed(0)
    model = get_peft_model(
        Net(4, d=D, block=Attends), LoraConfig(r=2, target_modules=["attn", "up"])
    )
    model, optimizer = side.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    side.train(model, optimizer, steps=3)
    if side.is_plain:
        saved = model.state_dict(), optimizer.state_dict()
        saved = copy.deepcopy(saved)
        side.train(model, optimizer, steps=2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            hetero.save_checkpoint(folder, model, optimizer)
            side.train(model, optimizer, steps=2)
            hetero.load_checkpoint(folder, model, optimizer)
    side.train(model, optimizer, steps=2)
    if not side.is_plain:
        model, optimizer = hetero.release(model, optimizer)
    side.train(model, optimizer, steps=2)


SIM = {"device": "cpu:sim", "hbm": 185_000}
WIDER = {**SIM, "hbm": 110_000}
CASES = [
    Case(lora_by_target_parameters, SIM),
    Case(lora_by_target_parameters, {**SIM, "hbm": 74_000, "activations": "recompute"}),
    Case(lora_by_target_parameters, {**SIM, "hbm": 212_000, "units": ["*gate", "*embed", "*head"]}),
    Case(lora_on_multihead_attention, WIDER),
    Case(lora_on_multihead_attention, {**WIDER, "activations": "recompute"}, (StateError, "anew")),
    Case(lora_on_multihead_attention, {**WIDER, "micro_batch": 1}, (StateError, "anew")),
    Case(lora_on_multihead_attention, {**SIM, "precision": "bf16"}, (ConfigError, "made anew")),
    Case(all_its_parameters_are_given_to_the_optimizer, WIDER),
]
