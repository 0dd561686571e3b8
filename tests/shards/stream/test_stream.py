"""ShardStream: a mixed order that all ranks share, the same batches for everyone, exact resume, little reading."""

from __future__ import annotations

import json
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shards
from pipeline.run import bytes_per_token, rows_per_unit
from pipeline.settings import StoreSettings
from shards.codec.protocol import CODECS, make_codec
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store.store import ShardStore
from shards.stream.dataset import RowStream
from shards.stream.stream import LaneOrder, Order, RowBatch, ShardStream, WholeOrder, lanes_for, random_bits
from tests.shards.store_cases import write_store
from tests.trainer.run_cases import teacher_logits
from tests.trainer.run_cases import write_store as write_trained_store


def order_rows(order: Order, num_rows: int) -> np.ndarray:
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
        assert sorted(order_rows(order, num_rows).tolist()) == list(range(num_rows))


@pytest.mark.parametrize("chunks_at_once", [1 << 20, 3])
def test_frozen_orders(chunks_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A change of these numbers breaks every saved training state.
    monkeypatch.setattr("shards.stream.stream.BITS_AT_ONCE", chunks_at_once)
    lanes = [5, 7, 3, 8, 4, 6, 11, 0, 9, 2, 10, 1]
    assert order_rows(LaneOrder(12, 3, 7, 0, 2), 12).tolist() == lanes
    assert order_rows(WholeOrder(8, 3, 7, 0), 8).tolist() == [5, 2, 7, 3, 0, 6, 4, 1]
    assert len(np.unique(random_bits(7, np.array([1, 1 + (1 << 32), 1 << 32])))) == 3


@pytest.mark.parametrize("lanes", [0, 16])
def test_epoch_and_seed_move_the_chunks_and_the_rows_in_them(lanes: int) -> None:
    def order(seed: int, epoch: int) -> np.ndarray:
        whole = WholeOrder(1024, 8, seed, epoch)
        return order_rows(LaneOrder(1024, 8, seed, epoch, lanes) if lanes else whole, 1024)

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
        *((100_000, 32, 98, 14), (100_000, 32, 509, 28)),  # a divisor of half the window; a prime has none
        *((384, 1, 512, 0), (384, 32, 512, 16), (1000, 1, 512, 512), (400, 1, 512, 256)),
    ],
)
def test_lanes_follow_sizes(num_chunks: int, mib: int, batch: int, lanes: int) -> None:
    assert lanes_for(num_chunks, mib << 20, batch) == lanes


@pytest.mark.parametrize(("length", "batch"), [(256, 64), (1024, 512)])
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


class CountingReader:
    """A split in memory that counts which chunks were read."""

    def __init__(self, num_rows: int, rows_per_chunk: int = 4, name: str = "store") -> None:
        self.num_rows, self.rows_per_chunk, self.fingerprint = num_rows, rows_per_chunk, name
        self.chunk_bytes = 1 << 20
        self.reads: Counter[int] = Counter()
        self._lock = threading.Lock()

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        start = index * self.rows_per_chunk
        rows = np.arange(start, min(start + self.rows_per_chunk, self.num_rows))
        assert len(rows)
        with self._lock:
            self.reads[index] += 1
        tokens = (rows[:, None] * 10 + np.arange(3)).astype(np.int32)
        return {"tokens": tokens, "ids": (tokens[..., None] % 251).astype(np.uint16)}


def stream(reader: CountingReader, **options) -> ShardStream:
    return ShardStream(reader, **{"seed": 3, "global_batch_size": 12, **options})


def rows_of(batches: Sequence[RowBatch]) -> list[int]:
    return [row for batch in batches for row in batch.row_ids.tolist()]


def joined(parts: Sequence[RowBatch]) -> list[int]:
    """Row ids of a global batch, put together from all ranks by their slots."""
    sizes, slots = [len(part.slots) for part in parts], torch.cat([part.slots for part in parts])
    assert max(sizes) - min(sizes) <= parts[0].num_global_rows % len(parts), "equal shares, but of a last batch"
    assert all(bool((part.slots.diff() > 0).all()) for part in parts)
    assert sorted(slots.tolist()) == list(range(parts[0].num_global_rows))
    return torch.cat([part.row_ids for part in parts])[slots.argsort()].tolist()


