"""Plans of the quality bench: order, mistakes, and where students begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import stories
from benchmarks.quality.__main__ import link_teacher
from benchmarks.quality.plan import TEACHER, Plan, Recipe, read_plan
from benchmarks.quality.stories import StoriesBench
from shards.errors import UsageError
from tests.trainer.backbone_cases import write_backbone
from trainer.initial_weights import network_settings
from trainer.students.registry import MDLM
from trainer.training.settings import compose_run, read_recipe


def test_plan_mistakes_and_order() -> None:
    with pytest.raises(UsageError, match="one name"):
        Plan("maze", (), (Recipe("a"), Recipe("a")))
    with pytest.raises(UsageError, match=r"no such recipe \[a\]; got 'b'"):
        Plan("maze", (), (Recipe("a", init_from="b"),))
    plan = Plan("maze", (), (Recipe("tuned", init_from="plain"), Recipe("plain")), seeds=(3,))
    assert [run.folder for run in plan.runs] == ["plain-seed3", "tuned-seed3"]
    command = plan.runs[1].command(plan, Path("store"), Path("home"))
    circle = (Recipe("a", init_from="b"), Recipe("b", init_from="a"))
    with pytest.raises(UsageError, match="circle"):
        _ = Plan("maze", (), circle).runs
    chain = (Recipe("c", init_from="b"), Recipe("b", init_from="a"), Recipe("a"))
    assert [run.recipe.name for run in Plan("maze", (), chain, seeds=(1,)).runs] == ["a", "b", "c"]
    assert command[command.index("--init-from") + 1] == str(Path("home/plain-seed3"))


def test_students_may_begin_as_the_teacher(tmp_path: Path) -> None:
    """It is nobody's student: it comes before all of them, whatever the seed."""
    adopted = Recipe("adopted", init_from=TEACHER)
    tuned, other = Recipe("tuned", init_from="adopted"), Recipe("other")
    plan = Plan("stories", (), (tuned, adopted, other), seeds=(3,))
    assert [plan.depth(recipe) for recipe in plan.recipes] == [1, 0, 0]
    assert [plan.begins_with_teacher(r) for r in plan.recipes] == [True, True, False]
    link_teacher(tmp_path, ("--corpus", "c", "--teacher", str(write_backbone(tmp_path / "lm"))))
    commands = [run.command(plan, tmp_path / "store", tmp_path) for run in plan.runs]
    starts = {Path(c[c.index("--init-from") + 1]).name: c for c in commands if "--init-from" in c}
    assert sorted(starts) == ["adopted-seed3", "the-teacher"]
    assert (tmp_path / "the-teacher" / "config.json").is_file()


def test_every_plan_in_the_repository_can_be_read(tmp_path: Path) -> None:
    five_layers = write_backbone(tmp_path / "lm", num_hidden_layers=6)  # as stories3M
    teacher = network_settings(five_layers, MDLM)
    files = sorted((Path(__file__).parents[2] / "benchmarks" / "quality").glob("*.toml"))
    assert files
    for file in files:
        plan = read_plan(file, [])
        first, *_ = plan.recipes
        assert read_plan(file, [], only=first.name).recipes[0] == first
        with pytest.raises(UsageError, match="--only"):
            read_plan(file, [], only="no such recipe")
        for run in plan.runs:
            settings = [*plan.settings, *run.recipe.settings]
            source = {"student": run.recipe.student}
            model = {"model": {"conditioning": run.recipe.conditioning}}
            network = teacher if plan.begins_with_teacher(run.recipe) else {}
            compose_run([read_recipe(plan.preset), network, source, model], settings)


def test_stories_are_sampled_as_their_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe with sweeps has no others; one that is only a start has no samples."""
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(stories, "run_visibly", lambda name, words: ran.append(words))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "nll_nats": 2.0}\n')
    own = Recipe("own", sweeps={"few": "--sampler block --nfe 2 --sweep tau=1,2"}, nfe=(64,))
    start, usual = Recipe("start", is_sampled=False), Recipe("usual", student="bd3lm", nfe=(8, 16))
    bench = StoriesBench(Plan("stories", (), (own, start, usual), seeds=(1,)), tmp_path, None)
    for run in bench.plan.runs:
        bench.measure(run, tmp_path)
    few, block = (" ".join(words) for words in ran)
    assert few.count("--nfe") == 1 and "--sampler block --nfe 2 --sweep tau=1,2" in few
    assert "own-seed1/few" in few and "usual-seed1/block" in block and "--nfe 8,16" in block
