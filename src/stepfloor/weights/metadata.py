"""What the quantization metadata claims, beside what the headers hold. Claims never decide a format.

Source: `quantization_config` in config.json (Qwen FP8, ModelOpt, compressed-tensors spellings) and ModelOpt's
hf_quant_config.json. Several releases contradict their own patterns, so a disagreement is reported, not refused.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stepfloor.errors import UserError

_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "FP8": ("fp8_tensor", "fp8_channel"),
    "FP8_PB_WO": ("fp8_block",),
    "FP8_BLOCK_SCALES": ("fp8_block",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel",),
    "MXFP8": ("mxfp8",),
    "BF16": ("bf16", "fp32"),
}
_GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32, "FP8_PB_WO": 128, "FP8_BLOCK_SCALES": 128}
_TABLE_DTYPES = {"float8_e4m3fn": "fp8_tensor", "nvfp4": "nvfp4", "bfloat16": "bf16"}
_PREFIXES = ("", "model.language_model.", "language_model.model.", "language_model.", "model.")


@dataclass(frozen=True, slots=True)
class Module:
    """One unit that metadata can name: a matrix, a layer's routed experts, or the n-gram table.

    name     canonical; aliases are other spellings of it (parts of a fused tensor, one of its experts)
    format   stored, a name in formats.table.FORMATS; linear is False for what no default rule applies to
    """

    name: str
    format: str
    linear: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Precision:
    """One row of the resolved precisions: a group of modules, its stored format, and the rule that claims it."""

    group: str
    format: str
    count: int
    rule: str


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: str
    algorithm: str
    origin: str

    def __str__(self) -> str:
        return self.origin if self.pattern == "*" else f"{self.origin} {self.pattern!r}"


@dataclass(frozen=True, slots=True)
class _Claims:
    exclusions: tuple[_Rule, ...] = ()
    layers: tuple[_Rule, ...] = ()
    default: _Rule | None = None


def read_metadata(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The quantization section: config.json's, else hf_quant_config.json's, else empty.

    Raises UserError for a container that safetensors headers cannot describe.
    """
    section = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    section = section or (hf_quant_config or {}).get("quantization") or {}
    if not isinstance(section, Mapping):
        raise UserError(f"quantization_config must be a JSON object; found {section!r}; fetch config.json again")
    if "csf" in str(section.get("quant_method", "")).lower():
        raise UserError(
            f"this checkpoint is a CSF container (quant_method {section['quant_method']!r}), which needs its vendor's "
            "loader; stepfloor reads the plain NVFP4 release of the same model"
        )
    return section


def cross_check(
    section: Mapping[str, Any], modules: Iterable[Module], table_dtype: str | None, table: str, skipped: Iterable[str]
) -> tuple[tuple[Precision, ...], tuple[str, ...]]:
    """Compare claims with what is stored.

    section      from read_metadata; table_dtype is text_config's ple_embedding_dtype
    table        canonical name of the n-gram table
    skipped      names a rule may match although no weight of ours has them (norms, vision tower)
    Returns one Precision per group of modules, and a sentence per contradiction, conflict and empty rule.
    """
    modules = tuple(modules)
    claims, notes = _claims(section)
    matched = _match(claims, modules)
    notes += _empty_rules(claims, matched, modules, tuple(skipped))
    rows: dict[tuple[str, str, str], int] = {}
    for module in modules:
        rules = matched[module.name]
        decided = rules[0] if rules else (claims.default if module.linear else None)
        if module.name == table and table_dtype is not None:
            announced = _Rule(table_dtype, _TABLE_DTYPES.get(table_dtype, table_dtype), "ple_embedding_dtype")
            rules, decided = [announced, *rules], announced
        notes += _conflicts(module, rules)
        if decided is not None and module.format not in _formats(decided.algorithm):
            notes.append(
                f"{module.name}: {decided} claims {decided.algorithm}; the headers hold {module.format}, which decides"
            )
        key = (_grouped(module.name), module.format, _grouped(str(decided)) if decided else "no rule")
        rows[key] = rows.get(key, 0) + 1
    return tuple(Precision(g, f, n, r) for (g, f, r), n in rows.items()), tuple(notes)


def table_format(table_dtype: str) -> str | None:
    """The format a ple_embedding_dtype announces, None if the word is unknown."""
    return _TABLE_DTYPES.get(table_dtype)


