"""Exported students compute what they computed: vLLM's Medusa heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from shards.errors import UsageError
from tests.trainer.backbone_cases import VOCAB, write_backbone
from trainer.serving.export import export
from trainer.students.backbone import load_backbone
from trainer.students.configuration import BackboneSettings, StudentSettings
from trainer.students.mdlm import MDLM
from trainer.students.medusa import Medusa


def on_backbone(kind: Any, folder: Path, conditioning: Any, **backbone: Any) -> Any:
    """A student whose every weight is drawn."""
    settings = StudentSettings(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        dropout=0.0,
        conditioning=conditioning,
        backbone=BackboneSettings(num_proposed=2, **backbone),
    )
    below = load_backbone(folder, VOCAB, "float32")
    config = kind.config_class.build(settings, vocab_size=VOCAB, row_length=12, bos_token_id=0)
    config.frozen = kind.describe(below)
    student = kind(config)
    torch.manual_seed(1)
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    student.attach(below)
    return student.eval()


@pytest.mark.parametrize("output", ["shared", "low_rank", "full"])
def test_medusa_heads_propose_what_they_did(output: str, tmp_path: Path) -> None:
    backbone = write_backbone(tmp_path / "llama")
    student = on_backbone(Medusa, backbone, "none", head_output=output, head_rank=3)
    told = export(student, tmp_path / "out")
    assert '"method": "medusa"' in told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_heads"], config["vocab_size"], config["hidden_size"]) == (2, VOCAB, 16)
    weights, hidden = load_file(tmp_path / "out" / "model.safetensors"), torch.randn(5, 16)
    expected = student.propose(hidden, None)
    for k in range(2):  # vllm/model_executor/models/medusa.py
        block = hidden + silu(hidden @ weights[f"blocks.{k}.layers.0.weight"].T)
        found = (block @ weights[f"lm_heads.{k}.weight"].T).log_softmax(dim=-1)
        torch.testing.assert_close(found, expected[:, k], rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    backbone = write_backbone(tmp_path / "llama")
    with pytest.raises(UsageError, match="heads that read noise do not fit"):
        export(on_backbone(Medusa, backbone, "gumbel"), tmp_path / "out")
    settings = StudentSettings(hidden_size=16, num_layers=1, num_heads=2)
    config = MDLM.config_class.build(settings, vocab_size=5, row_length=8, bos_token_id=0)
    with pytest.raises(UsageError, match="no format of an engine fits"):
        export(MDLM(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()
