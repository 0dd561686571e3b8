"""Readings of the noise that look at the K likeliest entries of each position alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conditioner import keyed_noise
from benchmarks.goldens import ArrivalRows
from shards.errors import UsageError
from shards.noise import embedding as noise_embedding
from shards.settings import resolve, to_mapping
from shards.testing import DenseNoise
from tests.trainer.sampling_cases import tiny_student
from tests.trainer.students.test_vocabulary_attention import (
    LENGTH,
    READING,
    VOCAB,
    make_batch,
    make_student,
)
from trainer.loading import generate
from trainer.students import noise_attention as vocabulary_attention
from trainer.students.noise_attention import (
    NoiseToRead,
    VocabularyAttention,
    likeliest_entries,
    mix_rows,
    noise_scores,
    pack_noise,
    row_products,
)
from trainer.students.registry import BD3LM, MDLM, StudentSettings

CPU = torch.device("cpu")


def gradients(student: MDLM, batch: Any) -> dict[str, Tensor]:
    student.zero_grad()
    student.loss(batch).loss.backward()
    return {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [MDLM, BD3LM])
def test_all_candidates_are_the_whole_vocabulary(kind: type[MDLM]) -> None:
    """Loss and gradients to the rounding of sums over V = 7 and D = 16, in two layers."""
    changes = {"block_size": 4} if kind is BD3LM else {}
    whole, among = (make_student(kind, noise={"top_k": n}, **changes) for n in (0, VOCAB))
    batch = make_batch()
    losses = [student.loss(batch).loss for student in (whole, among)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    expected, found = gradients(whole, batch), gradients(among, batch)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        room = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=room, msg=name)


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
    monkeypatch.setitem(noise_embedding.TILES, "cpu", (8, 5))
    monkeypatch.setattr(vocabulary_attention, "FEWEST_POSITIONS", 3)
    noise, prior = keyed_noise(17, 60, CPU), torch.linspace(0, -9, 60)
    ids, scores = likeliest_entries(noise, 9, tau, prior)
    every = noise_scores(noise, tau, prior)
    torch.testing.assert_close(every.gather(1, ids), scores)
    assert all(len(set(row)) == 9 for row in ids.tolist())
    others = every.scatter(1, ids, -math.inf)
    assert bool((others.max(1).values <= scores.min(1).values).all())
    none, _ = likeliest_entries(noise.select(slice(0, 0)), 9, tau, prior)
    assert none.shape == (0, 9)


def reading_of(shape: tuple[int, int]) -> tuple[VocabularyAttention, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    vocab_size, width = shape
    reading = VocabularyAttention(vocab_size, width)
    reading.reset_parameters()
    head = torch.randn(vocab_size + 1, width, generator=generator)
    return reading, head, torch.randn(2, 5, width, generator=generator)


@pytest.mark.parametrize("count", [2, 8, 32])
def test_what_is_left_out_bounds_the_difference(count: int) -> None:
    """With a share e of the softmax outside, a mixture moves by at most 2 e max |W|."""
    reading, head, x = reading_of((60, 8))
    noise = keyed_noise(10, 60, CPU)
    whole, among = (
        NoiseToRead.unpack(pack_noise(noise, 1.0, 0.0, n).unflatten(0, (2, 5)), n)
        for n in (0, count)
    )
    query = torch.nn.functional.layer_norm(x.flatten(0, 1), (8,))
    shares = torch.softmax(2 * (query @ head[:-1].T + whole.scores), dim=-1)
    assert among.ids is not None
    outside = 1 - shares.gather(1, among.ids.long()).sum(1)
    apart = (reading(x, whole, head) - reading(x, among, head)).flatten(0, 1).abs().amax(1)
    room = 2 * outside.clamp_min(0) * reading.weight.abs().max() + 1e-5
    assert bool((apart <= room).all())
    assert float(outside.max()) > 0.01 or count == 32, "the case must leave something out"


@pytest.mark.parametrize("count", [0, 5])
def test_entries_cut_off_are_not_read(count: int) -> None:
    """Two finite entries of seven: as if the vocabulary were these, and every gradient is a
    number."""
    batch = make_batch()
    assert isinstance(batch.noise, ArrivalRows)
    kept = torch.zeros(3, LENGTH, VOCAB, dtype=torch.bool)
    kept[..., 2] = kept[..., 5] = True
    cut = ArrivalRows(batch.noise.arrivals.masked_fill(~kept, math.inf))
    batch = dataclasses.replace(batch, noise=cut)
    few, some = (make_student(MDLM, noise={"top_k": n}) for n in (2, count))
    losses = [student.loss(batch).loss for student in (few, some)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    expected, found = gradients(few, batch), gradients(some, batch)
    for name, gradient in found.items():
        assert bool(gradient.isfinite().all()), name
        room = 1e-4 * float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=room, msg=name)
    for depth in ("1", "2"):
        unread = found[f"backbone.noise_readings.{depth}.weight"][[0, 1, 3, 4, 6]]
        assert not bool(unread.any())


def test_equal_scores_are_read_alike() -> None:
    """All V entries tie: K different ones of them are read, in equal shares."""
    reading, head, x = reading_of((12, 8))
    noise = DenseNoise(torch.full((10, 12), 0.5))
    packed = pack_noise(noise, 1.0, 0.0, 4).unflatten(0, (2, 5))
    found = NoiseToRead.unpack(packed, 4)
    assert found.ids is not None and all(len(set(row)) == 4 for row in found.ids.tolist())
    assert not bool(found.scores.any())
    read = reading(x, found, torch.zeros_like(head)) - x
    expected = reading.weight[found.ids.long()].mean(1).unflatten(0, (2, 5))
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


def test_ids_survive_narrow_embeddings() -> None:
    """All of the largest vocabulary's ids, beside bfloat16 embeddings, under autocast."""
    vocab_size = 50257
    arrivals = 1.0 + torch.arange(vocab_size).remainder(97)[None].repeat(2, 1)
    wanted = torch.tensor([[50256, 40961, 257], [32769, 4097, 50255]])
    arrivals.scatter_(1, wanted, 1e-3)
    student = make_student(MDLM, noise={"top_k": 3})
    noise = torch.cat((torch.zeros(2, 16), pack_noise(DenseNoise(arrivals), 1.0, 0.0, 3)), dim=1)
    masked = torch.tensor([[False, True, False, True]])
    laid = torch.zeros(1, 4, noise.shape[1]).index_put((masked.nonzero(as_tuple=True)), noise)
    narrow = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for packed in (student.inject(narrow, masked, noise), student.blend(narrow, masked, laid)):
            found = NoiseToRead.unpack(packed[..., 16:], 3)
            assert found.ids is not None and found.index[1].tolist() == [1, 3]
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
    monkeypatch.setitem(noise_embedding.TILES, "cpu", (32, 50))
    monkeypatch.setattr(vocabulary_attention, "FEWEST_POSITIONS", 8)
    num, vocab_size, count, width = 300, 500, 8, 16
    reading, head, _ = reading_of((vocab_size, width))
    x = torch.randn(1, num, width, requires_grad=True)
    with Largest() as largest:
        packed = pack_noise(keyed_noise(num, vocab_size, CPU), 1.0, 0.0, count)[None]
        reading(x, NoiseToRead.unpack(packed, count), head.requires_grad_()).sum().backward()
    assert x.grad is not None and head.grad is not None
    assert largest.elements < min(num * vocab_size, num * count * width)


