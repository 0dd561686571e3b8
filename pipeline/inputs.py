"""What stage 2 starts from, found and checked before anything costly.

Stage 1 may take hours; what a run would be refused for after it is asked here, before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import scheme_of
from pipeline.extract.manifest import rows_per_unit
from pipeline.maze.layout import MOVES, load_maze
from pipeline.maze.teacher import MazeTeacherConfig, demo_teacher_config, train_maze_teacher
from pipeline.settings import ExtractRequest, TeacherSettings
from pipeline.teacher.model import Teacher, check_row_length, check_vocabulary, tokenizer_size
from pipeline.teacher.model_group import ModelGroup
from pipeline.tokens.dataset import RECORD, TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from shards.errors import UsageError
from shards.language_model.loading import PretrainedFiles, find_pretrained
from shards.language_model.spread import Spread
from shards.store.location import file_claim, open_location
from shards.store.manifest import MANIFEST_FILE

MOST_OTHER_TOKENS = 0.01


@dataclass
class LazyTeacher:
    """The teacher, loaded when it is first needed: never, where nothing is left to do."""

    files: PretrainedFiles
    settings: TeacherSettings
    vocab_size: int
    device: torch.device
    group: ModelGroup | None = None

    @cached_property
    def loaded(self) -> Teacher:
        if self.group is None:
            return self.load(Spread(self.settings.device_map))
        return self.group.load(self.load)

    def load(self, spread: Spread) -> Teacher:
        """The teacher with its weights, on the devices of ``spread``."""
        return Teacher.load(
            self.files,
            self.settings.dtype,
            self.device,
            vocab_size=self.vocab_size,
            attention=self.settings.attention,
            compiled=self.settings.compiled,
            spread=spread,
        )


def known_teacher(request: ExtractRequest) -> PretrainedFiles | None:
    """What the teacher's small files tell; None for one that this run will train itself.

    Raises:
        UsageError: If there is no teacher.
    """
    settings, own = request.settings.teacher, request.out / "teacher"
    if settings.location is None:
        require_own_teacher(request)
    if settings.location is None and not own.exists():
        return None
    return find_pretrained(
        settings.location or own,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        weights=False,
    )


def prepare_teacher(
    request: ExtractRequest, device: torch.device, group: ModelGroup | None = None
) -> tuple[ExtractRequest, PreTrainedTokenizerBase, LazyTeacher]:
    """Find or train the teacher, and check all that its files tell.

    Returns:
        The request with its row length settled, the tokenizer, the teacher not yet loaded.

    Raises:
        UsageError: If teacher, tokenizer, rows, corpus and store do not fit together.
    """
    settings = request.settings.teacher
    if group is None:
        Spread(settings.device_map)  # a device that is not there is told before anything is read
    files = find_pretrained(
        settings.location or train_own_teacher(request),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    request, tokenizer = check_teacher(request, files)
    return request, tokenizer, LazyTeacher(files, settings, len(tokenizer), device, group)


def check_teacher(
    request: ExtractRequest, files: PretrainedFiles
) -> tuple[ExtractRequest, PreTrainedTokenizerBase]:
    """Refuse what a run, a plan and a dry run refuse alike: no weights are needed to see it.

    Returns:
        The request with its row length settled, the tokenizer.

    Raises:
        UsageError: If teacher, tokenizer, rows, corpus and store do not fit together.
    """
    settings = request.settings.teacher
    request = request.with_row_length(files.context_length)
    assert request.corpus.row_length is not None
    check_row_length(files, request.corpus.row_length)
    place = settings.tokenizer or files.folder
    tokenizer = load_tokenizer(place)
    check_vocabulary(files.num_logits, len(tokenizer), f"{place} and {files.name}")
    if settings.tokenizer is not None:
        check_same_tokens(tokenizer, files, place)
    if scheme_of(request.corpus.source)[0] == "maze":
        check_maze_vocabulary(tokenizer, files.name)
    arrays = request.codec.array_specs(len(tokenizer), files.hidden_size)
    rows_per_unit(request.corpus.row_length, arrays, request.settings.store)
    return request, tokenizer


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, files: PretrainedFiles, place: object
) -> None:
    """Refuse a tokenizer whose ids mean other tokens than those beside the teacher.

    A few may differ, as special tokens get new names; vocabularies of one size that are another's
    would otherwise pass for the teacher's own.

    Raises:
        UsageError: If more than 1% of the ids differ.
    """
    if tokenizer_size(files) is None:
        return
    own = {index: token for token, index in load_tokenizer(files.folder).get_vocab().items()}
    given = {index: token for token, index in tokenizer.get_vocab().items()}
    others = sorted(index for index in given if index in own and own[index] != given[index])
    if len(others) > MOST_OTHER_TOKENS * len(given):
        first = others[0]
        raise UsageError(
            "the tokenizer is of another family than the teacher",
            where=f"{place} and {files.name}",
            got=f"{len(others):,} ids that mean other tokens: {first} is {given[first]!r}",
            expected=f"{own[first]!r}, as beside the teacher",
            remedy="leave --tokenizer out",
        )


def check_maze_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher that does not speak in moves.

    Raises:
        UsageError: If it is one.
    """
    unknown = sorted(set(MOVES) - set(tokenizer.get_vocab()))
    if unknown:
        raise UsageError(
            "the teacher does not know the moves of a maze",
            where=f"--teacher {name}",
            got=f"no token {unknown[0]!r}",
            expected=f"the tokens {', '.join(MOVES)}",
            remedy="leave --teacher out: a maze trains its own",
        )


def require_store_place(store: str) -> bool:
    """Refuse a place where no store can be, before anything costly; whether one is begun there.

    Raises:
        UsageError: If the place is a file, or its scheme is not known here.
        GdistillError: If it cannot be reached.
    """
    if Path(store).is_file():
        raise UsageError("the store is a folder", where="--store", got=f"the file {store}")
    return open_location(store).size(MANIFEST_FILE) is not None


def tokenized(out: Path) -> bool:
    """Whether stage 1 is finished."""
    return (out / "tokens" / RECORD).is_file()


def require_known_ids(dataset: TokenDataset) -> None:
    """Refuse rows with ids that the vocabulary has not.

    Raises:
        UsageError: If there are any.
    """
    if dataset.max_token_id >= dataset.vocab_size:
        raise UsageError(
            "token id outside the vocabulary",
            where=dataset.path,
            got=dataset.max_token_id,
            expected=f"below {dataset.vocab_size}",
        )


def require_own_teacher(request: ExtractRequest) -> str:
    """The layout of a maze, the corpus that brings its teacher along.

    Raises:
        UsageError: For any other corpus.
    """
    scheme, layout = scheme_of(request.corpus.source)
    if scheme != "maze":
        raise UsageError(
            "no teacher",
            where="--teacher",
            expected="a local folder or the hub id of a causal language model",
        )
    return layout


def train_own_teacher(request: ExtractRequest) -> Path:
    """The teacher that a corpus brings along, trained once into ``<out>/teacher``."""
    layout = require_own_teacher(request)
    config = MazeTeacherConfig()
    if request.settings.teacher.preset == "demo":
        config = demo_teacher_config()
    config = replace(config, seed=request.corpus.seed)
    out = request.out / "teacher"
    with file_claim(request.out / ".teacher.lock", wait=True):
        train_maze_teacher(load_maze(layout or "k4"), out, config)
    return out
