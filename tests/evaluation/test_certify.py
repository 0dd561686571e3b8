"""``gdistill-eval certify``: verified samples agree everywhere; one altered token is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.samples import read_samples
from evaluation.scorers import make_scorers
from evaluation.text.reading import token_margins
from tests.commands import call
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import LENGTH as ROW_LENGTH
from tests.trainer.sample_cli_cases import command, read, save
from tests.trainer.sampling.test_adaptive import tiny_llama
from tests.trainer.sampling_cases import LENGTH
from trainer.training.loop import train


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(folder / "mdlm")
    save(folder / "plain", conditioning="none")
    save(folder / "teacher", conditioning="none")  # for its tokenizer
    tiny_llama().save_pretrained(folder / "teacher")
    for file in (folder / "teacher").glob("student.json"):
        file.unlink()
    return folder


def sample(models: Path, out: Path, *arguments: object, model: str = "mdlm") -> None:
    assert command(models / model, "--num", 20, "--out", out, *arguments) == 0


def rewrite(samples: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (samples / "samples.jsonl").write_text(lines)


def certify(samples: Path, teacher: Path) -> int:
    return call("gdistill-eval", "certify", samples, "--teacher", teacher)


def found(samples: Path) -> dict[str, Any]:
    return json.loads((samples / "certificate.json").read_text())["samples.jsonl"]


@pytest.mark.parametrize(
    ("tau", "cut"),
    [(1.0, ()), (0.7, ()), (0.9, ("--nucleus-p", 0.7)), (1.0, ("--top-k", 3, "--nucleus-p", 0.9))],
)
@pytest.mark.parametrize("model", ["mdlm", "plain"])
def test_verified_samples_agree_everywhere(
    model: str,
    tau: float,
    cut: tuple,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    coupled = ("--sampler", "coupled", "--verifier", models / "teacher", "--tau", tau)
    sample(models, tmp_path, *coupled, *cut, "--seed", 6, model=model)
    told = capsys.readouterr().err
    assert "tokens per pass of the verifier" in told and "agreement by distance 0." in told
    assert certify(tmp_path, models / "teacher") == 0
    result = found(tmp_path)
    assert result["num_positions"] == 20 * (LENGTH - 1)
    assert result["num_agreeing"] + len(result["ties"]) >= result["num_positions"]
    assert result["num_mismatches"] == 0 and result["tau"] == tau
    # One token replaced, as an editor would.
    records = read(tmp_path / "samples.jsonl")
    altered = records[7]["tokens"]
    altered[LENGTH - 1] = (altered[LENGTH - 1] + 1) % 11
    rewrite(tmp_path, records)
    capsys.readouterr()
    assert certify(tmp_path, models / "teacher") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"sample 7, position {LENGTH - 1}" in error
    assert found(tmp_path)["num_mismatches"] == 1


def test_a_file_cannot_call_its_tokens_given(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was given is known by its hash in the settings: more than that would hide tokens."""
    sample(models, tmp_path, "--sampler", "coupled", "--verifier", models / "teacher")
    assert certify(tmp_path, models / "teacher") == 0 and found(tmp_path)["given_is_checked"]
    records = read(tmp_path / "samples.jsonl")
    for given, count, said in (
        (LENGTH - 1, 1, "calls tokens given in a run without a prompt"),
        (LENGTH, 20, "nothing to certify"),
    ):
        changed = [{**r, "num_given": given if i < count else 1} for i, r in enumerate(records)]
        rewrite(tmp_path, changed)
        capsys.readouterr()
        assert certify(tmp_path, models / "teacher") != 0
        error = capsys.readouterr().err.strip()
        assert said in error and "\n" not in error


def test_a_students_own_samples_get_their_agreement(models: Path, tmp_path: Path) -> None:
    sample(models, tmp_path, "--nfe", 3, "--tau", 0.9)
    assert certify(tmp_path, models / "teacher") == 0
    result = found(tmp_path)
    assert 0 < result["agreement"] < 0.6 and result["tau"] == 0.9
    assert result["num_mismatches"] + result["num_agreeing"] <= result["num_positions"]


def test_what_cannot_be_certified_is_named(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(samples: Path, teacher: Path = models / "teacher") -> str:
        capsys.readouterr()
        assert certify(samples, teacher) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        return error

    sample(models, tmp_path / "plain", "--nfe", 2, model="plain")
    assert "without noise" in error_of(tmp_path / "plain")
    sample(models, tmp_path / "redrawn", "--nfe", 2, "--set", "redraw_noise=true")
    assert "redraw_noise" in error_of(tmp_path / "redrawn")
    coupled = ("--sampler", "coupled", "--verifier", models / "teacher")
    sample(models, tmp_path / "coupled", *coupled)
    other = tmp_path / "other"
    model = tiny_llama()
    model.lm_head.weight.data += 1
    model.save_pretrained(other)
    assert "verified by another model" in error_of(tmp_path / "coupled", other)
    tiny_llama(vocab_size=5).save_pretrained(tmp_path / "small")
    assert "fewer tokens" in error_of(tmp_path / "coupled", tmp_path / "small")
    records = read(tmp_path / "coupled" / "samples.jsonl")
    unseeded = [{k: v for k, v in record.items() if k != "seed"} for record in records]
    rewrite(tmp_path / "coupled", unseeded)
    assert "no recorded seed" in error_of(tmp_path / "coupled")


def test_margins_by_hand() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]], dtype=torch.float64)
    margins, winners = token_margins(scores, torch.tensor([2, 0]))
    assert margins.tolist() == [-1.0, 0.0] and winners.tolist() == [1, 1]


