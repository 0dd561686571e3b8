"""Stage 2: token rows -> teacher -> codec -> shards of the store.

In come rows (of the corpus, or written by the teacher) and a store open for writing; out go whole
shards, each claimed, scored, encoded and written by one of any number of processes, which compute
alike (:mod:`pipeline.extract.way`) and resume where the ledger ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.extract.loop import Extractor, Process, ReadRows, resources_on, unchanged
    from pipeline.extract.manifest import (
        build_manifest,
        corpus_unigram,
        rows_per_unit,
        side_files,
        teacher_identity,
    )
    from pipeline.extract.scores import ScoreWriter, with_position_0
    from pipeline.extract.way import WayOfComputing, settle_way
    from pipeline.extract.work import write_all

__getattr__, __dir__ = open_door(__name__, __file__)
