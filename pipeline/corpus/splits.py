"""Which documents belong to which split, and reading them as clean text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.corpus.config import CorpusConfig, Tally, decode_document, scheme_of
from pipeline.corpus.detokenize import detokenizer
from pipeline.corpus.files import CsvFiles, JsonLines, ParquetFiles, RawDocument, Source, TextFiles
from pipeline.corpus.hub import HubDataset
from pipeline.corpus.maze_paths import MazePaths
from pipeline.maze.layout import NUM_TRAINING_DOCUMENTS, NUM_VALIDATION_DOCUMENTS, load_maze
from shards.errors import GdistillError, UsageError

MANY_HELD_OUT = 100
"""From so many held-out documents on, a share of them is a share of the text, near enough."""
MOST_HELD_OUT = 0.05


def open_source(config: CorpusConfig, split: str) -> Source | None:
    """The source of a split; None for a validation split that is cut from the training source."""
    if split == "train":
        return _open(config.source, config.split, config, split)
    if config.validation_source:
        return _open(config.validation_source, config.split, config, split)
    if config.validation_split:
        return _open(config.source, config.validation_split, config, split)
    own_draws = scheme_of(config.source)[0] == "maze"
    return _open(config.source, config.split, config, split) if own_draws else None


def _open(source: str, hub_split: str, config: CorpusConfig, split: str) -> Source:
    scheme, rest = scheme_of(source)
    if scheme == "scores":
        raise UsageError(
            "rows that an engine scored are no text",
            where=source,
            remedy="extract from them: they are packed and scored already",
        )
    if scheme == "text":
        return TextFiles(rest, config.document_separator)
    if scheme == "maze":
        sizes = {"train": NUM_TRAINING_DOCUMENTS, "validation": NUM_VALIDATION_DOCUMENTS}
        return MazePaths(load_maze(rest or "k4"), sizes[split], config.seed, split)
    if scheme == "hf":
        name, _, variant = rest.partition(":")
        return HubDataset(name, variant or None, hub_split, config.field, config.revision)
    pattern, _, named = rest.rpartition("#") if "#" in rest else (rest, "", "")
    kind = {"jsonl": JsonLines, "csv": CsvFiles, "parquet": ParquetFiles}[scheme]
    return kind(pattern, named or config.field)


@dataclass(frozen=True)
class Span:
    """A run of a source's documents that belongs to one split.

    Attributes:
        begin: Where the first document starts to count, as a fraction of its characters.
        end: Where the last document stops to count. Both differ from 0 and 1 only where a
            document is divided between the splits.
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
        return text if (begin, end) == (0.0, 1.0) else _part(text, begin, end)


def plan_spans(config: CorpusConfig) -> list[Span]:
    """What each split reads, by the configuration's split rule.

    Raises:
        GdistillError: If the corpus has no documents.
        UsageError: If more documents are to be held out than there are.
    """
    train = open_source(config, "train")
    assert train is not None
    validation = open_source(config, "validation")
    count = _limited_count(train, config)
    if validation is not None:
        return [
            Span("train", train, 0, count),
            Span("validation", validation, 0, _limited_count(validation, config)),
        ]
    held_out, fraction = config.validation_documents, config.validation_fraction
    if held_out > count:
        raise UsageError(
            "more documents are to be held out than there are",
            where="corpus.validation_documents",
            got=held_out,
            expected=f"at most {count}",
        )
    if not held_out and 0 < fraction < 1 and round(fraction * count) < MANY_HELD_OUT:
        return _fair_spans(train, count, fraction)
    cut = count - (held_out or round(fraction * count))
    return [Span("train", train, 0, cut), Span("validation", train, cut, count)]


def _fair_spans(source: Source, count: int, fraction: float) -> list[Span]:
    """Hold out a fraction of few documents by their characters, for they may be of any size.

    The border of documents that is nearest, if it holds out half to one and a half times what is
    wanted, or 5% at most; else the document where the cut falls is divided.
    """
    sizes = [_num_characters(source, raw) for raw in source.documents(0, count)]
    total = sum(sizes)
    tails = [0]  # characters of the last 0, 1, 2, ... documents, one at least left to train
    for size in sizes[:0:-1]:
        tails.append(tails[-1] + size)
    wanted = fraction * total
    held_out = min(range(len(tails)), key=lambda tail: abs(tails[tail] - wanted))
    if not tails[held_out] and len(tails) > 1:
        held_out = next((tail for tail in range(len(tails)) if tails[tail]), 0)
    if wanted / 2 <= tails[held_out] <= max(1.5 * wanted, MOST_HELD_OUT * total) and held_out:
        cut = count - held_out
        return [Span("train", source, 0, cut), Span("validation", source, cut, count)]
    after, place = 0, count - 1
    while place > 0 and after + sizes[place] < wanted:
        after, place = after + sizes[place], place - 1
    at = 1 - (wanted - after) / max(1, sizes[place])
    return [
        Span("train", source, 0, place + 1, end=at),
        Span("validation", source, place, count, begin=at),
    ]


def _num_characters(source: Source, raw: RawDocument) -> int:
    text = raw.content if isinstance(raw.content, str) else raw.content.decode("utf-8", "replace")
    return len(source.text(text, raw))


def _limited_count(source: Source, config: CorpusConfig) -> int:
    count = source.count()
    if not count:
        raise GdistillError("the corpus has no documents", where=f"corpus {config.source}")
    return min(count, config.limit_documents or count)


def read_span(
    span: Span, config: CorpusConfig, tally: Tally, start: int | None = None
) -> Iterator[tuple[int, str]]:
    """(document number in the source, clean text) of a span, from document ``start`` on."""
    detokenize = detokenizer(config.detokenizer)
    first = span.start if start is None else start
    for number, raw in enumerate(span.source.documents(first, span.stop), first):
        text = decode_document(raw, span.source, config.on_bad_utf8, tally)
        if text is None:
            continue
        part = span.part(number, text)
        if part is not text:
            tally.num_bytes -= len(text.encode()) - len(part.encode())
        text = detokenize(part)
        if not config.keep_empty and (not text or text.isspace()):
            tally.num_empty += 1
            continue
        tally.num_documents += 1
        yield number, text


def _part(text: str, begin: float, end: float) -> str:
    """A part of the text by fractions of its length, moved to the next white space."""
    first, last = (_next_space(text, round(len(text) * at)) for at in (begin, end))
    return text[first:last]


def _next_space(text: str, at: int) -> int:
    while 0 < at < len(text) and not text[at].isspace():
        at += 1
    return at


def read_documents(
    config: CorpusConfig, split: str = "train", tally: Tally | None = None
) -> Iterator[str]:
    """The documents of one split, in order, a few in memory at a time.

    Args:
        tally: Counts what was read, left out and repaired, if given.

    Raises:
        UsageError: For a source, field or column that does not exist.
        GdistillError: For an unreadable source, bad text, or no documents.
    """
    tally = tally or Tally()
    for span in plan_spans(config):
        if span.split == split:
            for _, text in read_span(span, config, tally):
                yield text
