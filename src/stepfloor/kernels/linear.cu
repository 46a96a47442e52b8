// y = x W^T, bf16 x and few rows: the weight is streamed once as stored, every multiprocessor reads its share front to back.
// Source: mma.m16n8k16 with the weight as the 8-wide operand and the rows of x as the 16-tall one (wgmma, which adds up the
// same way, with the two changed over); linear.py, which writes the streamed layout and states the plan that the macros below
// repeat. Five forms serve different numbers of rows, a file each, included at the end.
//
// A step is 32 columns. Lane (g, t) owns 8 consecutive ones, 8t .. 8t + 7, of weight row g and of rows g and g + 8 of x:
// one 16-byte read of each feeds two matrix steps. Which column is called k inside a step does not matter as long as
// both operands agree. Weight rows past the last one of a piece repeat it: they spoil columns of the sums that nobody
// stores.
//
// The order of a value's sum is the same in every kernel here, whatever the number of rows: inside a slice of STEPS steps
// the lower and the upper half of each 32 columns in step order, their sum, then the slices in order from zero. With a scale
// for blocks of weights, such halves are added up over FLUSH steps, and their sums, each times its scale, over the slice.

#include "stream.cuh"
#include "formats.cuh"

// N, K            shape of the weight
// SPLIT           blocks of a cluster that share the columns
// SLICES, STACKS  warps that share the columns, and the rows, of a block; SLICES * STACKS = 8
// ROWS            weight rows of a warp
// PASS_ROWS       weight rows in the accumulators at one time
// STEPS           32-column steps of a warp
// CHUNK_STEPS     steps of one piece, whose PASS_ROWS weight rows are copied at once
// SLOTS           pieces of a warp in shared memory
// FORMAT          of the weights, see formats.cuh; FLUSH  steps that meet one block scale together
// TILES, TALL     tiles of x rows; whether a tile has 16 rows or 8
// BATCH           steps of x requested at once
// FORM            0: ring, 1: group, 2: spread, 3: share, 4: team; STAGE_STEPS and STAGES belong to group, spread and share
// CLUSTERS        of the spread and share kernels
// TOGETHER        passes that a warp of the spread kernel takes at a time; BUFFERS  of its sums
// WARPGROUPS      of the share kernel, 64 weight rows each
// TEAM            blocks of a cluster of the team kernel
// PER_SM          blocks that fit on a multiprocessor together, so that the next kernel can start early
// FIRST_BLOCK     one of two matrices in linear_pair.cu: the first block of the grid that has its rows; from row GAP_AT on
//                 they have their columns GAP further. Its ring form alone knows these three

#ifndef FIRST_BLOCK
#define ALONE
#define FIRST_BLOCK 0
#define GAP_AT 0
#define GAP 0
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = ROWS * STACKS;
constexpr int GROUPS = (N + BLOCK_ROWS - 1) / BLOCK_ROWS;
constexpr int TAPES = GROUPS * SPLIT * WARPS;  // warps of the grid
constexpr int PASSES = (ROWS + PASS_ROWS - 1) / PASS_ROWS;
constexpr int LAST_ROWS = ROWS - (PASSES - 1) * PASS_ROWS;
constexpr int CHUNKS = STEPS / CHUNK_STEPS;
constexpr int PIECES = PASSES * CHUNKS;
constexpr int CHUNK_UNITS = CHUNK_STEPS / UNIT_STEPS;
constexpr int PIECE_BYTES = CHUNK_UNITS * unit_bytes(PASS_ROWS);
constexpr int LAST_PIECE_BYTES = CHUNK_UNITS * unit_bytes(LAST_ROWS);
constexpr int WIDTHS = (PASS_ROWS + 7) / 8;  // 8-wide tiles of a pass
constexpr bool PADDED = SPLIT * SLICES * STEPS * 32 > K;
static_assert(SLICES * STACKS == WARPS && STEPS % CHUNK_STEPS == 0 && CHUNK_STEPS % BATCH == 0, "plan");
static_assert(SPLIT * SLICES * STEPS * 32 >= K && K % 16 == 0, "plan");
static_assert(BATCH % UNIT_STEPS == 0 && (!BLOCK_SCALES || (BATCH % FLUSH == 0 && 4 % FLUSH == 0)), "plan");

