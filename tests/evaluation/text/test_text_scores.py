"""Scores of text: the authors' numbers, hand-worked cases, scipy's distances, and tricks."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import linalg
from scipy.spatial.distance import mahalanobis
from scipy.stats import energy_distance as scipy_energy
from transformers import GPT2Config, GPT2LMHeadModel

from evaluation.samples import SampleSet, read_data_rows
from evaluation.score import PerSample, Score, mean_interval, wilson_interval
from evaluation.text import distance
from evaluation.text.mauve_divergence import TextFeatures, text_features
from evaluation.text.reading import JudgedText, JudgeModel, Judging, counted_positions, token_nll_nats, window_starts
from evaluation.text.reference import ReferenceText, Ruler, words_of
from shards.errors import UsageError
from tests.evaluation.kit import markov_text, write_lines, write_tokens


@pytest.fixture(scope="module")
def authors(golden: Path) -> tuple[dict, dict[str, torch.Tensor], GPT2LMHeadModel]:
    description = json.loads((golden / "gen_ppl.json").read_text())
    tensors = load_file(golden / "gen_ppl.safetensors")
    given = description["gpt2_config"]
    end = given["eos_token_id"]
    sizes = {n: given[n] for n in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")}
    config = GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)
    # In float64, so that what is compared is the rule and not this machine's float32 kernels.
    model = GPT2LMHeadModel(config).double().eval()
    weights = {n.removeprefix("gpt2."): v for n, v in tensors.items() if n.startswith("gpt2.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return description, tensors, model


@pytest.mark.parametrize("case", ("len160", "len150", "len65", "len40", "nosliding", "padded"))
def test_token_nll_perplexity_and_entropy_match_the_authors(case: str, authors: tuple) -> None:
    description, tensors, model = authors
    given, ids = description["results"][case], tensors[f"{case}.ids"]
    scored = ids[: given["sequences_scored"]]
    nll = token_nll_nats(model, scored, given["context"], given["stride"])
    counted = counted_positions(scored, [description["gpt2_config"]["eos_token_id"]])
    counted &= tensors.get(f"{case}.attention_mask", torch.ones(())).bool()
    assert torch.equal(counted, tensors[f"{case}.valid"].bool())
    assert (nll - tensors[f"{case}.nll"])[counted].abs().max() < 1e-4
    perplexity = math.exp(nll[counted].double().mean())
    assert perplexity == pytest.approx(given["gen_ppl"], rel=1e-4)
    expected = tensors[f"{case}.entropy_per_sample"].tolist()
    # The authors count right padding as tokens; ours scores samples, which have none.
    found = [distance.unigram_entropy_nats(row) for row in ids.tolist()]
    assert found == pytest.approx(expected, abs=1e-5)


def test_windows_score_every_position_once_and_tokens_between_texts_never() -> None:
    assert window_starts(10, 10, 5) == [(0, 0)]
    assert window_starts(11, 10, 5) == [(0, 0), (5, 10)]
    assert window_starts(20, 10, 5) == [(0, 0), (5, 10), (10, 15)]
    assert window_starts(20, 10, 4) == [(0, 0), (4, 10), (8, 14), (12, 18)]
    ids = torch.tensor([[1, 5, 1, 6, 2, 7]])
    assert counted_positions(ids, [1, 2]).tolist() == [[False, True, False, True, False, True]]
    assert counted_positions(ids, []).tolist() == [[False, True, True, True, True, True]]


def test_entropy_and_repetition_by_hand() -> None:
    assert distance.unigram_entropy_nats([1, 1, 2, 2]) == pytest.approx(math.log(2))
    assert distance.unigram_entropy_nats([7, 7, 7]) == 0.0
    score = distance.entropy_score([[1, 1, 2, 2], [3, 3]])
    assert score.value == pytest.approx(math.log(2) / 2) and score.num_samples == 2
    assert score.interval == mean_interval([math.log(2), 0.0])
    pooled = -(4 / 6 * math.log(1 / 3) + 2 / 6 * math.log(1 / 3))  # three tokens, two of each
    assert score.details["pooled_nats"] == pytest.approx(pooled)
    assert distance.distinct_ngram_share([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert score.details["distinct_1"] == pytest.approx(3 / 6)
    assert score.details["distinct_2"] == pytest.approx(4 / 4)
    assert score.settings["tokens_per_sample"] == "2..4"
    turns = distance.entropy_score([[1, 2, 1, 2, 1]]).details
    assert [turns[f"distinct_{n}"] for n in (1, 2, 3)] == pytest.approx([2 / 5, 2 / 4, 2 / 3])

    # Repetition is counted within a sample.
    assert distance.repetition_share([1, 2, 3, 4] * 2, 4) == pytest.approx(1 - 4 / 5)
    assert distance.repetition_share([5] * 10) == pytest.approx(1 - 1 / 7)
    assert distance.repetition_share([1, 2]) == distance.distinct_ngram_share([[1]], 2) == 0.0
    twice = distance.entropy_score([[1, 2, 3, 4]] * 2)  # equal samples: distinct-n sees it
    assert (twice.details["repeated_4"], twice.details["distinct_3"]) == (0.0, 0.5)


def test_both_aggregates_of_perplexity_by_hand(judge: JudgeModel) -> None:
    """Texts of perplexity 2, 4 and 32 over 1, 1 and 4 tokens: every way to average differs."""
    judging = Judging.of(judge)
    for text, nats in (("x", (math.log(2), 7.0)), ("y", (math.log(4), 7.0)), ("z", (math.log(32),) * 4)):
        counted = tuple(value != 7 for value in nats)  # an end of text does not count
        judging.memory.add(text, JudgedText((1,) * len(nats), nats, counted))
    score = judging.perplexity(["x", "y", "z"])
    assert score.value == pytest.approx(2 ** (23 / 6)) and score.num_samples == 3
    assert score.details["per_sample_mean"] == pytest.approx(38 / 3)
    assert score.details["per_sample_median"] == pytest.approx(4.0)
    assert score.details["nll_nats_per_token"] == pytest.approx(23 / 6 * math.log(2))
    assert score.details["num_tokens"] == 6


def test_a_bootstrap_resamples_whole_texts_with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given text is absent from a draw of 5 with chance (4/5)^5 = 0.328: then the mean of the others is 0."""
    one = PerSample.of_mean(range(5), (5.0, 0.0, 0.0, 0.0, 0.0))
    assert one.interval() == (0.0, 3.0)  # at most thrice in 97.5% of draws
    values = np.random.default_rng(5).normal(3.0, 1.0, 400)
    many, error = PerSample.of_mean(range(400), values), values.std() / 20
    whole = many.interval()
    monkeypatch.setattr("evaluation.score.MOST_DRAWN", 2999)
    assert many.interval() == whole, "a function of the number of samples, however many are drawn at a time"
    # 2,000 draws know such a quantile to 0.06 of an error.
    assert many.interval() == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=error / 4)
    assert (one.select([1]).interval(), one.select([1, 2]).interval()) == (None, (0.0, 0.0))
    assert PerSample((0, 1), (0.5, 0.0), (1.0, 0.0)).interval() == (0.5, 0.5), "a set without a denominator is none"
    ratio = PerSample((0, 1), (math.log(2), 3 * math.log(8)), (1.0, 3.0), True)
    both = ratio.resampled(np.array([[0, 0], [0, 1], [1, 1]]))
    assert both == pytest.approx([2.0, 2**2.5, 8.0])
    assert ratio.select([1]).value() == pytest.approx(8.0) and ratio.select([1, 0]).indices == (1, 0)
    assert ratio.select([1, 0]).denominators == (3.0, 1.0)


