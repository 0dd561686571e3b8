"""What a store is, in figures and in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from shards.errors import visible
from shards.store.manifest import LEDGER, ShardRange, read_record
from shards.store.store import ShardStore

MOST_SHARDS_OF_RATE = 64


@dataclass(frozen=True)
class Pace:
    """How fast a store that is not complete grows, by the times of its ledger's files.

    Attributes:
        tokens_per_second: Of the newest shards, at most 64, until now: of all processes together,
            and falling while nobody works. None before the second shard.
        num_shards: How many shards that is measured over, and
        seconds: in what time.
        eta_seconds: What the tokens left take at that rate.
        seconds_since_shard: Age of the last finished shard; None where no time is known.
        num_claimed: Unfinished shards that a process holds, or held when it was killed.
    """

    tokens_per_second: float | None
    num_shards: int
    seconds: float
    eta_seconds: float | None
    seconds_since_shard: float | None
    num_claimed: int

    @classmethod
    def of(
        cls, store: ShardStore, finished: Sequence[ShardRange], left: Sequence[ShardRange]
    ) -> Pace:
        """Measure a store of which some shards are finished and some are left."""
        times = store.location.written_at(LEDGER)
        known = [shard for shard in finished if shard.record_file in times]
        ordered = sorted((times[shard.record_file], shard.num_rows) for shard in known)
        newest = ordered[-MOST_SHARDS_OF_RATE - 1 :]
        now, length, rate = time.time(), store.manifest.row_length, None
        seconds = now - newest[0][0] if newest else 0.0
        if len(newest) > 1 and seconds > 0:
            rate = sum(rows for _, rows in newest[1:]) * length / seconds
        claims = set(store.location.claims())
        return cls(
            tokens_per_second=rate,
            num_shards=max(0, len(newest) - 1),
            seconds=seconds,
            eta_seconds=sum(shard.num_rows for shard in left) * length / rate if rate else None,
            seconds_since_shard=max(0.0, now - newest[-1][0]) if newest else None,
            num_claimed=sum(shard.claim_name in claims for shard in left),
        )

    def to_text(self) -> str:
        """One line."""
        parts = [f"{self.num_claimed} shards in work"]
        if self.seconds_since_shard is not None:
            parts.append(f"last one finished {_duration(self.seconds_since_shard)} ago")
        if self.tokens_per_second and self.eta_seconds is not None:
            over = f"{self.num_shards} shards in {_duration(self.seconds)}"
            parts.append(f"{self.tokens_per_second:,.0f} tok/s ({over})")
            parts.append(f"{_duration(self.eta_seconds)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@dataclass(frozen=True)
class Description:
    """A store's figures.

    Attributes:
        num_shards: Shards there will be, and of them
        num_finished: finished ones.
        num_tokens: Tokens in the finished shards.
        num_bytes: Bytes of all files of the store.
        shard_bytes: Bytes of the finished shards' files alone.
        pace: How fast it grows; None of a complete store.
        is_before_tails: Whether a version wrote it that recorded no tails of files.
    """

    store: ShardStore
    num_shards: int
    num_finished: int
    num_tokens: int
    num_bytes: int
    shard_bytes: int
    pace: Pace | None
    is_before_tails: bool

    @classmethod
    def of(cls, store: ShardStore) -> Description:
        """Measure a store, finished or not."""
        manifest, sizes = store.manifest, store.location.sizes()
        shards, unfinished = manifest.all_shards(), set(store.unfinished())
        finished = [shard for shard in shards if shard not in unfinished]
        files = (name for shard in finished for name in manifest.shard_files(shard).values())
        record = read_record(store.location, manifest, finished[0]) if finished else None
        return cls(
            store,
            len(shards),
            len(finished),
            sum(shard.num_rows for shard in finished) * manifest.row_length,
            sum(sizes.values()),
            sum(sizes.get(name, 0) for name in files),
            Pace.of(store, finished, [*unfinished]) if unfinished else None,
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
        """Figures and the manifest's words."""
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
            "pace": None if self.pace is None else asdict(self.pace),
        }

    def to_text(self) -> str:
        """A few aligned lines."""
        manifest, per_token, pace = self.store.manifest, self.bytes_per_token, self.pace
        splits, corpus = manifest.splits, manifest.tokens.get("corpus")
        corpus = corpus.get("source", corpus) if isinstance(corpus, dict) else corpus
        fingerprint = str(manifest.tokens.get("fingerprint", "unknown"))[:12]
        parameters = ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in manifest.codec.get("parameters", {}).items()
        )
        done = f"{self.num_finished} of {self.num_shards} shards, {self.num_tokens:,} tokens"
        if pace:
            share = self.num_tokens / (sum(splits.values()) * manifest.row_length)
            done += f" ({100 * share:.1f}%)"
        rows = ", ".join(f"{name} {rows:,}" for name, rows in splits.items())
        lines = {
            "store": self.store.location.url,
            "identity": manifest.sha256[:16],
            "codec": f"{manifest.codec['name']} {parameters}",
            "noise": "a fresh draw at every visit" if self.store.codec.is_fresh else "one draw",
            "teacher": _named(manifest.teacher, "weights_sha256"),
            "tokenizer": f"{_named(manifest.tokenizer, 'sha256')}, V = {manifest.vocab_size:,}",
            "corpus": f"{corpus} (fingerprint {fingerprint})",
            "rows": f"{rows} of {manifest.row_length} tokens",
            "complete": done,
            **({} if pace is None else {"running": pace.to_text()}),
            "bytes": f"{self.num_bytes:,}",
        }
        if per_token:
            dense = self.fp16_vector_bytes_per_token
            ratio = f"{dense / per_token:,.1f} x this store"
            lines["bytes/token"] = f"{per_token:.1f}; fp16 vectors {dense:,}: {ratio}"
        if self.is_before_tails:
            lines["checks"] = "written before tails: each shard is hashed whole when first read"
        # Whoever made the store chose the words: none of them may end a line or steer a terminal.
        return "\n".join(f"{name:<12} {visible(text)}" for name, text in lines.items())


def _named(part: Any, hash_name: str) -> str:
    text = str(part.get("id", "unknown"))
    return f"{text} (sha256 {str(part[hash_name])[:12]})" if hash_name in part else text
