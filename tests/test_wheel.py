"""What ``pip install gdistill`` brings works far from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
CALL = "import sys; from importlib import import_module; sys.argv[0] = {name!r}; {target}()"


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


def run(installed: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as pip's own script calls it, in an empty folder, with the wheel's modules."""
    module, _, function = SCRIPTS[script].partition(":")
    target = f"import_module({module!r}).{function}"
    code = CALL.format(name=script, target=target)
    home = installed.parent / "elsewhere"
    home.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_the_packages_with_their_data(installed: Path) -> None:
    where = "import shards, trainer; print(shards.__file__); print(trainer.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    found = subprocess.run(
        [sys.executable, "-c", where], env=environment, cwd="/", capture_output=True, text=True
    ).stdout.split()
    assert all(Path(place).is_relative_to(installed) for place in found) and len(found) == 2
    data = {
        path.relative_to(REPOSITORY)
        for package in ("shards", "pipeline", "trainer", "evaluation")
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml", ".html", ".md")
    }
    assert [path for path in data if not (installed / path).is_file()] == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "gdistill-lm-eval"])
def test_every_command_answers_help(installed: Path, script: str) -> None:
    done = run(installed, script, "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage" in done.stdout


def test_presets_are_inside(installed: Path) -> None:
    """A plan by a preset of the wheel needs nothing from outside."""
    done = run(
        installed,
        "gdistill-extract",
        "--corpus",
        "maze:k4",
        "--teacher-preset",
        "demo",
        "--plan",
        "--out",
        "x",
    )
    assert done.returncode == 0 and "B/token" in done.stdout + done.stderr, done.stderr[-2000:]
