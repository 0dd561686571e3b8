"""`gdistill-extract` as users type it: what it does, and what it refuses in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.maze import MazeTeacherConfig
from pipeline.settings import resolve_request
from pipeline.teacher import RawLogits, Teacher
from shards.errors import UsageError
from shards.store.location import open_location
from shards.store.store import ShardStore
from tests.commands import call
from tests.pipeline.extract_cases import CONTEXT_LENGTH, ROW_LENGTH, WORDS, contents, save_tokenizer

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run_once(*words: object) -> tuple[int, str, str]:
        code = call("gdistill-extract", *words)
        out, err = capsys.readouterr()
        return code, out, err

    return run_once


def good(teacher: Path, corpus: Path, out: Path, *more: object) -> list[object]:
    """Words of a run that works."""
    words: list[object] = ["--corpus", f"text:{corpus}", "--teacher", teacher, "--out", out]
    words += ["--row-length", ROW_LENGTH, "--device", "cpu", "--batch-size", 4]
    for setting in ("corpus.document_separator=line", "store.rows_per_shard=64"):
        words += ["--set", setting]
    return [*words, *more]


def error_line(err: str) -> str:
    """The one line of an error; nothing else may look like one."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def test_a_run_ends_with_its_figures(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    code, out, _ = command(*good(teacher, corpus, tmp_path, "--seed", 5))
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    sizes = {name: len(data) for name, data in contents(tmp_path / "store").items()}
    chunks = [n for n in sizes if n.startswith(("train/", "validation/")) and "/c/" in n]
    size = sum(sizes[name] for name in chunks)
    assert summary["num_bytes"] == sum(sizes.values()) > size == summary["shard_bytes"] > 0
    assert summary["bytes_per_token"] == size / summary["num_tokens"]
    assert summary["fp16_ratio"] == pytest.approx(2 * len(WORDS) * summary["num_tokens"] / size)
    for words in ("bytes/token", "fp16 vectors", "seconds", "train", "tokens left over"):
        assert words in out
    # The resolved request lies beside its outputs.
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["seed"], written["teacher"]["location"]) == (5, str(teacher))
    assert written["codec"]["name"] == "posterior"
    code, out, _ = command(*good(teacher, corpus, tmp_path, "--seed", 5))
    assert code == 0 and "nothing was left to do" in out


