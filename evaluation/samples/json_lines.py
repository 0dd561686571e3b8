"""JSON objects, one a line, from a file that somebody else may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from shards.base import GdistillError, UsageError


class Record(NamedTuple):
    """One object and the line it stands in, counted from 1."""

    line: int
    values: dict[str, Any]


def read_records(file: Path, kind: str) -> list[Record]:
    """The objects of all lines that are not blank, in the file's order.

    Only a line feed ends a line: ``str.splitlines`` would also cut at a raw U+2028 in a text.

    Args:
        file: A .jsonl file.
        kind: What a line holds (``sample``), for messages.

    Raises:
        UsageError: When the file cannot be read or holds no object.
        GdistillError: For a line that is no object, naming file and line.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"cannot read the {kind} file",
            where=file,
            got=error.strerror,
            expected="a .jsonl file",
            remedy="check the path",
        ) from error
    records = [
        Record(number, _parse(line, f"{file}:{number}", kind))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not records:
        raise UsageError(f"no {kind} in the file", where=file, got="an empty file")
    return records


def is_text(value: object) -> bool:
    """True for a string that a tokenizer can read: JSON can spell half a character, ``\\ud800``."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: object) -> str:
    """The value as JSON, cut to a length that fits a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(line: bytes, where: str, kind: str) -> dict[str, Any]:
    """The object in one line; ``where`` is its ``FILE:LINE``."""
    remedy = "write one JSON object a line, in UTF-8"
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise GdistillError(
            f"a {kind} line is not UTF-8", where=where, got=got, remedy=remedy
        ) from error
    except ValueError as error:
        raise GdistillError(
            f"a {kind} line is not JSON", where=where, got=error, remedy=remedy
        ) from error
    if not isinstance(value, dict):
        raise GdistillError(
            f"a {kind} line is no JSON object", where=where, got=type(value).__name__, remedy=remedy
        )
    return value