def test_intervals_of_shares_and_means() -> None:
    assert wilson_interval(0, 100)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(100, 100)[1] == pytest.approx(1.0)
    low, high = wilson_interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert mean_interval([1.0]) is None
    # Two values: their standard deviation is sqrt(2), that of their mean 1.
    assert mean_interval([1.0, 3.0]) == pytest.approx((2 - 1.959964, 2 + 1.959964))
    # What is no number is null in JSON.
    written = Score("x", math.nan, 1, (1.0, math.inf), {}, {"y": -math.inf, "z": "inf"}, ("few",)).to_json()
    assert written["value"] is None and written["interval_95"] == [1.0, None]
    assert (written["details"], written["cautions"]) == ({"y": None, "z": "inf"}, ["few"])
    json.dumps(written, allow_nan=False)


# Distances between samples and text.


def test_frechet_by_hand_and_as_scipy() -> None:
    x = np.array([[0.0], [2.0]])
    # Means 1 and 4, variances 2 and 8: 9 + 2 + 8 - 2 sqrt(16).
    assert distance.frechet_distance(x, np.array([[2.0], [6.0]])) == pytest.approx(11.0)
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(200, 6)), generator.normal(1.0, 2.0, size=(150, 6))
    first, second = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = np.real(np.asarray(linalg.sqrtm(first @ second)))
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(first + second - 2 * root)
    assert distance.frechet_distance(x, y) == pytest.approx(expected, rel=1e-6)
    assert distance.frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)
    wide = generator.normal(size=(3, 60))  # a covariance of rank 2, whose other roots rounding makes negative
    assert distance.frechet_distance(wide, wide) == pytest.approx(0.0, abs=1e-3)


