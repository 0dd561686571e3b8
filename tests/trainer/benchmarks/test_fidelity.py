"""Fidelity: the distance by hand and by law, whose settings are taken, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from benchmarks.quality.fidelity import __main__ as module
from benchmarks.quality.fidelity.__main__ import fidelity, samples_by_order
from benchmarks.quality.fidelity.distance import frechet_distance, read
from benchmarks.quality.fidelity.figure import draw_place
from benchmarks.quality.fidelity.nearness import (
    Setting,
    frontier,
    nearest,
    nearest_lines,
    no_farther_lines,
    settings_of,
    text_line,
)
from benchmarks.quality.fidelity.sweep import ways_of
from benchmarks.quality.plan import Plan, Recipe
from benchmarks.quality.stories import ORDER_TEMPERATURES
from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import write_backbone
from tests.trainer.run_cases import LENGTH, VOCAB, tiny_run, write_store
from tests.trainer.sampling_cases import tiny_student
from trainer.sampling.registry import make_sampler
from trainer.training.loop import train


def gaussian(count: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width))


def test_distance_by_hand() -> None:
    """Means 1 and 3, variances 2 and 8: 4 + 2 + 8 - 2 sqrt(16)."""
    assert frechet_distance(np.array([[0.0], [2.0]]), np.array([[1.0], [5.0]])) == pytest.approx(6)


def test_distance_of_covariances_that_do_not_commute() -> None:
    """Against the eigenvalues of C_x C_y itself, which is not symmetric."""
    x, y = gaussian(50, 4) @ gaussian(4, 4, 1), gaussian(60, 4, 2) @ gaussian(4, 4, 3) + 1
    first, second = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    assert not np.allclose(first @ second, second @ first)
    common = np.sqrt(np.linalg.eigvals(first @ second).real).sum()
    apart = ((x.mean(0) - y.mean(0)) ** 2).sum()
    expected = apart + np.trace(first) + np.trace(second) - 2 * common
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(y, x) == pytest.approx(expected, rel=1e-9)


def test_distance_does_not_turn_and_grows_with_a_shift() -> None:
    x, y = gaussian(40, 3), gaussian(40, 3, 1) * [1, 2, 3]
    turn, _ = np.linalg.qr(gaussian(3, 3, 2))
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x @ turn, y @ turn) == pytest.approx(frechet_distance(x, y))
    away = np.array([1.0, -2.0, 2.0])
    assert frechet_distance(x, x + away) == pytest.approx(9)


def test_samples_of_one_law_are_near_each_other() -> None:
    """E = 2 d / n of the means + d (d + 1) / 4 n of the covariances, to first order; ten of it."""
    count, width = 4000, 3
    found = frechet_distance(gaussian(count, width), gaussian(count, width, 1))
    assert 0 <= found < 10 * (2 * width + width * (width + 1) / 4) / count
    assert frechet_distance(gaussian(count, width), 1.2 * gaussian(count, width, 1)) > 0.08


def test_a_sample_alike_is_far_from_text_that_is_not() -> None:
    """All of the text's variance is missing: tr C."""
    text = gaussian(100, 3)
    alike = np.repeat(text.mean(axis=0)[None], 10, axis=0)
    expected = np.trace(np.cov(text, rowvar=False))
    assert frechet_distance(alike, text) == pytest.approx(expected, abs=1e-9)


def test_one_row_has_no_covariance() -> None:
    with pytest.raises(UsageError, match=r"a covariance needs two \[samples\].*1 and 5 rows"):
        frechet_distance(gaussian(1, 2), gaussian(5, 2))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_states_are_those_below_the_head_without_the_given_token(
    shape: str, tmp_path: Path
) -> None:
    judge = AutoModelForCausalLM.from_pretrained(write_backbone(tmp_path, shape)).eval()
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    said = judge(input_ids=tokens, output_hidden_states=True)
    expected = said.hidden_states[-1][:, 1:].double().mean(1).detach().numpy()
    logits, found = read(judge, tokens)
    assert found.dtype == np.float64 and np.allclose(found, expected, atol=1e-6)
    assert torch.allclose(logits, said.logits, atol=1e-6)