def test_medusa_samples_are_certified_by_their_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads trained, sampled and certified by the commands; other acceptance has no certificate."""
    backbone = write_backbone(tmp_path / "backbone", "qwen2")
    store = store_of(tmp_path / "store", backbone)
    train(backbone_run(backbone, training__num_steps=2), store, tmp_path / "run")

    def draw(out: str, *arguments: object) -> int:
        return command(tmp_path / "run", "--num", 6, "--out", tmp_path / out, *arguments)

    assert draw("coupled", "--tau", 0.8, "--length", 24) == 0
    assert "tokens per pass of the verifier" in capsys.readouterr().err
    assert certify(tmp_path / "coupled", backbone) == 0
    result = found(tmp_path / "coupled")
    assert result["num_positions"] == 6 * 23 and result["num_mismatches"] == 0
    records = read(tmp_path / "coupled" / "samples.jsonl")
    sets = [read_samples(tmp_path / "coupled" / "samples.jsonl")]
    scores = [score.to_json() for scorer in make_scorers(sets)[0] for score in scorer(sets[0])]
    (score,) = (one for one in scores if "pass" in one["name"])
    passes = sum(record["verifier_nfe"] for record in records)
    assert score["value"] == pytest.approx(6 * 23 / passes)
    reached, accepted = (sum(r[name][0] for r in records) for name in ("reached", "accepted"))
    assert score["details"]["conditional_acceptance"][0] == pytest.approx(accepted / reached)
    records[3]["tokens"][20] = (records[3]["tokens"][20] + 1) % 12
    rewrite(tmp_path / "coupled", records)
    assert certify(tmp_path / "coupled", backbone) == 1
    assert draw("typical", "--set", "acceptance=typical") == 0
    assert certify(tmp_path / "typical", backbone) == 2
    assert "acceptance=typical" in capsys.readouterr().err
    # What cannot be: longer rows than the backbone reads, another one, none where it was.
    assert draw("long", "--length", 65) == 2
    assert "the verifier reads shorter rows" in capsys.readouterr().err
    other = write_backbone(tmp_path / "other", "qwen2", seed=3)
    assert draw("other", "--backbone", other) == 2
    assert "another backbone" in capsys.readouterr().err
    assert draw("whole", "--sampler", "ancestral", "--nfe", 2) == 2
    backbone.rename(tmp_path / "moved")
    assert draw("gone") == 2
    assert "--backbone FOLDER" in capsys.readouterr().err
    assert draw("found", "--backbone", tmp_path / "moved") == 0


@pytest.mark.parametrize("student", ["medusa", "drafter"])
def test_samples_of_a_bf16_backbone_are_certified_in_bf16(
    student: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the precision that the samples name; a token that loses is listed, or refused."""
    backbone = write_backbone(tmp_path / "backbone", "qwen2")
    store = store_of(tmp_path / "store", backbone)
    for dtype in ("bfloat16", "float32"):
        config = backbone_run(
            backbone, student, training__num_steps=2, model__backbone__dtype=dtype
        )
        train(config, store, tmp_path / dtype)
        arguments = ("--num", 20, "--length", 24, "--out", tmp_path / f"{dtype}-samples")
        assert command(tmp_path / dtype, *arguments) == 0
    assert certify(tmp_path / "float32-samples", backbone) == 0
    fine = found(tmp_path / "float32-samples")
    samples = tmp_path / "bfloat16-samples"
    capsys.readouterr()
    assert certify(samples, backbone) == 0
    assert "ties within bfloat16 rounding" in capsys.readouterr().out
    coarse = found(samples)
    assert (fine["dtype"], coarse["dtype"]) == ("float32", "bfloat16")
    assert coarse["num_positions"] == 20 * 23 and coarse["num_mismatches"] == 0
    lost = sum(tie["margin"] <= 0 for tie in coarse["ties"])
    assert lost == coarse["num_positions"] - coarse["num_agreeing"]
    assert max(abs(tie["margin"]) for tie in coarse["ties"]) > fine["smallest_margin"]
    # The last token of every row replaced: a few lose by less than rounding, not all of them.
    records = read(samples / "samples.jsonl")
    for record in records:
        record["tokens"][-1] = (record["tokens"][-1] + 1) % 12
    rewrite(samples, records)
    assert certify(samples, backbone) == 1
    assert found(samples)["num_mismatches"] >= 5
    settings = json.loads((samples / "settings.json").read_text())
    settings["student_config"]["backbone"]["dtype"] = "float8"
    (samples / "settings.json").write_text(json.dumps(settings))
    capsys.readouterr()
    assert certify(samples, backbone) != 0
    assert "backbone.dtype" in capsys.readouterr().err


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
    assert record["num_positions"] == 20 * (ROW_LENGTH - 1) and record["num_mismatches"] == 0
    assert certify(samples, other) == 2
    assert "verified by another model" in capsys.readouterr().err
