"""What a judge has read, kept for this user: an interrupted evaluation goes on from there.

One line per text, found by the text's own hash, in a file named by everything else that decides the
numbers (the judge's weights and the windows). A torn last line is dropped. A reading is believed,
so none is looked for where somebody else may have written it: beside the samples, above all.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shards.base import GdistillError, append_line, canonical_json, whole_lines


def readings_folder(directory: Path) -> Path:
    """Where this user keeps what a judge reads for the results in ``directory``."""
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    return user_cache() / "gdistill" / "judged" / name


def user_cache() -> Path:
    """The folder for what a user's programs may make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


@dataclass(frozen=True)
class JudgedText:
    """A text in the judge's tokens; the token in front of it is left out.

    Attributes:
        ids: The judge's token ids.
        nll_nats: -log p of each, given what stands before it.
        counted: Whether it counts; what stands between texts does not.
    """

    ids: tuple[int, ...]
    nll_nats: tuple[float, ...]
    counted: tuple[bool, ...]

    @cached_property
    def nll_sum_nats(self) -> float:
        """Over the tokens that count, in float64."""
        return float(np.array(self.nll_nats)[list(self.counted)].sum())


class JudgeMemory:
    """Texts that were read, in memory and, if a folder is given, on disk.

    Args:
        folder: Where the file stands; None keeps nothing.
        identity: What decides the numbers besides the text: names the file.
    """

    def __init__(self, folder: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self._texts: dict[str, JudgedText] = {}
        self._file = None
        if folder is not None:
            name = hashlib.sha256(canonical_json(identity or {})).hexdigest()[:16]
            self._file = folder / f"{name}.judged"
            self._texts = _read_file(self._file)

    def __contains__(self, text: str) -> bool:
        return _key(text) in self._texts

    def __getitem__(self, text: str) -> JudgedText:
        return self._texts[_key(text)]

    def add(self, text: str, reading: JudgedText) -> None:
        """Remember a reading; it survives this process when this returns.

        Raises:
            GdistillError: When it cannot be written.
        """
        self._texts[_key(text)] = reading
        if self._file is None:
            return
        # The shortest decimal that is the same float32: what is read back is what was computed.
        nll = [float(str(np.float32(value))) for value in reading.nll_nats]
        record = [_key(text), reading.ids, nll, "".join("01"[flag] for flag in reading.counted)]
        try:
            append_line(self._file, json.dumps(record, separators=(",", ":")))
        except OSError as error:
            raise GdistillError(
                "cannot keep what the judge has read",
                where=self._file,
                got=error.strerror,
                remedy="set XDG_CACHE_HOME to a folder of your own",
            ) from error


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_file(file: Path) -> dict[str, JudgedText]:
    """The whole lines of the file; a torn one, and what an editor made of one, is read again."""
    found = {}
    for line in whole_lines(file):
        try:
            key, ids, nll, flags = json.loads(line)
            reading = JudgedText(
                tuple(map(int, ids)),
                tuple(_float32(nll)),
                tuple(flag == "1" for flag in flags),
            )
            if len(ids) == len(nll) == len(flags) and np.isfinite(reading.nll_nats).all():
                found[key] = reading
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _float32(values: list[float]) -> list[float]:
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32).astype(float).tolist()
