"""Extraction as a step of datatrove, whose executors start it: locally, on Slurm, Ray or HF Jobs.

Any callable of (data, rank, world_size) is a step there, so nothing of datatrove is imported. Its
notes of finished tasks are not looked at: the store's ledger says what is done, so a task that is
started again does what is left, of its own share first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cli import run
from pipeline.settings import Worker, resolve_request


@dataclass(frozen=True)
class ExtractStep:
    """Stage 1 (token rows), or both stages, of one extraction; documents pass through unread.

    Attributes:
        out: Folder of the run, which all tasks share.
        options: What a TOML file of ``gdistill-extract --config`` says, as a dictionary.
        tokens_only: Stage 1 alone, for an executor of CPUs that another one ``depends`` on.
    """

    out: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens_only: bool = False

    def __call__(self, data: Iterable[Any] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        yield from data or ()
        request = resolve_request(Path(self.out), self.options)
        for line in run(request, Worker.from_environment(rank, world_size), self.tokens_only):
            print(line)
