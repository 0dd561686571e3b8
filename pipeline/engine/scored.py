"""A row as an inference engine scores it: the tokens' log-probabilities and the likeliest others.

Engines (vLLM, SGLang, TensorRT-LLM, hosted APIs) give log-probabilities of a text's own tokens and
of the m likeliest ones at every position, never the whole distribution. That is what the
``posterior`` codec keeps, so nothing is lost but the tail beyond m.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int64

from shards.errors import GdistillError, UsageError

MAX_MASS = 1 + 1e-3
"""Engines round: probabilities may add up to a little more than 1."""
MAX_LOG_PROB = 1e-3
MAX_DISAGREEMENT_NATS = 1e-2
"""Between a token's log-probability as the text's own and as one of the likeliest."""

Top = Mapping[int, Any] | None
"""id -> log-probability as a file or a server gives it, not yet checked."""


@dataclass(frozen=True)
class ScoredRow:
    """One row under the engine's model.

    Attributes:
        token_ids: [L].
        token_log_probs: [L], nats; position 0 has no distribution and is 0.
        top_ids: [L, m], likeliest first; -1 where fewer than m are known, and at position 0.
        top_log_probs: [L, m], nats; -inf where the id is -1.
    """

    token_ids: Int64[np.ndarray, "l"]
    token_log_probs: Float32[np.ndarray, "l"]
    top_ids: Int64[np.ndarray, "l m"]
    top_log_probs: Float32[np.ndarray, "l m"]


def scored_row(
    token_ids: Sequence[Any],
    token_log_probs: Sequence[Any],
    tops: Sequence[Top],
    *,
    vocab_size: int,
    num_top: int,
    where: str,
) -> ScoredRow:
    """Check one row and lay it out; position 0 of the two lists of scores is not looked at.

    Args:
        token_ids: L ids.
        token_log_probs: L log-probabilities, nats.
        tops: For each position, id -> log-probability of the likeliest tokens.
        vocab_size: V; ids are 0..V-1.
        num_top: m; of more, the likeliest m are kept.
        where: File and line, or request: names the row in errors.

    Raises:
        GdistillError: For lists of different lengths, an id outside the vocabulary, a positive or
            missing log-probability, probabilities that add up to more than 1, or a token whose
            two log-probabilities differ.
    """
    length = len(token_ids)
    if len(token_log_probs) != length or len(tops) != length or length < 2:
        got = f"{length} tokens, {len(token_log_probs)} log p, {len(tops)} lists of likeliest"
        raise GdistillError("a scored row does not fit itself", where=where, got=got)
    ids = np.asarray(id_list(token_ids, where), dtype=np.int64)
    _require_known(ids, vocab_size, where)
    row = ScoredRow(
        ids,
        np.zeros(length, np.float32),
        np.full((length, num_top), -1, np.int64),
        np.full((length, num_top), -np.inf, np.float32),
    )
    for position in range(1, length):
        place = f"{where}, position {position}"
        _require_top(tops[position], place)
        own = _log_prob(token_log_probs[position], place)
        row.token_log_probs[position] = own
        top = _checked_top(tops[position], own, int(ids[position]), place)
        _require_known(np.fromiter(top, np.int64), vocab_size, place)
        _fill_top(row, position, top)
    return row


def id_list(values: Any, where: str) -> list[int]:
    """Token ids as they came from a file or a server.

    Raises:
        GdistillError: If they are no list of integers.
    """
    if not isinstance(values, list | tuple):
        raise _no_ids(values, where)
    wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise _no_ids(wrong[0], where)
    if any(abs(value) >= 1 << 62 for value in values):
        raise _no_ids(max(values, key=abs), where)
    return [*values]


def _no_ids(got: object, where: str) -> GdistillError:
    return GdistillError(
        "not token ids", where=where, got=repr(got)[:60], expected="a list of integers"
    )


def _fill_top(row: ScoredRow, position: int, top: dict[int, float]) -> None:
    best = sorted(top.items(), key=lambda item: (-item[1], item[0]))[: row.top_ids.shape[1]]
    row.top_ids[position, : len(best)] = [token for token, _ in best]
    row.top_log_probs[position, : len(best)] = [log_prob for _, log_prob in best]


def _require_top(top: Top, where: str) -> None:
    if not top:
        raise GdistillError(
            "a position without its likeliest tokens",
            where=where,
            expected="a list of ids with log-probabilities at every position but the first",
            remedy="ask the engine for prompt log-probabilities of at least one token",
        )


def _checked_top(top: Top, own: float, token: int, where: str) -> dict[int, float]:
    found = {name: _log_prob(value, where) for name, value in (top or {}).items()}
    if token in found and abs(found[token] - own) > MAX_DISAGREEMENT_NATS:
        raise GdistillError(
            "a token has two log-probabilities",
            where=where,
            got=f"token {token}: {own:.4f} by itself, {found[token]:.4f} among the likeliest",
        )
    mass = float(np.exp(np.fromiter(({**found, token: own}).values(), float)).sum())
    if mass > MAX_MASS:
        raise GdistillError(
            "probabilities add up to more than 1",
            where=where,
            got=f"{mass:.5f}",
            remedy="log-probabilities must be of the model itself: temperature 1, no penalties",
        )
    return found


def _log_prob(value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else float("nan")  # type: ignore[arg-type]
    if not np.isfinite(number) or number > MAX_LOG_PROB:
        raise GdistillError(
            "not a log-probability",
            where=where,
            got=repr(value)[:60],
            expected="a finite number, at most 0",
        )
    return min(number, 0.0)


def _require_known(ids: np.ndarray, vocab_size: int, where: str) -> None:
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        raise GdistillError(
            "token id outside the vocabulary",
            where=where,
            got=int(unknown[0]),
            expected=f"0 to {vocab_size - 1}",
            remedy="name the tokenizer that the engine's model uses",
        )


# What an OpenAI-compatible server answers about a prompt, as a :class:`ScoredRow`.
#
# Two shapes are in use; ``choices[0]`` holds either of them::
#
#     prompt_logprobs   [null, {"464": {"logprob": -1.2, "rank": 3}, ...}, ...]     vLLM, SGLang
#     logprobs          {"tokens": ["token_id:5", ...], "token_logprobs": [null, -1.2, ...],
#                        "top_logprobs": [null, {"token_id:464": -1.2, ...}, ...]}  echo = true
#
# Tokens must be named by id (``return_tokens_as_token_ids``): a text can stand for several ids.


NAMED_BY_ID = "token_id:"


def row_of_response(
    response: Mapping[str, Any],
    token_ids: Any,
    *,
    vocab_size: int,
    num_top: int,
    where: str,
) -> ScoredRow:
    """The scores of the prompt that was sent.

    Args:
        response: The parsed answer of ``/v1/completions``.
        token_ids: The prompt as ids.
        vocab_size: V.
        num_top: m.
        where: Names the request in errors.

    Raises:
        GdistillError: If the answer has neither shape, or is about another tokenization.
    """
    choice = _choice(response, where)
    sent = id_list(token_ids, where)
    if "prompt_logprobs" in choice or "prompt_logprobs" in response:
        tops = choice.get("prompt_logprobs") or response.get("prompt_logprobs")
        log_probs, likeliest = _by_position(tops, sent, where)
    elif isinstance(choice.get("logprobs"), Mapping):
        log_probs, likeliest = _echoed(choice["logprobs"], sent, where)
    else:
        raise GdistillError(
            "the engine gave no log-probabilities of the prompt",
            where=where,
            got=f"choices[0] with {sorted(choice)}",
            expected="prompt_logprobs, or logprobs of an echoed prompt",
            remedy="try --set engine.dialect=echo, or start the server with log-probabilities on",
        )
    return scored_row(
        sent, log_probs, likeliest, vocab_size=vocab_size, num_top=num_top, where=where
    )


def _choice(response: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise GdistillError(
            "not an answer of /v1/completions", where=where, got=str(response)[:120]
        )
    return choices[0]


def _by_position(tops: Any, sent: list[int], where: str) -> tuple[list[Any], list[Top]]:
    """``prompt_logprobs``: the prompt's own token is among the entries of every position."""
    if not isinstance(tops, list) or len(tops) != len(sent):
        count = len(tops) if isinstance(tops, list) else repr(tops)[:40]
        raise _other_tokenization(where, f"scores of {count} positions", f"{len(sent)}")
    log_probs: list[Any] = [None]
    likeliest: list[Top] = [None]
    for position, entries in enumerate(tops[1:], start=1):
        named = _numbers(entries, f"{where}, position {position}")
        if named and sent[position] not in named:
            got = f"ids {sorted(named)[:5]}"
            raise _other_tokenization(f"{where}, position {position}", got, str(sent[position]))
        log_probs.append(named.get(sent[position]))
        likeliest.append(named)
    return log_probs, likeliest


