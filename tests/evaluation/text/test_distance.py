"""Distances between samples and text: hand-worked, against scipy, and against tricks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg
from scipy.spatial.distance import mahalanobis
from scipy.stats import energy_distance as scipy_energy

from evaluation.text.distance import (
    Estimate,
    distinct_beginnings,
    energy_distance,
    frechet_distance,
    gradient_moment,
    jackknife,
    memorised_counts,
    naive_samples,
    ngram_vectors,
    require_enough,
    typicality_gap,
)
from evaluation.text.reference import ReferenceText, Ruler, words_of
from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION, PartWriter
from shards.errors import UsageError


def markov_text(num: int, length: int, seed: int, vocab_size: int = 40) -> np.ndarray:
    """Rows of one chain in which each token has four likely successors."""
    chain = np.random.default_rng(0).dirichlet(np.full(vocab_size, 0.1), size=vocab_size)
    generator = np.random.default_rng(seed)
    rows = generator.integers(vocab_size, size=(num, length))
    for place in range(1, length):
        draws = generator.random((num, 1))
        rows[:, place] = (
            (chain[rows[:, place - 1]].cumsum(1) < draws).sum(1).clip(0, vocab_size - 1)
        )
    return rows


def write_tokens(home: Path, splits: dict[str, np.ndarray], **facts: Any) -> Path:
    """A run's folder with the ``tokens`` of stage 1."""
    record: dict[str, Any] = {**dict.fromkeys(FIELDS), "fingerprint": "f", "corpus": {}, **facts}
    record |= {"format_version": FORMAT_VERSION, "splits": {}}
    for split, rows in splits.items():
        record["row_length"] = rows.shape[1]
        writer = PartWriter(home / "tokens" / split, rows.shape[1])
        writer.write(rows.astype(np.int32))
        record["splits"][split] = {"parts": [asdict(writer.close())]}
    (home / "tokens" / "tokens.json").write_text(json.dumps(record))
    return home


def test_frechet_by_hand_and_as_scipy() -> None:
    x = np.array([[0.0], [2.0]])
    # Means 1 and 4, variances 2 and 8: 9 + 2 + 8 - 2 sqrt(16).
    assert frechet_distance(x, np.array([[2.0], [6.0]])) == pytest.approx(11.0)
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(200, 6)), generator.normal(1.0, 2.0, size=(150, 6))
    first, second = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = np.real(np.asarray(linalg.sqrtm(first @ second)))
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(first + second - 2 * root)
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)


def test_energy_by_hand_and_as_scipy() -> None:
    # E|X - Y| = 2, E|X - X'| = 2 over distinct pairs, E|Y - Y'| = 4.
    x, y = np.array([[0.0], [2.0]]), np.array([[0.0], [4.0]])
    assert energy_distance(x, y).value == pytest.approx(2 * 2 - 2 - 4)
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(300, 1)), generator.normal(0.7, size=(400, 1))
    n, m = len(x), len(y)
    within = [np.abs(rows - rows.T).mean() for rows in (x, y)]
    # scipy keeps pairs of a row with itself and takes the root of half; both are put back.
    unbiased = scipy_energy(x[:, 0], y[:, 0]) ** 2 - within[0] / (n - 1) - within[1] / (m - 1)
    found = energy_distance(x, y)
    assert found.value == pytest.approx(unbiased, rel=1e-6)
    again = jackknife(lambda kept: energy_distance(x[kept], y).value, n)  # from the rows themselves
    assert (found.low, found.high) == pytest.approx((again.low, again.high), rel=1e-6)


def test_gradient_moment_by_hand() -> None:
    # Means 1 and 5, variances 2 and 8, two rows each: (16 - 2/2 - 8/2) / 8.
    x, y = np.array([[0.0], [2.0]]), np.array([[3.0], [7.0]])
    assert gradient_moment(x, y).value == pytest.approx(11 / 8)
    generator = np.random.default_rng(4)
    x, y = generator.normal(0.5, size=(400, 3)), generator.normal(size=(400, 3))
    found = gradient_moment(x, y)
    assert gradient_moment(7 * x, 7 * y).value == pytest.approx(found.value)
    assert found.low < 0.25 < found.high  # 3 times 0.5^2 in units of 3