def test_energy_by_hand_and_as_scipy_and_never_all_distances_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "ROWS_AT_ONCE", 7)
    # E|X - Y| = 2, E|X - X'| = 2 over distinct pairs, E|Y - Y'| = 4.
    x, y = np.array([[0.0], [2.0]]), np.array([[0.0], [4.0]])
    assert distance.energy_distance(x, y).value == pytest.approx(2 * 2 - 2 - 4)
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(300, 1)), generator.normal(0.7, size=(400, 1))
    n, m = len(x), len(y)
    within = [np.abs(rows - rows.T).mean() for rows in (x, y)]
    # scipy keeps pairs of a row with itself and takes the root of half; both are put back.
    unbiased = scipy_energy(x[:, 0], y[:, 0]) ** 2 - within[0] / (n - 1) - within[1] / (m - 1)
    tracemalloc.start()
    found, (_, most) = distance.energy_distance(x, y), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.value == pytest.approx(unbiased, rel=1e-6) and most < x.itemsize * n * n / 2
    # From the rows themselves.
    again = distance.jackknife(lambda kept: distance.energy_distance(x[kept], y).value, n)
    assert (found.low, found.high) == pytest.approx((again.low, again.high), rel=1e-6)
    far = generator.normal(size=(9, 65)) * 1e6  # a row and itself, of large numbers: nothing, and not their rounding
    assert not distance.distance_sums(far, far).diagonal().any()


def test_gradient_moment_by_hand() -> None:
    # Means 1 and 5, variances 2 and 8, two rows each: (16 - 2/2 - 8/2) / 8.
    x, y = np.array([[0.0], [2.0]]), np.array([[3.0], [7.0]])
    assert distance.gradient_moment(x, y).value == pytest.approx(11 / 8)
    generator = np.random.default_rng(4)
    x, y = generator.normal(0.5, size=(400, 3)), generator.normal(size=(400, 3))
    found = distance.gradient_moment(x, y)
    assert distance.gradient_moment(7 * x, 7 * y).value == pytest.approx(found.value)
    assert found.low < 0.25 < found.high  # 3 times 0.5^2 in units of 3


def test_distances_need_a_spread_on_both_sides() -> None:
    for x, y in (((1, 4), (9, 4)), ((9, 4), (1, 4))):
        for measure in (distance.energy_distance, distance.gradient_moment, distance.frechet_distance):
            with pytest.raises(UsageError, match="a spread needs two"):
                measure(np.ones(x), np.ones(y))


def test_ngram_vectors_see_order_and_frequency_alone() -> None:
    rows = [[1, 2, 3, 1, 2, 3], [3, 1, 2, 3, 1, 2], [1, 1, 2, 2, 3, 3]]
    vectors = distance.ngram_vectors(rows)
    assert np.allclose((vectors**2).sum(1), 3.0)  # unit length for each of the three orders
    unigrams, bigrams = vectors[:, :2048], vectors[:, 2048:4096]
    assert np.allclose(unigrams[0], unigrams[2]) and not np.allclose(bigrams[0], bigrams[2])
    assert not np.allclose(distance.ngram_vectors([[1, 2]]), distance.ngram_vectors([[2, 1]]))
    one, other = distance.ngram_vectors([[0, 1, 0, 2, 0], [0, 2, 0, 1, 0]])  # the same pairs in another order
    assert np.array_equal(one[:4096], other[:4096]) and not np.allclose(one, other)
    assert len({int(row.argmax()) for row in distance.ngram_vectors([[2048 * n] for n in range(9)])}) == 9


