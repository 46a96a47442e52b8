"""The memory plan: what a model and its requests take of the device and of the host, before a byte is allocated.

How the engine uses it: build Capacity from the driver (discrete_capacity) or from /proc/meminfo (unified_capacity),
call plan_memory with the checkpoint's weights and its own EngineConfig, and raise UserError(plan.refusal()) where
that is not None. What it allocates afterwards is what the lines say: `cache/tensors.py` agrees with them to the byte.

    plan = plan_memory(checkpoint.config, checkpoint.weights, engine_config, capacity)
    if refusal := plan.refusal():
        raise UserError(refusal)

A line is exact where a shape decides it, and says "at most" where it is a bound. Bytes throughout; GiB in sentences.
Source: shapes of cache/tensors.py, step/step.py and sampler/sampler.py; architecture of `qwen4_exp`, "per-sequence
state"; field reports of unified memory (MemAvailable, not the driver's free figure, is what a start may take).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.roofline.bytes import BF16_BYTES, FP32_BYTES, INT64_BYTES
from stepfloor.roofline.groups import HasBytes, component_bytes
from stepfloor.roofline.shards import ONE_DEVICE, Shards, device_bytes

TablePlace = Literal["device", "pinned", "mmap", "direct"]
KvDtype = Literal["bf16", "fp8"]
Where = Literal["device", "host"]

TABLE_PLACES: tuple[TablePlace, ...] = ("device", "pinned", "mmap", "direct")
KV_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}
_GIB = 1 << 30
_MIB = 1 << 20
# what a driver context, the libraries' own workspaces and fragmentation take on a discrete card
DEVICE_RESERVE_BYTES = 3 * _GIB // 2
# kept back from MemAvailable: file pages in use, the rest of the system, and the room in which nothing is killed
UNIFIED_RESERVE_BYTES = 6 * _GIB
HOST_RESERVE_BYTES = 4 * _GIB
# a row of the table may straddle two blocks of a disk; this many reads are under way at once
DIRECT_READS, _BLOCK_BYTES = 4096, 4096
_MAX_SEQUENCES = 256
# block scores of a prompt chunk are made for so many bytes of rows at a time, a tile at least (kernels.qsa_select)
SCORE_WORKSPACE_BYTES, SCORE_TILE_ROWS = 200 * _MIB, 64
SAMPLER_STAGE_SETS = 4  # step.STAGE_SETS, which lies above this room: a graph each


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a start may use. On unified memory the device's bytes are the whole pool, and host_bytes counts nothing.

    device_bytes, host_bytes  available now, reserve not yet taken off; of one device
    device_reserve, host_reserve  kept free
    note  what a reader should know about the figures, or nothing
    """

    device_bytes: int
    host_bytes: int
    unified: bool = False
    device_reserve: int = DEVICE_RESERVE_BYTES
    host_reserve: int = HOST_RESERVE_BYTES
    note: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where things go, and how large what may be chosen is.

    table          device; pinned: on the host, locked; mmap: in the page cache, as far as that reaches; direct: read
                   from the disk row by row past the page cache
    kv_dtype       of keys and values; block keys and index keys stay in the activations' type
    state_copies   recurrent states kept beside the running ones, for prefix reuse; host_state_copies  on the host
    expert_workspace_bytes  most that a prefill may take to decode one layer's experts to bf16
    """

    table: TablePlace = "device"
    kv_dtype: KvDtype = "bf16"
    state_copies: int = 0
    host_state_copies: int = 0
    expert_workspace_bytes: int = 5 * _GIB


@dataclass(frozen=True, slots=True)
class Line:
    """One component of the plan and where it lies; `note` says how its bytes come about."""

    component: str
    nbytes: int
    where: Where
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All lines of one device and of the host, and what the rest would hold.

    max_model_len  longest context that fits with the sequences asked for, 0 if none; at most the model's own
    max_num_seqs   most sequences that fit with the context asked for, 0 if none; looked for up to 256
    max_pages      most pages of the cache that fit with both, 0 if none; up to the longest sequence in every slot
    """

    lines: tuple[Line, ...]
    capacity: Capacity
    table: TablePlace
    engine: EngineConfig
    max_model_len: int
    max_num_seqs: int
    max_pages: int

    def total(self, where: Where) -> int:
        """Bytes of all lines there, reserve included."""
        return sum(line.nbytes for line in self.lines if line.where == where)

    def available(self, where: Where) -> int:
        return self.capacity.device_bytes if where == "device" else self.capacity.host_bytes

    def short(self, where: Where) -> int:
        """Bytes that are missing there; 0 where the plan fits."""
        return max(0, self.total(where) - self.available(where))

    @property
    def fits(self) -> bool:
        return not (self.short("device") or self.short("host"))

    def refusal(self) -> str | None:
        """Why the plan cannot be started and what to do, as one sentence with its arithmetic; None if it fits."""
        faults = [self._fault(where) for where in ("device", "host") if self.short(where)]
        if not faults:
            return None
        advice = "; ".join(self._advice())
        return f"{'; '.join(faults)}; {advice}" + (f" ({self.capacity.note})" if self.capacity.note else "")

    def _fault(self, where: Where) -> str:
        largest = sorted((line for line in self.lines if line.where == where), key=lambda line: -line.nbytes)
        parts = " + ".join(f"{line.component} {line.nbytes / _GIB:.2f}" for line in largest[:6])
        rest = sum(line.nbytes for line in largest[6:])
        parts += f" + rest {rest / _GIB:.2f}" if rest else ""
        pool = "unified memory" if self.capacity.unified else f"{where} memory"
        return (
            f"{pool}: wanted {self.total(where) / _GIB:.2f} GiB ({parts}); "
            f"{self.available(where) / _GIB:.2f} GiB are available, {self.short(where) / _GIB:.2f} GiB short"
        )

    def _advice(self) -> list[str]:
        advice: list[str] = []
        engine = self.engine
        if self.max_model_len >= 2 and self.max_model_len < engine.max_model_len:
            advice.append(f"--max-model-len {self.max_model_len} fits with {engine.max_num_seqs} sequences")
        if 0 < self.max_num_seqs < engine.max_num_seqs:
            advice.append(f"--max-num-seqs {self.max_num_seqs} fits with {engine.max_model_len} tokens each")
        if engine.max_num_seqs > 1 and engine.pages_per_sequence <= self.max_pages < engine.num_pages - 1:
            advice.append(
                f"--num-gpu-blocks-override {self.max_pages} fits: requests then wait for the pages of their prompt "
                "and max_tokens"
            )
        on_the_way = {"pinned": "host", "device": "device"}.get(self.table)
        if on_the_way and self.short("device" if self.capacity.unified or on_the_way == "device" else "host"):
            elsewhere = "mmap takes no memory of its own"
            if self.table == "device" and not self.capacity.unified:
                elsewhere = "pinned takes the host's"
            advice.append(f"the n-gram table may be placed elsewhere: --ngram-table {elsewhere}")
        return advice or ["a smaller checkpoint is needed (`stepfloor convert`), or more devices"]


