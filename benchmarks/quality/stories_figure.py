"""Perplexity at the stories' own entropy over forward passes, a panel per judge.

Every student is drawn in the best of the orders it was sampled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality.matched import best_orders, by_order, match_students
from evaluation.curve import MatchedValue

FILES = ("quality-stories.json", "quality-stories-further.json", "quality-stories-blocks.json")
MARKS = {True: "o-", False: "s--"}
"""Of lines: with noise, and without."""


def read_results(results: Path) -> dict[str, Any]:
    """Recipes of all files that are there, under one reference; a recipe of two files counts once.

    Half-way students are left out: others went on from them.
    """
    recipes, conditioned, found = {}, set(), {}
    for file in (results / name for name in FILES):
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            kept = {r["name"]: r for r in found["plan"]["recipes"] if "half-way" not in r["name"]}
            recipes = {**{name: found["recipes"][name] for name in kept}, **recipes}
            conditioned |= {name for name, r in kept.items() if r["conditioning"] != "none"}
    return {
        "recipes": recipes,
        "conditioned": conditioned,
        "entropy_nats": found["reference"]["entropy_nats"],
    }


def draw_stories(results: Path) -> Path:
    """Write ``quality-stories.png`` beside the JSON files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = read_results(results)
    entropy = found["entropy_nats"]
    any_way = next(iter(next(iter(found["recipes"].values()))[0]["samples"].values()))
    judges = list(next(iter(any_way.values()))["nll_sums"])
    shape = {"figsize": (5.4 * len(judges) + 3, 4.6), "layout": "constrained", "sharey": True}
    figure, panels = pyplot.subplots(1, len(judges), squeeze=False, **shape)
    for axes, judge in zip(panels[0], judges, strict=True):
        matched = best_orders(match_students(by_order(found["recipes"]), judge, entropy))
        _draw_judge(axes, matched, found["conditioned"])
        axes.set_title(f"judge: {judge}", loc="left", fontsize=10)
    panels[0][0].set_ylabel(f"generative perplexity at entropy {entropy:.2f}")
    panels[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    path = results / "quality-stories.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _draw_judge(
    axes: Any, matched: Mapping[tuple[str, float], MatchedValue], conditioned: set[str]
) -> None:
    from matplotlib import colormaps

    for number, name in enumerate(dict.fromkeys(name for name, _ in matched)):
        color = colormaps["tab20"](number % 20)
        passes = sorted(nfe for other, nfe in matched if other == name)
        cells = [matched[name, nfe] for nfe in passes]
        values = [cell.perplexity for cell in cells]
        bounds = [cell.interval or (cell.perplexity, cell.perplexity) for cell in cells]
        spread = [
            [value - low for value, (low, _) in zip(values, bounds, strict=True)],
            [high - value for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        mark = MARKS[name in conditioned]
        axes.errorbar(passes, values, spread, fmt=mark, color=color, ms=4, lw=1, label=name)
    every = sorted({nfe for _, nfe in matched})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [f"{nfe:g}" for nfe in every])
    axes.set_xlabel("forward passes for a row of 128 tokens")
    axes.spines[["top", "right"]].set_visible(False)
