"""``gdistill-eval certify``: right samples and answers pass; one altered token is found."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluation import served_certificate as told_of
from evaluation.certificate import decide
from evaluation.served_certificate import LEAST_P, TIES, Answer, allowed, answers_of, certify_answers, judge
from shards.errors import UsageError
from tests.commands import call
from tests.evaluation.kit import Told, one_line, write_lines
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.sampling_cases import LENGTH, command, read, save, tiny_llama
from trainer.sampling.noise import TokenRule
from trainer.serving.coupling import draw
from trainer.training.loop import train


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(folder / "mdlm")
    save(folder / "plain", conditioning="none")
    save(folder / "teacher", conditioning="none")  # for its tokenizer
    tiny_llama().save_pretrained(folder / "teacher")
    return folder


def sample(models: Path, out: Path, *words: object, model: str = "mdlm") -> Path:
    assert command(models / model, "--num", 20, "--out", out, *words) == 0
    return out


def sample_coupled(models: Path, out: Path, *words: object, model: str = "mdlm") -> Path:
    coupled = ("--sampler", "coupled", "--verifier", models / "teacher")
    return sample(models, out, *coupled, *words, model=model)


def certify(samples: Path, teacher: Path) -> int:
    return call("gdistill-eval", "certify", samples, "--teacher", teacher)


def refusal(told: Told, samples: Path, teacher: Path) -> str:
    """The one line that says why samples cannot be certified."""
    told()
    assert certify(samples, teacher) == 2
    return one_line(told())


def found(samples: Path, file: str = "samples.jsonl") -> dict[str, Any]:
    text = (samples / "certificate.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)[file]  # JSON has no infinity


AGAIN = ("--min-entropy", 3, "--set", "stop.entropy_window=8", "--set", "stop.max_tries=2")
"""More entropy than eight tokens can have: the noise is that of the last try."""


CASES: list[tuple[str, float, tuple[object, ...]]] = [("mdlm", 1.0, ()), ("plain", 0.7, ()), ("mdlm", 1.0, AGAIN)]
CASES += [("mdlm", 0.9, ("--nucleus-p", 0.7))]
CASES += [("plain", 1.0, ("--top-k", 3, "--nucleus-p", 0.9, "--nucleus-rule", "crossing"))]


@pytest.mark.parametrize(("model", "tau", "cut"), CASES)
def test_verified_samples_agree_everywhere(
    model: str, tau: float, cut: tuple, models: Path, tmp_path: Path, told: Told
) -> None:
    sample_coupled(models, tmp_path, "--tau", tau, *cut, "--seed", 6, model=model)
    assert certify(tmp_path, models / "teacher") == 0
    result = found(tmp_path)
    assert result["num_positions"] == 20 * (LENGTH - 1)
    assert result["num_agreeing"] + len(result["ties"]) >= result["num_positions"]
    assert result["num_mismatches"] == 0 and result["tau"] == tau
    # One token replaced, as an editor would.
    records = read(tmp_path / "samples.jsonl")
    assert all(record.get("attempt", 0) == (cut == AGAIN) for record in records)
    altered = records[7]["tokens"]
    altered[LENGTH - 1] = (altered[LENGTH - 1] + 1) % 11
    write_lines(tmp_path / "samples.jsonl", *records)
    told()
    assert certify(tmp_path, models / "teacher") == 1
    assert f"sample 7, position {LENGTH - 1}" in told().strip().splitlines()[-1]
    assert found(tmp_path)["num_mismatches"] == 1


def test_a_file_cannot_call_its_tokens_given(models: Path, tmp_path: Path, told: Told) -> None:
    """What was given is known by its hash in the settings: more than that would hide tokens."""
    sample_coupled(models, tmp_path)
    assert certify(tmp_path, models / "teacher") == 0 and found(tmp_path)["given_is_checked"]
    records = read(tmp_path / "samples.jsonl")
    first, *others = records
    tokens = [(first["tokens"][0] + 1) % 11, *first["tokens"][1:]]
    write_lines(tmp_path / "samples.jsonl", first | {"tokens": tokens}, *others)
    certify(tmp_path, models / "teacher")
    assert not found(tmp_path)["given_is_checked"], "another first token than the run was given"
    (tmp_path / "prompts").write_text("up up\ndown left\n")
    sample_coupled(models, tmp_path / "asked", "--prompt-file", tmp_path / "prompts")
    for altered in (False, True):
        asked = read(tmp_path / "asked/samples.jsonl")
        asked[3]["tokens"][1] += altered  # a word of the second prompt, when it was asked again
        write_lines(tmp_path / "asked/samples.jsonl", *asked)
        certify(tmp_path / "asked", models / "teacher")
        assert found(tmp_path / "asked")["given_is_checked"] is not altered
    for given, count, said in (
        (LENGTH - 1, 1, "calls tokens given in a run without a prompt"),
        (LENGTH, 20, "nothing to certify"),
    ):
        changed = ({**r, "num_given": given if i < count else 1} for i, r in enumerate(records))
        write_lines(tmp_path / "samples.jsonl", *changed)
        told()
        assert certify(tmp_path, models / "teacher") != 0
        assert said in one_line(told())


def test_a_students_own_samples_get_their_agreement(models: Path, tmp_path: Path) -> None:
    sample(models, tmp_path / "drawn", "--nfe", 3, "--sweep", "tau=0.8,0.9", "--nucleus-p", 0.9)
    words = ("certify", tmp_path / "drawn", "--teacher", models / "teacher", "--out", tmp_path)
    assert call("gdistill-eval", *words) == 0 and not (tmp_path / "drawn" / "certificate.json").exists()
    _, result = (found(tmp_path, f"tau={tau}/samples.jsonl") for tau in (0.8, 0.9))  # files of one name
    assert 0 < result["agreement"] < 0.6 and result["tau"] == 0.9
    lost = sum(tie["margin"] <= 0 for tie in result["ties"])
    assert result["num_mismatches"] + result["num_agreeing"] + lost == result["num_positions"]
    assert result["smallest_margin"] > 0, "of those that agree"
    assert len(result["mismatches"]) == 20 < result["num_mismatches"]
    assert all(one["margin"] > -1e5 for one in result["mismatches"]), "the student's nucleus is not the teacher's"


def test_what_cannot_be_certified_is_named(models: Path, tmp_path: Path, told: Told) -> None:
    teacher = models / "teacher"
    plain = sample(models, tmp_path / "plain", "--nfe", 2, model="plain")
    assert "without noise" in refusal(told, plain, teacher)
    redrawn = sample(models, tmp_path / "redrawn", "--nfe", 2)
    for file in redrawn.glob("*.json*"):  # as versions wrote it that could
        file.write_text(file.read_text().replace('"tau":', '"redraw_noise": true, "tau":'))
    assert "redraw_noise" in refusal(told, redrawn, teacher)
    (redrawn / "settings.json").write_text((redrawn / "settings.json").read_text().replace('"gumbel"', '"uniform"'))
    assert "one uniform per token" in refusal(told, redrawn, teacher)
    coupled = sample_coupled(models, tmp_path / "coupled")
    model = tiny_llama()
    model.lm_head.weight.data += 1
    model.save_pretrained(tmp_path / "other")
    assert "verified by another model" in refusal(told, coupled, tmp_path / "other")
    tiny_llama(vocab_size=5).save_pretrained(tmp_path / "small")
    assert "fewer tokens" in refusal(told, coupled, tmp_path / "small")
    records = read(coupled / "samples.jsonl")
    unseeded = ({k: v for k, v in record.items() if k != "seed"} for record in records)
    write_lines(coupled / "samples.jsonl", *unseeded)
    assert "no recorded seed" in refusal(told, coupled, teacher)


# Students that have their verifier on board.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the backbone that scored it."""
    folder = tmp_path_factory.mktemp("qwen")
    return store_of(folder / "store", write_backbone(folder / "backbone", "qwen2"))


