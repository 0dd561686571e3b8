"""``parquet:PATH#column``: one document per row of Parquet files."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.sources.files import expand, file_identity
from pipeline.corpus.sources.protocol import Known, RawDocument
from shards.base import GdistillError, UsageError

BATCH_ROWS = 256


@dataclass(frozen=True)
class ParquetFiles:
    """Parquet files in name order; the column holds strings (or UTF-8 bytes); null is empty."""

    pattern: str
    column: str

    @cached_property
    def _counts(self) -> list[tuple[Path, int]]:
        return [(path, _checked_rows(path, self.column)) for path in expand(self.pattern)]

    def count(self) -> int:
        return sum(rows for _, rows in self._counts)

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        position = 0
        for path, rows in self._counts:
            if position + rows > start and position < stop:
                yield from self._file(path, max(0, start - position), min(rows, stop - position))
            position += rows

    def _file(self, path: Path, start: int, stop: int) -> Iterator[RawDocument]:
        origin, index = str(path), 0
        try:
            batches = pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=[self.column])
            for batch in batches:
                if index + len(batch) > start and index < stop:
                    # As bytes: a column that claims to be UTF-8 and is not must be reported, too.
                    values = batch.column(0).cast(pa.large_binary()).to_pylist()
                    for row, value in enumerate(values, index):
                        if start <= row < stop:
                            yield RawDocument(value or b"", origin, row)
                index += len(batch)
        except (pa.ArrowException, OSError) as error:
            raise GdistillError("cannot read the Parquet file", where=path, got=error) from error

    def text(self, decoded: str, raw: RawDocument) -> str:
        return decoded

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: row {raw.offset}, byte {byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [file_identity(path, known) for path, _ in self._counts]


def _checked_rows(path: Path, column: str) -> int:
    """Rows of the file, once its column is known to hold text."""
    try:
        schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise GdistillError("not a Parquet file", where=path, got=error) from error
    if column not in schema.names:
        near = difflib.get_close_matches(column, schema.names, n=1)
        raise UsageError(
            f"no column {column!r}",
            where=path,
            got=f"columns {schema.names}",
            remedy=f"did you mean {near[0]!r}?" if near else "name one: parquet:PATH#column",
        )
    kind = schema.field(column).type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        raise UsageError(f"column {column!r} holds no text", where=path, got=kind)
    return rows
