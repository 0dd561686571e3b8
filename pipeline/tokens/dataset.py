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
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from transformers import PreTrainedTokenizerBase

from pipeline.tokens.tokenizer import tokenizer_sha256
from shards.atomic import canonical_json, fsync_path, write_json_atomic
from shards.errors import IntegrityError, UsageError, safe_name

PART_TOKENS = 1 << 24
"""A part is closed at the first batch border behind so many tokens."""
ROW_GROUP_TOKENS = 1 << 20
FORMAT_VERSION = 1
RECORD = "tokens.json"
COLUMN = "input_ids"
FIELDS = (
    "fingerprint", "identity", "corpus", "row_length", "vocab_size", "bos_id", "eos_id",
    "tokenizer", "splits",
)  # fmt: skip
"""What ``tokens.json`` must hold beside its format version."""


def rows_per_group(row_length: int) -> int:
    """Rows of one Parquet row group: what one read brings into memory."""
    return max(1, ROW_GROUP_TOKENS // row_length)


@dataclass(frozen=True)
class Part:
    """One Parquet file of a split; the hash is of its ids as little-endian int32, row by row."""

    name: str
    num_rows: int
    num_bytes: int
    tokens_sha256: str
    max_token_id: int


class PartWriter:
    """Appends rows to the open part of one split; a closed part is on disk whole.

    Args:
        folder: The split's folder; made if missing, an unclosed part in it is removed.
        row_length: L.
        num_closed: Parts that an earlier run closed.
    """

    def __init__(self, folder: Path, row_length: int, num_closed: int = 0) -> None:
        self.folder, self.row_length, self.num_closed = folder, row_length, num_closed
        kind = pa.list_(pa.int32(), row_length)
        self._schema = pa.schema([pa.field(COLUMN, kind, nullable=False)])
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        self._start()

    def _start(self) -> None:
        self._file: pq.ParquetWriter | None = None
        self._pending: list[np.ndarray] = []
        self._num_pending, self.num_rows, self._max_token_id = 0, 0, -1
        self._digest = hashlib.sha256()
        self.name = f"part-{self.num_closed:05d}.parquet"

    @property
    def is_full(self) -> bool:
        """Whether the open part has reached its size."""
        return self.num_rows * self.row_length >= PART_TOKENS

    def write(self, rows: np.ndarray) -> None:
        """Append rows [n, L] int32."""
        if not len(rows):
            return
        self._digest.update(np.ascontiguousarray(rows, dtype="<i4").data)
        self._max_token_id = max(self._max_token_id, int(rows.max()))
        self._pending.append(rows)
        self._num_pending += len(rows)
        self.num_rows += len(rows)
        group = rows_per_group(self.row_length)
        self._flush(self._num_pending // group * group)

    def _flush(self, num_rows: int) -> None:
        """Hand the first pending rows to the file, a row group at a time."""
        if not num_rows:
            return
        if self._file is None:
            self._file = pq.ParquetWriter(
                self.folder / f".{self.name}.tmp",
                self._schema,
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            )
        rows, group = np.concatenate(self._pending), rows_per_group(self.row_length)
        for start in range(0, num_rows, group):
            part = rows[start : min(start + group, num_rows)]
            values = pa.array(np.ascontiguousarray(part).reshape(-1), pa.int32())
            column = pa.FixedSizeListArray.from_arrays(values, type=self._schema.field(0).type)
            table = pa.Table.from_arrays([column], schema=self._schema)
            self._file.write_table(table, row_group_size=group)
        self._pending = [rows[num_rows:]]
        self._num_pending -= num_rows

    def close(self) -> Part | None:
        """Finish the open part durably and start the next; None if it has no rows."""
        if not self.num_rows:
            return None
        self._flush(self._num_pending)
        assert self._file is not None
        self._file.close()
        temporary, path = self.folder / f".{self.name}.tmp", self.folder / self.name
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(self.folder)
        sizes = self.num_rows, path.stat().st_size
        part = Part(self.name, *sizes, self._digest.hexdigest(), self._max_token_id)
        self.num_closed += 1
        self._start()
        return part


def write_record(
    work: Path,
    parts: Mapping[str, list[Part]],
    counts: Mapping[str, Mapping[str, Any]],
    identity: Mapping[str, Any],
    corpus: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    border_ids: Mapping[str, Any],
) -> None:
    """Write ``tokens.json`` and the tokenizer's files: what makes parts a data set.

    Args:
        work: The folder that holds the parts.
        parts: By split.
        counts: By split, what was read, left out and repaired.
        identity: What decides the rows; see :mod:`pipeline.tokens.build`.
        corpus: Its settings, ``row_length`` among them.
        tokenizer: Whose ids the rows hold.
        border_ids: ``bos_id`` and ``eos_id``.
    """
    row_length = corpus["row_length"]
    tokenizer.save_pretrained(work / "tokenizer")
    splits, content = {}, {}
    for split, found in parts.items():
        num_rows = sum(part.num_rows for part in found)
        splits[split] = {
            "num_rows": num_rows,
            "num_tokens": num_rows * row_length,
            **counts[split],
            "parts": [asdict(part) for part in found],
        }
        content[split] = [[part.num_rows, part.tokens_sha256] for part in found]
    # Equal rows in equal parts, equal fingerprint.
    digest = hashlib.sha256(canonical_json({"row_length": row_length, "splits": content}))
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": digest.hexdigest(),
        "identity": identity,
        "corpus": corpus,
        "row_length": row_length,
        "vocab_size": len(tokenizer),
        **border_ids,
        "tokenizer": {
            "id": str(tokenizer.name_or_path),
            "sha256": tokenizer_sha256(tokenizer),
        },
        "splits": splits,
        "versions": {"transformers": transformers.__version__},
    }
    write_json_atomic(work / RECORD, record)


class TokenDataset:
    """Reader of a finished stage 1. Memory: one row group at a time, per split.

    Attributes:
        path: The ``tokens`` folder.
        record: The parsed ``tokens.json``.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record = path, record
        self.tokenizer_path = path / "tokenizer"
        self._group = lru_cache(maxsize=2)(self._read_group)

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a ``tokens`` folder; every part must be there at its noted size.

        Raises:
            UsageError: If there is no finished token data set.
            IntegrityError: If the record lacks a field, or a part is missing or truncated.
        """
        path = Path(path)
        remedy = f"remove {path} and run stage 1 again"
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except OSError as error:
            expected = f"a {RECORD} in it"
            raise UsageError("no finished token data set", where=path, expected=expected) from error
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
        if missing := [name for name in FIELDS if name not in record]:
            where, got = path / RECORD, missing[0]
            raise IntegrityError("a field is missing", where=where, got=got, remedy=remedy)
        dataset = cls(path, record)
        try:
            for split in dataset.splits:
                for part in dataset.parts(split):
                    safe_name(f"{split}/{part.name}")  # the folder may come from anywhere
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            where, got = path / RECORD, str(error)[:400]
            raise IntegrityError(
                "malformed list of parts", where=where, got=got, remedy=remedy
            ) from error
        for split in dataset.splits:
            for part in dataset.parts(split):
                file = path / split / part.name
                size = file.stat().st_size if file.is_file() else None
                if size != part.num_bytes:
                    raise IntegrityError(
                        f"token rows are {'missing' if size is None else 'truncated'}",
                        where=file,
                        got="no file" if size is None else f"{size} bytes",
                        expected=f"{part.num_bytes} bytes",
                        remedy=remedy,
                    )
        return dataset

    @property
    def fingerprint(self) -> str:
        """Identifies the rows."""
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
            first, part, group = firsts[bisect.bisect_right(firsts, (start, 1 << 62, 0)) - 1]
            blocks.append(self._group(split, part, group)[start - first : stop - first])
            start += len(blocks[-1])
        return np.concatenate(blocks)

    @cached_property
    def _firsts(self) -> dict[str, list[tuple[int, int, int]]]:
        """For each split: (first row, part, row group in the part) of every row group."""
        per_group = rows_per_group(self.row_length)
        table: dict[str, list[tuple[int, int, int]]] = {}
        for split in self.splits:
            first, groups = 0, table.setdefault(split, [])
            for index, part in enumerate(self.parts(split)):
                starts = range(0, part.num_rows, per_group)
                groups += [(first + at, index, group) for group, at in enumerate(starts)]
                first += part.num_rows
        return table

    def _read_group(self, split: str, part: int, group: int) -> np.ndarray:
        path = self.path / split / self.parts(split)[part].name
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            column = file.read_row_group(group, columns=[COLUMN]).column(0).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            where = f"{path}, row group {group}"
            raise IntegrityError("damaged token rows", where=where, got=error) from error
        return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.row_length)
