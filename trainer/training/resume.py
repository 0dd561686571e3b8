"""A run goes on: its checkpoint is read and checked, and is of the run that is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shards.atomic import sha256_file
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.settings import flatten, from_mapping, to_mapping
from trainer.students.configuration import grouped, unread_settings
from trainer.students.registry import STUDENTS
from trainer.training.checkpoint import FILES, FORMAT_VERSION, Trainee, seal
from trainer.training.parallel import scatter_like
from trainer.training.settings import PREFIX, STATE_FILE, RunConfig, TrainingConfig

NOT_A_STATE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What reading a ``state.json`` of any other content may end in."""


@dataclass(frozen=True)
class State:
    """What ``state.json`` holds.

    Attributes:
        step: Optimiser steps done.
        files: Name -> sha256 of the files beside it.
        run: Identity of the run.
        stream: Place in the data.
        window: Sums since the last line of metrics.
        ema_num_updates: Updates of the moving average.
        validation: Figures of the last validation.
        format_version: Of the folder.
        sha256: Hash of all other fields; checkpoints of older versions have none.
    """

    step: int
    files: dict[str, str]
    run: dict[str, Any]
    stream: dict[str, Any]
    window: dict[str, float]
    ema_num_updates: int
    validation: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION
    sha256: str | None = None


def resumed(folder: Path, config: RunConfig, identity: Mapping[str, Any], trainee: Trainee) -> State:
    """The state of a checkpoint, as of the run that goes on; its tensors go to ``trainee``.

    Raises:
        IntegrityError: When the checkpoint is damaged.
        UsageError: When it is of another run than ``config`` and ``identity``.
    """
    state = read_state(folder)
    try:
        run = require_same_run(state.run, identity, operational_fields(config))
    except NOT_A_STATE as error:
        raise _unreadable(folder, error) from error
    restore(trainee, folder, state.ema_num_updates)
    return replace(state, run=run)


def read_state(folder: Path) -> State:
    """The state of a checkpoint whose files are all as written.

    Raises:
        IntegrityError: When a file is missing or altered, or the format is unknown.
    """
    try:
        document = json.loads((folder / STATE_FILE).read_bytes())
        version = document["format_version"]
        if version != FORMAT_VERSION:
            what, where = "checkpoint of another format version", folder / STATE_FILE
            raise IntegrityError(what, where=where, got=version, expected=FORMAT_VERSION)
        state = from_mapping(State, document)
        is_whole = state.sha256 in (None, seal(document)) and set(state.files) == set(FILES)
        if not is_whole or state.step != int(folder.name.removeprefix(PREFIX)):
            raise ValueError("fields that do not fit each other")
    except (OSError, UsageError, *NOT_A_STATE) as error:
        raise _unreadable(folder, error) from error
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != digest:
            what = "a file of the checkpoint is missing or altered"
            raise IntegrityError(what, where=path, remedy=_remedy(folder))
    return state


def _unreadable(folder: Path, error: Exception) -> IntegrityError:
    """What a checkpoint that another program wrote or altered ends in."""
    got = error.what if isinstance(error, GdistillError) else f"{type(error).__name__}: {error}"
    return IntegrityError("unreadable checkpoint", where=folder / STATE_FILE, got=got, remedy=_remedy(folder))


def _remedy(folder: Path) -> str:
    return f"delete {folder} to go on from the one before"


