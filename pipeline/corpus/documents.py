"""Numbered documents of clean text, from files and data sets, and which of them belong to which split.

Documents come as found, bytes or text. They are UTF-8: one that is not is an error by default, or
repaired with U+FFFD, or left out; a lone surrogate (from a JSON escape) is treated the same way.
Control characters (C0 but for tab, line feed and carriage return, and DEL) are kept and counted.

``datasets`` reads files too, but copies them, says no line of what is wrong, and stops for no bad UTF-8.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob, has_magic
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from pipeline.corpus.config import MARKED, BadUtf8, CorpusConfig, scheme_of, split_field
from shards.atomic import sha256_file
from shards.errors import GdistillError, UsageError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
BATCH_ROWS = 256
CONTROL_BYTES = bytes(sorted((set(range(32)) - set(b"\t\n\r")) | {127}))
MANY_HELD_OUT = 100
"""From so many held-out documents on, a share of them is a share of the text, near enough."""
MOST_HELD_OUT = 0.05
Known = Mapping[str, dict[str, Any]]
"""Identities of files, by path, that an earlier run noted."""


Found = tuple[bytes | str, str]
"""One document as found: undecoded bytes, or text from a source that decodes by itself; and its place."""


@dataclass(frozen=True)
class Files:
    """Documents of the files of a path or glob, in name order; blank ones are numbered too.

    ``read`` gives those of one file, ``parse`` makes text of (decoded content, its place),
    ``num_documents`` counts without reading.
    """

    pattern: str
    read: Callable[[Path], Iterator[Found]]
    parse: Callable[[str, str], str] = lambda decoded, where: decoded
    num_documents: Callable[[Path], int] | None = None

    @cached_property
    def paths(self) -> list[Path]:
        return expand(self.pattern)

    @cached_property
    def _counts(self) -> list[int]:
        count = self.num_documents or (lambda path: sum(1 for _ in self.read(path)))
        return [count(path) for path in self.paths]

    def count(self) -> int:
        return sum(self._counts)

    def documents(self, start: int, stop: int) -> Iterator[Found]:
        """Documents start..stop-1, one at a time."""
        firsts = accumulate(self._counts, initial=0)
        for path, count, first in zip(self.paths, self._counts, firsts, strict=False):
            if first < stop and start < first + count:
                yield from islice(self.read(path), max(0, start - first), stop - first)

    def identity(self, known: Known) -> list[dict[str, Any]]:
        """JSON-ready facts that change when the content does.

        A file that still has the size and modification time in ``known`` is not hashed again.
        """
        return [file_identity(path, known) for path in self.paths]


@dataclass(frozen=True)
class Listed:
    """Documents by number, of a drawn corpus or a data set; ``facts`` and ``files`` tell them from others."""

    texts: Sequence[str | None]
    facts: dict[str, Any]
    where: str
    files: Sequence[Path] = ()

    def count(self) -> int:
        return len(self.texts)

    def documents(self, start: int, stop: int) -> Iterator[Found]:
        for begin in range(start, stop, BATCH_ROWS):  # of a data set, what is read at once
            for row, text in enumerate(self.texts[begin : min(begin + BATCH_ROWS, stop)], begin):
                yield text or "", f"{self.where}: row {row}"

    def identity(self, known: Known) -> list[dict[str, Any]]:
        return [self.facts, *(file_identity(path, known) for path in self.files)]

    def parse(self, decoded: str, where: str) -> str:
        return decoded


Source = Files | Listed
"""Numbered documents that can be read again."""


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted by name; at least one, none of them a directory."""
    pattern = os.path.expanduser(pattern)
    is_glob = has_magic(pattern) and not os.path.exists(pattern)  # a name may hold [1]
    names = sorted(glob(pattern, recursive=True)) if is_glob else [pattern] if pattern else []
    paths = [Path(name) for name in names if not (is_glob and os.path.isdir(name))]
    if not paths:
        raise UsageError("no file matches the corpus pattern" if pattern else "the corpus names no file", where=pattern)
    for path in paths:
        if path.is_dir():
            what, remedy = "the corpus path is a directory", f"all files in it: '{path}/*'"
            raise UsageError(what, where=path, expected="a file or a glob", remedy=remedy)
        if not path.exists():
            raise UsageError("no such corpus file", where=path)
    return paths


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed if it ends in ``.gz`` or ``.zst``, without a byte order mark."""
    kind = COMPRESSION.get(path.suffix.lower())
    try:
        with pa.input_stream(str(path), compression=kind) as stream:
            file: io.BufferedReader = io.BufferedReader(cast(Any, stream), BUFFER_BYTES)
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            yield file
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


# Kinds of files.


def text_documents(path: Path, separator: str) -> Iterator[Found]:
    """Plain text by a separator (see :class:`CorpusConfig`). Line ends around a document are no part of it.

    Documents of nothing but white space are not counted, except with ``line``.
    """
    with open_bytes(path) as file:
        if separator == "line":
            for number, line in enumerate(file, 1):
                yield line.rstrip(b"\r\n"), f"{path}: line {number}"
            return
        marker = b"" if separator == "blank_line" else separator.encode()
        for begin, block in _blocks(file, None if separator == "file" else marker):
            if block.strip():
                yield block.strip(b"\r\n"), f"{path}: document at byte {begin}"


def _blocks(file: io.BufferedReader, marker: bytes | None) -> Iterator[tuple[int, bytes]]:
    """Runs of lines between lines that, stripped, equal ``marker``, and where they begin."""
    block: list[bytes] = []
    begin = offset = 0
    for line in file:
        offset += len(line)
        # startswith first: stripping each of a billion lines costs more than reading them.
        if marker is not None and (not marker or line.startswith(marker)) and line.strip() == marker:
            yield begin, b"".join(block)
            block, begin = [], offset
        else:
            block.append(line)
    yield begin, b"".join(block)


def open_source(config: CorpusConfig, split: str) -> Source | None:
    """The source of a split; None for a validation split that is cut from the training source."""
    source, hub_split = config.source, config.split
    if split == "validation":
        if config.validation_source:
            source = config.validation_source
        elif config.validation_split:
            hub_split = config.validation_split
        elif scheme_of(source)[0] != "maze":
            return None
    scheme, rest = scheme_of(source)
    if scheme == "text":
        return Files(rest, partial(text_documents, separator=config.document_separator))
    if scheme == "scores":
        what, remedy = "rows that an engine scored are no text", "extract: they are packed already"
        raise UsageError(what, where=config.source, remedy=remedy)
    if scheme == "maze":
        from pipeline.maze import maze_documents

        return Listed(*maze_documents(rest, config.seed, split), where=source)
    from pipeline.corpus import tables

    if scheme == "hf":
        texts, facts, files = tables.hub_texts(rest, hub_split, config.field, config.revision)
        return Listed(texts, facts, source, files)
    pattern, named = split_field(rest)
    field = named or config.field
    if scheme == "csv":
        return Files(pattern, lambda path: _opened(path, partial(tables.csv_rows, field)))
    if scheme == "parquet":
        return Files(
            pattern, partial(tables.parquet_rows, field), num_documents=partial(tables.count_parquet_rows, field)
        )
    parse = partial(tables.json_text, field)
    if scheme == "chat":
        parse = partial(tables.conversation, field, config.packing == "prompts")
    return Files(pattern, json_lines, parse)


def json_lines(path: Path) -> Iterator[Found]:
    """One JSON object a line; blank lines are not counted."""
    return (found for found in text_documents(path, "line") if found[0].strip())


def _opened(path: Path, read: Callable[[io.BufferedReader, Path], Iterator[Found]]) -> Iterator[Found]:
    with open_bytes(path) as file:
        yield from read(file, path)


# Clean text, and splits.


@dataclass
class Tally:
    """What was read so far of one split: documents handed on, bytes of UTF-8 of these and of those left out
    for being blank, those that were no UTF-8, and control characters kept in the text."""

    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_bad_utf8: int = 0
    num_control_characters: int = 0


def _decoded(text: bytes | str, where: str, source: Source, policy: BadUtf8, tally: Tally) -> str | None:
    """The document's clean text, counted in ``tally``; None if the policy leaves it out."""

    def is_refused(byte: int, got: str) -> bool:
        tally.num_bad_utf8 += 1
        if policy == "error":
            place, remedy = f"{where}, byte {byte}", "convert it, or --set corpus.on_bad_utf8=replace (or skip)"
            raise GdistillError("the text is not UTF-8", where=place, got=got, remedy=remedy)
        return policy == "skip"

    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            if is_refused(error.start, f"byte 0x{text[error.start]:02x} ({error.reason})"):
                return None
            text = text.decode("utf-8", "replace")
    text = source.parse(text, where)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        if is_refused(error.start, "a lone surrogate"):
            return None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoded = text.encode()
    tally.num_control_characters += len(encoded) - len(encoded.translate(None, CONTROL_BYTES))
    tally.num_bytes += len(encoded)
    return text


