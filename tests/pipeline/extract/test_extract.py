"""What a store of stage 2 holds, how it resumes, who computes differently, and that memory may run out."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline import extract
from pipeline.extract import Extractor
from pipeline.run import rows_per_unit, run_extraction
from pipeline.settings import ExtractRequest, StoreSettings, Worker, resolve_request
from pipeline.teacher import RawLogits, Teacher
from pipeline.tokens.dataset import TokenDataset
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import make_codec
from shards.errors import GdistillError, UsageError
from shards.noise.embedding import dense_arrivals
from shards.noise.gumbel import gumbel_argmax
from shards.store.location import open_location
from shards.store.manifest import COMPUTED_FILE, read_ways, record_ways
from shards.store.store import ShardStore, ShardWriter
from shards.store.verification import verify
from tests.changed_settings import changed
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked, Patch
from tests.pipeline.extract_cases import CONTEXT_LENGTH, ROW_LENGTH, VOCAB_SIZE, contents, options, run, times


def rows_of(dataset: TokenDataset, split: str) -> np.ndarray:
    return dataset.read_rows(split, 0, dataset.num_rows(split))


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_store_holds_rows_and_what_the_teacher_says_of_them(finished: Path, teacher: Path) -> None:
    store, dataset = ShardStore.open(finished / "store"), TokenDataset.open(finished / "tokens")
    model = Teacher.load(teacher, device="cpu")
    assert store.manifest.vocab_size == VOCAB_SIZE
    assert (store.manifest.bos_id, store.manifest.eos_id) == (0, 1)
    assert verify(finished / "store") == []
    for split in ("train", "validation"):
        rows = rows_of(dataset, split)
        arrays = store.split(split).read_rows(0, len(rows))
        assert np.array_equal(arrays["tokens"], rows)
        tokens = torch.from_numpy(rows).long()
        log_probs = extract_cases.scored(model, tokens).log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        stored = torch.from_numpy(arrays["token_log_probs"])
        assert (stored[:, 1:] - log_probs).abs().max() < 1e-5
        for name in arrays.keys() - {"tokens"}:
            assert not arrays[name][:, 0].any(), f"{name} has something at position 0"
    # What makes it self-contained, and the packages that decide meaning. Those that move last
    # bits stand beside it, so that an upgrade does not end a store.
    assert set(store.files("tokenizer")) == {"tokenizer.json", "tokenizer_config.json"}
    assert store.manifest.tokenizer == {"id": teacher.name, "sha256": dataset.record["tokenizer"]["sha256"]}
    assert set(store.manifest.versions) == {"gdistill", "numcodecs", "tokenizers", "zarr"}
    (way,) = read_ways(store.location)
    assert way["torch"] == torch.__version__
    # A smoothed count: a token that the training rows have not is not impossible.
    rows = rows_of(dataset, "train")[:, 1:]
    counts = np.bincount(rows.flatten(), minlength=VOCAB_SIZE) + 0.5
    assert counts[0] == 0.5
    np.testing.assert_allclose(store.resources["unigram_log_probs"].exp(), counts / counts.sum(), rtol=1e-5)


def test_frozen_noise_reproduces_every_token_and_differs_between_splits(
    tmp_path: Path, teacher: Path, corpus: Path, asked: Asked
) -> None:
    own = {"validation_source": f"text:{corpus}"}
    given = asked(codec={"name": "full"}, corpus=own)
    store, larger = run(tmp_path, given), run(tmp_path / "larger", given | {"store": {"rows_per_shard": 32}})
    noise, tokens = extract_cases.stored_noise(store)
    log_probs = extract_cases.scored(Teacher.load(teacher, device="cpu"), tokens).log_probs.flatten(0, 1)
    assert torch.equal(gumbel_argmax(log_probs, dense_arrivals(noise)), tokens[:, 1:].flatten())
    # Equal rows of two splits have noise of their own.
    train, held_out = (store.split(name).read_rows(0, 20) for name in ("train", "validation"))
    for name in ("tokens", "token_log_probs"):
        assert np.array_equal(train[name], held_out[name])
    name = max(store.manifest.arrays, key=lambda array: train[array].nbytes)
    assert (train[name][:, 1:] != held_out[name][:, 1:]).mean() > 0.9
    assert np.array_equal(larger.split("train").read_rows(0, 20)[name], train[name]), "whatever shard a row lies in"


def test_a_rerun_loads_no_weights_and_repairs_a_damaged_head(tmp_path: Path, asked: Asked, monkeypatch: Patch) -> None:
    given = asked(codec={"name": "hidden"})
    monkeypatch.setattr("pipeline.teacher.TRIED_TOKENS", CONTEXT_LENGTH + 1)  # more than this teacher reads
    run(tmp_path, given)
    before, written = contents(tmp_path / "store"), times(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.teacher.load_causal_model", lambda *_, **__: pytest.fail("the teacher was loaded"))
        run(tmp_path, given)
    assert times(tmp_path) == written
    head = next(name for name in before if name.startswith("resources/lm_head/c/"))
    (tmp_path / "store" / head).write_bytes(b"damaged")
    run(tmp_path, given)
    assert contents(tmp_path / "store") == before


@pytest.mark.parametrize("num_shards", [0, 1, 4])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path, asked: Asked, reference: dict[str, bytes], monkeypatch: Patch, num_shards: int
) -> None:
    """And a finished shard is not computed again."""
    forward, calls, most_calls = Teacher.forward, [], 4 * num_shards + 2

    def failing(self: Teacher, rows: Tensor, *rest: Any) -> RawLogits:
        calls.append(len(rows))
        if len(calls) > most_calls:
            raise KeyboardInterrupt
        return forward(self, rows, *rest)

    monkeypatch.setattr(Teacher, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, asked())
    left = ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    calls.clear()
    most_calls = 10**6
    clock = SimpleNamespace(monotonic=iter([5.0, 12.0]).__next__)  # loading and stage 1 take no part
    monkeypatch.setattr("pipeline.extract.time", clock)
    store = run(tmp_path, asked())
    assert sum(calls) == sum(shard.num_rows for shard in left)
    assert contents(tmp_path / "store") == reference
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_tokens"] == sum(store.manifest.splits.values()) * ROW_LENGTH
    assert summary["num_tokens_of_this_process"] == sum(calls) * ROW_LENGTH
    assert summary["tokens_per_second"] == sum(calls) * ROW_LENGTH / 7 and summary["seconds"] == 7


def test_out_of_memory_halves_the_batch_and_loses_nothing(
    tmp_path: Path, finished: Path, asked: Asked, monkeypatch: Patch
) -> None:
    forward, sizes = Teacher.forward, []

    def cramped(self: Teacher, rows: Tensor, *rest: Any) -> RawLogits:
        if len(rows) > 2:
            out_of_memory()
        sizes.append(len(rows))
        return forward(self, rows, *rest)

    monkeypatch.setattr(Teacher, "forward", cramped)
    store, whole = run(tmp_path, asked(batch_size=16)), ShardStore.open(finished / "store")
    assert max(sizes) == 2
    rows = store.manifest.splits["train"]
    ours, theirs = (each.split("train").read_rows(0, rows) for each in (store, whole))
    assert np.array_equal(ours["tokens"], theirs["tokens"])
    assert np.abs(ours["token_log_probs"] - theirs["token_log_probs"]).max() < 1e-5
    assert store.manifest.sha256 == whole.manifest.sha256, "batch size is no identity"


def test_encoding_that_runs_out_of_memory_goes_on_in_halves(
    tmp_path: Path, asked: Asked, reference: dict[str, bytes], monkeypatch: Patch
) -> None:
    normalise = RawLogits.normalise

    def cramped(self: RawLogits, *rest: Any) -> object:
        return out_of_memory() if len(self.tokens) > 1 else normalise(self, *rest)

    monkeypatch.setattr(RawLogits, "normalise", cramped)
    run(tmp_path, asked())
    assert contents(tmp_path / "store") == reference


def disk_full(*_: Any) -> None:
    raise GdistillError("disk full")


def test_errors_of_every_thread_end_the_run_in_one_line_and_leave_nothing_half_done(
    tmp_path: Path, asked: Asked, reference: dict[str, bytes], monkeypatch: Patch
) -> None:
    encode, calls = Extractor._encode, []

    def fails_at_a_shards_last_batch(self: Extractor, *given: Any) -> None:
        calls.append(given)
        disk_full() if len(calls) == 4 else encode(self, *given)

    cases: list[tuple[type, str, Any, str]] = [
        (Teacher, "forward", out_of_memory, "batch of one row"),
        (PosteriorCodec, "encode", out_of_memory, "batch of one row"),
        (Extractor, "_encode", fails_at_a_shards_last_batch, "disk full"),
        (ShardWriter, "write", disk_full, "disk full"),
    ]
    for owner, name, broken, message in cases:
        with monkeypatch.context() as patch, pytest.raises(GdistillError, match=message):
            patch.setattr(owner, name, broken)
            run(tmp_path, asked())
    run(tmp_path, asked())
    assert contents(tmp_path / "store") == reference


def test_another_teacher_or_corpus_of_the_same_name_is_refused(
    tmp_path: Path, finished: Path, corpus: Path, teacher: Path
) -> None:
    other = extract_cases.save_teacher(tmp_path / teacher.name, seed=1)
    set_up = shutil.copytree(teacher, tmp_path / "changed" / teacher.name) / "config.json"
    set_up.write_text(json.dumps({**json.loads(set_up.read_text()), "layer_norm_epsilon": 1e-4}))
    for folder, field in ((other, "weights_sha256"), (set_up.parent, "config_sha256")):
        with pytest.raises(UsageError, match=rf"teacher\.{field}"):
            run(finished, options(folder, corpus))
    own = extract_cases.write_corpus(tmp_path / "corpus.txt")
    run(tmp_path / "out", options(teacher, own))
    own.write_text(own.read_text().replace("w3 ", "w4 "))  # as many rows
    with pytest.raises(GdistillError, match="not the one that was tokenized"):
        run(tmp_path / "out", options(teacher, own))
    there = {"location": str(tmp_path / "out/store")}
    with pytest.raises(UsageError, match=r"other inputs.*tokens\.fingerprint"):
        run(tmp_path / "other", options(teacher, own, store=there))


def test_rows_limit_takes_the_first_rows(tmp_path: Path, asked: Asked, finished: Path) -> None:
    """Of token rows, too, that were made for all of them; and all rows may be held out."""
    shutil.copytree(finished / "tokens", tmp_path / "tokens")
    store = run(tmp_path, asked(store={"rows": 20, "validation_rows": 1}))
    assert store.manifest.splits == {"train": 20, "validation": 1}
    dataset = TokenDataset.open(tmp_path / "tokens")
    assert dataset.num_rows("train") > 20 and dataset.num_rows("validation") > 1
    rows = store.split("train").read_rows(0, 20)["tokens"]
    assert np.array_equal(rows, dataset.read_rows("train", 0, 20))
    record = json.loads((tmp_path / "tokens/tokens.json").read_text())
    record["splits"]["train"]["parts"][0]["max_token_id"] = VOCAB_SIZE
    (tmp_path / "tokens/tokens.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=rf"outside the vocabulary.*got {VOCAB_SIZE}"):
        run(tmp_path, asked(store={"rows": 20, "validation_rows": 1}))
    alone = run(tmp_path / "alone", asked(corpus={"validation_fraction": 1.0}, store={"rows": 20}))
    assert alone.manifest.splits == {"validation": 20}
    assert alone.resources["unigram_log_probs"].std() > 0.1, "counted in the rows that there are"


def test_sizes_of_chunks_and_shards_are_bounded_in_tokens_and_bytes() -> None:
    posterior, full = (make_codec(name).array_specs(50257, None) for name in ("posterior", "full"))
    assert rows_per_unit(1024, posterior, StoreSettings()) == (4, 256)
    assert rows_per_unit(1024, full, StoreSettings()) == (1, 2)
    assert rows_per_unit(1024, posterior, StoreSettings(rows_per_shard=6)) == (3, 6)
    assert rows_per_unit(1024, posterior, StoreSettings(rows_per_chunk=300)) == (300, 300)


# Every setting decides what is stored, or is known not to.

VALUES = {
    "corpus.bos_id": 5, "corpus.detokenizer": "ptb", "corpus.document_separator": "blank_line",
    "corpus.eos_id": 5, "corpus.on_bad_utf8": "skip", "corpus.packing": "wrap",
    "corpus.row_length": 10, "corpus.separator_id": 5, "corpus.validation_documents": 7,
    "device": "cpu:0", "store.rows": 20, "store.rows_per_chunk": 4, "store.rows_per_shard": 8,
    "store.validation_rows": 1, "teacher.attention": "eager", "teacher.device_map": None,
}  # fmt: skip
HOW_IT_RUNS = {
    "batch_size", "device", "strict", "threads", "teacher.attention", "sequential.batch_size",
}  # fmt: skip
"""The store may go on under another of these: a store is told from another by what it holds."""
ELSEWHERE = {
    *("corpus.source", "corpus.validation_source", "store.location", "teacher.location"),
    *("teacher.tokenizer", "teacher.revision", "teacher.device_map", "teacher.preset"),
    *("teacher.trust_remote_code", "teacher.compiled", "corpus.seed"),
}
"""Places, hub revisions and what only a maze or another device reads: other tests have them."""
WRITTEN = {"sequential.temperature", "sequential.nucleus_p"}
"""They decide rows that the teacher writes."""


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_store_goes_on_under_no_other_setting(tmp_path: Path, asked: Asked, mode: str) -> None:
    """Each setting changed alone: refused, or the store of the first run is left as it was."""
    base = resolve_request(tmp_path, asked(mode=mode))
    run_extraction(base, Worker())
    before = contents(tmp_path / "store")
    free = set()
    for part in ("settings", "corpus", "codec"):
        prefix = "" if part == "settings" else f"{part}."
        for name, other in changed(getattr(base, part), VALUES, prefix):
            if name in ELSEWHERE or name.startswith("engine."):
                continue
            try:
                assert other is not None, name
                request: ExtractRequest = dataclasses.replace(base, **{part: other})
                run_extraction(request, Worker())
                free.add(name)
            except GdistillError as error:
                assert re.search("with other (inputs|settings)", str(error)), (name, error)
            assert contents(tmp_path / "store") == before, name
    assert free == HOW_IT_RUNS | (WRITTEN if mode == "parallel" else set())


@pytest.fixture(autouse=True)
def threads_of_others() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def said(monkeypatch: Patch) -> list[str]:
    """What extraction says."""
    lines: list[str] = []
    monkeypatch.setattr(extract.stderr, "print", lambda line, **_: lines.append(line))
    return lines


def half_done(out: Path) -> None:
    """Forget half of the shards."""
    for record in sorted((out / "store" / "ledger").rglob("*.json"))[::2]:
        record.unlink()


def test_later_workers_compute_as_the_first(tmp_path: Path, asked: Asked, said: list[str], monkeypatch: Patch) -> None:
    run(tmp_path, asked(threads=2, batch_size=3))
    whole = contents(tmp_path / "store")
    (way,) = json.loads(whole[COMPUTED_FILE])["ways"]
    assert (way["device"], way["threads"], way["rows_per_pass"]) == ("cpu", 2, 3)
    assert (way["attention"], way["compiled"], way["torch"]) == ("sdpa", False, torch.__version__)
    assert way["kernels"].startswith(torch.backends.cpu.get_cpu_capability())
    half_done(tmp_path)
    torch.set_num_threads(1)
    run(tmp_path, asked(batch_size=None, threads=None, strict=True))
    assert torch.get_num_threads() == 2 and said == []
    assert contents(tmp_path / "store") == whole
    assert verify(tmp_path / "store") == []
    # A store without the record goes on.
    half_done(tmp_path)
    (tmp_path / "store" / COMPUTED_FILE).unlink()
    run(tmp_path, asked(threads=2, batch_size=3, strict=True))
    assert contents(tmp_path / "store") == whole
    half_done(tmp_path)
    run(tmp_path, asked(batch_size=2, threads=1))
    assert len(said) == 1 and "threads 1 (was 2), rows_per_pass 2 (was 3)" in said[0], "what was asked for is done"
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 2
    # A GPU's rows of a pass are none of a CPU's.
    half_done(tmp_path)
    (tmp_path / "store" / COMPUTED_FILE).unlink()
    on_gpu = {"device": "NVIDIA H100", "threads": 0, "rows_per_pass": 1 << 20}
    record_ways(open_location(tmp_path / "store"), [on_gpu])
    own = read_ways(run(tmp_path, asked(batch_size=None, threads=None)).location)[-1]
    assert own["rows_per_pass"] < 1 << 20 and own["threads"] == torch.get_num_threads()
    half_done(tmp_path)
    monkeypatch.setattr(extract, "largest_batch", lambda *_: 2)
    assert read_ways(run(tmp_path, asked(batch_size=3)).location)[-1]["rows_per_pass"] == 2


@pytest.mark.parametrize("obstacle", ["", "no Triton here"])
def test_extraction_asks_for_the_compiled_noise_kernel_and_says_why_it_has_none(
    tmp_path: Path, asked: Asked, monkeypatch: Patch, said: list[str], obstacle: str
) -> None:
    """Before the environment is settled, which records it; on the device that the teacher is on."""
    calls: list[object] = []

    def use(kernel: str, device: torch.device) -> str:
        calls.append((kernel, device.type))
        return obstacle

    settle = extract.settle_environment
    monkeypatch.setattr("pipeline.run.use_noise_kernel", use)
    monkeypatch.setattr("pipeline.run.settle_environment", lambda *given: (calls.append("way"), settle(*given))[1])
    run(tmp_path, asked())
    assert calls == [("auto", "cpu"), "way"]
    assert said == ["noise kernel: eager on cpu; no Triton here"] * bool(obstacle)


@pytest.mark.parametrize("kernel", ["compiled", "eager"])
def test_a_gpu_says_where_its_noise_is_eager(monkeypatch: Patch, kernel: str) -> None:
    monkeypatch.setattr(extract, "noise_kernel", lambda device: kernel)
    assert extract._kernels(True) == "float32" + ", eager noise" * (kernel == "eager")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert extract._kernels(False).endswith(" MKL_CBWR=COMPATIBLE")


def test_who_computes_differently_is_told_and_with_strict_refused(
    tmp_path: Path, asked: Asked, monkeypatch: Patch, said: list[str]
) -> None:
    given = asked(threads=1)
    run(tmp_path, given)
    half_done(tmp_path)
    monkeypatch.setattr(extract, "_kernels", lambda on_gpu: "OTHER")
    monkeypatch.setattr(Teacher, "num_devices", 2)
    before, held = contents(tmp_path / "store"), list[str]()
    for module in ("pipeline.extract", "shards.store.manifest"):
        monkeypatch.setattr(f"{module}.read_ways", lambda place: held.extend(place.claims()) or read_ways(place))
    with pytest.raises(UsageError, match=r"computes differently.*OTHER \(was .*--strict"):
        run(tmp_path, {**given, "strict": True})
    assert contents(tmp_path / "store") == before and said == []
    store = run(tmp_path, given)
    (line,) = said
    rounding = f"{extract.ROUNDING_NATS:g}"
    assert {"way", "computed"} <= {*held}, "two that begin at once agree on who is first"
    assert "kernels OTHER" in line and "device 2 x cpu (was cpu)" in line and "threads" not in line and rounding in line
    assert [way["kernels"] == "OTHER" for way in read_ways(store.location)] == [False, True]
    assert store.unfinished() == [] and verify(tmp_path / "store") == []
