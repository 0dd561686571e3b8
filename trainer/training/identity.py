"""What makes two runs the same run: the resolved config and the store, compared field by field."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from shards.base import UsageError, flatten, to_mapping
from shards.store import Manifest
from trainer.training.settings import RunConfig

STORE_FIELDS = (
    "vocab_size",
    "row_length",
    "codec",
    "teacher",
    "tokenizer",
    "tokens",
    "splits",
    "seed",
    "bos_id",
    "eos_id",
    "mask_id",
    "format_version",
)


def store_essentials(manifest: Manifest) -> dict[str, Any]:
    """What a model must remember of the store it was trained on, and the store's seal."""
    document = manifest.to_json()
    return {**{name: document[name] for name in STORE_FIELDS}, "sha256": manifest.sha256}


def run_identity(config: RunConfig, manifest: Manifest, init_from: Path | None) -> dict[str, Any]:
    """Everything that decides what a run computes, as JSON."""
    return {
        "config": to_mapping(config),
        "store": store_essentials(manifest),
        "init_from": None if init_from is None else str(init_from),
    }


def require_same_run(saved: Mapping[str, Any], ours: Mapping[str, Any], free: Set[str]) -> None:
    """Refuse to resume a run as another one.

    Args:
        saved: Identity in the checkpoint.
        ours: Identity asked for now.
        free: Config fields that may differ.

    Raises:
        UsageError: Naming the first field that differs, with both values.
    """
    before, now = flatten(saved), flatten(ours)
    ignored = {f"config.{name}" for name in free}
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, "absent"), now.get(name, "absent")
        if old != new and name not in ignored:
            raise UsageError(
                "this run was started with another setting",
                where=name.removeprefix("config."),
                got=repr(new),
                expected=f"{old!r} as in the checkpoint",
                remedy="resume with the old value, or give another --out",
            )
