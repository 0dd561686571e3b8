"""Text that samples are held against, and every score of their distribution in one call.

Each score stands with its 95% interval over samples and its **floor**: what as many other rows of
the text itself score against the same reference.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from evaluation.samples import SampleSet, read_data_rows, read_references, short
from evaluation.score import Score
from evaluation.text.distance import (
    MIN_SAMPLES,
    Estimate,
    Rows,
    distinct_beginnings,
    energy_distance,
    frechet_distance,
    gradient_moment,
    jackknife,
    memorised_counts,
    ngram_vectors,
    repetition_share,
    require_enough,
    typicality_gap,
)
from evaluation.text.mauve_divergence import TextFeatures, mauve_score, text_features
from evaluation.text.reading import Judging
from shards.errors import UsageError
from shards.language_model.loading import find_tokenizer

MOST_TRAINING_ROWS = 20_000


@dataclass(frozen=True)
class ReferenceText:
    """Rows of held-out text.

    Attributes:
        rows: What n-grams are counted of: token ids of a store, numbered words of a .jsonl file.
        unit: ``tokens`` or ``words``.
        texts: The rows as samples' text is written; None where a store keeps no tokenizer.
        training: Rows that students were trained on, in the same unit; None where not known.
        source: Where all this stands.
        tokenizer: Of a store.
        bos_id: The token in front of a store's rows, which is no part of their text.
        tokenizer_sha256: Of the tokenizer that wrote a store's rows, where it is known.
    """

    rows: Rows
    unit: str
    texts: list[str] | None
    training: np.ndarray | None
    source: Path
    tokenizer: Any = None
    bos_id: int | None = None
    tokenizer_sha256: str | None = None

    @classmethod
    def read(cls, place: Path, num: int | None = None, length: int | None = None) -> ReferenceText:
        """Validation rows of a store (training rows may differ: a corpus may be sorted),
        or the texts of a .jsonl file.

        Args:
            place: A store, a run's folder, or a file with a ``text`` field.
            num: At most so many rows of a store.
            length: Tokens of a store's held-out rows that are looked at: as many as samples have.

        Raises:
            UsageError: Where there is no text.
            GdistillError: For a damaged store, or a line without a text.
        """
        if not place.is_dir():
            texts = [text for text in read_references(place) if text]
            return cls([words_of(text) for text in texts], "words", texts, None, place)
        held_out = read_data_rows(place, "validation", num)
        training = read_data_rows(place, "train", MOST_TRAINING_ROWS).rows
        rows, digest = held_out.rows[:, :length].tolist(), held_out.tokenizer_sha256
        folders = [place / name for name in ("tokenizer", "store/tokenizer", "tokens/tokenizer")]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return cls(rows, "tokens", None, training, place, tokenizer_sha256=digest)
        tokenizer = find_tokenizer(folder)
        found = cls(rows, "tokens", [], training, place, tokenizer, held_out.bos_id, digest)
        found.texts.extend(found.decode(found.rows))  # type: ignore[union-attr]
        return found

    def decode(self, rows: Rows) -> list[str]:
        """Rows of token ids as the sampler writes text: without the token in front."""
        kept = [row[1:] if row[:1] == [self.bos_id] else row for row in rows]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=False)

    def require_texts(self) -> list[str]:
        """The texts.

        Raises:
            UsageError: Where the store keeps no tokenizer.
        """
        if self.texts is None:
            what = "a judge reads text, and this store keeps no tokenizer"
            remedy = "leave out --judge: the energy distance reads token ids"
            raise UsageError(what, where=self.source, remedy=remedy)
        return self.texts

    def rows_of(self, samples: SampleSet) -> Rows:
        """A file of samples in the unit of these rows.

        Raises:
            UsageError: For token ids of another tokenizer.
        """
        if self.unit == "words":
            return [words_of(text) for text in samples.require_texts()]
        ours, theirs = samples.setting("store", "tokenizer", "sha256"), self.tokenizer_sha256
        if ours != theirs and None not in (ours, theirs):
            what, got = "the samples are of another tokenizer than the text", f"tokenizer {short(ours)}"
            remedy = "hold them against texts, a .jsonl file: gdistill-extract references writes one"
            raise UsageError(what, where=samples.source, got=got, expected=f"{theirs}, of {self.source}", remedy=remedy)
        return samples.tokens


def words_of(text: str) -> list[int]:
    """Words and marks of a text, each by the CRC-32 of its UTF-8."""
    return [zlib.crc32(word.encode()) for word in re.findall(r"\w+|[^\w\s]", text)]


def _some(rows: Rows, places: Int[np.ndarray, "k"]) -> list[Any]:
    return [rows[place] for place in places]


class Ruler:
    """What measures samples against a text.

    Args:
        text: The text.
        num_samples: Samples of a set: as many rows are the reference, as many others the floor, or
            half of the text each where it has fewer.
        judging: A judge for scores of its states; None for those that need no model.

    Attributes:
        own_rows: The rows whose scores are the floor.
        ranking: The distance that ranks: by the judge where there is one.
        typical: The judge's states of the own rows.

    Raises:
        UsageError: For too few samples or rows of text.
    """

    def __init__(self, text: ReferenceText, num_samples: int, judging: Judging | None) -> None:
        require_enough(num_samples, "samples")
        more = "hold out more rows (corpus.validation_fraction), or give a file of texts"
        require_enough(len(text.rows), text.source, 2 * MIN_SAMPLES, more)
        self.text, self.judging = text, judging
        self.num_rows = min(num_samples, len(text.rows) // 2)
        # In an order of its own: a corpus may be sorted.
        order = np.random.default_rng(0).permutation(len(text.rows))
        self.own, reference = order[: self.num_rows], order[self.num_rows : 2 * self.num_rows]
        self.own_rows = _some(text.rows, self.own)
        self.vectors = ngram_vectors(_some(text.rows, reference))
        self.ranking = "energy_distance" if judging is None else "frechet_distance"
        if judging is not None:
            self.features = self.features_of(text.require_texts())
            self.typical = self.features.select(self.own)
            self.states = self.features.means[reference].astype(np.float64)
            self.gradients = self.features.gradients[reference].astype(np.float64)

    def features_of(self, texts: Sequence[str]) -> TextFeatures:
        """The judge's states of texts."""
        assert self.judging is not None
        return text_features(self.judging.judge, texts, self.max_tokens, self.judging.kept)

    @property
    def max_tokens(self) -> int:
        """The judge's tokens of a text that its states are of."""
        assert self.judging is not None
        return min(self.judging.limits.max_tokens, self.judging.judge.context_length)

    def measure(self, rows: Rows, features: TextFeatures | None) -> dict[str, Estimate]:
        """Score -> estimate, of rows in the text's unit; by states too where there are any."""
        found = {"energy_distance": energy_distance(ngram_vectors(rows), self.vectors)}
        if features is not None:
            states, typical = (part.means.astype(np.float64) for part in (features, self.typical))
            found["frechet_distance"] = jackknife(lambda kept: frechet_distance(states[kept], self.states), len(states))
            gradients = features.gradients.astype(np.float64)
            found["gradient_moment"] = gradient_moment(gradients, self.gradients)
            found["typicality_gap"] = typicality_gap(states, self.states, typical)
        repeated = np.array([repetition_share(row) for row in rows])
        found["repeated_4_grams"] = jackknife(lambda kept: repeated[kept].mean(), len(rows))
        found["distinct_beginnings"] = jackknife(lambda kept: distinct_beginnings(_some(rows, kept)), len(rows))
        if self.text.training is not None:
            counts = memorised_counts(rows, self.text.training)
            found["memorised_16_grams"] = jackknife(
                lambda kept: counts[kept, 0].sum() / max(1, counts[kept, 1].sum()), len(rows)
            )
        return found

    @cached_property
    def floor(self) -> dict[str, Estimate]:
        """What the text's own rows score; the typicality gap is that of one half to the other."""
        if self.judging is None:
            return self.measure(self.own_rows, None)
        found = self.measure(self.own_rows, self.typical)
        halves = np.array_split(self.typical.means.astype(np.float64), 2)
        return found | {"typicality_gap": typicality_gap(halves[0], self.states, halves[1])}

    def mauve(self, features: TextFeatures, references: TextFeatures | None = None) -> Score:
        """MAUVE of texts against all texts of the reference, as it is published, unless others are given."""
        assert self.judging is not None
        return mauve_score(self.judging.judge, features, references or self.features, max_tokens=self.max_tokens)

    @cached_property
    def mauve_floor(self) -> Score:
        """MAUVE of the text's own rows against its other ones."""
        others = np.setdiff1d(np.arange(len(self.text.rows)), self.own)
        return self.mauve(self.typical, self.features.select(others))

    def scores(self, samples: SampleSet) -> list[Score]:
        """All scores of a file of samples against the text, MAUVE among them with a judge."""
        features = None
        if self.judging is not None:
            features = self.features_of(samples.require_texts())
        settings = {
            "reference": f"{self.num_rows} rows of {self.text.source.name}",
            "n-grams of": self.text.unit,
            **(self.judging.judge.identity if self.judging else {}),
        }
        num, counts = len(samples.tokens), {"floor_samples": self.num_rows, "least_samples": MIN_SAMPLES}
        found = []
        for name, one in self.measure(self.text.rows_of(samples), features).items():
            own = self.floor[name]
            details = {"floor": own.value, "floor_interval_95": [own.low, own.high], **counts}
            found.append(Score(name, one.value, num, (one.low, one.high), settings, details))
        if features is not None:
            ours, own = self.mauve(features), self.mauve_floor
            details = {"floor": own.value, "floor_interval_95": list(own.interval or ()), **counts}
            found.append(replace(ours, details={**ours.details, **details}))
        return found