def test_states_of_a_judge_that_is_a_student() -> None:
    student: Any = tiny_student("ar", "none")
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    _, theirs = read(student, tokens)
    with torch.no_grad():
        states = student._hidden(tokens)[:, 1:].double().mean(1).numpy()
    assert np.allclose(theirs, states, atol=1e-6)
    assert not student.backbone._forward_hooks, "the hook is gone"


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_every_way_is_a_sampler_and_one_pass_has_one_order(kind: str, conditioning: str) -> None:
    student = tiny_student(kind, conditioning, block_size=4 if kind == "bd3lm" else None)
    blocks = student.config.row_length // student.config.tokens_per_block
    one, two = (ways_of(student, passes * blocks) for passes in (1, 2))
    for nfe, orders in ((blocks, one), (2 * blocks, two)):
        for ways in orders.values():
            for settings in ways.values():
                words = {"sampler": student.default_sampler, "nfe": nfe, **settings}
                sampler = make_sampler(words.pop("sampler"), **words)
                assert ("tau" in settings) == (conditioning == "gumbel")
                assert sampler.nfe == nfe
    assert one.keys() < two.keys()
    assert len(two) == len(one) + (1 if conditioning == "gumbel" else len(ORDER_TEMPERATURES) - 1)


def cell(nfe: int, way: str, distance: float, nll: float = 2.0) -> dict[str, Any]:
    return {
        "nfe": nfe,
        "order": "any",
        "way": way,
        "nll_sums": {"judge": [nll * 3, nll * 3]},
        "num_tokens": 3,
        "entropies": [1.0, 2.0],
        "divergence_nats": 0.5,
        "distances": {"judge": distance},
    }


def test_the_nearest_setting_is_that_of_all_seeds() -> None:
    seeds = [
        [cell(4, "a", 1.0), cell(4, "b", 3.0, nll=1.0), cell(8, "a", 9.0)],
        [cell(4, "a", 6.0), cell(4, "b", 3.5, nll=3.0), cell(8, "a", 7.0)],
    ]
    settings = settings_of("recipe", seeds)
    found = nearest(settings, "judge")
    assert list(found) == [("recipe", 4), ("recipe", 8)]
    best = found["recipe", 4]
    assert (best.way, best.distances["judge"]) == ("b", (3.0, 3.5)), "3.25, where a has 3.5"
    assert best.perplexity("judge") == pytest.approx(math.exp(2)), "over the tokens of both"
    assert (best.entropy_nats, best.divergence_nats) == (1.5, 0.5)
    _, _, line, _ = nearest_lines(settings, "judge", ["judge"])
    assert line == "| recipe | 4 | 3.25 | 3.00, 3.50 | 7 | 1.50 | 0.500 | any, b |"


def test_no_point_of_the_frontier_is_beaten() -> None:
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 3.0), (4.0, 2.0), (1.0, 6.0), (3.5, 1.0)]
    assert frontier(points) == [(1.0, 5.0), (2.0, 3.0), (3.0, 1.0)]


def recipes(*names: str) -> Plan:
    """Those with a + have noise; the last letter is the block size."""
    return Plan(
        "stories",
        (),
        tuple(
            Recipe(
                name,
                conditioning="gumbel" if "+" in name else "none",
                settings=(f"model.block_size={name[-1]}",),
            )
            for name in names
        ),
    )


def test_at_one_distance_each_writes_its_best() -> None:
    """Plain ones reach 2 and 3, the one with noise 1: what is within 2.2 counts, for both."""
    plan = recipes("far 4", "plain 4", "noise +4", "other 8")
    log = math.log
    found = {
        "far 4": [cell(4, "a", 3.0, log(5))],
        "plain 4": [cell(4, "a", 2.0, log(90)), cell(4, "b", 2.1, log(80)), cell(4, "c", 3.0, 1.0)],
        "noise +4": [cell(4, "a", 1.0, log(70)), cell(4, "b", 2.2, log(20)), cell(4, "c", 2.3, 0)],
        "other 8": [cell(4, "a", 0.1, 0.0)],
    }
    settings = [x for name, cells in found.items() for x in settings_of(name, [cells])]
    _, _, line = no_farther_lines(plan, settings, "judge")
    sides = "80 @ 1.50 (any, b) | 20 @ 1.50 (any, b)"
    assert line == f"| noise +4 | 4 | 2.20 | {sides} | 0.25 (seeds 0.25) |"


