"""Likelihoods of completions and of validation rows against sums written out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.goldens import predict
from evaluation.likelihood import validation
from evaluation.likelihood.completion import CompletionScorer
from evaluation.likelihood.validation import prior_noise, validation_perplexity
from evaluation.samples import DataRows, read_data_rows
from shards.errors import GdistillError, UsageError
from shards.settings import derive_seed
from tests.evaluation.kit import evaluate, results, write_tokens
from tests.trainer.run_cases import write_store
from tests.trainer.sampling_cases import tiny_student
from tests.trainer.students.test_drafter import tiny_drafter
from trainer.objective.batch import BatchMaker
from trainer.objective.corruption import FULL
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import Student

ROW = torch.tensor([[0, 3, 7, 2, 9, 4, 1, 5, 8]])


def log_prob(student: Student, row: Tensor, places: list[int], **noise: Tensor) -> float:
    """Sum of log p of the row's own tokens at masked places."""
    masked = row.clone()
    masked[0, places] = student.mask_id
    log_probs = predict(student, masked, *noise.values())
    return float(sum(log_probs[0, place, row[0, place]] for place in places))


def test_one_pass_masks_the_completion_and_nothing_else() -> None:
    """Blocks of 4: tokens 3, then 4 to 7 with block 0 clean, then 8 with a block open behind it."""
    student = tiny_student("mdlm", "none")
    (found,), _ = CompletionScorer(student)(ROW, [6], [0])
    assert found == pytest.approx(log_prob(student, ROW, [6, 7, 8]), abs=1e-4)
    student = tiny_student("bd3lm", "gumbel", block_size=12)
    (found,), _ = CompletionScorer(student, num_draws=1)(ROW, [6], [0])
    row, where = pad(ROW, (0, 3), value=student.mask_id), (torch.arange(12) > 5)[None]
    noise = prior_noise(student, torch.tensor([0]), 12, 0).embed(student, where, torch.arange(1))
    assert found == pytest.approx(log_prob(student, row, [6, 7, 8], noise=noise), abs=1e-4)
    student = tiny_student("bd3lm", "none", block_size=4)
    (found,), _ = CompletionScorer(student)(ROW, [3], [0])
    row = pad(ROW, (0, 3), value=student.mask_id)
    parts = ((row[:, :4], [3]), (row[:, :8], [4, 5, 6, 7]), (row, [8]))
    by_hand = sum(log_prob(student, part, places) for part, places in parts)
    assert found == pytest.approx(by_hand, abs=1e-4)


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
        for subset in itertools.combinations([6, 7, 8], count):
            values.append(3 / count * log_prob(student, ROW, list(subset)))
            chances.append(1 / 3 / math.comb(3, count))
    table, weights = torch.tensor(values), torch.tensor(chances)
    mean = float((table * weights).sum())
    error = float(((table - mean) ** 2 * weights).sum().sqrt()) / 400**0.5
    (found,), _ = CompletionScorer(student, estimate="bound", num_masks=400)(ROW, [6], [0])
    assert abs(found - mean) < 5 * error + 1e-4
    other = CompletionScorer(student, estimate="bound", num_masks=400, seed=1)
    assert other(ROW, [6], [0])[0] != [found] and other.settings["num_masks"] == 400
    last = torch.tensor([8])
    best = ROW.index_fill(1, last, int(predict(student, ROW.index_fill(1, last, student.mask_id))[0, 8].argmax()))
    assert CompletionScorer(student)(best, [8], [0])[1] == [True]
    single, greedy = CompletionScorer(student, estimate="bound", num_masks=2)(best, [8], [0])
    assert single == pytest.approx(CompletionScorer(student)(best, [8], [0])[0], abs=1e-4)
    assert greedy == [False], "masks by chance do not say it"


def test_prior_draws_average_likelihoods() -> None:
    student = tiny_student("mdlm", "gumbel")
    where = torch.zeros(ROW.shape, dtype=torch.bool)
    where[0, 6:] = True
    draws = []
    for draw in range(3):
        noise = prior_noise(student, torch.tensor([5]), ROW.shape[1], 1, draw).embed(student, where, torch.arange(1))
        draws.append(log_prob(student, ROW, [6, 7, 8], noise=noise))
    assert max(draws) - min(draws) > 0.01  # the noise matters
    expected = float(torch.tensor(draws).exp().mean().log())
    scorer = CompletionScorer(student, num_draws=3, seed=1)
    assert scorer(ROW, [6], [5])[0][0] == pytest.approx(expected, abs=1e-4)
    assert scorer.settings["noise"] == "mean over 3 prior draws"
    assert CompletionScorer(student, num_draws=3, seed=2)(ROW, [6], [5])[0][0] != scorer(ROW, [6], [5])[0][0]
    # Whether a token is the most probable is asked of the first draw alone.
    best, last = [], where & (torch.arange(ROW.shape[1]) == 8)
    for draw in range(3):
        noise = prior_noise(student, torch.tensor([5]), ROW.shape[1], 1, draw).embed(student, last, torch.arange(1))
        best.append(int(predict(student, ROW.masked_fill(last, student.mask_id), noise)[0, 8].argmax()))
    likely = ROW.masked_fill(last, best[0])
    assert scorer(likely, [8], [5])[1] == [True] and len(set(best)) > 1
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


