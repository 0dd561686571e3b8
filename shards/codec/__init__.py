"""DOOR: shards.codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.codec.array_spec import ArraySpec
    from shards.codec.byte_planes import from_planes
    from shards.codec.draws import frozen_posterior
    from shards.codec.posterior import PosteriorCodec
    from shards.codec.protocol import Arrays, Codec, TeacherOutput
    from shards.codec.registry import CODECS, codec_parameters, make_codec
    from shards.codec.topk import TopKCodec
    from shards.codec.vocabulary_order import FrequencyOrder

__getattr__, __dir__ = open_door(__name__, __file__)
