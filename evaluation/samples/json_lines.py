"""JSON from files that somebody else may have written: one object a line, or one a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from shards.base import GdistillError, UsageError

MAX_LINE_BYTES = 2**26
"""64 MiB: a row of a million tokens has a tenth. Of a sparse file no terabyte is read."""
MAX_FILE_BYTES = 2**30
"""Of a file that is one object."""
WHOLE_NUMBER_DIGITS = 19
"""Numbers of fewer digits are below 2^63."""


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
        with open_regular(file) as stream:
            records = [
                Record(number, _parse(line, f"{file}:{number}", kind))
                for number, line in enumerate(_lines(stream), start=1)
                if line.strip()
            ]
    except OSError as error:
        raise UsageError(
            f"cannot read the {kind} file",
            where=file,
            got=error.strerror,
            expected="a .jsonl file",
            remedy="check the path",
        ) from error
    if not records:
        raise UsageError(f"no {kind} in the file", where=file, got="an empty file")
    return records


def open_regular(file: Path) -> IO[bytes]:
    """A file to read; no pipe or device, which could be read for ever.

    Raises:
        OSError: When there is none.
    """
    if file.exists() and not file.is_file():
        raise OSError(0, "no regular file")
    return open(file, "rb")


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line


def read_object(file: Path) -> dict[str, Any]:
    """The one JSON object of a file.

    Raises:
        OSError: When it cannot be read.
        ValueError: When it is something else.
    """
    with open_regular(file) as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, no JSON object")
    return value


def parse_json(content: bytes) -> Any:
    """The value of a JSON text, if every other reader would find the same in it.

    Raises:
        ValueError: For what is no JSON or not UTF-8, NaN, a number beyond float64 or 64 bits, a
            name twice in one object, half a character, or more nesting than Python reads.
    """
    text = content.decode("utf-8")
    long_numbers = re.search(f"[0-9]{{{WHOLE_NUMBER_DIGITS}}}", text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole if long_numbers else None,
        )
    except RecursionError as error:
        raise ValueError("values nested too deeply") from error
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(value, ensure_ascii=False).encode()  # \ud800 is half a character: ValueError
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {short(twice)} stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]}, beyond float64")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]}..., beyond 64 bits")
    return int(digits)


def short(value: object) -> str:
    """The value as JSON, cut to a length that fits a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(line: bytes, where: str, kind: str) -> dict[str, Any]:
    """The object in one line; ``where`` is its ``FILE:LINE``."""
    remedy = "write one JSON object a line, in UTF-8"
    if len(line) > MAX_LINE_BYTES:
        got = f"more than {MAX_LINE_BYTES} bytes"
        raise GdistillError(f"a {kind} line is too long", where=where, got=got, remedy=remedy)
    try:
        value = parse_json(line)
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
