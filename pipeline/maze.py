"""The embedded corpus, the ways through a small grid within a move limit, and its own teacher.

A layout is a rectangle of ``.`` (free), ``#`` (wall), one ``S`` and one ``T``; cells are (row,
column) from the upper left. A document is one simple path from S to T of at most ``max_moves``
moves, written ``up up right ...``. The corpus is drawn uniformly with replacement from all of them.

The teacher is an ordinary causal LM of transformers, trained on the spot. The folder it leaves
behind is a plain Hugging Face model directory; nothing downstream knows that it came from here.
``training.json`` in it records the settings and how close the model came to the distribution of
the paths; it is part of the folder, which appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from shards.atomic import publish_folder, write_json_atomic
from shards.console import progress_bar
from shards.errors import UsageError, did_you_mean
from shards.settings import derive_seed, generator, to_mapping

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TOKENS = ("<bos>", "<eos>", *MOVES)
"""The maze vocabulary in id order: 0..5."""
BOS, EOS = 0, 1
DEFAULT_MAX_MOVES = 9
NUM_DOCUMENTS = {"train": 2000, "validation": 500}
LAYOUTS = {"k4": (".....", "..#..", "..#..", ".S#.T"), "m57": ("#....", ".....", ".....", ".S#.T")}
RECORD = "training.json"
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
        where, cells = f"maze layout {self.name}", "".join(self.rows)
        widths = [len(row) for row in self.rows]
        if len(set(widths)) != 1:
            raise UsageError("the maze is not a rectangle", where=where, got=widths)
        if stray := sorted(set(cells) - set(".#ST")):
            raise UsageError("unknown cell in the maze", where=where, got=stray, expected=". # S T")
        for mark in "ST":
            if (count := cells.count(mark)) != 1:
                raise UsageError(f"the maze needs exactly one {mark}", where=where, got=count)

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
        """All simple paths from S to T of at most ``max_moves`` moves.

        Ordered by length, then by the order of ``MOVES`` at the first difference.
        """
        found = sorted(self._continued((), (self.start,)), key=len)
        if not found:
            expected = f"a path from S to T of at most {self.max_moves} moves"
            where = f"maze layout {self.name}"
            raise UsageError("no way through the maze", where=where, expected=expected)
        return found

    def _continued(self, moves: Moves, cells: tuple[Cell, ...]) -> Iterator[Moves]:
        if cells[-1] == self.target:
            yield moves
        elif len(moves) < self.max_moves:
            for move, (down, right) in MOVES.items():
                cell = (cells[-1][0] + down, cells[-1][1] + right)
                if cell not in cells and self.is_free(cell):
                    yield from self._continued((*moves, move), (*cells, cell))

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
    """A built-in layout by name (k4 if none is named), or a file of the grid; a UsageError for any other."""
    name, path = str(layout) or "k4", Path(os.path.expanduser(layout))
    if name in LAYOUTS:
        return MazeLayout(name, LAYOUTS[name])
    if not path.is_file():
        expected = f"one of {sorted(LAYOUTS)} or a layout file"
        where, remedy = f"maze:{layout}", did_you_mean(name, LAYOUTS)
        raise UsageError("unknown maze layout", where=where, expected=expected, remedy=remedy)
    try:
        return MazeLayout(path.stem, tuple(path.read_text(encoding="utf-8").split()))
    except UnicodeDecodeError as error:
        raise UsageError("the maze layout is not UTF-8 text", where=path, got=error) from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher (``name``) that does not speak in moves."""
    if unknown := sorted(set(MOVES) - set(tokenizer.get_vocab())):
        what, where = "the teacher does not know the moves of a maze", f"--teacher {name}"
        got, expected = f"no token {unknown[0]!r}", f"the tokens {', '.join(MOVES)}"
        remedy = "leave --teacher out: a maze trains its own"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)


def draw_documents(maze: MazeLayout, num_documents: int, seed: int, split: str) -> list[str]:
    """Paths drawn uniformly with replacement, as documents; a pure function of the arguments."""
    documents = [" ".join(path) for path in maze.paths()]
    draws = generator(seed, "maze paths", split)
    chosen = torch.randint(len(documents), (num_documents,), generator=draws)
    return [documents[index] for index in chosen.tolist()]


def maze_documents(layout: str, seed: int, split: str) -> tuple[list[str], dict[str, Any]]:
    """The documents of a split, and what tells them from others, JSON-ready."""
    maze, count = load_maze(layout), NUM_DOCUMENTS[split]
    return draw_documents(maze, count, seed, split), {**maze.artifact(), "seed": seed, "num_documents": count}


def maze_tokenizer(model_max_length: int = DEFAULT_MAX_MOVES + 2) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the six tokens; a word it does not know is an error."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=TOKENS[BOS],
        eos_token=TOKENS[EOS],
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


# The teacher.


@dataclass(frozen=True)
class MazeTeacherConfig:
    """Shape and schedule of the teacher.

    Attributes:
        learning_rate: Peak of a linear warm-up and cosine decay (AdamW).
        batch_size: Rows per step; a corpus of fewer distinct rows is trained on whole.
    """

    num_layers: int = 8
    num_heads: int = 8
    hidden_size: int = 128
    num_steps: int = 400
    learning_rate: float = 1e-3
    batch_size: int = 256
    num_documents: int = NUM_DOCUMENTS["train"]
    seed: int = 0


