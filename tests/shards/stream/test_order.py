"""An epoch's order: a permutation, pure, shared by all ranks, well mixed, and cheap to read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from pipeline.run import bytes_per_token, rows_per_unit
from pipeline.settings import StoreSettings
from shards.codec.protocol import CODECS, make_codec
from shards.stream.stream import LaneOrder, Order, SequentialOrder, WholeOrder, lanes_for


def rows_of(order: Order, num_rows: int) -> np.ndarray:
    return order.locate(np.arange(num_rows))[0]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 700),
    rows_per_chunk=st.integers(1, 40),
    lanes=st.integers(1, 90),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_row_once(num_rows: int, rows_per_chunk: int, lanes: int, seed: int) -> None:
    lane_order = LaneOrder(num_rows, rows_per_chunk, seed, 3, min(lanes, num_rows))
    for order in (lane_order, WholeOrder(num_rows, rows_per_chunk, seed, 3)):
        assert sorted(rows_of(order, num_rows).tolist()) == list(range(num_rows))


def test_frozen_orders() -> None:
    # A change of these numbers breaks every saved training state.
    lanes = [5, 7, 3, 8, 4, 6, 11, 0, 9, 2, 10, 1]
    assert rows_of(LaneOrder(12, 3, 7, 0, 2), 12).tolist() == lanes
    assert rows_of(WholeOrder(8, 3, 7, 0), 8).tolist() == [5, 2, 7, 3, 0, 6, 4, 1]


@pytest.mark.parametrize("lanes", [0, 16])
def test_epoch_and_seed_move_the_chunks_and_the_rows_in_them(lanes: int) -> None:
    def order(seed: int, epoch: int) -> np.ndarray:
        whole = WholeOrder(1024, 8, seed, epoch)
        return rows_of(LaneOrder(1024, 8, seed, epoch, lanes) if lanes else whole, 1024)

    first = order(1, 0)
    assert np.array_equal(first, order(1, 0))
    for other in (order(1, 1), order(2, 0)):
        # Of random permutations a place agrees with probability 1 / 128, or 1 / 8 in a chunk.
        assert np.mean(first // 8 == other // 8) < 0.05
        assert np.mean(first % 8 == other % 8) < 0.25
        inside = [np.array([o[o // 8 == k] % 8 for k in range(128)]) for o in (first, other)]
        assert np.mean(inside[0] == inside[1]) < 0.25


@pytest.mark.parametrize(("num_rows", "lanes"), [(1000, 4), (1024, 16), (1021, 7), (50, 50)])
def test_any_positions_in_any_grouping_and_their_last_need(num_rows: int, lanes: int) -> None:
    """The last position of a run of a chunk is the one that needs it last."""
    order = LaneOrder(num_rows, 8, 1, 0, lanes)
    asked = np.random.default_rng(0).permutation(num_rows)
    rows, last = order.locate(np.arange(num_rows))
    assert np.array_equal(order.locate(asked)[0], rows[asked])
    parts = [order.locate(part)[0] for part in np.array_split(asked, 9)]
    assert np.array_equal(np.concatenate(parts), rows[asked])
    for lane in range(lanes):
        chunks, needs = rows[lane::lanes] // 8, last[lane::lanes]
        for i, (chunk, need) in enumerate(zip(chunks, needs, strict=True)):
            end = i
            while end + 1 < len(chunks) and chunks[end + 1] == chunk:
                end += 1
            assert need == end * lanes + lane


@pytest.mark.parametrize("world", [1, 5, 7, 32, 48, 64, 96, 128, 331, 1021, 1024])
def test_reads_per_chunk_whatever_the_world_size(world: int) -> None:
    """All ranks over one epoch, each keeping a chunk until its last need.

    The store has 48 million tokens and more: 12,288 chunks of 4 rows.
    """
    batch = world * max(1, 512 // world)
    order = LaneOrder(12_288 * 4, 4, 3, 0, lanes_for(12_288, 1 << 20, batch))
    owner = np.empty(12_288 * 4 // batch * batch, dtype=np.int64)
    for start in range(0, len(owner), batch):
        for rank in range(world):
            owner[order.positions_of_rank(start, start + batch, rank, world)] = rank
    rows, last = order.locate(np.arange(len(owner)))
    # A visit of a chunk by a lane ends at a position of its own; each rank in it reads it once.
    visits = np.unique(np.stack([rows // 4, last, owner]), axis=1)
    # A window below 1 GB holds fewer chunks of 1 MiB than the largest batches have rows.
    assert visits.shape[1] / 12_288 <= (1.1 if batch <= 896 else 3)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lanes", [0, 5, 8, 48])
def test_ranks_share_a_batch_equally(world: int, lanes: int) -> None:
    order = LaneOrder(4800, 8, 1, 0, lanes) if lanes else WholeOrder(4800, 8, 1, 0)
    for start in (0, 120, 7):
        parts = [order.positions_of_rank(start, start + 120, r, world) for r in range(world)]
        assert [len(part) for part in parts] == [120 // world] * world
        assert sorted(np.concatenate(parts).tolist()) == list(range(start, start + 120))
        assert all((np.diff(part) > 0).all() for part in parts)


def test_sequential_ranks_take_contiguous_parts() -> None:
    order = SequentialOrder(100, 8)
    parts = [order.positions_of_rank(90, 100, rank, 4).tolist() for rank in range(4)]
    assert [p for part in parts for p in part] == list(range(90, 100))
    assert order.locate(np.array([0, 7, 8, 99]))[1].tolist() == [7, 7, 15, 99]


def test_consecutive_rows_are_unrelated_and_a_batch_has_rows_of_as_many_chunks() -> None:
    num_rows = 48 * 64 * 16
    rows = rows_of(LaneOrder(num_rows, 16, 5, 0, 256), num_rows)
    # The coefficient of a random permutation has standard deviation 1 / sqrt(n - 1); whole chunks
    # of 16 rows are placed at random: as few free choices as there are chunks.
    bound = 5 / math.sqrt(num_rows) * math.sqrt(16)
    assert abs(spearmanr(rows[:-1], rows[1:]).statistic) < bound
    assert abs(spearmanr(np.arange(num_rows), rows).statistic) < bound
    # Two lanes may meet in the chunk that their border cuts.
    batches = (rows // 16).reshape(-1, 256)
    assert np.mean([1 - len(np.unique(batch)) / 256 for batch in batches]) < 0.02


def test_chunks_are_opened_at_an_even_pace() -> None:
    """Lanes of the same length as their chunks' multiples would all turn over at once."""
    rows, last = LaneOrder(64 * 16 * 8, 8, 1, 0, 64).locate(np.arange(64 * 16 * 8))
    _, first_met = np.unique(np.stack([rows // 8, last]), axis=1, return_index=True)
    opened = np.bincount(first_met // 64, minlength=128)
    assert opened[0] == 64 and opened[1:].max() <= 16  # 8 a round on average


@pytest.mark.parametrize(
    ("num_chunks", "mib", "batch", "lanes"),
    [
        *((100_000, 1, batch, lanes) for batch, lanes in ((512, 512), (1021, 896), (32, 512))),
        *((100_000, 1, 96, 480), (100_000, 32, 512, 16), (100_000, 1 << 20, 512, 1)),  # 28 fit
        (100_000, 32, 509, 28),  # a prime: no divisor
        *((384, 1, 512, 0), (384, 32, 512, 16), (1000, 1, 512, 512), (400, 1, 512, 256)),
    ],
)
def test_lanes_follow_sizes(num_chunks: int, mib: int, batch: int, lanes: int) -> None:
    assert lanes_for(num_chunks, mib << 20, batch) == lanes


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("length", [128, 256, 1024])
@pytest.mark.parametrize("codec", CODECS)
def test_few_rows_of_a_batch_share_a_chunk(codec: str, length: int, batch: int) -> None:
    arrays = make_codec(codec).array_specs(50_257, 4096)
    per_chunk = rows_per_unit(length, arrays, StoreSettings())[0]
    chunk_bytes = per_chunk * length * bytes_per_token(arrays)
    num_rows = (1 << 23) // length
    num_chunks = -(-num_rows // per_chunk)
    lanes = lanes_for(num_chunks, chunk_bytes, batch)
    assert (lanes or num_chunks) * chunk_bytes < 1e9
    order = LaneOrder(num_rows, per_chunk, 0, 0, lanes) if lanes else WholeOrder(num_rows, per_chunk, 0, 0)
    starts = np.linspace(0, num_rows - batch, 8).astype(np.int64)
    batches = (order.locate(start + np.arange(batch))[0] // per_chunk for start in starts)
    assert np.mean([1 - len(np.unique(chunks)) / batch for chunks in batches]) <= 0.2