def test_medusa_samples_are_certified_by_their_backbone(store: Path, tmp_path: Path, told: Told) -> None:
    """Heads trained, sampled and certified by the commands; other acceptance has no certificate."""
    backbone, samples = tmp_path / "backbone", tmp_path / "coupled"
    shutil.copytree(store.with_name("backbone"), backbone)
    train(backbone_run(backbone, training__num_steps=2), store, tmp_path / "run")

    def drawn_to(out: str, *words: object) -> int:
        return command(tmp_path / "run", "--num", 6, "--out", tmp_path / out, *words)

    assert drawn_to("coupled", "--tau", 0.8, "--length", 24) == 0
    assert certify(samples, backbone) == 0
    result = found(samples)
    assert result["num_positions"] == 6 * 23 and result["num_mismatches"] == 0
    assert json.loads((samples / "settings.json").read_text())["store"]["codec"]["name"] == "posterior"
    records = read(samples / "samples.jsonl")
    records[3]["tokens"][20] = (records[3]["tokens"][20] + 1) % 12
    write_lines(samples / "samples.jsonl", *records)
    assert certify(samples, backbone) == 1
    assert drawn_to("typical", "--set", "acceptance=typical") == 0
    assert certify(tmp_path / "typical", backbone) == 2
    assert "acceptance=typical" in told()
    # What cannot be: filling whole rows, and no backbone where it was.
    assert drawn_to("whole", "--sampler", "ancestral", "--nfe", 2) == 2
    backbone.rename(tmp_path / "moved")
    assert drawn_to("gone") == 2
    assert "--backbone FOLDER" in told()
    assert drawn_to("found", "--backbone", tmp_path / "moved") == 0


