"""Say what a checkpoint holds: bytes by category and format, the n-gram table's geometry, and what is odd about it.

Everything comes from the census (`weights`), so the numbers are those the loader and the planner use.
"""

import json
from typing import Any

from stepfloor.weights.checkpoint import Checkpoint
from stepfloor.weights.expected import CATEGORIES, category

_GIB = 1 << 30


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """The report as plain values, ready for JSON; sizes in bytes."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, weight in checkpoint.weights.items():
        group = groups.setdefault((category(name), weight.format), [0, 0])
        group[0] += 1
        group[1] += weight.num_bytes
    ordered = sorted(groups.items(), key=lambda item: (CATEGORIES.index(item[0][0]), -item[1][1]))
    categories = [
        {"category": name, "format": form, "tensors": count, "bytes": size} for (name, form), (count, size) in ordered
    ]
    config, table = checkpoint.config, checkpoint.table
    return {
        "directory": str(checkpoint.directory),
        "layers": config.num_hidden_layers,
        "linear_layers": len(config.linear_layers),
        "sparse_layers": len(config.sparse_layers),
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "context_tokens": config.max_position_embeddings,
        "drafter": checkpoint.has_drafter,
        "own_draft_head": "mtp.lm_head" in checkpoint.weights,
        "stop_token_ids": list(checkpoint.stop_token_ids),
        "bytes": checkpoint.num_bytes,
        "vision_bytes": checkpoint.vision_bytes,
        "ignored_bytes": checkpoint.ignored_bytes,
        "categories": categories,
        "table": {
            "rows": table.rows,
            "width": table.width,
            "shards": len(table.heights),
            "shard_rows": table.shard_rows,
            "format": table.format,
            "row_bytes": table.row_bytes,
            "rows_per_token": config.ngram_heads,
            "bytes": table.rows * table.row_bytes,
        },
        "precisions": [
            {"group": p.group, "format": p.format, "modules": p.count, "rule": p.rule} for p in checkpoint.precisions
        ],
        "findings": [{"kind": f.kind, "message": f.message} for f in checkpoint.findings],
    }


def show(checkpoint: Checkpoint, as_json: bool = False) -> None:
    """Print the report: a table for people, or one JSON object."""
    report = summary(checkpoint)
    if as_json:
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    drafter = "with drafter" if report["drafter"] else "without drafter"
    console.print(
        f"{report['directory']}: {report['layers']} layers ({report['linear_layers']} gated delta net, "
        f"{report['sparse_layers']} sparse attention), {report['experts_per_token']} of {report['experts']} experts, "
        f"{drafter}",
        soft_wrap=True,
        markup=False,
    )
    sizes = Table("category", "format", box=None, pad_edge=False)
    for title in ("tensors", "bytes", "GiB"):
        sizes.add_column(title, justify="right")
    rows = [(c["category"], c["format"], c["tensors"], c["bytes"]) for c in report["categories"]]
    if report["vision_bytes"]:
        rows.append(("vision tower (not loaded)", "", "", report["vision_bytes"]))
    if report["ignored_bytes"]:
        rows.append(("ignored", "", "", report["ignored_bytes"]))
    for label, form, count, size in [*rows, ("total loaded", "", len(checkpoint.weights), report["bytes"])]:
        sizes.add_row(label, form, str(count), f"{size:,}", f"{size / _GIB:.3f}")
    console.print(sizes)
    table = report["table"]
    console.print(
        f"n-gram table: {table['rows']:,} rows of {table['width']} values in {table['shards']} shards of "
        f"{table['shard_rows']:,}; {table['format']}, {table['row_bytes']} bytes a row, "
        f"{table['rows_per_token']} rows a token",
        soft_wrap=True,
    )
    for line in _claims(checkpoint):
        console.print(line, soft_wrap=True, markup=False)
    for finding in report["findings"]:
        console.print(f"note ({finding['kind']}): {finding['message']}", soft_wrap=True, markup=False)


def _claims(checkpoint: Checkpoint) -> list[str]:
    """Who claims what is quantized; the pattern of each rule is in the JSON report."""
    counts: dict[tuple[str, str, str], int] = {}
    for p in checkpoint.precisions:
        if p.format not in ("bf16", "fp32"):
            key = (category(p.group), p.format, p.rule.partition(" '")[0])
            counts[key] = counts.get(key, 0) + p.count
    return [f"{name}: {n} modules in {form}, claimed by {rule}" for (name, form, rule), n in counts.items()]
