"""The maze's table, figure and page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evaluation.maze.figure import Panels, paths_figure
from evaluation.maze.results import PLAIN, display_name, natural_rule
from evaluation.report import Table, write_report

PAPER = {
    "none": {1: 53, 2: 64, 4: 69, 8: 81, 16: 94},
    "gumbel": {1: 82, 2: 86, 4: 97, 8: 99, 16: 98},
}
"""Success in % over 100 paths, from the paper; its wall layout is not given."""

PAPER_MAX_PATHS = 4
"""The paper's 53% without noise at NFE 1 needs a language of at most about 4 paths: the exact
optimum is 42% for ``k4`` and 6% for ``m57``, so its rows mean nothing beside the larger one."""

NOTES = (
    "Success in % with its 95% interval. MDLM is decoded by categorical draws, MDLM + Gumbel by "
    "the argmax of its prediction (given the noise, the text is determined); the other rule of "
    "each is in results.json.",
    "Exact optimum: the best any unconditioned masked diffusion model can do, by enumeration.",
)
PAPER_NOTE = "The paper does not give its walls; its rows stand beside ours for orientation."


def success_table(results: Mapping[str, Any], layout: str) -> Table:
    """Success at every NFE for one layout: ours, the exact optimum, the paper's where it can be."""
    here = results["layouts"][layout]
    is_like_paper = here["num_paths"] <= PAPER_MAX_PATHS
    nfe = [int(steps) for steps in here["optimum"]]
    rows: list[tuple[str, ...]] = []
    kinds: list[str] = []
    rows.append(("exact optimum without noise", *(_percent(here["optimum"][str(n)]) for n in nfe)))
    kinds.append("")
    for kind, rules in here["models"].items():
        name, rule = display_name(kind), natural_rule(kind)
        cells = rules[rule]
        rows.append((f"{name} ({rule})", *(_with_interval(cells[str(n)]) for n in nfe)))
        kinds.append("ours")
        if is_like_paper and kind in PAPER:
            paper = PAPER[kind]
            rows.append((f"{name}, paper", *(str(paper.get(n, "-")) for n in nfe)))
            kinds.append("paper")
    header = (f"success, {layout}", *(f"NFE {n}" for n in nfe))
    notes = (*NOTES, PAPER_NOTE) if is_like_paper else NOTES
    title = f"Maze {layout}: {here['num_paths']} paths"
    return Table(title, header, tuple(rows), tuple(kinds), notes)


def coverage_table(results: Mapping[str, Any], layout: str) -> Table:
    """Distinct paths, total variation and agreement with the teacher, for one layout."""
    here = results["layouts"][layout]
    nfe = [int(steps) for steps in here["optimum"]]
    rows, kinds = [], []
    for kind, rules in here["models"].items():
        name, cells = display_name(kind), rules[natural_rule(kind)]
        for label, key, form in (
            ("distinct valid paths", "num_distinct_paths", "{:d}"),
            ("TV to the teacher", "total_variation_to_teacher", "{:.2f}"),
            ("equal to teacher's decode, %", "equal_to_teacher_decode", "{:.1%}"),
        ):
            values = (form.format(cells[str(n)][key]).rstrip("%") for n in nfe)
            rows.append((f"{name}: {label}", *values))
            kinds.append("" if kind == PLAIN else "ours")
    header = (f"coverage, {layout}", *(f"NFE {n}" for n in nfe))
    note = (
        "Total variation counts invalid samples as mass off the teacher's paths; "
        f"{here['sampling_floor']:.2f} is what as many draws from the teacher itself would show. "
        "The last rows: samples equal to the teacher's own sequential decode of the same noise."
    )
    return Table(f"Maze {layout}: coverage", header, tuple(rows), tuple(kinds), (note,))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _with_interval(cell: Mapping[str, Any]) -> str:
    low, high = cell["interval_95"]
    return f"{_percent(cell['success'])} [{_percent(low)}, {_percent(high)}]"


def write_maze_report(results: dict[str, Any], panels: Panels, out: Path) -> list[Table]:
    """Write results.json, tables.md, paths.png and report.html; returns the tables."""
    tables = []
    for layout in results["layouts"]:
        tables += [success_table(results, layout), coverage_table(results, layout)]
    figure = paths_figure(panels, out / "paths.png")
    write_report(
        out,
        title="gdistill: the maze",
        summary=results["summary"],
        tables=tables,
        figures=[("Sampled paths, NFE above each panel (blue: valid, red: failing)", figure)],
        results=results,
    )
    return tables
