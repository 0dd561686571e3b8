from __future__ import annotations

import pytest
import torch

from shards.language_model.loading import look_ahead, probe_rows


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
