"""What a run is refused for is said before stage 1, which may take hours; what ends it later."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from pipeline.extract import Extractor
from pipeline.plan import make_plan, what_would_be_done
from pipeline.run import public_source, run_extraction
from pipeline.settings import ExtractRequest, PlanOptions, Worker, resolve_request
from shards.errors import GdistillError, UsageError
from shards.store.store import ShardStore
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    WORDS,
    options,
    run,
    save_tokenizer,
)


def refused(out: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(GdistillError, match=match):
        run(out, given)
    assert not (out / "tokens").exists() and not (out / "store").exists()


def test_teachers_that_cannot_score(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "intermediate_size": 16}
    bert = BertConfig(**sizes, **heads, max_position_embeddings=CONTEXT_LENGTH)
    scaled = GraniteConfig(**sizes, **heads, logits_scaling=2.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
        GraniteForCausalLM(scaled).save_pretrained(tmp_path / "scaled")
        MambaForCausalLM(MambaConfig(**sizes, state_size=4)).save_pretrained(tmp_path / "mamba")
    for name in ("bert", "scaled", "mamba"):
        save_tokenizer(tmp_path / name)
    (shutil.copytree(teacher, tmp_path / "bare") / "model.safetensors").unlink()
    tensors = load_file(teacher / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = torch.nan
    nan = shutil.copytree(teacher, tmp_path / "nan") / "model.safetensors"
    save_file(tensors, nan, metadata={"format": "pt"})
    shutil.copytree(teacher, tmp_path / "plain")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("bare", {}, "the teacher has no weights"),
        ("bert", {}, "the teacher is not causal"),
        ("scaled", {"codec": {"name": "hidden", "num_entries": None}}, "changes its logits after"),
        ("mamba", {"mode": "sequential"}, "keeps no key-value cache"),
        ("nan", {}, r"weights hold NaN.*h\.1\.mlp\.c_fc\.bias"),
        ("plain", {"teacher": {"attention": "foo"}}, r"attention kernel cannot.*got foo"),
    ]
    for name, changes, match in cases:
        refused(tmp_path / "out", options(tmp_path / name, corpus, **changes), match)


WAYS: dict[str, Callable[[ExtractRequest], object]] = {
    "run": lambda request: run_extraction(request, Worker()),
    "--dry-run": lambda request: what_would_be_done(request, Worker()),
    "--plan": lambda request: make_plan(request, PlanOptions(tokens=1e6)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_a_plan_and_a_dry_run_refuse_alike(way: str, tmp_path: Path, asked: Asked) -> None:
    other = save_tokenizer(tmp_path / "other", [*WORDS[:2], *reversed(WORDS[2:])])
    wide = save_tokenizer(tmp_path / "wide", [*WORDS, *(f"x{i}" for i in range(64))])
    maze, none = asked(), asked()
    maze["corpus"], none["teacher"] = {"spec": "maze:k4"}, {}
    changes: dict[str, dict[str, Any]] = {
        "of another family": {"teacher": {"tokenizer": str(other)}},
        rf"a tokenizer of {len(WORDS) + 64}.*teacher's {VOCAB_SIZE}": {
            "teacher": {"tokenizer": str(wide)}
        },
        "no such tokenizer": {"teacher": {"tokenizer": "./nowhere"}},
        r"store\.rows_per_shard.*got 15.*multiple of 8": {"store": {"rows_per_shard": 15}},
        "context": {"corpus": {"row_length": CONTEXT_LENGTH + 1}},
        r"no revisions.*teacher\.revision.*'main'": {"teacher": {"revision": "main"}},
    }
    cases = {match: asked(**change) for match, change in changes.items()}
    cases |= {"does not know the moves.*leave --teacher out": maze, "no teacher": none}
    for match, given in cases.items():
        request = resolve_request(tmp_path / "out", given)
        with pytest.raises(UsageError, match=match):
            WAYS[way](request)
    assert not (tmp_path / "out/tokens").exists() and not (tmp_path / "out/store").exists()


def test_an_engine_leaves_no_revision_to_us(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    """Of a teacher elsewhere only the tokenizer is read here, and it is read as it stands."""
    for name, value in (("revision", "main"), ("trust_remote_code", True)):
        given = {
            "corpus": {"spec": f"text:{corpus}"},
            "engine": {"url": "http://127.0.0.1:9"},
            "teacher": {"tokenizer": str(teacher), name: value},
        }
        with pytest.raises(UsageError, match=rf"means nothing.*teacher\.{name}"):
            resolve_request(tmp_path, given)


def test_stores_that_cannot_be(tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "file").write_text("mine")
    for place, match in (("foo://bucket/store", "foo"), (f"{tmp_path}/file", "store is a folder")):
        refused(tmp_path / "out", asked(store={"location": place}), match)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_manifest_names_the_corpus_and_not_its_place(
    finished: Path, teacher: Path, corpus: Path
) -> None:
    manifest = (finished / "store" / "manifest.json").read_text()
    for place in (finished, corpus.parent, teacher.parent):
        assert str(place) not in manifest
    store = ShardStore.open(finished / "store")
    assert store.manifest.tokens["corpus"] == f"text:{corpus.name}"
    for source, public in (
        ("jsonl:/home/me/a.jsonl#text", "jsonl:a.jsonl#text"),
        ("hf:org/name:config", "hf:org/name:config"),
        ("hf:/home/me/data", "hf:data"),
        ("maze", "maze"),
        ("maze:k4", "maze:k4"),
    ):
        assert public_source(source) == public


def test_one_process_speaks_for_all(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    request = resolve_request(tmp_path, asked())
    assert run_extraction(request, Worker(1, 2)) == []
    assert any("nothing was left" in line for line in run_extraction(request, Worker(0, 2)))
    assert capsys.readouterr().err == "", "the silent worker found all the work"


def test_a_shard_that_goes_missing_meanwhile_is_no_success(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = Extractor.run

    def losing(self: Extractor, *arguments: Any) -> None:
        extract(self, *arguments)
        next((tmp_path / "store" / "ledger").rglob("*.json")).unlink()

    monkeypatch.setattr(Extractor, "run", losing)
    with pytest.raises(GdistillError, match=r"went missing.*same command again"):
        run(tmp_path, asked())
