from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.corpus.config import CorpusConfig, corpus_config, preset_names
from pipeline.corpus.documents import Tally, open_source, plan_spans, read_span
from shards.errors import GdistillError, UsageError


def read_documents(
    config: CorpusConfig, split: str = "train", tally: Tally | None = None
) -> Iterator[str]:
    """The documents of one split, in order, counted in ``tally``."""
    for span in plan_spans(config):
        if span.split == split:
            yield from (text for _, text in read_span(span, config, tally or Tally()))


def everything(config: CorpusConfig) -> list[str]:
    return [text for split in ("train", "validation") for text in read_documents(config, split)]


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("<|endoftext|>", ["one\n\nstill one", "two  ", "three"]),
        ("line", ["one", "still one", "<|endoftext|>", "two  ", "<|endoftext|>", "three"]),
        ("blank_line", ["one", "still one\n<|endoftext|>\ntwo  \n<|endoftext|>", "three"]),
        ("file", ["one\n\nstill one\n<|endoftext|>\ntwo  \n<|endoftext|>\n\nthree"]),
        ("two", ["one\n\nstill one\n<|endoftext|>", "<|endoftext|>\n\nthree"]),
    ],
)
def test_documents_of_a_text_file(tmp_path: Path, separator: str, expected: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one\n<|endoftext|>\ntwo  \n<|endoftext|>\n\nthree\n")
    config = CorpusConfig(f"text:{path}", document_separator=separator, validation_fraction=0.0)
    assert everything(config) == expected


def test_line_ends_and_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n<|endoftext|>\r\n\r\n<|endoftext|>\ntwo\r\nlines\r\n")
    config = CorpusConfig(f"text:{path}", validation_fraction=0.0)
    assert everything(config) == ["one", "two\r\nlines"]
    lines = CorpusConfig(f"text:{path}", document_separator="line", validation_fraction=0.0)
    assert everything(lines) == ["one", "<|endoftext|>", "<|endoftext|>", "two", "lines"]


def test_globs_and_compression(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"gzip", mtime=0))
    packed = zstandard.compress(b"zstd\n<|endoftext|>\n") + zstandard.compress(b"second frame")
    (tmp_path / "c.txt.zst").write_bytes(packed)
    (tmp_path / "folder.txt").mkdir()
    config = CorpusConfig(f"text:{tmp_path}/*.txt*", validation_fraction=0.0)
    assert everything(config) == ["plain", "gzip", "zstd", "second frame"]


def test_json_lines_and_parquet(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "no", "story": "one"}\n\n{"story": "tw\\u00f6"}\n')
    config = CorpusConfig(f"jsonl:{lines}#story", validation_fraction=0.5)
    assert list(read_documents(config)) == ["one"]
    assert list(read_documents(config, "validation")) == ["twö"]

    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a", None, "b"] * 1000}), table, row_group_size=700)
    config = CorpusConfig(f"parquet:{table}", field="body", validation_documents=1500)
    assert list(read_documents(config)) == ["a", "b"] * 500
    tally = Tally()
    assert len(list(read_documents(config, "validation", tally))) == 1000
    assert (tally.num_documents, tally.num_empty, tally.num_bytes) == (1000, 500, 1000)


