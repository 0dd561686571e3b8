"""House rules that a syntax tree can check: floors, doors, circles, the length of files."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import networkx
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
FLOORS: dict[str, list[list[str]]] = CONFIG["tool"]["gdistill"]["floors"]
ROOMS = {
    "shards": {"shards"},
    "pipeline": {"pipeline", "shards"},
    "trainer": {"trainer", "shards"},
    "evaluation": {"evaluation", "trainer", "shards"},
}
MAX_LINES = 400
MAX_FILES = 14
FILES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
ALL_FILES = FILES + sorted((REPOSITORY / "tests").rglob("*.py"))
ALL_FILES += sorted((REPOSITORY / "benchmarks").rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[tuple[str, tuple[str, ...]]]:
    """Modules imported anywhere in a file, inside functions too, with the names taken from them."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, ()) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import"
            found.add((node.module or "", tuple(alias.name for alias in node.names)))
    return frozenset(found)


def top_level(path: Path) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(path)}


def place(module: str) -> tuple[str, str] | None:
    """(room, sub-room or file of the room) that a module belongs to; None outside the house."""
    room, _, rest = module.partition(".")
    if room not in ROOMS:
        return None
    parts = rest.split(".")
    named = {name for floor in FLOORS[room] for name in floor}
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in named:
            return room, ".".join(parts[:length])
    return room, parts[0]


def floor_of(room: str, name: str) -> int:
    for height, names in enumerate(FLOORS[room]):
        if name in names:
            return height
    raise AssertionError(f"{room}/{name} stands on no floor of pyproject.toml")


def is_subroom(room: str, name: str) -> bool:
    return (REPOSITORY / room / name.replace(".", "/")).is_dir()


def foreign_imports(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Imports of a file that leave its own sub-room, with where they go."""
    own = place(module_name(path))
    for module, _ in sorted(imports(path)):
        target = place(module)
        if target is not None and target != own and module not in ROOMS:
            yield module, target


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_rooms_import_only_the_rooms_they_stand_on(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    foreign = (top_level(path) & set(ROOMS)) - ROOMS[room]
    assert not foreign, f"{relative(path)} imports {sorted(foreign)}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_shards_touches_the_storage_library(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    assert room == "shards" or "zarr" not in top_level(path)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_other_subrooms_are_entered_by_their_doors(path: Path) -> None:
    past = [
        module
        for module, (room, name) in foreign_imports(path)
        if is_subroom(room, name) and module != f"{room}.{name}"
    ]
    # errors.py stands before every door: its classes are raised everywhere.
    past = [module for module in past if not module.startswith("shards.base.")]
    assert not past, f"{relative(path)} walks past the door of {past}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_stands_only_on_lower_floors_of_its_room(path: Path) -> None:
    own = place(module_name(path))
    if own is None or module_name(path) in ROOMS:
        return
    height = floor_of(*own)
    above = [
        module
        for module, (room, name) in foreign_imports(path)
        if room == own[0] and floor_of(room, name) >= height
    ]
    assert not above, f"{relative(path)} (floor {height} of {own[0]}) imports {above}"


def test_the_floors_name_what_is_there() -> None:
    for room, floors in FLOORS.items():
        named = [name for floor in floors for name in floor]
        assert len(named) == len(set(named))
        for name in named:
            target = REPOSITORY / room / name.replace(".", "/")
            assert target.is_dir() or target.with_suffix(".py").is_file(), f"{room}/{name}"


def test_the_check_sees_every_room() -> None:
    assert {path.relative_to(REPOSITORY).parts[0] for path in FILES} == set(ROOMS)


def test_imports_form_no_circle() -> None:
    """Not through packages, and not through imports inside functions."""
    modules = {module_name(path): path for path in FILES}
    graph = networkx.DiGraph()
    for name, path in modules.items():
        if path.name == "__init__.py":
            continue  # a door loads nothing by itself
        for module, names in imports(path):
            if not names:
                graph.add_edge(name, module)
            for item in names:
                target = door_target(module, item, modules)
                if target in modules and modules[target].name != "__init__.py":
                    graph.add_edge(name, target)
    circles = [sorted(part) for part in networkx.strongly_connected_components(graph)]
    assert not [part for part in circles if len(part) > 1]
    assert not list(networkx.selfloop_edges(graph))


def door_target(module: str, item: str, modules: dict[str, Path]) -> str:
    """The file that ``from module import item`` leads to, through doors."""
    if f"{module}.{item}" in modules:
        return f"{module}.{item}"
    path = modules.get(module)
    if path is None or path.name != "__init__.py":
        return module
    for source, names in imports(path):
        if item in names:
            return source
    return module


@pytest.mark.parametrize("path", ALL_FILES, ids=relative)
def test_no_file_passes_the_wall(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{relative(path)} has {lines} lines"


def test_no_room_is_crowded() -> None:
    folders = {path.parent for path in FILES}
    counts = {relative(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: n for name, n in counts.items() if n > MAX_FILES} == {}


def test_every_door_says_what_happens_behind_it() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            lines = doc.count("\n") + 1
            assert 3 <= lines <= 14, f"{relative(path)}: a docstring of {lines} lines"


def test_no_module_shadows_the_standard_library_or_a_dependency() -> None:
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    taken -= set(ROOMS) | {"tests", "benchmarks", "configs"}
    shadows = [path for path in FILES if path.stem in taken and not path.stem.startswith("__")]
    assert not shadows, shadows
    assert not [path for path in FILES if path.stem == "utils"]


def test_readme_prints_the_floors() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for room, floors in FLOORS.items():
        line = f"{room:<11} " + " < ".join(", ".join(names) for names in floors)
        assert line in readme, f"README lacks or misstates the floors of {room}: {line}"