@pytest.mark.parametrize("student", ["medusa", "drafter"])
def test_samples_of_a_bf16_backbone_are_certified_in_bf16(
    student: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the precision that the samples name; a token that loses is listed, or refused."""
    qwen = store.with_name("backbone")
    samples = {name: tmp_path / f"{name}-samples" for name in ("bfloat16", "float32")}
    for dtype, out in samples.items():
        options = {"training__num_steps": 2, "model__backbone__dtype": dtype}
        train(backbone_run(qwen, student, **options), store, tmp_path / dtype)
        assert command(tmp_path / dtype, "--num", 20, "--length", 24, "--out", out) == 0
    passes = [record["verifier_nfe"] for record in read(samples["float32"] / "samples.jsonl")]
    assert f"{student}, {torch.tensor(passes).float().mean():.1f} NFE" in capsys.readouterr().err
    assert certify(samples["float32"], qwen) == 0
    capsys.readouterr()
    assert certify(samples["bfloat16"], qwen) == 0
    assert "ties within bfloat16 rounding" in capsys.readouterr().out
    fine, coarse = found(samples["float32"]), found(samples["bfloat16"])
    assert (fine["dtype"], coarse["dtype"]) == ("float32", "bfloat16")
    assert coarse["num_positions"] == 20 * 23 and coarse["num_mismatches"] == 0
    lost = sum(tie["margin"] <= 0 for tie in coarse["ties"])
    assert lost == coarse["num_positions"] - coarse["num_agreeing"]
    assert max(abs(tie["margin"]) for tie in coarse["ties"]) > fine["smallest_margin"]
    # The last token of every row replaced: a few lose by less than rounding, not all of them.
    file, settings = (samples["bfloat16"] / name for name in ("samples.jsonl", "settings.json"))
    records = read(file)
    for record in records:
        record["tokens"][-1] = (record["tokens"][-1] + 1) % 12
    write_lines(file, *records)
    assert certify(samples["bfloat16"], qwen) == 1
    assert found(samples["bfloat16"])["num_mismatches"] >= 5
    changed = json.loads(settings.read_text())
    changed["student_config"]["backbone"]["dtype"] = "float8"
    settings.write_text(json.dumps(changed))
    capsys.readouterr()
    assert certify(samples["bfloat16"], qwen) != 0
    assert "backbone.dtype" in capsys.readouterr().err


# Answers of a server, which draws with a noise that is known, or from the law.

END, PROMPT = 24, [1, 2, 3]
KNOWN = ("--noise", "murmur3")
Certified = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)  # a law that is not flat
    return model.eval()


@pytest.fixture(scope="module")
def teacher(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def drawn(model: Any, seeds: range, sharpen: float = 1.0, **settings: Any) -> list[list[int]]:
    """What a right engine says for each seed; ``sharpen`` is a fault: logits that much larger."""
    temperature = settings.get("temperature", 1.0)
    rows = torch.tensor([PROMPT] * len(seeds))
    while rows.shape[1] < END:
        logits: Tensor = sharpen * model(input_ids=rows).logits[:, -1].float()
        if temperature == 0:
            found = logits.argmax(dim=-1)
        else:
            rule = Answer("", [], [], top_k=settings.get("top_k", 0), top_p=settings.get("top_p", 1.0)).rule
            law = allowed(logits / temperature, rule)
            places = torch.full((len(seeds),), rows.shape[1] - 1)
            found = draw(law, torch.tensor(list(seeds)), places)
        rows = torch.cat((rows, found[:, None]), dim=1)
    return rows[:, len(PROMPT) :].tolist()


def served(model: Any, seed: int, **settings: Any) -> dict[str, Any]:
    """A request and its right answer."""
    (tokens,) = drawn(model, range(seed, seed + 1), **settings)
    choice = {"index": 0, "token_ids": tokens, "prompt_token_ids": PROMPT}
    request = {"prompt": "x", "temperature": 1.0, "seed": seed, **settings}
    return {"request": request, "answer": {"choices": [choice]}}


@pytest.fixture
def certified(teacher: Path, tmp_path: Path) -> Certified:
    """The exit code for these answers, and the certificate."""

    def call_with(*records: dict[str, Any], noise: tuple[str, ...] = KNOWN) -> Any:
        file = write_lines(tmp_path / "a.jsonl", *records)
        code = call("gdistill-eval", "certify", file, "--teacher", teacher, *noise)
        found = file.with_name("certificate.json")
        return code, json.loads(found.read_text()) if found.exists() else {}

    return call_with


SETTINGS = [{}, {"top_p": 0.8}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 4}]
SETTINGS += [{"temperature": 0.8, "top_p": 0.9, "top_k": 9}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_right_answers_of_a_known_noise_pass_and_one_altered_token_is_found(
    settings: dict[str, Any],
    model: Any,
    certified: Certified,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of several lengths, two in a pass."""
    monkeypatch.setattr("evaluation.certificate.ROWS_AT_A_TIME", 2)
    records = [served(model, seed, **settings) for seed in (7, 2**40, 2)]
    del records[1]["answer"]["choices"][0]["token_ids"][9:]
    code, found = certified(*records)
    assert code == 0 and found["is_right"]
    for verdict, num in zip(found["answers"], (END - len(PROMPT), 9, END - len(PROMPT)), strict=True):
        assert verdict["num_agreeing"] + verdict["num_ties"] == verdict["num_tokens"] == num
    tokens = records[2]["answer"]["choices"][0]["token_ids"]
    tokens[11] = (tokens[11] + 1) % model.config.vocab_size
    capsys.readouterr()
    code, found = certified(*records)
    assert code == 1 and not found["is_right"]
    assert found["answers"][2]["first"][:2] == [11, tokens[11]]
    assert [verdict["first"] for verdict in found["answers"][:2]] == [None, None]
    shown = capsys.readouterr()
    assert "token 11 is" in shown.out and "does not draw from this model" in shown.err


def test_what_a_request_leaves_out_is_as_the_model_has_it(
    model: Any, teacher: Path, certified: Certified, told: Told
) -> None:
    """As vLLM takes it, from a file that lies beside the weights."""
    settings = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
    record = served(model, 5, **settings)
    record["request"] = {"prompt": "x", "seed": 5, "top_p": None}
    for extra, code in (({"repetition_penalty": 1.05}, 2), ({}, 0)):
        (teacher / "generation_config.json").write_text(json.dumps(settings | extra))
        assert certified(record)[0] == code
    (teacher / "generation_config.json").unlink()
    assert "does not undo this setting" in told()


def test_the_law_passes_right_engines_and_convicts_others(model: Any) -> None:
    """Of 40 right batches 2 fail on average; 8 or more would be one chance in a thousand."""
    size = model.config.vocab_size
    answers = [Answer("", PROMPT, row) for row in drawn(model, range(160))]
    found = [certify_answers(answers[i : i + 4], model, size) for i in range(0, 160, 4)]
    assert {verdict.checked for one in found for verdict in one.verdicts} == {"law"}
    assert sum(one.p < LEAST_P for one in found) < 8
    for sharpen in (0.3, 2.0):  # both sides: too wild, and too tame
        wrong = [Answer("", PROMPT, row) for row in drawn(model, range(8), sharpen)]
        verdict = certify_answers(wrong, model, size)
        assert not verdict.is_right and (verdict.z > 0) == (sharpen < 1)
        known = [replace(one, checked="noise", num_agreeing=one.num_tokens) for one in verdict.verdicts]
        assert replace(verdict, verdicts=known).is_right, "however rare a noise is that is known"


def test_what_an_answer_leaves_out_is_known_from_its_request() -> None:
    """Of two prompts with two answers each; what would change the law is refused by name."""
    request = {"prompt": [[1, 2], [3]], "n": 2, "top_k": -1, "presence_penalty": 0, "repetition_penalty": 1.0}
    tokens = {"tokens": ["token_id:7", "token_id:9"]}
    said = {"choices": [{"index": index, "logprobs": tokens} for index in range(4)]}
    found = list(answers_of(request, {**said, "seed": 5, "noise": "murmur3"}, "here", None))
    asked = [([1, 2], 5), ([1, 2], 6), ([3], 5), ([3], 6)]
    assert [(answer.prompt, answer.seed) for answer in found] == asked
    assert [answer.name for answer in found] == [f"here, choice {index}" for index in range(4)]
    words: Any = {**request, "prompt": ["a b", "c"], "temperature": 0}
    cold = {**request, "temperature": 1e-3, "seed": 5}
    assert next(answers_of(cold, said, "", None)).temperature == 0.01, "vLLM draws at no lower one"
    for answers, prompt in ((said, [3]), ({**said, "prompt_token_ids": [8]}, [8])):  # greedy ones need no seed
        greedy = next(answers_of(words, {**answers, "noise": "murmur3"}, "", lambda text: {"input_ids": [len(text)]}))
        assert (greedy.prompt, greedy.seed, greedy.temperature) == (prompt, None, 0)
    for answer in found:
        assert (answer.tokens, answer.temperature, answer.noise) == ([7, 9], 1.0, "murmur3")
        assert (answer.top_k, answer.top_p) == (0, 1.0), "nothing is cut"
    for seed, expected in ((-1, [5, 6]), (2**63 - 1, [2**63 - 1, -(2**63)])):  # none; past 2^63 as the hash reads it
        seeds = answers_of({**request, "seed": seed}, {**said, "seed": 5}, "", None)
        assert [answer.seed for answer in seeds] == expected * 2
    harmless = {"response_format": {"type": "text"}, "logit_bias": {}, "bad_words": [], "use_beam_search": False}
    assert list(answers_of({**request, **harmless}, {**said, "seed": 5, "noise": "murmur3"}, "here", None)) == found
    values: dict[str, Any] = {"logit_bias": {"1": 2.0}, "bad_words": ["x"], "min_tokens": 3, "use_beam_search": True}
    values |= {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["x"]}}
    values |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    for name, value in {**values, "min_p": 0.1, "allowed_token_ids": [1]}.items():
        with pytest.raises(UsageError, match=rf"does not undo this setting \[here, {name}\]"):
            list(answers_of({**request, name: value}, said, "here", None))


