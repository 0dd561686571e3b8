"""Noise: Algorithm 1 against the authors' numbers, its invariant and laws; every kind reads alike; bits by key."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare, expon, kstest
from torch import Tensor

from benchmarks.dense_noise import DenseNoise, given_posterior
from shards.codec.full import StoredNoise
from shards.codec.seeded import ShiftedNoise
from shards.errors import GdistillError, UsageError
from shards.noise import embedding, gumbel, murmur3, philox
from shards.noise import order_statistics as statistics
from shards.noise.embedding import Noise, dense_arrivals
from shards.noise.gumbel import DenseProbabilities, Entries, HeadAndTail, KeyedPosterior, KeyedPrior
from shards.noise.order_statistics import SparseNoise, TopPrior
from shards.noise.philox import PositionKeys, exponential_from_bits
from tests.trainer.sampling_cases import Largest


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_keys(num: int, seed: int = 11, draw: int = 0) -> PositionKeys:
    index = torch.arange(num)
    return PositionKeys(seed, index // 16, index % 16 + 1, draw)


def posterior_of(log_probs: Tensor, tokens: Tensor, **of_keys: int) -> KeyedPosterior:
    own = log_probs.gather(1, tokens[:, None]).squeeze(1)
    keys = make_keys(len(tokens), **of_keys)
    return KeyedPosterior(keys, tokens, own, DenseProbabilities(log_probs))


def random_posterior(num: int, vocab_size: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, V], and a token of each drawn from them."""
    generator = seeded(num)
    log_probs = (torch.randn(num, vocab_size, generator=generator) * spread).log_softmax(-1)
    return log_probs, torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)


def dense_posterior(num: int, vocab_size: int) -> KeyedPosterior:
    return posterior_of(*random_posterior(num, vocab_size))


def winners(log_probs: Tensor, noise: Noise) -> Tensor:
    return (log_probs.double() + noise.gumbels().double()).argmax(1)


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "posterior.safetensors")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("part", ["", "peaked_"])
def test_posterior_matches_the_golden_vectors(
    case: dict[str, Tensor], part: str, dtype: torch.dtype, tolerance: float
) -> None:
    logits, tokens = case[part + "logits"].to(dtype), case[part + "tokens"]
    log_probs = (logits - logits.amax(-1, keepdim=True)).log_softmax(-1)
    zeta, zeta_0 = case[part + "zeta"].to(dtype), case[part + "zeta0"].squeeze(1).to(dtype)
    noise = given_posterior(log_probs, tokens, (-zeta).exp(), (-zeta_0).exp())
    expected = case[part + "xi_float64"].double()
    # xi_x of about 150 has a float32 spacing of 1.5e-5, and its inputs one rounding each.
    scale = expected.abs().clamp(min=1.0)
    assert float(((noise.gumbels().double() - expected).abs() / scale).max()) < tolerance
    assert bool((winners(log_probs, noise) == tokens).all())


def test_a_race_of_three_by_hand() -> None:
    less = torch.tensor([[1.0, math.exp(-64) * (1 - 2**-21)]])  # so little that float32 sees two equal scores
    assert gumbel.gumbel_argmax(torch.tensor([[0.0, -64.0]]), less).tolist() == [1]
    log_probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    others, first = torch.tensor([[9.0, 1.0, 0.1]]), torch.tensor([2.0])
    noise = given_posterior(log_probs, torch.tensor([0]), others, first)
    expected = torch.tensor([[0.5 * 2, 1.0 + 0.3 * 2, 0.1 + 0.2 * 2]])
    torch.testing.assert_close(dense_arrivals(noise), expected)


