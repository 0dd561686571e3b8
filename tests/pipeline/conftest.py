"""A small tokenizer and a small corpus, so that these tests need no reference data."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig
from pipeline.tokens import dataset, tokenizer
from pipeline.tokens.dataset import TokenDataset, prepare_tokens
from tests.pipeline.extract_cases import contents, options, run, save_teacher, write_corpus

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat,", "and", "then;", "Quick!", "old's"]
Prepare = Callable[..., TokenDataset]
Asked = Callable[..., dict[str, Any]]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """500 made-up sentences of 3 to 12 words."""
    source = random.Random(0)
    return [" ".join(source.choices(WORDS, k=source.randint(3, 12))) for _ in range(500)]


@pytest.fixture(scope="session")
def bpe(sentences: list[str]) -> PreTrainedTokenizerFast:
    """280 entries; ``<|endoftext|>`` (id 0) is bos and eos, as in GPT-2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bytes_ = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    special: dict[str, Any] = {"special_tokens": ["<|endoftext|>"], **bytes_}
    backend.train_from_iterator(sentences, trainers.BpeTrainer(vocab_size=280, **special))
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ends)


@pytest.fixture
def sentence_corpus(tmp_path: Path, sentences: list[str]) -> CorpusConfig:
    """500 sentences, one per line, the last 50 held out, in rows of 16."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(sentences) + "\n")
    settings: dict[str, Any] = {"row_length": 16, "validation_documents": 50}
    return CorpusConfig(f"text:{path}", document_separator="line", **settings)


@pytest.fixture
def prepare(sentence_corpus: CorpusConfig, bpe: PreTrainedTokenizerFast) -> Prepare:
    """Stage 1 of the sentences, or of a text, with changed settings, into a folder."""

    def prepared(out: Path, limits: Any = None, tokenizer: Any = bpe, **changes: Any) -> TokenDataset:
        config = dataclasses.replace(sentence_corpus, **changes)
        return prepare_tokens(config, tokenizer, out, limits=limits)

    return prepared


@pytest.fixture
def small_parts(monkeypatch: Patch) -> None:
    """Parts, row groups and batches small enough for a small corpus to have many."""
    monkeypatch.setattr(dataset, "PART_TOKENS", 800)
    monkeypatch.setattr(dataset, "ROW_GROUP_TOKENS", 160)
    monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", 40)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small teacher with its tokenizer; not to be written to."""
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file in the teacher's words; not to be written to."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def asked(teacher: Path, corpus: Path) -> Asked:
    """Options of a run of that teacher over that corpus, with changes."""
    return functools.partial(options, teacher, corpus)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, asked: Asked) -> Path:
    """Folder of a run of one process; not to be written to."""
    out = tmp_path_factory.mktemp("run")
    run(out, asked())
    return out


@pytest.fixture(scope="session")
def reference(finished: Path) -> dict[str, bytes]:
    """The small store as one process writes it."""
    return contents(finished / "store")
