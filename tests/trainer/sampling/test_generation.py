"""``generate``: what it fills, what it keeps, what it refuses."""

from __future__ import annotations

import pytest
import torch

from shards.errors import UsageError
from tests.trainer.students.student_cases import LENGTH, VOCAB, make_student
from trainer.loading import generate


def test_rows_are_filled_and_what_is_given_is_kept() -> None:
    student = make_student()
    student.config.bos_token_id = 2
    rows = generate(student, num_samples=3, nfe=4, seed=5)
    assert rows.shape == (3, LENGTH)
    assert (rows[:, 0] == 2).all()
    assert (rows < VOCAB).all()
    assert torch.equal(rows, generate(student, num_samples=3, nfe=4, seed=5))
    assert not torch.equal(rows, generate(student, num_samples=3, nfe=4, seed=6))
    given = rows.clone()
    given[:, 4:] = student.mask_id
    assert torch.equal(generate(student, given, nfe=2)[:, :4], rows[:, :4])


def test_a_short_prompt_is_continued_to_the_row_as_if_its_masks_were_given() -> None:
    student = make_student()
    prompt = torch.tensor([[2, 5, 1], [2, 0, 7]])
    rows = generate(student, input_ids=prompt, attention_mask=torch.ones_like(prompt), nfe=2)
    open_rows = torch.full((2, LENGTH), student.mask_id)
    open_rows[:, :3] = prompt
    assert torch.equal(rows, generate(student, open_rows, nfe=2))
    assert torch.equal(rows[:, :3], prompt) and bool((rows < VOCAB).all())
    assert generate(student, prompt, nfe=2, max_length=5).shape == (2, 5)


def test_without_bos_a_sample_begins_with_eos() -> None:
    student = make_student()
    student.config.eos_token_id = 3
    assert (generate(student, num_samples=2, nfe=1)[:, 0] == 3).all()


def test_what_is_wrong_is_said() -> None:
    student = make_student()
    with pytest.raises(UsageError, match="first token"):
        generate(student)
    whole = torch.zeros(1, LENGTH, dtype=torch.int64)
    with pytest.raises(UsageError, match="unknown sampler"):
        generate(student, whole, sampler="guess")
    with pytest.raises(UsageError, match=r"too long.*max_length"):
        generate(student, whole, max_length=LENGTH - 1)
    padded = torch.ones(1, LENGTH, dtype=torch.int64)
    padded[0, 0] = 0
    with pytest.raises(UsageError, match="padded"):
        generate(student, whole, attention_mask=padded)
