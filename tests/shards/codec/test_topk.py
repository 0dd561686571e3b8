"""``topk``: training noise and sampling noise are cut alike, in O(k)."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare, expon, ks_2samp, kstest
from torch import Tensor

from shards.codec.full import frozen_posterior
from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.codec.topk import TopKCodec
from shards.noise.kinds import KeyedPrior, dense_arrivals
from shards.noise.order_statistics import (
    SparseNoise,
    distinct_ids,
    first_arrivals_of,
    keep_first,
    mean_rate,
    rest_rate,
)
from shards.noise.philox import PositionKeys
from tests.shards.codec_cases import SEED, decode, teacher_output


def keys(num: int, seed: int = 3) -> PositionKeys:
    return PositionKeys(seed, torch.arange(num), torch.ones(num, dtype=torch.int64))


@pytest.mark.parametrize("kept", [1, 7, 90, 500])
def test_the_largest_entries_are_kept_and_the_others_weighed(kept: int) -> None:
    output, resources = teacher_output()
    noise = decode(TopKCodec(kept), output, resources)
    assert isinstance(noise, SparseNoise)
    exact = dense_arrivals(frozen_posterior(output, SEED))
    expected = keep_first(exact, min(kept, 90))
    assert torch.equal(noise.ids.sort(1).values, expected.ids.sort(1).values)
    cut = dense_arrivals(noise)
    assert bool((torch.isfinite(cut).sum(1) == min(kept, 90)).all())
    torch.testing.assert_close(cut[cut < torch.inf], exact[cut < torch.inf], rtol=1e-2, atol=0)
    total = exact.reciprocal().sum(1)
    known = torch.where(cut < torch.inf, exact.reciprocal(), 0).sum(1)
    torch.testing.assert_close(noise.rest_rate, total - known, rtol=1e-3, atol=1e-3)


def exponentials(num: int, vocab_size: int, seed: int = 1) -> Tensor:
    return dense_arrivals(KeyedPrior(keys(num, seed), vocab_size))


def dense_cut(num: int, vocab_size: int, kept: int) -> SparseNoise:
    return keep_first(exponentials(num, vocab_size), kept)


@pytest.mark.parametrize(("vocab_size", "kept"), [(3000, 5), (3000, 64)])
def test_order_statistics_have_the_law_of_the_dense_draw(vocab_size: int, kept: int) -> None:
    num = 3000
    sparse, dense = first_arrivals_of(keys(num), vocab_size, kept), dense_cut(num, vocab_size, kept)
    assert bool((sparse.arrivals.diff(dim=1) > 0).all())
    for rank in {0, 1, kept // 2, kept - 1}:
        pair = (sparse.arrivals[:, rank].numpy(), dense.arrivals[:, rank].numpy())
        assert ks_2samp(*pair).pvalue > 1e-4
    assert ks_2samp(sparse.rest_rate.numpy(), dense.rest_rate.numpy()).pvalue > 1e-4
    # The rest given the last kept arrival, not only on its own: the ratio to its mean.
    ratios = [
        (n.rest_rate.double() / mean_rate(n.arrivals[:, -1].double()) / (vocab_size - kept)).numpy()
        for n in (sparse, dense)
    ]
    assert ks_2samp(*ratios).pvalue > 1e-4


def test_gaps_are_exponential_and_independent() -> None:
    noise = first_arrivals_of(keys(20_000), 5000, 4)
    arrivals = torch.cat([torch.zeros(20_000, 1), noise.arrivals], dim=1).double()
    gaps = arrivals.diff(dim=1) * torch.arange(5000, 4996, -1)
    assert kstest(gaps.flatten().numpy(), expon.cdf).pvalue > 1e-4
    correlation = torch.corrcoef((-gaps).exp().T)[~torch.eye(4, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(20_000)


def test_ids_are_distinct_and_uniform_in_every_rank() -> None:
    ids = distinct_ids(keys(40_000), 40, 10)
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all())
    for rank in (0, 4, 9):
        counts = torch.bincount(ids[:, rank], minlength=40).numpy()
        assert chisquare(counts).pvalue > 1e-4
    pairs = torch.bincount(ids[:, 0] * 40 + ids[:, 9], minlength=1600).view(40, 40)
    off_diagonal = pairs[~torch.eye(40, dtype=torch.bool)].numpy()
    assert int(pairs.diagonal().sum()) == 0 and chisquare(off_diagonal).pvalue > 1e-4


@pytest.mark.parametrize(("vocab_size", "kept"), [(6, 3), (6, 9), (5000, 2000), (5000, 16)])
def test_keyed_per_position_and_not_by_batch(vocab_size: int, kept: int) -> None:
    prior = TopKCodec(kept).prior(keys(50), vocab_size)
    whole, part = prior.drawn, prior.select(torch.tensor([17])).drawn
    assert whole.ids.shape == (50, min(kept, vocab_size))
    assert torch.equal(whole.ids[17:18], part.ids)
    assert torch.equal(whole.arrivals[17:18], part.arrivals)
    assert torch.equal(whole.rest_rate[17:18], part.rest_rate)


def test_work_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    from shards.noise import philox

    plain = philox.philox4x32

    def counting(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> object:
        words = plain(counter, seed)
        drawn.append(words[0].numel())
        return words

    monkeypatch.setattr("shards.noise.philox.philox4x32", counting)
    totals = []
    for vocab_size in (50_257, 5_000_000):
        drawn.clear()
        first_arrivals_of(keys(8), vocab_size, 32)
        totals.append(sum(drawn))
    assert totals[0] == totals[1] < 8 * 64


def test_posterior_noise_cut_is_prior_noise_cut() -> None:
    """Tokens drawn from p: what training shows has the law of what sampling shows."""
    output, resources = teacher_output(100, 40, 60, spread=2.0)
    shown = decode(TopKCodec(8), output, resources)
    drawn = TopKCodec(8).prior(keys(4000), 60).drawn
    assert isinstance(shown, SparseNoise)
    assert ks_2samp(shown.rest_rate.numpy(), drawn.rest_rate.numpy()).pvalue > 1e-4
    ordered = shown.arrivals.sort(1).values
    for rank in (0, 7):
        pair = (ordered[:, rank].numpy(), drawn.arrivals[:, rank].numpy())
        assert ks_2samp(*pair).pvalue > 1e-4
    counts = torch.bincount(shown.ids.flatten(), minlength=60).numpy()
    assert chisquare(counts).pvalue > 1e-4


def test_mean_rate_by_quadrature() -> None:
    x = torch.tensor([0.01, 0.3, 1.0], dtype=torch.float64)
    t = torch.linspace(-12, 6, 200_001, dtype=torch.float64).exp()
    for value, got in zip(x, mean_rate(x), strict=True):
        expected = torch.trapezoid((-t).exp() / (value + t), t)
        assert float(expected) == pytest.approx(float(got), rel=1e-3)


def test_rest_rate_is_a_quantile_function() -> None:
    """A larger normal variate is a larger rate, and the rate at 0 is near the median."""
    after = torch.tensor([0.01, 0.1, 0.8], dtype=torch.float64)
    normals = torch.linspace(-4, 4, 81, dtype=torch.float64)
    rates = torch.stack([rest_rate(after, 3000, z.expand(3)) for z in normals])
    assert bool((rates.diff(dim=0) > 0).all())
    drawn = exponentials(2000, 3000, seed=4).double()
    for column, f in enumerate(after):
        exact = (f + drawn).reciprocal().sum(1)
        for z, share in ((-1.0, 0.158655), (0.0, 0.5), (1.0, 0.841345)):
            below = float((exact < rates[(normals - z).abs().argmin(), column]).double().mean())
            assert abs(below - share) < 4.5 * math.sqrt(share * (1 - share) / 2000)


def test_arrivals_say_nothing_of_ids() -> None:
    """Gaps, ids and the rest are drawn from streams of their own."""
    num = 20_000
    noise = first_arrivals_of(keys(num), 5000, 3)
    columns = [*noise.ids.T.double(), *noise.arrivals.T.double().neg().exp()]
    correlation = torch.corrcoef(torch.stack([*columns, noise.rest_rate.double()]))
    ids_by_others = correlation[:3, 3:]
    assert float(ids_by_others.abs().max()) < 4.5 / math.sqrt(num)


def test_the_token_is_known_apart_from_what_a_student_is_shown() -> None:
    """Also one so unlikely that its arrival time is no float32."""
    output, resources = teacher_output(num_rows=1, num_tokens=3)
    output.log_probs[0, :, 7] = torch.tensor([-10.0, -95.0, -600.0])
    output = TeacherOutput(output.log_probs, torch.full((1, 3), 7), output.rows)
    noise = decode(make_codec("topk", num_entries=4), output, resources)
    whole = frozen_posterior(output, SEED).token_gumbels
    assert torch.equal(noise.gumbels()[:, 7], whole)
    assert torch.equal(noise.select(slice(1, 3)).gumbels(5, 9)[:, 2], whole[1:])
    shown = torch.isfinite(dense_arrivals(noise)).sum(1)
    assert shown.tolist() == [4, 4, 4] and bool((noise.gumbels() > -torch.inf).sum(1).le(5).all())
