"""Rows for a training loop of one's own: a plain DataLoader, with and without workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import shards
from shards.errors import GdistillError, UsageError
from shards.stream.dataset import RowStream
from tests.trainer.run_cases import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("dataset") / "store", "posterior")


def open_rows(store: Path, **options) -> RowStream:
    return shards.open_store(store).stream(batch_size=4, seed=3, **options)


def batches(rows: RowStream, workers: int) -> list[dict[str, torch.Tensor]]:
    return list(DataLoader(rows, batch_size=None, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_do_not_show_and_any_batch_is_a_place_to_resume(store: Path, workers: int) -> None:
    plain = open_rows(store)
    epochs = [[batch["row_ids"].tolist() for batch in plain] for _ in range(2)]
    assert len(epochs[0]) == len(plain) > 4 and epochs[0] != epochs[1]
    rows = open_rows(store)
    seen = batches(rows, workers)
    assert [batch["row_ids"].tolist() for batch in seen] == epochs[0]
    for index in (0, 2, len(seen) - 1):
        again = open_rows(store)
        again.load_state_dict(rows.state_dict(seen[index]))
        rest = [batch["row_ids"].tolist() for batch in batches(again, workers)]
        assert rest == (epochs[0][index + 1 :] or epochs[1])


@pytest.mark.parametrize("kept", [False, True])
def test_a_second_loop_with_workers_is_the_next_epoch(store: Path, kept: bool) -> None:
    plain = open_rows(store)
    epochs = [[batch["row_ids"].tolist() for batch in plain] for _ in range(4)]
    rows = open_rows(store)
    loader = DataLoader(rows, batch_size=None, num_workers=2, persistent_workers=kept)
    for epoch in epochs[:2]:
        seen = list(loader)
        assert [batch["row_ids"].tolist() for batch in seen] == epoch
    next(iter(loader))  # a loop that is left early has begun the third epoch
    assert [batch["row_ids"].tolist() for batch in loader] == epochs[3]
    rows.load_state_dict(rows.state_dict(seen[2]))
    assert [batch["row_ids"].tolist() for batch in loader] == epochs[1][3:]
    assert [batch["row_ids"].tolist() for batch in rows] == epochs[2]


def test_fresh_noise_of_two_splits_differs(store: Path) -> None:
    drawn = [open_rows(store, split=split, shuffle=False) for split in ("train", "validation")]
    batch = next(iter(drawn[0]))
    mask = torch.zeros(batch["tokens"].shape, dtype=torch.bool)
    mask[:, 1:] = True
    first, other = (rows.noise(batch, mask).gumbels() for rows in drawn)
    assert not bool(torch.isclose(first, other).any(1).any())


def test_a_state_without_a_batch_is_refused_where_workers_read(store: Path) -> None:
    rows = open_rows(store)
    iterator = iter(rows)
    first = next(iterator)
    assert rows.state_dict() == rows.state_dict(first)
    batches(rows, 2)
    with pytest.raises(UsageError, match=r"state_dict\(batch\)"):
        rows.state_dict()


def test_noise_and_distribution_of_a_batch(store: Path) -> None:
    rows = open_rows(store)
    first, later = next(iter(rows)), None
    mask = torch.ones(first["tokens"].shape, dtype=torch.bool)
    with pytest.raises(UsageError, match="position 0"):
        rows.noise(first, mask)
    mask[:, 0] = False
    noise, target = rows.noise(first, mask), rows.distribution(first, mask)
    own = first["tokens"][mask].long()
    probs = target.tile(0, target.vocab_size)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=5e-3)
    expected = first["token_log_probs"][mask].exp()
    torch.testing.assert_close(probs.gather(1, own[:, None]).squeeze(1), expected)
    winners = (probs.double().log() + noise.gumbels().double()).argmax(1)
    assert float((winners == own).double().mean()) > 0.97
    for batch in (*rows, *rows):
        if torch.equal(batch["row_ids"], first["row_ids"]) and batch["place"][-1] == 1:
            later = batch
    assert noise.softmax_embed(torch.randn(noise.vocab_size, 8)).shape == (int(mask.sum()), 8)
    assert later is None or not torch.equal(rows.noise(later, mask).gumbels(), noise.gumbels())


def test_the_place_in_one_split_is_none_in_another(store: Path) -> None:
    train, validation = (open_rows(store, split=split) for split in ("train", "validation"))
    with pytest.raises(GdistillError, match="another store or order"):
        validation.load_state_dict(train.state_dict())