def restore(trainee: Trainee, folder: Path, num_updates: int) -> None:
    """Take over the tensors of a checkpoint; no process holds more than one whole tensor."""
    student, optimizer, ema = trainee.student, trainee.optimizer, trainee.ema
    weights, averages, moments = (safe_open(folder / name, "pt") for name in FILES)
    with torch.no_grad():
        for values, saved in ((student.state_dict(), weights), (ema.shadows, averages)):
            for name, value in values.items():
                value.copy_(scatter_like(saved.get_tensor(name), value))
    ema.num_updates = num_updates
    known = set(moments.keys())
    names = {parameter: name for name, parameter in student.named_parameters()}
    document = optimizer.state_dict()
    for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        name = names[parameter]
        if f"{name}/step" not in known:
            continue  # it has met no gradient yet
        # Scattering is collective: every process goes through the keys in the same order.
        entry = {"step": moments.get_tensor(f"{name}/step").clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = scatter_like(moments.get_tensor(f"{name}/{key}").clone(), parameter)
        document["state"][index] = entry
    optimizer.load_state_dict(document)


# What makes two runs the same run: the resolved config and the store, field by field.


OPERATIONAL = {
    *("training.checkpoint_every_steps", "training.compile", "training.device"),
    *("training.keep_every_steps", "training.keep_last", "training.noise_kernel"),
    *("training.num_workers", "training.peak_flops_per_second", "training.sharding"),
    *("training.trackers", "training.validation_batch_size", "model.attention"),
    "model.backbone.location",  # wherever it lies, its weights are those of the store's teacher
}
"""Fields that may change when a run resumes: they decide how it runs, not what it computes. Some
are settings of older versions, which their checkpoints still name."""
MEANT_BEFORE = {"config.model.backbone.own_noise": "seen"}
"""What runs did before a setting came, where its default is another; else the default is it."""
GONE = {
    "config.optimization.eps": 1e-8,
    "config.optimization.final_learning_rate_ratio": 0.0,
    "config.optimization.noise_learning_rate_ratio": 1.0,
}
"""Settings that are no more, and the values at which a run goes on as it was."""


def operational_fields(config: RunConfig) -> set[str]:
    """Fields a resumed run may change.

    Without dropout, whose draws follow the micro-batches, their size is one. A run may also be
    prolonged unless its end decides what comes before: by a cosine down to it, or by the search
    for clips that the last validation makes.
    """
    fields = {*OPERATIONAL}
    if not config.model.dropout:
        fields.add("training.micro_batch_size")
    if config.optimization.schedule == "constant" and not config.model.diffusion.search_schedule:
        fields |= {"training.num_steps", "training.num_epochs"}
    return fields


def require_same_run(saved: Mapping[str, Any], ours: Mapping[str, Any], free: Set[str]) -> dict[str, Any]:
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
    config = {**saved["config"], "model": grouped(saved["config"]["model"])}
    before, now = (flatten({**run, "init_from": None}) for run in ({**saved, "config": config}, ours))
    defaults = {"config": to_mapping(RunConfig(TrainingConfig(num_steps=1)))}
    before = {**flatten(defaults), **MEANT_BEFORE, **before}
    now |= {name: value for name, value in GONE.items() if name in before}
    foreign = unread_settings(STUDENTS[ours["config"]["student"]].reads)
    ignored = {f"config.{name}" for name in (*free, *(f"model.{name}" for name in foreign))}
    for name in dict.fromkeys((*now, *before)):
        old, new = before.get(name), now.get(name)  # what is absent is none
        if old != new and name not in ignored:
            first = "this version has no such setting:" if name in GONE else "resume with the old value, or"
            what, where = "this run was started with another setting", name.removeprefix("config.")
            expected, remedy = f"{old!r} as in the checkpoint", f"{first} give another --out"
            raise UsageError(what, where=where, got=repr(new), expected=expected, remedy=remedy)
    return {**ours, "init_from": start}


def _same_start(saved: Any, ours: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The same first weights, wherever they lie now; where they cannot be read, the same place."""
    # Runs of older versions remember the place alone, as a string.
    before = {"weights_sha256": None, "place": saved} if isinstance(saved, str) else saved
    if before is None or ours is None:
        same = before is ours
    else:
        key = "weights_sha256" if before["weights_sha256"] and ours["weights_sha256"] else "place"
        same = before[key] == ours[key]
    if not same:
        what, expected = "this run was started from other weights", f"{_in_words(before)}, as in the checkpoint"
        remedy = "resume with the same weights, or give another --out"
        raise UsageError(what, where="--init-from", got=_in_words(ours), expected=expected, remedy=remedy)
    return before if ours is None or not ours["weights_sha256"] else ours


def _in_words(start: Mapping[str, Any] | None) -> str:
    if start is None:
        return "none"
    digest = start["weights_sha256"]
    return f"{start['place']} ({f'weights {digest[:12]}' if digest else 'weights not known'})"
