"""The bench of drafters: every rule keeps the target's law, and no drafter sees its own draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2, chisquare, kstest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.drafting.__main__ import main
from benchmarks.drafting.drafters import Drafter, Form, Prefix
from benchmarks.drafting.evaluation import (
    Counts,
    decode,
    ngram_tree_proposer,
    proposer,
    sampled_tree_proposer,
    tree_proposer,
)
from benchmarks.drafting.target import Cache, Target, at_quantile, own_text
from benchmarks.drafting.training import Training, losses, posterior_noise, posterior_uniform, train
from trainer.sampling.ngrams import ORDER, NGrams

SLOTS = 3
FORMS = [
    Form(name="steps", kind="steps", layers=(1,)),
    Form(name="slots", kind="slots", layers=(0, 1)),
    Form(name="slots-soft", kind="slots", layers=(0, 1), noise="soft"),
    Form(name="slots-cross", kind="slots", layers=(0, 1), noise="cross"),
    Form(name="small", kind="small", layers=(1,)),
    Form(name="heads", kind="heads"),
    Form(name="heads-soft", kind="heads", noise="soft"),
    Form(name="lora", kind="lora", layers=(0, 1), rank=2),
    Form(name="lora-soft", kind="lora", layers=(0, 1), rank=2, noise="soft"),
    Form(name="lora-ids", kind="lora", layers=(0, 1), rank=2, noise="ids"),
    Form(name="uniform", kind="lora", layers=(0, 1), rank=2, noise="uniform"),
]
ADAPTED = [form for form in FORMS if form.kind == "lora"]


def write_llama(path: Path, seed: int, vocab_size: int, spread: float) -> Path:
    """A small Llama with sharp distributions, as transformers writes it."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    shape |= {"tie_word_embeddings": True, "initializer_range": spread}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 40 tokens."""
    return write_llama(tmp_path_factory.mktemp("target"), 0, 40, 0.3)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """The same, read by the bench."""
    return Target(folder)


def trained(form: Form, target: Target, size: int = 40, steps: int = 3, curve: list[float] | None = None) -> Drafter:
    """A drafter after three steps, so that what it reads of noise changes what it says."""
    torch.manual_seed(1)
    ids = torch.randperm(target.vocab_size)[:size]
    drafter = Drafter(form, target, ids, torch.zeros(size), SLOTS)
    weights = [w for w in drafter.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-2)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(target.vocab_size, (4, 12), generator=generator)
    for _ in range(steps):
        starts = torch.arange(1, 12 - SLOTS)
        loss, _ = losses(drafter, target, text, starts, Training(flops=1), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if curve is not None:
            curve.append(loss.item())
    return drafter.eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_learns_a_small_text(form: Form, target: Target) -> None:
    curve: list[float] = []
    trained(form, target, steps=40, curve=curve)
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])


