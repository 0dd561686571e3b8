"""Rows as an inference engine scores them, from its answers and from files, checked.

Engines give log-probabilities of a text's own tokens and of the m most probable ones at every
position, never the whole distribution. That is what the ``posterior`` codec keeps, so nothing is
lost but the tail beyond m.

Answers come in two shapes: in ``choices[0]`` of ``/v1/completions`` (vLLM), and in ``meta_info`` of
SGLang's ``/generate``, whose entries are [log p, id, text or null]::

    prompt_logprobs   [null, {"464": {"logprob": -1.2, "rank": 3}, ...}, ...]
    meta_info         {"input_token_logprobs": [[null, 5, null], [-1.2, 464, null], ...],
                       "input_top_logprobs": [null, [[-1.2, 464, null], ...], ...]}

Files hold one row each, in Parquet columns or JSONL fields::

    token_ids          list<int>          L ids
    token_log_probs    list<float>        log p of each, nats; the first is null or ignored
    top_ids            list<list<int>>    the most probable tokens; the first list is empty
    top_log_probs      list<list<float>>  their log p, nats

A JSONL line may instead be an answer in one of the two shapes (or a line of a batch output file,
with the answer under ``response.body``), the prompt's ids beside it under ``prompt_token_ids``.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.corpus.tables import open_parquet
from shards.errors import GdistillError, UsageError

MAX_MASS = 1 + 1e-3
"""Engines round: probabilities may add up to a little more than 1."""
MAX_LOG_PROB = 1e-3
MAX_DISAGREEMENT_NATS = 1e-2
"""Between a token's log-probability as the text's own and as one of the most probable."""
COLUMNS = ("token_ids", "token_log_probs", "top_ids", "top_log_probs")

Top = Mapping[int, Any] | None
"""id -> log-probability as a file or a server gives it, not yet checked."""


@dataclass(frozen=True)
class ScoredRow:
    """One row under the engine's model.

    Attributes:
        token_ids: [L].
        token_log_probs: [L], nats; position 0 has no distribution and is 0.
        top_ids: [L, m], most probable first; -1 where fewer than m are known, and at position 0.
        top_log_probs: [L, m], nats; -inf where the id is -1.
    """

    token_ids: Int64[np.ndarray, "l"]
    token_log_probs: Float32[np.ndarray, "l"]
    top_ids: Int64[np.ndarray, "l m"]
    top_log_probs: Float32[np.ndarray, "l m"]


def scored_row(
    token_ids: Any, token_log_probs: Sequence[Any], tops: Sequence[Top], *, vocab_size: int, num_top: int, where: str
) -> ScoredRow:
    """Check one row and lay it out; position 0 of the two lists of scores is not looked at.

    Models pad their output beyond the tokenizer (127 ids or 5%, as for a teacher that runs here):
    such ids are left out of the most probable, and their mass belongs to the tail.

    Args:
        token_ids: L ids.
        token_log_probs: L log-probabilities, nats.
        tops: For each position, id -> log-probability of the most probable tokens.
        vocab_size: V; ids are 0..V-1.
        num_top: m; of more, the m most probable are kept.
        where: File and line, or request: names the row in errors.

    Raises:
        GdistillError: For lists of different lengths, an id outside the vocabulary, a positive or
            missing log-probability, probabilities that add up to more than 1, or a token whose
            two log-probabilities differ.
    """
    length = len(token_ids)
    if len(token_log_probs) != length or len(tops) != length or length < 2:
        got = f"{length} tokens, {len(token_log_probs)} log p, {len(tops)} lists of most probable"
        raise GdistillError("a scored row's lists differ in length", where=where, got=got)
    ids = np.asarray(id_list(token_ids, where), dtype=np.int64)
    _require_known(ids, vocab_size, vocab_size, where)
    top_ids = np.full((length, num_top), -1, np.int64)
    top_log_probs = np.full((length, num_top), -np.inf, np.float32)
    row = ScoredRow(ids, np.zeros(length, np.float32), top_ids, top_log_probs)
    padded = vocab_size + max(127, vocab_size // 19)
    for position in range(1, length):
        place = f"{where}, position {position}"
        found = {name: _log_prob(value, place) for name, value in (tops[position] or {}).items()}
        if not found:
            what = "a position without its most probable tokens"
            remedy = "ask the engine for prompt log-probabilities of at least one token"
            raise GdistillError(what, where=place, remedy=remedy)
        _require_known(np.fromiter(found, np.int64), vocab_size, padded, place)
        own, token = _log_prob(token_log_probs[position], place), int(ids[position])
        if abs(found.get(token, own) - own) > MAX_DISAGREEMENT_NATS:
            got = f"token {token}: {own:.4f} by itself, {found[token]:.4f} among the most probable"
            raise GdistillError("a token has two log-probabilities", where=place, got=got)
        mass = sum(math.exp(value) for value in ({**found, token: own}).values())
        if mass > MAX_MASS:
            remedy = "log-probabilities must be of the model itself: temperature 1, no penalties"
            what, got = "probabilities add up to more than 1", f"{mass:.5f}"
            raise GdistillError(what, where=place, got=got, remedy=remedy)
        row.token_log_probs[position] = own
        real = [(-value, token) for token, value in found.items() if token < vocab_size]
        for rank, (value, token) in enumerate(sorted(real)[:num_top]):
            top_ids[position, rank], top_log_probs[position, rank] = token, -value
    return row


def id_list(values: Any, where: str) -> list[int]:
    """Token ids as they came from a file or a server; a GdistillError if they are none."""
    wrong: Any = values
    if isinstance(values, list | tuple):
        bad = [v for v in values if type(v) is not int or abs(v) >= 1 << 62]
        if not bad:
            return [*values]
        wrong = bad[0]
    raise GdistillError("not token ids", where=where, got=repr(wrong)[:60], expected="a list of integers")


def _log_prob(value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    if not math.isfinite(number) or number > MAX_LOG_PROB:
        got, expected = repr(value)[:60], "a finite number, at most 0"
        raise GdistillError("not a log-probability", where=where, got=got, expected=expected)
    return min(number, 0.0)


def _require_known(ids: np.ndarray, vocab_size: int, limit: int, where: str) -> None:
    unknown = ids[(ids < 0) | (ids >= limit)]
    if len(unknown):
        what = "token id outside the vocabulary"
        got = unknown[0]
        expected = f"0 to {vocab_size - 1}"
        remedy = "name the tokenizer that the engine's model uses"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)


# A server's answer.


def row_of_response(
    response: Mapping[str, Any], token_ids: Any, *, vocab_size: int, num_top: int, where: str
) -> ScoredRow:
    """The scores of the prompt that was sent.

    Args:
        response: The parsed answer of ``/v1/completions`` or SGLang's ``/generate``.
        token_ids: The prompt as ids.
        vocab_size: V.
        num_top: m.
        where: Names the request in errors.

    Raises:
        GdistillError: If the answer has no known shape, or is about another tokenization.
    """
    sent = id_list(token_ids, where)
    meta, choices = response.get("meta_info"), response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(meta, Mapping):
        scores = _generated(meta, sent, where)
    elif not isinstance(choice, Mapping):
        got, expected = str(response)[:120], "one of /v1/completions or /generate"
        raise GdistillError("not an engine's answer", where=where, got=got, expected=expected)
    elif tops := choice.get("prompt_logprobs") or response.get("prompt_logprobs"):
        scores = _by_position(tops, sent, where)
    else:
        raise _unscored(where, f"choices[0] with {sorted(choice)}")
    return scored_row(sent, *scores, vocab_size=vocab_size, num_top=num_top, where=where)


Scores = tuple[list[Any], list[Top]]


def _by_position(tops: Any, sent: list[int], where: str) -> Scores:
    """``prompt_logprobs``: the prompt's own token is among the entries of every position."""
    if not isinstance(tops, list) or len(tops) != len(sent):
        count = len(tops) if isinstance(tops, list) else repr(tops)[:40]
        raise _other_tokenization(where, f"scores of {count} positions", f"{len(sent)}")
    named: list[Top] = [None]
    for position, entries in enumerate(tops[1:], start=1):
        place = f"{where}, position {position}"
        found = _numbers(entries, place)
        if found and sent[position] not in found:
            raise _other_tokenization(place, f"ids {sorted(found)[:5]}", str(sent[position]))
        named.append(found)
    return [found and found.get(token) for found, token in zip(named, sent, strict=True)], named


