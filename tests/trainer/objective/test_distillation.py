"""Distillation: token by token, by hand, by what must hold, against the dense KL; in whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.goldens import denoise
from shards.noise.gumbel import DenseProbabilities, Entries, HeadAndTail
from tests.trainer.run_cases import VOCAB as SMALL
from tests.trainer.run_cases import next_batch, student_of, teacher_logits, tiny_run, trainer_of, write_store
from trainer.objective.distillation import Distillation
from trainer.students.registry import BD3LM, MDLM
from trainer.training.loop import train

VOCAB = 23


def dense(num_rows: int = 40) -> torch.Tensor:
    torch.manual_seed(0)
    return (2 * torch.randn(num_rows, VOCAB)).log_softmax(-1)


def student_log_probs(num_rows: int = 40) -> torch.Tensor:
    """Over V tokens and the mask, as the head gives them."""
    torch.manual_seed(1)
    logits = functional.pad(torch.randn(num_rows, VOCAB), (0, 1), value=-1e6)
    return logits.log_softmax(-1).requires_grad_()


def listed(log_probs: torch.Tensor, num_entries: int, unigram: torch.Tensor) -> HeadAndTail:
    """The likeliest entries and the mass of the others; one slot more, left unused."""
    probs = log_probs.exp()
    values, ids = probs.topk(num_entries, dim=1)
    ids, values = functional.pad(ids, (0, 1)), functional.pad(values, (0, 1), value=0.7)
    used = torch.ones_like(ids, dtype=torch.bool)
    used[:, -1] = False
    known = torch.where(used, unigram[ids], 0.0).sum(1)
    rest = 1 - torch.where(used, values, 0.0).sum(1)
    return HeadAndTail(Entries(ids, values, used, VOCAB), rest / (1 - known), unigram)


UNIFORM = torch.full((VOCAB,), 1 / VOCAB)
TARGETS = torch.zeros(40, dtype=torch.int64)


def losses_of(teacher: Any, student: torch.Tensor, **settings: float) -> torch.Tensor:
    return Distillation(teacher, **settings).losses(student, TARGETS, slice(None))


def test_kl_of_a_listed_token_and_the_rest_by_hand() -> None:
    """Teacher: p = 1/2 for id 0, the other half is the rest. Student: 1/4, and 3/4 elsewhere."""
    head = Entries(torch.tensor([[0]]), torch.tensor([[0.5]]), torch.tensor([[True]]), 3)
    teacher = HeadAndTail(head, torch.tensor([0.5 / (2 / 3)]), torch.full((3,), 1 / 3))
    student = torch.tensor([[0.25, 0.6, 0.15, 1e-30]]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = Distillation(teacher).losses(student, torch.tensor([1]), slice(None))
    assert float(found) == pytest.approx(expected, rel=1e-5)
    mixed = Distillation(teacher, weight=0.25).losses(student, torch.tensor([1]), slice(None))
    assert float(mixed) == pytest.approx(0.75 * -math.log(0.6) + 0.25 * expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_a_dense_teacher_gives_the_dense_kl(temperature: float) -> None:
    teacher, student = dense(), student_log_probs()
    target = (teacher / temperature).log_softmax(-1)
    found = (student[:, :VOCAB] / temperature).log_softmax(-1)
    expected = functional.kl_div(found, target, reduction="none", log_target=True).sum(1)
    losses = losses_of(DenseProbabilities(teacher), student, temperature=temperature)
    torch.testing.assert_close(losses, temperature**2 * expected, rtol=1e-4, atol=1e-6)


def test_nothing_is_lost_where_the_rest_is_one_token_or_none() -> None:
    """What rounding leaves over when every token is listed is no token, and costs nothing."""
    teacher, student = dense(), student_log_probs()
    whole = losses_of(DenseProbabilities(teacher), student)
    used = torch.ones_like(teacher, dtype=torch.bool)
    entries = Entries(torch.arange(VOCAB).expand(40, -1), teacher.exp(), used, VOCAB)
    every = HeadAndTail(entries, torch.full((40,), 1e7), UNIFORM)
    for part in (listed(teacher, VOCAB - 1, UNIFORM), every):
        torch.testing.assert_close(losses_of(part, student), whole, rtol=1e-4, atol=1e-6)


def test_within_the_rest_the_student_keeps_its_proportions() -> None:
    """The gradient on an unlisted logit is q (1 - p_rest / q_rest); on a listed one q - p."""
    teacher = listed(dense(), 4, UNIFORM)
    logits = student_log_probs().detach().requires_grad_()
    losses = losses_of(teacher, logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    q = logits.detach().softmax(-1)[:, :VOCAB]
    ids = teacher.head.ids[:, :-1]
    target = torch.zeros_like(q).scatter(1, ids, teacher.head.values[:, :-1])
    rest = torch.ones_like(q).scatter(1, ids, 0.0)
    q_rest = (q * rest).sum(1, keepdim=True)
    target = target + rest * q * teacher.tail_mass[:, None] / q_rest
    torch.testing.assert_close(gradient[:, :VOCAB], q - target, rtol=1e-3, atol=1e-6)
    assert float(gradient[:, VOCAB].abs().max()) == 0


def test_impossible_tokens_give_finite_gradients() -> None:
    teacher = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    logits = torch.tensor([[0.0, 50.0, -200.0, -1e6]], requires_grad=True)
    distillation = Distillation(DenseProbabilities(teacher))
    distillation.losses(logits.log_softmax(-1), torch.tensor([0]), slice(None)).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


# Students that learn from the teacher's stored probabilities, with and without noise.

TOKEN = {"model__kd__kind": "token"}
BLOCKS = {"student": "bd3lm", "model__block_size": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that keeps all V probabilities."""
    return write_store(tmp_path_factory.mktemp("whole") / "store", num_entries=SMALL)


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("kind", [{"student": "mdlm"}, {"student": "bd3lm", "model__block_size": 4}])
def test_a_diffusion_student_pays_the_dense_kl_where_it_is_masked(
    whole: Path, tmp_path: Path, kind: dict[str, Any], conditioning: str
) -> None:
    weight = 0.75
    settings = {**kind, **TOKEN, "model__kd__weight": weight, "model__conditioning": conditioning}
    student = student_of(whole, **settings)
    assert isinstance(student, MDLM | BD3LM)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = next_batch(trainer_of(whole, tmp_path / "run", **settings)[0])
    corruption = student.corrupt(batch)
    noised = batch.tokens.masked_fill(corruption.mask, student.mask_id)
    noise = None
    if student.is_conditioned and batch.noise is not None:
        noise = student.embed_noise(batch.noise.at(corruption.mask))
        noise = noise.laid_out(corruption.places.index, noised.shape)
    with torch.no_grad():
        found = denoise(student, noised, batch.tokens, noise)[..., :SMALL].log_softmax(-1)
        teacher = teacher_logits()[batch.tokens[:, :-1]].log_softmax(-1)
        kl = functional.kl_div(found[:, 1:], teacher, reduction="none", log_target=True).sum(-1)
        nll = -found.gather(-1, batch.tokens[..., None])[..., 0]
        mixed = weight * functional.pad(kl, (1, 0)) + (1 - weight) * nll
        loss, usual = ((part * corruption.weight * corruption.mask).sum() / noised.numel() for part in (mixed, nll))
    output = student.train().loss(batch)
    torch.testing.assert_close(output.loss, loss, rtol=3e-3, atol=1e-5)
    likelihood = student.eval().loss(batch)
    torch.testing.assert_close(likelihood.token_nlls, output.token_nlls, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(likelihood.loss, usual)


def test_an_autoregressive_student_pays_the_dense_kl_at_every_position(whole: Path, tmp_path: Path) -> None:
    settings = {"student": "ar", "model__conditioning": "none", **TOKEN, "model__kd__temperature": 2.0}
    student = student_of(whole, **settings)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = next_batch(trainer_of(whole, tmp_path / "run", **settings)[0])
    with torch.no_grad():
        found = student.eval().predict(batch.tokens)[:, :-1, :SMALL]  # type: ignore[operator]
        logits = teacher_logits()[batch.tokens[:, :-1]]
        parts = ((part / 2.0).log_softmax(-1) for part in (found, logits))
        kl = 4 * functional.kl_div(*parts, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(student.train().loss(batch).loss, kl.mean(), rtol=3e-3, atol=1e-5)


def test_sequence_level_distillation_learns_from_rows_of_the_teacher(tmp_path: Path) -> None:
    tokens = {"fingerprint": "ef" * 32, "corpus": "random", "mode": "sequential"}
    written = write_store(tmp_path / "written", tokens=tokens)
    assert train(tiny_run(model__kd__kind="sequence", training__num_steps=2), written, tmp_path / "run")
    sealed = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert sealed["kd"]["kind"] == "sequence"
