"""Ratios of perplexities at equal entropy, their figure, and what they are made from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality.__main__ import measure
from benchmarks.quality.matched import (
    best_orders,
    by_order,
    match_students,
    ratio_interval,
    ratio_lines,
    ratios,
)
from benchmarks.quality.plan import Plan, Recipe, Run
from benchmarks.quality.stories import WAYS, StoriesBench
from benchmarks.quality.stories_figure import FILES, draw_stories, read_results
from evaluation.curve import MatchedValue
from shards.atomic import write_json_atomic
from shards.settings import to_mapping


def sweep(rate: float, seed: int) -> dict[str, Any]:
    """Two ways of sampling on the line log perplexity = rate * entropy."""
    jitter = torch.rand(40, generator=torch.Generator().manual_seed(seed)).double() * 0.2
    ways = {}
    for entropy in (1.0, 3.0):
        entropies = (entropy + jitter - jitter.mean()).tolist()
        nlls = [10 * rate * each for each in entropies]
        ways[f"at {entropy:g}"] = {
            "entropies": entropies,
            "nll_sums": {"teacher": nlls},
            "num_tokens": 10,
        }
    return {"samples": {"4": ways}}


def test_ratio_to_the_best_plain_student_of_its_kind() -> None:
    """At entropy 2: exp(2 * 0.5) over exp(2 * 0.8), seed by seed, and a line of each recipe."""
    recipes = (
        Recipe("weak"),
        Recipe("strong"),
        Recipe("other kind", student="bd3lm"),
        Recipe("other blocks", settings=("model.block_size=4",)),
        Recipe("noisy", conditioning="gumbel"),
    )
    rates = {
        "weak": (1.0, 1.0),
        "strong": (0.7, 0.9),
        "other kind": (0.1, 0.1),
        "other blocks": (0.1, 0.1),
    }
    figures = {
        name: [sweep(rate, seed) for seed, rate in enumerate(pair)]
        for name, pair in {**rates, "noisy": (0.5, 0.5)}.items()
    }
    (found,) = ratios(Plan("stories", (), recipes), figures, "teacher", 2.0)
    assert (found.name, found.against, found.nfe, found.is_matched) == ("noisy", "strong", 4, True)
    assert found.value == pytest.approx(math.exp(2 * (0.5 - 0.8)), rel=0.02)
    assert found.by_seed == pytest.approx([math.exp(-0.4), math.exp(-0.8)], rel=0.02)
    assert found.interval[0] < found.value < found.interval[1]
    _, _, line = ratio_lines([found])
    assert line.startswith("| noisy | 0.5") and line.endswith("; strong) |")
    (far,) = ratios(Plan("stories", (), recipes), figures, "teacher", 9.0)
    assert not far.is_matched and "entropy not reached" in ratio_lines([far])[-1]


def in_orders(rate: float, **orders: float) -> dict[str, Any]:
    """The same sweep under further orders, of other rates."""
    further = {order: sweep(other, 0)["samples"] for order, other in orders.items()}
    return {**sweep(rate, 0), "orders": further}


def test_every_order_is_compared_with_the_best_order_of_the_plain_student() -> None:
    recipes = (Recipe("plain"), Recipe("noisy", conditioning="gumbel"))
    figures = {"plain": [in_orders(1.0, sure=0.8, odd=0.9)], "noisy": [in_orders(0.7, sure=0.5)]}
    found = {
        ratio.name: ratio for ratio in ratios(Plan("stories", (), recipes), figures, "teacher", 2.0)
    }
    assert found.keys() == {"noisy", "noisy; sure"}
    assert {ratio.against for ratio in found.values()} == {"plain; sure"}
    for name, rate in (("noisy", 0.7), ("noisy; sure", 0.5)):
        assert found[name].value == pytest.approx(math.exp(2 * (rate - 0.8)), rel=0.02)


def test_an_order_that_misses_the_entropy_is_no_rival() -> None:
    """Its perplexity is lower only because its text is poorer."""
    poor = sweep(0.1, 0)["samples"]
    low = {way: {**cell, "entropies": [0.5] * 40} for way, cell in poor["4"].items()}
    figures = {"plain": [{**sweep(1.0, 0), "orders": {"poor": {"4": low}}}]}
    matched = match_students(by_order(figures), "teacher", 2.0)
    assert not matched["plain; poor", 4].is_reached
    assert matched["plain; poor", 4].perplexity < matched["plain", 4].perplexity
    assert best_orders(matched) == {("plain", 4): matched["plain", 4]}
    recipes = (Recipe("plain"), Recipe("noisy", conditioning="gumbel"))
    plan = Plan("stories", (), recipes)
    (found,) = ratios(plan, {**figures, "noisy": [sweep(0.5, 0)]}, "teacher", 2.0)
    assert found.against == "plain"


def test_the_best_order_of_each_recipe() -> None:
    figures = {"plain": [in_orders(1.0, sure=0.8)], "noisy": [in_orders(0.5, sure=0.7)]}
    matched = match_students(by_order(figures), "teacher", 2.0)
    best = best_orders(matched)
    assert best == {("plain", 4): matched["plain; sure", 4], ("noisy", 4): matched["noisy", 4]}


def test_errors_of_a_ratio_add_as_squares() -> None:
    """Half widths 3 % and 4 % in logs make 5 %."""
    halves = [math.exp(0.03), math.exp(0.04)]
    noisy, plain = (
        MatchedValue(value, (value / half, value * half), 1.0, True, 1.0)
        for value, half in zip((6.0, 3.0), halves, strict=True)
    )
    low, high = ratio_interval(noisy, plain)
    assert (low, high) == pytest.approx((2 * math.exp(-0.05), 2 * math.exp(0.05)))


def test_one_figure_of_all_plans(tmp_path: Path) -> None:
    """A recipe of two files counts once, as the first file has it; half-way ones are left out."""
    for place, file in enumerate(FILES[:2]):
        recipes = [
            Recipe("plain, half-way"),
            Recipe("plain"),
            Recipe("noisy", conditioning="gumbel"),
        ]
        found = {
            "plan": to_mapping(Plan("stories", (), tuple(recipes))),
            "recipes": {recipe.name: [sweep(0.5 + place, 0)] for recipe in recipes},
            "reference": {"entropy_nats": 2.0},
        }
        write_json_atomic(tmp_path / file, found)
    found = read_results(tmp_path)
    assert list(found["recipes"]) == ["plain", "noisy"] and found["conditioned"] == {"noisy"}
    assert found["recipes"]["plain"] == [sweep(0.5, 0)]
    assert draw_stories(tmp_path).stat().st_size > 10_000


def test_a_plans_taus_take_the_place_of_nuclei(tmp_path: Path) -> None:
    plan = Plan("stories", (), (), argmax_tau=(1.0, 1.5))
    ways = StoriesBench(plan, tmp_path, "", None).conditioned_ways
    argmax = {"decision": "argmax"}
    assert ways == {
        "argmax, tau 1": {**argmax, "tau": 1.0},
        "argmax, tau 1.5": {**argmax, "tau": 1.5},
    }
    without = StoriesBench(replace(plan, argmax_tau=()), tmp_path, "", None).conditioned_ways
    assert without == {**WAYS, "argmax": argmax}


@pytest.mark.parametrize(
    "change",
    [{"argmax_tau": (1.5,)}, {"nfe": (2,)}, {"num_samples": 3}, {"further_orders": True}],
)
def test_kept_figures_are_of_one_way_to_sample(tmp_path: Path, change: dict[str, Any]) -> None:
    """Measured anew where the plan samples otherwise, and only then."""
    measured: list[str] = []

    class Counting:
        def measure(self, run: Run, folder: Path) -> int:
            measured.append(folder.name)
            return len(measured)

    counting: Any = Counting()
    plan = Plan("stories", (), (Recipe("a"),), seeds=(1,), argmax_tau=(1.0,))
    stores = {"": tmp_path / "store"}
    for each, expected in ((plan, 1), (plan, 1), (replace(plan, **change), 2)):
        assert measure(each, stores, tmp_path, counting) == {"a": [expected]}
