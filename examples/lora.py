"""Adapters of PEFT on a frozen model under a byte budget: python examples/lora.py [STEPS]

The frozen weights are fetched when they are needed and never written; adapters alone have states.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hetero

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH, BATCH = 32, 4


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))


def main(steps: int, folder: str) -> None:
    model = get_peft_model(base(), LoraConfig(r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    model, optimizer = hetero.prepare(model, optimizer, device=device, hbm="6MB")  # the one line

    place = "cuda" if device == "cuda" else "cpu"
    for step in range(steps):
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1))
        batch = TEXT[starts + torch.arange(LENGTH)].to(place)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")

    model.save_pretrained(folder)  # the adapters, as PEFT loads them
    again = PeftModel.from_pretrained(base(), folder)
    same = all(torch.equal(v, again.state_dict()[k].to(v)) for k, v in model.state_dict().items())
    print(f"adapters in {sum(f.stat().st_size for f in Path(folder).iterdir()):,} bytes;", end=" ")
    print("they load to the same model" if same else "they load to another model")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, folder)
