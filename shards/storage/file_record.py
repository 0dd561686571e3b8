"""What is known of a file before it is read: its size and its hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shards.base import UsageError

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a store."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a file holding ``data``."""
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def matches(self, data: bytes) -> bool:
        """Whether ``data`` is the file's content."""
        return FileRecord.of(data) == self

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        """Read a record.

        Raises:
            KeyError: If a field is missing.
            UsageError: If one is no size, or no hash.
        """
        num_bytes = value["bytes"]
        if type(num_bytes) is not int or num_bytes < 0:
            raise UsageError("not a number of bytes", got=repr(num_bytes))
        return cls(num_bytes, sha256_hex(value["sha256"]))


def sha256_hex(value: object) -> str:
    """``value``, if it is a sha256 in hex.

    Raises:
        UsageError: If it is not: it may become a file's name.
    """
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value
    raise UsageError("not a sha256", got=repr(value)[:80])
