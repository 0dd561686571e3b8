"""Stores of any number of rows that lie nowhere: manifest and ledger are computed when asked for.

Names, sizes and sealed records are what a real store of the default codec has; shard files read as
a few bytes whose hash the ledger knows. What is measured on them is what readers and writers do
with names and records, which is all that grows with a corpus and is not streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from shards.codec.registry import codec_parameters, make_codec
from shards.store.layout import ShardRange, shard_files, shard_ranges
from shards.store.ledger import ShardRecord
from shards.store.location import FileRecord
from shards.store.manifest import Manifest

ROW_LENGTH, VOCAB_SIZE = 128, 50_257
ROWS_PER_SHARD, ROWS_PER_CHUNK = 2048, 32
"""What extraction chooses for rows of 128 tokens and the default codec."""
CONTENT = b"a shard file that nobody decodes"


def simulated_manifest(num_rows: int) -> Manifest:
    """The identity of a store of that many rows in one split."""
    codec = make_codec("posterior")
    return Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(VOCAB_SIZE, None),
        vocab_size=VOCAB_SIZE,
        row_length=ROW_LENGTH,
        splits={"train": num_rows},
        rows_per_shard=ROWS_PER_SHARD,
        rows_per_chunk=ROWS_PER_CHUNK,
        teacher={"id": "simulated"},
        tokenizer={"id": "simulated"},
        tokens={"fingerprint": "simulated"},
        seed=0,
        versions={},
    )


class SimulatedLocation:
    """A :class:`shards.store.location.Location` of a store whose first shards are finished."""

    url = "simulated://store"

    def __init__(self, manifest: Manifest, share_done: float = 1.0) -> None:
        self.manifest = manifest
        self.shards = shard_ranges(manifest, "train")
        self.num_done = int(share_done * len(self.shards))

    @cached_property
    def _content(self) -> FileRecord:
        return FileRecord.of(CONTENT)

    def read(self, name: str) -> bytes:
        if name == "manifest.json":
            return self.manifest.to_bytes()
        if not name.startswith("ledger/"):
            return CONTENT
        index = int(Path(name).stem)
        if index >= self.num_done:
            raise FileNotFoundError(name)
        shard = self.shards[index]
        files = dict.fromkeys(shard_files(self.manifest, shard).values(), self._content)
        return ShardRecord(shard, self.manifest.sha256, files).to_bytes()

    def size(self, name: str) -> int | None:
        return len(CONTENT)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for shard in self.shards[: self.num_done]:
            found |= self._sizes_of(shard, prefix)
        return found

    def written_at(self, prefix: str) -> dict[str, float]:
        return dict.fromkeys(self.sizes(prefix), 0.0)

    def _sizes_of(self, shard: ShardRange, prefix: str) -> dict[str, int]:
        if prefix == "ledger":
            return {f"ledger/train/{shard.index:06d}.json": 1}
        names = shard_files(self.manifest, shard).values()
        found = dict.fromkeys(names, len(CONTENT))
        return found if prefix else {**found, f"ledger/train/{shard.index:06d}.json": 1}

    def write(self, name: str, data: bytes) -> None:
        raise OSError("a simulated store is read-only")

    def delete(self, name: str) -> None:
        raise OSError("a simulated store is read-only")

    def discard_leftovers(self, name: str) -> None:
        return

    def open_file(self, name: str, record: FileRecord) -> int:
        raise OSError("a simulated store has no files")

    def peek(self, name: str, start: int, length: int) -> bytes | None:
        return CONTENT[start : start + length]

    def discard_altered_copy(self, record: FileRecord) -> bool:
        return False

    @contextmanager
    def claim(self, name: str, *, wait: bool) -> Iterator[bool]:
        yield True

    def claims(self) -> list[str]:
        return []
