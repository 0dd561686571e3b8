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

from shards.atomic import write_json_atomic
from shards.stream.order import LaneOrder, lanes_for, window_bytes_of

SPLITS = {"1,024 tokens a row": (65_536, 4), "128 tokens a row": (524_288, 32)}
"""Rows and rows per chunk, as stores of 67 million tokens have them."""
CHUNK_BYTES = 4096 * 266
"""Decoded, of the default codec."""
WORLD_SIZES = (1, 2, 5, 7, 8, 32, 48, 64, 96, 128, 331, 1000, 1021, 1024)
BATCH_SIZE = 512
MAX_AMPLIFICATION = 1.1


def order_of(num_rows: int, rows_per_chunk: int, batch_size: int) -> LaneOrder:
    """Epoch 0 as a stream of that batch size goes through it."""
    num_lanes = lanes_for(-(-num_rows // rows_per_chunk), CHUNK_BYTES, batch_size)
    return LaneOrder(num_rows, rows_per_chunk, 1, 0, num_lanes)


def read_amplification(num_rows: int, rows_per_chunk: int, world_size: int) -> float:
    """Chunks read by all ranks together in one epoch, over the chunks there are.

    A rank keeps a chunk from the first position at which it needs it to the last at which it may.
    """
    batch_size = max(1, BATCH_SIZE // world_size) * world_size
    order = order_of(num_rows, rows_per_chunk, batch_size)
    end = num_rows // batch_size * batch_size
    owners = np.empty(end, dtype=np.int64)
    for start in range(0, end, batch_size):
        for rank in range(world_size):
            owners[order.positions_of_rank(start, start + batch_size, rank, world_size)] = rank
    rows, last = order.locate(np.arange(end))
    reads = np.unique(np.stack([rows // rows_per_chunk, last, owners]), axis=1)
    return reads.shape[1] * rows_per_chunk / num_rows


def epoch_rows(num_rows: int, rows_per_chunk: int) -> np.ndarray:
    """Row at every position of epoch 0."""
    return order_of(num_rows, rows_per_chunk, BATCH_SIZE).locate(np.arange(num_rows))[0]


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
            "batch_size": f"the largest multiple of the world size up to {BATCH_SIZE}, or it",
            "open_chunk_bytes": window_bytes_of(
                num_rows // rows_per_chunk, CHUNK_BYTES, BATCH_SIZE
            ),
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
