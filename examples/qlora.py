"""QLoRA under a byte budget: python examples/qlora.py [DIRECTORY OF A LLAMA]

A frozen base costs half a byte a parameter in RAM and on the link; an adapter of PEFT trains on it.
Without a directory the base is a small Llama with random weights, and the text is this repository's
license, byte by byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hetero

TEXT = (Path(__file__).parent.parent / "LICENSE").read_bytes()
STEPS, LENGTH = 15, 32


def base(directory: str | None) -> torch.nn.Module:
    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory)  # not quantised: hetero does that
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def batch(step: int, vocab: int, place: str) -> torch.Tensor:
    """Return two pieces of the text, one token a byte."""
    starts = torch.randint(0, len(TEXT) - LENGTH, (2,), generator=torch.manual_seed(step)).tolist()
    rows = [list(TEXT[start : start + LENGTH]) for start in starts]
    return torch.tensor(rows, device=place) % vocab


def main() -> None:
    # 1. the model as anybody makes it: a base, frozen by PEFT, and an adapter that trains
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base(sys.argv[1] if len(sys.argv) > 1 else None), lora)
    vocab = model.config.vocab_size
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    # 2. one line: frozen matrices wait as 4-bit NormalFloats, and compute in their own dtype
    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    hbm = "16GiB" if device == "cuda" else "6MB"
    model, optimizer = hetero.prepare(model, optimizer, device=device, hbm=hbm, frozen="nf4")

    # 3. the loop as it was
    place = "cuda" if device == "cuda" else "cpu"
    for step in range(STEPS):
        tokens = batch(step % 3, vocab, place)  # the same few pieces: it learns them by heart
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0 or step == STEPS - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")

    # 4. what it cost
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    status = hetero.status(model)
    at_rest = status.tiers["HOST"]["param"] - 4 * trained
    print(f"{frozen:,} frozen parameters at rest: {at_rest / frozen:.3f} bytes each")
    print(f"HBM peak {status.tiers['HBM']['peak']:,} of {status.tiers['HBM']['budget']:,} bytes")
    print(f"last step: {status.h2d_bytes:,} bytes up")
    hetero.release(model, optimizer)  # plain torch again: merge_and_unload() and the like


if __name__ == "__main__":
    main()