SAMPLERS = [
    ("mdlm", {"sampler": "ancestral", "nfe": 3}),
    ("mdlm", {"sampler": "first-hitting"}),
    ("bd3lm", {"sampler": "block", "nfe": 6}),
]


@pytest.mark.parametrize(("kind", "settings"), SAMPLERS)
def test_samples_are_those_of_the_whole_vocabulary(kind: str, settings: dict[str, Any]) -> None:
    """With all V as candidates; nothing here is nearer to a tie than sums are rounded."""
    block_size = 4 if kind == "bd3lm" else None
    samples = []
    for count in (0, 11):
        student = tiny_student(
            kind, block_size=block_size, noise={"layers": (1, 2), "top_k": count}
        )
        samples.append(generate(student, num_samples=3, seed=4, **settings))
    assert torch.equal(samples[0], samples[1])


@pytest.mark.parametrize(
    ("changes", "got"),
    [({"top_k": -1}, "-1"), ({"layers": (), "top_k": 2}, "2")],
)
def test_counts_that_mean_nothing(changes: dict[str, Any], got: str) -> None:
    with pytest.raises(UsageError, match=f"noise.top_k.*got {got}"):
        resolve(StudentSettings, to_mapping(READING), {"noise": changes})


def test_more_candidates_than_entries() -> None:
    with pytest.raises(UsageError, match=r"noise.top_k.*at most V = 7"):
        make_student(MDLM, noise={"top_k": VOCAB + 1})


def test_operations_by_hand() -> None:
    """Two readings of 3 entries of D = 16 cost 2 * 12 * 16 * 3 a masked position; of all, of 7."""
    none, few, whole = (
        make_student(MDLM, noise=changes).flops_per_masked
        for changes in ({"layers": ()}, {"top_k": 3}, {})
    )
    assert few - none == 2 * 12 * 16 * 3
    assert whole - none == 2 * 12 * 16 * 7