def _echoed(scores: Mapping[str, Any], sent: list[int], where: str) -> tuple[list[Any], list[Top]]:
    """``logprobs`` of an echoed prompt; what was generated after it is left out."""
    missing = [key for key in ("tokens", "token_logprobs", "top_logprobs") if key not in scores]
    if missing:
        raise GdistillError("the engine's logprobs lack a field", where=where, expected=missing[0])
    names = [_id_of(name, where) for name in scores["tokens"][: len(sent)]]
    if names != sent:
        first = next(i for i, token in enumerate(sent) if names[i : i + 1] != [token])
        got = str(names[first]) if first < len(names) else "no further token"
        raise _other_tokenization(f"{where}, position {first}", got, str(sent[first]))
    tops: list[Top] = [None]
    for position, entries in enumerate(scores["top_logprobs"][1 : len(sent)], start=1):
        tops.append(_numbers(entries, f"{where}, position {position}"))
    return list(scores["token_logprobs"][: len(sent)]), tops


def _numbers(entries: Any, where: str) -> dict[int, Any]:
    """id -> log-probability, from either way of writing an entry."""
    if not entries:
        return {}
    if not isinstance(entries, Mapping):
        raise GdistillError("not a table of likeliest tokens", where=where, got=repr(entries)[:60])
    return {
        _id_of(name, where): value.get("logprob") if isinstance(value, Mapping) else value
        for name, value in entries.items()
    }


