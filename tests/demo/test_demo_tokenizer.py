"""The tokenizer the recipe trains."""

import json
from pathlib import Path

import pytest

from demo.tokenizer import save_tokenizer, train_tokenizer


def test_the_vocabulary_is_exactly_as_large_as_the_models(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(): pass\n" * 3, "import this, import that"], vocab_size=280)
    assert sorted(tokenizer.get_vocab().values()) == list(range(280))
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    save_tokenizer(tokenizer, tmp_path, max_tokens=64)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 64


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="3072 were asked for"):
        train_tokenizer(["tiny"])