def _generated(meta: Mapping[str, Any], sent: list[int], where: str) -> Scores:
    """``meta_info`` of SGLang: entries [log p, id, text or null], position 0 without log p."""
    own, tops = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not isinstance(own, list) or not isinstance(tops, list) or not own:
        reason = meta.get("finish_reason")
        raise _unscored(where, str(reason) if reason else f"meta_info with {sorted(meta)}")
    named = [_entries(entries, f"{where}, position {i}") for i, entries in enumerate([own, *tops])]
    names = [token for token, _ in named[0]]
    if names != sent:
        differs = (i for i, token in enumerate(sent) if names[i : i + 1] != [token])
        first = next(differs, len(sent) - 1)
        got = str(names[first]) if first < len(names) else "no further token"
        raise _other_tokenization(f"{where}, position {first}", got, str(sent[first]))
    return [log_prob for _, log_prob in named[0]], [dict(pairs) for pairs in named[1:]]


def _entries(entries: Any, where: str) -> list[tuple[int, Any]]:
    try:
        pairs = [(entry[1], entry[0]) for entry in entries or []]
    except (TypeError, IndexError, KeyError) as error:
        raise GdistillError("not [log p, id, text] entries", where=where, got=repr(entries)[:60]) from error
    id_list([token for token, _ in pairs], where)
    return pairs