# Validation perplexity.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "store")


def rows(num: int = 24, length: int = 12, vocab_size: int = 11) -> DataRows:
    values = np.random.default_rng(0).integers(0, vocab_size, (num, length))
    return DataRows(values, "validation split", "f", vocab_size)


def test_the_perplexity_of_an_autoregressive_student_is_exact() -> None:
    """Over the tokens that count, of which some rows have fewer."""
    counted = np.ones((24, 12), dtype=bool)
    counted[:9, 4:] = False
    student, data = tiny_student("ar", "none"), replace(rows(), counted=counted)
    score = validation_perplexity(student, data, noise="none", batch_size=5, num_draws=3)
    tokens = torch.from_numpy(data.rows)
    with torch.no_grad():
        log_probs = student.predict(tokens[:, :-1])  # type: ignore[operator]
    nll = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0][torch.from_numpy(counted[:, 1:])].mean()
    assert score.value == pytest.approx(math.exp(nll), rel=1e-5)
    assert score.details["nll_nats_per_token"] == pytest.approx(float(nll), rel=1e-5)
    assert score.settings["estimate"] == "exact" and score.cautions == ()
    assert score.num_samples == 24 and score.settings["data_fingerprint"] == "f"


def test_the_noise_of_the_text_itself_is_named(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_data_rows(store, "train", 8)
    length, vocab_size = data.rows.shape[1], data.vocab_size
    student = tiny_student("mdlm", "gumbel", row_length=length, vocab_size=vocab_size)
    given = validation_perplexity(student, data, noise="posterior", store=store, split="train")
    prior = validation_perplexity(student, data, noise="prior")
    assert given.name == "conditional_validation_perplexity" != prior.name
    assert "inferred from the very text" in given.cautions[0] and not prior.cautions
    assert given.value != prior.value
    draws, seen, bounds, loss = list[int](), list[Any](), set[Any](), type(student).loss
    other = read_data_rows(store, "validation", 8)
    monkeypatch.setattr(validation, "prior_noise", lambda *of: draws.append(of[-1]) or prior_noise(*of))
    noted = lambda s, b, **how: seen.append(b) or bounds.update(how.values()) or loss(s, b, **how)  # noqa: E731
    monkeypatch.setattr(type(student), "loss", noted)
    made, maker = list[str](), BatchMaker.__init__
    monkeypatch.setattr(BatchMaker, "__init__", lambda *of, **how: made.append(of[2]) or maker(*of, **how))
    for noise in ("posterior", "prior"):
        options: Any = {"noise": noise, "store": store, "split": "train", "seed": 3}
        ours, theirs = (validation_perplexity(student, data, batch_size=n, **options).per_sample for n in (3, 8))
        assert ours.numerators == pytest.approx(theirs.numerators, rel=1e-4)
        assert len(made) == 2 * (noise == "posterior"), "what a store keeps once goes to the device once"
        validation_perplexity(student, data, num_draws=2, **options)
        assert [batch.epoch for batch in seen[-2:]] == [0, 1] and draws[-2:] in ([], [0, 1])
        first, second = (batch.slots.tolist() for batch in seen[-2:])
        assert sorted(first) == sorted(second) == [*range(8)] and first != second, "strata of its own in every draw"
        assert all((batch.seed, batch.global_batch_size) == (3, 8) for batch in seen)
        assert np.array_equal(seen[-1].tokens, data.rows)
        validation_perplexity(student, other, **options | {"seed": 4, "split": "validation"})
        assert np.array_equal(seen[-1].tokens, other.rows) and bounds == {FULL}, "not the student's own clips"
        assert seen[-1].slots.tolist() not in (first, second), "and for every seed"
        seen.clear()
        made.clear()
    student.save_pretrained(tmp_path / "model")
    words = ("--split", "train", "--rows", 8, "--draws", 2, "--seed", 3, "--out", tmp_path, "--batch-size", 3)
    shown = evaluate("perplexity", tmp_path / "model", store, store.parent, *words)  # a store, and its run
    assert {len(batch.tokens) for batch in seen} == {3, 2} and "(conditional): given noise" in shown
    assert {part["drawn_with"]["seed"] for part in results(tmp_path).values()} == {3}
    ours = [part["scores"][0] for part in results(tmp_path).values()]
    for score, noise in zip(ours, ("posterior", "prior") * 2, strict=True):
        options = {"noise": noise, "store": store, "split": "train", "num_draws": 2, "seed": 3}
        expected = validation_perplexity(student, data, **options)
        assert score["name"] == expected.name
        assert score["value"] == pytest.approx(expected.value, rel=1e-4)
        assert score["settings"]["draws_per_row"] == 2
    low, high = ours[0]["interval_95"]
    figures = [f"{ours[0]['value']:.2f}", "(conditional)", f"[{low:.2f},", f"{high:.2f}]"]
    assert " ".join(figures) in " ".join(shown.split())
    write_tokens(tmp_path / "run", {"train": data.rows}, vocab_size=vocab_size, bos_id=0)
    plain = tiny_student("mdlm", "none", row_length=length, vocab_size=vocab_size)
    plain.save_pretrained(tmp_path / "plain")
    for model, part, option, noise in (
        ("model", tmp_path / "run", (), "prior"),
        ("model", store, ("--noise", "posterior"), "posterior"),
        ("model", store, ("--noise", "prior"), "prior"),
        ("plain", store, (), "none"),
    ):
        evaluate("perplexity", tmp_path / model, part, *words, *option)
        assert [one["scores"][0]["settings"]["noise"] for one in results(tmp_path).values()] == [noise]
    for option in ("--draws", "--rows", "--batch-size"):
        with pytest.raises(SystemExit):
            evaluate("perplexity", tmp_path / "model", store, *words, option, 0)
    with pytest.raises(UsageError, match="cannot write there"):  # before a model is opened
        evaluate("perplexity", tmp_path / "none", store, "--split", "train", "--out", tmp_path / "results.json")


def test_prior_noise_is_the_samplers_own_cut_as_the_student_knows_it() -> None:
    """Of seeds of their own, so that no likelihood is of the noise that drew a sample."""
    student, ids = tiny_student("mdlm", "gumbel"), torch.tensor([4, 9])
    student.config.codec = {"name": "topk", "parameters": {"num_entries": 2}}
    noise = sampling_noise(derive_seed(3, "likelihood"), ids, 12, 11, codec=student.codec, draw=2)
    found = prior_noise(student, ids, 12, 3, 2).noise
    assert torch.equal(found.tile(0, 11), noise.tile(0, 11))
    assert not torch.equal(found.tile(0, 11), sampling_noise(3, ids, 12, 11, draw=2).tile(0, 11))


def test_what_does_not_suit_the_student_is_refused(store: Path, tmp_path: Path) -> None:
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
    drafter: Any = tiny_drafter(tmp_path)[0]
    for measure in (lambda: CompletionScorer(drafter), lambda: validation_perplexity(drafter, rows(), noise="none")):
        with pytest.raises(UsageError, match="no text a likelihood"):
            measure()
    scorer = CompletionScorer(plain)
    for row, given in ((ROW.repeat(2, 2), [3, 3]), (ROW.repeat(2, 1), [3, 0])):
        with pytest.raises(UsageError, match="cannot be scored"):
            scorer(row, given, [0, 1])
    scorer(pad(ROW, (0, 3)), [3], [0])  # as long as the student's
    for name in ("num_masks", "num_draws"):
        with pytest.raises(UsageError, match=name):
            CompletionScorer(plain, **{name: 0})
    broken = tiny_student("ar", "none")
    torch.nn.init.constant_(next(broken.parameters()), math.nan)
    with pytest.raises(GdistillError, match="a likelihood that is no number"):
        validation_perplexity(broken, rows(), noise="none")
    whole = read_data_rows(store.parent, "train")
    assert np.array_equal(read_data_rows(store, "train", 3).rows, whole.rows[:3])
    assert (whole.bos_id, whole.fingerprint) == (0, "ef" * 32)
    assert whole.name == f"train split of store, {len(whole.rows)} rows of {whole.rows.shape[1]} tokens"
    with pytest.raises(UsageError, match="no such split"):
        read_data_rows(store, "nothing")
    with pytest.raises(UsageError, match="no data there"):
        read_data_rows(store / "nothing")
