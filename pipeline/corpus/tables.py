"""Documents in a field of a table: JSON lines, conversations, CSV, Parquet, data sets of the hub; a null is empty."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import GdistillError, UsageError, did_you_mean

BATCH_ROWS = 256
LONGEST_CSV_FIELD = 1 << 30
ROLES = ("system", "developer", "user", "assistant", "tool")


def _json_object(decoded: str, where: str) -> dict[str, Any]:
    what = "malformed JSON line"
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise GdistillError(what, where=where, got=error) from error
    if not isinstance(record, dict):
        raise GdistillError(what, where=where, got=type(record).__name__, expected="an object")
    return record


def json_text(field: str, decoded: str, where: str) -> str:
    """The text in a field of a JSON line."""
    record = _json_object(decoded, where)
    value = record.get(field, ...)
    if value is None:
        return ""
    if not isinstance(value, str):
        got = f"fields {sorted(record)}" if value is ... else type(value).__name__
        remedy = did_you_mean(field, record.keys() - {field})
        raise GdistillError(f"no text in field {field!r}", where=where, got=got, remedy=remedy)
    return value


def conversation(field: str, is_prompts: bool, decoded: str, where: str) -> str:
    """``{"messages": [{"role": ..., "content": ...}, ...]}``, checked.

    One that ends with another turn than the assistant's, or ``{"prompt": "text"}``, is a prompt. The
    document is JSON: where it stands, for the messages of what reads it, and the value.
    """
    record = _json_object(decoded, where)
    value = record.get("messages" if field == "text" else field)
    if value is None and is_prompts and isinstance(record.get("prompt"), str):
        return json.dumps([where, record["prompt"]], ensure_ascii=False)
    if not value or not isinstance(value, list):
        got, expected = f"fields {sorted(record)}", '"messages", a list of turns'
        raise GdistillError("no conversation", where=where, got=got, expected=expected)
    for index, turn in enumerate(value):
        place, role = f"{where}, message {index}", turn.get("role") if isinstance(turn, dict) else None
        if role not in ROLES:
            raise GdistillError("not a turn", where=place, got=role or turn, expected=f"a role of {ROLES}")
        if not isinstance(turn.get("content"), str) or not turn["content"].strip():
            expected = "content, a text"
            raise GdistillError("an empty turn", where=place, got=f"role {role}", expected=expected)
    last = value[-1]["role"]
    if is_prompts == (last == "assistant"):
        what = "a prompt ends with" if is_prompts else "no answer to learn: it ends with"
        raise GdistillError(f"{what} the {last}'s turn", where=where)
    return json.dumps([where, value], ensure_ascii=False)  # a lone surrogate must be seen


def open_parquet(path: Path) -> pq.ParquetFile:
    """A Parquet file; a GdistillError if it is none."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise GdistillError("not a Parquet file", where=path, got=error) from error


def _parquet(column: str, path: Path) -> pq.ParquetFile:
    """A Parquet file whose column holds text; a null is empty."""
    file = open_parquet(path)
    schema = file.schema_arrow
    _require_column(column, path, schema.names)
    kind = schema.field(column).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind  # a category of pandas
    checks = ("string", "large_string", "string_view", "binary", "large_binary")
    if not any(getattr(pa.types, f"is_{name}")(values) for name in checks):
        raise UsageError(f"column {column!r} holds no text", where=path, got=kind)
    return file


def count_parquet_rows(column: str, path: Path) -> int:
    """How many documents a Parquet file has, without reading them."""
    return _parquet(column, path).metadata.num_rows


def parquet_rows(column: str, path: Path) -> Iterator[tuple[bytes, str]]:
    """Of a Parquet file only the column is read."""
    first, file = 0, _parquet(column, path)
    try:
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            found = batch.column(0)
            if pa.types.is_dictionary(found.type):
                found = found.dictionary_decode()
            # As bytes: a column that claims to be UTF-8 and is not must be reported, too.
            for row, value in enumerate(found.cast(pa.large_binary()).to_pylist(), first):
                yield value or b"", f"{path}: row {row}"
            first += len(found)
    except (pa.ArrowException, OSError) as error:
        raise GdistillError("cannot read the Parquet file", where=path, got=error) from error


def csv_rows(column: str, file: io.BufferedReader, path: Path) -> Iterator[tuple[bytes, str]]:
    """A CSV file with a line of column names; ``.tsv`` is split at tabs.

    A quoted field may hold line ends. Python's own reader notices where a quote never ends.
    """
    csv.field_size_limit(LONGEST_CSV_FIELD)
    delimiter = "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes] else ","
    # Surrogates carry bytes that are no UTF-8 to where all documents are decoded.
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        _require_column(column, path, names)
        at = names.index(column)
        for row, values in enumerate(line for line in reader if line):
            if len(values) != len(names):
                raise csv.Error(f"{len(values)} fields where {len(names)} are named")
            yield values[at].encode("utf-8", "surrogateescape"), f"{path}: row {row}"
    except csv.Error as error:
        what, where = "cannot read the CSV file", f"{path}: line {reader.line_num}"
        expected = "a line of column names, then rows of as many fields"
        raise GdistillError(what, where=where, got=error, expected=expected) from error


Hub = tuple[Sequence[str | None], dict[str, Any], list[Path]]
"""Texts, facts that change when they do, and the files of a local folder."""


def hub_texts(place: str, split: str, field: str, revision: str | None) -> Hub:
    """A field of one split of a data set of the hub (NAME[:CONFIG]), or of a folder that ``datasets`` loads.

    Memory-mapped by ``datasets``; no code of a repository is run.
    """
    import datasets  # late: other corpora need not wait for it

    (name, _, config), where = os.path.expanduser(place).partition(":"), f"hf:{place}".rstrip(":")
    folder, what = Path(name), "cannot load the data set"
    if (folder.is_absolute() or name.startswith(".")) and not folder.is_dir():
        raise UsageError("no such folder of a data set", where=where)
    try:
        rows = datasets.load_dataset(name, config or None, split=split, revision=revision)
    except ValueError as error:  # an unknown configuration or split, which it lists
        raise UsageError(what, where=where, got=error) from error
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        remedy = "is the name right and the hub (or its cache) within reach?"
        raise GdistillError(what, where=where, got=got, remedy=remedy) from error
    if field not in (names := rows.column_names):
        got, remedy = f"fields {names}", did_you_mean(field, names)
        raise UsageError(f"no field {field!r}", where=where, got=got, remedy=remedy)
    kind = getattr(rows.features[field], "dtype", "")
    if kind not in ("string", "large_string"):
        raise UsageError(f"field {field!r} holds no text", where=where, got=kind)
    rows = rows.select_columns([field])
    facts = {"config": config or None, "split": split, "num_rows": len(rows)}
    if folder.is_dir():  # where it lies says nothing: its files do
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return rows[field], facts, [p for p in paths if not any(n[0] == "." for n in p.relative_to(folder).parts)]
    return rows[field], facts | {"name": name, "revision": revision, "fingerprint": rows._fingerprint}, []


def _require_column(column: str, path: Path, names: list[str]) -> None:
    if column not in names:
        remedy = did_you_mean(column, names, "name one: PATH#column")
        raise UsageError(f"no column {column!r}", where=path, got=f"columns {names}", remedy=remedy)