def _numbers(entries: Any, where: str) -> dict[int, Any]:
    """id -> log-probability, from either way of writing an entry."""
    if entries and not isinstance(entries, Mapping):
        raise GdistillError("not a table of most probable tokens", where=where, got=repr(entries)[:60])
    return {
        _id_of(name, where): value.get("logprob") if isinstance(value, Mapping) else value
        for name, value in (entries or {}).items()
    }


def _id_of(name: object, where: str) -> int:
    if not str(name).lstrip("-").isdigit():
        what, remedy = "the engine names tokens by text", "for SGLang: --set engine.dialect=sglang"
        raise GdistillError(what, where=where, got=repr(name), expected="ids", remedy=remedy)
    return int(str(name))


def _unscored(where: str, got: str) -> GdistillError:
    what = "the engine gave no log-probabilities of the prompt"
    expected = "prompt_logprobs, or meta_info.input_token_logprobs"
    remedy = "serve the model with vLLM, or with SGLang and --set engine.dialect=sglang"
    return GdistillError(what, where=where, got=got[:200], expected=expected, remedy=remedy)


def _other_tokenization(where: str, got: str, expected: str) -> GdistillError:
    what = "the engine scored another tokenization of the text"
    remedy = "serve the model with this tokenizer, and without added special tokens"
    return GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)


# Files.


class JsonLinesFile:
    """One record a line; the places of the lines are found once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            sizes = [len(line) for line in file]
        self._starts = [0, *accumulate(sizes)]
        self.num_rows = len(sizes)

    def record(self, index: int) -> Mapping[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        where = f"{self.path}, line {index + 1}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GdistillError("not a line of JSON", where=where, got=line[:60]) from error
        if not isinstance(value, Mapping):
            raise GdistillError("not a JSON object", where=where, got=line[:60])
        return value


class ParquetFile:
    """Row groups, of which the last one read is kept."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_parquet(path)
        names = self._file.schema_arrow.names
        if missing := [name for name in COLUMNS if name not in names]:
            what, expected = "a column is missing", f"{missing[0]}, one of {list(COLUMNS)}"
            raise GdistillError(what, where=path, got=names, expected=expected)
        metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        self._starts = [0, *accumulate(metadata.row_group(g).num_rows for g in groups)]
        self.num_rows = metadata.num_rows
        self._group = lru_cache(maxsize=1)(lambda group: self._file.read_row_group(group, columns=list(COLUMNS)))

    def record(self, index: int) -> Mapping[str, Any]:
        group = bisect.bisect_right(self._starts, index) - 1
        table, row = self._group(group), index - self._starts[group]
        return {name: table.column(name)[row].as_py() for name in COLUMNS}


