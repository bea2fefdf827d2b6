// The largest logit of each row, and which it is; the first of equals. A NaN is larger than all.
//
// Built once for each number of rows, with SLOTS defined as 1, 4 or 8: most rows.
//
// logits   [rows, vocab] bfloat16, vocab a multiple of 8
// best     [rows] u64, zeros; left as zeros
// counters [rows] u32, zeros; left as zeros
// ids      [rows] u32, for the next step on the device
// told_i   [2] u32 for each slot, for the host: the id and the bits of the logit in f32. MLX keeps what has 8 bytes where the
//          host can read it without a copy.
//
// Grid: (blocks of a row, rows).

constexpr int THREADS = 256;

#define SLOT(i) u32 *told##i
#define NAME(i) told##i
#if SLOTS == 1
#define ALL(what) what(0)
#elif SLOTS == 4
#define ALL(what) what(0), what(1), what(2), what(3)
#else
#define ALL(what) what(0), what(1), what(2), what(3), what(4), what(5), what(6), what(7)
#endif

// Orders as the value does, then the first index before the later; never 0.
__device__ __forceinline__ u64 ranked(u32 value, u32 index) {
  const bool nan = (value & 0x7fff) > 0x7f80;
  const u32 order = nan ? 0xffff : value & 0x8000 ? ~value & 0xffff : value | 0x8000;
  return (u64)order << 32 | (u32)~index;
}

extern "C" __global__ void __launch_bounds__(THREADS) tandem_choose(
    const uint4* logits, u64* best, u32* counters, u32* ids, ALL(SLOT), int vocab) {
  u32* const told[SLOTS] = {ALL(NAME)};
  const int row = blockIdx.y, lane = threadIdx.x % 32;
  const uint4* own = logits + (u64)row * (vocab / 8);
  u64 most = 0;
#pragma unroll 2
  for (int at = blockIdx.x * THREADS + threadIdx.x; at < vocab / 8; at += gridDim.x * THREADS) {
    const uint4 eight = own[at];
    const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      most = max(most, ranked(pairs[i / 2] >> (16 * (i % 2)) & 0xffff, 8 * at + i));
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, other));
  }
  __shared__ u64 warps[THREADS / 32];
  if (lane == 0) {
    warps[threadIdx.x / 32] = most;
  }
  __syncthreads();
  if (threadIdx.x > 0) {
    return;
  }
  for (int w = 1; w < THREADS / 32; ++w) {
    most = max(most, warps[w]);
  }
  atomicMax(best + row, most);
  __threadfence();
  if (atomicAdd(counters + row, 1u) < gridDim.x - 1) {
    return;
  }
  most = atomicExch(best + row, 0ull);
  counters[row] = 0;
  const u32 order = most >> 32, index = ~(u32)most;
  ids[row] = index;
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    if (slot == row) {
      told[slot][0] = index;
      told[slot][1] = (order == 0xffff ? 0x7fff : order & 0x8000 ? order & 0x7fff : ~order & 0xffff) << 16;
#ifdef BROKEN
      told[slot][0] ^= 1;  // for the test of the check
#endif
    }
  }
}
