"""Where documents come from: the protocol of a source, and plain text files.

Documents are bytes or text as found; :mod:`pipeline.corpus.documents` decodes and divides them.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import pyarrow as pa

from shards.atomic import sha256_file
from shards.errors import GdistillError, UsageError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
Known = Mapping[str, dict[str, Any]]
"""Identities of files, by path, that an earlier run noted."""


class RawDocument(NamedTuple):
    """One document as found: undecoded bytes, or text from a source that decodes by itself.

    Its ``offset`` in ``origin`` (a file or data set) is a byte offset (after decompression) when
    ``content`` is bytes of a text file, else a row or line number.
    """

    content: bytes | str
    origin: str
    offset: int


class Source(ABC):
    """Numbered documents that can be read again; the numbering counts empty ones too."""

    @abstractmethod
    def count(self) -> int:
        """How many documents there are."""

    @abstractmethod
    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        """Documents start..stop-1, in order, holding one (or one read batch) at a time."""

    def text(self, decoded: str, raw: RawDocument) -> str:
        """The document's text within its decoded content: all of it, or a JSON field, say."""
        return decoded

    def place(self, raw: RawDocument, byte: int) -> str:
        """Names byte ``byte`` of ``raw.content`` for an error message."""
        return f"{raw.origin}: row {raw.offset}, byte {byte}"

    @abstractmethod
    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        """JSON-ready facts that change when the content does; ``sha256`` for files.

        A file that still has the size and modification time in ``known`` is not hashed again.
        """


@dataclass(frozen=True)
class Files(Source):
    """Files in name order, each a run of documents; ``pattern`` is a path or a glob."""

    pattern: str

    @cached_property
    def paths(self) -> list[Path]:
        return expand(self.pattern)

    @cached_property
    def _counts(self) -> list[int]:
        return [self.count_file(path) for path in self.paths]

    @abstractmethod
    def of_file(self, path: Path) -> Iterator[RawDocument]:
        """The documents of one of the files, in one pass."""

    def count_file(self, path: Path) -> int:
        """How many documents a file has."""
        return sum(1 for _ in self.of_file(path))

    def count(self) -> int:
        return sum(self._counts)

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        firsts = accumulate(self._counts, initial=0)
        for path, count, first in zip(self.paths, self._counts, firsts, strict=False):
            if first < stop and start < first + count:
                yield from islice(self.of_file(path), max(0, start - first), stop - first)

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [file_identity(path, known) for path in self.paths]


@dataclass(frozen=True)
class TextFiles(Files):
    """Plain text; a file's end always ends a document.

    Line ends around a document are not part of it; a leading byte order mark is not part of a
    file. Documents of nothing but white space are not counted, except with ``line``.

    Attributes:
        separator: ``line`` (every line is a document), ``blank_line`` (paragraphs), ``file``
            (every file is one document), or the text of a line that stands between documents.
    """

    separator: str

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: byte {raw.offset + byte}"

    def of_file(self, path: Path) -> Iterator[RawDocument]:
        with open_bytes(path) as file:
            if self.separator == "line":
                found = _lines(file)
            elif self.separator == "file":
                found = iter(_trimmed(0, [file.read()]))
            else:
                marker = "" if self.separator == "blank_line" else self.separator
                found = _blocks(file, marker.encode())
            for offset, content in found:
                yield RawDocument(content, str(path), offset)


def _lines(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for line in file:
        kept = line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line
        yield offset + len(line) - len(kept), kept.rstrip(b"\r\n")
        offset += len(line)


def _blocks(file: io.BufferedReader, marker: bytes) -> Iterator[tuple[int, bytes]]:
    """Runs of lines between lines that, stripped, equal ``marker``."""
    block: list[bytes] = []
    begin = offset = 0
    for line in file:
        offset += len(line)
        # startswith first: stripping each of a billion lines costs more than reading them.
        if (not marker or line.startswith(marker)) and line.strip() == marker:
            yield from _trimmed(begin, block)
            block, begin = [], offset
        else:
            block.append(line)
    yield from _trimmed(begin, block)


def _trimmed(begin: int, block: list[bytes]) -> list[tuple[int, bytes]]:
    """The block without line ends around it and where it begins; nothing if it is blank."""
    content = b"".join(block)
    kept = content.removeprefix(BYTE_ORDER_MARK) if begin == 0 else content
    kept = kept.lstrip(b"\r\n")
    return [(begin + len(content) - len(kept), kept.rstrip(b"\r\n"))] if kept.strip() else []


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted by name; at least one, none of them a directory."""
    pattern = os.path.expanduser(pattern)
    is_glob = has_magic(pattern) and not os.path.exists(pattern)  # a name may hold [1]
    names = sorted(glob(pattern, recursive=True)) if is_glob else [pattern] if pattern else []
    paths = [Path(name) for name in names if not (is_glob and os.path.isdir(name))]
    if not paths:
        what = "no file matches the corpus pattern" if pattern else "the corpus names no file"
        raise UsageError(what, where=pattern)
    for path in paths:
        if path.is_dir():
            what, remedy = "the corpus path is a directory", f"all files in it: '{path}/*'"
            raise UsageError(what, where=path, expected="a file or a glob", remedy=remedy)
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
    kind = COMPRESSION.get(path.suffix.lower())
    try:
        with pa.input_stream(str(path), compression=kind) as file:
            yield io.BufferedReader(cast(io.RawIOBase, file), BUFFER_BYTES)
    except OSError as error:
        what = "the compressed corpus file is damaged" if kind else "cannot read the corpus file"
        raise GdistillError(what, where=path, got=error) from error


def file_identity(path: Path, known: Known) -> dict[str, Any]:
    """Path, size, modification time and sha256 of one file as stored."""
    if str(path) in known and looks_unchanged(known[str(path)]):
        return known[str(path)]
    before = path.stat()
    times = {"num_bytes": before.st_size, "modified_ns": before.st_mtime_ns}
    return {"path": str(path), **times, "sha256": sha256_file(path)}


def looks_unchanged(known: dict[str, Any]) -> bool:
    """Whether a file still has the size and modification time noted with its hash."""
    try:
        found = Path(known["path"]).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (known["num_bytes"], known["modified_ns"])
