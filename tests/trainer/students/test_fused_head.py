"""The fused head against logits, log-softmax and gather."""

from __future__ import annotations

import pytest
import torch

from shards.noise.gumbel import DenseProbabilities
from trainer.objective.distillation import Distillation
from trainer.students import fused_head
from trainer.students.fused_head import weighted_nll

ROWS, WIDTH, VOCAB = 23, 8, 17


@pytest.fixture(autouse=True, params=[1, 8])
def small_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Several chunks; products of 18 columns, and of 24."""
    monkeypatch.setattr(fused_head, "CHUNK_ROWS", {"cpu": 5, "cuda": 5})
    monkeypatch.setattr(fused_head, "HEAD_MULTIPLE", {"cpu": request.param, "cuda": 64})


def inputs(num_rows: int = ROWS) -> tuple:
    torch.manual_seed(0)
    projection = torch.nn.Linear(WIDTH, VOCAB + 1)
    features = torch.randn(num_rows, WIDTH, requires_grad=True)
    targets = torch.randint(VOCAB, (num_rows,))
    return features, projection, targets, torch.rand(num_rows)


def plain(features, projection, targets, weights, distillation=None) -> tuple:
    logits = projection(features)
    logits = torch.cat((logits[:, :VOCAB], logits[:, VOCAB:] - 1e6), dim=1)
    log_probs = torch.log_softmax(logits, dim=-1)
    losses = nlls = -log_probs.gather(-1, targets[:, None])[:, 0]
    if distillation is not None:
        losses = distillation.losses(log_probs, targets, slice(None))
    return (losses * weights).sum(), nlls


@pytest.mark.parametrize(("has_teacher", "rtol"), [(False, 1e-5), (True, 1e-4)])
def test_loss_and_gradients_are_the_plain_ones(has_teacher: bool, rtol: float) -> None:
    given = inputs()
    features, projection = given[:2]
    teacher = DenseProbabilities(torch.randn(ROWS, VOCAB).log_softmax(-1))
    kd = Distillation(teacher, weight=0.6, temperature=1.5) if has_teacher else None
    results = []
    for loss, nlls in (plain(*given, kd), weighted_nll(*given, VOCAB, kd)):
        tensors = (features, projection.weight, projection.bias)
        gradients = torch.autograd.grad(3 * loss, tensors)
        results.append((loss.detach(), nlls.detach(), *gradients))
    for reference, ours in zip(*results, strict=True):
        assert torch.allclose(ours, reference, rtol=rtol, atol=1e-6)


def test_no_gradient_is_computed_when_none_is_wanted() -> None:
    given = inputs()
    with torch.no_grad():
        loss, nlls = weighted_nll(*given, VOCAB)
    assert not loss.requires_grad
    assert torch.allclose(nlls, plain(*given)[1], atol=1e-6)


def test_no_rows() -> None:
    features, projection, targets, weights = inputs(0)
    loss, _ = weighted_nll(features, projection, targets, weights, VOCAB)
    loss.backward()
    assert loss.item() == 0
    assert (projection.weight.grad == 0).all()


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    given = inputs()
    exact, _ = plain(*given)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = weighted_nll(*given, VOCAB)
    loss.backward()
    assert loss.dtype == torch.float32
    assert 0 < abs(loss.item() / exact.item() - 1) < 1e-2
    assert given[1].weight.grad.dtype == torch.float32


def test_a_chunk_of_logits_stays_within_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a GPU likes, but for a vocabulary of a million."""
    monkeypatch.setattr(fused_head, "CHUNK_ROWS", {"cpu": 512, "cuda": 4096})
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert fused_head.chunk_rows(gpu, 151_936, False) == 4096
    assert fused_head.chunk_rows(gpu, 151_936, True) == 1024
    rows = fused_head.chunk_rows(gpu, 1_000_000, False)
    assert rows * 1_000_000 < 2**31 <= (rows + 1) * 1_000_000
    assert fused_head.chunk_rows(cpu, 10_000_000, False) == 512
