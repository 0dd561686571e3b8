"""What a run amounts to, in a few lines and as ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.corpus import Tally
from pipeline.tokens import TokenDataset
from shards.store import ShardStore
from shards.tools import Description


def store_figures(store: ShardStore) -> dict[str, int | float]:
    """A finished store in numbers.

    ``num_tokens`` counts position 0; ``shard_bytes`` are those of ``num_bytes`` that grow with the
    corpus, and what ``bytes_per_token`` is of; ``fp16_bytes_per_token`` is what the noise as fp16
    vectors would take, 2 V.
    """
    found = Description.of(store)
    per_token, fp16 = found.shard_bytes / found.num_tokens, found.fp16_vector_bytes_per_token
    return {
        "num_rows": sum(store.manifest.splits.values()),
        "num_tokens": found.num_tokens,
        "num_bytes": found.num_bytes,
        "shard_bytes": found.shard_bytes,
        "fp16_bytes_per_token": fp16,
        "bytes_per_token": per_token,
        "fp16_ratio": fp16 / per_token,
    }


def store_lines(figures: Mapping[str, int | float]) -> list[str]:
    """The figures for people."""
    fp16, ratio = figures["fp16_bytes_per_token"], figures["fp16_ratio"]
    return [
        f"  rows           {figures['num_rows']:,}",
        f"  tokens         {figures['num_tokens']:,}",
        f"  bytes          {figures['num_bytes']:,}",
        f"  bytes/token    {figures['bytes_per_token']:.1f}",
        f"  fp16 vectors   {fp16:,} bytes/token: {ratio:.1f} x this store",
    ]


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
