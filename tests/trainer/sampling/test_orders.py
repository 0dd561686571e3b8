"""The order of filling: blocks with and without a cache, and what is most certain first."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shards.noise.philox import PositionKeys
from tests.trainer.sampling import decoding_cases as check
from tests.trainer.sampling_cases import LENGTH, draw, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.sampling import orders
from trainer.sampling.block import BlockRows, BlockSampler
from trainer.sampling.fill import Rows, fill
from trainer.sampling.noise import RowNoise, SampleKeys
from trainer.sampling.orders import ConfidenceSampler, FixedCountSampler, certainty, gumbels
from trainer.sampling.registry import make_sampler
from trainer.sampling.stopping import SampleResult, StopRule, unigram_entropy_nats

IDS = torch.tensor([5, 0, 17, 2, 9])


@pytest.mark.parametrize("length", [LENGTH, 2 * LENGTH])
@pytest.mark.parametrize("block_size", [1, 3, 4, 12])
@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("inner", ["ancestral", "first_hitting", "confidence", "ragged"])
def test_cache_changes_nothing(
    inner: str, conditioning: str, block_size: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits with and without cache agree within 1e-5 at every step, noise, window and all."""
    student = tiny_student("bd3lm", conditioning, block_size=block_size)
    tokens, settings = open_rows(student, 3, length), {} if inner == "ragged" else {"inner": inner}
    if inner == "ragged":  # a prompt up to the middle of a block, a whole row, a row with a hole
        tokens[0, 1:5], tokens[1, 1:], tokens[2, 1:10] = 7, 2, 3
        tokens[2, 4] = student.mask_id
    log, predict = [], BlockRows.predict

    def spy(self, part):
        log.append(predict(self, part))
        return log[-1]

    monkeypatch.setattr(BlockRows, "predict", spy)
    ids = torch.tensor([4, 0, 11])
    cached = draw(student, make_sampler("block", use_cache=True, **settings), ids, tokens).tokens
    num_passes = len(log)
    plain = draw(student, make_sampler("block", use_cache=False, **settings), ids, tokens).tokens
    assert torch.equal(cached, plain) and (cached < student.mask_id).all()
    assert num_passes >= (1 if inner == "ragged" else (length - 1) // block_size)
    for one, other in zip(log[:num_passes], log[num_passes:], strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=0)


def test_window_by_hand() -> None:
    """Rows of 12, blocks of 3: when the window is full, its front half of 6 is dropped."""
    student = tiny_student("bd3lm", "none", block_size=3)
    keys = SampleKeys(3, torch.arange(1))
    rows, starts = BlockRows(student, open_rows(student, 1, 27), RowNoise(None, 27), keys), []
    for block in range(9):
        rows.enter(block)
        starts.append(rows.window_start)
    assert starts == [0, 0, 0, 0, 6, 6, 12, 12, 18]


def test_one_block_is_a_whole_row() -> None:
    noisy = tiny_student("bd3lm", block_size=LENGTH)
    plain = tiny_student("bd3lm", "none", block_size=LENGTH)
    timed = tiny_student("bd3lm", block_size=LENGTH, diffusion={"time_conditioning": True})
    surest = {"confidence": "probability", "order_temperature": 1.5, "nfe": 3}
    for student, inner, settings in (
        (noisy, "ancestral", {"nfe": 5}),
        (timed, "ancestral", {"nfe": 5}),
        (noisy, "first_hitting", {}),
        (noisy, "confidence", surest),
        (plain, "confidence", surest),
    ):
        whole = draw(student, make_sampler(inner, **settings), IDS)
        use_cache = inner != "confidence" and student is not timed
        sampler = make_sampler("block", inner=inner, use_cache=use_cache, **settings)
        block = draw(student, sampler, IDS)
        assert torch.equal(block.tokens, whole.tokens) and torch.equal(block.nfe, whole.nfe), inner


def test_budget_is_spread_and_counted() -> None:
    student, ids = tiny_student("bd3lm", block_size=4), torch.arange(40)
    assert BlockSampler(nfe=7).budgets(3, 4) == [2, 2, 3]
    assert BlockSampler(passes_per_block=2).budgets(3, 4) == [2, 2, 2]
    for nfe in (3, 7, 12):
        used = draw(student, BlockSampler(nfe=nfe, final_argmax=False), ids).nfe
        assert used.max() <= nfe and used.min() >= 3
    for settings, nfe in (
        ({"nfe": 3}, 3),
        ({"inner": "first_hitting"}, LENGTH - 1),
        ({"inner": "confidence", "nfe": 5}, 5),  # one, two and two for 3 + 4 + 4 gaps
    ):
        for conditioning in ("gumbel", "none"):
            student = tiny_student("bd3lm", conditioning, block_size=4)
            assert (draw(student, make_sampler("block", **settings), ids).nfe == nfe).all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("block", {}), ("block", {"use_cache": False}), ("sequential", {}), ("ancestral", {"nfe": 6})],
)
def test_samples_end_at_eos(name: str, settings: dict[str, Any]) -> None:
    kind = {"block": "bd3lm", "sequential": "ar"}.get(name, "mdlm")
    student, ids = tiny_student(kind, "none", block_size=3 if name == "block" else None), torch.arange(60)
    eos, stop, tokens = student.config.eos_token_id, StopRule(at_eos=True), open_rows(student, 60)
    tokens[:20, 1:3] = eos  # to the end of a block: what is given ends nothing
    free = draw(student, make_sampler(name, **settings), ids, tokens)
    stopped = draw(student, make_sampler(name, **settings, stop={"at_eos": True}), ids, tokens)
    if name == "ancestral":  # its tokens stay, the length says where a sample ends
        assert torch.equal(stopped.tokens, free.tokens)
        assert torch.equal(stopped.lengths, stop.ends(free.tokens, tokens == student.mask_id, eos))
        assert stopped.lengths.min() < LENGTH
        return
    for made in (stopped, free):
        made.tokens[:20, 1:3] = 2
    check.ended_at_eos(stopped, free, eos)
    assert 5 < (free.tokens[:, 1:] == eos).any(dim=1).sum() < 60
    assert stopped.nfe.sum() < free.nfe.sum()


