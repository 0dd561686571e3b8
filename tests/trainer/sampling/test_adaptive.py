"""Adaptive parallel decoding: limits, the exact law of a two-token row, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sampler_statistics import chi_square
from tests.trainer.sampling_cases import BOS, LENGTH, VOCAB, draw, open_rows, tiny_student
from trainer.sampling.adaptive import AdaptiveSampler, mixture
from trainer.sampling.noise import SampleKeys, TokenRule
from trainer.sampling.verifier import CausalReader, Verifier, load_verifier
from trainer.students.registry import Student

IDS = torch.tensor([4, 0, 11])


@torch.no_grad()
def left_to_right(student: Student, ids: Tensor, lookahead: int, seed: int = 3) -> Tensor:
    """The student alone: a window of drafts per forward pass, all of them kept."""
    tokens = open_rows(student, len(ids))
    for index, row in zip(ids, tokens.split(1), strict=True):
        for number, first in enumerate(range(1, LENGTH, lookahead), start=1):
            where = row == student.mask_id
            where[:, first + lookahead :] = False
            stop = min(first + lookahead, LENGTH)
            log_probs = student.predict_at(row[:, :stop], where[:, :stop])
            names = SampleKeys(seed, index[None], number).at("sampling tokens", where)
            row[where] = TokenRule().choose(log_probs, names)
    return tokens


@pytest.mark.parametrize("lookahead", [1, 4, LENGTH])
def test_r_1_is_the_student_from_left_to_right(verifier: str, lookahead: int) -> None:
    student = tiny_student(conditioning="none")
    sampler = AdaptiveSampler(verifier=verifier, mixture_weight=1.0, max_lookahead=lookahead)
    result = draw(student, sampler, IDS)
    assert torch.equal(result.tokens, left_to_right(student, IDS, lookahead))
    assert (result.nfe == -(-(LENGTH - 1) // lookahead)).all()
    assert (result.details["acceptance"] == 1).all() and not result.details["verifier_nfe"].any()


def test_a_verifier_that_agrees_keeps_everything(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When p_AR is the student's own marginal, every R gives the draft."""
    student = tiny_student(conditioning="none")
    tokens = open_rows(student, 1)
    with torch.no_grad():
        marginals = student.predict_at(tokens, tokens == student.mask_id)[:, :-1]
    monkeypatch.setattr(CausalReader, "next_logits", lambda self, tokens, *_: marginals.expand(len(tokens), -1, -1))
    for weight in (0.0, 0.5):
        result = draw(student, AdaptiveSampler(verifier=verifier, mixture_weight=weight), IDS)
        assert (result.nfe == 1).all() and (result.details["acceptance"] == 1).all()


@torch.no_grad()
def exact_two_tokens(student: Student, verifier: Verifier, weight: float) -> Tensor:
    """P(x_1, x_2) of a row of bos and two masks.

    x_1 ~ p_D. With shared exponentials E, draft and target both pick v with probability
    1 / sum_j max(p_j / p_v, q_j / q_v); otherwise x_2 is drawn from p_D(. | x_1).
    """

    mask = student.mask_id

    def marginals(*row: int) -> Tensor:
        tokens = torch.tensor([row])
        return student.predict_at(tokens, tokens == mask)

    first, second = marginals(BOS, mask, mask)
    exact = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    p = second[:-1].double().exp()
    for token in range(VOCAB):
        verdict = verifier.model(torch.tensor([[BOS, token]])).logits[:, -1].log_softmax(-1)
        q = mixture(second[None], verdict, weight)[0, :-1].exp()
        both = 1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(dim=1)
        again = marginals(BOS, token, mask)[0, :-1].double().exp()
        exact[token] = first[token].double().exp() * (both + (1 - both.sum()) * again)
    return exact / exact.sum()


def test_a_mixture_by_hand() -> None:
    """R = 3/4 of the student: p^(3/4) q^(1/4), normalised, and nothing for the mask."""
    p, q = torch.tensor([16.0, 1.0]) / 17, torch.tensor([1.0, 16.0]) / 17
    student = torch.nn.functional.pad(p.log(), (0, 1), value=-1e6)[None]
    mixed = mixture(student, q.log()[None], 0.75).exp()
    assert mixed[0].tolist() == pytest.approx([0.8, 0.2, 0.0])  # 8 : 2


@pytest.mark.parametrize("weight", [0.0, 0.6])
def test_exact_law_of_two_tokens(verifier: str, weight: float) -> None:
    student = tiny_student(conditioning="none")
    model = load_verifier(verifier, VOCAB, student.device)
    exact = exact_two_tokens(student, model, weight)
    num = 20_000
    sampler = AdaptiveSampler(verifier=verifier, mixture_weight=weight)
    tokens = draw(student, sampler, torch.arange(num), open_rows(student, num, 3)).tokens
    counts = torch.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**2)
    result = chi_square(f"apd, R = {weight}", counts, exact)
    assert result.passed, result
    assert not chi_square("another R", counts, exact_two_tokens(student, model, 1.0)).passed


@pytest.mark.parametrize("lookahead", [None, 4])
def test_infilled_rows_are_verified_as_without_a_cache(
    verifier: str, lookahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection one draft may stand alone before given tokens: no verifier sees it."""
    student, ids = tiny_student(conditioning="none"), torch.arange(64)
    tokens = (torch.arange(LENGTH) % VOCAB).repeat(len(ids), 1)
    tokens[:, [2, 3, 8, 9]] = student.mask_id
    sampler = AdaptiveSampler(verifier=verifier, mixture_weight=0.3, max_lookahead=lookahead)
    alone = [draw(student, sampler, ids[i : i + 1], tokens[:1]) for i in range(len(ids))]
    together = draw(student, sampler, ids, tokens)
    assert (together.details["accepted"] == 4).all(), "whatever was drafted"
    for name, values in together.details.items():
        assert torch.equal(torch.cat([one.details[name] for one in alone]), values), name
    cached = CausalReader.next_logits

    def from_scratch(self: CausalReader, *given: Any) -> Tensor:
        self.cache = None
        return cached(self, *given)

    monkeypatch.setattr(CausalReader, "next_logits", from_scratch)
    expected = draw(student, sampler, ids, tokens).tokens
    assert torch.equal(together.tokens, expected)
    assert torch.equal(torch.cat([one.tokens for one in alone]), expected)
