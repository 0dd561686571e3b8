"""Token rows: which they are, what decides them, what is refused, and how they are resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.corpus.detokenize import detokenizer
from pipeline.maze import maze_tokenizer
from pipeline.references import write_references
from pipeline.tokens import dataset as stage
from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION, TokenDataset, prepare_tokens
from pipeline.tokens.tokenizer import (
    Packer,
    SpecialIds,
    backend,
    cut_between_words,
    encode,
    load_tokenizer,
    special_ids,
)
from shards.errors import GdistillError, IntegrityError, UsageError
from tests.commands import call
from tests.pipeline.conftest import Asked, Patch, Prepare
from tests.pipeline.extract_cases import contents, run, times

END = "<|endoftext|>"


def streamed(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> np.ndarray:
    """The reference's stream: every document, then eos, cut into rows; the rest is dropped."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in ids))
    num_rows = len(stream) // length
    return np.array(stream[: num_rows * length]).reshape(num_rows, length)


def all_rows(dataset: TokenDataset, split: str = "train") -> np.ndarray:
    return dataset.read_rows(split, 0, dataset.num_rows(split))


def made(spec: object, out: Path, tokenizer: Any, **settings: Any) -> TokenDataset:
    """Stage 1 of a corpus as it is named on the command line."""
    return prepare_tokens(corpus_config(str(spec), settings), tokenizer, out)


@pytest.mark.usefixtures("small_parts")
def test_rows_on_disk(
    tmp_path: Path, prepare: Prepare, bpe: PreTrainedTokenizerFast, sentences: list[str], monkeypatch: Patch
) -> None:
    dataset = prepare(tmp_path / "run")
    # Other readers open the files.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    files = {split: str(dataset.path / split / "*.parquet") for split in dataset.splits}
    loaded = datasets.load_dataset("parquet", data_files=files).with_format("numpy")
    for split, texts in (("train", sentences[:450]), ("validation", sentences[450:])):
        expected = streamed(bpe, texts, 16)
        assert np.array_equal(all_rows(dataset, split), expected)
        assert np.array_equal(loaded[split]["input_ids"][:], expected)
        # Ranges across row groups and parts.
        for start in range(0, len(expected) - 37, 29):
            found = dataset.read_rows(split, start, start + 37)
            assert np.array_equal(found, expected[start : start + 37])
        begin = 0
        for part in dataset.parts(split):
            rows = expected[begin : begin + part.num_rows]
            assert sha256(rows.astype("<i4").tobytes()).hexdigest() == part.tokens_sha256
            begin += part.num_rows
    assert len(dataset.parts("train")) > 3
    assert dataset.read_rows("train", 5, 5).shape == (0, 16)
    quiet = prepare(tmp_path / "quiet", separate_validation=False)
    assert (all_rows(quiet) == 0).any() and (all_rows(quiet, "validation") != 0).all()
    assert (dataset.row_length, dataset.vocab_size, dataset.eos_id) == (16, 280, 0)
    assert dataset.max_token_id == max(all_rows(dataset, name).max() for name in dataset.splits)
    assert len(AutoTokenizer.from_pretrained(dataset.tokenizer_path)) == 280
    summary = dataset.record["splits"]["train"]
    rows = dataset.num_rows("train")
    assert [summary[f"num_{name}"] for name in ("documents", "rows", "tokens")] == [450, rows, 16 * rows]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]
    assert {path.name for path in dataset.path.iterdir()} == {"tokens.json", "tokenizer", *dataset.splits}
    for start, stop in ((0, rows + 1), (-1, 1), (2, 1)):
        with pytest.raises(IndexError):
            dataset.read_rows("train", start, stop)
    schema = pq.read_table(dataset.path / "train").schema
    assert str(schema.field("input_ids").type).startswith("fixed_size_list")


