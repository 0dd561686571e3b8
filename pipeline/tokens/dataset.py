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
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED
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
        self.folder, self.row_length = folder, row_length
        kind = pa.list_(pa.int32(), row_length)
        self._schema = pa.schema([pa.field(COLUMN, kind, nullable=False)])
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        self._start(num_closed)

    def _start(self, number: int) -> None:
        self._file: pq.ParquetWriter | None = None
        self._pending: list[np.ndarray] = []
        self._num_pending, self.num_rows, self._max_token_id = 0, 0, -1
        self._digest = hashlib.sha256()
        self._number, self.name = number, f"part-{number:05d}.parquet"

    @property
    def is_full(self) -> bool:
        """Whether the open part has reached its size."""
        return self.num_rows * self.row_length >= PART_TOKENS

    def write(self, rows: np.ndarray) -> None:
        """Append rows [n, L] int32."""
        if not len(rows):
            return
        self._digest.update(np.ascontiguousarray(rows, dtype="<i4").data)
        self._max_token_id = max(self._max_token_id, int(rows.max()), int((~rows).max()))
        self._pending.append(rows)
        self._num_pending += len(rows)
        self.num_rows += len(rows)
        group = rows_per_group(self.row_length)
        self._flush(self._num_pending // group * group)

    def _flush(self, num_rows: int) -> None:
        """Hand the first pending rows to the file, in row groups."""
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
        rows = np.concatenate(self._pending)
        values = pa.array(np.ascontiguousarray(rows[:num_rows]).reshape(-1), pa.int32())
        column = pa.FixedSizeListArray.from_arrays(values, type=self._schema.field(0).type)
        table = pa.Table.from_arrays([column], schema=self._schema)
        self._file.write_table(table, row_group_size=rows_per_group(self.row_length))
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
        self._start(self._number + 1)
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
        rows = sum(part.num_rows for part in found)
        sizes = {"num_rows": rows, "num_tokens": rows * row_length}
        splits[split] = {**sizes, **counts[split], "parts": [asdict(part) for part in found]}
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
        "tokenizer": {"id": str(tokenizer.name_or_path), "sha256": tokenizer_sha256(tokenizer)},
        "splits": splits,
        "versions": {"transformers": transformers.__version__},
    }
    write_json_atomic(work / RECORD, record)


class TokenDataset:
    """Reader of a finished stage 1; see :meth:`open`. Memory: two row groups at a time.

    Attributes:
        path: The ``tokens`` folder; ``tokenizer_path`` is the tokenizer's in it.
        record: The parsed ``tokens.json``.
        fingerprint: Identifies the rows.
        row_length: Tokens of a row, L.
        vocab_size: Entries of the tokenizer, special tokens included.
        max_token_id: The largest id in any row; -1 without rows.
        splits: Their names.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record, self.tokenizer_path = path, record, path / "tokenizer"
        self.fingerprint: str = record["fingerprint"]
        self.row_length: int = record["row_length"]
        self.vocab_size: int = record["vocab_size"]
        self.bos_id: int = record["bos_id"]
        self.eos_id: int = record["eos_id"]
        self.splits: tuple[str, ...] = tuple(record["splits"])
        self._parts = {split: [Part(**part) for part in found["parts"]] for split, found in record["splits"].items()}
        every = [part for parts in self._parts.values() for part in parts]
        self.max_token_id = max((part.max_token_id for part in every), default=-1)
        self._group = lru_cache(maxsize=2)(self._read_group)

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a ``tokens`` folder; every part must be there at its noted size.

        Raises:
            UsageError: If there is no finished token data set.
            IntegrityError: If the record lacks a field, or a part is missing or truncated.
        """
        path = Path(path)
        file, remedy = path / RECORD, f"remove {path} and run stage 1 again"
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            expected = f"a {RECORD} in it"
            raise UsageError("no finished token data set", where=path, expected=expected) from error
        except (ValueError, RecursionError) as error:
            raise IntegrityError("damaged file", where=file, got=error) from error
        if not isinstance(record, dict):
            got = type(record).__name__
            raise IntegrityError("damaged file", where=file, got=got, expected="an object")
        if (version := record.get("format_version")) != FORMAT_VERSION:
            what, remedy = "token rows of another format version", "run stage 1 in a new folder"
            expected = FORMAT_VERSION
            raise UsageError(what, where=path, got=version, expected=expected, remedy=remedy)
        if missing := [name for name in FIELDS if name not in record]:
            raise IntegrityError("a field is missing", where=file, got=missing[0], remedy=remedy)
        try:
            dataset = cls(path, record)
            for split, parts in dataset._parts.items():
                for part in parts:
                    safe_name("/".join((split, part.name)))  # the folder may come from anywhere
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            what, got = "malformed list of parts", str(error)[:400]
            raise IntegrityError(what, where=file, got=got, remedy=remedy) from error
        for split, parts in dataset._parts.items():
            for part in parts:
                place = path / split / part.name
                size = place.stat().st_size if place.is_file() else None
                if size != part.num_bytes:
                    what = f"token rows are {'missing' if size is None else 'truncated'}"
                    got = "no file" if size is None else f"{size} bytes"
                    expected = f"{part.num_bytes} bytes"
                    raise IntegrityError(what, where=place, got=got, expected=expected, remedy=remedy)
        return dataset

    def parts(self, split: str) -> list[Part]:
        """The files of a split, in row order."""
        if split not in self._parts:
            raise UsageError("unknown split", where=self.path, got=split, expected=self.splits)
        return self._parts[split]

    def num_rows(self, split: str) -> int:
        """Rows of a split."""
        return sum(part.num_rows for part in self.parts(split))

    @property
    def packing(self) -> str:
        """How documents became rows; ``chat`` and ``prompts`` rows are marked."""
        return self.record["corpus"].get("packing", "concat")

    def read_rows(self, split: str, start: int, stop: int) -> np.ndarray:
        """Token ids of rows start..stop-1 of a split; [stop - start, L] int32."""
        rows = self.read_marked(split, start, stop)
        return unmarked(rows)[0] if self.packing in MARKED else rows

    def read_marked(self, split: str, start: int, stop: int) -> np.ndarray:
        """The same rows, with -1 - id where a token does not count (:mod:`pipeline.tokens.chat`).

        Raises:
            IntegrityError: If a part cannot be read as it was written.
            IndexError: If the range lies outside the split.
        """
        if not 0 <= start <= stop <= self.num_rows(split):
            raise IndexError(f"rows {start}..{stop} of {self.num_rows(split)} in {split!r}")
        blocks = [np.empty((0, self.row_length), np.int32)]
        firsts = [*accumulate((part.num_rows for part in self._parts[split]), initial=0)]
        while start < stop:
            part = bisect.bisect_right(firsts, start) - 1
            group, offset = divmod(start - firsts[part], rows_per_group(self.row_length))
            blocks.append(self._group(split, part, group)[offset : offset + stop - start])
            start += len(blocks[-1])
        return np.concatenate(blocks)

    def _read_group(self, split: str, part: int, group: int) -> np.ndarray:
        path = self.path / split / self._parts[split][part].name
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            column = file.read_row_group(group, columns=[COLUMN]).column(0).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            where = f"{path}, row group {group}"
            raise IntegrityError("damaged token rows", where=where, got=error) from error
        return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.row_length)


def unmarked(rows: Int[np.ndarray, "*s"]) -> tuple[Int[np.ndarray, "*s"], Bool[np.ndarray, "*s"]]:
    """Token ids of marked rows, and which of them count."""
    counted = rows >= 0
    return np.where(counted, rows, ~rows), counted
