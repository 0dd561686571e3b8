"""Token-level distillation: by hand, by what must hold, and against the dense KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from shards.noise.kinds import DenseProbabilities, Entries, HeadAndTail
from trainer.objective.distillation import Distillation, Outcomes, tempered_kl

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
    return HeadAndTail(Entries(ids, values, used), rest / (1 - known), unigram)


UNIFORM = torch.full((VOCAB,), 1 / VOCAB)
TARGETS = torch.zeros(40, dtype=torch.int64)


def losses_of(teacher: Any, student: torch.Tensor, **settings: float) -> torch.Tensor:
    return Distillation(teacher, **settings).losses(student, TARGETS, slice(None))


def test_kl_of_a_listed_token_and_the_rest_by_hand() -> None:
    """Teacher: p = 1/2 for id 0, the other half is the rest. Student: 1/4, and 3/4 elsewhere."""
    head = Entries(torch.tensor([[0]]), torch.tensor([[0.5]]), torch.tensor([[True]]))
    teacher = HeadAndTail(head, torch.tensor([0.5 / (2 / 3)]), torch.full((3,), 1 / 3))
    student = torch.tensor([[0.25, 0.6, 0.15, 1e-30]]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = Distillation(teacher).losses(student, torch.tensor([1]), slice(None))
    assert float(found) == pytest.approx(expected, rel=1e-5)
    mixed = Distillation(teacher, weight=0.25).losses(student, torch.tensor([1]), slice(None))
    assert float(mixed) == pytest.approx(0.75 * -math.log(0.6) + 0.25 * expected, rel=1e-5)


def test_temperature_by_hand() -> None:
    """p = (0.8, 0.2), q even: at T = 2 the roots of p are as 2 to 1, and the KL counts 4 times."""
    teacher, student = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 4 * (2 / 3 * math.log(2 / 3 / 0.5) + 1 / 3 * math.log(1 / 3 / 0.5))
    assert float(tempered_kl(teacher, student, 2.0)) == pytest.approx(expected, rel=1e-5)


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
    entries = Entries(torch.arange(VOCAB).expand(40, -1), teacher.exp(), used)
    every = HeadAndTail(entries, torch.full((40,), 1e7), UNIFORM)
    for part in (listed(teacher, VOCAB - 1, UNIFORM), every):
        torch.testing.assert_close(losses_of(part, student), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_entries", [1, 4, 12])
def test_coarser_outcomes_lose_divergence_and_are_zero_at_equality(num_entries: int) -> None:
    """Data processing: grouping never raises a KL; a student equal to the teacher has none left."""
    teacher, student = dense(), student_log_probs()
    part = listed(teacher, num_entries, UNIFORM)
    whole, found = losses_of(DenseProbabilities(teacher), student), losses_of(part, student)
    assert (found >= -1e-5).all() and (found <= whole + 1e-5).all()
    assert (found < whole - 1e-3).any()
    alike = functional.pad(teacher, (0, 1), value=-1e6)
    assert float(losses_of(part, alike).abs().max()) < 1e-5


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


def test_outcomes_are_normalised_and_rows_are_the_rows_asked_for() -> None:
    part = listed(dense(), 4, UNIFORM)
    assert torch.allclose(Outcomes.of(part).log_probs.exp().sum(1), torch.ones(40), atol=1e-5)
    student = student_log_probs()
    some = Distillation(part).losses(student[10:20], TARGETS[10:20], slice(10, 20))
    torch.testing.assert_close(some, losses_of(part, student)[10:20], rtol=1e-5, atol=1e-7)


def test_impossible_tokens_give_finite_gradients() -> None:
    teacher = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    logits = torch.tensor([[0.0, 50.0, -200.0, -1e6]], requires_grad=True)
    distillation = Distillation(DenseProbabilities(teacher))
    distillation.losses(logits.log_softmax(-1), torch.tensor([0]), slice(None)).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