@dataclass(frozen=True)
class Span:
    """A run of a source's documents that belongs to one split.

    ``begin`` and ``end``, fractions of characters, differ from 0 and 1 only where the first or the
    last document is divided between the splits.
    """

    split: str
    source: Source
    start: int
    stop: int
    begin: float = 0.0
    end: float = 1.0

    def part(self, number: int, text: str) -> str:
        """What counts of document ``number``, cut at white space."""
        begin = self.begin if number == self.start else 0.0
        end = self.end if number == self.stop - 1 else 1.0
        if (begin, end) == (0.0, 1.0):
            return text
        first, last = (_next_space(text, round(len(text) * at)) for at in (begin, end))
        return text[first:last]


def _next_space(text: str, at: int) -> int:
    while 0 < at < len(text) and not text[at].isspace():
        at += 1
    return at


def plan_spans(config: CorpusConfig) -> list[Span]:
    """What each split reads, by the configuration's split rule."""
    train, validation = open_source(config, "train"), open_source(config, "validation")
    assert train is not None
    count = _limited_count(train, config)
    if validation is not None:
        return [Span("train", train, 0, count), Span("validation", validation, 0, _limited_count(validation, config))]
    held_out, fraction = config.validation_documents, config.validation_fraction
    if held_out > count:
        what, where = "more documents are held out than there are", "corpus.validation_documents"
        raise UsageError(what, where=where, got=held_out, expected=f"at most {count}")
    if not held_out and 0 < fraction < 1 and round(fraction * count) < MANY_HELD_OUT:
        if config.packing not in MARKED:
            return _fair_spans(train, count, fraction)
        held_out = min(count - 1, math.ceil(fraction * count))  # no conversation is divided
    cut = count - (held_out or round(fraction * count))
    return [Span("train", train, 0, cut), Span("validation", train, cut, count)]


