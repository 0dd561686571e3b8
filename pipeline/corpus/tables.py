"""Documents in a field of a table: JSON lines, CSV and Parquet files, and data sets of the hub.

``datasets`` reads files too, but says neither line nor byte of what is wrong, and stops for no bad
UTF-8. A field that is null is empty.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.sources import (
    BYTE_ORDER_MARK,
    Files,
    Known,
    RawDocument,
    Source,
    TextFiles,
    file_identity,
    open_bytes,
)
from shards.errors import GdistillError, UsageError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
else:
    Dataset = Any

BATCH_ROWS = 256
LONGEST_CSV_FIELD = 1 << 30
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class JsonLines(Files):
    """One JSON object a line, the document in one of its fields; blank lines are not counted."""

    field: str

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        for number, raw in enumerate(TextFiles(self.pattern, "line").of_file(path), 1):
            if raw.content.strip():
                yield raw._replace(offset=number)

    def record(self, decoded: str, where: str) -> dict[str, Any]:
        """The object of a line."""
        what = "malformed JSON line"
        try:
            record = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise GdistillError(what, where=where, got=error) from error
        if not isinstance(record, dict):
            raise GdistillError(what, where=where, got=type(record).__name__, expected="an object")
        return record

    def text(self, decoded: str, raw: RawDocument) -> str:
        where = f"{raw.origin}: line {raw.offset}"
        record = self.record(decoded, where)
        value = record.get(self.field)
        if not isinstance(value, str):
            got = f"fields {sorted(record)}" if value is None else type(value).__name__
            remedy = did_you_mean(self.field, record.keys() - {self.field})
            what = f"no text in field {self.field!r}"
            raise GdistillError(what, where=where, got=got, remedy=remedy)
        return value

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: line {raw.offset}, byte {byte}"


@dataclass(frozen=True)
class ChatLines(JsonLines):
    """Conversations: ``{"messages": [{"role": ..., "content": ...}, ...]}`` a line.

    A line that ends with another turn than the assistant's, or ``{"prompt": "text"}``, is a prompt.
    The document is JSON: where it stands, for the messages of what reads it, and the value.
    """

    is_prompts: bool = False

    def text(self, decoded: str, raw: RawDocument) -> str:
        where = f"{raw.origin}: line {raw.offset}"
        record = self.record(decoded, where)
        value = record.get("messages" if self.field == "text" else self.field)
        if value is None and self.is_prompts and isinstance(record.get("prompt"), str):
            value = record["prompt"]
        elif not value or not isinstance(value, list):
            got, expected = f"fields {sorted(record)}", '"messages", a list of turns'
            raise GdistillError("no conversation", where=where, got=got, expected=expected)
        else:
            for index, turn in enumerate(value):
                self._check(turn, f"{where}, message {index}")
            if self.is_prompts == (value[-1]["role"] == "assistant"):
                last = value[-1]["role"]
                what = "a prompt ends with" if self.is_prompts else "no answer to learn: it ends with"
                raise GdistillError(f"{what} the {last}'s turn", where=where)
        return json.dumps([where, value])

    def _check(self, turn: Any, where: str) -> None:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            got = turn.get("role") if isinstance(turn, dict) else type(turn).__name__
            raise GdistillError("not a turn", where=where, got=got, expected=f"a role of {ROLES}")
        if not isinstance(turn.get("content"), str) or not turn["content"].strip():
            raise GdistillError("an empty turn", where=where, got=f"role {turn['role']}")


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
                what, where = "cannot read the CSV file", f"{path}: line {reader.line_num}"
                expected = "a line of column names, then rows of as many fields"
                raise GdistillError(what, where=where, got=error, expected=expected) from error


TABLES = {"jsonl": JsonLines, "csv": CsvFiles, "parquet": ParquetFiles}


def _require_column(column: str, path: Path, names: list[str]) -> None:
    if column not in names:
        remedy = did_you_mean(column, names, "name one: PATH#column")
        raise UsageError(f"no column {column!r}", where=path, got=f"columns {names}", remedy=remedy)


@dataclass(frozen=True)
class HubDataset(Source):
    """One split of a data set of the hub, or of a folder that ``datasets`` loads.

    Memory-mapped by ``datasets``; no code of a repository is run.
    """

    name: str
    config: str | None
    split: str
    field: str
    revision: str | None

    @cached_property
    def _rows(self) -> Dataset:
        import datasets  # late: other corpora need not wait for it

        where = f"hf:{self.name}" + (f":{self.config}" if self.config else "")
        name, what = os.path.expanduser(self.name), "cannot load the data set"
        if (os.path.isabs(name) or self.name.startswith(".")) and not os.path.isdir(name):
            raise UsageError("no such folder of a data set", where=where)
        try:
            given = {"split": self.split, "revision": self.revision}
            rows = datasets.load_dataset(name, self.config, **given)
        except ValueError as error:  # an unknown configuration or split, which it lists
            raise UsageError(what, where=where, got=error) from error
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            remedy = "is the name right and the hub (or its cache) within reach?"
            raise GdistillError(what, where=where, got=got, remedy=remedy) from error
        if self.field not in (names := rows.column_names):
            got, remedy = f"fields {names}", did_you_mean(self.field, names)
            raise UsageError(f"no field {self.field!r}", where=where, got=got, remedy=remedy)
        kind = getattr(rows.features[self.field], "dtype", "")
        if kind not in ("string", "large_string"):
            raise UsageError(f"field {self.field!r} holds no text", where=where, got=kind)
        return rows.select_columns([self.field])

    def count(self) -> int:
        return len(self._rows)

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        for begin in range(start, stop, BATCH_ROWS):
            batch = self._rows[begin : min(begin + BATCH_ROWS, stop)][self.field]
            for row, value in enumerate(batch, begin):
                yield RawDocument(value or "", f"hf:{self.name}", row)

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        rows, folder = self._rows, Path(os.path.expanduser(self.name))
        facts = {"config": self.config, "split": self.split, "num_rows": len(rows)}
        if folder.is_dir():  # where it lies says nothing: its files do
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            hidden = [any(p[0] == "." for p in path.relative_to(folder).parts) for path in files]
            kept = [path for path, is_hidden in zip(files, hidden, strict=True) if not is_hidden]
            return [facts, *(file_identity(path, known) for path in kept)]
        return [facts | {"name": self.name, "revision": self.revision, "fingerprint": rows._fingerprint}]
