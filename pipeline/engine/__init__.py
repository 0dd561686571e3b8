"""Teachers that run elsewhere: an inference engine's log-probabilities become posterior stores.

Comes in: files of scored rows (Parquet, JSONL), or the address of an OpenAI-compatible server.
Goes out: checked rows, and the arrays that the ``posterior`` codec keeps of them.
An engine never gives the whole distribution; what it leaves out is the codec's tail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.engine.client import Engine, EngineSettings
    from pipeline.engine.score_files import ScoreFiles, same_length
    from pipeline.engine.scored_rows import ScoredRow

__getattr__, __dir__ = open_door(__name__, __file__)
