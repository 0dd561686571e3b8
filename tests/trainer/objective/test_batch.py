"""Batches: noise decoded at masked positions, keyed draws, micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shards.noise.kinds import KeyedPosterior, dense_arrivals
from shards.provenance import derive_seed
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch, ShardStream
from tests.trainer.run_cases import LENGTH, SEED, VOCAB, tiny_run, write_store
from trainer.objective.batch import Batch, BatchMaker, CopiesAhead, StoredRowNoise
from trainer.objective.corruption import FULL, corrupt
from trainer.students.configuration import DiffusionSettings
from trainer.training.construction import build_student

CPU = torch.device("cpu")


def read_rows(store: ShardStore, maker: BatchMaker, epoch: int = 0) -> RowBatch:
    stream = ShardStream(
        store.split("train", maker.arrays), seed=1, global_batch_size=8, shuffle=False
    )
    return next(stream.one_pass(epoch))


def make_batch(path: Path, epoch: int = 0, with_noise: bool = True) -> Batch:
    store = ShardStore.open(path)
    maker = BatchMaker(store, "train", 3, CPU, with_noise)
    return maker(read_rows(store, maker, epoch), step=5)


def a_mask() -> torch.Tensor:
    mask = torch.rand(8, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 0] = False
    return mask


def test_fields(store: Path) -> None:
    batch = make_batch(store)
    assert batch.tokens.dtype == torch.int64 and batch.tokens.shape == (8, LENGTH)
    assert batch.token_log_probs.dtype == torch.float32
    assert batch.row_ids.tolist() == batch.slots.tolist() == list(range(8))
    assert (batch.global_batch_size, batch.step, batch.epoch, batch.seed) == (8, 5, 0, 3)


def test_noise_is_decoded_at_masked_positions_in_row_major_order(store: Path) -> None:
    batch, mask = make_batch(store), a_mask()
    assert batch.noise is not None
    noise = batch.noise.at(mask)
    assert isinstance(noise, KeyedPosterior)
    assert torch.equal(noise.tokens, batch.tokens[mask])
    assert torch.equal(noise.token_log_probs, batch.token_log_probs[mask])
    rows, positions = mask.nonzero(as_tuple=True)
    assert torch.equal(noise.keys.rows, batch.row_ids[rows])
    assert torch.equal(noise.keys.positions, positions)
    assert noise.keys.seed == derive_seed(3, "noise")
    everywhere = torch.ones_like(mask)
    everywhere[:, 0] = False
    whole = dense_arrivals(batch.noise.at(everywhere))
    assert torch.equal(whole[mask[everywhere]], dense_arrivals(noise))


def test_noise_makes_the_tokens_the_teachers_choice(store: Path) -> None:
    batch = make_batch(store)
    mask = torch.ones(8, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(SEED)) * 2
    log_probs = table[batch.tokens[:, :-1]].log_softmax(-1).flatten(0, 1)
    assert batch.noise is not None
    gumbels = -dense_arrivals(batch.noise.at(mask)).log()
    chosen = (log_probs + gumbels).argmax(-1)
    agreement = (chosen == batch.tokens[mask]).float().mean()
    assert agreement > 0.9  # four stored entries and a unigram tail: nearly always


def test_fresh_codec_draws_anew_in_every_epoch(store: Path) -> None:
    mask = a_mask()
    first, again, later = (make_batch(store, epoch) for epoch in (0, 0, 1))
    assert first.noise is not None and again.noise is not None and later.noise is not None
    one = dense_arrivals(first.noise.at(mask))
    assert torch.equal(one, dense_arrivals(again.noise.at(mask)))
    assert not torch.equal(one, dense_arrivals(later.noise.at(mask)))


def test_frozen_codec_repeats_its_draw_with_the_stores_keys(tmp_path: Path) -> None:
    path = write_store(tmp_path / "full", "full")
    mask = a_mask()
    first, later = make_batch(path, 0), make_batch(path, 1)
    assert isinstance(first.noise, StoredRowNoise) and isinstance(later.noise, StoredRowNoise)
    seed = ShardStore.open(path).manifest.noise_seed("train")
    assert (later.noise.seed, later.noise.draw) == (seed, 0)
    assert torch.equal(dense_arrivals(first.noise.at(mask)), dense_arrivals(later.noise.at(mask)))


def test_a_plain_student_reads_tokens_only(store: Path) -> None:
    batch = make_batch(store, with_noise=False)
    assert batch.noise is None
    opened = ShardStore.open(store)
    maker = BatchMaker(opened, "train", 3, CPU, with_noise=False)
    assert set(read_rows(opened, maker).arrays) == {"tokens", "token_log_probs"}


@pytest.mark.parametrize("size", [None, 3, 8, 100])
def test_micro_batches_keep_rows_slots_and_noise(store: Path, size: int | None) -> None:
    batch, mask = make_batch(store), a_mask()
    parts = list(batch.micro_batches(size))
    assert len(parts) == {None: 1, 3: 3, 8: 1, 100: 1}[size]
    assert sorted(torch.cat([part.slots for part in parts]).tolist()) == list(range(8))
    assert all(part.global_batch_size == 8 for part in parts)
    everywhere = torch.ones_like(mask)
    everywhere[:, 0] = False
    assert batch.noise is not None
    whole = dense_arrivals(batch.noise.at(everywhere)).unflatten(0, (8, -1))
    for part in parts:
        assert part.num_rows <= (size or 8) and part.noise is not None
        assert torch.equal(part.tokens, batch.tokens[part.slots])
        assert torch.equal(part.row_ids, batch.row_ids[part.slots])
        assert torch.equal(part.token_log_probs, batch.token_log_probs[part.slots])
        wanted = whole[part.slots][mask[part.slots, 1:]]
        assert torch.equal(dense_arrivals(part.noise.at(mask[part.slots])), wanted)
    moved = list(CopiesAhead(CPU, size).of(batch))
    assert [is_last for _, is_last in moved] == [False] * (len(parts) - 1) + [True]
    assert all(
        torch.equal(one.slots, two.slots) for (one, _), two in zip(moved, parts, strict=True)
    )


def test_every_micro_batch_has_every_kind_of_time() -> None:
    """Slots are strata of t: parts of neighbours would be nearly clean or nearly all masked."""
    rows = torch.arange(64)
    tokens = torch.zeros(64, LENGTH, dtype=torch.int64)
    batch = Batch(tokens, tokens.float(), rows, rows, 64, 0, 0, 3)
    parts = list(batch.micro_batches(8))
    means = [float(corrupt(part, DiffusionSettings(), 1, FULL).t.mean()) for part in parts]
    # Each part holds one time of every eighth of [0, 1]: their means differ by less than an eighth.
    assert len(parts) == 8 and max(means) - min(means) <= 1 / 8
    sizes = [part.num_rows for part in batch.micro_batches(10)]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 10


def test_micro_batches_give_the_whole_batchs_gradient(store: Path) -> None:
    student = build_student(tiny_run(), ShardStore.open(store), None)
    batch, gradients = make_batch(store), []
    for size in (None, 3):
        student.zero_grad()
        for part in batch.micro_batches(size):
            (student.loss(part).loss * part.num_rows / batch.num_rows).backward()
        gradients.append([p.grad.clone() for p in student.parameters() if p.grad is not None])
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-6)


def test_frozen_noise_of_different_splits_is_independent(tmp_path: Path) -> None:
    store = ShardStore.open(write_store(tmp_path / "full", "full"))
    gumbels = []
    for split in ("train", "validation"):
        maker = BatchMaker(store, split, 3, CPU, True)
        stream = ShardStream(
            store.split(split, maker.arrays), seed=1, global_batch_size=8, shuffle=False
        )
        batch = maker(next(stream.one_pass(0)), step=0)
        assert batch.noise is not None
        every = torch.ones(8, LENGTH, dtype=torch.bool)
        every[:, 0] = False
        gumbels.append(-dense_arrivals(batch.noise.at(every)).log().flatten())
    # 672 pairs: the correlation of independent draws has a standard deviation of 0.039.
    assert abs(torch.corrcoef(torch.stack(gumbels))[0, 1]) < 5 * 0.039


def test_a_number_of_draws_is_met_in_turn(store: Path) -> None:
    opened, mask = ShardStore.open(store), a_mask()

    def noise(epoch: int, num_draws: int | None) -> torch.Tensor:
        maker = BatchMaker(opened, "train", 3, CPU, True, num_draws)
        rows = replace(read_rows(opened, maker), epoch=epoch)
        batch = maker(rows, 0)
        assert batch.noise is not None
        return dense_arrivals(batch.noise.at(mask))

    draws = [noise(epoch, 4) for epoch in range(8)]
    for epoch in range(4):
        assert torch.equal(draws[epoch], draws[epoch + 4])
        assert torch.equal(draws[epoch], noise(epoch, None))
        assert not torch.equal(draws[epoch], draws[(epoch + 1) % 4])
    assert torch.equal(noise(5, 1), draws[0])
