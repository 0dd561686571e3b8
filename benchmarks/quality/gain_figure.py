"""The gain map's figure: by tokens ahead of known text, and by passes over a whole row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.gain import Gain
from benchmarks.quality.matched import Ratio, recipe_of
from evaluation.figures import figure_file, look

Point = tuple[float, float, float, float]
"""Place, value, and the ends of its interval."""


@dataclass(frozen=True)
class Cell:
    """A conditioned student at a distance.

    Attributes:
        student: Its name.
        shape: Its kind and size.
        num_ahead: Tokens filled behind known text, in one pass.
        plain: The plain student that is best there.
        gain: Of the conditioned student over it; None where no plain curve reaches its entropy.
        agreement: Share of fills whose last token is the teacher's, of the same noise.
        plain_agreement: The best of the plain students', drawn by that very noise.
    """

    student: str
    shape: str
    num_ahead: int
    plain: str | None
    gain: Gain | None
    agreement: float
    plain_agreement: float


def draw(cells: Sequence[Cell], ratios: Sequence[Ratio], path: Path) -> None:
    """Three panels; below the line the noise pays in the outer two, above it in the middle one."""
    students = list(dict.fromkeys(cell.student for cell in cells))
    own = {name: [cell for cell in cells if cell.student == name] for name in students}
    recipes = dict.fromkeys(recipe_of(ratio.name) for ratio in ratios)
    lines = (
        {name: _gains(own[name]) for name in students},
        {name: _agreements(own[name]) for name in students},
        {name: _over_passes(ratios, name) for name in recipes},
    )
    titles = (
        (
            "Behind known text: NLL at equal entropy (below 0 noise pays)",
            "tokens filled in one pass",
        ),
        ("The same: the teacher's own token (above 0 noise pays)", "tokens filled in one pass"),
        (
            "Rows of 128 tokens: NLL at equal entropy (below 0 noise pays)",
            "forward passes for a row",
        ),
    )
    nats = "less the best plain student's, nats a token"
    units = (nats, "less the best plain student's, points", nats)
    with figure_file(path, 1, 3, size=(16.5, 6.2)) as (_, panels):
        for axes, own_lines, (title, places), unit in zip(
            panels[0], lines, titles, units, strict=True
        ):
            _lines(axes, own_lines)
            axes.set_title(title)
            axes.set_xlabel(places)
            axes.set_ylabel(unit)


def _gains(cells: Iterable[Cell]) -> list[Point]:
    return [(cell.num_ahead, cell.gain.value, *cell.gain.interval) for cell in cells if cell.gain]


def _agreements(cells: Iterable[Cell]) -> list[Point]:
    gained = [(cell.num_ahead, 100 * (cell.agreement - cell.plain_agreement)) for cell in cells]
    return [(count, value, value, value) for count, value in gained]


def _over_passes(ratios: Iterable[Ratio], name: str) -> list[Point]:
    """Logarithms of the ratios of perplexity, where both sides reach the entropy or come near."""
    own = sorted((r for r in ratios if recipe_of(r.name) == name), key=lambda r: r.nfe)
    return [(r.nfe, math.log(r.value), *map(math.log, r.interval)) for r in own]


def _lines(axes: Any, lines: dict[str, list[Point]]) -> None:
    for number, (name, points) in enumerate(lines.items()):
        places, values = [point[0] for point in points], [point[1] for point in points]
        spread = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
        axes.errorbar(places, values, spread, capsize=2, label=name, **look(number))
    every = sorted({point[0] for points in lines.values() for point in points})
    axes.axhline(0, color="0.4", lw=1, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [f"{place:g}" for place in every])
    if lines:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), handlelength=4)
