"""Rows to fill from what a user gives: prompts, or rows with open positions.

A row is a tuple of token ids, the mask id where to fill.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shards.errors import UsageError
from trainer.students.registry import StudentConfig

Row = tuple[int, ...]


def prompted(texts: Sequence[str], tokenizer: Any, config: StudentConfig, length: int) -> tuple[Row, ...]:
    """Prompts in front, behind the bos token where the model has one.

    Raises:
        UsageError: Without a tokenizer, or when a prompt leaves no position to fill.
    """
    rows = []
    for number, text in enumerate(texts):
        given = _bos(config) + encode(text, tokenizer, config, "--prompt")
        where, got = f"prompt {number}", f"{len(given)} tokens with bos"
        if not given:
            raise UsageError("an empty prompt and no bos token", where=where)
        if len(given) >= length:
            expected = f"at most {length - 1}, so that something is left to fill"
            raise UsageError("the prompt is longer than the row", where=where, got=got, expected=expected)
        rows.append((*given, *[config.vocab_size] * (length - len(given))))
    return tuple(rows)


def _bos(config: StudentConfig) -> list[int]:
    return [] if config.bos_token_id is None else [config.bos_token_id]


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
    if (got := max(ids, default=0)) >= config.vocab_size:
        what, expected = "the tokenizer gives ids outside the student's vocabulary", f"below {config.vocab_size}"
        raise UsageError(what, where=where, got=got, expected=expected)
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


def read_infill(path: Path, tokenizer: Any, config: StudentConfig) -> tuple[Row, ...]:
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
    return tuple(rows)


def _read_lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read the {option} file", where=path, got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", where=path, got=error.reason) from error


def _parse_infill(line: str, where: str, tokenizer: Any, config: StudentConfig) -> Row:
    mask_id, most = config.vocab_size, config.row_length
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("not JSON", where=where, got=error) from error
    if not isinstance(record, Mapping) or not record.keys() & {"tokens", "text"}:
        raise UsageError("not a row to fill", where=where, expected='an object with "tokens" or "text"')
    name, kind, word = ("tokens", list, "list") if "tokens" in record else ("text", str, "string")
    given: Any = record[name]
    if not isinstance(given, kind):
        raise UsageError(f"{name} is no {word}", where=where, got=type(given).__name__)
    if isinstance(given, str):
        row = _bos(config) + encode(given, tokenizer, config, where)
    else:
        row = [mask_id if token is None else token for token in given]
        for place, token in enumerate(given):
            if token is not None and not (type(token) is int and 0 <= token < mask_id):
                at, expected = f"{where}, position {place}", f"null or an id in 0..{mask_id - 1}"
                raise UsageError("bad token", where=at, got=token, expected=expected)
    places, last = record.get("masked", []), len(row) - 1
    if not isinstance(places, list) or not all(type(p) is int and 0 <= p <= last for p in places):
        raise UsageError("bad positions", where=where, got=places, expected=f"a list of 0..{last}")
    for place in places:
        row[place] = mask_id
    if not 2 <= len(row) <= most:
        got, expected = f"{len(row)} tokens", f"2..{most}"
        raise UsageError("a row of this length cannot be filled", where=where, got=got, expected=expected)
    if row[0] == mask_id:
        raise UsageError("position 0 is always given", where=where, remedy="put bos there")
    if mask_id not in row:
        raise UsageError("nothing to fill", where=where, remedy='name positions under "masked"')
    return tuple(row)
