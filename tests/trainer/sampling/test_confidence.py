"""Confidence order: what the student is most certain of comes first."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shards.errors import UsageError
from shards.noise.philox import PositionKeys
from tests.trainer.sampling_cases import LENGTH, draw, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.sampling import confidence
from trainer.sampling.block import BlockSampler
from trainer.sampling.confidence import ConfidenceOrder, ConfidenceSampler, gumbels
from trainer.sampling.fill import FixedCountSampler, Rows, fill
from trainer.sampling.noise import RowNoise, SampleKeys, TokenRule

MASK = 3
PREDICTED = {
    # position: p of tokens 0, 1, 2; margins log 8, log 3, log 2 and 0
    1: (0.05, 0.1, 0.8),
    2: (0.4, 0.4, 0.2),
    3: (0.6, 0.3, 0.1),
    4: (0.15, 0.2, 0.6),
}
IDS = torch.tensor([5, 0, 17, 2, 9])


class Student:
    """Says the same of a position in every pass, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    mask_id, is_conditioned, device = MASK, False, torch.device("cpu")
    config = SimpleNamespace(eos_token_id=None)

    def predict_at(self, tokens: Tensor, where: Places, *_: object) -> Tensor:
        assert (tokens[where.index] == MASK).all()
        self.asked.append(where.positions.tolist())
        probs = torch.tensor([(*PREDICTED[position], 1e-30) for position in self.asked[-1]])
        return probs.log()


def first(order: ConfidenceOrder, nfe: int, rule: TokenRule) -> tuple[Tensor, list[list[int]]]:
    student = Student()
    keys = SampleKeys(1, torch.tensor([0]))
    rows = Rows(student, torch.tensor([[2, *[MASK] * 4]]), RowNoise(None, 5), keys)
    sampler = ConfidenceSampler(
        nfe=nfe,
        confidence=order.confidence,
        order_temperature=order.temperature,
        decision=rule.decision,
    )
    result = fill(sampler, rows)
    assert result.nfe.tolist() == [len(student.asked)]
    return result.tokens[0], student.asked


def test_margins_by_hand() -> None:
    tokens, asked = first(ConfidenceOrder("margin"), 4, TokenRule("argmax"))
    assert tokens.tolist() == [2, 2, 0, 0, 2], "of equal tokens the first; what is given stays"
    assert asked == [[1, 2, 3, 4], [2, 3, 4], [2, 3], [2]]


def test_the_last_pass_takes_the_rest() -> None:
    assert first(ConfidenceOrder("margin"), 3, TokenRule("argmax"))[1] == [[1, 2, 3, 4], [2, 3]]
    assert first(ConfidenceOrder("margin"), 1, TokenRule("argmax"))[1] == [[1, 2, 3, 4]]


def test_probability_looks_at_the_token_that_was_drawn() -> None:
    log_probs = torch.tensor([(0.8, 0.15, 0.05, 1e-9), (0.5, 0.4, 0.1, 1e-9)]).log()
    chosen, nothing = torch.tensor([2, 0]), torch.zeros(2, dtype=torch.float64)
    by_probability = ConfidenceOrder("probability").scores(log_probs, chosen, nothing, nothing)
    torch.testing.assert_close(by_probability, torch.tensor([0.05, 0.5]).log().double())
    by_margin = ConfidenceOrder("margin").scores(log_probs, chosen, nothing, nothing)
    expected = torch.tensor([0.8 / 0.15, 0.5 / 0.4]).log().double()
    torch.testing.assert_close(by_margin, expected, atol=1e-6, rtol=0)


def test_the_mask_is_no_rival() -> None:
    log_probs = torch.tensor([(0.5, 0.1, 0.0, 0.4)]).log()
    zero = torch.zeros(1, dtype=torch.float64)
    score = ConfidenceOrder("margin").scores(log_probs, torch.tensor([0]), zero, zero)
    assert float(score) == pytest.approx(math.log(5), abs=1e-6)


