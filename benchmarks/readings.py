"""Readings of the noise among K candidates at a large vocabulary: time, memory, coverage.

    python -m benchmarks.readings --tokenizer DIR --text FILE

* A whole training step (rows from shards, forward, backward, clipping, AdamW) of the paper's
  student against the same with w = 1 and readings behind two blocks, in turns; on a CPU in seconds
  of the processor. The interval is Student's t over the logarithms of the turns' ratios.
* What search and readings hold beyond their inputs and the gradients that they return, against
  what softmax(xi) W holds dense, as in :mod:`benchmarks.conditioner`, by the allocator's count.
* How often a text's own token is among the K entries of largest xi + w log q. The teacher's part
  is taken by the text's own bigrams, interpolated with its unigram; xi is their posterior noise.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from scipy import stats
from torch import Tensor

from benchmarks.conditioner import dense_pass, keyed_noise
from benchmarks.measure import interleaved_seconds, machine, median, peak_allocated_bytes
from benchmarks.steps import finish_step, tiled_loss
from benchmarks.synthetic import make_student, read_batch, unigram, write_store
from shards.atomic import write_json_atomic
from shards.noise.kinds import KeyedPosterior, dense_arrivals
from shards.noise.philox import PositionKeys, use_noise_kernel
from shards.noise.probabilities import DenseProbabilities
from trainer.students.conditioning import NoiseToRead, VocabularyAttention, pack_noise
from trainer.students.registry import MDLM, StudentSettings, read_preset
from trainer.training.optimization import make_optimizer
from trainer.training.settings import OptimizationConfig

BARS = {"time_ratio": 1.15, "memory_ratio": 0.1}


def settings_of(preset: str, depths: tuple[int, ...], count: int, w: float) -> StudentSettings:
    """The preset with noise, read again behind some blocks."""
    changes = {"conditioning": "gumbel", "dropout": 0.0, "prior_weight": w}
    readings = {"noise_readings": depths, "reading_candidates": count}
    return StudentSettings(**{**read_preset(preset), **changes, **readings})


def time_ratio(ours: Sequence[float], reference: Sequence[float]) -> dict[str, object]:
    """Median ratio of turns that followed each other, and a 95% interval of their mean log."""
    logs = [math.log(a / b) for a, b in zip(ours, reference, strict=True)]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    interval = [math.exp(mean - half), math.exp(mean + half)]
    return {"ratio": math.exp(statistics.median(logs)), "interval": interval}


def measure_steps(
    preset: str,
    depths: tuple[int, ...],
    counts: Sequence[int],
    shape: tuple[int, int, int],
    device: torch.device,
    repeats: int,
) -> dict[str, object]:
    """Seconds of a step of the paper's student, and of one that reads among each K."""
    batch_size, row_length, vocab_size = shape

    def stepper(settings: StudentSettings) -> tuple[MDLM, Callable[[], object]]:
        student = make_student(settings, row_length, vocab_size, device)
        if student.conditioner is not None and settings.prior_weight:
            student.conditioner.set_unigram(unigram(vocab_size).to(device))
        optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))

        def step() -> object:
            loss = tiled_loss(student, read_batch(store, batch_size, device))
            return finish_step(loss, student, optimizer)

        return student, step

    def among(count: int) -> Callable[[], object]:
        """The one student with readings, set to look at ``count`` entries."""

        def step() -> object:
            reader.settings = settings_of(preset, depths, count, 1.0)
            reader.backbone.num_candidates = count
            return read()

        return step

    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder) / "store", "posterior", batch_size, row_length, vocab_size)
        _, paper = stepper(settings_of(preset, (), 0, 0.0))
        reader, read = stepper(settings_of(preset, depths, counts[0], 1.0))
        work = {"paper": paper, **{f"K = {count}": among(count) for count in counts}}
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        seconds = interleaved_seconds(work, device, repeats=repeats, clock=clock)
    ratios = {name: time_ratio(seconds[name], seconds["paper"]) for name in list(work)[1:]}
    return {"seconds": {k: median(v) for k, v in seconds.items()}, "all": seconds, **ratios}


