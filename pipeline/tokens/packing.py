"""Tokenized documents -> rows of equal length.

::

    concat   d d d | d d S e e | e e e e      documents run on, S between them; no edges
    wrap     B d d S e e E | B e e e e S E    the same stream in pieces of L - 2, framed
    pad      B d d d E E E E                  one document per row

A row's worth of tokens that never fills up is dropped at the end of a split and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipeline.corpus.config import Packing
from shards.errors import UsageError

Ids = np.ndarray
"""Token ids, int32."""


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that packing inserts.

    Attributes:
        bos: First token of a framed or padded row.
        eos: Last token of a framed row, and the padding.
        separator: Stands after every document of a stream; None for nothing.
    """

    bos: int
    eos: int
    separator: int | None


@runtime_checkable
class Packer(Protocol):
    """Turns documents into rows, batch by batch; the batches' borders leave no trace."""

    row_length: int
    num_dropped_tokens: int

    def pack(self, documents: list[Ids]) -> np.ndarray:
        """Rows [n, L] int32 completed by these documents."""
        ...

    def finish(self) -> None:
        """End of the split: what is left over is dropped and counted."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-ready state between two batches."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        ...


@dataclass
class StreamPacker:
    """Documents joined to one stream of tokens, cut into rows: ``concat`` and ``wrap``.

    Attributes:
        row_length: Tokens of a row, L.
        separator: Id after every document, or None.
        frame: (bos, eos) around every piece of L - 2 tokens, or None for pieces of L.
        group_documents: If positive, every so many documents are packed by themselves and their
            remainder is dropped. 1000 repeats rows made with the batched ``map`` of ``datasets``,
            whose batches drop theirs.
    """

    row_length: int
    separator: int | None
    frame: tuple[int, int] | None = None
    group_documents: int = 0
    num_dropped_tokens: int = 0
    _rest: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    _num_in_group: int = 0

    def pack(self, documents: list[Ids]) -> np.ndarray:
        if not self.group_documents:
            return self._append(documents)
        rows = []
        while documents:
            room = self.group_documents - self._num_in_group
            taken, documents = documents[:room], documents[room:]
            rows.append(self._append(taken))
            self._num_in_group += len(taken)
            if self._num_in_group == self.group_documents:
                self.finish()
        return np.concatenate(rows) if rows else self._append([])

    def _append(self, documents: list[Ids]) -> np.ndarray:
        parts = [self._rest]
        separator = np.array([] if self.separator is None else [self.separator], np.int32)
        for document in documents:
            parts += (document, separator)
        stream = np.concatenate(parts)
        body = self.row_length - (2 if self.frame else 0)
        num_rows = len(stream) // body
        self._rest = stream[num_rows * body :].copy()
        return self._framed(stream[: num_rows * body].reshape(num_rows, body))

    def _framed(self, pieces: np.ndarray) -> np.ndarray:
        if not self.frame:
            return pieces
        bos, eos = (np.full((len(pieces), 1), token, np.int32) for token in self.frame)
        return np.concatenate([bos, pieces, eos], axis=1)

    def finish(self) -> None:
        self.num_dropped_tokens += len(self._rest)
        self._rest, self._num_in_group = np.empty(0, np.int32), 0

    def state(self) -> dict[str, Any]:
        return {
            "rest": self._rest.tolist(),
            "num_in_group": self._num_in_group,
            "num_dropped_tokens": self.num_dropped_tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._rest = np.array(state["rest"], np.int32)
        self._num_in_group = state["num_in_group"]
        self.num_dropped_tokens = state["num_dropped_tokens"]


@dataclass
class PadPacker:
    """One document per row: bos, the document, at least one eos; longer documents are cut."""

    row_length: int
    bos: int
    eos: int
    num_dropped_tokens: int = 0

    def pack(self, documents: list[Ids]) -> np.ndarray:
        rows = np.full((len(documents), self.row_length), self.eos, np.int32)
        rows[:, 0] = self.bos
        for row, document in zip(rows, documents, strict=True):
            kept = document[: self.row_length - 2]
            row[1 : len(kept) + 1] = kept
            self.num_dropped_tokens += len(document) - len(kept)
        return rows

    def finish(self) -> None:
        return

    def state(self) -> dict[str, Any]:
        return {"num_dropped_tokens": self.num_dropped_tokens}

    def restore(self, state: dict[str, Any]) -> None:
        self.num_dropped_tokens = state["num_dropped_tokens"]


def make_packer(
    packing: Packing, row_length: int, ids: SpecialIds, group_documents: int = 0
) -> Packer:
    """The packer of one split.

    Raises:
        UsageError: If rows are too short to hold a token of text, or grouping is asked of ``pad``.
    """
    shortest = 2 if packing == "concat" else 3
    if row_length < shortest:
        raise UsageError(
            "rows are too short for this packing",
            where="row_length",
            got=row_length,
            expected=f"at least {shortest} for {packing!r}",
        )
    if packing == "pad":
        return PadPacker(row_length, ids.bos, ids.eos)
    frame = (ids.bos, ids.eos) if packing == "wrap" else None
    return StreamPacker(row_length, ids.separator, frame, group_documents)
