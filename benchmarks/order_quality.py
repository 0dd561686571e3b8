"""What the order of an epoch costs and how well it mixes: exact counts, no clock.

    python -m benchmarks.order_quality [--out benchmarks/results]

Read amplification is chunks read over chunks there are, summed over all ranks of an epoch. Mixing
is told by two numbers of the order and, beside them, of a full permutation by the same generator:
Spearman's correlation between the stored places of consecutive rows, and the share of a batch's
rows that come from a chunk already met in that batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from shards.base import write_json_atomic
from shards.stream import ShardStream, Shuffle, ShuffledOrder

SPLITS = {"1,024 tokens a row": (65_536, 4), "128 tokens a row": (524_288, 32)}
"""Rows and rows per chunk, as stores of 67 million tokens have them."""
WORLD_SIZES = (1, 2, 3, 4, 8)
BATCH_SIZE = 512
MAX_AMPLIFICATION = 1.5


class ChunkCounter:
    """A split of nothing but row numbers that counts its reads."""

    fingerprint = "counted"

    def __init__(self, num_rows: int, rows_per_chunk: int) -> None:
        self.num_rows, self.rows_per_chunk, self.num_reads = num_rows, rows_per_chunk, 0

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        self.num_reads += 1
        start = index * self.rows_per_chunk
        return {"row": np.arange(start, min(start + self.rows_per_chunk, self.num_rows))}


def read_amplification(num_rows: int, rows_per_chunk: int, world_size: int) -> float:
    """Chunks read by all ranks together in one epoch, over the chunks there are."""
    num_reads = 0
    batch_size = BATCH_SIZE // world_size * world_size
    for rank in range(world_size):
        reader = ChunkCounter(num_rows, rows_per_chunk)
        stream = ShardStream(
            reader, seed=1, global_batch_size=batch_size, rank=rank, world_size=world_size
        )
        for _ in stream:
            pass
        num_reads += reader.num_reads
    return num_reads * rows_per_chunk / num_rows


def epoch_rows(num_rows: int, rows_per_chunk: int) -> np.ndarray:
    """Row at every position of epoch 0."""
    shuffle = Shuffle.for_chunks(-(-num_rows // rows_per_chunk))
    order = ShuffledOrder(num_rows, rows_per_chunk, 1, 0, shuffle)
    return order.locate(np.arange(num_rows))[0]


def mixing(rows: np.ndarray, rows_per_chunk: int) -> dict[str, float]:
    """The two numbers of an order of rows."""
    batches = (rows // rows_per_chunk)[: len(rows) // BATCH_SIZE * BATCH_SIZE]
    repeats = [1 - len(np.unique(batch)) / BATCH_SIZE for batch in batches.reshape(-1, BATCH_SIZE)]
    # Rows are a permutation, so they are their own ranks.
    return {
        "rank_correlation_of_consecutive_rows": float(np.corrcoef(rows[:-1], rows[1:])[0, 1]),
        "share_of_a_batch_from_a_chunk_met_before": float(np.mean(repeats)),
    }


def measure() -> dict[str, Any]:
    """All figures, by kind of split."""
    found: dict[str, Any] = {}
    for name, (num_rows, rows_per_chunk) in SPLITS.items():
        full = np.random.Generator(np.random.Philox(1)).permutation(num_rows)
        found[name] = {
            "num_rows": num_rows,
            "rows_per_chunk": rows_per_chunk,
            "batch_size": BATCH_SIZE,
            "read_amplification_by_world_size": {
                str(size): read_amplification(num_rows, rows_per_chunk, size)
                for size in WORLD_SIZES
            },
            "order": mixing(epoch_rows(num_rows, rows_per_chunk), rows_per_chunk),
            "full_permutation": mixing(full, rows_per_chunk),
            "standard_deviation_of_the_correlation": (num_rows - 1) ** -0.5,
        }
    return found


def main() -> None:
    """Measure, print, write ``order_quality.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    found = measure()
    worst = max(
        value
        for split in found.values()
        for value in split["read_amplification_by_world_size"].values()
    )
    bars = {"max_read_amplification": MAX_AMPLIFICATION, "met": worst <= MAX_AMPLIFICATION}
    write_json_atomic(out / "order_quality.json", {"splits": found, "bars": bars})
    for name, split in found.items():
        print(f"{name}: {split}")
    print(f"worst read amplification {worst:.3f}")


if __name__ == "__main__":
    main()
