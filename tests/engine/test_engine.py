"""The plugin in a real vLLM: drafts change no token, whatever drafts, in any order, on any batch.

Run by ``make test-engine``, which installs the engine (``GDISTILL_ENGINE`` is its environment).
Engines run side by side, each in a process of its own, as ``benchmarks.serving`` runs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine import compare, extract, real_server
from benchmarks.serving import CUTS, NGRAM, PROMPTS, STUDENT, Engine, Job
from evaluation.served_certificate import Answer, certify_answers
from shards.language_model.loading import find_pretrained, load_causal_model
from trainer.serving.export import export
from trainer.students.autoregressive import AR
from trainer.students.backbone import load_backbone
from trainer.students.configuration import BackboneSettings, StudentSettings
from trainer.students.medusa import Medusa
from trainer.students.registry import BD3LM, MDLM

pytestmark = pytest.mark.engine

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mdlm": (MDLM, {"conditioning": "gumbel"}),
    "bd3lm": (BD3LM, {"conditioning": "gumbel", "block_size": 4}),
    "ar": (AR, {"conditioning": "none"}),
}
JOBS = [Job(PROMPTS[i % len(PROMPTS)], i, temperature, top_p, 60) for i, (temperature, top_p) in enumerate(CUTS * 3)]


@pytest.fixture(scope="session")
def place() -> Path:
    """The engine's environment."""
    named = os.environ.get("GDISTILL_ENGINE")
    if not named or not (Path(named) / "bin" / "vllm").exists():
        pytest.skip("no engine: make test-engine installs one, or GDISTILL_ENGINE names one")
    return Path(named).resolve()


@pytest.fixture(scope="session")
def teacher(shared: Path) -> Path:
    return shared / "data" / "stories3M"


@pytest.fixture(scope="session")
def plain(place: Path, teacher: Path) -> Iterator[Engine]:
    engine = Engine(place, str(teacher), plugin=True)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def expected(plain: Engine) -> list[list[int]]:
    """What the requests get without drafts, sixteen at a time."""
    return [row["tokens"] for row in plain.serve(JOBS, 16)["rows"]]


def write_student(folder: Path, kind: str, teacher: Path) -> Path:
    """A student of random weights: its drafts are poor, and none may matter."""
    torch.manual_seed(0)
    cls, extra = KINDS[kind]
    settings = StudentSettings(hidden_size=32, num_layers=1, num_heads=2, dropout=0.0, **extra)
    config = cls.config_class.build(settings, vocab_size=4096, row_length=64, bos_token_id=1)
    cls(config).save_pretrained(folder)
    for file in teacher.glob("token*"):
        shutil.copy(file, folder / file.name)
    return folder


def test_another_batch_and_order_change_no_token(plain: Engine, expected: list[list[int]]) -> None:
    found = plain.serve(JOBS[::-1], 3)["rows"][::-1]
    assert [row["tokens"] for row in found] == expected


