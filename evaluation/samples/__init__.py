"""DOOR: evaluation.samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.samples.references import read_references
    from evaluation.samples.samples import SampleSet, find_sample_files, read_samples

__getattr__, __dir__ = open_door(__name__, __file__)
