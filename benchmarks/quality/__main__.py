"""Recipes of one store side by side, at equal shape, steps and tokens: from the plan to the table.

    python -m benchmarks.quality benchmarks/quality/maze.toml

extracts, trains, samples and scores what the file lists, resumes where it was stopped, and writes
a table, a figure and all numbers into benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.jobs import Job, run_under_a_bar, run_visibly, share_of_training
from benchmarks.measure import machine
from benchmarks.quality.maze import MazeBench
from benchmarks.quality.plan import TEACHER, Plan, Recipe, Run, read_plan, recall, remember
from benchmarks.quality.stories import StoriesBench
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.language_model.loading import find_pretrained
from shards.settings import to_mapping

FIGURES = "figures.json"


def quality(
    plan_file: Annotated[Path, typer.Argument(help="TOML file of recipes.")],
    home: Annotated[Path | None, typer.Option(help="Stores and students.")] = None,
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
    extract: Annotated[str, typer.Option(help="More words of gdistill-extract.")] = "",
    judge: Annotated[Path | None, typer.Option(help="Causal model; not the teacher.")] = None,
    only: Annotated[str, typer.Option(help="Recipes whose name has this text.")] = "",
    parallel: Annotated[int, typer.Option(min=1, help="Students trained side by side.")] = 2,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
) -> None:
    """Compare recipes; interrupted, the same command goes on."""
    plan = read_plan(plan_file, overrides or [], only)
    home = home or Path("out/quality") / plan_file.stem
    torch.set_num_threads(1)
    words = extract.split()
    stores = make_stores(plan, home, words)
    link_teacher(home, words)
    train(plan, plan.runs, stores, home, parallel)
    bench = MazeBench(plan, home) if plan.task == "maze" else StoriesBench(plan, home, judge)
    figures = measure(plan, stores, home, bench)
    out.mkdir(parents=True, exist_ok=True)
    place = out / f"quality-{plan_file.stem}"
    table = bench.summarise(figures)
    results = {"machine": machine(torch.device("cpu")), "plan": to_mapping(plan)}
    results |= {"reference": bench.reference(), "recipes": figures}
    write_json_atomic(place.with_suffix(".json"), results)
    place.with_suffix(".md").write_text("\n".join(table) + "\n", encoding="utf-8")
    typer.echo("\n".join(table))


def link_teacher(home: Path, words: Sequence[str]) -> None:
    """Put the teacher where recipes that start from it look for it."""
    link = home / Run(Recipe(TEACHER), seed=0).folder_of(TEACHER)
    if "--teacher" in words and not link.exists():
        link.unlink(missing_ok=True)  # it may lead nowhere
        files = find_pretrained(words[words.index("--teacher") + 1])
        link.symlink_to(files.folder.resolve())


def extracted(home: Path, words: tuple[str, ...]) -> Path:
    """The store all students share."""
    run_visibly("extraction", ("gdistill-extract", *words, "--out", str(home)))
    return home / "store"


def make_stores(plan: Plan, home: Path, words: Sequence[str]) -> dict[str, Path]:
    """Name -> store: the one that all share has none; others are made where a recipe names them."""
    stores = {"": extracted(home, (*plan.extract, *words))}
    named = {recipe.store for recipe in plan.recipes}
    for spec in (spec for spec in plan.stores if spec.name in named):
        folder = home / "stores" / spec.name
        if spec.extract:
            own = (word.format(home=home) for word in spec.extract)
            stores[spec.name] = extracted(folder, (*own, *words))
            continue
        stores[spec.name] = folder / "store"
        to = ("--out", str(stores[spec.name]), *spec.convert)
        run_visibly(f"store {spec.name}", ("gdistill-shards", "convert", str(stores[""]), *to))
    return stores


def train(plan: Plan, runs: list[Run], stores: Mapping[str, Path], home: Path, parallel: int) -> None:
    """Train what is not trained; those that others start from come first."""
    runs = [run for run in runs if run.recipe.student_of is None]
    for depth in sorted({plan.depth(run.recipe) for run in runs}):
        wave = [run for run in runs if plan.depth(run.recipe) == depth]
        jobs = []
        for run in wave:
            store = stores[run.recipe.store]
            command, folder = run.command(plan, store, home), home / run.folder
            if recall(folder / "done.json", command) is None:
                share = share_of_training(folder / "metrics.jsonl")
                jobs.append(Job(run.folder, command, folder / "train.log", share))
        if jobs:
            run_under_a_bar("train", jobs, parallel)
        for run in wave:
            command = run.command(plan, stores[run.recipe.store], home)
            remember(home / run.folder / "done.json", command, True)


def measure(
    plan: Plan, stores: Mapping[str, Path], home: Path, bench: MazeBench | StoriesBench
) -> dict[str, list[Any]]:
    """Recipe -> figures of its students, one per seed."""
    figures: dict[str, list[Any]] = {recipe.name: [] for recipe in plan.recipes}
    for run in plan.runs:
        folder = home / run.folder
        folder.mkdir(parents=True, exist_ok=True)
        command = run.command(plan, stores[run.recipe.store], home)
        sampling = [plan.num_samples, list(plan.sample_seeds), list(plan.nfe)]
        key = [command, sampling, to_mapping(run.recipe)]
        found = recall(folder / FIGURES, key)
        if found is None:
            found = bench.measure(run, home / run.folder_of(run.recipe.student_of))
            remember(folder / FIGURES, key, found)
        figures[run.recipe.name].append(found)
    return figures


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(quality)
    run_command(app)
