// Stands in for device.cuh and for what CUDA C++ has beyond C++: a block's threads are threads, one block runs after another.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// One block runs at a time.
#define __shared__ static
#define DYNAMIC_SHARED(type, name) alignas(16) static type name[1 << 14]

struct Dim {
  int x = 0, y = 0, z = 0;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};

inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

static thread_local Dim threadIdx;
static Dim blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
constexpr int MOST_THREADS = 1024;

inline int warp_start() { return threadIdx.x / 32 * 32; }
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <typename T>
T __shfl_xor_sync(u32, T value, int other) {
  static T values[MOST_THREADS];
  values[threadIdx.x] = value;
  __syncwarp();
  T theirs = values[warp_start() + (threadIdx.x % 32 ^ other)];
  __syncwarp();
  return theirs;
}

template <typename T>
T atomicAdd(T* to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
template <typename T>
T atomicExch(T* to, T value) { return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST); }
inline void atomicMax(u64* to, u64 value) {
  u64 old = *to;
  while (old < value && !__atomic_compare_exchange_n(to, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
}

template <typename T>
T __ldcg(const T* from) { return *from; }
inline u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= (u32)(bytes >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
  }
  return out;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf
#define __cosf cosf
#define __sinf sinf
using std::max;
using std::min;

inline float low(u32 pair) { return __uint_as_float(pair << 16); }
inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float widen(u16 value) { return __uint_as_float((u32)value << 16); }
inline u32 narrow(float value) {
  const u32 bits = __float_as_uint(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 narrow(float a, float b) { return narrow(b) << 16 | narrow(a); }
inline float power(float x) { return exp2f(x); }

inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  static u32 left[MOST_THREADS][4], right[MOST_THREADS][2];
  u32 own[4] = {a0, a1, a2, a3};
  memcpy(left[threadIdx.x], own, sizeof own);
  right[threadIdx.x][0] = b0, right[threadIdx.x][1] = b1;
  __syncwarp();
  const auto half = [](u32 pair, int which) { return which ? high(pair) : low(pair); };
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 a = left[warp_start() + row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const u32 b = right[warp_start() + column * 4 + k % 8 / 2][k / 8];
      d[i] += half(a, k % 2) * half(b, k % 2);
    }
  }
  __syncwarp();
}

inline void bring16(char* to, const void* from) { memcpy(to, from, 16); }
inline void bring4(char* to, const void* from) { memcpy(to, from, 4); }
inline void end_batch() {}
template <int COUNT>
void wait_but() {}
template <typename T>
void opaque(T*&) {}
inline void opaque(u32&) {}

// Runs `kernel` for every block of a grid.
template <typename Kernel>
void launch(Dim grid, int threads, Kernel kernel) {
  gridDim = grid;
  for (int block = 0; block < grid.x * grid.y * grid.z; ++block) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (int i = 0; i < threads / 32; ++i) {
      warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    }
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([=] {
        threadIdx = {i, 0, 0};
        kernel();
      });
    }
    for (auto& thread : running) {
      thread.join();
    }
  }
}

// Values between -1 and 1.
inline float drawn() {
  static u32 state = 12345;
  state = state * 1664525u + 1013904223u;
  return (state >> 8) / 8388608.0f - 1.0f;
}

inline std::vector<u16> drawn(size_t count, float scale = 1, float offset = 0) {
  std::vector<u16> values(count);
  for (auto& value : values) {
    value = narrow(offset + scale * drawn());
  }
  return values;
}

// Difference and reference, in lengths.
struct Error {
  double off = 0, all = 0;
  void add(double got, double expected) {
    off += (got - expected) * (got - expected);
    all += expected * expected;
  }
  // What bfloat16 alone makes is 2e-3 and less. Prints, and says by the exit status whether it is that.
  bool small(const char* of) const {
    const double error = sqrt(off / all);
    printf("%s: relative error %.2e\n", of, error);
    return error < 6e-3;
  }
};
