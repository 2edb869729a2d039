"""BERT learns to fill in masked bytes, in a plain loop: python examples/bert_masked_lm.py [STEPS]

A small BERT with random weights reads this repository's license; 15 % of its bytes are hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import hetero

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
MASK, VOCABULARY = 256, 257
LENGTH, BATCH = 32, 4


def masked() -> dict[str, torch.Tensor]:
    """Return a batch of pieces of the text in which some bytes are to be guessed."""
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1))
    labels = TEXT[starts + torch.arange(LENGTH)]
    hidden = torch.rand(labels.shape) < 0.15
    return {
        "input_ids": labels.masked_fill(hidden, MASK),
        "labels": labels.masked_fill(~hidden, -100),  # no loss where nothing is hidden
    }


def main(steps: int) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    model, optimizer = hetero.prepare(model, optimizer, device=device, hbm="6MB")  # the one line

    place = "cuda" if device == "cuda" else "cpu"
    for step in range(steps):
        loss = model(**{name: t.to(place) for name, t in masked().items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")

    status = hetero.status(model)
    print(f"HBM held {status.tiers['HBM']['peak']:,} of {status.tiers['HBM']['budget']:,} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
