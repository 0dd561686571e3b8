"""Sweep every sampler of trained students, and say where their text is nearest the corpus.

    python -m benchmarks.quality.fidelity benchmarks/quality/stories-blocks.toml --home .. \
      --extract .. --judge .. --only 'BD3-LM, blocks of 8' --only 'BD3-LM, blocks of 8 + Gumbel'

goes through students that the bench has trained: plan, --home, --extract and --judge as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.measure import machine
from benchmarks.quality.__main__ import make_judge
from benchmarks.quality.fidelity.figure import draw
from benchmarks.quality.fidelity.nearness import (
    Setting,
    nearest_lines,
    no_farther_lines,
    settings_of,
    text_line,
)
from benchmarks.quality.fidelity.sweep import Fidelity
from benchmarks.quality.matched import match_students, ratio_lines, ratios
from benchmarks.quality.plan import Plan, Recipe, Run, read_plan, recall, remember
from benchmarks.quality.stories import StoriesBench
from evaluation.curve import matched_table
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.errors import UsageError
from shards.settings import to_mapping

FIGURES = "fidelity-nfe{nfe}.json"


def fidelity(
    plan_file: Annotated[Path, typer.Argument(help="TOML file of recipes.")],
    home: Annotated[Path, typer.Option(help="Where the bench has its stores and students.")],
    extract: Annotated[str, typer.Option(help="As of the bench; the teacher is read of it.")],
    judge: Annotated[str, typer.Option(help="As of the bench.")] = "",
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
    only: Annotated[list[str] | None, typer.Option(help="Recipes, by their whole names.")] = None,
    nfe: Annotated[str, typer.Option(help="Forward passes, 4,8; else the recipe's own.")] = "",
    num: Annotated[int, typer.Option(min=2, help="Samples per setting.")] = 256,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
) -> None:
    """Sweep every sampler of trained students; interrupted, the same command goes on."""
    plan = replace(read_plan(plan_file, overrides or []), num_samples=num)
    if plan.task != "stories":
        raise UsageError("samples of text are wanted", where=plan_file, got=f"task {plan.task!r}")
    recipes = chosen(plan, only or [])
    torch.set_num_threads(1)
    words = extract.split()
    if "--teacher" not in words:
        raise UsageError("no judge", where="--extract", got=extract, expected="--teacher FOLDER")
    teacher = words[words.index("--teacher") + 1]
    bench = StoriesBench(plan, home, teacher, make_judge(plan, judge.split(), home, 1))
    work = Fidelity(bench)
    budgets = tuple(map(int, nfe.split(","))) if nfe else None
    figures = {
        recipe.name: [swept(work, plan, recipe, seed, budgets) for seed in plan.seeds]
        for recipe in recipes
    }
    settings = [setting for name, seeds in figures.items() for setting in settings_of(name, seeds)]
    text = work.text()
    table = table_of(plan, bench, figures, settings, text)
    place = out / f"quality-{plan_file.stem}-fidelity"
    out.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine(torch.device("cpu")), "plan": to_mapping(plan), "text": text}
    found = [asdict(setting) for setting in settings]
    write_json_atomic(place.with_suffix(".json"), {**results, "settings": found})
    place.with_suffix(".md").write_text("\n".join(table) + "\n", encoding="utf-8")
    draw(plan, settings, tuple(bench.judges), place.with_suffix(".png"))
    typer.echo("\n".join(table))


def chosen(plan: Plan, names: Sequence[str]) -> tuple[Recipe, ...]:
    """The recipes of these names; all where none is given.

    Raises:
        UsageError: For a name that the plan has not.
    """
    known = [recipe.name for recipe in plan.recipes]
    if unknown := set(names) - set(known):
        raise UsageError("no such recipe", where="--only", got=sorted(unknown), expected=known)
    return tuple(recipe for recipe in plan.recipes if not names or recipe.name in names)


def swept(
    work: Fidelity, plan: Plan, recipe: Recipe, seed: int, budgets: tuple[int, ...] | None
) -> list[Any]:
    """Figures of one student; those of each NFE are kept beside it."""
    run = Run(recipe, seed)
    folder = work.bench.home / run.folder
    command = run.command(plan, work.bench.home / "store", work.bench.home)
    found: list[Any] = []
    for nfe in budgets or recipe.nfe or plan.nfe:
        key = [command, [plan.num_samples, list(plan.sample_seeds)]]
        file = folder / FIGURES.format(nfe=nfe)
        figures = recall(file, key)
        if figures is None:
            figures = work.measure(folder, nfe)
            remember(file, key, figures)
        found += figures
    return found


def table_of(
    plan: Plan,
    bench: StoriesBench,
    figures: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    settings: Sequence[Setting],
    text: Mapping[str, Any],
) -> list[str]:
    """By each judge: where each recipe is nearest the text, and perplexity at its entropy."""
    entropy, sweeps = bench.reference()["entropy_nats"], samples_by_order(figures)
    lines: list[str] = []
    for judge in bench.judges:
        matched = matched_table(
            match_students(sweeps, judge, entropy), entropy, f"the validation rows; judge: {judge}"
        )
        lines += [
            *nearest_lines(settings, judge, tuple(bench.judges)),
            "",
            text_line(text, judge),
            "",
            *no_farther_lines(plan, settings, judge),
            "",
            matched.to_markdown(),
            "",
        ]
        lines += [*ratio_lines(ratios(plan, sweeps, judge, entropy)), ""]
    return lines[:-1]


def samples_by_order(
    figures: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> dict[str, list[dict[str, Any]]]:
    """``recipe; order`` -> samples per seed, as :mod:`benchmarks.quality.matched` reads them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for recipe, seeds in figures.items():
        for order in dict.fromkeys(cell["order"] for cell in seeds[0]):
            found[f"{recipe}; {order}"] = [{"samples": _nested(cells, order)} for cells in seeds]
    return found


def _nested(cells: Sequence[Mapping[str, Any]], order: str) -> dict[str, dict[str, Any]]:
    samples: dict[str, dict[str, Any]] = {}
    for cell in (cell for cell in cells if cell["order"] == order):
        samples.setdefault(str(cell["nfe"]), {})[cell["way"]] = cell
    return samples


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(fidelity)
    run_command(app)
