"""How students read noise: embedded once, and again by attention inside the network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conditioner import keyed_noise
from benchmarks.dense_noise import DenseNoise
from benchmarks.goldens import ArrivalRows, denoise
from shards.errors import UsageError
from shards.noise import embedding
from shards.noise.embedding import Transform, dense_arrivals
from shards.noise.gumbel import KeyedPrior
from shards.noise.order_statistics import SparseNoise
from shards.noise.philox import PositionKeys
from tests.trainer.sampling_cases import Largest, tiny_student
from tests.trainer.students.student_cases import BLOCK, LENGTH, VOCAB, make_batch, make_student, row_noise
from trainer.objective.batch import Places
from trainer.students import noise_attention
from trainer.students.conditioning import EmbeddedNoise, GumbelConditioner, LayerNoise
from trainer.students.configuration import NoiseSettings
from trainer.students.noise_attention import VocabularyAttention, layer_scores
from trainer.students.registry import BD3LM, MDLM

SIZE, WIDTH, NUM = 300, 12, 37
CPU = torch.device("cpu")
TRANSFORMS = pytest.mark.parametrize("transform", ["gumbel", "gaussian", "uniform"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and chunks, none of them dividing evenly."""
    monkeypatch.setattr(embedding, "TILES", {"cpu": (16, 64), "cuda": (16, 64)})


