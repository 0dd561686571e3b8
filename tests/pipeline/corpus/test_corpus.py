from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.corpus.config import CorpusConfig, corpus_config, preset_names
from pipeline.corpus.splits import open_source, plan_spans, read_documents
from pipeline.corpus.text_policy import Tally
from shards.base.errors import GdistillError, UsageError


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
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"gzip"))
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
        ("a.txt.gz", gzip.compress(b"a" * 10_000)[:-12], "file is damaged"),
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


def test_the_seven_validation_corpora_are_packed_alike() -> None:
    names = ["ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"]
    configs = {name: corpus_config(f"eval_{name}") for name in names}
    packings = {
        (config.packing, config.row_length, config.separate_validation, config.validation_fraction)
        for config in configs.values()
    }
    assert packings == {("concat", 1024, False, 1.0)}
    # The text itself is that of the presets for training.
    for name in ("ptb", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"):
        own, evaluated = corpus_config(name), configs[name]
        assert (evaluated.source, evaluated.field) == (own.source, own.field)
        assert evaluated.detokenizer == own.detokenizer
        assert evaluated.split == (own.validation_split or own.split)


def test_bare_paths_tell_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a story")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a packed story"))
    (tmp_path / "c.jsonl").write_text(json.dumps({"story": "a line"}) + "\n")
    (tmp_path / "d.csv").write_text('id,story\n1,"a row, ""quoted""\nin two lines"\n')
    (tmp_path / "e.tsv").write_text("id\tstory\nx\ta tab\n")
    pq.write_table(pa.table({"story": ["a cell"]}), tmp_path / "f.parquet")
    specs = ["a.txt", "b.txt.gz", "c.jsonl#story", "d.csv#story", "e.tsv#story", "f.parquet#story"]
    expected = [
        "a story",
        "a packed story",
        "a line",
        'a row, "quoted"\nin two lines',
        "a tab",
        "a cell",
    ]
    for spec, text in zip(specs, expected, strict=True):
        for place in (spec, f"./{spec}", f"{tmp_path}/{spec}"):
            assert everything(corpus_config(place, ["validation_fraction=0"])) == [text]
    assert corpus_config("*.txt").source == "text:*.txt"
    (tmp_path / "g.bin").write_text("x")
    for spec, message in (
        ("none.txt", "no such corpus file"),
        ("/none/at/all", "no such corpus file"),
        (str(tmp_path), "is a directory"),
        ("g.bin", "suffix does not tell"),
    ):
        with pytest.raises(UsageError, match=message):
            corpus_config(spec)


def test_csv_files(tmp_path: Path) -> None:
    """Other columns may hold anything; a range is that part of the whole; errors name the file."""
    rows = "".join(f"{i},{'word ' * 300}{i}\n" for i in range(5000))
    (tmp_path / "a.csv").write_text(f"n,text\n{rows}not a number,last\n")
    source = open_source(corpus_config(f"{tmp_path}/a.csv"), "train")
    assert source is not None and source.count() == 5001
    whole = list(source.documents(0, 5001))
    assert whole[-1].content == b"last" and whole[4321].content.endswith(b" 4321")  # type: ignore[arg-type]
    assert list(source.documents(4990, 4995)) == whole[4990:4995]
    (tmp_path / "b.csv").write_text("n,text\n1,2,3\n")
    with pytest.raises(GdistillError, match=r"cannot read the CSV file.*b\.csv"):
        everything(corpus_config(f"{tmp_path}/b.csv"))
    with pytest.raises(UsageError, match="did you mean 'text'"):
        everything(corpus_config(f"{tmp_path}/a.csv#txt"))


@pytest.mark.parametrize(
    ("sizes", "fraction"),
    [
        ([4000, 5000, 6000, 3000], 0.01),
        ([4000, 5000], 0.01),
        ([100] * 30 + [9000], 0.1),
        ([9000] + [100] * 30, 0.1),
        ([1000] * 200, 0.02),
        ([50, 50, 7000], 0.05),
    ],
)
def test_what_is_held_out_is_a_share_of_the_text(
    tmp_path: Path, sizes: list[int], fraction: float
) -> None:
    for number, size in enumerate(sizes):
        words = " ".join(f"{number}-{i}" for i in range(size // 5))
        (tmp_path / f"{number:03d}.txt").write_text(words)
    config = CorpusConfig(f"text:{tmp_path}/*.txt", validation_fraction=fraction)
    train, validation = (list(read_documents(config, split)) for split in ("train", "validation"))
    total = sum(map(len, train + validation))
    share = sum(map(len, validation)) / total
    assert train and 0.4 * fraction < share < 1.6 * fraction
    original = "".join(path.read_text() for path in sorted(tmp_path.glob("*.txt")))
    assert "".join(train + validation) == original


def test_settings_that_a_source_would_not_look_at_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for override in ("field=story", "split=test", "seed=3", "revision=main"):
        with pytest.raises(
            UsageError, match=rf"means nothing.*corpus\.{override.partition('=')[0]}"
        ):
            corpus_config(f"text:{tmp_path}/a.txt", [override])
    with pytest.raises(UsageError, match="document_separator"):
        corpus_config("jsonl:a.jsonl", ["document_separator=line"])
    with pytest.raises(UsageError, match="two fields"):
        corpus_config("jsonl:a.jsonl#text", ["field=story"])
    assert corpus_config("jsonl:a.jsonl", ["validation_split=none"]).validation_split is None


def test_limit_documents_holds_for_a_validation_source_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 5)
    source = f"jsonl:{tmp_path}/a.jsonl"
    config = CorpusConfig(source, validation_source=source, limit_documents=2)
    assert [span.stop - span.start for span in plan_spans(config)] == [2, 2]


def test_a_local_folder_of_a_data_set_is_known_by_its_content(tmp_path: Path) -> None:
    identities = []
    for name, text in (("one", "a"), ("two", "a"), ("three", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
        source = open_source(CorpusConfig(f"hf:{tmp_path / name}"), "train")
        assert source is not None
        facts = [dict(fact) for fact in source.identity()]
        for fact in facts:
            for local in ("path", "modified_ns"):
                fact.pop(local, None)
        identities.append(facts)
    assert identities[0] == identities[1] != identities[2]
    assert all(len(fact["sha256"]) == 64 for fact in identities[0] if "sha256" in fact)


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
    from pipeline.maze.layout import draw_documents, load_maze

    config = corpus_config("maze:m57", settings={"seed": 5})
    assert list(read_documents(config)) == draw_documents(load_maze("m57"), 2000, 5, "train")
    assert len(list(read_documents(config, "validation"))) == 500
    assert json.dumps(open_source(config, "train").identity())  # type: ignore[union-attr]
