"""What a run is refused for is said before stage 1, which may take hours."""

from __future__ import annotations

import json
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
from tests.pipeline.extract_cases import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    WORDS,
    options,
    run,
    save_tokenizer,
)


def refused(out: Path, given: dict[str, Any], match: str, error: type = UsageError) -> None:
    with pytest.raises(error, match=match):
        run(out, given)
    assert not (out / "tokens").exists() and not (out / "store").exists()


def test_teachers_that_cannot_score(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(teacher, bare)
    (bare / "model.safetensors").unlink()
    refused(tmp_path / "a", options(bare, corpus), "the teacher has no weights")

    bert = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=CONTEXT_LENGTH,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    given = options(save_tokenizer(tmp_path / "bert"), corpus)
    refused(tmp_path / "b", given, "the teacher is not causal")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "intermediate_size": 16, "logits_scaling": 2.0}
        GraniteForCausalLM(GraniteConfig(**sizes, **heads)).save_pretrained(tmp_path / "scaled")
        MambaForCausalLM(MambaConfig(**sizes, state_size=4)).save_pretrained(tmp_path / "mamba")
    given = options(save_tokenizer(tmp_path / "scaled"), corpus)
    given["codec"] = {"name": "hidden"}
    refused(tmp_path / "d", given, "changes its logits after the LM head")
    given = options(save_tokenizer(tmp_path / "mamba"), corpus, mode="sequential")
    refused(tmp_path / "e", given, "keeps no key-value cache")
    tensors = load_file(teacher / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = torch.nan
    shutil.copytree(teacher, tmp_path / "nan")
    save_file(tensors, tmp_path / "nan/model.safetensors", metadata={"format": "pt"})
    given = options(tmp_path / "nan", corpus)
    refused(tmp_path / "f", given, r"weights hold NaN.*h\.1\.mlp\.c_fc\.bias", GdistillError)

    named = options(teacher, corpus, teacher={"attention": "foo"})
    refused(tmp_path / "c", named, r"attention kernel cannot be used.*got foo")


WAYS: dict[str, Callable[[ExtractRequest], object]] = {
    "run": lambda request: run_extraction(request, Worker()),
    "--dry-run": lambda request: what_would_be_done(request, Worker()),
    "--plan": lambda request: make_plan(request, PlanOptions(tokens=1e6)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_a_plan_and_a_dry_run_refuse_alike(
    way: str, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    words = [*WORDS[:2], *reversed(WORDS[2:])]
    other = str(save_tokenizer(tmp_path / "other", words))
    wide = str(save_tokenizer(tmp_path / "wide", [*WORDS, "more"]))
    maze = options(teacher, corpus)
    maze["corpus"] = {"spec": "maze:k4"}
    none = options(teacher, corpus)
    none["teacher"] = {}
    cases = {
        "of another family": options(teacher, corpus, teacher={"tokenizer": other}),
        "vocabular": options(teacher, corpus, teacher={"tokenizer": wide}),
        "no such tokenizer": options(teacher, corpus, teacher={"tokenizer": "./nowhere"}),
        "does not know the moves.*leave --teacher out": maze,
        "no teacher": none,
        r"store\.rows_per_shard.*got 15.*multiple of 8": options(
            teacher, corpus, store={"rows_per_shard": 15}
        ),
        r"context": options(teacher, corpus, corpus={"row_length": CONTEXT_LENGTH + 1}),
        r"no revisions.*teacher\.revision.*'main'": options(
            teacher, corpus, teacher={"revision": "main"}
        ),
    }
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


def test_stores_that_cannot_be(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    given = options(teacher, corpus, store={"location": "foo://bucket/store"})
    refused(tmp_path / "a", given, "foo")
    (tmp_path / "file").write_text("mine")
    given = options(teacher, corpus, store={"location": str(tmp_path / "file")})
    refused(tmp_path / "b", given, "the store is a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_manifest_names_the_corpus_and_not_its_place(
    tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    run(tmp_path, options(teacher, corpus))
    manifest = (tmp_path / "store" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest and str(corpus.parent) not in manifest
    assert str(teacher.parent) not in manifest
    store = ShardStore.open(tmp_path / "store")
    assert store.manifest.tokens["corpus"] == f"text:{corpus.name}"
    assert public_source("jsonl:/home/me/a.jsonl#text") == "jsonl:a.jsonl#text"
    assert public_source("hf:org/name:config") == "hf:org/name:config"
    assert public_source("hf:/home/me/data") == "hf:data"
    assert public_source("maze") == "maze" and public_source("maze:k4") == "maze:k4"


def test_one_process_speaks_for_all(
    tmp_path: Path, teacher: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(teacher, corpus)
    request = resolve_request(tmp_path, given)
    assert run_extraction(request, Worker(1, 2)) == []
    assert any(
        "tokens/s" in line or "nothing was left" in line
        for line in run_extraction(request, Worker(0, 2))
    )
    assert capsys.readouterr().err == "", "the silent worker found all the work"


def test_a_shard_that_goes_missing_meanwhile_is_no_success(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = Extractor.run

    def losing(self: Extractor, *arguments: Any) -> None:
        extract(self, *arguments)
        next((tmp_path / "store" / "ledger").rglob("*.json")).unlink()

    monkeypatch.setattr(Extractor, "run", losing)
    with pytest.raises(GdistillError, match=r"went missing.*same command again"):
        run(tmp_path, options(teacher, corpus))


def test_the_resolved_request_lies_beside_its_outputs(
    tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    run(tmp_path, options(teacher, corpus, seed=5))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["seed"] == 5 and written["codec"]["num_entries"] == 5
    assert written["teacher"]["location"] == str(teacher)
