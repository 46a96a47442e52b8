"""Rows of training tokens: windows of the documents, and rows full of conversations."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from demo.chat import Conversations
from demo.tokenizer import END_OF_TEXT


class Batches:
    """Draws batches for ever; the same seed draws the same ones.

    documents  token ids of each training document
    share      of rows that hold conversations; 0 to 1
    length     tokens a row predicts; a row holds one more
    """

    def __init__(
        self,
        documents: Sequence[list[int]],
        conversations: Conversations,
        share: float,
        rows: int,
        length: int,
        seed: int,
    ) -> None:
        self._draw = random.Random(seed)
        self._share, self._rows, self._length = share, rows, length
        self._text = self._text_rows([np.array([*d, END_OF_TEXT], dtype=np.int64) for d in documents])
        self._asked = self._conversation_rows(conversations)
        self.text_tokens = sum(len(d) + 1 for d in documents)

    def next(self) -> Tensor:
        """int64 [rows, length + 1]."""
        asked = int(self._share * self._rows + self._draw.random())
        rows = [next(self._asked) for _ in range(asked)] + [next(self._text) for _ in range(self._rows - asked)]
        return torch.from_numpy(np.stack(rows))

    def _text_rows(self, documents: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Each epoch lays the documents end to end in a new order and cuts windows from a new offset."""
        size = self._length + 1
        while True:
            stream = np.concatenate(self._draw.sample(documents, len(documents)))
            stream = np.roll(stream, -self._draw.randrange(len(stream)))
            if len(stream) < size:
                stream = np.tile(stream, -(-size // len(stream)))
            starts = list(range(0, len(stream) - size + 1, self._length))
            self._draw.shuffle(starts)
            yield from (stream[start : start + size] for start in starts)

    def _conversation_rows(self, conversations: Conversations) -> Iterator[np.ndarray]:
        """A row starts with a conversation, so that one is often seen with nothing before it, as in use."""
        row: list[int] = []
        while True:
            for conversation in conversations.epoch(self._draw):
                row += conversation
                if len(row) > self._length:
                    yield np.array(row[: self._length + 1], dtype=np.int64)
                    row = []