TEACHERS = {"full": MazeTeacherConfig(), "demo": MazeTeacherConfig(4, 8, 64, num_steps=300, learning_rate=4e-3)}
"""The full protocol's, and a smaller one for a quick walk through the system."""


def path_rows(paths: list[Moves], row_length: int) -> Int[Tensor, "n l"]:
    """Rows bos + moves + eos padding, as the ``pad`` packing makes them; int64."""
    rows = torch.full((len(paths), row_length), EOS)
    rows[:, 0] = BOS
    for row, path in zip(rows, paths, strict=True):
        row[1 : len(path) + 1] = torch.tensor([TOKENS.index(move) for move in path])
    return rows


def row_log_probs(model: LlamaForCausalLM, rows: Int[Tensor, "n l"]) -> Float[Tensor, "n"]:
    """Log-probability in nats of every row given its first token; float32."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1).sum(-1)


def train_maze_teacher(maze: MazeLayout, out: Path, config: MazeTeacherConfig) -> None:
    """Train the teacher of ``maze`` and save it to ``out``; a finished one is left as it is.

    ``out`` becomes the model directory: weights as safetensors, tokenizer, ``maze.json`` with the
    teacher's path probabilities, ``training.json``.

    Raises:
        UsageError: If ``out`` holds something else, or a teacher of other settings.
    """
    settings = {"maze": maze.artifact(), "config": to_mapping(config)}
    if out.exists():
        _require_same(out, settings)
        return
    model, report = _train(maze, config)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    transformers_logging.disable_progress_bar()  # one bar per stage, and it is ours
    model.save_pretrained(temporary)
    maze_tokenizer(maze.row_length).save_pretrained(temporary)
    artifact = {**maze.artifact(), "seed": config.seed, "teacher_probabilities": report["path_probabilities"]}
    write_json_atomic(temporary / "maze.json", artifact)
    write_json_atomic(temporary / RECORD, {**settings, "report": report})
    publish_folder(temporary, out)


def _require_same(out: Path, settings: dict[str, Any]) -> None:
    """Refuse what is already there and no teacher of these settings."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what, expected = "the folder is no maze teacher", f"a {RECORD} in it"
        remedy = "choose another folder"
        raise UsageError(what, where=out, expected=expected, remedy=remedy) from error
    for part, wanted in settings.items():
        for key, value in wanted.items():
            if (found := record.get(part, {}).get(key)) != value:
                what, where = "a maze teacher with other settings is there", f"{out}: {part}.{key}"
                remedy = "choose another folder or remove this one"
                raise UsageError(what, where=where, got=found, expected=value, remedy=remedy)


def _train(maze: MazeLayout, config: MazeTeacherConfig) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    documents = draw_documents(maze, config.num_documents, config.seed, "train")
    rows = path_rows([tuple(document.split()) for document in documents], maze.row_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "maze teacher weights"))
        shape = LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=maze.row_length,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    warmup = max(1, config.num_steps // 20)

    def factor(step: int) -> float:
        """Linear warm-up, then half a cosine down to 0."""
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, config.num_steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = generator(config.seed, "maze teacher batches")
    with progress_bar("maze teacher", config.num_steps, unit="step") as bar:
        for _ in range(config.num_steps):
            batch, weights = _batch(rows, config.batch_size, order)
            loss = -(weights * row_log_probs(model, batch)).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.advance(1)
            bar.note(f"loss {loss.item():.3f} nats/row")
    model.eval()
    return model, _report(model, maze, rows)


def _batch(
    rows: Int[Tensor, "n l"], batch_size: int, order: torch.Generator
) -> tuple[Int[Tensor, "b l"], Float[Tensor, "b"]]:
    """Distinct rows with their shares: equal rows need one forward pass, the loss is the same."""
    distinct, counts = rows.unique(dim=0, return_counts=True)
    if len(distinct) > batch_size:
        chosen = torch.randint(len(rows), (batch_size,), generator=order)
        distinct, counts = rows[chosen].unique(dim=0, return_counts=True)
    return distinct, counts / counts.sum()


@torch.no_grad()
def _report(model: LlamaForCausalLM, maze: MazeLayout, rows: Int[Tensor, "n l"]) -> dict[str, Any]:
    """How close the teacher came to its corpus, JSON-ready.

    The probability of each path, in the order of :meth:`MazeLayout.paths`; the distance to the uniform
    distribution over them; the mean negative log-likelihood of a training row, and the entropy of the
    paths' shares in the rows, which is the least possible.
    """
    paths = path_rows(maze.paths(), maze.row_length)
    model_probs = row_log_probs(model, paths).double().exp()
    shares = (rows[:, None] == paths[None]).all(-1).double().mean(0)
    seen, outside = shares > 0, (1 - model_probs.sum()).clamp(min=0)  # what the model gives to no path
    return {
        "path_probabilities": model_probs.tolist(),
        "total_variation": (((model_probs - 1 / len(paths)).abs().sum() + outside) / 2).item(),
        "loss_nats": -(shares[seen] * model_probs[seen].log()).sum().item(),
        "entropy_nats": -(shares[seen] * shares[seen].log()).sum().item(),
    }
