"""inspect and floor: what a checkpoint holds, and what a decode step must read of it."""

from pathlib import Path
from typing import Annotated

import typer

from stepfloor.cli.environment import open_headers
from stepfloor.cli.options import (
    MOST_SEQUENCES,
    AnyModel,
    AsJson,
    Download,
    NumGpuBlocks,
    Revision,
    bounded,
    filled,
    writable,
)


def inspect(
    model: AnyModel,
    revision: Revision = None,
    download: Download = False,
    json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: bytes by category and format, table geometry, contradictions."""
    from stepfloor.tools.inspect import show

    show(open_headers(model, revision, download), as_json=json)


def floor(
    model: Annotated[
        str | None, typer.Argument(callback=filled, help="As for inspect; without one, the NVFP4 release's layout.")
    ] = None,
    device: Annotated[str, typer.Option(help="GB10, 5090, pro-6000, H200, ...; list shows the table.")] = "GB10",
    bandwidth: Annotated[float | None, typer.Option(help="Measured GB/s; wins over the table.")] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(callback=bounded(high=1024), help="Devices that share each layer.")
    ] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Whole experts on each device.")
    ] = False,
    spec_tokens: Annotated[int | None, typer.Option(help="Drafts a step; 3 where there is a drafter.")] = None,
    sequences: Annotated[
        int, typer.Option(callback=bounded(high=MOST_SEQUENCES), help="Sequences that decode together.")
    ] = 1,
    context: Annotated[int, typer.Option(help="Tokens each sequence holds.")] = 0,
    acceptance_length: Annotated[float | None, typer.Option(help="Mean tokens a step delivers, if known.")] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Share of steps that accept each draft: 0.8,0.6,0.4. Finds the best k.")
    ] = None,
    what_if: Annotated[
        str, typer.Option(help="dense=fp8,head=mxfp8,draft_head=nvfp4,mtp_experts=fp8,draft_vocab=32768, ...")
    ] = "",
    distinct_experts: Annotated[
        str | None, typer.Option(help="Measured overlap, TOKENS=EXPERTS a layer: 4=32.5. Without it, uniform.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (bf16) or fp8.")] = "auto",
    link: Annotated[str | None, typer.Option(help="roce, pcie or nvlink, between devices.")] = None,
    collective_us: Annotated[
        float | None, typer.Option(callback=bounded(0), help="Measured latency of one small exchange.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Plan the memory as well.")] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(callback=bounded(1, MOST_SEQUENCES), help="For --memory; as many as --sequences.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="For --memory: tokens of the longest sequence.")] = 32_768,
    max_num_batched_tokens: Annotated[int, typer.Option(help="For --memory: longest prompt chunk.")] = 2048,
    block_size: Annotated[int, typer.Option(help="For --memory: tokens of a page.")] = 64,
    num_gpu_blocks_override: NumGpuBlocks = None,
    ngram_table: Annotated[str, typer.Option(help="For --memory: device, pinned, mmap or direct.")] = "device",
    state_copies: Annotated[
        int, typer.Option(callback=bounded(0), help="For --memory: states kept for prefix reuse.")
    ] = 0,
    available_gib: Annotated[
        float | None, typer.Option(callback=bounded(0.001), help="For --memory: what the device really has free.")
    ] = None,
    host_gib: Annotated[
        float, typer.Option(callback=bounded(0), help="For --memory: the host's available memory.")
    ] = 64.0,
    shapes: Annotated[bool, typer.Option("--shapes", help="List the matrix products and the floor of each.")] = False,
    json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(callback=writable, help="Draw the bytes into this SVG file.")] = None,
    revision: Revision = None,
) -> None:
    """Say what a decode step must read and the least time it takes, what would lessen it, and what fits."""
    from stepfloor.tools.floor.report import ask
    from stepfloor.tools.floor.report import memory as plan
    from stepfloor.tools.floor.show import show, show_devices

    if device == "list":
        show_devices(as_json=json)
        return
    checkpoint = open_headers(model or "qwen3.8-flash-next:nvfp4", revision)
    question = ask(
        checkpoint.config,
        device,
        bandwidth=bandwidth,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel=enable_expert_parallel,
        spec_tokens=spec_tokens,
        sequences=sequences,
        context=context,
        acceptance=acceptance,
        acceptance_length=acceptance_length,
        what_if=what_if,
        distinct_experts=distinct_experts,
        kv_cache_dtype=kv_cache_dtype,
        link=link,
        collective_us=collective_us,
    )
    planned = None
    if memory:
        planned = plan(
            checkpoint,
            question,
            max_num_seqs=max_num_seqs or sequences,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            table=ngram_table,
            available_gib=available_gib,
            host_gib=host_gib,
            state_copies=state_copies,
        )
    show(checkpoint, question, planned, as_json=json, plot=plot, shapes=shapes)
