"""Rows per second in shuffled order: ShardStream beside other loaders, on the same rows.

    python -m benchmarks.stream [--out benchmarks/results] [--repeats 2] [--scale 0.25]

The other loaders need `pip install --no-deps --target .venv/stream-peers -r
benchmarks/stream_peers.txt`. Every measurement is a process of its own that gives batches of
tensors: a first epoch that is not measured (workers start, copies are unpacked), then whole epochs
for two seconds or more. Loaders take turns. In the first round each runs with no worker and with as
many as there are cores (at most 4); the better number is kept for the others. All loaders give the
same arrays, and every format stores all of them, so bytes on disk are charged alike. All files are
in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import stream_data as data
from benchmarks.measure import machine
from benchmarks.stream_loaders import LOADERS, import_peers
from evaluation.figures import WITH_NOISE, figure_file

SHAPES = {1024: data.Shape(4096, 1024), 128: data.Shape(32768, 128)}
BATCH_SIZES = {1024: 32, 128: 256}
FORMATS = {
    "store": data.write_store,
    "parquet": data.write_parquet,
    "mosaic-zstd": lambda folder, shape: data.write_mosaic(folder, shape, "zstd"),
    "mosaic-raw": lambda folder, shape: data.write_mosaic(folder, shape, None),
    "litdata-zstd": lambda folder, shape: data.write_litdata(folder, shape, "zstd"),
    "litdata-raw": lambda folder, shape: data.write_litdata(folder, shape, None),
}
FORMAT_OF = dict(
    zip(
        LOADERS,
        [
            *("store", "store", "parquet", "arrow"),
            *("mosaic-zstd", "mosaic-raw", "litdata-zstd", "litdata-raw"),
        ],
        strict=True,
    )
)
OURS, ZARR = list(LOADERS)[:2]


def measure_shape(folder: Path, shape: data.Shape, repeats: int) -> list[dict[str, Any]]:
    """Write the rows in every format, then measure every loader ``repeats`` times, in turns."""
    data.write_shape(folder, shape)
    for name, write in FORMATS.items():
        write(folder / name, shape)
        print(f"  wrote {name}", flush=True)
    workers = (0, min(4, os.cpu_count() or 1))
    rates: dict[tuple[str, int], list[float]] = {}
    checksums = set()
    firsts: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name in LOADERS:
            for count in workers if repeat == 0 else [best_workers(name, rates)]:
                found = _run(name, folder, count, BATCH_SIZES[shape.row_length])
                if found["checksum"] is not None:
                    checksums.add((found["rows"], found["checksum"]))
                rates.setdefault((name, count), []).append(found["rows_per_second"])
                firsts.setdefault(name, []).append(found["first_rows_per_second"])
        print(f"  round {repeat + 1} of {repeats}", flush=True)
    if len(checksums) != 1:
        raise SystemExit(f"the loaders read different rows: {checksums}")
    return [
        entry(name, shape, rates, firsts[name], data.folder_bytes(folder / FORMAT_OF[name]))
        for name in LOADERS
    ]


def best_workers(name: str, rates: dict[tuple[str, int], list[float]]) -> int:
    """The number of workers with the best median."""
    medians = {count: statistics.median(each) for (n, count), each in rates.items() if n == name}
    return max(medians, key=lambda count: medians[count])


def _run(name: str, folder: Path, workers: int, batch_size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.stream_loaders", name, str(folder)]
    done = subprocess.run(
        [*command, str(workers), str(batch_size)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{name}, {workers} workers failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def entry(
    name: str,
    shape: data.Shape,
    rates: dict[tuple[str, int], list[float]],
    firsts: list[float],
    num_bytes: int,
) -> dict[str, Any]:
    """One loader's figures: of warm epochs, and of the best first one beside them."""
    medians = {w: statistics.median(values) for (n, w), values in rates.items() if n == name}
    best = best_workers(name, rates)
    num_tokens = shape.num_rows * shape.row_length
    return {
        "loader": name,
        "row_length": shape.row_length,
        "rows_per_second": medians[best],
        "range": [min(rates[name, best]), max(rates[name, best])],
        "workers": best,
        "rows_per_second_by_workers": medians,
        "first_epoch_rows_per_second": max(firsts),
        "bytes_per_token_on_disk": num_bytes / num_tokens,
    }


def bars(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Our rate over that of zarr-python with the same chunks, and over the best of the others."""
    rates = {entry["loader"]: entry["rows_per_second"] for entry in entries}
    others = [rate for name, rate in rates.items() if name not in (OURS, ZARR)]
    packed = [rate for name, rate in rates.items() if "zstd" in name or "streamed" in name]
    return {
        "over_zarr_python": rates[OURS] / rates[ZARR],
        "over_best_other": rates[OURS] / max(others),
        "over_best_other_with_compressed_files": rates[OURS] / max(packed),
    }


def table(results: dict[str, Any]) -> str:
    """The numbers as a Markdown table."""
    lines = [
        "| loader | B/token on disk | " + " | ".join(f"rows/s, L = {n}" for n in SHAPES) + " |",
        "|---|---|" + "---|" * len(SHAPES),
    ]
    by_length = results["loaders"]
    for entries in zip(*by_length.values(), strict=True):
        cells = [
            f"{e['rows_per_second']:,.0f} ({e['range'][0]:,.0f} to {e['range'][1]:,.0f})"
            for e in entries
        ]
        size = " / ".join(f"{e['bytes_per_token_on_disk']:.0f}" for e in entries)
        lines.append(f"| {entries[0]['loader']} | {size} | {' | '.join(cells)} |")
    for length, values in results["bars"].items():
        parts = ", ".join(
            f"{name.replace('_', ' ')} {value:.2f}x" for name, value in values.items()
        )
        lines.append(f"\nL = {length}: ShardStream {parts}.")
    return "\n".join(lines) + "\n"


def figure(results: dict[str, Any], path: Path) -> None:
    """Bars of rows per second, one panel per row length."""
    by_length = results["loaders"]
    size = (11, 3.6)
    with figure_file(path, 1, len(by_length), size=size, sharey=True) as (_, panels):
        for axes, (length, entries) in zip(panels[0], by_length.items(), strict=True):
            names = [entry["loader"] for entry in entries][::-1]
            rates = [entry["rows_per_second"] for entry in entries][::-1]
            colours = [WITH_NOISE if name == OURS else "#B0B0B0" for name in names]
            axes.barh(names, rates, color=colours, height=0.7)
            for place, rate in enumerate(rates):
                axes.text(rate, place, f" {rate:,.0f}", va="center", fontsize=8)
            axes.set_title(f"rows of {length} tokens (blue: ours)")
            axes.set_xlabel("rows per second, shuffled")
            axes.set_xlim(0, max(rates) * 1.18)


def main() -> None:
    """Measure, check the bars, write JSON, table and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.25, help="share of the rows")
    parser.add_argument("--work", type=Path, help="where to put the data for the run")
    options = parser.parse_args()
    import_peers()
    results: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "scale": options.scale,
        "repeats": options.repeats,
        "loaders": {},
        "bars": {},
    }
    for length, shape in SHAPES.items():
        print(f"rows of {length} tokens", flush=True)
        scaled = data.Shape(max(512, int(shape.num_rows * options.scale)), length)
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            entries = measure_shape(Path(folder), scaled, options.repeats)
        results["loaders"][str(length)] = entries
        results["bars"][str(length)] = bars(entries)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stream.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "stream.md").write_text(table(results))
    figure(results, options.out / "stream.png")
    print(table(results))


if __name__ == "__main__":
    main()
