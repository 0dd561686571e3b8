"""Faults done for real, in full numbers: python -m benchmarks.faults --out benchmarks/results

Kills at random moments of a three-process write, a death at every single file operation, random
bit flips over all files, every shard file missing, empty and truncated. The tests run a few of
each; this writes the counts of all to ``faults.json`` and fails if one of them went wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import zarr

from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from shards.console import progress_bar
from tests.shards.store import fault_trials as trials
from tests.shards.store_cases import file_bytes, write_store


def kills(folder: Path, number: int, seed: int) -> Counter[str]:
    """Kill -9 three writers at random moments; resume; compare every byte."""
    trials.write_with(folder / "reference", 1)
    reference = file_bytes(folder / "reference")
    seconds = trials.write_with(folder / "timing", 3)
    total: Counter[str] = Counter()
    with progress_bar("kill -9", number, unit="kill") as bar:
        for trial in range(number):
            rng = np.random.default_rng([seed, trial])
            total += trials.kill_trial(folder / "killed", reference, rng, seconds)
            bar.advance(1)
    return total


def deaths(folder: Path) -> Counter[str]:
    """Die at the first file operation, the second, ... until the write outlives it."""
    write_store(folder / "small")
    reference = file_bytes(folder / "small")
    total: Counter[str] = Counter()
    with progress_bar("die at operation", None, unit="death") as bar:
        for after in itertools.count():
            if trials.crash_trial(folder / "crashed", reference, after) is None:
                return total
            total += Counter(trials=1, byte_identical=1)  # a difference raises
            bar.advance(1)
    return total


def flips(folder: Path, number: int, seed: int) -> Counter[str]:
    """Single-bit flips over all files."""
    write_store(folder / "flipped")
    rng, total = np.random.default_rng(seed), Counter[str]()
    with progress_bar("bit flips", number, unit="flip") as bar:
        for _ in range(number // 10):
            total += trials.flip_trials(folder / "flipped", 10, rng)
            bar.advance(10)
    return total


def lost_files(folder: Path) -> Counter[str]:
    """Every shard file in turn missing, empty, truncated by half and by one byte."""
    root = folder / "lost"
    write_store(root)
    files, truth = file_bytes(root), trials.read_everything(root)
    shards = [name for name in files if "/c/" in name and not name.startswith("resources")]
    total: Counter[str] = Counter()
    with progress_bar("lost files", 4 * len(shards), unit="file") as bar:
        for name in shards:
            data = files[name]
            for left in (None, b"", data[: len(data) // 2], data[:-1]):
                total += trials.damage_trial(root, name, left, truth)
                bar.advance(1)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "kills": kills(folder, arguments.kills, arguments.seed),
            "deaths_at_a_file_operation": deaths(folder),
            "single_bit_flips": flips(folder, arguments.flips, arguments.seed),
            "lost_files": lost_files(folder),
        }
    checks = {
        "every killed write resumed to the same bytes": result["kills"]["byte_identical"]
        == result["kills"]["kills"],
        "every flip detected by verify": result["single_bit_flips"]["detected_by_verify"]
        == result["single_bit_flips"]["trials"],
        "no flip silently read": result["single_bit_flips"]["silently_wrong"] == 0,
        "every lost file refused by the reader": result["lost_files"]["refused_by_reader"]
        == result["lost_files"]["trials"],
        "every lost file named by verify": result["lost_files"]["named_by_verify"]
        == result["lost_files"]["trials"],
    }
    about = {**machine(torch.device("cpu")), "zarr": zarr.__version__, "seed": arguments.seed}
    document = {"machine": about, **{k: dict(v) for k, v in result.items()}, "checks": checks}
    write_json_atomic(arguments.out / "faults.json", document)
    print(json.dumps(document, indent=2))
    if not all(checks.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
