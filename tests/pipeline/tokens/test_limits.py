"""As many rows as asked for, special tokens in a text, and what belongs to the identity of rows."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig
from pipeline.corpus.sources import file_identity
from pipeline.references import write_references
from pipeline.tokens import build as stage1
from pipeline.tokens.build import corpus_identity, prepare_tokens
from shards.errors import UsageError


@pytest.mark.usefixtures("small_parts")
def test_only_the_rows_asked_for_are_tokenized(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "whole")
    seen, read = [], stage1.read_span

    def counted(*arguments):  # type: ignore[no-untyped-def]
        for item in read(*arguments):
            seen.append(item)
            yield item

    monkeypatch.setattr(stage1, "read_span", counted)
    limits = {"train": 7, "validation": 0}
    few = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "few", limits=limits)
    assert (few.num_rows("train"), few.num_rows("validation")) == (7, 0)
    assert np.array_equal(few.read_rows("train", 0, 7), whole.read_rows("train", 0, 7))
    assert len(seen) < 250, "of 500 documents"
    # The same and fewer rows are there; more are not.
    for rows in (7, 3):
        again = {"train": rows, "validation": 0}
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "few", limits=again)
    for more in ({"train": 8, "validation": 0}, {"train": 7}, {}):
        with pytest.raises(UsageError, match="only the first ones"):
            prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "few", limits=more)


def test_a_special_token_in_a_text_is_text_and_counted(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat<|endoftext|>the dog sat on a mat"}\n' * 9)
    records = {}
    for choice in ("text", "token"):
        config = CorpusConfig(
            f"jsonl:{tmp_path}/a.jsonl",
            row_length=4,
            validation_fraction=0.0,
            separate_train=False,
            special_tokens=choice,  # type: ignore[arg-type]
        )
        dataset = prepare_tokens(config, bpe_tokenizer, tmp_path / choice)
        rows = dataset.read_rows("train", 0, dataset.num_rows("train"))
        records[choice] = int((rows == 0).sum())
        assert dataset.record["splits"]["train"]["num_special_tokens"] == 9
        text = bpe_tokenizer.decode(rows.reshape(-1).tolist())
        assert text.startswith("the cat<|endoftext|>the dog")
    assert records == {"text": 0, "token": 9}


@pytest.mark.parametrize(
    "change",
    [
        {"detokenizer": "ptb"},
        {"keep_empty": True},
        {"on_bad_utf8": "skip"},
        {"special_tokens": "token"},
        {"packing": "wrap"},
        {"validation_fraction": 0.5, "validation_documents": 0},
    ],
    ids=str,
)
def test_every_setting_that_can_change_a_row_is_in_the_identity(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    change: dict[str, object],
) -> None:
    other = dataclasses.replace(sentence_corpus, **change)  # type: ignore[arg-type]
    identities = [corpus_identity(each, bpe_tokenizer, None) for each in (sentence_corpus, other)]
    assert identities[0] != identities[1]


def test_a_file_of_the_same_size_is_hashed_again_once_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    known = file_identity(path, {})
    path.write_text("two")
    os.utime(path, ns=(1, known["modified_ns"] + 1))
    assert file_identity(path, {str(path): known})["sha256"] != known["sha256"]


def test_a_part_is_on_disk_before_it_has_its_name(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A journal that names a part must never outlive it in a power cut."""
    synced, fsync, replace = set(), os.fsync, os.replace

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(old: Path, new: Path) -> None:
        assert os.stat(old).st_ino in synced, f"{new} is named before its content is on disk"
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path)


def test_rows_as_reference_texts(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path)
    out = tmp_path / "references.jsonl"
    assert write_references(str(tmp_path), out, 5, "train") == 5
    lines = out.read_text().splitlines()
    assert len(lines) == 5
    rows = dataset.read_rows("train", 0, 5)
    for row, line in zip(rows, lines, strict=True):
        kept = row[1:] if row[0] == dataset.bos_id else row
        assert json.loads(line) == {"text": bpe_tokenizer.decode(kept.tolist())}
    with pytest.raises(UsageError, match="too few rows"):
        write_references(str(tmp_path), out, 10**6, "train")
