"""Keyed noise: tiles, selection, the invariant and the law, for each kind of probability source."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from shards.codec.full import StoredNoise
from shards.codec.seeded import ShiftedNoise
from shards.errors import GdistillError, UsageError
from shards.noise import compiled as compiled_module
from shards.noise import philox
from shards.noise.embedding import Weighting
from shards.noise.gumbel import exponential_from_bits
from shards.noise.kinds import (
    DenseProbabilities,
    Entries,
    HeadAndTail,
    KeyedPosterior,
    KeyedPrior,
    Noise,
    TokenNoise,
    dense_arrivals,
)
from shards.noise.order_statistics import SparseNoise, TopPrior
from shards.noise.philox import (
    OfPositions,
    PositionKeys,
    keyed_bits,
    keyed_exponentials,
    noise_kernel,
    use_noise_kernel,
)


def make_keys(num: int, seed: int = 11, draw: int = 0) -> PositionKeys:
    index = torch.arange(num)
    return PositionKeys(seed, index // 16, index % 16 + 1, draw)


def dense_posterior(
    num: int, vocab_size: int, spread: float = 3.0, draw: int = 0
) -> KeyedPosterior:
    generator = torch.Generator().manual_seed(num)
    log_probs = (torch.randn(num, vocab_size, generator=generator) * spread).log_softmax(-1)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    token_log_probs = log_probs.gather(1, tokens[:, None]).squeeze(1)
    keys = make_keys(num, draw=draw)
    return KeyedPosterior(keys, tokens, token_log_probs, DenseProbabilities(log_probs))


def head_and_tail(num: int, vocab_size: int, kept: int) -> tuple[KeyedPosterior, Tensor]:
    """A posterior whose tail is the unigram, and the same distribution in full."""
    exact = dense_posterior(num, vocab_size)
    assert isinstance(exact.probabilities, DenseProbabilities)
    probs = exact.probabilities.log_probs.exp()
    unigram = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) + 0.1
    unigram /= unigram.sum()
    top, ids = probs.topk(kept, dim=1)
    scale = (1 - top.sum(1)) / (1 - unigram[ids].sum(1))
    full = (scale[:, None] * unigram).scatter(1, ids, top)
    head = Entries(ids, top, torch.ones_like(ids, dtype=torch.bool))
    approximate = HeadAndTail(head, scale, unigram)
    log_p = full.gather(1, exact.tokens[:, None]).squeeze(1).log()
    return KeyedPosterior(exact.keys, exact.tokens, log_p, approximate), full


def sparse(num: int, vocab_size: int, kept: int) -> SparseNoise:
    arrivals, ids = dense_arrivals(KeyedPrior(make_keys(num), vocab_size)).topk(kept, largest=False)
    return SparseNoise(ids, arrivals, vocab_size, torch.ones(num))


def shifted(num: int, vocab_size: int) -> ShiftedNoise:
    exact = dense_posterior(num, vocab_size)
    ids = torch.arange(6).expand(num, 6) * 5
    used = ids % 3 != torch.arange(num)[:, None] % 3
    factors = Entries(ids, 1.0 + ids / 7, used)
    return ShiftedNoise(exact.keys, exact.tokens, exact.token_log_probs, factors, vocab_size)


def stored(num: int, vocab_size: int) -> StoredNoise:
    exact = dense_posterior(num, vocab_size)
    columns = (exact.gumbels().half(),)
    return StoredNoise(
        columns, lambda c, i, j: c[0][:, i:j].float(), exact.tokens, exact.token_gumbels, vocab_size
    )


NOISES: dict[str, Callable[[], Noise]] = {
    "dense": lambda: DenseNoise(torch.rand(40, 97)),
    "prior": lambda: KeyedPrior(make_keys(40), 97),
    "posterior": lambda: dense_posterior(40, 97),
    "head_and_tail": lambda: head_and_tail(40, 97, 9)[0],
    "sparse": lambda: sparse(40, 97, 13),
    "top_prior": lambda: TopPrior(make_keys(40), 97, 13),
    "shifted": lambda: shifted(40, 97),
    "stored": lambda: stored(40, 97),
}


@pytest.mark.parametrize("kind", NOISES)
def test_any_noise_reads_in_tiles_and_selections(kind: str) -> None:
    noise = NOISES[kind]()
    assert isinstance(noise, Noise)
    whole = dense_arrivals(noise)
    assert whole.shape == (noise.num_positions, noise.vocab_size) and whole.dtype == torch.float32
    for width in (1, 7, 32, 97):
        parts = [noise.tile(i, min(i + width, 97)) for i in range(0, 97, width)]
        assert torch.equal(torch.cat(parts, dim=1), whole)
        parts = [noise.gumbels(i, min(i + width, 97)) for i in range(0, 97, width)]
        assert torch.equal(torch.cat(parts, dim=1), noise.gumbels())
    torch.testing.assert_close(noise.gumbels(), -whole.log(), rtol=1e-5, atol=1e-5)
    index = torch.tensor([3, 39, 0, 3])
    assert torch.equal(dense_arrivals(noise.select(index)), whole[index])
    mask = torch.arange(40) % 3 == 0
    assert torch.equal(dense_arrivals(noise.select(mask).to("cpu")), whole[mask])
    assert torch.equal(dense_arrivals(noise.select(slice(5, 9))), whole[5:9])
    assert dense_arrivals(noise.select(torch.zeros(40, dtype=torch.bool))).shape == (0, 97)


SOME = torch.arange(40) % 3 == 0
POSTERIORS = ("posterior", "head_and_tail")


@pytest.mark.parametrize("kind", POSTERIORS)
def test_positions_that_are_prior_have_its_entries_and_all_else_stays(kind: str) -> None:
    """F_j = E_j bit for bit, F_x = E_0; at the other positions nothing changes."""
    posterior = NOISES[kind]()
    assert isinstance(posterior, KeyedPosterior)
    noise = replace(posterior, is_prior=SOME)
    found, keys = dense_arrivals(noise), make_keys(40)
    assert torch.equal(found[~SOME], dense_arrivals(posterior)[~SOME])
    prior, first = dense_arrivals(KeyedPrior(keys, 97)), keys.first_arrivals()
    is_own = torch.arange(97) == posterior.tokens[:, None]
    assert torch.equal(found[SOME][~is_own[SOME]], prior[SOME][~is_own[SOME]])
    torch.testing.assert_close(found[is_own][SOME], first[SOME], rtol=1e-5, atol=0)
    index = torch.tensor([3, 39, 0, 4])
    assert torch.equal(dense_arrivals(noise.select(index)), found[index])
    assert torch.equal(torch.cat([dense_arrivals(part) for part in noise.split(7)]), found)
    weight = torch.randn(97, 5, generator=torch.Generator().manual_seed(0))
    expected = (1.3 * noise.gumbels()).softmax(-1) @ weight
    embedded = noise.softmax_embed(weight, Weighting(tau=1.3))
    torch.testing.assert_close(embedded, expected, rtol=1e-4, atol=1e-5)


def test_a_token_at_a_prior_position_is_as_good_as_unknown() -> None:
    """Its own F is Exp(1) however unlikely it was, and it wins the race as often as any id."""
    n, vocab_size = 20_000, 8
    log_probs = torch.full((n, vocab_size), math.log(1e-3 / (vocab_size - 1)))
    log_probs[:, 0] = math.log1p(-1e-3)
    everywhere, tokens = torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.int64)
    source = DenseProbabilities(log_probs)
    noise = KeyedPosterior(make_keys(n), tokens, log_probs[:, 1], source, everywhere)
    arrivals = dense_arrivals(noise).double()
    assert kstest(arrivals[:, 1].numpy(), "expon").pvalue > 1e-6
    wins, share = int((arrivals.argmin(dim=1) == 1).sum()), 1 / vocab_size
    assert abs(wins - n * share) < 5 * math.sqrt(n * share * (1 - share))


@pytest.mark.parametrize("width", [7, 20, 40, 64])
@pytest.mark.parametrize("kind", [*NOISES, "wide head_and_tail", "wide shifted"])
def test_parts_of_consecutive_positions_read_like_the_whole(kind: str, width: int) -> None:
    """Also where the entries of many tiles are counted at once, and between such tiles."""
    wide = {
        "wide head_and_tail": lambda: head_and_tail(40, 1300, 9)[0],
        "wide shifted": lambda: shifted(40, 1300),
    }
    noise = (NOISES | wide)[kind]()
    whole = dense_arrivals(noise)
    parts = noise.split(width)
    sizes = [min(width, 40 - i) for i in range(0, 40, width)]
    assert [part.num_positions for part in parts] == sizes
    for first, last in ((0, 512), (512, 1024), (1024, 1300), (1024, 1100), (0, 1300), (30, 700)):
        start, stop = min(first, noise.vocab_size - 1), min(last, noise.vocab_size)
        read = torch.cat([part.tile(start, stop) for part in parts])
        assert torch.equal(read, whole[:, start:stop])


def assert_as_defined(keys: PositionKeys, start: int, stop: int) -> None:
    expected = exponential_from_bits(keyed_bits(keys, start, stop))
    assert torch.equal(keyed_exponentials(keys, start, stop), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 90), (5, 5), (50251, 50257)])
@pytest.mark.parametrize("num", [0, 1, 300])
def test_fast_exponentials_equal_the_plain_formula(num: int, start: int, stop: int) -> None:
    assert_as_defined(make_keys(num, seed=(1 << 63) - 5, draw=7), start, stop)


@pytest.mark.parametrize("elements", [1, 130, 1 << 20])
def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(philox, "BLOCK_ELEMENTS", elements)
    assert_as_defined(make_keys(50), 0, 200)


def test_head_and_tail_uses_its_own_distribution() -> None:
    noise, full = head_and_tail(200, 97, 9)
    torch.testing.assert_close(full.sum(1), torch.ones(200))
    torch.testing.assert_close(noise.probabilities.tile(0, 97), full)
    exact = KeyedPosterior(
        noise.keys, noise.tokens, noise.token_log_probs, DenseProbabilities(full.log())
    )
    torch.testing.assert_close(dense_arrivals(noise), dense_arrivals(exact), rtol=1e-5, atol=1e-8)


def test_unused_slots_leave_the_tail_alone() -> None:
    ids, probs = torch.tensor([[2, 0], [1, 0]]), torch.tensor([[0.5, 9.0], [0.5, 0.25]])
    head = Entries(ids, probs, torch.tensor([[True, False], [True, True]]))
    source = HeadAndTail(head, torch.tensor([1.0, 0.5]), torch.tensor([0.25, 0.25, 0.5]))
    expected = torch.tensor([[0.25, 0.25, 0.5], [0.25, 0.5, 0.25]])
    torch.testing.assert_close(source.tile(0, 3), expected)


def test_posterior_moves_the_prior_only_later() -> None:
    """F_j >= E_j off the token: an entry the posterior does not touch keeps the prior's value."""
    noise = dense_posterior(500, 60)
    prior, moved = dense_arrivals(KeyedPrior(noise.keys, 60)), dense_arrivals(noise)
    off_token = torch.ones_like(moved, dtype=torch.bool).scatter(1, noise.tokens[:, None], False)
    assert bool((moved >= prior)[off_token].all())


