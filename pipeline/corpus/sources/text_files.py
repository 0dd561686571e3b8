"""``text:PATH-or-GLOB``: documents in plain text, ended by marker lines, line ends or files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.corpus.sources.files import expand, file_identity, open_bytes
from pipeline.corpus.sources.protocol import Known, RawDocument, Source

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
