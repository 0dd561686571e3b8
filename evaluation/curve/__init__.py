"""Quality at equal entropy: one number per model and NFE that truncation cannot buy.

In: samples drawn over a sweep (nucleus p, temperature or tau) at several NFE, each with its nats
and tokens under a judge and its entropy. Out: log perplexity interpolated at one entropy with
bootstrap intervals (:func:`matched_perplexity`, which knows no files), a table model x NFE, and a
figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.curve.figure import curve_figure
    from evaluation.curve.matched import CurvePoint, MatchedValue, matched_perplexity
    from evaluation.curve.sweep import Curve, Run, curves_of, read_run, require_comparable
    from evaluation.curve.table import curve_results, match, matched_table, points_table

__getattr__, __dir__ = open_door(__name__, __file__)
