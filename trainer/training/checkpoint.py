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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shards.base import IntegrityError, publish_folder, sha256_file, write_json_atomic
from trainer.training.optimization import ExponentialMovingAverage
from trainer.training.parallel import gather_full, on_main_process, scatter_like
from trainer.training.run_folder import PREFIX, STATE_FILE, checkpoint_steps

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
