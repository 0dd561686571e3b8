"""The orders in which the bench samples students of stories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality import stories
from benchmarks.quality.__main__ import sampling_of
from benchmarks.quality.plan import Plan, Recipe, Run
from benchmarks.quality.stories import StoriesBench
from tests.trainer.sampling_cases import draw, tiny_student
from trainer.sampling.ancestral import FixedCountConfig
from trainer.sampling.block import BlockConfig
from trainer.sampling.confidence import ConfidenceConfig
from trainer.sampling.registry import make_sampler

IDS = torch.arange(5)


def samplers(student, path: Path, **settings: tuple[float, ...]):
    """Order -> way -> sampler."""
    plan = Plan("stories", (), (), argmax_tau=(1.0, 1.5), further_orders=True, **settings)
    orders = StoriesBench(plan, path, "", None)._orders(student)
    default = {"sampler": student.default_sampler, "nfe": 4}
    found = {}
    for order, ways in orders.items():
        for way, settings in ways.items():
            words = {**default, **settings}
            found.setdefault(order, {})[way] = make_sampler(words.pop("sampler"), **words)
    return found


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_students_with_noise_come_surest_first_at_every_tau(kind: str, tmp_path: Path) -> None:
    student = tiny_student(kind, "gumbel", block_size=4 if kind == "bd3lm" else None)
    (ways,) = samplers(student, tmp_path).values()
    assert [sampler.tau for sampler in ways.values()] == [1.0, 1.5]
    for sampler in ways.values():
        assert sampler.decision == "argmax"
        assert (sampler.confidence, sampler.order_temperature) == ("margin", 0)
        expected = (BlockConfig, "confidence") if kind == "bd3lm" else (ConfidenceConfig, None)
        assert (type(sampler), getattr(sampler, "inner", None)) == expected


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_students_with_noise_are_drawn_from_at_the_plain_temperatures(
    kind: str, tmp_path: Path
) -> None:
    student = tiny_student(kind, "gumbel", block_size=4 if kind == "bd3lm" else None)
    taken, *drawn = samplers(student, tmp_path, drawn_tau=(0.5, 0.8)).values()
    assert {sampler.decision for sampler in taken.values()} == {"argmax"}
    for tau, ways in zip((0.5, 0.8), drawn, strict=True):
        assert {(sampler.decision, sampler.tau) for sampler in ways.values()} == {
            ("categorical", tau)
        }
        heats = [sampler.temperature for sampler in ways.values()]
        assert heats == list(stories.TEMPERATURES)
        orders = {(s.confidence, s.order_temperature) for s in ways.values()}
        assert orders == {("margin", 0)}, "the order that argmax has"


def test_only_figures_that_change_are_made_again() -> None:
    noisy, plain = Recipe("noisy", conditioning="gumbel"), Recipe("plain")
    bare = Plan("stories", (), (), further_orders=True)
    drawn = replace(bare, drawn_tau=(0.8,))
    assert sampling_of(drawn, plain) == sampling_of(bare, plain)
    assert sampling_of(drawn, noisy) != sampling_of(bare, noisy)
    other = replace(drawn, drawn_tau=(0.9,))
    assert sampling_of(other, noisy) != sampling_of(drawn, noisy)
    unused = replace(drawn, further_orders=False)
    assert sampling_of(unused, noisy) == sampling_of(replace(bare, further_orders=False), noisy)


def test_plain_students_come_in_orders_of_more_and_more_noise(tmp_path: Path) -> None:
    student = tiny_student("mdlm", "none")
    found = samplers(student, tmp_path)
    noise = [next(iter(ways.values())).order_temperature for ways in found.values()]
    assert noise == sorted(noise) and noise[0] > 0
    every = [sampler for ways in found.values() for sampler in ways.values()]
    assert {sampler.confidence for sampler in every} == {"probability"}
    heats = [[sampler.temperature for sampler in ways.values()] for ways in found.values()]
    assert heats == [list(stories.TEMPERATURES)] * len(noise)
    *_, (name, uniform) = found.items()
    assert name == "as many in every pass"
    expected = draw(student, FixedCountConfig(nfe=4), IDS).tokens
    assert torch.equal(draw(student, uniform["temperature 1"], IDS).tokens, expected)


@pytest.mark.parametrize("further", [False, True])
def test_figures_of_further_orders_are_asked_for(
    further: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sweep per order and NFE, each with the settings of its order."""
    monkeypatch.setattr(stories, "load_student", lambda folder: tiny_student("mdlm", "none"))
    monkeypatch.setattr(stories, "last_validation", lambda folder: {})
    monkeypatch.setattr(StoriesBench, "_sample", lambda self, student, nfe, ways: dict(ways))
    plan = Plan("stories", (), (), nfe=(2, 3), is_ahead=False, further_orders=further)
    found = StoriesBench(plan, tmp_path, "", None).measure(Run(Recipe("plain"), 1), tmp_path)
    assert found["samples"] == dict.fromkeys(("2", "3"), stories.WAYS)
    assert set(found["orders"]) == (set(stories.ORDER_TEMPERATURES) if further else set())
    for order, sweeps in found["orders"].items():
        for ways in (sweeps["2"], sweeps["3"]):
            noise = {settings["order_temperature"] for settings in ways.values()}
            assert noise == {stories.ORDER_TEMPERATURES[order]}
