"""Stage 1: documents -> rows of token ids, as a Parquet data set with a fingerprint.

In come a corpus and the teacher's tokenizer, out comes the folder ``tokens/``: parts of rows, the
tokenizer's files and a record of what was tokenized, how, and what was dropped. An interrupted run
goes on where it was; rows of another corpus, setting or tokenizer are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.tokens.build import prepare_tokens
    from pipeline.tokens.dataset import RECORD, TokenDataset, rows_per_group
    from pipeline.tokens.given_rows import write_given_rows
    from pipeline.tokens.tokenizer import (
        backend,
        encode,
        load_tokenizer,
        special_ids,
        tokenizer_sha256,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
