"""Codecs by name, ours and others', and the kit that each must pass."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch

from shards.codec import registry
from shards.codec.full import FullCodec
from shards.codec.registry import CODECS, make_codec
from shards.errors import UsageError
from shards.testing import check_codec

AGREEMENT = {"posterior": 0.99, "hidden": 0.95, "topk": 0.0}


@pytest.mark.parametrize("name", CODECS)
def test_our_codecs_pass_the_kit(name: str) -> None:
    check_codec(make_codec(name), min_agreement=AGREEMENT.get(name, 1.0))


@dataclass(frozen=True)
class Redrawing(FullCodec):
    """Says that it is fresh, and is not."""

    is_fresh = True


@dataclass(frozen=True)
class Undeclared(FullCodec):
    """Keeps an array that it does not declare."""

    def encode(self, output, seed, resources):
        return {**super().encode(output, seed, resources), "more": output.tokens}


@dataclass(frozen=True)
class Batchwise(FullCodec):
    """Encodes a row by its place in the batch."""

    def encode(self, output, seed, resources):
        arrays = super().encode(output, seed, resources)
        return {
            **arrays,
            "gumbels": arrays["gumbels"] + torch.arange(len(output.rows))[:, None, None].half(),
        }


@pytest.mark.parametrize("codec", [Redrawing(), Undeclared(), Batchwise()])
def test_the_kit_sees_what_is_wrong(codec: FullCodec) -> None:
    with pytest.raises(AssertionError):
        check_codec(codec, min_agreement=1.0)


def test_codecs_from_outside_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("acme/whole", "shards.codec.full:FullCodec", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert isinstance(make_codec("acme/whole"), FullCodec)
    with pytest.raises(UsageError, match="pip install acme"):
        make_codec("acme/other")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(UsageError, match="pip install acme-codecs"):
        make_codec("acme-codecs/path", width=3)
