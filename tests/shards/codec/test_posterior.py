"""``posterior``: the distribution kept, fresh draws, coupling agreement 1 / (1 + d)."""

from __future__ import annotations

import math

import pytest
import torch

from shards.codec.ids import from_planes
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.errors import UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import KeyedPosterior, dense_arrivals
from tests.shards.codec_cases import decode, flat_log_probs, teacher_output


@pytest.mark.parametrize("kept", [1, 8, 90, 1000])
def test_the_stored_distribution_is_normalised_and_keeps_the_token(kept: int) -> None:
    output, resources = teacher_output()
    noise = decode(make_codec("posterior", num_entries=kept), output, resources)
    assert isinstance(noise, KeyedPosterior)
    probs = noise.probabilities.tile(0, noise.vocab_size)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=2e-3)
    exact = flat_log_probs(output).exp()
    own = output.tokens.flatten()[:, None]
    torch.testing.assert_close(probs.gather(1, own), exact.gather(1, own))


def test_agreement_is_one_over_one_plus_the_total_variation() -> None:
    output, resources = teacher_output(60, 60, 40, spread=2.0)
    codec = make_codec("posterior", num_entries=4)
    wins = []
    for draw in range(1, 5):
        noise = decode(codec, output, resources, draw)
        chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
        wins.append(chosen == output.tokens.flatten())
    assert isinstance(noise, KeyedPosterior)
    missing = (flat_log_probs(output).exp() - noise.probabilities.tile(0, 40)).clamp(min=0).sum(1)
    expected = float((1 / (1 + missing)).mean())
    agreement = torch.stack(wins).float()
    sigma = float(agreement.std()) / agreement.numel() ** 0.5
    assert abs(float(agreement.mean()) - expected) < 4.5 * sigma
    assert expected < 0.97, "the case must be able to tell"


def test_every_listed_probability_is_within_half_a_step_the_least_included() -> None:
    step = 0.25
    least = math.exp(-12.8 * step)  # nearer to 13 steps than to 12
    probs = torch.tensor([0.5, 0.3, least, *[(0.2 - least) / 7] * 7])
    output = TeacherOutput(probs.log()[None, None], torch.tensor([[0]]), torch.tensor([0]))
    codec = PosteriorCodec(3, min_probability=0.999 * least, log_prob_step_nats=step)
    arrays = codec.encode(output, 0, {"unigram_log_probs": torch.full((10,), -math.log(10))})
    steps = from_planes("entry_step", arrays, codec._max_step).flatten()
    errors = step * steps.cumsum(0) + probs[:3].log()
    assert float(errors.abs().max()) <= step / 2 + 1e-6


def test_draws_differ_by_visit_and_repeat_within_one() -> None:
    output, resources = teacher_output()
    first, again, second = (
        dense_arrivals(decode(PosteriorCodec(), output, resources, draw)) for draw in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not bool((first == second).any())


def test_bad_parameters() -> None:
    with pytest.raises(UsageError, match="num_entries"):
        make_codec("posterior", num_entries=0)
    with pytest.raises(UsageError, match="did you mean 'num_entries'"):
        make_codec("posterior", num_entrys=3)
    with pytest.raises(UsageError, match="did you mean 'posterior'"):
        make_codec("posteriors")
