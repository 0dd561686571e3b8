"""Hostile and damaged checkpoints: one error line each, nothing executed, nothing written."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.errors import GdistillError
from trainer.importing import Inert, import_checkpoint, read_checkpoint

State = dict[str, Any]
EMBEDDING, ROTARY = "backbone.vocab_embed.embedding", "backbone.rotary_emb.inv_freq"


def small_checkpoint() -> State:
    """Enough of the authors' layout to get as far as the architecture."""
    state = {
        EMBEDDING: torch.zeros(12, 8),
        ROTARY: torch.zeros(2),
        "backbone.blocks.0.mlp.0.weight": torch.zeros(32, 8),
    }
    config = {"model": {"length": 8}}
    return {"state_dict": state, "hyper_parameters": {"config": config}, "global_step": 3}


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def change(**entries: Any) -> Callable[[State], None]:
    return lambda checkpoint: checkpoint.update(entries)


def change_state(name: str, value: Any) -> Callable[[State], None]:
    return lambda checkpoint: checkpoint["state_dict"].update({name: value})


def change_config(**settings: Any) -> Callable[[State], None]:
    return change(hyper_parameters={"config": {"model": {"length": 8}, **settings}})


CASES: dict[str, Callable[[State], None]] = {
    "no weights at all": change(state_dict=None),
    "weights are a list": change(state_dict=[torch.zeros(2)]),
    "weights are text": change(state_dict="weights"),
    "a weight is text": change_state(EMBEDDING, "weight"),
    "a weight is a number": change_state(EMBEDDING, 3.0),
    "a weight has no axes": change_state(EMBEDDING, torch.zeros(())),
    "a weight has three axes": change_state(EMBEDDING, torch.zeros(2, 2, 2)),
    "a vocabulary of nothing": change_state(EMBEDDING, torch.zeros(0, 8)),
    "a width of nothing": change_state(EMBEDDING, torch.zeros(12, 0)),
    "no rotary frequencies": change_state(ROTARY, torch.zeros(0)),
    "more frequencies than width": change_state(ROTARY, torch.zeros(64)),
    "a name that is a number": change_state(7, torch.zeros(2)),  # type: ignore[arg-type]
    "a name that is a path": change_state("../../escape", torch.zeros(2)),
    "a billion blocks": change_state("backbone.blocks.999999999.mlp.0.weight", torch.zeros(2)),
    "a block without a number": change_state("backbone.blocks.x.mlp.0.weight", torch.zeros(2)),
    "a negative block": change_state("backbone.blocks.-1.mlp.0.weight", torch.zeros(2)),
    "a vocabulary larger than its bytes": change_state(EMBEDDING, torch.zeros(1).expand(10**9, 8)),
    "a width larger than its bytes": change_state(EMBEDDING, torch.zeros(12, 1).expand(12, 10**9)),
    "a sigma weight without axes": change_state("backbone.sigma_map.mlp.0.weight", torch.zeros(())),
    "a sparse weight": change_state(EMBEDDING, torch.zeros(12, 8).to_sparse()),
    "weights of integers": change_state(EMBEDDING, torch.zeros(12, 8, dtype=torch.int64)),
    "an EMA that is text": change(ema="average"),
    "an EMA of text": change(ema={"shadow_params": ["a", "b", "c"]}),
    "an EMA that is a dict": change(ema={"shadow_params": {"a": torch.zeros(1)}}),
    "clips of several numbers": change_state("sampling_eps_min", torch.zeros(3)),
    "clips that are text": change_state("sampling_eps_min", "0"),
    "clips that are no times": change_state("sampling_eps_min", torch.tensor(5.0)),
    "clips that are not numbers": change_state("sampling_eps_max", torch.tensor(float("nan"))),
    "a row length of text": change_config(model={"length": "eight"}),
    "a row length below one": change_config(model={"length": -8}),
    "a row length of a list": change_config(model={"length": [8]}),
    "a reference to itself": change_config(model={"length": "${model.length}"}),
    "a reference to the environment": change_config(model={"length": "${oc.env:HOME}"}),
    "dropout of text": change_config(model={"length": 8, "dropout": "all"}),
    "dropout above one": change_config(model={"length": 8, "dropout": 7.0}),
    "an unknown schedule": change_config(noise={"type": "geometric"}),
    "an unknown injection": change_config(model={"length": 8, "gumbel_inject_mode": "eval"}),
    "a config that is a list": change(hyper_parameters={"config": [1, 2]}),
    "settings that are text": change(hyper_parameters="settings"),
    "runs a command": change(callback=Calls(os.system, "touch FIRED")),
    "calls what it has looked up": change(callback=Calls(Path.touch, Path("FIRED"))),
    "opens a file": change(callback=Calls(open, "FIRED", "w")),
    "evaluates text": change(callback=Calls(eval, "open('FIRED', 'w')")),
    "weights by a command": change_state(EMBEDDING, Calls(os.system, "touch FIRED")),
    "more memory than there is": change(callback=Calls(bytearray, 10**15)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_one_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = small_checkpoint()
    CASES[name](checkpoint)
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    with pytest.raises(GdistillError) as caught:
        import_checkpoint(tmp_path / "bad.ckpt", tmp_path / "out", ema="EMA" in name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert {path.name for path in tmp_path.iterdir()} == {"bad.ckpt"}


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compress: bool = False) -> None:
    """The archive with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))


def with_record(end: str, change: Callable[[bytes], bytes], compress: bool = False) -> Any:
    """Rewrites the records whose names hold ``end``."""
    return lambda path: rewrite(path, lambda n, old: change(old) if end in n else old, compress)


def with_pickle(content: bytes) -> Any:
    return with_record("data.pkl", lambda old: content)


ARCHIVES: dict[str, Callable[[Path], Any]] = {
    "an empty file": lambda path: path.write_bytes(b""),
    "a pickle without an archive": lambda path: path.write_bytes(pickle.dumps({})),
    "an archive of nothing": lambda path: zipfile.ZipFile(path, "w").close(),
    "no pickle": with_pickle(b""),
    "a pickle of noise": with_pickle(bytes(range(256))),
    "a pickle that ends early": with_record("data.pkl", lambda old: old[: len(old) // 2]),
    "a number": with_pickle(pickle.dumps(3, protocol=2)),
    "weights cut short": with_record("/data/", lambda old: old[:5]),
    "a bomb": with_record("/data/", lambda old: b"\0" * 10**7, compress=True),
    "pickles nested without end": with_pickle(b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b"."),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_every_archive_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.ckpt"
    torch.save(small_checkpoint(), path)
    ARCHIVES[name](path)
    with pytest.raises(GdistillError) as caught:
        import_checkpoint(path, tmp_path / "out", ema=False)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"bad.ckpt"}


def test_a_pickle_cannot_change_torch(tmp_path: Path) -> None:
    """Attributes set on a named function would outlive the file."""
    before = dict(vars(torch._utils._rebuild_tensor_v2))
    defaults = torch._utils._rebuild_tensor_v2.__defaults__
    stream = b"\x80\x02}X\x01\x00\x00\x00aNctorch._utils\n_rebuild_tensor_v2\n"
    stream += b"}X\x08\x00\x00\x00poisonedI1\nsb0s."
    torch.save(small_checkpoint(), tmp_path / "odd.ckpt")
    with_pickle(stream)(tmp_path / "odd.ckpt")
    with contextlib.suppress(GdistillError):
        read_checkpoint(tmp_path / "odd.ckpt")
    assert vars(torch._utils._rebuild_tensor_v2) == before
    assert torch._utils._rebuild_tensor_v2.__defaults__ == defaults


def test_plain_containers_come_back_as_they_are(tmp_path: Path) -> None:
    checkpoint = small_checkpoint()
    checkpoint["order"] = collections.OrderedDict(a=1)
    checkpoint["foreign"] = Calls(print, "foreign")
    checkpoint["counts"] = collections.defaultdict(int, a=2)
    torch.save(checkpoint, tmp_path / "good.ckpt")
    read = read_checkpoint(tmp_path / "good.ckpt")
    assert (read["order"], read["counts"]) == ({"a": 1}, {"a": 2})
    assert isinstance(read["foreign"], Inert)
    assert torch.equal(read["state_dict"][EMBEDDING], torch.zeros(12, 8))
