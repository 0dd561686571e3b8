"""Which models may judge, what of a text they read, that nothing is read twice, and MAUVE."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mauve
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from evaluation.text import reading
from evaluation.text.mauve_divergence import TextFeatures, _cautions, mauve_of_histograms, mauve_score, text_features
from evaluation.text.reading import JudgeModel, Judging, load_judge
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import BatchSize
from tests.evaluation.kit import Told, nll_nats


@pytest.fixture
def copied(tmp_path: Path, judge_folder: Path) -> Path:
    return Path(shutil.copytree(judge_folder, tmp_path / "copy"))


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_text_is_read_up_to_1024_tokens_unless_a_limit_is_given(copied: Path) -> None:
    """The length of the paper's samples, also of a judge that reads further or without a limit."""
    shape = {"vocab_size": 4, "n_layer": 1, "n_head": 1}
    config = transformers.BloomConfig(hidden_size=8, **shape)
    transformers.BloomForCausalLM(config).save_pretrained(copied)
    judge = load_judge(str(copied))
    assert judge.context_length == 1024
    assert Judging.of(judge).perplexity(["a b " * 600]).details["num_tokens"] == 1023
    config = transformers.GPT2Config(n_positions=2048, n_embd=8, **shape)
    transformers.GPT2LMHeadModel(config).save_pretrained(copied)
    assert Judging.load(str(copied)).limits == reading.ReadingLimits(2048, 1024, 1024)
    assert Judging.load(str(copied), max_tokens=1500).limits.max_tokens == 1500
    assert Judging.of(replace(judge, context_length=16), stride=8).limits.max_tokens == 1024, "in windows"
    assert Judging.of(judge, None, 2, 1024).limits == reading.ReadingLimits(1024, 1024, 2), "the least and the most"


