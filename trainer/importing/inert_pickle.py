"""Read a torch checkpoint without running anything it names.

``torch.load(weights_only=True)`` refuses a whole file for one class that it does not know, and the
authors' files hold a pickled config and tokenizer. Here tensors and plain containers are built as
usual, and every other global becomes an inert object that only remembers what it was given: no
code of the named class runs, and none is imported.
"""

from __future__ import annotations

import pickle
import types
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import torch

from shards.base import GdistillError, UsageError, first_line

HARMLESS = {
    "builtins": {"bool", "complex", "dict", "float", "frozenset", "int", "list"}
    | {"set", "slice", "str", "tuple"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
}


class Inert:
    """Stands for an object of a class that is not loaded."""

    module: ClassVar[str] = ""
    qualified_name: ClassVar[str] = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = (*arguments, *named.values())
        self.state: Any = None
        self.items: list[Any] = []

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        Inert.__init__(made, *arguments, **named)
        return made

    def __call__(self, *arguments: Any, **named: Any) -> Inert:
        return Inert(self, *arguments, **named)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """What the pickle of a list-like class calls."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """What the pickle of a list-like class calls."""
        self.items.extend(values)


class InertUnpickler(pickle.Unpickler):
    """An unpickler whose globals are tensors' builders, plain containers or :class:`Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        """The real global where it is harmless; else a fresh inert class."""
        if name in HARMLESS.get(module, ()):
            found = super().find_class(module, name)
            # A function of its own each time: a pickle may set attributes of what it names.
            return (lambda *given: found(*given)) if module == "torch._utils" else found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        namespace = {"module": module, "qualified_name": name}
        return type(name.rsplit(".", 1)[-1], (Inert,), namespace)


def _inert_pickle_module() -> types.ModuleType:
    module = types.ModuleType("inert_pickle")
    module.Unpickler = InertUnpickler  # type: ignore[attr-defined]
    return module


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The dict that ``torch.save`` wrote, tensors on the CPU.

    ``weights_only=True`` where that suffices, else with inert objects in place of what it refuses.

    Raises:
        UsageError: When the file is absent.
        GdistillError: When it is no torch zip archive, or damaged; the reason is given.
    """
    if not path.is_file():
        raise UsageError("no such checkpoint", where=path)
    if not zipfile.is_zipfile(path):
        expected = "a zip archive written by torch.save (PyTorch 1.6 or later)"
        raise GdistillError("cannot read the checkpoint", where=path, expected=expected)
    try:
        _require_stored_records(path)
        loaded = _load(path)
    except GdistillError:
        raise
    except Exception as error:  # a damaged pickle may raise anything at all
        reason = first_line(error)
        raise GdistillError("cannot read the checkpoint", where=path, got=reason) from error
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise GdistillError("not a checkpoint", where=path, got=kind, expected="a dict")
    return loaded


def _require_stored_records(path: Path) -> None:
    """torch.save compresses nothing: an archive that unpacks to more than its size is a bomb."""
    with zipfile.ZipFile(path) as archive:
        total = sum(record.file_size for record in archive.infolist())
    if total > path.stat().st_size:
        expected = "records as torch.save stores them, uncompressed"
        raise GdistillError("not a checkpoint", where=path, got=f"{total:,} B", expected=expected)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # Safe although weights_only is off: InertUnpickler decides which globals exist.
        module = _inert_pickle_module()
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)


def plain_config(value: Any) -> Any:
    """A config as plain dicts and values, also from the inert remains of an OmegaConf tree.

    An OmegaConf node pickles its children as state ``_content`` and a leaf's value as ``_val``.
    """
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        return plain_config(state.get("_content", state.get("_val")))
    if isinstance(value, dict):
        return {str(key): plain_config(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_config(entry) for entry in value]
    return value
