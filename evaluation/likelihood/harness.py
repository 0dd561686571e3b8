"""A student as a model of lm-evaluation-harness.

    gdistill-lm-eval --model gdistill --model_args pretrained=RUN,noise=prior,draws=4 --tasks ...

The harness finds models in its registry only, which importing this module fills; the command
``gdistill-lm-eval`` is the harness's own with that import in front of it.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any, cast, get_args

import torch

from evaluation.likelihood.completion import CompletionScorer, Estimate, ScoringNoise
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.settings import code_version
from trainer.students.folder import open_model

try:
    from lm_eval import utils as rolling  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as error:
    what, remedy = "lm-evaluation-harness is not installed", "pip install 'gdistill[evaluation]'"
    raise UsageError(what, where="lm_eval", got=error, remedy=remedy) from error


HARNESS_DEVICE = "cuda:0"
"""What the harness's command asks of every model unless given."""


def _device(name: str) -> torch.device:
    """The harness's own default is the CPU where there is no GPU, and says so."""
    if name == HARNESS_DEVICE and not torch.cuda.is_available():
        print("no GPU here: computing on the CPU", file=sys.stderr)
        name = "cpu"
    return resolve_device(name)


@register_model("gdistill")
class GdistillLM(TemplateLM):
    """A trained student, MDLM, BD3-LM or AR.

    Args:
        pretrained: Model folder, or the ``--out`` of a training.
        noise: ``prior`` (the mean likelihood over ``draws`` draws) or ``none``.
        draws: Prior draws.
        estimate: ``one_pass`` or ``bound``; see ``evaluation.likelihood.completion``.
        masks: Monte-Carlo masks of the bound.
        nfe: Forward passes of ``generate_until``; the sampler's own unless given.
        seed: Of noise, masks and samples.
        batch_size: Rows at a time; changes no score but by rounding.
        device: ``auto`` or a torch device; the harness's own default, cuda:0, as it does itself:
            the CPU where there is no GPU.
        max_length: Tokens of context and completion; the student's row length unless given.
    """

    def __init__(
        self,
        pretrained: str,
        noise: str = "prior",
        draws: int = 4,
        estimate: str = "one_pass",
        masks: int = 32,
        nfe: int | None = None,
        seed: int = 0,
        batch_size: int | str = 16,
        device: str | None = "auto",
        max_length: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        unknown = {name: value for name, value in unknown.items() if value is not None}
        unknown.pop("max_batch_size", None)  # the harness passes it to every model
        if unknown:
            raise UsageError("unknown model_args", where="--model_args", got=", ".join(unknown))
        choices = {"noise": (noise, ScoringNoise), "estimate": (estimate, Estimate)}
        for name, (value, kinds) in choices.items():
            if value not in get_args(kinds):
                where, expected = "--model_args", " or ".join(get_args(kinds))
                raise UsageError(f"unknown {name}", where=where, got=value, expected=expected)
        folder = open_model(Path(pretrained), _device(device or "auto"))
        if folder.tokenizer is None:
            what, expected = "the model folder has no tokenizer", "tokenizer.json"
            raise UsageError(what, where=folder.directory, expected=expected)
        self.student, self.tokenizer = folder.student, folder.tokenizer
        self.weights_sha256 = folder.weights_sha256
        self.max_length = min(int(max_length or 1 << 30), self.student.config.row_length)
        self.batch_size = 16 if batch_size == "auto" else int(batch_size)
        self.nfe, self.seed = nfe, int(seed)
        kinds = cast(ScoringNoise, noise), int(draws), cast(Estimate, estimate), int(masks)
        self.scorer = CompletionScorer(self.student, *kinds, self.seed)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results."""
        return {
            "student": type(self.student).__name__.lower(),
            "weights_sha256": self.weights_sha256,
            "code_version": code_version(),
            "scoring": self.scorer.settings,
            "max_length": self.max_length,
        }

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; a student without one begins and ends with bos."""
        config = self.student.config
        found = config.bos_token_id if config.eos_token_id is None else config.eos_token_id
        if found is None:
            raise GdistillError("the student has neither eos nor bos", where="config.json")
        return found

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of every text: bos, or eos where there is none."""
        first = self.student.config.first_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, without anything in front."""
        return self.tokenizer.encode(string, add_special_tokens=False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, completion) for _, context, completion in requests]
        order = sorted(range(len(rows)), key=lambda number: (len(rows[number][0]), number))
        results: dict[int, tuple[float, bool]] = {}
        shown = not disable_tqdm
        with progress_bar("likelihood", len(rows), unit="text", main_process=shown) as bar:
            for _, group in groupby(order, key=lambda number: len(rows[number][0])):
                alike = list(group)
                for start in range(0, len(alike), self.batch_size):
                    members = alike[start : start + self.batch_size]
                    tokens = torch.tensor([rows[number][0] for number in members])
                    given = [rows[number][1] for number in members]
                    found = zip(*self.scorer(tokens, given, members), strict=True)
                    results |= dict(zip(members, found, strict=True))
                    bar.advance(len(members))
        return [results[number] for number in range(len(rows))]

    def _row(self, context: list[int], completion: list[int]) -> tuple[list[int], int]:
        """bos, the end of the context and the completion; and how many of them are given."""
        if not completion:
            raise GdistillError("an empty completion has no likelihood", where="lm_eval request")
        own = [] if context == [self.prefix_token_id] else [self.prefix_token_id]
        room = self.max_length - len(own) - len(completion)
        if room < (0 if own else 1):
            kept = completion[-(self.max_length - 1) :]  # longer than a row: its end is scored
            return [self.prefix_token_id, *kept], 1
        shown = context[max(0, len(context) - room) :]
        return [*own, *shown, *completion], len(own) + len(shown)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats of whole texts, in windows of a row without overlap."""
        results = []
        for request in requests:
            tokens, most = self.tok_encode(request.args[0]), self.max_length - 1
            windows = rolling.get_rolling_token_windows(tokens, self.prefix_token_id, most, 1)
            parts = [(("", ""), *rolling.make_disjoint_window(window)) for window in windows]
            results.append(sum(value for value, _ in self._loglikelihood_tokens(parts, True)))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations by the student's own sampler, up to the first stop string."""
        return [self._generate(number, *request.args) for number, request in enumerate(requests)]

    def _generate(self, number: int, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        wanted = int(options.get("max_gen_toks", self.max_length // 2))
        wanted = max(1, min(wanted, self.max_length - 2))
        ids = self.tok_encode(context)[-(self.max_length - 1 - wanted) :]
        given = torch.tensor([[self.prefix_token_id, *ids]])
        length = given.shape[1] + wanted
        settings = {} if self.nfe is None else {"nfe": int(self.nfe)}
        size = self.student.config.row_length if type(self.student).__name__ == "BD3LM" else length
        rows = self.student.generate(given, max_length=size, seed=self.seed + number, **settings)
        text = self.tokenizer.decode(rows[0, given.shape[1] : length].tolist())
        eos = self.tokenizer.decode([self.eot_token_id])
        for stop in [*until, eos]:
            text = text.split(stop)[0] if stop else text
        return text
