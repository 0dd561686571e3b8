"""Is what a server said what it should have drawn?

Two questions about the answers of an OpenAI-compatible server, each by one clean pass of the model:

- **the noise**: where the stream is known (the engine with :mod:`trainer.serving`, and vLLM's V2
  runner by itself), every token must be argmax(l / T + g) of its seed and position; greedy answers
  must be argmax l. One altered token is found.
- **the law**: without it, the surprise -log p(x_t) of the drawn tokens must be p's entropy on
  average. Under a right engine the sum of the differences is a martingale, whose variance is the
  sum of the surprises' variances under p: z is standard normal for long samples, whatever the
  prompts and wherever the answers end.

p is the model's distribution as the request cuts it: temperature, then top-k, then the nucleus, as
vLLM does it (``v1/sample/ops/topk_topp_sampler.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import requests
import torch
import typer
from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig

from evaluation.certificate import certify_samples, clean_logits, decide, kept
from evaluation.samples import open_regular, read_records
from shards.atomic import require_writable, write_bytes_atomic, write_json_atomic
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.language_model.loading import find_pretrained, load_causal_model
from shards.noise.murmur3 import engine_gumbels, wrapped
from trainer.sampling.noise import TokenRule
from trainer.students.folder import load_tokenizer

NOISES = {"murmur3": torch.float32, "murmur3-float64": torch.float64}
"""Streams by name, and the precision of their variates."""
TIMEOUT_S = 600
"""That one answer may take."""
LEAST_TEMPERATURE = 0.01
"""vLLM draws at this one where a lower one is asked for; 0 is greedy."""
LEAST_P = 0.05
"""A law test that comes out less likely convicts: a right engine passes 19 of 20 times."""
TIES = {"float32": 2e-5, "bfloat16": 0.05}
"""Two scores so close, in units of the largest |l / T|, and a token so close to where the nucleus
ends, are rounding's to decide: an engine computes a pass in other batches than the certificate. By
the precision that the engine computes in."""
CHANGES_THE_LAW: Mapping[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "use_beam_search")),
    **dict.fromkeys(("logit_bias", "bad_words", "structured_outputs", "allowed_token_ids")),
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
}
"""Settings that the certificate does not undo, and their harmless values (besides 0 and nothing)."""


@dataclass(frozen=True)
class Answer:
    """One sequence that a server said.

    Attributes:
        name: Where it stands, for messages.
        prompt: Token ids.
        tokens: Token ids that were drawn.
        temperature: 0 is greedy.
        top_k: 0 cuts nothing.
        top_p: 1 cuts nothing.
        seed: None where the answer does not say it.
        noise: One of ``NOISES``; None where the stream is unknown.
    """

    name: str
    prompt: list[int]
    tokens: list[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    noise: str | None = None

    @property
    def rule(self) -> TokenRule:
        """What the request cuts off: top-k first, then the nucleus of the rest."""
        return TokenRule(nucleus_p=self.top_p, nucleus_rule="crossing", top_k=self.top_k or None)


@dataclass
class Verdict:
    """What was found of one answer.

    Attributes:
        name: The answer's.
        num_tokens: Tokens looked at.
        checked: "noise", "greedy", or "law" where no stream is known.
        num_agreeing: Tokens that are what the noise, or greedy decoding, asks for.
        num_ties: Others that rounding can explain.
        first: The first token that it cannot: position among the answer's tokens, the token, what
            the noise asks for, and by how many nats that is better (None: the token was cut off).
        excess: Sum of surprise minus entropy, nats; 0 for greedy answers.
        variance: Sum of the surprises' variances under p, nats squared.
        surprise: Sum of surprises, nats.
        entropy: Sum of entropies, nats.
        num_impossible: Tokens that the request's own settings cut off.
    """

    name: str
    num_tokens: int
    checked: str
    num_agreeing: int = 0
    num_ties: int = 0
    first: tuple[int, int, int, float | None] | None = None
    excess: float = 0.0
    variance: float = 0.0
    surprise: float = 0.0
    entropy: float = 0.0
    num_impossible: int = 0

    @property
    def num_faults(self) -> int:
        """Tokens that nothing explains."""
        if self.checked == "law":
            return self.num_impossible
        return self.num_tokens - self.num_agreeing - self.num_ties


@dataclass(frozen=True)
class ServedCertificate:
    """What was found of all answers.

    Attributes:
        verdicts: One per answer.
    """

    verdicts: list[Verdict]

    @property
    def drawn(self) -> list[Verdict]:
        """Answers that were drawn at random."""
        return [verdict for verdict in self.verdicts if verdict.checked != "greedy"]

    @property
    def z(self) -> float:
        """Of the test of the law: (surprise - entropy) / standard deviation."""
        variance = sum(verdict.variance for verdict in self.drawn)
        return sum(v.excess for v in self.drawn) / math.sqrt(variance) if variance else 0.0

    @property
    def p(self) -> float:
        """How often a right engine has a z so far from 0, on either side."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    @property
    def is_right(self) -> bool:
        """No token is at fault, and where no stream is known the law is passed."""
        has_law = any(verdict.checked == "law" for verdict in self.verdicts)
        return not self.num_faults and (self.p >= LEAST_P or not has_law)

    @property
    def num_faults(self) -> int:
        """Tokens that nothing explains."""
        return sum(verdict.num_faults for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "is_right": self.is_right,
            "z": self.z,
            "p": self.p,
            "nats_per_token": self.per_token("surprise"),
            "entropy_per_token": self.per_token("entropy"),
            "answers": [asdict(verdict) for verdict in self.verdicts],
        }

    def per_token(self, what: str) -> float:
        """Mean of ``surprise`` or ``entropy`` over the drawn tokens, nats."""
        count = sum(verdict.num_tokens for verdict in self.drawn)
        return sum(getattr(verdict, what) for verdict in self.drawn) / max(1, count)

    def lines(self) -> Iterator[str]:
        """What a reader should know, a line each."""
        for verdict in self.verdicts:
            if verdict.checked != "law" and verdict.first is not None:
                place, token, winner, margin = verdict.first
                by = "the request cuts it off" if margin is None else f"by {margin:.3g} nats"
                yield (
                    f"{verdict.name}: {verdict.num_faults} of {verdict.num_tokens} tokens are not "
                    f"the ones asked for; first: token {place} is {token}, expected {winner}, {by}"
                )
        for checked, words in (("noise", "argmax(l / T + g)"), ("greedy", "argmax l")):
            found = [verdict for verdict in self.verdicts if verdict.checked == checked]
            if found:
                tokens = sum(v.num_tokens for v in found)
                agreeing = sum(v.num_agreeing for v in found)
                ties = sum(v.num_ties for v in found)
                yield f"{agreeing} of {tokens} tokens are {words}, {ties} ties within rounding"
        if self.drawn:
            yield (
                f"law: {self.per_token('surprise'):.3f} nats per token, entropy "
                f"{self.per_token('entropy'):.3f}; z = {self.z:.2f}, p = {self.p:.2g}"
            )
            if cut := sum(verdict.num_impossible for verdict in self.drawn):
                yield f"{cut} tokens are ones that the requests cut off"


