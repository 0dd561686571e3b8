"""What is trained (weights, AdamW, moving average) and its checkpoints: whole or absent, complete, by name.

    checkpoints/step-00005000/
        weights.safetensors      parameters and buffers of the student
        ema.safetensors          their moving average, by parameter name
        optimizer.safetensors    PARAMETER/exp_avg, PARAMETER/exp_avg_sq, PARAMETER/step
        state.json               step, place in the data, averages, run identity, file hashes

There is no random state to save: every draw is keyed by (seed, step or epoch, row). A checkpoint is
written under a temporary name, synced, and renamed; ``state.json`` seals the other files, and
itself. :mod:`trainer.training.resume` reads it. Sharded tensors are gathered one at a time:
torch.distributed.checkpoint would leave what is on disk to the number of processes, and unpickle.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from shards.atomic import canonical_json, publish_folder, sha256_file, write_json_atomic
from shards.errors import UsageError
from shards.settings import to_mapping
from shards.store.manifest import Manifest
from trainer.training.parallel import gather_full, on_main_process
from trainer.training.settings import PREFIX, STATE_FILE, OptimizationConfig, RunConfig, checkpoint_steps

FORMAT_VERSION = 1
UNFINISHED = ".writing-"
FILES = ("weights.safetensors", "ema.safetensors", "optimizer.safetensors")
STORE_FIELDS = (
    *("vocab_size", "row_length", "codec", "teacher", "tokenizer", "tokens", "splits", "seed"),
    *("bos_id", "eos_id", "mask_id", "format_version"),
)


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizationConfig) -> torch.optim.AdamW:
    """AdamW with the fused kernel, except over sharded parameters."""
    parameters = list(parameters)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    betas, kernels = (config.beta1, config.beta2), {"fused": not sharded, "foreach": sharded}
    return torch.optim.AdamW(parameters, config.learning_rate, betas, weight_decay=config.weight_decay, **kernels)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global L2 norm of at most ``max_norm``; returns the norm before, float32."""
    norm = clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ExponentialMovingAverage:
    """Shadow weights s <- s - (1 - d) (s - w), by parameter name, in the weights' precision and sharding.

    d = min(``decay``, (1 + n) / (10 + n)) at update n = 1, 2, ...
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.shadows = {name: w.detach().clone() for name, w in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.num_updates += 1
        shadows, weights = list(self.shadows.values()), list(self._parameters.values())
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(shadows, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module carries the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, shadow in self.shadows.items():
            kept = self._parameters[name].clone()
            self._parameters[name].copy_(shadow)
            shadow.copy_(kept)


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
        contents = zip(FILES, (self.student.state_dict(), self.ema.shadows, moments), strict=True)
        return {name: gather_full(tensors, accelerator) for name, tensors in contents}


class CheckpointFolder:
    """The checkpoints of one run, in ``OUT/checkpoints``: the newest, and multiples of some step."""

    def __init__(self, directory: Path, keep_last: int, keep_every_steps: int | None) -> None:
        self.directory = directory
        self._keep_last, self._keep_every = keep_last, keep_every_steps

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return checkpoint_steps(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / f"{PREFIX}{step:08d}"

    def save(self, step: int, trainee: Trainee, state: dict[str, Any], accelerator: Accelerator) -> None:
        """Write a checkpoint and prune older ones; every process must call it.

        ``state`` is ``run``, ``stream``, ``window`` and ``validation`` of :class:`~trainer.training.resume.State`.
        All processes raise GdistillError when the files cannot be written.
        """
        tensors = trainee.gather(accelerator)
        counts = {"step": step, "ema_num_updates": trainee.ema.num_updates, "format_version": FORMAT_VERSION}

        def write() -> None:
            self._remove_unfinished()
            temporary = self.directory / f"{UNFINISHED}{PREFIX}{step:08d}"
            try:
                temporary.mkdir(parents=True)
                for name, content in tensors.items():
                    save_file(content, temporary / name)
                document = {**state, **counts, "files": {name: sha256_file(temporary / name) for name in tensors}}
                write_json_atomic(temporary / STATE_FILE, {**document, "sha256": seal(document)})
                publish_folder(temporary, self.path(step))
            finally:
                self._remove_unfinished()
            steps = self.steps()
            kept = {*steps[-self._keep_last :], *(s for s in steps if self._keep_every and s % self._keep_every == 0)}
            for old in set(steps) - kept:
                # By another name: what a kill leaves of it is no checkpoint, and goes with the next save.
                shutil.rmtree(self.path(old).rename(self.directory / f"{UNFINISHED}{PREFIX}{old:08d}"))

        on_main_process(write, accelerator)

    def _remove_unfinished(self) -> None:
        """What a write that died has left: the run's lock is held, so nobody is writing it."""
        for folder in self.directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(folder)


def seal(document: Mapping[str, Any]) -> str:
    """Hash of a ``state.json``'s fields but ``sha256``, where it is kept."""
    return hashlib.sha256(canonical_json({**document, "sha256": None})).hexdigest()


def run_identity(config: RunConfig, manifest: Manifest, init_from: Path | None) -> dict[str, Any]:
    """Everything that decides what a run computes, as JSON.

    First weights are named by their content; a run that has begun needs their files no longer.
    """
    start = None
    if init_from is not None:
        from trainer.initial_weights import find_source

        start = {"weights_sha256": None, "place": str(init_from)}
        with suppress(UsageError):
            start["weights_sha256"] = find_source(init_from).weights_sha256
    document = manifest.to_json()
    store = {**{name: document[name] for name in STORE_FIELDS}, "sha256": manifest.sha256}
    return {"config": to_mapping(config), "store": store, "init_from": start}
