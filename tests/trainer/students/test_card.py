"""The model card: what the hub reads, what people read, and nobody's folders."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from tests.trainer.students.test_mdlm import make_student
from trainer.students.card import model_card, without_places


def record(teacher: str, corpus: str) -> dict:
    store = {
        "row_length": 8,
        "vocab_size": 11,
        "mask_id": 11,
        "tokens": {"corpus": corpus},
        "teacher": {"id": teacher, "weights_sha256": "ab" * 32},
        "codec": {"name": "posterior", "parameters": {"num_entries": 4}},
    }
    config = {"student": "mdlm", "training": {"global_batch_size": 8}, "seed": 1}
    return {"step": 10, "run": {"config": config, "store": store}, "validation": None}


def test_the_hub_reads_teacher_and_corpus() -> None:
    told = record("openai-community/gpt2", "hf:Salesforce/wikitext:wikitext-2-raw-v1")
    data = ModelCard(model_card(told, make_student())).data.to_dict()
    assert data["base_model"] == "openai-community/gpt2"
    assert data["datasets"] == ["Salesforce/wikitext"]
    assert (data["license"], data["library_name"]) == ("unknown", "transformers")
    assert "mdlm" in data["tags"]


def test_what_is_not_on_the_hub_is_not_linked() -> None:
    card = ModelCard(model_card(record("stories260K", "maze:k4"), make_student()))
    assert {"base_model", "datasets"}.isdisjoint(card.data.to_dict())
    assert "stories260K" in card.text and "maze:k4" in card.text


@pytest.mark.parametrize(
    ("told", "published"),
    [
        ("/home/me/teachers/gpt2", "gpt2"),
        ("text:/home/me/stories/*.txt", "text:*.txt"),
        ("jsonl:/data/a.jsonl#text", "jsonl:a.jsonl#text"),
        ("~/models/mine", "mine"),
        ("file:///srv/store", "store"),
        ("s3://bucket/run/store", "s3://bucket/run/store"),
        ("hf:org/name", "hf:org/name"),
        ("org/name", "org/name"),
        ("out/run/model", "out/run/model"),
        (3, 3),
    ],
)
def test_absolute_paths_become_names(told: object, published: object) -> None:
    assert without_places({"a": [told]}) == {"a": [published]}
