"""Writing the parts of a token data set, so that a killed run can go on where it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import transformers
from transformers import PreTrainedTokenizerBase

from pipeline.tokens.dataset import (
    FORMAT_VERSION,
    RECORD,
    Part,
    fingerprint,
    rows_per_group,
    rows_schema,
    rows_table,
)
from pipeline.tokens.tokenizer import tokenizer_sha256
from shards.base import fsync_path, write_json_atomic

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
        identity: What decides the rows; see :mod:`pipeline.tokens.identity`.
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
