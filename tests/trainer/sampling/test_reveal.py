"""A step's positions in groups of rows: the same samples, less memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from tests.trainer.sampling_cases import LENGTH, draw, tiny_student
from trainer.sampling import fill
from trainer.sampling.fill import row_groups
from trainer.sampling.noise import TokenRule
from trainer.sampling.registry import make_sampler

CASES = {
    "one pass": ("mdlm", None, "ancestral", {"nfe": 1}),
    "few passes": ("mdlm", None, "ancestral", {"nfe": 3, "nucleus_p": 0.9}),
    "redrawn": ("mdlm", None, "ancestral", {"nfe": 4, "redraw_noise": True}),
    "confidence": ("mdlm", None, "confidence", {"nfe": 3}),
    "block": ("bd3lm", 4, "block", {"nfe": 6, "use_cache": True}),
    "block without cache": ("bd3lm", 4, "block", {"nfe": 6, "use_cache": False}),
    "block, confidence": ("bd3lm", 4, "block", {"nfe": 6, "inner": "confidence"}),
    "one block": ("bd3lm", LENGTH, "block", {"nfe": 2, "use_cache": True}),
}


@pytest.mark.parametrize("at_a_time", [1, 7, 30])
@pytest.mark.parametrize("case", CASES)
def test_samples_do_not_depend_on_the_groups(
    monkeypatch: pytest.MonkeyPatch, case: str, at_a_time: int
) -> None:
    kind, block_size, name, settings = CASES[case]
    student = tiny_student(kind, block_size=block_size)
    sampler = make_sampler(name, **settings)
    ids = torch.arange(6)
    whole = draw(student, sampler, ids)
    sizes: list[int] = []
    choose = TokenRule.choose

    def recorded(self: TokenRule, log_probs: Float[Tensor, "n v1"], keys: object) -> Tensor:
        sizes.append(len(log_probs))
        return choose(self, log_probs, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(TokenRule, "choose", recorded)
    monkeypatch.setattr(fill, "POSITIONS_AT_A_TIME", at_a_time)
    grouped = draw(student, sampler, ids)
    assert torch.equal(grouped.tokens, whole.tokens) and torch.equal(grouped.nfe, whole.nfe)
    assert max(sizes) <= max(at_a_time, LENGTH)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 30))
def test_groups_cover_the_rows_once_and_keep_to_the_bound(counts: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "POSITIONS_AT_A_TIME", most)
        groups = [counts[group] for group in row_groups(counts)]
    assert [count for group in groups for count in group] == counts
    assert all(group and (sum(group) <= most or len(group) == 1) for group in groups)
    pairs = itertools.pairwise(groups)
    assert all(sum(one) + two[0] > most for one, two in pairs), "a group could be larger"
