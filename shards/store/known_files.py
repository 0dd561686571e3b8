"""What a reader remembers of shards that it has met: 40 bytes a file, whatever the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shards.storage import FileRecord

UNKNOWN = -1


class KnownFiles:
    """Size and hash of the files of a split's shards, one file per array.

    Threads may add the same shard at once, as they add the same values.

    Args:
        num_shards: Shards of the split.
        arrays: The arrays whose files are of interest.
    """

    def __init__(self, num_shards: int, arrays: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(arrays)}
        shape = (num_shards, len(self._columns))
        self._num_bytes = np.full(shape, UNKNOWN, np.int64)
        self._sha256 = np.zeros((*shape, 32), np.uint8)

    def __contains__(self, shard: int) -> bool:
        # The last column is the last to be filled in.
        return bool(self._num_bytes[shard, -1] != UNKNOWN)

    def add(self, shard: int, files: Mapping[str, FileRecord]) -> None:
        """Remember a shard's files, given by array name; other arrays are passed over."""
        for name, column in self._columns.items():
            sha256 = bytes.fromhex(files[name].sha256)
            self._sha256[shard, column] = np.frombuffer(sha256, np.uint8)
            self._num_bytes[shard, column] = files[name].num_bytes

    def num_bytes(self, shard: int, array: str) -> int:
        """The size of a known shard's file."""
        return int(self._num_bytes[shard, self._columns[array]])

    def record(self, shard: int, array: str) -> FileRecord:
        """Size and hash of a known shard's file."""
        sha256 = self._sha256[shard, self._columns[array]].tobytes().hex()
        return FileRecord(self.num_bytes(shard, array), sha256)
