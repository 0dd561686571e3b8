"""The authors' checkpoints in our layout: logits equal, and nothing of theirs is executed.

Hostile and damaged ones: one error line each, nothing executed, nothing written.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModel, PreTrainedTokenizerFast

import trainer
from benchmarks.goldens import absolute, condition_of, denoise
from shards.atomic import sha256_file
from shards.errors import GdistillError, UsageError
from shards.settings import merge, nested
from tests.commands import call
from trainer.importing import (
    Inert,
    backbone_of,
    import_checkpoint,
    plain_config,
    read_checkpoint,
    student_from,
    with_ema,
)
from trainer.initial_weights import misfit
from trainer.students.folder import open_model
from trainer.students.registry import AR, BD3LM, Student, StudentSettings

State = dict[str, Any]
MLP, SHARED = "backbone.blocks.0.mlp.0.weight", torch.zeros(12, 8)
EMBEDDING, ROTARY = "backbone.vocab_embed.embedding", "backbone.rotary_emb.inv_freq"
NAMES = ["mdlm-tiny", "mdlm-gumbel-tiny", "bd3lms-tiny", "bd3lms-gumbel-tiny", "ar-tiny"]


def loaded(golden: Path, name: str = "mdlm-gumbel-tiny") -> State:
    return read_checkpoint(golden / f"{name}.ckpt")


def logits_of(student: Student, expected: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = expected["x_input"]
    if isinstance(student, AR):
        return student(tokens).logits
    noised, clean = tokens.chunk(2, dim=1) if isinstance(student, BD3LM) else (tokens, tokens)
    condition = None
    if "gumbel" in expected:
        condition = condition_of(student, expected["gumbel"], noised)
    return denoise(student, noised, clean, condition)


@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_match(golden: Path, tmp_path: Path, name: str, weights: str) -> None:
    words = (golden / f"{name}.ckpt", tmp_path / "model", *(["--no-ema"] * (weights == "raw")))
    assert call("gdistill-train", "import", *words) == 0
    student = AutoModel.from_pretrained(tmp_path / "model").eval()
    expected = load_file(golden / f"{name}_expected.safetensors")
    with torch.no_grad():
        logits = logits_of(student, expected)
    assert absolute(logits, expected[f"logits_{weights}_weights"]) <= 5e-5
    backbone, unexpected = backbone_of(loaded(golden, name)["state_dict"])
    told = json.loads((golden / f"{name}_expected.json").read_text())
    order = [key for key in backbone if key != "rotary_emb.inv_freq"]
    assert (order, unexpected) == (told["ema_parameter_order"], [])
    other = "raw" if weights == "ema" else "ema"
    assert absolute(logits, expected[f"logits_{other}_weights"]) > 1e-2
    source = json.loads((tmp_path / "model" / "import.json").read_text())
    said = [source[key] for key in ("weights", "file", "sha256", "global_step")]
    assert said == [weights, f"{name}.ckpt", sha256_file(words[0]), loaded(golden, name).get("global_step")]
    ends = student.config.vocab_size - 1  # of a tokenizer like GPT-2's
    assert (student.config.bos_token_id, student.config.eos_token_id) == (ends, ends)
    assert student.config.row_length == told["config"]["length"]
    if isinstance(student, BD3LM):
        assert student.block_size == told["config"]["block_size"]


def test_keys_that_do_not_fit_are_listed_and_the_ema_of_another_model_is_refused(golden: Path) -> None:
    checkpoint, prefix = loaded(golden), "backbone._orig_mod."
    changed = ("blocks.0.extra", "critic.weight", "blocks.1.norm1.weight")
    checkpoint["state_dict"] |= {n: torch.zeros(1) for n in (prefix + changed[0], changed[1], "teacher_model.weight")}
    del checkpoint["state_dict"][prefix + changed[2]]
    with pytest.raises(GdistillError) as caught:
        student_from(checkpoint, ema=False)
    assert all(name in str(caught.value) for name in changed) and "teacher" not in str(caught.value)
    given, wanted = ({name: torch.zeros(size) for name in names} for names, size in (("ab", 2), ("acdef", 3)))
    listed = "missing: c, d, e; unexpected: b; of another shape: a (2,), expected (3,)"
    assert misfit(given, wanted) == listed and misfit(given, given) == ""
    checkpoint = loaded(golden)
    backbone, _ = backbone_of(checkpoint["state_dict"])
    shadows = checkpoint["ema"]["shadow_params"]
    for ema, words in (
        ({"shadow_params": shadows[:-1]}, "30 tensors"),
        ({"shadow_params": [*shadows, shadows[0]]}, "32 tensors"),
        ({"shadow_params": shadows[::-1]}, "vocab_embed"),
        (None, "no EMA"),
    ):
        with pytest.raises(GdistillError, match=words):
            with_ema(backbone, ema)


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class FakeNode:
    """Pickles like an OmegaConf node."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def test_foreign_classes_are_read_but_never_run_and_plain_containers_come_back(golden: Path, tmp_path: Path) -> None:
    leaf = {"length": FakeNode(_val=16), "dropout": FakeNode(_val=0)}
    config = FakeNode(_content={"model": FakeNode(_content=leaf)})
    fired, path = tmp_path / "fired", tmp_path / "real.ckpt"
    armed = Calls(open, str(fired), "w")
    plain = {"order": collections.OrderedDict(a=1), "counts": collections.defaultdict(int, a=2)}
    torch.save({**loaded(golden), **plain, "hyper_parameters": {"config": config, "tokenizer": armed}}, path)
    read = read_checkpoint(path)
    assert (read["order"], read["counts"]) == ({"a": 1}, {"a": 2})
    assert not fired.exists()
    assert isinstance(read["hyper_parameters"]["tokenizer"], Inert)
    assert plain_config((read["hyper_parameters"]["config"],)) == [{"model": {"length": 16, "dropout": 0.0}}]
    name, student = student_from(read)
    assert (name, student.config.row_length, student.settings.dropout) == ("mdlm", 16, 0.0)
    settings, usual = student.settings, StudentSettings()
    assert (settings.diffusion, settings.noise) == (usual.diffusion, usual.noise), "the authors' where nothing is said"
    assert not student.training


