"""Causal language models that others trained: a teacher, a judge of samples, a verifier.

In comes a folder or a hub id; out comes a network in evaluation mode that is what it says: every
weight there, each position seeing earlier tokens only, context length and vocabulary told from any
configuration. What cannot be so is refused before it scores a token, and code that lies beside a
model runs only where the user asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.language_model.batching import (
        BatchSize,
        in_batches,
        is_out_of_memory,
        largest_batch,
        memory_bytes,
        require_indexable,
    )
    from shards.language_model.device import DtypeName, allow_tf32, resolve_device
    from shards.language_model.files import (
        PretrainedFiles,
        Role,
        find_pretrained,
        looks_local,
        not_causal_lm,
    )
    from shards.language_model.head import Float32Head
    from shards.language_model.loading import CausalModel, load_causal_model
    from shards.language_model.spread import ONE_DEVICE, Spread

__getattr__, __dir__ = open_door(__name__, __file__)
