"""What ``pip install gdistill`` brings works far from the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.commands import python

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
CALLS = """
import json, sys
from importlib import import_module
for target, words in json.loads(sys.argv[1]):
    module, _, function = target.partition(":")
    sys.argv = words
    try:
        getattr(import_module(module), function)()
    except SystemExit as done:
        assert not done.code, words
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and nothing else; dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = folder.glob("gdistill-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_packages_with_their_data(installed: Path) -> None:
    where = "import shards, trainer; print(shards.__file__); print(trainer.__file__)"
    found = python("-c", where, path=installed, cwd=Path("/")).stdout.split()
    assert all(Path(place).is_relative_to(installed) for place in found) and len(found) == 2
    data = {
        path.relative_to(REPOSITORY)
        for package in ("shards", "pipeline", "trainer", "evaluation")
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml", ".html", ".md")
    }
    assert [path for path in data if not (installed / path).is_file()] == []


def test_every_command_answers_help_and_a_plan_by_a_preset_needs_nothing(installed: Path) -> None:
    """As pip's scripts call them, in an empty folder, with the wheel's modules."""
    calls = [(SCRIPTS[n], [n, "--help"]) for n in SCRIPTS if n != "gdistill-lm-eval"]
    plan = ["gdistill-extract", "--corpus", "maze:k4", "--teacher-preset", "demo", "--plan"]
    plan += ["--out", "x"]
    calls.append((SCRIPTS[plan[0]], plan))
    home = installed.parent / "elsewhere"
    home.mkdir()
    done = python("-c", CALLS, json.dumps(calls), path=installed, cwd=home)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Usage") == len(calls) - 1
    assert "B/token" in done.stdout + done.stderr
