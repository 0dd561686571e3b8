"""Confidence order: what the student is most certain of comes first."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shards.errors import UsageError
from shards.noise.philox import PositionKeys
from tests.trainer.sampling_cases import LENGTH, draw, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.sampling import orders
from trainer.sampling.block import BlockSampler
from trainer.sampling.fill import Rows, fill
from trainer.sampling.noise import RowNoise, SampleKeys, TokenRule
from trainer.sampling.orders import ConfidenceSampler, FixedCountSampler, certainty, gumbels

MASK = 3
PREDICTED = {
    # position: p of tokens 0, 1, 2; margins log 8, log 1, log 2 and log 3
    1: (0.05, 0.1, 0.8),
    2: (0.4, 0.4, 0.2),
    3: (0.6, 0.3, 0.1),
    4: (0.15, 0.2, 0.6),
}
IDS = torch.tensor([5, 0, 17, 2, 9])


class Student:
    """Says the same of a position in every pass, and remembers what it was asked."""

    mask_id, is_conditioned, device = MASK, False, torch.device("cpu")
    config = SimpleNamespace(eos_token_id=None)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def predict_at(self, tokens: Tensor, where: Places, *_: object) -> Tensor:
        assert (tokens[where.index] == MASK).all()
        self.asked.append(where.positions.tolist())
        return torch.tensor([(*PREDICTED[place], 1e-30) for place in self.asked[-1]]).log()


def first(nfe: int, **settings: Any) -> tuple[list[int], list[list[int]]]:
    """One row: its tokens, and the positions that each pass was asked for."""
    student, keys = Student(), SampleKeys(1, torch.tensor([0]))
    rows = Rows(student, torch.tensor([[2, *[MASK] * 4]]), RowNoise(None, 5), keys)
    result = fill(ConfidenceSampler(nfe=nfe, decision="argmax", **settings), rows)
    assert result.nfe.tolist() == [len(student.asked)]
    return result.tokens[0].tolist(), student.asked


def test_margins_by_hand_and_the_last_pass_takes_the_rest() -> None:
    tokens, asked = first(4)
    assert tokens == [2, 2, 0, 0, 2], "of equal tokens the first; what is given stays"
    assert asked == [[1, 2, 3, 4], [2, 3, 4], [2, 3], [2]]
    assert first(3)[1] == [[1, 2, 3, 4], [2, 3]]
    assert first(1)[1] == [[1, 2, 3, 4]]


def test_certainty_by_hand() -> None:
    """Probability looks at the token that was drawn; the mask is no rival."""
    log_probs = torch.tensor([(0.8, 0.15, 0.05, 1e-9), (0.5, 0.1, 0.0, 0.4)]).log()
    tokens = torch.tensor([2, 0])
    by_probability = certainty(log_probs, tokens, "probability")
    torch.testing.assert_close(by_probability, torch.tensor([0.05, 0.5]).log())
    by_margin = certainty(log_probs, tokens, "margin")
    torch.testing.assert_close(by_margin, torch.tensor([0.8 / 0.15, 5]).log())


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.42, [1, 4, 3, 2]),  # pass 1, 3/4 of the noise: 4 passes 1 above log(8/3) / 2.25 = 0.436
        (0.45, [4, 1, 3, 2]),
        (1.30, [4, 1, 3, 2]),  # pass 2, half of it: 3 passes 1 above log 4 = 1.39
        (1.50, [4, 3, 1, 2]),
        (8.00, [4, 3, 1, 2]),  # pass 3, a quarter: 2 passes 1 above 4 log 8 = 8.3
        (9.00, [4, 3, 2, 1]),
    ],
)
def test_noise_on_the_order_falls_with_the_passes(
    temperature: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of k at position k, in place of a Gumbel's."""
    monkeypatch.setattr(orders, "gumbels", lambda keys: keys.positions.double())
    asked = [*first(4, order_temperature=temperature)[1], []]
    left = [set(one) - set(two) for one, two in itertools.pairwise(asked)]
    assert left == [{position} for position in expected]


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
def test_nothing_but_noise_is_a_uniform_order(conditioning: str) -> None:
    """The largest Gumbel is that of the largest uniform, which a uniform order takes first."""
    student = tiny_student(conditioning=conditioning)
    uniform = draw(student, FixedCountSampler(nfe=4), IDS)
    noisy = draw(student, ConfidenceSampler(nfe=4, order_temperature=1e9), IDS)
    assert torch.equal(noisy.tokens, uniform.tokens) and torch.equal(noisy.nfe, uniform.nfe)
    plain = draw(student, ConfidenceSampler(nfe=4), IDS)
    assert not torch.equal(plain.tokens, uniform.tokens), "else the order has no effect here"