def test_a_finished_stage_is_left_alone_and_outlives_its_corpus(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare, bpe: Any, capsys: Any, monkeypatch: Any
) -> None:
    first, source = prepare(tmp_path / "run"), sentence_corpus.source.removeprefix("text:")
    before = times(first.path)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.corpus.documents.sha256_file", lambda _: pytest.fail("an unchanged file is read again"))
        assert prepare(tmp_path / "run").fingerprint == first.fingerprint
    # The same content elsewhere, and a file merely touched, are the same corpus.
    shutil.copy(source, tmp_path / "moved.txt")
    prepare(tmp_path / "run", source=f"text:{tmp_path}/moved.txt")
    for name in ("corpus", "moved"):
        prepare(tmp_path / "held out", validation_source=f"text:{tmp_path}/{name}.txt")
    os.utime(source, (1, 1))
    prepare(tmp_path / "run")
    assert times(first.path) == before
    assert prepare(tmp_path / "b").fingerprint == first.fingerprint
    Path(source).unlink()
    assert prepare(tmp_path / "run").fingerprint == first.fingerprint
    assert "the corpus is gone" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no such corpus file"):
        prepare(tmp_path / "new")
    with pytest.raises(UsageError, match=r"other settings.*row_length\]; got 16; expected 8"):
        prepare(tmp_path / "run", row_length=8)
    other = Tokenizer.from_str(backend(bpe).to_str())
    other.normalizer = normalizers.NFC()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"tokenizer\.sha256"):
        prepare(tmp_path / "run", tokenizer=PreTrainedTokenizerFast(tokenizer_object=other, eos_token=END))


