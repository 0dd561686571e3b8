from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.corpus.detokenize import detokenizer
from pipeline.maze import load_maze, maze_tokenizer
from pipeline.maze_teacher import path_rows
from pipeline.tokens import tokenizer as tokenization
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.dataset import TokenDataset
from shards.errors import GdistillError, IntegrityError, UsageError


def streamed(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> np.ndarray:
    """The reference's stream: every document, then eos, cut into rows; the rest is dropped."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in ids))
    num_rows = len(stream) // length
    return np.array(stream[: num_rows * length]).reshape(num_rows, length)


def all_rows(dataset: TokenDataset, split: str) -> np.ndarray:
    return dataset.read_rows(split, 0, dataset.num_rows(split))


@pytest.mark.usefixtures("small_parts")
def test_rows_on_disk(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    sentences: list[str],
) -> None:
    dataset = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
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


@pytest.mark.usefixtures("small_parts")
def test_other_readers_open_the_parquet_files(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    files = {split: str(dataset.path / split / "*.parquet") for split in dataset.splits}
    loaded = datasets.load_dataset("parquet", data_files=files).with_format("numpy")
    for split in dataset.splits:
        assert np.array_equal(loaded[split]["input_ids"][:], all_rows(dataset, split))
    table = pq.read_table(dataset.path / "train")
    assert str(table.schema.field("input_ids").type).startswith("fixed_size_list")
    assert table.num_rows == dataset.num_rows("train")


def test_a_finished_stage_is_left_alone(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    first = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    again = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    assert again.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before
    # The same content elsewhere, and a file merely touched, are the same corpus.
    moved = tmp_path / "moved.txt"
    shutil.copy(sentence_corpus.source.removeprefix("text:"), moved)
    elsewhere = CorpusConfig(**{**vars(sentence_corpus), "source": f"text:{moved}"})
    prepare_tokens(elsewhere, bpe_tokenizer, tmp_path / "run")
    os.utime(sentence_corpus.source.removeprefix("text:"), (1, 1))
    prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    assert (
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "b").fingerprint
        == first.fingerprint
    )


def test_the_record_counts_what_the_policy_met(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = [b"a cat sat on a mat", b"", b"a \x01 dog", b"a \xff dog", b"the end"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n")
    config = CorpusConfig(
        f"text:{tmp_path}/a.txt",
        document_separator="line",
        on_bad_utf8="skip",
        row_length=4,
        validation_documents=1,
    )
    record = prepare_tokens(config, bpe_tokenizer, tmp_path).record["splits"]
    counted = ("num_documents", "num_empty", "num_bad_utf8", "num_control_characters")
    assert [record["train"][name] for name in counted] == [2, 1, 1, 1]
    assert [record["validation"][name] for name in counted] == [1, 0, 0, 0]
    assert record["train"]["num_bytes"] == len("a cat sat on a mat" + "a \x01 dog")


def test_other_settings_are_refused_by_name(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path)
    changes = {"row_length": 8, "packing": "wrap", "validation_documents": 3, "separator_id": 4}
    for name, value in changes.items():
        changed = CorpusConfig(**{**vars(sentence_corpus), name: value})
        with pytest.raises(UsageError, match=rf"corpus\.{name}\]; got .*; expected {value}"):
            prepare_tokens(changed, bpe_tokenizer, tmp_path)
    larger = PreTrainedTokenizerFast(
        tokenizer_object=tokenization.backend(bpe_tokenizer), eos_token="<|endoftext|>"
    )
    larger.add_tokens(["xyzzy"])
    with pytest.raises(UsageError, match=r"tokenizer\.(sha256|vocab_size)"):
        prepare_tokens(sentence_corpus, larger, tmp_path)


def test_finished_rows_outlive_their_corpus(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    path = Path(sentence_corpus.source.removeprefix("text:"))
    path.unlink()
    again = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    assert again.fingerprint == first.fingerprint
    assert "the corpus is gone" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no such corpus file"):
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "new")
    changed = CorpusConfig(**{**vars(sentence_corpus), "row_length": 8})
    with pytest.raises(UsageError, match="other settings"):
        prepare_tokens(changed, bpe_tokenizer, tmp_path / "run")


def test_a_changed_corpus_is_refused_by_name(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    path = Path(sentence_corpus.source.removeprefix("text:"))
    path.write_text(path.read_text().replace("dog", "god", 1))
    with pytest.raises(GdistillError, match=r"not the one that was tokenized.*corpus\.txt"):
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")


def test_a_corpus_that_changes_while_it_is_read(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = tokenization.encode

    def meddle(*arguments: object) -> list[np.ndarray]:
        os.utime(sentence_corpus.source.removeprefix("text:"), (1, 1))
        return encode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenization, "encode", meddle)
    with pytest.raises(GdistillError, match="changed while it was read"):
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    assert not (tmp_path / "run/tokens").exists()


def test_damage_is_found(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path)
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
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path)
    record = json.loads((tmp_path / "tokens/tokens.json").read_text())
    for name in sorted(set(record) - {"format_version", "versions"}):
        less = {key: value for key, value in record.items() if key != name}
        (tmp_path / "tokens/tokens.json").write_text(json.dumps(less))
        with pytest.raises(IntegrityError, match=rf"a field is missing.*got {name};.*stage 1"):
            TokenDataset.open(tmp_path / "tokens")
    for text in ("[]", "[" * 100_000, json.dumps({**record, "splits": {"train": {}}})):
        (tmp_path / "tokens/tokens.json").write_text(text)
        with pytest.raises(IntegrityError, match=r"damaged file|malformed list of parts"):
            TokenDataset.open(tmp_path / "tokens")
    (tmp_path / "tokens/tokens.json").write_text('{"format_version": 99}')
    with pytest.raises(UsageError, match="format version"):
        TokenDataset.open(tmp_path / "tokens")


def test_wikitext_rows_by_hand(tmp_path: Path) -> None:
    """Four lines of WikiText: empty ones leave their eos, the text is detokenized, rows framed."""
    words = [
        "<eos>",
        "=",
        "Valkyria",
        "Chronicles",
        "The",
        "game",
        ",",
        "released",
        "in",
        "2011",
        ".",
        "@-@",
        "role",
        "playing",
    ]
    tokenizer = word_tokenizer([*words, "game,", "released", "2011.", "role-playing", "=\n"])
    lines = tmp_path / "wiki.jsonl"
    texts = ["", " = Valkyria Chronicles = \n", "", " The role @-@ playing game , in 2011 . \n"]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = corpus_config(
        "wikitext2",
        ["validation_split=none", "validation_fraction=0.0", "row_length=6"],
        {"source": f"jsonl:{lines}"},
    )
    dataset = prepare_tokens(config, tokenizer, tmp_path)
    ids = tokenizer.convert_tokens_to_ids
    #          eos | = Valkyria Chronicles | = eos eos The | role-playing game, in 2011. | eos
    expected = [
        ["<eos>", "<eos>", "=", "Valkyria", "Chronicles", "<eos>"],
        ["<eos>", "=", "<eos>", "<eos>", "The", "<eos>"],
        ["<eos>", "role-playing", "game,", "in", "2011.", "<eos>"],
    ]
    assert all_rows(dataset, "train").tolist() == [ids(row) for row in expected]
    assert dataset.record["splits"]["train"]["num_dropped_tokens"] == 1
    assert dataset.num_rows("validation") == 0


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(dict.fromkeys(words))})
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<eos>", eos_token="<eos>")


def test_lm1b_rows_equal_the_references_packing(shared: Path, tmp_path: Path) -> None:
    """1,500 real sentences: [BOS] + 126 tokens + [EOS]; per 1,000 sentences as batched map does."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/gpt2-tokenizer")
    file = shared / "data/lm1b/1b_benchmark.dev.tokens"
    settings = ["validation_split=none", "validation_fraction=0.0", "document_separator=line"]
    settings += ["limit_documents=1500"]
    texts = [detokenizer("lm1b")(line) for line in file.read_text().split("\n")[:1500]]
    for group, groups in ((0, [texts]), (1000, [texts[:1000], texts[1000:]])):
        config = corpus_config(
            "lm1b", [*settings, f"group_documents={group}"], {"source": f"text:{file}"}
        )
        rows = all_rows(prepare_tokens(config, tokenizer, tmp_path / str(group)), "train")
        bodies = np.concatenate([streamed(tokenizer, part, 126) for part in groups])
        assert np.array_equal(rows[:, 1:-1], bodies)
        assert (rows[:, 0] == 50256).all() and (rows[:, -1] == 50256).all()