def test_a_file_that_is_not_there_and_a_folder_that_is_taken(tmp_path: Path, golden: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        import_checkpoint(tmp_path / "absent.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="taken"):
            import_checkpoint(golden / "mdlm-tiny.ckpt", place)


def with_config(golden: Path, name: str, **settings: Any) -> State:
    """A golden checkpoint under another config (dotted names with ``__``)."""
    config: dict[str, Any] = {}
    for path, value in settings.items():
        config = merge(config, nested(path.split("__"), value))
    return {**loaded(golden, name), "hyper_parameters": {"config": config}}


def test_what_shapes_do_not_show_comes_from_the_config(golden: Path) -> None:
    model = {"model__length": 16, "model__dropout": 0.25, "model__gumbel_inject_mode": "add"}
    algo = {"algo__time_conditioning": True, "algo__mdlm_loss_scale": True}
    config = {**model, **algo, "noise__type": "cosine", "block_size": 4}
    checkpoint = with_config(golden, "bd3lms-gumbel-tiny", **config)
    for end, value in (("min", 0.3), ("max", 0.8)):
        checkpoint["state_dict"][f"sampling_eps_{end}"] = torch.tensor(value)
    name, student = student_from(checkpoint)
    settings = student.settings
    assert (name, settings.block_size, student.clips) == ("bd3lm", 4, (0.3, 0.8))
    assert (settings.dropout, settings.noise.injection, settings.diffusion.min_time) == (0.25, "add", 0.3)
    assert (settings.diffusion.schedule, settings.diffusion.loss_weighting) == ("cosine", "rate")
    assert settings.diffusion.time_conditioning and settings.conditioning == "gumbel"
    # References are followed; whether it reads blocks is said where its clips do not show it.
    config = {"model__length": "${row}", "row": 16, "block_size": "${model.length}", "algo__cross_attn": True}
    name, student = student_from(with_config(golden, "mdlm-tiny", **config))
    assert (name, student.config.row_length, student.settings.block_size) == ("bd3lm", 16, 16)
    assert student.settings.dropout == 0.1


def test_a_tokenizer_comes_along(golden: Path, tmp_path: Path) -> None:
    vocab_size = student_from(loaded(golden))[1].config.vocab_size
    names = ["<s>", "</s>", *(f"w{i}" for i in range(vocab_size - 2))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "words")
    checkpoint, out = golden / "mdlm-gumbel-tiny.ckpt", tmp_path / "model"
    assert call("gdistill-train", "import", checkpoint, out, "--tokenizer", tmp_path / "words") == 0
    model = open_model(out)
    assert model.tokenizer.decode([2, 3]) == "w0 w1" and not model.student.training
    for place in (out, str(out), str(tmp_path)):  # the folder and, as of a run, the one around it
        assert trainer.load_tokenizer(place).decode([2, 3]) == "w0 w1"
    with pytest.raises(UsageError, match="no model there"):
        trainer.load_tokenizer(str(tmp_path / "absent"))
    assert (model.student.config.bos_token_id, model.student.config.eos_token_id) == (0, 1)
    fast.add_tokens(["another"])
    fast.save_pretrained(tmp_path / "longer")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))).save_pretrained(tmp_path / "less")
    misfit = "not its tokenizer"
    for place, expected in (("longer", misfit), ("less", misfit), ("absent", "cannot load a tokenizer")):
        with pytest.raises(UsageError, match=expected):
            import_checkpoint(checkpoint, tmp_path / "out", tokenizer=str(tmp_path / place))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "config", "missing"),
    [("bd3lms-tiny", {"model__length": 16}, {"block_size": 8}), ("mdlm-gumbel-tiny", {}, {"row_length": 16})],
)
def test_what_the_config_lacks_must_be_given(
    golden: Path, tmp_path: Path, name: str, config: dict[str, Any], missing: dict[str, int]
) -> None:
    checkpoint, (option, value) = with_config(golden, name, **config), *missing.items()
    words = option.split("_")
    with pytest.raises(UsageError, match=rf"{' '.join(words)}.*got nothing.*--{'-'.join(words)}"):
        student_from(checkpoint)
    torch.save(checkpoint, tmp_path / "one.ckpt")
    line = ("import", tmp_path / "one.ckpt", tmp_path / "out", f"--{'-'.join(words)}", value)
    assert call("gdistill-train", *line) == 0
    assert getattr(AutoModel.from_pretrained(tmp_path / "out").config, option) == value


