"""Every benchmark at a toy shape, jobs side by side, plans of the quality bench, and records."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_checks, gpu_suite, jobs, parity
from benchmarks.jobs import Job, run_jobs, run_visibly, script, share_of_training
from benchmarks.quality import stories
from benchmarks.quality.__main__ import link_teacher
from benchmarks.quality.plan import TEACHER, Plan, Recipe, read_plan
from benchmarks.quality.stories import StoriesBench
from shards.errors import GdistillError, Stopped, UsageError
from tests.trainer.backbone_cases import write_backbone
from trainer.initial_weights import network_settings
from trainer.students.registry import MDLM
from trainer.training.settings import compose_run, read_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_gpu_suite_at_toy_shape(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert all(check["passed"] for check in record["checks"].values())
    names = ("keyed noise", "categorical draws", "conditioner", "flex", "step")
    assert all(any(key.startswith(name) for key in record["checks"]) for name in names)
    assert record["left_out_for_time"] == [] and len(record["bars"]) == 5
    page = out.with_suffix(".md").read_text()
    assert "not measured" not in page and page.count("| yes |") + page.count("| NO |") >= 5


def test_gpu_suite_keeps_what_it_has_when_a_part_and_a_check_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    wrong = {"step": {"error": float("nan"), "tolerance": 1e-5, "passed": False}}
    part = {"noise in memory": {"time_ratio": 0.4}}
    monkeypatch.setattr(gpu_suite, "check_everything", lambda *_: wrong)
    monkeypatch.setattr(gpu_suite, "run_benchmark", lambda *_, **__: part)
    for name in ("training_throughput", "extraction", "first_hitting", "block_training"):
        monkeypatch.setattr(gpu_suite, name, full)
    out = tmp_path / "suite.json"
    with pytest.raises(GdistillError, match="parts of the suite failed"):
        gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert record["failures"][0] == "check step" and "extraction" in record["failures"]
    assert record["checks"]["step"]["error"] == "nan"
    assert "OutOfMemoryError: CUDA out of memory" in record["extraction"]["error"]
    assert "Failed: check step," in out.with_suffix(".md").read_text()
    with pytest.raises(UsageError, match=r"--shape\]; got foo; expected paper or toy"):
        gpu_suite.main(shape="foo", device="cpu", out=tmp_path / "a.json")


def test_a_check_that_cannot_run_has_failed_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_checks, "check_attention", broken)
    monkeypatch.setattr(gpu_checks, "check_conditioner", lambda *_: {})
    checks = gpu_checks.check_everything(97, torch.device("cpu"))
    failed = [name for name, check in checks.items() if not check["passed"]]
    assert failed == ["flex attention"] and "no such kernel" in checks["flex attention"]["error"]


CASES = [
    *((parity.diffusion_case, name) for name in parity.DIFFUSION_CASES),
    *((parity.sampling_case, name) for name in parity.SAMPLING_CASES),
    *((case,) for case in (parity.n_minus_2_case, parity.autoregressive_case, parity.training_case)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0].__name__, *case[1:]]))
def test_a_pass_is_the_authors(golden: Path, case: tuple[Any, ...]) -> None:
    compare, *names = case
    comparisons = compare(golden, *names)
    assert comparisons
    assert not [c for c in comparisons if not c.passed]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of the project, as shell scripts."""
    for name, code in (("good", "exit 0"), ("bad", "echo first; echo it broke; exit 3")):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{code}\n")
        file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    return tmp_path


def job(scripts: Path, name: str) -> Job:
    return Job(name, (name,), scripts / "logs" / f"{name}.log", lambda: 0.0)


