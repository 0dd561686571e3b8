"""The authors' checkpoints in our layout: logits equal, and nothing of theirs is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModel, PreTrainedTokenizerFast

import trainer
from benchmarks.goldens import absolute, condition_of
from shards.errors import GdistillError, UsageError
from shards.settings import merge, nested
from trainer.importing import (
    Inert,
    backbone_of,
    import_checkpoint,
    plain_config,
    read_checkpoint,
    student_from,
    with_ema,
)
from trainer.students.folder import open_model
from trainer.students.registry import AR, BD3LM, Student

NAMES = ["mdlm-tiny", "mdlm-gumbel-tiny", "bd3lms-tiny", "bd3lms-gumbel-tiny", "ar-tiny"]


def logits_of(student: Student, expected: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = expected["x_input"]
    if isinstance(student, AR):
        return student(tokens).logits
    noised, clean = tokens, tokens
    if isinstance(student, BD3LM):
        noised, clean = tokens.chunk(2, dim=1)
    condition = None
    if "gumbel" in expected:
        condition = condition_of(student, expected["gumbel"], noised)
    return student.denoise(noised, clean, condition)


@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_match(golden: Path, tmp_path: Path, name: str, weights: str) -> None:
    done = import_checkpoint(golden / f"{name}.ckpt", tmp_path / "model", ema=weights == "ema")
    student = AutoModel.from_pretrained(tmp_path / "model").eval()
    expected = load_file(golden / f"{name}_expected.safetensors")
    with torch.no_grad():
        logits = logits_of(student, expected)
    assert absolute(logits, expected[f"logits_{weights}_weights"]) <= 5e-5
    backbone, unexpected = backbone_of(read_checkpoint(golden / f"{name}.ckpt")["state_dict"])
    told = json.loads((golden / f"{name}_expected.json").read_text())
    order = [key for key in backbone if key != "rotary_emb.inv_freq"]
    assert (order, unexpected) == (told["ema_parameter_order"], [])
    other = "raw" if weights == "ema" else "ema"
    assert absolute(logits, expected[f"logits_{other}_weights"]) > 1e-2
    assert done.weights == weights
    assert json.loads((tmp_path / "model" / "import.json").read_text())["weights"] == weights
    config = told["config"]
    assert student.config.row_length == config["length"]
    if isinstance(student, BD3LM):
        assert student.block_size == config["block_size"]


def loaded(golden: Path) -> dict[str, Any]:
    return read_checkpoint(golden / "mdlm-gumbel-tiny.ckpt")


def test_missing_and_unexpected_keys_are_listed(golden: Path) -> None:
    checkpoint = loaded(golden)
    state = checkpoint["state_dict"]
    state["backbone._orig_mod.blocks.0.extra"] = torch.zeros(1)
    state["critic.weight"] = torch.zeros(1)
    del state["backbone._orig_mod.blocks.1.norm1.weight"]
    with pytest.raises(GdistillError) as caught:
        student_from(checkpoint, ema=False)
    for name in ("blocks.0.extra", "critic.weight", "blocks.1.norm1.weight"):
        assert name in str(caught.value)


def test_ema_of_another_model_is_refused(golden: Path) -> None:
    checkpoint = loaded(golden)
    backbone, _ = backbone_of(checkpoint["state_dict"])
    shadows = checkpoint["ema"]["shadow_params"]
    with pytest.raises(GdistillError, match="30 tensors"):
        with_ema(backbone, {"shadow_params": shadows[:-1]})
    with pytest.raises(GdistillError, match="vocab_embed"):
        with_ema(backbone, {"shadow_params": shadows[::-1]})
    with pytest.raises(GdistillError, match="no EMA"):
        with_ema(backbone, None)


class Armed:
    """Would write a file if anyone unpickled it for real."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


