"""Checkpoints: whole or absent, complete, by name, pruned by rule; which run they are of.

    checkpoints/step-00005000/
        weights.safetensors      parameters and buffers of the student
        ema.safetensors          their moving average, by parameter name
        optimizer.safetensors    PARAMETER/exp_avg, PARAMETER/exp_avg_sq, PARAMETER/step
        state.json               step, place in the data, averages, run identity, file hashes

There is no random state to save: every draw is keyed by (seed, step or epoch, row). A checkpoint is
written under a temporary name, synced, and renamed; ``state.json`` seals the other files, and
itself.

Sharded tensors are gathered one at a time, and the first process alone keeps them, in its main
memory (:func:`~trainer.training.parallel.gather_full`). torch.distributed.checkpoint would spare it
that, at the price of what is promised here: one file a process, so that what is on disk depends on
how many there were; a ``.metadata`` that is unpickled on reading; nothing that safetensors reads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shards.atomic import canonical_json, publish_folder, sha256_file, write_json_atomic
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.settings import flatten, from_mapping, to_mapping
from shards.store.manifest import Manifest
from trainer.initial_weights import find_source
from trainer.students.configuration import grouped, unread_settings
from trainer.students.registry import STUDENTS
from trainer.training.metrics import PREFIX, STATE_FILE, StepWindow, checkpoint_steps
from trainer.training.optimization import ExponentialMovingAverage
from trainer.training.parallel import gather_full, on_main_process, scatter_like
from trainer.training.settings import RunConfig, TrainingConfig

FORMAT_VERSION = 1
UNFINISHED = ".writing-"
FILES = ("weights.safetensors", "ema.safetensors", "optimizer.safetensors")
NOT_A_STATE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What reading a ``state.json`` of any other content may end in."""


