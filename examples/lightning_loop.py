"""Lightning's Trainer under a byte budget: python examples/lightning_loop.py [STEPS]

strategy=HeteroStrategy(...) is the one argument that is new; ckpt_path= goes on from a checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import hetero
from hetero.integrations.lightning import HeteroStrategy

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH = 32


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
        self.net = LlamaForCausalLM(config).train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        if self.global_step % 5 == 0:
            print(f"step {self.global_step:3}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(steps: int, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(
        strategy=HeteroStrategy(device="cuda" if on_gpu else "cpu:sim", hbm="6MB"),
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,  # or several, with HeteroStrategy(mesh="world", ...): docs/ranks.md
        max_steps=steps,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    blocks = TEXT[: len(TEXT) // LENGTH * LENGTH].view(-1, LENGTH)
    model = Module()
    trainer.fit(model, DataLoader(blocks, batch_size=4))

    trainer.save_checkpoint(f"{folder}/last.ckpt")  # a directory: fit(..., ckpt_path=...)
    tiers = hetero.status(model).tiers
    print(f"HBM held {tiers['HBM']['peak']:,} of {tiers['HBM']['budget']:,} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, folder)