def measure_memory(
    num: int, vocab_size: int, width: int, count: int, num_readings: int, device: torch.device
) -> dict[str, object]:
    """Bytes of tensors that search and readings hold, beside softmax(xi) W held dense."""
    torch.manual_seed(0)
    noise, prior = keyed_noise(num, vocab_size, device), unigram(vocab_size).to(device)
    readings = [VocabularyAttention(vocab_size, width).to(device) for _ in range(num_readings)]
    head = torch.randn(vocab_size + 1, width, device=device, requires_grad=True)
    x = torch.randn(1, num, width, device=device, requires_grad=True)
    for reading in readings:
        reading.reset_parameters()

    def search() -> None:
        pack_noise(noise, 1.0, prior, count)

    def read() -> None:
        packed = pack_noise(noise, 1.0, prior, count)[None]
        found, states = NoiseToRead.unpack(packed, count), x
        for reading in readings:
            states = reading(states, found, head)
        states.sum().backward()

    def dense() -> None:
        dense_pass(-dense_arrivals(noise).log(), readings[0].weight, x.detach()[0])

    work = {"search": search, "readings": read, "dense": dense}
    peaks = {name: peak_allocated_bytes(run, device) for name, run in work.items()}
    peaks["dense"] -= 4 * width * (num + vocab_size)  # its output and the gradient of W
    weights = [head, x, *(p for reading in readings for p in reading.parameters())]
    peaks["readings"] -= sum(weight.nbytes for weight in weights)
    ratios = {name: peaks[name] / peaks["dense"] for name in ("search", "readings")}
    return {"K": count, "peak_allocated_bytes": peaks, "memory_ratio": ratios}


def bigram_log_probs(tokens: Tensor, before: Tensor, vocab_size: int, share: float) -> Tensor:
    """log p(. | before) [n, V]: ``share`` of the bigrams of ``tokens``, the rest their unigram."""
    counts = torch.bincount(tokens, minlength=vocab_size).double() + 0.1
    q = counts / counts.sum()
    rows = []
    for previous in before.tolist():
        followers = torch.bincount(tokens[1:][tokens[:-1] == previous], minlength=vocab_size)
        seen = followers.double() / followers.sum().clamp_min(1)
        rows.append(share * seen + (1 - share) * q if int(followers.sum()) else q)
    return torch.stack(rows).log().float()


def coverage(
    tokens: Tensor, vocab_size: int, counts: Sequence[int], num: int, share: float = 0.8
) -> dict[str, object]:
    """Shares of ``num`` places whose own token is among the K; with w = 1 and without a prior."""
    chosen = torch.linspace(1, len(tokens) - 1, num).long()
    log_probs = bigram_log_probs(tokens, tokens[chosen - 1], vocab_size, share)
    q = (torch.bincount(tokens, minlength=vocab_size) + 0.1).log().log_softmax(0)
    own = log_probs.gather(1, tokens[chosen][:, None])[:, 0]
    keys = PositionKeys(3, chosen, chosen % 1024)
    noise = KeyedPosterior(keys, tokens[chosen], own, DenseProbabilities(log_probs))
    found: dict[str, object] = {"teacher_nll_nats": -float(own.mean()), "positions": num}
    for w in (0.0, 1.0):
        scores = noise.gumbels() + w * q
        rank = (scores > scores.gather(1, tokens[chosen][:, None])).sum(1)
        found[f"w = {w:g}"] = {str(k): float((rank < k).double().mean()) for k in counts}
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/readings.json"
    ),
    preset: str = "small",
    depths: Annotated[str, typer.Option(help="Blocks behind which noise is read.")] = "4,8",
    candidates: Annotated[str, typer.Option(help="K, comma-separated.")] = "32,128,256",
    batch_size: int = 8,
    row_length: int = 128,
    vocab_size: int = 50257,
    repeats: int = 5,
    num_positions: Annotated[int, typer.Option(help="Of the memory measured.")] = 4096,
    tokenizer: Annotated[Path | None, typer.Option(help="Of the text.")] = None,
    text: Annotated[Path | None, typer.Option(help="Plain text for coverage.")] = None,
    device: str = "cpu",
    noise_kernel: Annotated[str, typer.Option(help="eager or compiled, on both sides.")] = "eager",
) -> None:
    """Measure, write the JSON, print the figures."""
    target = torch.device(device)
    use_noise_kernel(noise_kernel, target)
    counts = [int(part) for part in candidates.split(",")]
    behind = tuple(int(part) for part in depths.split(","))
    record: dict[str, Any] = {"machine": machine(target), "bars": BARS, "depths": behind}
    shape = (batch_size, row_length, vocab_size)
    record["shape"] = {"preset": preset, "batch_size_row_length_V": shape, "kernel": noise_kernel}
    if tokenizer is not None and text is not None:
        from transformers import AutoTokenizer

        read = AutoTokenizer.from_pretrained(tokenizer)
        ids = torch.tensor(read(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
        powers = [2**power for power in range(4, 11)]
        record["coverage"] = coverage(ids, len(read), powers, num=1000)
        print("coverage", record["coverage"], flush=True)
    width = settings_of(preset, (), 0, 0.0).hidden_size
    record["memory"] = [
        measure_memory(num_positions, vocab_size, width, count, len(behind), target)
        for count in counts
    ]
    print("memory", record["memory"], flush=True)
    record["step"] = measure_steps(preset, behind, counts, shape, target, repeats)
    for count in counts:
        print(f"K = {count}", record["step"][f"K = {count}"])
    write_json_atomic(out, record)


if __name__ == "__main__":
    typer.run(main)
