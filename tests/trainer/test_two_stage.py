"""The recipe in two parts: what each of them is, what a user may change, how it goes on."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.commands import call
from tests.trainer.run_cases import write_store
from trainer.students.folder import weights_sha256
from trainer.students.registry import read_preset
from trainer.training.settings import read_recipe
from trainer.training.status import status_text
from trainer.two_stage import (
    LARGE_VOCABULARY,
    Parts,
    noise_layers_of,
    train_two_stage,
    two_stage_parts,
)

TINY: dict[str, Any] = {
    "model": {**read_preset("tiny"), "hidden_size": 16, "num_heads": 2},
    "training": {"num_steps": 20, "global_batch_size": 4, "trackers": []},
    "optimization": {"learning_rate": 1e-3, "warmup_steps": 7},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("two-stage") / "store")


def parts_of(store: Path, student: str = "mdlm", *overrides: str) -> Parts:
    return two_stage_parts(student, ShardStore.open(store), TINY, [], overrides)


def both(found: Parts, name: str) -> list[Any]:
    """A setting of both parts."""
    return [attrgetter(name)(part) for part in found]


def test_as_many_steps_go_on_with_noise(store: Path) -> None:
    found, blocks = parts_of(store), parts_of(store, "bd3lm")
    for name, values in {
        "student": ["mdlm", "mdlm"],
        "model.conditioning": ["none", "gumbel"],
        "model.diffusion.max_loss_weight": [1.0, 1.0],
        "training.num_steps": [20, 20],
        "optimization.warmup_steps": [7, 2],
        "optimization.schedule": ["constant", "cosine"],
        "optimization.learning_rate": [1e-3, 1e-3],
    }.items():
        assert both(found, name) == values, name
    assert blocks.noise.optimization.learning_rate == pytest.approx(2e-3)
    assert found.noise.model.noise.injection == "add" and found.noise.model.noise.layers == (1, 2)


def test_epochs_are_counted_in_steps(store: Path) -> None:
    """Ten epochs of 40 rows in batches of 4 are 100 steps, and 100 with noise."""
    preset = {**TINY, "training": {"num_epochs": 10, "global_batch_size": 4, "trackers": []}}
    found = two_stage_parts("mdlm", ShardStore.open(store), preset)
    assert both(found, "training.num_steps") == [None, 100]
    assert found.noise.training.num_epochs is None


def test_blocks_begin_as_a_whole_row(store: Path) -> None:
    found = parts_of(store, "bd3lm", "model.block_size=2", "model.noise.prior_weight=0.5")
    assert both(found, "student") == ["mdlm", "bd3lm"]
    assert both(found, "model.block_size") == [None, 2]
    assert both(found, "model.noise.prior_weight") == [0.0, 0.5]
    assert both(found, "model.diffusion.fully_masked_share") == [0.0, 0.5]


def test_what_a_user_sets_goes_before_the_recipe_in_both_parts(store: Path) -> None:
    found = parts_of(
        store, "mdlm", "seed=3", "model.diffusion.max_loss_weight=5.0", "model.noise.layers=[2]",
        "optimization.schedule=constant", "training.num_steps=40", "training.num_noise_draws=2",
    )  # fmt: skip
    assert both(found, "seed") == [3, 3]
    assert both(found, "model.diffusion.max_loss_weight") == [5.0, 5.0]
    assert both(found, "optimization.schedule") == ["constant"] * 2
    assert both(found, "training.num_steps") == [40, 40]
    assert both(found, "model.noise.layers") == [(), (2,)]
    assert both(found, "training.num_noise_draws") == [None, 2]
    own = {"model": {"noise": {"prior_weight": 0.5}, "diffusion": {"max_loss_weight": 3.0}}}
    found = two_stage_parts("mdlm", ShardStore.open(store), TINY, [own])
    assert both(found, "model.noise.prior_weight") == [0.0, 0.5]
    assert both(found, "model.diffusion.max_loss_weight") == [3.0, 3.0]


def test_large_vocabularies_are_read_among_candidates_at_thirds() -> None:
    assert noise_layers_of(4, LARGE_VOCABULARY - 1) == {"layers": [1, 2, 3, 4]}
    found = noise_layers_of(12, LARGE_VOCABULARY)
    assert found == {"layers": [4, 8], "top_k": 256}
    assert noise_layers_of(1, LARGE_VOCABULARY)["layers"] == [1]


@pytest.mark.parametrize("preset", ["tiny", "small", "medium", "maze"])
@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_every_preset_has_both_parts(store: Path, preset: str, student: str) -> None:
    found = two_stage_parts(student, ShardStore.open(store), read_recipe(preset))
    assert found.noise.model.num_layers == found.plain.model.num_layers


def test_both_parts_are_trained_and_the_same_call_goes_on(store: Path, tmp_path: Path) -> None:
    found, out = parts_of(store), tmp_path / "run"
    assert train_two_stage(found, store, out)
    weights = (out / "model/model.safetensors").read_bytes()
    begun = json.loads((out / "plain/model/student.json").read_text())
    assert begun["step"] == 20
    record = json.loads((out / "model/student.json").read_text())
    assert record["run"]["init_from"]["weights_sha256"] == weights_sha256(out / "plain/model")
    (out / "model/model.safetensors").unlink()
    assert train_two_stage(found, store, out)
    assert (out / "model/model.safetensors").read_bytes() == weights
    other = tmp_path / "other"
    assert train_two_stage(found, store, other, init_from=out / "plain")
    assert not (other / "plain").exists()
    assert (other / "model/model.safetensors").read_bytes() == weights


def test_the_command(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--config, --set and --init-from reach the parts, which are named and seen."""
    (tmp_path / "own.toml").write_text("[model]\nhidden_size = 16\nnum_heads = 2\n")
    words = ["two-stage", "--store", store, "--config", tmp_path / "own.toml", "--set"]
    words += ["training.num_steps=3", "--set", "training.global_batch_size=4", "--out"]
    assert call("gdistill-train", *words, tmp_path / "run") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("part 1 of 2: mdlm, conditioning none")
    assert any(line.startswith("part 2 of 2: mdlm, conditioning gumbel") for line in lines)
    assert status_text(tmp_path / "run").count("3 of 3 (100.0%)") == 2
    record = json.loads((tmp_path / "run/config.json").read_text())
    assert record["model"]["hidden_size"] == 16 and record["training"]["num_steps"] == 3
    other = (tmp_path / "other", "--init-from", tmp_path / "run/plain")
    assert call("gdistill-train", *words, *other) == 0
    assert not (tmp_path / "other/plain").exists()


@pytest.mark.parametrize("codec", ["posterior", "seeded", "topk", "quantized", "full"])
def test_every_codec_has_the_recipe(codec: str, tmp_path: Path) -> None:
    """Prior noise, asked for, is drawn where a store keeps distributions; one draw leaves none."""
    path = write_store(tmp_path / "store", codec)
    found = parts_of(path)
    assert train_two_stage(found, path, tmp_path / "run")
    asked = parts_of(path, "mdlm", "model.noise.prior_share=0.1")
    assert asked.noise.model.noise.prior_share == 0.1
    if codec != "posterior":
        with pytest.raises(UsageError, match="keeps one draw"):
            train_two_stage(asked, path, tmp_path / "asked")
        assert not (tmp_path / "asked" / "plain").exists(), "said before the first part"
