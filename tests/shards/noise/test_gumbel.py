"""Algorithm 1 as it runs: the authors' numbers, the invariant, and the laws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstest
from torch import Tensor

from benchmarks.dense_noise import given_posterior
from shards.noise.gumbel import (
    arrivals_from_gumbel,
    exponential_from_bits,
    gumbel_argmax,
    place_tokens,
    token_gumbels,
)
from shards.noise.kinds import DenseProbabilities, KeyedPosterior, KeyedPrior, dense_arrivals
from shards.noise.philox import PositionKeys


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, Tensor]:
    assert json.loads((golden / "posterior.json").read_text())["tensors"].keys()
    return load_file(golden / "posterior.safetensors")


def log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return (logits.to(dtype) - logits.to(dtype).amax(-1, keepdim=True)).log_softmax(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("part", ["", "peaked_"])
def test_posterior_matches_the_golden_vectors(
    case: dict[str, Tensor], part: str, dtype: torch.dtype, tolerance: float
) -> None:
    log_probs, tokens = log_softmax(case[part + "logits"], dtype), case[part + "tokens"]
    zeta, zeta_0 = case[part + "zeta"].to(dtype), case[part + "zeta0"].squeeze(1).to(dtype)
    noise = given_posterior(log_probs, tokens, (-zeta).exp(), (-zeta_0).exp())
    expected = case[part + "xi_float64"].double()
    # xi_x of about 150 has a float32 spacing of 1.5e-5, and its inputs one rounding each.
    scale = expected.abs().clamp(min=1.0)
    assert float(((noise.gumbels().double() - expected).abs() / scale).max()) < tolerance
    assert bool((log_probs.double() + noise.gumbels().double()).argmax(1).eq(tokens).all())


def test_a_race_of_three_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    others, first = torch.tensor([[9.0, 1.0, 0.1]]), torch.tensor([2.0])
    noise = given_posterior(log_probs, torch.tensor([0]), others, first)
    expected = torch.tensor([[0.5 * 2, 1.0 + 0.3 * 2, 0.1 + 0.2 * 2]])
    torch.testing.assert_close(dense_arrivals(noise), expected)
    torch.testing.assert_close(noise.gumbels(), -expected.log())


def test_exponential_of_extreme_bits() -> None:
    values = exponential_from_bits(torch.tensor([0, 1 << 31, (1 << 32) - 1]))
    expected = [0.5 * 2.0**-32, math.log(2.0), 24 * math.log(2.0)]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=0)
    assert float(values[0]) > 0


def random_posteriors(num: int, vocab_size: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, vocab_size, generator=generator) * spread
    log_probs = log_softmax(logits, torch.float32)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return log_probs, tokens


def posterior(log_probs: Tensor, tokens: Tensor, seed: int = 4) -> KeyedPosterior:
    index = torch.arange(len(tokens))
    own = log_probs.gather(1, tokens[:, None]).squeeze(1)
    keys = PositionKeys(seed, index, index % 7)
    return KeyedPosterior(keys, tokens, own, DenseProbabilities(log_probs))


def winners(log_probs: Tensor, noise: KeyedPosterior) -> Tensor:
    return (log_probs.double() + noise.gumbels().double()).argmax(1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 20.0, 80.0])
def test_the_token_is_always_the_argmax(spread: float) -> None:
    log_probs, tokens = random_posteriors(20_000, 50, spread, seed=3)
    noise = posterior(log_probs, tokens)
    assert torch.equal(winners(log_probs, noise), tokens)
    assert torch.equal(gumbel_argmax(log_probs, dense_arrivals(noise)), tokens)
    # However unlikely: float32 has no room for p = e^-150, and xi has.
    improbable = log_probs.argmin(1)
    assert torch.equal(winners(log_probs, posterior(log_probs, improbable, seed=5)), improbable)


@pytest.mark.parametrize("own", [-1.0, -20.0, -60.0, -100.0, -130.0, -250.0])
def test_the_argmax_survives_waits_below_the_float32_spacing(own: float) -> None:
    """E_j of every other token is as small as it gets: all but tie with the winner."""
    num, vocab_size = 2000, 64
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num, vocab_size, generator=generator)
    logits[:, 5] = -torch.inf
    log_probs = logits.log_softmax(-1)
    log_probs[:, 5] = own - torch.rand(num, generator=generator)
    first = -torch.rand(num, generator=generator).log()
    others = torch.full((num, vocab_size), 0.5 * 2.0**-32)
    noise = given_posterior(log_probs, torch.full((num,), 5), others, first)
    naive = log_probs.exp() * first[:, None] + others
    assert bool((naive == log_probs.exp() * first[:, None]).any()), "the case must have ties"
    assert bool((winners(log_probs, noise) == 5).all())
    if own > -80:
        assert bool((gumbel_argmax(log_probs, dense_arrivals(noise)) == 5).all())


def test_the_tokens_gumbel_is_rounded_up() -> None:
    generator = torch.Generator().manual_seed(2)
    log_probs = -250 * torch.rand(5000, generator=generator)
    first = -torch.rand(5000, generator=generator).log()
    exact = -(log_probs.double() + first.double().log())
    rounded = token_gumbels(log_probs, first)
    assert bool((rounded.double() >= exact).all())
    assert float((rounded.double() - exact).max()) <= 2.0**-15  # one spacing below 256


def test_posterior_of_drawn_tokens_is_the_prior() -> None:
    """If x ~ p then xi given x, mixed over x, has independent standard Gumbel entries."""
    num, vocab_size = 100_000, 5
    log_probs = torch.tensor([0.55, 0.25, 0.12, 0.05, 0.03]).log().expand(num, vocab_size)
    tokens = torch.multinomial(
        log_probs[0].exp(), num, True, generator=torch.Generator().manual_seed(6)
    )
    noise = posterior(log_probs, tokens, seed=7)
    for entry in range(vocab_size):
        assert kstest(noise.gumbels()[:, entry].double().numpy(), "gumbel_r").pvalue > 1e-4
    # Independent Exp(1): every pairwise correlation of exp(-F) is 0 +- 1/sqrt(num).
    correlation = torch.corrcoef((-dense_arrivals(noise).double()).exp().T)
    off_diagonal = correlation[~torch.eye(vocab_size, dtype=torch.bool)]
    assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(num)


def test_prior_argmax_draws_from_the_teacher() -> None:
    num, index = 200_000, torch.arange(200_000)
    log_probs = torch.tensor([0.6, 0.3, 0.1]).log()
    noise = KeyedPrior(PositionKeys(8, index, index % 5), 3)
    counts = torch.bincount(gumbel_argmax(log_probs.expand(num, 3), dense_arrivals(noise)))
    deviation = (counts.double() / num - log_probs.exp().double()).abs()
    assert float(deviation.max()) < 4.5 * math.sqrt(0.25 / num)


def test_arrivals_of_gumbels() -> None:
    gumbels = torch.linspace(-3, 80, 500)
    torch.testing.assert_close(-arrivals_from_gumbel(gumbels).log(), gumbels)
    assert float(arrivals_from_gumbel(torch.tensor([150.0]))[0].reciprocal()) < math.inf


def test_tokens_are_placed_in_their_own_tile_only() -> None:
    tokens, own = torch.tensor([0, 3, 4, 9]), torch.tensor([10.0, 13.0, 14.0, 19.0])
    tiles = [place_tokens(torch.zeros(4, 2), tokens, own, i, i + 2) for i in range(0, 10, 2)]
    expected = torch.zeros(4, 10).scatter_(1, tokens[:, None], own[:, None])
    assert torch.equal(torch.cat(tiles, dim=1), expected)
