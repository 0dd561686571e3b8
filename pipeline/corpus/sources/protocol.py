"""What a source of documents is: numbered raw documents, their text, and a content identity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

Known = Mapping[str, dict[str, Any]]
"""Identities of files, by path, that an earlier run noted."""


class RawDocument(NamedTuple):
    """One document as found.

    Attributes:
        content: Undecoded bytes, or text from a source that decodes by itself.
        origin: The file or data set it comes from.
        offset: Where ``content`` starts there: a byte offset (after decompression) when
            ``content`` is bytes of a text file, else a row or line number.
    """

    content: bytes | str
    origin: str
    offset: int


@runtime_checkable
class Source(Protocol):
    """Numbered documents that can be read again; the numbering counts empty ones too."""

    def count(self) -> int:
        """How many documents there are."""
        ...

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        """Documents start..stop-1, in order, holding one (or one read batch) at a time."""
        ...

    def text(self, decoded: str, raw: RawDocument) -> str:
        """The document's text within its decoded content: all of it, or a JSON field, say."""
        return decoded

    def place(self, raw: RawDocument, byte: int) -> str:
        """Names byte ``byte`` of ``raw.content`` for an error message."""
        ...

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        """JSON-ready facts that change when the content does; ``sha256`` for files.

        A file that still has the size and modification time in ``known`` is not hashed again.
        """
        ...
