"""One loader for three roles, and rows through a model: what is refused, what fits, what is asked.

What is no whole, causal language model is refused in every role.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BloomConfig, GPT2Config, GPT2LMHeadModel, MambaConfig

from evaluation.text.reading import UNLIMITED_CONTEXT, load_judge
from pipeline.teacher import Teacher
from shards.console import without_library_bars
from shards.errors import GdistillError, UsageError
from shards.language_model import forward, loading
from shards.language_model.forward import BatchSize, in_batches
from tests.pipeline.extract_cases import CONTEXT_LENGTH, VOCAB_SIZE, save_teacher, save_tokenizer, scored
from trainer.sampling.verifier import load_verifier

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LOADERS: dict[str, Callable[[Path], Any]] = {
    "teacher": lambda folder: Teacher.load(folder, device="cpu"),
    "judge": lambda folder: load_judge(str(folder)),
    "verifier": lambda folder: load_verifier(str(folder), VOCAB_SIZE, CPU),
}


def save_bert(folder: Path, initializer_range: float = 0.02, **changes: Any) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": CONTEXT_LENGTH}
    changes |= {"vocab_size": VOCAB_SIZE, "initializer_range": initializer_range}
    config = BertConfig(**sizes, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.BertForMaskedLM(config)
        network.cls.predictions.bias.data.normal_(std=0.1)
        network.save_pretrained(folder)
    return save_tokenizer(folder)


def save_translator(folder: Path) -> Path:
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return save_tokenizer(folder)


def save_without_a_tensor(folder: Path) -> Path:
    """The library would draw it at random, and the model would score all the same."""
    weights = save_teacher(folder) / "model.safetensors"
    tensors = load_file(weights)
    for name in ("weight", "bias"):
        tensors.pop(f"transformer.h.1.mlp.c_fc.{name}")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def save_without_weights(folder: Path) -> Path:
    (save_teacher(folder) / "model.safetensors").unlink()
    return folder


def save_damaged_index(folder: Path, index: str = '{"weight_map": []}') -> Path:
    (save_without_weights(folder) / "model.safetensors.index.json").write_text(index)
    return folder


def save_half_the_weights(folder: Path) -> Path:
    weights = save_teacher(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def save_nothing(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_with_code(folder: Path, model_type: str = "own-kind") -> Path:
    """Code that would leave a file beside the folder."""
    code = f"open({str(folder.parent / 'ran')!r}, 'w').close()\nimport transformers\n"
    code += "class OwnConfig(transformers.GPT2Config):\n    model_type = 'own-kind'\n"
    code += "class Own(transformers.GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    (save_teacher(folder) / "modeling_own.py").write_text(code)
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "model_type": model_type, "auto_map": own}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


@pytest.mark.parametrize("role", LOADERS)
@pytest.mark.parametrize(
    ("save", "error", "words"),
    [
        (save_bert, UsageError, r"the ROLE is not causal.*is_decoder"),
        (save_translator, UsageError, "cannot load the ROLE.*expected a causal language model of transformers"),
        (save_without_a_tensor, GdistillError, r"the ROLE's weights are incomplete.*mlp\.c_fc\.bias and 1 more"),
        (save_without_weights, UsageError, "the ROLE has no weights"),
        (save_with_code, UsageError, "cannot read the ROLE's configuration"),
        (partial(save_nothing, model_type="nonsense"), UsageError, "cannot read the ROLE's configuration"),
        (
            partial(save_nothing, model_type="gpt2", vocab_size="many"),
            UsageError,
            r"cannot read the ROLE's configuration.*config\.json.*vocab_size",
        ),
        (save_half_the_weights, GdistillError, "cannot load the ROLE"),
        (save_damaged_index, GdistillError, "damaged weight index"),
        (partial(save_damaged_index, index="{}"), GdistillError, "damaged weight index"),
        (save_nothing, UsageError, r"without config\.json"),
        (lambda folder: folder, UsageError, "no such ROLE folder"),
    ],
)
def test_what_is_no_whole_causal_model_is_refused(
    tmp_path: Path, role: str, save: Callable[[Path], Path], error: type[Exception], words: str
) -> None:
    folder = save(tmp_path / "model")
    with pytest.raises(error, match=words.replace("ROLE", role)) as caught:
        LOADERS[role](folder)
    assert type(caught.value) is error, "an exit code of its own"
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_model_runs_where_the_user_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = loading.find_pretrained(save_with_code(tmp_path / "own"), trust_remote_code=True).config
    assert type(config).__name__ == "OwnConfig"
    (tmp_path / "ran").unlink()
    # A tokenizer's code never runs.
    (tmp_path / "own/tokenizer.json").unlink()
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["modeling_own.Own", None]}}
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(UsageError, match=r"cannot load a tokenizer \[where it was named\]"):
        loading.find_tokenizer(tmp_path / "own", where="where it was named")
    folder = save_with_code(tmp_path / "model", "gpt2")
    for trusted, name in ((False, "GPT2LMHeadModel"), (True, "Own")):
        files = loading.find_pretrained(folder, trust_remote_code=trusted)
        assert type(loading.load_causal_model(files).network).__name__ == name
        assert (tmp_path / "ran").exists() == trusted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_as_a_decoder_is_a_teacher(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(UsageError, match="not causal"):
        Teacher.load(save_bert(tmp_path / "not", 0.3), dtype, "cpu")
    folder = save_bert(tmp_path / "one", 0.3, is_decoder=True)
    loaded = Teacher.load(folder, dtype, "cpu")
    assert loaded.head is not None and loaded.head.last_hidden is loaded.head.last_logits is None
    rows = torch.tensor([[0, 3, 4]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)(rows).logits[:, :-1]
    error = (scored(loaded, rows).log_probs - plain.log_softmax(-1)).abs().max()
    assert float(error) < {"float32": 1e-4, "bfloat16": 0.3}[dtype]


def test_of_the_hub_the_revision_and_the_files_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = save_without_weights(tmp_path), []

    def snapshot(*name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append((*name, options, allow_patterns[5:]))
        assert allow_patterns[:5] == ["*.json", "*.txt", "*.model", "*.py", "*.jinja"]
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", snapshot)
    for weights, patterns in ((False, [[]]), (True, [["model*.safetensors"], ["pytorch_model*.bin"]])):
        options = {"revision": "v2", "local_files_only": weights}
        files = loading.find_pretrained("me/model", **options, weights=weights)
        assert (files.name, files.folder) == ("me/model", folder)
        assert asked == [("me/model", options, pattern) for pattern in patterns]
        asked.clear()
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    here = f"~/{tmp_path.name}"
    assert loading.find_pretrained(here).folder == tmp_path and loading.find_tokenizer(here)
    with pytest.raises(UsageError, match=r"no revisions \[teacher\.revision\]"):
        loading.find_pretrained(here, revision="v2")
    monkeypatch.chdir(tmp_path)
    assert loading.find_pretrained(".").name == tmp_path.name
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda place, **options: options)
    for local in ({}, {"local_files_only": False}):
        assert loading.find_tokenizer("me/model", **local) == {
            "local_files_only": True, "trust_remote_code": False, **local
        }  # fmt: skip
    written = {"me/model": False, "a/b/c": True, "./model": True, "~": True}
    assert {place: loading.looks_local(place) for place in written} == written


class TwiceTheHead(nn.Linear):
    """An output layer that is more than a matrix product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (TwiceTheHead, r"no float32 logits.*bfloat16.*got no plain linear layer.*use --dtype float32"),
        (None, r"no float32 logits.*got logits rounded to torch\.bfloat16"),
        (torch.OutOfMemoryError("no room"), "^no room"),
        (RuntimeError("an own error"), "teacher cannot score a row.*got an own error"),
    ],
)
def test_what_a_models_own_code_does_to_its_logits_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Any, words: str
) -> None:
    library, folder = transformers.AutoModelForCausalLM, save_teacher(tmp_path)
    load = library.from_pretrained

    def changed(*arguments: Any, **options: Any) -> Any:
        network, report = load(*arguments, **options)
        plain, weight = network.forward, network.lm_head.weight

        def forward(**given: Any) -> Any:
            if own is not None:
                raise own
            return SimpleNamespace(logits=plain(**given).logits.bfloat16())

        if own is TwiceTheHead:
            network.lm_head = own(*weight.T.shape, bias=False, dtype=weight.dtype)
            network.lm_head.weight = weight
        else:
            network.forward = forward
        return network, report

    monkeypatch.setattr(library, "from_pretrained", changed)
    with pytest.raises((GdistillError, torch.OutOfMemoryError), match=words):
        Teacher.load(folder, "bfloat16", "cpu")
    if own is TwiceTheHead:
        loaded = Teacher.load(folder, "float32", "cpu")
        assert loaded.head is None and scored(loaded, torch.tensor([[0, 3]])).log_probs.dtype == torch.float32


SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config", [BloomConfig(**SIZES, n_head=2), MambaConfig(**SIZES, state_size=4, use_mambapy=False)]
)
def test_models_that_read_any_length_score(tmp_path: Path, config: Any) -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    folder = save_tokenizer(tmp_path)
    assert Teacher.load(folder, device="cpu").files.context_length is None
    assert load_judge(str(folder)).context_length == UNLIMITED_CONTEXT
    assert load_verifier(str(folder), VOCAB_SIZE, CPU).context_length is None


def files_with(config: Any) -> loading.PretrainedFiles:
    return loading.PretrainedFiles("model", Path("model"), config)


def test_the_context_is_found_under_any_name_and_in_nested_configurations(tmp_path: Path) -> None:
    nested = {"max_position_embeddings": 77, "hidden_size": 8, "vocab_size": 9}
    files = files_with(transformers.Gemma3Config(text_config=nested))
    assert (files.context_length, files.hidden_size, files.num_logits) == (77, 8, 9)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
        assert files_with(transformers.PreTrainedConfig(**{name: 55})).context_length == 55
    with pytest.raises(UsageError, match=r"no language model.*vit without vocab_size"):
        _ = files_with(transformers.ViTConfig()).num_logits
    for unlimited in (MambaConfig(), MambaConfig(max_position_embeddings=-1)):
        assert files_with(unlimited).context_length is None
    assert loading.find_pretrained(save_teacher(tmp_path)).context_length == CONTEXT_LENGTH