def test_ends_and_redraws_by_hand() -> None:
    """eos is 1. An end counts where it was filled in; the tokens before it are judged, if there are three."""
    rule, calls = StopRule(at_eos=True, min_entropy_nats=0.7, entropy_window=3, max_tries=3), list[Any]()
    tokens = torch.tensor([[1, 4, 5, 1, 7], [0, 2, 6, 6, 6], [0, 1, 6, 6, 6], [0, 2, 1, 4, 5], [0, 6, 6, 1, 9]])
    filled = torch.arange(5).expand(5, 5) > 0
    filled[3, 2] = False

    def result(tokens: torch.Tensor, filled: torch.Tensor, nfe: int) -> SampleResult:
        counts = torch.full((len(tokens),), nfe)
        made = SampleResult(tokens, counts, counts, {"verifier_nfe": counts, "times": counts})
        return rule.judged(made, filled, 1)

    def draw_again(rows: torch.Tensor, attempt: int) -> SampleResult:
        calls.append((rows.tolist(), attempt))
        again = torch.tensor([[0, 2, 1, 4, 5], [0, 6, 6, 6, 6]])[-len(rows) :]
        return result(again, filled[rows], 10)

    first = result(tokens, filled, 1)
    assert first.lengths.tolist() == [4, 5, 2, 5, 4]
    assert first.details["low_entropy"].tolist() == [False, True, False, False, True]
    last = rule.redrawn(first, draw_again)
    assert calls == [([1, 4], 1), ([4], 2)] and last.details["attempt"].tolist() == [0, 1, 0, 0, 2]
    assert last.lengths.tolist() == [4, 3, 2, 5, 5] and last.tokens[[1, 4], 3].tolist() == [4, 6]
    assert last.details["low_entropy"].tolist() == [False] * 4 + [True]
    assert last.nfe.tolist() == last.details["verifier_nfe"].tolist() == [1, 11, 1, 1, 21]
    assert last.details["times"].tolist() == [1, 10, 1, 1, 10], "of the draw that is kept"


def test_monotonous_samples_are_drawn_anew() -> None:
    student, ids = tiny_student("bd3lm", "gumbel", block_size=3), torch.arange(60)
    # The least entropy is set where some samples pass at once and some after a few tries.
    rule = StopRule(min_entropy_nats=1.2, entropy_window=6, max_tries=4)
    plain = draw(student, BlockSampler(), ids)
    kept = draw(student, BlockSampler(stop=rule), ids)
    attempts, flagged = kept.details["attempt"], kept.details["low_entropy"]
    at_once = attempts == 0
    assert at_once.any() and not at_once.all()
    assert torch.equal(kept.tokens[at_once], plain.tokens[at_once])
    assert torch.equal(kept.nfe[at_once], plain.nfe[at_once])
    assert (attempts[flagged] == 3).all(), "only the last try may be kept flagged"
    for end in range(6, LENGTH + 1, 3):
        assert (unigram_entropy_nats(kept.tokens[~flagged, end - 6 : end]) >= 1.2).all()
    assert (kept.tokens < student.mask_id).all()


def test_unigram_entropy(ops: dict[str, Tensor]) -> None:
    """The golden takes all rows together."""
    ours = unigram_entropy_nats(ops["entropy.x"].reshape(1, -1))
    assert torch.allclose(ours.float(), ops["entropy.value"], atol=1e-6)


# What the student is most certain of comes first.

MASK = 3
PREDICTED = {
    # position: p of tokens 0, 1, 2; margins log 8, log 1, log 2 and log 3
    1: (0.05, 0.1, 0.8),
    2: (0.4, 0.4, 0.2),
    3: (0.6, 0.3, 0.1),
    4: (0.15, 0.2, 0.6),
}


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
    for kind, expected in (("probability", [0.05, 0.5]), ("margin", [0.8 / 0.15, 5])):
        found = certainty(log_probs, torch.tensor([2, 0]), kind)
        torch.testing.assert_close(found, torch.tensor(expected).log())


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


def test_draws_of_a_block_are_named_by_positions_of_the_row(monkeypatch: Any) -> None:
    """Else all blocks of a sample would share their draws; the exact laws say so of other orders, and of noise."""
    named, at = dict[str, set[int]](), SampleKeys.at

    def spy(self: SampleKeys, purpose: str, where: Any) -> PositionKeys:
        named.setdefault(purpose, set()).update(Places.of(where).positions.tolist())
        return at(self, purpose, where)

    monkeypatch.setattr(SampleKeys, "at", spy)
    draw(tiny_student("bd3lm", block_size=4), BlockSampler(inner="confidence", nfe=3), IDS)
    assert named == {purpose: {*range(1, LENGTH)} for purpose in ("sampling tokens", "sampling order")}