def allowed(scaled: Float[Tensor, "n v"], rule: TokenRule, slack: float = 0.0) -> Float[Tensor, "n v"]:
    """l / T where a request may draw, -inf elsewhere; see :func:`evaluation.certificate.kept`."""
    return scaled.masked_fill(~kept(scaled, rule, slack), -torch.inf)


def judge(answer: Answer, logits: Float[Tensor, "n v"], tie: float) -> Verdict:
    """Compare one answer's tokens with what the model's logits before each of them ask for.

    Args:
        answer: Of n tokens.
        logits: Float32.
        tie: What rounding may do; see ``TIES``.
    """
    greedy = answer.temperature == 0
    checked = "greedy" if greedy else "noise" if answer.noise else "law"
    verdict = Verdict(answer.name, len(answer.tokens), checked)
    tokens = torch.tensor(answer.tokens, dtype=torch.int64)
    scaled = logits if greedy else logits / answer.temperature
    if not greedy:
        _weigh(verdict, allowed(scaled, answer.rule), allowed(scaled, answer.rule, tie), tokens)
    if checked == "law":
        return verdict
    scores = scaled.double()
    if not greedy:
        assert answer.seed is not None and answer.noise is not None
        seeds = torch.full((len(tokens),), answer.seed, dtype=torch.int64)
        places = len(answer.prompt) - 1 + torch.arange(len(tokens))
        scores = scores + engine_gumbels(seeds, places, 0, logits.shape[1], NOISES[answer.noise]).double()
    within = tie * scaled.abs().amax(dim=-1).clamp_min(1.0)
    margins, winners, is_tie = decide(scores, scaled, tokens, answer.rule, within, tie)
    is_agreeing = margins > 0
    verdict.num_agreeing = int(is_agreeing.sum())
    verdict.num_ties = int((is_tie & ~is_agreeing).sum())
    for place in (~is_agreeing & ~is_tie).nonzero()[:1, 0].tolist():
        margin = -float(margins[place])
        by = margin if math.isfinite(margin) else None
        verdict.first = (place, answer.tokens[place], int(winners[place]), by)
    return verdict


