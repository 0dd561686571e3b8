"""The likeliest tokens: exactly ``torch.topk``, by any of the ways taken."""

from __future__ import annotations

import pytest
import torch

from shards.codec.ids import likeliest_tokens


@pytest.mark.parametrize(
    ("vocab_size", "num_entries"),
    [(1, 1), (7, 7), (23, 5), (512, 64), (4096, 64), (4099, 100), (50257, 64)],
)
def test_values_and_ids_are_those_of_topk(vocab_size: int, num_entries: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    log_probs = torch.randn(9, vocab_size, generator=generator).mul(4).log_softmax(-1)
    values, ids = likeliest_tokens(log_probs, num_entries)
    expected, expected_ids = log_probs.topk(num_entries, dim=-1)
    assert torch.equal(values, expected)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)


@pytest.mark.parametrize("vocab_size", [40, 4096])
def test_equal_probabilities_give_distinct_ids(vocab_size: int) -> None:
    log_probs = torch.zeros(3, vocab_size)
    log_probs[:, vocab_size // 2] = 1.0
    values, ids = likeliest_tokens(log_probs, 10)
    assert values.tolist() == [[1.0] + [0.0] * 9] * 3
    assert ids[:, 0].tolist() == [vocab_size // 2] * 3
    assert all(len(set(row)) == 10 for row in ids.tolist())


def test_the_largest_of_one_block_are_all_found() -> None:
    log_probs = torch.zeros(1, 4096)
    stride = 4096 // 8  # block b holds ids b, b + 512, ...
    log_probs[0, 3::stride] = torch.arange(8, 0, -1.0)
    values, ids = likeliest_tokens(log_probs, 8)
    assert values.tolist() == [[8, 7, 6, 5, 4, 3, 2, 1]]
    assert ids.tolist() == [list(range(3, 4096, stride))]
