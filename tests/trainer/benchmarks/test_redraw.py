"""Every kept figure can be drawn again from the numbers that are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.redraw import figures

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
NOT_REDRAWN = {"stories-curve", "maze-paths"}


def test_every_kept_figure_is_known() -> None:
    kept = {path.stem for path in RESULTS.glob("*.png")}
    assert kept - NOT_REDRAWN == set(figures())


@pytest.mark.parametrize("name", ["codecs", "scale", "quality", "quality-stories-fidelity"])
def test_a_figure_comes_from_its_json(name: str, tmp_path: Path) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    figures()[name](tmp_path)
    written = [path.name for path in tmp_path.glob("*.png")]
    assert written == [f"{name}.png"]
