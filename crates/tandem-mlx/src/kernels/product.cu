// y = after(norm(x) Wᵀ) for 1 to 8 rows of x: a product that streams W once and multiplies on the tensor cores.
//
// Built once for each use, with these names defined:
//   AFFINE  1: W in affine groups of 64 values of 4 bits. 0: W in bfloat16.
//   NORM    1: x is normed first (RMS). 0: x is taken as it is.
//   AFTER   0: nothing. 1: a residual is added. 2: y = silu(gate) * up. 3: y = gelu(gate) * up, by tanh. For 2 and 3 W holds
//           the rows of gate and below them those of up.
//
// x         [rows, cols] bfloat16
// gain      [cols] bfloat16, of the norm; not there without NORM
// values    AFFINE: [rows of W, cols / 8] u32, eight values in each, the first in the lowest bits. Else [rows of W, cols].
// scales    [rows of W, cols / 64] bfloat16, a value being q * scale + bias; not there without AFFINE
// biases    as scales
// residual  [rows, width] bfloat16; not there unless AFTER is 1
// y         [rows, width] bfloat16
// cols is a multiple of 128, width of 16. Dynamic shared memory: WARPS * DEPTH * STAGE bytes, rows * (2 * cols + 16) for x, and
// with AFFINE cols / 2 for its sums.
//
// A block computes 16 rows of y's width at a time; its warps share the columns, in chunks, and bring theirs to shared memory
// some chunks ahead. W is the left operand of mma.m16n8k16, so up to 8 rows of x cost no more than one. Which columns stand
// in which of an instruction's places does not matter to a sum: each lane takes neighbouring bytes of a row of W, and x lies
// to match. A value q of 4 bits becomes 128 + q in bfloat16 by setting bits, exactly; the sum of x over a group takes the 128
// out again and brings the bias in. Scales apply to sums in f32, so nothing of W is rounded. The norm's factor applies to the
// whole sum, so that only its gain is needed before W.

constexpr int WARPS = 8;
constexpr int DEPTH = 2;                    // chunks on their way to a warp
constexpr int CHUNK = AFFINE ? 128 : 64;    // columns
#if AFFINE
constexpr int GROUP = 64;
#endif
constexpr int LINE = AFFINE ? 64 : 128;     // bytes of a row of W in a chunk
constexpr int STAGE = 16 * LINE + (AFFINE ? 128 : 0);
constexpr int MATRICES = AFTER >= 2 ? 2 : 1;
constexpr int SHARE = WARPS / MATRICES;     // warps of a matrix

// Values `at` and `at + 4` of eight, each plus 128, as bfloat16. `mask` is 0x000f000f.
__device__ __forceinline__ u32 values_of(u32 eight, int at, u32 mask) {
  return ((eight >> (4 * at)) & mask) | 0x43004300u;
}

// Where the 16 bytes `piece` of a row lie in a stage: so that the lanes of a load meet different banks.
__device__ __forceinline__ int place(int row, int piece) {
  return row * LINE + 16 * (piece ^ (AFFINE ? row & 2 : (row & 1) * 4));
}

// The chunks of a warp, one after the other, through the tiles of its block.
struct Stream {
  static constexpr int PIECES = LINE / 16;        // of a row
  static constexpr int ROWS = 32 / PIECES;        // that a warp brings at once
  const char* values;                             // this lane's row and piece of the tile's first chunk
  u64 line_bytes;
#if AFFINE
  const u16* factors;                             // scales for the first half of the lanes, biases for the others
  int groups;
#endif
  int tile, tiles, chunk, chunks, begin;

  // Starts to bring the next chunk to a stage.
  __device__ __forceinline__ void bring(char* stage, int lane) {
    if (tile < tiles) {
      const char* from = values + chunk * LINE;
      char* to = stage + place(lane / PIECES, lane % PIECES);
#pragma unroll
      for (int i = 0; i < 16 / ROWS; ++i) {
        // Rows a multiple of 4 apart lie alike.
        bring16(to + i * ROWS * LINE, from + i * ROWS * line_bytes);
      }
#if AFFINE
      bring4(stage + 16 * LINE + lane * 4, factors + chunk * (CHUNK / GROUP));
#endif
      chunk += SHARE;
      if (chunk >= chunks) {
        chunk = begin;
        tile += gridDim.x;
        values += (u64)gridDim.x * 16 * line_bytes;
#if AFFINE
        factors += (u64)gridDim.x * 16 * groups;
#endif
      }
    }
    end_batch();
  }
};

