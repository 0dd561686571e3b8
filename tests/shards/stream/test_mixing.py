"""Every codec's rows are well mixed, in a window below 1 GB."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.run import bytes_per_token, rows_per_unit
from pipeline.settings import StoreSettings
from shards.codec.registry import make_codec
from shards.stream.order import LaneOrder, shuffling_of
from shards.stream.stream import lanes_for

VOCAB, TOKENS = 50_257, 1 << 23
CODECS = {"posterior": {}, "topk": {}, "seeded": {}, "quantized": {}, "full": {}, "hidden": {}}


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("length", [128, 256, 1024])
@pytest.mark.parametrize("codec", CODECS)
def test_few_rows_of_a_batch_share_a_chunk(codec: str, length: int, batch: int) -> None:
    arrays = make_codec(codec, **CODECS[codec]).array_specs(VOCAB, 4096)
    per_chunk = rows_per_unit(length, arrays, StoreSettings())[0]
    chunk_bytes = per_chunk * length * bytes_per_token(arrays)
    shuffling = shuffling_of(TOKENS // length, per_chunk, chunk_bytes, batch)
    assert shuffling.shared_rows <= 0.2
    assert shuffling.window_bytes < 1e9
    assert shuffling.batch_bytes == batch * length * bytes_per_token(arrays)


def test_shared_rows_are_those_of_the_order() -> None:
    lanes = lanes_for(4096, 1 << 23, 512)
    rows = LaneOrder(4096 * 8, 8, 0, 0, lanes).locate(np.arange(4096 * 8))[0]
    batches = (rows // 8).reshape(-1, 512)
    exact = np.mean([1 - len(np.unique(chunks)) / 512 for chunks in batches])
    shared = shuffling_of(4096 * 8, 8, 1 << 23, 512).shared_rows
    assert shared > 0.5 and abs(shared - exact) < 0.05


@pytest.mark.parametrize("world", [1, 3, 8, 64])
def test_ranks_read_a_batch_of_wide_rows_once(world: int) -> None:
    """Chunks of one row, more of them than the window holds."""
    batch = 512 // world * world
    order = LaneOrder(8192, 1, 0, 0, lanes_for(8192, 50 << 20, batch))
    parts = [order.positions_of_rank(0, batch, rank, world) for rank in range(world)]
    rows = order.locate(np.concatenate(parts))[0]
    assert len(np.unique(rows)) == batch == len(rows)
