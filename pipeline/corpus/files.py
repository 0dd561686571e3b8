"""What a source of documents is: numbered raw documents, their text, and a content identity."""

from __future__ import annotations

import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from io import BufferedReader
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from shards.atomic import sha256_file
from shards.errors import GdistillError, UsageError, did_you_mean

Known = Mapping[str, dict[str, Any]]
"""Identities of files, by path, that an earlier run noted."""


class RawDocument(NamedTuple):
    """One document as found.

    Attributes:
        content: Undecoded bytes, or text from a source that decodes by itself.
        origin: The file or data set it comes from.
        offset: Where ``content`` starts there: a byte offset (after decompression) when
            ``content`` is bytes of a text file, else a row or line number.
    """

    content: bytes | str
    origin: str
    offset: int


@runtime_checkable
class Source(Protocol):
    """Numbered documents that can be read again; the numbering counts empty ones too."""

    def count(self) -> int:
        """How many documents there are."""
        ...

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        """Documents start..stop-1, in order, holding one (or one read batch) at a time."""
        ...

    def text(self, decoded: str, raw: RawDocument) -> str:
        """The document's text within its decoded content: all of it, or a JSON field, say."""
        return decoded

    def place(self, raw: RawDocument, byte: int) -> str:
        """Names byte ``byte`` of ``raw.content`` for an error message."""
        ...

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        """JSON-ready facts that change when the content does; ``sha256`` for files.

        A file that still has the size and modification time in ``known`` is not hashed again.
        """
        ...


# ``text:PATH-or-GLOB``: documents in plain text, ended by marker lines, line ends or files.


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFiles(Source):
    """Text files in name order; a file's end always ends a document.

    Attributes:
        pattern: A path or a glob.
        separator: ``line`` (every line is a document), ``blank_line`` (paragraphs), ``file``
            (every file is one document), or the text of a line that stands between documents.

    Line ends around a document are not part of it; a leading byte order mark is not part of a
    file. Documents of nothing but white space are not counted, except with ``line``.
    """

    pattern: str
    separator: str

    @cached_property
    def paths(self) -> list[Path]:
        return expand(self.pattern)

    @cached_property
    def _counts(self) -> list[int]:
        return [sum(1 for _ in self.of_file(path)) for path in self.paths]

    def count(self) -> int:
        return sum(self._counts)

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        position = 0
        for path, count in zip(self.paths, self._counts, strict=True):
            if position >= stop:
                return
            if position + count > start:
                for index, raw in enumerate(self.of_file(path), position):
                    if index >= stop:
                        return
                    if index >= start:
                        yield raw
            position += count

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: byte {raw.offset + byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [file_identity(path, known) for path in self.paths]

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        """The documents of one of the files, in one pass and without counting first."""
        origin = str(path)
        with open_bytes(path) as file:
            for offset, content in self._split(file):
                yield RawDocument(content, origin, offset)

    def _split(self, file: BufferedReader) -> Iterator[tuple[int, bytes]]:
        if self.separator == "line":
            return _lines(file)
        if self.separator == "file":
            return iter(_trimmed(0, [file.read()]))
        if self.separator == "blank_line":
            return _blocks(file, b"")
        return _blocks(file, self.separator.encode())


def _lines(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for line in file:
        skipped = len(BYTE_ORDER_MARK) if offset == 0 and line.startswith(BYTE_ORDER_MARK) else 0
        yield offset + skipped, line[skipped:].rstrip(b"\r\n")
        offset += len(line)


def _blocks(file: BufferedReader, marker: bytes) -> Iterator[tuple[int, bytes]]:
    """Runs of lines between lines that, stripped, equal ``marker``."""
    block: list[bytes] = []
    begin = offset = 0
    for line in file:
        # startswith first: stripping each of a billion lines costs more than reading them.
        if (not marker or line.startswith(marker)) and line.strip() == marker:
            yield from _trimmed(begin, block)
            block, begin = [], offset + len(line)
        else:
            block.append(line)
        offset += len(line)
    yield from _trimmed(begin, block)


def _trimmed(begin: int, block: list[bytes]) -> list[tuple[int, bytes]]:
    """The block without line ends around it and where it begins; nothing if it is blank."""
    content = b"".join(block)
    kept = content.removeprefix(BYTE_ORDER_MARK) if begin == 0 else content
    kept = kept.lstrip(b"\r\n")
    begin += len(content) - len(kept)
    kept = kept.rstrip(b"\r\n")
    return [(begin, kept)] if kept.strip() else []


# ``jsonl:PATH#field``: one JSON object per line, the document in one of its fields.


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


# ``parquet:PATH#column`` and ``csv:PATH#column``: one document per row of tables.


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


# Local files: patterns, plain or compressed bytes, and what identifies their content.


BUFFER_BYTES = 1 << 20
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted by name; at least one, none of them a directory."""
    if not pattern:
        raise UsageError("the corpus names no file", expected="text:PATH, jsonl:PATH#field, ...")
    pattern = os.path.expanduser(pattern)
    names = sorted(glob(pattern, recursive=True)) if has_magic(pattern) else [pattern]
    paths = [Path(name) for name in names]
    if has_magic(pattern):
        paths = [path for path in paths if not path.is_dir()]
    if not paths:
        raise UsageError("no file matches the corpus pattern", where=pattern)
    for path in paths:
        if path.is_dir():
            raise UsageError(
                "the corpus path is a directory",
                where=path,
                expected="a file or a glob",
                remedy=f"for all files in it: '{path}/*'",
            )
        if not path.exists():
            raise UsageError("no such corpus file", where=path)
    return paths


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed if it ends in ``.gz`` or ``.zst``.

    Frames that follow each other in one file are read as one text.

    Raises:
        GdistillError: For a file that cannot be read, or is damaged or cut short; names it.
    """
    try:
        with pa.input_stream(str(path), compression=COMPRESSION.get(path.suffix)) as file:
            yield io.BufferedReader(cast(io.RawIOBase, file), BUFFER_BYTES)
    except OSError as error:
        damaged = path.suffix in COMPRESSION
        what = "the compressed corpus file is damaged" if damaged else "cannot read the corpus file"
        raise GdistillError(what, where=path, got=error) from error


def file_identity(path: Path, known: Known) -> dict[str, Any]:
    """Path, size, modification time and sha256 of one file as stored."""
    if str(path) in known and looks_unchanged(known[str(path)]):
        return known[str(path)]
    before = path.stat()
    digest = sha256_file(path)
    return {
        "path": str(path),
        "num_bytes": before.st_size,
        "modified_ns": before.st_mtime_ns,
        "sha256": digest,
    }


def looks_unchanged(known: dict[str, Any]) -> bool:
    """Whether a file still has the size and modification time noted with its hash."""
    try:
        found = Path(known["path"]).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (known["num_bytes"], known["modified_ns"])
