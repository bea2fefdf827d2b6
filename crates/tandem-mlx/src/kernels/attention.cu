// Decode attention: one new token of each of up to SLOTS sequences. Turns the new queries and keys, writes the new keys and
// values behind those that are there, attends.
//
// Built once for each number of sequences and shape, with these names defined:
//   SLOTS   how many sequences' buffers are passed, 1 to 8
//   DIM     of a head: 64, 128 or 256
//   HEADS   query heads of a block: a divisor of those that share a key head, at most 4
//
// qkv          [rows, (heads + 2 * kv_heads) * DIM] bfloat16: queries, keys, values
// wavelengths  [turned / 2] f32: the first `turned` dimensions of a head turn, i with i + turned / 2
// counters     [rows * heads / HEADS] u32, zeros; left as zeros
// k0, v0, ...  [kv_heads, capacity, DIM] bfloat16, SLOTS of each; written at the row's position. Nothing else reads or writes
//              that place before this kernel is done, and whatever reads it later waits for `out`.
// out          [rows, heads * DIM] bfloat16
// parts        [rows, heads, splits, DIM + 2] f32: what a block leaves for the last one, with the largest score and the sum
// first_i, position_i, capacity_i   of each slot: the first key it sees, the new token's place, its buffers' capacity
//
// Grid: (splits, at most 32; heads / HEADS; rows). A block takes its share of a sequence's keys, PAGE at a time; DIM / 8 lanes share a key.
// The last block of a group of heads adds the shares up.

constexpr int WARPS = 8;
constexpr int LANES = DIM / 8;              // to a key
constexpr int SIDE = 32 / LANES;            // keys of a warp, side by side
constexpr int TIMES = 2;                    // keys of a lane, one after the other
constexpr int PAGE = WARPS * SIDE * TIMES;
constexpr float HIDDEN = -1e30f;
#ifdef BROKEN
constexpr float FAULT = 1;  // for the test of the check
#else
constexpr float FAULT = 0;
#endif

__device__ __forceinline__ void unpack(float (&out)[8], uint4 eight) {
  const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = low(pairs[i]);
    out[2 * i + 1] = high(pairs[i]);
  }
}

#define SLOT(i) u16 *k##i, u16 *v##i
#define PLACE(i) int first##i, int position##i, int capacity##i
#if SLOTS == 1
#define ALL(what) what(0)
#elif SLOTS == 2
#define ALL(what) what(0), what(1)
#elif SLOTS == 4
#define ALL(what) what(0), what(1), what(2), what(3)
#else
#define ALL(what) what(0), what(1), what(2), what(3), what(4), what(5), what(6), what(7)
#endif
#define PAIR(i) {k##i, v##i}
#define TRIPLE(i) {first##i, position##i, capacity##i}