def arrivals(num: int = NUM, vocab: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return -torch.log1p(-torch.rand(num, vocab, generator=generator).clamp(1e-7, 1 - 1e-7))


def make(transform: Transform = "gumbel", prior_weight: float = 0.0) -> GumbelConditioner:
    torch.manual_seed(1)
    made = GumbelConditioner(SIZE, WIDTH, NoiseSettings(transform=transform, prior_weight=prior_weight))
    torch.nn.init.normal_(made.weight)
    return made


def transformed(xi: Tensor, transform: str) -> Tensor:
    cdf = torch.exp(-torch.exp(-xi.double()))
    table = {"gumbel": xi.double(), "uniform": cdf, "gaussian": torch.special.ndtri(cdf)}
    return table[transform]


@TRANSFORMS
@pytest.mark.parametrize("tau", [1.0, 0.85, 1.3])
@pytest.mark.parametrize("prior_weight", [0.0, 0.4, 1.0])
def test_equals_dense_softmax(transform: Transform, tau: float, prior_weight: float) -> None:
    """Noise that is held, and noise that is drawn again in the backward pass."""
    keys = PositionKeys(5, torch.arange(NUM), torch.arange(NUM) % 7, draw=3)
    unigram, upstream = torch.log_softmax(3 * torch.randn(SIZE), dim=0), torch.randn(NUM, WIDTH)
    for noise in (DenseNoise(arrivals()), KeyedPrior(keys, SIZE)):
        conditioner = make(transform, prior_weight)
        if prior_weight:
            conditioner.set_unigram(unigram)
        weight = conditioner.weight.detach().double().requires_grad_()
        scores = tau * transformed(-dense_arrivals(noise).log(), transform) + prior_weight * unigram.double()
        dense = torch.softmax(scores, dim=-1) @ weight
        dense.backward(upstream.double())
        ours = conditioner(noise, tau)
        ours.backward(upstream)
        room = 1e-5 * float(dense.detach().abs().max())
        assert torch.allclose(ours.double(), dense, rtol=1e-5, atol=room)
        gap = (conditioner.weight.grad.double() - weight.grad).abs().max()
        assert gap <= 1e-5 * float(weight.grad.abs().max())


def test_sparse_rest_by_hand() -> None:
    """V = 4, two entries kept: rates 2 and 1, rest rate 3; q = (0.1, 0.2, 0.3, 0.4), w = 1.

    The two unknown rates are 1.5 each on average, under priors 0.3 and 0.4: the denominator is
    2 * 0.1 + 1 * 0.2 + 1.5 * 0.7 = 1.45.
    """
    conditioner = GumbelConditioner(4, 1, NoiseSettings(prior_weight=1.0))
    conditioner.weight.data = torch.tensor([[1.0], [10.0], [0.0], [0.0]])
    conditioner.set_unigram(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    kept, rest = torch.tensor([[0.5, 1.0]]), torch.tensor([3.0])
    noise = SparseNoise(torch.tensor([[0, 1]]), kept, 4, rest)
    assert conditioner(noise).item() == pytest.approx((0.2 * 1 + 0.2 * 10) / 1.45, rel=1e-5)


@TRANSFORMS
@pytest.mark.parametrize("num_known", [20, SIZE])
@pytest.mark.parametrize("tau", [0.5, 0.85, 1.0, 1.3])
@pytest.mark.parametrize("prior_weight", [0.0, 0.5, 2.0])
def test_sparse_noise_is_dense_noise_whose_rest_arrives_together(
    num_known: int, tau: float, transform: Transform, prior_weight: float
) -> None:
    """Equal arrival times and priors of the unknown entries: then nothing is approximated."""
    full, at = arrivals(), 2.5
    full[:, num_known:] = at
    ids = torch.arange(num_known).expand(NUM, num_known).contiguous()
    rest = torch.full((NUM,), (SIZE - num_known) / at)
    sparse = SparseNoise(ids, full[:, :num_known].contiguous(), SIZE, rest)
    unigram = torch.randn(SIZE, generator=torch.Generator().manual_seed(5))
    unigram[num_known:] = -1.0
    conditioner = make(transform, prior_weight)
    conditioner.set_unigram(unigram.log_softmax(0))
    conditioner.weight.data[num_known:] = 0.0  # their rows of W are not added
    results, upstream = [], torch.randn(NUM, WIDTH)
    for noise in (DenseNoise(full), sparse):
        embedded = conditioner(noise, tau)
        gradient = torch.autograd.grad(embedded, conditioner.weight, upstream)[0][:num_known]
        results.append((embedded, gradient))
    for dense, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5)


def test_first_weights_have_the_deviation_asked_for() -> None:
    """12 x 64 draws are off by 2.6%, by 13% never. A projection of noise is uniform over the vocabulary,
    as a new linear layer; the variance of n uniform draws has a deviation of sqrt(0.8 / n)."""
    for std in (0.02, 0.7, None):  # without one, uniform over the width
        embed = make_student(hidden_size=64, embedding_init_std=std).backbone.vocab_embed
        embed.reset_parameters()
        weights, bound = embed.embedding.detach(), 64**-0.5
        assert std is not None or float(weights.abs().max()) <= bound
        assert float(weights.std()) == pytest.approx(std or bound / 3**0.5, rel=0.13)
    for reader in (GumbelConditioner, VocabularyAttention):
        module = reader(900, 400)
        module.reset_parameters()
        weight = module.weight.detach()
        assert float(weight.abs().max()) <= 1 / 30 + 1e-7
        assert abs(float(weight.var()) * 3 * 900 - 1) < 5 * math.sqrt(0.8 / weight.numel())
        assert abs(float(weight.mean())) < 5 / 30 / (3 * weight.numel()) ** 0.5


def test_extreme_arrivals_stay_finite_and_no_position_costs_nothing() -> None:
    full = arrivals()
    full[0, 3] = 2.0**-126
    full[1, :] = torch.inf
    full[1, 5] = 1.0
    conditioner, before = make(), full.clone()
    for tau in (0.5, 1.0, 2.0):
        for kind in ("uniform", "gaussian", "gumbel"):
            assert make(kind)(DenseNoise(full), tau).isfinite().all()
    assert torch.equal(full, before), "rates leave the noise alone"
    out = conditioner(DenseNoise(full))
    assert torch.allclose(out[0], conditioner.weight[3])
    assert torch.allclose(out[1], conditioner.weight[5])
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
    with pytest.raises(UsageError, match=r"another vocabulary.*got 299; expected 300.*a store of its own teacher"):
        make()(DenseNoise(arrivals(vocab=299)))
    with pytest.raises(UsageError, match="unigram"):
        make(prior_weight=1.0)(DenseNoise(arrivals()))
    for unigram in (torch.zeros(3), torch.full((SIZE,), -math.inf)):
        with pytest.raises(UsageError, match=rf"unigram.*expected {SIZE} finite"):
            make(prior_weight=1.0).set_unigram(unigram)


@pytest.mark.parametrize("injection", ["replace", "add"])
@pytest.mark.parametrize("num_scores", [0, 5])
def test_embeddings_laid_out_like_rows_blend_as_listed(injection: str, num_scores: int) -> None:
    student = tiny_student(noise={"injection": injection})
    scores, masked = torch.randn(3, 12, num_scores), torch.rand(3, 12) < 0.5
    noise = EmbeddedNoise(torch.randn(3, 12, 16), scores, scores.int())
    tokens = torch.zeros(3, 12, dtype=torch.int64).masked_fill(masked, student.mask_id)
    embeddings = student.backbone.vocab_embed(tokens)
    listed, later = student.inject(embeddings, Places.of(masked), noise[masked])
    blended, found = student.embed(tokens, EmbeddedNoise.cat([noise[:1], noise[1:]]))
    assert torch.equal(blended, listed) and not torch.equal(listed, embeddings)
    assert torch.equal(found.scores, later.scores) and torch.equal(found.ids, later.ids)
    assert torch.equal(later.places.read(scores), later.scores)


def test_a_projection_of_low_rank_is_its_product() -> None:
    torch.manual_seed(1)
    narrow, noise = GumbelConditioner(SIZE, WIDTH, NoiseSettings(rank=3)), DenseNoise(arrivals())
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
    fresh = GumbelConditioner(SIZE, WIDTH, NoiseSettings(projection="tied"))
    assert torch.equal(fresh.map.weight, torch.eye(WIDTH))
    noise = DenseNoise(arrivals(vocab=vocab))
    table = student.backbone.vocab_embed.embedding
    mixed = torch.softmax(-noise.arrivals.log(), dim=1) @ table[:vocab]
    embedded = student.embed_noise(noise).embedding
    assert torch.allclose(embedded, mixed @ student.conditioner.map.weight.T, atol=1e-5)
    embedded.sum().backward()
    assert bool((table.grad[:vocab] != 0).any(dim=1).all())
    assert float(table.grad[vocab].abs().max()) == 0  # the mask is no token


# Attention: the noise read again inside the network.


def reader_of(kind: type[MDLM] = MDLM, top_k: int = 0, **changes: Any) -> Any:
    layers = {"layers": [1, 2], "top_k": top_k}
    return make_student(kind, std=0.3, **{"noise": layers, **changes})


def gradients(student: MDLM, batch: Any) -> dict[str, Tensor]:
    """Every parameter of every layer that reads noise has one."""
    student.zero_grad()
    student.loss(batch).loss.backward()
    for parameter in student.backbone.noise_readings.parameters():
        assert parameter.grad is not None and bool(parameter.grad.any())
    return {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


def assert_same_training(first: MDLM, second: MDLM, batch: Any) -> dict[str, Tensor]:
    """Loss and gradients to the rounding of their sums."""
    losses = [student.loss(batch).loss for student in (first, second)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    expected, found = gradients(first, batch), gradients(second, batch)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        room = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=room, msg=name)
    return found


@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_one_layer_by_hand(beta: float) -> None:
    """D = 2, V = 2, LN(h) = (1, -1): beta ((2, -2) + log (0.2, 0.8)) against W."""
    layer = VocabularyAttention(2, 2)
    layer.reset_parameters()
    assert float(layer.log_beta.exp()) == pytest.approx(2) and bool((layer.gamma == 1).all()), "as it begins"
    with torch.no_grad():
        layer.log_beta.fill_(math.log(beta))
        layer.gamma.copy_(torch.tensor([2.0, 1.0]))
        layer.weight.copy_(torch.eye(2))
    x = torch.tensor([[[5.0, -5.0], [3.0, 1.0]]])
    noise = LayerNoise(Places(*torch.tensor([[0], [0]])), torch.tensor([[0.2, 0.8]]).log())
    head = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [7.0, 7.0]])  # the mask's row is not read
    result = layer(x, noise, head)
    odds = (0.2 / 0.8 * math.exp(4)) ** beta
    first = odds / (1 + odds)
    assert torch.allclose(result[0, 0], torch.tensor([5 + first, -5 + 1 - first]), atol=1e-5)
    assert torch.equal(result[0, 1], x[0, 1])  # nothing is read at a known token


