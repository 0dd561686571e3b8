"""Codecs by name."""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from typing import Any

from shards.codec.full import FullCodec
from shards.codec.hidden import HiddenCodec
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import Codec
from shards.codec.quantized import QuantizedCodec
from shards.codec.seeded import SeededCodec
from shards.codec.topk import TopKCodec
from shards.errors import UsageError, did_you_mean
from shards.settings import from_mapping

CODECS: dict[str, type[Any]] = {
    codec.name: codec for codec in (FullCodec, QuantizedCodec, TopKCodec, SeededCodec, PosteriorCodec, HiddenCodec)
}
ENTRY_POINTS = "gdistill.codecs"


def codec_class(name: str) -> type[Any]:
    """The codec of that name: one of ours, or PACKAGE/NAME, as an installed package registers it.

    A package registers a codec under the name that stores and students will call it by::

        [project.entry-points."gdistill.codecs"]
        "acme-codecs/path" = "acme_codecs.path:PathCodec"

    Raises:
        UsageError: For an unknown name; for one of a package that is missing, naming the package.
    """
    if name in CODECS:
        return CODECS[name]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        return installed[name].load()
    package, slash, _ = name.partition("/")
    if slash:
        what = "the codec is of a package that is not installed, or offers it no more"
        raise UsageError(what, got=name, remedy=f"pip install {package}")
    known = sorted([*CODECS, *installed])
    hint = did_you_mean(name, known, f"known codecs: {known}")
    raise UsageError("unknown codec", got=name, remedy=hint)


def make_codec(name: str, /, **parameters: Any) -> Codec:
    """The codec of that name.

    Raises:
        UsageError: For an unknown name or parameter (naming the nearest known one), or a bad value.
    """
    return from_mapping(codec_class(name), parameters, where=f"codec {name}")


def codec_parameters(codec: Codec) -> dict[str, Any]:
    """JSON-ready parameters from which ``make_codec(name, **parameters)`` rebuilds the codec."""
    return dataclasses.asdict(codec)  # type: ignore[call-overload]
