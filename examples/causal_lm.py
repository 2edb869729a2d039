"""A causal language model of transformers in a plain loop: python examples/causal_lm.py [STEPS]

A small Llama with random weights learns this repository's license, one token a byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import hetero

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
LENGTH, BATCH = 32, 4


def blocks(tokenizer: ByT5Tokenizer) -> torch.Tensor:
    """Return the text as int64 [blocks, LENGTH]."""
    ids = torch.tensor(tokenizer(TEXT).input_ids)
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def main(steps: int) -> None:
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    model, optimizer = hetero.prepare(model, optimizer, device=device, hbm="6MB")  # the one line

    place = "cuda" if device == "cuda" else "cpu"
    data = blocks(tokenizer)
    for step in range(steps):
        batch = data[torch.randint(len(data), (BATCH,))].to(place)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")

    tiers = hetero.status(model).tiers
    states = 16 * sum(p.numel() for p in model.parameters())
    print(f"HBM held {tiers['HBM']['peak']:,} of {tiers['HBM']['budget']:,} bytes", end=" ")
    print(f"for {states:,} bytes of states, and activations")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