class FakeNode:
    """Pickles like an OmegaConf node."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def test_foreign_classes_are_read_but_never_run(golden: Path, tmp_path: Path) -> None:
    checkpoint = loaded(golden)
    leaf = {"length": FakeNode(_val=16), "dropout": FakeNode(_val=0.0)}
    config = FakeNode(_content={"model": FakeNode(_content=leaf)})
    fired = tmp_path / "fired"
    checkpoint["hyper_parameters"] = {"config": config, "tokenizer": Armed(str(fired))}
    path = tmp_path / "real.ckpt"
    torch.save(checkpoint, path)
    read = read_checkpoint(path)
    assert not fired.exists()
    assert isinstance(read["hyper_parameters"]["tokenizer"], Inert)
    plain = plain_config(read["hyper_parameters"]["config"])
    assert plain["model"] == {"length": 16, "dropout": 0.0}
    name, student = student_from(read)
    assert (name, student.config.row_length) == ("mdlm", 16)


def test_unreadable_files_are_explained(tmp_path: Path, golden: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        import_checkpoint(tmp_path / "absent.ckpt", tmp_path / "out")
    text = tmp_path / "text.ckpt"
    text.write_text("hello")
    with pytest.raises(GdistillError, match="zip archive"):
        import_checkpoint(text, tmp_path / "out")
    whole = (golden / "mdlm-tiny.ckpt").read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GdistillError, match="cannot read"):
        import_checkpoint(cut, tmp_path / "out")
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, other)
    with pytest.raises(GdistillError, match="DiT"):
        import_checkpoint(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="taken"):
        import_checkpoint(golden / "mdlm-tiny.ckpt", tmp_path)


def with_config(golden: Path, name: str, **settings: Any) -> dict[str, Any]:
    """A golden checkpoint under another config (dotted names with ``__``)."""
    config: dict[str, Any] = {}
    for path, value in settings.items():
        config = merge(config, nested(path.split("__"), value))
    checkpoint = read_checkpoint(golden / f"{name}.ckpt")
    return {**checkpoint, "hyper_parameters": {"config": config}}


def test_what_shapes_do_not_show_comes_from_the_config(golden: Path) -> None:
    checkpoint = with_config(
        golden,
        "bd3lms-gumbel-tiny",
        model__length=16,
        model__dropout=0.25,
        model__gumbel_inject_mode="add",
        noise__type="cosine",
        algo__time_conditioning=True,
        algo__mdlm_loss_scale=True,
        block_size=4,
    )
    checkpoint["state_dict"]["sampling_eps_min"] = torch.tensor(0.3)
    checkpoint["state_dict"]["sampling_eps_max"] = torch.tensor(0.8)
    name, student = student_from(checkpoint)
    settings = student.settings
    assert (name, settings.block_size, student.clips) == ("bd3lm", 4, (0.3, 0.8))
    assert (settings.dropout, settings.noise.injection) == (0.25, "add")
    assert (settings.diffusion.schedule, settings.diffusion.loss_weighting) == ("cosine", "rate")
    assert settings.diffusion.time_conditioning and settings.conditioning == "gumbel"


def test_references_in_the_config_are_followed(golden: Path) -> None:
    checkpoint = with_config(
        golden, "bd3lms-tiny", model__length="${row}", row=16, block_size="${model.length}"
    )
    student = student_from(checkpoint)[1]
    assert (student.config.row_length, student.settings.block_size) == (16, 16)
    circle = with_config(golden, "mdlm-tiny", model__length="${model.length}")
    with pytest.raises(UsageError, match="row length"):
        student_from(circle)


def test_a_tokenizer_comes_along(golden: Path, tmp_path: Path) -> None:
    vocab_size = student_from(loaded(golden))[1].config.vocab_size
    names = ["<s>", "</s>", *(f"w{i}" for i in range(vocab_size - 2))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "words")
    checkpoint, out = golden / "mdlm-gumbel-tiny.ckpt", tmp_path / "model"
    import_checkpoint(checkpoint, out, tokenizer=str(tmp_path / "words"))
    model = open_model(out)
    assert model.tokenizer.decode([2, 3]) == "w0 w1"
    for place in (out, str(out), str(tmp_path)):  # the folder and, as of a run, the one around it
        assert trainer.load_tokenizer(place).decode([2, 3]) == "w0 w1"
    with pytest.raises(UsageError, match="no model there"):
        trainer.load_tokenizer(str(tmp_path / "absent"))
    assert (model.student.config.bos_token_id, model.student.config.eos_token_id) == (0, 1)
    fast.add_tokens(["another"])
    fast.save_pretrained(tmp_path / "longer")
    for place, expected in (("longer", "not its tokenizer"), ("absent", "cannot load a tokenizer")):
        with pytest.raises(UsageError, match=expected):
            import_checkpoint(checkpoint, tmp_path / "out", tokenizer=str(tmp_path / place))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "config", "missing"),
    [
        ("bd3lms-tiny", {"model__length": 16}, {"block_size": 8}),
        ("mdlm-gumbel-tiny", {}, {"row_length": 16}),
    ],
)
def test_what_the_config_lacks_must_be_given(
    golden: Path, name: str, config: dict[str, Any], missing: dict[str, int]
) -> None:
    checkpoint, (option, value) = with_config(golden, name, **config), *missing.items()
    words = option.split("_")
    with pytest.raises(UsageError, match=rf"{' '.join(words)}.*--{'-'.join(words)}"):
        student_from(checkpoint)
    assert getattr(student_from(checkpoint, **missing)[1].config, option) == value
