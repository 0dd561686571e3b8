"""Prior and posterior arrival times: the authors' numbers, the invariant, and the laws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstest
from torch import Tensor

from shards.noise.gumbel import (
    arrivals_from_gumbel,
    exponential_from_bits,
    exponentials,
    gumbel_argmax,
    gumbel_from_arrivals,
    posterior_arrivals,
    posterior_from_exponentials,
    posterior_gumbels_from_draws,
    prior_arrivals,
)


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, Tensor]:
    assert json.loads((golden / "posterior.json").read_text())["tensors"].keys()
    return load_file(golden / "posterior.safetensors")


def log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return (logits.to(dtype) - logits.to(dtype).amax(-1, keepdim=True)).log_softmax(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("part", ["", "peaked_"])
def test_log_space_posterior_matches_the_golden_vectors(
    case: dict[str, Tensor], part: str, dtype: torch.dtype, tolerance: float
) -> None:
    log_probs = log_softmax(case[part + "logits"], dtype)
    tokens = case[part + "tokens"]
    zeta, zeta_0 = case[part + "zeta"].to(dtype), case[part + "zeta0"].squeeze(1).to(dtype)
    gumbels = posterior_gumbels_from_draws(log_probs, tokens, zeta, zeta_0)
    expected = case[part + "xi_float64"].double()
    # xi_x of about 150 has a float32 spacing of 1.5e-5, and its inputs one rounding each.
    scale = expected.abs().clamp(min=1.0)
    assert float(((gumbels.double() - expected).abs() / scale).max()) < tolerance
    assert bool(torch.isfinite(gumbels).all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_arrival_form_matches_the_golden_vectors(
    case: dict[str, Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    log_probs = log_softmax(case["logits"], dtype)
    arrivals = posterior_from_exponentials(
        log_probs,
        case["tokens"],
        (-case["zeta"].to(dtype)).exp(),
        (-case["zeta0"].squeeze(1).to(dtype)).exp(),
    )
    gumbels = gumbel_from_arrivals(arrivals).double()
    assert float((gumbels - case["xi_float64"]).abs().max()) < tolerance
    assert torch.equal(gumbel_argmax(log_probs, arrivals), case["tokens"])


def test_a_race_of_three_by_hand() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    others = torch.tensor([9.0, 1.0, 0.1], dtype=torch.float64)
    first = torch.tensor(2.0, dtype=torch.float64)
    arrivals = posterior_from_exponentials(log_probs, torch.tensor(0), others, first)
    expected = torch.tensor([0.5 * 2, 1.0 + 0.3 * 2, 0.1 + 0.2 * 2], dtype=torch.float64)
    torch.testing.assert_close(arrivals, expected)


def test_exponential_of_extreme_bits() -> None:
    values = exponential_from_bits(torch.tensor([0, 1 << 31, (1 << 32) - 1]))
    expected = [0.5 * 2.0**-32, math.log(2.0), 24 * math.log(2.0)]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=0)
    assert float(values[0]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_exponential(dtype: torch.dtype) -> None:
    draws = exponentials((200_000,), torch.Generator().manual_seed(1), dtype)
    assert draws.dtype == dtype
    # A p-value below 1e-4 would come up once in 10,000 seeds; the seed is fixed.
    assert kstest(draws.double().numpy(), "expon").pvalue > 1e-4


def random_posteriors(num: int, vocab_size: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, vocab_size, generator=generator) * spread
    log_probs = log_softmax(logits, torch.float32)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return log_probs, tokens


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 20.0])
def test_the_token_is_always_the_argmax(spread: float) -> None:
    log_probs, tokens = random_posteriors(20_000, 50, spread, seed=3)
    arrivals = posterior_arrivals(log_probs, tokens, torch.Generator().manual_seed(4))
    assert torch.equal(gumbel_argmax(log_probs, arrivals), tokens)
    improbable = log_probs.clamp(min=-60.0).argmin(-1)
    arrivals = posterior_arrivals(log_probs, improbable, torch.Generator().manual_seed(5))
    reachable = log_probs.amin(-1) > -60
    wins = gumbel_argmax(log_probs, arrivals) == improbable
    assert bool(wins[reachable].all())


def test_the_argmax_survives_waits_below_the_float32_spacing() -> None:
    log_probs = torch.tensor([[0.98, 0.02]]).log()
    others = torch.full((1, 2), 0.5 * 2.0**-32)
    arrivals = posterior_from_exponentials(
        log_probs, torch.tensor([1]), others, torch.tensor([3.0])
    )
    naive = log_probs.exp() * 3.0 + others
    assert bool((naive[0, 0] == log_probs.exp()[0, 0] * 3.0).all()), "the case must be a tie"
    assert gumbel_argmax(log_probs, arrivals).tolist() == [1]


def test_posterior_of_drawn_tokens_is_the_prior() -> None:
    """If x ~ p then xi given x, mixed over x, has independent standard Gumbel entries."""
    num, vocab_size = 100_000, 5
    log_probs = torch.tensor([0.55, 0.25, 0.12, 0.05, 0.03]).log().expand(num, vocab_size)
    tokens = torch.multinomial(
        log_probs[0].exp(), num, True, generator=torch.Generator().manual_seed(6)
    )
    arrivals = posterior_arrivals(log_probs, tokens, torch.Generator().manual_seed(7))
    gumbels = gumbel_from_arrivals(arrivals).double()
    for entry in range(vocab_size):
        assert kstest(gumbels[:, entry].numpy(), "gumbel_r").pvalue > 1e-4
    # Independent Exp(1): every pairwise correlation of exp(-F) is 0 +- 1/sqrt(num).
    correlation = torch.corrcoef((-arrivals.double()).exp().T)
    off_diagonal = correlation[~torch.eye(vocab_size, dtype=torch.bool)]
    assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(num)


def test_prior_argmax_draws_from_the_teacher() -> None:
    num = 200_000
    log_probs = torch.tensor([0.6, 0.3, 0.1]).log()
    arrivals = prior_arrivals((num, 3), torch.Generator().manual_seed(8))
    counts = torch.bincount(gumbel_argmax(log_probs.expand(num, 3), arrivals), minlength=3)
    deviation = (counts.double() / num - log_probs.exp().double()).abs()
    assert float(deviation.max()) < 4.5 * math.sqrt(0.25 / num)


def test_gumbel_and_arrival_forms_are_inverse() -> None:
    gumbels = torch.linspace(-3, 80, 500)
    torch.testing.assert_close(gumbel_from_arrivals(arrivals_from_gumbel(gumbels)), gumbels)
    assert float(arrivals_from_gumbel(torch.tensor([150.0]))[0]) > 0
