"""The student in lm-evaluation-harness, over local questions and without a network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from evaluation import likelihood_command
from evaluation.likelihood.completion import CompletionScorer
from evaluation.likelihood.harness import GdistillLM
from shards.errors import GdistillError, UsageError
from tests.evaluation.kit import Told, write_lines
from tests.trainer.sampling_cases import tiny_student

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, judge_folder: Path) -> Path:
    """A student over the judge's four words."""
    folder = tmp_path_factory.mktemp("student")
    tiny_student("mdlm", "gumbel", vocab_size=4, row_length=16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    adds = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 2)])
    tokenizer.backend_tokenizer.post_processor = adds  # nothing but the student's own token stands in front
    tokenizer.save_pretrained(folder)
    return folder


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_completions_are_scored_behind_their_context(model_folder: Path) -> None:
    """Rows of one length go together, two at a time; each has the noise of its own number."""
    model = GdistillLM(str(model_folder), draws=2, batch_size="2")
    same = [request("b a", " b")] * 5
    found = model.loglikelihood([*same, request("b a", " b a b"), request("b", " a")], disable_tqdm=True)
    first = model.prefix_token_id
    rows = [*[[first, 1, 0, 1]] * 5, [first, 1, 0, 1, 0, 1], [first, 1, 0]]
    for number, (row, given) in enumerate(zip(rows, (*[3] * 6, 2), strict=True)):
        value, _ = model.scorer(torch.tensor([row]), [given], [number])
        assert found[number][0] == pytest.approx(value[0], abs=1e-4)


def test_long_contexts_lose_their_beginning_and_long_completions_too(model_folder: Path) -> None:
    model = GdistillLM(str(model_folder))
    first = model.prefix_token_id
    row, given = model._row([0] * 20 + [1], [1, 1])
    assert row == [first] + [0] * 12 + [1] + [1, 1] and given == 14
    row, given = model._row([0], [1] * 30)
    assert row == [first] + [1] * 15 and given == 1
    assert model._row([first], [1])[0] == [first, 1]  # an empty context is bos alone
    assert model._row([first], [1] * 16) == ([first] + [1] * 15, 1)
    with pytest.raises(GdistillError, match="an empty completion"):
        model._row([0], [])
    for given, most in ((6, 6), (99, 16)):  # a row at most
        assert len(GdistillLM(str(model_folder), max_length=given)._row([0] * 20, [1])[0]) == most


def test_rolling_windows_score_every_token_once(model_folder: Path) -> None:
    model = GdistillLM(str(model_folder), draws=1)
    seen: list[tuple[list[int], int, float]] = []
    inner = model.scorer

    def counted(tokens: Any, num_given: Any, row_ids: Any) -> Any:
        values, greedy = inner(tokens, num_given, row_ids)
        seen.extend(zip(tokens.tolist(), num_given, values, strict=True))
        return values, greedy

    object.__setattr__(model, "scorer", counted)
    values = model.loglikelihood_rolling([request("a b " * 20), request("a")], disable_tqdm=True)
    assert sum(len(row) - given for row, given, _ in seen) == 41 and len(seen) == 4
    assert values == pytest.approx([sum(part for *_, part in seen[:3]), seen[3][2]])
    assert seen[3][:2] == ([model.prefix_token_id, 0], 1)


