"""Transformers' Trainer under a byte budget: python examples/trainer.py [STEPS]

Two words are new: hetero.trainer(...) around the class, and hetero=... among its arguments.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hetero

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH = 32


def main(steps: int, folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    blocks = TEXT[: len(TEXT) // LENGTH * LENGTH].view(-1, LENGTH)

    on_gpu = torch.cuda.is_available()
    trainer = hetero.trainer(Trainer)(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=3,
            use_cpu=not on_gpu,
            report_to=[],
        ),
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        hetero={"device": "cuda" if on_gpu else "cpu:sim", "hbm": "6MB"},
    )
    trainer.train()

    tiers = hetero.status(model).tiers
    print(f"HBM held {tiers['HBM']['peak']:,} of {tiers['HBM']['budget']:,} bytes")
    trainer.save_model(f"{folder}/model")  # what from_pretrained loads
    print(sorted(path.name for path in Path(folder, "model").iterdir()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, folder)