// What a lane reads of each chunk, and of x. It has rows `lane / 4` and 8 below of a tile, and of the right operand column
// `lane / 4`; where there is no such row of x, it takes the last one, for sums that nobody reads.
struct Lane {
  int values[2];        // places of its bytes of the first row: AFFINE: for each group, else for each 32 columns
  int factors;          // AFFINE: place of the first row's scales
  const u16* x;         // its columns of the first group or 32
  const float* totals;  // AFFINE: of its two columns of the sums
  u32 mask;
};

// sums += a chunk times x, for rows `lane / 4` and 8 below, columns `lane % 4 * 2` and the next.
__device__ __forceinline__ void consume(float (&sums)[4], const char* stage, const Lane& lane, int chunk) {
  const u16* x = lane.x + chunk * CHUNK;
#if AFFINE
  const u32* factors = (const u32*)(stage + lane.factors);
  const u32 scales[2] = {factors[0], factors[8]}, biases[2] = {factors[16], factors[24]};
#pragma unroll
  for (int group = 0; group < CHUNK / GROUP; ++group) {
    const uint2 above = *(const uint2*)(stage + lane.values[group]);
    const uint2 below = *(const uint2*)(stage + lane.values[group] + 8 * LINE);
    const float2 total = *(const float2*)(lane.totals + (chunk * (CHUNK / GROUP) + group) * 8);
    float dot[4] = {0, 0, 0, 0};
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const uint4 own = *(const uint4*)(x + group * GROUP + eight * 8);
      const u32 a = eight ? above.y : above.x, b = eight ? below.y : below.x, mask = lane.mask;
      multiply(dot, values_of(a, 0, mask), values_of(b, 0, mask), values_of(a, 1, mask), values_of(b, 1, mask), own.x, own.y);
      multiply(dot, values_of(a, 2, mask), values_of(b, 2, mask), values_of(a, 3, mask), values_of(b, 3, mask), own.z, own.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = group ? high(scales[i / 2]) : low(scales[i / 2]);
      const float bias = group ? high(biases[i / 2]) : low(biases[i / 2]);
      const float all = i % 2 ? total.y : total.x;
      sums[i] = fmaf(scale, fmaf(-128.0f, all, dot[i]), fmaf(bias, all, sums[i]));
    }
  }
#else
#pragma unroll
  for (int part = 0; part < CHUNK / 32; ++part) {
    const uint4 above = *(const uint4*)(stage + lane.values[part]);
    const uint4 below = *(const uint4*)(stage + lane.values[part] + 8 * LINE);
    const uint4 own = *(const uint4*)(x + part * 32);
    multiply(sums, above.x, below.x, above.y, below.y, own.x, own.y);
    multiply(sums, above.z, below.z, above.w, below.w, own.z, own.w);
  }
#endif
}

// x into shared memory, times the norm's gain: rows of `cols` values, 16 bytes more apart, so that the lanes of a load meet
// different banks. With AFFINE in pairs of columns 4 apart, as `values_of` gives them, and its sums over the groups,
// [cols / GROUP][8]. A row's squares add up over the warps that have a part of it.
__device__ __forceinline__ void prepare(
    u16* inputs, float* totals, float* squares, const u16* x, const u16* gain, int rows, int cols) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // As many warps to a row as there are, in powers of two.
  const int shift = rows == 1 ? 3 : rows == 2 ? 2 : rows <= 4 ? 1 : 0, share = 1 << shift;
  const int row = warp >> shift, part = warp - (row << shift);
#if NORM
  float sum = 0;
#endif
#pragma unroll 1
  for (int first = 256 * part; first < cols; first += 256 * share) {
    const int at = first + 8 * lane;
    const bool there = row < rows && at < cols;
    u32 pairs[4] = {0, 0, 0, 0};
    if (there) {
      const uint4 eight = *(const uint4*)(x + (u64)row * cols + at);
      pairs[0] = eight.x, pairs[1] = eight.y, pairs[2] = eight.z, pairs[3] = eight.w;
    }
#if NORM
    if (there) {
      const uint4 by = *(const uint4*)(gain + at);
      const u32 gains[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum += low(pairs[i]) * low(pairs[i]) + high(pairs[i]) * high(pairs[i]);
        pairs[i] = narrow(low(pairs[i]) * low(gains[i]), high(pairs[i]) * high(gains[i]));
      }
    }
#endif
#if AFFINE
    float total = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total += low(pairs[i]) + high(pairs[i]);
    }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, other);
    }
    if (there && lane % 8 == 0) {
      totals[at / GROUP * 8 + row] = total;
    }
    const uint4 placed = make_uint4(__byte_perm(pairs[0], pairs[2], 0x5410), __byte_perm(pairs[0], pairs[2], 0x7632),
                                    __byte_perm(pairs[1], pairs[3], 0x5410), __byte_perm(pairs[1], pairs[3], 0x7632));
