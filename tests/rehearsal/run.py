"""Builds the device guard and runs a Python module with it preloaded, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def library() -> Path:
    """torch's folder of shared libraries."""
    return Path(torch.__file__).parent / "lib"


def build_guard(folder: Path) -> Path:
    """The compiled guard, built once per version of its source and of torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = folder / f"gdistill-pretend-cuda-{key}.so"
    if target.is_file():
        return target
    found = compiler()
    assert found is not None
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20", *(f"-I{path}" for path in include_paths())]
    link = [f"-L{library()}", "-ltorch_cpu", "-lc10", "-o", name]
    subprocess.run([found, *flags, str(SOURCE), *link], check=True, capture_output=True)
    os.replace(name, target)
    return target


def rehearse(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m module words`` with the guard preloaded."""
    guard = build_guard(Path(tempfile.gettempdir()))
    searched = [str(library()), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_PRELOAD": str(guard),
        "LD_LIBRARY_PATH": ":".join(filter(None, searched)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main() -> None:
    """A table of every scenario: how often the host waits in one repetition, and where."""
    done = rehearse("tests.rehearsal.run_scenarios", *sys.argv[1:])
    print("| scenario | waits | where |\n|---|---:|---|")
    for record in map(json.loads, done.stdout.splitlines()):
        places = [f"{kind} ({count:g})" for kind, count in record.get("places", {}).items()]
        waits = f"{record['waits']:g}" if "waits" in record else "failed"
        print(f"| {record['scenario']} | {waits} | {', '.join(places) or '-'} |")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
