"""Posterior stores from the likeliest tokens alone, as inference engines give them."""

from __future__ import annotations

import math

import pytest
import torch

from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import TeacherOutput
from shards.errors import UsageError

VOCAB, POSITIONS, KEPT = 40, 6, 8


@pytest.fixture
def output() -> TeacherOutput:
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(1, POSITIONS, VOCAB, generator=drawn) * 2
    tokens = torch.randint(VOCAB, (1, POSITIONS), generator=drawn)
    return TeacherOutput(logits.log_softmax(-1), tokens, torch.tensor([0]))


@pytest.fixture
def resources() -> dict[str, torch.Tensor]:
    return {"unigram_log_probs": torch.log_softmax(-torch.arange(VOCAB) / 9.0, 0)}


def likeliest(output: TeacherOutput, k: int) -> tuple[torch.Tensor, ...]:
    log_probs, tokens = output.log_probs[0], output.tokens[0]
    values, ids = log_probs.topk(k)
    return ids, values, tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def test_the_arrays_are_those_of_the_whole_distribution(
    output: TeacherOutput, resources: dict[str, torch.Tensor]
) -> None:
    codec = PosteriorCodec(num_entries=KEPT)
    whole = codec.encode(output, 0, resources)
    found = codec.encode_likeliest(*likeliest(output, KEPT), resources)
    assert found.keys() == whole.keys()
    for name in found:
        if name == "tail_log_mass":  # a difference here, a sum there
            torch.testing.assert_close(found[name], whole[name][0], atol=2e-3, rtol=2e-3)
        else:
            assert torch.equal(found[name], whole[name][0]), name


def test_fewer_known_tokens_leave_their_mass_to_the_tail(
    output: TeacherOutput, resources: dict[str, torch.Tensor]
) -> None:
    codec = PosteriorCodec(num_entries=KEPT)
    ids, values, tokens, own = likeliest(output, 3)
    arrays = codec.encode_likeliest(ids, values, tokens, own, resources)
    listed = (ids == tokens[:, None]).any(1)
    expected = 1 - values.exp().sum(1) - torch.where(listed, 0.0, own.exp())
    torch.testing.assert_close(
        arrays["tail_log_mass"].float().exp(), expected, atol=1e-3, rtol=2e-3
    )
    found = codec.distribution(arrays, tokens, own, resources).tile(0, VOCAB)
    torch.testing.assert_close(found.sum(1), torch.ones(POSITIONS), atol=5e-3, rtol=0)
    torch.testing.assert_close(found.gather(1, tokens[:, None])[:, 0], own.exp())


def test_unknown_entries_are_no_entries(resources: dict[str, torch.Tensor]) -> None:
    ids = torch.tensor([[4, -1, -1]])
    log_probs = torch.tensor([[math.log(0.5), -math.inf, -math.inf]])
    own = torch.tensor([math.log(0.25)])
    codec = PosteriorCodec(num_entries=KEPT)
    arrays = codec.encode_likeliest(ids, log_probs, torch.tensor([7]), own, resources)
    found = codec.distribution(arrays, torch.tensor([7]), own, resources).tile(0, VOCAB)[0]
    assert abs(float(found[4]) - 0.5) < 0.01 and abs(float(found[7]) - 0.25) < 1e-6
    assert abs(float(arrays["tail_log_mass"].float().exp()) - 0.25) < 1e-3


def test_a_whole_distribution_is_asked_of_the_teacher(
    output: TeacherOutput, resources: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(UsageError, match="not a whole distribution"):
        PosteriorCodec(num_entries=VOCAB).encode_likeliest(*likeliest(output, 5), resources)
