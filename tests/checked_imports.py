"""Functions of the project check their arguments in tests: types by beartype, shapes by jaxtyping.

jaxtyping has an import hook of its own. It wraps every function as if it had shapes, which costs
60 µs a call, and while it imports one of our modules it hides the compiled files of all others.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

PACKAGES = ("shards", "pipeline", "trainer", "evaluation")
SHAPE = re.compile(r"\b(Bool|Float|Int|UInt|Shaped)\d*\[")


typechecked = beartype(conf=BeartypeConf(violation_type=TypeError))  # as Python's own


def has_shapes(owner: Any, names: dict[str, Any]) -> bool:
    """Whether an annotation of a function or class, or an alias that it names, has a shape."""

    def is_shape(value: Any) -> bool:
        parts = (value, *get_args(value))
        return any(isinstance(part, type) and issubclass(part, AbstractArray) for part in parts)

    text = " ".join(str(hint) for hint in getattr(owner, "__annotations__", {}).values())
    return bool(SHAPE.search(text)) or any(is_shape(names.get(w)) for w in re.findall(r"\w+", text))


def checked(owner: Any, unresolved: set[str]) -> Any:
    """A function, or a dataclass with shapes, that checks what it is given.

    Hints with one of the ``unresolved`` names are not checked.
    """
    names = vars(sys.modules[owner.__module__])
    if isinstance(owner, type):
        if dataclasses.is_dataclass(owner) and "__init__" in vars(owner):
            return jaxtyped(typechecker=typechecked)(owner) if has_shapes(owner, names) else owner
        return owner
    for name, hint in owner.__annotations__.items():
        if not unresolved.isdisjoint(re.findall(r"\w+", str(hint))):
            owner.__annotations__[name] = Any
    if not has_shapes(owner, names):
        return typechecked(owner)
    if inspect.isgeneratorfunction(owner):
        return owner  # its arguments are checked at the first step, in whose context none knows
    typed = typechecked(owner)

    @wraps(owner)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with jaxtyped("context"):  # in which a letter is one size
            return typed(*arguments, **keywords)

    return call


class Decorator(ast.NodeTransformer):
    """Put ``@__checked__`` at every function and class; find what only type checkers import."""

    def __init__(self) -> None:
        self.unresolved: set[str] = set()

    def visit_If(self, node: ast.If) -> Any:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [one for one in node.body if isinstance(one, ast.Import | ast.ImportFrom)]
            self.unresolved |= {name.asname or name.name for one in imports for name in one.names}
        return self.generic_visit(node)

    def mark(self, node: Any, place: int) -> Any:
        self.generic_visit(node)
        if not any(isinstance(d, ast.Name) and d.id == "no_type_check" for d in node.decorator_list):
            mark = ast.copy_location(ast.Name("__checked__", ast.Load()), node)
            node.decorator_list.insert(place, mark)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.mark(node, len(node.decorator_list))  # within classmethod and property

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self.mark(node, 0)  # around dataclass


class CheckedLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        path, decorator = self.get_filename(module.__name__), Decorator()
        tree = decorator.visit(ast.parse(self.get_data(path), path))
        vars(module)["__checked__"] = partial(checked, unresolved=decorator.unresolved)
        exec(compile(tree, path, "exec", dont_inherit=True), vars(module))


class CheckedFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    sys.meta_path.insert(0, CheckedFinder)