def test_data_sets_of_the_hub_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, words in (("train", ["a", "b", "c"]), ("validation", ["d"])):
        table = pa.table({"text": words, "label": [0] * len(words)})
        pq.write_table(table, folder / f"{split}.parquet")
    held_out = CorpusConfig(f"hf:{folder}", validation_documents=1)
    assert list(read_documents(held_out)) == ["a", "b"]
    assert list(read_documents(held_out, "validation")) == ["c"]
    own = CorpusConfig(f"hf:{folder}", validation_split="validation")
    assert (list(read_documents(own)), list(read_documents(own, "validation"))) == (
        ["a", "b", "c"],
        ["d"],
    )
    pq.write_table(pa.table({"text": ["a", None, "b"]}), folder / "test.parquet")
    nothing = CorpusConfig(f"hf:{folder}", split="test", validation_fraction=0.0)
    tally = Tally()
    assert list(read_documents(nothing, "train", tally)) == ["a", "b"] and tally.num_empty == 1
    (folder / "test.parquet").unlink()
    first, second = (open_source(own, "train"), open_source(own, "train"))
    assert first is not None and second is not None and first.identity() == second.identity()
    with pytest.raises(UsageError, match=r"no field 'txt'.*did you mean 'text'"):
        list(read_documents(CorpusConfig(f"hf:{folder}", field="txt")))
    with pytest.raises(UsageError, match="holds no text"):
        list(read_documents(CorpusConfig(f"hf:{folder}", field="label")))
    with pytest.raises(UsageError, match="cannot load the data set"):
        list(read_documents(CorpusConfig(f"hf:{folder}", split="tset")))
    with pytest.raises(UsageError, match="no such folder of a data set"):
        list(read_documents(CorpusConfig(f"hf:{tmp_path}/nowhere")))


@pytest.mark.parametrize(
    ("settings", "num_train", "num_validation"),
    [
        ({}, 198, 2),
        ({"validation_fraction": 0.0}, 200, 0),
        ({"validation_fraction": 0.001}, 199, 1),
        ({"validation_fraction": 1.0}, 0, 200),
        ({"validation_documents": 50}, 150, 50),
        ({"validation_documents": 50, "limit_documents": 60}, 10, 50),
    ],
)
def test_split_rules_keep_order(
    tmp_path: Path, settings: dict[str, float], num_train: int, num_validation: int
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(200)))
    config = CorpusConfig(f"text:{path}", document_separator="line", **settings)  # type: ignore[arg-type]
    train, validation = list(read_documents(config)), list(read_documents(config, "validation"))
    assert (len(train), len(validation)) == (num_train, num_validation)
    assert [int(text) for text in train + validation] == list(range(num_train + num_validation))


def test_a_source_of_its_own_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    config = CorpusConfig(f"text:{tmp_path}/a.txt", validation_source=f"text:{tmp_path}/b.txt")
    assert everything(config) == ["train", "held out"]


def test_a_single_document_is_divided_at_white_space(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(1000))
    (tmp_path / "a.txt").write_text(text)
    config = CorpusConfig(f"text:{tmp_path}/a.txt", validation_fraction=0.1)
    tally = Tally()
    (train,), (validation,) = (
        read_documents(config, split, tally) for split in ("train", "validation")
    )
    assert tally.num_bytes == len(text)
    assert train + validation == text
    assert validation.startswith(" word") and len(validation) == pytest.approx(
        len(text) / 10, abs=9
    )


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n<|endoftext|>\nbad \xff text\n<|endoftext|>\ngood\n")
    where = rf"{path}: byte {5 + 14 + 4}\]; got byte 0xff"
    with pytest.raises(GdistillError, match=where):
        everything(CorpusConfig(f"text:{path}"))
    for policy, expected in (("replace", ["good", "bad � text", "good"]), ("skip", ["good"] * 2)):
        tally = Tally()
        config = CorpusConfig(f"text:{path}", on_bad_utf8=policy, validation_fraction=0.0)  # type: ignore[arg-type]
        assert list(read_documents(config, "train", tally)) == expected
        assert tally.num_bad_utf8 == 1