def test_noise_on_the_order_falls_with_the_passes() -> None:
    log_probs = torch.tensor([(0.5, 0.25, 0.25, 1e-9)]).log()
    order = ConfidenceOrder("margin", temperature=3.0)
    gumbel, ahead = torch.tensor([2.0]).double(), torch.tensor([0.25]).double()
    score = order.scores(log_probs, torch.tensor([0]), gumbel, ahead)
    assert float(score) == pytest.approx(math.log(2) + 3 * 0.25 * 2, abs=1e-6)


def test_no_noise_is_left_in_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four passes 3/4, 1/2, 1/4 and none are still to come."""
    shares, original = [], ConfidenceOrder.scores

    def spy(self: ConfidenceOrder, *given: Tensor) -> Tensor:
        shares.append(given[-1].unique().tolist())
        return original(self, *given)

    monkeypatch.setattr(ConfidenceOrder, "scores", spy)
    first(ConfidenceOrder("margin", temperature=1.0), 4, TokenRule("argmax"))
    assert shares == [[0.75], [0.5], [0.25], [0.0]]


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
    zeros = torch.zeros(n, dtype=torch.int64)
    drawn = gumbels(PositionKeys(3, torch.arange(n), zeros, 0)).sort().values
    below = torch.exp(-torch.exp(-drawn))
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
def test_one_block_is_a_whole_row(conditioning: str) -> None:
    student = tiny_student("bd3lm", conditioning, block_size=LENGTH)
    settings = {"nfe": 3, "confidence": "probability", "order_temperature": 1.5}
    whole = draw(student, ConfidenceSampler(**settings), IDS)
    block = draw(student, BlockSampler(inner="confidence", use_cache=False, **settings), IDS)
    assert torch.equal(block.tokens, whole.tokens) and torch.equal(block.nfe, whole.nfe)


def test_blocks_share_the_budget() -> None:
    student = tiny_student("bd3lm", block_size=4)
    result = draw(student, BlockSampler(inner="confidence", nfe=5), IDS)
    assert (result.nfe == 5).all(), "one pass, two and two for blocks of 3 + 4 + 4 gaps"


def test_draws_of_a_block_are_named_by_positions_of_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all blocks of a sample would share their draws."""
    named: dict[str, set[int]] = {"tokens": set(), "order": set()}
    choose, noise = TokenRule.choose, gumbels

    def spy_choose(self: TokenRule, log_probs: Tensor, keys: PositionKeys) -> Tensor:
        named["tokens"] |= set(keys.positions.tolist())
        return choose(self, log_probs, keys)

    def spy_gumbels(keys: PositionKeys) -> Tensor:
        named["order"] |= set(keys.positions.tolist())
        return noise(keys)

    monkeypatch.setattr(TokenRule, "choose", spy_choose)
    monkeypatch.setattr(confidence, "gumbels", spy_gumbels)
    draw(tiny_student("bd3lm", block_size=4), BlockSampler(inner="confidence", nfe=3), IDS)
    assert named["tokens"] == named["order"] == set(range(1, LENGTH))


@pytest.mark.parametrize("sampler", [ConfidenceSampler, BlockSampler])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_noise_is_refused(sampler: type, value: float) -> None:
    with pytest.raises(UsageError, match="order_temperature"):
        sampler(order_temperature=value)


@pytest.mark.parametrize("setting", [{"confidence": "probability"}, {"order_temperature": 1.0}])
def test_an_order_that_blocks_would_not_follow_is_refused(setting: dict[str, object]) -> None:
    """Settings that would be left undone without a word."""
    assert BlockSampler(inner="confidence", **setting)  # type: ignore[arg-type]
    for inner in ("ancestral", "first_hitting"):
        with pytest.raises(UsageError, match=f"inner={inner}.*inner=confidence"):
            BlockSampler(inner=inner, **setting)  # type: ignore[arg-type]
