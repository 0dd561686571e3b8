"""What a run amounts to, in a few lines and as ``summary.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.corpus import Tally
from pipeline.tokens import TokenDataset
from shards.store import ShardStore
from shards.tools import Description


@dataclass(frozen=True)
class StoreSummary:
    """A finished store in numbers.

    Attributes:
        num_tokens: Tokens of all splits, position 0 included.
        num_bytes: All files of the store, and of them
        shard_bytes: those that grow with the corpus.
        fp16_bytes_per_token: What the noise as fp16 vectors would take: 2 V.
    """

    num_rows: int
    num_tokens: int
    num_bytes: int
    shard_bytes: int
    fp16_bytes_per_token: int

    @classmethod
    def of(cls, store: ShardStore) -> StoreSummary:
        """The numbers of an open store."""
        description = Description.of(store)
        return cls(
            num_rows=sum(store.manifest.splits.values()),
            num_tokens=description.num_tokens,
            num_bytes=description.num_bytes,
            shard_bytes=description.shard_bytes,
            fp16_bytes_per_token=description.fp16_vector_bytes_per_token,
        )

    @property
    def bytes_per_token(self) -> float:
        """Of the shards alone: tokenizer, unigram and metadata do not grow with the corpus."""
        return self.shard_bytes / self.num_tokens

    def lines(self) -> list[str]:
        """For people."""
        ratio = self.fp16_bytes_per_token / self.bytes_per_token
        return [
            f"  rows           {self.num_rows:,}",
            f"  tokens         {self.num_tokens:,}",
            f"  bytes          {self.num_bytes:,}",
            f"  bytes/token    {self.bytes_per_token:.1f}",
            f"  fp16 vectors   {self.fp16_bytes_per_token:,} bytes/token: {ratio:.1f} x this store",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bytes_per_token": self.bytes_per_token,
            "fp16_ratio": self.fp16_bytes_per_token / self.bytes_per_token,
        }


def corpus_lines(dataset: TokenDataset) -> list[str]:
    """What stage 1 read, left out and repaired, split by split."""
    lines = []
    for split, record in dataset.record["splits"].items():
        tally = Tally(**{name: record[name] for name in vars(Tally())})
        documents = [f"{tally.num_documents:,} documents"] * bool(tally.num_documents)
        parts = [*documents, f"{record['num_rows']:,} rows"]  # scored rows come without documents
        notes = {
            "empty documents left out": tally.num_empty,
            "documents of bad UTF-8": tally.num_bad_utf8,
            "control characters kept": tally.num_control_characters,
            "special tokens spelled out in the text": record.get("num_special_tokens", 0),
            "tokens left over": record["num_dropped_tokens"],
        }
        parts += [f"{count:,} {what}" for what, count in notes.items() if count]
        parts += ["cut there, as asked"] * record.get("was_cut", False)
        lines.append(f"  {split:<14} {', '.join(parts)}")
    return lines
