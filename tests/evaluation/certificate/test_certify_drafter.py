"""A drafter's samples, from training to the certificate of its backbone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.certificate.test_certify import certify, found
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import LENGTH
from tests.trainer.sample_cli_cases import command
from trainer.training.loop import train


def test_samples_of_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The backbone certifies them, by name of its weights."""
    backbone = write_backbone(tmp_path / "backbone")
    store = store_of(tmp_path / "store", backbone)
    assert train(backbone_run(backbone, "drafter", training__num_steps=3), store, tmp_path / "run")
    samples = tmp_path / "samples"
    assert command(tmp_path / "run", "--num", 20, "--seed", 6, "--tau", 0.7, "--out", samples) == 0
    assert "tokens per pass of the verifier" in capsys.readouterr().err
    other = write_backbone(tmp_path / "other", seed=1)
    assert certify(samples, backbone) == 0
    record = found(samples)
    assert record["num_positions"] == 20 * (LENGTH - 1) and record["num_mismatches"] == 0
    assert certify(samples, other) == 2
    assert "verified by another model" in capsys.readouterr().err
