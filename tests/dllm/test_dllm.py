"""dllm's own trainers and samplers with the noise of a store, and without.

dllm keeps another transformers than the commands: run in its environment (docs/dllm.md), with
pytest, beartype and hypothesis: ``pytest tests/dllm``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.trainer.run_cases import VOCAB, draw_weights, quiet, tokenizer, write_store
from trainer.distillation import store_rows
from trainer.dllm_adapter import NoiseMixin, NoiseSamplerMixin

pytestmark = pytest.mark.dllm
PAGE = Path(__file__).resolve().parents[2] / "docs/dllm.md"


@pytest.fixture(autouse=True)
def dllm() -> Any:
    return pytest.importorskip("dllm", reason="docs/dllm.md says how it is installed")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "posterior")


def dllm_student(kind: str) -> Any:
    """Random weights of a class of its zoo."""
    torch.manual_seed(0)
    ids = {"vocab_size": VOCAB + 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    if kind == "llada":
        from dllm.pipelines.llada import LLaDAConfig, LLaDAModelLM
        from dllm.pipelines.llada.models import modeling_llada as llada

        sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "mlp_hidden_size": 32}
        whole = {"weight_tying": False, "embedding_size": VOCAB + 1, "init_device": "cpu"}
        whole |= {"rope": True, "block_type": "llama", "activation_type": "silu"}
        config = LLaDAConfig(**sizes, **ids, **whole)
        inner = llada.create_model_config_from_pretrained_config(config)
        return LLaDAModelLM(config, llada.LLaDAModel(inner, init_params=True))
    if kind == "modernbert":
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        ends = {"cls_token_id": 0, "sep_token_id": 0}
        return ModernBertForMaskedLM(ModernBertConfig(num_attention_heads=2, **size, **ids, **ends))
    from dllm.pipelines.a2d import A2DQwen3Config, A2DQwen3LMHeadModel

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return A2DQwen3LMHeadModel(A2DQwen3Config(**size, **heads, **ids))


def dllm_trainer(place: Path | None, store: Path, out: Path, kind: str, name: str) -> Any:
    """dllm's own trainer, or ours on it where a store is the noise's."""
    from dllm.core import trainers

    base = getattr(trainers, f"{name}Trainer")
    args = getattr(trainers, f"{name}Config")(
        **quiet(out, max_steps=12, bf16=False, eval_strategy="no", report_to="none")
    )
    kinds = (NoiseMixin, base) if place else (base,)
    own = {"store": place} if place else {"data_collator": default_collate}
    return type("Made", kinds, {})(
        model=dllm_student(kind),
        args=args,
        processing_class=tokenizer(),
        train_dataset=store_rows(store, with_teacher=place is not None),
        eval_dataset=store_rows(store, "validation", epochs=1, with_teacher=place is not None),
        **own,
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3", "MDLM"), ("llada", "MDLM"), ("modernbert", "MDLM"), ("qwen3", "BD3LM")]
)
def test_the_first_loss_is_dllms_own(store: Path, tmp_path: Path, kind: str, name: str) -> None:
    """To the last bit: same weights, rows, times and masks. Then the noise begins to tell."""
    losses = []
    for place in (store, None):
        made = dllm_trainer(place, store, tmp_path, kind, name)
        batch = next(iter(made.get_train_dataloader()))
        torch.manual_seed(1)
        losses.append(made.compute_loss(made.model, batch).item())
        made.train()
        assert place is None or made.noise_input.weight.any()
        losses.append(made.evaluate()["eval_loss"])
    assert losses[0] == losses[2] and losses[1] != losses[3]


@pytest.mark.parametrize("name", ["MDLM", "BD3LM"])
def test_dllms_samplers_draw_from_the_noise_alone(store: Path, tmp_path: Path, name: str) -> None:
    made = dllm_trainer(store, store, tmp_path, "qwen3", name)
    draw_weights(made.noise_input)
    made.model.eval()
    from dllm.core import samplers

    base = getattr(samplers, f"{name}Sampler")
    sizes = {"max_new_tokens": 7, "steps": 4, "block_size": 7, "temperature": 0.0}
    config = getattr(samplers, f"{name}SamplerConfig")(**sizes)
    sampler = type("Drawn", (NoiseSamplerMixin, base), {})(made.model, tokenizer())
    drawn = [sampler.sample([[1]] * count, config, seed=1) for count in (4, 4, 2)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0][:2], drawn[2])
    assert not torch.equal(drawn[0], sampler.sample([[1]] * 4, config, seed=2))
    assert len(drawn[0].unique(dim=0)) > 1


def test_the_page_runs(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    files = {f"tokenizer/{p.name}": p.read_bytes() for p in (tmp_path / "tokenizer").iterdir()}
    write_store(tmp_path / "out/latest/store", files=files)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