def _weigh(verdict: Verdict, law: Float[Tensor, "n v"], wide: Float[Tensor, "n v"], tokens: Tensor) -> None:
    """Sums of the test of the law; a token that was cut off has no surprise to count."""
    log_p = law.double().log_softmax(dim=-1)
    own = log_p.gather(1, tokens[:, None])[:, 0]
    cut = wide.gather(1, tokens[:, None])[:, 0].isinf()
    surprises = torch.where(log_p.isinf(), 0.0, -log_p)
    entropy = (log_p.exp() * surprises).sum(dim=-1)
    variance = (log_p.exp() * surprises.square()).sum(dim=-1) - entropy.square()
    counted = own.isfinite()
    verdict.num_impossible = int(cut.sum())
    verdict.surprise = float(-own[counted].sum())
    verdict.entropy = float(entropy[counted].sum())
    verdict.excess = verdict.surprise - verdict.entropy
    verdict.variance = float(variance[counted].clamp_min(0).sum())


def certify_answers(
    answers: list[Answer], model: Any, vocab_size: int, tie: float = TIES["float32"]
) -> ServedCertificate:
    """Judge every answer by one pass of the model over its prompt and tokens.

    Args:
        answers: What a server said.
        model: A causal language model of transformers.
        vocab_size: V.
        tie: What rounding may do; see ``TIES``.

    Raises:
        GdistillError: For a token id outside of the vocabulary.
    """
    rows = [answer.prompt + answer.tokens for answer in answers]
    for answer, ids in zip(answers, rows, strict=True):
        if not answer.prompt or not all(0 <= token < vocab_size for token in ids):
            what, remedy = "an answer is not of this model", "give the model served as --teacher"
            got = f"{len(answer.prompt)} tokens of prompt, ids up to {max(ids, default=-1)}"
            facts = {"where": answer.name, "expected": f"a prompt, and ids below {vocab_size}"}
            raise GdistillError(what, got=got, remedy=remedy, **facts)
    found: dict[int, Verdict] = {}
    for number, logits in clean_logits(model, rows, vocab_size):
        start = len(answers[number].prompt) - 1
        here = logits[start : start + len(answers[number].tokens)].cpu()
        found[number] = judge(answers[number], here, tie)
    return ServedCertificate([found[number] for number in range(len(answers))])


def read_answers(
    file: Path, tokenizer: Any, noise: str | None = None, defaults: Mapping[str, Any] | None = None
) -> list[Answer]:
    """Answers that somebody kept: a line each, ``{"request": {...}, "answer": {...}}``.

    Args:
        file: JSON lines; the request is the body that was sent, the answer the one that came.
        tokenizer: The model's, for prompts and answers that are given as text alone.
        noise: The stream, where the answers do not name it.
        defaults: Settings that the server takes where a request leaves them out.

    Raises:
        GdistillError: For a line that is no such pair.
        UsageError: For a request whose settings the certificate does not undo.
    """
    found = []
    for line, record in read_records(file, "answer"):
        where = f"{file}, line {line}"
        try:
            request = {name: value for name, value in record["request"].items() if value is not None}
            found += answers_of({**(defaults or {}), **request}, record["answer"], where, tokenizer, noise)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what, got = "not a kept answer", f"{type(error).__name__}: {error}"
            expected = '{"request": the body sent, "answer": the JSON that came back}'
            raise GdistillError(what, where=where, got=got, expected=expected) from error
    if not any(answer.tokens for answer in found):
        raise UsageError("no answer has a token, so there is nothing to certify", where=file)
    return found


