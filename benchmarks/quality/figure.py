"""The bench's figures: stories over passes, and the maze's recipes beside the headroom.

python -m benchmarks.quality.figure
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.quality.stories_figure import draw_stories
from evaluation.figures import PALETTE, TEACHER, WITH_NOISE, WITHOUT_NOISE, figure_file
from shards.console import run_command


def draw(results: Path) -> Path:
    """Read the JSON files of the maze and of the headroom; write ``quality.png`` beside them."""
    maze = json.loads((results / "quality-maze.json").read_text(encoding="utf-8"))
    full = json.loads((results / "maze-full.json").read_text(encoding="utf-8"))
    headroom = json.loads((results / "quality-headroom.json").read_text(encoding="utf-8"))
    path = results / "quality.png"
    with figure_file(path, 1, 3, size=(14, 4.4)) as (_, panels):
        _draw_success(panels[0, 0], maze, full)
        _draw_margins(panels[0, 1], maze)
        _draw_headroom(panels[0, 2], headroom)
    return path


def _draw_success(axes: Any, maze: dict[str, Any], full: dict[str, Any]) -> None:
    """A line per student over NFE, beside what was before and the optimum without noise."""
    budgets = maze["plan"]["nfe"]
    for number, (name, seeds) in enumerate(maze["recipes"].items()):
        for place, cells in enumerate(seeds):
            values = [100 * cells[str(nfe)]["success"] for nfe in budgets]
            label = name if place == 0 else None
            axes.plot(budgets, values, "o-", color=_colour(number), label=label)
    optimum = maze["reference"]["optimum"]
    values = [100 * optimum[str(nfe)] for nfe in budgets]
    label = "exact optimum without noise"
    axes.plot(budgets, values, "s--", color=WITHOUT_NOISE, label=label)
    earlier = full["layouts"]["m57"]["models"]["gumbel"]["argmax"]
    values = [100 * earlier[str(nfe)]["success"] for nfe in budgets]
    label = "MDLM + Gumbel, preset maze (maze-full.json)"
    axes.plot(budgets, values, "^-", color=TEACHER, label=label)
    axes.axhline(95, color="grey", lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(nfe) for nfe in budgets])
    axes.set_ylim(0, 100)
    axes.set_xlabel("forward passes")
    axes.set_ylabel("success, %")
    axes.set_title("m57: success (dotted: 95%)")
    axes.legend(fontsize=7, loc="lower right")


def _colour(number: int) -> str:
    """Of the ``number``-th conditioned recipe; never the colour of what has no noise."""
    return [color for color in PALETTE if color != WITHOUT_NOISE][number]


def _draw_margins(axes: Any, maze: dict[str, Any]) -> None:
    """Agreement in one pass by the teacher's margin, for the conditioned recipes."""
    conditioned = [r["name"] for r in maze["plan"]["recipes"] if r["conditioning"] != "none"]
    names = list(maze["recipes"])
    ticks: list[str] = []
    for name in conditioned:
        for cells in maze["recipes"][name]:
            rows = [row for row in cells["by_margin"] if row["num_samples"]]
            shares = [100 * row["num_equal"] / row["num_samples"] for row in rows]
            low = [100 * row["interval_95"][0] for row in rows]
            high = [100 * row["interval_95"][1] for row in rows]
            spread = [
                [share - bound for share, bound in zip(shares, low, strict=True)],
                [bound - share for share, bound in zip(shares, high, strict=True)],
            ]
            color = _colour(names.index(name))
            axes.errorbar(range(len(rows)), shares, spread, fmt="o-", color=color)
            ticks = [
                f"{row['from_nats']:g} to {row['to_nats']:g}"
                if row["to_nats"]
                else f"above {row['from_nats']:g}"
                for row in rows
            ]
    axes.set_xticks(range(len(ticks)), ticks, fontsize=8)
    axes.set_ylim(0, 102)
    axes.set_xlabel("least distance of the two largest log p + xi in a row, nats")
    axes.set_ylabel("equal to the teacher's decode, %")
    axes.set_title("m57 in one pass: what is missed are near ties")


def _draw_headroom(axes: Any, headroom: dict[str, Any]) -> None:
    """NLL of the best model without noise over tokens per pass, and the teacher's."""
    sizes = sorted(int(size) for size in headroom["blocks"])
    for key, label, color in (
        ("first_block_nll_nats", "without noise, first pass", WITHOUT_NOISE),
        ("nll_nats", "without noise, 32 tokens, pass after pass", "C4"),
    ):
        rows = [headroom["blocks"][str(size)][key] for size in sizes]
        values = [row["value"] for row in rows]
        spread = [
            [row["value"] - row["interval_95"][0] for row in rows],
            [row["interval_95"][1] - row["value"] for row in rows],
        ]
        axes.errorbar(sizes, values, spread, fmt="o-", color=color, label=label)
    own = headroom["teacher"]["nll_nats"]["value"]
    axes.axhline(own, color=WITH_NOISE, lw=1, label="with noise at best: the teacher")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens per pass")
    axes.set_ylabel("NLL under the teacher, nats per token")
    axes.set_title("stories: exact optima at equal entropy")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.16))


def main(
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Draw the figures from the recorded numbers."""
    typer.echo(f"{draw(results)}\n{draw_stories(results)}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_command(app)
