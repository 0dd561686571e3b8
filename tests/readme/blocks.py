"""README's code blocks, and whether each can be run.

A shell line that ends in ``(not run by the README test: REASON)`` is left out, and so is a whole
block whose first line says so. Everything else runs, in order, in one folder, as a reader types it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = re.compile(r"\(not run by the README test: ([^)]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, what of it is run, and why the rest is not."""

    page: str
    heading: str
    line: int
    language: str
    text: str
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page}: {self.heading}, line {self.line}"


def read_blocks(page: Path) -> list[Block]:
    """The shell and Python blocks of a Markdown file, in order."""
    blocks: list[Block] = []
    heading, opened, language, lines = "", 0, "", [""]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if opened and language in ("bash", "sh", "python"):
                blocks.append(_block(page.name, heading, opened, language, lines))
            opened, language, lines = (0, "", []) if opened else (number, line[3:].strip(), [])
        elif opened:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    return blocks


def _block(page: str, heading: str, opened: int, language: str, lines: list[str]) -> Block:
    reasons = tuple(match.group(1) for line in lines if (match := NOT_RUN.search(line)))
    if lines and NOT_RUN.search(lines[0]) and lines[0].lstrip().startswith("#"):
        lines = []
    kept = [line for line in lines if not NOT_RUN.search(line)]
    return Block(page, heading, opened, language, "\n".join(kept).strip(), reasons)
