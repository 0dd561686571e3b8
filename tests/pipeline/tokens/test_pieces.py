from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from pipeline.tokens.pieces import cut_between_words, encode_with_overlap, join
from pipeline.tokens.tokenizer import backend, encode, load_tokenizer

TEXTS = {
    "sentences": "".join(f'Cat {i} sat, then ran; "slowly" (on\n\n{i * i}).\n' for i in range(400)),
    "accents": "naïve café — «ça va?»  日本語 テキスト 🙂🙂\n\n" * 60,
    "white space": " \n\t  a   \n\n\n b\r\n" * 100,
    "no white space": "abc" * 2000,
    "special": "one<|endoftext|> two " * 200,
}


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("size", [50, 777])
def test_pieces_have_the_ids_of_the_whole(
    bpe_tokenizer: PreTrainedTokenizerFast, name: str, size: int
) -> None:
    fast, text = backend(bpe_tokenizer), TEXTS[name]
    pieces = cut_between_words(fast, text, size)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in whole(fast, piece)] == whole(fast, text)
    if name != "no white space":
        assert len(pieces) > len(text) // size // 3


def test_a_normalizer_that_adds_to_the_text_forbids_cuts(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    fast = Tokenizer.from_str(backend(bpe_tokenizer).to_str())
    fast.normalizer = normalizers.Prepend("x")  # type: ignore[assignment]
    assert cut_between_words(fast, TEXTS["sentences"], 100) == [TEXTS["sentences"]]
    fast.normalizer = normalizers.NFC()  # type: ignore[assignment]
    assert len(cut_between_words(fast, TEXTS["accents"], 100)) > 10


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_overlapping_pieces_have_the_ids_of_the_whole(
    bpe_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    fast, text = backend(bpe_tokenizer), TEXTS[name]
    assert encode_with_overlap(fast, text, 1000).tolist() == whole(fast, text)


@pytest.mark.parametrize("num_equal", [1, 10, 63, 64, 90])
def test_pieces_are_joined_where_many_tokens_agree(num_equal: int) -> None:
    """Fewer may agree by chance: then the text is tokenized whole."""
    borders = np.arange(200, dtype=np.int64)
    left, right = np.zeros(200, np.int32), np.ones(200, np.int32)
    left[50 : 50 + num_equal] = right[50 : 50 + num_equal] = 7
    cut = join(left, borders, right, borders)
    assert (cut is not None) == (num_equal >= 64)
    if cut is not None:
        assert cut[0] == cut[1] and 50 <= cut[0] < 50 + num_equal


def test_real_tokenizers(shared: Path) -> None:
    text = (shared / "data/tinystories/tinystories_a.txt").read_text(encoding="utf-8")[:60_000]
    for name in ("gpt2-tokenizer", "stories260K"):
        fast = backend(load_tokenizer(shared / "data" / name))
        expected = np.array(whole(fast, text))
        assert np.array_equal(encode_with_overlap(fast, text, 10_000), expected)
        assert np.array_equal(encode(load_tokenizer(shared / "data" / name), [text])[0], expected)


def test_long_and_short_documents_in_one_batch_keep_their_order(
    bpe_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, groups of pieces and overlaps all smaller than the documents."""
    fast = Tokenizer.from_str(backend(bpe_tokenizer).to_str())
    whole_words_only = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>")
    monkeypatch.setattr("pipeline.tokens.pieces.BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr("pipeline.tokens.pieces.HUGE_CHARACTERS", 50_000)
    texts = [TEXTS["sentences"] * 5, "", "the cat", TEXTS["no white space"] * 10, "ran"]
    texts += [TEXTS["accents"] * 6]
    expected = [whole(fast, text) for text in texts]
    assert [ids.tolist() for ids in encode(whole_words_only, texts)] == expected
