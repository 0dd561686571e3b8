"""What decides samples, so that one folder never mixes those of two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.base import GdistillError, UsageError, flatten, to_mapping
from trainer.students import ModelFolder


def student_identity(loaded: ModelFolder) -> dict[str, Any]:
    """The weights, the time bounds among them, and what is made of them: JSON."""
    student = loaded.student
    config = student.config
    frozen = {} if config.frozen is None else {"backbone": config.frozen}
    return {
        **frozen,
        "weights_sha256": loaded.weights_sha256,
        "student": type(student).__name__.lower(),
        "student_config": to_mapping(student.settings),
        "row_length": config.row_length,
        "bos_id": config.bos_token_id,
        "eos_id": config.eos_token_id,
        "codec": config.codec,
    }


def files_of_same_run(settings_file: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What ``settings.json`` says of the files that earlier runs left; empty without one.

    Args:
        settings_file: Where it stands, if it does.
        identity: Of the run that wants to go on there.

    Raises:
        UsageError: When the files are of another identity, naming the first field that differs.
        GdistillError: When the file is damaged.
    """
    if not settings_file.is_file():
        return {}
    try:
        before = json.loads(settings_file.read_text(encoding="utf-8"))
        saved, files = flatten(before["identity"]), dict(before["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GdistillError("damaged settings", where=settings_file, got=error) from error
    ours = flatten(identity)
    for name in sorted(saved.keys() | ours.keys()):
        old, new = saved.get(name, "absent"), ours.get(name, "absent")
        if old != new:
            raise UsageError(
                "the folder holds samples of another run",
                where=f"{settings_file.parent}: {name}",
                got=new,
                expected=f"{old} as there",
                remedy="give another --out",
            )
    return files
