"""Compiled transformer blocks: few graphs, the same numbers, and a word where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer.run_cases import metrics_without_timing

SCRIPT = Path(__file__).with_name("compiled_runs.py")
HALVES = 2


@pytest.fixture(scope="module")
def out(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs, and ``found.json``."""
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, str(SCRIPT), str(store), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "found.json").read_text())


def test_the_trial_makes_all_graphs_of_a_run(found: dict[str, Any]) -> None:
    """Two with gradients, two without, whatever the layers, rows and masked tokens."""
    assert found["off"] == {"tried": [0, 0], "run": [0, 0], "one row": [0, 0]}
    assert found["on"]["tried"] == found["on"]["run"] == [2 * HALVES, 0]
    assert found["on"]["one row"] in ([2 * HALVES, 0], [3 * HALVES, 0])


def test_a_run_is_the_same_compiled(out: Path) -> None:
    """But for rounding, some ten times 2^-9 in bf16."""
    for one, other in zip(
        *(metrics_without_timing(out / way) for way in ("off", "on")), strict=True
    ):
        assert (one["kind"], one["step"]) == (other["kind"], other["step"])
        if one["kind"] == "train":
            assert (one["blocks"], other["blocks"]) == ("eager", "compiled")
        for name in {"loss", "nll_nats"} & set(one):
            assert other[name] == pytest.approx(one[name], rel=2.0**-5)
    models = [set(load_file(out / way / "model/model.safetensors")) for way in ("off", "on")]
    assert models[0] == models[1]


def test_compiled_blocks_read_caches_and_empty_batches(found: dict[str, Any]) -> None:
    assert found["sampled"]["error"] < 1e-4


def test_compilers_that_fail_or_lie(found: dict[str, Any]) -> None:
    told = found["refusals"]
    assert told["on"].startswith("GdistillError cannot compile the blocks")
    assert told["auto"] == "no such compiler" and told["auto"] in told["on"]
    assert told["auto, broken"].startswith("compiled, it differs from itself by")
    assert told["off"] == told["auto, cpu"] == "" and told["in use"] == "eager"


def test_the_memory_plan_cuts_blocks_as_the_compiler_does(out: Path) -> None:
    """Without compiling them for any device; a backend that cuts otherwise keeps more.

    Inductor itself, which a test would wait long for, kept what was planned to the byte: 1,083,680
    of a row of 64 tokens in three blocks of width 64.
    """
    kept = json.loads((out / "found.json").read_text())["planned"]
    assert kept["on"] < 0.97 * kept["off"]
    assert kept["aot_eager"] > 1.02 * kept["on"]
