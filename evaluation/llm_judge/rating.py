"""Ratings of samples: every answer kept, failures counted, a score per dimension."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.bootstrap import PerSample
from evaluation.llm_judge.endpoint import Endpoint
from evaluation.llm_judge.rubric import DIMENSIONS, INSTRUCTIONS, parse_ratings, prompt_for
from evaluation.score import Score, mean_interval
from shards.base import GdistillError, append_line, canonical_json, progress_bar, whole_lines

CHARACTERS_PER_TOKEN = 4
"""A usual figure for English; the estimate says that it is one."""


@dataclass(frozen=True)
class Estimate:
    """What the questions will cost, before one is asked.

    Attributes:
        num_questions: Texts without a kept answer.
        input_tokens: About how many go in.
        output_tokens: At most how many come back.
        price: In the currency of the prices; None without prices.
    """

    num_questions: int
    input_tokens: int
    output_tokens: int
    price: float | None


class AnswerFile:
    """Answers by question, one JSON object a line; a torn last line is dropped.

    Args:
        path: Where they are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, str] = {}
        for number, line in enumerate(whole_lines(path), start=1):
            try:
                record = json.loads(line)
                self._answers[record["question_sha256"]] = str(record["answer"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise GdistillError(
                    "a kept answer is damaged",
                    where=f"{path}:{number}",
                    got=error,
                    remedy="delete the line: its question is asked again",
                ) from error

    def get(self, key: str) -> str | None:
        """The answer to a question."""
        return self._answers.get(key)

    def add(self, key: str, answer: str, **more: Any) -> None:
        """Keep an answer, whatever it says."""
        self._answers[key] = answer
        record = {"question_sha256": key, "answer": answer, **more}
        try:
            append_line(self.path, json.dumps(record))
        except OSError as error:
            raise GdistillError(
                "cannot keep an answer", where=self.path, got=error.strerror
            ) from error


def question_sha256(endpoint: Endpoint, text: str) -> str:
    """Names a question: model, settings, rubric and text."""
    asked = [endpoint.model, endpoint.temperature, endpoint.max_tokens, prompt_for(text)]
    return hashlib.sha256(canonical_json(asked)).hexdigest()


def estimate_cost(
    endpoint: Endpoint,
    texts: Sequence[str],
    answers: AnswerFile,
    prices_per_million: tuple[float, float] | None = None,
) -> Estimate:
    """Tokens, and money where prices are known, of the questions that are still open."""
    missing = [t for t in dict.fromkeys(texts) if answers.get(question_sha256(endpoint, t)) is None]
    characters = sum(len(text) + len(INSTRUCTIONS) + 10 for text in missing)
    inside, outside = characters // CHARACTERS_PER_TOKEN, len(missing) * endpoint.max_tokens
    price = None
    if prices_per_million is not None:
        price = (inside * prices_per_million[0] + outside * prices_per_million[1]) / 1e6
    return Estimate(len(missing), inside, outside, price)


def rate_samples(
    endpoint: Endpoint, texts: Sequence[str], answers: AnswerFile
) -> list[dict[str, int] | None]:
    """Ratings of each text; None where the answer could not be read.

    An answer that cannot be read is kept and counted, and its question is not asked again: a judge
    that is asked until it obeys is another judge.

    Raises:
        GdistillError: When the endpoint gives no answer; those so far are kept.
    """
    with progress_bar("judge", len(texts), unit="text") as bar:
        for text in texts:
            key = question_sha256(endpoint, text)
            if answers.get(key) is None:
                answers.add(key, endpoint.ask(prompt_for(text)), model=endpoint.model)
            bar.advance(1)
    ratings: list[dict[str, int] | None] = []
    for text in texts:
        try:
            ratings.append(parse_ratings(answers.get(question_sha256(endpoint, text)) or ""))
        except ValueError:
            endpoint.faults["unreadable ratings"] += 1
            ratings.append(None)
    return ratings


def rating_scores(
    ratings: Sequence[Mapping[str, int] | None],
    indices: Sequence[int],
    endpoint: Endpoint,
    where: object = "",
) -> list[Score]:
    """A score per dimension over the samples whose ratings could be read.

    Raises:
        GdistillError: When none could.
    """
    read = [(index, rating) for index, rating in zip(indices, ratings, strict=True) if rating]
    num_failed = len(ratings) - len(read)
    if not read:
        raise GdistillError(
            "no answer holds ratings",
            where=where,
            got=f"{num_failed} answers without the JSON object",
            remedy="look at the kept answers; another --model may follow the instructions",
        )
    rubric = hashlib.sha256(INSTRUCTIONS.encode()).hexdigest()
    settings = {
        "model": endpoint.model,
        "url": endpoint.url,
        "rubric_sha256": rubric,
        "temperature": endpoint.temperature,
        "max_tokens": endpoint.max_tokens,
    }
    scores = []
    for name in DIMENSIONS:
        values = [float(rating[name]) for _, rating in read]
        scores.append(
            Score(
                name=f"judged_{name}",
                value=sum(values) / len(values),
                num_samples=len(values),
                interval=mean_interval(values),
                settings=settings,
                details={"num_unreadable": num_failed},
                cautions=(f"{num_failed} of {len(ratings)} answers could not be read",)
                if num_failed
                else (),
                per_sample=PerSample.of_mean([index for index, _ in read], values),
            )
        )
    return scores
