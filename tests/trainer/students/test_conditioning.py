"""The tiled conditioner against the dense softmax, for every kind of noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from shards.errors import UsageError
from shards.noise import embedding
from shards.noise.embedding import Transform
from shards.noise.kinds import KeyedPrior, dense_arrivals
from shards.noise.order_statistics import SparseNoise
from shards.noise.philox import PositionKeys
from tests.trainer.sampling_cases import LENGTH, tiny_student
from tests.trainer.students.student_cases import make_student
from trainer.students.conditioning import EmbeddedNoise, GumbelConditioner
from trainer.students.noise_attention import VocabularyAttention

VOCAB, WIDTH, NUM = 300, 12, 37


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and chunks, none of them dividing evenly."""
    monkeypatch.setattr(embedding, "TILES", {"cpu": (16, 64), "cuda": (16, 64)})


def arrivals(seed: int = 0, num: int = NUM, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.log1p(-torch.rand(num, vocab, generator=generator).clamp(1e-7, 1 - 1e-7))


def make(transform: Transform = "gumbel", prior_weight: float = 0.0) -> GumbelConditioner:
    torch.manual_seed(1)
    made = GumbelConditioner(VOCAB, WIDTH, transform, prior_weight)
    torch.nn.init.normal_(made.weight)
    return made


def transformed(xi: Tensor, transform: str) -> Tensor:
    cdf = torch.exp(-torch.exp(-xi.double()))
    table = {"gumbel": xi.double(), "uniform": cdf, "gaussian": torch.special.ndtri(cdf)}
    return table[transform]


@pytest.mark.parametrize("transform", ["gumbel", "gaussian", "uniform"])
@pytest.mark.parametrize("tau", [1.0, 0.85, 1.3])
@pytest.mark.parametrize("prior_weight", [0.0, 0.4, 1.0])
def test_equals_dense_softmax(transform: str, tau: float, prior_weight: float) -> None:
    conditioner, noise = make(transform, prior_weight), DenseNoise(arrivals())
    unigram = torch.log_softmax(3 * torch.randn(VOCAB), dim=0)
    if prior_weight:
        conditioner.set_unigram(unigram)
    weight = conditioner.weight.detach().double().requires_grad_()
    scores = tau * transformed(-noise.arrivals.log(), transform) + prior_weight * unigram.double()
    dense = torch.softmax(scores, dim=-1) @ weight
    upstream = torch.randn(NUM, WIDTH)
    dense.backward(upstream.double())
    ours = conditioner(noise, tau)
    ours.backward(upstream)
    assert torch.allclose(
        ours.double(), dense, rtol=1e-5, atol=1e-5 * float(dense.detach().abs().max())
    )
    scale = float(weight.grad.abs().max())
    gap = (conditioner.weight.grad.double() - weight.grad).abs().max()
    assert gap <= 1e-5 * scale


def test_by_hand() -> None:
    conditioner = GumbelConditioner(2, 1)
    conditioner.weight.data = torch.tensor([[1.0], [5.0]])
    # xi = (0, log 3): shares 1/4 and 3/4.
    noise = DenseNoise(torch.tensor([[1.0, 1 / 3]]))
    assert conditioner(noise).item() == pytest.approx(4.0)
    # tau = 2 squares the odds: 1/10 and 9/10.
    assert conditioner(noise, 2.0).item() == pytest.approx(4.6)


def test_keyed_noise_is_regenerated_in_backward() -> None:
    keys = PositionKeys(5, torch.arange(NUM), torch.arange(NUM) % 7, draw=3)
    keyed = KeyedPrior(keys, VOCAB)
    first, second = make(), make()
    upstream = torch.randn(NUM, WIDTH)
    for conditioner, noise in ((first, keyed), (second, DenseNoise(dense_arrivals(keyed)))):
        conditioner(noise).backward(upstream)
    torch.testing.assert_close(first.weight.grad, second.weight.grad, rtol=1e-5, atol=1e-6)


def sparse_of(full: Tensor, k: int) -> SparseNoise:
    kept = full.topk(k, largest=False)
    rest = full.reciprocal().sum(-1) - kept.values.reciprocal().sum(-1)
    return SparseNoise(kept.indices, kept.values, full.shape[1], rest)


@pytest.mark.parametrize("tau", [0.85, 1.0, 1.3])
@pytest.mark.parametrize("transform", ["gumbel", "gaussian", "uniform"])
def test_sparse_noise_with_every_entry_is_dense_noise(transform: str, tau: float) -> None:
    full, conditioner = arrivals(), make(transform)
    ids = torch.arange(VOCAB).expand(NUM, VOCAB).contiguous()
    sparse = SparseNoise(ids, full, VOCAB, torch.zeros(NUM))
    expected = conditioner(DenseNoise(full), tau)
    scale = float(expected.detach().abs().max())
    assert torch.allclose(conditioner(sparse, tau), expected, atol=1e-5 * scale)


def test_sparse_rest_by_hand() -> None:
    """V = 4, two entries kept: rates 2 and 1, rest rate 3; q = (0.1, 0.2, 0.3, 0.4), w = 1.

    The two unknown rates are 1.5 each on average, under priors 0.3 and 0.4: the denominator is
    2 * 0.1 + 1 * 0.2 + 1.5 * 0.7 = 1.45.
    """
    conditioner = GumbelConditioner(4, 1, prior_weight=1.0)
    conditioner.weight.data = torch.tensor([[1.0], [10.0], [0.0], [0.0]])
    conditioner.set_unigram(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    kept, rest = torch.tensor([[0.5, 1.0]]), torch.tensor([3.0])
    noise = SparseNoise(torch.tensor([[0, 1]]), kept, 4, rest)
    assert conditioner(noise).item() == pytest.approx((0.2 * 1 + 0.2 * 10) / 1.45, rel=1e-5)


def test_sparse_noise_keeps_the_denominator() -> None:
    full, conditioner = arrivals(), make()
    shares = full.reciprocal() / full.reciprocal().sum(-1, keepdim=True)
    sparse = sparse_of(full, 20)
    want = shares.gather(1, sparse.ids)
    expected = torch.einsum("nk,nkd->nd", want, conditioner.weight[sparse.ids])
    ours = conditioner(sparse)
    assert torch.allclose(ours, expected, atol=1e-5)
    upstream = torch.randn(NUM, WIDTH)
    expected.backward(upstream)
    dense_grad = conditioner.weight.grad.clone()
    conditioner.weight.grad = None
    conditioner(sparse).backward(upstream)
    assert torch.allclose(conditioner.weight.grad, dense_grad, atol=1e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("transform", ["gumbel", "gaussian", "uniform"])
@pytest.mark.parametrize("prior_weight", [0.0, 0.5, 2.0])
def test_sparse_noise_is_dense_noise_whose_rest_arrives_together(
    tau: float, transform: Transform, prior_weight: float
) -> None:
    """Equal arrival times and priors of the unknown entries: then nothing is approximated."""
    num_known, at = 20, 2.5
    full = arrivals()
    full[:, num_known:] = at
    ids = torch.arange(num_known).expand(NUM, num_known)
    rest = torch.full((NUM,), (VOCAB - num_known) / at)
    sparse = SparseNoise(ids, full[:, :num_known].contiguous(), VOCAB, rest)
    unigram = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    unigram[num_known:] = -1.0
    conditioner = make(transform, prior_weight)
    conditioner.set_unigram(unigram.log_softmax(0))
    conditioner.weight.data[num_known:] = 0.0  # their rows of W are not added
    torch.testing.assert_close(
        conditioner(sparse, tau), conditioner(DenseNoise(full), tau), rtol=1e-4, atol=1e-6
    )


def embedding_of(std: float | None) -> Tensor:
    student = make_student(hidden_size=64, embedding_init_std=std)
    student.backbone.vocab_embed.reset_parameters()
    return student.backbone.vocab_embed.embedding.detach()


@pytest.mark.parametrize("std", [0.02, 0.7, None])
def test_the_embedding_has_the_deviation_asked_for(std: float | None) -> None:
    """Without one it is uniform over the width. 12 x 64 draws are off by 2.6%, by 13% never."""
    weights, bound = embedding_of(std), 64**-0.5
    assert std is not None or float(weights.abs().max()) <= bound
    assert float(weights.std()) == pytest.approx(std or bound / 3**0.5, rel=0.13)


@pytest.mark.parametrize("reader", [GumbelConditioner, VocabularyAttention])
def test_a_projection_of_noise_is_uniform_over_the_vocabulary(reader: type) -> None:
    """As a new linear layer; the variance of n uniform draws has a deviation of sqrt(0.8 / n)."""
    module = reader(900, 400)
    module.reset_parameters()
    weight = module.weight.detach()
    assert float(weight.abs().max()) <= 1 / 30 + 1e-7
    assert abs(float(weight.var()) * 3 * 900 - 1) < 5 * math.sqrt(0.8 / weight.numel())
    assert abs(float(weight.mean())) < 5 / 30 / (3 * weight.numel()) ** 0.5


def test_a_uniform_unigram_changes_nothing() -> None:
    """Neither of kept entries nor of the rest."""
    plain, weighted = make(), make(prior_weight=1.0)
    weighted.set_unigram(torch.full((VOCAB,), -math.log(VOCAB)))
    for noise in (DenseNoise(arrivals()), sparse_of(arrivals(), 20)):
        assert torch.allclose(plain(noise), weighted(noise), atol=1e-5)


def test_extreme_arrivals_stay_finite() -> None:
    full = arrivals()
    full[0, 3] = 2.0**-126
    full[1, :] = torch.inf
    full[1, 5] = 1.0
    conditioner, before = make(), full.clone()
    for tau in (0.5, 1.0, 2.0):
        for kind in ("uniform", "gaussian", "gumbel"):
            conditioner.transform = kind
            assert conditioner(DenseNoise(full), tau).isfinite().all()
    assert torch.equal(full, before), "rates leave the noise alone"
    out = conditioner(DenseNoise(full))
    assert torch.allclose(out[0], conditioner.weight[3])
    assert torch.allclose(out[1], conditioner.weight[5])


def test_no_masked_position() -> None:
    conditioner = make()
    out = conditioner(DenseNoise(arrivals(num=0)))
    assert out.shape == (0, WIDTH)
    out.sum().backward()
    assert (conditioner.weight.grad == 0).all()


def test_autocast_keeps_float32_sums() -> None:
    conditioner, noise = make(), DenseNoise(arrivals())
    exact = conditioner(noise)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = conditioner(noise)
    rounded.sum().backward()
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 2e-2
    assert conditioner.weight.grad.dtype == torch.float32


def test_refusals() -> None:
    with pytest.raises(UsageError, match="another vocabulary"):
        make()(DenseNoise(arrivals(vocab=299)))
    with pytest.raises(UsageError, match="unigram"):
        make(prior_weight=1.0)(DenseNoise(arrivals()))
    with pytest.raises(UsageError, match="unigram"):
        make(prior_weight=1.0).set_unigram(torch.zeros(3))


@pytest.mark.parametrize("injection", ["replace", "add"])
@pytest.mark.parametrize("num_scores", [0, 5])
def test_embeddings_laid_out_like_the_row_blend_as_those_listed(
    injection: str, num_scores: int
) -> None:
    student = tiny_student(noise={"injection": injection})
    embeddings, scores = torch.randn(3, LENGTH, 8), torch.randn(3, LENGTH, num_scores)
    noise = EmbeddedNoise(torch.randn(3, LENGTH, 8), scores, scores.int())
    masked = torch.rand(3, LENGTH) < 0.5
    listed, later = student.inject(embeddings, masked, noise[masked])
    blended, found = student.blend(embeddings, masked, noise)
    assert torch.equal(blended, listed) and not torch.equal(listed, embeddings)
    assert torch.equal(found.scores, later.scores) and torch.equal(found.ids, later.ids)
    assert torch.equal(later.places.read(scores), later.scores)


def test_a_projection_of_low_rank_is_its_product() -> None:
    torch.manual_seed(1)
    narrow, noise = GumbelConditioner(VOCAB, WIDTH, rank=3), DenseNoise(arrivals())
    whole = make()
    whole.weight.data = narrow.weight.data @ narrow.map.weight.data.T
    assert torch.allclose(narrow(noise), whole(noise), atol=1e-6)
    upstream = torch.randn(NUM, WIDTH)
    narrow(noise).backward(upstream)
    whole(noise).backward(upstream)
    expected = whole.weight.grad @ narrow.map.weight.data
    assert torch.allclose(narrow.weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_tied_projection_reads_the_token_embedding_and_teaches_it() -> None:
    student = tiny_student("mdlm", "gumbel", noise={"projection": "tied"})
    vocab = student.config.vocab_size
    assert student.conditioner.weight is None
    fresh = GumbelConditioner(VOCAB, WIDTH, is_tied=True)
    assert torch.equal(fresh.map.weight, torch.eye(WIDTH))
    noise = DenseNoise(arrivals(vocab=vocab))
    table = student.backbone.vocab_embed.embedding
    mixed = torch.softmax(-noise.arrivals.log(), dim=1) @ table[:vocab]
    embedded = student.embed_noise(noise).embedding
    assert torch.allclose(embedded, mixed @ student.conditioner.map.weight.T, atol=1e-5)
    embedded.sum().backward()
    assert bool((table.grad[:vocab] != 0).any(dim=1).all())
    assert float(table.grad[vocab].abs().max()) == 0  # the mask is no token


@pytest.mark.parametrize(
    ("num", "most", "sizes"), [(37, 16, [13, 13, 11]), (17, 16, [9, 8]), (16, 16, [16]), (0, 4, [])]
)
def test_chunks_of_positions_are_even(
    monkeypatch: pytest.MonkeyPatch, num: int, most: int, sizes: list[int]
) -> None:
    """As few as can be, and no last one of a few positions."""
    monkeypatch.setattr(embedding, "TILES", dict.fromkeys(("cpu", "cuda"), (most, 64)))
    walk = embedding.Walk(DenseNoise(arrivals(num=num)), embedding.Weighting())
    chunks = walk.position_chunks()
    assert [rows.stop - rows.start for rows, _ in chunks] == sizes
    assert [part.noise.num_positions for _, part in chunks] == sizes