def small_checkpoint() -> State:
    """Enough of the authors' layout to get as far as the architecture."""
    state = {EMBEDDING: torch.zeros(12, 8), ROTARY: torch.zeros(2)}
    state[MLP] = torch.zeros(32, 8)
    config = {"model": {"length": 8}}
    return {"state_dict": state, "hyper_parameters": {"config": config}, "global_step": 3}


def change(**entries: Any) -> Callable[[State], None]:
    return lambda checkpoint: checkpoint.update(entries)


def change_state(name: str, value: Any) -> Callable[[State], None]:
    return lambda checkpoint: checkpoint["state_dict"].update({name: value})


def change_config(**settings: Any) -> Callable[[State], None]:
    return change(hyper_parameters={"config": {"model": {"length": 8}, **settings}})


CHECKPOINTS: dict[str, Callable[[State], None]] = {
    "weights of another model": change(state_dict={"weight": torch.zeros(2)}),
    "no weights at all": change(state_dict=None),
    "weights are text": change(state_dict="weights"),
    "a weight is text": change_state(EMBEDDING, "weight"),
    "a weight has no axes": change_state(EMBEDDING, torch.zeros(())),
    "a weight has three axes": change_state(EMBEDDING, torch.zeros(2, 2, 2)),
    "a vocabulary of nothing": change_state(EMBEDDING, torch.zeros(0, 8)),
    "no rotary frequencies": change_state(ROTARY, torch.zeros(0)),
    "more frequencies than width": change_state(ROTARY, torch.zeros(64)),
    "a name that is a number": change_state(7, torch.zeros(2)),  # type: ignore[arg-type]
    "a name that is a path": change_state("../../escape", torch.zeros(2)),
    "a billion blocks": change_state("backbone.blocks.999999999.mlp.0.weight", torch.zeros(2)),
    "a vocabulary larger than its bytes": change_state(EMBEDDING, torch.zeros(1).expand(10**9, 8)),
    "a sigma weight without axes": change_state("backbone.sigma_map.mlp.0.weight", torch.zeros(())),
    "weights that share their bytes": lambda c: c["state_dict"].update(dict.fromkeys((EMBEDDING, MLP), SHARED)),
    "a sparse weight": change_state(EMBEDDING, torch.zeros(12, 8).to_sparse()),
    "weights of integers": change_state(EMBEDDING, torch.zeros(12, 8, dtype=torch.int64)),
    "an EMA that is text": change(ema="average"),
    "an EMA of text": change(ema={"shadow_params": ["a", "b"]}),
    "clips of several numbers": change_state("sampling_eps_min", torch.zeros(3)),
    "clips that are text": change_state("sampling_eps_min", "0"),
    "clips that are no times": change_state("sampling_eps_min", torch.tensor(5.0)),
    "clips that are not numbers": change_state("sampling_eps_max", torch.tensor(float("nan"))),
    "a row length of text": change_config(model={"length": "eight"}),
    "a row length below one": change_config(model={"length": -8}),
    "a reference to itself": change_config(model={"length": "${model.length}"}),
    "a reference to the environment": change_config(model={"length": "${oc.env:HOME}"}),
    "dropout of text": change_config(model={"length": 8, "dropout": "all"}),
    "dropout above one": change_config(model={"length": 8, "dropout": 7.0}),
    "an unknown schedule": change_config(noise={"type": "geometric"}),
    "a config that is a list": change(hyper_parameters={"config": [1, 2]}),
    "settings that are text": change(hyper_parameters="settings"),
    "runs a command": change(callback=Calls(os.system, "touch FIRED")),
    "opens a file": change(callback=Calls(open, "FIRED", "w")),
    "weights by a command": change_state(EMBEDDING, Calls(os.system, "touch FIRED")),
    "more memory than there is": change(callback=Calls(bytearray, 10**15)),
}


