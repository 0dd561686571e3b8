"""The autoregressive baseline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shards.errors import UsageError
from trainer.objective.batch import Batch
from trainer.students.registry import AR, ARConfig, StudentSettings

VOCAB, LENGTH = 11, 8


def make_student(**change: object) -> AR:
    torch.manual_seed(0)
    settings = StudentSettings(hidden_size=16, num_layers=2, num_heads=2, dropout=0.0, **change)
    student = AR(ARConfig.build(settings, vocab_size=VOCAB, row_length=LENGTH)).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return student


def make_tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def test_loss_is_the_mean_nll_of_the_next_token() -> None:
    student, tokens = make_student(), make_tokens()
    rows = torch.arange(3)
    output = student.loss(Batch(tokens, tokens.float(), rows, rows, 3, 0, 0, 0))
    log_probs = student.predict(tokens)
    nlls = -log_probs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    assert torch.allclose(output.loss, nlls.mean(), rtol=1e-5)
    assert torch.allclose(output.token_nlls[:, 1:], nlls, atol=1e-5)
    assert output.num_tokens == 3 * (LENGTH - 1)
    assert (log_probs[..., VOCAB] < -9e5).all()


def test_the_future_is_not_seen() -> None:
    student, tokens = make_student(), make_tokens()
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    assert torch.equal(student.predict(tokens)[:, :5], student.predict(changed)[:, :5])


def test_cache_reads_a_prompt_then_single_tokens() -> None:
    student, tokens = make_student(), make_tokens()
    whole = student.predict(tokens).detach()
    cache = student.start_cache(3)
    found = [student.predict_next(tokens[:, :4], cache)]
    found += [student.predict_next(tokens[:, i : i + 1], cache) for i in range(4, LENGTH)]
    assert torch.allclose(torch.stack(found, 1), whole[:, 3:], atol=1e-5)
    with pytest.raises(UsageError, match="one token"):
        student.predict_next(tokens[:, :2], cache)


def test_no_noise_level_parameters_and_no_noise() -> None:
    assert not [n for n, _ in make_student().named_parameters() if "adaLN" in n or "sigma" in n]
    with pytest.raises(UsageError, match="takes no noise"):
        make_student(conditioning="gumbel")


def test_round_trip(tmp_path: Path) -> None:
    student, tokens = make_student(), make_tokens()
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, AR)
    torch.testing.assert_close(loaded.predict(tokens), student.predict(tokens))


def test_forward_refuses_what_it_would_ignore() -> None:
    student, tokens = make_student(), make_tokens()
    with pytest.raises(UsageError, match="labels"):
        student(tokens, labels=tokens)
    with pytest.raises(UsageError, match="attention_mask"):
        student(tokens, attention_mask=torch.zeros_like(tokens))