def test_without_head_it_is_the_conditioner() -> None:
    """Under a prior over the vocabulary too."""
    everywhere = torch.ones(4, LENGTH, dtype=torch.bool)
    student = reader_of(noise={"layers": [1], "prior_weight": 0.7})
    student.conditioner.set_unigram(torch.linspace(0, 3, VOCAB).log_softmax(0))
    layer = student.backbone.noise_readings["1"]
    with torch.no_grad():
        layer.weight.copy_(student.conditioner.weight)
        layer.log_beta.zero_()
    embedded = student.embed_noise(make_batch().noise.at(everywhere), 0.7)
    x, head = torch.zeros(4, LENGTH, 16), torch.zeros(VOCAB + 1, 16)
    read = layer(x, LayerNoise.of(embedded, Places.of(everywhere)), head)
    assert torch.allclose(read.flatten(0, 1), embedded.embedding, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 3])
def test_block_sampling_reads_as_training_does(top_k: int) -> None:
    """Behind a cache, over a window and in one training pass: the same log-probabilities."""
    student, batch = reader_of(BD3LM, top_k), make_batch(3)
    masked = torch.zeros(3, LENGTH, dtype=torch.bool)
    masked[:, BLOCK:] = True
    noised = batch.tokens.masked_fill(masked, student.mask_id)
    noise = row_noise(student, batch)
    trained = denoise(student, noised, batch.tokens, noise)[:, BLOCK:]
    trained[..., student.mask_id] -= 1e6
    expected = trained.log_softmax(-1).flatten(0, 1)
    here, cache = torch.ones(3, BLOCK, dtype=torch.bool), student.start_cache(3)
    known, block = batch.tokens[:, :BLOCK], noised[:, BLOCK:]
    cached = student.predict_after(known, block, here, noise[:, BLOCK:], cache)
    assert torch.allclose(student.predict_at(noised, masked, noise), expected, atol=1e-4)
    assert torch.allclose(cached, expected, atol=1e-4) and not cached.requires_grad
    part = torch.tensor([2, 0])  # again, of some rows alone
    given = (each[part] for each in (block[:, :0], block, here, noise[:, BLOCK:]))
    some = student.predict_after(*given, cache.select(part))
    assert torch.allclose(some, expected.unflatten(0, (3, BLOCK))[part].flatten(0, 1), atol=1e-4)


