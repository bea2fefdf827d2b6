// What Tandem needs of MLX, in terms that cxx can carry. See ffi.rs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "rust/cxx.h"

namespace tandem_mlx {

using Array = mlx::core::array;
using Handle = std::unique_ptr<Array>;
using Ints = rust::Slice<const int32_t>;

struct Arrays {
  std::vector<Array> all;
};

// A CUDA kernel in machine code.
struct Module {
  std::string name;
  std::string code;
};

enum class Dtype : std::uint8_t;
struct Fact;
struct Output;
struct Launch;

rust::String header_version();
rust::String library_version();
// Takes the GPU if there is one, else the CPU. Whether it is the GPU.
bool choose_device();
rust::Vec<Fact> device_facts();
size_t cache_memory();
void clear_cache();
void set_memory_limit(size_t bytes);
void set_cache_limit(size_t bytes);
void set_wired_limit(size_t bytes);

std::unique_ptr<Arrays> list();
void push(Arrays& list, const Array& array);
Handle at(const Arrays& list, size_t index);
void evaluate(const Arrays& list);
void evaluate_async(const Arrays& list);
// Bytes of the buffers behind evaluated arrays, each buffer once.
size_t buffer_bytes(const Arrays& list);

Handle share(const Array& a);
Handle from_bytes(rust::Slice<const uint8_t> bytes, Dtype dtype, Ints shape);
Handle zeros(Ints shape, Dtype dtype);
// The readers wait for the array. Sizes must match.
void read_f32(const Array& a, rust::Slice<float> out);
void read_u32(const Array& a, rust::Slice<uint32_t> out);
rust::Vec<uint8_t> read_bytes(const Array& a);

Handle reshape(const Array& a, Ints shape);
Handle transpose(const Array& a, Ints axes);
Handle slice(const Array& a, Ints start, Ints stop);
Handle slice_update(const Array& a, const Array& update, Ints start, Ints stop);
Handle concatenate(const Arrays& list, int32_t axis);
Handle as_type(const Array& a, Dtype dtype);
// Rows of `a`.
Handle take(const Array& a, const Array& indices);
Handle add(const Array& a, const Array& b);
Handle multiply(const Array& a, const Array& b);
Handle scale(const Array& a, float factor);
// cap * tanh(a / cap)
Handle softcap(const Array& a, float cap);
// act(gate) * up, in one kernel if `fuse`.
Handle gate_silu(const Array& gate, const Array& up, bool fuse);
Handle gate_gelu(const Array& gate, const Array& up, bool fuse);
Handle matmul(const Array& a, const Array& b);
// Over the last axis.
Handle softmax(const Array& a);
// x w^T
Handle matmul_transposed(const Array& x, const Array& w);
Handle quantized_matmul(
    const Array& x, const Array& w, const Array& scales, const Array& biases, int32_t group, int32_t bits);
// Values, scales, biases.
std::unique_ptr<Arrays> quantize(const Array& w, int32_t group, int32_t bits);
Handle dequantize(const Array& w, const Array& scales, const Array& biases, int32_t group, int32_t bits);
Handle rms_norm(const Array& x, const Array& weight, float eps);
// `x` is [batch, heads, tokens, head_dim]; wavelengths are reciprocals of the angular frequencies.
Handle rope(const Array& x, int32_t dims, const Array& wavelengths, int32_t offset);
// One offset for each of the batch.
Handle rope_each(const Array& x, int32_t dims, const Array& wavelengths, const Array& offsets);
// [queries, keys]: true where a query at position `p` sees a key at `p - window + 1 ..= p`.
Handle window_mask(int32_t first_query, int32_t queries, int32_t first_key, int32_t keys, int32_t window);
// q is [batch, heads, queries, head_dim], k and v [batch, kv heads, keys, head_dim]. `causal`: the last query sees all.
Handle attention(const Array& q, const Array& k, const Array& v, float scale, bool causal);
Handle attention_masked(const Array& q, const Array& k, const Array& v, float scale, const Array& mask);
Handle attention_capped(
    const Array& q, const Array& k, const Array& v, float scale, float cap, const Array& mask);
// Over the last axis.
Handle argmax(const Array& a);
Handle maximum(const Array& a);

// `source` for the architecture ("sm_90"), with those names defined ("X=1"). Throws what the compiler says.
rust::Vec<uint8_t> compile_cuda(rust::Str source, rust::Str architecture, const rust::Vec<rust::String>& defines);
std::unique_ptr<Module> module_of(rust::Str name, rust::Slice<const uint8_t> code);
// For a module that has run: lets its nodes carry eight bytes in place of its code.
void shorten(Module& module);
// A node that runs the kernel. Its parameters are the inputs, the outputs, the integers, the floats.
std::unique_ptr<Arrays> launch(
    const Module& module,
    const Arrays& inputs,
    rust::Slice<const Output> outputs,
    Ints integers,
    rust::Slice<const float> floats,
    const Launch& launch);

} // namespace tandem_mlx
