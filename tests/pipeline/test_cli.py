"""`gdistill-extract` as users type it: what it does and plans, and what is refused before stage 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedConfig, T5Config

from pipeline.extract import Extractor
from pipeline.maze import TEACHERS, MazeTeacherConfig
from pipeline.plan import count_tokens, measured_bytes_per_token, plan_lines
from pipeline.run import _check_same_tokens, check_teacher, known_teacher, public_source, run_extraction
from pipeline.settings import ExtractRequest, PlanOptions, Worker, resolve_request
from pipeline.teacher import RawLogits, Teacher
from pipeline.tokens.tokenizer import load_tokenizer
from shards.atomic import file_claim
from shards.codec.protocol import CODECS, make_codec
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import PretrainedFiles
from shards.store.location import open_location
from shards.store.store import ShardStore
from tests.commands import call
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked, Patch
from tests.pipeline.extract_cases import CONTEXT_LENGTH, ROW_LENGTH, VOCAB_SIZE, WORDS, contents, options, run

Words = Callable[..., list[Any]]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def words(teacher: Path, corpus: Path) -> Words:
    """Words of a run that works, into a folder, and more of them."""

    def words_of_run(out: Path, *more: object, corpus: Path = corpus) -> list[Any]:
        found: list[Any] = ["--corpus", f"text:{corpus}", "--teacher", teacher, "--out", out]
        found += ["--row-length", extract_cases.ROW_LENGTH, "--device", "cpu", "--batch-size", 4]
        found += ["--set", "corpus.document_separator=line", "--set", "store.rows_per_shard=64"]
        return [*found, *more]

    return words_of_run


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run_once(*words: object) -> tuple[int, str, str]:
        return call("gdistill-extract", *words), *capsys.readouterr()

    return run_once


@pytest.fixture
def extract(command: Command, words: Words) -> Command:
    """Run the command that works, and more words."""
    return lambda *more, **named: command(*words(*more, **named))


def error_line(err: str) -> str:
    """The one line of an error; nothing else may look like one."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def require_nothing_made(out: Path) -> None:
    assert not (out / "tokens").exists() and not (out / "store").exists()


def test_a_run_ends_with_its_figures(extract: Command, tmp_path: Path, teacher: Path) -> None:
    code, out, _ = extract(tmp_path, "--seed", 5)
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    sizes = {name: len(data) for name, data in contents(tmp_path / "store").items()}
    chunks = [n for n in sizes if n.startswith(("train/", "validation/")) and "/c/" in n]
    size = sum(sizes[name] for name in chunks)
    assert summary["num_bytes"] == sum(sizes.values()) > size == summary["shard_bytes"] > 0
    num_rows = sum(ShardStore.open(tmp_path / "store").manifest.splits.values())
    assert (summary["num_rows"], summary["fp16_bytes_per_token"]) == (num_rows, 2 * len(WORDS))
    assert summary["bytes_per_token"] == size / summary["num_tokens"]
    assert summary["fp16_ratio"] == pytest.approx(2 * len(WORDS) * summary["num_tokens"] / size)
    record = json.loads((tmp_path / "tokens/tokens.json").read_text())["splits"]["train"]
    left_over = f"{record['num_dropped_tokens']} tokens left over"
    for text in ("bytes/token", "fp16 vectors", "seconds", "train", left_over):
        assert text in out
    # The resolved request lies beside its outputs.
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["seed"], written["teacher"]["location"]) == (5, str(teacher))
    assert written["codec"]["name"] == "posterior"
    code, out, _ = extract(tmp_path, "--seed", 5)
    assert code == 0 and "nothing was left to do" in out


