// What the kernels share: number formats, and the instructions that C++ has no words for. Comes before each of them.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]

// Of two bfloat16.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 value) { return __uint_as_float((u32)value << 16); }

// Two floats as bfloat16, `a` in the low half.
__device__ __forceinline__ u32 narrow(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// 2^x
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// d += a b, of 16 x 16 and 16 x 8 bfloat16 that a warp holds as mma.m16n8k16 has it.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copies to shared memory that go on by themselves, in batches of a thread. 16 bytes past the first cache.
__device__ __forceinline__ void bring16(char* to, const void* from) {
  const u32 address = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void bring4(char* to, const void* from) {
  const u32 address = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most COUNT batches of this thread are under way.
template <int COUNT>
__device__ __forceinline__ void wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// Hides where a pointer comes from, so that code is not made twice over for what it may be.
template <typename T>
__device__ __forceinline__ void opaque(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// The same for a constant, so that it stays in a register.
__device__ __forceinline__ void opaque(u32& value) { asm volatile("" : "+r"(value)); }
