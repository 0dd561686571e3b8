"""Reference texts: a .jsonl file with a ``text`` field, as any corpus export has it."""

from __future__ import annotations

from pathlib import Path

from evaluation.samples.json_lines import read_records, short
from shards.base import GdistillError


def read_references(file: Path) -> list[str]:
    """The texts of the file, in its order; other fields are not looked at.

    Raises:
        UsageError: When the file cannot be read or is empty.
        GdistillError: For a line without a text, naming file and line.
    """
    return [
        _text(values.get("text"), f"{file}:{line}")
        for line, values in read_records(file, "reference")
    ]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise GdistillError(
            "a reference has no text",
            where=where,
            got="null or no such field" if value is None else short(value),
            expected='{"text": "..."}',
            remedy="leave the line out, or give it a text",
        )
    return value
