"""Numbered documents of clean text, and which of them belong to which split.

A source gives documents as found, bytes or text. They are UTF-8: one that is not is an error by
default, or repaired with U+FFFD, or left out; a lone surrogate (from a JSON escape) is treated the
same way. Control characters (C0 but for tab, line feed and carriage return, and DEL) are part of
the text: they are kept and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from pipeline.corpus.config import MARKED, BadUtf8, CorpusConfig, scheme_of, split_field
from pipeline.corpus.sources import RawDocument, Source, TextFiles
from shards.errors import GdistillError, UsageError

CONTROL_BYTES = bytes(sorted((set(range(32)) - set(b"\t\n\r")) | {127}))
MANY_HELD_OUT = 100
"""From so many held-out documents on, a share of them is a share of the text, near enough."""
MOST_HELD_OUT = 0.05


@dataclass
class Tally:
    """What was read so far; all counts are of one split.

    Attributes:
        num_documents: Documents handed on.
        num_bytes: Their size in UTF-8.
        num_empty: Documents left out for holding nothing but white space.
        num_bad_utf8: Documents that were not UTF-8, repaired or left out.
        num_control_characters: Control characters kept in the text.
    """

    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_bad_utf8: int = 0
    num_control_characters: int = 0


def _decoded(raw: RawDocument, source: Source, policy: BadUtf8, tally: Tally) -> str | None:
    """The document's clean text, counted in ``tally``; None if the policy leaves it out.

    Raises:
        GdistillError: For text that is not UTF-8, under the policy ``error``.
    """

    def refuse(byte: int, got: str) -> None:
        tally.num_bad_utf8 += 1
        if policy == "error":
            where = source.place(raw, byte)
            remedy = "convert it, or --set corpus.on_bad_utf8=replace (or skip)"
            raise GdistillError("the text is not UTF-8", where=where, got=got, remedy=remedy)

    encoded, decoded = b"", raw.content
    if isinstance(decoded, bytes):
        encoded = decoded
        try:
            decoded = encoded.decode()
        except UnicodeDecodeError as error:
            refuse(error.start, f"byte 0x{encoded[error.start]:02x} ({error.reason})")
            if policy == "skip":
                return None
            decoded = encoded.decode("utf-8", "replace")
            encoded = b""
    text = source.text(decoded, raw)
    try:
        encoded = encoded if encoded and text is decoded else text.encode()
    except UnicodeEncodeError as error:
        refuse(error.start, "a lone surrogate")
        if policy == "skip":
            return None
        encoded = text.encode("utf-8", "replace")
        text = encoded.decode()
    tally.num_control_characters += len(encoded) - len(encoded.translate(None, CONTROL_BYTES))
    tally.num_bytes += len(encoded)
    return text


# Splits.


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
        return TextFiles(rest, config.document_separator)
    if scheme == "scores":
        what, remedy = "rows that an engine scored are no text", "extract: they are packed already"
        raise UsageError(what, where=config.source, remedy=remedy)
    if scheme == "maze":
        from pipeline.maze import MazePaths

        return MazePaths.of(rest or "k4", config.seed, split)
    from pipeline.corpus.tables import TABLES, ChatLines, HubDataset

    if scheme == "chat":
        pattern, named = split_field(rest)
        return ChatLines(pattern, named or config.field, config.packing == "prompts")
    if scheme in TABLES:
        pattern, named = split_field(rest)
        return TABLES[scheme](pattern, named or config.field)
    name, _, variant = rest.partition(":")
    return HubDataset(name, variant or None, hub_split, config.field, config.revision)


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
    """What each split reads, by the configuration's split rule.

    Raises:
        GdistillError: If the corpus has no documents.
        UsageError: If more documents are to be held out than there are.
    """
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

    The border of documents that is nearest, if it holds out half to one and a half times what is
    wanted, or 5% at most; else the document where the cut falls is divided.
    """
    sizes = []
    for raw in source.documents(0, count):
        content = raw.content
        text = content if isinstance(content, str) else content.decode("utf-8", "replace")
        sizes.append(len(source.text(text, raw)))
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
    for number, raw in enumerate(span.source.documents(first, span.stop), first):
        text = _decoded(raw, span.source, config.on_bad_utf8, tally)
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
