"""Wall time of a training step: ours against plainly dense, and against an online teacher.

    python -m benchmarks.training_step [--preset small] [--batch-size 8]

Every step is whole: rows read from shards, noise decoded, forward, backward, clipping, AdamW. The
dense step is measured twice: decoding its noise as ours does, and with xi given in memory for free.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.measure import interleaved_seconds, machine
from benchmarks.steps import dense_gumbels, dense_loss, finish_step, online_batch, tiled_loss
from benchmarks.synthetic import make_student, make_teacher, read_batch, write_store
from shards.atomic import write_json_atomic
from shards.noise.philox import use_noise_kernel
from shards.store.store import ShardStore
from trainer.objective.batch import Batch
from trainer.students.registry import StudentSettings, read_preset
from trainer.training.construction import make_optimizer
from trainer.training.settings import OptimizationConfig

LOSS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def measure_steps(
    store: ShardStore,
    settings: StudentSettings,
    batch_size: int,
    device: torch.device,
    repeats: int,
    teacher_shape: tuple[int, int, int] | None,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Seconds of each step and their ratios; the losses must agree first."""
    vocab_size, row_length = store.manifest.vocab_size, store.manifest.row_length
    student = make_student(settings, row_length, vocab_size, device)
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))
    batch = read_batch(store, batch_size, device)
    xi = dense_gumbels(batch)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    with autocast():
        losses = {
            "ours": float(tiled_loss(student, batch).detach()),
            "dense": float(dense_loss(student, batch, xi).detach()),
        }
    if abs(losses["ours"] / losses["dense"] - 1) > LOSS_TOLERANCES[dtype]:
        raise RuntimeError(f"the two formulations disagree: {losses}")

    def step_of(loss_of: Callable[[], Tensor]) -> Callable[[], object]:
        def step() -> object:
            with autocast():
                loss = loss_of()
            return finish_step([loss], student, optimizer)

        return step

    def read() -> Batch:
        return read_batch(store, batch_size, device)

    def dense() -> Tensor:
        batch = read()
        return dense_loss(student, batch, dense_gumbels(batch))

    work = {
        "ours": step_of(lambda: tiled_loss(student, read())),
        "dense": step_of(dense),
        "dense, xi in memory": step_of(lambda: dense_loss(student, batch, xi)),
    }
    if teacher_shape is not None:
        teacher = make_teacher(*teacher_shape, vocab_size, device).to(dtype)
        work["online teacher"] = step_of(lambda: tiled_loss(student, online_batch(teacher, read())))
    seconds = {k: min(v) for k, v in interleaved_seconds(work, device, repeats=repeats).items()}
    found: dict[str, object] = {
        "losses": losses,
        "seconds": seconds,
        "tokens_per_second": {k: batch_size * row_length / v for k, v in seconds.items()},
        "ratio_to_dense": seconds["ours"] / seconds["dense"],
        "ratio_to_dense_given_xi": seconds["ours"] / seconds["dense, xi in memory"],
    }
    if "online teacher" in seconds:
        found["decoupling_gain"] = seconds["online teacher"] / seconds["ours"]
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/training_step.json"
    ),
    presets: Annotated[str, typer.Option(help="Student presets, comma-separated.")] = "tiny,small",
    codecs: Annotated[str, typer.Option(help="Codecs, comma-separated.")] = "posterior,full",
    batch_size: int = 16,
    row_length: int = 128,
    vocab_size: int = 50257,
    repeats: int = 3,
    dtypes: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "float32,bfloat16",
    teacher: Annotated[
        str, typer.Option(help="layers,width,heads; empty for none.")
    ] = "36,1280,20",
    device: str = "cpu",
    noise_kernel: Annotated[str, typer.Option(help="eager or compiled, on all sides.")] = "eager",
) -> None:
    """Measure every preset and codec, write the JSON, print the ratios."""
    target, results = torch.device(device), {}
    use_noise_kernel(noise_kernel, target)
    shape = tuple(int(part) for part in teacher.split(",")) if teacher else None
    for codec in codecs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            store = write_store(Path(folder) / "store", codec, batch_size, row_length, vocab_size)
            for preset in presets.split(","):
                settings = StudentSettings(
                    **{**read_preset(preset), "conditioning": "gumbel", "dropout": 0.0}
                )
                for dtype in dtypes.split(","):
                    work = (store, settings, batch_size, target, repeats, shape)
                    found = measure_steps(*work, getattr(torch, dtype))
                    name = f"{preset}, {codec}, {dtype}"
                    results[name] = found
                    keys = ("ratio_to_dense", "ratio_to_dense_given_xi", "decoupling_gain")
                    shown = "; ".join(f"{k} {found[k]:.3f}" for k in keys if k in found)
                    print(f"{name}: {shown}", flush=True)
    size = {
        "noise_kernel": noise_kernel,
        "batch_size": batch_size,
        "row_length": row_length,
        "vocab_size": vocab_size,
    }
    record = {"machine": machine(target), "shape": size, "teacher": teacher, "steps": results}
    write_json_atomic(out, {**record, "bars": {"ratio_to_dense": 0.6}})


if __name__ == "__main__":
    typer.run(main)