def _fair_spans(source: Source, count: int, fraction: float) -> list[Span]:
    """Hold out a fraction of few documents by their characters, for they may be of any size.

    At the nearest border of documents, if that holds out half to one and a half times what is
    wanted, or 5% at most; else the document where the cut falls is divided.
    """
    sizes = []
    for content, where in source.documents(0, count):
        text = content if isinstance(content, str) else content.decode("utf-8", "replace")
        sizes.append(len(source.parse(text, where)))
    total = sum(sizes)
    # Characters of the last 0, 1, 2, ... documents, one at least left to train.
    tails = [*accumulate(sizes[:0:-1], initial=0)]
    wanted = fraction * total
    held_out = min(range(len(tails)), key=lambda tail: abs(tails[tail] - wanted))
    if not tails[held_out]:
        held_out = next((tail for tail in range(len(tails)) if tails[tail]), 0)
    if wanted / 2 <= tails[held_out] <= max(1.5 * wanted, MOST_HELD_OUT * total) and held_out:
        cut = count - held_out
        return [Span("train", source, 0, cut), Span("validation", source, cut, count)]
    after, place = 0, count - 1
    while place > 0 and after + sizes[place] < wanted:
        after, place = after + sizes[place], place - 1
    at = 1 - (wanted - after) / max(1, sizes[place])
    return [Span("train", source, 0, place + 1, end=at), Span("validation", source, place, count, begin=at)]


def _limited_count(source: Source, config: CorpusConfig) -> int:
    count = source.count()
    if not count:
        raise GdistillError("the corpus has no documents", where=f"corpus {config.source}")
    return min(count, config.limit_documents or count)


def read_span(span: Span, config: CorpusConfig, tally: Tally, start: int | None = None) -> Iterator[tuple[int, str]]:
    """(document number in the source, clean text) of a span, from document ``start`` on."""
    detokenize = None
    if config.detokenizer != "none":
        from pipeline.corpus.detokenize import detokenizer

        detokenize = detokenizer(config.detokenizer)
    first = span.start if start is None else start
    for number, found in enumerate(span.source.documents(first, span.stop), first):
        text = _decoded(*found, span.source, config.on_bad_utf8, tally)
        if text is None:
            continue
        part = span.part(number, text)
        if part is not text:
            tally.num_bytes -= len(text.encode()) - len(part.encode())
        text = detokenize(part) if detokenize else part
        if not config.keep_empty and (not text or text.isspace()):
            tally.num_empty += 1
        else:
            tally.num_documents += 1
            yield number, text
