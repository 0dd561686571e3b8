"""Which corpus: a preset, a configuration file, a source in one word, or the path of files.

``maze[:LAYOUT]``, ``text:PATH-or-GLOB``, ``jsonl:PATH#field``, ``csv:PATH#column``,
``parquet:PATH#column``, ``hf:NAME[:CONFIG]``, the name of a preset in ``presets/``, a TOML file
like those, or the bare path (or glob) of files whose suffix tells their kind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from glob import has_magic, iglob
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError, did_you_mean
from shards.settings import check_bounds, read_toml, resolve, setting

PRESETS = Path(__file__).parent / "presets"
SPLITS = ("train", "validation")
SCHEMES = ("maze", "text", "jsonl", "csv", "parquet", "hf", "chat", "scores")
SUFFIXES = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}
"""Kind of a bare path by its suffix, ``.gz`` and ``.zst`` left aside."""
BadUtf8 = Literal["error", "replace", "skip"]
Packing = Literal["concat", "wrap", "pad", "chat", "prompts"]
MARKED = ("chat", "prompts")
"""Packings of conversations, whose tokens do not all count."""
SpecialTokens = Literal["text", "token"]
MEANT_FOR = {
    "field": ("jsonl", "csv", "parquet", "hf", "chat"),
    **dict.fromkeys(("split", "revision", "validation_split"), ("hf",)),
    "document_separator": ("text",),
    "seed": ("maze",),
}
"""Settings that only some kinds of source look at."""
OF_SCORED_ROWS = ("source", "row_length", "validation_fraction")
"""All that means something for rows that an engine scored."""


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
            (``<|endoftext|>`` by default), or ``line``, ``blank_line`` or ``file``. The end of a
            file always does, so a file without separator lines is one document.
        detokenizer: See :mod:`pipeline.corpus.detokenize`.
        keep_empty: Keep documents of nothing but white space (they leave separators behind).
        on_bad_utf8: ``error``, ``replace`` or ``skip``; see :mod:`pipeline.corpus.documents`.
        packing: ``concat``, ``wrap``, ``pad``, ``chat``, ``prompts``: :mod:`pipeline.tokens.tokenizer`.
        group_documents: Pack so many documents by themselves, and drop the rest of each group.
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
    validation_documents: int = setting(0, within="[0, inf)")
    validation_fraction: float = setting(0.01, within="[0, 1]")
    limit_documents: int | None = setting(None, within="[1, inf)")
    document_separator: str = "<|endoftext|>"
    detokenizer: str = "none"
    keep_empty: bool = False
    on_bad_utf8: BadUtf8 = "error"
    packing: Packing = "concat"
    group_documents: int = setting(0, within="[0, inf)")
    row_length: int | None = setting(None, within="[2, inf)")
    separate_train: bool = True
    separate_validation: bool = True
    bos_id: int | None = None
    eos_id: int | None = None
    separator_id: int | None = None
    special_tokens: SpecialTokens = "text"
    seed: int = 0

    def __post_init__(self) -> None:
        scheme_of(self.source)
        check_bounds(self, "corpus")
        if self.detokenizer != "none":
            from pipeline.corpus.detokenize import detokenizer

            detokenizer(self.detokenizer)  # refuses an unknown one
        for source in filter(None, (self.source, self.validation_source)):
            if (self.packing in MARKED) != (scheme_of(source)[0] == "chat"):
                what = "conversations have a packing of their own"
                expected = f"one of {MARKED} with a chat: source"
                raise UsageError(what, where="corpus.packing", got=f"{self.packing}, {source}", expected=expected)
        if not self.document_separator.strip():
            raise UsageError("no separator", where="corpus.document_separator")
        if self.validation_source and self.validation_split:
            raise UsageError("validation_source and validation_split exclude each other")
        if self.group_documents and self.packing == "pad":
            raise UsageError("group_documents means nothing for pad", where="corpus.packing")


def scheme_of(source: str) -> tuple[str, str]:
    """(scheme, rest) of a source; an unknown scheme is a :class:`UsageError`."""
    scheme, _, rest = source.partition(":")
    if scheme in SCHEMES:
        return scheme, rest
    raise _unknown(source)


def split_field(place: str) -> tuple[str, str]:
    """``PATH#field`` as (path, field); a file whose own name has the # is taken as it is."""
    if "#" not in place or os.path.exists(os.path.expanduser(place)):
        return place, ""
    path, _, name = place.rpartition("#")
    return path, name


