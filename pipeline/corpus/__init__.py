"""DOOR: pipeline.corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.corpus.identity import check_identity, corpus_identity, sources_unchanged
    from pipeline.corpus.splits import (
        SPLITS,
        CorpusConfig,
        Span,
        corpus_config,
        plan_spans,
        read_documents,
        read_span,
        scheme_of,
    )
    from pipeline.corpus.text_policy import Tally

__getattr__, __dir__ = open_door(__name__, __file__)
