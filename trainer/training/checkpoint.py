"""Checkpoints: whole or absent, complete, by name, pruned by rule.

    checkpoints/step-00005000/
        weights.safetensors      parameters and buffers of the student
        ema.safetensors          their moving average, by parameter name
        optimizer.safetensors    PARAMETER/exp_avg, PARAMETER/exp_avg_sq, PARAMETER/step
        state.json               step, place in the data, averages, run identity, file hashes

There is no random state to save: every draw is keyed by (seed, step or epoch, row). A checkpoint is
written under a temporary name, synced, and renamed; ``state.json`` seals the other files.

Sharded tensors are gathered one at a time, and the first process alone keeps them, in its main
memory (:func:`~trainer.training.parallel.gather_full`). torch.distributed.checkpoint would spare it
that, at the price of what is promised here: one file a process, so that what is on disk depends on
how many there were; a ``.metadata`` that is unpickled on reading; nothing that safetensors reads.
Its ``get_model_state_dict(full_state_dict=True, cpu_offload=True)`` gathers as is done here.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shards.atomic import is_held, publish_folder, sha256_file, write_json_atomic
from shards.errors import IntegrityError, UsageError
from shards.settings import flatten, to_mapping
from shards.store.manifest import Manifest
from trainer.initial_weights import find_source
from trainer.students.configuration import grouped, unread_settings
from trainer.students.registry import STUDENTS
from trainer.training.optimization import ExponentialMovingAverage
from trainer.training.parallel import gather_full, on_main_process, scatter_like
from trainer.training.settings import RunConfig, TrainingConfig

FORMAT_VERSION = 1
UNFINISHED = ".writing-"


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
        contents = {
            "weights.safetensors": self.student.state_dict(),
            "ema.safetensors": self.ema.shadows,
            "optimizer.safetensors": moments,
        }
        return {name: gather_full(tensors, accelerator) for name, tensors in contents.items()}

    def restore(self, directory: Path, num_updates: int) -> None:
        """Take over the tensors of a checkpoint; no process holds more than one whole tensor."""
        with safe_open(directory / "weights.safetensors", "pt") as weights, torch.no_grad():
            for name, value in self.student.state_dict().items():
                value.copy_(scatter_like(weights.get_tensor(name), value))
        with safe_open(directory / "ema.safetensors", "pt") as averages:
            shadows = self.ema.shadows
            self.ema.require_names(averages.keys())
            placed = {n: scatter_like(averages.get_tensor(n), shadows[n]) for n in shadows}
            self.ema.load(placed, num_updates)
        with safe_open(directory / "optimizer.safetensors", "pt") as moments:
            self._restore_moments(moments)

    def _restore_moments(self, moments: Any) -> None:
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.student.named_parameters()
        }
        document = self.optimizer.state_dict()
        for index, parameter in enumerate(_parameters_of(self.optimizer)):
            prefix = f"{names[parameter]}/"
            entry = {}
            # Scattering is collective: every process must go through the keys in the same order,
            # which that of a set, different in every process, is not.
            for name in sorted(key for key in moments.keys() if key.startswith(prefix)):  # noqa: SIM118
                key, value = name.removeprefix(prefix), moments.get_tensor(name).clone()
                entry[key] = value if key == "step" else scatter_like(value, parameter)
            if entry:
                document["state"][index] = entry
        self.optimizer.load_state_dict(document)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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

        Raises:
            GdistillError: On every process, when the files cannot be written.
        """
        tensors = trainee.gather(accelerator)

        def write() -> None:
            self._remove_unfinished()
            try:
                self._write(step, tensors, {**state, "ema_num_updates": trainee.ema.num_updates})
            finally:
                self._remove_unfinished()
            self._prune()

        on_main_process(write, accelerator)

    def _write(
        self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]
    ) -> None:
        temporary = self.directory / f"{UNFINISHED}{PREFIX}{step:08d}"
        temporary.mkdir(parents=True)
        files = {}
        for name, content in tensors.items():
            save_file(content, temporary / name)
            files[name] = sha256_file(temporary / name)
        document = {"format_version": FORMAT_VERSION, "step": step, "files": files, **state}
        write_json_atomic(temporary / STATE_FILE, document)
        publish_folder(temporary, self.path(step))

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

    def read_state(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint whose files are all as written.

        Raises:
            IntegrityError: When a file is missing or altered, or the format is unknown.
        """
        directory = self.path(step)
        remedy = f"delete {directory} to go on from the checkpoint before it"
        try:
            state = json.loads((directory / STATE_FILE).read_bytes())
            version = state["format_version"]
            files = dict(state["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = directory / STATE_FILE
            raise IntegrityError("unreadable checkpoint", where=where, remedy=remedy) from error
        if version != FORMAT_VERSION:
            raise IntegrityError(
                "checkpoint of another format version",
                where=directory,
                got=version,
                expected=FORMAT_VERSION,
            )
        for name, digest in files.items():
            path = directory / name
            if not path.is_file() or sha256_file(path) != digest:
                what = "a file of the checkpoint is missing or altered"
                raise IntegrityError(what, where=path, remedy=remedy)
        return state


# What lies in the folder of a run, and how far the run is: read without torch, while it runs.


METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"
CHECKPOINTS, MODEL = "checkpoints", "model"
STATE_FILE, PREFIX = "state.json", "step-"


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in ``OUT/checkpoints``, ascending."""
    found = directory.glob(f"{PREFIX}*/{STATE_FILE}")
    numbers = (path.parent.name.removeprefix(PREFIX) for path in found)
    return sorted(int(number) for number in numbers if number.isdigit())


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, by the last lines of its metrics.

    Attributes:
        out: The run's folder.
        student: What is trained.
        step: Step of the last line of training; None before the first.
        num_steps: Steps of the whole run.
        tokens_per_second: Over the steps since the line before.
        steps_per_second: The same in steps.
        eta_seconds: What the steps left take at that rate; validation comes on top.
        loss: Mean training loss over those steps.
        validation_step: Step of the last validation; None before the first.
        validation_nll_nats: Its negative log-likelihood per token.
        checkpoint_step: Step of the last whole checkpoint.
        seconds_since_line: Age of the last line.
        is_running: Whether a process holds the folder; None where that cannot be told.
        is_finished: Whether the model of the last step is written.
    """

    out: str
    student: str
    step: int | None
    num_steps: int | None
    tokens_per_second: float | None
    steps_per_second: float | None
    eta_seconds: float | None
    loss: float | None
    validation_step: int | None
    validation_nll_nats: float | None
    checkpoint_step: int | None
    seconds_since_line: float | None
    is_running: bool | None
    is_finished: bool

    @classmethod
    def of(cls, out: Path, now: float | None = None) -> RunStatus:
        """Read a run's folder.

        Args:
            out: The ``--out`` of a training.
            now: Unix time; the clock's unless told.

        Raises:
            UsageError: If no training has begun there.
        """
        try:
            config = json.loads((out / CONFIG_FILE).read_bytes())
            student = str(config["student"])
            config["training"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "no training run there",
                where=out,
                got=f"no {CONFIG_FILE} of a run",
                expected="the --out of gdistill-train run",
            ) from error
        last = _last_lines(out / METRICS_FILE)
        train, validation = last.get("train", {}), last.get("validation", {})
        step, num_steps = train.get("step"), train.get("num_steps")
        speed = train.get("tokens_per_second")
        steps_per_second = None
        if speed and train.get("num_tokens"):
            steps_per_second = speed * step / train["num_tokens"]
        left = None if step is None else num_steps - step
        checkpoints = checkpoint_steps(out / CHECKPOINTS)
        return cls(
            out=str(out),
            student=student,
            step=step,
            num_steps=num_steps,
            tokens_per_second=speed,
            steps_per_second=steps_per_second,
            eta_seconds=left / steps_per_second if left and steps_per_second else None,
            loss=train.get("loss"),
            validation_step=validation.get("step"),
            validation_nll_nats=validation.get("nll_nats"),
            checkpoint_step=checkpoints[-1] if checkpoints else None,
            seconds_since_line=_age(out / METRICS_FILE, time.time() if now is None else now),
            is_running=is_held(out),
            is_finished=left == 0 and (out / MODEL / CONFIG_FILE).is_file(),
        )

    def to_json(self) -> dict[str, Any]:
        """The figures by name; null where there is none yet."""
        return asdict(self)

    def to_text(self) -> str:
        """A few aligned lines."""
        lines = {"run": f"{self.student}, {self.out}", "step": "none yet"}
        if self.step is not None and self.num_steps:
            share = 100 * self.step / self.num_steps
            lines["step"] = f"{self.step:,} of {self.num_steps:,} ({share:.1f}%)"
        if self.steps_per_second is not None and self.tokens_per_second is not None:
            lines["rate"] = (
                f"{self.tokens_per_second:,.0f} tok/s, {self.steps_per_second:.3g} steps/s"
            )
        if self.eta_seconds is not None:
            lines["left"] = str(timedelta(seconds=round(self.eta_seconds)))
        if self.loss is not None:
            lines["loss"] = f"{self.loss:.4f}"
        if self.validation_nll_nats is not None:
            lines["validation"] = (
                f"{self.validation_nll_nats:.4f} nats per token at step {self.validation_step:,}"
            )
        step = self.checkpoint_step
        lines["checkpoint"] = "none yet" if step is None else f"step {step:,}"
        lines["process"] = self._process()
        return "\n".join(f"{name:<12} {text}" for name, text in lines.items())

    def _process(self) -> str:
        age = ""
        if self.seconds_since_line is not None:
            age = f"; last line {timedelta(seconds=round(self.seconds_since_line))} ago"
        if self.is_running:
            return f"at work{age}"
        if self.is_finished:
            return f"none: finished, {Path(self.out) / MODEL}"
        if self.is_running is None:
            return f"unknown: this file system has no locks{age}"
        begin = (
            "the beginning" if self.checkpoint_step is None else f"step {self.checkpoint_step:,}"
        )
        return f"none{age}; the same command goes on from {begin}"


def _last_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each kind; a line that is being written is not there yet."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in reversed(lines):
        try:
            value = json.loads(line)
            found.setdefault(value["kind"], value)
        except (ValueError, KeyError, TypeError):
            continue
        if len(found) == 2:
            break
    return found


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


# What makes two runs the same run: the resolved config and the store, field by field.


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
    "model.attention",
)
"""Fields that may change when a run resumes: they decide how it runs, not what it computes."""


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
MEANT_BEFORE = {"config.model.backbone.own_noise": "seen"}
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
