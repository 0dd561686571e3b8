"""What a store is, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shards.store.manifest import read_record
from shards.store.store import ShardStore


@dataclass(frozen=True)
class Description:
    """A store's figures.

    Attributes:
        num_shards: Shards there will be, and of them
        num_finished: finished ones.
        num_tokens: Tokens in the finished shards.
        num_bytes: Bytes of all files of the store.
        shard_bytes: Bytes of the finished shards' files alone.
        is_before_tails: Whether a version wrote it that recorded no tails of files.
    """

    store: ShardStore
    num_shards: int
    num_finished: int
    num_tokens: int
    num_bytes: int
    shard_bytes: int
    is_before_tails: bool

    @classmethod
    def of(cls, store: ShardStore) -> Description:
        """Measure a store, finished or not."""
        manifest, sizes = store.manifest, store.location.sizes()
        shards, finished = manifest.all_shards(), store.finished()
        files = (name for shard in finished for name in manifest.shard_files(shard).values())
        record = read_record(store.location, manifest, finished[0]) if finished else None
        return cls(
            store,
            len(shards),
            len(finished),
            sum(shard.num_rows for shard in finished) * manifest.row_length,
            sum(sizes.values()),
            sum(sizes.get(name, 0) for name in files),
            record is not None and not record.tails,
        )

    @property
    def bytes_per_token(self) -> float | None:
        """Of the finished shards, noise, tokens and log-probabilities together."""
        return self.shard_bytes / self.num_tokens if self.num_tokens else None

    @property
    def fp16_vector_bytes_per_token(self) -> int:
        """What a dense noise vector in half precision would take."""
        return 2 * self.store.manifest.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Figures and the manifest's words, JSON-ready."""
        manifest = self.store.manifest
        parts = ("codec", "teacher", "tokenizer", "tokens")
        return {
            "location": self.store.location.url,
            "manifest_sha256": manifest.sha256,
            **{name: dict(getattr(manifest, name)) for name in parts},
            "vocab_size": manifest.vocab_size,
            "row_length": manifest.row_length,
            "splits": dict(manifest.splits),
            "num_shards": self.num_shards,
            "num_finished_shards": self.num_finished,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "bytes_per_token": self.bytes_per_token,
            "fp16_vector_bytes_per_token": self.fp16_vector_bytes_per_token,
        }