extern "C" __global__ void __launch_bounds__(WARPS * 32) tandem_attention(
    const u16* qkv, const float* wavelengths, u32* counters, ALL(SLOT), u16* out, float* parts, ALL(PLACE), int heads,
    int kv_heads, int turned, float scale) {
  u16* const buffers[SLOTS][2] = {ALL(PAIR)};
  const int places[SLOTS][3] = {ALL(TRIPLE)};
  u16 *keys = buffers[0][0], *values = buffers[0][1];
  int first = places[0][0], position = places[0][1], capacity = places[0][2];
  const int row = blockIdx.z;
#pragma unroll
  for (int slot = 1; slot < SLOTS; ++slot) {
    if (slot == row) {
      keys = buffers[slot][0], values = buffers[slot][1];
      first = places[slot][0], position = places[slot][1], capacity = places[slot][2];
    }
  }
  const int splits = gridDim.x, split = blockIdx.x, head = blockIdx.y * HEADS;
  const int kv_head = head / (heads / kv_heads);
  const u64 offset = (u64)kv_head * capacity * DIM;
  keys += offset, values += offset;
  opaque(keys);
  opaque(values);
  const u16* own = qkv + (u64)row * (heads + 2 * kv_heads) * DIM;

  __shared__ float queries[HEADS][DIM];
  // The new key and value.
  __shared__ uint4 fresh[2][DIM / 8];
  // Shares of the warps.
  __shared__ float sums[WARPS][HEADS][DIM];
  __shared__ float largest[WARPS][HEADS], weights[WARPS][HEADS];
  __shared__ float factors[HEADS][32];
  __shared__ bool last;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = position + 1 - first, share = (count + splits - 1) / splits;
  const int begin = first + split * share, end = min(begin + share, position + 1);
  uint4 k[TIMES], v[TIMES];
  bool seen[TIMES];
  auto load = [&](int page) {
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
      const int key = page + (t * WARPS + warp) * SIDE + lane / LANES;
      seen[t] = key < end;
      const u64 at = (u64)(seen[t] ? key : begin) * DIM + lane % LANES * 8;
      k[t] = *(const uint4*)(keys + at);
      v[t] = *(const uint4*)(values + at);
    }
  };
  // On their way while the queries turn.
  if (begin < end) {
    load(begin);
  }

  // Whose share the new token is, keeps it.
  const bool keeps = begin <= position && position < end;
#pragma unroll 1
  for (int i = threadIdx.x; i < (HEADS + 1) * DIM / 2; i += WARPS * 32) {
    // Two dimensions that turn together, or two that do not turn, of a query or of the key.
    const int h = i / (DIM / 2), pair = i % (DIM / 2), half = turned / 2;
    const int at = pair < half ? pair : 2 * pair, other = pair < half ? pair + half : at + 1;
    const u16* from = own + (h < HEADS ? head + h : heads + kv_head) * DIM;
    float a = widen(from[at]), b = widen(from[other]);
    if (pair < half) {
      // Brought to half a turn in f64: the fast functions are exact to 21 bits there.
      const double angle = position * (1.0f / wavelengths[pair]);
      const float rest = (float)(angle - 6.283185307179586 * rint(angle * 0.15915494309189535));
      const float cosine = __cosf(rest), sine = __sinf(rest), old = a;
      a = old * cosine - b * sine;
      b = old * sine + b * cosine;
    }
    if (h < HEADS) {
      // In powers of two from here on.
      queries[h][at] = a * scale * 1.4426950408889634f;
      queries[h][other] = b * scale * 1.4426950408889634f;
    } else {
      ((u16*)fresh[0])[at] = (u16)narrow(a, 0);
      ((u16*)fresh[0])[other] = (u16)narrow(b, 0);
    }
  }
  if (threadIdx.x < DIM / 8) {
    fresh[1][threadIdx.x] = ((const uint4*)(own + (heads + kv_heads + kv_head) * DIM))[threadIdx.x];
  }
  __syncthreads();
  if (keeps && threadIdx.x < DIM / 4) {
    const int part = threadIdx.x % (DIM / 8);
    const bool key = threadIdx.x < DIM / 8;
    ((uint4*)((key ? keys : values) + (u64)position * DIM))[part] = fresh[key ? 0 : 1][part];
  }

  float q[HEADS][8], sum[HEADS][8] = {}, most[HEADS], weight[HEADS] = {};
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    most[h] = HIDDEN;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[h][i] = queries[h][lane % LANES * 8 + i];
    }
  }
