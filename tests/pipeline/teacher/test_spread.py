"""Teachers on several devices and in several processes, and tokenizers that are not theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.run import run_extraction
from pipeline.settings import resolve_request
from pipeline.teacher.model import Teacher, check_vocabulary
from pipeline.teacher.model_group import ModelGroup
from pipeline.workers import Worker
from shards.errors import GdistillError, UsageError
from shards.language_model.spread import Spread
from shards.store.store import ShardStore
from tests.pipeline.extract_cases import VOCAB_SIZE, options, save_tokenizer
from tests.pipeline.teacher.test_families import rows, save

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers", "model.norm", "lm_head")


@pytest.mark.parametrize(
    "device_map",
    ["cpu", {"": "cpu"}, "auto", dict.fromkeys(PARTS, "cpu"), {PARTS[0]: "cpu"}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_device_map_computes_the_same(tmp_path: Path, family: str, device_map: Any) -> None:
    if torch.cuda.is_available() and device_map == "auto":
        device_map = "cpu"  # kernels of another device round differently
    folder = save(tmp_path, family, "4KB")
    plain = Teacher.load(folder, device="cpu")
    spread = Teacher.load(folder, spread=Spread(device_map))
    assert spread.device.type == "cpu" and spread.num_devices == 1
    assert (plain.log_probs(rows()) - spread.log_probs(rows())).abs().max() < 1e-5
    raw = spread.forward(rows(), torch.arange(3), need_hidden=True)
    assert raw.hidden is not None and raw.hidden.shape == (3, 11, 16)


@pytest.mark.parametrize(
    "device_map", ["nowhere", "cuda:97", "meta", {}, {"": "disk"}, {"": 97}, {"": True}], ids=str
)
def test_a_place_that_is_not_there_is_one_line(device_map: Any) -> None:
    with pytest.raises(UsageError, match=r"no such place for a model \[device_map\]"):
        Spread(device_map)


def test_what_transformers_cannot_spread_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, "llama")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no rule for this model\nand a traceback")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(UsageError, match=r"spread like this.*no rule for this") as caught:
        Teacher.load(folder, spread=Spread("cpu"))
    assert "traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("teacher", "others"),
    [
        ({"device_map": "auto"}, {"device": "cpu"}),
        ({"device_map": "auto", "tensor_parallel": True}, {}),
        ({"tensor_parallel": True, "compiled": True}, {}),
        ({"tensor_parallel": True}, {"mode": "sequential"}),
    ],
)
def test_what_excludes_each_other_is_refused(
    tmp_path: Path, teacher: dict[str, Any], others: dict[str, Any]
) -> None:
    given = {"corpus": {"spec": "a.txt"}, "teacher": {"location": "x", **teacher}, **others}
    with pytest.raises(UsageError, match="exclude each other"):
        resolve_request(tmp_path, given)


def test_tensor_parallelism_without_torchrun_is_one_line(tmp_path: Path, corpus: Path) -> None:
    given = options(save(tmp_path / "teacher", "llama"), corpus, device="auto")
    given["teacher"]["tensor_parallel"] = True
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        run_extraction(resolve_request(tmp_path / "run", given), Worker())
    with pytest.raises(UsageError, match="WORLD_SIZE=1, LOCAL_RANK=unset"):
        ModelGroup.join({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_two_processes_share_a_teacher(tmp_path: Path, corpus: Path, family: str) -> None:
    given = options(save(tmp_path / "teacher", family), corpus)
    run_extraction(resolve_request(tmp_path / "alone", given), Worker())
    given["teacher"]["tensor_parallel"] = True
    config = {name: value for name, value in given.items() if name != "device"}
    (tmp_path / "run.toml").write_text(to_toml(config))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "pipeline.cli", "--out", tmp_path / "both", "--config", tmp_path / "run.toml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(2):  # the second time nothing is left to do, and nobody waits for the other
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("left out") == 1, "one process speaks"
    stores = [ShardStore.open(tmp_path / name / "store") for name in ("alone", "both")]
    assert stores[0].manifest.sha256 == stores[1].manifest.sha256
    for split, num_rows in stores[0].manifest.splits.items():
        one, both = (
            store.split(split, ["tokens", "token_log_probs"]).read_rows(0, num_rows)
            for store in stores
        )
        assert np.array_equal(one["tokens"], both["tokens"])
        # Sums over two halves round differently; a part forgotten would cost nats.
        difference = np.abs(one["token_log_probs"] - both["token_log_probs"])
        assert difference.max() < 1e-3
    ways = json.loads((tmp_path / "both" / "store" / "computed.json").read_text())["ways"]
    assert [way["device"] for way in ways] == ["2 x cpu"]


def to_toml(values: dict[str, Any]) -> str:
    plain = [f"{k} = {json.dumps(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            plain += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(plain)


def test_after_a_pass_that_broke_off_nobody_goes_on() -> None:
    group = ModelGroup(0, 2)
    with pytest.raises(MemoryError), group._together():
        raise MemoryError
    with pytest.raises(GdistillError, match="smaller --batch-size"):
        group._scorer(Teacher.__new__(Teacher))(torch.zeros(1, 2))
    group.end()  # says nothing to processes that hang in the pass


def test_output_wider_than_the_tokenizer_is_padding_and_narrower_is_not() -> None:
    check_vocabulary(152_064, 151_936, "")
    check_vocabulary(50_304, 50_257, "")
    for num_logits, vocab_size in ((151_936, 152_064), (50_257, 50_258), (152_064, 128_256)):
        with pytest.raises(UsageError, match=f"{num_logits} logits"):
            check_vocabulary(num_logits, vocab_size, "")


def test_a_tokenizer_of_the_same_size_but_other_tokens_is_refused(
    tmp_path: Path, corpus: Path
) -> None:
    folder = save(tmp_path / "teacher", "llama")
    words = [f"x{i}" for i in range(VOCAB_SIZE)]
    other = save_tokenizer(tmp_path / "other", words)
    given = options(folder, corpus, teacher={"tokenizer": str(other)})
    with pytest.raises(UsageError, match=r"another family.*0 is 'x0'.*leave --tokenizer out"):
        run_extraction(resolve_request(tmp_path / "run", given), Worker())
    given = options(folder, corpus, teacher={"tokenizer": str(folder)})
    run_extraction(resolve_request(tmp_path / "run", given), Worker())
