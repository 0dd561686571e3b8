"""Fidelity against bytes per token, for every codec: ``python -m benchmarks.codecs --out DIR``.

Writes DIR/codecs.json, DIR/codecs.png and DIR/codecs.md. Two teachers: synthetic posteriors at
V = 50257, and stories260K on TinyStories when the reference data is there. For each codec and
setting: bytes per token as a store writes them (its arrays and log p of the token; the tokens
themselves, kept by every store, are left out); coupling agreement, the probability that
argmax(logits + decoded noise) is the token, with the teacher's exact logits; max and mean |error|
of xi against the exact posterior draw of the same exponentials; relative L2 error of softmax(xi) W;
tokens encoded and decoded (all V entries) per second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_layouts import id_layouts
from benchmarks.codec_measures import Exact, Measurement, embedding_weight
from benchmarks.codec_peers import DISTILLKIT_BUDGET, DISTILLKIT_RECOMMENDED, MEGATRON
from benchmarks.codec_report import draw_figure, markdown_table
from benchmarks.codec_storage import stored_bytes_per_token
from benchmarks.codec_teachers import SyntheticTeacher, TrainedTeacher
from shards.atomic import write_bytes_atomic, write_json_atomic
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.console import progress_bar
from shards.noise.philox import use_noise_kernel

Teacher = SyntheticTeacher | TrainedTeacher
REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLED_TOLERANCE = 4.5


def synthetic_settings() -> list[Measurement]:
    """What is measured at V = 50257."""
    heads = [(16, 1e-3), (32, 1e-3), (64, 1e-3), (64, 3e-4), (96, 3e-4), (128, 1e-4), (256, 1e-4)]
    return [
        *frozen_settings(),
        *(
            Measurement(
                f"posterior m={m} p>={p:g}",
                make_codec("posterior", num_entries=m, min_probability=p),
            )
            for m, p in heads
        ),
        *peer_settings(),
    ]


def trained_settings(vocab_size: int) -> list[Measurement]:
    """What is measured on the trained model."""
    return [
        *frozen_settings(top=(16, 64, 128)),
        *(
            Measurement(f"posterior m={m}", make_codec("posterior", num_entries=m))
            for m in (16, 32, 64)
        ),
        Measurement("posterior m=V", make_codec("posterior", num_entries=vocab_size)),
        Measurement("hidden int8", make_codec("hidden")),
        Measurement("hidden float16", make_codec("hidden", dtype="float16")),
        *peer_settings(),
    ]


def frozen_settings(top: Sequence[int] = (64, 128, 512)) -> list[Measurement]:
    """Codecs that store one draw."""
    return [
        Measurement("full fp16", make_codec("full")),
        Measurement("quantized 8 bit", make_codec("quantized", bits=8)),
        Measurement("quantized 4 bit", make_codec("quantized", bits=4)),
        *(Measurement(f"topk k={k}", make_codec("topk", num_entries=k)) for k in top),
        *(
            Measurement(f"seeded eps={eps:g}", make_codec("seeded", tolerance_nats=eps))
            for eps in (0.1, 0.03, 0.01, 0.003)
        ),
    ]


def peer_settings() -> list[Measurement]:
    """Other projects' formats."""
    return [
        Measurement("DistillKit-like k=50", DISTILLKIT_BUDGET, peer=True),
        Measurement("DistillKit-like k=128", DISTILLKIT_RECOMMENDED, peer=True),
        Measurement("Megatron-like k=128", MEGATRON, peer=True),
    ]


def measure(teacher: Teacher, settings: list[Measurement]) -> dict[str, Any]:
    """Run every setting over every batch; the teacher's part of codecs.json."""
    resources = teacher.resources()
    vocab_size = len(resources["unigram_log_probs"])
    weight = embedding_weight(vocab_size)
    outputs: list[TeacherOutput] = []
    facts = {"entropy_nats": 0.0, "mass_of_top_64": 0.0}
    with progress_bar(f"codecs, {teacher.name}", teacher.num_tokens) as bar:
        for output in teacher.batches():
            exact = Exact.of(output, weight)
            for setting in settings:
                setting.add(exact, resources)
            outputs.append(_own_column(output))
            probs = exact.log_probs.exp()
            facts["entropy_nats"] -= float((probs * exact.log_probs).sum())
            facts["mass_of_top_64"] += float(probs.topk(64, dim=1).values.sum())
            bar.advance(output.tokens.numel())
    num_tokens = sum(output.tokens.numel() for output in outputs)
    results = []
    for setting in settings:
        codec, arrays = setting.codec, setting.arrays
        sizes = stored_bytes_per_token(codec, arrays, outputs, vocab_size, teacher.hidden_size)
        token_bytes = sizes.pop("tokens")
        if setting.peer:  # they do not keep the token's own log-probability
            del sizes["token_log_probs"]
        results.append(setting.result(sizes))
    layouts = [
        id_layouts(s.codec, s.arrays, resources)
        for s in settings
        if isinstance(s.codec, PosteriorCodec) and s.codec == PosteriorCodec()
    ]
    return {
        "id_layouts_bytes_per_token": layouts[0] if layouts else {},
        "vocab_size": vocab_size,
        "num_tokens": num_tokens,
        **{name: total / num_tokens for name, total in facts.items()},
        "tokens_array_bytes_per_token": token_bytes,
        "fp16_vector_bytes_per_token": 2 * vocab_size,
        "results": results,
    }


