"""Stage 2 against the bare teacher: how much longer than its forward passes does extraction take?

    python -m benchmarks.extract --teacher gpt2-small --rows 24 --threads 1
    python -m benchmarks.extract --teacher gpt2-large --dtype bfloat16 --device cuda --rows 256

Both sides see the same batches in the same process, in turns; the fastest of each counts, for
whatever else the machine does only slows. The bare side is transformers' own model, logits
computed and dropped. Ours is all of stage 2: forward pass, log-softmax, codec, compression, files
on disk with fsync, ledger. Shaped teachers have random weights, their output scaled so that the
entropy is a language model's.

``--threads`` are those of the forward pass, on both sides. Give it one less than there are cores to
see what overlaps, as on a machine whose GPU does the forward pass; without it the bare side keeps
every core busy and encoding must take its time from the forward pass.

The CPU seconds of both sides are given too. Where the machine is busy with other things, the ratio
of wall times says little; the ratio of CPU seconds is what extraction costs when nothing overlaps
and the bare side keeps every core busy: the worst case.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from benchmarks.measure import interleaved_seconds, machine
from pipeline.extract import Extractor, resources_on
from pipeline.run import rows_per_unit
from pipeline.settings import StoreSettings, Worker
from pipeline.teacher import Teacher, automatic_batch_size, rows_tensor
from shards.atomic import write_json_atomic
from shards.codec.protocol import CODECS, Codec, codec_parameters, make_codec
from shards.console import Bar
from shards.language_model.forward import BatchSize, resolve_device
from shards.language_model.loading import find_pretrained
from shards.store.manifest import Manifest
from shards.store.store import ShardWriter

SHAPES = {
    "gpt2-small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
}
LOGIT_SPREAD_NATS = 4.0
BARS = {"cpu": 1.15, "cuda": 1.10}


@dataclass
class Case:
    """One teacher with its rows and their batches."""

    teacher: Teacher
    bare: torch.nn.Module
    rows: np.ndarray
    batch_size: int
    folder: Path

    def run_bare(self) -> None:
        """transformers' forward pass over all batches; nothing is kept."""
        tokens = rows_tensor(self.rows)
        with torch.inference_mode():
            for part in tokens.split(self.batch_size):
                batch = part.to(self.teacher.device)
                _ = self.bare(input_ids=batch[:, :-1], use_cache=False).logits

    def run_stage2(self, codec: Codec) -> None:
        """Everything stage 2 does, into a fresh store."""
        shutil.rmtree(self.folder, ignore_errors=True)
        resources = self.resources(codec)
        writer = ShardWriter.create_or_resume(self.folder, self.manifest(codec), resources)
        extractor = Extractor(
            teacher=self.teacher,
            read_rows=lambda split, start, stop, note: self.rows[start:stop],
            codec=codec,
            writer=writer,
            resources=resources_on(self.teacher.device, resources),
            batch_size=BatchSize(self.batch_size),
        )
        extractor.run(writer.pending("train"), Worker(), Bar())

    def resources(self, codec: Codec) -> dict[str, np.ndarray]:
        """What the codec wants once per store; made before the clock starts by a first call."""
        made = {}
        if "unigram_log_probs" in codec.resource_names:
            zipf = -np.log(np.arange(1, self.teacher.vocab_size + 1, dtype=np.float32))
            made["unigram_log_probs"] = (zipf - np.log(np.exp(zipf).sum())).astype(np.float32)
        if "lm_head" in codec.resource_names:
            made["lm_head"] = self.teacher.lm_head[0].numpy()
        return made

    def manifest(self, codec: Codec) -> Manifest:
        """Shards of a quarter of the rows, so that writing can overlap."""
        arrays = codec.array_specs(self.teacher.vocab_size, self.teacher.files.hidden_size)
        length = self.rows.shape[1]
        shard = max(1, len(self.rows) // 4)
        chunk, shard = rows_per_unit(length, arrays, StoreSettings(rows_per_shard=shard))
        return Manifest(
            codec={"name": codec.name, "parameters": codec_parameters(codec)},
            arrays=arrays,
            vocab_size=self.teacher.vocab_size,
            row_length=length,
            splits={"train": len(self.rows)},
            rows_per_shard=shard,
            rows_per_chunk=chunk,
            seed=0,
            **{key: {} for key in ("teacher", "tokenizer", "tokens", "versions")},
        )


def main(
    teacher: Literal["gpt2-small", "gpt2-large"] = "gpt2-small",
    rows: int = 8,
    row_length: int = 256,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Of the forward pass.")] = None,
    repeats: int = 3,
    codec: Annotated[list[str] | None, typer.Option(help="One or more; all of them.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = Path("benchmarks/results"),
) -> None:
    """Measure, write extract-TEACHER.json; exit 1 where the default codec misses its bar."""
    target = resolve_device(device)
    if threads:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        source = random_teacher(SHAPES[teacher], Path(folder, "teacher"))
        draw = np.random.default_rng(0)
        tokens = draw.integers(50257, size=(rows, row_length), dtype=np.int32)
        case = case_of(source, dtype, target, tokens, Path(folder))
        result = measure(case, codec or list(CODECS), repeats)
    result = {"teacher": teacher, "dtype": dtype, **result}
    about = machine(target) | {"load_average_1min": round(os.getloadavg()[0], 1)}
    write_json_atomic(out / f"extract-{teacher}.json", {"machine": about, **result})
    print(json.dumps(result, indent=2))
    raise typer.Exit(0 if result["default_codec_meets_bar"] else 1)


def case_of(source: Path, dtype: str, device: torch.device, rows: np.ndarray, folder: Path) -> Case:
    """A teacher as extraction loads it, beside the same as transformers does."""
    teacher = Teacher.load(find_pretrained(source), dtype, device)
    bare = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    weight_bytes = sum(p.numel() * p.element_size() for p in bare.parameters())
    sizes = (rows.shape[1], teacher.files.num_logits, weight_bytes, device)
    batch_size = automatic_batch_size(*sizes)
    return Case(teacher, bare.to(device), rows, batch_size, folder / "store")


def random_teacher(shape: dict[str, int], folder: Path) -> Path:
    """A GPT-2 of that shape whose logits spread like a trained model's."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape))
    spread = LOGIT_SPREAD_NATS / (model.config.initializer_range * shape["n_embd"] ** 0.5)
    torch.nn.init.constant_(model.transformer.ln_f.weight, spread)
    model.save_pretrained(folder)
    return folder


def measure(case: Case, codecs: list[str], repeats: int) -> dict[str, object]:
    """Seconds and ratios of every codec against the bare forward, in turns."""
    work: dict[str, Callable[[], object]] = {"bare": case.run_bare}
    work |= {name: partial(case.run_stage2, make_codec(name)) for name in codecs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in work}

    def timed(name: str) -> None:
        start = time.process_time()
        work[name]()
        cpu_seconds[name].append(time.process_time() - start)

    both = {name: partial(timed, name) for name in work}
    seconds = interleaved_seconds(both, case.teacher.device, repeats=repeats)
    figures = {
        name: {
            "seconds": [round(value, 4) for value in seconds[name]],
            "cpu_seconds": [round(value, 4) for value in cpu_seconds[name]],
            "ratio": min(seconds[name]) / min(seconds["bare"]),
            "cpu_ratio": min(cpu_seconds[name]) / min(cpu_seconds["bare"]),
            "tokens_per_second": case.rows.size / min(seconds[name]),
        }
        for name in work
    }
    bar = BARS[case.teacher.device.type]
    default = "posterior" if "posterior" in codecs else codecs[0]
    return {
        "rows": list(case.rows.shape),
        "batch_size": case.batch_size,
        "vocab_size": case.teacher.vocab_size,
        "num_parameters": sum(p.numel() for p in case.bare.parameters()),
        "figures": figures,
        "bar": bar,
        "default_codec_meets_bar": figures[default]["ratio"] <= bar,
    }


if __name__ == "__main__":
    typer.run(main)