def test_maze_rows_are_the_teachers(tmp_path: Path) -> None:
    config = corpus_config("maze:k4", settings={"seed": 1})
    dataset = prepare_tokens(config, maze_tokenizer(), tmp_path)
    rows = all_rows(dataset, "train")
    assert rows.shape == (2000, 11) and dataset.num_rows("validation") == 500
    distinct = {tuple(row) for row in rows.tolist()}
    assert distinct == {tuple(row) for row in path_rows(load_maze("k4").paths(), 11).tolist()}


def test_special_ids(shared: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    plain = CorpusConfig("text:a")
    ids = tokenization.special_ids(bpe_tokenizer, plain)
    assert (ids.bos, ids.eos, ids.separator) == (0, 0, 0)
    quiet = CorpusConfig("text:a", separate_validation=False, eos_id=7)
    assert tokenization.special_ids(bpe_tokenizer, quiet, "validation").separator is None
    assert tokenization.special_ids(bpe_tokenizer, quiet, "train").separator == 7
    with pytest.raises(UsageError, match=r"corpus\.bos_id.*0 to 279"):
        tokenization.special_ids(bpe_tokenizer, CorpusConfig("text:a", bos_id=280))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenization.backend(bpe_tokenizer))
    with pytest.raises(UsageError, match=r"neither a bos nor an eos.*corpus\.eos_id=N"):
        tokenization.special_ids(bare, plain)
    ids = tokenization.special_ids(bare, CorpusConfig("text:a", eos_id=7))
    assert (ids.bos, ids.eos, ids.separator) == (7, 7, 7), "as the remedy says"
    # bos before and eos after every text: borders are eos, as the model has seen them.
    framed = Tokenizer.from_str(tokenization.backend(bpe_tokenizer).to_str())
    framed.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", 280), ("</s>", 281)]
    framed.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    both = PreTrainedTokenizerFast(tokenizer_object=framed, bos_token="<s>", eos_token="</s>")
    ids = tokenization.special_ids(both, plain)
    assert (ids.bos, ids.eos, ids.separator) == (280, 281, 281)
    # Stories end with the <s> that the tokenizer puts before every text.
    stories = tokenization.load_tokenizer(shared / "data/stories260K")
    ids = tokenization.special_ids(stories, plain)
    assert (ids.bos, ids.eos, ids.separator) == (1, 1, 1)


def test_requests_that_cannot_be_met(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UsageError, match="no such tokenizer folder"):
        prepare_tokens(sentence_corpus, tmp_path / "nowhere", tmp_path / "run")
    long = CorpusConfig(**{**vars(sentence_corpus), "row_length": 100_000})
    with pytest.raises(GdistillError, match=r"does not fill one row.*expected at least 100000"):
        prepare_tokens(long, bpe_tokenizer, tmp_path / "long")
    with pytest.raises(GdistillError, match=r"cannot encode the text.*this corpus"):
        prepare_tokens(sentence_corpus, maze_tokenizer(), tmp_path / "words")
    (tmp_path / "file").write_text("")
    with pytest.raises(GdistillError, match=r"cannot write the token rows.*file"):
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "file/run")
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
