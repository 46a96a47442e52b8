"""Text to ids and back."""

from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from stepfloor.errors import UserError
from stepfloor.tokenizer.tokenizer import Tokenizer

# surrogates are not text: UTF-8 cannot carry them
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@pytest.fixture(scope="session")
def reference(tokenizer_directory: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(tokenizer_directory)


def test_any_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    @given(any_text)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()

    check()


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerBase) -> None:
    @given(any_text)
    def check(text: str) -> None:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)

    check()
    marked = "<|im_start|>user\n<think>x</think><|im_end|>"
    assert tokenizer.encode(marked) == reference.encode(marked, add_special_tokens=False)


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("12345")] == [b"1", b"2", b"3", b"4", b"5"]


def test_special_tokens_in_a_prompt_become_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.decode([1, 2], skip_special=True) == ""


def test_tags_are_text_and_control_tokens_are_not(tokenizer: Tokenizer) -> None:
    (think,) = tokenizer.encode("<think>")
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think], skip_special=True) == "<think>"
    assert [i for i in range(320) if tokenizer.is_special(i)] == list(range(8))


def test_a_character_cut_by_a_token_boundary_keeps_its_bytes(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("\U0001f9ed")]
    assert len(pieces) > 1
    assert b"".join(pieces) == "\U0001f9ed".encode()


def test_rows_past_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert tokenizer.token_bytes(320) == b""
    assert tokenizer.decode([320]) == ""


def test_a_missing_tokenizer_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--token-ids"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)
