"""Where stage 2 gets its rows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from pipeline.teacher import Note
from pipeline.tokens import TokenDataset


@runtime_checkable
class RowSource(Protocol):
    """Token rows by split and index: a pure function of both."""

    def read(self, split: str, start: int, stop: int, note: Note) -> np.ndarray:
        """Rows start..stop-1; [n, L] int32.

        Args:
            note: Told how far a slow source has come.
        """
        ...


@dataclass(frozen=True)
class CorpusRows:
    """The rows of stage 1."""

    dataset: TokenDataset

    def read(self, split: str, start: int, stop: int, note: Note) -> np.ndarray:
        return self.dataset.read_rows(split, start, stop)
