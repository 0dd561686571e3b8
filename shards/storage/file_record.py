"""What is known of a file before it is read: its size and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        return cls(int(value["bytes"]), str(value["sha256"]))
