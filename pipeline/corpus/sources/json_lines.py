"""``jsonl:PATH#field``: one JSON object per line, the document in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

from pipeline.corpus.sources.protocol import Known, RawDocument
from pipeline.corpus.sources.text_files import TextFiles
from shards.base import GdistillError, did_you_mean


@dataclass(frozen=True)
class JsonLines:
    """JSON-lines files in name order, plain or compressed; blank lines are not counted."""

    pattern: str
    field: str

    @cached_property
    def _lines(self) -> TextFiles:
        return TextFiles(self.pattern, "line")

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self._objects())

    def _objects(self) -> Iterator[RawDocument]:
        for path in self._lines.paths:
            for number, raw in enumerate(self._lines.of_file(path), 1):
                if raw.content.strip():
                    yield raw._replace(offset=number)

    def count(self) -> int:
        return self._count

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        return islice(self._objects(), start, stop)

    def text(self, decoded: str, raw: RawDocument) -> str:
        where = f"{raw.origin}: line {raw.offset}"
        try:
            record = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise GdistillError("malformed JSON line", where=where, got=error) from error
        if not isinstance(record, dict):
            raise GdistillError(
                "malformed JSON line", where=where, got=type(record).__name__, expected="an object"
            )
        value = record.get(self.field)
        if not isinstance(value, str):
            raise GdistillError(
                f"no text in field {self.field!r}",
                where=where,
                got=f"fields {sorted(record)}" if value is None else type(value).__name__,
                remedy=did_you_mean(self.field, record.keys() - {self.field}),
            )
        return value

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: line {raw.offset}, byte {byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return self._lines.identity(known)