def test_ties_and_the_law_by_hand() -> None:
    """A greedy token that is the second best, by so much of a logit of size 1. Of two tokens 1e-6 apart the top-1
    keeps the first; the noise prefers the other, or it. p = 0.8, 0.2: the surprise of token 1 is log 5; entropy
    and variance are sums over both."""
    for gap, expected in ((1e-6, (1, 0)), (1e-3, (0, 1))):
        verdict = judge(Answer("", [0], [1], temperature=0), torch.tensor([[1.0, 1 - gap]]), TIES["float32"])
        assert (verdict.num_ties, verdict.num_faults) == expected
        verdict = judge(Answer("", [0], [1], top_k=1), torch.tensor([[1.0, 1 - gap]]), TIES["float32"])
        assert verdict.num_impossible == expected[1], "the law: cut off by so little is not cut off"
    logits, rule, within = torch.tensor([[1.0, 1 - 1e-6]] * 2), TokenRule(top_k=1), torch.full((2,), 1e-4)
    scores, tokens = torch.tensor([[0.0, 5.0], [5.0, 0.0]]), torch.tensor([1, 0])
    for slack, ties in ((1e-5, [True, False]), (1e-8, [False, False])):
        margins, _, is_tie = decide(scores, logits, tokens, rule, within, slack)
        assert is_tie.tolist() == ties and margins.tolist() == [-math.inf, math.inf]
    p = np.array([0.8, 0.2])
    entropy = -(p * np.log(p)).sum()
    verdict = judge(Answer("", [0], [1]), torch.tensor(np.log(p)[None], dtype=torch.float32), TIES["float32"])
    assert (verdict.surprise, verdict.entropy) == pytest.approx((math.log(5), entropy), abs=1e-6)
    assert verdict.variance == pytest.approx((p * np.log(p) ** 2).sum() - entropy**2, abs=1e-6)


