"""Stage 1 on disk: rows of token ids as a Parquet data set, with a fingerprint.

::

    tokens/
      tokens.json               what was tokenized, how, and the fingerprint of the rows
      tokenizer/                the tokenizer's files
      train/part-00000.parquet  column input_ids: fixed_size_list<int32>[L]
      validation/part-00000.parquet

The folder appears under this name when it is complete, never before.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.base import IntegrityError, UsageError, canonical_json, safe_name

FORMAT_VERSION = 1
RECORD = "tokens.json"
COLUMN = "input_ids"
ROW_GROUP_TOKENS = 1 << 20
FIELDS = (
    "fingerprint", "identity", "corpus", "row_length", "vocab_size", "bos_id", "eos_id",
    "tokenizer", "splits",
)  # fmt: skip
"""What ``tokens.json`` must hold beside its format version."""


@dataclass(frozen=True)
class Part:
    """One Parquet file of a split.

    Attributes:
        tokens_sha256: Hash of its ids as little-endian int32, row by row: the content, whatever
            the compression.
    """

    name: str
    num_rows: int
    num_bytes: int
    tokens_sha256: str
    max_token_id: int


def rows_per_group(row_length: int) -> int:
    """Rows of one Parquet row group: what one read brings into memory."""
    return max(1, ROW_GROUP_TOKENS // row_length)


def rows_schema(row_length: int) -> pa.Schema:
    """The schema of every part."""
    return pa.schema([pa.field(COLUMN, pa.list_(pa.int32(), row_length), nullable=False)])


def rows_table(rows: np.ndarray) -> pa.Table:
    """Rows [n, L] int32 as an Arrow table."""
    schema = rows_schema(rows.shape[1])
    values = pa.array(np.ascontiguousarray(rows).reshape(-1), pa.int32())
    column = pa.FixedSizeListArray.from_arrays(values, type=schema.field(COLUMN).type)
    return pa.Table.from_arrays([column], schema=schema)


def fingerprint(row_length: int, splits: Mapping[str, list[Part]]) -> str:
    """Identifies the rows of a token data set: equal rows in equal parts, equal fingerprint."""
    content = {
        "row_length": row_length,
        "splits": {
            name: [[part.num_rows, part.tokens_sha256] for part in parts]
            for name, parts in splits.items()
        },
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


class TokenDataset:
    """Reader of a finished stage 1. Memory: one row group at a time, per split.

    Attributes:
        path: The ``tokens`` folder.
        record: The parsed ``tokens.json``.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record = path, record
        self._group = lru_cache(maxsize=2)(self._read_group)

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a ``tokens`` folder; every part must be there at its noted size.

        Raises:
            UsageError: If there is no finished token data set.
            IntegrityError: If the record lacks a field, or a part is missing or truncated.
        """
        path = Path(path)
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                "no finished token data set", where=path, expected=f"a {RECORD} in it"
            ) from error
        except (ValueError, RecursionError) as error:
            raise IntegrityError("damaged file", where=path / RECORD, got=error) from error
        if not isinstance(record, dict):
            got = type(record).__name__
            raise IntegrityError("damaged file", where=path / RECORD, got=got, expected="an object")
        if (version := record.get("format_version")) != FORMAT_VERSION:
            raise UsageError(
                "token data set of another format version",
                where=path,
                got=version,
                expected=FORMAT_VERSION,
                remedy="run stage 1 again into a new folder",
            )
        dataset = cls(path, record)
        dataset._check_fields()
        dataset._check_sizes()
        return dataset

    @property
    def fingerprint(self) -> str:
        """Identifies the rows; see :func:`fingerprint`."""
        return self.record["fingerprint"]

    @property
    def row_length(self) -> int:
        """Tokens per row, L."""
        return self.record["row_length"]

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer, special tokens included."""
        return self.record["vocab_size"]

    @property
    def max_token_id(self) -> int:
        """The largest id in any row; -1 without rows."""
        parts = [part for name in self.splits for part in self.parts(name)]
        return max((part.max_token_id for part in parts), default=-1)

    @property
    def bos_id(self) -> int:
        return self.record["bos_id"]

    @property
    def eos_id(self) -> int:
        return self.record["eos_id"]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.record["splits"])

    @property
    def tokenizer_path(self) -> Path:
        """A Hugging Face tokenizer folder."""
        return self.path / "tokenizer"

    def parts(self, split: str) -> list[Part]:
        """The files of a split, in row order."""
        if split not in self.record["splits"]:
            raise UsageError("unknown split", where=self.path, got=split, expected=self.splits)
        return [Part(**part) for part in self.record["splits"][split]["parts"]]

    def num_rows(self, split: str) -> int:
        """Rows of a split."""
        return sum(part.num_rows for part in self.parts(split))

    def read_rows(self, split: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a split; [stop - start, L] int32.

        Raises:
            IntegrityError: If a part cannot be read as it was written.
            IndexError: If the range lies outside the split.
        """
        if not 0 <= start <= stop <= self.num_rows(split):
            raise IndexError(f"rows {start}..{stop} of {self.num_rows(split)} in {split!r}")
        blocks = [np.empty((0, self.row_length), np.int32)]
        firsts = self._firsts[split]
        while start < stop:
            index = bisect.bisect_right(firsts, (start, 1 << 62, 0)) - 1
            first, part, group = firsts[index]
            rows = self._group(split, part, group)
            blocks.append(rows[start - first : stop - first])
            start += len(blocks[-1])
        return np.concatenate(blocks)

    @cached_property
    def _firsts(self) -> dict[str, list[tuple[int, int, int]]]:
        """For each split: (first row, part, row group in the part) of every row group."""
        per_group = rows_per_group(self.row_length)
        table: dict[str, list[tuple[int, int, int]]] = {}
        for split in self.splits:
            first, groups = 0, []
            for index, part in enumerate(self.parts(split)):
                starts = range(0, part.num_rows, per_group)
                groups += [(first + at, index, group) for group, at in enumerate(starts)]
                first += part.num_rows
            table[split] = groups
        return table

    def _read_group(self, split: str, part: int, group: int) -> np.ndarray:
        path = self.path / split / self.parts(split)[part].name
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            column = file.read_row_group(group, columns=[COLUMN]).column(0).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError(
                "damaged token rows", where=f"{path}, row group {group}", got=error
            ) from error
        return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.row_length)

    def _check_fields(self) -> None:
        """Refuse a record that stage 1 did not write: all others rely on these fields."""
        where = self.path / RECORD
        remedy = f"remove {self.path} and run stage 1 again"
        missing = [name for name in FIELDS if name not in self.record]
        if missing:
            raise IntegrityError("a field is missing", where=where, got=missing[0], remedy=remedy)
        try:
            for split in self.splits:
                for part in self.parts(split):
                    safe_name(f"{split}/{part.name}")  # the folder may come from anywhere
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            raise IntegrityError(
                "malformed list of parts", where=where, got=str(error)[:400], remedy=remedy
            ) from error

    def _check_sizes(self) -> None:
        for split in self.splits:
            for part in self.parts(split):
                path = self.path / split / part.name
                found = path.stat().st_size if path.is_file() else None
                if found != part.num_bytes:
                    raise IntegrityError(
                        "token rows are missing" if found is None else "token rows are truncated",
                        where=path,
                        got="no file" if found is None else f"{found} bytes",
                        expected=f"{part.num_bytes} bytes",
                        remedy=f"remove {self.path} and run stage 1 again",
                    )
