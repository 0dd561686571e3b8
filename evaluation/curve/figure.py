"""Perplexity against entropy, a line per model and NFE; and against NFE at one entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.curve.sweep import Curve
from evaluation.curve.table import Matched
from evaluation.figures import LINE_STYLES, MARKERS, figure_file, look
from shards.base import visible


def curve_figure(
    curves: Sequence[Curve], matched: Matched, entropy_nats: float, output: Path
) -> Path:
    """Write a PNG of both panels.

    Args:
        curves: Every model at every NFE.
        matched: What they say at H; open marks are points of their own entropy.
        entropy_nats: H.
        output: The file.
    """
    models = list(dict.fromkeys(curve.model for curve in curves))
    with figure_file(output, 1, 2, size=(13, 4.2)) as (_, panels):
        sweeps, budgets = panels[0]
        _draw_sweeps(sweeps, curves, models)
        sweeps.axvline(entropy_nats, color="grey", lw=0.8, ls=":")
        _draw_budgets(budgets, matched, models)
        budgets.set_title(f"at entropy {entropy_nats:.2f} (open: out of reach)")
        for axes in (sweeps, budgets):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.tick_params(axis="y", which="both", labelsize=8)
            axes.set_ylabel("generative perplexity")
        _label_sweeps(sweeps, sorted({curve.nfe for curve in curves}))
        # A colour is a model in both panels; outside, where no line is hidden.
        budgets.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return output


def _draw_sweeps(axes: Any, curves: Sequence[Curve], models: Sequence[str]) -> None:
    budgets = sorted({curve.nfe for curve in curves})
    for curve in curves:
        place = budgets.index(curve.nfe)
        pairs = sorted((point.entropy_nats, point.log_perplexity) for point in curve.points)
        axes.plot(
            [entropy for entropy, _ in pairs],
            [math.exp(value) for _, value in pairs],
            color=look(models.index(curve.model))["color"],
            ls=LINE_STYLES[place % len(LINE_STYLES)],
            marker=MARKERS[place % len(MARKERS)],
            ms=3.5,
        )
    axes.set_xlabel("unigram entropy, nats (right is more varied)")


def _label_sweeps(axes: Any, budgets: Sequence[float]) -> None:
    """A style of line is a number of passes."""
    for place, nfe in enumerate(budgets):
        style, marker = LINE_STYLES[place % len(LINE_STYLES)], MARKERS[place % len(MARKERS)]
        axes.plot([], [], color="grey", ls=style, marker=marker, ms=3.5, label=f"NFE {nfe:g}")
    axes.legend(handlelength=3)


def _draw_budgets(axes: Any, matched: Matched, models: Sequence[str]) -> None:
    for number, model in enumerate(models):
        cells = sorted((nfe, value) for (name, nfe), value in matched.items() if name == model)
        color = look(number)["color"]
        reached = [(nfe, value.perplexity) for nfe, value in cells if value.is_reached]
        if reached:
            axes.plot(*zip(*reached, strict=True), color=color, lw=1)
        for nfe, value in cells:
            low, high = value.interval or (value.perplexity, value.perplexity)
            errors = [[value.perplexity - min(low, value.perplexity)]]
            errors.append([max(high, value.perplexity) - value.perplexity])
            face = color if value.is_reached else "none"
            axes.errorbar(
                [nfe * 1.02**number],
                [value.perplexity],
                errors,
                color=color,
                fmt="o",
                mfc=face,
                ms=5,
                capsize=2,
            )
        axes.plot([], [], "o-", color=color, label=_plain(model))
    axes.set_xscale("log", base=2)
    ticks = sorted({nfe for _, nfe in matched})
    axes.set_xticks(ticks, [f"{nfe:g}" for nfe in ticks])
    axes.set_xlabel("NFE (forward passes)")


def _plain(name: str) -> str:
    """A name as it stands: matplotlib would set ``$...$`` as mathematics and hide a first ``_``."""
    return visible(name).replace("$", r"\$").removeprefix("_")
