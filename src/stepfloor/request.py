"""The values that travel between rooms: what was asked, what one step runs, what comes back. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from stepfloor.errors import UserError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn; names and meanings are vLLM's.

    temperature         0 is greedy
    top_k               0 or -1 keeps all; applied before top_p
    top_p               1 keeps all
    min_p               drops tokens below min_p times the best probability; 0 keeps all
    presence_penalty    subtracted once from a token that the output already holds
    frequency_penalty   subtracted once per occurrence in the output
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output; 1 is off
    logit_bias          (token id, value added to its logit) pairs
    forbidden_ids       token ids that are never drawn
    seed                of the counter-based noise; None lets the engine choose one
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    forbidden_ids: tuple[int, ...] = ()
    seed: int | None = None

    def check(self, vocab_size: int) -> None:
        """Raise UserError for the first value outside its range."""
        for name, low, high in (
            ("temperature", 0.0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, float("inf")),
        ):
            value = getattr(self, name)
            # written so that NaN fails too
            if not (low <= value <= high) or value == float("inf"):
                raise UserError(f"{name} must be between {low} and {high}; got {value}")
        if self.top_p == 0.0 or self.repetition_penalty == 0.0:
            raise UserError(
                f"top_p and repetition_penalty must be above 0; got {self.top_p} and {self.repetition_penalty}"
            )
        if self.top_k < -1:
            raise UserError(f"top_k must be -1 (all), 0 (all) or positive; got {self.top_k}")
        for token in (*(i for i, _ in self.logit_bias), *self.forbidden_ids):
            if not 0 <= token < vocab_size:
                raise UserError(f"token ids must be 0 to {vocab_size - 1}; got {token}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a request must match.

    kind   json_schema, regex, ebnf or structural_tag: how `text` is to be read; any JSON value is the schema {}
    after  text that must have been generated before the grammar begins (the end of the reasoning); None: from the
           first token
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    stop_token_ids       end the output and are not delivered; stop  strings that do the same in the text
    max_tokens           tokens delivered at most
    min_tokens           tokens delivered at least: until then no stop id can be drawn and no stop string is looked for
    logprobs             report each delivered token's log-probability and those of this many best; None for neither
    grammar              what the text must match
    include_stop         the text ends with the stop string instead of before it
    skip_special_tokens  control tokens leave no text
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def waits(self) -> bool:
        """Whether a step of this request needs what the last one emitted: its mask depends on it."""
        return self.grammar is not None or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a delivered token in the target's distribution, and the best (id, log-probability) pairs.

    The distribution is the model's own: before bias, penalties, temperature and filters, as vLLM's raw_logprobs.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step delivered to one request.

    token_ids      delivered; deltas  the text that each of them completed, and at the end the text that was held
    finish_reason  why no token follows, if none does; stop_reason  the string or id that ended it
    error          what went wrong, where finish_reason is "error"
    logprobs       one for each token, if the request asked for them
    """

    request_id: str
    token_ids: tuple[int, ...]
    deltas: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text that can be sent now."""
        return "".join(self.deltas)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of prompt tokens that one step prefills for one slot.

    start  position of the first token; following  the prompt token after the chunk, None at the prompt's end
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    following: int | None


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence that takes over a slot before this step runs, with every page it may ever need."""

    slot: int
    pages: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step runs, in integers only.

    leaves   slots that were given back since the last batch, released before anything else
    joins    slots to reset, some of them just released
    chunks   prompt chunks, run one after another before the decode rows
    decodes  slots whose newest tokens are verified, spec_tokens + 1 rows each
    spec_tokens  drafts that this step verifies and proposes for each slot
    verified  of each of `decodes`: how many of them the step before proposed, where it proposed fewer
    owners   (slot, serial number of its sequence) of every slot that this step will give tokens
    logprobs  (slot, how many of the best) of those whose tokens' log-probabilities are wanted
    """

    leaves: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[int, ...] = ()
    spec_tokens: int = 0
    verified: tuple[int, ...] = ()
    owners: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step gave one request, which held `slot`.

    token_ids  delivered, stop id removed; consumed  tokens of the step that were looked at, a stop id included
    stop_id    the stop id that ended it, if one did
    """

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    consumed: int
    finish_reason: FinishReason | None
    stop_id: int | None = None
