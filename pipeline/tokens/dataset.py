"""Writing the parts of a token data set, so that a killed run can go on where it was."""

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


class PartWriter:
    """Appends rows to the open part of one split; a closed part is on disk whole.

    Args:
        folder: The split's folder; made if missing, an unclosed part in it is removed.
        row_length: L.
        num_closed: Parts that an earlier run closed.
    """

    def __init__(self, folder: Path, row_length: int, num_closed: int = 0) -> None:
        self.folder, self.row_length, self.num_closed = folder, row_length, num_closed
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        self._start()

    def _start(self) -> None:
        self._file: pq.ParquetWriter | None = None
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self.num_rows = 0
        self._max_token_id = -1
        self._digest = hashlib.sha256()

    @property
    def name(self) -> str:
        """File name of the open part."""
        return f"part-{self.num_closed:05d}.parquet"

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
        if self._num_pending >= group:
            stacked = np.concatenate(self._pending)
            whole = len(stacked) // group * group
            self._flush(stacked[:whole], group)
            self._pending = [stacked[whole:]]
            self._num_pending = len(stacked) - whole

    def _flush(self, rows: np.ndarray, group: int) -> None:
        if self._file is None:
            self._file = pq.ParquetWriter(
                self._temporary,
                rows_schema(self.row_length),
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            )
        for start in range(0, len(rows), group):
            self._file.write_table(rows_table(rows[start : start + group]), row_group_size=group)

    @property
    def _temporary(self) -> Path:
        return self.folder / f".{self.name}.tmp"

    def close(self) -> Part | None:
        """Finish the open part durably and start the next; None if it has no rows."""
        if not self.num_rows:
            return None
        if self._num_pending:
            self._flush(np.concatenate(self._pending), rows_per_group(self.row_length))
        assert self._file is not None
        self._file.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        path = self.folder / self.name
        os.replace(self._temporary, path)
        fsync_path(self.folder)
        part = Part(
            name=self.name,
            num_rows=self.num_rows,
            num_bytes=path.stat().st_size,
            tokens_sha256=self._digest.hexdigest(),
            max_token_id=self._max_token_id,
        )
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
    num_rows = {split: sum(part.num_rows for part in found) for split, found in parts.items()}
    tokenizer.save_pretrained(work / "tokenizer")
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint(row_length, parts),
        "identity": identity,
        "corpus": corpus,
        "row_length": row_length,
        "vocab_size": len(tokenizer),
        **border_ids,
        "tokenizer": {
            "id": str(tokenizer.name_or_path),
            "sha256": tokenizer_sha256(tokenizer),
        },
        "splits": {
            split: {
                "num_rows": num_rows[split],
                "num_tokens": num_rows[split] * row_length,
                **counts[split],
                "parts": [asdict(part) for part in found],
            }
            for split, found in parts.items()
        },
        "versions": {"transformers": transformers.__version__},
    }
    write_json_atomic(work / RECORD, record)


# Stage 1 on disk: rows of token ids as a Parquet data set, with a fingerprint.
#
# ::
#
#     tokens/
#       tokens.json               what was tokenized, how, and the fingerprint of the rows
#       tokenizer/                the tokenizer's files
#       train/part-00000.parquet  column input_ids: fixed_size_list<int32>[L]
#       validation/part-00000.parquet
#
# The folder appears under this name when it is complete, never before.


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
