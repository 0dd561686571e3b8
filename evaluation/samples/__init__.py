"""Samples and reference texts on disk, read and checked line by line.

In: folders of ``samples*.jsonl`` with the ``settings.json`` that the sampler left, or files that
somebody else wrote. Out: a :class:`SampleSet` per file, and plain lists of reference texts. A fault
is named with file and line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.samples.drawn import drawn_with
    from evaluation.samples.infill_rows import (
        InfillRow,
        make_infill_rows,
        read_infill_rows,
        rows_of_samples,
        write_infill_rows,
    )
    from evaluation.samples.json_lines import read_object, read_records, short
    from evaluation.samples.references import read_references
    from evaluation.samples.rows import DataRows, read_data_rows
    from evaluation.samples.samples import SampleSet, find_sample_files, named_folder, read_samples

__getattr__, __dir__ = open_door(__name__, __file__)
