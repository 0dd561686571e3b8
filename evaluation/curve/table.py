"""Curves as tables: perplexity at one entropy, model x NFE, and every point behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.curve.matched import MatchedValue, matched_perplexity
from evaluation.curve.sweep import Curve
from evaluation.report import Table

Matched = Mapping[tuple[str, float], MatchedValue]


def match(curves: Sequence[Curve], entropy_nats: float) -> dict[tuple[str, float], MatchedValue]:
    """(model, NFE) -> what its curve says at H."""
    return {
        (curve.model, curve.nfe): matched_perplexity(
            curve.points, entropy_nats, is_paired=curve.is_paired
        )
        for curve in curves
    }


def matched_table(matched: Matched, entropy_nats: float, source: str) -> Table:
    """Model x NFE; where H is out of reach, the nearest point with its own entropy in parentheses.

    Args:
        matched: From :func:`match`.
        entropy_nats: H.
        source: Where H comes from, for the note.
    """
    models = list(dict.fromkeys(model for model, _ in matched))
    budgets = sorted({nfe for _, nfe in matched})
    rows = tuple(
        (model, *(_cell(matched.get((model, nfe))) for nfe in budgets)) for model in models
    )
    notes = (
        f"Log perplexity interpolated at an entropy of {entropy_nats:.3f} nats ({source}). In "
        "brackets: 95% bootstrap intervals over samples.",
        "(H = ...): the sweep does not reach that entropy; its nearest point, at its own entropy.",
    )
    title = f"Generative perplexity at entropy {entropy_nats:.3f}"
    return Table(title, ("model", *(f"NFE {nfe:g}" for nfe in budgets)), rows, notes=notes)


def points_table(curves: Sequence[Curve]) -> Table:
    """Every point: the setting, its entropy and both aggregates of perplexity."""
    rows = [
        (
            curve.model,
            f"{curve.nfe:g}",
            "-" if curve.swept is None else f"{curve.swept} {setting}",
            str(len(point.nll_nats)),
            f"{point.entropy_nats:.3f}",
            f"{perplexity.value:.2f}",
            f"{perplexity.details['per_sample_mean']:.2f}",
            f"{entropy.details['distinct_2']:.3f}",
            f"{entropy.details['repeated_4']:.3f}",
        )
        for curve in curves
        for setting, point, perplexity, entropy in zip(
            curve.settings, curve.points, curve.perplexities, curve.entropies, strict=True
        )
    ]
    header = ("model", "NFE", "setting", "n", "entropy", "perplexity", "mean per sample")
    return Table("Points", (*header, "distinct-2", "repeated 4-grams"), tuple(rows))


def curve_results(
    curves: Sequence[Curve], matched: Matched, entropy_nats: float, source: str
) -> dict[str, Any]:
    """JSON-ready: H, what was matched, and every point."""
    return {
        "entropy_nats": entropy_nats,
        "entropy_source": source,
        "aggregate": "corpus",
        "judge": dict(curves[0].perplexities[0].settings),
        "matched": [
            {
                "model": model,
                "nfe": nfe,
                "perplexity": value.perplexity,
                "interval_95": list(value.interval) if value.interval else None,
                "entropy_nats": value.entropy_nats,
                "is_reached": value.is_reached,
                "share_of_draws_reached": value.share_reached,
            }
            for (model, nfe), value in matched.items()
        ],
        "points": [
            {
                "model": curve.model,
                "nfe": curve.nfe,
                "swept": curve.swept,
                "setting": setting,
                "perplexity": perplexity.to_json(),
                "entropy": entropy.to_json(),
            }
            for curve in curves
            for setting, perplexity, entropy in zip(
                curve.settings, curve.perplexities, curve.entropies, strict=True
            )
        ],
    }


def _cell(value: MatchedValue | None) -> str:
    if value is None:
        return "-"
    text = f"{value.perplexity:.1f}"
    if value.interval:
        text += f" [{value.interval[0]:.1f}, {value.interval[1]:.1f}]"
    return text if value.is_reached else f"{text} (H = {value.entropy_nats:.2f})"
