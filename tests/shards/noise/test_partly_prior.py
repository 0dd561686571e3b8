"""Posterior noise of which some positions are prior: as if their tokens were not known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shards.noise.embedding import Weighting
from shards.noise.kinds import KeyedPosterior, KeyedPrior, dense_arrivals
from tests.shards.noise.test_kinds import dense_posterior, head_and_tail, make_keys

NUM, VOCAB = 40, 97
SOME = torch.arange(NUM) % 3 == 0
POSTERIORS = {
    "dense": lambda: dense_posterior(NUM, VOCAB),
    "head_and_tail": lambda: head_and_tail(NUM, VOCAB, 9)[0],
}


def mixed(kind: str) -> tuple[KeyedPosterior, KeyedPosterior]:
    posterior = POSTERIORS[kind]()
    return posterior, replace(posterior, is_prior=SOME)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_entries_are_those_of_the_prior_and_all_else_stays(kind: str) -> None:
    """F_j = E_j bit for bit, F_x = E_0; at the other positions nothing changes."""
    posterior, noise = mixed(kind)
    found = dense_arrivals(noise)
    assert torch.equal(found[~SOME], dense_arrivals(posterior)[~SOME])
    prior, first = (
        dense_arrivals(KeyedPrior(make_keys(NUM), VOCAB)),
        make_keys(NUM).first_arrivals(),
    )
    is_own = torch.arange(VOCAB) == posterior.tokens[:, None]
    assert torch.equal(found[SOME][~is_own[SOME]], prior[SOME][~is_own[SOME]])
    torch.testing.assert_close(found[is_own][SOME], first[SOME], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_selections_and_parts_keep_what_is_prior(kind: str) -> None:
    _, noise = mixed(kind)
    whole, index = dense_arrivals(noise), torch.tensor([3, 39, 0, 4])
    assert torch.equal(dense_arrivals(noise.select(index)), whole[index])
    assert torch.equal(torch.cat([dense_arrivals(part) for part in noise.split(7)]), whole)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_embeddings_mix_the_two(kind: str) -> None:
    """The way in which kernels read noise, too."""
    _, noise = mixed(kind)
    weight = torch.randn(VOCAB, 5, generator=torch.Generator().manual_seed(0))
    found = noise.softmax_embed(weight, Weighting(tau=1.3))
    expected = (1.3 * noise.gumbels()).softmax(-1) @ weight
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_token_is_as_good_as_unknown() -> None:
    """Its own F is Exp(1) however unlikely it was, and it wins the race as often as any id.

    Kolmogorov's distance stays below sqrt(log(2 / 1e-6) / 2n) but once in 1e6; a count of n draws
    of probability 1 / V within 5 standard deviations.
    """
    n, vocab_size = 20_000, 8
    log_probs = torch.full((n, vocab_size), math.log(1e-3 / (vocab_size - 1)))
    log_probs[:, 0] = math.log1p(-1e-3)
    tokens = torch.ones(n, dtype=torch.int64)
    posterior = dense_posterior(n, vocab_size)
    noise = replace(
        posterior,
        tokens=tokens,
        token_log_probs=log_probs[:, 1],
        probabilities=replace(posterior.probabilities, log_probs=log_probs),
        is_prior=torch.ones(n, dtype=torch.bool),
    )
    arrivals = dense_arrivals(noise).double()
    assert distance_to_exponential(arrivals[:, 1]) < math.sqrt(math.log(2e6) / (2 * n))
    wins = int((arrivals.argmin(dim=1) == 1).sum())
    share = 1 / vocab_size
    assert abs(wins - n * share) < 5 * math.sqrt(n * share * (1 - share))


def distance_to_exponential(values: Tensor) -> float:
    below, ranks = 1 - torch.exp(-values.sort().values), torch.arange(1, len(values) + 1)
    upper = (ranks / len(values) - below).abs().max()
    return max(float(upper), float(((ranks - 1) / len(values) - below).abs().max()))