def test_stage_1_alone_is_what_the_run_goes_on_from(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    """On a node of CPUs, where no weights lie; and the corpus may go when it is done."""
    shutil.copytree(teacher, tmp_path / "teacher")
    shutil.copy(corpus, tmp_path / "text.txt")
    words = good(tmp_path / "teacher", tmp_path / "text.txt", tmp_path / "out")
    words[1] = tmp_path / "text.txt"
    weights = tmp_path / "teacher/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    at = words.index("--device")
    code, out, err = command("tokens", *words[:at], *words[at + 4 :])
    assert code == 0 and " documents, " in out, err
    assert not (tmp_path / "out/store").exists()
    before = contents(tmp_path / "out/tokens")
    (tmp_path / "elsewhere").rename(weights)
    (tmp_path / "text.txt").unlink()
    code, _, err = command(*words)
    assert code == 0, err
    assert contents(tmp_path / "out/tokens") == before


def test_a_store_at_a_url_holds_the_same_bytes(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    url = f"memory://{tmp_path.name}/store"
    assert command(*good(teacher, corpus, tmp_path / "here"))[0] == 0
    words = good(teacher, corpus, tmp_path / "there", "--store", url)
    assert "would write" in command(*words, "--dry-run")[1]
    code, out, _ = command(*words)
    assert code == 0 and url in out
    assert not (tmp_path / "there" / "store").exists()
    place = open_location(url)
    remote = {name: place.read(name) for name in place.sizes()}
    assert remote == contents(tmp_path / "here" / "store")
    code, out, _ = command(*words, "--dry-run")
    assert code == 0 and "stage 2   done" in out


def test_plan_and_dry_run_touch_nothing(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    out = tmp_path / "out"
    plan = good(teacher, corpus, out, "--plan", "--rate", "1e6", "--tokens", "1e9")
    code, text, _ = command(*plan)
    assert code == 0 and "OpenWebText" in text and "FineWeb" in text
    code, text, _ = command(*good(teacher, corpus, out), "--dry-run")
    assert code == 0 and "would tokenize" in text and not out.exists()
    command(*good(teacher, corpus, out))
    before = contents(out)
    code, text, _ = command(*good(teacher, corpus, out), "--dry-run")
    assert code == 0 and "stage 1   done" in text and "stage 2   done" in text
    assert contents(out) == before


BAD: dict[str, tuple[list[object], str]] = {
    "no corpus": (["--corpus", None], "no corpus"),
    "unknown corpus": (["--corpus", "owtt"], "did you mean 'owt'"),
    "missing file": (["--corpus", "text:/nonexistent/x.txt"], "/nonexistent/x.txt"),
    "no teacher": (["--teacher", None], "no teacher"),
    "missing teacher": (["--teacher", "./nonexistent"], "no such teacher folder"),
    "no model": (["--teacher", "{folder}"], "without config.json"),
    "long rows": (["--row-length", CONTEXT_LENGTH + 1], f"at most {CONTEXT_LENGTH}"),
    "other tokenizer": (["--tokenizer", "{folder}/tokenizer"], "different vocabularies"),
    "unknown codec": (["--codec", "posteriour"], "did you mean 'posterior'"),
    "codec parameter": (["--set", "codec.num_entrys=3"], "did you mean 'num_entries'"),
    "unknown key": (["--set", "store.row=3"], "did you mean 'rows'"),
    "wrong type": (["--set", "store.rows=many"], "store.rows"),
    "mode": (["--mode", "serial"], "'serial'"),
    "dtype": (["--dtype", "float8"], "'float8'"),
    "GPU": (["--device", f"cuda:{torch.cuda.device_count()}"], "no such GPU"),
    "device": (["--device", "tpu9"], "unknown device"),
    "meta device": (["--device", "meta"], "device not supported"),
    "worker": (["--worker", 2], "belong together"),
    "worker number": (["--worker", 2, "--workers", 2], "no such worker"),
    "batch size": (["--batch-size", 0], "batch_size"),
    "temperature": (["--set", "sequential.temperature=0"], "temperature"),
    "idle setting": (["--set", "sequential.temperature=2"], "means nothing in parallel mode"),
    "chunks": (["--set", "store.rows_per_chunk=5"], "multiple"),
    "seed": (["--seed", -1], "seed"),
    "remote folder": (["--out", "s3://bucket/run"], "--store"),
    "unwritable": (["--out", "{folder}/file/out"], "cannot write there"),
    "rate": (["--plan", None, "--rate", "0"], "--rate"),
    "rate alone": (["--rate", "3"], "an option of --plan without it"),
    "endless corpus": (["--plan", None, "--tokens", "inf"], "--tokens"),
    "no number": (["--plan", None, "--tokens", "nan"], "--tokens"),
    "two plans": (["--plan", None, "--dry-run", None], "exclude each other"),
    "config file": (["--config", "/nonexistent.toml"], "cannot read the config file"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_requests_are_one_line_and_leave_nothing_behind(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path, case: str
) -> None:
    change, text = BAD[case]
    (tmp_path / "file").write_text("in the way")
    save_tokenizer(tmp_path / "tokenizer", [*WORDS, *(f"x{i}" for i in range(5))])
    words = good(teacher, corpus, tmp_path / "out")
    for name, value in zip(change[::2], change[1::2], strict=True):
        if name in words and name != "--set":
            at = words.index(name)
            del words[at : at + 2]
        if value is not None:
            words += [name, str(value).format(folder=tmp_path)]
        elif name in ("--plan", "--dry-run"):
            words.append(name)
    code, _, err = command(*words)
    assert code == 2
    assert text in error_line(err)
    assert not (tmp_path / "out/store").exists() and not (tmp_path / "out/tokens").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "no documents"),
        (b"\n\n \n", "no"),
        (b"w1 w2 \xff\xfe w3\n" * 40, "UTF-8"),
        (b"w1 w2 unknown-word\n" * 40, "tokenizer"),
        (b"w1 w2 w3\n", "row"),
    ],
)
def test_bad_corpora_are_one_line_and_leave_nothing_finished(
    command: Command, tmp_path: Path, teacher: Path, content: bytes, text: str
) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out"
    corpus.write_bytes(content)
    code, _, err = command(*good(teacher, corpus, out))
    assert code == 1
    assert text in error_line(err)
    assert not (out / "tokens").exists() and not (out / "store").exists()


def test_a_folder_of_foreign_files_is_not_taken_for_a_store(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("precious")
    code, _, err = command(*good(teacher, corpus, tmp_path))
    assert code == 1 and "no manifest" in error_line(err)
    assert (tmp_path / "store" / "thesis.tex").read_text() == "precious"


def test_nan_logits_name_row_and_position_and_leave_an_unfinished_store(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Teacher.forward

    def poisoned(self: Teacher, rows: torch.Tensor, row_ids: torch.Tensor, *rest: Any) -> RawLogits:
        raw = forward(self, rows, row_ids, *rest)
        hit = (row_ids == 9).nonzero()
        if len(hit):
            raw.logits[int(hit[0]), 3] = torch.nan
        return raw

    monkeypatch.setattr(Teacher, "forward", torch.inference_mode()(poisoned))
    code, _, err = command(*good(teacher, corpus, tmp_path))
    assert code == 1
    assert "train row 9, position 4" in error_line(err)
    assert ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    with pytest.raises(Exception, match="not complete"):
        ShardStore.open(tmp_path / "store")


def test_control_characters_and_repaired_text_are_counted(
    command: Command, tmp_path: Path, teacher: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(b"w1 w2 w3 w4\x0b w5 w6\n" * 30 + b"w1 \xff w2\n")
    words = good(teacher, corpus, tmp_path / "out", "--set", "corpus.on_bad_utf8=skip")
    code, out, err = command(*words)
    assert code == 0, err
    assert "control characters kept" in out and "1 documents of bad UTF-8" in out


def test_settings_come_from_file_options_and_overrides_in_that_order(
    tmp_path: Path, corpus: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'seed = 1\n[corpus]\nspec = "text:{corpus}"\nrow_length = 8\n[codec]\nname = "full"\n'
        '[teacher]\nlocation = "a"\ndtype = "bfloat16"\n[store]\nrows = 5\n'
    )
    options = {"seed": None, "teacher": {"location": "b", "dtype": None}, "codec": {"name": None}}
    request = resolve_request(tmp_path, options, ["store.rows=7", "seed=3"], file)
    settings = request.settings
    assert (settings.seed, settings.store.rows) == (3, 7)
    assert (settings.teacher.location, settings.teacher.dtype) == ("b", "bfloat16")
    assert request.codec.name == "full" and request.corpus.row_length == 8
    for given, message in (
        ({"teachers": {"dtype": "float32"}}, "did you mean 'teacher'"),
        ({"corpus": 3}, "expected a table"),
        ({"device": "cpu", "teacher": {"device_map": "auto"}}, r"exclude each other.*device_map"),
        ({"teacher": {"location": "a", "preset": "demo"}}, "--teacher-preset"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_request(tmp_path, given, [], file)


def test_every_codec_runs_from_the_command_line(
    command: Command, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    for codec in ("full", "quantized", "topk", "seeded", "hidden"):
        out = tmp_path / codec
        code, _, err = command(*good(teacher, corpus, out), "--codec", codec, "--rows", 8)
        assert code == 0, err
        assert ShardStore.open(out / "store").codec.name == codec


def test_maze_brings_its_own_teacher(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = MazeTeacherConfig(2, num_heads=2, hidden_size=32, num_steps=120, learning_rate=1e-2)
    monkeypatch.setattr("pipeline.maze.demo_teacher_config", lambda: small)
    words = ["--corpus", "maze:k4", "--teacher-preset", "demo", "--out", tmp_path]
    words += ["--device", "cpu", "--set", "corpus.limit_documents=50"]
    code, _, err = command(*words)
    assert code == 0, err
    store = ShardStore.open(tmp_path / "store")
    maze = json.loads(store.files("corpus")["maze.json"])
    assert len(maze["paths"]) == 4 and len(maze["teacher_probabilities"]) == 4
    assert store.manifest.vocab_size == 6 and store.manifest.row_length == 11
    rows = store.split("train").read_rows(0, 50)
    # The teacher has learnt the maze: all but the choice between 4 paths is certain.
    assert np.exp(rows["token_log_probs"].sum(1)).mean() == pytest.approx(0.25, abs=0.05)
    shutil.rmtree(tmp_path / "store")
    assert command(*words)[0] == 0, "the teacher is not trained again"
