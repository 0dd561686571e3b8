"""Conversations: marks of the assistant's tokens from file to loss, and answers to prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evaluation.likelihood.validation import validation_perplexity
from evaluation.samples import read_data_rows
from pipeline.cli import run as run_request
from pipeline.generate import marked_answers
from pipeline.run import corpus_unigram
from pipeline.settings import Worker, resolve_request
from pipeline.tokens.chat import encode_chats
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from shards.codec.protocol import make_codec
from shards.console import Bar
from shards.errors import GdistillError, UsageError
from shards.noise.embedding import dense_arrivals
from shards.store.store import ShardStore
from shards.stream.dataset import open_store
from shards.stream.stream import ShardStream
from shards.tools.conversion import convert
from shards.tools.row_view import view_row
from tests.pipeline import extract_cases
from tests.pipeline.extract_cases import ROW_LENGTH, VOCAB_SIZE, WORDS, contents, run, write_lines
from tests.trainer.run_cases import tiny_run
from trainer.distillation import store_rows
from trainer.objective.batch import Batch, BatchMaker
from trainer.training.settings import build_student

TEMPLATE = (
    "{% for m in messages[6:] or messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}"
    "{% endif %}{{ 'w0 ' if m.role == 'user' else 'w1 ' }}{{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w2 ' if messages[-1].content == 'w13' else 'w1 ' }}{% endif %}"
)
EOS = WORDS.index("<eos>")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = extract_cases.save_teacher(tmp_path_factory.mktemp("teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def turns(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def given(teacher: Path, corpus: Path, packing: str = "chat") -> dict[str, Any]:
    spec = {"spec": f"chat:{corpus}", "packing": packing, "row_length": ROW_LENGTH}
    small = {"rows_per_shard": 4, "rows_per_chunk": 2}
    mode = "parallel" if packing == "chat" else "sequential"
    return {**extract_cases.options(teacher, corpus, mode=mode, store=small), "corpus": spec}


CONVERSATIONS = [
    {"messages": turns("w5 w20", "w7 w8")},
    {"messages": turns("w5", "w7", "w9", "w10")},
    *({"messages": turns(f"w{i}", f"w{i + 1}")} for i in range(2, 12)),
]


@pytest.fixture(scope="module")
def conversations(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    folder = tmp_path_factory.mktemp("chat")
    return run(folder / "run", given(teacher, write_lines(folder / "chat.jsonl", *CONVERSATIONS)))


def test_one_conversation_a_row_with_the_answers_marked(conversations: ShardStore) -> None:
    rows = conversations.split("train").read_rows(0, 2)
    first = "w0 w5 w20 <eos> w1 w7 w8 <eos> <eos> <eos> <eos> <eos>"
    second = "w0 w5 <eos> w1 w7 <eos> w0 w9 <eos> w1 w10 <eos>"
    found = [" ".join(WORDS[token] for token in row) for row in rows["tokens"]]
    assert found == [first, second]
    marks = ["".join(map(str, row)) for row in rows["counted"]]
    assert marks == ["000001110000", "000011000011"]
    assert conversations.manifest.splits == {"train": 11, "validation": 1}, "1%, and one at least"
    tokens = TokenDataset.open(Path(conversations.location.url).with_name("tokens"))
    assert tokens.max_token_id == WORDS.index("w20"), "of those that do not count, too"
    assert np.array_equal(tokens.read_rows("train", 0, 2), rows["tokens"]), "without marks"


def test_rows_are_begun_once_and_their_first_token_never_counts(teacher: Path) -> None:
    """A text as the tokenizer begins one, or by padding; a conversation as its template does."""
    fast = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    prompt = [{"role": "tool", "content": "w5"}]
    lines = [json.dumps(["a.jsonl: line 1", value]) for value in ("w3 w4", turns("w5", "w6"), "", prompt)]
    text, conversation, _, asked = encode_chats(tokenizer, EOS, 5, lines)
    w3, w4, w5, w6 = (WORDS.index(f"w{n}") for n in (3, 4, 5, 6))
    assert text.tolist() == [~0, ~w3, ~w4, EOS, EOS]
    assert conversation.tolist() == [~w5, w6, ~EOS, ~EOS, ~EOS]
    assert asked.tolist() == [~w5, EOS, EOS, EOS, EOS]
    (nothing,) = encode_chats(load_tokenizer(teacher), EOS, 3, lines[2:3])
    assert nothing.tolist() == [~EOS, EOS, EOS]
    # A token of the answer that takes the template's last space along counts.
    words = {word: i for i, word in enumerate(("▁u:", "▁a:", "▁w5", "▁w6", "▁"))}
    fast = Tokenizer(models.WordLevel(words))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}{{ 'a: ' if add_generation_prompt }}"
    )
    assert encode_chats(tokenizer, 4, 6, lines[1:2])[0].tolist() == [~0, ~2, ~1, 3, 4, ~4]


def test_padding_is_no_part_of_the_unigram(conversations: ShardStore, teacher: Path, tmp_path: Path) -> None:
    """Nor are questions, where there are answers; each of these ends once. Of prompts all tokens
    that are given count."""
    rows = conversations.split("train").read_rows(0, conversations.manifest.splits["train"])
    counts = np.bincount(rows["tokens"][rows["counted"] == 1], minlength=VOCAB_SIZE) + 0.5
    found = conversations.resources["unigram_log_probs"].numpy()
    np.testing.assert_allclose(np.exp(found), counts / counts.sum(), rtol=1e-5)
    asked = write_lines(tmp_path / "prompts.jsonl", *({"prompt": "w2 w3 w3"} for _ in range(9)))
    run_request(resolve_request(tmp_path, given(teacher, asked, "prompts")), Worker(), tokens_only=True)
    prompts = TokenDataset.open(tmp_path / "tokens")
    counts = np.bincount([4, 5, 5] * 8, minlength=VOCAB_SIZE) + 0.5  # one of nine is held out
    np.testing.assert_allclose(np.exp(corpus_unigram(prompts)), counts / counts.sum(), rtol=1e-5)


def test_only_counted_tokens_have_noise(conversations: ShardStore, tmp_path: Path) -> None:
    split = conversations.split("train")
    rows = split.read_rows(0, split.num_rows)
    idle = rows["counted"] == 0
    for name in rows.keys() - {"tokens", "counted"}:
        assert not rows[name][idle].any(), name
    assert (rows["token_log_probs"][~idle] < 0).all()
    stream = open_store(conversations.location.url).stream(batch_size=2, seed=0)
    batch = next(iter(stream))
    mask = batch["counted"].bool()
    noise = dense_arrivals(stream.noise(batch, mask))
    p = stream.distribution(batch, mask).tile(0, VOCAB_SIZE)
    assert torch.equal((p / noise).argmax(1), batch["tokens"][mask].long())
    for row, marks in enumerate(rows["counted"]):
        _, views = view_row(conversations, "train", row)
        assert [view.position for view in views] == np.flatnonzero(marks).tolist()
    with pytest.raises(UsageError, match="a store of conversations stays as it is"):
        convert(conversations, str(tmp_path / "out"), make_codec("seeded"), Bar())


def student_and_batch(store: ShardStore, name: str, noise: str = "gumbel", **changes: Any) -> tuple[Any, Batch]:
    """A small student of that kind, and the first four rows as it is given them."""
    config = tiny_run(student=name, model__conditioning=noise, **changes)
    torch.manual_seed(0)
    student = build_student(config, store, None).eval()
    make = BatchMaker(store, "train", 0, torch.device("cpu"), with_noise=noise == "gumbel")
    stream = ShardStream(store.split("train", make.arrays), seed=0, global_batch_size=4)
    return student, make(next(iter(stream)))


@pytest.mark.parametrize("name", ["mdlm", "bd3lm", "ar"])
def test_students_learn_the_assistants_tokens_alone(conversations: ShardStore, name: str) -> None:
    """What a prompt or the padding says of itself moves no loss; micro-batches add up."""
    blocks = {"model__block_size": 4} if name == "bd3lm" else {}
    noise = "none" if name == "ar" else "gumbel"
    student, batch = student_and_batch(conversations, name, noise, **blocks)
    assert batch.counted is not None and 0 < batch.counted.sum() < batch.counted.numel()
    output = student.loss(batch)
    assert not output.token_nlls[~batch.counted].any()
    assert output.num_tokens == int(batch.counted.sum())
    assert output.loss.item() > 0
    parts = [student.loss(part).loss for part in batch.micro_batches(2)]
    torch.testing.assert_close(sum(parts) / 2, output.loss, rtol=1e-4, atol=1e-6)
    if name == "ar":  # a token weighs as much whatever others count
        places = batch.tokens[:, 1:].numel()
        torch.testing.assert_close(output.loss, output.token_nlls.sum() / places, rtol=1e-5, atol=0)
    else:
        assert not (student.corrupt(batch).mask & ~batch.counted).any()


@pytest.mark.parametrize("name", ["medusa", "drafter"])
def test_heads_on_a_backbone_learn_the_assistants_tokens_alone(
    conversations: ShardStore, teacher: Path, name: str
) -> None:
    noise = "gumbel" if name == "medusa" else "none"
    chosen = {"model__backbone__location": str(teacher), "model__backbone__num_proposed": 2}
    student, batch = student_and_batch(conversations, name, noise, **chosen)
    output = student.loss(batch)
    assert batch.counted is not None and torch.isfinite(output.loss) and output.loss > 0
    assert 0 < output.num_tokens < student.loss(replace(batch, counted=None)).num_tokens
    if name == "drafter":  # which says of each place what it had there
        assert not output.token_nlls[~batch.counted].any()
    else:  # which says it at the first token behind the anchor
        ours, following = batch.counted[:, 1:-2], batch.counted[:, 2:-1]
        assert not output.token_nlls[:, 1:-2][~(ours & following)].any()
    silent = student.loss(replace(batch, counted=torch.zeros_like(batch.counted)))
    assert silent.loss == 0 and not silent.token_nlls.any()


def test_a_likelihood_of_conversations_is_of_their_answers(conversations: ShardStore) -> None:
    """By the student's own logits, place by place."""
    student, _ = student_and_batch(conversations, "ar", "none")
    data = read_data_rows(Path(conversations.location.url), "train")
    assert data.counted is not None
    found = validation_perplexity(student, data, noise="none")
    rows, counted = torch.from_numpy(data.rows), torch.from_numpy(data.counted)[:, 1:]
    with torch.no_grad():
        logits = student(rows[:, :-1]).logits[..., :VOCAB_SIZE]
    log_probs = logits.log_softmax(-1)
    nlls = -log_probs.gather(-1, rows[:, 1:, None])[..., 0]
    expected = nlls[counted].mean().item()
    assert found.details["nll_nats_per_token"] == pytest.approx(expected, rel=1e-5)


