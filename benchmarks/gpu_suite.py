"""Every GPU figure in one run: correctness first, then time, one JSON. No network, weights or data.

The JSON is written after the checks and again after each part, so a session that ends early keeps
what it has. A part or check that fails is recorded as an error and the rest goes on; the exit code
is 1 then, and figures beside a failed check are to be read with it.

    python -m benchmarks.gpu_suite [--shape paper|toy] [--device cuda] [--out ...]

Shapes are true (V 50257, student 12 x 768, teacher 36 x 1280), weights and rows random. The paper
shape is planned to end within 8 minutes on one H200: before each part the suite looks at the clock,
and says in the JSON what it left out for want of time. ``toy`` runs anywhere in seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.conditioner import run_benchmark
from benchmarks.gpu_checks import check_everything, describe
from benchmarks.measure import interleaved_seconds, machine, median
from benchmarks.steps import finish_step, online_batch, tiled_loss, update
from benchmarks.synthetic import make_student, make_teacher, random_batch
from shards.base import GdistillError, UsageError, run_command, write_json_atomic
from shards.language_model import resolve_device
from shards.noise import noise_kernel, use_noise_kernel
from trainer.objective import Batch
from trainer.students import BD3LM, MDLM, BD3LMConfig, StudentSettings
from trainer.training import OptimizationConfig, make_optimizer

TIME_LIMIT_SECONDS = 450
H200_BF16_FLOPS = 989e12


@dataclass(frozen=True)
class SuiteShape:
    """What the suite runs at.

    Attributes:
        vocab_size: V.
        student: Settings of the student.
        teacher: Layers, width, heads of the online teacher.
        conditioner: Width and masked tokens of the conditioner benchmark.
        rows: (row length, global batch, micro-batch) of each training benchmark.
        dtype: Autocast precision of the steps.
        repeats: Timed repetitions.
    """

    vocab_size: int
    student: StudentSettings
    teacher: tuple[int, int, int]
    conditioner: tuple[int, int]
    rows: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    repeats: int


PAPER = SuiteShape(
    vocab_size=50257,
    student=StudentSettings(conditioning="gumbel", dropout=0.0),
    teacher=(36, 1280, 20),
    conditioner=(768, 4096),
    rows=((128, 512, 128), (1024, 64, 16)),
    dtype=torch.bfloat16,
    repeats=3,
)
TOY = SuiteShape(
    vocab_size=97,
    student=StudentSettings(
        hidden_size=32, num_layers=1, num_heads=2, condition_size=8, dropout=0.0,
        conditioning="gumbel",
    ),
    teacher=(1, 32, 2),
    conditioner=(16, 32),
    rows=((16, 4, 2), (32, 2, 1)),
    dtype=torch.float32,
    repeats=1,
)  # fmt: skip
SHAPES = {"paper": PAPER, "toy": TOY}


def step_flops(student: MDLM, num_tokens: int, row_length: int, masked_share: float) -> float:
    """Floating-point operations of forward and backward: 6 per weight and token that it meets.

    Backbone: every token. Head and noise projection: masked tokens only; the noise is no
    parameter, so the projection has no gradient towards its input (4 per weight). Attention:
    12 * L * D per layer and token. Recomputed noise is not counted.
    """
    settings = student.settings
    blocks = sum(p.numel() for p in student.backbone.blocks.parameters())
    head = student.backbone.output_layer.linear.weight.numel()
    noise = 0 if student.conditioner is None else student.conditioner.weight.numel()
    attention = 12 * settings.num_layers * row_length * settings.hidden_size
    masked = masked_share * (6 * head + 4 * noise)
    return num_tokens * (6 * blocks + attention + masked)


def training_throughput(
    shape: SuiteShape, row_length: int, batch_size: int, micro: int, device: torch.device
) -> dict[str, Any]:
    """Tokens per second from stored teacher distributions and with an online teacher; MFU.

    A step is ``batch_size / micro`` micro-batches of forward and backward and one update.
    """
    student = make_student(shape.student, row_length, shape.vocab_size, device)
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))
    teacher = make_teacher(*shape.teacher, shape.vocab_size, device, max(row_length, 8))
    teacher = teacher.to(shape.dtype)
    parts = [random_batch(micro, row_length, shape.vocab_size, device, i * micro, batch_size)
             for i in range(batch_size // micro)]  # fmt: skip

    def step(noise_of: Callable[[Batch], Batch]) -> None:
        for part in parts:
            with torch.autocast(device.type, shape.dtype, enabled=shape.dtype != torch.float32):
                loss = tiled_loss(student, noise_of(part)) / len(parts)
            loss.backward()
        update(student, optimizer)

    work = {
        "from shards": lambda: step(lambda part: part),
        "online teacher": lambda: step(lambda part: online_batch(teacher, part)),
    }
    seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    chosen = {name: median(values) for name, values in seconds.items()}
    tokens = batch_size * row_length
    flops = step_flops(student, tokens, row_length, masked_share=0.5)
    return {
        "row_length": row_length,
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "seconds": chosen,
        "tokens_per_second": {name: tokens / value for name, value in chosen.items()},
        "decoupling_gain": chosen["online teacher"] / chosen["from shards"],
        "model_flops_per_step": flops,
        "mfu_of_h200_bf16": flops / chosen["from shards"] / H200_BF16_FLOPS,
    }


def block_training(shape: SuiteShape, device: torch.device) -> dict[str, Any]:
    """BD3-LM steps with SDPA and with FlexAttention (the latter on CUDA only)."""
    row_length, _, micro = shape.rows[-1]
    paths = ("sdpa", "flex") if device.type == "cuda" else ("sdpa",)
    batch = random_batch(micro, row_length, shape.vocab_size, device, 0, micro)
    work = {path: _block_step(shape, path, row_length, batch, device) for path in paths}
    seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    chosen = {name: median(values) for name, values in seconds.items()}
    return {"row_length": row_length, "batch_size": micro, "block_size": 4, "seconds": chosen}


def _block_step(
    shape: SuiteShape, path: str, row_length: int, batch: Batch, device: torch.device
) -> Callable[[], object]:
    settings = replace(shape.student, block_size=4, attention=path)
    config = BD3LMConfig.build(settings, vocab_size=shape.vocab_size, row_length=row_length)
    student = BD3LM(config).to(device).train()
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))

    def step() -> object:
        with torch.autocast(device.type, shape.dtype, enabled=shape.dtype != torch.float32):
            loss = tiled_loss(student, batch)
        return finish_step(loss, student, optimizer)

    return step


Found = dict[str, Any]


def suite_parts(shape: SuiteShape, device: torch.device) -> dict[str, Callable[[], Found]]:
    """What is timed, by name, in the order of its worth."""
    width, masked = shape.conditioner

    def conditioner(dtype: torch.dtype) -> Callable[[], Found]:
        return lambda: run_benchmark(
            shape.vocab_size, width, masked, device=device, repeats=shape.repeats, dtype=dtype
        )

    parts = {"conditioner float32": conditioner(torch.float32)}
    if shape.dtype != torch.float32:
        parts["conditioner autocast"] = conditioner(shape.dtype)
    for rows in shape.rows:
        parts[f"training, rows of {rows[0]}"] = lambda rows=rows: training_throughput(
            shape, *rows, device
        )
    parts["block training"] = lambda: block_training(shape, device)
    return parts


def run_suite(
    shape: SuiteShape, device: torch.device, keep: Callable[[Found], None] = lambda _: None
) -> Found:
    """Checks, then each part while there is time; what fails is recorded, and the rest goes on.

    Args:
        keep: Given everything found so far, after the checks and after each part.
    """
    start = time.monotonic()
    obstacle = use_noise_kernel("auto", device)
    kernel = noise_kernel(device) + (f": {obstacle}" if obstacle else "")
    checks = check_everything(shape.vocab_size, device)
    found: Found = {"noise_kernel": kernel, "checks": checks, "left_out_for_time": []}
    keep(found)
    for name, part in suite_parts(shape, device).items():
        _free_memory(device)
        if time.monotonic() - start > TIME_LIMIT_SECONDS:
            found["left_out_for_time"].append(name)
            continue
        found[name] = attempt(part)
        found["seconds"] = time.monotonic() - start
        verdict = found[name].get("error", "done")
        print(f"{name}: {verdict} after {found['seconds']:.0f} s", flush=True)
        keep(found)
    keep(found)
    return found


def attempt(part: Callable[[], Found]) -> Found:
    """What a part finds, or ``{"error": ...}``."""
    try:
        return part()
    except Exception as error:  # the other parts are worth their while
        return {"error": describe(error)}


def _free_memory(device: torch.device) -> None:
    """Room for the next part; after a fault that leaves the device unusable, that will tell."""
    gc.collect()
    if device.type == "cuda":
        attempt(lambda: {"freed": torch.cuda.empty_cache()})


def failures(found: Found) -> list[str]:
    """Checks that did not pass and parts that ended in an error."""
    wrong = [name for name, check in found["checks"].items() if not check["passed"]]
    parts = [name for name, part in found.items() if isinstance(part, dict) and "error" in part]
    return [f"check {name}" for name in wrong] + parts


def bars_of(found: Found) -> dict[str, Found]:
    """The bars set for a GPU, the figure found for each, and whether it is met."""
    bars: dict[str, Found] = {}
    for name, part in found.items():
        if not isinstance(part, dict) or "error" in part:
            continue
        if name.startswith("conditioner "):
            ratio = part["noise in memory"]["time_ratio"]
            bars[f"{name}: time <= 0.5x dense"] = {"figure": ratio, "met": ratio <= 0.5}
        if name.startswith("training, "):
            gain = part["decoupling_gain"]
            bar = f"{name}: >= 2.5x tokens per second of online"
            bars[bar] = {"figure": gain, "met": gain >= 2.5}
    return bars


def plain(value: Any) -> Any:
    """JSON-ready form: numbers that are not finite become texts, which JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main(
    shape: Annotated[str, typer.Option(help="paper or toy.")] = "paper",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/gpu_suite.json"
    ),
) -> None:
    """Run the suite and write its JSON; exit code 1 if a check or a part failed."""
    if shape not in SHAPES:
        raise UsageError("unknown shape", where="--shape", got=shape, expected=" or ".join(SHAPES))
    target = resolve_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = {"machine": machine(target), "shape": shape}

    def keep(found: Found) -> None:
        record = {**about, "failures": failures(found), "bars": bars_of(found), **found}
        write_json_atomic(out, plain(record))

    found = run_suite(SHAPES[shape], target, keep)
    for name, bar in bars_of(found).items():
        print(f"{name}: {bar['figure']:.3g} ({'met' if bar['met'] else 'not met'})")
    if wrong := failures(found):
        raise GdistillError("parts of the suite failed", where=out, got=", ".join(wrong))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