def global_batches(num_rows: int, world_size: int, **options) -> list[list[int]]:
    options |= {"world_size": world_size}
    ranks = [list(stream(CountingReader(num_rows), rank=r, **options)) for r in range(world_size)]
    return [joined(parts) for parts in zip(*ranks, strict=True)]


def endless(one: ShardStream) -> Iterator[RowBatch]:
    while True:
        yield from one


@pytest.mark.parametrize("order", [{}, {"shuffle": False}, {"window_bytes": 10 << 20}])
@pytest.mark.parametrize("num_rows", [50, 601])
def test_global_batches_depend_on_nothing_but_the_seed(num_rows: int, order: dict) -> None:
    expected = global_batches(num_rows, 1, num_workers=0, **order)
    assert len({row for batch in expected for row in batch}) == sum(map(len, expected))
    for world_size, num_workers in product((1, 2, 4), (0, 1, 3)):
        got = global_batches(num_rows, world_size, num_workers=num_workers, **order)
        assert got == expected, (world_size, num_workers)


@pytest.mark.parametrize("window", [{}, {"window_bytes": 4 << 20}])
def test_epochs_drop_the_ragged_end_and_differ_as_seeds_do(window: dict) -> None:
    one = stream(CountingReader(50), **window)
    epochs = [list(one) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [4, 4, 4] == [len(one)] * 3
    assert [b.step for epoch in epochs for b in epoch] == list(range(12))
    assert [b.epoch for epoch in epochs for b in epoch] == [0] * 4 + [1] * 4 + [2] * 4
    dropped = [set(range(50)) - set(rows_of(epoch)) for epoch in epochs]
    assert all(len(rows) == 2 for rows in dropped) and dropped[0] != dropped[1]
    assert rows_of(epochs[0]) != rows_of(list(stream(CountingReader(50), seed=4, **window)))


def test_validation_keeps_order_and_the_last_partial_batch() -> None:
    one = stream(reader := CountingReader(50, 5), shuffle=False)
    batches = list(one)
    assert [b.num_global_rows for b in batches] == [12, 12, 12, 12, 2] and len(one) == 5
    assert rows_of(batches) == list(range(50)) and set(reader.reads.values()) == {1}
    for rank in range(4):  # a rank without rows in the last batch still steps
        one = stream(CountingReader(37), shuffle=False, rank=rank, world_size=4, num_workers=1)
        last = list(one)[-1]
        assert last.num_global_rows == 1
        assert last.arrays["tokens"].shape == (int(rank == 3), 3)


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(24, 300),
    first=st.integers(0, 30),
    second=st.integers(0, 30),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
    workers=st.sampled_from([0, 1, 3]),
)
def test_resume_twice_with_other_world_sizes(
    num_rows: int, first: int, second: int, worlds: list[int], workers: int
) -> None:
    whole, steps, state = endless(stream(CountingReader(num_rows))), count(), None
    for world_size, length in zip(worlds, (first, second, 5), strict=True):
        options = {"world_size": world_size, "num_workers": workers}
        ranks = [stream(CountingReader(num_rows), rank=r, **options) for r in range(world_size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
        iterators = [endless(rank) for rank in ranks]
        for _ in range(length):
            parts, expected = [next(iterator) for iterator in iterators], next(whole)
            assert joined(parts) == expected.row_ids.tolist()
            assert parts[0].step == expected.step == next(steps)
        state, *others = [rank.state_dict() for rank in ranks]
        assert all(other == state for other in others)
        assert len(json.dumps(state)) < 200


def test_one_pass_leaves_the_place_alone_and_a_whole_epoch_moves_it() -> None:
    one = stream(CountingReader(50))
    next(iter(one))
    before = one.state_dict()
    assert len(list(one.one_pass())) == 4 and one.state_dict() == before
    assert stream(CountingReader(4000)).state_dict()["num_lanes"] == 504, "of 896 MiB, unless told"
    list(one)
    assert (one.state_dict()["epoch"], one.state_dict()["rows_consumed"]) == (1, 0)
    for num_batches, shuffle in ((4, True), (5, False)):
        one = stream(CountingReader(50), shuffle=shuffle)
        next(iter(one))
        one.skip_epoch()
        assert (one.state_dict()["epoch"], one.state_dict()["step"]) == (1, num_batches)
        assert [b.step - 2 * num_batches for b in one.one_pass(2)] == [*range(num_batches)]


def test_a_changed_batch_size_continues_with_the_next_row() -> None:
    """Later epochs are shuffled as ever with that size."""
    window = {"window_bytes": 10 << 20}
    one, other = (stream(CountingReader(200), global_batch_size=g, **window) for g in (12, 10))
    later = rows_of(list(other.one_pass(1)))
    iterator = iter(one)
    first = [next(iterator) for _ in range(3)]
    other.load_state_dict(one.state_dict())
    assert rows_of(list(other.one_pass(1))) == later
    rest = list(other)
    assert [b.step for b in rest] == [*range(3, 19)]
    assert other.state_dict()["step"] == 19 and rows_of(list(other)) == later
    whole = rows_of(list(stream(CountingReader(200), **window).one_pass()))
    assert rows_of(first + rest)[:192] == whole[:192]


def test_the_state_of_another_store_and_a_damaged_one_are_refused() -> None:
    one = stream(CountingReader(50, name="abc train"))
    state = one.state_dict()
    for name, seed in (("def train", 3), ("abc train", 4)):
        other = stream(CountingReader(50, name=name), seed=seed)
        with pytest.raises(GdistillError, match=r"got abc train, seed 3.*expected") as caught:
            other.load_state_dict(state)
        assert other.fingerprint in str(caught.value)
    stored, another = (stream(CountingReader(50), shuffle=False, seed=seed) for seed in (3, 4))
    another.load_state_dict(stored.state_dict())  # an order without a seed
    odd = {"epoch": (-1,), "rows_consumed": (51, None), "step": (-1,), "num_lanes": (51, None)}
    for name, value in ((name, value) for name, values in odd.items() for value in values):
        with pytest.raises(GdistillError, match="damaged"):
            one.load_state_dict({**state, name: value})


def test_two_iterations_at_once_are_refused() -> None:
    one = stream(CountingReader(50))
    for move in (lambda: next(iter(one)), lambda: one.load_state_dict(one.state_dict())):
        old = iter(one)
        next(old)
        move()
        with pytest.raises(GdistillError, match="repositioned, or iterated anew"):
            next(old)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 64}, "50 rows.*at least 64.*lower the batch"),
        ({"global_batch_size": 10, "world_size": 4}, "multiple of the world size 4"),
        ({"global_batch_size": 0}, "multiple"),
        *(({"rank": rank, "world_size": size}, f"rank {rank} of {size}") for rank, size in ((2, 2), (-1, 2), (0, 0))),
        ({"num_workers": -1}, "num_workers"),
        ({"num_rows": 0, "shuffle": False}, "empty"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict, words: str) -> None:
    assert len(stream(CountingReader(12))) == 1
    with pytest.raises(UsageError, match=words):
        stream(CountingReader(options.pop("num_rows", 50)), **options)