#pragma unroll 1
  for (int page = begin; page < end; page += PAGE) {
    if (page > begin) {
      load(page);
    }
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
      if (page + (t * WARPS + warp) * SIDE + lane / LANES == position) {
        k[t] = fresh[0][lane % LANES];
        v[t] = fresh[1][lane % LANES];
      }
    }
    float scores[TIMES][HEADS];
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
      float eight[8];
      unpack(eight, k[t]);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          score = fmaf(q[h][i], eight[i], score);
        }
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) {
          score += __shfl_xor_sync(0xffffffffu, score, other);
        }
        scores[t][h] = seen[t] ? score : HIDDEN;
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float larger = most[h];
#pragma unroll
      for (int t = 0; t < TIMES; ++t) {
        larger = fmaxf(larger, scores[t][h]);
      }
      const float shrink = power(most[h] - larger);
      most[h] = larger;
      weight[h] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[h][i] *= shrink;
      }
    }
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
      float eight[8];
      unpack(eight, v[t]);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        const float by = seen[t] ? power(scores[t][h] - most[h]) : 0.0f;
        weight[h] += by;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[h][i] = fmaf(by, eight[i], sum[h][i]);
        }
      }
    }
  }

  // The shares of a warp's keys side by side, then those of the warps.
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float theirs = __shfl_xor_sync(0xffffffffu, most[h], other);
      const float larger = fmaxf(most[h], theirs);
      const float shrink = power(most[h] - larger);
      most[h] = larger;
      weight[h] *= shrink;
      weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], other);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[h][i] *= shrink;
        sum[h][i] += __shfl_xor_sync(0xffffffffu, sum[h][i], other);
      }
    }
    if (lane < LANES) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[warp][h][lane * 8 + i] = sum[h][i];
      }
      if (lane == 0) {
        largest[warp][h] = most[h];
        weights[warp][h] = weight[h];
      }
    }
  }
  __syncthreads();
  u16* to = out + ((u64)row * heads + head) * DIM;
  float* shares = parts + ((u64)row * heads + head) * splits * (DIM + 2);
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * DIM; i += WARPS * 32) {
    const int h = i / DIM, d = i % DIM;
    float larger = HIDDEN, total = 0, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      larger = fmaxf(larger, largest[w][h]);
    }
#pragma unroll 4
    for (int w = 0; w < WARPS; ++w) {
      const float shrink = power(largest[w][h] - larger);
      total = fmaf(sums[w][h][d], shrink, total);
      all = fmaf(weights[w][h], shrink, all);
    }
    if (splits == 1) {
      to[i] = (u16)narrow(__fdividef(total, all) + FAULT, 0);
    } else {
      float* share = shares + ((u64)h * splits + split) * (DIM + 2);
      share[d] = total;
      if (d == 0) {
        share[DIM] = larger;
        share[DIM + 1] = all;
      }
    }
  }
  if (splits == 1) {
    return;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* counter = counters + row * gridDim.y + blockIdx.y;
    last = atomicAdd(counter, 1u) == splits - 1;
    if (last) {
      *counter = 0;
    }
  }
  __syncthreads();
  if (!last) {
    return;
  }
  __threadfence();
  // A warp for each head, a lane for each share: what the share's sums count for.
  if (warp < HEADS) {
    float2 theirs = make_float2(HIDDEN, 0.0f);
    if (lane < splits) {
      theirs = __ldcg((const float2*)(shares + ((u64)warp * splits + lane) * (DIM + 2) + DIM));
    }
    float larger = theirs.x;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, other));
    }
    const float shrink = power(theirs.x - larger);
    float all = shrink * theirs.y;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      all += __shfl_xor_sync(0xffffffffu, all, other);
    }
    factors[warp][lane] = __fdividef(shrink, all);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 2 * threadIdx.x; i < HEADS * DIM; i += 2 * WARPS * 32) {
    const int h = i / DIM;
    const float* from = shares + (u64)h * splits * (DIM + 2) + i % DIM;
    float a = 0, b = 0;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
      const float2 theirs = __ldcg((const float2*)(from + s * (DIM + 2)));
      a = fmaf(theirs.x, factors[h][s], a);
      b = fmaf(theirs.y, factors[h][s], b);
    }
    to[i] = (u16)narrow(a + FAULT, 0);
    to[i + 1] = (u16)narrow(b + FAULT, 0);
  }
}