def _grouped(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", text)


def _formats(algorithm: str) -> tuple[str, ...]:
    return _ALGORITHMS.get(algorithm, (algorithm,))


def _claims(section: Mapping[str, Any]) -> tuple[_Claims, list[str]]:
    notes: list[str] = []
    method = str(section.get("quant_method", "")).lower()
    if method == "fp8":
        exclusions = _rules(section.get("modules_to_not_convert"), "BF16", "modules_to_not_convert")
        # the release names its n-gram embedding here: one scale per tensor, unlike the blocks of the rest
        named = _rules(section.get("modules_to_convert"), "FP8", "modules_to_convert")
        return _Claims(exclusions, named, _Rule("*", "FP8_PB_WO", "quant_method")), notes
    names = section.get("ignore") or section.get("exclude_modules")
    exclusions = _rules(names, "BF16", "ignore" if "ignore" in section else "exclude_modules")
    layers: list[_Rule] = []
    for name, entry in (section.get("quantized_layers") or {}).items():
        algorithm = str(entry.get("quant_algo") if isinstance(entry, Mapping) else entry)
        layers.append(_Rule(name, algorithm, "quantized_layers"))
        if isinstance(entry, Mapping):
            notes += _algorithm_notes(f"quantized_layers {name!r}", algorithm, entry.get("group_size"))
    algorithm = section.get("quant_algo")
    default = None
    if isinstance(algorithm, str) and algorithm != "MIXED_PRECISION":
        default = _Rule("*", algorithm, "quant_algo")
        notes += _algorithm_notes("quant_algo", algorithm, section.get("group_size"))
    return _Claims(exclusions, tuple(layers), default), notes


def _rules(names: Any, algorithm: str, origin: str) -> tuple[_Rule, ...]:
    listed = names if isinstance(names, list) else []
    return tuple(_Rule(str(name), algorithm, origin) for name in listed)


def _algorithm_notes(where: str, algorithm: str, group_size: Any) -> list[str]:
    if algorithm not in _ALGORITHMS:
        return [f"{where}: quant_algo {algorithm!r} is unknown; the headers decide"]
    wanted = _GROUP_SIZES.get(algorithm)
    if wanted is not None and group_size not in (None, wanted):
        return [f"{where}: {algorithm} has groups of {wanted}; the metadata says {group_size}; the headers decide"]
    return []


def _plain(pattern: str) -> str:
    """A pattern without its prefix variant; the drafter's layer may be numbered after the last one."""
    for prefix in sorted(_PREFIXES, key=len, reverse=True):
        if prefix and pattern.startswith(prefix) and not pattern.startswith("model.visual"):
            pattern = pattern[len(prefix) :]
            break
    return re.sub(r"^mtp\.layers\.\d+", "mtp.layers.0", pattern.removesuffix(".weight"))


def _match(claims: _Claims, modules: tuple[Module, ...]) -> dict[str, list[_Rule]]:
    """The rules that name each module: exclusions first, then layer entries, in file order."""
    exact: dict[str, list[_Rule]] = {}
    globs: list[tuple[re.Pattern[str], _Rule]] = []
    for rule in (*claims.exclusions, *claims.layers):
        if any(mark in rule.pattern for mark in "*?["):
            globs.append((re.compile(fnmatch.translate(_plain(rule.pattern))), rule))
        else:
            exact.setdefault(_plain(rule.pattern), []).append(rule)
    order = {id(rule): i for i, rule in enumerate((*claims.exclusions, *claims.layers))}
    matched: dict[str, list[_Rule]] = {}
    for module in modules:
        rules: dict[int, _Rule] = {}
        for name in (module.name, *module.aliases):
            parent = name
            while parent:
                rules.update((id(rule), rule) for rule in exact.get(parent, ()))
                parent = parent.rpartition(".")[0]
            spellings = [prefix + name for prefix in _PREFIXES]
            rules.update((id(r), r) for glob, r in globs if any(glob.match(s) for s in spellings))
        matched[module.name] = sorted(rules.values(), key=lambda rule: order[id(rule)])
    return matched


def _empty_rules(
    claims: _Claims, matched: Mapping[str, list[_Rule]], modules: tuple[Module, ...], skipped: tuple[str, ...]
) -> list[str]:
    used = {id(rule) for rules in matched.values() for rule in rules}
    rest = [rule for rule in (*claims.exclusions, *claims.layers) if id(rule) not in used]
    others = tuple(Module(name, "bf16", False) for name in skipped)
    found = _match(_Claims(tuple(rest)), others) if rest else {}
    used |= {id(rule) for rules in found.values() for rule in rules}
    return [f"{rule} matches no tensor" for rule in rest if id(rule) not in used]


def _conflicts(module: Module, rules: list[_Rule]) -> list[str]:
    for first, second in pairwise(rules):
        if not set(_formats(first.algorithm)) & set(_formats(second.algorithm)):
            return [
                f"{module.name}: {first} says {first.algorithm}, {second} says {second.algorithm}; the headers hold "
                f"{module.format}, which decides"
            ]
    return []