def discrete_capacity(device_bytes: int, host_bytes: int) -> Capacity:
    """A card with memory of its own: what its driver says is free, and the host's MemAvailable."""
    return Capacity(device_bytes, host_bytes)


def unified_capacity(meminfo: Mapping[str, int], device_free: int | None = None) -> Capacity:
    """Device and host in one pool.

    meminfo      /proc/meminfo in bytes; needs MemAvailable
    device_free  what the driver calls free. It counts file pages as used, so it is not believed, only named
    Raises ValueError without MemAvailable.
    """
    if "MemAvailable" not in meminfo:
        raise ValueError(f"unified_capacity needs MemAvailable; got {sorted(meminfo)}")
    available = meminfo["MemAvailable"]
    notes: list[str] = []
    if device_free is not None and device_free < available:
        notes.append(
            f"the driver calls {device_free / _GIB:.1f} GiB free; the page cache gives back the rest of the "
            f"{available / _GIB:.1f} GiB available"
        )
    swapped = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    if swapped > _GIB // 2:
        notes.append(f"{swapped / _GIB:.1f} GiB are swapped out: end what uses them, or expect stalls")
    return Capacity(available, available, unified=True, device_reserve=UNIFIED_RESERVE_BYTES, note="; ".join(notes))


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes by name.

    >>> parse_meminfo("MemTotal:  4 kB\\nHugePages_Total: 2\\n")
    {'MemTotal': 4096, 'HugePages_Total': 2}
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split() or ["0"]
        found[name.strip()] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


# names of a limit, of what is used of it, and of the file pages in that which go first: cgroup version 2, version 1
_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
CGROUP_FILES = frozenset(name for limit, used, _ in _CGROUPS for name in (limit, used)) | {"memory.stat"}


