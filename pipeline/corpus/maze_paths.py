"""``maze[:LAYOUT]``: paths drawn uniformly with replacement; see :mod:`pipeline.maze.layout`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pipeline.corpus.files import Known, RawDocument, Source
from pipeline.maze.layout import MazeLayout, draw_documents


@dataclass(frozen=True)
class MazePaths(Source):
    """``num_documents`` draws of one split of a maze."""

    maze: MazeLayout
    num_documents: int
    seed: int
    split: str

    @cached_property
    def _documents(self) -> list[str]:
        return draw_documents(self.maze, self.num_documents, self.seed, self.split)

    def count(self) -> int:
        return self.num_documents

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        for index, document in enumerate(self._documents[start:stop], start):
            yield RawDocument(document, f"maze:{self.maze.name}", index)

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: document {raw.offset}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [{**self.maze.artifact(), "seed": self.seed, "num_documents": self.num_documents}]