@pytest.mark.parametrize("kind", [MDLM, BD3LM])
def test_all_candidates_are_the_whole_vocabulary(kind: type[MDLM]) -> None:
    assert_same_training(reader_of(kind), reader_of(kind, VOCAB), make_batch())


@pytest.mark.parametrize("top_k", [0, 5])
def test_entries_cut_off_are_not_read(top_k: int) -> None:
    """Two finite entries: as if the vocabulary were these, and every gradient is a number."""
    batch, kept = make_batch(), [2, 5]
    cut = torch.full_like(batch.noise.arrivals, math.inf)
    cut[..., kept] = batch.noise.arrivals[..., kept]
    batch = dataclasses.replace(batch, noise=ArrivalRows(cut))
    found = assert_same_training(reader_of(top_k=2), reader_of(top_k=top_k), batch)
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    for depth in ("1", "2"):
        unread = found[f"backbone.noise_readings.{depth}.weight"].clone()
        unread[kept] = 0
        assert not bool(unread.any())


def test_products_and_mixtures_have_each_others_derivatives() -> None:
    """Numerically, in float64; an id that several positions name, and one named twice."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, (4, 3), generator=generator)
    ids[0] = torch.tensor([2, 4, 2])
    query, table, shares = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((4, 6), (5, 6), (4, 3))
    )
    found = noise_attention.row_products(query, table, ids)
    torch.testing.assert_close(found, torch.einsum("nd,nkd->nk", query, table[ids]))
    assert torch.autograd.gradcheck(lambda q, t: noise_attention.row_products(q, t, ids), (query, table))
    mixed = noise_attention.mix_rows(shares, table, ids)
    torch.testing.assert_close(mixed, torch.einsum("nk,nkd->nd", shares, table[ids]))
    with torch.inference_mode():
        torch.testing.assert_close(noise_attention.row_products(query, table, ids), found.detach())


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_candidates_are_the_largest_scores(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found a few positions at a time: no other entry scores more, and scores are the entries', the largest 0."""
    monkeypatch.setitem(embedding.TILES, "cpu", (8, 5))
    monkeypatch.setattr(noise_attention, "FEWEST_POSITIONS", 3)
    noise, prior = keyed_noise(17, 60, CPU), torch.linspace(0, -9, 60)
    every = prior - tau * dense_arrivals(noise).log()
    every -= every.amax(1, keepdim=True)
    torch.testing.assert_close(layer_scores(noise, tau, prior, 0)[0], every)
    scores, ids = layer_scores(noise, tau, prior, 9)
    torch.testing.assert_close(every.gather(1, ids.long()), scores)
    assert all(len(set(row)) == 9 for row in ids.tolist())
    others = every.scatter(1, ids.long(), -math.inf)
    assert bool((others.max(1).values <= scores.min(1).values).all())
    assert layer_scores(noise.select(slice(0, 0)), tau, prior, 9)[0].shape == (0, 9)