@dataclass(frozen=True)
class ScoreFiles:
    """All rows of some files, in the order of the files' names and of their lines."""

    files: tuple[JsonLinesFile | ParquetFile, ...]
    vocab_size: int
    num_top: int

    @classmethod
    def open(cls, paths: Sequence[Path], vocab_size: int, num_top: int) -> ScoreFiles:
        """Open ``.parquet`` and ``.jsonl`` files.

        Raises:
            UsageError: For a file of another kind.
            GdistillError: If one cannot be read or lacks a column.
        """
        kinds = {".parquet": ParquetFile, ".jsonl": JsonLinesFile}
        if unknown := [path for path in paths if path.suffix not in kinds]:
            where, expected = "--from-logprobs", "files that end in .parquet or .jsonl"
            raise UsageError("no scored rows", where=where, got=unknown[0], expected=expected)
        return cls(tuple(kinds[path.suffix](path) for path in sorted(paths)), vocab_size, num_top)

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Of all bytes of all files: what the rows are."""
        digest = hashlib.sha256()
        for file in self.files:
            with open(file.path, "rb") as stream:
                hashlib.file_digest(stream, lambda: digest)
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> list[ScoredRow]:
        """Rows start..stop-1."""
        rows, first = [], 0
        for file in self.files:
            for index in range(max(0, start - first), min(file.num_rows, stop - first)):
                rows.append(self._parse(file.record(index), f"{file.path}, row {index + 1}"))
            first += file.num_rows
        return rows

    def _parse(self, record: Mapping[str, Any], where: str) -> ScoredRow:
        sizes: dict[str, Any] = {"vocab_size": self.vocab_size, "num_top": self.num_top}
        if "token_ids" in record or "token_log_probs" in record:
            return scored_row(*_own_schema(record, where), **sizes, where=where)
        response = record.get("response")
        body = response.get("body") if isinstance(response, Mapping) else None
        body = body if isinstance(body, Mapping) else record
        ids, choices = body.get("prompt_token_ids"), body.get("choices")
        if ids is None and isinstance(choices, list) and choices and isinstance(choices[0], dict):
            ids = choices[0].get("prompt_token_ids")
        if ids is None:
            got, expected = sorted(record), "token_ids, or an engine's answer with prompt_token_ids"
            raise GdistillError("a row without token ids", where=where, got=got, expected=expected)
        return row_of_response(body, ids, **sizes, where=where)


def _own_schema(record: Mapping[str, Any], where: str) -> tuple[Any, Any, list[Top]]:
    for name in COLUMNS:
        if not isinstance(record.get(name), list):
            what, got = "a column is missing, or no list", f"{name} = {record.get(name)!r}"[:60]
            expected = f"the lists {', '.join(COLUMNS)}; see gdistill-extract --help"
            raise GdistillError(what, where=where, got=got, expected=expected)
    tops: list[Top] = []
    for position, pair in enumerate(zip_longest(record["top_ids"], record["top_log_probs"])):
        place, (ids, values) = f"{where}, position {position}", (each or [] for each in pair)
        named = id_list(ids, place)
        if not isinstance(values, list) or not len({*named}) == len(named) == len(values):
            what = "top_ids and top_log_probs differ, or an id is there twice"
            raise GdistillError(what, where=place, got=str(pair)[:60])
        tops.append(dict(zip(named, values, strict=True)))
    return record["token_ids"], record["token_log_probs"], tops


def same_length(rows: Sequence[ScoredRow], row_length: int, where: str) -> np.ndarray:
    """The token ids of rows, [n, L] int32; all rows of a store have one length."""
    wrong = next((r for r in rows if len(r.token_ids) != row_length), None)
    if wrong is not None:
        got, expected = f"{len(wrong.token_ids)} tokens", f"{row_length}, as the first row"
        remedy = "score rows of one length: pack the text before it goes to the engine"
        what = "rows of different lengths"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    return np.stack([row.token_ids for row in rows]).astype(np.int32)