@pytest.mark.parametrize(
    ("world_size", "num_chunks", "mib", "times"),
    [(1, 6000, 896, 1), (7, 3000, 896, 1), (16, 600, 28, 2), (1, 10, 896, 1)],
)
def test_a_chunk_is_read_by_one_rank_of_any_number(world_size: int, num_chunks: int, mib: int, times: int) -> None:
    """Or by two, where 16 ranks share 28 lanes; ten chunks are permuted whole."""
    batch_size = min(120 // world_size, num_chunks) * world_size
    readers = [CountingReader(num_chunks * 4 - 1) for _ in range(world_size)]
    for rank, reader in enumerate(readers):
        options = {"rank": rank, "world_size": world_size, "num_workers": rank % 2, "window_bytes": mib << 20}
        list(stream(reader, global_batch_size=batch_size, **options))
    total = sum(sum(reader.reads.values()) for reader in readers)
    assert total <= times * num_chunks + lanes_for(num_chunks, 1 << 20, batch_size, mib << 20)
    met = set().union(*(reader.reads for reader in readers))
    assert len(met) >= num_chunks - batch_size


class WeighingReader(CountingReader):
    """Knows how many of its chunks are alive at once."""

    alive, most = 0, 0

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        chunk = super().read_chunk(index)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(chunk["tokens"], self._gone)
        return chunk

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("window", [20, 64, 1000])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 4)])
def test_the_window_is_bounded_in_bytes(window: int, rank: int, world_size: int) -> None:
    """Whatever a chunk weighs: those open at a time, and those of the batch being put together."""
    reader = WeighingReader(num_rows=16_000)
    reader.chunk_bytes = 1000
    options = {"window_bytes": 1000 * window, "rank": rank, "world_size": world_size}
    list(stream(reader, global_batch_size=48, **options))
    assert reader.most <= window / world_size + 48


