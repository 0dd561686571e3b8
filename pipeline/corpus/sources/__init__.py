"""Formats of corpora, one file each: text, JSON lines, tables, data sets of the hub, the maze.

Each offers :class:`Source`: how many documents there are, raw documents by number, their place for
error messages, and an identity that changes when the content does. Reads plain and compressed files
in blocks; nothing is held whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.corpus.sources.files import looks_unchanged
    from pipeline.corpus.sources.hub import HubDataset
    from pipeline.corpus.sources.json_lines import JsonLines
    from pipeline.corpus.sources.maze_paths import MazePaths
    from pipeline.corpus.sources.protocol import RawDocument, Source
    from pipeline.corpus.sources.tables import CsvFiles, ParquetFiles
    from pipeline.corpus.sources.text_files import TextFiles

__getattr__, __dir__ = open_door(__name__, __file__)
