"""Stores from an engine's hidden states: what our own extraction of the same rows writes."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.engine import StatesTeacher, run_scored
from pipeline.settings import EngineSettings, Worker, resolve_request
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import find_pretrained, load_causal_model
from shards.store.store import ShardStore
from tests.commands import call
from tests.pipeline.engine.engine_server import EngineServer
from tests.pipeline.extract_cases import VOCAB_SIZE, options, save_teacher
from tests.pipeline.extract_cases import run as run_own

CODECS: dict[str, dict[str, Any]] = {
    "hidden": {"name": "hidden", "dtype": "float16"},
    "full": {"name": "full"},
    "posterior": {"name": "posterior", "num_entries": 9},
}
FAULTS = {
    "no_states": "gives no hidden states.*docs/engines.md",
    "no_file": "cannot be read.*shared_storage_path",
    "other_ids": "of other tokens",
    "shifted_states": r"does not give its own log p .*row \d+, position \d+",
}


@pytest.fixture
def server(teacher: Path, tmp_path: Path) -> EngineServer:
    found = EngineServer(teacher)
    found.states = tmp_path / "states"
    found.states.mkdir()
    return found


def asked(teacher: Path, corpus: Path, url: str, codec: dict[str, Any]) -> dict[str, Any]:
    given = options(teacher, corpus)
    return {**given, "codec": codec, "engine": {"url": url, "max_tries": 2, "in_flight": 3}}


def run(out: Path, given: dict[str, Any]) -> ShardStore:
    run_scored(resolve_request(out, given), Worker())
    return ShardStore.open(out / "store")


def probabilities(store: ShardStore) -> torch.Tensor:
    read = store.split("train").read_rows(0, store.manifest.splits["train"])
    flat = {name: torch.from_numpy(value[:, 1:]).flatten(0, 1) for name, value in read.items()}
    tokens, own = flat.pop("tokens").long(), flat.pop("token_log_probs")
    found = store.codec.distribution(flat, tokens, own, store.resources)  # type: ignore[attr-defined]
    return found.tile(0, VOCAB_SIZE)


@pytest.mark.parametrize("name", CODECS)
def test_states_give_the_store_that_the_model_itself_gives(
    name: str, teacher: Path, corpus: Path, tmp_path: Path, server: EngineServer
) -> None:
    codec = CODECS[name]
    own = run_own(tmp_path / "own", {**options(teacher, corpus), "codec": codec})
    with server.running() as url:
        found = run(tmp_path / "out", asked(teacher, corpus, url, codec))
    for split, rows in own.manifest.splits.items():
        ours, theirs = (store.split(split).read_rows(0, rows) for store in (own, found))
        np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
        logs = ours["token_log_probs"], theirs["token_log_probs"]
        np.testing.assert_allclose(*logs, rtol=0, atol=1e-4)
    if name == "full":  # the noise itself: the same where the distribution is
        ours, theirs = (store.split("train").read_rows(0, 16) for store in (own, found))
        for array in own.manifest.arrays:
            np.testing.assert_allclose(ours[array], theirs[array], rtol=1e-2, atol=1e-2)
    else:
        torch.testing.assert_close(probabilities(found), probabilities(own), rtol=0, atol=2e-3)
    assert found.manifest.teacher["states"] == "engine"
    assert server.states is not None and not list(server.states.iterdir()), "files are deleted"
    assert server.most_in_flight > 1


@pytest.mark.parametrize("fault", FAULTS)
def test_states_that_are_not_the_rows_are_refused(
    fault: str, teacher: Path, corpus: Path, tmp_path: Path, server: EngineServer
) -> None:
    """In the first request, and in one among many."""
    with server.running() as url:
        for number in (0, 9):
            server.misdeeds.extend([""] * number + [fault])
            given = asked(teacher, corpus, url, CODECS["hidden"])
            with pytest.raises(GdistillError, match=FAULTS[fault]) as caught:
                run(tmp_path / str(number), given)
            assert "\n" not in str(caught.value)
            server.misdeeds.clear()
    assert (tmp_path / "9" / "tokens").exists() and not (tmp_path / "0" / "tokens").exists()


def test_another_precision_is_refused(
    teacher: Path, corpus: Path, tmp_path: Path, server: EngineServer
) -> None:
    server.misdeeds.append("bfloat16")
    with server.running() as url:
        given = asked(teacher, corpus, url, CODECS["hidden"])
        with pytest.raises(UsageError, match=r"another precision.*--dtype bfloat16"):
            run(tmp_path / "out", given)


class Given:
    """Stands for an engine: log p of rows, and the states behind the last layer, given at once."""

    settings = EngineSettings(url="http://here")

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        seen: list[torch.Tensor] = []
        inner = model.get_decoder().children()
        norm = [each for each in inner if "Norm" in type(each).__name__][-1]
        handle = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with torch.inference_mode():
            self.expected = model(rows).logits[:, :-1].log_softmax(-1)
        handle.remove()
        own = self.expected.gather(-1, rows[:, 1:, None])[..., 0]
        self.log_probs = torch.cat((torch.zeros(len(rows), 1), own), dim=1)
        self.behind_layers = seen[0].clone()

    def states(self, rows: torch.Tensor, names: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_probs, self.behind_layers


def test_one_wrong_state_of_a_row_is_found(teacher: Path) -> None:
    """By its place, not by the row's mean."""
    rows = torch.randint(2, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(0))
    behind = StatesTeacher.load(teacher)
    given = Given(AutoModelForCausalLM.from_pretrained(teacher), rows)
    behind.engine = given  # type: ignore[attr-defined]
    behind.forward(rows, torch.tensor([10, 11]))
    given.behind_layers[1, 4] = given.behind_layers[1, 3]
    with pytest.raises(GdistillError, match=r"row 11, position 5\]; got"):
        behind.forward(rows, torch.tensor([10, 11]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "sequential"}, "writes none.*--mode"),
        ({"engine": {"url": "http://127.0.0.1:9", "num_top": 3}}, "elsewhere.*engine.num_top"),
        ({"teacher": {"attention": "sdpa"}}, "elsewhere.*teacher.attention"),
    ],
)
def test_settings_that_states_do_not_look_at(
    teacher: Path, corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = asked(teacher, corpus, "http://127.0.0.1:9", CODECS["hidden"])
    for name, value in changes.items():
        given[name] = {**given[name], **value} if isinstance(value, dict) else value
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


def test_the_pages_command_asks_for_states(
    teacher: Path, corpus: Path, tmp_path: Path, server: EngineServer, monkeypatch: Any
) -> None:
    """docs/engines.md, its second block; the tokenizer lies beside the teacher."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "engines.md").read_text()
    block = next(b for b in page.split("```bash\n") if "--codec hidden" in b).split("```")[0]
    words = shlex.split(block.replace("\\\n", " "), comments=True)
    with server.running() as url:
        named = {"http://127.0.0.1:8000": url, "path/or/hub-id": teacher, "stories/*.txt": corpus}
        monkeypatch.chdir(tmp_path)
        assert call(*[named.get(word, word) for word in words]) == 0
    store = ShardStore.open(tmp_path / "out/states/store")
    assert store.manifest.codec["name"] == "hidden"


@pytest.mark.parametrize("padding", [0, 3])
def test_a_padded_output_layer_is_cut(padding: int, corpus: Path, tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "padded", VOCAB_SIZE + padding)
    server = EngineServer(teacher)
    server.states = tmp_path
    with server.running() as url:
        found = run(tmp_path / "out", asked(teacher, corpus, url, CODECS["hidden"]))
    assert found.manifest.vocab_size == VOCAB_SIZE
    total = probabilities(found).sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=5e-3)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 2, "intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "gpt_neox": SMALL,
    "opt": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_behind_the_layers_is_read_without_them(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    files = find_pretrained(tmp_path)
    before = copy.deepcopy(files.config.to_dict())
    loaded = load_causal_model(files, float32_logits=True, has_layers=False)
    assert files.config.to_dict() == before
    layers = sum("layers." in name or ".h." in name for name, _ in model.named_parameters())
    assert layers and not any(
        "layers." in name or ".h." in name for name, _ in loaded.network.named_parameters()
    )
    ids = torch.randint(0, 64, (2, 9))
    teacher = StatesTeacher(loaded, 64)
    teacher.engine = given = Given(model, ids)  # type: ignore[assignment]
    found = teacher.output(ids, torch.arange(2)).log_probs
    torch.testing.assert_close(found, given.expected, rtol=0, atol=1e-4)