def test_extreme_bits_and_entries_cut_off() -> None:
    values = philox.exponential_from_bits(torch.tensor([0, 1 << 31, (1 << 32) - 1]))
    expected = [0.5 * 2.0**-32, math.log(2.0), 24 * math.log(2.0)]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=0)
    for rates in embedding.RATES.values():
        assert (rates(torch.tensor([1.0, torch.inf]), 0.9) > 0).tolist() == [True, False]


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 20.0, 80.0])
def test_the_token_is_always_the_argmax(spread: float) -> None:
    log_probs, tokens = random_posterior(20_000, 50, spread)
    noise = posterior_of(log_probs, tokens, seed=4)
    assert torch.equal(winners(log_probs, noise), tokens)
    assert torch.equal(gumbel.gumbel_argmax(log_probs, dense_arrivals(noise)), tokens)
    # However unlikely: float32 has no room for p = e^-150, and xi has.
    least = log_probs.argmin(1)
    noise = posterior_of(log_probs, least, seed=5)
    assert torch.equal(winners(log_probs, noise), least)
    assert bool(dense_arrivals(noise).reciprocal().sum(1).isfinite().all())


@pytest.mark.parametrize("own", [-1.0, -20.0, -60.0, -100.0, -130.0, -250.0])
def test_the_argmax_survives_waits_below_the_float32_spacing(own: float) -> None:
    """E_j of every other token is as small as it gets: all but tie with the winner."""
    num, vocab_size, generator = 2000, 64, seeded(1)
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
        assert bool((gumbel.gumbel_argmax(log_probs, dense_arrivals(noise)) == 5).all())


def test_the_tokens_gumbel_is_rounded_up() -> None:
    generator = seeded(2)
    log_probs = -250 * torch.rand(5000, generator=generator)
    first = -torch.rand(5000, generator=generator).log()
    exact = -(log_probs.double() + first.double().log())
    rounded = gumbel.token_gumbels(log_probs, first)
    assert bool((rounded.double() >= exact).all())
    assert float((rounded.double() - exact).max()) <= 2.0**-15  # one spacing below 256


def test_posterior_of_drawn_tokens_is_the_prior_and_every_draw_is_fresh() -> None:
    """If x ~ p then xi given x, mixed over x, has independent standard Gumbel entries."""
    num, p = 100_000, torch.tensor([0.55, 0.25, 0.12, 0.05, 0.03])
    tokens = torch.multinomial(p, num, True, generator=seeded(6))
    draws = []
    for draw in (0, 1, 2):
        noise = posterior_of(p.log().expand(num, 5), tokens, seed=7, draw=draw)
        for entry in range(5):
            assert kstest(noise.gumbels()[:, entry].double().numpy(), "gumbel_r").pvalue > 1e-4
        # Independent Exp(1): every pairwise correlation of exp(-F) is 0 +- 1/sqrt(num).
        draws.append((-dense_arrivals(noise).double()).exp())
        off_diagonal = torch.corrcoef(draws[-1].T)[~torch.eye(5, dtype=torch.bool)]
        assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(num)
    off_token = tokens != 0
    pair = torch.stack([draw[off_token, 0] for draw in draws[1:]])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.5 / math.sqrt(int(off_token.sum()))


def head_and_tail(num: int, vocab_size: int, kept: int) -> tuple[KeyedPosterior, Tensor]:
    """A posterior whose tail is the unigram, and the same distribution in full."""
    log_probs, tokens = random_posterior(num, vocab_size)
    unigram = torch.rand(vocab_size, generator=seeded(1)) + 0.1
    unigram /= unigram.sum()
    top, ids = log_probs.exp().topk(kept, dim=1)
    scale = (1 - top.sum(1)) / (1 - unigram[ids].sum(1))
    full = (scale[:, None] * unigram).scatter(1, ids, top)
    # A slot that no position uses counts for nothing, whatever it holds.
    ids, top = torch.cat([ids, ids[:, :1]], 1), torch.cat([top, 9 * top[:, :1]], 1)
    head = Entries(ids, top, (torch.arange(kept + 1) < kept).expand(ids.shape), vocab_size)
    noise = posterior_of(full.log(), tokens)
    return replace(noise, probabilities=HeadAndTail(head, scale, unigram)), full


