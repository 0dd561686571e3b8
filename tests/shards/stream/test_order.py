"""An epoch's order: a permutation, pure, shared by all ranks, well mixed, and cheap to read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.base.errors import UsageError
from shards.stream import order as order_module
from shards.stream.order import SequentialOrder, Shuffle, ShuffledOrder, epoch_order


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 700),
    rows_per_chunk=st.integers(1, 40),
    lanes=st.integers(1, 9),
    window=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_row_once(
    num_rows: int, rows_per_chunk: int, lanes: int, window: int, seed: int
) -> None:
    rows = epoch_order(num_rows, rows_per_chunk, seed, 3, Shuffle(lanes, window))
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_hand_worked_positions() -> None:
    # Chunks in the order 1 3 | 2 0, two lanes. In lane 0 the first bucket holds one row of chunk 1
    # (3), the second its other two and one of chunk 3 (11 5 4), the third the rest of chunk 3.
    # Frozen: a change of these numbers breaks every saved training state.
    rows = epoch_order(12, 3, 7, 0, Shuffle(2, 2))
    assert rows[0::2].tolist() == [3, 11, 5, 4, 10, 9]
    assert rows[1::2].tolist() == [8, 7, 2, 6, 0, 1]


def test_pure_in_seed_and_epoch() -> None:
    first = epoch_order(1000, 8, 1, 0)
    assert np.array_equal(first, epoch_order(1000, 8, 1, 0))
    assert not np.array_equal(first, epoch_order(1000, 8, 1, 1))
    assert not np.array_equal(first, epoch_order(1000, 8, 2, 0))


def test_any_positions_in_any_grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = epoch_order(5000, 7, 1, 0, Shuffle(4, 3))
    monkeypatch.setattr(order_module, "BLOCK_ROWS", 64)
    order = ShuffledOrder(5000, 7, 1, 0, Shuffle(4, 3))
    asked = np.random.default_rng(0).permutation(5000)
    assert np.array_equal(order.locate(asked)[0], whole[asked])


def test_last_need_is_the_last_position_of_a_chunk_in_its_lane() -> None:
    lanes = 4
    order = ShuffledOrder(1000, 8, 1, 0, Shuffle(lanes, 3))
    positions = np.arange(1000)
    rows, last = order.locate(positions)
    real: dict[tuple[int, int], int] = {}
    for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
        real[position % lanes, row // 8] = position
    bound = {(p % lanes, r // 8): e for p, r, e in zip(positions, rows, last, strict=True)}
    assert all(bound[key] >= position for key, position in real.items())
    slack = [bound[key] - position for key, position in real.items()]
    assert np.mean(slack) < 2 * 8 * lanes  # no chunk lingers beyond its window


def test_ranks_share_a_batch_and_keep_to_their_lanes() -> None:
    order = ShuffledOrder(9600, 8, 1, 0)
    assert order.shuffle.num_lanes == 48
    for world_size in (1, 2, 3, 4, 8):
        parts = [order.positions_of_rank(96, 192, r, world_size) for r in range(world_size)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(96, 192))
        lanes = [set((part % 48).tolist()) for part in parts]
        assert sum(map(len, lanes)) == 48


def test_sequential_ranks_take_contiguous_parts() -> None:
    order = SequentialOrder(100, 8)
    parts = [order.positions_of_rank(90, 100, rank, 4).tolist() for rank in range(4)]
    assert [p for part in parts for p in part] == list(range(90, 100))
    assert order.locate(np.array([0, 7, 8, 99]))[1].tolist() == [7, 7, 15, 99]


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's, of samples without ties worth speaking of."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def test_consecutive_rows_are_as_unrelated_as_in_a_full_permutation() -> None:
    num_rows = 48 * 64 * 16
    rows = epoch_order(num_rows, 16, 5, 0)
    # The coefficient of a random permutation has standard deviation 1 / sqrt(n - 1).
    bound = 5 / math.sqrt(num_rows)
    assert abs(rank_correlation(rows[:-1], rows[1:])) < bound
    # Whole chunks of 16 rows are placed at random: as few free choices as there are chunks.
    assert abs(rank_correlation(np.arange(num_rows), rows)) < bound * math.sqrt(16)
    assert rank_correlation(np.arange(num_rows), np.arange(num_rows)[::-1]) < -0.999


def test_rows_of_a_chunk_meet_in_a_batch_rarely() -> None:
    rows = epoch_order(48 * 64 * 16, 16, 5, 0)
    batches = (rows // 16)[: len(rows) // 256 * 256].reshape(-1, 256)
    shared = [1 - len(np.unique(batch)) / 256 for batch in batches]
    # 384 chunks are open: a batch of 256 draws about as if with replacement from that many.
    assert np.mean(shared) < 0.35


def test_numpy_stream_is_addressed_by_word() -> None:
    whole = order_module._random_bits(9, 0, 40)
    for start in range(20):
        assert np.array_equal(order_module._random_bits(9, start, 11), whole[start : start + 11])


def test_sizes_are_checked() -> None:
    with pytest.raises(UsageError, match="num_lanes"):
        Shuffle(0)
    assert [Shuffle.for_chunks(n).num_lanes for n in (1, 8, 31, 32, 96, 10**6)] == [
        1,
        2,
        4,
        8,
        24,
        48,
    ]
