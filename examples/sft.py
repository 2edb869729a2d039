"""Supervised fine-tuning with TRL under a byte budget: python examples/sft.py [STEPS]

A small Llama with random weights learns to say which file of this repository a line is from. The
same from the command line: hetero train --task sft --model DIRECTORY --data rows.jsonl
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import hetero

HERE = Path(__file__).parent


def rows() -> Dataset:
    files = sorted(HERE.glob("*.py"))
    lines = [(line, file.name) for file in files for line in file.read_text().splitlines() if line]
    return Dataset.from_list([{"prompt": line, "completion": f" {name}"} for line, name in lines])


def main(steps: int, folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    config = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)

    on_gpu = torch.cuda.is_available()
    trainer = hetero.trainer(SFTTrainer)(
        model=model,
        args=SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            max_length=48,
            learning_rate=3e-3,
            logging_steps=3,
            bf16=False,
            use_cpu=not on_gpu,
            report_to=[],
        ),
        train_dataset=rows(),
        processing_class=tokenizer,
        hetero={"device": "cuda" if on_gpu else "cpu:sim", "hbm": "32MB"},
    )
    trainer.train()

    tiers = hetero.status(model).tiers
    print(f"HBM held {tiers['HBM']['peak']:,} of {tiers['HBM']['budget']:,} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, folder)
