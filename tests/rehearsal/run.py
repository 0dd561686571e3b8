"""Builds the device guard and rehearses in a process of its own with it preloaded.

python -m tests.rehearsal.run [SCENARIO ...]    a table: how often the host waits, and where
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("guard.cpp")
LIBRARY = Path(torch.__file__).parent / "lib"


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build_guard(folder: Path) -> Path:
    """The compiled guard, built once per version of its source and of torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = folder / f"gdistill-pretend-cuda-{key}.so"
    if not target.is_file():
        handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20", *(f"-I{p}" for p in include_paths())]
        link = [f"-L{LIBRARY}", "-ltorch_cpu", "-lc10", "-o", name]
        command = [str(compiler()), *flags, str(SOURCE), *link]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(name, target)
    return target


def rehearse(*names: str) -> list[dict[str, Any]]:
    """What each scenario (all, without names) says: its waits by place, or its error."""
    environment = os.environ | {
        "LD_PRELOAD": str(build_guard(Path(tempfile.gettempdir()))),
        "LD_LIBRARY_PATH": f"{LIBRARY}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "OMP_NUM_THREADS": "1",
        "MALLOC_PERTURB_": "128",  # glibc: memory that nobody wrote reads as 3.4e38, not as zeros
    }
    command = [sys.executable, "-m", "tests.rehearsal.scenarios", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    print("| scenario | waits | where |\n|---|---:|---|")
    for record in rehearse(*sys.argv[1:]):
        places = [f"{kind} ({count:g})" for kind, count in record.get("places", {}).items()]
        waits = f"{record['waits']:g}" if "waits" in record else "failed"
        print(f"| {record['scenario']} | {waits} | {', '.join(places) or '-'} |")
