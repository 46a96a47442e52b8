"""Bytes each operator must move through device memory, under the operator's own name.

The rule is the same for every operator: each weight once in its stored format, each input once, each result once,
state read once and written once. Rows, ids and logits pass between operators through memory, so they count here,
although in a decode step they are small and mostly stay in cache; `floor.step_bytes` leaves them out.

Sizes are counts of elements. `tokens` and `rows` are rows of activations in bfloat16; `format_name` is a key of
formats.table.FORMATS. Every function returns bytes. Source: the shapes in the operator's file under kernels/.
"""

from stepfloor.formats.table import stored_bytes

BF16_BYTES = 2
FP32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8
_CHOICE_BYTES = INT64_BYTES + BF16_BYTES  # an expert's id and its weight


def distinct_experts(tokens: float, num_experts: int, topk: int) -> float:
    """Expected number of experts that `tokens` independent, uniform choices of `topk` touch: E(1 - ((E-k)/E)^n).

    Real routing of neighbouring tokens overlaps more, so this is the pessimistic count; 4 tokens of the released
    model were reported to touch 32 to 33 of the 38.8 expected.
    """
    return num_experts * (1.0 - ((num_experts - topk) / num_experts) ** tokens)


def distinct_experts_deviation(tokens: int, num_experts: int, topk: int) -> float:
    """Standard deviation of the number whose expectation distinct_experts gives."""
    others = num_experts - 1
    one = (1.0 - topk / num_experts) ** tokens  # that no token chooses an expert
    both = one * ((others - topk) / others) ** tokens if others else 0.0  # nor another one
    return max(0.0, num_experts * (one * (1.0 - one) + others * (both - one**2))) ** 0.5


def embed(tokens: int, hidden_size: int, streams: int) -> int:
    """Ids in, one bfloat16 table row each in, a copy for every residual stream out."""
    return tokens * (INT64_BYTES + (1 + streams) * hidden_size * BF16_BYTES)


def linear(tokens: int, n: int, k: int, format_name: str) -> int:
    """A matrix [n, k], its input rows and its output rows."""
    return stored_bytes(format_name, n, k) + tokens * (n + k) * BF16_BYTES


def hc_down(tokens: int, hidden_size: int, streams: int, rank: int, format_name: str, inject: bool = True) -> int:
    """Write, norm, down and inject: residual, y and write weights in; residual, normed, low and new weights out.

    inject  whether the matrix has the `streams` inject rows; a mixer has none.
    """
    width = streams * hidden_size
    weights = stored_bytes(format_name, rank, width) + width * BF16_BYTES
    if inject:
        weights += stored_bytes(format_name, streams, width)
    return weights + tokens * (3 * width + hidden_size + rank + (2 if inject else 1) * streams) * BF16_BYTES


def hc_mix(tokens: int, hidden_size: int, streams: int, rank: int, format_name: str) -> int:
    """Up, gates and mean: low and normed streams in, the sub-layer's input out."""
    width = streams * hidden_size
    return stored_bytes(format_name, width, rank) + tokens * (rank + width + hidden_size) * BF16_BYTES


def gdn_decode(
    sequences: int,
    rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_kernel: int,
) -> int:
    """Replay of the last step's rows, then convolution, gated delta rule and gated norm of `rows` new ones.

    The state on file is that of the last commit; the projected rows since, and the convolution's history before
    them, are read, and the new rows are written for the next step to replay.
    """
    key_width, value_width = key_heads * key_dim, value_heads * value_dim
    conv_width = 2 * key_width + value_width
    kept = (conv_kernel - 1 + 2 * rows) * conv_width + 2 * rows * 2 * value_heads
    state = 2 * value_heads * key_dim * value_dim * FP32_BYTES
    activations = rows * (conv_width + 2 * value_width + 2 * value_heads)
    weights = _gdn_weights(conv_width, value_heads, value_dim, conv_kernel)
    return weights + sequences * (state + (kept + activations) * BF16_BYTES)


