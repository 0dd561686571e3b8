"""Stage 2 against the bare teacher: how much longer than its forward passes does extraction take?

    python -m benchmarks.extract --teacher stories260K --rows 512 --row-length 512 --threads 1
    python -m benchmarks.extract --teacher gpt2-small --rows 24 --row-length 256 --threads 1
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

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from benchmarks.measure import interleaved_seconds, machine
from pipeline.corpus.config import corpus_config
from pipeline.extract import Extractor, resources_on
from pipeline.run import rows_per_unit
from pipeline.settings import StoreSettings, Worker
from pipeline.teacher import Teacher, automatic_batch_size, rows_tensor
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.tokenizer import load_tokenizer
from shards.atomic import write_json_atomic
from shards.codec.protocol import Codec
from shards.codec.registry import CODECS, codec_parameters, make_codec
from shards.console import Bar
from shards.language_model.forward import BatchSize, resolve_device
from shards.language_model.loading import find_pretrained
from shards.store.manifest import Manifest
from shards.store.writer import ShardWriter

SHAPES = {
    "gpt2-small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
}
LOGIT_SPREAD_NATS = 4.0
BARS = {"cpu": 1.15, "cuda": 1.10}
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


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
            for part in BatchSize(self.batch_size).parts(len(tokens)):
                batch = tokens[part].to(self.teacher.device)
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
        vocab_size = self.teacher.vocab_size
        made = {}
        if "unigram_log_probs" in codec.resource_names:
            zipf = -np.log(np.arange(1, vocab_size + 1, dtype=np.float32))
            made["unigram_log_probs"] = (zipf - np.log(np.exp(zipf).sum())).astype(np.float32)
        if "lm_head" in codec.resource_names:
            made["lm_head"] = self.teacher.lm_head[0].numpy()
        return made

    def manifest(self, codec: Codec) -> Manifest:
        """Shards of a quarter of the rows, so that writing can overlap."""
        arrays = codec.array_specs(self.teacher.vocab_size, self.teacher.hidden_size)
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
            teacher={},
            tokenizer={},
            tokens={},
            seed=0,
            versions={},
        )


def main() -> None:
    arguments = _arguments()
    device = resolve_device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(arguments, device, Path(folder))
        result = measure(case, arguments.codec or list(CODECS), arguments.repeats)
    result = {"teacher": arguments.teacher, "dtype": arguments.dtype, **result}
    path = arguments.out / f"extract-{arguments.name or arguments.teacher}.json"
    load = {"load_average_1min": round(os.getloadavg()[0], 1)}
    write_json_atomic(path, {"machine": machine(device) | load, **result})
    print(json.dumps(result, indent=2))
    if not result["default_codec_meets_bar"]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", choices=["stories260K", *SHAPES], default="gpt2-small")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    numbers = {"rows": 8, "row-length": 256, "batch-size": None, "threads": None, "repeats": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--codec", action="append", choices=list(CODECS))
    return parser.parse_args()


def make_case(arguments: argparse.Namespace, device: torch.device, folder: Path) -> Case:
    """The teacher, its rows and the batch size that extraction would choose."""
    if arguments.teacher == "stories260K":
        source = arguments.shared / "data" / "stories260K"
        rows = _story_rows(arguments, source, folder)
    else:
        source = random_teacher(SHAPES[arguments.teacher], folder / "teacher")
        draw = np.random.default_rng(0)
        rows = draw.integers(50257, size=(arguments.rows, arguments.row_length), dtype=np.int32)
    return case_of(source, arguments.dtype, device, rows, folder, arguments.batch_size)


def case_of(
    source: Path,
    dtype: str,
    device: torch.device,
    rows: np.ndarray,
    folder: Path,
    batch_size: int | None = None,
) -> Case:
    """A teacher as extraction loads it, beside the same as transformers does."""
    teacher = Teacher.load(find_pretrained(source), dtype, device)
    bare = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    weight_bytes = sum(p.numel() * p.element_size() for p in bare.parameters())
    sizes = (rows.shape[1], teacher.files.num_logits, weight_bytes, device)
    batch_size = batch_size or automatic_batch_size(*sizes)
    return Case(teacher, bare.to(device), rows, batch_size, folder / "store")


def _story_rows(arguments: argparse.Namespace, teacher: Path, folder: Path) -> np.ndarray:
    text = arguments.shared / "data" / "tinystories" / "tinystories_a.txt"
    config = corpus_config(f"text:{text}", {"row_length": arguments.row_length})
    tokenizer = load_tokenizer(teacher)
    return prepare_tokens(config, tokenizer, folder).read_rows("train", 0, arguments.rows)


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
    made = {name: make_codec(name) for name in codecs}
    work: dict[str, Callable[[], object]] = {"bare": case.run_bare}
    for name, codec in made.items():
        work[name] = partial(case.run_stage2, codec)
    cpu_seconds: dict[str, list[float]] = {name: [] for name in work}

    def timed(name: str) -> None:
        start = time.process_time()
        work[name]()
        cpu_seconds[name].append(time.process_time() - start)

    both = {name: partial(timed, name) for name in work}
    seconds = interleaved_seconds(both, case.teacher.device, repeats=repeats)
    num_tokens = case.rows.size
    bare = min(seconds["bare"])
    figures = {
        name: {
            "seconds": [round(value, 4) for value in seconds[name]],
            "cpu_seconds": [round(value, 4) for value in cpu_seconds[name]],
            "ratio": min(seconds[name]) / bare,
            "cpu_ratio": min(cpu_seconds[name]) / min(cpu_seconds["bare"]),
            "tokens_per_second": num_tokens / min(seconds[name]),
        }
        for name in work
    }
    bar = BARS[case.teacher.device.type]
    default = "posterior" if "posterior" in made else codecs[0]
    return {
        "rows": list(case.rows.shape),
        "batch_size": case.batch_size,
        "vocab_size": case.teacher.vocab_size,
        "num_parameters": sum(p.numel() for p in case.bare.parameters()),
        "figures": figures,
        "model_flops_utilisation": _utilisation(case, num_tokens / bare),
        "bar": bar,
        "default_codec_meets_bar": figures[default]["ratio"] <= bar,
    }


def _utilisation(case: Case, tokens_per_second: float) -> float | None:
    """Of the bare forward: 2 FLOPs per parameter and token against the device's bf16 peak."""
    if case.teacher.device.type != "cuda":
        return None
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name(case.teacher.device))
    weights = sum(p.numel() for p in case.bare.parameters())
    return None if peak is None else 2 * weights * tokens_per_second / peak


if __name__ == "__main__":
    main()