def test_stage_1_alone_is_what_the_run_goes_on_from(
    command: Command, words: Words, tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    """On a node of CPUs, where no weights lie; and the corpus may go when it is done."""
    shutil.copytree(teacher, tmp_path / "teacher")
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(b"w1 <eos> w2\x0b w3\n\nw1 \xff w2\n" + corpus.read_bytes())
    given = words(out, "--set", "corpus.on_bad_utf8=skip", "--set", "corpus.special_tokens=token")
    given[1:4:2] = text, tmp_path / "teacher"
    weights = tmp_path / "teacher/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    at = given.index("--device")
    code, said, err = command("tokens", *given[:at], *given[at + 4 :])
    assert code == 0, err
    for count in ("60 documents", "1 empty documents", "1 documents of bad UTF-8", "1 control characters kept"):
        assert count in said
    assert "1 special tokens spelled out" in said
    assert not (out / "store").exists()
    before = contents(out / "tokens")
    (tmp_path / "elsewhere").rename(weights)
    text.unlink()
    code, _, err = command(*given)
    assert code == 0, err
    assert contents(out / "tokens") == before


def test_a_store_at_a_url_holds_the_same_bytes(extract: Command, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/store"
    assert extract(tmp_path / "here")[0] == 0
    there = tmp_path / "there", "--store", url
    assert "all of it is to do" in extract(*there, "--plan")[1]
    code, out, _ = extract(*there)
    assert code == 0 and url in out
    assert not (tmp_path / "there" / "store").exists()
    place = open_location(url)
    remote = {name: place.read(name) for name in place.sizes()}
    assert remote == contents(tmp_path / "here" / "store")
    code, out, _ = extract(*there, "--plan")
    assert code == 0 and f"{url}: it is done" in out


def test_a_plan_touches_nothing_and_says_what_is_done(extract: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, _ = extract(out, "--plan", "--rate", "1e6", "--tokens", "1e9")
    assert code == 0 and "1,000,000,000  as given" in text and "all of it is to do" in text and not out.exists()
    extract(out)
    before = contents(out)
    code, text, _ = extract(out, "--plan")
    assert code == 0 and "counted in" in text and "it is done" in text and contents(out) == before
    next((out / "store/ledger").rglob("*.json")).unlink()
    assert "1 shards are not done" in extract(out, "--plan")[1]


OF_ENGINE: dict[str, Any] = {"num_top": 0, "url": "localhost:8000"}
BAD: dict[str, tuple[list[object], str]] = {
    "no corpus": (["--corpus", None], "no corpus"),
    "unknown corpus": (["--corpus", "owtt"], "did you mean 'owt'"),
    "missing file": (["--corpus", "text:/nonexistent/x.txt"], "/nonexistent/x.txt"),
    "no teacher": (["--teacher", None], "no teacher"),
    "unknown codec": (["--codec", "posteriour"], "did you mean 'posterior'"),
    "codec parameter": (["--set", "codec.num_entrys=3"], "did you mean 'num_entries'"),
    "unknown key": (["--set", "store.row=3"], "did you mean 'rows'"),
    "mode": (["--mode", "serial"], "'serial'"),
    "GPU": (["--device", f"cuda:{torch.cuda.device_count()}"], "no such GPU"),
    "worker": (["--worker", 2], "belong together"),
    "worker number": (["--worker", 2, "--workers", 2], "no such worker"),
    "temperature": (["--set", "sequential.temperature=0"], "[sequential.temperature]; got 0"),
    "rows": (["--rows", 0], "store.rows"),
    "idle setting": (["--set", "sequential.temperature=2"], "means nothing in parallel mode"),
    "seed": (["--seed", -1], "seed"),
    "remote folder": (["--out", "s3://bucket/run"], "--store"),
    "unwritable": (["--out", "{folder}/file/out"], "cannot write there"),
    "no such store": (["--store", "foo://bucket/store"], "foo"),
    "file of a store": (["--store", "{folder}/file"], "the store is a folder"),
    "rate alone": (["--rate", "3"], "an option of --plan without it"),
    "plan of an engine": (["--teacher", None, "--engine", "http://x", "--plan", None], "runs here [--engine]"),
    "plan of files": (["--corpus", None, "--from-logprobs", "a", "--plan", None], "runs here [--from-logprobs]"),
    "two corpora": (["--from-logprobs", "a.jsonl"], "their own corpus"),
    **{name: (["--set", f"engine.{name}={got}"], f"[engine.{name}]; got {got}") for name, got in OF_ENGINE.items()},
    "config file": (["--config", "/nonexistent.toml"], "cannot read the config file"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_requests_are_one_line_and_leave_nothing_behind(
    command: Command, words: Words, tmp_path: Path, case: str
) -> None:
    change, text = BAD[case]
    (tmp_path / "file").write_text("in the way")
    given = words(tmp_path / "out")
    for name, value in zip(change[::2], change[1::2], strict=True):
        if name in given and name != "--set":
            at = given.index(name)
            del given[at : at + 2]
        if value is not None:
            given += [name, str(value).format(folder=tmp_path)]
        elif name == "--plan":
            given.append(name)
    code, _, err = command(*given)
    assert code == 2
    assert text in error_line(err)
    require_nothing_made(tmp_path / "out")
    assert (tmp_path / "file").read_text() == "in the way"


def test_nan_logits_name_row_and_position_and_leave_an_unfinished_store(
    extract: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
    forward = Teacher.forward

    def poisoned(self: Teacher, rows: torch.Tensor, row_ids: torch.Tensor, *rest: Any) -> RawLogits:
        raw = forward(self, rows, row_ids, *rest)
        hit = (row_ids == 9).nonzero()
        if len(hit):
            raw.logits[int(hit[0]), 3] = torch.nan
        return raw

    monkeypatch.setattr(Teacher, "forward", torch.inference_mode()(poisoned))
    code, _, err = extract(tmp_path)
    assert code == 1
    assert "train row 9, position 4" in error_line(err)
    assert ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    with pytest.raises(Exception, match="not complete"):
        ShardStore.open(tmp_path / "store")


def test_settings_come_from_file_options_and_overrides(tmp_path: Path, corpus: Path, monkeypatch: Patch) -> None:
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
    file.write_text(f'[corpus]\nsource = "text:absent.txt"\nvalidation_source = "{corpus}"\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = resolve_request(Path("~/run"), {"corpus": {"spec": f"text:{corpus}"}}, [], file)
    assert (chosen.corpus.source, chosen.out) == (f"text:{corpus}", tmp_path / "run")
    assert chosen.corpus.validation_source == f"text:{corpus}"
    assert resolve_request(tmp_path, {"corpus": {"spec": "owt", "source": "hf:a"}}).corpus.source == "hf:a"
    unset = resolve_request(tmp_path, {"corpus": {"source": str(corpus)}})
    for context, length in ((512, 512), (131_072, 1024), (None, 1024)):
        assert unset.with_row_length(context).corpus.row_length == length
    for given, message in (
        ({"teachers": {"dtype": "float32"}}, "did you mean 'teacher'"),
        ({"corpus": 3}, "expected a table"),
        ({"device": "cpu", "teacher": {"device_map": "auto"}}, r"exclude each other.*device_map"),
        ({"teacher": {"location": "a", "preset": "demo"}}, "--teacher-preset"),
        ({"mode": "sequential", "codec": {"name": "hidden"}, "sequential": {"nucleus_p": 0.9}}, "distribution alone"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_request(tmp_path, given, [], file)


def test_every_option_reaches_the_run(command: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    hub: list[object] = []
    files = PretrainedFiles("t", tmp_path, PreTrainedConfig())
    monkeypatch.setattr("pipeline.run.find_pretrained", lambda *of, **how: hub.append((*of, how)) or files)
    seen: list[tuple[ExtractRequest, Worker, bool]] = []
    monkeypatch.setattr(
        "pipeline.cli.run", lambda asked, by, tokens_only=False: seen.append((asked, by, tokens_only)) or []
    )
    (tmp_path / "a.toml").write_text("[corpus]\nlimit_documents = 6\n")
    of_hub = {"revision": "v2", "trust_remote_code": True}
    shared = ["--out", tmp_path, "--teacher", "t", "--tokenizer", "u", "--row-length", 9, "--set", "corpus.bos_id=2"]
    shared += ["--set", "teacher.revision=v2", "--set", "teacher.trust_remote_code=true"]
    stored = ["--store", "s", "--codec", "full", "--seed", 4, "--worker", 1, "--workers", 2]
    how = ["--batch-size", 3, "--dtype", "bfloat16", "--device", "cuda:1", "--compile", "--strict"]
    text = [*shared, "--corpus", "maze:k4", "--rows", 5, "--config", tmp_path / "a.toml"]
    for words in (
        [*text, *stored, *how, "--mode", "sequential"],
        ["tokens", *text],
        ["complete", *shared, *stored, "--prompts", "a.jsonl", "--temperature", 0.5],
    ):
        assert command(*words)[0] == 0, words
    assert [tokens_only for *_, tokens_only in seen] == [False, True, False]
    for request, *_ in seen:
        place = request.settings.teacher.location, request.settings.teacher.tokenizer
        assert known_teacher(request, weights=True) == files and hub[-1] == ("t", {**of_hub, "weights": True})
        assert (*place, request.out, request.corpus.row_length, request.corpus.bos_id) == ("t", "u", tmp_path, 9, 2)
    (whole, process, _), (tokens, *_), (complete, answering, _) = seen
    for request, worker in ((whole, process), (complete, answering)):
        assert (request.store, request.codec.name, worker) == ("s", "full", Worker(1, 2))
        assert (request.settings.seed, request.settings.mode) == (4, "sequential")
    assert whole.row_limits == tokens.row_limits == {"train": 5, "validation": 5}
    assert whole.corpus.source == tokens.corpus.source == "maze:k4"
    assert whole.corpus.limit_documents == tokens.corpus.limit_documents == 6
    settings, of_teacher = whole.settings, whole.settings.teacher
    assert (settings.batch_size, settings.device, settings.strict) == (3, "cuda:1", True)
    assert (of_teacher.dtype, of_teacher.compiled) == ("bfloat16", True)
    assert complete.settings.sequential.temperature == 0.5
    assert (complete.corpus.source, complete.corpus.packing) == ("chat:a.jsonl", "prompts")


def test_every_codec_runs_from_the_command_line(extract: Command, tmp_path: Path, teacher: Path) -> None:
    """With a padded teacher whose tokenizer lies elsewhere; the report says what was left out."""
    padded = extract_cases.save_teacher(tmp_path / "padded", VOCAB_SIZE + 3)
    for file in padded.glob("*token*"):
        file.unlink()
    for codec in ("full", "quantized", "topk", "seeded", "hidden"):
        out = tmp_path / codec
        words = ["--codec", codec, "--rows", 8, "--teacher", padded, "--tokenizer", teacher]
        code, said, err = extract(out, *words)
        assert code == 0, err
        assert [line.split()[0] for line in said.splitlines() if "cut there, as asked" in line] == ["train"]
        assert f" {VOCAB_SIZE + 3}, the last 3 of no token" in said
        assert ShardStore.open(out / "store").codec.name == codec


def test_maze_brings_its_own_teacher(command: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    small = MazeTeacherConfig(2, num_heads=2, hidden_size=32, num_steps=120, learning_rate=1e-2)
    monkeypatch.setitem(TEACHERS, "demo", small)
    held = list[tuple[str, bool]]()
    monkeypatch.setattr(
        "pipeline.run.file_claim", lambda at, wait: held.append((at.name, wait)) or file_claim(at, wait)
    )
    words = ["--corpus", "maze:k4", "--teacher-preset", "demo", "--out", tmp_path]
    words += ["--device", "cpu", "--set", "corpus.limit_documents=50", "--set", "corpus.seed=3"]
    code, _, err = command(*words)
    assert code == 0, err
    store = ShardStore.open(tmp_path / "store")
    maze = json.loads(store.files("corpus")["maze.json"])
    assert len(maze["paths"]) == 4 and len(maze["teacher_probabilities"]) == 4
    assert maze["seed"] == 3
    assert store.manifest.vocab_size == 6 and store.manifest.row_length == 11
    rows = store.split("train").read_rows(0, 50)
    # The teacher has learnt the maze: all but the choice between 4 paths is certain.
    assert np.exp(rows["token_log_probs"].sum(1)).mean() == pytest.approx(0.25, abs=0.05)
    shutil.rmtree(tmp_path / "store")
    assert command(*words)[0] == 0, "the teacher is not trained again"
    assert held.count((".teacher.lock", True)) == 2, "nor by two workers at once"
    assert json.loads((tmp_path / "teacher/training.json").read_text())["config"]["num_steps"] == 120


# What a run is refused for is said before stage 1, which may take hours; what ends it later.


def refused(out: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(GdistillError, match=match):
        run(out, given)
    require_nothing_made(out)


def test_teachers_that_cannot_score(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "intermediate_size": 16}
    scaled = GraniteConfig(**sizes, **heads, logits_scaling=2.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GraniteForCausalLM(scaled).save_pretrained(tmp_path / "scaled")
        MambaForCausalLM(MambaConfig(**sizes, state_size=4)).save_pretrained(tmp_path / "mamba")
    for name in ("scaled", "mamba"):
        extract_cases.save_tokenizer(tmp_path / name)
    tensors = load_file(teacher / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = torch.nan
    nan = shutil.copytree(teacher, tmp_path / "nan") / "model.safetensors"
    save_file(tensors, nan, metadata={"format": "pt"})
    shutil.copytree(teacher, tmp_path / "plain")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("scaled", {"codec": {"name": "hidden"}}, "changes its logits after"),
        ("mamba", {"mode": "sequential"}, "keeps no key-value cache"),
        ("nan", {}, r"weights hold NaN.*h\.1\.mlp\.c_fc\.bias"),
        ("plain", {"teacher": {"attention": "foo"}}, r"attention kernel cannot.*got foo"),
    ]
    for name, changes, match in cases:
        refused(tmp_path / "out", options(tmp_path / name, corpus, **changes), match)


WAYS: dict[str, Callable[[ExtractRequest], object]] = {
    "run": lambda request: run_extraction(request, Worker()),
    "--plan": lambda request: plan_lines(request, PlanOptions(tokens=1e6), Worker()),
}


def test_a_run_and_a_plan_refuse_alike(tmp_path: Path, asked: Asked) -> None:
    two_swapped = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    other = extract_cases.save_tokenizer(tmp_path / "other", two_swapped)
    wide = extract_cases.save_tokenizer(tmp_path / "wide", [*WORDS, *(f"x{i}" for i in range(64))])
    maze, none = asked(), asked()
    maze["corpus"], none["teacher"] = {"spec": "maze:k4"}, {}
    too_wide = rf"a tokenizer of {len(WORDS) + 64}.*teacher's {VOCAB_SIZE}"
    changes: dict[str, dict[str, Any]] = {
        "of another family": {"teacher": {"tokenizer": str(other)}},
        too_wide: {"teacher": {"tokenizer": str(wide)}},
        "no such tokenizer": {"teacher": {"tokenizer": "./nowhere"}},
        r"store\.rows_per_shard.*got 15.*multiple of 8": {"store": {"rows_per_shard": 15}},
        "context": {"corpus": {"row_length": CONTEXT_LENGTH + 1}},
        r"no revisions.*teacher\.revision.*'main'": {"teacher": {"revision": "main"}},
    }
    cases = {match: asked(**change) for match, change in changes.items()}
    cases |= {"does not know the moves.*leave --teacher out": maze, "no teacher": none}
    for way, (match, given) in product(WAYS, cases.items()):
        request = resolve_request(tmp_path / way, given)
        with pytest.raises(UsageError, match=match):
            WAYS[way](request)
        require_nothing_made(tmp_path / way)
    # One id in a hundred may be another token: a special one that was added, say.
    words = [*WORDS[:2], *(f"x{i}" for i in range(2, 100))]
    lists = {"own": words, "near": [*words[:99], "y"], "far": [*words[:98], "y", "z"]}
    own, near, far = (load_tokenizer(extract_cases.save_tokenizer(tmp_path / n, each)) for n, each in lists.items())
    _check_same_tokens(near, own, "here")
    with pytest.raises(UsageError, match=r"2 ids that mean other tokens: 98 is 'y'.*expected 'x98'"):
        _check_same_tokens(far, own, "here")


def test_the_manifest_names_the_corpus_and_not_its_place(finished: Path, teacher: Path, corpus: Path) -> None:
    manifest = (finished / "store" / "manifest.json").read_text()
    for place in (finished, corpus.parent, teacher.parent):
        assert str(place) not in manifest
    store = ShardStore.open(finished / "store")
    assert store.manifest.tokens["corpus"] == f"text:{corpus.name}"
    public = {"jsonl:/home/me/a.jsonl#text": "jsonl:a.jsonl#text", "hf:/home/me/data": "hf:data"}
    public |= {source: source for source in ("hf:org/name:config", "maze", "maze:k4")}
    assert {source: public_source(source) for source in public} == public


def test_a_shard_that_goes_missing_meanwhile_is_no_success(tmp_path: Path, asked: Asked, monkeypatch: Patch) -> None:
    extract = Extractor.run

    def losing(self: Extractor, *arguments: Any) -> None:
        extract(self, *arguments)
        next((tmp_path / "store" / "ledger").rglob("*.json")).unlink()

    monkeypatch.setattr(Extractor, "run", losing)
    with pytest.raises(GdistillError, match=r"went missing.*same command again"):
        run(tmp_path, asked())


def planned(out: Path, given: dict[str, Any], **figures: float) -> dict[str, str]:
    """Label -> the rest of its line."""
    lines = plan_lines(resolve_request(out, given), PlanOptions(**figures), Worker())
    return {line[:10].strip(): " ".join(line[10:].split()) for line in lines}


def counted(out: Path, given: dict[str, Any]) -> tuple[float, str, float]:
    request = resolve_request(out, given)
    files = known_teacher(request)
    return count_tokens(check_teacher(request, files)[0], files)


def test_figures_out_of_range_and_unreadable_rates_are_refused_by_name(tmp_path: Path, asked: Asked) -> None:
    rates = ["{", "[]", '{"tokens_per_second": null}']
    for value in (0.0, -1.0, float("inf"), float("nan")):
        rates.append(json.dumps({"tokens_per_second": value}))
        for name in ("rate", "tokens", "price"):
            with pytest.raises(UsageError, match=rf"out of range \[--plan\.{name}\]"):
                PlanOptions(**{name: value})
    absent = asked(corpus={"spec": "text:absent.txt"})
    with pytest.raises(UsageError, match=r"cannot be counted here.*absent\.txt.*--tokens"):
        planned(tmp_path, absent)
    assert planned(tmp_path, absent, tokens=1e9)["tokens"].startswith("1,000,000,000 as given")
    for text in rates:
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(GdistillError, match=r"cannot read an earlier run's rate.*--rate"):
            planned(tmp_path, asked())


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, corpus: Path) -> None:
    T5Config(vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "model")
    extract_cases.save_tokenizer(tmp_path / "model")
    with pytest.raises(UsageError, match="causal language model"):
        planned(tmp_path, options(tmp_path / "model", corpus))


def test_a_plan_by_hand_loads_no_teacher_and_writes_nothing(tmp_path: Path, asked: Asked, monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipeline.teacher.load_causal_model", lambda *_, **__: pytest.fail("the teacher was loaded"))
    monkeypatch.setattr("pipeline.plan.measured_bytes_per_token", lambda *_: 50.0)
    plan = planned(tmp_path / "out", asked(), rate=1000.0, tokens=7_200_001.0, price=3.0)
    assert not (tmp_path / "out").exists()
    # GPT-2: embeddings, 2 blocks, final norm; D = 16, head tied.
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 4 * 16
    parameters = (VOCAB_SIZE + extract_cases.CONTEXT_LENGTH) * 16 + 2 * block + 32
    assert plan["teacher"].startswith(f"{parameters:,} parameters") and f"V = {VOCAB_SIZE}" in plan["teacher"]
    assert plan["tokens"] == "7,200,001 as given; 600,001 rows of 12"
    assert plan["stage 2"].startswith("2 hours at 1,000 tokens/s") and plan["price"].startswith("6 at 3")
    assert plan["posterior"] == "360.0 MB 50.0 B/token, the codec asked for"
    assert plan["full"] == "360.0 MB 50.0 B/token" and set(CODECS) <= set(plan)
    for dtype, peak in (("float32", 67e12), ("bfloat16", 989e12)):  # two FLOPs for each weight, 40% of the peak
        rate = planned(tmp_path, asked(teacher={"dtype": dtype}), tokens=1.0)["stage 2"]
        assert f"hours at {0.4 * peak / (2 * parameters):,.0f} tokens/s of one H100" in rate and dtype in rate


def test_tokens_are_estimated_then_counted(tmp_path: Path, asked: Asked) -> None:
    estimate, origin, tokens_per_second = counted(tmp_path, asked())
    assert "estimated from 60 of 60 documents" in origin and tokens_per_second > 0
    hours, _, _, _, _, _, rate = planned(tmp_path, asked())["stage 1"].split()[:7]
    assert float(hours) * 3600 * float(rate.replace(",", "")) == pytest.approx(estimate, rel=0.01)
    run(tmp_path, asked())
    exact, origin, _ = counted(tmp_path, asked())
    assert "counted" in origin and exact % ROW_LENGTH == 0
    # All 54 training documents are in the sample; what differs is the remainder of the packing.
    assert abs(estimate - exact) < 0.1 * exact
    summary = json.loads((tmp_path / "summary.json").read_text())
    rate = planned(tmp_path, asked())["stage 2"]
    assert f"{summary['tokens_per_second']:,.0f} tokens/s of one process, measured by the run" in rate
    assert "1,000 tokens/s of one process, as given" in planned(tmp_path, asked(), rate=1000.0)["stage 2"]


def test_every_split_and_every_part_of_a_corpus_is_counted(tmp_path: Path, teacher: Path, monkeypatch: Patch) -> None:
    """One document in two splits, all of it validation, and short documents before long ones."""
    (tmp_path / "one.txt").write_text(" ".join(f"w{i % 21}" for i in range(3000)))
    lines = ["w1 w2 w3"] * 400 + [" ".join(["w4"] * 60)] * 400
    (tmp_path / "many.txt").write_text("\n".join(lines) + "\n")
    every_line = sum(len(line.split()) + 1 for line in lines)
    # Of a document's 8,000 characters 740 are looked at: ten times its 21 words.
    monkeypatch.setattr("pipeline.plan.DOCUMENT_CHARACTERS", 740)
    cases = [("one.txt", 0.1, "concat", 3000), ("one.txt", 1.0, "concat", 3000)]
    cases += [("many.txt", 0.3, "wrap", every_line * ROW_LENGTH / (ROW_LENGTH - 2))]
    cases += [("many.txt", 0.3, "pad", 800 * ROW_LENGTH), ("many.txt", 0.3, "concat", every_line)]
    given: dict[str, Any] = {}
    for name, fraction, packing, expected in cases:
        given = options(teacher, tmp_path / name, corpus={"validation_fraction": fraction, "packing": packing})
        found, origin, _ = counted(tmp_path, given)
        assert found == pytest.approx(expected, rel=0.02)
        # Of 800 documents not all are read, but a padded one is a row whatever it holds.
        assert ("+-" in origin) == (name == "many.txt" and packing != "pad")
    limited, _, _ = counted(tmp_path, {**given, "store": {"rows": 7}})
    assert limited == 2 * 7 * ROW_LENGTH
    (tmp_path / "few.txt").write_text("w1 w2\n\n" * 10)  # of a blank document nothing is stored
    corpus = {"validation_documents": 8, "separate_validation": False}
    assert counted(tmp_path, options(teacher, tmp_path / "few.txt", corpus=corpus))[0] == 6 * 3 + 4 * 2


def test_neighbours_that_are_alike_widen_the_error(tmp_path: Path, teacher: Path, monkeypatch: Patch) -> None:
    """Two blocks of equal documents of 3 and of 7 tokens: a hundred documents tell as much as two do."""
    (tmp_path / "a.txt").write_text("w1 w2\n" * 88 + "w1 w2 w3 w4 w5 w6\n" * 32)
    monkeypatch.setattr("pipeline.plan.SAMPLE_BLOCKS", 2)
    found, origin, _ = counted(tmp_path, options(teacher, tmp_path / "a.txt", corpus={"validation_fraction": 0.0}))
    share = 2.13 * stdev([3, 7]) / 2**0.5 / fmean([3, 7])
    assert found == pytest.approx(5 * 120)
    assert f"+- {share:.1%} from 64 of 120 documents" in origin


def test_a_teacher_that_writes_is_planned_as_it_is_run(tmp_path: Path) -> None:
    """It writes as many training rows as asked for; of validation no more than there are, but for
    a number of its own."""
    given: dict[str, Any] = {"corpus": {"spec": "maze:k4"}, "mode": "sequential"}
    for store, rows in (
        ({"rows": 800}, 800 + 500),
        ({"rows": 3000}, 3000 + 500),
        ({"rows": 10, "validation_rows": 600}, 10 + 600),
        ({}, 2000 + 500),
    ):
        plan = planned(tmp_path, {**given, "store": store})
        assert plan["tokens"] == f"{rows * 11:,} one row a document; {rows:,} rows of 11"
        assert plan["teacher"] == f"{16 * 8 * 128**2:,} parameters: maze teacher (full), V = 6"
    asked = {**given, "store": {"rows": 9}}
    assert resolve_request(tmp_path, asked).stored_rows("train", 0) == 0
    asked["corpus"] = {"spec": "chat:a.jsonl", "packing": "prompts"}
    assert resolve_request(tmp_path, asked).stored_rows("train", 4) == 4, "an answer has a prompt"


def test_codec_sizes_are_those_of_real_shards() -> None:
    # 2 V bytes that hardly compress, and some bytes for the token itself.
    assert 0.85 * 2000 < measured_bytes_per_token(make_codec("full"), 1000, 8) < 1.05 * 2000 + 20
    assert 230 < measured_bytes_per_token(make_codec("hidden"), 1000, 256) < 290
    usual = measured_bytes_per_token(make_codec("posterior"), 50257, 8)
    assert usual == pytest.approx(111, rel=0.1), "README's bytes a token"
