"""Every golden of the students, within the tolerance its README states."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import parity


@pytest.mark.parametrize("name", parity.DIFFUSION_CASES)
def test_training_pass(golden: Path, name: str) -> None:
    comparisons = parity.diffusion_case(golden, name)
    assert comparisons
    assert not [c for c in comparisons if not c.passed]
