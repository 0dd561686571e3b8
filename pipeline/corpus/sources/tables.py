"""``parquet:PATH#column`` and ``csv:PATH#column``: one document per row of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.corpus.sources.files import expand, file_identity, open_bytes
from pipeline.corpus.sources.protocol import Known, RawDocument, Source
from shards.base import GdistillError, UsageError, did_you_mean

BATCH_ROWS = 256
CSV_BLOCK_BYTES = 1 << 26
"""Read at once; the longest row that a CSV file may have."""


@dataclass(frozen=True)
class TableFiles(Source, ABC):
    """Tables in name order; the column holds strings (or UTF-8 bytes); null is empty."""

    pattern: str
    column: str

    @cached_property
    def _counts(self) -> list[tuple[Path, int]]:
        return [(path, self._num_rows(path)) for path in expand(self.pattern)]

    @abstractmethod
    def _num_rows(self, path: Path) -> int:
        """Rows of the file, once its column is known to hold text."""

    @abstractmethod
    def _columns(self, path: Path) -> Iterator[pa.Array]:
        """The column, batch by batch, as bytes or strings."""

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
        for column in self._columns(path):
            if index >= stop:
                return
            if index + len(column) > start:
                # As bytes: a column that claims to be UTF-8 and is not must be reported, too.
                values = column.cast(pa.large_binary()).to_pylist()
                for row, value in enumerate(values, index):
                    if start <= row < stop:
                        yield RawDocument(value or b"", origin, row)
            index += len(column)

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: row {raw.offset}, byte {byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [file_identity(path, known) for path, _ in self._counts]

    def _require_column(self, path: Path, names: list[str]) -> None:
        if self.column in names:
            return
        raise UsageError(
            f"no column {self.column!r}",
            where=path,
            got=f"columns {names}",
            remedy=did_you_mean(self.column, names, "name one: PATH#column"),
        )


class ParquetFiles(TableFiles):
    """Parquet files; of each only the column is read."""

    def _num_rows(self, path: Path) -> int:
        try:
            schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise GdistillError("not a Parquet file", where=path, got=error) from error
        self._require_column(path, schema.names)
        kind = schema.field(self.column).type
        if not (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
            or pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
        ):
            raise UsageError(f"column {self.column!r} holds no text", where=path, got=kind)
        return rows

    def _columns(self, path: Path) -> Iterator[pa.Array]:
        try:
            for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=[self.column]):
                yield batch.column(0)
        except (pa.ArrowException, OSError) as error:
            raise GdistillError("cannot read the Parquet file", where=path, got=error) from error


class CsvFiles(TableFiles):
    """CSV files with a line of column names, plain or compressed; ``.tsv`` is split at tabs.

    A quoted field may hold line ends.
    """

    def _num_rows(self, path: Path) -> int:
        with self._reading(path) as reader:
            self._require_column(path, reader.schema.names)
        return sum(map(len, self._columns(path)))

    def _columns(self, path: Path) -> Iterator[pa.Array]:
        # Of the other columns nothing may matter, not even whether their types stay the same.
        only = pyarrow.csv.ConvertOptions(
            include_columns=[self.column],
            column_types={self.column: pa.binary()},
            strings_can_be_null=False,
        )
        with self._reading(path, only) as reader:
            for batch in reader:
                yield batch.column(0)

    @contextmanager
    def _reading(
        self, path: Path, convert: pyarrow.csv.ConvertOptions | None = None
    ) -> Iterator[pyarrow.csv.CSVStreamingReader]:
        delimiter = "\t" if ".tsv" in path.suffixes else ","
        read = pyarrow.csv.ReadOptions(block_size=CSV_BLOCK_BYTES)
        parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        try:
            with open_bytes(path) as file:
                yield pyarrow.csv.open_csv(file, read, parse, convert)
        except pa.ArrowException as error:
            raise GdistillError(
                "cannot read the CSV file",
                where=path,
                got=error,
                expected="a line of column names, then rows of as many fields",
            ) from error
