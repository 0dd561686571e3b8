"""Validation perplexity: the loss it averages, what the noise was, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.likelihood.validation import validation_perplexity
from evaluation.samples import DataRows, read_data_rows
from shards.errors import UsageError
from tests.trainer.run_cases import write_store
from tests.trainer.sampling_cases import tiny_student


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "store")


def rows(num: int = 24, length: int = 12, vocab_size: int = 11) -> DataRows:
    values = np.random.default_rng(0).integers(0, vocab_size, (num, length))
    return DataRows(values, "validation split", "f", vocab_size)


def test_an_autoregressive_student_is_exact_by_hand() -> None:
    student, data = tiny_student("ar", "none"), rows()
    score = validation_perplexity(student, data, noise="none", batch_size=5)
    tokens = torch.from_numpy(data.rows)
    with torch.no_grad():
        log_probs = student.predict(tokens[:, :-1])  # type: ignore[operator]
    nll = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
    assert score.value == pytest.approx(math.exp(nll), rel=1e-5)
    assert score.settings["estimate"] == "exact" and score.cautions == ()
    assert score.num_samples == 24


def test_the_bound_is_the_same_whatever_the_draws_and_the_batch() -> None:
    """40 draws of 24 rows against 40 others: two means of one bound, within five errors."""
    student, data = tiny_student("mdlm", "none"), rows()
    first = validation_perplexity(student, data, noise="none", num_draws=40)
    other = validation_perplexity(student, data, noise="none", num_draws=40, seed=1)
    parts = [np.array(score.per_sample.numerators) / 11 for score in (first, other)]  # type: ignore[union-attr]
    error = (parts[0] - parts[1]).std() / math.sqrt(24)
    assert abs((parts[0] - parts[1]).mean()) < 5 * error
    assert np.ptp(parts[0] - parts[1]) > 0


def test_the_noise_of_the_text_itself_is_named(store: Path) -> None:
    data = read_data_rows(store, "train", 8)
    length, vocab_size = data.rows.shape[1], data.vocab_size
    student = tiny_student("mdlm", "gumbel", row_length=length, vocab_size=vocab_size)
    given = validation_perplexity(student, data, noise="posterior", store=store, split="train")
    prior = validation_perplexity(student, data, noise="prior")
    assert given.name == "conditional_validation_perplexity" != prior.name
    assert "inferred from the very text" in given.cautions[0] and not prior.cautions
    assert given.value != prior.value


def test_what_does_not_suit_the_student_is_refused() -> None:
    plain, noisy = tiny_student("mdlm", "none"), tiny_student("mdlm", "gumbel")
    for student, data, noise in (
        (plain, rows(length=10), "none"),
        (plain, rows(vocab_size=10), "none"),
        (plain, rows(), "prior"),
        (noisy, rows(), "none"),
        (noisy, rows(), "posterior"),
    ):
        with pytest.raises(UsageError, match="do not suit the student"):
            validation_perplexity(student, data, noise=noise)  # type: ignore[arg-type]


def test_a_store_and_its_rows(store: Path) -> None:
    whole = read_data_rows(store.parent, "train")
    assert np.array_equal(read_data_rows(store, "train", 3).rows, whole.rows[:3])
    with pytest.raises(UsageError, match="no such split"):
        read_data_rows(store, "nothing")
    with pytest.raises(UsageError, match="no data there"):
        read_data_rows(store / "nothing")
