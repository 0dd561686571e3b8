"""A page on which samples settle pass by pass: students beside each other, under the same noise.

The page is one file that loads nothing from outside. It shows in which pass each token was
revealed, for several budgets of passes and several noises, and beside them the teacher, which
writes one token a pass from the same noise. For mazes it draws the way on the map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from evaluation.maze import BOS, Maze, moves_of_words, teacher_decode
from shards.atomic import require_writable, write_bytes_atomic
from shards.console import progress_bar
from shards.errors import UsageError
from shards.settings import nested, parse_override
from trainer.sampling.fill import Sampler, require_whole_row_student
from trainer.sampling.noise import noise_of_rows, sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.students.registry import Student

TEMPLATE = Path(__file__).with_name("passes.html")
Role = Literal["plain", "noise", "teacher"]


@dataclass(frozen=True)
class Settled:
    """One finished row and how it came to be.

    Attributes:
        pieces: Text of each token, the given first one included.
        passes: The pass, from 1, that revealed each token; 0 where it was given.
        verdict: What is to be said of the whole row.
    """

    pieces: tuple[str, ...]
    passes: tuple[int, ...]
    verdict: str = ""


@dataclass(frozen=True)
class Column:
    """A student, or the teacher.

    Attributes:
        name: What it is called.
        role: Decides its colour.
        samples: Budget of passes -> a row per noise; ``own`` for the teacher, which has no budget.
    """

    name: str
    role: Role
    samples: Mapping[str, Sequence[Settled]]


@torch.no_grad()
def settle(student: Student, sampler: Sampler, sample_id: int, seed: int) -> tuple[Int[Tensor, "l"], list[int]]:
    """Draw one sample, and note which pass revealed each of its L tokens.

    The sample is the one that ``student.generate`` draws with this seed at this index.

    Raises:
        UsageError: For a student that does not fill whole rows, or that knows no first token.
    """
    whole = require_whole_row_student(student, "pass by pass page's")
    length, device = student.config.row_length, student.device
    rows = torch.full((1, length), student.mask_id, device=device)
    rows[0, 0] = student.config.require_first_token()
    read: list[Tensor] = []
    ids = torch.tensor([sample_id], device=device)
    noise = noise_of_rows(student, seed, ids, length)
    hook = whole.backbone.vocab_embed.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0].clone()))
    try:
        tokens = sampler.sample(student, rows, ids, noise, seed).tokens[0]
    finally:
        hook.remove()
    was_open = torch.stack(read) == student.mask_id  # [passes, L]: before each of them
    return tokens.cpu(), was_open.sum(0).tolist()


def read_text(tokenizer: Any, tokens: Int[Tensor, "l"], passes: list[int]) -> Settled:
    """A row of text: what each token adds to it; nothing where it is a part of a character."""
    pieces, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count].tolist())
        is_whole = text.startswith(before) and not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text[len(before) :] if is_whole else "")
        before = text if is_whole else before
    return Settled(tuple(pieces), tuple(passes))


def read_moves(maze: Maze, words: Sequence[str], tokens: Int[Tensor, "l"], passes: list[int]) -> Settled:
    """A row of a maze, which says whether it reaches the target."""
    pieces = [words[int(token)] for token in tokens]
    reaches = maze.is_success(moves_of_words(pieces))
    return Settled(tuple(pieces), tuple(passes), "reaches T" if reaches else "does not reach T")


def write_page(path: Path, columns: Sequence[Column], *, title: str, about: str, maze: Maze | None = None) -> Path:
    """Write the page.

    Args:
        path: The file.
        columns: At least one student; all of as many rows.
        title: Heading.
        about: A paragraph below it.
        maze: The map, for rows of a maze.
    """
    budgets = list(columns[0].samples)
    data = {
        "title": title,
        "about": about,
        "budgets": list(map(int, budgets)),
        "num_samples": len(columns[0].samples[budgets[0]]),
        "columns": [asdict(column) for column in columns],
        "maze": maze and {"rows": maze.rows, "start": maze.start, "target": maze.target},
    }
    # A script element ends at the first "</", whatever its type.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8").replace("DATA", text, 1)
    write_bytes_atomic(path, page.encode())
    return path


def passes(
    models: Annotated[list[str], typer.Argument(help="NAME=MODEL, students of one tokenizer.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("passes.html"),
    nfe: Annotated[str, typer.Option(help="Budgets of passes.")] = "1,2,4,8",
    num: Annotated[int, typer.Option(min=1, help="Noises to choose from.")] = 12,
    seed: Annotated[int, typer.Option(help="As of gdistill-sample.")] = 0,
    teacher: Annotated[str | None, typer.Option(help="Their teacher: what it writes from the same noise.")] = None,
    maze: Annotated[Path | None, typer.Option(help="STORE/corpus/maze.json of a maze.")] = None,
    sampler: Annotated[str, typer.Option(help="A sampler of whole rows.")] = "ancestral",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Settings of the sampler, key=value.")] = None,
) -> None:
    """Make a page on which samples of students settle pass by pass, under the same noise."""
    from evaluation.samples import named_folder
    from trainer.sample_cli import parse_budgets
    from trainer.students.folder import open_model

    require_writable(out.parent)
    named = dict(named_folder(text) for text in models)
    opened = {name: open_model(folder) for name, folder in named.items()}
    first, tokenizer = next((model.student, model.tokenizer) for model in opened.values())
    if tokenizer is None:
        raise UsageError("the student has no tokenizer beside it", where=models[0])
    own: dict[str, Any] = {}
    for text in settings or ():
        own |= nested(*parse_override(text))
    read = partial(read_text, tokenizer)
    found = None if maze is None else Maze.read(maze)
    if found is not None:
        words = list(map(str, tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))
        if BOS not in words:
            raise UsageError("these students write no moves", where=f"--maze {maze}")
        read = partial(read_moves, found, words)
    columns = []
    with progress_bar("passes", len(opened) + (teacher is not None), unit="models") as bar:
        for name, model in opened.items():
            student, samples = model.student, {}
            settings_of = {"decision": "argmax", "tau": 1.0} if student.is_conditioned else {}
            for budget in parse_budgets("--nfe", nfe):
                chosen = make_sampler(sampler, **{"nfe": budget, **settings_of, **own})
                samples[str(budget)] = [read(*settle(student, chosen, n, seed)) for n in range(num)]
            columns.append(Column(name, "noise" if student.is_conditioned else "plain", samples))
            bar.advance(1)
        if teacher is not None:
            from evaluation.text.reading import load_judge

            network, length = load_judge(teacher).model, first.config.row_length
            noise = sampling_noise(seed, torch.arange(num), length, network.config.vocab_size)
            begun = torch.full((num,), first.config.require_first_token())
            written = [read(row, [*range(length)]) for row in teacher_decode(network, begun, noise, length)]
            columns.append(Column("teacher", "teacher", {"own": written}))
            bar.advance(1)
    about = (
        "Every student fills a whole row in few passes; the teacher writes one token a pass. "
        "The noise of one number is the same for all that see it."
    )
    write_page(out, columns, title="Pass by pass", about=about, maze=found)
    typer.echo(f"wrote {out}")
