"""The model card: what the hub reads, what people read, and nobody's folders."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.trainer.sampling_cases import LENGTH, tiny_student
from tests.trainer.students.student_cases import make_student
from trainer.students.folder import model_card, without_places

ROOT = Path(__file__).parents[3]


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


def test_heads_name_the_backbone_that_they_need() -> None:
    told, student = record("stories260K", "maze:k4"), make_student()
    assert "stands on" not in model_card(told, student)
    student.config.frozen = {"name": "/home/me/stories260K", "weights_sha256": "cd" * 32}
    card = model_card(told, student)
    assert "the language model stories260K, which is not in this folder" in card
    assert f"weights_sha256 `{'cd' * 32}`" in card and "/home/me" not in card


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


def options_of(line: str) -> set[tuple[str, float | str]]:
    pairs = re.findall(r"(--[a-z]+) (\S+)", line)
    return {(name, float(word) if word[0].isdigit() else word) for name, word in pairs}


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_the_card_samples_as_make_sample_does(kind: str, layers: tuple[int, ...]) -> None:
    """The same options in its command, the same settings in its Python, which runs."""
    student = tiny_student(kind, "gumbel", noise={"layers": layers})
    told = record("tiny", "maze")
    told["run"]["config"]["student"] = kind
    card = model_card(told, student)
    (command,) = re.findall(r"^gdistill-sample .*$", card, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(rf"^NEAREST_{kind} *= (.*)$", makefile, re.MULTILINE)
    given, expected = options_of(command), options_of(line)
    assert expected <= given if layers else not expected & given
    assert ("--nfe", 16.0) in given
    assert "(640 tokens)" in card  # 10 steps of 8 rows of 8
    (call,) = re.findall(r"student\.(generate\(.*\))", card)
    rows = eval(f"student.{call}", {"student": student})
    assert rows.shape == (4, LENGTH) and bool((rows < student.mask_id).all())


def test_a_users_own_trainer_py_is_warned_of(tmp_path: Path) -> None:
    """Python then imports it in place of the package; the card quotes what it says."""
    (tmp_path / "trainer.py").write_text("")
    words = [sys.executable, "-c", "import trainer.loading"]
    known = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "'trainer' is not a package" in known.stderr
    assert "'trainer' is not a package" in model_card(record("tiny", "maze"), make_student())


IN_A_FRESH_PROCESS = """
import sys
for script in sys.argv[1:]:
    try:
        exec(script.replace("import trainer.loading", "#"), {})
    except ValueError as error:
        print(str(error).splitlines()[0])
for script in sys.argv[1:]:
    exec(script, {})
"""


def test_transformers_knows_the_model_after_the_one_import_of_the_card(tmp_path: Path) -> None:
    """In a process of its own, as a reader of the card meets it: with the card's very lines."""
    cards, scripts = {}, []
    for kind, other in (("mdlm", "AutoModelForMaskedLM"), ("ar", "AutoModelForCausalLM")):
        student, folder = tiny_student(kind, "none"), tmp_path / kind
        student.save_pretrained(folder)
        told = record("tiny", "maze")
        told["run"]["config"]["student"] = kind
        cards[kind] = model_card(told, student)
        script = cards[kind].split("```python")[-1].split("```")[0]
        script = script.replace("PATH-TO-THIS-FOLDER", str(folder))
        script += f"from transformers import {other}\n"
        script += f"assert type({other}.from_pretrained('{folder}')) is type(student)\n"
        scripts.append(script + "print(student.generate(num_samples=2, seed=0).shape)\n")
    words = [sys.executable, "-c", IN_A_FRESH_PROCESS, *scripts]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stdout.count(f"[2, {LENGTH}]") == 2, done.stderr
    for kind, error in zip(cards, done.stdout.splitlines(), strict=False):
        assert f"`gdistill-{kind}`" in error and f"`gdistill-{kind}`" in cards[kind]