def test_draws_are_fresh_and_standard() -> None:
    """Tokens from p: over positions and draws each entry is a standard Gumbel."""
    num, p = 40_000, torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    tokens = torch.multinomial(p, num, True, generator=torch.Generator().manual_seed(2))
    source = DenseProbabilities(p.log().expand(num, 5))
    gumbels = []
    for draw in (1, 2):
        noise = KeyedPosterior(make_keys(num, draw=draw), tokens, p.log()[tokens], source)
        gumbels.append(noise.gumbels().double())
        for entry in range(5):
            assert kstest(gumbels[-1][:, entry].numpy(), "gumbel_r").pvalue > 1e-4
    off_token = tokens != 0
    pair = torch.stack([draws[off_token, 0] for draws in gumbels]).neg().exp().neg().exp()
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.5 / math.sqrt(int(off_token.sum()))


def test_extreme_tokens_stay_finite() -> None:
    log_probs = torch.tensor([[0.0, -150.0]])
    noise = KeyedPosterior(
        make_keys(1), torch.tensor([1]), torch.tensor([-150.0]), DenseProbabilities(log_probs)
    )
    rates = dense_arrivals(noise).reciprocal()
    assert bool(torch.isfinite(rates.sum(1)).all()) and float(rates[0, 1]) > 1e30
    torch.testing.assert_close(noise.token_gumbels, 150 - make_keys(1).first_arrivals().log())


