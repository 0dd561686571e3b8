"""Which corpus: a preset, a configuration file, a source in one word, or a path.

``maze[:LAYOUT]``, ``text:PATH-or-GLOB``, ``jsonl:PATH#field``, ``csv:PATH#column``,
``parquet:PATH#column``, ``hf:NAME[:CONFIG]``, the name of a preset in ``presets/``, a TOML file
like those, or the bare path (or glob) of files whose suffix tells their kind.

Nothing here reads a document, so that asking for help or a wrong word costs no heavy import.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.corpus.detokenize import detokenizer
from shards.base import UsageError, read_toml, resolve

PRESETS = Path(__file__).parent / "presets"
SPLITS = ("train", "validation")
SCHEMES = ("maze", "text", "jsonl", "csv", "parquet", "hf", "scores")
SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
"""Kind of a bare path by its suffix, ``.gz`` and ``.zst`` left aside."""
BadUtf8 = Literal["error", "replace", "skip"]
Packing = Literal["concat", "wrap", "pad"]


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
        from pipeline.maze import load_maze  # late: it waits for torch

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