def sparse(num: int, vocab_size: int, kept: int) -> SparseNoise:
    arrivals, ids = dense_arrivals(KeyedPrior(make_keys(num), vocab_size)).topk(kept, largest=False)
    return SparseNoise(ids, arrivals, vocab_size, torch.ones(num))


def shifted(num: int, vocab_size: int) -> ShiftedNoise:
    exact = dense_posterior(num, vocab_size)
    ids = torch.arange(6).expand(num, 6) * 5
    used = ids % 3 != torch.arange(num)[:, None] % 3
    factors = Entries(ids, 1.0 + ids / 7, used, vocab_size)
    return ShiftedNoise(exact.keys, exact.tokens, exact.token_log_probs, factors, vocab_size)


def stored(num: int, vocab_size: int) -> StoredNoise:
    exact = dense_posterior(num, vocab_size)
    columns = (exact.gumbels().half(),)
    return StoredNoise(columns, lambda c, i, j: c[0][:, i:j].float(), exact.tokens, exact.token_gumbels, vocab_size)


SOME = torch.arange(40) % 3 == 0
POSTERIORS: dict[str, Callable[[], KeyedPosterior]] = {
    "posterior": lambda: dense_posterior(40, 97),
    "head_and_tail": lambda: head_and_tail(40, 97, 9)[0],
}
NOISES: dict[str, Callable[[], Noise]] = {
    **POSTERIORS,
    "dense": lambda: DenseNoise(torch.rand(40, 97)),
    "prior": lambda: KeyedPrior(make_keys(40), 97),
    "sparse": lambda: sparse(40, 97, 13),
    "top_prior": lambda: TopPrior(make_keys(40), 97, 13),
    "shifted": lambda: shifted(40, 97),
    "stored": lambda: stored(40, 97),
    "wide head_and_tail": lambda: head_and_tail(40, 1300, 9)[0],
    "wide shifted": lambda: shifted(40, 1300),
    "prior at some": lambda: replace(dense_posterior(40, 97), is_prior=SOME),
}
WINDOWS = [(0, 512), (512, 1024), (1024, 1300), (1024, 1100), (0, 1300), (30, 700)]


@pytest.mark.parametrize("kind", NOISES)
def test_any_noise_reads_in_tiles_selections_and_parts(kind: str) -> None:
    """Also where the entries of many tiles are counted at once, and between such tiles."""
    noise = NOISES[kind]()
    assert isinstance(noise, Noise)
    whole, size = dense_arrivals(noise), noise.vocab_size
    assert whole.shape == (noise.num_positions, size) and whole.dtype == torch.float32
    for width in (1, 7, 32, 97) if size == 97 else (97, 512):
        tiles = [(i, min(i + width, size)) for i in range(0, size, width)]
        assert torch.equal(torch.cat([noise.tile(*tile) for tile in tiles], dim=1), whole)
        gumbels = torch.cat([noise.gumbels(*tile) for tile in tiles], dim=1)
        assert torch.equal(gumbels, noise.gumbels())
    torch.testing.assert_close(noise.gumbels(), -whole.log(), rtol=1e-5, atol=1e-5)
    for index in (torch.tensor([3, 39, 0, 3]), SOME, slice(5, 9), torch.zeros(40, dtype=torch.bool)):
        assert torch.equal(dense_arrivals(noise.select(index).to("cpu")), whole[index])
    for width in (7, 20, 40, 64):
        parts = noise.split(width)
        assert [part.num_positions for part in parts] == [min(width, 40 - i) for i in range(0, 40, width)]
        for first, last in WINDOWS:
            start, stop = min(first, size - 1), min(last, size)
            read = torch.cat([part.tile(start, stop) for part in parts])
            assert torch.equal(read, whole[:, start:stop]), (width, start, stop)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_positions_that_are_prior_have_its_entries_and_all_else_stays(kind: str) -> None:
    """F_j = E_j bit for bit, F_x = E_0; at the other positions nothing changes."""
    posterior, keys = POSTERIORS[kind](), make_keys(40)
    noise = replace(posterior, is_prior=SOME)
    found = dense_arrivals(noise)
    assert torch.equal(found[~SOME], dense_arrivals(posterior)[~SOME])
    prior, first = dense_arrivals(KeyedPrior(keys, 97)), keys.first_arrivals()
    is_own = torch.arange(97) == posterior.tokens[:, None]
    assert torch.equal(found[SOME][~is_own[SOME]], prior[SOME][~is_own[SOME]])
    torch.testing.assert_close(found[is_own][SOME], first[SOME], rtol=1e-5, atol=0)


