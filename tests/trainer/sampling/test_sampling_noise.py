"""The randomness of samples: noise, conditioned on as in training, and how tokens are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import AutoModel, TopPLogitsWarper

from shards.codec.protocol import CODECS, Codec, TeacherOutput, make_codec
from shards.errors import UsageError
from shards.noise.embedding import Noise, dense_arrivals
from shards.noise.gumbel import KeyedPrior
from shards.noise.nucleus import FIRST_CANDIDATES, truncate_to_nucleus
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sampling_cases import LENGTH, VOCAB, Largest, command, draw, open_rows, read, save, tiny_student
from trainer.loading import generate
from trainer.objective.batch import StoredRowNoise
from trainer.sampling import noise as draws
from trainer.sampling.adaptive import AdaptiveSampler
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import SampleKeys, TokenRule, sampling_noise
from trainer.sampling.stopping import StopRule
from trainer.students.folder import STUDENT_FILE, export_model, open_model
from trainer.students.registry import Student
from trainer.training.checkpoint import run_identity
from trainer.training.settings import build_student

TOP_2 = {"name": "topk", "parameters": {"num_entries": 2}}
IDS = torch.tensor([5, 0, 17])


def arrivals(seed: int, ids: Tensor, draw: int = 0) -> Tensor:
    noise = sampling_noise(seed, ids, LENGTH, VOCAB, draw=draw)
    return dense_arrivals(noise).view(len(ids), LENGTH, VOCAB)


def are_new(values: list[Tensor]) -> bool:
    """Whether they are draws of their own; of many float32 numbers a few agree by rounding."""
    together = torch.stack(values)
    return len(together.unique()) > 0.99 * together.numel()


def test_every_name_gives_noise_of_its_own() -> None:
    """Exponentials of other names agree nowhere; those of one name agree whatever the batch."""
    ours = arrivals(3, IDS)
    assert torch.equal(arrivals(3, IDS[1:2])[0], ours[1])
    assert are_new([*ours, *arrivals(4, IDS), *arrivals(3, IDS, draw=1), *arrivals(3, IDS + 1)])


def test_a_sample_drawn_anew_sees_other_noise_or_other_draws(verifier: str) -> None:
    """argmax of x_0 in one pass is a function of the noise alone: it changes only with it."""
    noisy, plain, ids = tiny_student(), tiny_student(conditioning="none"), torch.arange(40)
    entropic = StopRule(min_entropy_nats=100.0, entropy_window=LONG, max_tries=2)
    for student, sampler in (
        (noisy, AncestralSampler(nfe=1, decision="argmax")),
        (plain, AncestralSampler(nfe=1)),
        (plain, AdaptiveSampler(verifier=verifier, mixture_weight=1.0)),
    ):
        once, twice = (draw(student, one, ids) for one in (sampler, replace(sampler, stop=entropic)))
        assert (twice.details["attempt"] == 1).all() and (once.nfe == 1).all() and (twice.nfe == 2).all()
        assert (twice.tokens != once.tokens).any(dim=1).float().mean() > 0.9
    stored = training_noise(make_codec("full"), VOCAB).at(torch.ones(ROWS, LONG, dtype=torch.bool))
    with pytest.raises(UsageError, match="cannot be redrawn"):
        AncestralSampler(nfe=1, stop=entropic).sample(noisy, open_rows(noisy, ROWS, LONG), ids[:ROWS], stored, 3)


# Truncated as a student's training noise was, whoever asks the student.


def edit_config(model: Path, **codec: Any) -> Path:
    """Name a codec in the config, or take the field out as in older models."""
    config = json.loads((model / "config.json").read_text())
    del config["codec"]
    (model / "config.json").write_text(json.dumps({**config, **codec}))
    return model


def generated(student: Student, **options: Any) -> list[list[int]]:
    return generate(student.eval(), num_samples=6, nfe=3, seed=5, **options).tolist()


def test_generate_and_the_command_truncate_alike(tmp_path: Path) -> None:
    model = edit_config(save(tmp_path / "model"), codec=TOP_2)
    assert command(model, "--num", 6, "--nfe", 3, "--seed", 5, "--out", tmp_path / "out") == 0
    sampled = [record["tokens"] for record in read(tmp_path / "out" / "samples.jsonl")]
    student = AutoModel.from_pretrained(model)
    assert generated(student) == sampled
    whole = generated(tiny_student())
    assert whole != sampled
    noise = sampling_noise(5, torch.arange(6), LENGTH, VOCAB)
    assert generated(student, noise=noise) == whole, "noise that is given is taken as it is"


def test_models_without_a_codec_take_the_whole_prior(tmp_path: Path) -> None:
    """Older models name it in ``student.json`` only, where the command finds it."""
    model = edit_config(save(tmp_path / "model"))
    assert generated(AutoModel.from_pretrained(model)) == generated(tiny_student())
    assert open_model(model).student.codec is None
    (model / STUDENT_FILE).write_text(json.dumps({"run": {"store": {"codec": TOP_2}}}))
    named = tiny_student()
    named.config.codec = TOP_2
    assert generated(open_model(model).student) == generated(named)


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
def test_an_exported_model_names_the_codec(tmp_path: Path, conditioning: str) -> None:
    store = ShardStore.open(write_store(tmp_path / "store", "topk"))
    config = tiny_run(model__conditioning=conditioning)
    student = build_student(config, store, None)
    record = {"run": run_identity(config, store.manifest, None), "validation": None, "step": 0}
    export_model(tmp_path / "model", student, student.state_dict(), record, store)
    exported = AutoModel.from_pretrained(tmp_path / "model")
    assert exported.codec == (store.codec if conditioning == "gumbel" else None)


@pytest.mark.parametrize("codec", ["topk", {"name": "topk"}, {"name": "top", "parameters": {}}])
def test_a_bad_codec_is_named(codec: Any) -> None:
    student = tiny_student()
    student.config.codec = codec
    with pytest.raises(UsageError, match="codec"):
        generate(student, num_samples=1, nfe=1)


# Noise of the same content is conditioned on alike, from a store and in sampling.

ROWS, LONG, SEED = 6, 9, 5
SETTINGS = {
    "topk": {"num_entries": 12},
    "seeded": {"tolerance_nats": 1e-3},
    "posterior": {"num_entries": 16},
    "hidden": {"dtype": "float16"},
}
ROUNDING = {"full": 2.0**-9, "quantized": 0.05, "topk": 2.0**-9, "seeded": 2e-3}
"""Largest relative error of a share where a codec rounds xi; the others store no xi."""


def training_noise(codec: Codec, vocab_size: int) -> StoredRowNoise:
    """Stored noise whose content is the prior noise of the samples.

    The posterior is F_x = p_x E_0 and F_j = E_j + p_j E_0: with p_x = E_x / E_0 and p_j = 0 it is
    the prior, entry by entry. Such a p is not normalised, which no codec minds.
    """
    ids, positions = torch.arange(ROWS).repeat_interleave(LONG), torch.arange(LONG).repeat(ROWS)
    keys = PositionKeys(derive_seed(SEED, "sampling noise"), ids, positions, 0)
    prior = dense_arrivals(KeyedPrior(keys, vocab_size))
    tokens = prior.argmin(1)
    own = (prior.gather(1, tokens[:, None]).squeeze(1) / keys.first_arrivals()).log()
    resources = {
        "unigram_log_probs": torch.linspace(0, -2, vocab_size).log_softmax(0),
        "lm_head": 300 * torch.eye(vocab_size),
        "lm_head_bias": torch.full((vocab_size,), -300.0),
    }
    hidden = one_hot(tokens, vocab_size).float()
    log_probs = 300 * hidden - 300 + own[:, None]

    def rows(values: Tensor) -> Tensor:
        return values.unflatten(0, (ROWS, LONG))

    seen = rows(hidden)[:, 1:] if codec.needs_hidden else None
    scored = TeacherOutput(rows(log_probs)[:, 1:], rows(tokens)[:, 1:], torch.arange(ROWS), seen)
    encoded = codec.encode(scored, keys.seed, resources)
    arrays = {name: torch.cat([a[:, :1], a], dim=1) for name, a in encoded.items()}
    used = {name: resources[name] for name in codec.resource_names}
    own_rows = rows(tokens), rows(own), torch.arange(ROWS)
    return StoredRowNoise(codec, arrays, *own_rows, keys.seed, 0, used)


def relative(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())


def watched(student: Student, codec: str, tau: float) -> list[tuple[Noise, float, Tensor]]:
    """What its conditioner was given and gave while a student sampled."""
    student.config.codec = {"name": codec, "parameters": SETTINGS.get(codec, {})}
    seen: list[tuple[Noise, float, Tensor]] = []
    student.conditioner.register_forward_hook(lambda module, arguments, output: seen.append((*arguments[:2], output)))
    generate(student, num_samples=ROWS, nfe=2, seed=SEED, tau=tau)
    return seen.copy()


@pytest.mark.parametrize("tau", [1.0, 0.85])
@pytest.mark.parametrize("name", CODECS)
def test_for_every_codec(name: str, tau: float) -> None:
    student = tiny_student(vocab_size=300, row_length=LONG, noise={"prior_weight": 0.5})
    student.conditioner.set_unigram(torch.linspace(0, -3, 300).log_softmax(0))
    ((noise, seen_tau, sampled),) = watched(student, name, tau)  # the noise is embedded once
    assert seen_tau == tau and noise.num_positions == ROWS * (LONG - 1)
    stored = training_noise(make_codec(name, **SETTINGS.get(name, {})), 300)
    mask = torch.arange(LONG).expand(ROWS, -1) > 0
    some = mask.clone()
    some[1, 3:5] = False
    for places in (mask, some):
        trained = student.embed_noise(stored.at(places), tau).embedding
        chosen = student.embed_noise(noise.select(places[mask]), tau).embedding
        assert relative(trained, chosen) <= ROUNDING.get(name, 1e-4)
    assert relative(chosen, sampled[some[mask]]) < 1e-6
    another = student.embed_noise(noise.redrawn(1), tau).embedding
    assert relative(another, sampled) > 0.3, "the case must tell draws apart"


# How tokens are chosen: the nucleus by both rules, top-k, in the memory of a few positions.

WIDE = 8 * FIRST_CANDIDATES


def log_probs_and_keys(num_rows: int, length: int, size: int) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows * length, size + 1, generator=generator)
    where = torch.ones(num_rows, length, dtype=torch.bool)
    return logits.log_softmax(-1), SampleKeys(1, torch.arange(num_rows)).at("test", where)


def test_samplers_hold_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_student("ar", "none").save_pretrained(tmp_path)
    student, ids = tiny_student(conditioning="none"), torch.arange(40)
    nucleus, apd = AncestralSampler(nfe=1, nucleus_p=0.9), AdaptiveSampler(verifier=str(tmp_path))
    for sampler in (nucleus, apd):
        whole = draw(student, sampler, ids)
        with monkeypatch.context() as patch, Largest(torch.float64) as watch:
            patch.setattr(draws, "MOST_ELEMENTS", {"cpu": 1200})  # of 440 positions x 11 tokens
            assert torch.equal(draw(student, sampler, ids).tokens, whole.tokens)
        assert 0 < watch.elements <= 1320


def test_no_position_no_token() -> None:
    log_probs, keys = log_probs_and_keys(0, 4, 2000)
    for rule in (TokenRule(), TokenRule(nucleus_p=0.9), TokenRule("argmax")):
        assert rule.choose(log_probs, keys).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "probs", "expected"),
    [
        ({"temperature": 0.5}, [2, 1, 1], [4, 1, 1]),
        # at temperature 1/2 probabilities are squared, so fewer tokens make up the nucleus
        ({"temperature": 0.5, "nucleus_p": 0.7}, [2, 1, 1], [1, 0, 0]),
        ({"nucleus_p": 0.8}, [2, 1, 1], [2, 1, 0]),
        ({"top_k": 2}, [4, 3, 2, 1], [4, 3, 0, 0]),
        ({"top_k": 2}, [4, 3, 3, 1], [4, 3, 3, 0]),  # ties stay
        # of 4 and 3 in 7 the nucleus of 0.8 keeps one: top-k comes first
        ({"top_k": 2, "nucleus_p": 0.8}, [4, 3, 2, 1], [1, 0, 0, 0]),
        ({"top_k": 9}, [4, 3, 2, 1], [4, 3, 2, 1]),
    ],
)
def test_settings_by_hand(settings: Any, probs: list[float], expected: list[float]) -> None:
    found = TokenRule(**settings).probabilities(torch.tensor([probs], dtype=torch.float64).log())
    wanted = torch.tensor([expected], dtype=torch.float64)
    assert torch.allclose(found, wanted / wanted.sum())


@pytest.mark.parametrize("p", ["0.9", "0.5", "0.05"])
def test_nuclei_of_the_authors(ops: dict[str, Tensor], p: str) -> None:
    ours = truncate_to_nucleus(ops["nucleus.p"].flatten(0, 1), float(p))
    theirs = ops[f"nucleus.out.{p}"].flatten(0, 1)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def random_probs(num_rows: int, size: int, scale: float, dtype: Any = None) -> Tensor:
    logits = scale * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    return logits.to(dtype).double().softmax(-1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_crossing_rule_is_that_of_transformers(p: float) -> None:
    probs = random_probs(50, 300, 2.0)
    theirs = TopPLogitsWarper(p)(torch.zeros(50, 1, dtype=torch.long), probs.log()).softmax(-1)
    assert torch.allclose(truncate_to_nucleus(probs, p, "crossing"), theirs)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
@pytest.mark.parametrize("p", [0.2, 0.6, 0.8, 0.9])
def test_large_vocabularies_agree_with_a_full_sort(p: float, rule: Any) -> None:
    """Of equal tokens the smallest ids are kept, also across the edge of the first look; flat rows
    are wider than it, and change nothing for those beside them."""
    tied = torch.ones(3, WIDE, dtype=torch.float64)
    for row, num_above in zip(tied, (0, FIRST_CANDIDATES // 2, 2 * FIRST_CANDIDATES), strict=True):
        row[WIDE - num_above :] = 3.0
    rows = [random_probs(20, WIDE, 3.0, torch.bfloat16), tied / tied.sum(-1, keepdim=True)]
    probs = torch.cat([*rows, *(random_probs(4, WIDE, scale) for scale in (0.1, 4.0))])
    ordered, ids = probs.sort(descending=True, stable=True)
    sums = ordered.cumsum(-1)
    kept = sums <= p if rule == "strict" else sums - ordered < p
    kept[:, 0] = True
    expected = torch.zeros_like(probs).scatter_(1, ids, ordered * kept)
    expected /= expected.sum(-1, keepdim=True)
    found = truncate_to_nucleus(probs, p, rule)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected)
    # Three of four tokens add up to p exactly: the strict rule keeps a sum of p, crossing needs no more.
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64)
    assert (truncate_to_nucleus(probs, 0.875, rule) > 0).tolist() == [[True, True, True, False]]
    assert truncate_to_nucleus(probs, 1e-9, rule).tolist() == [[0, 1, 0, 0]]
    assert truncate_to_nucleus(probs, 1.0, rule) is probs