def test_the_record_counts_what_the_policy_met(tmp_path: Path, prepare: Prepare) -> None:
    lines = ["a cat sât on a mat".encode(), b" ", b"a\x00 \x01 dog\t\x7f\x1b", b"a \xff dog", b"the end"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n")
    settings: dict[str, Any] = {"validation_documents": 1, "on_bad_utf8": "skip", "row_length": 4}
    record = prepare(tmp_path, source=f"text:{tmp_path}/a.txt", **settings).record["splits"]
    counted = ("num_documents", "num_empty", "num_bad_utf8", "num_control_characters")
    assert [record["train"][name] for name in counted] == [2, 1, 1, 4]
    assert [record["validation"][name] for name in counted] == [1, 0, 0, 0]
    assert record["train"]["num_bytes"] == len(b"".join(lines[:3])), "they are kept"


def test_a_changed_corpus_is_refused_by_name(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare, monkeypatch: Patch
) -> None:
    prepare(tmp_path / "run")
    path, encode = Path(sentence_corpus.source.removeprefix("text:")), stage.encode
    old, noted = path.read_text(), path.stat()
    for new, modified_ns in ((old.replace("dog", "god", 1), 0), (old + "dog", noted.st_mtime_ns)):
        path.write_text(new)
        os.utime(path, ns=(0, modified_ns))  # of the same size, then of the same time
        got, expected = (sha256(text.encode()).hexdigest()[:12] for text in (new, old))
        message = rf"not the one that was tokenized.*corpus\.txt\]; got content {got}; expected content {expected}"
        with pytest.raises(GdistillError, match=message):
            prepare(tmp_path / "run")
    everything = f"text:{path.parent}/*.txt"
    prepare(tmp_path / "all", source=everything)
    (tmp_path / "more.txt").write_text("a dog ran\n")
    with pytest.raises(GdistillError, match=r"not the one that was tokenized.*more\.txt"):
        prepare(tmp_path / "all", source=everything)
    made("maze:k4", tmp_path / "maze", maze_tokenizer(), seed=1)
    with pytest.raises(GdistillError, match=r"not the one that was tokenized.*train: k4"):
        made("maze:k4", tmp_path / "maze", maze_tokenizer(), seed=2)

    def meddle(*arguments: Any, **named: Any) -> list[np.ndarray]:
        os.utime(path, (1, 1))
        return encode(*arguments, **named)

    monkeypatch.setattr(stage, "encode", meddle)
    with pytest.raises(GdistillError, match="changed while it was read"):
        prepare(tmp_path / "meddled", source=f"text:{tmp_path}/more.txt", validation_source=everything)
    assert not (tmp_path / "meddled/tokens").exists()


def test_damage_is_found(tmp_path: Path, prepare: Prepare) -> None:
    dataset = prepare(tmp_path)
    part = dataset.path / "train" / dataset.parts("train")[0].name
    whole = part.read_bytes()
    for position in range(200, len(whole) // 2, 997):
        damage = bytes([whole[position] ^ 4])
        part.write_bytes(whole[:position] + damage + whole[position + 1 :])
        with pytest.raises(IntegrityError, match="damaged token rows"):
            TokenDataset.open(tmp_path / "tokens").read_rows("train", 0, 1)
    part.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match="truncated"):
        TokenDataset.open(tmp_path / "tokens")
    part.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        prepare(tmp_path)
    path = tmp_path / "tokens/tokens.json"
    record = json.loads(path.read_text())
    for name in sorted(set(record) - {"format_version", "versions"}):
        path.write_text(json.dumps({key: record[key] for key in record if key != name}))
        with pytest.raises(IntegrityError, match=rf"a field is missing.*got {name};.*stage 1"):
            TokenDataset.open(tmp_path / "tokens")
    path.write_text('{"format_version": 99}')
    with pytest.raises(UsageError, match="format version"):
        TokenDataset.open(tmp_path / "tokens")


PART = {"name": "part-00000.parquet", "num_rows": 1, "num_bytes": 7, "max_token_id": 3}
PART["tokens_sha256"] = "0" * 64
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
def test_only_the_rows_asked_for_are_tokenized(tmp_path: Path, prepare: Prepare, monkeypatch: Patch) -> None:
    whole, seen, read = prepare(tmp_path / "whole"), [], stage.read_span

    def counted(*arguments: Any) -> Any:
        for item in read(*arguments):
            seen.append(item)
            yield item

    monkeypatch.setattr(stage, "read_span", counted)
    few = prepare(tmp_path / "few", {"train": 7, "validation": 0})
    assert (few.num_rows("train"), few.num_rows("validation")) == (7, 0)
    assert np.array_equal(few.read_rows("train", 0, 7), whole.read_rows("train", 0, 7))
    assert len(seen) < 250, "of 500 documents"
    assert few.record["splits"]["validation"]["num_documents"] == 0, "nor is one looked at"
    # The same and fewer rows are there; more are not.
    for rows in (7, 3):
        prepare(tmp_path / "few", {"train": rows, "validation": 0})
    for more in ({"train": 8, "validation": 0}, {"train": 7}, {}):
        with pytest.raises(UsageError, match="only the first ones"):
            prepare(tmp_path / "few", more)


@pytest.mark.usefixtures("small_parts")
def test_a_special_token_in_a_text_is_text_and_counted(tmp_path: Path, bpe: PreTrainedTokenizerFast) -> None:
    """In every batch; a token that was added and is not special is none."""
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend(bpe).to_str()), eos_token=END)
    fast.add_tokens(["cat"])
    (tmp_path / "a.jsonl").write_text('{"text": "the cat<|endoftext|>the dog sat on a mat"}\n' * 90)
    settings = {"row_length": 4, "validation_fraction": 0.0, "separate_train": False}
    for choice, expected in ((None, 0), ("token", 90)):
        out, chosen = tmp_path / str(choice), {**settings, "special_tokens": choice}
        dataset = made(tmp_path / "a.jsonl", out, fast, **chosen)
        rows = all_rows(dataset)
        assert (rows == 0).sum() == expected
        assert dataset.record["splits"]["train"]["num_special_tokens"] == 90
        text = str(fast.decode(rows.reshape(-1).tolist()))
        assert text.startswith("the cat<|endoftext|>the dog")


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
    dataset = made("wikitext2", tmp_path, words_only, **settings, source=f"jsonl:{lines}")
    #          eos | = Valkyria Chronicles | = eos eos The | role-playing game, in 2011. | eos
    expected = [
        "<eos> <eos> = Valkyria Chronicles <eos>",
        "<eos> = <eos> <eos> The <eos>",
        "<eos> role-playing game, in 2011. <eos>",
    ]
    rows = all_rows(dataset)
    assert [words_only.convert_ids_to_tokens(row) for row in rows] == [e.split() for e in expected]
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
        out, chosen = tmp_path / str(group), {**settings, "group_documents": group}
        rows = all_rows(made("lm1b", out, gpt2, **chosen))
        bodies = np.concatenate([streamed(gpt2, part, 126) for part in groups])
        assert np.array_equal(rows[:, 1:-1], bodies)
        assert (rows[:, 0] == 50256).all() and (rows[:, -1] == 50256).all()