def test_an_embedding_is_summed_over_tiles_that_autocast_does_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile of a hidden state is a matrix product; the last tile here is one id wide."""
    was_on: list[bool] = []

    class Watched(DenseNoise):
        def tile(self, start: int, stop: int) -> Tensor:
            was_on.append(torch.is_autocast_enabled("cpu"))
            return super().tile(start, stop)

    monkeypatch.setitem(embedding.TILES, "cpu", (16, 32))
    noise, weight = Watched(exponentials(40, 97)), torch.randn(97, 5, generator=seeded(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        embedded = noise.softmax_embed(weight)
        embedded.sum().backward()
    assert len(was_on) == 2 * 3 * 4 and not any(was_on)
    shares = noise.gumbels().softmax(-1)
    torch.testing.assert_close(embedded, shares @ weight, rtol=0, atol=0.03)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, shares.sum(0)[:, None].expand(97, 5), rtol=0.03, atol=0)


def test_a_tile_fits_into_a_gpus_cache_but_keeps_it_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, found = torch.device("cuda"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert embedding.tile_shape(cuda) == embedding.tile_shape(torch.device("meta")) == (8192, 2048)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for known in ({"L2_cache_size": 96 << 20}, {"L2_cache_size": 40 << 20}, {}, {"L2_cache_size": 2 << 20}):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: SimpleNamespace(**known))
        found.append(embedding.tile_shape(cuda))
    assert found == [(8192, 2048), (2048, 2048), (4096, 2048), (1024, 2048)]


def test_head_and_tail_uses_its_own_distribution() -> None:
    noise, full = head_and_tail(200, 97, 9)
    torch.testing.assert_close(full.sum(1), torch.ones(200))
    torch.testing.assert_close(noise.probabilities.tile(0, 97), full)
    exact = dense_arrivals(posterior_of(full.log(), noise.tokens))
    torch.testing.assert_close(dense_arrivals(noise), exact, rtol=1e-5, atol=1e-8)


def assert_uniform(counts: Tensor) -> None:
    assert chisquare(counts.numpy()).pvalue > 1e-4


def exponentials(num: int, vocab_size: int, seed: int = 1) -> Tensor:
    return dense_arrivals(KeyedPrior(make_keys(num, seed), vocab_size))


def test_gaps_are_exponential_and_independent_and_say_nothing_of_ids() -> None:
    """Gaps, ids and the rest are drawn from streams of their own."""
    noise = statistics.first_arrivals_of(make_keys(20_000), 5000, 4)
    arrivals = torch.cat([torch.zeros(20_000, 1), noise.arrivals], dim=1).double()
    gaps = arrivals.diff(dim=1) * torch.arange(5000, 4996, -1)
    assert kstest(gaps.flatten().numpy(), expon.cdf).pvalue > 1e-4 and bool((gaps >= 0).all())
    correlation = torch.corrcoef((-gaps).exp().T)[~torch.eye(4, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(20_000)
    columns = [*noise.ids.T.double(), *noise.arrivals.T.double().neg().exp()]
    correlation = torch.corrcoef(torch.stack([*columns, noise.rest_rate.double()]))
    ids_by_others = correlation[:4, 4:]
    assert float(ids_by_others.abs().max()) < 4.5 / math.sqrt(20_000)


def test_ids_are_distinct_and_uniform_in_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = statistics.distinct_ids(make_keys(40_000), 40, 10)
    monkeypatch.setattr(statistics, "SPARE_IDS", 0)
    alone = [statistics.distinct_ids(make_keys(50).select(slice(i, i + 1)), 40, 10) for i in range(50)]
    assert torch.equal(torch.cat(alone), ids[:50]), "however many are drawn at first, and with whom"
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all())
    for rank in (0, 4, 9):
        assert_uniform(torch.bincount(ids[:, rank], minlength=40))
    pairs = torch.bincount(ids[:, 0] * 40 + ids[:, 9], minlength=1600).view(40, 40)
    assert int(pairs.diagonal().sum()) == 0
    assert_uniform(pairs[~torch.eye(40, dtype=torch.bool)])


def test_no_tensor_is_as_large_as_the_vocabulary() -> None:
    with Largest() as largest:
        statistics.first_arrivals_of(make_keys(8), 50_257, 32)
    assert largest.elements <= 8 * 64


def test_the_rest_has_the_mean_variance_and_skewness_of_its_sum_by_quadrature() -> None:
    t, z = torch.linspace(-12, 6, 200_001).double().exp(), torch.linspace(-8, 8, 4001).double()
    weights = (-z * z / 2).softmax(0)
    for f in torch.tensor([0.01, 0.3, 1.0]).double():
        m1, m2, m3 = (torch.trapezoid((-t).exp() / (f + t) ** power, t) for power in (1, 2, 3))
        rates = statistics.rest_rate(f.expand(len(z)), 3000, z)
        assert bool((rates.diff() > 0).all())
        mean = (weights * rates).sum()
        found = [mean, *((weights * (rates - mean) ** power).sum() for power in (2, 3))]
        expected = [m1, m2 - m1**2, m3 - 3 * m1 * m2 + 2 * m1**3]
        assert [*map(float, found)] == pytest.approx([3000 * float(one) for one in expected], rel=0.01)


@pytest.mark.parametrize(("vocab_size", "kept"), [(6, 3), (6, 9), (5000, 2000), (5000, 16)])
def test_keyed_per_position_and_not_by_batch(vocab_size: int, kept: int) -> None:
    prior = TopPrior(make_keys(50), vocab_size, kept)
    whole, part = prior.drawn, prior.select(torch.tensor([17])).drawn
    if kept != 16:  # a small vocabulary is drawn in full, and cut
        every = dense_arrivals(KeyedPrior(prior.keys, vocab_size))
        assert torch.equal(whole.arrivals, every.sort(1).values[:, :kept])
        assert torch.equal(every.gather(1, whole.ids), whole.arrivals)
        rest = every.scatter(1, whole.ids, torch.inf).reciprocal().sum(1)
        torch.testing.assert_close(whole.rest_rate, rest)
    assert whole.ids.shape == (50, min(kept, vocab_size))
    for name in ("ids", "arrivals", "rest_rate"):
        assert torch.equal(getattr(whole, name)[17:18], getattr(part, name)), name


def test_frozen_draws() -> None:
    # A change of these numbers loses the noise of every sample that was drawn with them.
    noise, keys = statistics.first_arrivals_of(make_keys(1), 3000, 3), murmur3.EngineKeys(*torch.tensor([[5], [1]]))
    found = [*noise.ids[0], *(1000 * noise.arrivals[0]), *noise.rest_rate]
    assert [*map(float, found)] == pytest.approx([1174, 2332, 1595, 1.33129, 2.05881, 2.52784, 15615.9], rel=1e-5)
    found = [keys.first_arrivals(), keys.redrawn(1).first_arrivals(), keys.redrawn(1).exponentials(7, 8)]
    found += [keys.redrawn(9).exponentials(7, 8), make_keys(1).first_arrivals()]
    assert [*map(float, found)] == pytest.approx([0.8456, 0.2841, 0.7306, 0.8644, 0.09007], rel=2e-4)


# Random123, kat_vectors: counter, key, expected.
ZERO, ONES = "00000000 " * 3 + "00000000", "ffffffff " * 3 + "ffffffff"
PI = "243f6a88 85a308d3 13198a2e 03707344"
KNOWN = [
    (ZERO, "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (ONES, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
VECTORS = json.loads(Path(__file__).with_name("murmur3_vectors.json").read_text())


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def words_of(counter: list[int], seed: int) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    return [int(word) for word in philox.philox4x32((c0, c1, c2, c3), seed)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = hexadecimal(key)
    assert words_of(hexadecimal(counter), low | high << 32) == hexadecimal(expected)


def wide_keys(seed: int = 5, draw: int = 0) -> PositionKeys:
    rows = torch.tensor([0, 1, 1, 7, (1 << 32) + 1, (1 << 44) - 1])
    return PositionKeys(seed, rows, torch.tensor([1, 1, 2, 1023, 1, (1 << 20) - 1]), draw)


def test_keyed_bits_follow_the_documented_counter() -> None:
    row, position, vocab_id = (1 << 44) - 1, (1 << 20) - 1, 9
    counter = [vocab_id // 4, position | (row >> 32) << 20, row & 0xFFFFFFFF, 1 << 20]
    bits = philox.keyed_bits(wide_keys(draw=(1 << 33) + (1 << 20)), 0, 10)
    assert int(bits[5, vocab_id]) == words_of(counter, 5)[vocab_id % 4]


def test_every_part_of_the_key_matters() -> None:
    whole = philox.keyed_bits(wide_keys(), 0, 400)
    assert len(set(whole.flatten().tolist())) > 0.999 * whole.numel()
    for other in (wide_keys(seed=6), wide_keys(seed=5 + (1 << 40)), wide_keys(draw=1)):
        assert not (philox.keyed_bits(other, 0, 400) == whole).any()
    assert torch.equal(philox.keyed_bits(wide_keys(draw=-5).redrawn(2).redrawn(3), 0, 400), whole)
    streams = torch.cat([philox.stream_bits(wide_keys(), stream, 200) for stream in range(3)], dim=1)
    assert not np.isin(streams.numpy(), whole.numpy()).any()


def test_a_race_hears_tokens_of_small_probability() -> None:
    """float32 has no value within 6e-8 of 1, and log 0 is none."""
    uniform = philox.uniforms(make_keys(100), 0, 4000)
    assert uniform.dtype == torch.float64 and bool(((2.0**32 * uniform) % 1 == 0.5).all()), "never 0 nor 1"
    # At the largest uniform a score is 1 / 1.164e-10, which the other token's 1 / 0.693 meets at p = 5.955e9.
    probs = torch.tensor([[1.0, 5.9e9], [1.0, 6.0e9]], dtype=torch.float64)
    largest = torch.tensor([1 - 2.0**-33, 0.5], dtype=torch.float64).expand(2, 2)
    assert philox.race(probs, largest).tolist() == [0, 1]


def assert_as_defined(keys: PositionKeys, start: int, stop: int) -> None:
    expected = exponential_from_bits(philox.keyed_bits(keys, start, stop))
    assert torch.equal(philox.keyed_exponentials(keys, start, stop), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 90), (5, 5), (50251, 50257)])
@pytest.mark.parametrize("num", [0, 1, 300])
def test_fast_exponentials_equal_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, num: int, start: int, stop: int
) -> None:
    for elements in (1, 130, 1 << 20):  # of a block of rows
        monkeypatch.setattr(philox, "BLOCK_ELEMENTS", elements)
        assert_as_defined(make_keys(num, seed=(1 << 63) - 5, draw=(1 << 33) - 7), start, stop)


@pytest.fixture(scope="module")
def compiled_noise() -> Iterator[None]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the compiler of PyTorch writes no code for its plainest kernels")
    philox.use_noise_kernel("compiled")
    yield
    philox.use_noise_kernel("eager")


@pytest.mark.parametrize(("num", "start", "stop"), [(300, 3, 90), (2, 0, 50257), (64, 6, 2055)])
def test_the_compiled_kernel_gives_the_same_bits(compiled_noise: None, num: int, start: int, stop: int) -> None:
    assert philox.noise_kernel() == "compiled"
    assert_as_defined(make_keys(num, draw=3), start, stop)


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Gives torch another compiler, in a process that has compiled nothing yet."""
    kernels: dict[str, Callable[..., Tensor]] = {}
    monkeypatch.setattr(philox, "compiled_kernels", kernels)
    return partial(monkeypatch.setattr, torch, "compile")