def test_the_target_is_the_model_of_the_folder(folder: Path, target: Target) -> None:
    tokens = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(folder)(tokens).logits
    found = target.read(tokens)[0]
    cache = Cache.empty(2, target.shape, 3, 9)
    parts = []
    for part in tokens.split([4, 5], 1):
        parts.append(target.read(part, cache)[0])
        cache.lengths += part.shape[1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_slot_does_not_see_its_own_noise_nor_later_ones(form: Form, target: Target) -> None:
    drafter = trained(form, target)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(40, (2, 7), generator=generator)
    cache = Cache.empty(2, target.shape, 2, 7)
    states = target.read(tokens[:, :-1], cache)[1]
    cache.lengths += 6
    at = torch.full((2, 1), 6)
    prefix = Prefix(states[:, -1:], tokens[:, -1:], at, cache.keys, cache.seen())
    noise = torch.rand((2, 1, SLOTS, 40), generator=generator)
    noise = -torch.log(-torch.log(noise)) * 4
    with torch.no_grad():
        first = drafter(prefix, drafter.hears(noise))
        changed = noise.clone()
        changed[:, :, 1:] = changed[:, :, 1:].flip(-1).roll(1, 0)
        other = drafter(prefix, drafter.hears(changed))
    torch.testing.assert_close(first[:, :, :2], other[:, :, :2])
    if form.kind == "steps" or form.noise != "none":
        assert not torch.allclose(first[:, :, 2], other[:, :, 2])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_coupled_text_is_the_targets_own_decode(form: Form, target: Target) -> None:
    prompts = torch.randint(40, (5, 4), generator=torch.Generator().manual_seed(5))
    propose = proposer(trained(form, target, 30))
    found = decode(target, propose, prompts, 16, SLOTS, "coupled", 7)
    assert torch.equal(found.text[:, :20], own_text(target, prompts, 20, 7, 0))
    # A pass writes what it kept and one token more.
    assert int(found.tokens.sum()) == int(found.kept.sum() + found.passes.sum())


@pytest.mark.parametrize("form", ADAPTED, ids=str)
def test_adapters_leave_the_texts_own_rows_to_the_target(form: Form, target: Target) -> None:
    """The first slot is then the target itself, and every draw of it is the target's own."""
    prompts = torch.randint(40, (5, 4), generator=torch.Generator().manual_seed(6))
    drafter = trained(form, target)
    for own, theirs in zip(drafter.layers, target.layers, strict=True):
        assert torch.equal(own.qkv.whole.weight, theirs.qkv.weight)
    rule = "quantile" if form.noise == "uniform" else "coupled"
    found = decode(target, proposer(drafter), prompts, 16, SLOTS, rule, 8)
    assert found.kept[0] == found.reached[0] > 0
    assert 0 < found.kept[1] < found.reached[1]


def test_noise_of_the_text_tells_its_tokens_and_is_noise() -> None:
    """Behind tokens of the target's law, the posterior has the law of fresh noise."""
    generator = torch.Generator().manual_seed(17)
    p = torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03]).expand(5000, -1)
    tokens = torch.multinomial(p, 1, generator=generator)[:, 0]
    xi = posterior_noise(p.log(), tokens, generator)
    assert torch.equal((p.log() + xi).argmax(-1), tokens)
    u = posterior_uniform(p.log(), tokens, generator)
    assert torch.equal(at_quantile(p, u), tokens)
    laws = [kstest((-xi[:, token]).exp().numpy(), "expon") for token in range(5)]
    laws.append(kstest(u.numpy(), "uniform"))
    assert min(law.pvalue for law in laws) > 1e-4


@pytest.mark.parametrize("form", FORMS[:-1], ids=str)
def test_text_of_a_tree_is_the_targets_own_in_fewer_passes(form: Form, target: Target) -> None:
    prompts = torch.randint(40, (6, 4), generator=torch.Generator().manual_seed(14))
    drafter = trained(form, target)
    chain = decode(target, proposer(drafter), prompts, 24, SLOTS, "coupled", 15)
    passes = []
    for nodes, width in ((SLOTS, 1), (12, 5), (40, 20)):
        propose = tree_proposer(drafter, nodes, width)
        found = decode(target, propose, prompts, 24, SLOTS, "coupled", 15, room=nodes + 2)
        assert torch.equal(found.text[:, :28], own_text(target, prompts, 28, 15, 0))
        passes.append(int(found.passes.sum()))
    # One path is the chain itself; more paths meet more of the target's tokens.
    assert passes[0] == int(chain.passes.sum())
    assert passes[0] > passes[1] > passes[2]


def test_a_drafter_that_may_stop_takes_no_step_without_hope(target: Target) -> None:
    """A step is taken while the paths so far reach a chance; which draws there are is not changed."""
    prompts = torch.randint(40, (6, 4), generator=torch.Generator().manual_seed(14))
    drafter, found = trained(FORMS[0], target), []
    for reach in (0.0, 0.3, 1.1):
        propose = tree_proposer(drafter, 12, 5, reach=reach)
        found.append(decode(target, propose, prompts, 24, SLOTS, "coupled", 15, room=14))
        assert torch.equal(found[-1].text[:, :28], own_text(target, prompts, 28, 15, 0))
    every, some, first = ((each.steps / each.passes).mean().item() for each in found)
    assert every == SLOTS > some > first == 1
    assert found[0].passes.sum() < found[2].passes.sum() and float(found[2].kept[1:].sum()) == 0


