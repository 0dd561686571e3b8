"""Documents in a field of a table: JSON lines, CSV and Parquet files, plain or compressed.

``datasets`` reads them too, but says neither line nor byte of what is wrong, and stops for no bad
UTF-8. A field that is null is empty.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.sources import BYTE_ORDER_MARK, Files, RawDocument, TextFiles, open_bytes
from shards.errors import GdistillError, UsageError, did_you_mean

BATCH_ROWS = 256
LONGEST_CSV_FIELD = 1 << 30


@dataclass(frozen=True)
class JsonLines(Files):
    """One JSON object a line, the document in one of its fields; blank lines are not counted."""

    field: str

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        for number, raw in enumerate(TextFiles(self.pattern, "line").of_file(path), 1):
            if raw.content.strip():
                yield raw._replace(offset=number)

    def text(self, decoded: str, raw: RawDocument) -> str:
        where = f"{raw.origin}: line {raw.offset}"
        try:
            record = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise GdistillError("malformed JSON line", where=where, got=error) from error
        if not isinstance(record, dict):
            got = type(record).__name__
            raise GdistillError("malformed JSON line", where=where, got=got, expected="an object")
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


@dataclass(frozen=True)
class ParquetFiles(Files):
    """Parquet files; of each only the column is read, as strings or UTF-8 bytes."""

    column: str

    def count_file(self, path: Path) -> int:
        try:
            schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise GdistillError("not a Parquet file", where=path, got=error) from error
        _require_column(self.column, path, schema.names)
        kind = schema.field(self.column).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind  # a category of pandas
        checks = ("string", "large_string", "string_view", "binary", "large_binary")
        if not any(getattr(pa.types, f"is_{name}")(values) for name in checks):
            raise UsageError(f"column {self.column!r} holds no text", where=path, got=kind)
        return rows

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        first = 0
        try:
            for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=[self.column]):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                # As bytes: a column that claims to be UTF-8 and is not must be reported, too.
                for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first):
                    yield RawDocument(value or b"", str(path), row)
                first += len(column)
        except (pa.ArrowException, OSError) as error:
            raise GdistillError("cannot read the Parquet file", where=path, got=error) from error


@dataclass(frozen=True)
class CsvFiles(Files):
    """CSV files with a line of column names; ``.tsv`` is split at tabs.

    A quoted field may hold line ends. Python's own reader notices where a quote never ends.
    """

    column: str

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        csv.field_size_limit(LONGEST_CSV_FIELD)
        delimiter = "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes] else ","
        with open_bytes(path) as file:
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            # Surrogates carry bytes that are no UTF-8 to where all documents are decoded.
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                names = next(reader, [])
                _require_column(self.column, path, names)
                at = names.index(self.column)
                for row, values in enumerate(line for line in reader if line):
                    if len(values) != len(names):
                        raise csv.Error(f"{len(values)} fields where {len(names)} are named")
                    content = values[at].encode("utf-8", "surrogateescape")
                    yield RawDocument(content, str(path), row)
            except csv.Error as error:
                raise GdistillError(
                    "cannot read the CSV file",
                    where=f"{path}: line {reader.line_num}",
                    got=error,
                    expected="a line of column names, then rows of as many fields",
                ) from error


TABLES = {"jsonl": JsonLines, "csv": CsvFiles, "parquet": ParquetFiles}


def _require_column(column: str, path: Path, names: list[str]) -> None:
    if column not in names:
        remedy = did_you_mean(column, names, "name one: PATH#column")
        raise UsageError(f"no column {column!r}", where=path, got=f"columns {names}", remedy=remedy)