struct Arguments {
  const u8* tape;
  const float* scales;  // of rows or of blocks of weights
  const u16* x;
  u16* out;
  long long x_stride, out_stride;  // in values
  int rows;                        // of x
};

template <bool BOTH> struct Fragment {
  Words top, bottom;
};
template <> struct Fragment<false> {
  Words top;
};

DEVICE Words load_row(const u16* row, int column) {
  if (!PADDED) return load_global(row + column);
  // no branch around a load: it would serialise the steps. The weight is zero here, but zero times NaN is not.
  Words v = load_global(row + (column < K ? column : 0));
  if (column >= K) v.x = v.y = v.z = v.w = 0;
  return v;
}

template <bool BOTH> DEVICE void load_fragment(Fragment<BOTH>& f, const u16* top, const u16* bottom, int column) {
  f.top = load_row(top, column);
  if constexpr (BOTH) f.bottom = load_row(bottom, column);
}

template <bool BOTH> DEVICE void step(float (&even)[4], float (&odd)[4], const Fragment<BOTH>& x, const Words& w) {
  if constexpr (BOTH) {
    matrix_step(even, x.top.x, x.bottom.x, x.top.y, x.bottom.y, w.x, w.y);
    matrix_step(odd, x.top.z, x.bottom.z, x.top.w, x.bottom.w, w.z, w.w);
  } else {
    matrix_step(even, x.top.x, 0, x.top.y, 0, w.x, w.y);
    matrix_step(odd, x.top.z, 0, x.top.w, 0, w.z, w.w);
  }
}

#if FORM == 1 || FORM == 3
// ------------------------------------------------------------------ group, share: rows of x as the operands of warpgroups

constexpr int X_ROWS = TILES * 16;
constexpr int X_STEP = X_ROWS * 64;  // the lower halves of each 8 columns, then the upper ones

// Columns 8t .. 8t + 7 of a row go to four operands of 8 x 8, a pair of columns to each.
DEVICE void store_operands(u32 step, int row, int t, const Words& words) {
  const u32 place = step + row / 8 * 256 + row % 8 * 16 + t * 4;
  store_shared_word(place, words.x);
  store_shared_word(place + 128, words.y);
  store_shared_word(place + X_STEP / 2, words.z);
  store_shared_word(place + X_STEP / 2 + 128, words.w);
}

#endif

#if FORM == 0 || FORM == 4
// ------------------------------------------------------------------ ring, team: a warp's pieces of the weight

constexpr int RING_BYTES = WARPS * SLOTS * PIECE_BYTES;

// The pieces of one warp, in order, through SLOTS slots of shared memory. Its lane 0 copies; each slot has a barrier.
struct Ring {
  const u8* tape;
  u32 buffer, barriers, warp_index, parity;
  int issued, slot;
  u64 policy;

  DEVICE void issue(int into) {
    const int pass = issued / CHUNKS, chunk = issued % CHUNKS;
    const u32 bytes = pass == PASSES - 1 ? LAST_PIECE_BYTES : PIECE_BYTES;
    const u8* from = tape + (u64)pass * ((u64)TAPES * CHUNKS * PIECE_BYTES) + ((u64)chunk * TAPES + warp_index) * bytes;
    barrier_expect(barriers + 8 * into, bytes);
    bulk_copy(buffer + into * PIECE_BYTES, from, bytes, barriers + 8 * into, policy);
    issued++;
  }
  DEVICE void start(int lane) {
    if (lane == 0) {
      for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 8 * i, 1);
      barrier_init_done();
      for (int i = 0; i < SLOTS && i < PIECES; i++) issue(i);
    }
    __syncwarp();
  }
  DEVICE u32 wait() {
    barrier_wait(barriers + 8 * slot, parity);
    return buffer + slot * PIECE_BYTES;
  }
  DEVICE void release(int lane) {
    if (PIECES > SLOTS) {
      reads_done();
      if (lane == 0 && issued < PIECES) issue(slot);
    }
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};
#endif

#if FORM == 0
#include "linear_ring.cu"
#elif FORM == 1
#include "linear_group.cu"
#elif FORM == 2
#include "linear_spread.cu"
#elif FORM == 3
#include "linear_share.cu"
#else
#include "linear_team.cu"
#endif
