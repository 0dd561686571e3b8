"""Files of scored rows, as labs keep them, read by row index.

The documented schema, one row of text each, in Parquet columns or JSONL fields::

    token_ids          list<int>          L ids
    token_log_probs    list<float>        log p of each, nats; the first is null or ignored
    top_ids            list<list<int>>    the likeliest tokens at each position; the first is empty
    top_log_probs      list<list<float>>  their log p, nats

A JSONL line may instead be an answer of ``/v1/completions`` (or a line of a batch output file, with
the answer under ``response.body``), its prompt's ids under ``prompt_token_ids``.
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

from pipeline.engine.answers import row_of_response
from pipeline.engine.scored_rows import ScoredRow, id_list, scored_row
from shards.base import GdistillError, UsageError

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
