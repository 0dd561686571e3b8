"""JSON files that notice any change to themselves.

A sealed file is indented JSON with sorted keys and a field ``sha256`` over the canonical form of
all other fields. It is accepted only if rendering what was parsed gives the same bytes again, so
a flipped bit is found even where JSON would not care (white space, a repeated key).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from shards.base import IntegrityError, canonical_json

SEAL = "sha256"


def digest(value: Mapping[str, Any]) -> str:
    """The hex sha256 of a record's fields, the seal itself left out."""
    body = {key: entry for key, entry in value.items() if key != SEAL}
    return hashlib.sha256(canonical_json(body)).hexdigest()


def seal(value: Mapping[str, Any]) -> bytes:
    """The file's bytes: ``value`` with its seal."""
    record = {**value, SEAL: digest(value)}
    return json.dumps(record, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse(data: bytes, where: object) -> dict[str, Any]:
    """The JSON object in ``data``, its seal not yet checked.

    Raises:
        IntegrityError: If ``data`` is not a JSON object.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            "not a readable record", where=where, got=str(error)[:80], expected="a sealed JSON file"
        ) from error
    if not isinstance(value, dict):
        raise IntegrityError("not a record", where=where, expected="a JSON object")
    return value


def unseal(data: bytes, where: object) -> dict[str, Any]:
    """The record in ``data`` with its seal, which has been checked.

    Raises:
        IntegrityError: If anything in the file differs from what was sealed.
    """
    value = parse(data, where)
    try:
        intact = seal(value) == data
    except (ValueError, TypeError):  # NaN, or keys that do not sort
        intact = False
    if not intact:
        raise IntegrityError(
            "the record was altered after it was written",
            where=where,
            got=f"sha256 {str(value.get(SEAL))[:12]}",
            expected=f"sha256 {_digest_or_unknown(value)[:12]}",
            remedy="restore the file from a copy, or write the store again",
        )
    return value


def _digest_or_unknown(value: Mapping[str, Any]) -> str:
    try:
        return digest(value)
    except (ValueError, TypeError):
        return "unknown"
