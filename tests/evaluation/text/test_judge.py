"""Which models may judge, what of a text they judge, and that no reading is done twice."""

from __future__ import annotations

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from evaluation.text import reading
from evaluation.text.reading import (
    UNLIMITED_CONTEXT,
    JudgedText,
    JudgeMemory,
    JudgeModel,
    Judging,
    ReadingLimits,
    Room,
    generative_perplexity,
    load_judge,
    read_texts,
    reading_limits,
)
from shards.errors import GdistillError, UsageError


@pytest.fixture(scope="module")
def judge(judge_folder: Path) -> JudgeModel:
    return load_judge(str(judge_folder))


@pytest.fixture
def copied(tmp_path: Path, judge_folder: Path) -> Path:
    return Path(shutil.copytree(judge_folder, tmp_path / "copy"))


def test_a_judge_without_one_of_its_tensors_is_refused(copied: Path) -> None:
    """transformers would fill it with random numbers, and the perplexity with them."""
    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if name.endswith("attn.c_proj.weight"))
    del weights[name]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(GdistillError, match=r"judge's weights are incomplete.*c_proj"):
        load_judge(str(copied))


def test_a_judge_that_sees_the_future_is_refused(copied: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=4, intermediate_size=8, max_position_embeddings=16, **shape)
    for seed in range(2):  # whatever its weights
        torch.manual_seed(seed)
        BertLMHeadModel(config).save_pretrained(copied)
        with pytest.raises(UsageError, match="the judge is not causal"):
            load_judge(str(copied))


def test_a_judge_without_a_limit_reads_windows_of_1024(copied: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=4, hidden_size=8, n_layer=1, n_head=1)).save_pretrained(
        copied
    )
    judge = load_judge(str(copied))
    assert judge.context_length == UNLIMITED_CONTEXT
    assert generative_perplexity(judge, ["a b " * 600]).details["num_tokens"] == 1023


def test_a_text_is_read_up_to_1024_tokens_unless_a_limit_is_given(copied: Path) -> None:
    """The length of the paper's samples, also of a judge that reads further."""
    config = GPT2Config(vocab_size=4, n_positions=2048, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(copied)
    assert Judging.load(str(copied)).limits == ReadingLimits(2048, 1024, 1024)
    assert Judging.load(str(copied), max_tokens=1500).limits.max_tokens == 1500


def test_a_judge_computes_in_float32_and_is_known_by_its_weights(
    copied: Path, judge: JudgeModel, judge_folder: Path
) -> None:
    assert load_judge(str(copied)).weights_sha256 == judge.weights_sha256 != ""
    ids = torch.tensor([[2, 0, 1]])
    theirs = AutoModelForCausalLM.from_pretrained(judge_folder)(input_ids=ids).logits
    assert (judge.model(input_ids=ids).logits - theirs).abs().max() < 1e-5
    weights = load_file(copied / "model.safetensors")
    half = {name: value.bfloat16() for name, value in weights.items()}
    save_file(half, copied / "model.safetensors", {"format": "pt"})
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    other = load_judge(str(copied))
    assert {value.dtype for value in other.model.parameters()} == {torch.float32}
    assert other.weights_sha256 != judge.weights_sha256


def test_the_start_token_of_a_judge_stands_in_front_and_never_counts(copied: Path) -> None:
    """As with ``<s>`` of LLaMA-like judges: a border inside a text is no target."""
    file = copied / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"bos_token": "<unk>"}))
    judge = load_judge(str(copied))
    assert (judge.document_start_id, judge.border_ids) == (3, (2, 3))
    plain = generative_perplexity(judge, ["a b a"])
    assert plain.details["num_tokens"] == 3
    bordered = generative_perplexity(judge, ["a b <unk> a <eos> b"])
    assert bordered.details["num_tokens"] == 4
    ids = torch.tensor([[3, 0, 1, 0]])
    log_probs = judge.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    nll = -log_probs.gather(-1, ids[0, 1:, None]).sum()
    assert plain.value == pytest.approx(math.exp(nll / 3), rel=1e-5)


def test_a_judge_without_any_border_or_weights_is_refused(copied: Path) -> None:
    file = copied / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if k != "eos_token"}))
    with pytest.raises(GdistillError, match="no token between texts"):
        load_judge(str(copied))
    for name in ("./none", "nobody/nothing"):
        with pytest.raises(UsageError) as caught:
            load_judge(name)
        assert "judge" in caught.value.what and caught.value.expected


def test_long_texts_are_scored_in_windows_as_one_forward_pass_each(judge: JudgeModel) -> None:
    """Context 16, stride 8, by hand: the second window scores positions 16 to 23 only."""
    ids = torch.tensor([2] + [0, 1, 1] * 7)  # 22 tokens with the one in front
    text = "a b b " * 7
    first = _nll(judge, ids[:16])
    second = _nll(judge, ids[8:])[7:]
    score = generative_perplexity(judge, [text], stride=8, max_tokens=22)
    assert score.details["num_tokens"] == len(first) + len(second) == 21
    expected = torch.cat([first, second]).mean()
    assert score.details["nll_nats_per_token"] == pytest.approx(float(expected), rel=1e-5)


