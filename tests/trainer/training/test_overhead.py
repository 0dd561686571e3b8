"""The paper's overhead table."""

from __future__ import annotations

import pytest

from trainer.students.registry import MDLM, MDLMConfig, StudentSettings
from trainer.training.overhead import MODELS, overhead_table

PAPER = {
    "GPT-2 Small": ("38.6M", "33.0%"),
    "GPT-2 Large": ("64.3M", "8.3%"),
    "LLaMA-7B": ("131.1M", "1.9%"),
    "LLaMA-13B": ("163.8M", "1.3%"),
    "Qwen-7B": ("622.6M", "8.9%"),
}


@pytest.mark.parametrize("model", list(PAPER))
def test_rows_are_the_papers(model: str) -> None:
    line = next(line for line in overhead_table().splitlines() if line.startswith(model))
    assert tuple(line.split()[-2:]) == PAPER[model]


def test_a_students_own_overhead_is_v_times_h() -> None:
    plain = StudentSettings(hidden_size=16, num_layers=1, num_heads=2, condition_size=8)
    gumbel = StudentSettings(
        hidden_size=16, num_layers=1, num_heads=2, condition_size=8, conditioning="gumbel"
    )
    sizes = [
        sum(p.numel() for p in MDLM(MDLMConfig.build(s, vocab_size=50, row_length=8)).parameters())
        for s in (plain, gumbel)
    ]
    assert sizes[1] - sizes[0] == 50 * 16
    assert len(MODELS) == len(PAPER)
