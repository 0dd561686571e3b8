"""The benchmarks of lossless decoding: same tokens for all, intervals, a certificate that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import acceptance, coupled, slot_noise
from evaluation.acceptance import acceptance_score
from shards.errors import GdistillError, UsageError
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.students.drafter.drafter_cases import RECIPES, a_batch, tiny_drafter
from trainer.students.folder import ModelFolder, open_model
from trainer.students.registry import Medusa
from trainer.training.loop import train


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFolder]:
    folder = tmp_path_factory.mktemp("lossless")
    backbone = write_backbone(folder / "backbone", "qwen2")
    store = store_of(folder / "store", backbone)
    for kind in ("none", "gumbel"):
        train(backbone_run(backbone, model__conditioning=kind), store, folder / kind)
    return {kind: open_model(folder / kind) for kind in ("none", "gumbel")}


def heads(model: ModelFolder) -> Medusa:
    assert isinstance(model.student, Medusa)
    return model.student


def test_all_students_give_the_same_tokens(models: dict[str, ModelFolder]) -> None:
    rows = coupled.open_rows(heads(models["none"]), 12, 20)
    found = acceptance.compare(models, rows, ["coupled", "greedy", "typical"])
    assert len(found["models"]) == 6
    for name, line in found["models"].items():
        low, high = line["tokens_per_teacher_pass_95"]
        assert low <= line["tokens_per_teacher_pass"] <= high, name
        assert 1 <= line["tokens_per_teacher_pass"] <= 3
        # Tokens of 12 rows: each of 19 was accepted, or told by a pass.
        if "typical" not in name:
            assert line["accepted_tokens"] + line["teacher_passes"] == 12 * 19
            assert line["tokens_differing_from_the_first"] == 0
    one = found["ratios"]["gumbel / none, coupled"]
    passes = [found["models"][f"{name}, coupled"]["teacher_passes"] for name in ("none", "gumbel")]
    assert one["value"] == pytest.approx(passes[0] / passes[1])
    assert one["interval_95"][0] <= one["value"] <= one["interval_95"][1]


def test_acceptance_by_hand() -> None:
    """Two samples: 3 + 2 passes, 4 + 1 accepted; head 2 was reached four times, accepted once."""
    score = acceptance_score([[3, 1, 0], [1, 0, 0]], [[3, 3, 1], [2, 1, 0]], [3, 2], [0, 1])
    assert score.value == (4 + 1 + 5) / 5
    assert score.details["conditional_acceptance"] == [4 / 5, 1 / 4, 0.0]
    assert score.details["teacher_passes"] == 5 and score.details["accepted_tokens"] == 5


def test_the_certificate_counts_what_is_not_the_teachers(models: dict[str, ModelFolder]) -> None:
    student = heads(models["gumbel"])
    decoded = acceptance.decode(student, coupled.COUPLED, coupled.open_rows(student, 4, 12))
    found = coupled.certificate(student, decoded)
    assert found["num_positions"] == 4 * 11 and found["num_mismatches"] == 0
    decoded.result.tokens[2, 11] = (decoded.result.tokens[2, 11] + 1) % student.config.vocab_size
    assert coupled.certificate(student, decoded)["num_mismatches"] == 1


def test_coupled_and_plain_are_timed_on_the_same_tokens(models: dict[str, ModelFolder]) -> None:
    found = coupled.timed(heads(models["gumbel"]), 2, 12, 1)
    assert found["differing_tokens"] == 0 and found["rounds"]["plain"] == 11
    assert found["rounds"]["coupled"] <= 11 and set(found["seconds"]) == {
        "plain",
        "coupled",
        "transformers generate",
    }


def test_prompts_and_names(models: dict[str, ModelFolder], tmp_path: Path) -> None:
    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [int(word) for word in text.split()]

    file = tmp_path / "stories.txt"
    file.write_text("1 2 3 4\n<|endoftext|>\n5 6\n<|endoftext|>\n7 8 9\n")
    student = models["none"].student
    rows = acceptance.read_prompts(file, Words(), student, 2, 3, 2)
    mask = student.mask_id
    assert rows.tolist() == [[0, 1, 2, 3, mask, mask], [0, 7, 8, 9, mask, mask]]
    with pytest.raises(UsageError, match="too few prompts"):
        acceptance.read_prompts(file, Words(), student, 3, 3, 2)
    with pytest.raises(GdistillError, match="NAME=FOLDER"):
        acceptance.parse_models(["medusa"])
    assert torch.is_tensor(rows)


@pytest.mark.parametrize("recipe", RECIPES)
def test_slots_are_measured_as_they_are_trained(recipe: str, tmp_path: Path) -> None:
    """Their mean loss is the training loss; exchanged noise costs nothing where none is told."""
    student, store = tiny_drafter(tmp_path, recipe=recipe)
    batch = a_batch(store)
    found = slot_noise.read_slots(student, batch)
    assert torch.isclose(found["loss"].mean(), student.loss(batch).loss.detach(), atol=1e-5)
    moved = (found["loss"] - found["loss_of_others"]).abs().amax(dim=0) > 1e-3
    told = {"none": [], "hidden": [1, 2], "waiting": [1, 2]}.get(recipe, [0, 1, 2])
    assert moved.nonzero().flatten().tolist() == told


def test_drafts_of_slots_by_hand() -> None:
    """Four points, three slots: the second reached by all, the third by two of them."""
    right = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1], [1, 0, 1]], dtype=torch.bool)
    losses = torch.arange(12.0).view(4, 3)
    line = slot_noise.describe({"loss": losses, "loss_of_others": losses + 1, "right": right})
    assert line["right"] == [0.75, 0.5, 0.75] and line["reached"] == [4, 2]
    assert line["conditional_acceptance"] == [0.5, 0.5] and line["points"] == 4
    assert line["loss_nats"] == [4.5, 5.5, 6.5]
    assert line["loss_nats_with_noise_of_another_row"] == [5.5, 6.5, 7.5]
