"""Where training starts: the distributions of initial weights, and what the setting changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.students.conditioning import GumbelConditioner
from trainer.students.noise_attention import VocabularyAttention
from trainer.students.registry import MDLM, MDLMConfig, StudentSettings

SETTINGS = StudentSettings(
    hidden_size=64, num_layers=1, num_heads=2, condition_size=8, conditioning="gumbel"
)
VOCAB = 500


def embedding_of(std: float | None) -> torch.Tensor:
    torch.manual_seed(0)
    settings = dataclasses.replace(SETTINGS, embedding_init_std=std)
    student = MDLM(MDLMConfig.build(settings, vocab_size=VOCAB, row_length=8))
    return student.backbone.vocab_embed.embedding.detach()


def test_the_embedding_has_the_deviation_asked_for() -> None:
    # 501 x 64 draws: a sample deviation is off by 1 / sqrt(2 n) = 0.4% as a rule, by 2% never.
    assert float(embedding_of(0.02).std()) == pytest.approx(0.02, rel=0.02)
    assert float(embedding_of(0.7).std()) == pytest.approx(0.7, rel=0.02)


def test_without_one_it_is_uniform_over_the_width() -> None:
    # kaiming with a = sqrt 5: uniform in +-1/sqrt(fan in), the width.
    weights = embedding_of(None)
    assert float(weights.abs().max()) <= 64**-0.5
    assert float(weights.std()) == pytest.approx(64**-0.5 / 3**0.5, rel=0.02)


@pytest.mark.parametrize("reader", [GumbelConditioner, VocabularyAttention])
def test_a_projection_of_noise_is_uniform_over_the_vocabulary(reader: type) -> None:
    torch.manual_seed(0)
    module = reader(VOCAB, 64)
    module.reset_parameters()
    weights = module.weight.detach()
    assert float(weights.abs().max()) <= VOCAB**-0.5
    assert float(weights.std()) == pytest.approx(VOCAB**-0.5 / 3**0.5, rel=0.02)
    assert abs(float(weights.mean())) < 5 * VOCAB**-0.5 / (3 * weights.numel()) ** 0.5
