"""How much a token's own noise tells of it, given how much of the text.

    python -m benchmarks.quality.own_noise STORE --teacher DIR --student PLAIN [--noisy DIR] --out FILE.json

The noise says which token the teacher took: x = argmax(l + xi), to whoever knows the logits l. A student knows l as far
as it has read what the teacher had read. So the exact posterior noise of held-out rows is added to a *plain* student's
prediction: without any training this says what a student of that knowledge could learn from the noise.

    no context      p(v | xi): the share of the teacher's contexts, over training rows, in which argmax(l + xi) is v.
    masked, ahead   softmax(a log p + b xi), a and b fitted on one half of the rows, nats from the other, and back.
    who tells       a student with noise, where the token's own noise, or that of all others, is prior noise instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measure import machine
from pipeline.teacher import Teacher
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.noise.gumbel import DenseProbabilities, KeyedPosterior
from shards.noise.philox import PositionKeys
from shards.store.store import ShardStore
from trainer.loading import load_student

TIMES = (1.0, 0.9, 0.75, 0.5, 0.25)
AHEAD = (1, 2, 3, 4, 8)
Gain = dict[str, float]


def own_noise(
    store: Annotated[Path, typer.Argument(help="Store whose validation rows the teacher wrote.")],
    teacher: Annotated[Path, typer.Option(help="The teacher of the store.")],
    student: Annotated[Path, typer.Option(help="A plain whole-row student.")],
    noisy: Annotated[Path | None, typer.Option(help="A whole-row student with noise.")] = None,
    num: Annotated[int, typer.Option(help="Validation rows.")] = 64,
    num_contexts: Annotated[int, typer.Option(help="Contexts of training rows that vote.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of masks and noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results/quality-own-noise.json"),
) -> None:
    """What its own noise tells of a token, by context; nats and per cent."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    opened = ShardStore.open(store)
    rows = torch.from_numpy(opened.split("validation").read_rows(0, num)["tokens"]).long()
    model = Teacher.load(teacher, vocab_size=opened.manifest.vocab_size)
    found: dict[str, object] = {"machine": machine(torch.device("cpu")), "rows": num, "seed": seed}
    with torch.inference_mode():
        noise = Noise(rows, torch.cat([model.log_probs(part) for part in rows.split(16)]), seed)
        found["no context"] = without_context(opened, model, noise, num_contexts)
        found |= {"masked": masked_share(student, noise), "ahead": some_ahead(student, noise)}
        if noisy is not None:
            found["who tells"] = who_tells(noisy, noise)
    write_json_atomic(out, found)


class Noise:
    """Rows, what the teacher says of each token but the first ([B, L - 1, V], nats), and exact posterior noise."""

    def __init__(self, rows: Tensor, said: Tensor, seed: int) -> None:
        self.rows, self.said, self.seed = rows, said, seed

    def posterior(self, where: Tensor, is_prior: Tensor | None = None) -> KeyedPosterior:
        """Noise of the places of a mask, row by row; prior noise where ``is_prior`` of these."""
        row, position = where.nonzero(as_tuple=True)
        tokens, log_probs = self.rows[where], self.log_probs(where)
        own = log_probs.gather(1, tokens[:, None])[:, 0]
        keys = PositionKeys(self.seed, row, position)
        return KeyedPosterior(keys, tokens, own, DenseProbabilities(log_probs), is_prior)

    def log_probs(self, where: Tensor) -> Tensor:
        """The teacher's, at the places of a mask; not place 0."""
        return self.said[where[:, 1:]]


def hits(scores: Tensor, tokens: Tensor) -> float:
    """Per cent of the places where the best is the token."""
    return 100 * (scores.argmax(-1) == tokens).double().mean().item()


def mean_and_error(nats: Tensor) -> tuple[float, float]:
    """Mean, and 1.96 standard errors of it."""
    return nats.mean().item(), 1.96 * nats.std().item() / len(nats) ** 0.5


