"""Runs side by side: is a difference more than the luck of the samples?

In: ``results.json`` of two or more evaluations, with their values sample by sample. Out: each
score's value and bootstrap interval, the paired difference to a named baseline and the change in
per cent as the paper's tables print it. Numbers of different judges, lengths or windows never share
a column: the field that differs is named instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.compare.difference import Comparison, compare_scores
    from evaluation.compare.recorded import RecordedRun, read_run, require_one_kind
    from evaluation.compare.table import comparison_results, comparison_table

__getattr__, __dir__ = open_door(__name__, __file__)