def test_special_ids(shared: Path, bpe: PreTrainedTokenizerFast) -> None:
    def found(tokenizer: Any, split: str = "train", **settings: Any) -> list[int | None]:
        config = CorpusConfig("text:a", **settings)
        return list(vars(special_ids(tokenizer, config, split)).values())

    assert found(bpe) == [0, 0, 0]
    quiet: dict[str, Any] = {"separate_validation": False, "eos_id": 7}
    assert found(bpe, "validation", **quiet)[2] is None
    assert found(bpe, **quiet)[2] == 7
    for name in ("bos_id", "eos_id", "separator_id"):
        for token in (-1, 280):
            with pytest.raises(UsageError, match=rf"corpus\.{name}.*got {token}; expected 0 to 279"):
                found(bpe, "train", **{name: token})
    bare = PreTrainedTokenizerFast(tokenizer_object=backend(bpe))
    with pytest.raises(UsageError, match=r"neither a bos nor an eos.*corpus\.eos_id=N"):
        found(bare)
    assert found(bare, eos_id=7) == found(bare, bos_id=7) == [7, 7, 7], "as the remedy says"
    # bos before and eos after every text: borders are eos, as the model has seen them.
    framed = Tokenizer.from_str(backend(bpe).to_str())
    framed.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", 280), ("</s>", 281)]
    framed.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    both = PreTrainedTokenizerFast(tokenizer_object=framed, bos_token="<s>", eos_token="</s>")
    assert found(both) == [280, 281, 281]
    assert found(both, eos_id=0) == [280, 0, 0] and found(both, bos_id=0, separator_id=0) == [0, 281, 0]
    # Stories end with the <s> that the tokenizer puts before every text.
    assert found(load_tokenizer(shared / "data/stories260K")) == [1, 1, 1]


