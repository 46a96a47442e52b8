"""In which format a tensor is stored, decided by its dtype and the scales beside it, and what is wrong with it.

Source: the tensor layouts of `formats.table`. Metadata has no say here.
"""

import math
from dataclasses import replace
from math import prod

from stepfloor.formats.table import FORMATS
from stepfloor.weights.expected import Expected, Shape
from stepfloor.weights.headers import Entry

_PLAIN = {"BF16": "bf16", "F32": "fp32"}


def stored_format(expected: Expected, parts: dict[str, Entry]) -> tuple[str | None, list[str]]:
    """The format of one tensor by its dtypes and companions, or the reasons why it has none."""
    name, weight = expected.name, parts.get("weight")
    if weight is None:
        scales = ", ".join(sorted(parts))
        return None, [f"{name}: {scales} found but no weight; fetch or export it again"]
    if expected.kind != "linear" or weight.dtype in _PLAIN:
        return _plain_format(expected, weight, parts)
    format_name = _quantized_format(expected.shape[0], weight, parts)
    if format_name is None:
        scales = ", ".join(f"{p} {e.dtype} {list(e.shape)}" for p, e in parts.items() if p != "weight")
        return None, [
            f"{name}: wanted BF16, F32 or a quantized layout; found {weight.dtype} {list(weight.shape)} "
            f"{'with ' + scales if scales else 'without a scale'} in {weight.file.name}; export it again"
        ]
    faults = _layout_faults(name, (expected.shape[0], expected.shape[1]), parts, format_name)
    return (None if faults else format_name), faults


def _plain_format(expected: Expected, weight: Entry, parts: dict[str, Entry]) -> tuple[str | None, list[str]]:
    name = expected.name
    faults: list[str] = []
    wanted = ("I64",) if expected.kind == "buffer" else tuple(_PLAIN)
    scales = [part for part in parts if part != "weight"]
    if weight.dtype not in wanted:
        beside = f" with {', '.join(scales)}" if scales else ""
        faults.append(
            f"{name}: wanted {' or '.join(wanted)}; found {weight.dtype} {list(weight.shape)}{beside} in "
            f"{weight.file.name}; export it in {wanted[0]}"
        )
    elif weight.shape != expected.shape:
        faults.append(shape_fault(name, expected.shape, weight))
    if weight.dtype in wanted:
        for part in scales:
            faults.append(
                f"{name}.{part} ({parts[part].file.name}) is a scale beside a {weight.dtype} weight, which uses none; "
                "export the pair again"
            )
    format_name = "int64" if expected.kind == "buffer" else _PLAIN.get(weight.dtype)
    return (None if faults else format_name), faults


def _quantized_format(n: int, weight: Entry, parts: dict[str, Entry]) -> str | None:
    """Which layout the companions speak for; whether it is complete is checked afterwards."""
    scale = parts.get("weight_scale")
    if weight.dtype == "U8":
        return "nvfp4"
    if weight.dtype != "F8_E4M3":
        return None
    if "weight_scale_inv" in parts:
        return "fp8_block"
    if scale is None:
        return None
    if scale.dtype == "U8":
        return "mxfp8"
    return "fp8_tensor" if prod(scale.shape) == 1 and n != 1 else "fp8_channel"


def _layout_faults(name: str, shape: tuple[int, int], parts: dict[str, Entry], format_name: str) -> list[str]:
    """Weight and companions against formats.table."""
    (n, k), form, weight = shape, FORMATS[format_name], parts["weight"]
    if form.group is not None and form.group[0] == 1 and k % form.group[1]:
        return [f"{name}: {format_name} wants rows of a multiple of {form.group[1]} values; config.json says {k}"]
    faults: list[str] = []
    if weight.shape != form.weight_shape(n, k):
        faults.append(shape_fault(name, form.weight_shape(n, k), weight, format_name))
    for companion in form.companions:
        entry = parts.get(companion.suffix)
        shapes = [companion.shape(n, k)] + ([companion.alternative(n, k)] if companion.alternative else [])
        if entry is None:
            if not companion.optional:
                faults.append(
                    f"{name}.{companion.suffix} is missing: {format_name} wants {companion.dtypes[0]} "
                    f"{list(shapes[0])} beside {weight.dtype} weight in {weight.file.name}; fetch or export it again"
                )
        elif entry.dtype not in companion.dtypes:
            faults.append(
                f"{name}.{companion.suffix}: {format_name} wants {' or '.join(companion.dtypes)}; found {entry.dtype} "
                f"{list(entry.shape)} in {entry.file.name}; export it again"
            )
        elif entry.shape not in shapes:
            hint = " (padded or swizzled scales are not read)" if prod(entry.shape) > prod(shapes[0]) else ""
            wanted = " or ".join(str(list(s)) for s in shapes)
            faults.append(
                f"{name}.{companion.suffix}: {format_name} of {[n, k]} wants {wanted}; found "
                f"{entry.dtype} {list(entry.shape)} in {entry.file.name}{hint}; export it again"
            )
    known = {"weight", *(c.suffix for c in form.companions)}
    for part in parts:
        if part not in known:
            faults.append(
                f"{name}.{part} ({parts[part].file.name}) is a scale {format_name} does not use; export the pair again"
            )
    return faults


def shard_faults(name: str, shape: tuple[int, int], parts: dict[str, Entry], format_name: str) -> list[str]:
    weight = parts["weight"]
    if not format_name:
        return [f"{name}: wanted BF16, F8_E4M3 or U8 rows; found {weight.dtype} in {weight.file.name}; export it again"]
    if format_name != "nvfp4":
        faults = [] if weight.shape == shape else [shape_fault(name, shape, weight)]
        for part, entry in parts.items():
            if part != "weight":
                faults.append(
                    f"{name}.{part} ({entry.file.name}) is a scale that {format_name} rows do not use; export it again"
                )
        return faults
    # the second scale is shared by all shards and checked once, for the table
    shared = next(iter(parts.values()))
    stand_in = replace(shared, dtype="F32", shape=())
    if "weight_scale_2" in parts:
        file = parts["weight_scale_2"].file.name
        return [f"{name}.weight_scale_2 ({file}) is not used: one weight_scale_2 serves all shards; export it again"]
    return _layout_faults(name, shape, parts | {"weight_scale_2": stand_in}, "nvfp4")


def shape_fault(name: str, wanted: Shape, found: Entry, format_name: str = "") -> str:
    layout = f" as {format_name}" if format_name else ""
    return (
        f"{name}: wanted {list(wanted)}{layout}; found {found.dtype} {list(found.shape)} in {found.file.name}; check "
        "that config.json fits these files"
    )


def scale_fault(name: str, part: str, entry: Entry) -> str | None:
    raw = bytes(entry.read()[: 4 if entry.dtype == "F32" else 2])
    bits = int.from_bytes(raw, "little") << (0 if entry.dtype == "F32" else 16)
    value = _float32(bits)
    if not math.isfinite(value) or value <= 0.0:
        return f"{name}.{part} is {value:g}; wanted a positive scale; export it again"
    # amax / 448 or amax / 2688: above 1 the largest weight would pass 448, and no release's passes 10
    if value > 1.0:
        return (
            f"{name}.{part} is {value:g}; wanted a multiplier below 1 (largest weight / 448 or / 2688); a divisor in "
            f"its place would mean {1 / value:g}; export it with multipliers"
        )
    return None


def _float32(bits: int) -> float:
    return float(memoryview(bits.to_bytes(4, "little")).cast("f")[0])
