"""Corpora by bare path, tables, fair splits, and settings that would mean nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.corpus.documents import open_source, plan_spans
from shards.errors import GdistillError, UsageError
from tests.pipeline.corpus.test_corpus import everything, read_documents


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
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a packed story", mtime=0))
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


def test_odd_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that hold what a pattern or a #field is written with, and suffixes in capitals."""
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].txt", "C#.txt", "B.TXT"):
        (tmp_path / name).write_text(name)
        assert everything(corpus_config(name, ["validation_fraction=0"])) == [name]
    (tmp_path / "a#b.jsonl").write_text('{"body": "x", "text": "y"}\n')
    for spec, text in (("a#b.jsonl#body", "x"), ("a#b.jsonl", "y")):
        assert everything(corpus_config(spec, ["validation_fraction=0"])) == [text]
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), "c.parquet")
    assert everything(corpus_config("c.parquet", ["validation_fraction=0"])) == ["a", "b", "a"]


def test_a_quote_that_never_ends_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\nfine\n"cut in the mid')
    with pytest.raises(GdistillError, match=r"cannot read the CSV file.*a\.csv: line 3"):
        everything(corpus_config(f"{tmp_path}/a.csv"))
    (tmp_path / "b.csv").write_bytes("\ufefftext,n\n".encode() + b'"bad \xff byte",1\n\n,2\n')
    with pytest.raises(GdistillError, match=r"not UTF-8.*row 0, byte 4"):
        everything(corpus_config(f"{tmp_path}/b.csv"))
    kept = corpus_config(f"{tmp_path}/b.csv", ["on_bad_utf8=skip", "validation_fraction=0"])
    assert everything(kept) == []


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
