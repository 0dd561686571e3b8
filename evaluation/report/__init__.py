"""Results for machines (``results.json``) and for people: tables, and one self-contained page.

In: tables of strings, figures as files or inline SVG, samples with the judge's surprise at each
token. Out: ``results.json``, ``tables.md`` and a ``report.html`` that loads nothing from outside
and reads well on a phone and in the dark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.report.browser import MAX_ROWS, ShownSample, browser_section
    from evaluation.report.page import own_folder, write_report
    from evaluation.report.table import Table

__getattr__, __dir__ = open_door(__name__, __file__)