def test_ids_survive_narrow_embeddings() -> None:
    """All of the largest vocabulary's ids, beside bfloat16 embeddings, under autocast."""
    arrivals = 1.0 + torch.arange(50257).remainder(97)[None].repeat(2, 1)
    wanted = torch.tensor([[50256, 40961, 257], [32769, 4097, 50255]])
    arrivals.scatter_(1, wanted, 1e-3)
    student, masked = reader_of(top_k=3), torch.tensor([[False, True, False, True]])
    narrow = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        scores = layer_scores(DenseNoise(arrivals), 1.0, 0.0, 3)
        noise = EmbeddedNoise(torch.zeros(2, 16), *scores)
        laid = noise.laid_out(masked.nonzero(as_tuple=True), masked.shape)
        tokens = masked.int() * student.mask_id
        both = student.inject(narrow, Places.of(masked), noise), student.embed(tokens, laid)
    for _, found in both:
        assert found.places.positions.tolist() == [1, 3] and found.scores.dtype == torch.float32
        assert torch.equal(found.ids.sort().values, wanted.int().sort().values)


def test_neither_scores_nor_rows_are_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """n = 300, V = 500, D = 16, K = 8: nothing as large as [n, V], or as [n, K, D]."""
    monkeypatch.setitem(embedding.TILES, "cpu", (32, 50))
    monkeypatch.setattr(noise_attention, "FEWEST_POSITIONS", 8)
    layer, head, x = VocabularyAttention(500, 16), torch.randn(501, 16), torch.randn(1, 300, 16, requires_grad=True)
    layer.reset_parameters()
    with Largest() as largest:
        scores = layer_scores(keyed_noise(300, 500, CPU), 1.0, 0.0, 8)
        noise = LayerNoise(Places.of(torch.ones(1, 300, dtype=torch.bool)), *scores)
        layer(x, noise, head.requires_grad_()).sum().backward()
    assert x.grad is not None and head.grad is not None
    assert largest.elements < min(300 * 500, 300 * 8 * 16)
