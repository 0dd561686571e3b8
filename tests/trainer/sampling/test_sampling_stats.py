"""The samplers against exact distributions, and a sampler that must fail the same test.

Small runs of ``benchmarks/sampler_statistics.py``; the table at 200,000 samples comes from there.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.float32_truncation import (
    FLOAT32,
    FLOAT64,
    TAIL_PROBABILITY,
    flat_tail_student,
    head_probability,
    judge,
    simulate,
    through_the_sampler,
)
from benchmarks.sampler_statistics import Goldens, chi_square, run_case, run_tau
from trainer.sampling.noise import TokenRule

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


def test_float32_draws_fail_the_same_test() -> None:
    """A flat tail of 50,256 tokens of 2^-25 each: 300 of 200,000 draws are from the tail."""
    num_tail, num = 50_256, 200_000
    outcome = {}
    for precision in (FLOAT64, FLOAT32):
        counts = simulate(precision, num_tail, num)
        outcome[precision.name] = judge(precision.name, counts, num_tail)
        if precision is FLOAT32:
            share = 2.0**-24 * num_tail / (math.e**2 - 1)
            assert abs(int(counts[1]) - share * num) < 5 * math.sqrt(share * num)
    assert outcome["float64"].passed
    assert not outcome["float32"].passed


def test_the_short_cut_is_the_sampler() -> None:
    """The sampler itself, all uniforms drawn, gives what the simulation gives: few but the same."""
    num_tail = 4095
    student = flat_tail_student(num_tail)
    tokens = torch.tensor([[0, student.mask_id]])
    with torch.no_grad():
        found = student.predict_at(tokens, tokens == student.mask_id)
        probs = TokenRule().probabilities(found[:, :-1])
    assert float(probs[0, 0]) == pytest.approx(head_probability(num_tail), rel=1e-6)
    assert torch.allclose(probs[0, 1:], torch.tensor(TAIL_PROBABILITY).double(), rtol=1e-4)
    for precision in (FLOAT64, FLOAT32):
        counts = through_the_sampler(precision, num_tail, 400, lambda _: None)
        assert int(counts.sum()) == 400 and int(counts[0]) >= 399


def test_tau_has_its_own_distribution(goldens: Goldens) -> None:
    assert run_tau(goldens, 0.5, NUM, judged_by=0.5).passed
    assert not run_tau(goldens, 0.5, NUM, judged_by=1.0).passed