def test_kernels_are_chosen_by_name_and_a_failure_changes_nothing(compile_by: Callable) -> None:
    def broken(*arguments: object, **options: object) -> object:
        told = RuntimeError("which compiler this is")
        vars(told)["inner_exception"] = OSError("no compiler\nand so on")
        raise told

    with pytest.raises(UsageError, match="noise kernel"):
        philox.use_noise_kernel("fast")
    compile_by(lambda *_, **options: broken)
    with pytest.raises(GdistillError, match="got no compiler;"):
        philox.use_noise_kernel("compiled")
    assert philox.noise_kernel() == "eager"
    philox.compiled_kernels["cpu"] = torch.neg  # of an earlier choice
    with pytest.raises(GdistillError, match="no compiler"):
        philox.use_noise_kernel("compiled")
    assert philox.noise_kernel() == "compiled"


def test_auto_compiles_on_cuda_alone_and_tells_why_not(compile_by: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def fails(device: torch.device) -> None:
        calls.append(device)
        raise GdistillError("cannot compile the noise kernel", got="no Triton")

    monkeypatch.setattr(philox, "_compile", fails)
    philox.compiled_kernels |= dict.fromkeys(("cpu", "cuda"), torch.neg)  # of an earlier choice
    assert philox.use_noise_kernel("auto", "cpu") == "" and not calls
    assert "no Triton" in philox.use_noise_kernel("auto", "cuda")
    assert calls == [torch.device("cuda")]
    assert philox.noise_kernel("cpu") == philox.noise_kernel("cuda") == "eager"


@pytest.mark.parametrize(
    ("ulps", "most", "forms", "fits"),
    [((0, 9), 0, 1, True), ((1, 0), 0, 2, True), ((1, 1), 0, 2, False), ((2, 9), 2, 1, True), ((3, 3), 2, 2, False)],
)
def test_the_first_form_is_taken_that_differs_no_more_than_its_device_allows(
    compile_by: Callable, monkeypatch: pytest.MonkeyPatch, ulps: tuple[int, int], most: int, forms: int, fits: bool
) -> None:
    """Not at all on a CPU, whose results are reproduced bit for bit; PyTorch 2.13 errs in the first under AVX2."""
    tried: list[str] = []

    def compiled(work: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        def run(*words: Tensor) -> Tensor:
            found = work(*words)
            found.view(torch.int32)[3, 5, 1] -= ulps[work.__name__ == "_all_lanes"]
            return found

        tried.append(work.__name__)
        return run

    assert philox.LARGEST_ULPS == {"cpu": 0, "cuda": 2}
    compile_by(compiled)
    monkeypatch.setitem(philox.LARGEST_ULPS, "cpu", most)
    obstacle = ""
    try:
        philox.use_noise_kernel("compiled", "cpu")
    except GdistillError as error:
        obstacle = str(error)
    assert tried == ["_by_lane", "_all_lanes"][:forms]
    assert philox.noise_kernel("cpu") == ("compiled" if fits else "eager")
    assert philox.noise_kernel("cuda") == "eager", "another device keeps its own kernel"
    assert fits or f"{ulps[0]} units" in obstacle


def test_one_graph_serves_every_size_and_gradient_mode(compile_by: Callable) -> None:
    from torch._dynamo.utils import counters

    compile_by(partial(torch.compile, backend="eager"))
    before = counters["stats"]["unique_graphs"]
    philox.use_noise_kernel("compiled")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for num in (2, 40):
            with mode():
                found = philox.keyed_exponentials(make_keys(num), 5, 9000)
                expected = exponential_from_bits(philox.keyed_bits(make_keys(num), 5, 9000))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert counters["stats"]["unique_graphs"] == before + 1


def at_vectors(draw: Callable[..., Tensor], *more: int) -> Tensor:
    """[9, 16] draws of the engine's stream at the vectors' seeds, positions and ids."""
    seeds, positions = torch.tensor(VECTORS["seeds"]), torch.tensor(VECTORS["positions"])
    return torch.cat([draw(seeds, positions, j, j + 1, *more) for j in VECTORS["token_ids"]], dim=1)


def numbers(name: str) -> Tensor:
    rows = [[float.fromhex(value) for value in row] for row in VECTORS[name]]
    return torch.tensor(rows, dtype=torch.float64)


def test_bits_uniforms_and_variates_are_the_engines_own() -> None:
    first = at_vectors(murmur3.engine_bits)
    second = at_vectors(murmur3.engine_bits, murmur3.SECOND_WORD)
    assert (first.long() & murmur3.MASK).tolist() == VECTORS["bits"]
    assert (second.long() & murmur3.MASK).tolist() == VECTORS["bits_of_second_word"]
    assert torch.equal(murmur3.uniforms(first).double(), numbers("uniforms32"))
    assert torch.equal(murmur3.uniforms64(first, second), numbers("uniforms64"))
    found = at_vectors(murmur3.engine_gumbels).double()  # to the rounding of a logarithm
    torch.testing.assert_close(found, numbers("gumbels32"), rtol=3e-7, atol=3e-7)
    extreme = torch.tensor([0, -1], dtype=torch.int32)
    assert murmur3.uniforms(extreme).tolist() == [2.0**-33, 1.0]
    assert murmur3.exponentials(murmur3.uniforms(extreme)).tolist() == pytest.approx([2.0**-33, 24 * math.log(2.0)])
    assert bool(((u := murmur3.uniforms64(extreme, extreme)) > 0).all()) and bool((u < 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_keys_is_what_the_engine_draws_the_token_with(dtype: torch.dtype) -> None:
    """Other draws, and the first arrivals, are of streams that no token's noise is of."""
    seeds, places = torch.tensor([5, 5, 8]), torch.tensor([1, 2, 1])
    keys = murmur3.EngineKeys(seeds, places, dtype=dtype)
    noise, drawn = KeyedPrior(keys, 60), murmur3.engine_gumbels(seeds, places - 1, 0, 60, dtype)
    torch.testing.assert_close(noise.gumbels(), drawn.float())
    assert torch.equal(noise.tile(17, 40), noise.tile(0, 60)[:, 17:40])
    assert torch.equal(noise.select(torch.tensor([2])).gumbels(), noise.gumbels()[2:])
    assert torch.equal(noise.redrawn(1).redrawn(1).gumbels(), noise.redrawn(2).gumbels())
    draws = [noise.redrawn(draw) for draw in range(3)]
    streams = [part for draw in draws for part in (draw.tile(0, 60), draw.keys.first_arrivals())]
    assert len(torch.cat([part.flatten() for part in streams]).unique()) == 3 * 3 * 61
