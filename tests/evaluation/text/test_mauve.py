"""MAUVE: mauve-text's own number from text to score, and every seed in it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import mauve
import numpy as np
import pytest
import torch

from evaluation.text.mauve_divergence import (
    TextFeatures,
    mauve_of_histograms,
    mauve_score,
    text_features,
)
from evaluation.text.reading import JudgeModel, Room, load_judge
from shards.errors import UsageError

LIMIT = 12


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory, judge_folder: Path) -> Path:
    """mauve-text takes models with this in their name only."""
    folder = tmp_path_factory.mktemp("models") / "gpt2-tiny"
    return Path(shutil.copytree(judge_folder, folder))


@pytest.fixture(scope="module")
def judge(gpt2_folder: Path) -> JudgeModel:
    return load_judge(str(gpt2_folder))


def texts(seed: int, share_of_b: float) -> list[str]:
    generator = np.random.default_rng(seed)
    return [
        " ".join("ab"[int(u < share_of_b)] for u in generator.random(generator.integers(3, 20)))
        for _ in range(130)
    ]


def test_the_score_is_that_of_mauve_text_called_directly(
    judge: JudgeModel, gpt2_folder: Path
) -> None:
    real, ours = texts(1, 0.3), [*texts(2, 0.6), ""]  # mauve-text leaves empty texts out
    direct = [
        mauve.compute_mauve(
            p_text=real,
            q_text=ours,
            featurize_model_name=str(gpt2_folder),
            max_text_length=LIMIT,
            seed=seed,
        ).mauve
        for seed in (25, 31)
    ]
    features = (text_features(judge, part, LIMIT) for part in (ours, real))
    score = mauve_score(judge, *features, max_tokens=LIMIT, seeds=(25, 31))
    assert score.details["by_seed"] == pytest.approx(direct, abs=1e-6)
    assert score.value == pytest.approx(np.mean(direct), abs=1e-6)
    spread = abs(direct[0] - direct[1]) / 2**0.5
    assert score.details["spread_over_seeds"] == pytest.approx(spread, abs=1e-6)
    assert score.details["num_empty"] == 1 and score.num_samples == 130


def test_texts_side_by_side_have_the_features_of_each_alone(judge: JudgeModel) -> None:
    """One block of 8 units: float32 sums of 8 and 32 terms below 2 in another order."""
    given = [*texts(1, 0.3), "a"]
    alone = text_features(judge, given, LIMIT)
    together = text_features(replace(judge, room=Room(64, 1000)), given, LIMIT)
    assert np.array_equal(alone.num_tokens, together.num_tokens)
    np.testing.assert_allclose(together.values, alone.values, rtol=0, atol=2e-5)


def test_a_model_that_is_all_head_is_refused(judge: JudgeModel) -> None:
    with pytest.raises(UsageError, match=r"no features.*AllHead.*--reference"):
        text_features(replace(judge, model=AllHead()), ["a"], LIMIT)


class AllHead(torch.nn.Linear):
    """Says of itself what transformers says of a model without a body of its own."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    @property
    def base_model(self) -> torch.nn.Module:
        return self


def test_our_area_of_histograms_is_mauve_texts(judge: JudgeModel) -> None:
    ours, real = (text_features(judge, part, LIMIT) for part in (texts(2, 0.6), texts(1, 0.3)))
    direct = mauve.compute_mauve(ours.values, real.values, num_buckets=12, verbose=False)
    found = mauve_of_histograms(direct.p_hist, direct.q_hist)
    assert found == pytest.approx(float(direct.mauve), abs=1e-6) and 0.05 < found < 0.95
    score = mauve_score(judge, ours, real, max_tokens=LIMIT)
    assert score.interval is not None and score.interval[0] < score.value < score.interval[1]


def test_every_seed_is_used(judge: JudgeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compute = mauve.compute_mauve

    def noted(**options: object) -> object:
        seen.append(options["seed"])
        return compute(**options)

    monkeypatch.setattr(mauve, "compute_mauve", noted)
    features = text_features(judge, texts(1, 0.3), LIMIT)
    mauve_score(judge, features, features, max_tokens=LIMIT, seeds=(3, 4, 5))
    assert seen == [3, 4, 5]


def test_features_are_kept_by_content(tmp_path: Path, judge: JudgeModel) -> None:
    first = text_features(judge, ["a b", "b"], 4, tmp_path)
    (file,) = tmp_path.iterdir()
    assert np.array_equal(text_features(judge, ["a b", "b"], 4, tmp_path).values, first.values)
    text_features(judge, ["a b", "a"], 4, tmp_path)
    text_features(judge, ["a b", "b"], 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    file.write_bytes(file.read_bytes()[:-30])  # a torn file is computed again
    assert np.array_equal(text_features(judge, ["a b", "b"], 4, tmp_path).values, first.values)


def test_lengths_are_what_was_read(judge: JudgeModel) -> None:
    features = text_features(judge, ["a b a", "b " * 50], 5)
    assert features.num_tokens.tolist() == [3, 5]
    with pytest.raises(UsageError, match="max_tokens"):
        text_features(judge, ["a"], 17)


def test_gradients_are_those_of_the_surprise(judge: JudgeModel) -> None:
    """By autograd, with respect to the logarithm of a scale of the last states; 0 for one token."""
    features = text_features(judge, ["a b a a", "b"], LIMIT)
    ids = torch.tensor([judge.tokenizer.encode("a b a a")])
    log_scale = torch.zeros(features.means.shape[1], requires_grad=True)
    states = judge.model.base_model(input_ids=ids).last_hidden_state[0]
    logits = judge.model.get_output_embeddings()(states * log_scale.exp())
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    assert np.allclose(features.gradients[0], log_scale.grad, atol=1e-6)
    assert np.abs(features.gradients[0]).max() > 1e-3 and not features.gradients[1].any()


def test_many_texts_of_equal_length_need_no_caution(judge: JudgeModel) -> None:
    values = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    features = TextFeatures(values, values, values, np.full(1000, 9))
    score = mauve_score(judge, features, features, max_tokens=9, seeds=(25,))
    assert score.cautions == () and score.settings["buckets"] == 100
    few = features.select(np.arange(999))
    assert mauve_score(judge, few, features, max_tokens=9, seeds=(25,)).cautions
