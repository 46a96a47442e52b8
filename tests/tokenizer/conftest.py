"""A tokenizer of 320 ids, trained on a few lines, in a directory of its own."""

from pathlib import Path

import pytest

from demo.tokenizer import save_tokenizer, train_tokenizer
from stepfloor.tokenizer.tokenizer import Tokenizer

LINES = ["def main(argument):\n    return argument + 1\n", "the quick brown fox; the lazy dog", "naïve 東京 🙂 12345\n"]


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(LINES * 3, vocab_size=320), directory, max_tokens=4096)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_directory)