def test_leaving_early_stops_the_threads() -> None:
    before = threading.active_count()
    reader = CountingReader(4000)
    for _ in stream(reader, num_workers=3):
        break
    assert threading.active_count() == before
    assert sum(reader.reads.values()) < 200


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_the_rows_of_the_store_and_a_lost_shard_stops_them(tmp_path: Path, num_workers: int) -> None:
    def read() -> Iterator[RowBatch]:
        split = ShardStore.open(tmp_path / "store").split("train")
        return iter(ShardStream(split, seed=1, global_batch_size=4, num_workers=num_workers))

    write_store(tmp_path / "store")
    split = ShardStore.open(tmp_path / "store").split("train")
    stored = split.read_rows(0, split.num_rows)
    for batch in read():
        for name, array in batch.arrays.items():
            assert torch.equal(array, torch.from_numpy(stored[name][batch.row_ids.numpy()]))
    (tmp_path / "store/train/entry_gumbels/c/1/0/0").unlink()
    with pytest.raises(IntegrityError, match=r"train/entry_gumbels/c/1/0/0.*train shard 1"):
        list(read())


# Rows for a training loop of one's own: a plain DataLoader, with and without workers.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_store(tmp_path_factory.mktemp("dataset") / "store", "posterior")


def open_rows(store: Path, **options) -> RowStream:
    return shards.open_store(store).stream(batch_size=4, **{"seed": 3, **options})


