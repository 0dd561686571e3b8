"""What happens to text that is not clean, and the count of it.

Documents are UTF-8. One that is not is an error by default, or repaired with U+FFFD, or left out;
a lone surrogate (from a JSON escape) is treated the same way. Control characters (C0 but for tab,
line feed and carriage return, and DEL) are part of the text: they are kept and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from glob import has_magic, iglob
from pathlib import Path
from typing import Any, Literal

from pipeline.corpus.detokenize import detokenizer
from pipeline.corpus.files import RawDocument, Source
from shards.errors import GdistillError, UsageError, did_you_mean
from shards.settings import parse_override, read_toml, resolve

CONTROL_BYTES = bytes(sorted((set(range(32)) - set(b"\t\n\r")) | {127}))


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


def decode_document(
    raw: RawDocument, source: Source, on_bad_utf8: BadUtf8, tally: Tally
) -> str | None:
    """The document's clean text, counted in ``tally``; None if the policy leaves it out.

    Raises:
        GdistillError: For text that is not UTF-8, under the policy ``error``.
    """
    decoded = _decode(raw, source, on_bad_utf8, tally)
    if decoded is None:
        return None
    text = source.text(decoded, raw)
    try:
        encoded = raw.content if text is decoded and isinstance(raw.content, bytes) else None
        encoded = text.encode() if encoded is None else encoded
    except UnicodeEncodeError as error:
        if not _tolerated(raw, source, on_bad_utf8, tally, error.start, "a lone surrogate"):
            return None
        encoded = text.encode("utf-8", "replace")
        text = encoded.decode()
    tally.num_control_characters += len(encoded) - len(encoded.translate(None, CONTROL_BYTES))
    tally.num_bytes += len(encoded)
    return text


def _decode(raw: RawDocument, source: Source, on_bad_utf8: BadUtf8, tally: Tally) -> str | None:
    if isinstance(raw.content, str):
        return raw.content
    try:
        return raw.content.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw.content[error.start]:02x} ({error.reason})"
        if not _tolerated(raw, source, on_bad_utf8, tally, error.start, found):
            return None
        return raw.content.decode("utf-8", "replace")


def _tolerated(
    raw: RawDocument,
    source: Source,
    on_bad_utf8: BadUtf8,
    tally: Tally,
    byte: int,
    found: str,
) -> bool:
    """Count bad text; whether it is to be repaired (else left out)."""
    if on_bad_utf8 == "error":
        raise GdistillError(
            "the text is not UTF-8",
            where=source.place(raw, byte),
            got=found,
            remedy="convert it, or --set corpus.on_bad_utf8=replace (or skip)",
        )
    tally.num_bad_utf8 += 1
    return on_bad_utf8 == "replace"


# Which corpus: a preset, a configuration file, a source in one word, or a path.
#
# ``maze[:LAYOUT]``, ``text:PATH-or-GLOB``, ``jsonl:PATH#field``, ``csv:PATH#column``,
# ``parquet:PATH#column``, ``hf:NAME[:CONFIG]``, the name of a preset in ``presets/``, a TOML file
# like those, or the bare path (or glob) of files whose suffix tells their kind.
#
# Nothing here reads a document, so that asking for help or a wrong word costs no heavy import.


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
SpecialTokens = Literal["text", "token"]
MEANT_FOR = {
    "field": ("jsonl", "csv", "parquet", "hf"),
    "split": ("hf",),
    "revision": ("hf",),
    "validation_split": ("hf",),
    "document_separator": ("text",),
    "seed": ("maze",),
}
"""Settings that only some kinds of source look at."""


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
        validation_fraction: Without any of the above, this fraction from the end. Of many
            documents it is counted in documents, of few (fewer than 100 held out) in characters;
            where no border of documents is near, the document there is cut in two. 1 holds out
            everything.
        limit_documents: Read only this many first documents of each source.
        document_separator: What ends a document of a ``text:`` source: a line of this text
            (``<|endoftext|>`` unless told), or ``line``, ``blank_line`` or ``file``. The end of a
            file always does, so a file without separator lines is one document.
        detokenizer: See :mod:`pipeline.corpus.detokenize`.
        keep_empty: Keep documents of nothing but white space (they leave separators behind).
        on_bad_utf8: ``error``, ``replace`` or ``skip``; see :mod:`pipeline.corpus.config`.
        packing, group_documents: See :mod:`pipeline.tokens.packing`.
        row_length: Tokens of a row; None lets the command choose from the teacher's context.
        separate_train, separate_validation: Whether a separator follows each document of a stream.
        bos_id, eos_id, separator_id: Override what the tokenizer says (``special_ids``).
        special_tokens: What a special token is that a document spells out (``<s>``,
            ``<|endoftext|>``): ``text`` like any other, or the ``token``, as ``transformers`` has
            it. Counted either way.
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
    special_tokens: SpecialTokens = "text"
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


DEFAULTS = {field.name: field.default for field in fields(CorpusConfig)}


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
    own = "for files of your own: their path"
    hint = did_you_mean(spec.partition(":")[0], [*known, *SCHEMES], own, cutoff=0.5)
    return UsageError(
        "unknown corpus", where=f"--corpus {spec}", expected=f"one of {known}", remedy=hint
    )


def corpus_config(
    spec: str, overrides: Iterable[str] = (), settings: dict[str, Any] | None = None
) -> CorpusConfig:
    """The configuration of a corpus named on the command line.

    Args:
        spec: Preset, TOML file, source, or the path of files.
        overrides: ``key=value`` texts; they win.
        settings: Further values by field name; None values are ignored.

    Raises:
        UsageError: For an unknown corpus or setting, a value out of range, or a setting that this
            kind of source does not look at.
    """
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    for text in overrides:
        path, value = parse_override(text)
        given[".".join(path)] = value
    config = resolve(CorpusConfig, _base(spec), given)
    _check_meaning(config, given)
    scheme, rest = scheme_of(config.source)
    if scheme == "maze" and config.row_length is None:
        from pipeline.maze.layout import load_maze  # late: it waits for torch

        config = replace(config, row_length=load_maze(rest or "k4").row_length)
    return config


def _check_meaning(config: CorpusConfig, given: dict[str, Any]) -> None:
    """Refuse settings that nothing would look at."""
    sources = [source for source in (config.source, config.validation_source) if source]
    schemes = {scheme_of(source)[0] for source in sources}
    for name, fitting in MEANT_FOR.items():
        value = getattr(config, name)
        if name in given and value != DEFAULTS[name] and not schemes & set(fitting):
            raise UsageError(
                f"this setting means nothing for a {'/'.join(sorted(schemes))}: source",
                where=f"corpus.{name}",
                got=repr(value),
                expected=f"a source of {', '.join(f'{scheme}:' for scheme in fitting)}",
                remedy="leave it out",
            )
    named = config.source.partition("#")[2]
    if named and given.get("field", named) != named and len(sources) == 1:
        raise UsageError(
            "two fields are named", where="corpus.field", got=f"{given['field']!r} and #{named}"
        )


def _base(spec: str) -> dict[str, Any]:
    scheme, colon, _ = spec.partition(":")
    if spec in preset_names():
        return read_toml(PRESETS / f"{spec}.toml")
    if colon and scheme in SCHEMES:
        preset = read_toml(PRESETS / "maze.toml") if scheme == "maze" else {}
        return {**preset, "source": spec}
    if spec.endswith(".toml"):
        return read_toml(Path(spec))
    return {"source": _source_of_path(spec)}


def _source_of_path(spec: str) -> str:
    """A bare path or glob, with ``#field`` if need be, as a source: its suffix tells the kind.

    Raises:
        UsageError: If there is no such file, or its suffix tells nothing.
    """
    path = Path(os.path.expanduser(spec.partition("#")[0]))
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    pattern = os.path.expanduser(spec if os.path.exists(spec) else spec.partition("#")[0])
    found = os.path.exists(pattern) or (has_magic(pattern) and any(iglob(pattern, recursive=True)))
    if not found:
        if ":" not in spec and (suffix in SUFFIXES or "/" in spec or spec.startswith("~")):
            raise UsageError(
                "no such corpus file",
                where=f"--corpus {spec}",
                expected="a path, a glob in quotes, a preset (owt, ...) or hf:NAME",
            )
        raise _unknown(spec)
    if os.path.isdir(pattern):
        raise UsageError(
            "the corpus path is a directory",
            where=f"--corpus {spec}",
            expected="a file or a glob",
            remedy=f"for all text files in it: '{spec.rstrip('/')}/*.txt'",
        )
    if suffix not in SUFFIXES:
        raise UsageError(
            "the suffix does not tell what the corpus file holds",
            where=f"--corpus {spec}",
            expected=f"one of {', '.join(SUFFIXES)}, also with .gz or .zst",
            remedy=f"say it: text:{spec}, jsonl:{spec}#field, ...",
        )
    return f"{SUFFIXES[suffix]}:{spec}"