def cgroup_available(files: Mapping[str, str]) -> int | None:
    """Bytes that a container's own limit leaves; None where it has none. MemAvailable is the whole host's.

    files  of its cgroup directory: name to text
    """
    for limit, used, idle in _CGROUPS:
        if limit in files and used in files and files[limit].strip() != "max":
            stat = dict(line.split(maxsplit=1) for line in files.get("memory.stat", "").splitlines() if " " in line)
            return max(0, int(files[limit]) - int(files[used]) + int(stat.get(idle, 0)))
    return None


def plan_memory(
    config: ModelConfig,
    weights: Mapping[str, HasBytes],
    engine: EngineConfig,
    capacity: Capacity,
    placement: Placement | None = None,
    shards: Shards = ONE_DEVICE,
    activation_bytes: int = BF16_BYTES,
) -> MemoryPlan:
    """Plan one device of `shards.devices`, and the host.

    weights           canonical name -> weight, of a checkpoint or of roofline.planned; the drafter's are left out
                      where engine.spec_tokens is 0
    placement         as the engine's own settings say, without one
    activation_bytes  2 for bf16; 4 for a checkpoint in float32
    Raises ValueError for a weight that the byte model does not know.
    """
    placement = placement or placement_of(engine)
    kept = {n: w for n, w in weights.items() if engine.spec_tokens or not n.startswith("mtp.")}
    fixed = tuple(_weight_lines(kept, placement, shards, capacity))

    def lines(asked: EngineConfig) -> tuple[Line, ...]:
        return (
            *fixed,
            *cache_lines(config, asked, placement, shards, activation_bytes),
            *_work_lines(config, asked, placement, shards, kept, activation_bytes),
            *_reserve_lines(capacity),
        )

    def fits(asked: EngineConfig) -> bool:
        return MemoryPlan(lines(asked), capacity, placement.table, asked, 0, 0, 0).fits

    def holds(asked: EngineConfig) -> bool:
        return asked.num_pages > asked.pages_per_sequence and fits(asked)

    longest = _largest(lambda n: holds(replace(engine, max_model_len=n)), config.max_position_embeddings)
    most = _largest(lambda n: fits(replace(engine, max_num_seqs=n)), _MAX_SEQUENCES)
    every = engine.max_num_seqs * engine.pages_per_sequence
    pages = _largest(lambda n: fits(replace(engine, num_gpu_blocks_override=n)), every)
    return MemoryPlan(lines(engine), capacity, placement.table, engine, longest, most, pages)


def placement_of(engine: EngineConfig) -> Placement:
    """What an engine's settings say of the table and of keys and values."""
    return Placement(table=engine.ngram_table, kv_dtype="fp8" if engine.kv_cache_dtype == "fp8" else "bf16")


