"""vLLM with shared noise: found through the entry point ``vllm.general_plugins``, no fork.

The stock engine draws each token from a generator that moves on, and tests drafts by a ratio of
probabilities. Here the noise is a function of (seed, position, token id), the token is
argmax(l / T + g), and a draft stays while it is that very token. So a request's text depends on its
seed alone: not on drafts, batch, order of arrival, preemption or prefix cache.

What is replaced asks the stock method for everything else: penalties, bad words, grammars,
temperature, top-k, nucleus and log-probabilities are the engine's.

One method is replaced because it is wrong: on a CPU vLLM 0.32 leaves the temperatures, top-k and
nuclei of drafted positions uninitialised (``expand``: its kernel writes to an int64 copy of the
result). That is what destroys its speculative text at any temperature but 0.
"""

# vLLM is there where the plugin runs, and need not be where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from shards.noise.murmur3 import wrapped
from trainer.serving.coupling import draw, keep_agreeing

TRIED = ("0.32.0",)
"""Versions of vLLM whose every bar was run."""
OTHER_RUNNER = """gdistill: the V2 model runner draws keyed noise without this plugin, and tests \
drafts by a ratio, which makes the text depend on them; for drafts that cannot change it set \
VLLM_USE_V2_MODEL_RUNNER=0"""
is_registered = False
"""Whether this process's engine draws from keyed noise."""


@dataclass(frozen=True)
class Keys:
    """What the noise of n rows of logits is a function of.

    Attributes:
        seeds: [n] int64, on the CPU.
        positions: [n] int64, of the token before the drawn one.
        dtype: Of the noise.
    """

    seeds: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]
    dtype: torch.dtype

    def select(self, rows: Int[Tensor, "m"]) -> Keys:
        """Those of some rows."""
        return replace(self, seeds=self.seeds[rows.cpu()], positions=self.positions[rows])


class KeyedRows(dict[int, torch.Generator]):
    """Stands where the engine hands on the generators of a step's requests.

    Args:
        drawn: Keys of the rows that get a token whatever the drafts: one per request.
        drafted: Keys of the rows at which there are drafts.
    """

    def __init__(self, drawn: Keys, drafted: Keys | None) -> None:
        self.drawn, self.drafted = drawn, drafted


def seed_of(request_id: str, seed: int | None) -> int:
    """A request's seed; without one it is a hash of its name, which is the same on every worker."""
    if seed is not None:
        return wrapped(seed)
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little") >> 1


def register() -> None:
    """Make this process's engine draw from shared noise; a second call changes nothing."""
    import vllm
    from vllm.logger import init_logger
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    global is_registered
    logger = init_logger("vllm.gdistill")
    if is_registered:
        return
    is_registered = True
    version = vllm.__version__.split("+")[0]
    if version not in TRIED:
        told = "gdistill: shared noise was tried with vLLM %s; this is %s: certify what it serves"
        logger.warning(told, ", ".join(TRIED), version)
    _replace(GPUModelRunner, "_sample", _keyed_step)
    _replace(GPUModelRunner, "propose_draft_token_ids", lambda stock: _safe_drafts(stock, logger))
    _replace(TopKTopPSampler, "__init__", _keyed_draw)
    _replace(rejection_sampler, "rejection_sample", _keyed_acceptance)
    _replace(rejection_sampler, "expand_batch_to_tokens", lambda _: expand)
    _warn_of_v2(logger)
    logger.info("gdistill: tokens are drawn with keyed noise, and drafts kept that equal them")


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(make(stock)))


def _warn_of_v2(logger: Any) -> None:
    """The other runner needs Triton, and draws this noise by itself."""
    try:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    except ImportError:
        return

    def make(stock: Any) -> Any:
        def begin(runner: Any, vllm_config: Any, *rest: Any, **named: Any) -> None:
            logger.warning(OTHER_RUNNER)
            stock(runner, vllm_config, *rest, **named)

        return begin

    _replace(Second, "__init__", make)


def _keyed_step(stock: Any) -> Any:
    """``GPUModelRunner._sample`` with keys in place of generators."""

    def sample(runner: Any, logits: Tensor | None, drafts: Any) -> Any:
        batch = runner.input_batch
        batch.generators.clear()  # none is ever asked, and one more step would move them on
        metadata = batch.sampling_metadata
        if drafts is not None and not sum(drafts.num_draft_tokens):
            drafts = None  # the stock test of drafts fails on none of them under top-k
        if metadata.all_greedy and drafts is None:
            return stock(runner, logits, drafts)
        metadata.generators, unkeyed = _keyed_rows(runner, drafts), metadata.generators
        try:
            return stock(runner, logits, drafts)
        finally:
            metadata.generators = unkeyed

    return sample


def _keyed_rows(runner: Any, drafts: Any) -> KeyedRows:
    """Keys of this step's rows of logits."""
    seeds = _seeds(runner)
    dtype = torch.float64 if runner.sampler.use_fp64_gumbel else torch.float32
    if drafts is None:  # of each token: a torch call is 0.1% of a small model's step
        return KeyedRows(Keys(seeds, runner.seq_lens[: len(seeds)].long() - 1, dtype), None)
    counts = torch.tensor(drafts.num_draft_tokens) + 1
    positions = runner.positions[drafts.logits_indices.long()]
    keys = Keys(seeds.repeat_interleave(counts), positions, dtype)
    drawn, drafted = drafts.bonus_logits_indices.long(), drafts.target_logits_indices.long()
    return KeyedRows(keys.select(drawn), keys.select(drafted))


