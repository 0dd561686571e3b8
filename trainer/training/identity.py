"""What makes two runs the same run: the resolved config and the store, compared field by field."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from shards.base import UsageError, flatten, to_mapping
from shards.store import Manifest
from trainer.initial_weights import find_source
from trainer.students import STUDENTS
from trainer.training.settings import RunConfig, TrainingConfig

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
MEANT_BEFORE = {"config.model.own_noise": "seen"}
"""What runs did before a setting came, where its default is another; else the default is it."""


def store_essentials(manifest: Manifest) -> dict[str, Any]:
    """What a model must remember of the store it was trained on, and the store's seal."""
    document = manifest.to_json()
    return {**{name: document[name] for name in STORE_FIELDS}, "sha256": manifest.sha256}


def run_identity(config: RunConfig, manifest: Manifest, init_from: Path | None) -> dict[str, Any]:
    """Everything that decides what a run computes, as JSON."""
    return {
        "config": to_mapping(config),
        "store": store_essentials(manifest),
        "init_from": _start(init_from),
    }


def _start(init_from: Path | None) -> dict[str, Any] | None:
    """The first weights by their content; a run that has begun no longer needs the files."""
    if init_from is None:
        return None
    try:
        digest = find_source(init_from).weights_sha256
    except UsageError:
        digest = None
    return {"weights_sha256": digest, "place": str(init_from)}


def require_same_run(
    saved: Mapping[str, Any], ours: Mapping[str, Any], free: Set[str]
) -> dict[str, Any]:
    """Refuse to resume a run as another one.

    Args:
        saved: Identity in the checkpoint; of an older version it may lack settings that came later.
        ours: Identity asked for now.
        free: Config fields that may differ.

    Returns:
        Ours, with what of the first weights only the checkpoint still knows.

    Raises:
        UsageError: Naming the first field that differs, with both values.
    """
    start = _same_start(saved.get("init_from"), ours.get("init_from"))
    before, now = (flatten({**run, "init_from": None}) for run in (saved, ours))
    defaults = {"config": to_mapping(RunConfig(TrainingConfig(num_steps=1)))}
    before = {**flatten(defaults), **MEANT_BEFORE, **before}
    foreign = STUDENTS[ours["config"]["student"]].foreign_settings
    ignored = {f"config.{name}" for name in (*free, *(f"model.{name}" for name in foreign))}
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)  # what is absent is none
        if old != new and name not in ignored:
            raise UsageError(
                "this run was started with another setting",
                where=name.removeprefix("config."),
                got=repr(new),
                expected=f"{old!r} as in the checkpoint",
                remedy="resume with the old value, or give another --out",
            )
    return {**ours, "init_from": start}


def _same_start(saved: Any, ours: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The same first weights, wherever they lie now; where they cannot be read, the same place.

    Raises:
        UsageError: For other weights, or when it cannot be told.
    """
    # Runs of older versions remember the place alone, as a string.
    before = {"weights_sha256": None, "place": saved} if isinstance(saved, str) else saved
    if before is None or ours is None:
        same = before is ours
    elif before["weights_sha256"] and ours["weights_sha256"]:
        same = before["weights_sha256"] == ours["weights_sha256"]
    else:
        same = before["place"] == ours["place"]
    if not same:
        raise UsageError(
            "this run was started from other weights",
            where="--init-from",
            got=_told(ours),
            expected=f"{_told(before)}, as in the checkpoint",
            remedy="resume with the same weights, or give another --out",
        )
    return before if ours is None or not ours["weights_sha256"] else ours


def _told(start: Mapping[str, Any] | None) -> str:
    if start is None:
        return "none"
    digest = start["weights_sha256"]
    return f"{start['place']} ({f'weights {digest[:12]}' if digest else 'weights not known'})"
