"""Draw every kept figure again from the JSON beside it, each by its benchmark's own code.

    python -m benchmarks.redraw                 # all of benchmarks/results
    python -m benchmarks.redraw codecs scale    # those whose name has one of these words

Not of these are ``stories-curve.png`` (the samples behind it are not kept) and the demo's picture,
which ``make demo`` draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import codec_report, scale, stories, stream
from benchmarks.quality import ablation, gain_figure, stories_figure
from benchmarks.quality import figure as quality_figure
from benchmarks.quality.fidelity import figure as fidelity_figure
from benchmarks.quality.fidelity.nearness import Setting
from benchmarks.quality.gain import Gain
from benchmarks.quality.matched import Ratio
from benchmarks.quality.plan import Plan
from shards.console import run_command
from shards.errors import UsageError
from shards.settings import resolve


def figures() -> dict[str, Callable[[Path], object]]:
    """Name of each kept figure -> what draws it from the folder of results."""

    def redraw(name: str, draw: Callable[[dict[str, Any], Path], object]) -> Callable[[Path], None]:
        def from_json(results: Path) -> None:
            recorded = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
            draw(recorded, results / f"{name}.png")

        return from_json

    drawn: dict[str, Callable[[dict[str, Any], Path], object]] = {
        "codecs": codec_report.draw_figure,
        "stories-narrow": stories.draw,
        "stories-wide": stories.draw,
        "stream": stream.figure,
        "scale": _scale,
        "gain-map": _gain_map,
        "quality-stories-fidelity": _fidelity,
        "quality-stories-blocks-fidelity": _fidelity,
        "quality-stories-blocks-wide-fidelity": _fidelity,
    }
    several: dict[str, Callable[[Path], object]] = {
        "quality": quality_figure.draw,
        "quality-stories": stories_figure.draw_stories,
        "quality-ablation": ablation.draw_ablations,
    }
    return {name: redraw(name, draw) for name, draw in drawn.items()} | several


def _scale(recorded: dict[str, Any], path: Path) -> None:
    tasks = recorded["results"].items()  # JSON has sizes as words
    scale.draw({task: {int(n): found[n] for n in found} for task, found in tasks}, path)


def _gain_map(recorded: dict[str, Any], path: Path) -> None:
    cells = [
        gain_figure.Cell(**{**cell, "gain": cell["gain"] and Gain(**cell["gain"])})
        for cell in recorded["cells"]
    ]
    gain_figure.draw(cells, [Ratio(**ratio) for ratio in recorded["passes"]], path)


def _fidelity(recorded: dict[str, Any], path: Path) -> None:
    settings = [Setting(**setting) for setting in recorded["settings"]]
    plan = resolve(Plan, recorded["plan"])
    judges = sorted(settings[0].distances, key=lambda judge: judge != "teacher")
    fidelity_figure.draw(plan, settings, judges, path)


def redraw(
    words: Annotated[list[str] | None, typer.Argument(help="Parts of names; else all.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Draw them."""
    known = figures()
    wanted = [name for name in known if not words or any(word in name for word in words)]
    if not wanted:
        raise UsageError("no such figure", got=words, expected=sorted(known))
    for name in wanted:
        known[name](results)
        typer.echo(f"wrote {results / name}.png")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(redraw)
    run_command(app)
