"""Stores of Gumbel posteriors: noise, how it is kept, where, and how it is read.

errors, atomic, console, settings: what every package stands on
noise           Gumbel noise given a token, in arrival times; keyed draws that need no state
language_model  a causal model of transformers, checked and loaded
codec           teacher output -> arrays per token -> noise
store           manifest, ledger, shards, in a folder or at a URL: written by any number of
                processes, read with checks (docs/store-format.md)
stream          the order of an epoch: shuffled, resumable, the same for every world size
tools           what people do with stores; ``gdistill-shards`` is :mod:`shards.cli`

``shards.open_store(path_or_url)`` opens one for reading; its ``stream(batch_size=32, seed=0)``
is a torch ``IterableDataset``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shards.store.store import ShardStore
    from shards.stream.dataset import open_store

_HOME = {"open_store": "shards.stream.dataset", "ShardStore": "shards.store.store"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a ``--help`` must not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"{__name__!r} offers no {name!r}; it offers {sorted(_HOME)}")
    return getattr(import_module(_HOME[name]), name)
