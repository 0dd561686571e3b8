"""The house rules that a syntax tree can check: who imports whom, and how long a file may be."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = {
    "shards": {"shards"},
    "pipeline": {"pipeline", "shards"},
    "trainer": {"trainer", "shards"},
    "evaluation": {"evaluation", "trainer", "shards"},
}
MAX_LINES = 400
FILES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
ALL_FILES = FILES + sorted((REPOSITORY / "tests").rglob("*.py"))
ALL_FILES += sorted((REPOSITORY / "benchmarks").rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Top-level names imported anywhere in a file, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_rooms_import_only_through_their_doors(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    foreign = (imported_modules(path) & set(ROOMS)) - ROOMS[room]
    assert not foreign, f"{path.relative_to(REPOSITORY)} imports {sorted(foreign)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_only_shards_touches_the_storage_library(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    assert room == "shards" or "zarr" not in imported_modules(path)


def test_the_check_sees_every_room() -> None:
    assert {path.relative_to(REPOSITORY).parts[0] for path in FILES} == set(ROOMS)


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_file_passes_the_wall(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path.relative_to(REPOSITORY)} has {lines} lines"


def test_no_module_shadows_the_standard_library_or_a_dependency() -> None:
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    taken -= set(ROOMS) | {"tests", "benchmarks", "configs"}
    shadows = [path for path in FILES if path.stem in taken and not path.stem.startswith("__")]
    assert not shadows, shadows
    assert not [path for path in FILES if path.stem == "utils"]


def test_imports_form_no_circle() -> None:
    graph = {
        str(path.relative_to(REPOSITORY).with_suffix("")).replace("/", "."): _edges(path)
        for path in FILES
    }
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"import circle: {' -> '.join((*trail, name))}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for target in sorted(graph.get(name, set()) & set(graph)):
            visit(target, (*trail, name))
        state[name] = 2

    for name in sorted(graph):
        visit(name, ())


def _edges(path: Path) -> set[str]:
    """Modules imported at the top of a file (an import inside a function is no circle)."""
    edges: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            edges |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            edges |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return edges
