"""README and docs are run: every shell and Python block, at toy size, in the order of the text."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import get_cachedir

from tests.pipeline.extract_cases import WORDS, save_teacher
from tests.readme.blocks import Block, read_blocks

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN = [block for block in BLOCKS if block.text]
FOLDERS = "shards|pipeline|trainer|evaluation|benchmarks|configs|runs|tests|docs"
TOY = {"EXTRAS": "dev", "STEPS": "3"}
"""Environment variables that make every block small."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone with a user's stories and teacher beside the code."""
    folder = tmp_path
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("out", "samples", ".git", ".venv") and "_cache" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    # The tests' own environment, as `make setup` leaves one: nothing is installed.
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".installed"):
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv/.installed-dev").touch()
    save_teacher((folder / "path/or/hub-id").resolve())
    draw = random.Random(0)
    (folder / "stories").mkdir()
    for part in "ab":
        words = [draw.choices(WORDS[2:], k=draw.randint(20, 60)) for _ in range(80)]
        text = "\n<|endoftext|>\n".join(" ".join(document) for document in words)
        (folder / f"stories/{part}.txt").write_text(text + "\n")
    return folder


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """The block as a reader would type it: any line that fails ends it."""
    binaries = Path(sys.executable).parent
    environment = os.environ | TOY | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"XDG_CACHE_HOME": str(folder / ".cache"), "MPLCONFIGDIR": get_cachedir()}
    for name in ("MAKEFLAGS", "ARGS"):  # of the `make test` that this runs under
        environment.pop(name, None)
    shell = ["bash", "-euo", "pipefail", "-c", block.text]
    command = [sys.executable, "-c", block.text] if block.language == "python" else shell
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_blocks_do_what_they_say(clone: Path) -> None:
    """One test: a block stands on those before it, and xdist parts the tests of a file."""
    for block in RUN:
        done = run_block(block, clone)
        output = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{block.name}\n{block.text}\n{output}"


def test_whatever_is_not_run_says_why() -> None:
    for block in BLOCKS:
        assert block.text or block.reasons, f"{block.name} runs nothing and gives no reason"
    assert len(RUN) >= 5, "most of README runs"


def test_readme_is_a_front_door_not_a_manual() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1200
    lines = text.splitlines()
    assert all(sum(line.startswith("|") for line in lines[i : i + 9]) < 9 for i in range(60))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
    files = set(re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*\w)", text))
    assert [file for file in sorted(files) if not (REPOSITORY / file).exists()] == []