def test_keyed_prior_is_exponential_and_uncorrelated() -> None:
    arrivals = dense_arrivals(KeyedPrior(make_keys(2000), 128)).double()
    assert kstest(arrivals.flatten().numpy(), "expon").pvalue > 1e-4
    u = (-arrivals).exp()
    for one, other in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4.5 / math.sqrt(u.numel())


@pytest.fixture(scope="module")
def compiled_noise() -> Iterator[None]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the compiler of PyTorch writes no code for its plainest kernels")
    use_noise_kernel("compiled")
    yield
    use_noise_kernel("eager")


@pytest.mark.parametrize(("num", "start", "stop"), [(300, 3, 90), (2, 0, 50257), (64, 6, 2055)])
def test_the_compiled_kernel_gives_the_same_bits(
    compiled_noise: None, num: int, start: int, stop: int
) -> None:
    assert noise_kernel() == "compiled"
    assert_as_defined(make_keys(num, seed=99, draw=3), start, stop)


def broken(*arguments: object, **options: object) -> object:
    raise RuntimeError("no compiler")


def test_kernels_are_chosen_by_name_and_a_failure_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="noise kernel"):
        use_noise_kernel("fast")
    before = noise_kernel()
    monkeypatch.setattr(torch, "compile", lambda *a, **k: broken)
    with pytest.raises(GdistillError, match="no compiler"):
        use_noise_kernel("compiled")
    assert noise_kernel() == before


