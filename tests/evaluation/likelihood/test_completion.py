"""Likelihoods of completions against sums written out by hand, and independence of the batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from evaluation.likelihood.completion import CompletionScorer
from evaluation.likelihood.validation import PriorRowNoise
from shards.errors import UsageError
from tests.trainer.sampling_cases import tiny_student
from trainer.students.registry import Student

ROW = torch.tensor([[0, 3, 7, 2, 9, 4, 1, 5, 8]])


def log_prob(student: Student, row: Tensor, places: list[int], **noise: Tensor) -> float:
    """Sum of log p of the row's own tokens at masked places."""
    masked = row.clone()
    masked[0, places] = student.mask_id
    log_probs = student.predict(masked, *noise.values())  # type: ignore[operator]
    return float(sum(log_probs[0, place, row[0, place]] for place in places))


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_one_pass_masks_the_completion_and_nothing_else(kind: str) -> None:
    student = tiny_student(kind, "none", block_size=12 if kind == "bd3lm" else None)
    (found,), _ = CompletionScorer(student)(ROW, [6], [0])
    length = ROW.shape[1]
    row = torch.nn.functional.pad(
        ROW, (0, 12 - length if kind == "bd3lm" else 0), value=student.mask_id
    )
    assert found == pytest.approx(log_prob(student, row, [6, 7, 8]), abs=1e-4)


def test_blocks_are_scored_one_after_the_other() -> None:
    """Blocks of 4: tokens 3, then 4 to 7 with block 0 clean, then 8 with a block open behind it."""
    student = tiny_student("bd3lm", "none", block_size=4)
    (found,), _ = CompletionScorer(student)(ROW, [3], [0])
    last = torch.nn.functional.pad(ROW, (0, 3), value=student.mask_id)
    parts = [
        log_prob(student, ROW[:, :4], [3]),
        log_prob(student, ROW[:, :8], [4, 5, 6, 7]),
        log_prob(student, last, [8]),
    ]
    assert found == pytest.approx(sum(parts), abs=1e-4)


def test_an_autoregressive_student_is_exact() -> None:
    student = tiny_student("ar", "none")
    scorer = CompletionScorer(student)
    (found,), (greedy,) = scorer(ROW, [4], [0])
    log_probs = student.predict(ROW)  # type: ignore[operator]
    by_hand = sum(float(log_probs[0, i - 1, ROW[0, i]]) for i in range(4, 9))
    assert found == pytest.approx(by_hand, abs=1e-4) and scorer.settings["estimate"] == "exact"
    most_probable = ROW.clone()
    for place in range(4, 9):
        most_probable[0, place] = student.predict(most_probable)[0, place - 1].argmax()  # type: ignore[operator]
    assert scorer(most_probable, [4], [0])[1] == [True] and not greedy


def test_the_bound_is_the_mean_over_all_masks() -> None:
    """Three open tokens: every subset of m has chance 1/3 / C(3, m) and weight 3 / m.

    400 masks; the tolerance is five standard errors of their values.
    """
    student = tiny_student("mdlm", "none")
    values, chances = [], []
    for count in (1, 2, 3):
        subsets = list(itertools.combinations([6, 7, 8], count))
        for subset in subsets:
            values.append(3 / count * log_prob(student, ROW, list(subset)))
            chances.append(1 / 3 / len(subsets))
    table, weights = torch.tensor(values), torch.tensor(chances)
    mean = float((table * weights).sum())
    error = float(((table - mean) ** 2 * weights).sum().sqrt()) / 400**0.5
    (found,), _ = CompletionScorer(student, estimate="bound", num_masks=400)(ROW, [6], [0])
    assert abs(found - mean) < 5 * error + 1e-4
    single = CompletionScorer(student, estimate="bound", num_masks=2)(ROW, [8], [0])[0]
    assert single == pytest.approx(CompletionScorer(student)(ROW, [8], [0])[0], abs=1e-4)


def test_prior_draws_average_likelihoods() -> None:
    student = tiny_student("mdlm", "gumbel")
    where = torch.zeros(ROW.shape, dtype=torch.bool)
    where[0, 6:] = True
    draws = []
    for draw in range(3):
        noise = PriorRowNoise(student, torch.tensor([5]), ROW.shape[1], 1, draw)
        draws.append(log_prob(student, ROW, [6, 7, 8], noise=noise.embeddings(where)))
    assert max(draws) - min(draws) > 0.01  # the noise matters
    expected = float(torch.tensor(draws).exp().mean().log())
    scorer = CompletionScorer(student, num_draws=3, seed=1)
    assert scorer(ROW, [6], [5])[0][0] == pytest.approx(expected, abs=1e-4)
    assert scorer.settings["noise"] == "mean over 3 prior draws"
    blind = CompletionScorer(student, noise="none")
    assert blind(ROW, [6], [5])[0][0] == pytest.approx(log_prob(student, ROW, [6, 7, 8]), abs=1e-4)
    assert blind.settings["noise"] == "none"


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
@pytest.mark.parametrize("estimate", ["one_pass", "bound"])
def test_no_score_depends_on_its_batch(kind: str, estimate: str) -> None:
    student = tiny_student(kind, "gumbel", block_size=4 if kind == "bd3lm" else None)
    scorer = CompletionScorer(student, estimate=estimate, num_draws=2, num_masks=3)  # type: ignore[arg-type]
    rows = torch.cat((ROW, ROW.flip(1), ROW))
    together, _ = scorer(rows, [3, 5, 3], [10, 11, 12])
    alone = [scorer(rows[i : i + 1], [given], [10 + i])[0][0] for i, given in enumerate((3, 5, 3))]
    assert together == pytest.approx(alone, abs=1e-4)
    assert together[0] != together[2]  # each row has its own noise


def test_rows_that_cannot_be_scored_are_refused() -> None:
    scorer = CompletionScorer(tiny_student("mdlm", "none"))
    with pytest.raises(UsageError, match="cannot be scored"):
        scorer(ROW.repeat(1, 2), [3], [0])
    with pytest.raises(UsageError, match="cannot be scored"):
        scorer(ROW, [0], [0])
    with pytest.raises(UsageError, match="num_masks"):
        CompletionScorer(tiny_student("mdlm", "none"), num_masks=0)
