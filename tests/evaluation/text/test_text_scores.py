"""Perplexity, entropy and their intervals against the authors' numbers and hand-worked cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from evaluation.score import mean_interval, wilson_interval
from evaluation.text.diversity import distinct_ngram_share, entropy_score, unigram_entropy_nats
from evaluation.text.perplexity import counted_positions, token_nll_nats, window_starts

CASES = ("len160", "len150", "len65", "len40", "nosliding", "padded")


@pytest.fixture(scope="module")
def authors(golden: Path) -> tuple[dict, dict[str, torch.Tensor], GPT2LMHeadModel]:
    description = json.loads((golden / "gen_ppl.json").read_text())
    tensors = load_file(golden / "gen_ppl.safetensors")
    given = description["gpt2_config"]
    end = given["eos_token_id"]
    config = GPT2Config(
        vocab_size=given["vocab_size"],
        n_embd=given["n_embd"],
        n_layer=given["n_layer"],
        n_head=given["n_head"],
        n_positions=given["n_positions"],
        bos_token_id=end,
        eos_token_id=end,
    )
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
    counted = counted_positions(scored, eos_id, mask)
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
    assert distinct_ngram_share([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)


def test_wilson_interval_contains_the_share_and_stays_in_range() -> None:
    assert wilson_interval(0, 100)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(100, 100)[1] == pytest.approx(1.0)
    low, high = wilson_interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(3, 2)


def test_mean_interval() -> None:
    assert mean_interval([1.0]) is None
    interval = mean_interval([1.0, 3.0])
    assert interval is not None and sum(interval) / 2 == pytest.approx(2.0)
