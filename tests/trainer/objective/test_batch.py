"""Batches: noise decoded at masked positions, keyed draws, prior noise, micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shards.noise.embedding import dense_arrivals
from shards.noise.gumbel import KeyedPosterior
from shards.settings import derive_seed
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch, ShardStream
from tests.trainer.run_cases import LENGTH, teacher_logits, tiny_run, write_store
from trainer.objective.batch import Batch, BatchMaker, Places, StoredRowNoise
from trainer.objective.corruption import FULL, corrupt, partly_prior
from trainer.students.configuration import DiffusionSettings
from trainer.training.settings import build_student

CPU = torch.device("cpu")
EVERYWHERE = torch.ones(8, LENGTH, dtype=torch.bool)
EVERYWHERE[:, 0] = False
MASK = EVERYWHERE & (torch.rand(8, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5)


def read_rows(maker: BatchMaker, store: ShardStore, split: str = "train", epoch: int = 0) -> RowBatch:
    reader = store.split(split, maker.arrays)
    return next(ShardStream(reader, seed=1, global_batch_size=8, shuffle=False).one_pass(epoch))


def make_batch(path: Path, epoch: int = 0, with_noise: bool = True, num_draws: int | None = None) -> Batch:
    store = ShardStore.open(path)
    maker = BatchMaker(store, "train", 3, CPU, with_noise, num_draws)
    return maker(read_rows(maker, store, epoch=epoch))


def arrivals(batch: Batch, mask: Tensor = MASK) -> Tensor:
    """[N, V]: what the noise is decoded to there."""
    assert batch.noise is not None
    return dense_arrivals(batch.noise.at(mask))


def test_noise_is_decoded_at_masked_positions_and_makes_the_tokens_the_teachers_choice(store: Path) -> None:
    """In row-major order."""
    batch = make_batch(store)
    assert batch.noise is not None
    noise = batch.noise.at(MASK)
    assert isinstance(noise, KeyedPosterior)
    assert torch.equal(noise.tokens, batch.tokens[MASK])
    assert torch.equal(noise.token_log_probs, batch.token_log_probs[MASK])
    rows, positions = MASK.nonzero(as_tuple=True)
    assert torch.equal(noise.keys.rows, batch.row_ids[rows])
    assert torch.equal(noise.keys.positions, positions)
    assert noise.keys.seed == derive_seed(3, "noise")
    whole = arrivals(batch, EVERYWHERE)
    assert torch.equal(whole[MASK[EVERYWHERE]], dense_arrivals(noise))
    log_probs = teacher_logits()[batch.tokens[:, :-1]].log_softmax(-1).flatten(0, 1)
    chosen = (log_probs - whole.log()).argmax(-1)
    agreement = (chosen == batch.tokens[EVERYWHERE]).float().mean()
    assert agreement > 0.9  # four stored entries and a unigram tail: nearly always


def test_a_fresh_codec_draws_anew_in_every_epoch_or_a_number_of_draws_in_turn(store: Path) -> None:
    endless, four = ([arrivals(make_batch(store, epoch, num_draws=num)) for epoch in range(8)] for num in (None, 4))
    assert torch.equal(endless[0], arrivals(make_batch(store))) and make_batch(store, 5).epoch == 5
    for epoch in range(4):
        assert torch.equal(four[epoch], four[epoch + 4])
        assert torch.equal(four[epoch], endless[epoch])
        assert not torch.equal(four[epoch], four[(epoch + 1) % 4])
    assert torch.equal(arrivals(make_batch(store, 5, num_draws=1)), four[0])


def test_a_frozen_codec_repeats_its_draw_with_the_stores_keys(tmp_path: Path) -> None:
    """The draws of its two splits are independent."""
    path = write_store(tmp_path / "full", "full")
    first, later = make_batch(path, 0), make_batch(path, 1)
    assert isinstance(first.noise, StoredRowNoise) and isinstance(later.noise, StoredRowNoise)
    opened = ShardStore.open(path)
    assert (later.noise.seed, later.noise.draw) == (opened.manifest.noise_seed("train"), 0)
    assert torch.equal(arrivals(first), arrivals(later))
    gumbels = []
    for split in ("train", "validation"):
        maker = BatchMaker(opened, split, 3, CPU, True)
        batch = maker(read_rows(maker, opened, split))
        gumbels.append(-arrivals(batch, EVERYWHERE).log().flatten())
    # 672 pairs: the correlation of independent draws has a standard deviation of 0.039.
    assert abs(torch.corrcoef(torch.stack(gumbels))[0, 1]) < 5 * 0.039


def test_a_plain_student_reads_tokens_only(store: Path) -> None:
    assert make_batch(store, with_noise=False).noise is None
    opened = ShardStore.open(store)
    maker = BatchMaker(opened, "train", 3, CPU, with_noise=False)
    assert set(read_rows(maker, opened).arrays) == {"tokens", "token_log_probs"}


@pytest.mark.parametrize(("size", "number"), [(None, 1), (3, 3), (8, 1), (100, 1)])
def test_micro_batches_keep_everything(store: Path, size: int | None, number: int) -> None:
    batch = make_batch(store)
    parts = list(batch.micro_batches(size))
    assert len(parts) == number
    assert sorted(torch.cat([part.slots for part in parts]).tolist()) == list(range(8))
    assert all(part.global_batch_size == 8 for part in parts)
    counted = replace(batch, counted=torch.ones_like(batch.tokens, dtype=torch.bool))
    assert counted.num_scored == batch.num_scored == 8 * (LENGTH - 1), "position 0 is no token to predict"
    whole = arrivals(batch, EVERYWHERE).unflatten(0, (8, -1))
    for part in parts:
        assert part.num_rows <= (size or 8)
        assert torch.equal(part.tokens, batch.tokens[part.slots])
        assert torch.equal(part.row_ids, batch.row_ids[part.slots])
        assert torch.equal(part.token_log_probs, batch.token_log_probs[part.slots])
        mask = MASK[part.slots]
        assert torch.equal(arrivals(part, mask), whole[part.slots][mask[:, 1:]])


def test_every_micro_batch_has_every_kind_of_time() -> None:
    """Slots are strata of t: parts of neighbours would be nearly clean or nearly all masked."""
    rows = torch.arange(64)
    tokens = torch.zeros(64, LENGTH, dtype=torch.int64)
    batch = Batch(tokens, tokens.float(), rows, rows, 64, 0, 3)
    parts = list(batch.micro_batches(8))
    means = [float(corrupt(part, DiffusionSettings(), 1, FULL).t.mean()) for part in parts]
    # Each part holds one time of every eighth of [0, 1]: their means differ by less than an eighth.
    assert len(parts) == 8 and max(means) - min(means) <= 1 / 8
    sizes = [part.num_rows for part in batch.micro_batches(10)]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 10


# Prior noise: at which masked positions, when, and what a student makes of them.


def freed(batch: Batch, share: float, mask: Tensor = MASK) -> Tensor:
    """[B, L]: where the noise is prior."""
    assert batch.noise is not None
    places = Places.of(mask)
    noise = partly_prior(batch.noise.at(places), batch, places, share)
    assert isinstance(noise, KeyedPosterior) and noise.is_prior is not None
    return torch.zeros_like(mask).index_put(places.index, noise.is_prior)


def test_share_of_the_positions(store: Path) -> None:
    """Over many draws, of all positions, and of what is masked at t = 0.3: the choice knows nothing
    of the mask. Within 5 standard deviations."""
    epochs = [replace(make_batch(store), epoch=epoch) for epoch in range(60)]
    masked = [corrupt(one, DiffusionSettings(), 1, (0.3, 0.3)).mask for one in epochs]
    for share, masks in ((0.1, [EVERYWHERE] * 60), (0.5, [EVERYWHERE] * 60), (0.5, masked)):
        pairs = zip(epochs, masks, strict=True)
        found = sum(int(freed(batch, share, mask).sum()) for batch, mask in pairs)
        count = sum(int(mask.sum()) for mask in masks)
        assert abs(found - count * share) < 5 * math.sqrt(count * share * (1 - share))
    assert (freed(epochs[0], 0.5, EVERYWHERE) >= freed(epochs[0], 0.1, EVERYWHERE)).all()


def test_which_ones_follows_from_the_names_alone(store: Path) -> None:
    batch, part = make_batch(store), slice(1, None, 3)
    whole = freed(batch, 0.5)
    assert torch.equal(freed(batch.rows(part), 0.5, MASK[part]), whole[part])
    assert torch.equal(freed(batch, 0.5, EVERYWHERE) & MASK, whole), "whatever else is masked"
    for other in ({"epoch": 1}, {"seed": 4}):
        assert not torch.equal(freed(replace(batch, **other), 0.5), whole)


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_only_training_sees_it(store: Path, kind: str) -> None:
    """The same weights: validation is as without, a training step is not."""
    block = {"model__block_size": 4} if kind == "bd3lm" else {}
    losses = []
    for share in (0.0, 0.6):
        config = tiny_run(student=kind, model__noise__prior_share=share, **block)
        student = build_student(config, ShardStore.open(store), None)
        torch.manual_seed(0)
        for weight in student.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        batch = make_batch(store)
        losses.append([student.train(mode).loss(batch).loss.item() for mode in (True, False)])
    (trained, validated), (freely_trained, freely_validated) = losses
    assert validated == freely_validated and trained != freely_trained
