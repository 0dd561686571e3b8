"""Token rows: which they are, what decides them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.corpus.detokenize import detokenizer
from pipeline.corpus.sources import file_identity
from pipeline.maze import load_maze, maze_tokenizer, path_rows
from pipeline.references import write_references
from pipeline.tokens import build, tokenizer
from pipeline.tokens.build import corpus_identity, prepare_tokens
from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION, TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer, special_ids
from shards.errors import GdistillError, IntegrityError, UsageError
from tests.pipeline.conftest import Prepare


def streamed(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> np.ndarray:
    """The reference's stream: every document, then eos, cut into rows; the rest is dropped."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in ids))
    num_rows = len(stream) // length
    return np.array(stream[: num_rows * length]).reshape(num_rows, length)


def all_rows(dataset: TokenDataset, split: str) -> np.ndarray:
    return dataset.read_rows(split, 0, dataset.num_rows(split))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.usefixtures("small_parts")
def test_rows_on_disk(
    tmp_path: Path,
    prepare: Prepare,
    bpe_tokenizer: PreTrainedTokenizerFast,
    sentences: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = prepare(tmp_path / "run")
    for split, texts in (("train", sentences[:450]), ("validation", sentences[450:])):
        expected = streamed(bpe_tokenizer, texts, 16)
        assert np.array_equal(all_rows(dataset, split), expected)
        # Ranges across row groups and parts.
        for start in range(0, len(expected) - 37, 29):
            found = dataset.read_rows(split, start, start + 37)
            assert np.array_equal(found, expected[start : start + 37])
    assert len(dataset.parts("train")) > 3
    assert dataset.read_rows("train", 5, 5).shape == (0, 16)
    assert (dataset.row_length, dataset.vocab_size, dataset.eos_id) == (16, 280, 0)
    assert dataset.max_token_id == max(all_rows(dataset, name).max() for name in dataset.splits)
    for split in dataset.splits:
        begin = 0
        for part in dataset.parts(split):
            rows = dataset.read_rows(split, begin, begin + part.num_rows)
            assert sha256(rows.astype("<i4").tobytes()).hexdigest() == part.tokens_sha256
            begin += part.num_rows
    assert len(AutoTokenizer.from_pretrained(dataset.tokenizer_path)) == 280
    summary = dataset.record["splits"]["train"]
    assert (summary["num_documents"], summary["num_rows"]) == (450, dataset.num_rows("train"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]
    with pytest.raises(IndexError):
        dataset.read_rows("train", 0, dataset.num_rows("train") + 1)
    # Other readers open the files.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    files = {split: str(dataset.path / split / "*.parquet") for split in dataset.splits}
    loaded = datasets.load_dataset("parquet", data_files=files).with_format("numpy")
    for split in dataset.splits:
        assert np.array_equal(loaded[split]["input_ids"][:], all_rows(dataset, split))
    schema = pq.read_table(dataset.path / "train").schema
    assert str(schema.field("input_ids").type).startswith("fixed_size_list")


def test_a_finished_stage_is_left_alone(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare
) -> None:
    first, source = prepare(tmp_path / "run"), sentence_corpus.source.removeprefix("text:")
    before = times(first.path)
    assert prepare(tmp_path / "run").fingerprint == first.fingerprint
    # The same content elsewhere, and a file merely touched, are the same corpus.
    shutil.copy(source, tmp_path / "moved.txt")
    prepare(tmp_path / "run", source=f"text:{tmp_path}/moved.txt")
    os.utime(source, (1, 1))
    prepare(tmp_path / "run")
    assert times(first.path) == before
    assert prepare(tmp_path / "b").fingerprint == first.fingerprint


def test_the_record_counts_what_the_policy_met(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = [b"a cat sat on a mat", b"", b"a \x01 dog", b"a \xff dog", b"the end"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n")
    settings = {"document_separator": "line", "on_bad_utf8": "skip", "validation_documents": 1}
    config = corpus_config(f"{tmp_path}/a.txt", {**settings, "row_length": 4})
    record = prepare_tokens(config, bpe_tokenizer, tmp_path).record["splits"]
    counted = ("num_documents", "num_empty", "num_bad_utf8", "num_control_characters")
    assert [record["train"][name] for name in counted] == [2, 1, 1, 1]
    assert [record["validation"][name] for name in counted] == [1, 0, 0, 0]
    assert record["train"]["num_bytes"] == len("a cat sat on a mat" + "a \x01 dog")


def test_other_settings_are_refused_by_name(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    prepare: Prepare,
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prepare(tmp_path)
    changes = {"row_length": 8, "packing": "wrap", "validation_documents": 3, "separator_id": 4}
    for name, value in changes.items():
        with pytest.raises(UsageError, match=rf"corpus\.{name}\]; got .*; expected {value}"):
            prepare(tmp_path, **{name: value})
    backend = tokenizer.backend(bpe_tokenizer)
    larger = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    larger.add_tokens(["xyzzy"])
    with pytest.raises(UsageError, match=r"tokenizer\.(sha256|vocab_size)"):
        prepare_tokens(sentence_corpus, larger, tmp_path)


def test_finished_rows_outlive_their_corpus(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    prepare: Prepare,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = prepare(tmp_path / "run")
    Path(sentence_corpus.source.removeprefix("text:")).unlink()
    assert prepare(tmp_path / "run").fingerprint == first.fingerprint
    assert "the corpus is gone" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no such corpus file"):
        prepare(tmp_path / "new")
    with pytest.raises(UsageError, match="other settings"):
        prepare(tmp_path / "run", row_length=8)


def test_a_changed_corpus_is_refused_by_name(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "run")
    path, encode = Path(sentence_corpus.source.removeprefix("text:")), build.encode
    path.write_text(path.read_text().replace("dog", "god", 1))
    with pytest.raises(GdistillError, match=r"not the one that was tokenized.*corpus\.txt"):
        prepare(tmp_path / "run")

    def meddle(*arguments: Any, **named: Any) -> list[np.ndarray]:
        os.utime(path, (1, 1))
        return encode(*arguments, **named)

    monkeypatch.setattr(build, "encode", meddle)
    with pytest.raises(GdistillError, match="changed while it was read"):
        prepare(tmp_path / "meddled")
    assert not (tmp_path / "meddled/tokens").exists()


def test_a_file_of_the_same_size_is_hashed_again_once_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    known = file_identity(path, {})
    path.write_text("two")
    os.utime(path, ns=(1, known["modified_ns"] + 1))
    assert file_identity(path, {str(path): known})["sha256"] != known["sha256"]


def test_every_setting_that_can_change_a_row_is_in_the_identity(
    sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    own = corpus_identity(sentence_corpus, bpe_tokenizer, {})
    changes: list[dict[str, Any]] = [
        {"detokenizer": "ptb"}, {"keep_empty": True}, {"on_bad_utf8": "skip"},
        {"special_tokens": "token"}, {"packing": "wrap"}, {"field": "story"},
        {"validation_fraction": 0.5, "validation_documents": 0},
    ]  # fmt: skip
    for change in changes:
        other = dataclasses.replace(sentence_corpus, **change)
        assert corpus_identity(other, bpe_tokenizer, {}) != own, change


def test_damage_is_found(tmp_path: Path, prepare: Prepare) -> None:
    dataset = prepare(tmp_path)
    part = dataset.path / "train" / dataset.parts("train")[0].name
    whole = part.read_bytes()
    for position in range(200, len(whole) // 2, 997):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        part.write_bytes(damaged)
        with pytest.raises(IntegrityError, match="damaged token rows"):
            TokenDataset.open(tmp_path / "tokens").read_rows("train", 0, 1)
    part.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match="truncated"):
        TokenDataset.open(tmp_path / "tokens")
    part.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        prepare(tmp_path)
    record = json.loads((tmp_path / "tokens/tokens.json").read_text())
    for name in sorted(set(record) - {"format_version", "versions"}):
        less = {key: value for key, value in record.items() if key != name}
        (tmp_path / "tokens/tokens.json").write_text(json.dumps(less))
        with pytest.raises(IntegrityError, match=rf"a field is missing.*got {name};.*stage 1"):
            TokenDataset.open(tmp_path / "tokens")
    (tmp_path / "tokens/tokens.json").write_text('{"format_version": 99}')
    with pytest.raises(UsageError, match="format version"):
        TokenDataset.open(tmp_path / "tokens")


PART = {
    "name": "part-00000.parquet",
    "num_rows": 1,
    "num_bytes": 7,
    "tokens_sha256": "0" * 64,
    "max_token_id": 3,
}
NAMES = ["../../planted", "/etc/passwd", "..", "", "a//b", "a\\b", "a\0b", "a" * 300, 7, None]
OUTSIDE: list[Any] = [{"train": {"parts": [{**PART, "name": name}]}} for name in NAMES]
OUTSIDE += [{split: {"parts": [PART]}} for split in ("..", "../tokens/train", "/tmp", "", "a\nb")]
MALFORMED: list[Any] = [3, None, "train", {"train": []}, {"train": {}}]
MALFORMED += [{"train": {"parts": parts}} for parts in (3, [[]], [{}], [{"a": 1}])]
NO_RECORDS = ["[" * 10**5, "[]", "null", "", "{", "1e999", "{}"]


@pytest.mark.parametrize("splits", [*OUTSIDE, *MALFORMED, *NO_RECORDS])
def test_folders_made_to_do_harm_are_one_line(tmp_path: Path, splits: Any) -> None:
    (tmp_path / "planted").write_bytes(b"planted")
    (tmp_path / "tokens/train").mkdir(parents=True)
    (tmp_path / "tokens/train/part-00000.parquet").write_bytes(b"planted")
    record = {**{name: {} for name in FIELDS}, "format_version": FORMAT_VERSION, "splits": splits}
    text = splits if splits in NO_RECORDS else json.dumps(record)
    (tmp_path / "tokens/tokens.json").write_text(text)
    with pytest.raises(GdistillError) as caught:
        TokenDataset.open(tmp_path / "tokens")
    message = str(caught.value)
    assert "\n" not in message
    assert splits not in OUTSIDE or "malformed list of parts" in message


@pytest.mark.usefixtures("small_parts")
def test_only_the_rows_asked_for_are_tokenized(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen, read = prepare(tmp_path / "whole"), [], build.read_span

    def counted(*arguments: Any) -> Any:
        for item in read(*arguments):
            seen.append(item)
            yield item

    monkeypatch.setattr(build, "read_span", counted)
    few = prepare(tmp_path / "few", {"train": 7, "validation": 0})
    assert (few.num_rows("train"), few.num_rows("validation")) == (7, 0)
    assert np.array_equal(few.read_rows("train", 0, 7), whole.read_rows("train", 0, 7))
    assert len(seen) < 250, "of 500 documents"
    # The same and fewer rows are there; more are not.
    for rows in (7, 3):
        prepare(tmp_path / "few", {"train": rows, "validation": 0})
    for more in ({"train": 8, "validation": 0}, {"train": 7}, {}):
        with pytest.raises(UsageError, match="only the first ones"):
            prepare(tmp_path / "few", more)


def test_a_special_token_in_a_text_is_text_and_counted(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat<|endoftext|>the dog sat on a mat"}\n' * 9)
    settings = {"row_length": 4, "validation_fraction": 0.0, "separate_train": False}
    found = {}
    for choice in ("text", "token"):
        config = corpus_config(f"{tmp_path}/a.jsonl", {**settings, "special_tokens": choice})
        dataset = prepare_tokens(config, bpe_tokenizer, tmp_path / choice)
        rows = all_rows(dataset, "train")
        found[choice] = int((rows == 0).sum())
        assert dataset.record["splits"]["train"]["num_special_tokens"] == 9
        text = bpe_tokenizer.decode(rows.reshape(-1).tolist())
        assert text.startswith("the cat<|endoftext|>the dog")
    assert found == {"text": 0, "token": 9}


def test_wikitext_rows_by_hand(tmp_path: Path) -> None:
    """Four lines of WikiText: empty ones leave their eos, the text is detokenized, rows framed."""
    words = ["<eos>", "=", "Valkyria", "Chronicles", "The", "game,", "in", "2011.", "role-playing"]
    word_level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    ends = {"bos_token": "<eos>", "eos_token": "<eos>"}
    words_only = PreTrainedTokenizerFast(tokenizer_object=word_level, **ends)
    lines = tmp_path / "wiki.jsonl"
    texts = ["", " = Valkyria Chronicles = \n", "", " The role @-@ playing game , in 2011 . \n"]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"validation_split": "none", "validation_fraction": 0.0, "row_length": 6}
    config = corpus_config("wikitext2", {**settings, "source": f"jsonl:{lines}"})
    dataset = prepare_tokens(config, words_only, tmp_path)
    #          eos | = Valkyria Chronicles | = eos eos The | role-playing game, in 2011. | eos
    expected = [
        ["<eos>", "<eos>", "=", "Valkyria", "Chronicles", "<eos>"],
        ["<eos>", "=", "<eos>", "<eos>", "The", "<eos>"],
        ["<eos>", "role-playing", "game,", "in", "2011.", "<eos>"],
    ]
    found = [words_only.convert_ids_to_tokens(row) for row in all_rows(dataset, "train")]
    assert found == expected
    assert dataset.record["splits"]["train"]["num_dropped_tokens"] == 1
    assert dataset.num_rows("validation") == 0


def test_lm1b_rows_equal_the_references_packing(shared: Path, tmp_path: Path) -> None:
    """1,500 real sentences: [BOS] + 126 tokens + [EOS]; per 1,000 sentences as batched map does."""
    gpt2 = AutoTokenizer.from_pretrained(shared / "data/gpt2-tokenizer")
    file = shared / "data/lm1b/1b_benchmark.dev.tokens"
    settings = {"validation_split": "none", "validation_fraction": 0.0, "limit_documents": 1500}
    settings |= {"document_separator": "line", "source": f"text:{file}"}
    texts = [detokenizer("lm1b")(line) for line in file.read_text().split("\n")[:1500]]
    for group, groups in ((0, [texts]), (1000, [texts[:1000], texts[1000:]])):
        config = corpus_config("lm1b", {**settings, "group_documents": group})
        rows = all_rows(prepare_tokens(config, gpt2, tmp_path / str(group)), "train")
        bodies = np.concatenate([streamed(gpt2, part, 126) for part in groups])
        assert np.array_equal(rows[:, 1:-1], bodies)
        assert (rows[:, 0] == 50256).all() and (rows[:, -1] == 50256).all()


def test_maze_rows_are_the_teachers(tmp_path: Path) -> None:
    dataset = prepare_tokens(corpus_config("maze:k4", {"seed": 1}), maze_tokenizer(), tmp_path)
    rows = all_rows(dataset, "train")
    assert rows.shape == (2000, 11) and dataset.num_rows("validation") == 500
    distinct = {tuple(row) for row in rows.tolist()}
    assert distinct == {tuple(row) for row in path_rows(load_maze("k4").paths(), 11).tolist()}


def test_special_ids(shared: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    def found(tokenizer: Any, split: str = "train", **settings: Any) -> list[int | None]:
        return list(
            vars(special_ids(tokenizer, CorpusConfig("text:a", **settings), split)).values()
        )

    assert found(bpe_tokenizer) == [0, 0, 0]
    quiet: dict[str, Any] = {"separate_validation": False, "eos_id": 7}
    assert found(bpe_tokenizer, "validation", **quiet)[2] is None
    assert found(bpe_tokenizer, **quiet)[2] == 7
    with pytest.raises(UsageError, match=r"corpus\.bos_id.*0 to 279"):
        found(bpe_tokenizer, bos_id=280)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend(bpe_tokenizer))
    with pytest.raises(UsageError, match=r"neither a bos nor an eos.*corpus\.eos_id=N"):
        found(bare)
    assert found(bare, eos_id=7) == [7, 7, 7], "as the remedy says"
    # bos before and eos after every text: borders are eos, as the model has seen them.
    framed = Tokenizer.from_str(tokenizer.backend(bpe_tokenizer).to_str())
    framed.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", 280), ("</s>", 281)]
    framed.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    both = PreTrainedTokenizerFast(tokenizer_object=framed, bos_token="<s>", eos_token="</s>")
    assert found(both) == [280, 281, 281]
    # Stories end with the <s> that the tokenizer puts before every text.
    assert found(load_tokenizer(shared / "data/stories260K")) == [1, 1, 1]


def test_requests_that_cannot_be_met(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare
) -> None:
    with pytest.raises(UsageError, match="no such tokenizer folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(GdistillError, match=r"does not fill one row.*expected at least 100000"):
        prepare(tmp_path / "long", row_length=100_000)
    with pytest.raises(GdistillError, match=r"cannot encode the text.*this corpus"):
        prepare_tokens(sentence_corpus, maze_tokenizer(), tmp_path / "words")
    (tmp_path / "file").write_text("")
    with pytest.raises(GdistillError, match=r"cannot write the token rows.*file"):
        prepare(tmp_path / "file/run")
    assert not list(tmp_path.glob("*/tokens"))


def test_a_huge_single_document(
    tmp_path: Path, sentences: list[str], bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = " ".join(sentences * 4)
    (tmp_path / "a.txt").write_text(text)
    config = CorpusConfig(f"text:{tmp_path}/a.txt", row_length=16, validation_fraction=0.1)
    dataset = prepare_tokens(config, bpe_tokenizer, tmp_path)
    rows = np.concatenate([all_rows(dataset, split) for split in ("train", "validation")])
    assert 0.89 < dataset.num_rows("train") / len(rows) < 0.91
    decoded = bpe_tokenizer.decode(all_rows(dataset, "train").reshape(-1))
    assert text.startswith(decoded.removesuffix("<|endoftext|>"))


def test_rows_as_reference_texts(
    tmp_path: Path, prepare: Prepare, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset, out = prepare(tmp_path), tmp_path / "references.jsonl"
    assert write_references(str(tmp_path), out, 5, "train") == 5
    rows = dataset.read_rows("train", 0, 5)
    for row, line in zip(rows, out.read_text().splitlines(), strict=True):
        kept = row[1:] if row[0] == dataset.bos_id else row
        assert json.loads(line) == {"text": bpe_tokenizer.decode(kept.tolist())}
    with pytest.raises(UsageError, match="too few rows"):
        write_references(str(tmp_path), out, 10**6, "train")
