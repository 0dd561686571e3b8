"""The noise read again inside the network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from benchmarks.goldens import ArrivalRows
from shards.errors import UsageError
from shards.settings import resolve, to_mapping
from trainer.objective.batch import Batch
from trainer.students.configuration import NoiseSettings
from trainer.students.noise_attention import NoiseToRead, VocabularyAttention
from trainer.students.registry import BD3LM, MDLM, StudentSettings

VOCAB, LENGTH, BLOCK = 7, 8, 4
READING = StudentSettings(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    condition_size=8,
    dropout=0.0,
    conditioning="gumbel",
    noise=NoiseSettings(layers=(1, 2)),
)


def make_batch(num_rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, LENGTH, VOCAB)
    arrivals = -torch.log1p(-torch.rand(shape, generator=generator))
    return Batch(
        tokens=torch.randint(VOCAB, shape[:2], generator=generator),
        token_log_probs=torch.zeros(shape[:2]),
        row_ids=torch.arange(num_rows),
        slots=torch.arange(num_rows),
        global_batch_size=num_rows,
        step=0,
        epoch=0,
        seed=7,
        noise=ArrivalRows(arrivals),
    )


def make_student(kind: type[MDLM], **changes: Any) -> MDLM:
    settings = resolve(StudentSettings, to_mapping(READING), changes)
    config: Any = kind.config_class
    torch.manual_seed(0)
    student = kind(config.build(settings, vocab_size=VOCAB, row_length=LENGTH)).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return student


@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_one_reading_by_hand(beta: float) -> None:
    """D = 2, V = 2, LN(h) = (1, -1): beta ((2, -2) + log (0.2, 0.8)) against W."""
    reading = VocabularyAttention(2, 2)
    with torch.no_grad():
        reading.log_beta.fill_(math.log(beta))
        reading.gamma.copy_(torch.tensor([2.0, 1.0]))
        reading.weight.copy_(torch.eye(2))
    x = torch.tensor([[[5.0, -5.0], [3.0, 1.0]]])
    shares = torch.tensor([[[0.2, 0.8], [0.0, 0.0]]])
    head = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [7.0, 7.0]])  # the mask's row is not read
    result = reading(x, NoiseToRead.unpack(shares, 0), head)
    odds = (0.2 / 0.8 * math.exp(4)) ** beta
    first = odds / (1 + odds)
    assert torch.allclose(result[0, 0], torch.tensor([5 + first, -5 + 1 - first]), atol=1e-5)
    assert torch.equal(result[0, 1], x[0, 1])  # nothing is read at a known token


def test_without_head_it_is_the_conditioner() -> None:
    student = make_student(MDLM)
    conditioner, reading = student.conditioner, student.backbone.noise_readings["1"]
    with torch.no_grad():
        reading.weight.copy_(conditioner.weight)
        reading.log_beta.zero_()
    noise = make_batch().noise.at(torch.ones(3, LENGTH, dtype=torch.bool))
    embedded = student.embed_noise(noise, 0.7)
    x, shares = torch.zeros(1, len(embedded), 16), embedded[None, :, 16:]
    read = reading(x, NoiseToRead.unpack(shares, 0), torch.zeros(VOCAB + 1, 16))
    assert torch.allclose(shares.sum(-1), torch.ones(()))
    assert torch.allclose(read[0], embedded[:, :16], atol=1e-5)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_reading_takes_part(depth: int, count: int) -> None:
    student, batch = make_student(MDLM, noise={"top_k": count}), make_batch()
    student.loss(batch).loss.backward()
    for parameter in student.backbone.noise_readings[str(depth)].parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)


@pytest.mark.parametrize("count", [0, 3])
def test_block_sampling_reads_as_training_does(count: int) -> None:
    """Behind a cache, over a window and in one training pass: the same log-probabilities."""
    student = make_student(BD3LM, block_size=BLOCK, noise={"top_k": count})
    batch = make_batch()
    masked = torch.zeros(3, LENGTH, dtype=torch.bool)
    masked[:, BLOCK:] = True
    noised = batch.tokens.masked_fill(masked, student.mask_id)
    embedded = student.embed_noise(batch.noise.at(torch.ones_like(masked)))
    embedded = embedded.unflatten(0, (3, LENGTH)).detach()
    trained = student.denoise(noised, batch.tokens, embedded)[:, BLOCK:]
    trained[..., student.mask_id] -= 1e6
    expected = trained.log_softmax(-1).flatten(0, 1)
    window = student.predict_at(noised, masked, embedded)
    here = torch.ones(3, BLOCK, dtype=torch.bool)
    cached = student.predict_after(
        batch.tokens[:, :BLOCK],
        noised[:, BLOCK:],
        here,
        embedded[:, BLOCK:],
        student.start_cache(3),
    )
    assert torch.allclose(window, expected, atol=1e-4)
    assert torch.allclose(cached, expected, atol=1e-4)


def test_depths_that_are_not_there() -> None:
    for depths in ((0,), (3,)):
        with pytest.raises(UsageError, match=r"noise\.layers"):
            dataclasses.replace(READING, noise=NoiseSettings(layers=depths))
    with pytest.raises(UsageError, match=r"noise\.layers"):
        dataclasses.replace(READING, conditioning="none")


def test_round_trip_keeps_the_readings(tmp_path: Any) -> None:
    student = make_student(MDLM, noise={"top_k": 3})
    student.save_pretrained(tmp_path)
    loaded = MDLM.from_pretrained(tmp_path)
    assert loaded.config.settings == student.settings
    assert student.settings.noise.top_k == 3
    assert loaded.state_dict().keys() == student.state_dict().keys()


def test_only_gumbel_noise_is_read_again() -> None:
    with pytest.raises(UsageError, match=r"noise\.layers"):
        resolve(StudentSettings, to_mapping(READING), {"noise": {"transform": "uniform"}})