def nll(scores: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(scores.float(), tokens, reduction="none")


def without_context(store: ShardStore, model: Teacher, noise: Noise, num_contexts: int, num: int = 512) -> Gain:
    """p(v | xi), every context's vote counted, beside the unigram of the same contexts."""
    length = noise.rows.shape[1]
    train = torch.from_numpy(store.split("train").read_rows(0, num_contexts // (length - 1) + 1)["tokens"]).long()
    contexts = torch.cat([model.log_probs(part).flatten(0, 1) for part in train.split(16)])[:num_contexts]
    where = torch.zeros_like(noise.rows, dtype=torch.bool)
    where.view(-1)[torch.randperm(where.numel())[: 2 * num]] = True
    where[:, 0] = False
    tokens, xi = noise.rows[where][:num], noise.posterior(where).gumbels()[:num]
    unigram = store.resources["unigram_log_probs"].float()
    written = contexts.exp().mean(0)  # what the teacher writes, over all contexts
    num = len(tokens)
    votes = torch.stack([torch.bincount((contexts + one).argmax(-1), minlength=len(unigram)) for one in xi])
    shares = 0.97 * votes / len(contexts) + 0.03 * written
    prior = nll(written.log().expand(num, -1), tokens)
    gain, error = mean_and_error(prior - nll(shares.log(), tokens))
    return {
        "places": num,
        "contexts": len(contexts),
        "unigram, %": hits(written.expand(num, -1), tokens),
        "unigram + xi, %": hits(unigram + xi, tokens),
        "all contexts vote, %": hits(shares, tokens),
        "unigram, nats": prior.mean().item(),
        "noise tells, nats": gain,
        "+-": error,
        "the teacher leaves open, nats": -noise.log_probs(where)[:num].gather(1, tokens[:, None]).mean().item(),
    }


def read_with(log_probs: Tensor, xi: Tensor, tokens: Tensor, teacher: Tensor) -> Gain:
    """What xi adds to a prediction: by argmax(log p + xi), and by a softmax of both, fitted on the other half."""
    halves, read = [slice(0, None, 2), slice(1, None, 2)], torch.empty(len(tokens))
    for fitted, scored in (halves, halves[::-1]):
        a, b = fit(log_probs[fitted], xi[fitted], tokens[fitted])
        read[scored] = nll(a * log_probs[scored] + b * xi[scored], tokens[scored])
    plain = nll(log_probs, tokens)
    gain, error = mean_and_error(plain - read)
    return {
        "places": len(tokens),
        "plain, %": hits(log_probs, tokens),
        "plain + xi, %": hits(log_probs + xi, tokens),
        "teacher, %": hits(teacher, tokens),
        "plain, nats": plain.mean().item(),
        "noise tells, nats": gain,
        "+-": error,
        "the teacher leaves open, nats": nll(teacher, tokens).mean().item(),
    }


def fit(log_probs: Tensor, xi: Tensor, tokens: Tensor) -> tuple[float, float]:
    """a and b of least NLL of softmax(a log p + b xi)."""
    with torch.inference_mode(False), torch.enable_grad():
        given, best = (log_probs.clone(), xi.clone(), tokens.clone()), torch.tensor([1.0, 0.5], requires_grad=True)
        search = torch.optim.LBFGS([best], max_iter=20)

        def loss() -> Tensor:
            search.zero_grad()
            value = cross_entropy(best[0] * given[0] + best[1] * given[1], given[2])
            value.backward()
            return value

        search.step(loss)  # pyright: ignore[reportArgumentType]
    return best[0].item(), best[1].item()


def masked_share(student: Path, noise: Noise, most: int = 3000) -> dict[str, Gain]:
    """Where a share t of the row is masked."""
    model, found = load_student(student).eval(), {}
    for t in TIMES:
        mask = torch.rand(noise.rows.shape) <= t
        mask[:, 0] = False
        log_probs = predicted(model, noise.rows, mask)
        xi, teacher, tokens = noise.posterior(mask).gumbels(), noise.log_probs(mask), noise.rows[mask]
        some = torch.randperm(len(tokens))[:most]
        found[str(t)] = read_with(log_probs[some], xi[some], tokens[some], teacher[some])
    return found


def some_ahead(student: Path, noise: Noise) -> dict[str, Gain]:
    """Where all before a place is known, and k - 1 tokens before the asked one are not, nor any behind."""
    model, parts = load_student(student).eval(), {k: [] for k in AHEAD}
    for start in range(16, noise.rows.shape[1] - max(AHEAD), 16):
        mask = torch.zeros_like(noise.rows, dtype=torch.bool)
        mask[:, start:] = True
        for k in AHEAD:
            asked = torch.zeros_like(mask)
            asked[:, start + k - 1] = True
            given = predicted(model, noise.rows, mask, asked), noise.posterior(asked).gumbels(), noise.rows[asked]
            parts[k].append((*given, noise.log_probs(asked)))
    return {str(k): read_with(*map(torch.cat, zip(*part, strict=True))) for k, part in parts.items()}


def predicted(
    model: Any, rows: Tensor, mask: Tensor, asked: Tensor | None = None, noise: KeyedPosterior | None = None
) -> Tensor:
    """Log-probabilities of V tokens at the asked places, all of the mask by default."""
    condition = None
    if noise is not None:
        condition = model.embed_noise(noise).laid_out(mask.nonzero(as_tuple=True), mask.shape)
    asked, seen = mask if asked is None else asked, rows.masked_fill(mask, model.mask_id)
    return model.predict_at(seen, asked, condition)[:, :-1]


def who_tells(noisy: Path, noise: Noise) -> dict[str, dict[str, float]]:
    """NLL of a student with noise at a tenth of the masked places, by whose noise it is given."""
    model, found = load_student(noisy).eval(), {}
    for t in TIMES:
        mask = torch.rand(noise.rows.shape) <= t
        mask[:, 0] = False
        asked = mask & (torch.rand(mask.shape) < 0.1)
        tokens, is_asked = noise.rows[asked], asked[mask]
        every = torch.ones_like(is_asked)
        given = {"all noise": ~every, "own alone": ~is_asked, "others' alone": is_asked, "none": every}
        nats = {
            name: nll(predicted(model, noise.rows, mask, asked, noise.posterior(mask, prior)), tokens)
            for name, prior in given.items()
        }
        found[str(t)] = {name: values.mean().item() for name, values in nats.items()}
        pairs = {"own tells": ("none", "own alone"), "others tell": ("own alone", "all noise")}
        for name, (less, more) in pairs.items():
            found[str(t)][name], found[str(t)][f"{name}, +-"] = mean_and_error(nats[less] - nats[more])
        found[str(t)]["places"] = len(tokens)
    return found


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(own_noise)
    run_command(app)