def test_counts_read_the_last_tokens_of_every_path(target: Target) -> None:
    """Behind each path the law of the n-grams, whatever was drafted side by side."""
    rows = torch.randint(5, (8, 40), generator=torch.Generator().manual_seed(18))
    model, slots = NGrams(rows.numpy(), 5), 2
    drafter, text = Counts(model, slots), rows[:2, :9]
    at = torch.tensor([[6], [8]])
    prefix = drafter.knows(Prefix(torch.zeros(2, 1, 1), text.gather(1, at), at, [], torch.zeros(2, 1, 9)), text)
    first, grown = drafter.grow(prefix, prefix.tokens[:, None], 0, torch.ones(1), None)
    tokens = torch.tensor([[[4, 1]], [[0, 2]]])
    second, _ = drafter.grow(prefix, tokens, 1, torch.ones(1), grown.of(torch.zeros(2, 2, dtype=torch.long)))
    for row in range(2):
        known = text[row, : at[row, 0] + 1].tolist()
        assert torch.allclose(first[row, 0, 0].exp(), torch.from_numpy(model.probabilities(known[-ORDER + 1 :])))
        for path, token in enumerate(tokens[row, 0].tolist()):
            law = model.probabilities([*known, token][-ORDER + 1 :])
            assert torch.allclose(second[row, 0, path].exp(), torch.from_numpy(law))
    prompts, passes = torch.randint(40, (6, 4), generator=torch.Generator().manual_seed(14)), []
    learnt = own_text(target, prompts, 40, 3, 0).numpy()
    for blind in (False, True):
        propose = ngram_tree_proposer(NGrams(learnt, 40), SLOTS, 6, blind=blind)
        found = decode(target, propose, prompts, 24, SLOTS, "coupled", 15, room=8)
        assert torch.equal(found.text[:, :28], own_text(target, prompts, 28, 15, 0))
        passes.append(int(found.passes.sum()))
    assert passes[0] < passes[1] < int(found.tokens.sum())


LAWS = [FORMS[0], *FORMS[2:5], FORMS[6], *FORMS[-2:], "tree of steps", "tree of slots", "counts", "quantile"]


@pytest.mark.parametrize("form", LAWS, ids=str)
def test_a_rule_keeps_the_law(form: Form | str, tmp_path: Path) -> None:
    """The law of three tokens, against the target's probabilities of all of them."""
    target = Target(write_llama(tmp_path, 9, 5, 0.2))
    count, prompt = 6000, torch.tensor([1, 3, 2])
    # Token 4 or so is none that the drafter can name.
    if isinstance(form, Form) or form == "quantile":
        propose = proposer(trained(form if isinstance(form, Form) else FORMS[-1], target, 4))
    elif form == "counts":
        text = torch.randint(4, (9, 9), generator=torch.Generator().manual_seed(19))
        propose = sampled_tree_proposer(Counts(NGrams(text.numpy(), 5), SLOTS), 30, [[0.5, 0.4, 0.3, 0.2]])
    else:
        drafter = trained(FORMS[form == "tree of slots"], target, 4)
        drafter.norms[0].weight.data *= 3  # it is too sure, so that many draws are refused
        propose = sampled_tree_proposer(drafter, 9, [[0.5, 0.4, 0.2], [0.5, 0.3]])
    rows = prompt.expand(count, -1)
    rule = "quantile" if form == "quantile" else "standard"
    found = decode(target, propose, rows, 3, SLOTS, rule, 11, room=32)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    logits = target.read(torch.cat([prompt.expand(125, -1), every], 1))[0].log_softmax(-1)
    exact = logits[:, 2:5].gather(-1, every[..., None]).sum((1, 2)).exp().double()
    codes = (found.text[:, 3:6] * torch.tensor([25, 5, 1])).sum(1)
    seen = torch.bincount(codes, minlength=125).double()
    # Rare triples are counted as one, so that every count is near enough to a normal variate.
    rare = exact * count < 8
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([exact[~rare], exact[rare].sum()[None]]) * count
    expected *= seen.sum() / expected.sum()
    statistic = chisquare(seen.numpy(), expected.numpy()).statistic
    assert statistic < chi2.ppf(1 - 1e-5, len(seen) - 1)
    assert 0 < float(found.kept.sum()) < float(found.reached.sum())


