"""The teacher: token rows [B, L] -> log-probabilities [B, L-1, V], float32, nats.

In comes any causal language model of transformers; out come its distributions, checked, aligned
with the tokens they are about, in batches that fit the memory. It can also write rows of its own,
by Gumbel-max. The only home of the shift by one between logits and tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.teacher.batching import automatic_batch_size
    from pipeline.teacher.generate import GeneratedRows, Note, ProcessOutput
    from pipeline.teacher.model import (
        Teacher,
        check_row_length,
        check_vocabulary,
        tokenizer_size,
    )
    from pipeline.teacher.model_group import ModelGroup
    from pipeline.teacher.output import RawLogits, check_output, rows_tensor

__getattr__, __dir__ = open_door(__name__, __file__)