def answers_of(
    request: Mapping[str, Any], answer: Mapping[str, Any], where: str, tokenizer: Any, noise: str | None = None
) -> Iterator[Answer]:
    """The sequences of one answer, a prompt's n ones after the other.

    Raises:
        UsageError: For a request whose settings the certificate does not undo, or one without a
            seed though its stream is known.
    """
    for name, harmless in CHANGES_THE_LAW.items():
        if request.get(name) and request[name] != harmless:
            what, got = "the certificate does not undo this setting", request[name]
            expected = "requests with temperature, top_k, top_p and seed alone"
            raise UsageError(what, where=f"{where}, {name}", got=got, expected=expected)
    noise = noise or answer.get("noise")
    if noise is not None and noise not in NOISES:
        raise UsageError("unknown noise", where=where, got=noise, expected=" or ".join(NOISES))
    seed, num = request.get("seed"), int(request.get("n", 1))
    seed = answer.get("seed") if seed in (None, -1) else seed  # to vLLM both are none
    temperature = float(request.get("temperature", 1.0))
    temperature = max(temperature, LEAST_TEMPERATURE) if temperature else 0.0
    if noise and seed is None and temperature:
        remedy = "send one with the request, or serve with make serve, which returns it"
        raise UsageError("the answer does not say its seed", where=where, remedy=remedy)
    for choice in answer["choices"]:
        index = int(choice.get("index", 0))
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        if prompt is None:
            prompt = _prompt_ids(request["prompt"], index // num, tokenizer)
        tokens, names = choice.get("token_ids"), (choice.get("logprobs") or {}).get("tokens") or []
        if tokens is None and names and all(str(name).startswith("token_id:") for name in names):
            tokens = [int(name.removeprefix("token_id:")) for name in names]
        if tokens is None:
            what = "the answer does not say its token ids, and text can be cut in several ways"
            remedy = 'ask with "return_token_ids": true'
            raise UsageError(what, where=where, got=", ".join(choice), remedy=remedy)
        yield Answer(
            name=f"{where}, choice {index}" if len(answer["choices"]) > 1 else where,
            prompt=list(prompt),
            tokens=list(tokens),
            temperature=temperature,
            top_k=max(0, int(request.get("top_k", 0))),
            top_p=float(request.get("top_p", 1.0)),
            seed=None if seed is None else wrapped(int(seed) + index % num),
            noise=noise,
        )


def defaults_of(folder: Path) -> dict[str, Any]:
    """What vLLM takes where a request leaves it out: the model's ``generation_config.json``."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True).to_diff_dict()
    except OSError:  # there is none
        return {}


def _prompt_ids(prompt: Any, index: int, tokenizer: Any) -> list[int]:
    """Of a prompt that is text, ids, or a list of either."""
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        prompt = prompt[index]
    if not isinstance(prompt, list) and tokenizer is None:
        what = "no tokenizer beside the model, and the prompt is given as text"
        remedy = 'ask with "return_token_ids": true, or save the tokenizer there'
        raise UsageError(what, where="--teacher", remedy=remedy)
    return prompt if isinstance(prompt, list) else tokenizer(prompt)["input_ids"]


def ask(url: str, num: int, prompt: str, request: str) -> Iterator[dict[str, Any]]:
    """Ask a server for ``num`` answers, with the seeds from the request's on.

    Args:
        url: The server's address, with or without ``/v1``.
        num: Answers.
        prompt: The same for all.
        request: JSON of its other fields: ``max_tokens``, ``temperature``, ...

    Raises:
        UsageError: When the request is none.
        GdistillError: When the server does not answer, or with an error.
    """
    base, session = url.rstrip("/").removesuffix("/v1") + "/v1", requests.Session()
    try:
        settings = json.loads(request)
        first, step = int(settings.get("seed") or 0), int(settings.get("n") or 1)
    except (ValueError, TypeError, AttributeError) as error:
        expected = "a JSON object; seed and n: whole numbers"
        raise UsageError("no request", where="--request", got=request, expected=expected) from error
    try:
        named = session.get(f"{base}/models", timeout=TIMEOUT_S)
        named.raise_for_status()
        model = named.json()["data"][0]["id"]
        for index in range(num):
            body = {"model": model, "prompt": prompt, "return_token_ids": True, **settings}
            body["seed"] = first + index * step
            reply = session.post(f"{base}/completions", json=body, timeout=TIMEOUT_S)
            if reply.status_code != 200:
                got = f"{reply.status_code} {reply.text[:200]}"
                raise GdistillError("the server refuses the request", where=base, got=got)
            yield {"request": body, "answer": reply.json()}
    except (requests.RequestException, ValueError, LookupError) as error:
        what, got = "the server does not answer", f"{type(error).__name__}: {error}"
        remedy = "is it running, and is this its address?"
        raise GdistillError(what, where=base, got=got, remedy=remedy) from error


def is_url(source: str) -> bool:
    """Whether a source is a server's address."""
    return source.startswith(("http://", "https://"))


def is_served(source: str) -> bool:
    """Whether a source is a server, or a file of a server's answers."""
    if is_url(source):
        return True
    try:
        with open_regular(Path(source)) as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {"request", "answer"} <= first.keys()


def certify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLES",
            help="Folder or .jsonl file of gdistill-sample; or the URL of an OpenAI-compatible "
            'server, or a .jsonl file of its answers: {"request": ..., "answer": ...}.',
        ),
    ],
    teacher: Annotated[str, typer.Option(help="Causal LM: local folder, or a hub id in its cache.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for certificate.json (the samples' own; of a server here).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    noise: Annotated[
        str | None, typer.Option(help="Of a server: murmur3, murmur3-float64, if answers do not name it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of a server: the precision that it computes in.")] = "float32",
    num: Annotated[int, typer.Option(help="Of a URL: answers to ask for.")] = 32,
    prompt: Annotated[str, typer.Option(help="Of a URL: what is asked.")] = "Once upon a time",
    request: Annotated[
        str, typer.Option(help="Of a URL: further fields of the request, JSON.")
    ] = '{"max_tokens": 100, "temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "seed": 0}',
) -> None:
    """Find the noise of each sample again and compare each token with argmax(l + tau xi).

    Samples that a teacher has verified must agree everywhere, or the command fails; those of a
    student get the share that does. The teacher computes in the precision that verified them, which
    the certificate names (float32 where none did); ties within its rounding are listed there.

    Answers of a server must be argmax(l / T + g) where the noise is known, and greedy ones argmax
    l; else their surprise must be the model's entropy, or the command fails.
    """
    if not is_served(source):
        certify_samples(Path(source), teacher, out, device)
        return
    if dtype not in TIES:
        raise UsageError("unknown precision", where="--dtype", got=dtype, expected=", ".join(TIES))
    files = find_pretrained(teacher, role="teacher", local_files_only=True)
    size = files.num_logits  # an engine draws from all of them
    folder = out or (Path() if is_url(source) else Path(source).parent)
    require_writable(folder)
    file = folder / "answers.jsonl" if is_url(source) else Path(source)
    if is_url(source):
        lines = [json.dumps(record) + "\n" for record in ask(source, num, prompt, request)]
        write_bytes_atomic(file, "".join(lines).encode())
    answers = read_answers(file, load_tokenizer(files.folder), noise, defaults_of(files.folder))
    model = load_causal_model(files, dtype, resolve_device(device), vocab_size=size).network  # type: ignore[arg-type]
    certificate = certify_answers(answers, model, size, TIES[dtype])
    write_json_atomic(folder / "certificate.json", certificate.to_json())
    for line in certificate.lines():
        typer.echo(line)
    if not certificate.is_right:
        what, num = "the server does not draw from this model", certificate.num_faults
        got = f"{num} tokens at fault, law p = {certificate.p:.2g}"
        expected = f"no token at fault, and p of {LEAST_P} or more where no noise is known"
        remedy = f"see {folder / 'certificate.json'}; is it the model that was served?"
        raise GdistillError(what, where=source, got=got, expected=expected, remedy=remedy)
