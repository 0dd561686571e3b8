from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2LMHeadModel

from pipeline.teacher import model as teacher_module
from pipeline.teacher.model import Teacher
from pipeline.teacher.probe import look_ahead, probe_rows
from shards.base.errors import UsageError
from tests.pipeline.extract_cases import CONTEXT_LENGTH, VOCAB_SIZE, save_tokenizer


def save_bert(folder: Path, initializer_range: float, **changes: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=initializer_range,
            **changes,
        )
        BertForMaskedLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize(("dtype", "initializer_range"), [("float32", 0.02), ("bfloat16", 0.3)])
def test_a_model_that_sees_later_tokens_is_refused(
    tmp_path: Path, dtype: Any, initializer_range: float
) -> None:
    folder = save_bert(tmp_path, initializer_range)
    with pytest.raises(UsageError, match=r"not causal.*is_decoder"):
        Teacher.load(folder, dtype, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_as_a_decoder_is_a_teacher(tmp_path: Path, dtype: Any) -> None:
    folder = save_bert(tmp_path, 0.3, is_decoder=True)
    loaded = Teacher.load(folder, dtype, "cpu")
    assert loaded.head is not None and loaded.head.last_hidden is None
    assert loaded.log_probs(torch.tensor([[0, 3, 4]])).shape == (1, 2, VOCAB_SIZE)


def test_one_small_pass_is_all_the_question_costs(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, forward = [], GPT2LMHeadModel.forward

    def counted(self: GPT2LMHeadModel, **arguments: Any) -> Any:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(self, **arguments)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", counted)
    Teacher.load(teacher, device="cpu")
    assert shapes == [(5, 8)]


def test_rows_of_the_probe_differ_in_their_last_token_alone() -> None:
    for vocab_size, length in ((50257, 8), (23, 8), (6, 8), (2, 2), (3, 1)):
        rows = probe_rows(vocab_size, length)
        assert torch.equal(rows[0], rows[1]) and (rows[:, :-1] == rows[0, :-1]).all()
        assert (rows[2:, -1] != rows[0, -1]).any()
        assert rows.min() >= 0 and rows.max() < vocab_size


def test_what_moves_equal_rows_too_is_no_look_ahead() -> None:
    logits = torch.randn(1, 8, 50, generator=torch.Generator().manual_seed(0)).repeat(5, 1, 1)
    assert look_ahead(logits, 1e-4) is None
    leaking = logits.clone()
    leaking[3, 2] += 0.01 * torch.arange(50) / 50
    assert look_ahead(leaking, 1e-4) == pytest.approx(0.0058, rel=0.2)
    leaking[1, 4] += 0.01 * torch.arange(50) / 50  # the equal row moved as far
    assert look_ahead(leaking, 1e-4) is None
    masked = logits.clone()
    masked[..., 7] = -torch.inf
    assert look_ahead(masked, 1e-4) is None


class TwiceTheHead(nn.Linear):
    """An output layer that is more than a matrix product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_logits_that_would_be_rounded_are_refused(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = teacher_module._load_model

    def with_own_head(*arguments: Any) -> Any:
        model = load_model(*arguments)
        weight = model.lm_head.weight
        model.lm_head = TwiceTheHead(*weight.T.shape, bias=False, dtype=weight.dtype)
        model.lm_head.weight = weight
        return model

    monkeypatch.setattr(teacher_module, "_load_model", with_own_head)
    with pytest.raises(UsageError, match=r"no float32 logits.*bfloat16.*use --dtype float32"):
        Teacher.load(teacher, "bfloat16", "cpu")
    loaded = Teacher.load(teacher, "float32", "cpu")
    assert loaded.head is None and loaded.log_probs(torch.tensor([[0, 3]])).dtype == torch.float32
