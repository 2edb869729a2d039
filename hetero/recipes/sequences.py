"""Token sequences to learn from: packed text, answers to prompts, batches in a seeded order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError

from hetero.errors import ConfigError
from hetero.recipes.text import Batch, Row, readable

IGNORED = -100  # label of a position without a loss
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Template for a tokenizer without one; it is exported with the tokenizer."""
Encode = Callable[[str], list[int]]


class Tokens(NamedTuple):
    """One sequence; int64 [tokens] each."""

    ids: torch.Tensor
    labels: torch.Tensor


def packed(documents: Iterable[Sequence[int]], eos: int, length: int) -> list[Tokens]:
    """Concatenate documents, ``eos`` after each, and cut them into blocks of ``length`` tokens.

    Blocks have no padding; the tokens of an incomplete last block are dropped.
    """
    stream = torch.tensor([*chain.from_iterable((*ids, eos) for ids in documents)])
    blocks = stream[: len(stream) // length * length].view(-1, length)
    return [Tokens(block, block) for block in blocks]


def answered(row: Row, tokenizer: Any, encode: Encode, length: int) -> Tokens | None:
    """Return a prompt with its completion, or a conversation; only answers have labels.

    It is cut to ``length`` tokens; None if no token of an answer is left.
    """
    ids, learned = (
        conversation(row["messages"], tokenizer)
        if "messages" in row
        else completion(row, tokenizer, encode)
    )
    found = torch.tensor(ids[:length], dtype=torch.long)
    labels = torch.where(torch.tensor(learned[:length], dtype=torch.bool), found, IGNORED)
    return Tokens(found, labels) if bool((labels[1:] != IGNORED).any()) else None


def completion(row: Row, tokenizer: Any, encode: Encode) -> tuple[list[int], list[bool]]:
    """Return the tokens of a prompt and its completion, and which are the completion's."""
    missing = [key for key in ("prompt", "completion") if not isinstance(row.get(key), str)]
    if missing:
        raise ConfigError(
            f"a row has {', '.join(map(str, row))[:200]} and no {missing[0]!r} that is a text",
            advice='give rows as {"prompt": "...", "completion": "..."} or {"messages": [...]}',
        )
    prompt, said = encode(row["prompt"]), [*encode(row["completion"]), tokenizer.eos_token_id]
    return prompt + said, [False] * len(prompt) + [True] * len(said)


def conversation(messages: Sequence[Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them are the assistant's."""
    check_messages(messages)
    ids: list[int] = []
    learned: list[bool] = []
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        before = templated(tokenizer, messages[: number - 1], answer=True)
        upto = templated(tokenizer, messages[:number], answer=False)
        if before[: len(ids)] != ids or upto[: len(before)] != before:
            raise ConfigError(
                "the tokenizer's chat template changes earlier messages with every new one",
                advice="give rows of one exchange each, or as prompt and completion",
            )
        learned += [False] * (len(before) - len(ids)) + [True] * (len(upto) - len(before))
        ids = upto
    return ids, learned


def check_messages(messages: Any) -> None:
    """Raise ConfigError unless this is a list of messages, each with a role."""
    rows = messages if isinstance(messages, (list, tuple)) else [None]
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in rows):
        raise ConfigError(
            "a row's messages are no list of objects with a role",
            advice='give rows as {"messages": [{"role": "user", "content": "..."}, ...]}',
        )


def templated(tokenizer: Any, messages: Sequence[Any], *, answer: bool) -> list[int]:
    """Return the tokens of messages in the tokenizer's template, by default `CHAT`."""
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = CHAT
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer
        )
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the tokenizer's chat template refuses a conversation: {str(error)[:300]}",
            advice="give rows that it takes: every message with a role and a content that is text",
        ) from error
    ids: list[int] = tokenizer(readable(text), add_special_tokens=False)["input_ids"]
    return ids


def together(sequences: Sequence[Tokens], pad: int) -> Batch:
    """Return sequences as one batch, int64 [samples, tokens] each, padded to the longest."""
    ids, labels = ([s[i] for s in sequences] for i in (0, 1))
    padded = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": padded(ids, batch_first=True, padding_value=pad),
        "labels": padded(labels, batch_first=True, padding_value=IGNORED),
    }
    if len({len(each) for each in ids}) > 1:
        ones = [torch.ones_like(each) for each in ids]
        batch["attention_mask"] = padded(ones, batch_first=True, padding_value=0)
    return batch


class Shuffled:
    """Yields batches without end: all sequences in a random order, then in another, and so on.

    The same seed yields the same batches; the global generator is not touched. The position is the
    number of sequences seen, which a checkpoint keeps.
    """

    def __init__(self, sequences: Sequence[Tokens], *, batch: int, pad: int, seed: int) -> None:
        self._sequences = sequences
        self._batch = batch
        self._pad = pad
        self._seed = seed
        self._seen = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def __next__(self) -> Batch:
        chosen = [self._sequence(self._seen + i) for i in range(self._batch)]
        self._seen += self._batch
        return together(chosen, self._pad)

    def _sequence(self, number: int) -> Tokens:
        epoch, at = divmod(number, len(self._sequences))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(len(self._sequences), generator=generator)
            self._order = (epoch, order.tolist())
        return self._sequences[self._order[1][at]]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position; ValueError unless it is a count."""
        seen = state["seen"]
        if type(seen) is not int or seen < 0:
            raise ValueError(f"{seen!r} sequences were seen")
        self._seen = seen