def test_jackknife_of_a_mean_is_the_known_interval() -> None:
    """Of 20 values each is a group of its own: the half width is 1.96 standard errors."""
    x = np.random.default_rng(4).normal(size=20)
    found = distance.jackknife(lambda kept: float(x[kept].mean()), len(x))
    half = 1.959964 * x.std(ddof=1) / np.sqrt(len(x))
    assert (found.value, found.low, found.high) == pytest.approx((x.mean(), x.mean() - half, x.mean() + half))


def test_naive_samplers_are_what_their_names_say() -> None:
    text = markov_text(400, 48, 5)
    naive = distance.naive_samples(text, 300)
    assert set(naive) == {"periodic text", "unigram draws", "frequent 4-grams", "shuffled rows"}
    assert {rows.shape for rows in naive.values()} == {(300, 48)}
    again = distance.naive_samples(text, 300)
    assert all(np.array_equal(rows, again[name]) for name, rows in naive.items())
    begun = {tuple(row[:8]) for row in naive["periodic text"]}
    assert np.array_equal(naive["periodic text"], np.tile(naive["periodic text"][:, :8], 6))
    assert begun <= {tuple(row[:8]) for row in text} and len(begun) > 100
    # 14,400 tokens: five standard errors of each token's share.
    shares, drawn = (np.bincount(rows.ravel(), minlength=40) / rows.size for rows in (text, naive["unigram draws"]))
    assert (abs(drawn - shares) <= 5 * np.sqrt(shares * (1 - shares) / 14_400)).all()
    uses = Counter(tuple(row[i : i + 4]) for row in text.tolist() for i in range(45))
    least = sorted(uses.values())[-64]
    assert min(uses[tuple(gram)] for gram in naive["frequent 4-grams"].reshape(-1, 4).tolist()) >= least
    shuffled = naive["shuffled rows"]
    assert sorted(shuffled[0].tolist()) in [sorted(row.tolist()) for row in text]


def test_typicality_as_scipy_and_on_both_sides() -> None:
    generator = np.random.default_rng(8)
    fitted, typical, same, near, far = (generator.normal(scale=scale, size=(500, 8)) for scale in (1, 1, 1, 0.3, 2))
    covariance = np.cov(fitted, rowvar=False)
    inverse = np.linalg.inv(covariance + np.eye(8) * 1e-3 * np.trace(covariance) / 8)
    mean = fitted.mean(0)
    ours, theirs = (np.mean([mahalanobis(row, mean, inverse) for row in rows]) for rows in (far, typical))
    gap = distance.typicality_gap(far, fitted, typical)
    assert gap.value == pytest.approx(ours / theirs - 1, rel=1e-6)
    values = [distance.typicality_gap(rows, fitted, typical) for rows in (same, near, far)]
    assert values[0].value < 0.05 < min(value.low for value in values[1:])


def test_beginnings_and_memory_by_hand() -> None:
    rows = [[0, *range(1, 30)], [0, *range(1, 30)], [0, *range(50, 79)]]
    assert distance.distinct_beginnings(rows) == pytest.approx(2 / 3)
    near = [[n, *range(8), n] for n in range(3)]  # eight tokens count, not the given one
    assert distance.distinct_beginnings([*near, [0, *range(7), 50]]) == 2 / 4
    training = np.array([[9, *range(1, 30)]])
    # 15 16-grams a row; of the first two rows all but the one that holds the first token.
    assert distance.memorised_counts(rows, training).tolist() == [[14, 15], [14, 15], [0, 15]]
    assert distance.memorised_counts([[1, 2]], training).tolist() == [[0, 0]]


def test_the_floor_of_a_sorted_text_is_that_of_any_other() -> None:
    rows = np.concatenate([markov_text(200, 32, 1), np.zeros((200, 32), dtype=int)])
    text = ReferenceText(rows.tolist(), "tokens", None, None, Path("x"))
    floor = Ruler(text, 200, None).floor["energy_distance"]
    assert floor.low < 0 < floor.high
    assert len(Ruler(text, 150, None).vectors) == 150, "as many rows as there are samples"
    with pytest.raises(UsageError, match="got 127; expected at least 128"):
        Ruler(text, 127, None)
    with pytest.raises(UsageError, match="got 200; expected at least 256"):
        Ruler(replace(text, rows=text.rows[:200]), 200, None)


