"""What a training step of each recipe costs, in processor seconds, side by side.

    python -m benchmarks.quality.step_cost PLAN.toml --store out/quality/stories/store

Steps are taken in turns, so that whatever else the machine does falls on all alike; processor time
of one thread, not time on the wall. "Equal compute" in a plan is to be read by this table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.quality.plan import Plan, Recipe, read_plan
from shards.console import run_command
from shards.store.store import ShardStore
from trainer.initial_weights import network_settings
from trainer.training.construction import student_class
from trainer.training.loop import Trainer
from trainer.training.settings import compose_run, read_recipe


def steps_of(
    plan: Plan, recipe: Recipe, store: ShardStore, out: Path, teacher: str | None
) -> Iterator[float]:
    """Take a training step each time; yields its processor seconds."""
    network = teacher if plan.begins_with_teacher(recipe) else None
    sources = [
        read_recipe(plan.preset),
        network_settings(network, student_class(recipe.student)),
        {"student": recipe.student, "model": {"conditioning": recipe.conditioning}},
    ]
    config = compose_run(sources, [*plan.settings, *recipe.settings])
    trainer = Trainer(config, store, out)
    for rows in trainer.stream:
        start = time.process_time()
        trainer.advance(trainer.make_batch(rows, 0))
        yield time.process_time() - start


def step_cost(
    plan_file: Annotated[Path, typer.Argument(help="TOML file of recipes.")],
    store: Annotated[Path, typer.Option(help="The store they are trained on.")],
    num_steps: Annotated[int, typer.Option(help="Steps of each recipe.")] = 30,
    teacher: Annotated[
        str | None, typer.Option(help="The teacher, where recipes have its layers.")
    ] = None,
) -> None:
    """A line per recipe: milliseconds of a step, and its ratio to the first recipe's."""
    torch.set_num_threads(1)
    plan = read_plan(plan_file, [])
    opened, seconds = ShardStore.open(store), {}
    recipes = [r for r in plan.recipes if "model.kd=through_time" not in r.settings]
    with tempfile.TemporaryDirectory() as folder:
        steps = {r.name: steps_of(plan, r, opened, Path(folder) / r.name, teacher) for r in recipes}
        for name in steps:
            next(steps[name])  # the first compiles
        for _ in range(num_steps):
            for name, each in steps.items():
                seconds.setdefault(name, []).append(next(each))
    first = np.array(seconds[recipes[0].name])
    typer.echo("| recipe | ms a step | of the first |\n| --- | --- | --- |")
    for name, own in seconds.items():
        typer.echo(
            f"| {name} | {1000 * np.median(own):.0f} | {np.median(np.array(own) / first):.2f} |"
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(step_cost)
    run_command(app)