@pytest.mark.parametrize("distance", [energy_distance, gradient_moment])
def test_a_distance_of_one_law_is_nought_on_average(distance: Callable[..., Estimate]) -> None:
    """400 pairs of sets of one law: the mean is within four standard errors of 0."""
    generator = np.random.default_rng(3)
    values = [distance(*generator.normal(size=(2, 30, 4))).value for _ in range(400)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(len(values))


def test_ngram_vectors_see_order_and_frequency_alone() -> None:
    rows = [[1, 2, 3, 1, 2, 3], [3, 1, 2, 3, 1, 2], [1, 1, 2, 2, 3, 3]]
    vectors = ngram_vectors(rows)
    assert np.allclose((vectors**2).sum(1), 3.0)  # unit length for each of the three orders
    unigrams, bigrams = vectors[:, :2048], vectors[:, 2048:4096]
    assert np.allclose(unigrams[0], unigrams[2]) and not np.allclose(bigrams[0], bigrams[2])
    assert not np.allclose(ngram_vectors([[1, 2]]), ngram_vectors([[2, 1]]))


def test_jackknife_of_a_mean_is_the_known_interval() -> None:
    x = np.random.default_rng(4).normal(size=(2000, 1))
    found = jackknife(lambda kept: float(x[kept].mean()), len(x))
    half = 1.96 * x.std(ddof=1) / np.sqrt(len(x))
    assert found.value == pytest.approx(x.mean())
    # 20 groups know a spread to one part in sqrt(2 * 19): four of those.
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=4 / np.sqrt(38))


def test_naive_samplers_are_behind_other_rows_of_the_text() -> None:
    text, other, reference = (markov_text(400, 48, seed) for seed in (5, 6, 7))
    vectors = ngram_vectors(reference.tolist())

    def measure(rows: np.ndarray) -> Estimate:
        return energy_distance(ngram_vectors(rows.tolist()), vectors)

    floor = measure(other[:300])
    naive = naive_samples(text, 300)
    assert set(naive) == {"periodic text", "unigram draws", "frequent 4-grams", "shuffled rows"}
    for name, rows in naive.items():
        assert rows.shape == (300, 48)
        assert measure(rows).low > max(0, floor.high), name
    assert np.array_equal(naive["periodic text"][0, :8], naive["periodic text"][0, 8:16])
    shuffled = naive["shuffled rows"]
    assert sorted(shuffled[0].tolist()) in [sorted(row.tolist()) for row in text]


def test_typicality_as_scipy_and_on_both_sides() -> None:
    generator = np.random.default_rng(8)
    fitted, typical, same, near, far = (
        generator.normal(scale=scale, size=(500, 8)) for scale in (1, 1, 1, 0.3, 2)
    )
    covariance = np.cov(fitted, rowvar=False)
    inverse = np.linalg.inv(covariance + np.eye(8) * 1e-3 * np.trace(covariance) / 8)
    mean = fitted.mean(0)
    ours, theirs = (
        np.mean([mahalanobis(row, mean, inverse) for row in rows]) for rows in (far, typical)
    )
    assert typicality_gap(far, fitted, typical).value == pytest.approx(ours / theirs - 1, rel=1e-6)
    values = [typicality_gap(rows, fitted, typical) for rows in (same, near, far)]
    assert values[0].value < 0.05 < min(value.low for value in values[1:])


def test_beginnings_and_memory_by_hand() -> None:
    rows = [[0, *range(1, 30)], [0, *range(1, 30)], [0, *range(50, 79)]]
    assert distinct_beginnings(rows) == pytest.approx(2 / 3)
    training = np.array([[9, *range(1, 30)]])
    # 15 16-grams a row; of the first two rows all but the one that holds the first token.
    assert memorised_counts(rows, training).tolist() == [[14, 15], [14, 15], [0, 15]]
    assert memorised_counts([[1, 2]], training).tolist() == [[0, 0]]


def test_few_samples_say_nothing() -> None:
    with pytest.raises(UsageError, match=r"too few samples.*got 64; expected at least 128"):
        require_enough(64, "samples")
    with pytest.raises(UsageError, match="a covariance needs two"):
        frechet_distance(np.zeros((1, 2)), np.zeros((3, 2)))


def test_the_floor_of_a_sorted_text_is_that_of_any_other() -> None:
    rows = np.concatenate([markov_text(200, 32, 1), np.zeros((200, 32), dtype=int)])
    text = ReferenceText(rows.tolist(), "tokens", None, None, Path("x"))
    floor = Ruler(text, 200, None, None).floor["energy_distance"]
    assert floor.low < 0 < floor.high
    with pytest.raises(UsageError, match="got 200; expected at least 256"):
        Ruler(replace(text, rows=text.rows[:200]), 200, None, None)


def test_texts_of_a_store_are_written_as_samples_are(tmp_path: Path, judge_folder: Path) -> None:
    """Without the token in front; words of a file are what stands between spaces and marks."""
    rows = np.array([[2, 0, 1, 0], [2, 1, 1, 0]])
    write_tokens(tmp_path, {"train": rows[:1], "validation": rows}, vocab_size=4, bos_id=2)
    with pytest.raises(UsageError, match="keeps no tokenizer"):
        ReferenceText.read(tmp_path).require_texts()
    shutil.copytree(judge_folder, tmp_path / "tokens" / "tokenizer")
    found = ReferenceText.read(tmp_path, length=3)
    assert found.texts == ["a b", "b b"] and found.rows == [[2, 0, 1], [2, 1, 1]]
    assert found.training.tolist() == [[2, 0, 1]]  # type: ignore[union-attr]
    assert len(set(words_of("It's a day, a day."))) == 7 and words_of("a\n b") == words_of("a b")