def test_a_judge_computes_in_float32_and_is_known_by_its_weights(
    copied: Path, judge: JudgeModel, judge_folder: Path, tmp_path: Path
) -> None:
    assert load_judge(str(copied)).weights_sha256 == judge.weights_sha256 != ""
    ids = torch.tensor([[2, 0, 1]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(judge_folder)(input_ids=ids)
    assert (judge.model(input_ids=ids).logits - theirs.logits).abs().max() < 1e-5
    weights = load_file(copied / "model.safetensors")
    halved = {name: value.bfloat16() for name, value in weights.items()}
    save_file(halved, copied / "model.safetensors", {"format": "pt"})
    change_json(copied / "config.json", dtype="bfloat16")
    other = load_judge(str(copied))
    assert {value.dtype for value in other.model.parameters()} == {torch.float32}
    assert other.weights_sha256 != judge.weights_sha256
    # What one has read is no reading of the other's.
    Judging.load(str(judge_folder), kept=tmp_path / "kept").perplexity(["a b"])
    same, changed = (Judging.load(str(folder), kept=tmp_path / "kept").memory for folder in (judge_folder, copied))
    assert "a b" in same and "a b" not in changed


def test_the_start_token_of_a_judge_stands_in_front_and_never_counts(copied: Path) -> None:
    """As with ``<s>`` of LLaMA-like judges: a border inside a text is no target."""
    change_json(copied / "tokenizer_config.json", bos_token="<unk>")
    start, text = {"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    adds = {"type": "TemplateProcessing", "single": [start, text], "pair": [start, text]}
    adds |= {"special_tokens": {"<unk>": {"id": "<unk>", "ids": [3], "tokens": ["<unk>"]}}}
    change_json(copied / "tokenizer.json", post_processor=adds)  # a tokenizer that would put it there itself
    judge = load_judge(str(copied))
    assert text_features(judge, ["a"], 5).num_tokens == [2], "as mauve-text reads it"
    assert (judge.document_start_id, judge.border_ids) == (3, (2, 3))
    judging = Judging.of(judge)
    plain = judging.perplexity(["a b a", "", "<eos>"])
    assert (plain.details["num_tokens"], plain.details["num_empty"]) == (3, 2)
    assert plain.cautions == ("2 texts without a token to score are left out",)
    assert [span[:2] for span in judging.spans("a b a")] == [(0, 1), (1, 3), (3, 5)]
    bordered = Judging.of(judge).perplexity(["a b <unk> a <eos> b"])
    assert bordered.details["num_tokens"] == 4
    nll = nll_nats(judge, torch.tensor([3, 0, 1, 0])).sum()
    assert plain.value == pytest.approx(math.exp(nll / 3), rel=1e-5)
    change_json(copied / "tokenizer_config.json", bos_token=None, eos_token=None)
    with pytest.raises(GdistillError, match="no token between texts"):
        load_judge(str(copied))


def test_long_texts_are_scored_in_windows_as_one_forward_pass_each(judge: JudgeModel) -> None:
    """Context 16, stride 8, by hand: the second window scores positions 16 to 23 only."""
    ids = torch.tensor([2] + [0, 1, 1] * 7)  # 22 tokens with the one in front
    by_hand = torch.cat([nll_nats(judge, ids[:16]), nll_nats(judge, ids[8:])[7:]])
    details = Judging.of(judge, stride=8, max_tokens=22).perplexity(["a b b " * 7]).details
    assert details["num_tokens"] == len(by_hand) == 21
    assert details["nll_nats_per_token"] == pytest.approx(float(by_hand.mean()), rel=1e-5)


def test_readings_survive_and_are_not_made_twice(
    tmp_path: Path, judge: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a b", "b b a", "", "a b"]
    first = Judging.of(judge, tmp_path).read(texts)
    (file,) = tmp_path.iterdir()
    with open(file, "ab") as torn:  # as a kill in the middle of a line leaves it
        torn.write(b'["0011')
    monkeypatch.setattr(reading, "token_nll_nats", lambda *_: pytest.fail("read again"))
    assert Judging.of(judge, tmp_path).read(texts) == first  # to the last bit
    assert first[0] == first[3] and first[2].ids == ()
    # Other windows, or another limit, give other numbers.
    for limits in ({"stride": 4}, {"max_tokens": 8}):
        assert "a b" not in Judging.of(judge, tmp_path, **limits).memory
    assert "a b" not in Judging.of(replace(judge, products="TF32"), tmp_path).memory


# Texts side by side: nine windows of 16 at most.

TEXTS = ["a b b " * 9, "b", "", "a a b " * 2, "<eos>", "b b a " * 7 + "<eos> a", "a b b"]


def judging(judge: JudgeModel, texts: int = 1) -> Judging:
    return Judging.of(replace(judge, size=BatchSize(texts)), stride=8, max_tokens=29)


@pytest.mark.parametrize(("texts", "most"), [(2, 10**9), (3, 10**9), (100, 10**9), (7, 40)])
def test_texts_side_by_side_read_like_each_alone(
    judge: JudgeModel, texts: int, most: int, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """A logit of this judge is a sum of 8 terms of size below 1. What does not fit is remembered."""
    alone, passes, forward = judging(judge).read(TEXTS), [], judge.model.forward

    def noted(input_ids: Tensor, **options: Any) -> Any:
        passes.append(input_ids)
        if input_ids.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(judge.model, "forward", noted)
    together = judging(judge, texts)
    found = together.read(TEXTS)
    for one, other in zip(alone, found, strict=True):
        assert (one.ids, one.counted) == (other.ids, other.counted)
        assert other.nll_nats == pytest.approx(one.nll_nats, rel=0, abs=1e-5)
    assert found[4].nll_nats == (0.0,), "of a text without a token that counts"
    assert all(len(ids) <= texts for ids in passes)
    if texts == 100:
        assert len(passes) == 3, "one for each window of the longest"
    failed = sum(ids.numel() > most for ids in passes)
    together.read([text + " b" for text in TEXTS])
    assert sum(ids.numel() > most for ids in passes) == failed, "tried once in a process"
    assert told().count("out of memory") == failed and (failed > 0) == (most == 40)
    assert together.judge.size.rows == (texts if most > 40 else 1)


# MAUVE: mauve-text's own number from text to score, and every seed in it.

MOST = 12


def texts(seed: int, share_of_b: float) -> list[str]:
    generator = np.random.default_rng(seed)
    return [
        " ".join("ab"[int(u < share_of_b)] for u in generator.random(generator.integers(3, 20))) for _ in range(130)
    ]


def test_the_score_is_that_of_mauve_text_called_directly(judge: JudgeModel, judge_folder: Path) -> None:
    real, ours = texts(1, 0.3)[1:], [*texts(2, 0.6), ""]  # mauve-text leaves empty texts out
    options = {"featurize_model_name": str(judge_folder), "max_text_length": MOST}
    direct = [mauve.compute_mauve(p_text=real, q_text=ours, seed=seed, **options).mauve for seed in (25, 31)]
    features = [text_features(judge, part, MOST) for part in (ours, real)]
    score = mauve_score(judge, *features, max_tokens=MOST, seeds=(25, 31))
    assert score.details["by_seed"] == pytest.approx(direct, abs=1e-6)
    assert score.value == pytest.approx(np.mean(direct), abs=1e-6)
    spread = abs(direct[0] - direct[1]) / 2**0.5
    assert score.details["spread_over_seeds"] == pytest.approx(spread, abs=1e-6)
    assert score.details["num_empty"] == 1 and score.num_samples == 130
    assert score.settings == judge.identity | {
        "num_references": 129,
        "max_tokens": MOST,
        "scaling": 5,
        "seeds": [25, 31],
        "buckets": 13,
    }
    lengths = score.details["mean_tokens"], score.details["mean_tokens_reference"]
    assert lengths == tuple(part.num_tokens.mean() for part in features)
    few = features[0].select(np.arange(127))
    for pair in ((few, features[1]), (features[0], few)):
        with pytest.raises(UsageError, match="got 127; expected at least 128"):
            mauve_score(judge, *pair, max_tokens=MOST)

    many = TextFeatures(*[np.zeros((1000, 1))] * 3, np.full(1000, 9))  # type: ignore[arg-type]
    fewer, longer = many.select(np.arange(999)), replace(many, num_tokens=np.full(1000, 12))
    assert _cautions(many, many) == []
    for other, said in ((fewer, "fewer than 1,000 a side"), (longer, "by length alone")):
        assert said in _cautions(many, other)[0] and said in _cautions(other, many)[0]

    # Our area of histograms is mauve-text's.
    ours, real = features
    direct = mauve.compute_mauve(ours.values, real.values, num_buckets=12, verbose=False)
    found = mauve_of_histograms(direct.p_hist, direct.q_hist)
    assert found == pytest.approx(float(direct.mauve), abs=1e-6) and 0.05 < found < 0.95
    score = mauve_score(judge, ours, real, max_tokens=MOST, seeds=(25,))
    assert score.interval is not None and score.interval[0] < score.value < score.interval[1]
    assert score.details["spread_over_seeds"] == 0
    # Its half width is 1.96 deviations over sets of as many samples; 100 sets know one to 7%.
    direct = mauve.compute_mauve(real.values, ours.values, seed=25, verbose=False)
    drawn = np.random.default_rng(1).multinomial(130, direct.q_hist, size=400) / 130
    spread = np.std([mauve_of_histograms(direct.p_hist, q) for q in drawn])
    assert (score.interval[1] - score.interval[0]) / 2 == pytest.approx(1.96 * spread, rel=0.35)


def test_texts_side_by_side_have_the_features_of_each_alone(judge: JudgeModel) -> None:
    """One block of 8 units: float32 sums of 8 and 32 terms below 2 in another order."""
    given = [*texts(1, 0.3), "a"]
    alone = text_features(judge, given, MOST)
    together = text_features(replace(judge, size=BatchSize(64)), given, MOST)
    assert np.array_equal(alone.num_tokens, together.num_tokens)
    np.testing.assert_allclose(together.values, alone.values, rtol=0, atol=2e-5)


class AllHead(torch.nn.Linear):
    """Says of itself what transformers says of a model without a body of its own."""

    @property
    def base_model(self) -> torch.nn.Module:
        return self


def test_what_cannot_be_read_is_refused(judge: JudgeModel, judge_folder: Path) -> None:
    broken = load_judge(str(judge_folder))
    torch.nn.init.constant_(broken.model.lm_head.weight, float("nan"))
    with pytest.raises(GdistillError, match="a likelihood that is no number"):
        Judging.of(broken).perplexity(["a b"])
    with pytest.raises(UsageError, match=r"no features.*AllHead.*--reference"):
        text_features(replace(judge, model=AllHead(1, 1)), ["a"], MOST)
    with pytest.raises(GdistillError, match="no text has a token; got 2 empty texts"):
        text_features(judge, ["", ""], 5)


def test_features_are_kept_by_what_was_read(tmp_path: Path, judge: JudgeModel) -> None:
    assert text_features(judge, ["a b a", "b " * 50], 5).num_tokens.tolist() == [3, 5]
    first = text_features(judge, ["a b", "b"], 4, tmp_path)
    (file,) = tmp_path.iterdir()
    assert np.array_equal(text_features(judge, ["a b", "b"], 4, tmp_path).values, first.values)
    turned = text_features(judge, ["b", "a b"], 4, tmp_path)
    assert np.array_equal(turned.values, first.values[::-1])
    text_features(judge, ["a b", "b"], 1, tmp_path)
    for other in ({"weights_sha256": "another's"}, {"products": "TF32"}):
        text_features(replace(judge, **other), ["a b", "b"], 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    text_features(judge, ["a"] * 3, 4, tmp_path / "three")
    (three,) = (tmp_path / "three").iterdir()
    for content in (file.read_bytes()[:-30], three.read_bytes()):  # a torn file, and one of other texts
        file.write_bytes(content)
        assert np.array_equal(text_features(judge, ["a b", "b"], 4, tmp_path).values, first.values)


def test_gradients_are_those_of_the_surprise(judge: JudgeModel) -> None:
    """By autograd, with respect to the logarithm of a scale of the last states; 0 for one token."""
    features = text_features(judge, ["a b a a", "b"], MOST)
    ids = torch.tensor([judge.tokenizer.encode("a b a a")])
    log_scale = torch.zeros(features.means.shape[1], requires_grad=True)
    states = judge.model.base_model(input_ids=ids).last_hidden_state[0]
    logits = judge.model.get_output_embeddings()(states * log_scale.exp())
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    assert np.allclose(features.gradients[0], log_scale.grad, atol=1e-6)
    assert np.allclose(features.means[0], states.detach().mean(0), atol=1e-6)
    assert np.abs(features.gradients[0]).max() > 1e-3 and not features.gradients[1].any()