def test_what_is_said_of_all_answers_by_hand() -> None:
    """z = 2 / sqrt(4) of the drawn ones alone; by chance one right engine in 20 is so far off that p = 0.05."""
    greedy = told_of.Verdict("a", 3, "greedy", num_agreeing=1, num_ties=1, first=(2, 5, 7, 0.5))
    cut = told_of.Verdict("b", 2, "noise", num_agreeing=1, first=(0, 6, 8, None))
    law = told_of.Verdict("c", 4, "law", excess=2.0, variance=4.0, surprise=6.0, entropy=4.0, num_impossible=1)
    found = told_of.ServedCertificate([greedy, cut, law])
    assert (found.z, found.p, found.num_faults) == (1.0, pytest.approx(0.3173, abs=1e-4), 3)
    assert (found.to_json()["nats_per_token"], found.to_json()["entropy_per_token"]) == (1.0, pytest.approx(4 / 6))
    assert [*found.lines()] == [
        "a: 1 of 3 tokens are not the ones asked for; first: token 2 is 5, expected 7, by 0.5 nats",
        "b: 1 of 2 tokens are not the ones asked for; first: token 0 is 6, expected 8, the request cuts it off",
        "1 of 2 tokens are argmax(l / T + g), 0 ties within rounding",
        "1 of 3 tokens are argmax l, 1 ties within rounding",
        "law: 1.000 nats per token, entropy 0.667; z = 1.00, p = 0.32",
        "1 tokens are ones that the requests cut off",
    ]
    for excess, is_right in ((1.95, True), (-1.97, False)):
        law = told_of.Verdict("", 4, "law", excess=excess, variance=1.0)
        assert told_of.ServedCertificate([law]).is_right is is_right