def test_requests_that_cannot_be_met(tmp_path: Path, prepare: Prepare) -> None:
    with pytest.raises(UsageError, match="no such tokenizer folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(GdistillError, match=r"does not fill one row.*expected at least 100000"):
        prepare(tmp_path / "long", row_length=100_000)
    with pytest.raises(GdistillError, match=r"cannot encode the text.*this corpus"):
        prepare(tmp_path / "words", tokenizer=maze_tokenizer())
    (tmp_path / "file").write_text("")
    with pytest.raises(GdistillError, match=r"cannot write the token rows.*file"):
        prepare(tmp_path / "file/run")
    assert not list(tmp_path.glob("*/tokens"))
    for packing, length in (("concat", 1), ("wrap", 2), ("pad", 2)):
        with pytest.raises(UsageError, match="too short"):
            Packer(packing, length, IDS)  # type: ignore[arg-type]


def test_rows_as_reference_texts(
    tmp_path: Path, asked: Asked, teacher: Path, finished: Path, monkeypatch: Patch
) -> None:
    """Of a run's folder and of its store: without a bos in front, other special ones stay."""
    monkeypatch.setattr("pipeline.references.BLOCK_ROWS", 2)
    rows = run(tmp_path, asked(corpus={"packing": "wrap"})).split("train").read_rows(0, 5)["tokens"]
    tokenizer, out = load_tokenizer(teacher), tmp_path / "references.jsonl"
    for place in (str(tmp_path), str(tmp_path / "store")):
        assert write_references(place, out, 5, "train") == 5
        texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
        assert texts == [tokenizer.decode(row[1:].tolist()) for row in rows]
        assert all(text.endswith(" <eos>") for text in texts)
        for num, split, message in ((10**6, "train", "too few"), (0, "train", "--num"), (1, "test", "unknown split")):
            with pytest.raises(UsageError, match=message):
                write_references(place, out, num, split)
    dataset = TokenDataset.open(finished / "tokens")
    for split, words in (("validation", ()), ("train", ("--split", "train", "--num", dataset.num_rows("train")))):
        assert call("gdistill-extract", "references", dataset.path, "--out", out, *words) == 0
        texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
        assert texts == [tokenizer.decode(row.tolist()) for row in all_rows(dataset, split)]


# How documents are laid into rows.

IDS, NO_SEPARATOR = SpecialIds(bos=100, eos=101, separator=101), SpecialIds(100, 101, None)


def documents(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


WRAPPED = [[100, 1, 2, 3, 101], [100, 101, 4, 101, 101]]
PADDED = [[100, 1, 2, 3, 101], [100, 4, 101, 101, 101], [100, 101, 101, 101, 101]]
BY_HAND: dict[str, tuple[Any, list[list[int]], list[list[int]], int]] = {
    # 7 8 and the last separator are dropped
    "concat": ((4, IDS), [[1, 2, 3], [4], [5, 6, 7, 8]], [[1, 2, 3, 101], [4, 101, 5, 6]], 3),
    "wrap": ((5, IDS), [[1, 2, 3], [4], [5]], WRAPPED, 2),  # 5 and its separator
    "pad": ((5, IDS), [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]], [*PADDED, [100, 5, 6, 7, 101]], 2),
    "concat without a separator": ((2, NO_SEPARATOR), [[1], [2, 3], [4]], [[1, 2], [3, 4]], 0),
    "concat two by two": ((2, NO_SEPARATOR, 2), [[1], [2, 3], [4], [5]], [[1, 2], [4, 5]], 1),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_packing_by_hand(name: str) -> None:
    given_to, texts, rows, num_dropped = BY_HAND[name]
    packer = Packer(name.split()[0], *given_to)  # type: ignore[arg-type]
    assert packer.pack(documents(*texts)).tolist() == rows
    packer.finish()
    assert packer.num_dropped_tokens == num_dropped


TEXTS_OF_IDS = st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12)
without_a_clock = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@without_a_clock
@given(TEXTS_OF_IDS, st.integers(0, 12), st.sampled_from(["concat", "wrap", "pad"]), st.booleans())
def test_batch_borders_and_resumes_leave_no_trace(
    texts: list[list[int]], cut: int, packing: Any, is_grouped: bool
) -> None:
    group = 3 if is_grouped and packing != "pad" else 0
    whole, first, second = (Packer(packing, 4, IDS, group) for _ in range(3))
    rows = whole.pack(documents(*texts))
    whole.finish()
    head = first.pack(documents(*texts[:cut]))
    second.restore(json.loads(json.dumps(first.state())))
    tail = second.pack(documents(*texts[cut:]))
    second.finish()
    assert np.concatenate([head, tail]).tolist() == rows.tolist()
    assert second.num_dropped_tokens == whole.num_dropped_tokens
    assert rows.dtype == np.int32 and rows.shape[1] == 4
    if packing == "concat" and not group:
        stream = [token for text in texts for token in [*text, 101]]
        assert rows.reshape(-1).tolist() == stream[: rows.size]
        assert rows.size + whole.num_dropped_tokens == len(stream)


# Long documents are tokenized in pieces.

TEXTS = {
    "sentences": "".join(f'Cat {i} sat, then ran; "slowly" (on\n\n{i * i}).\n' for i in range(400)),
    "accents": "naïve café — «ça va?»  日本語 テキスト 🙂🙂\n\n" * 60,
    "white space": " \n\t  a   \n\n\n b\r\n" * 100,
    "no white space": "abc" * 2000,
    "special": f"one{END} two " * 200,
}


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("size", [50, 777])
def test_pieces_have_the_ids_of_the_whole(bpe: PreTrainedTokenizerFast, name: str, size: int) -> None:
    fast, text = backend(bpe), TEXTS[name]
    pieces = cut_between_words(fast, text, size)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in whole(fast, piece)] == whole(fast, text)
    if name != "no white space":
        assert len(pieces) > len(text) // size // 3


