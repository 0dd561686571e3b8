"""DOOR: pipeline.extract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.extract.loop import Extractor, Process, resources_on, unchanged
    from pipeline.extract.manifest import build_manifest, corpus_unigram, rows_per_unit, side_files
    from pipeline.extract.rows import CorpusRows, Note, RowSource

__getattr__, __dir__ = open_door(__name__, __file__)
