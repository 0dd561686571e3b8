"""Rows to fill from what a user gives: a first token, prompts, or rows with open positions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from shards.errors import UsageError
from trainer.students.registry import StudentConfig


@dataclass(frozen=True)
class GivenRows:
    """Partly known rows; sample i fills row i modulo their number.

    Attributes:
        rows: Token ids of each row, the mask id where to fill.
        mask_id: The mask id.
        first_token_is_text: Whether position 0 belongs to the text (no bos stands there).
    """

    rows: tuple[tuple[int, ...], ...]
    mask_id: int
    first_token_is_text: bool = False

    def row(self, index: int) -> tuple[int, ...]:
        """What is given of sample ``index``."""
        return self.rows[index % len(self.rows)]

    def tokens(self, indices: Sequence[int], device: torch.device | str) -> Int[Tensor, "b l"]:
        """The rows of some samples, all of one length."""
        return torch.tensor([self.row(index) for index in indices], device=device)

    def filled_positions(self, index: int) -> list[int]:
        """Positions that the sampler fills."""
        return [place for place, token in enumerate(self.row(index)) if token == self.mask_id]


def unconditional(config: StudentConfig, length: int) -> GivenRows:
    """Only the first token is given: bos, or eos where the tokenizer has no bos.

    Raises:
        UsageError: When the model has neither.
    """
    first = config.first_token_id
    if first is None:
        raise UsageError(
            "the model has no bos and no eos token to begin with",
            where="--prompt",
            remedy="give a prompt",
        )
    return from_prompts([[]], [first], config, length)


def from_prompts(
    prompts: Sequence[Sequence[int]], bos: Sequence[int], config: StudentConfig, length: int
) -> GivenRows:
    """Rows of bos, prompt and masks."""
    mask_id, rows = config.vocab_size, []
    for number, prompt in enumerate(prompts):
        given = [*bos, *prompt]
        if not given:
            raise UsageError("an empty prompt and no bos token", where=f"prompt {number}")
        if len(given) >= length:
            raise UsageError(
                "the prompt is longer than the row",
                where=f"prompt {number}",
                got=f"{len(given)} tokens with bos",
                expected=f"at most {length - 1}, so that something is left to fill",
            )
        rows.append((*given, *[mask_id] * (length - len(given))))
    return GivenRows(tuple(rows), mask_id, not bos)


def prompted(texts: Sequence[str], tokenizer: Any, config: StudentConfig, length: int) -> GivenRows:
    """Prompts in front, behind the bos token where the model has one.

    Raises:
        UsageError: Without a tokenizer, or when a prompt leaves no position to fill.
    """
    ids = [encode(text, tokenizer, config, "--prompt") for text in texts]
    bos = [] if config.bos_token_id is None else [config.bos_token_id]
    return from_prompts(ids, bos, config, length)


def encode(text: str, tokenizer: Any, config: StudentConfig, where: str) -> list[int]:
    """Token ids of a text.

    Raises:
        UsageError: Without a tokenizer, for an id outside the student's vocabulary, or when the
            text holds half a surrogate pair.
    """
    if tokenizer is None:
        raise UsageError("the model folder has no tokenizer", where=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("not UTF-8 text", where=where, got=error.reason) from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if any(token >= config.vocab_size for token in ids):
        raise UsageError(
            "the tokenizer gives ids outside the student's vocabulary",
            where=where,
            got=max(ids),
            expected=f"below {config.vocab_size}",
        )
    return ids


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; empty lines are left out.

    Raises:
        UsageError: For a missing or empty file, or one that is not UTF-8.
    """
    prompts = [line for line in _read_lines(path, "--prompt-file") if line.strip()]
    if not prompts:
        raise UsageError("no prompt in the file", where=path)
    return prompts


def read_infill(path: Path, tokenizer: Any, config: StudentConfig) -> GivenRows:
    """Rows with given and open positions from a .jsonl file, one object per line:

        {"tokens": [2, 17, null, 9]}                         null where to fill
        {"tokens": [2, 17, 5, 9], "masked": [2]}             or positions listed
        {"text": "once upon a time", "masked": [2, 3]}       tokenized; with bos at position 0

    Raises:
        UsageError: Naming the line and what is wrong with it.
    """
    rows = [
        _parse_infill(line, f"{path}:{number}", tokenizer, config)
        for number, line in enumerate(_read_lines(path, "--infill"), start=1)
        if line.strip()
    ]
    if not rows:
        raise UsageError("no row in the file", where=path)
    return GivenRows(tuple(rows), config.vocab_size, config.bos_token_id is None)


def _read_lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        what = f"cannot read the {option} file"
        raise UsageError(what, where=path, got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", where=path, got=error.reason) from error


def _parse_infill(line: str, where: str, tokenizer: Any, config: StudentConfig) -> tuple[int, ...]:
    mask_id = config.vocab_size
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("not JSON", where=where, got=error) from error
    if not isinstance(record, Mapping) or not record.keys() & {"tokens", "text"}:
        raise UsageError(
            "not a row to fill", where=where, expected='an object with "tokens" or "text"'
        )
    if "tokens" in record:
        tokens = record["tokens"]
        if not isinstance(tokens, list):
            raise UsageError("tokens is no list", where=where, got=type(tokens).__name__)
        for place, token in enumerate(tokens):
            if token is not None and not (type(token) is int and 0 <= token < mask_id):
                expected = f"null or an id in 0..{mask_id - 1}"
                raise UsageError(
                    "bad token", where=f"{where}, position {place}", got=token, expected=expected
                )
        row = [mask_id if token is None else token for token in tokens]
    else:
        text = record["text"]
        if not isinstance(text, str):
            raise UsageError("text is no string", where=where, got=type(text).__name__)
        bos = [] if config.bos_token_id is None else [config.bos_token_id]
        row = bos + encode(text, tokenizer, config, where)
    places = record.get("masked", [])
    if not isinstance(places, list) or not all(
        type(place) is int and 0 <= place < len(row) for place in places
    ):
        expected = f"a list of 0..{len(row) - 1}"
        raise UsageError("bad positions", where=where, got=places, expected=expected)
    for place in places:
        row[place] = mask_id
    if not 2 <= len(row) <= config.row_length:
        raise UsageError(
            "a row of this length cannot be filled",
            where=where,
            got=f"{len(row)} tokens",
            expected=f"2..{config.row_length}",
        )
    if row[0] == mask_id:
        raise UsageError("position 0 is always given", where=where, remedy="put bos there")
    if mask_id not in row:
        raise UsageError("nothing to fill", where=where, remedy='name positions under "masked"')
    return tuple(row)
