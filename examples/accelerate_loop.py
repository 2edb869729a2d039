"""A loop of accelerate under a byte budget: python examples/accelerate_loop.py [STEPS]

HeteroAccelerator in place of Accelerator; every other line is as it was.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import hetero
from hetero.integrations.accelerate import HeteroAccelerator, HeteroPlugin

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH = 32


def main(steps: int, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    plugin = HeteroPlugin(device="cuda" if on_gpu else "cpu:sim", hbm="6MB")
    accelerator = HeteroAccelerator(
        hetero_plugin=plugin, gradient_accumulation_steps=2, cpu=not on_gpu
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    blocks = TEXT[: len(TEXT) // LENGTH * LENGTH].view(-1, LENGTH)
    loader = DataLoader(TensorDataset(blocks), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for step, (batch,) in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            accelerator.print(f"step {step:3}  loss {loss.item():.4f}")

    accelerator.save_state(folder)  # load_state goes on from here
    tiers = hetero.status(model).tiers
    print(f"HBM held {tiers['HBM']['peak']:,} of {tiers['HBM']['budget']:,} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, folder)