@pytest.fixture
def url(model: Any) -> Iterator[str]:
    """A server that draws with the engine's noise."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/completions" or body["prompt"] == "bad" or not body["return_token_ids"]:
                self.send_error(400)
                return
            kept = {key: body[key] for key in ("temperature", "top_p") if key in body}
            self.reply(served(model, body["seed"], **kept)["answer"])

        def reply(self, said: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        log_message = lambda *_: None  # noqa: E731

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_is_asked_and_its_answers_are_kept(
    url: str, teacher: Path, tmp_path: Path, certified: Certified, told: Told
) -> None:
    into = ("--teacher", teacher, "--out", tmp_path)
    asked = ("--num", 3, "--request", '{"temperature": 0.9, "seed": 5, "n": 2}', *KNOWN, "--prompt", "Hi")
    assert call("gdistill-eval", "certify", f"{url}/v1/", *into, *asked) == 0
    kept = read(tmp_path / "answers.jsonl")
    sent = [record["request"] for record in kept]
    assert [(one["seed"], one["temperature"], one["prompt"]) for one in sent] == [(n, 0.9, "Hi") for n in (5, 7, 9)]
    code, found = certified(*kept)
    assert code == 0 and len(found["answers"]) == 3
    for source, words, said in (
        ("http://127.0.0.1:9", (), "the server does not answer"),
        (url, ("--prompt", "bad"), "the server refuses the request"),
        *((url, ("--request", none), f"no request [--request]; got {none}") for none in ("[1]", "{", '{"seed": "x"}')),
        (url, ("--dtype", "int3"), "unknown precision [--dtype]; got int3"),
    ):
        assert call("gdistill-eval", "certify", source, *into, *words) != 0
        assert said in told()
    assert read(tmp_path / "answers.jsonl") == kept, "what failed wrote over no answers"


NOT_JUDGED: dict[str, dict[str, Any]] = {
    "presence_penalty": {"request": {"presence_penalty": 0.5}},
    "unknown noise": {"answer": {"noise": "mersenne"}},
    "return_token_ids": {"answer": {"choices": [{"text": "abc"}]}},
    "seed": {"request": {"seed": None}},
    "ids below": {"answer": {"choices": [{"token_ids": [10**6], "prompt_token_ids": [1]}]}},
    "no tokenizer": {"answer": {"choices": [{"token_ids": [1]}]}},
    "not a kept answer": {"answer": {"choices": 5}},
    "no answer has a token": {"answer": {"choices": [{"token_ids": [], "prompt_token_ids": [1]}]}},
}


@pytest.mark.parametrize("said", NOT_JUDGED)
def test_what_cannot_be_judged_is_refused_in_a_line(said: str, model: Any, certified: Certified, told: Told) -> None:
    change = NOT_JUDGED[said]
    record = served(model, 3)
    for part, values in change.items():
        record[part] |= values
    noise = () if "noise" in change.get("answer", {}) else KNOWN
    assert certified(record, noise=noise)[0] != 0
    error = told()
    assert said in error and "Traceback" not in error