def _nll(judge: JudgeModel, ids: torch.Tensor) -> torch.Tensor:
    logits = judge.model(input_ids=ids[None]).logits[0, :-1]
    return -logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def test_readings_survive_and_are_not_made_twice(
    tmp_path: Path, judge: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = reading_limits(judge, None, None)
    texts = ["a b", "b b a", "", "a b"]
    first = read_texts(judge, texts, limits, JudgeMemory(tmp_path, {"stride": 8}))
    (file,) = tmp_path.iterdir()
    with open(file, "ab") as torn:  # as a kill in the middle of a line leaves it
        torn.write(b'["0011')
    monkeypatch.setattr(reading, "token_nll_nats", lambda *_: pytest.fail("read again"))
    again = read_texts(judge, texts, limits, JudgeMemory(tmp_path, {"stride": 8}))
    assert again == first  # to the last bit
    assert first[0] == first[3] and first[2].ids == ()
    other = JudgeMemory(tmp_path, {"stride": 4})
    assert "a b" not in other  # other windows give other numbers
    assert file.read_bytes().endswith(b"\n")


TEXTS = ["a b b " * 9, "b", "", "a a b " * 2, "<eos>", "b b a " * 7 + "<eos> a", "a b b"]


@pytest.mark.parametrize("tokens", [7, 16, 40, 1000])
@pytest.mark.parametrize("with_logits", [3, 16, 1000])
def test_texts_side_by_side_and_windows_in_parts_read_like_each_alone(
    judge: JudgeModel, tokens: int, with_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine windows of 16 at most; a logit of this judge is a sum of 8 terms of size below 1."""
    limits = ReadingLimits(16, 8, 29)
    alone = read_texts(judge, TEXTS, limits)
    together = replace(judge, room=Room(tokens, with_logits))
    passes = noted_passes(judge, monkeypatch)
    found = read_texts(together, TEXTS, limits)
    for one, other in zip(alone, found, strict=True):
        assert (one.ids, one.counted) == (other.ids, other.counted)
        assert other.nll_nats == pytest.approx(one.nll_nats, rel=0, abs=1e-5)
    assert found[4].nll_nats == (0.0,), "of a text without a token that counts"
    assert all(len(ids) == 1 or ids.numel() <= tokens for ids, _ in passes)
    assert all(logits <= max(with_logits, len(ids)) for ids, logits in passes)
    if tokens == 1000 == with_logits:
        assert len(passes) == 3, "one for each window of the longest"


def noted_passes(
    judge: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, int]]:
    """(token ids, positions whose logits were given) of each pass, while they are made."""
    passes: list[tuple[torch.Tensor, int]] = []
    forward = judge.model.forward

    @functools.wraps(forward)
    def noted(input_ids: torch.Tensor, **options: Any) -> Any:
        output = forward(input_ids=input_ids, **options)
        passes.append((input_ids, output.logits.shape[0] * output.logits.shape[1]))
        return output

    monkeypatch.setattr(judge.model, "forward", noted)
    return passes


def test_what_did_not_fit_is_remembered(
    judge: JudgeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    together, limits = replace(judge, room=Room(100, 1000)), ReadingLimits(16, 8, 29)
    alone = read_texts(judge, TEXTS, limits)
    forward, sizes = judge.model.forward, []

    def small(input_ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(input_ids.numel())
        if input_ids.numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(judge.model, "forward", small)
    found = read_texts(together, TEXTS, limits)
    assert [reading.ids for reading in found] == [reading.ids for reading in alone]
    assert together.room.side_by_side <= 40 and max(sizes) > 40
    failed = sum(size > 40 for size in sizes)
    read_texts(together, [text + " b" for text in TEXTS], limits)
    assert sum(size > 40 for size in sizes) == failed, "tried once in a process"
    assert capsys.readouterr().err.count("out of memory") == failed


def test_a_text_whose_logits_nobody_can_hold_is_refused(
    judge: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = judge.model.forward
    monkeypatch.setattr(judge.model, "forward", lambda input_ids, use_cache: forward(input_ids))
    narrow = replace(judge, room=Room(1, 5))
    with pytest.raises(GdistillError, match=r"or none.*got 16 tokens; expected at most 5, "):
        read_texts(narrow, TEXTS, ReadingLimits(16, 8, 29))


def test_room_is_sized_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 Large and a vocabulary of 151,936 on 40 GB; a CPU reads one text at a time."""
    memory = SimpleNamespace(total_memory=40 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    gpu, weights = torch.device("cuda"), 3 * 10**9
    room = Room.on(gpu, 50_257, 1280, weights)
    assert room.side_by_side == room.with_logits == 18_500_000_000 // (4 * 191_731)
    assert room.side_by_side // 1024 == 23
    monkeypatch.setattr(memory, "total_memory", 10**12)
    wide = Room.on(gpu, 151_936, 1280, weights)
    assert wide.with_logits * 151_936 < 2**31 <= (wide.with_logits + 1) * 151_936
    host = Room.on(torch.device("cpu"), 151_936, 1280, weights)
    assert host.side_by_side == 1 and host.with_logits > 1


def test_a_reading_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    memory = JudgeMemory(tmp_path, {})
    memory.add("a", JudgedText((1, 2), (0.5, 0.1), (True, False)))
    memory.add("b", JudgedText((3,), (1.5,), (True,)))
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines()
    file.write_text(lines[0].replace("[1,2]", "[1]") + "\n" + lines[1] + "\n")
    again = JudgeMemory(tmp_path, {})
    assert "a" not in again and again["b"].nll_sum_nats == 1.5