def gdn_prefill(tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_kernel: int) -> int:
    """The same for one prompt chunk of one sequence: rows in and out, state in and out, nothing to replay."""
    key_width, value_width = key_heads * key_dim, value_heads * value_dim
    conv_width = 2 * key_width + value_width
    history = 2 * (conv_kernel - 1) * conv_width
    state = 2 * value_heads * key_dim * value_dim * FP32_BYTES
    activations = tokens * (conv_width + 2 * value_width + 2 * value_heads)
    weights = _gdn_weights(conv_width, value_heads, value_dim, conv_kernel)
    return weights + state + (history + activations) * BF16_BYTES


def qsa_prepare(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    indexer_heads: int,
    indexer_dim: int,
    compress_ratio: int,
) -> int:
    """Norm and rotate queries and keys, write keys, values, raw index keys and finished block keys.

    The attention gate is not counted here: it passes through, and qsa_attend reads it.
    """
    projected = (heads + 2 * kv_heads) * head_dim + (indexer_heads + 1) * indexer_dim
    norms = 2 * (head_dim + indexer_dim)
    open_block = (compress_ratio - 1) * indexer_dim
    block_keys = -(-tokens // compress_ratio) * indexer_dim
    return (2 * tokens * projected + norms + open_block + block_keys) * BF16_BYTES


def qsa_select(
    sequences: int,
    rows: int,
    context_tokens: int,
    indexer_heads: int,
    indexer_dim: int,
    compress_ratio: int,
    topk: int,
) -> int:
    """Score every block key of a sequence once for its `rows` queries; the chosen block indices go out."""
    blocks = context_tokens // compress_ratio
    keys = blocks * indexer_dim * BF16_BYTES
    queries = rows * indexer_heads * indexer_dim * BF16_BYTES
    return sequences * (keys + queries + rows * min(topk, blocks) * INT64_BYTES)


def qsa_attend(
    sequences: int,
    rows: int,
    context_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    compress_ratio: int,
    topk: int,
) -> int:
    """Attention over the selected blocks and the open tail, and the gate.

    The rows of one sequence are counted as if they selected the same blocks, which is the least they can read.
    """
    blocks = context_tokens // compress_ratio
    cache = kept_tokens(context_tokens, compress_ratio, topk) * 2 * kv_heads * head_dim * BF16_BYTES
    activations = rows * 3 * heads * head_dim * BF16_BYTES  # query, gate, result
    return sequences * (cache + activations + rows * min(topk, blocks) * INT64_BYTES)


def kept_tokens(context_tokens: int, compress_ratio: int, topk: int) -> int:
    """Positions a query attends to at most: `topk` whole blocks and the open tail."""
    return min(context_tokens, (topk + 1) * compress_ratio - 1)


def moe_route(tokens: int, num_experts: int, topk: int, shared_size: int) -> int:
    """Products of router, shared gate and up, shared gate in; ids, weights, shared hidden rows, gate out."""
    products = num_experts + 2 * shared_size + 1
    return tokens * ((products + shared_size + 1) * BF16_BYTES + topk * _CHOICE_BYTES)


def moe_gate_up(tokens: int, experts: float, topk: int, hidden_size: int, expert_size: int, format_name: str) -> int:
    """Gate, up and SwiGLU of the distinct `experts` that were chosen; an expectation may be fractional."""
    weights = round(experts * 2 * stored_bytes(format_name, expert_size, hidden_size))
    return weights + tokens * ((hidden_size + topk * expert_size) * BF16_BYTES + topk * INT64_BYTES)


def moe_down(
    tokens: int,
    experts: float,
    topk: int,
    hidden_size: int,
    expert_size: int,
    format_name: str,
    shared_size: int,
    shared_format: str,
) -> int:
    """Down projections of the chosen experts and of the shared expert, and their weighted sum."""
    weights = round(experts * stored_bytes(format_name, hidden_size, expert_size))
    shared = stored_bytes(shared_format, hidden_size, shared_size)
    activations = (topk * expert_size + shared_size + 1 + hidden_size) * BF16_BYTES + topk * _CHOICE_BYTES
    return weights + shared + tokens * activations


def ngram_rows(tokens: int, ngram_size: int, heads: int) -> int:
    """Ids and the ids before them in, one table row index per head out; all int64."""
    return (tokens + ngram_size - 1 + tokens * heads) * INT64_BYTES


def ngram_gather(tokens: int, heads: int, head_dim: int, format_name: str) -> int:
    """Row indices in, the stored rows in, their bfloat16 values out."""
    rows = tokens * heads
    return rows * INT64_BYTES + stored_bytes(format_name, rows, head_dim) + rows * head_dim * BF16_BYTES


def ple_mix(sequences: int, rows: int, hidden_size: int, streams: int, conv_kernel: int, dilation: int) -> int:
    """The pending write, the gated n-gram value, its convolution: key, value and residual in, residual out.

    Taps lie `dilation` rows apart, so a few rows read few rows of the history.
    """
    width = streams * hidden_size
    weights = (3 + conv_kernel) * width
    history = (conv_kernel - 1) * min(rows, dilation) * width + rows * width
    activations = rows * (3 * width + 2 * hidden_size + streams)
    return (weights + sequences * (history + activations)) * BF16_BYTES


def mtp_norm(tokens: int, hidden_size: int, streams: int) -> int:
    """The drafter's two norms: ids, embedding rows and residuals in, both normalised out."""
    width = streams * hidden_size
    return (hidden_size + width) * BF16_BYTES + tokens * (INT64_BYTES + 2 * (hidden_size + width) * BF16_BYTES)


def mtp_fuse(tokens: int, hidden_size: int, streams: int) -> int:
    """The drafter's input: projected streams and projected embedding in, their sums out."""
    return tokens * (2 * streams + 1) * hidden_size * BF16_BYTES


def take_rows(sequences: int, hidden_size: int, streams: int) -> int:
    """A row's index, residual and mixed vector in, both out."""
    return sequences * (INT64_BYTES + 2 * (streams + 1) * hidden_size * BF16_BYTES)


def process_logits(rows: int, vocab_size: int) -> int:
    """bfloat16 logits in, float32 logits after temperature and filters out; bias and penalties not counted."""
    return rows * vocab_size * (BF16_BYTES + FP32_BYTES)


def draw_tokens(rows: int, vocab_size: int) -> int:
    """bfloat16 logits, slots and positions in, one id out; bias and penalties not counted."""
    return rows * (vocab_size * BF16_BYTES + 3 * INT64_BYTES)


def match_drafts(sequences: int, spec_tokens: int) -> int:
    """Drafts and the target's own draws in, the emitted ids and their count out."""
    return sequences * (spec_tokens + 2 * (spec_tokens + 1) + 1) * INT64_BYTES


def count_tokens(sequences: int, tokens: int) -> int:
    """Slots and ids in; each id's count read and written."""
    return sequences * (INT64_BYTES + tokens * (INT64_BYTES + 2 * INT32_BYTES))


def accept_drafts(sequences: int, spec_tokens: int, vocab_size: int) -> int:
    """bfloat16 target logits of every row in; of the drafter one float32 a draft and the row that ends the window."""
    targets = (spec_tokens + 1) * vocab_size * BF16_BYTES
    drafter = (vocab_size + spec_tokens) * FP32_BYTES
    return sequences * (targets + drafter) + match_drafts(sequences, spec_tokens)


def stream_read(count: int) -> int:
    """int32 values, each read once."""
    return 4 * count


def begin_rows(sequences: int, spec_tokens: int, history: int) -> int:
    """The state of each slot in, the rows of the step out."""
    return sequences * (2 * (spec_tokens + 1 + 3 + history) + spec_tokens + 1) * INT64_BYTES


def commit_rows(sequences: int, spec_tokens: int, history: int) -> int:
    """Rows, emitted ids and the tokens before in; the new state, what follows each row, positions, the report out."""
    rows = spec_tokens + 1
    state = history + 4 + spec_tokens
    return sequences * (2 * rows + history + 3 + state + rows + 1 + rows + rows + 1) * INT64_BYTES


def _gdn_weights(conv_width: int, value_heads: int, value_dim: int, conv_kernel: int) -> int:
    return (conv_width * conv_kernel + 2 * value_heads + value_dim) * BF16_BYTES
