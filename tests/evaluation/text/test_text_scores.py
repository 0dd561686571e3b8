"""Perplexity, entropy and their intervals against the authors' numbers and hand-worked cases."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from evaluation.score import (
    PerSample,
    Score,
    bootstrap_draws,
    mean_interval,
    percentile_interval,
    wilson_interval,
)
from evaluation.text.distance import (
    distinct_ngram_share,
    entropy_score,
    repetition_share,
    unigram_entropy_nats,
)
from evaluation.text.reading import counted_positions, summarise, token_nll_nats, window_starts

CASES = ("len160", "len150", "len65", "len40", "nosliding", "padded")


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
    names = set(model.state_dict())
    weights = {
        key: value
        for name, value in tensors.items()
        for key in names
        if name.endswith(key)
        and "." in key
        and name.split(key)[0] in ("", "weights.", "gpt2.", "model.")
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return description, tensors, model


@pytest.mark.parametrize("case", CASES)
def test_token_nll_perplexity_and_entropy_match_the_authors(case: str, authors: tuple) -> None:
    description, tensors, model = authors
    given = description["results"][case]
    ids = tensors[f"{case}.ids"]
    mask = tensors.get(f"{case}.attention_mask")
    eos_id = description["gpt2_config"]["eos_token_id"]
    scored = ids[: given["sequences_scored"]]
    nll = token_nll_nats(model, scored, given["context"], given["stride"])
    counted = counted_positions(scored, [eos_id])
    if mask is not None:
        counted &= mask.bool()
    assert torch.equal(counted, tensors[f"{case}.valid"].bool())
    assert (nll - tensors[f"{case}.nll"])[counted].abs().max() < 1e-4
    perplexity = math.exp(nll[counted].double().mean())
    assert perplexity == pytest.approx(given["gen_ppl"], rel=1e-4)
    expected = tensors[f"{case}.entropy_per_sample"].tolist()
    # The authors count right padding as tokens; ours scores samples, which have none.
    assert [unigram_entropy_nats(row) for row in ids.tolist()] == pytest.approx(expected, abs=1e-5)


def test_windows_score_every_position_once() -> None:
    assert window_starts(10, 10, 5) == [(0, 0)]
    assert window_starts(11, 10, 5) == [(0, 0), (5, 10)]
    assert window_starts(20, 10, 5) == [(0, 0), (5, 10), (10, 15)]
    with pytest.raises(ValueError, match="stride"):
        window_starts(10, 4, 5)


def test_entropy_by_hand() -> None:
    assert unigram_entropy_nats([1, 1, 2, 2]) == pytest.approx(math.log(2))
    assert unigram_entropy_nats([7, 7, 7]) == 0.0
    score = entropy_score([[1, 1, 2, 2], [3, 3]])
    assert score.value == pytest.approx(math.log(2) / 2)
    pooled = -(4 / 6 * math.log(1 / 3) + 2 / 6 * math.log(1 / 3))  # three tokens, two of each
    assert score.details["pooled_nats"] == pytest.approx(pooled)
    assert distinct_ngram_share([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert score.details["distinct_1"] == pytest.approx(3 / 6)
    assert score.details["distinct_2"] == pytest.approx(4 / 4)
    assert score.settings["tokens_per_sample"] == "2..4"
    turns = entropy_score([[1, 2, 1, 2, 1]]).details
    assert [turns[f"distinct_{n}"] for n in (1, 2, 3)] == pytest.approx([2 / 5, 2 / 4, 2 / 3])


def test_repetition_is_counted_within_a_sample() -> None:
    assert repetition_share([1, 2, 3, 4] * 2, 4) == pytest.approx(1 - 4 / 5)
    assert repetition_share([5] * 10, 4) == pytest.approx(1 - 1 / 7)
    assert repetition_share([1, 2], 4) == 0.0
    twice = entropy_score([[1, 2, 3, 4], [1, 2, 3, 4]])  # equal samples: distinct-n sees it
    assert (twice.details["repeated_4"], twice.details["distinct_3"]) == (0.0, 0.5)


def test_both_aggregates_of_perplexity_by_hand() -> None:
    """Texts of perplexity 2, 4 and 32 over 1, 1 and 4 tokens: every way to average differs."""
    nats = (math.log(2), math.log(4), 4 * math.log(32))
    score = summarise(PerSample((0, 1, 2), nats, (1.0, 1.0, 4.0), True), 0, {})
    assert score.value == pytest.approx(2 ** (23 / 6))
    assert score.details["per_sample_mean"] == pytest.approx(38 / 3)
    assert score.details["per_sample_median"] == pytest.approx(4.0)
    assert score.details["nll_nats_per_token"] == pytest.approx(23 / 6 * math.log(2))
    assert score.details["num_tokens"] == 6


def test_a_bootstrap_interval_covers_what_it_says() -> None:
    """Of 300 sets of 60 normal values the 95% interval holds the mean in 0.91 to 0.98.

    A percentile bootstrap of 60 covers about 0.945; four standard errors of the share are 0.052.
    """
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        values = generator.normal(3.0, 1.0, 60)
        interval = PerSample.of_mean(range(60), values).interval()
        assert interval is not None
        covered += interval[0] <= 3.0 <= interval[1]
    assert 0.893 < covered / 300 < 0.997


def test_a_bootstrap_resamples_whole_texts_with_replacement() -> None:
    draws = bootstrap_draws(5, 4000)
    assert draws.shape == (4000, 5) and set(draws.ravel().tolist()) == set(range(5))
    assert np.array_equal(draws, bootstrap_draws(5, 4000))
    # A given text is absent from a draw with chance (4/5)^5 = 0.328, four standard errors 0.030.
    assert abs((draws != 0).all(1).mean() - 0.8**5) < 0.03
    ratio = PerSample((0, 1), (math.log(2), 3 * math.log(8)), (1.0, 3.0), True)
    both = ratio.resampled(np.array([[0, 0], [0, 1], [1, 1]]))
    assert both == pytest.approx([2.0, 2**2.5, 8.0])
    assert ratio.select([1]).value() == pytest.approx(8.0)
    assert PerSample.from_json(json.loads(json.dumps(asdict(ratio)))) == ratio
    assert percentile_interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))


@pytest.mark.parametrize(
    "change", [{"numerators": [1.0]}, {"numerators": [1.0, math.nan]}, {"denominators": [0, 0]}]
)
def test_damaged_values_per_sample_are_refused(change: dict) -> None:
    good = PerSample((0, 1), (1.0, 2.0), (1.0, 1.0))
    with pytest.raises(ValueError):
        PerSample.from_json(asdict(good) | change)


def test_a_score_that_is_no_number_is_null_in_json() -> None:
    score = Score("x", math.nan, 1, (1.0, math.inf), details={"y": -math.inf, "z": "inf"})
    written = score.to_json()
    assert written["value"] is None and written["interval_95"] == [1.0, None]
    assert written["details"] == {"y": None, "z": "inf"}
    json.dumps(written, allow_nan=False)


def test_tokens_between_texts_do_not_count() -> None:
    ids = torch.tensor([[1, 5, 1, 6, 2, 7]])
    assert counted_positions(ids, [1, 2]).tolist() == [[False, True, False, True, False, True]]
    assert counted_positions(ids, []).tolist() == [[False, True, True, True, True, True]]


def test_intervals_of_shares_and_means() -> None:
    assert wilson_interval(0, 100)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(100, 100)[1] == pytest.approx(1.0)
    low, high = wilson_interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(3, 2)
    assert mean_interval([1.0]) is None
    # Two values: their standard deviation is sqrt(2), that of their mean 1.
    assert mean_interval([1.0, 3.0]) == pytest.approx((2 - 1.959964, 2 + 1.959964))