def test_the_distance_is_one_that_both_reach() -> None:
    plan = recipes("plain 4", "noise +4")
    cells = {"plain 4": [cell(4, "a", 1.0, 1.0)], "noise +4": [cell(4, "a", 5.0, 2.0)]}
    settings = [x for name, seeds in cells.items() for x in settings_of(name, [seeds, seeds])]
    *_, line = no_farther_lines(plan, settings, "judge")
    assert "| 5.50 |" in line and line.endswith("| 2.72 (seeds 2.72, 2.72) |")


def test_noise_without_a_plain_student_of_its_kind_stands_alone() -> None:
    plan = recipes("plain 8", "noise +4")
    settings = settings_of("plain 8", [[cell(4, "a", 1.0)]])
    settings += settings_of("noise +4", [[cell(4, "a", 1.0)]])
    assert len(no_farther_lines(plan, settings, "judge")) == 2, "the head alone"


def test_the_text_itself_is_told() -> None:
    line = text_line(cell(0, "", 0.05, math.log(3.5)), "judge")
    assert "distance 0.05, perplexity 3.5, entropy 1.50, KL 0.500" in line


def test_judges_keep_their_order_wherever_figures_come_from() -> None:
    """Kept figures come back with their keys sorted."""
    found = cell(4, "a", 1.0, nll=math.log(7))
    both = {"z": found["nll_sums"]["judge"], "a": [math.log(5) * 3] * 2}
    found = {**found, "nll_sums": both, "distances": {"z": 1.0, "a": 2.0}}
    for kept in (found, json.loads(json.dumps(found, sort_keys=True))):
        lines = nearest_lines(settings_of("recipe", [[kept]]), "z", ("z", "a"))
        assert "| perplexity there (z, a) |" in lines[0] and "| 7, 5 |" in lines[2]


def test_seeds_must_have_been_swept_alike() -> None:
    with pytest.raises(ValueError, match="shorter"):
        settings_of("recipe", [[cell(4, "a", 1.0)], []])


def test_orders_are_matched_apart() -> None:
    other = {**cell(8, "c", 2.0), "order": "other"}
    found = samples_by_order({"recipe": [[cell(4, "a", 1.0), cell(4, "b", 1.0), other]]})
    assert found.keys() == {"recipe; any", "recipe; other"}
    (seed,) = found["recipe; any"]
    assert seed["samples"].keys() == {"4"} and seed["samples"]["4"].keys() == {"a", "b"}
    assert found["recipe; other"][0]["samples"]["8"]["c"]["order"] == "other"


PLAN = """
task = "stories"
extract = []
settings = []
seeds = [1]
sample_seeds = [5]
nfe = [2]

[[recipes]]
name = "plain"

[[recipes]]
name = "noisy"
conditioning = "gumbel"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two students of one step, a teacher, a plan."""
    write_store(tmp_path / "home" / "store")
    for name, conditioning in (("plain", "none"), ("noisy", "gumbel")):
        config = tiny_run(model__conditioning=conditioning, training__num_steps=1)
        assert train(config, tmp_path / "home" / "store", tmp_path / "home" / f"{name}-seed1")
    write_backbone(tmp_path / "teacher")
    (tmp_path / "few.toml").write_text(PLAN)
    return tmp_path / "home"