def test_trainers_of_language_models_get_the_marks(conversations: ShardStore) -> None:
    for with_teacher in (True, False):
        examples = list(store_rows(conversations.location.url, seed=None, epochs=1, with_teacher=with_teacher))
        rows = conversations.split("train").read_rows(0, len(examples))
        for example, counted in zip(examples, rows["counted"], strict=True):
            assert ((example["labels"] != -100).numpy() == (counted == 1)).all()


LONG = " ".join(["w3"] * ROW_LENGTH)
MISTAKES = {
    "template": ({"messages": [{"role": "system", "content": "w2"}, *turns("w3", "w4")]}, "chat",
                 ["chat template fails", "no system turn"]),
    "rewritten": ({"messages": turns(*WORDS[2:10])}, "chat", ["rewrites earlier turns", "message 1"]),
    "opened": ({"messages": turns("w13", "w4")}, "chat", ["rewrites earlier turns", "message 1"]),
    "empty": ({"messages": turns("w3", " ")}, "chat", ["an empty turn", "message 1"]),
    "role": ({"messages": [{"role": "me", "content": "w2"}]}, "chat", ["not a turn", "me"]),
    "long": ({"messages": turns("w3", LONG)}, "chat", ["longer than a row", "at most 12"]),
    "no answer": ({"messages": turns("w3")}, "chat", ["ends with the user's turn"]),
    "no messages": ({"prompt": "w3"}, "chat", ["no conversation", "fields ['prompt']"]),
    "no turns": ({"messages": []}, "chat", ["no conversation"]),
    "answered": ({"messages": turns("w3", "w4")}, "prompts", ["ends with the assistant's turn"]),
    "long prompt": ({"prompt": LONG}, "prompts", ["the prompt is longer", "at most 11"]),
    "surrogate": ({"prompt": "\ud800"}, "prompts", ["not UTF-8", "a lone surrogate"]),
}  # fmt: skip


