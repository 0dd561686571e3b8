"""A model's folder: its configuration, today's and of before, and the card that people read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoConfig

from shards.atomic import sha256_file
from shards.errors import UsageError
from shards.settings import flatten, to_mapping
from tests.trainer.sampling_cases import LENGTH, tiny_student
from tests.trainer.students.student_cases import make_student
from trainer.loading import load_student
from trainer.students.configuration import FLAT_BEFORE, StudentSettings, grouped, unread_settings
from trainer.students.folder import _cell, find_model, model_card, read_model, weights_sha256, without_places
from trainer.students.registry import STUDENTS

ROOT = Path(__file__).parents[3]
CHANGED: dict[str, Any] = {
    "block_size": 4,
    "noise": {"injection": "add", "prior_weight": 0.5, "layers": [1, 2], "top_k": 3, "tau": 0.9},
    "diffusion": {"schedule": "cosine", "min_time": 0.25, "max_loss_weight": 1.0},
    "kd": {"kind": "token", "weight": 0.5},
    "backbone": {"own_noise": "seen", "num_proposed": 5},
}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """What the configuration of the student in ``tmp_path`` says."""
    tiny_student("bd3lm", **CHANGED).save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def rewrite(folder: Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_flat_keys_is_the_same_student(tmp_path: Path, config: dict[str, Any]) -> None:
    """Those that have gone are left out, whatever they say."""
    now = read_model(tmp_path)
    groups = {name: config.pop(name) for name in ("noise", "diffusion", "kd", "backbone")}
    flat = flatten(groups)
    before = {old: flat[new] for old, new in FLAT_BEFORE.items()}
    assert len(before) == len(flat), "every setting of a group had a name"
    gone = {"time_beta": 2.0, "noise_init": "zero", "kd_time_step": 0.5, "kd_num_steps": 3}
    rewrite(tmp_path, {**config, **before, **gone})
    then = read_model(tmp_path)
    assert then.settings == now.settings
    assert to_mapping(then.settings)["noise"] == groups["noise"]
    rewrite(tmp_path, {**config, **before, "kd": "through_time"})
    assert read_model(tmp_path).settings.kd.kind == "none"


def test_weights_in_several_files_are_hashed_all(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").write_text(name)
    both = (sha256_file(tmp_path / f"{name}.safetensors") for name in ("a", "b"))
    assert weights_sha256(tmp_path) == "+".join(both)


def test_what_is_no_model_yet_is_named(tmp_path: Path) -> None:
    for name, got in (("nothing", "no config.json of a model"), ("checkpoints/step-1", "an unfinished training run")):
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(UsageError, match=f"no model there.*{got}"):
            find_model(tmp_path)
    assert _cell({"a": "x|y\nz", "b": {}}) == "a x\\|y z", "one cell of a table"


def test_unknown_keys_refuse_themselves_and_transformers_own_pass(tmp_path: Path, config: Any) -> None:
    read = AutoConfig.from_pretrained(tmp_path, name_or_path="x", torch_dtype="float32")
    assert read.settings == read_model(tmp_path).settings
    assert read.num_hidden_layers == read.num_layers == config["num_layers"] == 2
    assert type(read)(**read.to_dict()).settings == read.settings
    named = type(read)(num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=32)
    assert (named.num_layers, named.num_heads, named.row_length) == (3, 4, 32)
    with pytest.raises(UsageError, match=r"stands on no backbone.*got x; .*leave --backbone out"):
        load_student(tmp_path, backbone="x")
    for change, words in (
        ({"nosie": {"tau": 0.5}}, "nosie.*noise"),
        ({"noise": {"tua": 0.5}}, "noise.tua.*tau"),
        ({"hidden_sizes": 16}, "hidden_sizes"),
        ({"noise_reading": [1]}, "noise_reading"),
    ):
        rewrite(tmp_path, {**config, **change})
        with pytest.raises(UsageError, match=words):
            read_model(tmp_path)


def test_every_setting_is_read_by_a_student_and_grouped_once() -> None:
    assert not set.intersection(*(unread_settings(each.reads) for each in STUDENTS.values()))
    values = to_mapping(StudentSettings())
    did_something = {"time_beta": 2.0}
    assert grouped({**values, "time_beta": 1.0}) == values and grouped(did_something) == did_something
    for student in STUDENTS.values():
        named = {name for name in student.reads if "." in name}
        assert named <= {*flatten(values)}, "a name that no setting has would refuse nothing"


# The card: what the hub reads, what people read, and nobody's folders.


def record(teacher: str = "stories260K", corpus: str = "maze:k4", student: str = "mdlm") -> Any:
    shape = {"row_length": 8, "vocab_size": 11, "mask_id": 11}
    store = {
        **shape,
        "tokens": {"corpus": corpus},
        "teacher": {"id": teacher, "weights_sha256": "ab" * 32},
        "codec": {"name": "posterior", "parameters": {"num_entries": 4}},
    }
    config = {"student": student, "training": {"global_batch_size": 8}, "seed": 1}
    return {"step": 10, "run": {"config": config, "store": store}, "validation": None}


def test_the_hub_is_told_of_what_is_on_it_alone() -> None:
    told = record("openai-community/gpt2", "hf:Salesforce/wikitext:wikitext-2-raw-v1")
    data = ModelCard(model_card(told, make_student())).data.to_dict()
    assert data["base_model"] == "openai-community/gpt2"
    assert data["datasets"] == ["Salesforce/wikitext"]
    assert (data["license"], data["library_name"]) == ("unknown", "transformers")
    assert "mdlm" in data["tags"]
    scores = {"nll_nats": 1.25, "perplexity": 3.5, "num_tokens": 4096}
    for conditional, kind in ((True, "given the noise"), (False, "bound")):
        told["validation"] = {**scores, "conditional": conditional}
        said = f"1.2500 nats per token ({kind}), perplexity 3.500, 4,096 tokens."
        assert said in model_card(told, make_student())
    card = ModelCard(model_card(record("teachers/stories260K/new"), make_student()))
    assert {"base_model", "datasets"}.isdisjoint(card.data.to_dict())
    assert "stories260K" in card.text and "maze:k4" in card.text


def test_heads_name_the_backbone_that_they_need() -> None:
    student = make_student()
    assert "stands on" not in model_card(record(), student)
    student.config.frozen = {"name": "/home/me/stories260K", "weights_sha256": "cd" * 32}
    card = model_card(record(), student)
    assert "the language model stories260K, which is not in this folder" in card
    assert f"weights_sha256 `{'cd' * 32}`" in card and "/home/me" not in card
    assert "--nfe" in card and "--nfe" not in model_card(record(student="drafter"), student)


def test_absolute_paths_become_names() -> None:
    published = {
        "/home/me/teachers/gpt2": "gpt2",
        "text:/home/me/stories/*.txt": "text:*.txt",
        "jsonl:/data/a.jsonl#text": "jsonl:a.jsonl#text",
        "~/models/mine": "mine",
        "file:///srv/store": "store",
    }
    same = ["s3://bucket/run/store", "hf:org/name", "org/name", "out/run/model", 3]
    assert without_places({"a": [(*published, *same)]}) == {"a": [[*published.values(), *same]]}


def options_of(line: str) -> set[tuple[str, float | str]]:
    pairs = re.findall(r"(--[a-z]+) (\S+)", line)
    return {(name, float(word) if word[0].isdigit() else word) for name, word in pairs}


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_the_card_samples_as_make_sample_does(kind: str, layers: tuple[int, ...]) -> None:
    """The same options in its command, the same settings in its Python, which runs."""
    student = tiny_student(kind, "gumbel", noise={"layers": layers})
    card = model_card(record(student=kind), student)
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


def test_transformers_knows_the_model_after_the_one_import_of_the_card(tmp_path: Path) -> None:
    """In a process of its own, as a reader of the card meets it: with the card's very lines."""
    scripts = []
    for kind, other in (("mdlm", "AutoModelForMaskedLM"), ("ar", "AutoModelForCausalLM")):
        student, folder = tiny_student(kind, "none"), tmp_path / kind
        student.save_pretrained(folder)
        card = model_card(record(student=kind), student)
        assert other in card and f"`gdistill-{kind}`" in card
        script = card.split("```python")[-1].split("```")[0]
        script = script.replace("PATH-TO-THIS-FOLDER", str(folder))
        script += f"from transformers import {other}\n"
        script += f"assert type({other}.from_pretrained('{folder}')) is type(student)\n"
        scripts.append(script + "print(student.generate(num_samples=2, seed=0).shape)\n")
    words = [sys.executable, "-c", "".join(scripts)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stdout.count(f"[2, {LENGTH}]") == 2, done.stderr
