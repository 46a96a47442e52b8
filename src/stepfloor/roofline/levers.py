"""What a change of formats, of the draft vocabulary or of k would buy, and what it costs.

A change is written as on the command line, `dense=fp8,head=mxfp8,draft_vocab=32768`. Its bytes come from the shapes of
the weights at hand, so the floor of a checkpoint not yet made is the same computation as that of one on disk.
Source: published tables of the releases; reports of those who made such checkpoints are quoted with the risk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.formats.table import FORMATS, stored_bytes
from stepfloor.roofline.groups import pass_group, weight_component
from stepfloor.roofline.passes import Matrices

# what may be changed: group of matrices -> components of the target or the drafter
_DENSE = ("gdn", "qsa", "hc", "shared_experts")
_TARGETS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "experts": (False, ("experts",)),
    "dense": (False, _DENSE),
    "gdn": (False, ("gdn",)),
    "qsa": (False, ("qsa",)),
    "hc": (False, ("hc",)),
    "shared": (False, ("shared_experts",)),
    "head": (False, ("head",)),
    "table": (False, ("table",)),
    "mtp_experts": (True, ("experts",)),
    "mtp_dense": (True, (*_DENSE, "mtp")),
    "draft_head": (True, ("head",)),
}
_SHORT = {"experts": "fp8_block", "mtp_experts": "fp8_block", "table": "fp8_tensor"}


@dataclass(frozen=True, slots=True)
class Change:
    """Formats by group of matrices, and how many ids the drafter scores; None is all of them."""

    formats: tuple[tuple[str, str], ...] = ()
    draft_vocab: int | None = None

    def __str__(self) -> str:
        parts = [f"{group}={form}" for group, form in self.formats]
        return ",".join(parts + ([f"draft_vocab={self.draft_vocab}"] if self.draft_vocab else []))


@dataclass(frozen=True, slots=True)
class Lever:
    """A change worth naming: what it risks, what it takes, and how the text says so."""

    change: Change
    risk: str
    work: str


def parse_change(text: str, vocab_size: int) -> Change:
    """`dense=fp8,head=mxfp8,draft_vocab=32768`. Raises ValueError that names the part that cannot be.

    fp8 is per output channel for dense matrices and heads, blocks of 128 for experts, one scale for the table.
    """
    formats: dict[str, str] = {}
    draft_vocab = None
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        name, value = name.strip().replace("-", "_"), value.strip().lower()
        if name == "draft_vocab":
            if not value.isdecimal() or not 0 < int(value) <= vocab_size:
                raise ValueError(f"draft_vocab must be 1 to {vocab_size}; got {value!r}")
            draft_vocab = int(value)
            continue
        form = _SHORT.get(name, "fp8_channel") if value == "fp8" else value
        if name not in _TARGETS:
            raise ValueError(f"{name!r} cannot be changed; known: {', '.join(_TARGETS)}, draft_vocab")
        if form not in FORMATS:
            raise ValueError(f"{name}={value}: no such format; known: fp8, {', '.join(FORMATS)}")
        formats[name] = form
    return Change(tuple(formats.items()), draft_vocab)


def changed(weights: Mapping[str, Matrices], config: ModelConfig, change: Change) -> dict[str, Matrices]:
    """The weights after a change of formats (`passes.fold` makes the argument).

    Raises ValueError for a format that a matrix cannot have, and for a change that reaches no matrix.
    """
    found = dict(weights)
    for group, form in change.formats:
        drafter, components = _TARGETS[group]
        if group == "draft_head":
            if not config.has_drafter:
                raise ValueError("draft_head: this checkpoint has no drafter")
            head = found["lm_head"]
            found["mtp.lm_head"] = _stored("mtp.lm_head", head, form)
            continue
        reached = [
            name
            for name in found
            if name.startswith("mtp.") == drafter
            and weight_component(name) in components
            and pass_group(name) in ("experts", "dense", "head", "table")
        ]
        if not reached:
            raise ValueError(f"{group}: this checkpoint has no such matrices")
        for name in reached:
            found[name] = _stored(name, found[name], form)
    return found


def _stored(name: str, old: Matrices, form: str) -> Matrices:
    columns = FORMATS[form].group
    if columns is not None and columns[0] == 1 and old.k % columns[1]:
        raise ValueError(f"{form} stores rows of a multiple of {columns[1]} values; {name} has rows of {old.k}")
    return Matrices(form, old.count, old.n, old.k, old.count * stored_bytes(form, old.n, old.k))


def levers(weights: Mapping[str, Matrices], config: ModelConfig, draft_vocab: int | None = None) -> list[Lever]:
    """The changes that would lessen a step of these weights, each alone."""
    found: list[Lever] = []
    for group, form, risk, work in _KNOWN:
        change = Change(((group, form),))
        try:
            new = changed(weights, config, change)
        except ValueError:
            continue
        before = sum(w.num_bytes for w in weights.values())
        shared = group == "draft_head" and "mtp.lm_head" not in weights
        after = sum(w.num_bytes for w in new.values())
        if shared:
            # a head of its own takes memory, but the drafter then reads the smaller one
            if new["mtp.lm_head"].num_bytes < weights["lm_head"].num_bytes:
                found.append(Lever(change, risk, work))
        elif after < before:
            found.append(Lever(change, risk, work))
    if config.has_drafter and draft_vocab is None and config.vocab_size > 2 * 32_768:
        found.append(Lever(Change(draft_vocab=32_768), *_DRAFT_VOCAB))
    return found


# group, format, what it risks, what it takes
_KNOWN = (
    (
        "dense",
        "fp8_channel",
        "low: 0.026 relative RMS a matrix; +17.5 to +23 % measured where bytes alone promise +40 to +60 %",
        "`stepfloor convert fp8-dense`, minutes",
    ),
    (
        "head",
        "mxfp8",
        "low: 0.027 relative RMS; compare acceptance, not only the rate",
        "`stepfloor convert head-mxfp8`, seconds",
    ),
    (
        "draft_head",
        "nvfp4",
        "none for the text, which the target's head decides; acceptance 42.97 % reported, 42.11 with bf16",
        "`stepfloor convert draft-head-nvfp4`, seconds",
    ),
    (
        "mtp_experts",
        "fp8_block",
        "none for the text; about +5 % reported",
        "`stepfloor convert mtp-fp8`, seconds",
    ),
    (
        "mtp_dense",
        "fp8_channel",
        "none for the text; compare acceptance by position",
        "`stepfloor convert mtp-fp8`, seconds",
    ),
    (
        "experts",
        "nvfp4",
        "real: take a release whose maker measured it",
        "another release, made with calibration",
    ),
)
_DRAFT_VOCAB = (
    "none for the text; drafts outside the list are lost: 32,768 ids gave +11.7 %, 8,600 -4 % elsewhere",
    "a ranked list of ids, and an engine that maps them; not in `convert`",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One number of drafts: mean tokens a step delivers, time of a step, tokens/s of all sequences."""

    spec_tokens: int
    tokens_per_step: float
    step_us: float
    tokens_per_s: float


def tokens_per_step(acceptance: Sequence[float], spec_tokens: int) -> float:
    """Mean tokens a verification delivers: one, and one for each position in the share of steps that accept it.

    acceptance  share of all steps in which the draft at each position was accepted
    """
    return 1.0 + sum(acceptance[:spec_tokens])


def acceptance_of_length(length: float, spec_tokens: int) -> tuple[float, ...]:
    """Shares by position for a mean accepted length, every draft accepted with the same chance once those before are.

    Raises ValueError for a length that so many drafts cannot give.
    """
    if not 1 <= length <= spec_tokens + 1:
        raise ValueError(f"{spec_tokens} drafts give 1 to {spec_tokens + 1} tokens a step; got {length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(spec_tokens + 1)) < length else (low, middle)
    return tuple(low ** (i + 1) for i in range(spec_tokens))


def best_choice(choices: Sequence[Choice]) -> Choice:
    """The number of drafts with the highest rate; the smaller of equals."""
    return max(choices, key=lambda choice: (choice.tokens_per_s, -choice.spec_tokens))