def _id_of(name: object, where: str) -> int:
    text = str(name).removeprefix(NAMED_BY_ID)
    if not text.lstrip("-").isdigit():
        raise GdistillError(
            "the engine names tokens by text",
            where=where,
            got=repr(name),
            expected=f"ids, as in {NAMED_BY_ID}464",
            remedy="start the server with tokens returned as ids (return_tokens_as_token_ids)",
        )
    return int(text)


def _other_tokenization(where: str, got: str, expected: str) -> GdistillError:
    return GdistillError(
        "the engine scored another tokenization of the text",
        where=where,
        got=got,
        expected=expected,
        remedy="serve the model with this tokenizer, and without added special tokens",
    )


# Files of scored rows, as labs keep them, read by row index.
#
# The documented schema, one row of text each, in Parquet columns or JSONL fields::
#
#     token_ids          list<int>          L ids
#     token_log_probs    list<float>        log p of each, nats; the first is null or ignored
#     top_ids            list<list<int>>    the likeliest tokens at each position; the first is
#     empty top_log_probs      list<list<float>>  their log p, nats
#
# A JSONL line may instead be an answer of ``/v1/completions`` (or a line of a batch output file,
# with the answer under ``response.body``), its prompt's ids under ``prompt_token_ids``.


COLUMNS = ("token_ids", "token_log_probs", "top_ids", "top_log_probs")
TYPE = "a list for each row; see the schema in gdistill-extract --help"


@runtime_checkable
class RecordFile(Protocol):
    """One file: how many rows, and the raw record of each."""

    path: Path
    num_rows: int

    def record(self, index: int) -> Mapping[str, Any]: ...


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
        except ValueError as error:
            raise GdistillError("not a line of JSON", where=where, got=line[:60]) from error
        if not isinstance(value, Mapping):
            raise GdistillError("not a JSON object", where=where, got=line[:60])
        return value