def preset_names() -> list[str]:
    """The corpora that have a file of their own."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _unknown(spec: str) -> UsageError:
    known = [*preset_names(), *(f"{scheme}:" for scheme in SCHEMES)]
    own = "for files of your own: their path"
    hint = did_you_mean(spec.partition(":")[0], [*known, *SCHEMES], own, cutoff=0.5)
    where = f"--corpus {spec}"
    return UsageError("unknown corpus", where=where, expected=f"one of {known}", remedy=hint)


def corpus_config(spec: str, settings: Mapping[str, Any] | None = None, *, is_read: bool = False) -> CorpusConfig:
    """The configuration of a corpus named on the command line (``spec``); ``settings`` that are not None win.

    Args:
        is_read: Stage 1 is finished, and files may have gone since.

    Raises:
        UsageError: For an unknown corpus or setting, a value out of range, or a setting that this
            kind of source does not look at.
    """
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    scheme, colon, _ = spec.partition(":")
    if spec in preset_names():
        base = read_toml(PRESETS / f"{spec}.toml")
    elif colon and scheme in SCHEMES:
        preset = read_toml(PRESETS / "maze.toml") if scheme == "maze" else {}
        base = {**preset, "source": spec, **({"packing": "chat"} if scheme == "chat" else {})}
    else:
        base = read_toml(Path(spec)) if spec.endswith(".toml") else {"source": spec}
    values = {**base, **given}
    for name in ("source", "validation_source"):
        if (source := values.get(name)) and str(source).partition(":")[0] not in SCHEMES:
            values[name] = _source_of_path(str(source), is_read)
    config = resolve(CorpusConfig, values)
    _check_meaning(config, given)
    scheme, rest = scheme_of(config.source)
    if scheme == "maze" and config.row_length is None:
        from pipeline.maze import load_maze  # late: it waits for torch

        config = replace(config, row_length=load_maze(rest).row_length)
    return config


def _check_meaning(config: CorpusConfig, given: dict[str, Any]) -> None:
    """Refuse settings that nothing would look at."""
    sources = [source for source in (config.source, config.validation_source) if source]
    schemes = {scheme_of(source)[0] for source in sources}
    for field in fields(config):
        every = SCHEMES if field.name in OF_SCORED_ROWS else SCHEMES[:-1]
        value, fitting = getattr(config, field.name), MEANT_FOR.get(field.name, every)
        if field.name in given and value != field.default and not schemes.intersection(fitting):
            what = f"this setting means nothing for a {'/'.join(sorted(schemes))}: source"
            where, expected = f"corpus.{field.name}", f"a source of {': '.join(fitting)}:"
            remedy, got = "leave it out", repr(value)
            raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    named = split_field(scheme_of(config.source)[1])[1]
    if named and given.get("field", named) != named and len(sources) == 1:
        raise UsageError("two fields are named", where="corpus.field", got=f"{given['field']!r} and #{named}")


def _source_of_path(spec: str, is_read: bool) -> str:
    """A bare path or glob, with ``#field`` if need be, as a source: its suffix tells the kind."""
    pattern = os.path.expanduser(split_field(spec)[0])
    path, where = Path(pattern.lower()), f"--corpus {spec}"
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    found = os.path.exists(pattern) or (has_magic(pattern) and any(iglob(pattern, recursive=True)))
    if not found and not (is_read and suffix in SUFFIXES):
        if ":" not in spec and (suffix in SUFFIXES or "/" in spec or spec.startswith("~")):
            expected = "a path, a glob in quotes, a preset (owt, ...) or hf:NAME"
            raise UsageError("no such corpus file", where=where, expected=expected)
        raise _unknown(spec)
    if os.path.isdir(pattern):
        expected, remedy = "a file or a glob", f"all text files in it: '{spec.rstrip('/')}/*.txt'"
        what = "the corpus path is a directory"
        raise UsageError(what, where=where, expected=expected, remedy=remedy)
    if suffix not in SUFFIXES:
        what = "the suffix does not tell what the corpus file holds"
        expected = f"one of {', '.join(SUFFIXES)}, also with .gz or .zst"
        remedy = f"say it: text:{spec}, jsonl:{spec}#field, ..."
        raise UsageError(what, where=where, expected=expected, remedy=remedy)
    return f"{SUFFIXES[suffix]}:{spec}"
