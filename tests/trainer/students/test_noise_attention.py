"""Noise cross-attention: the noise read again inside the network, of all entries or of K."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conditioner import keyed_noise
from benchmarks.dense_noise import DenseNoise
from benchmarks.goldens import ArrivalRows
from shards.noise import embedding
from tests.trainer.sampling_cases import tiny_student
from tests.trainer.students.student_cases import BLOCK, LENGTH, VOCAB, make_batch, make_student
from trainer.loading import generate
from trainer.objective.batch import Places
from trainer.students import noise_attention
from trainer.students.conditioning import EmbeddedNoise, LayerNoise
from trainer.students.noise_attention import (
    VocabularyAttention,
    layer_scores,
    mix_rows,
    most_probable_entries,
    noise_scores,
    row_products,
)
from trainer.students.registry import BD3LM, MDLM

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", [MDLM, BD3LM])
TEN = Places.of(torch.ones(2, 5, dtype=torch.bool))


def reader_of(kind: type[MDLM] = MDLM, top_k: int = 0, **changes: Any) -> Any:
    layers = {"layers": [1, 2], "top_k": top_k}
    return make_student(kind, std=0.3, **{"noise": layers, **changes})


def gradients(student: MDLM, batch: Any) -> dict[str, Tensor]:
    student.zero_grad()
    student.loss(batch).loss.backward()
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
    student = reader_of()
    layer = student.backbone.noise_readings["1"]
    with torch.no_grad():
        layer.weight.copy_(student.conditioner.weight)
        layer.log_beta.zero_()
    everywhere = torch.ones(4, LENGTH, dtype=torch.bool)
    embedded = student.embed_noise(make_batch().noise.at(everywhere), 0.7)
    x, head = torch.zeros(4, LENGTH, 16), torch.zeros(VOCAB + 1, 16)
    read = layer(x, LayerNoise.of(embedded, Places.of(everywhere)), head)
    assert torch.allclose(read.flatten(0, 1), embedded.embedding, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 3])
def test_every_layer_takes_part(top_k: int) -> None:
    student = reader_of(top_k=top_k)
    student.loss(make_batch()).loss.backward()
    for parameter in student.backbone.noise_readings.parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)


@pytest.mark.parametrize("top_k", [0, 3])
def test_block_sampling_reads_as_training_does(top_k: int) -> None:
    """Behind a cache, over a window and in one training pass: the same log-probabilities."""
    student, batch = reader_of(BD3LM, top_k), make_batch(3)
    masked = torch.zeros(3, LENGTH, dtype=torch.bool)
    masked[:, BLOCK:] = True
    noised = batch.tokens.masked_fill(masked, student.mask_id)
    noise = student.embed_noise(batch.noise.at(torch.ones_like(masked)))
    noise = noise.unflatten((3, LENGTH)).map(torch.detach)
    trained = student.denoise(noised, batch.tokens, noise)[:, BLOCK:]
    trained[..., student.mask_id] -= 1e6
    expected = trained.log_softmax(-1).flatten(0, 1)
    here, cache = torch.ones(3, BLOCK, dtype=torch.bool), student.start_cache(3)
    known, block = batch.tokens[:, :BLOCK], noised[:, BLOCK:]
    cached = student.predict_after(known, block, here, noise[:, BLOCK:], cache)
    assert torch.allclose(student.predict_at(noised, masked, noise), expected, atol=1e-4)
    assert torch.allclose(cached, expected, atol=1e-4)


@KINDS
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
    found = row_products(query, table, ids)
    torch.testing.assert_close(found, torch.einsum("nd,nkd->nk", query, table[ids]))
    assert torch.autograd.gradcheck(lambda q, t: row_products(q, t, ids), (query, table))
    mixed = mix_rows(shares, table, ids)
    torch.testing.assert_close(mixed, torch.einsum("nk,nkd->nd", shares, table[ids]))
    with torch.inference_mode():
        torch.testing.assert_close(row_products(query, table, ids), found.detach())


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_candidates_are_the_largest_scores(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found a few positions at a time: no other entry scores more, and scores are the entries'."""
    monkeypatch.setitem(embedding.TILES, "cpu", (8, 5))
    monkeypatch.setattr(noise_attention, "FEWEST_POSITIONS", 3)
    noise, prior = keyed_noise(17, 60, CPU), torch.linspace(0, -9, 60)
    ids, scores = most_probable_entries(noise, 9, tau, prior)
    every = noise_scores(noise, tau, prior)
    torch.testing.assert_close(every.gather(1, ids), scores)
    assert all(len(set(row)) == 9 for row in ids.tolist())
    others = every.scatter(1, ids, -math.inf)
    assert bool((others.max(1).values <= scores.min(1).values).all())
    none, _ = most_probable_entries(noise.select(slice(0, 0)), 9, tau, prior)
    assert none.shape == (0, 9)