def _own_column(output: TeacherOutput) -> TeacherOutput:
    """The tokens, with nothing of the distributions but the tokens' log-probabilities."""
    own = output.log_probs.gather(-1, output.tokens[..., None])
    return TeacherOutput(own, torch.zeros_like(output.tokens), output.rows)


def check_bars(teachers: dict[str, Any]) -> list[dict[str, Any]]:
    """The promises of the format, each with what was measured."""
    bars: list[dict[str, Any]] = []

    def bar(teacher: str, label: str, field: str, holds: str, limit: float) -> None:
        found = [r for r in teachers.get(teacher, {}).get("results", []) if r["label"] == label]
        for result in found:
            value = result[field]
            met = value <= limit if holds == "<=" else value >= limit
            promise = f"{field} {holds} {limit:g}"
            bars.append(
                {
                    "teacher": teacher,
                    "label": label,
                    "promise": promise,
                    "measured": value,
                    "met": met,
                }
            )

    synthetic = teachers["synthetic"]
    for fact, target, margin in (("entropy_nats", 3.0, 0.1), ("mass_of_top_64", 0.90, 0.02)):
        value = synthetic[fact]
        bars.append(
            {
                "teacher": "synthetic",
                "label": "posteriors",
                "promise": f"{fact} = {target:g} +- {margin:g}",
                "measured": value,
                "met": abs(value - target) <= margin,
            }
        )
    bar("synthetic", "seeded eps=0.01", "bytes_per_token", "<=", 100)
    bar("synthetic", "seeded eps=0.01", "max_abs_error_nats", "<=", 0.01)
    bar("synthetic", "posterior m=64 p>=0.0003", "bytes_per_token", "<=", 200)
    bar("synthetic", "posterior m=64 p>=0.0003", "coupling_agreement", ">=", 0.93)
    bar("stories260K", "seeded eps=0.01", "max_abs_error_nats", "<=", 0.01)
    bar("stories260K", "posterior m=V", "coupling_agreement", ">=", 0.999)
    bar("stories260K", "hidden int8", "coupling_agreement", ">=", 0.99)
    return bars


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    default_data = Path(os.environ.get("GDISTILL_SHARED", REPOSITORY.parent / "shared")) / "data"
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", type=Path, default=default_data, help="folder of reference data")
    parser.add_argument("--tokens", type=int, default=2048, help="synthetic tokens")
    parser.add_argument("--trained-tokens", type=int, default=8192, help="stories260K tokens")
    parser.add_argument("--vocabulary", type=int, default=50257, help="synthetic V")
    parser.add_argument("--noise-kernel", default="compiled", choices=("eager", "compiled"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bar is missed."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    use_noise_kernel(options.noise_kernel)
    start = time.perf_counter()
    synthetic = SyntheticTeacher(options.tokens, options.vocabulary)
    teachers = {synthetic.name: measure(synthetic, synthetic_settings())}
    model, text = options.data / "stories260K", options.data / "tinystories" / "tinystories_b.txt"
    if model.is_dir() and text.is_file():
        trained = TrainedTeacher(model, text, options.trained_tokens)
        size = len(trained.resources()["unigram_log_probs"])
        teachers[trained.name] = measure(trained, trained_settings(size))
    else:
        print(f"no trained teacher: {model} or {text} is missing", file=sys.stderr)
    bars = check_bars(teachers)
    report = {
        "teachers": teachers,
        "bars": bars,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "noise_kernel": options.noise_kernel,
        },
        "seconds": time.perf_counter() - start,
    }
    write_json_atomic(options.out / "codecs.json", report)
    write_bytes_atomic(options.out / "codecs.md", markdown_table(report).encode())
    draw_figure(json.loads((options.out / "codecs.json").read_text()), options.out / "codecs.png")
    print(markdown_table(report))
    return 0 if all(entry["met"] for entry in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