def test_a_configuration_is_told_by_what_it_computes() -> None:
    """A teacher of another configuration is another teacher, whatever its weights."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11).to_dict()
    first = files_with(GPT2Config(**config)).config_sha256
    for change in ({"layer_norm_epsilon": 1e-3}, {"layer_norm_epsilon": math.inf}, {"n_head": 4}):
        assert files_with(GPT2Config(**{**config, **change})).config_sha256 != first
    saved = (
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"_name_or_path": "elsewhere"},
        {"transformers_version": "0"},
    )
    for change in ({}, *saved):
        assert files_with(GPT2Config(**{**config, **change})).config_sha256 == first


def test_weights_are_told_by_name_type_shape_and_bytes_in_whatever_files(tmp_path: Path) -> None:
    def told(*files: dict[str, torch.Tensor]) -> str:
        names = [f"{index}.safetensors" for index in range(len(files))]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, tensors in zip(names, files, strict=True):
            save_file(tensors, folder / name)
        places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return loading.PretrainedFiles("a", folder, GPT2Config()).weights_sha256

    one, two = torch.arange(4.0), torch.arange(6.0)
    first = told({"a": one, "b": two})
    assert first.startswith("d21bfcb6"), "with another one no extraction would resume"
    with pytest.raises(GdistillError, match="damaged safetensors file"):
        _ = loading.find_pretrained(save_half_the_weights(tmp_path / "half")).weights_sha256
    assert told({"b": two}, {"a": one}) == first
    changed = {"a": one.view(2, 2)}, {"a": one.view(torch.int32)}, {"a": one + 1}, {"c": one}
    assert len({first, *(told({"b": two, **tensors}) for tensors in changed)}) == 5


def test_pickled_weights_are_told_by_all_their_files_and_safetensors_come_first(tmp_path: Path) -> None:
    files = [loading.PretrainedFiles("a", tmp_path, GPT2Config()) for _ in range(2)]
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "1.bin", "y": "2.bin"}}')
    (tmp_path / "1.bin").write_bytes(b"x")
    with pytest.raises(GdistillError, match=r"a file of the teacher's weights is missing .*2\.bin"):
        _ = files[0].weight_files
    (tmp_path / "2.bin").write_bytes(b"x")
    first = files[0].weights_sha256
    (tmp_path / "2.bin").write_bytes(b"y")
    assert files[1].weights_sha256 != first and not files[1].has_safetensors
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert files[0].weight_files == [tmp_path / "model.safetensors"]


def test_the_librarys_bars_are_hidden_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    library = transformers.utils.logging
    before, is_shown = library.get_verbosity(), library.is_progress_bar_enabled
    for bars, reports in product((True, False), repeat=2):
        monkeypatch.setattr(library, "_tqdm_active", bars)
        with without_library_bars(reports):
            assert not is_shown() and library.get_verbosity() == (before if reports else library.ERROR)
        assert is_shown() == bars and library.get_verbosity() == before


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_a_device_map_computes_the_same(tmp_path: Path, device_map: str) -> None:
    if torch.cuda.is_available() and device_map == "auto":
        device_map = "cpu"  # kernels of another device round differently
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=5, vocab_size=11)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    files, rows = loading.find_pretrained(tmp_path), torch.arange(10).view(2, 5)
    models = [loading.load_causal_model(files, device_map=where) for where in (None, device_map)]
    for model in models:
        frozen = not any(parameter.requires_grad for parameter in model.network.parameters())
        assert frozen and not model.network.training and model.head is None
    plain, mapped = (model.network(rows).logits for model in models)
    torch.testing.assert_close(plain, mapped, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"teacher cannot be spread like this \[device_map\]; got elsewhere"):
        loading.load_causal_model(files, device_map="elsewhere")


def test_a_retry_finds_the_memory_of_the_attempts_that_failed(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()  # what is gone must be gone at once: a device out of memory waits for no collection
    request.addfinalizer(gc.enable)
    attempts: list[weakref.ref[torch.Tensor]] = []
    done: list[int] = []

    def work(part: slice) -> None:
        assert not any(attempt() is not None for attempt in attempts)
        big = torch.zeros(1000)
        attempts.append(weakref.ref(big))
        if part.stop - part.start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        done.extend(range(part.start, part.stop))

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(all(one() is None for one in attempts)))
    size = BatchSize(8)
    in_batches(work, 11, size)
    assert emptied == [True] * 3, "when nothing holds it any more"
    assert done == list(range(11))
    assert len(attempts) == 3 + 11, "tried with 8, 4 and 2 rows once each, then with one"
    assert "out of memory: batches of 4 rows from here on" in capsys.readouterr().err
    in_batches(work, 2, size)
    assert size.rows == 1 and len(attempts) == 3 + 11 + 2, "what was found is remembered"


@pytest.mark.parametrize(
    ("error", "told", "tried"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), r"batch of one row; got \w+.*; use shorter rows", [4, 2, 1]),
        (MemoryError(), "batch of one row", [4, 2, 1]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "batch of one row; got .*Allocator", [4, 2, 1]),
        (ValueError("not about memory"), "not about memory", [4]),
    ],
)
def test_one_row_that_does_not_fit_and_other_errors_end_it(error: BaseException, told: str, tried: list[int]) -> None:
    parts: list[int] = []

    def work(part: slice) -> None:
        parts.append(part.stop - part.start)
        raise error

    with pytest.raises((GdistillError, ValueError), match=told):
        in_batches(work, 4, BatchSize(9))
    assert parts == tried, "a batch that is smaller than the size is halved itself"


def test_a_row_that_no_kernel_can_index_is_refused_with_a_way_out() -> None:
    forward.require_indexable(2**31 - 1, GPU, "")
    forward.require_indexable(2**40, CPU, "")
    words = r"got 2,147,615,360 logits of a row; expected at most 2,147,483,647.*; shorter rows$"
    with pytest.raises(GdistillError, match=words):
        forward.require_indexable(14_135 * 151_936, GPU, "shorter rows")
    assert forward.largest_batch(2**31, GPU) == 1 < 1000 < forward.largest_batch(2**31, CPU)


@pytest.mark.parametrize(
    ("capability", "override", "runs"),
    [((9, 0), None, "TF32"), ((8, 0), "1", "TF32"), ((8, 0), "0", "float32"), ((7, 5), None, "float32")],
)
def test_tf32_is_allowed_where_a_gpu_has_it_and_the_user_does_not_object(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], override: str | None, runs: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert forward.allow_tf32(CPU) == "float32"
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert forward.allow_tf32(GPU) == runs
    assert torch.backends.cuda.matmul.allow_tf32 is (runs == "TF32")


def test_rows_of_the_probe_differ_in_their_last_token_alone() -> None:
    for vocab_size, length in ((50257, 8), (23, 8), (6, 8), (2, 2), (3, 1)):
        rows = loading.probe_rows(vocab_size, length)
        assert torch.equal(rows[0], rows[1]) and (rows[:, :-1] == rows[0, :-1]).all()
        assert (rows[2:, -1] != rows[0, -1]).sum() >= 2
        assert rows.min() >= 0 and rows.max() < vocab_size


def test_what_moves_equal_rows_too_is_no_look_ahead() -> None:
    logits = torch.randn(1, 8, 50, generator=torch.Generator().manual_seed(0)).repeat(5, 1, 1)
    assert loading.look_ahead(logits, 1e-4) is None and loading.look_ahead(logits[:, :1], 1e-4) is None
    leaking = logits.clone()
    leaking[3, 2] += 0.01 * torch.arange(50) / 50
    assert loading.look_ahead(leaking, 1e-4) == pytest.approx(0.0058, rel=0.2)
    leaking[1, 4] += 0.01 * torch.arange(50) / 50  # the equal row moved as far
    assert loading.look_ahead(leaking, 1e-4) is None
    masked = logits.clone()
    masked[..., 7] = -torch.inf
    assert loading.look_ahead(masked, 1e-4) is None