def _keyed_draw(stock: Any) -> Any:
    """``TopKTopPSampler`` that draws with keys where it is handed some."""

    def begin(sampler: Any, *arguments: Any, **named: Any) -> None:
        stock(sampler, *arguments, **named)
        unkeyed = sampler.forward

        def forward(
            logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Any
        ) -> tuple[Tensor, Tensor | None]:
            if not isinstance(generators, KeyedRows):
                return unkeyed(logits, generators, k, p)
            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            logits = apply_top_k_top_p(logits, k, p)
            said = None
            if sampler.logprobs_mode == "processed_logits":
                said = logits
            elif sampler.logprobs_mode == "processed_logprobs":
                said = logits.log_softmax(dim=-1, dtype=torch.float32)
            keys = generators.drawn
            return draw(logits, keys.seeds, keys.positions, keys.dtype), said

        sampler.forward = forward
        first = torch.zeros(1, dtype=torch.int64)
        draw(torch.zeros(1, 2), first, first)  # compiles, so that no request waits for it

    return begin


def expand(
    values: Tensor, cumulative: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Values of requests, [b], as values of their drafts, [n]; one value replaced by another.

    Args:
        values: One per request.
        cumulative: [b], drafts of the requests up to each.
        num_tokens: n.
        replace_from: What is replaced.
        replace_to: By what.
    """
    counts = cumulative.diff(prepend=cumulative.new_zeros(1))
    spread = values.repeat_interleave(counts.long(), output_size=num_tokens)
    return torch.where(spread == replace_from, replace_to, spread).to(values.dtype)


def _keyed_acceptance(stock: Any) -> Any:
    """``rejection_sample`` by equality."""
    signature = inspect.signature(stock)

    def rejection_sample(*given: Any, **named: Any) -> Tensor:
        asked = signature.bind(*given, **named).arguments
        metadata, logits = asked["sampling_metadata"], asked["target_logits"]
        keyed = metadata.generators
        if not isinstance(keyed, KeyedRows) or asked.get("synthetic_mode"):
            return stock(*given, **named)
        counts = torch.tensor(asked["num_draft_tokens"], device=logits.device)
        keys = keyed.drafted
        assert keys is not None
        if metadata.all_greedy:
            targets = logits.argmax(dim=-1)
        else:
            greedy = None
            if not metadata.all_random:
                greedy = (metadata.temperature == 0).repeat_interleave(counts)
            targets = draw(logits, keys.seeds, keys.positions, keys.dtype, greedy)
        drafts, bonus = asked["draft_token_ids"].long(), asked["bonus_token_ids"][:, 0].long()
        return keep_agreeing(drafts, targets, counts, bonus, asked["max_spec_len"])

    return rejection_sample


@dataclass(frozen=True)
class Requests:
    """The requests of a step, in the order of the engine's batch.

    Attributes:
        ids: Their names in the engine.
        seeds: [b] int64, on the CPU.
        temperatures: [b] float32; 0 is greedy.
    """

    ids: list[str]
    seeds: Int[Tensor, "b"]
    temperatures: Tensor


def requests_of(runner: Any) -> Requests:
    """What a drafter may know of the requests that it drafts for."""
    ids, temperatures = runner.input_batch.req_ids, runner.input_batch.sampling_metadata.temperature
    if temperatures is None:
        temperatures = torch.zeros(len(ids))
    return Requests([*ids], _seeds(runner), temperatures)


def _seeds(runner: Any) -> Int[Tensor, "b"]:
    ids, known = runner.input_batch.req_ids, runner.requests
    seeds = [seed_of(name, known[name].sampling_params.seed) for name in ids]
    return torch.tensor(seeds, dtype=torch.int64)


def _safe_drafts(stock: Any, logger: Any) -> Any:
    """``propose_draft_token_ids`` of which no failure reaches a request."""

    def propose(runner: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any) -> Any:
        if not isinstance(sampled_token_ids, list):  # drafts stay on the device, by a model's head
            return stock(runner, scheduler_output, sampled_token_ids, *rest)
        look = getattr(runner.drafter, "look", None)
        try:
            if look is not None:  # rest: sampling metadata, hidden states, those of the drawn rows
                look(requests_of(runner), rest[2], rest[4])
            drafts = stock(runner, scheduler_output, sampled_token_ids, *rest)
        except Exception as error:
            told = "gdistill: the drafter failed, requests go on without drafts: %s: %s"
            logger.warning_once(told, type(error).__name__, str(error).split("\n")[0])
            return [[] for _ in sampled_token_ids]
        if not isinstance(drafts, list):
            return drafts
        size = runner.input_batch.vocab_size
        for row, tokens in enumerate(drafts):
            wrong = next((i for i, token in enumerate(tokens) if not 0 <= token < size), None)
            if wrong is not None:
                told = "gdistill: ids outside of the vocabulary are drafted, and left out; got %d; "
                logger.warning_once(told + "expected 0 to %d", tokens[wrong], size - 1)
                drafts[row] = tokens[:wrong]
        return drafts

    return propose
