"""The look that all figures share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from evaluation.figures import PALETTE, figure_file, look

# Machado, Oliveira & Fernandes 2009, severity 1: how linear RGB reaches an eye without one cone.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
}  # fmt: skip


def lab(colour: str, eye: list[list[float]]) -> np.ndarray:
    """CIELAB (D65) of an sRGB colour as that eye sees it."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(eye) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.array(to_xyz) @ seen / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", BLINDNESS.values(), ids=list(BLINDNESS))
def test_colour_blind_people_can_tell_the_first_colours_apart(eye: list[list[float]]) -> None:
    seen = [lab(colour, eye) for colour in PALETTE[:6]]
    nearest = min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i])
    assert nearest > 10  # red and green of equal lightness come to less than 5


def test_no_two_of_many_series_look_alike() -> None:
    looks = [tuple(sorted(look(number).items())) for number in range(32)]
    assert len(set(looks)) == 32


def test_the_file_is_written_whole_and_the_style_stays_inside(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    path = tmp_path / "new" / "figure.png"
    with figure_file(path, 1, 2, size=(4, 2), sharey=True) as (_, panels):
        for axes, values in zip(panels[0], ([1, 2], [3, 40]), strict=True):
            axes.plot(values)
    picture = imread(path)
    assert picture.shape[:2] == (300, 600)
    assert panels[0, 0].get_ylim() == panels[0, 1].get_ylim()
    assert dict(matplotlib.rcParams) == before


def test_a_figure_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), figure_file(tmp_path / "figure.png"):
        _ = 1 / 0
    assert not (tmp_path / "figure.png").exists()
