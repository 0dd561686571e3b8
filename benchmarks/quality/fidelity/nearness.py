"""Students where their text is nearest the corpus, and beside each other at one distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.quality.plan import Plan, Recipe

SLACK = 1.1
"""Of the distance that both of a pair reach: a tenth more, lest one setting be all there is."""


@dataclass(frozen=True)
class Setting:
    """One way of sampling one recipe's students, of all training seeds.

    Attributes:
        recipe: Its name.
        nfe: Forward passes.
        order: Of the sampler.
        way: And the rest of its settings.
        distances: Judge -> Fréchet distance to the validation rows, of each seed's student.
        perplexities: Judge -> perplexity of each seed's samples.
        entropy_nats: Mean entropy within a sample.
        divergence_nats: KL of token frequencies from the corpus's, mean over seeds.
    """

    recipe: str
    nfe: int
    order: str
    way: str
    distances: Mapping[str, tuple[float, ...]]
    perplexities: Mapping[str, tuple[float, ...]]
    entropy_nats: float
    divergence_nats: float

    def distance(self, judge: str) -> float:
        """Mean over seeds."""
        return float(np.mean(self.distances[judge]))

    def perplexity(self, judge: str) -> float:
        """Of all samples, of which there are as many of every seed."""
        return float(np.exp(np.mean(np.log(self.perplexities[judge]))))


def settings_of(recipe: str, seeds: Sequence[Sequence[Mapping[str, Any]]]) -> list[Setting]:
    """The figures of a recipe's students, setting by setting."""
    return [_setting(recipe, cells) for cells in zip(*seeds, strict=True)]


def _setting(recipe: str, cells: Sequence[Mapping[str, Any]]) -> Setting:
    first = cells[0]
    judges = tuple(first["distances"])
    return Setting(
        recipe,
        first["nfe"],
        first["order"],
        first["way"],
        {judge: tuple(cell["distances"][judge] for cell in cells) for judge in judges},
        {judge: tuple(perplexity_of(cell, judge) for cell in cells) for judge in judges},
        float(np.mean([cell["entropies"] for cell in cells])),
        float(np.mean([cell["divergence_nats"] for cell in cells])),
    )


def perplexity_of(cell: Mapping[str, Any], judge: str) -> float:
    """Over all tokens of one student's samples."""
    sums = cell["nll_sums"][judge]
    return math.exp(sum(sums) / (len(sums) * cell["num_tokens"]))


def nearest(settings: Sequence[Setting], judge: str) -> dict[tuple[str, int], Setting]:
    """(Recipe, NFE) -> where its students' mean distance is least."""
    found: dict[tuple[str, int], Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.distance(judge)):
        found.setdefault((setting.recipe, setting.nfe), setting)
    places = dict.fromkeys((setting.recipe, setting.nfe) for setting in settings)
    return {place: found[place] for place in places}


def nearest_lines(settings: Sequence[Setting], judge: str, judges: Sequence[str]) -> list[str]:
    """A row per recipe and NFE, with the perplexities by all judges."""
    head = [
        f"nearest the text ({judge})",
        "NFE",
        "distance",
        "of each seed",
        f"perplexity there ({', '.join(judges)})",
        "entropy, nats",
        "KL of frequencies, nats",
        "sampled",
    ]
    lines = [head, ["---"] * len(head)]
    for (recipe, nfe), best in nearest(settings, judge).items():
        seeds = ", ".join(f"{value:.2f}" for value in best.distances[judge])
        perplexities = ", ".join(f"{best.perplexity(name):.0f}" for name in judges)
        numbers = [f"{best.distance(judge):.2f}", seeds, perplexities]
        numbers += [f"{best.entropy_nats:.2f}", f"{best.divergence_nats:.3f}"]
        lines.append([recipe, str(nfe), *numbers, f"{best.order}, {best.way}"])
    return ["| " + " | ".join(line) + " |" for line in lines]


def text_line(text: Mapping[str, Any], judge: str) -> str:
    """The same figures of the text itself."""
    return (
        f"As many rows that students were trained on: distance {text['distances'][judge]:.2f}, "
        f"perplexity {perplexity_of(text, judge):.1f}, entropy {np.mean(text['entropies']):.2f}, "
        f"KL {text['divergence_nats']:.3f}."
    )


def best_plain(
    plan: Plan, noisy: Recipe, nfe: int, found: Mapping[tuple[str, int], Setting], judge: str
) -> Setting | None:
    """Of the plain recipes of a kind the one whose nearest setting is nearest."""
    plain = [
        found[recipe.name, nfe]
        for recipe in plan.recipes
        if recipe.conditioning == "none"
        and recipe.kind == noisy.kind
        and (recipe.name, nfe) in found
    ]
    return min(plain, key=lambda setting: setting.distance(judge), default=None)


def least_perplexity(
    settings: Sequence[Setting], place: tuple[str, int], judge: str, distance: float
) -> Setting:
    """The setting of a recipe and NFE that writes best, of those no farther from the text."""
    near = [
        setting
        for setting in settings
        if (setting.recipe, setting.nfe) == place and setting.distance(judge) <= distance
    ]
    return min(near, key=lambda setting: setting.perplexity(judge))


def no_farther_lines(plan: Plan, settings: Sequence[Setting], judge: str) -> list[str]:
    """Noise beside the best plain student, each at its least perplexity within one distance.

    That distance is a tenth more than what both reach.
    """
    head = [
        f"no farther from the text ({judge}) than",
        "NFE",
        "distance",
        "without noise",
        "with noise",
        "ratio",
    ]
    lines, found = [head, ["---"] * len(head)], nearest(settings, judge)
    for noisy in (recipe for recipe in plan.recipes if recipe.conditioning != "none"):
        for name, nfe in (place for place in found if place[0] == noisy.name):
            plain = best_plain(plan, noisy, nfe, found, judge)
            if plain is None:
                continue
            limit = SLACK * max(plain.distance(judge), found[name, nfe].distance(judge))
            places = ((plain.recipe, nfe), (name, nfe))
            both = [least_perplexity(settings, place, judge, limit) for place in places]
            lines.append([name, str(nfe), f"{limit:.2f}", *_beside(both, judge)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _beside(both: Sequence[Setting], judge: str) -> list[str]:
    plain, noisy = both
    by_seed = [
        noise / without
        for noise, without in zip(noisy.perplexities[judge], plain.perplexities[judge], strict=True)
    ]
    seeds = ", ".join(f"{value:.2f}" for value in by_seed)
    cells = [f"{x.perplexity(judge):.0f} @ {x.entropy_nats:.2f} ({x.order}, {x.way})" for x in both]
    return [*cells, f"{noisy.perplexity(judge) / plain.perplexity(judge):.2f} (seeds {seeds})"]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is as good as in both; ascending in the first, lower is better."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
