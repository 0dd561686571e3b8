"""The embedded corpus: the ways through a small grid within a move limit, enumerated exactly.

A layout is a rectangle of ``.`` (free), ``#`` (wall), one ``S`` and one ``T``; cells are (row,
column) from the upper left. A document is one simple path from S to T of at most ``max_moves``
moves, written ``up up right ...``. The corpus is drawn uniformly with replacement from all of them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shards.errors import UsageError, did_you_mean
from shards.provenance import generator

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TOKENS = ("<bos>", "<eos>", *MOVES)
"""The maze vocabulary in id order: 0..5."""

DEFAULT_MAX_MOVES = 9
NUM_DOCUMENTS = {"train": 2000, "validation": 500}

LAYOUTS = {
    "k4": (".....", "..#..", "..#..", ".S#.T"),
    "m57": ("#....", ".....", ".....", ".S#.T"),
}

Cell = tuple[int, int]
Moves = tuple[str, ...]


@dataclass(frozen=True)
class MazeLayout:
    """A checked layout.

    Attributes:
        name: Built-in name, or the stem of the layout's file.
        rows: The grid, top to bottom.
        max_moves: Longest path that counts.
    """

    name: str
    rows: tuple[str, ...]
    max_moves: int = DEFAULT_MAX_MOVES

    def __post_init__(self) -> None:
        where = f"maze layout {self.name}"
        if not self.rows or len({len(row) for row in self.rows}) != 1 or not self.rows[0]:
            raise UsageError(
                "the maze is not a rectangle", where=where, got=[len(row) for row in self.rows]
            )
        cells = "".join(self.rows)
        if stray := sorted(set(cells) - set(".#ST")):
            raise UsageError("unknown cell in the maze", where=where, got=stray, expected=". # S T")
        for mark in "ST":
            if cells.count(mark) != 1:
                raise UsageError(
                    f"the maze needs exactly one {mark}", where=where, got=cells.count(mark)
                )
        if self.max_moves < 1:
            raise UsageError("max_moves must be at least 1", where=where, got=self.max_moves)

    @property
    def start(self) -> Cell:
        return self._find("S")

    @property
    def target(self) -> Cell:
        return self._find("T")

    @property
    def row_length(self) -> int:
        """Tokens of a row: bos, the longest path, one eos."""
        return self.max_moves + 2

    def _find(self, mark: str) -> Cell:
        return next((r, row.index(mark)) for r, row in enumerate(self.rows) if mark in row)

    def is_free(self, cell: Cell) -> bool:
        """Whether a cell lies in the grid and is no wall."""
        row, column = cell
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return inside and self.rows[row][column] != "#"

    def paths(self) -> list[Moves]:
        """All simple paths from S to T of at most ``max_moves`` moves, breadth first.

        Ordered by length, then by the order of ``MOVES`` at the first difference.
        """
        found: list[Moves] = []
        frontier: list[tuple[Moves, tuple[Cell, ...]]] = [((), (self.start,))]
        while frontier:
            frontier, arrived = self._extend(frontier)
            found += arrived
        if not found:
            raise UsageError(
                "no way through the maze",
                where=f"maze layout {self.name}",
                expected=f"a path from S to T of at most {self.max_moves} moves",
            )
        return found

    def _extend(
        self, frontier: list[tuple[Moves, tuple[Cell, ...]]]
    ) -> tuple[list[tuple[Moves, tuple[Cell, ...]]], list[Moves]]:
        longer: list[tuple[Moves, tuple[Cell, ...]]] = []
        arrived: list[Moves] = []
        for moves, cells in frontier:
            for move, (down, right) in MOVES.items():
                cell = (cells[-1][0] + down, cells[-1][1] + right)
                if cell in cells or not self.is_free(cell):
                    continue
                if cell == self.target:
                    arrived.append((*moves, move))
                elif len(moves) + 1 < self.max_moves:
                    longer.append(((*moves, move), (*cells, cell)))
        return longer, arrived

    def artifact(self) -> dict[str, Any]:
        """What the scores need to know of the maze, JSON-ready."""
        return {
            "name": self.name,
            "rows": list(self.rows),
            "start": list(self.start),
            "target": list(self.target),
            "paths": [list(path) for path in self.paths()],
            "max_moves": self.max_moves,
        }


def load_maze(layout: str | Path) -> MazeLayout:
    """A built-in layout by name, or a layout file.

    A file is either the grid as plain text, or TOML with ``rows = [...]`` and, if wanted,
    ``max_moves``.

    Raises:
        UsageError: For an unknown name (naming the nearest) or a malformed layout.
    """
    if str(layout) in LAYOUTS:
        return MazeLayout(str(layout), LAYOUTS[str(layout)])
    path = Path(layout)
    if not path.is_file():
        raise UsageError(
            "unknown maze layout",
            where=f"maze:{layout}",
            expected=f"one of {sorted(LAYOUTS)} or a layout file",
            remedy=did_you_mean(str(layout), LAYOUTS),
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the maze layout is not UTF-8 text", where=path, got=error) from error
    if path.suffix != ".toml":
        return MazeLayout(
            path.stem, tuple(line.strip() for line in text.splitlines() if line.strip())
        )
    return _maze_from_toml(path, text)


def _maze_from_toml(path: Path, text: str) -> MazeLayout:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the maze layout is not TOML", where=path, got=error) from error
    rows, max_moves = values.pop("rows", None), values.pop("max_moves", DEFAULT_MAX_MOVES)
    well_typed = isinstance(rows, list) and all(isinstance(row, str) for row in rows)
    if values or not well_typed or not isinstance(max_moves, int):
        raise UsageError(
            "malformed maze layout",
            where=path,
            got=sorted(values) or rows,
            expected='rows = ["....", ...] and, optionally, max_moves',
        )
    return MazeLayout(path.stem, tuple(rows), max_moves)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher (``name``) that does not speak in moves."""
    unknown = sorted(set(MOVES) - set(tokenizer.get_vocab()))
    if unknown:
        raise UsageError(
            "the teacher does not know the moves of a maze",
            where=f"--teacher {name}",
            got=f"no token {unknown[0]!r}",
            expected=f"the tokens {', '.join(MOVES)}",
            remedy="leave --teacher out: a maze trains its own",
        )


def draw_documents(maze: MazeLayout, num_documents: int, seed: int, split: str) -> list[str]:
    """Paths drawn uniformly with replacement, as documents; a pure function of the arguments."""
    documents = [" ".join(path) for path in maze.paths()]
    chosen = torch.randint(
        len(documents), (num_documents,), generator=generator(seed, "maze paths", split)
    )
    return [documents[index] for index in chosen.tolist()]


def maze_tokenizer(model_max_length: int = DEFAULT_MAX_MOVES + 2) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the six tokens; a word it does not know is an error."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=TOKENS[0],
        eos_token=TOKENS[1],
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