def test_the_states_of_own_rows_are_held_against_those_of_other_rows(
    judge: JudgeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = markov_text(256, 12, 1, vocab_size=2)
    texts = [" ".join("ab"[token] for token in row) for row in rows]
    text = ReferenceText(rows.tolist(), "words", texts, None, Path("x"))
    ruler = Ruler(text, 128, Judging.of(judge, tmp_path, max_tokens=9))
    assert len(list(tmp_path.iterdir())) == 1, "what was read is kept"
    all_states = text_features(judge, texts, 9, tmp_path)
    others = np.setdiff1d(np.arange(256), ruler.own)
    own, rest = (all_states.select(places) for places in (ruler.own, others))
    halves = np.array_split(own.means.astype(np.float64), 2)
    reference, gap = rest.means.astype(np.float64), distance.typicality_gap
    vectors = (distance.ngram_vectors(rows[places]) for places in (ruler.own, others))
    gradients = (part.gradients.astype(np.float64) for part in (own, rest))
    expected = {
        "energy_distance": distance.energy_distance(*vectors).value,
        "frechet_distance": distance.frechet_distance(own.means.astype(np.float64), reference),
        "gradient_moment": distance.gradient_moment(*gradients).value,
        "typicality_gap": gap(halves[0], reference, halves[1]).value,
    }
    assert {name: ruler.floor[name].value for name in expected} == pytest.approx(expected, rel=1e-6)
    found = ruler.measure(rows[:130].tolist(), all_states.select(np.arange(130)))
    states = all_states.means[:130].astype(np.float64), reference, own.means.astype(np.float64)
    assert found["typicality_gap"].value == pytest.approx(gap(*states).value, rel=1e-6)

    def counted(_: object, ours: TextFeatures, theirs: TextFeatures, max_tokens: int) -> Score:
        return Score(f"{max_tokens} tokens", len(theirs.values), len(ours.values))

    monkeypatch.setattr("evaluation.text.reference.mauve_score", counted)
    given = SampleSet("s", rows[:150].tolist(), texts[:150], [*range(150)], [], [], 0, {}, {}, Path("s"))
    *_, mauve = ruler.scores(given)
    assert (mauve.name, mauve.value, mauve.num_samples) == ("9 tokens", 256, 150), "against all of the text"
    assert mauve.details["floor"] == 128, "the text's own rows against the others alone"
    energy, words = ruler.scores(given)[0], distance.ngram_vectors([words_of(one) for one in texts[:150]])
    assert energy.value == distance.energy_distance(words, ruler.vectors).value
    assert (energy.num_samples, energy.settings["n-grams of"], ruler.ranking) == (150, "words", "frechet_distance")


def test_texts_of_a_store_are_written_as_samples_are(tmp_path: Path, judge_folder: Path) -> None:
    """Without the token in front; words of a file are what stands between spaces and marks."""
    rows = np.array([[2, 0, 1, 0], [0, 1, 2, 0]])
    write_tokens(tmp_path, {"train": rows[[0, 0]], "validation": rows}, vocab_size=4, bos_id=2)
    with pytest.raises(UsageError, match="keeps no tokenizer"):
        ReferenceText.read(tmp_path).require_texts()
    for place in ("tokens/tokenizer", "store/tokenizer", "tokenizer"):
        shutil.copytree(judge_folder, tmp_path / place)
        found = ReferenceText.read(tmp_path, length=3)
        shutil.rmtree(tmp_path / place)
        assert found.texts == ["a b", "a b <eos>"] and found.rows == [[2, 0, 1], [0, 1, 2]]
    assert found.decode([[], [2], [0]]) == ["", "", "a"]
    assert read_data_rows(tmp_path).name == f"validation split of {tmp_path.name}, 2 rows of 4 tokens"
    write_tokens(tmp_path / "empty", {"train": rows, "validation": rows[:0]}, vocab_size=4, bos_id=2)
    with pytest.raises(UsageError, match="the split is empty"):
        read_data_rows(tmp_path / "empty")
    one = ReferenceText.read(tmp_path, 1, 3)
    assert (len(one.rows), one.training.tolist()) == (1, [[2, 0, 1, 0]] * 2)  # type: ignore[union-attr]
    assert len(set(words_of("It's a day, a day."))) == 7 and words_of("a\n b") == words_of("a b")
    file = write_lines(tmp_path / "r.jsonl", {"text": "a b"}, {"text": ""})
    assert ReferenceText.read(file).rows == [words_of("a b")], "a text without a word is left out"