def cache_lines(
    config: ModelConfig,
    engine: EngineConfig,
    placement: Placement,
    shards: Shards = ONE_DEVICE,
    activation_bytes: int = BF16_BYTES,
) -> list[Line]:
    """What the sequences leave behind, line by line as cache/tensors.py allocates it, and the copies of states."""
    slots, rows = engine.max_num_seqs + 1, engine.spec_tokens + 1
    pages = engine.num_pages
    sparse = len(config.sparse_layers) + (1 if engine.spec_tokens else 0)
    linear = len(config.linear_layers)
    kv_heads = shards.kv_heads(config.num_key_value_heads)
    value_heads = shards.heads(config.linear_num_value_heads)
    conv_width = shards.heads(config.conv_width)
    state = config.linear_key_head_dim * config.linear_value_head_dim * FP32_BYTES * value_heads
    keys = 2 * sparse * pages * engine.block_size * kv_heads * config.head_dim
    block_keys = sparse * pages * (engine.block_size // config.indexer_compress_ratio) * config.indexer_head_dim
    ring = config.indexer_compress_ratio + engine.spec_tokens
    raw_rows = config.linear_conv_kernel_dim - 1 + rows
    ngram_rows = config.ngram_size * (config.ple_conv_kernel_size - 1) + rows
    kv_bytes = KV_BYTES[placement.kv_dtype] if placement.kv_dtype == "fp8" else activation_bytes
    copies = placement.state_copies
    lines = [
        Line("keys and values", keys * kv_bytes, "device", f"{pages} pages of {engine.block_size}, {sparse} layers"),
        Line("block keys", block_keys * activation_bytes, "device", f"one for {config.indexer_compress_ratio} tokens"),
        Line("index keys", sparse * slots * ring * config.indexer_head_dim * activation_bytes, "device", "open blocks"),
        Line("page table", slots * engine.pages_per_sequence * INT64_BYTES, "device"),
        Line("recurrent state", linear * slots * state, "device", f"{slots} slots, one of them for padding"),
        Line("pending rows", linear * slots * raw_rows * conv_width * activation_bytes, "device"),
        Line("pending gates", linear * slots * rows * 2 * value_heads * activation_bytes, "device"),
        Line("n-gram history", slots * ngram_rows * config.stream_width * activation_bytes, "device"),
    ]
    if copies:
        size = state_copy_bytes(config, shards, activation_bytes)
        lines.append(Line("state copies", copies * size, "device", f"{copies} of {size / _MIB:.1f} MiB"))
    if placement.host_state_copies:
        size = placement.host_state_copies * state_copy_bytes(config, shards, activation_bytes)
        lines.append(Line("state copies on the host", size, "host"))
    return lines


def state_copy_bytes(config: ModelConfig, shards: Shards = ONE_DEVICE, activation_bytes: int = BF16_BYTES) -> int:
    """What must be kept to go on from a position: recurrent states, convolution histories, the drafter's input row.

    At a multiple of the indexer's ratio no block is open, so raw index keys are not part of it.
    """
    value_heads = shards.heads(config.linear_num_value_heads)
    state = value_heads * config.linear_key_head_dim * config.linear_value_head_dim * FP32_BYTES
    window = (config.linear_conv_kernel_dim - 1) * shards.heads(config.conv_width) * activation_bytes
    history = config.ngram_size * (config.ple_conv_kernel_size - 1) * config.stream_width * activation_bytes
    tokens = (config.ngram_size - 1) * INT64_BYTES
    return len(config.linear_layers) * (state + window) + history + config.stream_width * activation_bytes + tokens


def index_score_bytes(rows: int, context_tokens: int, compress_ratio: int) -> int:
    """float32 scores of `rows` queries against every block of a context."""
    return rows * -(-context_tokens // compress_ratio) * FP32_BYTES


def _weight_lines(
    weights: Mapping[str, HasBytes], placement: Placement, shards: Shards, capacity: Capacity
) -> list[Line]:
    shared = {name: _Size(device_bytes(name, w.num_bytes, shards)) for name, w in weights.items()}
    whole_table = sum(w.num_bytes for n, w in weights.items() if ".ngram_embedding" in n)
    table = sum(w.num_bytes for n, w in shared.items() if ".ngram_embedding" in n)
    # what is left under that name are the constants of its hash
    sizes = component_bytes({n: w for n, w in shared.items() if ".ngram_embedding" not in n})
    lines = [Line(f"weights: {_WORDS[name]}", size, "device") for name, size in sizes.items() if size]
    lines.sort(key=lambda line: -line.nbytes)
    host: Where = "device" if capacity.unified else "host"
    if placement.table == "device":
        lines.append(Line("n-gram table", table, "device"))
    elif placement.table == "pinned":
        note = "pinned in the pool that the device uses too: nothing is gained" if capacity.unified else "pinned"
        lines.append(Line("n-gram table", whole_table, host, note))
    elif placement.table == "mmap":
        note = f"{whole_table / _GIB:.2f} GiB mapped; the page cache keeps what is left free"
        lines.append(Line("n-gram table", 0, host, note))
    else:
        lines.append(Line("n-gram table", 2 * DIRECT_READS * _BLOCK_BYTES, host, "buffers of direct reads"))
    return lines


def _work_lines(
    config: ModelConfig,
    engine: EngineConfig,
    placement: Placement,
    shards: Shards,
    weights: Mapping[str, HasBytes],
    activation_bytes: int,
) -> list[Line]:
    slots, k, vocab = engine.max_num_seqs + 1, engine.spec_tokens, config.vocab_size
    decode_rows = engine.max_num_seqs * (k + 1)
    chunk = engine.max_num_batched_tokens
    per_row = _activation_values(config, shards) * activation_bytes
    # what a row's logits pass through: as they come, processed in float32, once more while filtered, and their log
    logits = decode_rows * vocab * (activation_bytes + 3 * FP32_BYTES)
    scored_at_once = SCORE_WORKSPACE_BYTES // index_score_bytes(1, engine.max_model_len, config.indexer_compress_ratio)
    scored = max(decode_rows, min(chunk, max(SCORE_TILE_ROWS, scored_at_once)))
    scores = index_score_bytes(scored, engine.max_model_len, config.indexer_compress_ratio)
    rope = 2 * engine.positions * config.rope.dim * activation_bytes
    decoded = _decoded_experts(config, weights, chunk, shards)
    integers = slots * (4 + k + config.ngram_size) * INT64_BYTES
    graphs = 0 if engine.enforce_eager else len(engine.decode_shapes) * SAMPLER_STAGE_SETS
    when = "when wanted" if engine.enforce_eager else "from the start, with the graphs"
    lines = [
        Line("sampler: bias", slots * vocab * FP32_BYTES, "device", when),
        Line("sampler: penalties", slots * vocab * (FP32_BYTES + 1), "device", when),
        Line("sampler: log q", slots * k * vocab * FP32_BYTES, "device", when),
        Line("step state", integers + rope, "device", "tokens, lengths, drafts; rotary tables"),
        Line(
            "workspace: experts", min(decoded, placement.expert_workspace_bytes), "device", "at most: bf16 in prefill"
        ),
        Line("workspace: activations", max(chunk, decode_rows) * per_row, "device", f"at most: {chunk} rows"),
        Line("workspace: block scores", scores, "device", f"at most: {scored} rows at a time"),
        Line("workspace: logits", logits, "device", f"at most: {decode_rows} rows"),
        Line("graphs", graphs * (decode_rows * per_row // 8 + 16 * _MIB), "device", f"at most: {graphs} of them"),
    ]
    return [line for line in lines if line.nbytes]


def _activation_values(config: ModelConfig, shards: Shards) -> int:
    """Values of one row alive at once, at most: the residual before and after, its normed form, and one sub-layer."""
    width, hidden = config.stream_width, config.hidden_size
    value_width, attention = shards.heads(config.value_width), shards.heads(config.attention_width)
    # projections; q, k, v after the convolution, in float32; the result before and after its gate
    conv_width = shards.heads(config.conv_width)
    linear = conv_width + value_width + 2 * config.linear_num_value_heads + 2 * conv_width + 3 * value_width
    sparse = 2 * (2 * attention + 2 * config.kv_width + config.indexer_width) + 3 * attention
    inner = config.moe_intermediate_size * config.num_experts_per_tok
    # the chosen experts' hidden rows in float32 and bf16, and their results
    experts = 3 * inner + config.num_experts_per_tok * hidden + 4 * config.num_experts
    ngram = config.ple_embed_dim + width + hidden + 2 * width
    return 3 * width + 2 * hidden + max(linear, sparse, experts, ngram)


def _decoded_experts(config: ModelConfig, weights: Mapping[str, HasBytes], chunk: int, shards: Shards) -> int:
    """One layer's experts in bf16, as many as a chunk can touch; 0 where all are stored so."""
    one = 3 * config.moe_intermediate_size * config.hidden_size * BF16_BYTES
    blocks: dict[str, int] = {}
    for name, weight in weights.items():
        head, inside, _ = name.partition(".mlp.experts.")
        if inside:
            blocks[head] = blocks.get(head, 0) + weight.num_bytes
    if all(size >= one * config.num_experts for size in blocks.values()):
        return 0
    touched = min(config.num_experts, chunk * config.num_experts_per_tok)
    return -(-touched * one // shards.devices)


def _reserve_lines(capacity: Capacity) -> list[Line]:
    if capacity.unified:
        return [Line("reserve", capacity.device_reserve, "device", "the system, its file pages, the driver")]
    return [
        Line("reserve", capacity.device_reserve, "device", "driver context, libraries, fragmentation"),
        Line("reserve", capacity.host_reserve, "host", "the system"),
    ]


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n up to limit that fits, 0 if 1 does not; what fits at n fits below it."""
    if not fits(1):
        return 0
    low, high = 1, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class _Size:
    num_bytes: int


_WORDS = {
    "experts": "routed experts",
    "gdn": "gated delta net",
    "qsa": "sparse attention",
    "indexer": "indexer",
    "hc": "hyper-connections",
    "router": "router",
    "shared_experts": "shared experts",
    "head": "head",
    "embedding": "embedding",
    "ple": "n-gram projections",
    "vectors": "norms and vectors",
    "table": "n-gram constants",
    "mtp_dense": "drafter, dense",
    "mtp_experts": "drafter experts",
    "mtp_head": "drafter head",
}