def test_a_training_that_was_cut_off_ends_in_the_same_weights(target: Target, tmp_path: Path) -> None:
    text = torch.randint(40, (6, 14), generator=torch.Generator().manual_seed(13))
    settings = Training(flops=1.2e7, rows=2, anchors=4, slots=SLOTS, vocabulary=30, save_every=1)
    said: list[str] = []
    whole = train(FORMS[-2], target, text, settings, 0, tmp_path / "whole.pt", said.append)
    assert len(said) > 3

    def stop(line: str) -> None:
        if line == said[1]:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(FORMS[-2], target, text, settings, 0, tmp_path / "cut.pt", stop)
    again: list[str] = []
    resumed = train(FORMS[-2], target, text, settings, 0, tmp_path / "cut.pt", again.append)
    assert again == said[2:]
    train(FORMS[-2], target, text, settings, 0, tmp_path / "cut.pt", again.append)
    assert again == said[2:], "what is done is not done again"
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.shared
def test_the_bench_writes_a_table_a_figure_and_their_numbers(shared: Path, tmp_path: Path) -> None:
    stories = json.dumps([str(shared / "data/tinystories/tinystories_a.txt")])
    settings = tmp_path / "settings.toml"
    settings.write_text(f"""
folder = "{tmp_path}"
target = "{shared / "data/stories260K"}"
results = "{tmp_path / "results"}"
ratios = [["slots, coupled", "steps, coupled, tree of 4"]]
[seeds]
every = [0]
slots = [0, 1]
[text]
stories = {stories}
rows = 6
prompt = 4
length = 24
seed = 1
[evaluation]
stories = {stories}
prompts = 3
prompt = 4
tokens = 6
seed = 2
repeats = 1
[training]
flops = 4e8
rows = 2
anchors = 4
slots = 3
vocabulary = 64
[[drafter]]
name = "slots"
kind = "slots"
layers = [0, 4]
[[drafter]]
name = "steps"
kind = "steps"
layers = [4]
[[drafter]]
name = "uniform"
kind = "lora"
layers = [0, 1, 2, 3, 4]
rank = 2
noise = "uniform"
[[point]]
drafter = "uniform"
rule = "quantile"
[[point]]
drafter = "slots"
rule = "coupled"
[[point]]
drafter = "slots"
rule = "standard"
[[point]]
drafter = "steps"
rule = "coupled"
tree = [4, 2]
[[point]]
drafter = "steps"
rule = "standard"
tree = [4, 2]
ranks = [[0.5, 0.2], [0.3]]
[[point]]
drafter = "steps"
rule = "coupled"
tree = [4, 2]
reach = 0.4
[[point]]
drafter = "its text"
rule = "coupled"
tree = [4, 2]
[[point]]
drafter = "its text"
rule = "standard"
tree = [4, 2]
ranks = [[0.5, 0.2], [0.3]]
slots = 2
[counts]
"its text" = ""
""")
    main(str(settings))
    report = json.loads((tmp_path / "results.json").read_text())
    lines = {line["name"]: line for line in report["lines"]}
    assert len(lines) == 8
    whole, stopped = (lines[f"steps, coupled, tree of 4{more}"] for more in ("", ", steps at 0.4"))
    assert whole["share_of_steps"] == 1 > stopped["share_of_steps"] >= 1 / 3
    assert stopped["draft_flops"] == pytest.approx(whole["draft_flops"] * stopped["share_of_steps"])
    assert len(lines["its text, standard, tree of 4, 2 slots"]["kept_by_slot"]) == 2
    mean, low, high = lines["slots, coupled"]["tokens_per_pass"]
    assert 1 <= low <= mean <= high <= 4
    assert lines["slots, coupled"]["seeds"] == 2
    given = report["given the earlier tokens"]["steps"]
    # What shared noise keeps lies between its lower bound and what rejection keeps.
    assert given["(1 - TV) / (1 + TV)"] <= given["1 - TV"]
    assert (tmp_path / "results.png").exists() and (tmp_path / "results-table.md").exists()
