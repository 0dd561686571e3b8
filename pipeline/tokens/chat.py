"""Conversations as rows: what a chat template makes of them, the assistant's tokens marked.

A row holds one conversation, or one prompt that the teacher is to complete, and padding behind it.
A token that does not count (it is not the assistant's) is kept in stage 1 as -1 - id; the store
has an array ``counted`` instead. Position 0 never counts: nothing predicts it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.tokens.tokenizer import Ids, backend
from shards.errors import GdistillError, first_line


def encode_chats(tokenizer: PreTrainedTokenizerBase, padding: int, row_length: int, documents: list[str]) -> list[Ids]:
    """Marked rows [L] of documents of a ``chat:`` source: ``[place, messages or prompt]`` in JSON.

    Behind a prompt the positions count, which are the teacher's to fill.

    Raises:
        GdistillError: For a template that fails, or more tokens than a row has: names file and
            line.
    """
    rows = []
    for document in documents:
        where, value = json.loads(document)
        is_prompt = isinstance(value, str) or value[-1]["role"] != "assistant"
        ids = _prompt(tokenizer, where, value) if is_prompt else _marked(tokenizer, where, value)
        if len(ids) > (most := row_length - is_prompt):
            what = f"the {'prompt' if is_prompt else 'conversation'} is longer than a row"
            got, expected = f"{len(ids):,} tokens", f"at most {most:,}"
            remedy = "choose a greater --row-length, or leave the line out"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        row = np.full(row_length, padding if is_prompt else ~padding, np.int32)
        row[: len(ids)] = ids
        row[0] = min(row[0], ~row[0])
        rows.append(row)
    return rows


def _prompt(tokenizer: PreTrainedTokenizerBase, where: str, value: Any) -> Ids:
    """Ids of a text, begun as the tokenizer begins one, or of messages and the answer's opening."""
    if isinstance(value, str):
        framed: Any = tokenizer("")["input_ids"]
        ids = [*framed[:1], *tokenizer(value, add_special_tokens=False)["input_ids"]]
    else:
        text = _render(tokenizer, where, value, add_generation_prompt=True)
        ids = backend(tokenizer).encode(text, add_special_tokens=False).ids
    return ~np.array(ids, np.int32)


def _marked(tokenizer: PreTrainedTokenizerBase, where: str, messages: Any) -> Ids:
    """A whole conversation; what the template writes for the assistant's turns counts."""
    text, spans = _render(tokenizer, where, messages), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, where, messages[:index], add_generation_prompt=True)
        behind = _render(tokenizer, where, messages[: index + 1])
        if not (behind.startswith(before) and text.startswith(behind)):
            what, where = "the chat template rewrites earlier turns", f"{where}, message {index}"
            expected = "each turn's text behind that of the turns before it"
            remedy = "split the conversation into one line per answer, or use a plainer template"
            raise GdistillError(what, where=where, expected=expected, remedy=remedy)
        spans.append((len(before), len(behind)))
    encoding = backend(tokenizer).encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    counted = np.zeros(len(starts), bool)
    for begin, end in spans:  # the answer's first token may begin with the template's last space
        counted |= (ends > begin) & (starts < end)
    ids = np.array(encoding.ids, np.int32)
    return np.where(counted, ids, ~ids)


def _render(tokenizer: PreTrainedTokenizerBase, where: str, messages: list[Any], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # whatever a template raises
        what, got = "the chat template fails", first_line(error)
        remedy = "give a --tokenizer with a chat_template that takes these roles"
        raise GdistillError(what, where=where, got=got, remedy=remedy) from error
