"""Corpora: a preset, a configuration file or a source in one word -> documents.

``maze[:LAYOUT]``, ``text:PATH-or-GLOB``, ``jsonl:PATH#field``, ``parquet:PATH#column``,
``hf:NAME[:CONFIG]``, the name of a preset in ``pipeline/corpora/``, or a TOML file like those.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.corpus.detokenize import detokenizer
from pipeline.corpus.sources import (
    HubDataset,
    JsonLines,
    MazePaths,
    ParquetFiles,
    Source,
    TextFiles,
)
from pipeline.corpus.text_policy import BadUtf8, Tally, decode_document
from pipeline.maze import NUM_TRAINING_DOCUMENTS, NUM_VALIDATION_DOCUMENTS, load_maze
from pipeline.tokens import Packing
from shards.base import GdistillError, UsageError, read_toml, resolve

PRESETS = Path(__file__).parent / "presets"
SCHEMES = ("maze", "text", "jsonl", "parquet", "hf")
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class CorpusConfig:
    """Where documents come from, how they are split, cleaned and packed.

    Attributes:
        source: ``SCHEME:...``, see the module.
        field: Field or column of the text, for sources that have one and do not name it.
        split: Split of a hub data set that is read.
        revision: Revision of a hub data set (branch, tag or commit).
        validation_source: A source of its own for validation, in the same grammar.
        validation_split: Another split of the same hub data set for validation.
        validation_documents: Without either, this many last documents are held out.
        validation_fraction: Without any of the above, this fraction of the documents, from the
            end, at least one; of a single document, its tail. 1 holds out everything.
        limit_documents: Read only this many first documents of each source.
        document_separator: What ends a document of a ``text:`` source: a line of this text
            (``<|endoftext|>`` unless told), or ``line``, ``blank_line`` or ``file``. The end of a
            file always does, so a file without separator lines is one document.
        detokenizer: See :mod:`pipeline.corpus.detokenize`.
        keep_empty: Keep documents of nothing but white space (they leave separators behind).
        on_bad_utf8: ``error``, ``replace`` or ``skip``; see :mod:`pipeline.corpus.text_policy`.
        packing, group_documents: See :mod:`pipeline.tokens.packing`.
        row_length: Tokens of a row; None lets the command choose from the teacher's context.
        separate_train, separate_validation: Whether a separator follows each document of a stream.
        bos_id, eos_id, separator_id: Override what the tokenizer says (``special_ids``).
        seed: Seed of a drawn corpus (``maze``).
    """

    source: str
    field: str = "text"
    split: str = "train"
    revision: str | None = None
    validation_source: str | None = None
    validation_split: str | None = None
    validation_documents: int = 0
    validation_fraction: float = 0.01
    limit_documents: int | None = None
    document_separator: str = "<|endoftext|>"
    detokenizer: str = "none"
    keep_empty: bool = False
    on_bad_utf8: BadUtf8 = "error"
    packing: Packing = "concat"
    group_documents: int = 0
    row_length: int | None = None
    separate_train: bool = True
    separate_validation: bool = True
    bos_id: int | None = None
    eos_id: int | None = None
    separator_id: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        scheme_of(self.source)
        detokenizer(self.detokenizer)
        self._check(0 <= self.validation_fraction <= 1, "validation_fraction", "0 to 1")
        self._check(self.validation_documents >= 0, "validation_documents", "0 or more")
        self._check(self.group_documents >= 0, "group_documents", "0 or more")
        self._check(self.row_length is None or self.row_length >= 2, "row_length", "2 or more")
        limit = self.limit_documents
        self._check(limit is None or limit > 0, "limit_documents", "1 or more")
        self._check(bool(self.document_separator.strip()), "document_separator", "some text")
        if self.validation_source and self.validation_split:
            raise UsageError("validation_source and validation_split exclude each other")
        if self.group_documents and self.packing == "pad":
            raise UsageError("group_documents means nothing for pad", where="corpus.packing")

    def _check(self, good: bool, name: str, expected: str) -> None:
        if not good:
            got = repr(getattr(self, name))
            raise UsageError(
                "value out of range", where=f"corpus.{name}", got=got, expected=expected
            )


def scheme_of(source: str) -> tuple[str, str]:
    """(scheme, rest) of a source; an unknown scheme is a :class:`UsageError`."""
    scheme, _, rest = source.partition(":")
    if scheme in SCHEMES:
        return scheme, rest
    raise _unknown(source)


def preset_names() -> list[str]:
    """The corpora that have a file of their own."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _unknown(spec: str) -> UsageError:
    known = [*preset_names(), *(f"{scheme}:" for scheme in SCHEMES)]
    near = difflib.get_close_matches(spec.partition(":")[0], [*known, *SCHEMES], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "for a file of your own: text:PATH"
    return UsageError(
        "unknown corpus", where=f"--corpus {spec}", expected=f"one of {known}", remedy=hint
    )


def corpus_config(
    spec: str, overrides: Iterable[str] = (), settings: dict[str, Any] | None = None
) -> CorpusConfig:
    """The configuration of a corpus named on the command line.

    Args:
        spec: Preset, TOML file or source.
        overrides: ``key=value`` texts; they win.
        settings: Further values by field name; None values are ignored.
    """
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    config = resolve(CorpusConfig, _base(spec), given, overrides=overrides)
    scheme, rest = scheme_of(config.source)
    if scheme == "maze" and config.row_length is None:
        fitting = {"row_length": load_maze(rest or "k4").row_length}
        config = resolve(CorpusConfig, _base(spec), fitting, given, overrides=overrides)
    return config


def _base(spec: str) -> dict[str, Any]:
    scheme, colon, _ = spec.partition(":")
    if spec in preset_names():
        return read_toml(PRESETS / f"{spec}.toml")
    if spec.endswith(".toml") and not colon:
        return read_toml(Path(spec))
    if scheme not in SCHEMES or not colon:
        raise _unknown(spec)
    preset = read_toml(PRESETS / "maze.toml") if scheme == "maze" else {}
    return {**preset, "source": spec}


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
    if scheme == "text":
        return TextFiles(rest, config.document_separator)
    if scheme == "maze":
        sizes = {"train": NUM_TRAINING_DOCUMENTS, "validation": NUM_VALIDATION_DOCUMENTS}
        return MazePaths(load_maze(rest or "k4"), sizes[split], config.seed, split)
    if scheme == "hf":
        name, _, variant = rest.partition(":")
        return HubDataset(name, variant or None, hub_split, config.field, config.revision)
    pattern, _, named = rest.rpartition("#") if "#" in rest else (rest, "", "")
    kind = JsonLines if scheme == "jsonl" else ParquetFiles
    return kind(pattern, named or config.field)


@dataclass(frozen=True)
class Span:
    """A run of a source's documents that belongs to one split.

    Attributes:
        begin, end: The part of each document that counts, as fractions of its characters; they
            differ from 0 and 1 only when a single document is divided between the splits.
    """

    split: str
    source: Source
    start: int
    stop: int
    begin: float = 0.0
    end: float = 1.0


def plan_spans(config: CorpusConfig) -> list[Span]:
    """What each split reads, by the configuration's split rule.

    Raises:
        GdistillError: If the corpus has no documents.
        UsageError: If more documents are to be held out than there are.
    """
    train = open_source(config, "train")
    assert train is not None
    validation = open_source(config, "validation")
    num_documents = _limited_count(train, config)
    if validation is not None:
        return [
            Span("train", train, 0, num_documents),
            Span("validation", validation, 0, _limited_count(validation, config)),
        ]
    held_out, fraction = config.validation_documents, config.validation_fraction
    if held_out > num_documents:
        raise UsageError(
            "more documents are to be held out than there are",
            where="corpus.validation_documents",
            got=held_out,
            expected=f"at most {num_documents}",
        )
    if num_documents == 1 and not held_out and 0 < fraction < 1:
        return [
            Span("train", train, 0, 1, end=1 - fraction),
            Span("validation", train, 0, 1, begin=1 - fraction),
        ]
    if not held_out and fraction:
        most = num_documents if fraction == 1 else num_documents - 1
        held_out = min(most, max(1, round(fraction * num_documents)))
    cut = num_documents - held_out
    return [
        Span("train", train, 0, cut),
        Span("validation", train, cut, num_documents),
    ]


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
        if (span.begin, span.end) != (0.0, 1.0):
            whole, text = text, _part(text, span.begin, span.end)
            tally.num_bytes -= len(whole.encode()) - len(text.encode())
        text = detokenize(text)
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
