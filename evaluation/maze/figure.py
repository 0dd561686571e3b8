"""Sampled paths drawn over the map: one panel per model, as in the paper's Figure 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from evaluation.maze.success import STEPS, Maze, Path_

matplotlib.use("Agg")


VALID, INVALID, WALL = "#1f77b4", "#d62728", "#444444"
MAX_LINES = 100
Panels = Mapping[str, Mapping[str, tuple[Maze, Sequence[Path_ | None]]]]
"""maze name -> panel title -> (maze, samples)."""


def draw_panel(
    axes: Axes, maze: Maze, samples: Sequence[Path_ | None], title: str, seed: int = 0
) -> None:
    """Draw up to 100 sampled paths: valid ones blue, failing ones red up to their first fault."""
    _draw_map(axes, maze)
    jitter = np.random.default_rng(seed)
    shown = list(samples[:MAX_LINES])
    shown.sort(key=lambda moves: maze.is_success(moves), reverse=True)
    for moves in shown:
        good = maze.is_success(moves)
        cells = np.array(_visited(maze, moves or ()), dtype=float)
        cells = cells + jitter.normal(0, 0.075, 2) + jitter.normal(0, 0.02, cells.shape)
        axes.plot(cells[:, 1], cells[:, 0], color=VALID if good else INVALID, lw=0.9, alpha=0.45)
    num_good = sum(maze.is_success(moves) for moves in shown)
    axes.set_title(f"{title}\n{num_good} of {len(shown)} reach the target", fontsize=9)


def _draw_map(axes: Axes, maze: Maze) -> None:
    height, width = len(maze.rows), len(maze.rows[0])
    for row in range(height):
        for column in range(width):
            wall = maze.rows[row][column] == "#"
            axes.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5),
                    1,
                    1,
                    facecolor=WALL if wall else "#fafafa",
                    edgecolor="#cccccc",
                    lw=0.8,
                )
            )
    for name, (row, column), color in (
        ("S", maze.start, "#2ca02c"),
        ("T", maze.target, "#ff7f0e"),
    ):
        axes.scatter([column], [row], s=230, color=color, zorder=5, edgecolor="white")
        axes.text(
            column, row, name, ha="center", va="center", color="white", zorder=6, weight="bold"
        )
    axes.set(xlim=(-0.6, width - 0.4), ylim=(height - 0.4, -0.6), aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _visited(maze: Maze, moves: Path_) -> list[tuple[float, float]]:
    """Cells walked until the first fault; the faulty step is drawn half way."""
    cells: list[tuple[float, float]] = [maze.start]
    for count in range(1, len(moves) + 1):
        walked = maze.walk(moves[:count])
        if walked is None:
            down, right = STEPS[moves[count - 1]]
            cells.append((cells[-1][0] + 0.45 * down, cells[-1][1] + 0.45 * right))
            break
        cells.append(walked[-1])
    return cells


def paths_figure(panels: Panels, output: Path) -> Path:
    """Write a PNG: one row per maze, one panel per model.

    Args:
        panels: What to draw.
        output: File to write.
    """
    columns = max(len(row) for row in panels.values())
    figure, grid = plt.subplots(
        len(panels), columns, figsize=(3.1 * columns, 3.0 * len(panels)), squeeze=False
    )
    for axes_row, (name, row) in zip(grid, panels.items(), strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_visible(False)
        for axes, (title, (maze, samples)) in zip(axes_row, row.items(), strict=False):
            draw_panel(axes, maze, samples, title)
        axes_row[0].set_ylabel(f"maze {name}", fontsize=10)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    plt.close(figure)
    return output