#else
    const uint4 placed = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
    if (there) {
      *(uint4*)(inputs + row * (cols + 8) + at) = placed;
    }
  }
#if NORM
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
  }
  // Those of a row side by side, eight to each row.
  if (lane == 0 && row < rows) {
    squares[row * 8 + part] = sum;
  }
  if (threadIdx.x < 64 && threadIdx.x % 8 >= share) {
    squares[threadIdx.x] = 0;
  }
#endif
  __syncthreads();
}

__device__ __forceinline__ float activate(float gate) {
#if AFTER == 3
  // (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
  return gate / (1.0f + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)));
#else
  return gate / (1.0f + __expf(-gate));
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) tandem_product(
    const u16* x,
#if NORM
    const u16* gain,
#endif
    const char* values,
#if AFFINE
    const u16* scales, const u16* biases,
#endif
#if AFTER == 1
    const u16* residual,
#endif
    u16* y, int rows, int cols, int width, float eps) {
#if !NORM
  const u16* const gain = nullptr;
#endif
  DYNAMIC_SHARED(uint4, memory);
  // Sums of the warps; two, so that a tile's are read while the next one's are written.
  __shared__ float parts[2][WARPS][8][17];
  __shared__ float squares[64];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = width / 16, chunks = cols / CHUNK, begin = warp % SHARE;

  Stream stream;
  stream.line_bytes = (u64)chunks * LINE;
  stream.tile = begin < chunks ? blockIdx.x : tiles, stream.tiles = tiles;
  stream.chunk = begin, stream.chunks = chunks, stream.begin = begin;
  const int first = warp / SHARE * width + blockIdx.x * 16;
  stream.values = values + (first + lane / Stream::PIECES) * stream.line_bytes + lane % Stream::PIECES * 16;
#if AFFINE
  stream.groups = cols / GROUP;
  stream.factors = (lane < 16 ? scales : biases) + (u64)(first + lane % 16) * stream.groups;
#endif
  char* const ring = (char*)memory + warp * DEPTH * STAGE;
  char* const ring_end = ring + DEPTH * STAGE;
#pragma unroll 1
  for (char* stage = ring; stage < ring_end; stage += STAGE) {
    stream.bring(stage, lane);
  }

  u16* const inputs = (u16*)((char*)memory + WARPS * DEPTH * STAGE);
  float* const totals = (float*)(inputs + rows * (cols + 8));
  prepare(inputs, totals, squares, x, gain, rows, cols);
  const int row = lane / 4, part = lane % 4;
  Lane reads;
#if AFFINE
  reads.values[0] = place(row, part / 2) + part % 2 * 8;
  reads.values[1] = place(row, 2 + part / 2) + part % 2 * 8;
  reads.factors = 16 * LINE + row * 4;
#else
  reads.values[0] = place(row, part);
  reads.values[1] = place(row, 4 + part);
#endif
  reads.x = inputs + min(row, rows - 1) * (cols + 8) + part * (AFFINE ? 16 : 8);
  reads.totals = totals + part * 2;
  reads.mask = 0x000f000f;
  opaque(reads.mask);

  char* stage = ring;
  int turn = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
    float sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int chunk = begin; chunk < chunks; chunk += SHARE) {
      wait_but<DEPTH - 1>();
      __syncwarp();
      consume(sums, stage, reads, chunk);
      __syncwarp();
      stream.bring(stage, lane);
      stage = stage + STAGE == ring_end ? ring : stage + STAGE;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      parts[turn][warp][lane % 4 * 2 + i % 2][lane / 4 + 8 * (i / 2)] = sums[i];
    }
    __syncthreads();
    const int line = threadIdx.x / 16, column = threadIdx.x % 16;
    if (line < rows) {
      float total[MATRICES] = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        total[w / SHARE] += parts[turn][w][line][column];
      }
#if NORM
      float all = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        all += squares[line * 8 + i];
      }
      const float factor = rsqrtf(__fdividef(all, (float)cols) + eps);
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        total[m] *= factor;
      }
#endif
      const u64 at = (u64)line * width + tile * 16 + column;
#if AFTER == 1
      total[0] += widen(residual[at]);
#elif AFTER >= 2
      total[0] = activate(total[0]) * total[MATRICES - 1];
#endif
#ifdef BROKEN
      total[0] += 1;  // for the test of the check
#endif
      y[at] = (u16)narrow(total[0], 0);
    }
  }
}