def test_auto_compiles_on_cuda_alone_and_tells_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def fails(device: torch.device) -> None:
        calls.append(device)
        raise GdistillError("cannot compile the noise kernel", got="no Triton")

    monkeypatch.setattr("shards.noise.philox._compile", fails)
    monkeypatch.setattr(philox, "_compiled", {})
    assert use_noise_kernel("auto", "cpu") == "" and not calls
    assert "no Triton" in use_noise_kernel("auto", "cuda") and calls == [torch.device("cuda")]
    assert noise_kernel() == "eager"


def test_a_form_that_is_compiled_wrongly_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PyTorch 2.13 does under AVX2: numbers of the first form are wrong, of the second right."""
    tried: list[str] = []

    def compiled(work: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        tried.append(work.__name__)
        wrong = work.__name__ == "_by_lane"
        return lambda *words: -work(*words) if wrong else work(*words)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(philox, "_compiled", {})
    use_noise_kernel("compiled")
    try:
        assert_as_defined(make_keys(5, seed=1), 0, 40)
    finally:
        use_noise_kernel("eager")
    assert tried == ["_by_lane", "_all_lanes"]


@pytest.mark.parametrize(
    ("ulps", "most", "fits"), [(0, 0, True), (1, 0, False), (2, 2, True), (3, 2, False)]
)
def test_a_compiled_kernel_may_differ_as_far_as_its_device_allows(
    monkeypatch: pytest.MonkeyPatch, ulps: int, most: int, fits: bool
) -> None:
    """Not at all on a CPU, whose results are reproduced bit for bit."""

    def compiled(work: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        def run(*words: Tensor) -> Tensor:
            found = work(*words)
            found.view(torch.int32)[3, 5, 1] += ulps
            return found

        return run

    assert compiled_module.LARGEST_ULPS == {"cpu": 0, "cuda": 2}
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(philox, "_compiled", {})
    monkeypatch.setitem(compiled_module.LARGEST_ULPS, "cpu", most)
    obstacle = ""
    try:
        use_noise_kernel("compiled", "cpu")
    except GdistillError as error:
        obstacle = str(error)
    assert noise_kernel("cpu") == ("compiled" if fits else "eager")
    assert noise_kernel("cuda") == "eager", "another device keeps its own kernel"
    assert fits or f"{ulps} units" in obstacle


def test_a_kind_without_its_own_part_cannot_be_made() -> None:
    class Half(TokenNoise):
        pass

    with pytest.raises(TypeError, match="other_arrivals"):
        Half()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="num_positions"):
        OfPositions()  # type: ignore[abstract]


def test_one_graph_serves_every_size_and_gradient_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(philox, "_compiled", {})
    before = counters["stats"]["unique_graphs"]
    use_noise_kernel("compiled")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for num in (2, 40):
            with mode():
                keys = make_keys(num, seed=99)
                found = keyed_exponentials(keys, 5, 9000)
                expected = exponential_from_bits(keyed_bits(keys, 5, 9000))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert counters["stats"]["unique_graphs"] == before + 1
