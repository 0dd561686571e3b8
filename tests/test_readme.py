"""README and docs are run: every shell and Python block, at toy size, in the order of the text.

A shell line that ends in ``(not run by the README test: REASON)`` is left out, and so is a whole
block whose first line says so. Everything else runs, in order, in one folder, as a reader types it.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib import get_cachedir

from tests.pipeline.extract_cases import WORDS, save_teacher

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = "shards|pipeline|trainer|evaluation|benchmarks|configs|runs|tests|docs"
TOY = {"EXTRAS": "dev", "STEPS": "3"}
"""Environment variables that make every block small."""
NOT_RUN = re.compile(r"\(not run by the README test: ([^)]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, what of it is run, and why the rest is not."""

    name: str
    language: str
    text: str
    reasons: tuple[str, ...]


def read_blocks(page: Path) -> Iterator[Block]:
    """The shell and Python blocks of a Markdown file, in order."""
    heading, opened, language, lines = "", 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and opened:
            if language in ("bash", "sh", "python"):
                reasons = tuple(reason for line in lines for reason in NOT_RUN.findall(line)[:1])
                of_all = lines and lines[0].lstrip().startswith("#") and NOT_RUN.search(lines[0])
                kept = [] if of_all else [line for line in lines if not NOT_RUN.search(line)]
                name = f"{page.name}: {heading}, line {opened}"
                yield Block(name, language, "\n".join(kept).strip(), reasons)
            opened = 0
        elif line.startswith("```"):
            opened, language, lines = number, line[3:].strip(), []
        elif opened:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN = [block for block in BLOCKS if block.text]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone with a user's stories and teacher beside the code."""
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("out", "samples", ".git", ".venv") and "_cache" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    # The tests' own environment, as `make setup` leaves one: nothing is installed.
    (tmp_path / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".installed"):
            (tmp_path / ".venv" / entry.name).symlink_to(entry)
    (tmp_path / ".venv/.installed-dev").touch()
    save_teacher((tmp_path / "path/or/hub-id").resolve())
    draw = random.Random(0)
    (tmp_path / "stories").mkdir()
    for part in "ab":
        words = [draw.choices(WORDS[2:], k=draw.randint(20, 60)) for _ in range(80)]
        text = "\n<|endoftext|>\n".join(" ".join(document) for document in words)
        (tmp_path / f"stories/{part}.txt").write_text(text + "\n")
    return tmp_path


def test_the_blocks_do_what_they_say(clone: Path) -> None:
    """One test: a block stands on those before it, and xdist parts the tests of a file.

    Any line that fails ends its block.
    """
    binaries = Path(sys.executable).parent
    environment = os.environ | TOY | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"XDG_CACHE_HOME": str(clone / ".cache"), "MPLCONFIGDIR": get_cachedir()}
    for name in ("MAKEFLAGS", "ARGS"):  # of the `make test` that this runs under
        environment.pop(name, None)
    for block in RUN:
        shell = ["bash", "-euo", "pipefail", "-c", block.text]
        command = [sys.executable, "-c", block.text] if block.language == "python" else shell
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
        output = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{block.name}\n{block.text}\n{output}"


def test_readme_is_a_front_door_and_whatever_is_not_run_says_why() -> None:
    for block in BLOCKS:
        assert block.text or block.reasons, f"{block.name} runs nothing and gives no reason"
    assert len(RUN) >= 5, "most of README runs"
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