@pytest.mark.parametrize("kind", ["n-gram", *KINDS])
def test_drafts_change_no_token(
    kind: str, place: Path, teacher: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """One in six leaves early; what it got by then is a beginning of the same text."""
    drafts, drafter = dict(NGRAM), None
    if kind != "n-gram":
        drafts = {**STUDENT, "num_speculative_tokens": 3}
        drafter = write_student(tmp_path / kind, kind, teacher)
    engine = Engine(place, str(teacher), True, drafts, drafter)
    jobs = [Job(**vars(job)) for job in JOBS]
    for job in jobs[::6]:
        job.cancel_after = 7 + job.seed
    found = engine.serve(jobs, 5)["rows"]
    engine.close()
    for job, row, right in zip(jobs, found, expected, strict=True):
        assert row["tokens"] == right[: len(row["tokens"])]
        assert len(row["tokens"]) == 60 or job.cancel_after is not None


def test_the_text_is_what_the_noise_asks_for(expected: list[list[int]], teacher: Path) -> None:
    """By another implementation of the model, in another process."""
    words = AutoTokenizer.from_pretrained(teacher)
    answers = [
        Answer(
            name=str(job.seed),
            prompt=words(job.prompt)["input_ids"],
            tokens=tokens,
            temperature=job.temperature,
            top_p=job.top_p,
            seed=job.seed,
            noise="murmur3",
        )
        for job, tokens in zip(JOBS, expected, strict=True)
    ]
    files = find_pretrained(teacher)
    model = load_causal_model(files).network
    certificate = certify_answers(answers, model, files.num_logits)
    assert certificate.is_right, list(certificate.lines())


def test_preemption_and_prefix_cache_change_no_token(place: Path, teacher: Path, plain: Engine) -> None:
    """Long prompts with one beginning, at temperature 1.5 too, in a cache that holds three rows."""
    jobs = [Job(" ".join([*PROMPTS, *PROMPTS, PROMPTS[i % 8]]), i, (1.5, 1.0)[i % 2], 1.0, 60) for i in range(12)]
    expected = plain.serve(jobs, 2)
    assert not expected["preempted"]
    options = {"num_gpu_blocks_override": 16, "block_size": 32}
    engine = Engine(place, str(teacher), True, NGRAM, options=options)
    found = engine.serve(jobs, 6)
    engine.close()
    assert [row["tokens"] for row in found["rows"]] == [row["tokens"] for row in expected["rows"]]
    assert found["preempted"] and any(row["cached"] for row in found["rows"])


def test_hidden_states_are_the_models_own(place: Path, teacher: Path, shared: Path, tmp_path: Path) -> None:
    """Eight requests at a time; the store beside transformers."""
    text = shared / "data" / "tinystories" / "tinystories_b.txt"
    own: dict[str, Any] = {"device": "cpu", "teacher": {"location": str(teacher)}}
    with real_server(place, teacher) as server:
        asked = {**own, "engine": {"url": server.url, "in_flight": 8}}
        store = extract(tmp_path, text, {"name": "hidden"}, asked)
        assert not list(server.states.iterdir()), "a file is deleted once it is read"
    found = compare(store, AutoModelForCausalLM.from_pretrained(teacher).eval())
    assert found["max_abs_log_prob_difference_nats"] < 1e-3
    assert found["coupling_agreement"] > 0.99


def write_heads(folder: Path, teacher: Path) -> tuple[Medusa, Path]:
    """Two heads of small random weights on the teacher, and their files as vLLM loads them."""
    torch.manual_seed(0)
    settings = StudentSettings(conditioning="none", backbone=BackboneSettings(num_proposed=2))
    below = load_backbone(teacher, 4096, "float32")
    config = Medusa.config_class.build(settings, vocab_size=4096, row_length=64, bos_token_id=1)
    config.frozen = Medusa.describe(below)
    student = Medusa(config)
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    student.attach(below)
    export(student.eval(), folder)
    return student, folder


@torch.no_grad()
def passes_with(heads: Medusa, prompt: list[int], tokens: list[int]) -> int:
    """Passes of the target for an answer, when drafts are the heads' most probable tokens."""
    ids = torch.tensor([prompt + tokens])
    hidden = heads.language_model.hidden(ids)[0, len(prompt) - 1 :]
    drafts = heads.propose(hidden, None).argmax(dim=-1).tolist()
    done, passes = 1, 1  # the first pass reads the prompt
    while done < len(tokens):
        kept = 0
        while kept < 2 and done + kept < len(tokens):
            if drafts[done - 1][kept] != tokens[done + kept]:
                break
            kept += 1
        done, passes = done + kept + 1, passes + 1
    return passes


def test_the_engine_loads_exported_heads(place: Path, teacher: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """vLLM's own MedusaModel: no token differs, and it drafts what our heads propose."""
    heads, folder = write_heads(tmp_path / "heads", teacher)
    drafts = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2}
    engine = Engine(place, str(teacher), True, drafts)
    found = engine.serve(JOBS, 5)["rows"]
    engine.close()
    assert [row["tokens"] for row in found] == expected
    words = AutoTokenizer.from_pretrained(teacher)
    ours = [
        passes_with(heads, words(job.prompt)["input_ids"], tokens) for job, tokens in zip(JOBS, expected, strict=True)
    ]
    passes = [row["passes"] for row in found]
    assert sum(passes) < sum(len(tokens) for tokens in expected)
    assert sum(abs(one - other) for one, other in zip(passes, ours, strict=True)) <= 2  # near ties


COMPARED = """
import torch
from shards.noise.murmur3 import engine_gumbels
from trainer.serving import coupling
assert coupling._cpu_kernel() is not None
torch.manual_seed(0)
for rows, size in ((1, 4096), (16, 4096), (64, 512), (4, 50257)):
    logits = 3 * torch.randn(rows, size)
    logits[:, ::7] = -torch.inf
    seeds, places = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 5000, (rows,))
    greedy = torch.arange(rows) % 5 == 4
    noise = engine_gumbels(seeds, places, 0, size).masked_fill_(greedy[:, None], 0.0)
    expected = (logits + noise).argmax(dim=-1)
    assert torch.equal(coupling.draw(logits, seeds, places, is_greedy=greedy), expected)
"""


def test_the_cpu_kernel_draws_what_the_equation_says(place: Path) -> None:
    python = place / "bin" / "python"
    done = subprocess.run([python, "-c", COMPARED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BROKEN = """
class Broken:
    calls = 0
    def __init__(self, config): pass
    def load_model(self, target): pass
    def propose(self, sampled, *arguments, **named):
        self.calls += 1
        if self.calls % 2: raise RuntimeError("broken\\nin two lines")
        return [[10**6, -5] for _ in sampled]
"""
SAID = "the drafter failed, requests go on without drafts: RuntimeError: broken", "ids outside of the vocab"


def test_a_broken_drafter_costs_no_request(
    place: Path,
    teacher: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Every other draft fails, or is none of the vocabulary's; and the log says each, once."""
    (tmp_path / "broken_drafters.py").write_text(BROKEN)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    drafts = {**STUDENT, "model": "broken_drafters.Broken", "num_speculative_tokens": 2}
    engine = Engine(place, str(teacher), True, drafts)
    found = engine.serve(JOBS[:6], 4)["rows"]
    engine.close()
    assert [row["tokens"] for row in found] == expected[:6]
    said = "".join(capfd.readouterr())
    assert [said.count(line) for line in SAID] == [1, 1]
