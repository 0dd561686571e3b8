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
from evaluation.figures import PALETTE, figure_file

FILES = ("quality-stories.json", "quality-stories-further.json", "quality-stories-blocks.json")
MARKS = {True: ("o-", "^-"), False: ("s--", "D--")}
"""Of lines with noise and without; the second where the colours begin again."""


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
    found = read_results(results)
    entropy = found["entropy_nats"]
    any_way = next(iter(next(iter(found["recipes"].values()))[0]["samples"].values()))
    judges = list(next(iter(any_way.values()))["nll_sums"])
    path = results / "quality-stories.png"
    size = (5.4 * len(judges) + 3, 4.8)
    with figure_file(path, 1, len(judges), size=size, sharey=True) as (_, panels):
        for axes, judge in zip(panels[0], judges, strict=True):
            matched = best_orders(match_students(by_order(found["recipes"]), judge, entropy))
            _draw_judge(axes, matched, found["conditioned"])
            axes.set_title(f"judge: {judge}")
        panels[0][0].set_ylabel(f"generative perplexity at entropy {entropy:.2f}")
        panels[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)
    return path


def _draw_judge(
    axes: Any, matched: Mapping[tuple[str, float], MatchedValue], conditioned: set[str]
) -> None:
    names = list(dict.fromkeys(name for name, _ in matched))
    for name in names:
        of_a_kind = [other for other in names if (other in conditioned) == (name in conditioned)]
        turn, place = divmod(of_a_kind.index(name), len(PALETTE))
        passes = sorted(nfe for other, nfe in matched if other == name)
        cells = [matched[name, nfe] for nfe in passes]
        values = [cell.perplexity for cell in cells]
        bounds = [cell.interval or (cell.perplexity, cell.perplexity) for cell in cells]
        spread = [
            [value - low for value, (low, _) in zip(values, bounds, strict=True)],
            [high - value for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        mark = MARKS[name in conditioned][turn % 2]
        axes.errorbar(passes, values, spread, fmt=mark, color=PALETTE[place], label=name)
    every = sorted({nfe for _, nfe in matched})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [f"{nfe:g}" for nfe in every])
    axes.set_xlabel("forward passes for a row of 128 tokens")
