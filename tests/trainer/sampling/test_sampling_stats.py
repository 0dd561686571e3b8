"""The samplers against exact distributions, and a sampler that must fail the same test.

Runs of ``benchmarks/sampler_statistics.py``.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.sampler_statistics import Goldens, chi_square, run_case, run_tau
from shards.noise.philox import PositionKeys, race, uniforms

NUM = 20_000


@pytest.fixture(scope="module")
def goldens(golden: Path) -> Goldens:
    return Goldens.read(golden)


@pytest.mark.parametrize(
    "case",
    [
        "mdlm.ancestral_T1.p1.0",
        "mdlm.ancestral_T5.p1.0",
        "mdlm.ancestral_T2.p0.8.noise_removal",
        "mdlm.fixed_k_T2.p1.0",
        "ar.p0.8",
        "mdlm.first_hitting.p1.0",
        "mdlm_gumbel.ancestral_T2.p1.0",
        "mdlm_gumbel.first_hitting.p0.8",
    ],
)
def test_samplers_follow_the_exact_distribution(goldens: Goldens, case: str) -> None:
    result = run_case(goldens, case, NUM)
    assert result.passed, result
    # w <= 0.09 found with probability 0.99: a total variation of 4.5% at most goes unseen.
    assert result.detectable_effect < 0.09


@pytest.mark.parametrize(
    ("drawn", "judged"),
    [
        ("mdlm.ancestral_T1.p1.0", "mdlm.ancestral_T2.p1.0"),
        ("mdlm.ancestral_T2.p0.8", "mdlm.ancestral_T5.p0.8"),
        ("mdlm.ancestral_T1.p1.0", "mdlm_gumbel.ancestral_T1.p1.0"),
        ("mdlm.ancestral_T5.p1.0", "mdlm.ancestral_T5.p0.8"),
    ],
)
def test_the_test_can_fail(goldens: Goldens, drawn: str, judged: str) -> None:
    """Another number of steps, another nucleus p or missing noise is rejected."""
    assert not run_case(goldens, drawn, NUM, judged_by=judged).passed


def test_pooling_by_hand() -> None:
    probs = torch.tensor([0.5, 0.46, 0.01, 0.01, 0.01, 0.01])
    result = chi_square("hand", torch.tensor([55, 41, 1, 1, 1, 1]), probs)
    # The four small cells pool to an expectation of 4, below 5, and join the cell of 46.
    assert result.num_cells == 2
    assert result.statistic == pytest.approx((55 - 50) ** 2 / 50 + (45 - 50) ** 2 / 50)
    impossible = chi_square("hand", torch.tensor([99, 1]), torch.tensor([1.0, 0.0]))
    assert impossible.p_value == 0


def test_draws_are_finer_than_float32() -> None:
    """On float32's grid a token of probability 2^-25 is drawn three times too rarely."""
    rows = torch.arange(4)
    scaled = uniforms(PositionKeys(3, rows, rows), 0, 2000) * 2.0**24
    assert float((scaled != scaled.floor()).double().mean()) > 0.9
    rare = 2.0**-25
    for head_wins, head in ((True, math.exp(-0.3)), (False, math.exp(-0.7))):
        # The rare token's E is 2^-26, which float32 makes 0: p / E = 2 against 1 / 0.3 and 1 / 0.7.
        uniform = torch.tensor([[head, 1 - 2.0**-26]], dtype=torch.float64)
        winner = race(torch.tensor([[1 - rare, rare]], dtype=torch.float64), uniform)
        assert bool(winner == 0) is head_wins


def test_tau_has_its_own_distribution(goldens: Goldens) -> None:
    assert run_tau(goldens, 0.5, NUM, judged_by=0.5).passed
    assert not run_tau(goldens, 0.5, NUM, judged_by=1.0).passed