class ParquetFile:
    """Row groups, of which the last one read is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise GdistillError("not a Parquet file", where=path, got=error) from error
        missing = [name for name in COLUMNS if name not in self._file.schema_arrow.names]
        if missing:
            raise GdistillError(
                "a column is missing",
                where=path,
                got=self._file.schema_arrow.names,
                expected=f"{missing[0]}, one of {list(COLUMNS)}",
            )
        metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        self._starts = [0, *accumulate(metadata.row_group(g).num_rows for g in groups)]
        self.num_rows = metadata.num_rows
        self._group = lru_cache(maxsize=1)(self._read_group)

    def _read_group(self, index: int) -> pa.Table:
        return self._file.read_row_group(index, columns=list(COLUMNS))

    def record(self, index: int) -> Mapping[str, Any]:
        group = bisect.bisect_right(self._starts, index) - 1
        table = self._group(group)
        row = index - self._starts[group]
        return {name: table.column(name)[row].as_py() for name in COLUMNS}


@dataclass(frozen=True)
class ScoreFiles:
    """All rows of some files, in the order of the files' names and of their lines.

    Attributes:
        files: Opened, not empty.
        vocab_size: V.
        num_top: m.
    """

    files: tuple[RecordFile, ...]
    vocab_size: int
    num_top: int

    @classmethod
    def open(cls, paths: Sequence[Path], vocab_size: int, num_top: int) -> ScoreFiles:
        """Open ``.parquet`` and ``.jsonl`` files.

        Raises:
            UsageError: For no file, or one of another kind.
            GdistillError: If one cannot be read or lacks a column.
        """
        kinds = {".parquet": ParquetFile, ".jsonl": JsonLinesFile}
        unknown = [path for path in paths if path.suffix not in kinds]
        if unknown or not paths:
            got = unknown[0] if unknown else "no file"
            raise UsageError(
                "no scored rows",
                where="--from-logprobs",
                got=got,
                expected="files that end in .parquet or .jsonl, or a pattern such as 'DIR/*.jsonl'",
            )
        try:
            files = tuple(kinds[path.suffix](path) for path in sorted(paths))
        except OSError as error:
            raise UsageError("cannot read scored rows", where=error.filename, got=error) from error
        return cls(tuple(file for file in files if file.num_rows), vocab_size, num_top)

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
        return [self._row(index) for index in range(start, stop)]

    def _row(self, index: int) -> ScoredRow:
        for file in self.files:
            if index < file.num_rows:
                where = f"{file.path}, row {index + 1}"
                return self._parse(file.record(index), where)
            index -= file.num_rows
        raise IndexError(index)

    def _parse(self, record: Mapping[str, Any], where: str) -> ScoredRow:
        if "token_ids" in record or "token_log_probs" in record:
            return self._own_schema(record, where)
        body = _answer_in(record)
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        ids = body.get("prompt_token_ids")
        if ids is None and isinstance(choice, Mapping):
            ids = choice.get("prompt_token_ids")
        if ids is None:
            raise GdistillError(
                "a row without token ids",
                where=where,
                got=sorted(record),
                expected="token_ids, or an engine's answer with prompt_token_ids",
            )
        sizes = {"vocab_size": self.vocab_size, "num_top": self.num_top}
        return row_of_response(body, ids, **sizes, where=where)

    def _own_schema(self, record: Mapping[str, Any], where: str) -> ScoredRow:
        missing = [name for name in COLUMNS if record.get(name) is None]
        if missing:
            got, expected = sorted(record), f"{missing[0]}, one of {list(COLUMNS)}"
            raise GdistillError("a column is missing", where=where, got=got, expected=expected)
        for name in COLUMNS:
            if not isinstance(record[name], list):
                got = f"{name} = {record[name]!r}"[:60]
                raise GdistillError("a column of another type", where=where, got=got, expected=TYPE)
        ids, log_probs = record["top_ids"], record["top_log_probs"]
        if len(ids) != len(log_probs):
            got = f"{len(ids)} and {len(log_probs)} positions"
            raise GdistillError("top_ids and top_log_probs differ", where=where, got=got)
        tops = [
            _table(*pair, f"{where}, position {i}")
            for i, pair in enumerate(zip(ids, log_probs, strict=True))
        ]
        return scored_row(
            record["token_ids"],
            record["token_log_probs"],
            tops,
            vocab_size=self.vocab_size,
            num_top=self.num_top,
            where=where,
        )


def _answer_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer in a line of a batch's output, or the record, if it is one itself."""
    response = record.get("response")
    body = response.get("body") if isinstance(response, Mapping) else None
    return body if isinstance(body, Mapping) else record


def _table(ids: Any, log_probs: Any, where: str) -> dict[int, Any] | None:
    if not ids and not log_probs:
        return None
    named = id_list(ids or [], where)
    if not isinstance(log_probs, list) or len(named) != len(log_probs):
        count = len(log_probs) if isinstance(log_probs, list) else 0
        got = f"{len(named)} ids, {count} log-probabilities"
        raise GdistillError("top_ids and top_log_probs differ", where=where, got=got)
    if len(set(named)) < len(named):
        twice = next(token for token in named if named.count(token) > 1)
        raise GdistillError("a token is twice among the likeliest", where=where, got=twice)
    return dict(zip(named, log_probs, strict=True))


def same_length(rows: Sequence[ScoredRow], row_length: int, where: str) -> np.ndarray:
    """The token ids of rows, [n, L] int32; all rows of a store have one length."""
    wrong = next((r for r in rows if len(r.token_ids) != row_length), None)
    if wrong is not None:
        raise GdistillError(
            "rows of different lengths",
            where=where,
            got=f"{len(wrong.token_ids)} tokens",
            expected=f"{row_length}, as the first row",
            remedy="score rows of one length: pack the text before it goes to the engine",
        )
    return np.stack([row.token_ids for row in rows]).astype(np.int32)
