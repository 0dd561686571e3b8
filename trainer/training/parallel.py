"""Processes, devices and sharding: the only place that knows there may be more than one process.

Accelerate opens the process group that the launcher describes (``accelerate launch``, ``torchrun``,
``srun`` or none) and wraps the student for DDP; with ``sharding = "fsdp"`` torch's ``fully_shard``
cuts weights, optimiser and moving average into one piece per process instead.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
)
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shards.errors import GdistillError, UsageError
from trainer.students.registry import LossOutput, Student
from trainer.training.settings import TrainingConfig


def open_accelerator(config: TrainingConfig, logging_dir: Path) -> Accelerator:
    """The process's place in the world, on the device asked for, with trackers; a UsageError where one is absent."""
    available = {str(tracker.value) for tracker in get_available_trackers()}
    for tracker in set(config.trackers) - available:
        where, remedy = "training.trackers", f"pip install {tracker}, or leave it out"
        raise UsageError("a tracker is not installed", where=where, got=tracker, remedy=remedy)
    if config.device == "cuda" and not torch.cuda.is_available():
        remedy = "use training.device=cpu, or a machine with a GPU and a CUDA build of torch"
        raise UsageError("CUDA is asked for and absent", where="training.device", remedy=remedy)
    follow_srun(os.environ)
    if not torch.distributed.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        cpu=config.device == "cpu" or not torch.cuda.is_available(),
        log_with=list(config.trackers) or None,  # type: ignore[arg-type]
        project_config=ProjectConfiguration(logging_dir=str(logging_dir)),
        mixed_precision="no",  # autocast is opened in TrainingStep, for DDP and FSDP alike
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(minutes=30)),
        ],
    )


def follow_srun(environment: MutableMapping[str, str]) -> None:
    """What ``srun`` says of its tasks, in torchrun's words; nothing where torchrun has spoken.

    A batch script sees SLURM_NTASKS too and is one process: only a step (``srun``) has an id. All
    tasks meet on the step's first node, at a port that follows from the job's number.
    """
    if "RANK" in environment or not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys():
        return
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])
    job = int(environment.get("SLURM_JOB_ID") or 0)
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=tasks,
        LOCAL_RANK=environment.get("SLURM_LOCALID", "0"),
        MASTER_ADDR=environment.get("MASTER_ADDR") or first or "127.0.0.1",
        MASTER_PORT=environment.get("MASTER_PORT") or str(20_000 + job % 20_000),
    )


class TrainingStep(nn.Module):
    """The student's loss as a forward pass, which is what DDP and FSDP hook into."""

    def __init__(self, student: Student, precision: str) -> None:
        super().__init__()
        self.student, self.precision = student, precision

    def forward(self, batch: object, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """``student.loss`` under autocast; weights stay float32."""
        device = self.student.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.student.loss(batch, time_bounds=time_bounds)  # type: ignore[arg-type]


def parallelize(step: TrainingStep, accelerator: Accelerator, sharding: str) -> nn.Module:
    """The step on its device, wrapped for the world it runs in."""
    step.to(accelerator.device)
    if accelerator.num_processes == 1:
        return step
    if sharding == "fsdp" or accelerator.distributed_type == DistributedType.FSDP:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for part in (*step.student.sharded_blocks, step):
            fully_shard(part, mesh=mesh)
        return step
    with warnings.catch_warnings():
        # Accelerate passes broadcast_buffers on; torch has a new name for it.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return accelerator.prepare_model(step)  # type: ignore[no-any-return]


def without_sync(module: nn.Module, accelerator: Accelerator, last: bool) -> AbstractContextManager:
    """Gradients are exchanged at the last micro-batch of a step only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif not last:
        return accelerator.no_sync(module)
    return nullcontext()


def gather_full(tensors: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """Whole copies on the main process's CPU of tensors that may be sharded, one at a time; {} elsewhere.

    Every process must call it with the same names in the same order.
    """
    kept = {}
    for name, tensor in tensors.items():
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if accelerator.is_main_process:
            kept[name] = whole.to("cpu", copy=True).contiguous()
    return kept


def scatter_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` in the device and sharding of ``like``."""
    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def sum_over_processes(values: list[float], accelerator: Accelerator) -> list[float]:
    """Element-wise sums in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(total, "sum").tolist()  # type: ignore[union-attr]


def on_main_process(work: Callable[[], object], accelerator: Accelerator) -> None:
    """Work of the main process that the others wait for; its GdistillError, or full disk, is everyone's.

    Without that a full disk would leave the others in a barrier until it times out.
    """
    failure: GdistillError | None = None
    if accelerator.is_main_process:
        try:
            work()
        except GdistillError as error:
            failure = error
        except (OSError, SafetensorError) as error:
            failure = cannot_write(error)
    (failure,) = broadcast_object_list([failure])
    if failure is not None:
        raise failure


def cannot_write(error: Exception, where: object = "") -> GdistillError:
    """A full disk and its like in one line; safetensors has an error of its own for them."""
    place, reason = getattr(error, "filename", None) or where, getattr(error, "strerror", None) or error
    return GdistillError("cannot write", where=place, got=reason, remedy="make room and run the same command again")


def leave() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
