"""The ablations' figure: a bar per recipe, axis by axis, from what the bench recorded.

python -m benchmarks.quality.ablation
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.quality.matched import match_students
from evaluation.figures import PALETTE, WITHOUT_NOISE, figure_file
from shards.console import run_command
from shards.errors import UsageError

TASKS = ("maze", "stories")
MOST_PATHS = 0.8
"""A bar that draws fewer of the paths says so: one path alone is easily always right."""


@dataclass(frozen=True)
class Bar:
    """One recipe on one task.

    Attributes:
        group: Axis of the ablation.
        name: The recipe.
        value: Mean over training seeds.
        interval: 95%.
        note: Passes, where the sampler counts its own; paths, where many are never drawn.
    """

    group: str
    name: str
    value: float
    interval: tuple[float, float]
    note: str = ""


def maze_bars(results: Mapping[str, Any]) -> list[Bar]:
    """Success in per cent at the smallest budget, or at the sampler's own."""
    budget = str(results["plan"]["nfe"][0])
    bars = []
    for group, name, seeds in in_order(results):
        key = budget if budget in seeds[0] else "own"
        cells = [cells[key] for cells in seeds]
        value = 100 * float(np.mean([cell["success"] for cell in cells]))
        low = 100 * float(np.mean([cell["interval_95"][0] for cell in cells]))
        high = 100 * float(np.mean([cell["interval_95"][1] for cell in cells]))
        bars.append(Bar(group, name, value, (low, high), _maze_note(cells, key == "own")))
    return bars


def _maze_note(cells: Sequence[Mapping[str, Any]], counts_passes: bool) -> str:
    passes = np.mean([cell["nfe_mean"] for cell in cells])
    parts = [f"NFE {passes:.1f}"] if counts_passes else []
    fewest = min(cells, key=lambda cell: cell["num_distinct_paths"])
    drawn, known = fewest["num_distinct_paths"], fewest["num_paths_in_language"]
    if drawn < MOST_PATHS * known:
        parts.append(f"{drawn} of {known} paths")
    return f"({', '.join(parts)})" if parts else ""


def in_order(results: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(Axis, recipe, figures per seed) as the plan lists them; JSON sorts by name."""
    return [
        (recipe["group"], recipe["name"], results["recipes"][recipe["name"]])
        for recipe in results["plan"]["recipes"]
        if recipe["name"] in results["recipes"]
    ]


def stories_bars(results: Mapping[str, Any]) -> list[Bar]:
    """Perplexity under the teacher at the validation rows' entropy, at the largest budget."""
    budget = max(results["plan"]["nfe"])
    entropy = results["reference"]["entropy_nats"]
    matched = match_students(results["recipes"], "teacher", entropy)
    bars = []
    for group, name, _ in in_order(results):
        found = matched[name, float(budget)]
        note = "" if found.is_reached else f"(at entropy {found.entropy_nats:.2f})"
        interval = found.interval or (found.perplexity, found.perplexity)
        bars.append(Bar(group, name, found.perplexity, interval, note))
    return bars


def draw_ablations(results: Path) -> Path:
    """Write ``quality-ablation.png`` from the JSON beside it; stories where they were run.

    Raises:
        UsageError: When the bench has not been run.
    """
    maze, stories = (_read(results / f"quality-ablation-{task}.json") for task in TASKS)
    if maze is None:
        file = results / f"quality-ablation-{TASKS[0]}.json"
        raise UsageError("no results there", where=file, remedy="make ablate")
    panels = [maze_bars(maze), *([stories_bars(stories)] if stories else [])]
    size = (9 * len(panels), 1.2 + 0.27 * max(map(len, panels)))
    path = results / "quality-ablation.png"
    with figure_file(path, 1, len(panels), size=size) as (_, axes):
        for place, bars in zip(axes[0], panels, strict=True):
            _draw(place, bars)
        _label_maze(axes[0, 0], maze)
        if stories:
            _label_stories(axes[0, 1], stories)
    return path


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _label_maze(axes: Any, maze: Mapping[str, Any]) -> None:
    budget = maze["plan"]["nfe"][0]
    optimum = 100 * maze["reference"]["optimum"][str(budget)]
    said = {"color": WITHOUT_NOISE, "fontsize": 8}
    axes.axvline(optimum, color=WITHOUT_NOISE, ls="--", lw=1)
    axes.text(optimum + 0.5, -0.8, "best possible without noise", **said)
    axes.set_xlim(0, 112)
    axes.set_title("Maze m57: longer is better")
    axes.set_xlabel(f"valid paths, % of samples (NFE {budget} unless said; bars: 95%)")


def _label_stories(axes: Any, stories: Mapping[str, Any]) -> None:
    budget, entropy = max(stories["plan"]["nfe"]), stories["reference"]["entropy_nats"]
    axes.set_title("Stories: shorter is better (logarithmic)")
    _, high = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xlim(min(bar.get_width() for bar in axes.patches) / 2, 3 * high)
    axes.set_xlabel(
        f"generative perplexity at entropy {entropy:.2f} unless said, NFE {budget} (bars: 95%)"
    )


def _draw(axes: Any, bars: Sequence[Bar]) -> None:
    """Bars from top to bottom, a colour per axis of the ablation."""
    order = list(dict.fromkeys(bar.group for bar in bars))
    bars = sorted(bars, key=lambda bar: order.index(bar.group))
    widest = max(bar.interval[1] for bar in bars)
    for place, bar in enumerate(bars):
        low, high = bar.interval
        errors = [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]]
        color = PALETTE[order.index(bar.group) % len(PALETTE)]
        axes.barh(place, bar.value, color=color, alpha=0.7, xerr=errors, ecolor="0.4")
        axes.annotate(
            f"{bar.value:.{1 if bar.value < 1000 else 0}f} {bar.note}",
            (high, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), [f"{bar.group}: {bar.name}" for bar in bars], fontsize=8)
    axes.set_xlim(0, 1.12 * widest)
    axes.invert_yaxis()


def main(
    results: Annotated[Path, typer.Option(help="Where the JSON is.")] = Path("benchmarks/results"),
) -> None:
    """Draw it."""
    typer.echo(f"wrote {draw_ablations(results)}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_command(app)
