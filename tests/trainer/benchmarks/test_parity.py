"""Every golden of the students, within the tolerance its README states."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import parity


def check(comparisons: list[parity.Comparison]) -> None:
    assert comparisons
    assert not [c for c in comparisons if not c.passed]


@pytest.mark.parametrize("name", parity.DIFFUSION_CASES)
def test_training_pass(golden: Path, name: str) -> None:
    check(parity.diffusion_case(golden, name))


@pytest.mark.parametrize("name", parity.SAMPLING_CASES)
def test_sampling_pass(golden: Path, name: str) -> None:
    check(parity.sampling_case(golden, name))


def test_noise_without_the_last_position(golden: Path) -> None:
    check(parity.n_minus_2_case(golden))


def test_autoregressive_baseline(golden: Path) -> None:
    check(parity.autoregressive_case(golden))


def test_training_steps(golden: Path) -> None:
    check(parity.training_case(golden))