def test_students_are_swept_once_and_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home.parent
    words = f"--teacher {root / 'teacher'}"
    fidelity(root / "few.toml", home, words, out=root / "out", num=4)
    table = (root / "out" / "quality-few-fidelity.md").read_text()
    assert "| nearest the text (teacher) |" in table and "| noisy; by probability |" in table
    results = json.loads((root / "out" / "quality-few-fidelity.json").read_text())
    settings = [Setting(**setting) for setting in results["settings"]]
    assert {setting.recipe for setting in settings} == {"plain", "noisy"}
    assert all(setting.nfe == 2 and setting.distances["teacher"][0] > 0 for setting in settings)

    assert (root / "out" / "quality-few-fidelity.png").stat().st_size > 5_000
    assert "As many rows that students were trained on: distance" in table

    measure = module.Fidelity.measure
    monkeypatch.setattr(module.Fidelity, "measure", lambda *_: pytest.fail("it is kept"))
    fidelity(root / "few.toml", home, words, out=root / "again", num=4)
    again = (root / "again" / "quality-few-fidelity.json").read_bytes()
    assert again == (root / "out" / "quality-few-fidelity.json").read_bytes()
    assert (root / "again" / "quality-few-fidelity.md").read_text() == table
    with pytest.raises(pytest.fail.Exception, match="it is kept"):
        fidelity(root / "few.toml", home, words, out=root / "again", num=5)

    passes: list[int] = []
    counted = lambda *args: passes.append(args[2]) or measure(*args)  # noqa: E731
    monkeypatch.setattr(module.Fidelity, "measure", counted)
    fidelity(root / "few.toml", home, words, out=root / "more", num=4, nfe="2,4")
    assert passes == [4, 4], "what is kept of one NFE is not measured with another"
    more = json.loads((root / "more" / "quality-few-fidelity.json").read_text())["settings"]
    assert {setting["nfe"] for setting in more} == {2, 4}


def test_figures_are_those_of_the_validation_rows_themselves(home: Path) -> None:
    """Rows of the text are at distance 0 from it, and have its frequencies."""
    plan = replace(module.read_plan(home.parent / "few.toml", []), num_samples=4)
    bench = module.StoriesBench(plan, home, str(home.parent / "teacher"), None)
    found = module.Fidelity(bench).figures_of(bench.validation)
    assert found["distances"]["teacher"] == pytest.approx(0, abs=1e-6)
    num_tokens = len(bench.validation) * (LENGTH - 1)
    assert 0 <= found["divergence_nats"] < VOCAB / (2 * num_tokens), "the half tokens alone"
    assert len(found["entropies"]) == len(bench.validation)
    assert found["nll_sums"] == bench.scores(bench.validation)["nll_sums"]


def test_figure_has_every_setting_and_a_line_through_the_best() -> None:
    plan = recipes("plain 4", "noise +4")
    cells = {
        "plain 4": [cell(4, "a", 1.0, math.log(9)), cell(4, "b", 2.0, math.log(20))],
        "noise +4": [cell(4, "a", 0.5, math.log(8)), cell(4, "b", 3.0, math.log(2))],
    }
    settings = [x for name, found in cells.items() for x in settings_of(name, [found])]
    axes = Figure().subplots()
    draw_place(axes, plan, settings, "judge")
    points, best, _, noisy = (
        np.round(np.asarray(line.get_xydata(), dtype=float), 6).tolist() for line in axes.lines
    )
    assert points == [[1, 9], [2, 20]] and best == [[1, 9]]
    assert noisy == [[0.5, 8], [3, 2]]
    plain, noise = (axes.lines[number].get_color() for number in (1, 3))
    assert plain != noise and axes.get_xscale() == axes.get_yscale() == "log"


def test_the_text_is_told_by_rows_of_training(home: Path) -> None:
    plan = replace(module.read_plan(home.parent / "few.toml", []), num_samples=4)
    bench = module.StoriesBench(plan, home, str(home.parent / "teacher"), None)
    rows = ShardStore.open(home / "store").split("train", ["tokens"]).read_rows(0, 4)["tokens"]
    expected = bench.scores(torch.from_numpy(np.asarray(rows)).long())
    assert module.Fidelity(bench).text()["nll_sums"] == expected["nll_sums"]


def test_what_is_not_there_is_named(home: Path) -> None:
    words = f"--teacher {home.parent / 'teacher'}"
    with pytest.raises(UsageError, match=r"no such recipe \[--only\].*'other'.*'plain'"):
        fidelity(home.parent / "few.toml", home, words, only=["other"])
    with pytest.raises(UsageError, match=r"no judge \[--extract\]"):
        fidelity(home.parent / "few.toml", home, "")
    (home.parent / "maze.toml").write_text(PLAN.replace("stories", "maze"))
    with pytest.raises(UsageError, match=r"samples of text are wanted.*'maze'"):
        fidelity(home.parent / "maze.toml", home, words)
