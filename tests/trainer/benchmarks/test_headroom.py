"""The optimum of one pass without noise, against a language where it is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import headroom
from benchmarks.quality.headroom import fill_by_blocks, independent_fill, interval, measure, nll
from shards.provenance import generator

START = 2
FIRST = [0.25, 0.75]
EPS = 1e-3


class Repeating:
    """A Markov chain: behind START a 0 or a 1 by FIRST, then that token for ever (all but EPS)."""

    config = SimpleNamespace(bos_token_id=START)

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        table = torch.tensor([[1 - EPS, EPS], [EPS, 1 - EPS], FIRST])
        logits = torch.nn.functional.pad(table.log(), (0, 1), value=-torch.inf)[input_ids]
        return SimpleNamespace(logits=logits, past_key_values=None)


def test_tokens_of_one_pass_are_independent_and_have_the_teachers_marginals() -> None:
    context = torch.full((4000, 1), START)
    filled = independent_fill(Repeating(), context, 3, generator(0, "test"))
    # A share of 4,000 draws has standard deviation at most 0.008; five of them.
    assert torch.allclose(filled.double().mean(0), torch.full((3,), 0.75).double(), atol=0.04)
    both = (filled[:, 0] == filled[:, 1]).double().mean()
    assert abs(float(both) - (0.75**2 + 0.25**2)) < 0.04


def test_blocks_of_one_are_the_teacher_itself() -> None:
    context = torch.full((500, 1), START)
    filled = fill_by_blocks(Repeating(), context, 1, generator(0, "test"))
    assert filled.shape == (500, headroom.AHEAD)
    # 31 steps change the token with probability 31 EPS; binomial(500, 0.03) stays below 50.
    assert int((filled != filled[:, :1]).any(dim=1).sum()) < 50


def test_headroom_of_the_chain_by_hand() -> None:
    """Blocks of two: the second token differs with 2 p q and then costs log 1/EPS."""
    found = measure(Repeating(), START, num_rows=4000, start=1, seed=0)
    row = found["blocks"]["2"]["first_block_headroom_nats"]
    differs = 2 * 0.75 * 0.25
    expected = differs * math.log((1 - EPS) / EPS) / 2
    # One row's value is 0 or 3.45, of standard deviation 1.67, less the teacher's own.
    assert abs(row["value"] - expected) < 5 * 2.0 / math.sqrt(4000)
    assert row["interval_95"][0] < row["value"] < row["interval_95"][1]
    single = found["blocks"]["1"]["first_block_headroom_nats"]
    assert abs(single["value"]) < 0.1


def test_nll_by_hand() -> None:
    context, written = torch.tensor([[START]]), torch.tensor([[1, 0]])
    found = nll(Repeating(), context, written)
    assert torch.allclose(found, -torch.tensor([[0.75, EPS]]).log())


def test_interval_of_equal_values_is_a_point() -> None:
    assert interval(torch.full((5,), 2.0)) == {"value": 2.0, "interval_95": [2.0, 2.0]}