def test_generation_stops_where_it_is_told(model_folder: Path) -> None:
    """The student is asked for the end of a context that leaves room, and for half a row unless told."""
    asked: list[Any] = []
    model = GdistillLM(str(model_folder), seed=7, nfe=4)
    said = torch.tensor([[0, 0, 3, 0, 0, 0, 1, *[0] * 9]])  # 1, or b, ends its texts
    model.student.generate = lambda given, **of: asked.append((given.tolist(), of)) or torch.cat((given, said), 1)  # type: ignore[method-assign,misc]
    texts = {"b " + "a " * 20: {"max_gen_toks": 4, "until": ["zzz", "<unk>"]}, "b": {"until": "zazuz"}}
    texts |= {" b": {"max_gen_toks": 0}, "  b": {"max_gen_toks": 50, "until": "<unk>"}}
    found = model.generate_until([request(*item) for item in texts.items()])
    assert [text.split() for text in found] == [["a"] * 2, ["a", "a", "<unk>", *["a"] * 3], ["a"], ["a"] * 2]
    sizes = [(given, of["max_length"]) for (given,), of in asked]
    assert sizes == [([0] * 12, 16), ([0, 1], 10), ([0, 1], 3), ([0, 1], 16)]
    assert [(of["seed"], of["nfe"]) for _, of in asked] == [(7, 4), (8, 4), (9, 4), (10, 4)]


def test_the_harness_scores_local_questions(tmp_path: Path, model_folder: Path) -> None:
    """Tasks where the completion, and where the context, is one of several."""
    kinds = {"choice": ("query", "choices", "gold"), "context": ("gold", "context_options", "continuation")}
    choice = {"query": "a b", "choices": ["a", "b b"], "gold": 1}
    context = {"context_options": ["a", "b"], "continuation": "b a", "gold": 0}
    for name, question, count in (("choice", choice, 3), ("context", context, 2)):
        file = write_lines(tmp_path / f"{name}.jsonl", *[question] * count)
        task: dict[str, Any] = {"task": name, "output_type": "multiple_choice", "target_delimiter": " "}
        task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        task |= dict(zip(("doc_to_text", "doc_to_choice", "doc_to_target"), kinds[name], strict=True))
        task["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
        write_lines(tmp_path / f"tasks/{name}.yaml", task)  # JSON is YAML
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    words = f"pretrained={model_folder},draws=2,device=cpu"
    options = {"tasks": list(kinds), "task_manager": tasks, "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(model="gdistill", model_args=words, **options)
    assert found is not None
    assert all(0 <= found["results"][name]["acc,none"] <= 1 for name in kinds)
    told = found["config"]["scoring"]
    assert told["noise"] == "mean over 2 prior draws" and told["estimate"] == "one_pass"


def test_known_arguments_reach_the_scorer_and_unknown_ones_are_refused(model_folder: Path, tmp_path: Path) -> None:
    own = {"noise": "none", "draws": 3, "estimate": "bound", "masks": 5, "seed": 7}
    model = GdistillLM(str(model_folder), **own, batch_size="auto", max_batch_size=64, tau=None)
    assert model.scorer == CompletionScorer(model.student, *own.values()) and model.batch_size == 16  # type: ignore[arg-type]
    assert (model.prefix_token_id, model.eot_token_id) == (0, 1)
    model.student.config.eos_token_id = None
    assert model.eot_token_id == 0, "a student without eos ends with bos"
    for unknown, said in (
        ({"tau": 0.5}, "model_args"),
        ({"noise": "posterior"}, "noise"),
        ({"estimate": "x"}, "estimate"),
    ):
        with pytest.raises(UsageError, match=f"unknown {said}"):
            GdistillLM(str(model_folder), **unknown)
    model.student.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no tokenizer"):
        GdistillLM(str(tmp_path))


def test_the_harness_s_own_device_is_the_cpu_where_there_is_no_gpu(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """Its command asks for cuda:0 unless told; another GPU was asked for by a person."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = GdistillLM(str(model_folder), device="cuda:0")
    assert model.student.device.type == "cpu"
    assert told().startswith("no GPU here")
    with pytest.raises(UsageError, match="no such GPU"):
        GdistillLM(str(model_folder), device="cuda:1")


def test_without_the_harness_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.delitem(sys.modules, "evaluation.likelihood.harness")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["gdistill-lm-eval", "--help"])
    with pytest.raises(SystemExit) as ended:
        likelihood_command.lm_eval()
    error = told().strip()
    assert ended.value.code == 2 and "\n" not in error
    assert "pip install 'gdistill[evaluation]'" in error
