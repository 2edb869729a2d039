"""Text from a model that is larger than the device: python examples/generate.py

A small Llama is saved to a temporary directory, and loaded into a third of the bytes that it has.
Name a directory of your own, or a model on the Hub, for a real one.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import hetero


def saved(directory: str) -> int:
    """Save a Llama of 13 million parameters; returns its bytes."""
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=16,
        num_attention_heads=4,
        vocab_size=512,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return sum(p.nbytes for p in model.parameters())


def generated(model: torch.nn.Module, place: str) -> torch.Tensor:
    prompt = torch.arange(8, device=place).unsqueeze(0)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    place = "cuda" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        n_bytes = saved(directory)
        model = hetero.from_pretrained(directory, device=device, hbm=n_bytes // 3)  # the one line
        stock = transformers.LlamaForCausalLM.from_pretrained(directory).to(place)
        same = torch.equal(generated(model, place), generated(stock, place))

    status = hetero.status(model)
    print(f"{'the same' if same else 'other'} tokens as without a budget")
    print(f"the model has {n_bytes} bytes, the device held {status.tiers['HBM']['peak']} at most")
    print(f"the last token moved {status.h2d_bytes} bytes, with {status.misses} misses")


if __name__ == "__main__":
    main()