@dataclass(frozen=True)
class Trainee:
    """The parts of a run whose tensors a checkpoint holds."""

    student: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ExponentialMovingAverage

    def gather(self, accelerator: Accelerator) -> dict[str, dict[str, Tensor]]:
        """File name -> whole tensors on the main process's CPU; every process must call it."""
        moments = {
            f"{name}/{key}": value
            for name, parameter in self.student.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        contents = (self.student.state_dict(), self.ema.shadows, moments)
        return {
            name: gather_full(tensors, accelerator)
            for name, tensors in zip(FILES, contents, strict=True)
        }

    def restore(self, directory: Path, num_updates: int) -> None:
        """Take over the tensors of a checkpoint; no process holds more than one whole tensor.

        Raises:
            IntegrityError: When a file does not hold this student's tensors.
        """
        weights, averages, moments = (_Tensors(directory / name) for name in FILES)
        with torch.no_grad():
            for name, value in self.student.state_dict().items():
                value.copy_(scatter_like(weights(name), value))
            for name, value in self.ema.shadows.items():
                value.copy_(scatter_like(averages(name), value))
        self.ema.num_updates = num_updates
        names = {parameter: name for name, parameter in self.student.named_parameters()}
        document = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if not moments.has(f"{names[parameter]}/step"):
                continue  # it has met no gradient yet
            # Scattering is collective: every process goes through the keys in the same order.
            entry = {"step": moments(f"{names[parameter]}/step").clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = scatter_like(moments(f"{names[parameter]}/{key}").clone(), parameter)
            document["state"][index] = entry
        self.optimizer.load_state_dict(document)


class _Tensors:
    """Tensors of one file of a checkpoint by name."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, safe_open(path, "pt")
        self._names = set(self._file.keys())

    def has(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str) -> Tensor:
        if name not in self._names:
            raise IntegrityError(
                "a tensor is missing in the checkpoint", where=self._path, got=name
            )
        return self._file.get_tensor(name)


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
    window: dict[str, Any]
    ema_num_updates: int
    validation: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION
    sha256: str | None = None

    def __post_init__(self) -> None:
        window = {**StepWindow().state_dict(), **self.window}
        numbers = [self.step, self.ema_num_updates, *window.values()]
        right = (
            set(self.files) == set(FILES)
            and window.keys() == self.window.keys()
            and all(isinstance(n, int | float) and n >= 0 for n in numbers[:2])
            and all(isinstance(n, int | float) and n == n for n in numbers[2:])
            and self.window["num_tokens"] >= 0
            and self.window["num_steps"] >= 0
            and self.sha256 in (None, self.seal())
        )
        if not right:
            raise ValueError("fields that do not fit each other")

    def seal(self) -> str:
        """Hash of the other fields."""
        return hashlib.sha256(canonical_json({**to_mapping(self), "sha256": None})).hexdigest()


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        directory: ``OUT/checkpoints``.
        keep_last: Newest checkpoints to keep.
        keep_every_steps: Also keep multiples of this.
    """

    def __init__(self, directory: Path, keep_last: int, keep_every_steps: int | None) -> None:
        self.directory = directory
        self._keep_last, self._keep_every = keep_last, keep_every_steps

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return checkpoint_steps(self.directory)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` steps."""
        return self.directory / f"{PREFIX}{step:08d}"

    def save(
        self, step: int, trainee: Trainee, state: dict[str, Any], accelerator: Accelerator
    ) -> None:
        """Write a checkpoint and prune older ones; every process must call it.

        Args:
            step: Optimiser steps done.
            trainee: Gives the tensors.
            state: ``run``, ``stream``, ``window`` and ``validation`` of :class:`State`.
            accelerator: The processes.

        Raises:
            GdistillError: On every process, when the files cannot be written.
        """
        tensors = trainee.gather(accelerator)

        def write() -> None:
            self._remove_unfinished()
            temporary = self.directory / f"{UNFINISHED}{PREFIX}{step:08d}"
            try:
                temporary.mkdir(parents=True)
                for name, content in tensors.items():
                    save_file(content, temporary / name)
                files = {name: sha256_file(temporary / name) for name in tensors}
                made = State(
                    step=step, files=files, ema_num_updates=trainee.ema.num_updates, **state
                )
                document = {**to_mapping(made), "sha256": made.seal()}
                write_json_atomic(temporary / STATE_FILE, document)
                publish_folder(temporary, self.path(step))
            finally:
                self._remove_unfinished()
            self._prune()

        on_main_process(write, accelerator)

    def _remove_unfinished(self) -> None:
        """What a write that died has left: the run's lock is held, so nobody is writing it."""
        for folder in self.directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(folder)

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._keep_last :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        for step in set(steps) - kept:
            # The state file goes first: a folder without it does not count as a checkpoint.
            (self.path(step) / STATE_FILE).unlink()
            shutil.rmtree(self.path(step))

    def seal(self, step: int) -> str:
        """What tells this checkpoint from any other: the hash of its state file."""
        return sha256_file(self.path(step) / STATE_FILE)

    def read_state(self, step: int) -> State:
        """The state of a checkpoint whose files are all as written.

        Raises:
            IntegrityError: When a file is missing or altered, or the format is unknown.
        """
        directory = self.path(step)
        where, remedy = directory / STATE_FILE, f"delete {directory} to go on from the one before"
        try:
            document = json.loads(where.read_bytes())
            version = document["format_version"]
            if version != FORMAT_VERSION:
                raise IntegrityError(
                    "checkpoint of another format version",
                    where=where,
                    got=version,
                    expected=FORMAT_VERSION,
                )
            state = from_mapping(State, document)
        except (OSError, UsageError, *NOT_A_STATE) as error:
            raise unreadable(where, error, remedy) from error
        if state.step != step:
            raise unreadable(where, f"step {state.step}", remedy)
        for name, digest in state.files.items():
            path = directory / name
            if not path.is_file() or sha256_file(path) != digest:
                what = "a file of the checkpoint is missing or altered"
                raise IntegrityError(what, where=path, remedy=remedy)
        return state


def unreadable(where: Path, got: object, remedy: str) -> IntegrityError:
    """What a checkpoint that another program wrote or altered ends in."""
    got = got.what if isinstance(got, GdistillError) else f"{type(got).__name__}: {got}"
    return IntegrityError("unreadable checkpoint", where=where, got=got, remedy=remedy)


# What makes two runs the same run: the resolved config and the store, field by field.


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
OPERATIONAL = (
    "training.checkpoint_every_steps",
    "training.compile",
    "training.device",
    "training.keep_every_steps",
    "training.keep_last",
    "training.noise_kernel",
    "training.num_workers",
    "training.peak_flops_per_second",
    "training.sharding",
    "training.trackers",
    "training.validation_batch_size",
    "model.attention",
)
"""Fields that may change when a run resumes: they decide how it runs, not what it computes. Some
are settings of older versions, which their checkpoints still name."""
MEANT_BEFORE = {"config.model.backbone.own_noise": "seen"}
"""What runs did before a setting came, where its default is another; else the default is it."""


def operational_fields(config: RunConfig) -> set[str]:
    """Fields a resumed run may change.

    Without dropout, whose draws follow the micro-batches, their size is one. A run may also be
    prolonged unless its end decides what comes before: by a cosine down to it, or by the search
    for clips that the last validation makes.
    """
    fields: set[str] = {*OPERATIONAL}
    if not config.model.dropout:
        fields.add("training.micro_batch_size")
    if config.optimization.schedule == "constant" and not config.model.diffusion.search_schedule:
        fields |= {"training.num_steps", "training.num_epochs"}
    return fields


def run_identity(config: RunConfig, manifest: Manifest, init_from: Path | None) -> dict[str, Any]:
    """Everything that decides what a run computes, as JSON.

    First weights are named by their content; a run that has begun needs their files no longer.
    """
    start = None
    if init_from is not None:
        try:
            digest = find_source(init_from).weights_sha256
        except UsageError:
            digest = None
        start = {"weights_sha256": digest, "place": str(init_from)}
    document = manifest.to_json()
    store = {**{name: document[name] for name in STORE_FIELDS}, "sha256": manifest.sha256}
    return {"config": to_mapping(config), "store": store, "init_from": start}


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
    config = {**saved["config"], "model": grouped(saved["config"]["model"])}
    before, now = (
        flatten({**run, "init_from": None}) for run in ({**saved, "config": config}, ours)
    )
    defaults = {"config": to_mapping(RunConfig(TrainingConfig(num_steps=1)))}
    before = {**flatten(defaults), **MEANT_BEFORE, **before}
    foreign = unread_settings(STUDENTS[ours["config"]["student"]].reads)
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