def test_white_space_that_is_one_word_is_not_cut() -> None:
    fast, text = Tokenizer(models.BPE()), TEXTS["white space"]
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how: dict[str, Any] = {"vocab_size": 300, "initial_alphabet": alphabet, "show_progress": False}
    fast.train_from_iterator([text], trainers.BpeTrainer(**how))
    for size in range(50, 62):
        pieces = cut_between_words(fast, text, size)
        assert len(pieces) > 3 and [token for piece in pieces for token in whole(fast, piece)] == whole(fast, text)


def test_a_normalizer_that_adds_to_the_text_forbids_cuts(bpe: PreTrainedTokenizerFast) -> None:
    assert cut_between_words(Tokenizer(models.BPE()), TEXTS["sentences"], 100) == [TEXTS["sentences"]], "no words"
    fast = Tokenizer.from_str(backend(bpe).to_str())
    fast.normalizer = normalizers.Prepend("x")  # type: ignore[assignment]
    assert cut_between_words(fast, TEXTS["sentences"], 100) == [TEXTS["sentences"]]
    fast.normalizer = normalizers.NFC()  # type: ignore[assignment]
    assert len(cut_between_words(fast, TEXTS["accents"], 100)) > 10
    # Nor is a word cut that holds white space.
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"sat, then|\s|\S+"), "isolated")  # type: ignore[assignment]
    pieces = cut_between_words(fast, TEXTS["sentences"], 100)
    assert len(pieces) > 10 and not any(piece.startswith(" then") for piece in pieces)


def test_real_tokenizers(shared: Path) -> None:
    text = (shared / "data/tinystories/tinystories_a.txt").read_text(encoding="utf-8")[:60_000]
    for name in ("gpt2-tokenizer", "stories260K"):
        fast = backend(load_tokenizer(shared / "data" / name))
        for part in (text, text[:99]):  # in pieces, and at once
            (found,) = encode(load_tokenizer(shared / "data" / name), [part])
            assert found.tolist() == whole(fast, part)


def test_long_and_short_documents_in_one_batch_keep_their_order(
    bpe: PreTrainedTokenizerFast, monkeypatch: Patch
) -> None:
    """Batches of pieces smaller than the documents; none is cut short."""
    fast = Tokenizer.from_str(backend(bpe).to_str())
    fast.enable_truncation(max_length=8)
    fast.enable_padding(length=9)
    whole_words_only = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END)
    monkeypatch.setattr("pipeline.tokens.tokenizer.BATCH_CHARACTERS", 20_000)
    texts = [TEXTS["sentences"] * 5, "", "the cat", TEXTS["no white space"] * 10, "ran"]
    texts += [TEXTS["accents"] * 6]
    expected = [whole(backend(bpe), text) for text in texts]
    assert [ids.tolist() for ids in encode(whole_words_only, texts)] == expected


# Stage 1 that is interrupted, killed or asked for by many.


