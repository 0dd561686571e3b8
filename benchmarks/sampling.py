"""Tokens per second of every sampler; weights and rows are random, shapes true.

    python -m benchmarks.sampling [--shape auto|paper|scaled|toy] [--device auto] [--out DIR]

``paper`` is the paper's student (12 x 768, V 50257, rows of 1024) for a GPU; ``scaled`` keeps its
proportions for a CPU; ``toy`` ends in seconds and measures nothing. Each measurement fills the last
``num_filled`` positions of full-length rows: a forward pass costs what it costs in a whole sample,
and one-token-per-pass samplers end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import interleaved_seconds, machine
from benchmarks.synthetic import make_student
from shards.atomic import write_json_atomic
from shards.console import without_library_bars
from shards.language_model.forward import resolve_device
from trainer.sampling.adaptive import AdaptiveSampler
from trainer.sampling.block import BlockSampler, SequentialSampler
from trainer.sampling.fill import AncestralSampler, Sampler, SampleResult
from trainer.sampling.noise import sampling_noise
from trainer.sampling.orders import FirstHittingSampler
from trainer.students.registry import Student, StudentSettings, read_preset

BLOCK_SIZE = 4
LARGE_BATCH = 16


@dataclass(frozen=True)
class Shape:
    """What is measured at; of each row ``num_filled`` positions, ``nfe`` of ancestral sampling."""

    settings: StudentSettings
    vocab_size: int
    row_length: int
    num_filled: int
    batch_size: int
    nfe: tuple[int, ...]
    repeats: int = 3


SHAPES = {
    "paper": Shape(
        StudentSettings(**{**read_preset("small"), "conditioning": "none"}),
        vocab_size=50257, row_length=1024, num_filled=256, batch_size=16, nfe=(8, 32, 128),
    ),
    "scaled": Shape(
        StudentSettings(hidden_size=192, num_layers=4, num_heads=3),
        vocab_size=2048, row_length=1024, num_filled=32, batch_size=4, nfe=(8, 32),
    ),
    "toy": Shape(
        StudentSettings(hidden_size=16, num_layers=1, num_heads=1, condition_size=8),
        vocab_size=31, row_length=16, num_filled=8, batch_size=2, nfe=(2,), repeats=1,
    ),
}  # fmt: skip


@dataclass
class Trial:
    """One sampler on one student, rows per call, and what the calls returned."""

    name: str
    student: Student
    sampler: Sampler
    batch_size: int
    shape: Shape
    precision: torch.dtype
    results: list[SampleResult] = field(default_factory=list)

    def rows(self) -> Tensor:
        """Rows whose last positions are to be filled."""
        shape, generator = self.shape, torch.Generator().manual_seed(0)
        size = (self.batch_size, shape.row_length)
        rows = torch.randint(shape.vocab_size, size, generator=generator)
        rows[:, -shape.num_filled :] = self.student.mask_id
        return rows.to(self.student.device)

    def __call__(self) -> None:
        """Draw the samples once."""
        tokens, device = self.rows(), self.student.device
        ids = torch.arange(self.batch_size, device=device)
        enabled = self.precision != torch.float32
        with torch.autocast(device.type, self.precision, enabled=enabled):
            noise = None
            if self.student.is_conditioned:
                noise = sampling_noise(0, ids, self.shape.row_length, self.shape.vocab_size)
            self.results.append(self.sampler.sample(self.student, tokens, ids, noise, 0))


def save_verifier(folder: Path, shape: Shape) -> str:
    """A causal model of about a quarter of the student's layers."""
    width, layers = shape.settings.hidden_size, max(1, shape.settings.num_layers // 4)
    sizes = {"vocab_size": shape.vocab_size, "max_position_embeddings": shape.row_length}
    sizes |= {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=shape.settings.num_heads)
    torch.manual_seed(0)
    with without_library_bars():
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_trials(shape: Shape, device: torch.device, precision: torch.dtype, verifier: str) -> list[Trial]:
    """Everything that is measured."""

    def student(kind: str, **changes: Any) -> Student:
        settings = replace(shape.settings, **changes)
        return make_student(kind, settings, shape.row_length, shape.vocab_size, device).eval()

    mdlm, gumbel = student("mdlm"), student("mdlm", conditioning="gumbel")
    blocks, sequential = student("bd3lm", block_size=BLOCK_SIZE), student("ar")

    def trial(name: str, student: Student, sampler: Sampler, batch: int | None = None) -> Trial:
        return Trial(name, student, sampler, batch or shape.batch_size, shape, precision)

    least, many = shape.nfe[0], LARGE_BATCH
    nucleus = AncestralSampler(nfe=least, nucleus_p=0.9)
    apd = AdaptiveSampler(verifier=verifier, mixture_weight=0.9, max_lookahead=16)
    return [
        *(trial(f"ancestral, NFE {n}", mdlm, AncestralSampler(nfe=n)) for n in shape.nfe),
        trial(f"ancestral, NFE {least}, nucleus 0.9", mdlm, nucleus),
        trial(f"ancestral + Gumbel, NFE {least}", gumbel, AncestralSampler(nfe=least)),
        trial("first-hitting, batch 1", mdlm, FirstHittingSampler(), 1),
        trial(f"first-hitting, batch {many}", mdlm, FirstHittingSampler(), many),
        trial("block 4, cache", blocks, BlockSampler()),
        trial("block 4, no cache", blocks, BlockSampler(use_cache=False)),
        trial("block 4, first-hitting, cache", blocks, BlockSampler(inner="first_hitting")),
        trial("APD, R 0.9, lookahead 16", mdlm, apd),
        trial("sequential (AR)", sequential, SequentialSampler()),
    ]


def summarise(trial: Trial, seconds: list[float]) -> dict[str, Any]:
    """One row of the table."""
    filled = trial.batch_size * trial.shape.num_filled
    result = trial.results[-1]
    return {
        "name": trial.name,
        "batch_size": trial.batch_size,
        "nfe_mean": float(result.nfe.double().mean()),
        "seconds": seconds,
        "tokens_per_second": filled / median(seconds),
        "details": {name: float(v.double().mean()) for name, v in result.details.items()},
    }


def run_benchmark(shape: Shape, device: torch.device, precision: torch.dtype) -> dict[str, Any]:
    """Measure every sampler in turns."""
    with tempfile.TemporaryDirectory() as folder:
        trials = make_trials(shape, device, precision, save_verifier(Path(folder), shape))
        work: dict[str, Callable[[], object]] = {trial.name: trial for trial in trials}
        seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    rows = [summarise(trial, seconds[trial.name]) for trial in trials]
    speed = {row["name"]: row["tokens_per_second"] for row in rows}
    many, one = (speed[f"first-hitting, batch {size}"] for size in (LARGE_BATCH, 1))
    cached = speed["block 4, cache"] / speed["block 4, no cache"]
    about = {"machine": machine(device), "precision": str(precision).removeprefix("torch.")}
    about |= {"shape": asdict(shape), "parameters": trials[0].student.num_parameters()}
    ratios = {"block_cache_over_no_cache": cached, "first_hitting_batch_16_over_1": many / one}
    return {**about, "samplers": rows, "ratios": ratios}


def main(
    shape: Literal["auto", "paper", "scaled", "toy"] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = Path("benchmarks/results"),
) -> None:
    """Measure, print the table, write the JSON; the precision is bf16 on CUDA, unless given."""
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    name = ("paper" if on_gpu else "scaled") if shape == "auto" else shape
    is_bf16 = precision == "bf16" or (precision == "auto" and on_gpu)
    report = run_benchmark(SHAPES[name], where, torch.bfloat16 if is_bf16 else torch.float32)
    form = "{name:<36} rows {batch_size:>3} NFE {nfe_mean:>6.1f} tokens/s {tokens_per_second:>9.1f}"
    print(*(form.format(**row) for row in report["samplers"]), sep="\n")
    print(*(f"{name}: {value:.2f}" for name, value in report["ratios"].items()), sep="\n")
    write_json_atomic(out / f"sampling-{where.type}-{name}.json", report)


if __name__ == "__main__":
    typer.run(main)