def layer_of(vocab_size: int, width: int) -> tuple[VocabularyAttention, Tensor, Tensor]:
    generator, layer = torch.Generator().manual_seed(2), VocabularyAttention(vocab_size, width)
    layer.reset_parameters()
    head = torch.randn(vocab_size + 1, width, generator=generator)
    return layer, head, torch.randn(2, 5, width, generator=generator)


@pytest.mark.parametrize("count", [2, 8, 32])
def test_what_is_left_out_bounds_the_difference(count: int) -> None:
    """With a share e of the softmax outside, a mixture moves by at most 2 e max |W|."""
    layer, head, x = layer_of(60, 8)
    noise = keyed_noise(10, 60, CPU)
    whole, among = (LayerNoise(TEN, *layer_scores(noise, 1.0, 0.0, n)) for n in (0, count))
    query = torch.nn.functional.layer_norm(x.flatten(0, 1), (8,))
    shares = torch.softmax(2 * (query @ head[:-1].T + whole.scores), dim=-1)
    assert among.ids is not None
    outside = 1 - shares.gather(1, among.ids.long()).sum(1)
    apart = (layer(x, whole, head) - layer(x, among, head)).flatten(0, 1).abs().amax(1)
    room = 2 * outside.clamp_min(0) * layer.weight.abs().max() + 1e-5
    assert bool((apart <= room).all())
    assert float(outside.max()) > 0.01 or count == 32, "the case must leave something out"


def test_equal_scores_are_read_alike() -> None:
    """All V entries tie: K different ones of them are read, in equal shares."""
    layer, head, x = layer_of(12, 8)
    found = LayerNoise(TEN, *layer_scores(DenseNoise(torch.full((10, 12), 0.5)), 1.0, 0.0, 4))
    assert found.ids is not None and all(len(set(row)) == 4 for row in found.ids.tolist())
    assert not bool(found.scores.any())
    read = layer(x, found, torch.zeros_like(head)) - x
    expected = layer.weight[found.ids.long()].mean(1).unflatten(0, (2, 5))
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


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
        both = (student.inject(narrow, masked, noise), student.blend(narrow, masked, laid))
    for _, found in both:
        assert found.places.positions.tolist() == [1, 3] and found.scores.dtype == torch.float32
        assert torch.equal(found.ids.sort().values, wanted.int().sort().values)


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_neither_scores_nor_rows_are_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """n = 300, V = 500, D = 16, K = 8: nothing as large as [n, V], or as [n, K, D]."""
    monkeypatch.setitem(embedding.TILES, "cpu", (32, 50))
    monkeypatch.setattr(noise_attention, "FEWEST_POSITIONS", 8)
    layer, head, _ = layer_of(500, 16)
    x = torch.randn(1, 300, 16, requires_grad=True)
    with Largest() as largest:
        scores = layer_scores(keyed_noise(300, 500, CPU), 1.0, 0.0, 8)
        noise = LayerNoise(Places.of(torch.ones(1, 300, dtype=torch.bool)), *scores)
        layer(x, noise, head.requires_grad_()).sum().backward()
    assert x.grad is not None and head.grad is not None
    assert largest.elements < min(300 * 500, 300 * 8 * 16)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mdlm", {"sampler": "ancestral", "nfe": 3}),
        ("mdlm", {"sampler": "first-hitting"}),
        ("bd3lm", {"sampler": "block", "nfe": 6}),
    ],
)
def test_samples_are_those_of_the_whole_vocabulary(kind: str, settings: dict[str, Any]) -> None:
    """With all V as candidates; nothing here is nearer to a tie than sums are rounded."""
    block, samples = 4 if kind == "bd3lm" else None, []
    for count in (0, 11):
        student = tiny_student(kind, block_size=block, noise={"layers": (1, 2), "top_k": count})
        samples.append(generate(student, num_samples=3, seed=4, **settings))
    assert torch.equal(samples[0], samples[1])


def test_operations_by_hand() -> None:
    """Two layers over 3 entries of D = 16 cost 2 * 12 * 16 * 3 a masked position; of all, of 11."""
    none = make_student(noise={"layers": []}).flops_per_masked
    assert reader_of(top_k=3).flops_per_masked - none == 2 * 12 * 16 * 3
    assert reader_of().flops_per_masked - none == 2 * 12 * 16 * VOCAB
