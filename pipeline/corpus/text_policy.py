"""What happens to text that is not clean, and the count of it.

Documents are UTF-8. One that is not is an error by default, or repaired with U+FFFD, or left out;
a lone surrogate (from a JSON escape) is treated the same way. Control characters (C0 but for tab,
line feed and carriage return, and DEL) are part of the text: they are kept and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.corpus.config import BadUtf8
from pipeline.corpus.sources import RawDocument, Source
from shards.base import GdistillError

CONTROL_BYTES = bytes(sorted((set(range(32)) - set(b"\t\n\r")) | {127}))


@dataclass
class Tally:
    """What was read so far; all counts are of one split.

    Attributes:
        num_documents: Documents handed on.
        num_bytes: Their size in UTF-8.
        num_empty: Documents left out for holding nothing but white space.
        num_bad_utf8: Documents that were not UTF-8, repaired or left out.
        num_control_characters: Control characters kept in the text.
    """

    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_bad_utf8: int = 0
    num_control_characters: int = 0


def decode_document(
    raw: RawDocument, source: Source, on_bad_utf8: BadUtf8, tally: Tally
) -> str | None:
    """The document's clean text, counted in ``tally``; None if the policy leaves it out.

    Raises:
        GdistillError: For text that is not UTF-8, under the policy ``error``.
    """
    decoded = _decode(raw, source, on_bad_utf8, tally)
    if decoded is None:
        return None
    text = source.text(decoded, raw)
    try:
        encoded = raw.content if text is decoded and isinstance(raw.content, bytes) else None
        encoded = text.encode() if encoded is None else encoded
    except UnicodeEncodeError as error:
        if not _tolerated(raw, source, on_bad_utf8, tally, error.start, "a lone surrogate"):
            return None
        encoded = text.encode("utf-8", "replace")
        text = encoded.decode()
    tally.num_control_characters += len(encoded) - len(encoded.translate(None, CONTROL_BYTES))
    tally.num_bytes += len(encoded)
    return text


def _decode(raw: RawDocument, source: Source, on_bad_utf8: BadUtf8, tally: Tally) -> str | None:
    if isinstance(raw.content, str):
        return raw.content
    try:
        return raw.content.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw.content[error.start]:02x} ({error.reason})"
        if not _tolerated(raw, source, on_bad_utf8, tally, error.start, found):
            return None
        return raw.content.decode("utf-8", "replace")


def _tolerated(
    raw: RawDocument,
    source: Source,
    on_bad_utf8: BadUtf8,
    tally: Tally,
    byte: int,
    found: str,
) -> bool:
    """Count bad text; whether it is to be repaired (else left out)."""
    if on_bad_utf8 == "error":
        raise GdistillError(
            "the text is not UTF-8",
            where=source.place(raw, byte),
            got=found,
            remedy="convert it, or --set corpus.on_bad_utf8=replace (or skip)",
        )
    tally.num_bad_utf8 += 1
    return on_bad_utf8 == "replace"
