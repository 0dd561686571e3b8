"""What grows with the corpus: opening, resuming, ordering, verifying and listing, to 10^9 rows.

    python -m benchmarks.scale [--out benchmarks/results] [--max-rows 1000000000]

Stores are simulated (:mod:`benchmarks.simulated_store`): rows of 128 tokens, 2,048 rows a shard, 32
a chunk. Every measurement is a process of its own; memory is the growth of its resident high-water
mark. ``open`` reads the manifest and asks for unfinished shards, ``resume`` finds the pending ones
of a half-written store, ``order`` lays out an epoch and finds its first 512 rows, ``verify`` hashes
2,000 shards at most, ``list`` lists as many keys from a loopback server that speaks S3 and waits
30 ms before each of its answers, a thousand keys each. Seconds are the processor's. A cost per row
that stays flat or falls is a straight line of slope 1 or less in the figure; the slope between the
two largest sizes is printed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.listing_server import ListingServer
from benchmarks.measure import machine, peak_extra_bytes
from benchmarks.simulated_store import (
    ROWS_PER_CHUNK,
    ROWS_PER_SHARD,
    SimulatedLocation,
    simulated_manifest,
)
from evaluation.figures import figure_file, look
from shards.atomic import write_json_atomic
from shards.console import progress_bar
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from shards.stream.order import LaneOrder

BATCH_ROWS = 512
LATENCY_SECONDS = 0.03
MAX_VERIFIED_SHARDS = 2_000
MAX_LISTED_KEYS = 50_000
MAX_SLOPE = 1.1
"""Of seconds against rows, on log axes: linear, with room for a logarithm and the clock."""


def open_store(num_rows: int) -> Callable[[], object]:
    location = SimulatedLocation(simulated_manifest(num_rows))
    return lambda: ShardStore.open(location)


def resume(num_rows: int) -> Callable[[], object]:
    manifest = simulated_manifest(num_rows)
    writer = ShardWriter(SimulatedLocation(manifest, share_done=0.5), manifest)

    def run() -> None:
        pending = writer.pending("train")
        assert len(pending) == math.ceil(len(writer.shards("train")) / 2)

    return run


def order(num_rows: int) -> Callable[[], object]:
    def run() -> None:
        epoch = LaneOrder(num_rows, ROWS_PER_CHUNK, seed=1, epoch=0, num_lanes=BATCH_ROWS)
        epoch.locate(np.arange(BATCH_ROWS, dtype=np.int64))

    return run


def verify_some(num_rows: int) -> Callable[[], object]:
    rows = min(num_rows, MAX_VERIFIED_SHARDS * ROWS_PER_SHARD)
    location = SimulatedLocation(simulated_manifest(rows))
    return lambda: verify(location)


def list_keys(num_rows: int) -> Callable[[], object]:
    from s3fs import S3FileSystem

    keys = min(MAX_LISTED_KEYS, num_rows // ROWS_PER_SHARD)
    server = ListingServer(keys, LATENCY_SECONDS)

    def run() -> None:
        with server as endpoint:
            files = S3FileSystem(key="k", secret="s", endpoint_url=endpoint)
            assert len(files.find("bucket/ledger")) == keys

    return run


TASKS = {
    "open": open_store,
    "resume": resume,
    "order": order,
    "verify": verify_some,
    "list": list_keys,
}
LIMITS = {"verify": MAX_VERIFIED_SHARDS * ROWS_PER_SHARD, "list": MAX_LISTED_KEYS * ROWS_PER_SHARD}
"""Rows past which a task would only repeat itself."""


def measure(task: str, num_rows: int) -> dict[str, float]:
    """Seconds and peak extra bytes of one task; call it in a fresh process.

    Seconds are the processor's: whatever else the machine does takes none of them. What waits for a
    server is told by the requests it makes.
    """
    run = TASKS[task](num_rows)
    started = time.process_time()
    peak = peak_extra_bytes(run, torch.device("cpu"))
    return {"seconds": time.process_time() - started, "peak_bytes": peak}


def measured_apart(task: str, num_rows: int) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--task", task, "--rows", str(num_rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def slope(found: dict[int, dict[str, float]], field: str) -> float:
    """Growth of a figure between the two largest sizes, as a power of the number of rows."""
    (few, small), (many, large) = sorted(found.items())[-2:]
    return math.log(large[field] / max(small[field], 1e-9)) / math.log(many / few)


def table(results: dict[str, dict[int, dict[str, float]]]) -> str:
    """Markdown: one row per task, one column per size, and the slope."""
    sizes = sorted({rows for found in results.values() for rows in found})
    lines = ["| task | " + " | ".join(f"{rows:.0e} rows" for rows in sizes) + " | slope |"]
    lines.append("|---|" + "---:|" * (len(sizes) + 1))
    for task, found in results.items():
        cells = [_cell(found.get(rows)) for rows in sizes]
        lines.append(f"| {task} | {' | '.join(cells)} | {slope(found, 'seconds'):.2f} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['seconds']:.2g} s, {found['peak_bytes'] / 1e6:,.0f} MB"


def draw(results: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Seconds and memory against rows, on log axes."""
    fields = {"seconds": "seconds", "peak_bytes": "peak memory, bytes"}
    with figure_file(path, 1, 2, size=(10.5, 3.8)) as (figure, panels):
        for axes, (field, label) in zip(panels[0], fields.items(), strict=True):
            for number, (task, found) in enumerate(results.items()):
                sizes = sorted(found)
                values = [found[n][field] for n in sizes]
                axes.loglog(sizes, values, label=task, **look(number))
            axes.set_xlabel("rows of the corpus")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        panels[0, 1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle("What grows with the corpus (simulated stores, rows of 128 tokens)")


def run_all(max_rows: int) -> dict[str, dict[int, dict[str, float]]]:
    """Every task at every size it is measured at."""
    sizes = [10**power for power in range(6, 10) if 10**power <= max_rows]
    jobs = [(t, n) for t in TASKS for n in sizes if n <= max(sizes[0], LIMITS.get(t, max_rows))]
    jobs += [(t, limit) for t, limit in LIMITS.items() if sizes[-1] > limit]
    results: dict[str, dict[int, dict[str, float]]] = {task: {} for task in TASKS}
    with progress_bar("scale", len(jobs), unit="runs") as bar:
        for task, num_rows in jobs:
            bar.note(f"{task}, {num_rows:.0e} rows")
            results[task][num_rows] = measured_apart(task, num_rows)
            bar.advance(1)
    return results


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("benchmarks/results"),
    max_rows: Annotated[int, typer.Option(help="Largest corpus.")] = 10**9,
    task: Annotated[str | None, typer.Option(help="Measure one task in this process.")] = None,
    rows: Annotated[int, typer.Option(help="For --task.")] = 10**6,
) -> None:
    """Measure every task at every size."""
    if task is not None:
        typer.echo(json.dumps(measure(task, rows)))
        return
    results = run_all(max_rows)
    slopes = {t: slope(found, "seconds") for t, found in results.items() if len(found) > 1}
    record: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "results": results,
        "slopes": slopes,
        "bars": {"max_slope": MAX_SLOPE, "met": all(s <= MAX_SLOPE for s in slopes.values())},
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "scale.json", record)
    (out / "scale.md").write_text(table(results))
    draw(results, out / "scale.png")
    typer.echo(table(results))


if __name__ == "__main__":
    typer.run(main)