def test_gumbels_are_standard() -> None:
    """Kolmogorov's distance of n draws stays below sqrt(log(2 / 1e-6) / 2n) but once in 1e6."""
    n = 20_000
    drawn = gumbels(PositionKeys(3, torch.arange(n), torch.zeros(n, dtype=torch.int64), 0))
    below = torch.exp(-torch.exp(-drawn.sort().values))
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((ranks - below).abs(), (ranks - 1 / n - below).abs()).max()
    assert float(distance) < math.sqrt(math.log(2e6) / (2 * n))


def test_rows_with_fewer_gaps_end_earlier() -> None:
    student = tiny_student()
    tokens = open_rows(student, 3)
    tokens[1, 3:] = 4
    tokens[2, 1:] = 4
    result = draw(student, ConfidenceSampler(nfe=4), IDS[:3], tokens)
    assert result.nfe.tolist() == [4, 2, 0], "11 gaps by threes, 2 by ones, none"
    assert (result.tokens[1, 3:] == 4).all() and (result.tokens != student.mask_id).all()


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
def test_one_block_is_a_whole_row_and_blocks_share_the_budget(conditioning: str) -> None:
    student = tiny_student("bd3lm", conditioning, block_size=LENGTH)
    settings: dict[str, Any] = {"confidence": "probability", "order_temperature": 1.5, "nfe": 3}
    whole = draw(student, ConfidenceSampler(**settings), IDS)
    block = draw(student, BlockSampler(inner="confidence", use_cache=False, **settings), IDS)
    assert torch.equal(block.tokens, whole.tokens) and torch.equal(block.nfe, whole.nfe)
    student = tiny_student("bd3lm", conditioning, block_size=4)
    result = draw(student, BlockSampler(inner="confidence", nfe=5), IDS)
    assert (result.nfe == 5).all(), "one pass, two and two for blocks of 3 + 4 + 4 gaps"


def test_draws_of_a_block_are_named_by_positions_of_the_row(monkeypatch: Any) -> None:
    """Else all blocks of a sample would share their draws."""
    named: dict[str, set[int]] = {"tokens": set(), "order": set()}
    choose = TokenRule.choose

    def spy_choose(self: TokenRule, log_probs: Tensor, keys: PositionKeys) -> Tensor:
        named["tokens"] |= set(keys.positions.tolist())
        return choose(self, log_probs, keys)

    def spy_gumbels(keys: PositionKeys) -> Tensor:
        named["order"] |= set(keys.positions.tolist())
        return gumbels(keys)

    monkeypatch.setattr(TokenRule, "choose", spy_choose)
    monkeypatch.setattr(orders, "gumbels", spy_gumbels)
    draw(tiny_student("bd3lm", block_size=4), BlockSampler(inner="confidence", nfe=3), IDS)
    assert named["tokens"] == named["order"] == set(range(1, LENGTH))


@pytest.mark.parametrize("sampler", [ConfidenceSampler, BlockSampler])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_noise_is_refused(sampler: type, value: float) -> None:
    with pytest.raises(UsageError, match="order_temperature"):
        sampler(order_temperature=value)
