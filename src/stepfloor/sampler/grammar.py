"""Which tokens a request may be given next: a grammar over its text, and no stop before min_tokens.

A mask is a row of bits, one for each token id, in int32 words; bit i of word w is token 32 w + i. It is known on the
host only, so a request with one waits for each of its results before its next step: drafts 1 to j of a window are taken
as given when row j's mask is made. What a grammar forbids the target never emits, so drafts need no mask.

Source: xgrammar 0.2 for grammars and the layout of the bits. It is imported when the first grammar comes: it brings
transformers in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepfloor.errors import UserError
from stepfloor.request import Grammar, Request

Mask = NDArray[np.int32]
MAX_GRAMMAR_BYTES = 256 << 10
MAX_BLANKS = 8


class GrammarCompiler:
    """Compiles grammars for one vocabulary; calls may come from several threads, and repeat at no cost."""

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int, special_ids: Sequence[int]) -> None:
        """Nothing is imported yet.

        special_ids  control tokens, which no text of a grammar stands for
        """
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._special_ids = frozenset(special_ids)
        self._compilers: dict[tuple[int, ...], Any] = {}

    def compile(self, grammar: Grammar, stop_ids: Sequence[int]) -> Any:
        """A compiled grammar after whose end one of the stop ids may come. Raises UserError for one that is broken."""
        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            raise UserError(f"a grammar may have {MAX_GRAMMAR_BYTES} characters; this one has {len(grammar.text)}")
        compiler = self._compiler(tuple(stop_ids))
        compile_kind = {
            # a model that is not sure pads JSON with blanks for ever, if it may
            "json_schema": partial(compiler.compile_json_schema, max_whitespace_cnt=MAX_BLANKS),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "structural_tag": compiler.compile_structural_tag,
        }[grammar.kind]
        try:
            return compile_kind(grammar.text)
        except (RuntimeError, ValueError, TypeError) as error:
            said = str(error).splitlines()[0].rpartition(": ")[2] if str(error) else type(error).__name__
            raise UserError(f"the {grammar.kind} cannot be compiled: {said}") from None

    def _compiler(self, stop_ids: tuple[int, ...]) -> Any:
        if stop_ids not in self._compilers:
            try:
                import xgrammar
            except ModuleNotFoundError:
                raise UserError(
                    "grammars and JSON schemas need xgrammar, which is not installed; pip install 'stepfloor[grammar]'"
                ) from None
            special = self._special_ids - set(stop_ids)
            texts = [b"" if i in special else self._token_bytes(i) for i in range(self._vocab_size)]
            info = xgrammar.TokenizerInfo(
                texts, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=list(stop_ids)
            )
            self._compilers[stop_ids] = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 << 20)
        return self._compilers[stop_ids]


class Constraint:
    """One request's masks, as far as it has come."""

    def __init__(
        self,
        request: Request,
        compiled: Any | None,
        token_bytes: Callable[[int], bytes] | None,
        vocab_size: int,
    ) -> None:
        """Begin a request.

        compiled     its grammar; token_bytes  bytes of an id, wanted with a grammar that begins after some text
        """
        self._stop_ids = request.stop_token_ids
        self._min_tokens = request.min_tokens
        self._token_bytes = token_bytes
        self._words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._matcher: Any = None
        if compiled is not None:
            import xgrammar

            self._matcher = xgrammar.GrammarMatcher(compiled)
        after = request.grammar.after if request.grammar is not None else None
        self._after = None if after is None else after.encode()
        self._tail = b""  # of the text before the grammar began
        self._delivered = 0
        self._done = False
        self.drafts: Sequence[int] = ()

    def masks(self, rows: int) -> Mask:
        """Masks [rows, words] int32 of the next window; row j as if drafts 1 to j had been emitted."""
        result = np.full((rows, self._words), -1, dtype=np.int32)
        state = (self._after, self._tail, self._done)
        taken = 0
        for row in range(rows):
            self._fill(result, row)
            if self._delivered + row < self._min_tokens:
                for token in self._stop_ids:
                    result[row, token // 32] &= ~np.int32(1 << (token % 32)) if token % 32 < 31 else np.int32(2**31 - 1)
            if row == rows - 1 or row >= len(self.drafts):
                break
            token = self.drafts[row]
            if token < 0 or not result[row, token // 32] >> (token % 32) & 1:
                break  # refused here; the rows behind it decide nothing
            accepted = self._take(token)
            taken += accepted
        if taken:
            self._matcher.rollback(taken)
        self._after, self._tail, self._done = state
        return result

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that were delivered."""
        for token in token_ids:
            self._take(token)
        self._delivered += len(token_ids)

    def _fill(self, masks: Mask, row: int) -> None:
        if self._matcher is None or self._after is not None or self._done:
            return
        if self._matcher.is_terminated():
            return
        self._matcher.fill_next_token_bitmask(masks, row)

    def _take(self, token: int) -> int:
        """Go one token on; 1 if the matcher did too."""
        if self._matcher is None or self._done or self._token_bytes is None:
            return 0
        if self._after is not None:
            self._tail = (self._tail + self._token_bytes(token))[-len(self._after) - 64 :]
            if self._after in self._tail:
                self._after, self._tail = None, b""
            return 0
        if self._matcher.is_terminated():
            return 0
        if not self._matcher.accept_token(token):
            # only a token outside the mask: then the text is no longer the grammar's, and nothing can be promised
            self._done = True
            return 0
        return 1