@pytest.mark.parametrize(("line", "packing", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_line(
    teacher: Path, tmp_path: Path, line: Any, packing: str, words: list[str]
) -> None:
    good = CONVERSATIONS[0] if packing == "chat" else {"prompt": "w3"}
    corpus = write_lines(tmp_path / "chat.jsonl", good, line, good)
    with pytest.raises(GdistillError) as refused:
        run(tmp_path / "run", given(teacher, corpus, packing))
    message = str(refused.value)
    assert "\n" not in message and "chat.jsonl: line 2" in message
    assert [word for word in words if word not in message] == []


def test_conversations_are_packed_and_scored_in_one_way(teacher: Path, tmp_path: Path) -> None:
    whole, concat = given(teacher, tmp_path / "x.jsonl"), {"spec": "chat:x.jsonl", "packing": "concat"}
    scored = {"corpus": whole["corpus"], "engine": {"url": "http://x"}}
    for asked in ({**whole, "mode": "sequential"}, {**whole, "corpus": concat}, scored):
        with pytest.raises(UsageError, match="conversations"):
            resolve_request(tmp_path, asked)


PROMPTS = [*({"messages": turns(f"w{i} w{i + 1}")} for i in range(2, 12)), *({"prompt": f"w{i}"} for i in range(2, 8))]


def test_answers_end_with_an_end_or_the_row(teacher: Path, tmp_path: Path) -> None:
    """Rows are prompt, answer, end, padding; what is left of them is written to the same bytes."""
    prompts = write_lines(tmp_path / "prompts.jsonl", *PROMPTS)
    store = run(tmp_path / "a", given(teacher, prompts, "prompts"))
    before = contents(tmp_path / "a/store")
    for record in sorted((tmp_path / "a/store/ledger").rglob("*.json"))[::2]:
        record.unlink()
    run(tmp_path / "a", given(teacher, prompts, "prompts"))
    assert contents(tmp_path / "a/store") == before
    rows = store.split("train").read_rows(0, store.manifest.splits["train"])
    dataset = TokenDataset.open(tmp_path / "a/tokens")
    marked = dataset.read_marked("train", 0, len(rows["tokens"]))
    assert (rows["tokens"] == ~marked)[marked < 0].all(), "prompts stay as they were given"
    prompt = " ".join(WORDS[token] for token in rows["tokens"][0, marked[0] < 0])
    assert prompt == "w0 w2 w3 <eos> w1", "the answer is opened"
    ended = 0
    for tokens, counted, prompt in zip(rows["tokens"], rows["counted"], marked, strict=True):
        answer = tokens[counted == 1]
        first = int((prompt < 0).sum())
        assert (np.flatnonzero(counted) == first + np.arange(len(answer))).all() and len(answer)
        assert EOS not in answer[:-1] and (tokens[first + len(answer) :] == EOS).all()
        ended += int(answer[-1]) == EOS
        assert int(answer[-1]) == EOS or first + len(answer) == ROW_LENGTH
    assert ended > 0, "some answers end before the row does"
    tokens, prompt = torch.tensor([[5, 7, 0, 0]]), torch.tensor([[~5, 0, 0, 0]])
    assert marked_answers(tokens, prompt, {0}).tolist() == [[~5, 7, 0, ~0]], "the end may be token 0"
