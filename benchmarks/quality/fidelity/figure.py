"""Perplexity over distance from the text, a point per setting of a sampler, a panel per NFE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.fidelity.nearness import Setting, frontier
from benchmarks.quality.plan import Plan
from evaluation.figures import MARKERS, WITH_NOISE, WITHOUT_NOISE, figure_file


def draw(plan: Plan, settings: Sequence[Setting], judges: Sequence[str], path: Path) -> None:
    """A row per judge, a column per kind of student and NFE; down and left is better."""
    kinds = {recipe.name: recipe.kind for recipe in plan.recipes}
    places = list(dict.fromkeys((kinds[x.recipe], x.nfe) for x in settings))
    size = (3.6 * len(places) + 1, 3.4 * len(judges) + 0.8)
    with figure_file(path, len(judges), len(places), size=size) as (figure, panels):
        shown = {}
        for row, judge in zip(panels, judges, strict=True):
            for axes, place in zip(row, places, strict=True):
                own = [x for x in settings if (kinds[x.recipe], x.nfe) == place]
                draw_place(axes, plan, own, judge)
                handles, labels = axes.get_legend_handles_labels()
                shown |= dict(zip(labels, handles, strict=True))
                axes.set_title(f"{_said(place[0])}, NFE {place[1]}; judge: {judge}")
            row[0].set_ylabel("generative perplexity")
        for axes in panels[-1]:
            axes.set_xlabel("Fréchet distance to the text")
        # Below all panels: inside one it would lie on points.
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=2)


def draw_place(axes: Any, plan: Plan, settings: Sequence[Setting], judge: str) -> None:
    """Every setting a faint point, and a line per recipe through those that no other beats."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    conditioned = {recipe.name: recipe.conditioning != "none" for recipe in plan.recipes}
    names = list(dict.fromkeys(x.recipe for x in settings))
    for name in names:
        has_noise = conditioned[name]
        of_a_kind = [n for n in names if conditioned[n] == has_noise]
        mark = MARKERS[of_a_kind.index(name) % len(MARKERS)]
        points = [(x.distance(judge), x.perplexity(judge)) for x in settings if x.recipe == name]
        color = WITH_NOISE if has_noise else WITHOUT_NOISE
        look: dict[str, Any] = {"color": color, "marker": mark}
        axes.plot(*zip(*points, strict=True), ls="", ms=3, alpha=0.35, **look)
        axes.plot(*zip(*frontier(points), strict=True), lw=1, ms=4, label=name, **look)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _said(kind: tuple[str, str]) -> str:
    student, blocks = kind
    return f"{student}, blocks of {blocks.partition('=')[2]}" if blocks else student
