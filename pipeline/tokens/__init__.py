"""DOOR: pipeline.tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.tokens.build import prepare_tokens
    from pipeline.tokens.dataset import RECORD, TokenDataset, rows_per_group
    from pipeline.tokens.packing import Packing
    from pipeline.tokens.publishing import publish
    from pipeline.tokens.tokenizer import (
        backend,
        encode,
        load_tokenizer,
        special_ids,
        tokenizer_sha256,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