def with_record(end: str, change: Callable[[bytes], bytes], kind: int = zipfile.ZIP_STORED) -> Any:
    """Rewrites the records of an archive whose names hold ``end``."""

    def rewrite(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, content in records.items():
                archive.writestr(name, change(content) if end in name else content)

    return rewrite


def with_pickle(content: bytes) -> Any:
    return with_record("data.pkl", lambda old: content)


ARCHIVES: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("hello"),
    "the first half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a pickle without an archive": lambda path: path.write_bytes(pickle.dumps({})),
    "no pickle": with_pickle(b""),
    "a number": with_pickle(pickle.dumps(3, protocol=2)),
    "weights cut short": with_record("/data/", lambda old: old[:5]),
    "a bomb": with_record("/data/", lambda old: b"\0" * 10**4, zipfile.ZIP_DEFLATED),
    "pickles nested without end": with_pickle(b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b"."),
}
SAID = {"weights of another model": "DiT", "text": "zip archive", "the first half": "cannot read"}
SAID |= {"weights that share their bytes": "stored whole", "a row length below one": "does not say its row length"}
SAID |= {"a bomb": "uncompressed", "a billion blocks": "blocks are missing", "a reference to itself": "does not say"}


@pytest.mark.parametrize("name", [*CHECKPOINTS, *ARCHIVES])
def test_every_one_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint holds, and what its file is."""
    monkeypatch.chdir(tmp_path)
    checkpoint, path = small_checkpoint(), tmp_path / "bad.ckpt"
    if name in CHECKPOINTS:
        CHECKPOINTS[name](checkpoint)
    torch.save(checkpoint, path)
    if name in ARCHIVES:
        ARCHIVES[name](path)
    with pytest.raises(GdistillError, match=SAID.get(name)) as caught:
        import_checkpoint(path, tmp_path / "out", ema="EMA" in name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert {path.name for path in tmp_path.iterdir()} == {"bad.ckpt"}


def test_a_pickle_cannot_change_torch(tmp_path: Path) -> None:
    """Attributes set on a named function would outlive the file."""
    function = torch._utils._rebuild_tensor_v2
    before, defaults = dict(vars(function)), function.__defaults__
    stream = b"\x80\x02}X\x01\x00\x00\x00aNctorch._utils\n_rebuild_tensor_v2\n"
    stream += b"}X\x08\x00\x00\x00poisonedI1\nsb0s."
    path = tmp_path / "odd.ckpt"
    torch.save(small_checkpoint(), path)
    with_pickle(stream)(path)
    with contextlib.suppress(GdistillError):
        read_checkpoint(path)
    assert (vars(function), function.__defaults__) == (before, defaults)
