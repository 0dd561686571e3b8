"""Writing the parts of a token data set, so that a killed run can go on where it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.tokens.dataset import Part, rows_per_group, rows_schema, rows_table
from shards.base import fsync_path

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