def test_bad_utf8_in_other_sources(tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_bytes(b'{"text": "ok"}\n{"text": "\\ud800 lone"}\n')
    column = pa.array([b"ok", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), table)
    with pytest.raises(GdistillError, match="lone surrogate"):
        everything(CorpusConfig(f"jsonl:{lines}"))
    with pytest.raises(GdistillError, match="row 1, byte 0"):
        everything(CorpusConfig(f"parquet:{table}"))
    replaced = CorpusConfig(f"jsonl:{lines}", on_bad_utf8="replace", validation_fraction=0.0)
    assert everything(replaced) == ["ok", "? lone"]


def test_control_characters_are_kept_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\x00b\tc\x7f\x1b\n")
    tally = Tally()
    config = CorpusConfig(f"text:{path}", validation_fraction=0.0)
    assert list(read_documents(config, "train", tally)) == ["a\x00b\tc\x7f\x1b"]
    assert tally.num_control_characters == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wikitxt2", "did you mean 'wikitext2'"),
        ("txt:a.txt", "did you mean 'text"),
        ("text:{folder}/none.txt", "no such corpus file"),
        ("text:{folder}/*.none", "no file matches"),
        ("text:{folder}", "is a directory"),
        ("text:", "names no file"),
        ("maze:k5", "did you mean 'k4'"),
        ("parquet:{folder}/a.parquet#txet", "did you mean 'text'"),
        ("parquet:{folder}/a.parquet#n", "holds no text"),
        ("{folder}/no.toml", "cannot read the config file"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, spec: str, message: str) -> None:
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=message):
        everything(corpus_config(spec.format(folder=tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"txt": "a"}\n', "no text in field 'text'.*did you mean 'txt'"),
        ("a.jsonl", b'{"text": 3}\n', "got int"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a.jsonl: line 2\].*got list"),
        ("a.jsonl", b'{"text"\n', "malformed JSON line"),
        ("a.txt.gz", gzip.compress(b"a" * 10_000, mtime=0)[:-12], "file is damaged"),
        ("a.txt.zst", b"not zstd", "file is damaged"),
        ("b.txt.zst", zstandard.compress(b"a" * 10_000)[:-2], "file is damaged.*Truncated"),
        ("a.parquet", b"not parquet", "not a Parquet file"),
        ("a.txt", b"\n \n<|endoftext|>\n", "no documents"),
        ("empty.jsonl", b"", "no documents"),
    ],
)
def test_broken_sources(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    scheme = "text" if ".txt" in name else name.rpartition(".")[2]
    with pytest.raises(GdistillError, match=message):
        everything(CorpusConfig(f"{scheme}:{tmp_path}/{name}"))


def test_more_held_out_than_there_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(UsageError, match=r"held out.*got 2; expected at most 1"):
        plan_spans(CorpusConfig(f"text:{tmp_path}/a.txt", validation_documents=2))


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_well_formed(name: str) -> None:
    config = corpus_config(name)
    assert config.row_length and config.row_length >= 11


def test_presets_are_the_ones_promised() -> None:
    promised = "ag_news arxiv lambada lm1b maze owt ptb pubmed tinystories wikitext103 wikitext2"
    evaluated = [name for name in preset_names() if name.startswith("eval_")]
    assert preset_names() == sorted([*promised.split(), *evaluated])
    owt, lm1b = corpus_config("owt"), corpus_config("lm1b")
    assert (owt.packing, owt.row_length, owt.validation_documents) == ("concat", 1024, 100_000)
    assert (lm1b.packing, lm1b.row_length, lm1b.detokenizer) == ("wrap", 128, "lm1b")


def test_overrides_settings_and_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('source = "text:a.txt"\nrow_length = 64\npacking = "wrap"\n')
    config = corpus_config(
        str(path), ["row_length=32"], {"bos_id": 3, "row_length": 48, "eos_id": None}
    )
    assert (config.packing, config.row_length, config.bos_id) == ("wrap", 32, 3)
    assert corpus_config("maze:m57").row_length == 11
    assert corpus_config("text:a.txt").row_length is None
    with pytest.raises(UsageError, match="did you mean 'row_length'"):
        corpus_config("owt", ["row_lenght=32"])
    with pytest.raises(UsageError, match="validation_fraction"):
        corpus_config("owt", ["validation_fraction=1.5"])


def test_maze_documents_are_the_teachers_training_rows(tmp_path: Path) -> None:
    from pipeline.maze import draw_documents, load_maze

    config = corpus_config("maze:m57", settings={"seed": 5})
    assert list(read_documents(config)) == draw_documents(load_maze("m57"), 2000, 5, "train")
    assert len(list(read_documents(config, "validation"))) == 500
    assert json.dumps(open_source(config, "train").identity())  # type: ignore[union-attr]
