"""What a model folder's configuration may hold: today's keys, and the flat ones of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shards.errors import UsageError
from shards.settings import flatten, to_mapping
from tests.trainer.sampling_cases import tiny_student
from trainer.students.configuration import FLAT_BEFORE, StudentSettings, grouped, unread_settings
from trainer.students.folder import read_model
from trainer.students.registry import STUDENTS

CHANGED: dict[str, Any] = {
    "block_size": 4,
    "noise": {"injection": "add", "prior_weight": 0.5, "layers": [1, 2], "top_k": 3, "tau": 0.9},
    "diffusion": {"schedule": "cosine", "min_time": 0.25, "max_loss_weight": 1.0},
    "kd": {"kind": "token", "weight": 0.5},
    "backbone": {"own_noise": "seen", "num_proposed": 5},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_student("bd3lm", **CHANGED).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_with_flat_keys_is_the_same_student(folder: Path) -> None:
    """Its keys are flat; those that have gone are left out, whatever they say."""
    config = json.loads((folder / "config.json").read_text())
    now = read_model(folder)
    groups = {name: config.pop(name) for name in ("noise", "diffusion", "kd", "backbone")}
    flat = flatten(groups)
    before = {old: flat[new] for old, new in FLAT_BEFORE.items()}
    assert len(before) == len(flat), "every setting of a group had a name"
    gone = {"time_beta": 2.0, "noise_init": "zero", "kd_time_step": 0.5, "kd_num_steps": 3}
    rewrite(folder, {**config, **before, **gone})
    then = read_model(folder)
    assert then.settings == now.settings
    assert to_mapping(then.settings)["noise"] == groups["noise"]
    rewrite(folder, {**config, **before, "kd": "through_time"})
    assert read_model(folder).settings.kd.kind == "none"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nosie": {"tau": 0.5}}, "nosie.*noise"),
        ({"noise": {"tua": 0.5}}, "noise.tua.*tau"),
        ({"hidden_sizes": 16}, "hidden_sizes"),
        ({"noise_reading": [1]}, "noise_reading"),
    ],
)
def test_unknown_keys_refuse_themselves(folder: Path, change: dict[str, Any], named: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder, {**config, **change})
    with pytest.raises(UsageError, match=named):
        read_model(folder)


def test_transformers_own_arguments_pass(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, name_or_path="x", torch_dtype="float32")
    assert config.settings == read_model(folder).settings
    assert config.num_hidden_layers == config.num_layers == 2
    assert type(config)(**config.to_dict()).settings == config.settings


def test_every_setting_is_read_by_a_student() -> None:
    unread = [unread_settings(student.reads) for student in STUDENTS.values()]
    assert not set.intersection(*unread)
    everything = {*flatten(to_mapping(StudentSettings()))}
    for student in STUDENTS.values():
        named = {name for name in student.reads if "." in name}
        assert named <= everything, "a name that no setting has would refuse nothing"


def test_grouping_leaves_what_is_grouped() -> None:
    values = to_mapping(StudentSettings())
    assert grouped(values) == values
