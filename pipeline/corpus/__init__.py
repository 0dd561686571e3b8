"""A corpus: where documents come from, how they are split, cleaned and repaired.

In comes a name (a preset, a source in one word, a path) with settings, out come numbered documents
of clean text for each split, the same ones every time, and what had to be left out or repaired.
``sources`` reads the formats; ``presets`` holds the published corpora; ``detokenize`` undoes their
word-level tokenization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.corpus.config import (
        SPLITS,
        BadUtf8,
        CorpusConfig,
        Packing,
        SpecialTokens,
        corpus_config,
        preset_names,
        scheme_of,
    )
    from pipeline.corpus.splits import (
        Span,
        open_source,
        plan_spans,
        read_documents,
        read_span,
    )
    from pipeline.corpus.text_policy import Tally

__getattr__, __dir__ = open_door(__name__, __file__)
