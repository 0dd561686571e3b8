"""Masked positions under prior noise: which, when, and what a student makes of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from shards.errors import UsageError
from shards.noise.kinds import KeyedPosterior
from shards.store.store import ShardStore
from tests.trainer.objective.test_batch import a_mask, make_batch
from tests.trainer.run_cases import LENGTH, tiny_run, write_store
from trainer.objective.batch import Batch, Places
from trainer.objective.corruption import corrupt, partly_prior
from trainer.students.configuration import DiffusionSettings
from trainer.training.construction import build_student


def freed(batch: Batch, share: float, mask: torch.Tensor) -> torch.Tensor:
    """[B, L]: where the noise is prior."""
    assert batch.noise is not None
    places = Places.of(mask)
    noise = partly_prior(batch.noise.at(places), batch, places, share)
    assert isinstance(noise, KeyedPosterior) and noise.is_prior is not None
    return torch.zeros_like(mask).index_put(places.index, noise.is_prior)


def test_share_of_the_positions(store: Path) -> None:
    """Within 5 standard deviations, over many draws; more of them under a larger share."""
    batch = make_batch(store)
    mask = torch.ones(8, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    epochs = [dataclasses.replace(batch, epoch=epoch) for epoch in range(60)]
    for share in (0.1, 0.5):
        found = torch.stack([freed(one, share, mask) for one in epochs])
        count = 60 * int(mask.sum())
        deviation = math.sqrt(count * share * (1 - share))
        assert abs(int(found.sum()) - count * share) < 5 * deviation
    assert (freed(batch, 0.5, mask) >= freed(batch, 0.1, mask)).all()


def test_the_choice_knows_nothing_of_the_mask(store: Path) -> None:
    """Of what is masked at t = 0.3 half is prior, within 5 standard deviations."""
    batch, settings = make_batch(store), DiffusionSettings()
    num_prior = count = 0
    for epoch in range(60):
        one = dataclasses.replace(batch, epoch=epoch)
        mask = corrupt(one, settings, 1, (0.3, 0.3)).mask
        num_prior += int(freed(one, 0.5, mask).sum())
        count += int(mask.sum())
    assert abs(num_prior - count / 2) < 5 * math.sqrt(count / 4)


def test_which_ones_follows_from_the_names_alone(store: Path) -> None:
    batch, mask = make_batch(store), a_mask()
    whole = freed(batch, 0.5, mask)
    part = slice(1, None, 3)
    assert torch.equal(freed(batch.rows(part), 0.5, mask[part]), whole[part])
    everywhere = torch.ones_like(mask)
    everywhere[:, 0] = False
    assert torch.equal(freed(batch, 0.5, everywhere) & mask, whole), "whatever else is masked"
    for other in ({"epoch": 1}, {"seed": 4}):
        assert not torch.equal(freed(dataclasses.replace(batch, **other), 0.5, mask), whole)


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_only_training_sees_it(store: Path, kind: str) -> None:
    """The same weights: validation is as without, a training step is not."""
    block = {"model__block_size": 4} if kind == "bd3lm" else {}
    opened, batch = ShardStore.open(store), make_batch(store)
    losses = {}
    for share in (0.0, 0.6):
        config = tiny_run(student=kind, model__noise__prior_share=share, **block)
        student = build_student(config, opened, None)
        for index, weight in enumerate(student.parameters()):
            generator = torch.Generator().manual_seed(index)
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
        losses[share] = [student.train(mode).loss(batch).loss.item() for mode in (True, False)]
    assert losses[0.0][1] == losses[0.6][1]
    assert losses[0.0][0] != losses[0.6][0]


def test_stores_of_frozen_draws_are_refused_before_training(store: Path, tmp_path: Path) -> None:
    frozen = write_store(tmp_path / "seeded", codec_name="seeded")
    config = tiny_run(model__noise__prior_share=0.2)
    with pytest.raises(UsageError, match=r"prior_share.*codec seeded"):
        build_student(config, ShardStore.open(frozen), None)
    without = tiny_run(model__conditioning="none", model__noise__prior_share=0.2)
    with pytest.raises(UsageError, match="prior_share"):
        build_student(without, ShardStore.open(store), None)