def test_processes_that_ask_at_the_same_time_share_one_run(
    tmp_path: Path, prepare: Prepare, monkeypatch: Patch
) -> None:
    """The lock is per open file, so threads stand for processes here."""
    publish, built = stage.publish_folder, []

    def counted(*arguments: Any) -> None:
        built.append(1)
        publish(*arguments)

    monkeypatch.setattr(stage, "publish_folder", counted)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(prepare, tmp_path) for _ in range(3)]
        assert len({one.result().fingerprint for one in asked}) == 1
    assert len(built) == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("packing", "limits"), [("concat", {}), ("wrap", {}), ("pad", {"train": 430})])
def test_an_interrupted_stage_goes_on_to_the_same_bytes(
    tmp_path: Path, prepare: Prepare, monkeypatch: Patch, packing: str, limits: dict[str, int]
) -> None:
    """Rows that an earlier run wrote count as rows of the limit."""
    whole, encoded = prepare(tmp_path / "whole", limits, packing=packing), stage.encoded
    for num_batches in (1, 4, 9, 12):
        run, read = tmp_path / str(num_batches), list[int]()

        def count(*arguments: Any, most: int = num_batches, read: Any = read) -> Iterator[Any]:
            for number, found in enumerate(encoded(*arguments)):
                if len(read) == most:
                    raise KeyboardInterrupt
                read.append(number)
                yield found

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(stage, "encoded", count)
            prepare(run, limits, packing=packing)
        assert not (run / "tokens").exists()
        with pytest.raises(UsageError, match="no finished token data set"):
            TokenDataset.open(run / "tokens")
        if num_batches > 2:
            with pytest.raises(UsageError, match=r"row_length.*remove .*tokens\.partial"):
                prepare(run, limits, packing=packing, row_length=8)
            with pytest.raises(UsageError, match="another number of rows"):
                prepare(run, {"train": 5}, packing=packing)
        if num_batches == 4:  # another version's journal, or none: the stage begins anew
            (run / ".tokens.partial/journal.json").write_text('{"span": 0, "identity": {}}')
        resumed = prepare(run, limits, packing=packing)
        assert contents(resumed.path) == contents(whole.path)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.corpus.config import corpus_config
from pipeline.tokens import dataset, tokenizer
dataset.PART_TOKENS, dataset.ROW_GROUP_TOKENS, tokenizer.BATCH_DOCUMENTS = 800, 160, 40
write = dataset.write_json_atomic
def write_and_die(path, journal):
    write(path, journal)
    if len(journal["splits"]["train"]["parts"]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
dataset.write_json_atomic = write_and_die
settings = {"document_separator": "line", "row_length": 16, "validation_documents": 50}
config = corpus_config(sys.argv[1], settings)
dataset.prepare_tokens(config, tokenizer.load_tokenizer(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.usefixtures("small_parts")
def test_a_killed_process_loses_no_finished_part(
    tmp_path: Path, sentence_corpus: CorpusConfig, prepare: Prepare, bpe: Any, monkeypatch: Patch
) -> None:
    bpe.save_pretrained(tmp_path / "tokenizer")
    given = [sentence_corpus.source, str(tmp_path / "tokenizer"), str(tmp_path)]
    command = [sys.executable, "-c", KILLED, *given]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    parts = sorted((tmp_path / ".tokens.partial/train").glob("part-*.parquet"))
    written = {path.name: path.stat().st_mtime_ns for path in parts}
    assert len(written) == 3 and not (tmp_path / "tokens").exists()
    for name in (".journal.json", ".tokens.json", "train/.part-00003.parquet"):
        (tmp_path / f".tokens.partial/{name}.{'0' * 32}.tmp").write_text("killed while")
    monkeypatch.setenv("HOME", str(tmp_path))
    saved = load_tokenizer("~/tokenizer")
    resumed = prepare(tmp_path, tokenizer=saved)
    kept = {name: (resumed.path / "train" / name).stat().st_mtime_ns for name in written}
    assert kept == written
    whole = prepare(tmp_path / "whole", tokenizer=saved)
    assert contents(resumed.path) == contents(whole.path)
