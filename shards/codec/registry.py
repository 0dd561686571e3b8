"""Codecs by name."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from shards.base import UsageError, from_mapping
from shards.codec.full import FullCodec
from shards.codec.hidden import HiddenCodec
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import Codec
from shards.codec.quantized import QuantizedCodec
from shards.codec.seeded import SeededCodec
from shards.codec.topk import TopKCodec

CODECS: dict[str, type[Any]] = {
    codec.name: codec
    for codec in (
        FullCodec,
        QuantizedCodec,
        TopKCodec,
        SeededCodec,
        PosteriorCodec,
        HiddenCodec,
    )
}


def make_codec(name: str, /, **parameters: Any) -> Codec:
    """The codec of that name.

    Raises:
        UsageError: For an unknown name or parameter (naming the nearest known one), or a bad value.
    """
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known codecs: {sorted(CODECS)}"
        raise UsageError("unknown codec", got=name, remedy=hint)
    return from_mapping(CODECS[name], parameters, where=f"codec {name}")


def codec_parameters(codec: Codec) -> dict[str, Any]:
    """JSON-ready parameters from which ``make_codec(name, **parameters)`` rebuilds the codec."""
    return dataclasses.asdict(codec)  # type: ignore[call-overload]
