"""Perplexity with noise over the best without it, at equal entropy and equal passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.quality.plan import Plan, Recipe
from evaluation.curve import CurvePoint, MatchedValue, matched_perplexity

Matched = Mapping[tuple[str, float], MatchedValue]


@dataclass(frozen=True)
class Ratio:
    """One conditioned recipe beside the best plain one of its kind and NFE.

    Attributes:
        name: The conditioned recipe.
        against: The plain recipe.
        nfe: Forward passes.
        value: Perplexity over perplexity, the samples of all training seeds together.
        interval: 95%: the two intervals' widths in logs, added as independent errors are.
        by_seed: The ratio of each training seed alone.
        is_matched: Whether both sweeps reach the entropy.
    """

    name: str
    against: str
    nfe: float
    value: float
    interval: tuple[float, float]
    by_seed: tuple[float, ...]
    is_matched: bool


def by_order(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Any]]:
    """The figures, and those of every further order of sampling under ``recipe; order``."""
    found: dict[str, list[Any]] = {}
    for name, seeds in figures.items():
        found[name] = list(seeds)
        for order in seeds[0].get("orders", {}):
            found[f"{name}; {order}"] = [
                {**cells, "samples": cells["orders"][order]} for cells in seeds
            ]
    return found


def recipe_of(name: str) -> str:
    """The recipe, whatever the order."""
    return name.partition("; ")[0]


def match_students(
    figures: Mapping[str, Sequence[Mapping[str, Any]]], judge: str, entropy_nats: float
) -> dict[tuple[str, float], MatchedValue]:
    """(Recipe, NFE) -> perplexity at one entropy, the samples of all training seeds together."""
    return {
        (name, float(nfe)): matched_perplexity(
            _points([cells["samples"][nfe] for cells in seeds], judge),
            entropy_nats,
            is_paired=True,
        )
        for name, seeds in figures.items()
        for nfe in seeds[0]["samples"]
    }


def _points(seeds: Sequence[Mapping[str, Mapping[str, Any]]], judge: str) -> list[CurvePoint]:
    """A point per way of sampling, the samples of all training seeds together."""
    return [
        CurvePoint(
            np.concatenate([np.array(cells[way]["nll_sums"][judge]) for cells in seeds]),
            np.concatenate(
                [np.full(len(cells[way]["entropies"]), cells[way]["num_tokens"]) for cells in seeds]
            ).astype(float),
            np.concatenate([np.array(cells[way]["entropies"]) for cells in seeds]),
        )
        for way in seeds[0]
    ]


def ratio_interval(noisy: MatchedValue, plain: MatchedValue) -> tuple[float, float]:
    """exp(log r -+ sqrt(a^2 + b^2)), a and b half of each interval's width in logs."""
    halves = [math.log(x.interval[1] / x.interval[0]) / 2 for x in (noisy, plain) if x.interval]
    half, value = math.hypot(*halves), noisy.perplexity / plain.perplexity
    return value * math.exp(-half), value * math.exp(half)


def ratios(
    plan: Plan, figures: Mapping[str, Sequence[Mapping[str, Any]]], judge: str, entropy_nats: float
) -> list[Ratio]:
    """Every conditioned recipe, in each order, at every NFE that a plain one of its kind has."""
    figures = by_order(figures)
    pooled = match_students(figures, judge, entropy_nats)
    num_seeds = len(next(iter(figures.values())))
    by_seed = [
        match_students(
            {name: [cells[seed]] for name, cells in figures.items()}, judge, entropy_nats
        )
        for seed in range(num_seeds)
    ]
    noisy = {recipe.name: recipe for recipe in plan.recipes if recipe.conditioning != "none"}
    found = []
    for name, nfe in (place for place in pooled if recipe_of(place[0]) in noisy):
        plain = _best_plain(plan, noisy[recipe_of(name)], nfe, pooled)
        if plain is not None:
            found.append(_ratio(name, plain, nfe, pooled, by_seed))
    return found


def best_orders(matched: Matched) -> dict[tuple[str, float], MatchedValue]:
    """(Recipe, NFE) -> what its best order gives, of those that reach the entropy if any does."""
    found: dict[tuple[str, float], MatchedValue] = {}
    for (name, nfe), value in sorted(matched.items(), key=lambda item: _rank(item[1])):
        found.setdefault((recipe_of(name), nfe), value)
    return {place: found[place] for place in matched if place in found}


def _rank(value: MatchedValue) -> tuple[bool, float]:
    return not value.is_reached, value.perplexity


def _best_plain(plan: Plan, noisy: Recipe, nfe: float, pooled: Matched) -> str | None:
    """In whatever order; of those that reach the entropy, if any does."""
    names = {
        recipe.name
        for recipe in plan.recipes
        if recipe.conditioning == "none" and recipe.kind == noisy.kind
    }
    found = {
        name: value
        for (name, passes), value in pooled.items()
        if passes == nfe and recipe_of(name) in names
    }
    return min(found, key=lambda name: _rank(found[name]), default=None)


def _ratio(
    name: str, against: str, nfe: float, pooled: Matched, by_seed: Sequence[Matched]
) -> Ratio:
    noisy, plain = pooled[name, nfe], pooled[against, nfe]
    return Ratio(
        name,
        against,
        nfe,
        noisy.perplexity / plain.perplexity,
        ratio_interval(noisy, plain),
        tuple(seed[name, nfe].perplexity / seed[against, nfe].perplexity for seed in by_seed),
        noisy.is_reached and plain.is_reached,
    )


def ratio_lines(found: Sequence[Ratio]) -> list[str]:
    """A row per conditioned recipe, a column per NFE."""
    columns = sorted({ratio.nfe for ratio in found})
    lines = [["perplexity over the best plain student's", *(f"NFE {nfe:g}" for nfe in columns)]]
    lines.append(["---"] * len(lines[0]))
    for name in dict.fromkeys(ratio.name for ratio in found):
        own = {ratio.nfe: ratio for ratio in found if ratio.name == name}
        lines.append([name, *(_cell(own.get(nfe)) for nfe in columns)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    low, high = ratio.interval
    seeds = ", ".join(f"{value:.2f}" for value in ratio.by_seed)
    note = "" if ratio.is_matched else "; entropy not reached"
    said = f"{ratio.value:.2f} [{low:.2f}, {high:.2f}]"
    return f"{said} (seeds {seeds}; {ratio.against}{note})"