def ids_of(batches: Iterable[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_do_not_show_and_any_batch_is_a_place_to_resume(store: Path, workers: int) -> None:
    plain, rows = open_rows(store), open_rows(store)
    epochs = [ids_of(plain) for _ in range(2)]
    assert len(epochs[0]) == len(plain) > 4 and epochs[0] != epochs[1]
    for other in ({"window_bytes": 1}, {"seed": 4}):  # less memory is another order, too
        assert ids_of(open_rows(store, **other)) != epochs[0]
    ranks = [ids_of(open_rows(store, rank=rank, world_size=2)) for rank in range(2)]
    shares = [sorted(one + other) for one, other in zip(*ranks, strict=True)]
    assert shares == [sorted(batch) for batch in epochs[0]]
    seen = list(DataLoader(rows, batch_size=None, num_workers=workers))
    assert ids_of(seen) == epochs[0] == ids_of(pickle.loads(pickle.dumps(open_rows(store)))), "as workers are spawned"
    for index in (0, 2, len(seen) - 1):
        again = open_rows(store)
        again.load_state_dict(rows.state_dict(seen[index]))
        rest = ids_of(DataLoader(again, batch_size=None, num_workers=workers))
        assert rest == (epochs[0][index + 1 :] or epochs[1])


@pytest.mark.parametrize("kept", [False, True])
def test_a_second_loop_with_workers_is_the_next_epoch(store: Path, kept: bool) -> None:
    plain, rows = open_rows(store), open_rows(store)
    epochs = [ids_of(plain) for _ in range(4)]
    loader = DataLoader(rows, batch_size=None, num_workers=2, persistent_workers=kept)
    for index, epoch in enumerate(epochs[:2]):
        seen = list(loader)
        assert ids_of(seen) == epoch
        steps = [rows.state_dict(batch)["step"] for batch in seen]
        assert steps == [index * len(rows) + i for i in range(1, len(rows) + 1)]
    next(iter(loader))  # a loop that is left early has begun the third epoch
    assert ids_of(loader) == epochs[3]
    rows.load_state_dict(rows.state_dict(seen[2]))
    assert ids_of(loader) == epochs[1][3:]
    with pytest.raises(UsageError, match=r"state_dict\(batch\)"):  # workers have read ahead
        rows.state_dict()
    assert ids_of(rows) == epochs[2] and ids_of(loader) == epochs[3], "without workers and with them again"


def everywhere(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mask of all positions that have noise."""
    return (torch.arange(batch["tokens"].shape[1]) > 0).expand(batch["tokens"].shape)


def test_fresh_noise_differs_by_split_seed_and_epoch_and_so_do_places(store: Path) -> None:
    options = [{}, {"split": "validation"}, {"seed": 4}]
    first, *others = (open_rows(store, shuffle=False, **option) for option in options)
    (batch, *_, last), (later, *_) = list(first), list(first)
    assert batch["row_ids"].equal(later["row_ids"])
    mask = everywhere(batch)
    noise = first.noise(batch, mask).gumbels()
    assert noise.equal(open_rows(store).noise(batch, mask).gumbels())
    drawn = [first.noise({**last, "place": place}, everywhere(last)) for place in (last["place"], batch["place"])]
    assert drawn[0].gumbels().equal(drawn[1].gumbels()), "also in the last batch, whose place is the next epoch's"
    for other in (first.noise(later, mask), *(rows.noise(batch, mask) for rows in others)):
        assert not bool(torch.isclose(noise, other.gumbels()).any(1).any())
    with pytest.raises(GdistillError, match="another store or order"):
        open_rows(store, split="validation").load_state_dict(open_rows(store).state_dict())


def test_frozen_noise_of_any_split_and_epoch_is_the_draw_that_was_stored(tmp_path: Path) -> None:
    """So the token is the argmax under the teacher that drew it."""
    rows = open_rows(write_trained_store(tmp_path / "store", "seeded"), split="validation")
    for batch in (*rows, *rows):
        mask, tokens = everywhere(batch), batch["tokens"].long()
        log_probs = teacher_logits()[tokens[:, :-1]].log_softmax(-1).flatten(0, 1)
        winners = (log_probs.double() + rows.noise(batch, mask).gumbels().double()).argmax(1)
        assert winners.equal(tokens[mask])
    with pytest.raises(UsageError, match="not the teacher's distribution"):
        rows.distribution(batch, mask)


def test_noise_and_distribution_of_a_batch(store: Path) -> None:
    rows = open_rows(store)
    first = next(iter(rows))
    assert rows.state_dict() == rows.state_dict(first)
    mask = everywhere(first)
    with pytest.raises(UsageError, match="position 0"):
        rows.noise(first, torch.ones_like(mask))
    noise, target = rows.noise(first, mask), rows.distribution(first, mask)
    own = first["tokens"][mask].long()
    probs = target.tile(0, target.vocab_size)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=5e-3)
    expected = first["token_log_probs"][mask].exp()
    torch.testing.assert_close(probs.gather(1, own[:, None]).squeeze(1), expected)
    winners = (probs.double().log() + noise.gumbels().double()).argmax(1)
    assert float((winners == own).double().mean()) > 0.97
    for some in (mask, mask & False):
        embedded = rows.noise(first, some).softmax_embed(torch.randn(noise.vocab_size, 8))
        assert embedded.shape == (int(some.sum()), 8)
