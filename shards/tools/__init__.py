"""What people do with stores: look (figures, one row made visible), and make new ones from old.

In come open stores; out come a description, a page and a picture of a row, what other couplings of
noise and tokens would keep, or another store: with another codec, with fewer rows, or gathered
from parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.tools.couplings import CouplingReport, measure_couplings
    from shards.tools.description import Description
    from shards.tools.rewriting import check_subset, convert, merge, require_convertible, subset
    from shards.tools.row_view import row_figure, row_page, view_row
    from shards.tools.unigram import unigram_log_probs

__getattr__, __dir__ = open_door(__name__, __file__)