def test_a_job_that_fails_ends_all_with_its_last_line(scripts: Path) -> None:
    told: list[float] = []
    run_jobs([job(scripts, "good"), job(scripts, "good")], 1, lambda share, _: told.append(share))
    assert told[-1] == 1.0 and told == sorted(told)
    (scripts / "good").write_text("#!/bin/sh\nexec sleep 600\n")  # is ended, not waited for
    both = [job(scripts, "good"), job(scripts, "bad")]
    with pytest.raises(GdistillError, match=r"bad failed with exit code 3.*got it broke") as caught:
        run_jobs(both, 2, lambda *_: None)
    assert caught.value.where.endswith("bad.log")
    with pytest.raises(Stopped, match="SIGTERM"):
        run_jobs(both[:1], 1, lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(GdistillError, match="exit code 3"):
        run_visibly("bad", ("bad",))
    with pytest.raises(UsageError, match="gdistill-nothing"):
        script("gdistill-nothing")


def test_jobs_share_the_machines_threads(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that spin at a barrier would hold the core that another job's thread needs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    (scripts / "good").write_text("#!/bin/sh\necho $OMP_NUM_THREADS threads, $OMP_WAIT_POLICY\n")
    run_jobs([job(scripts, "good")], 3, lambda *_: None)
    assert (scripts / "logs" / "good.log").read_text() == "4 threads, passive\n"


def test_a_trainings_share_is_of_its_last_whole_line(tmp_path: Path) -> None:
    share = share_of_training(tmp_path / "metrics.jsonl")
    assert share() == 0.0
    lines = [json.dumps({"step": step, "num_steps": 40}) for step in (1, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert share() == 0.25


def test_plan_mistakes_and_order() -> None:
    with pytest.raises(UsageError, match="one name"):
        Plan("maze", (), (Recipe("a"), Recipe("a")))
    with pytest.raises(UsageError, match=r"no such recipe \[a\]; got 'b'"):
        Plan("maze", (), (Recipe("a", init_from="b"),))
    plan = Plan("maze", (), (Recipe("tuned", init_from="plain"), Recipe("plain")), seeds=(3,))
    assert [run.folder for run in plan.runs] == ["plain-seed3", "tuned-seed3"]
    command = plan.runs[1].command(plan, Path("store"), Path("home"))
    circle = (Recipe("a", init_from="b"), Recipe("b", init_from="a"))
    with pytest.raises(UsageError, match="circle"):
        _ = Plan("maze", (), circle).runs
    chain = (Recipe("c", init_from="b"), Recipe("b", init_from="a"), Recipe("a"))
    assert [run.recipe.name for run in Plan("maze", (), chain, seeds=(1,)).runs] == ["a", "b", "c"]
    assert command[command.index("--init-from") + 1] == str(Path("home/plain-seed3"))


def test_students_may_begin_as_the_teacher(tmp_path: Path) -> None:
    """It is nobody's student: it comes before all of them, whatever the seed."""
    adopted = Recipe("adopted", init_from=TEACHER)
    tuned, other = Recipe("tuned", init_from="adopted"), Recipe("other")
    plan = Plan("stories", (), (tuned, adopted, other), seeds=(3,))
    assert [plan.depth(recipe) for recipe in plan.recipes] == [1, 0, 0]
    assert [plan.begins_with_teacher(r) for r in plan.recipes] == [True, True, False]
    link_teacher(tmp_path, ("--corpus", "c", "--teacher", str(write_backbone(tmp_path / "lm"))))
    commands = [run.command(plan, tmp_path / "store", tmp_path) for run in plan.runs]
    starts = {Path(c[c.index("--init-from") + 1]).name: c for c in commands if "--init-from" in c}
    assert sorted(starts) == ["adopted-seed3", "the-teacher"]
    assert (tmp_path / "the-teacher" / "config.json").is_file()


def test_every_plan_in_the_repository_can_be_read(tmp_path: Path) -> None:
    five_layers = write_backbone(tmp_path / "lm", num_hidden_layers=6)  # as stories3M
    teacher = network_settings(five_layers, MDLM)
    files = sorted((BENCHMARKS / "quality").glob("*.toml"))
    assert files
    for file in files:
        plan = read_plan(file, [])
        first, *_ = plan.recipes
        assert read_plan(file, [], only=first.name).recipes[0] == first
        with pytest.raises(UsageError, match="--only"):
            read_plan(file, [], only="no such recipe")
        for run in plan.runs:
            settings = [*plan.settings, *run.recipe.settings]
            source = {"student": run.recipe.student}
            model = {"model": {"conditioning": run.recipe.conditioning}}
            network = teacher if plan.begins_with_teacher(run.recipe) else {}
            compose_run([read_recipe(plan.preset), network, source, model], settings)


def test_stories_are_sampled_as_their_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with sweeps has no others; one that is only a start has no samples."""
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(stories, "run_visibly", lambda name, words: ran.append(words))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "nll_nats": 2.0}\n')
    own = Recipe("own", sweeps={"few": "--sampler block --nfe 2 --sweep tau=1,2"}, nfe=(64,))
    start, usual = Recipe("start", is_sampled=False), Recipe("usual", student="bd3lm", nfe=(8, 16))
    bench = StoriesBench(Plan("stories", (), (own, start, usual), seeds=(1,)), tmp_path, None)
    for run in bench.plan.runs:
        bench.measure(run, tmp_path)
    few, block = (" ".join(words) for words in ran)
    assert few.count("--nfe") == 1 and "--sampler block --nfe 2 --sweep tau=1,2" in few
    assert "own-seed1/few" in few and "usual-seed1/block" in block and "--nfe 8,16" in block


def said(record: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of a record, at any depth."""
    parts = record.values() if isinstance(record, dict) else record
    if isinstance(record, dict):
        yield from record.items()
    for part in parts:
        if isinstance(part, dict | list):
            yield from said(part)


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").rglob("*.json")), ids=lambda file: file.name)
def test_a_record_names_its_commit_machine_and_versions(file: Path) -> None:
    about = dict(said(json.loads(file.read_text(encoding="utf-8"))))
    assert len(about["commit"]) >= 12
    assert about.get("name") or about.get("processor"), "no machine"
    assert about["torch"]
