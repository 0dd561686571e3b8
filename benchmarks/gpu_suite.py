"""Every GPU figure in one run: correctness first, then time, one JSON and one page.

The JSON is written after the checks and again after each part, so a session that ends early keeps
what it has. A part or check that fails is recorded as an error and the rest goes on; the exit code
is 1 then, and figures beside a failed check are to be read with it. No network, weights or data
are needed.

    python -m benchmarks.gpu_suite [--shape paper|toy] [--device cuda] [--out ...]

Shapes are true (V 50257, student 12 x 768, teacher 36 x 1280), weights random, rows too: those of
"from shards" are written to a store first and read back within the time. The paper shape is planned
to end within 8 minutes on one H100: before each part the suite looks at the clock, and says in the
JSON what it left out for want of time. ``toy`` runs anywhere in seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.conditioner import run_benchmark
from benchmarks.gpu_checks import check_everything, describe
from benchmarks.gpu_parts import (
    SUITE_SHAPES,
    SuiteShape,
    block_training,
    extraction,
    first_hitting,
    training_throughput,
)
from benchmarks.measure import machine
from shards.atomic import write_bytes_atomic, write_json_atomic
from shards.console import run_command
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.noise.philox import noise_kernel, use_noise_kernel

TIME_LIMIT_SECONDS = 450
Found = dict[str, Any]


class Bar(NamedTuple):
    """A bar: how its parts' names begin, what is compared, the figure's keys, and its bound."""

    part: str
    what: str
    keys: tuple[str, ...]
    bound: float
    is_least: bool

    @property
    def title(self) -> str:
        """What is compared, with the bound."""
        return f"{self.what} {'>=' if self.is_least else '<='} {self.bound:g}"


GAIN = "tokens per second from shards over an online teacher"
TILED = "time of the tiled conditioner over a dense one"
STAGE_2 = "stage 2 over the bare forward pass"
BARS = (
    Bar("training, ", GAIN, ("decoupling_gain",), 2.5, True),
    Bar("conditioner ", TILED, ("noise in memory", "time_ratio"), 0.5, False),
    Bar("first hitting", "tokens per second of 16 rows over one", ("batched_gain",), 6.0, True),
    Bar("extraction", STAGE_2, ("figures", "posterior", "ratio"), 1.10, False),
)


def bars_of(found: Mapping[str, Any]) -> dict[str, Found]:
    """Title -> figure and whether the bar is met; parts that failed or were left out have none."""
    bars: dict[str, Found] = {}
    for bar in BARS:
        for name, part in found.items():
            if name.startswith(bar.part) and isinstance(part, dict) and "error" not in part:
                for key in bar.keys:
                    part = part[key]
                met = part >= bar.bound if bar.is_least else part <= bar.bound
                bars[f"{name}: {bar.title}"] = {"figure": part, "met": met}
    return bars


def page_of(record: Mapping[str, Any]) -> str:
    """The suite's record as one Markdown page: bars, then checks, then what is missing."""
    about = ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    yes = {True: "yes", False: "NO"}
    lines = ["# GPU suite", "", f"Shape `{record['shape']}`. {about}.", ""]
    lines += [f"Noise kernel: {record['noise_kernel']}.", ""]
    lines += ["| bar | figure | met |", "| --- | ---: | --- |"]
    lines += [f"| {n} | {b['figure']:.3g} | {yes[b['met']]} |" for n, b in record["bars"].items()]
    answered = " ".join(record["bars"])
    missing = [bar.title for bar in BARS if bar.title not in answered]
    lines += [f"| {title} | not measured | NO |" for title in missing]
    lines += ["", "| check | error | passed |", "| --- | ---: | --- |"]
    checks = record["checks"].items()
    lines += [f"| {name} | {check['error']} | {yes[check['passed']]} |" for name, check in checks]
    lines += ["", f"Failed: {', '.join(record['failures']) or 'nothing'}."]
    lines += [f"Left out for want of time: {', '.join(record['left_out_for_time']) or 'nothing'}."]
    return "\n".join(lines) + "\n"


def suite_parts(shape: SuiteShape, device: torch.device) -> dict[str, Callable[[], Found]]:
    """What is timed, by name, in the order of its worth."""
    sizes = (shape.vocab_size, *shape.conditioner)

    def conditioner(dtype: torch.dtype) -> Found:
        return run_benchmark(sizes, device, shape.repeats, dtype)

    parts = {"conditioner float32": lambda: conditioner(torch.float32)}
    if shape.dtype != torch.float32:
        parts["conditioner autocast"] = lambda: conditioner(shape.dtype)
    for rows in shape.rows:
        parts[f"training, rows of {rows[0]}"] = lambda rows=rows: training_throughput(shape, *rows, device)
    parts["extraction"] = lambda: extraction(shape, device)
    parts["first hitting"] = lambda: first_hitting(shape, device)
    parts["block training"] = lambda: block_training(shape, device)
    return parts


def run_suite(shape: SuiteShape, device: torch.device, keep: Callable[[Found], None]) -> Found:
    """Checks, then each part while there is time; what fails is recorded, and the rest goes on.

    After the checks and after each part ``keep`` is given everything found so far.
    """
    start = time.monotonic()
    obstacle = use_noise_kernel("auto", device)
    kernel = noise_kernel(device) + (f": {obstacle}" if obstacle else "")
    checks = check_everything(shape.vocab_size, device)
    found: Found = {"noise_kernel": kernel, "checks": checks, "left_out_for_time": []}
    keep(found)
    for name, part in suite_parts(shape, device).items():
        if time.monotonic() - start > TIME_LIMIT_SECONDS:
            found["left_out_for_time"].append(name)
            continue
        gc.collect()
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            found[name] = part()
        except Exception as error:  # the other parts are worth their while
            found[name] = {"error": describe(error)}
        found["seconds"] = time.monotonic() - start
        verdict = found[name].get("error", "done")
        print(f"{name}: {verdict} after {found['seconds']:.0f} s", flush=True)
        keep(found)
    keep(found)
    return found


def failures(found: Found) -> list[str]:
    """Checks that did not pass and parts that ended in an error."""
    wrong = [f"check {name}" for name, check in found["checks"].items() if not check["passed"]]
    return wrong + [n for n, part in found.items() if isinstance(part, dict) and "error" in part]


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
    out: Annotated[Path, typer.Option(help="JSON.")] = Path("benchmarks/results/gpu_suite.json"),
) -> None:
    """Run the suite, write its JSON and its page; exit code 1 if a check or a part failed."""
    if shape not in SUITE_SHAPES:
        expected = " or ".join(SUITE_SHAPES)
        raise UsageError("unknown shape", where="--shape", got=shape, expected=expected)
    target = resolve_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = {"machine": machine(target), "shape": shape}

    def keep(found: Found) -> None:
        record = {**about, "failures": failures(found), "bars": bars_of(found), **found}
        write_json_atomic(out, plain(record))
        write_bytes_atomic(out.with_suffix(".md"), page_of(plain(record)).encode())

    found = run_suite(SUITE_SHAPES[shape], target, keep)
    for name, bar in bars_of(found).items():
        print(f"{name}: {bar['figure']:.3g} ({'met' if bar['met'] else 'not met'})")
    if wrong := failures(found):
        raise GdistillError("parts of the suite failed", where=out, got=", ".join(wrong))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
