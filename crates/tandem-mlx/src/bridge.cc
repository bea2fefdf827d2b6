#include "tandem-mlx/src/bridge.h"

#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <variant>

#include "mlx/compile.h"
#include "mlx/device.h"
#include "mlx/fast.h"
#include "mlx/memory.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/version.h"
#include "tandem-mlx/src/ffi.rs.h"

namespace tandem_mlx {

namespace mx = mlx::core;

namespace {

Handle hand(Array a) {
  return std::make_unique<Array>(std::move(a));
}

mx::Shape shape_of(Ints ints) {
  return mx::Shape(ints.begin(), ints.end());
}

mx::Dtype dtype_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::U32:
      return mx::uint32;
    case Dtype::I32:
      return mx::int32;
    case Dtype::F16:
      return mx::float16;
    case Dtype::Bf16:
      return mx::bfloat16;
    case Dtype::F32:
      return mx::float32;
  }
  throw std::invalid_argument("an unknown number format");
}

// A scalar that does not widen what it is combined with.
Array like(const Array& a, float value) {
  return Array(value, a.dtype());
}

// `a` evaluated, in row-major order and of that type. What is so already is waited for and nothing else: an operation
// more would stand behind all that was submitted since.
Array readable(const Array& a, mx::Dtype dtype) {
  if (a.dtype() == dtype) {
    Array same = a;
    same.eval();
    if (same.flags().row_contiguous) {
      return same;
    }
  }
  Array out = mx::contiguous(mx::astype(a, dtype));
  out.eval();
  return out;
}

std::vector<Array> silu(const std::vector<Array>& in) {
  return {mx::multiply(mx::multiply(in[0], mx::sigmoid(in[0])), in[1])};
}

std::vector<Array> gelu(const std::vector<Array>& in) {
  const Array& x = in[0];
  auto cube = mx::multiply(mx::multiply(x, x), x);
  auto inner = mx::multiply(
      like(x, std::sqrt(2.0 / M_PI)), mx::add(x, mx::multiply(like(x, 0.044715f), cube)));
  auto half = mx::multiply(like(x, 0.5f), x);
  return {mx::multiply(mx::multiply(half, mx::add(like(x, 1.0f), mx::tanh(inner))), in[1])};
}

} // namespace

rust::String header_version() {
  return std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
      std::to_string(MLX_VERSION_PATCH);
}

rust::String library_version() {
  return mx::version();
}

bool choose_device() {
  bool gpu = mx::is_available(mx::Device::gpu);
  mx::set_default_device(gpu ? mx::Device::gpu : mx::Device::cpu);
  return gpu;
}

rust::Vec<Fact> device_facts() {
  rust::Vec<Fact> facts;
  for (const auto& [name, value] : mx::device_info(mx::default_device())) {
    Fact fact{name, "", 0};
    if (const auto* text = std::get_if<std::string>(&value)) {
      fact.text = *text;
    } else {
      fact.number = std::get<size_t>(value);
    }
    facts.push_back(std::move(fact));
  }
  return facts;
}

size_t cache_memory() {
  return mx::get_cache_memory();
}

void clear_cache() {
  mx::clear_cache();
}

void set_memory_limit(size_t bytes) {
  mx::set_memory_limit(bytes);
}

void set_cache_limit(size_t bytes) {
  mx::set_cache_limit(bytes);
}

void set_wired_limit(size_t bytes) {
  mx::set_wired_limit(bytes);
}

std::unique_ptr<Arrays> list() {
  return std::make_unique<Arrays>();
}

void push(Arrays& list, const Array& array) {
  list.all.push_back(array);
}

Handle at(const Arrays& list, size_t index) {
  return hand(list.all.at(index));
}

void evaluate(const Arrays& list) {
  mx::eval(list.all);
}

void evaluate_async(const Arrays& list) {
  mx::async_eval(list.all);
}

size_t buffer_bytes(const Arrays& list) {
  return mx::get_array_buffer_size(list.all);
}

Handle share(const Array& a) {
  return hand(a);
}

Handle from_bytes(rust::Slice<const uint8_t> bytes, Dtype dtype, Ints shape) {
  // As bytes first: MLX would convert the elements of a typed range one by one.
  Array raw(bytes.data(), {static_cast<int>(bytes.size())}, mx::uint8);
#ifndef __APPLE__
  // On NVIDIA these bytes lie in managed memory, which moves page by page and may be taken from the device again: weights go
  // to the device's own. `raw` is held meanwhile, or its memory would be used for the result.
  if (bytes.size() >= 1 << 20 && mx::default_device() == mx::Device::gpu) {
    Array moved = mx::bitwise_or(raw, Array(0, mx::uint8));
    moved.eval();
    return hand(mx::reshape(mx::view(moved, dtype_of(dtype)), shape_of(shape)));
  }
#endif
  return hand(mx::reshape(mx::view(raw, dtype_of(dtype)), shape_of(shape)));
}

Handle zeros(Ints shape, Dtype dtype) {
  return hand(mx::zeros(shape_of(shape), dtype_of(dtype)));
}

template <typename T>
void read(const Array& a, mx::Dtype dtype, rust::Slice<T> out) {
  if (a.size() != out.size()) {
    throw std::invalid_argument("an array of another size was to be read");
  }
  Array ready = readable(a, dtype);
  std::memcpy(out.data(), ready.data<T>(), out.size() * sizeof(T));
}

void read_f32(const Array& a, rust::Slice<float> out) {
  read(a, mx::float32, out);
}

void read_u32(const Array& a, rust::Slice<uint32_t> out) {
  read(a, mx::uint32, out);
}

rust::Vec<uint8_t> read_bytes(const Array& a) {
  Array ready = readable(a, a.dtype());
  rust::Vec<uint8_t> out;
  out.reserve(ready.nbytes());
  const uint8_t* data = ready.data<uint8_t>();
  for (size_t i = 0; i < ready.nbytes(); ++i) {
    out.push_back(data[i]);
  }
  return out;
}

Handle reshape(const Array& a, Ints shape) {
  return hand(mx::reshape(a, shape_of(shape)));
}

Handle transpose(const Array& a, Ints axes) {
  return hand(mx::transpose(a, std::vector<int>(axes.begin(), axes.end())));
}

Handle slice(const Array& a, Ints start, Ints stop) {
  return hand(mx::slice(a, shape_of(start), shape_of(stop)));
}

Handle slice_update(const Array& a, const Array& update, Ints start, Ints stop) {
  return hand(mx::slice_update(a, update, shape_of(start), shape_of(stop)));
}

Handle concatenate(const Arrays& list, int32_t axis) {
  return hand(mx::concatenate(list.all, axis));
}

Handle as_type(const Array& a, Dtype dtype) {
  return hand(mx::astype(a, dtype_of(dtype)));
}

Handle take(const Array& a, const Array& indices) {
  return hand(mx::take(a, indices, 0));
}

Handle add(const Array& a, const Array& b) {
  return hand(mx::add(a, b));
}

Handle multiply(const Array& a, const Array& b) {
  return hand(mx::multiply(a, b));
}

Handle scale(const Array& a, float factor) {
  return hand(mx::multiply(a, like(a, factor)));
}

Handle softcap(const Array& a, float cap) {
  auto squashed = mx::tanh(mx::divide(a, like(a, cap)));
  return hand(mx::multiply(squashed, like(a, cap)));
}

Handle gate_silu(const Array& gate, const Array& up, bool fuse) {
  static thread_local auto fused = mx::compile(silu, true);
  return hand((fuse ? fused({gate, up}) : silu({gate, up}))[0]);
}

Handle gate_gelu(const Array& gate, const Array& up, bool fuse) {
  static thread_local auto fused = mx::compile(gelu, true);
  return hand((fuse ? fused({gate, up}) : gelu({gate, up}))[0]);
}

Handle matmul(const Array& a, const Array& b) {
  return hand(mx::matmul(a, b));
}

Handle softmax(const Array& a) {
  return hand(mx::softmax(a, -1, true));
}

Handle matmul_transposed(const Array& x, const Array& w) {
  return hand(mx::matmul(x, mx::transpose(w)));
}

Handle quantized_matmul(
    const Array& x, const Array& w, const Array& scales, const Array& biases, int32_t group, int32_t bits) {
  return hand(mx::quantized_matmul(x, w, scales, biases, true, group, bits));
}

std::unique_ptr<Arrays> quantize(const Array& w, int32_t group, int32_t bits) {
  return std::make_unique<Arrays>(Arrays{mx::quantize(w, group, bits)});
}

Handle dequantize(const Array& w, const Array& scales, const Array& biases, int32_t group, int32_t bits) {
  return hand(mx::dequantize(w, scales, biases, group, bits));
}

Handle rms_norm(const Array& x, const Array& weight, float eps) {
  return hand(mx::fast::rms_norm(x, weight, eps));
}

Handle rope(const Array& x, int32_t dims, const Array& wavelengths, int32_t offset) {
  return hand(mx::fast::rope(x, dims, false, std::nullopt, 1.0f, offset, wavelengths));
}

Handle rope_each(const Array& x, int32_t dims, const Array& wavelengths, const Array& offsets) {
  return hand(mx::fast::rope(x, dims, false, std::nullopt, 1.0f, offsets, wavelengths));
}

Handle window_mask(int32_t first_query, int32_t queries, int32_t first_key, int32_t keys, int32_t window) {
  auto q = mx::expand_dims(mx::arange(first_query, first_query + queries), 1);
  auto k = mx::expand_dims(mx::arange(first_key, first_key + keys), 0);
  return hand(mx::logical_and(mx::greater_equal(q, k), mx::less(q, mx::add(k, Array(window)))));
}

Handle attention(const Array& q, const Array& k, const Array& v, float scale, bool causal) {
  return hand(mx::fast::scaled_dot_product_attention(q, k, v, scale, causal ? "causal" : ""));
}

Handle attention_masked(const Array& q, const Array& k, const Array& v, float scale, const Array& mask) {
  return hand(mx::fast::scaled_dot_product_attention(q, k, v, scale, "array", mask));
}

Handle attention_capped(
    const Array& q, const Array& k, const Array& v, float scale, float cap, const Array& mask) {
  const int batch = q.shape(0), heads = q.shape(1), tokens = q.shape(2), dim = q.shape(3), groups = k.shape(1);
  auto grouped =
      mx::reshape(mx::multiply(q, like(q, scale)), {batch, groups, heads / groups, tokens, dim});
  auto scores = mx::matmul(grouped, mx::swapaxes(mx::expand_dims(k, 2), -1, -2));
  scores = mx::multiply(mx::tanh(mx::divide(scores, like(scores, cap))), like(scores, cap));
  scores = mx::where(mask, scores, like(scores, -std::numeric_limits<float>::infinity()));
  auto out = mx::matmul(mx::softmax(scores, -1, true), mx::expand_dims(v, 2));
  return hand(mx::reshape(out, {batch, heads, tokens, dim}));
}

Handle argmax(const Array& a) {
  return hand(mx::argmax(a, -1));
}

Handle maximum(const Array& a) {
  return hand(mx::max(a, -1));
}

namespace {

// NVRTC of the CUDA that MLX is linked with; MLX has it loaded.
struct Compiler {
  void* library = dlopen("libnvrtc.so.13", RTLD_NOW);

  template <typename... Args>
  int call(const char* name, Args... args) const {
    void* function = library ? dlsym(library, name) : nullptr;
    if (!function) {
      throw std::runtime_error(std::string(name) + " of libnvrtc.so.13 was not found");
    }
    return reinterpret_cast<int (*)(Args...)>(function)(args...);
  }
};

} // namespace

rust::Vec<uint8_t> compile_cuda(
    rust::Str source, rust::Str architecture, const rust::Vec<rust::String>& defines) {
  static const Compiler compiler;
  std::vector<std::string> options{"--gpu-architecture=" + std::string(architecture)};
  for (const auto& define : defines) {
    options.push_back("-D" + std::string(define));
  }
  std::vector<const char*> pointers;
  for (const auto& option : options) {
    pointers.push_back(option.c_str());
  }
  void* program = nullptr;
  const std::string text(source);
  int failed = compiler.call(
      "nvrtcCreateProgram",
      &program,
      text.c_str(),
      "kernel.cu",
      0,
      static_cast<const char* const*>(nullptr),
      static_cast<const char* const*>(nullptr));
  if (failed) {
    throw std::runtime_error("nvrtcCreateProgram failed with " + std::to_string(failed));
  }
  size_t size = 0;
  std::string log;
  rust::Vec<uint8_t> code;
  failed = compiler.call(
      "nvrtcCompileProgram", program, static_cast<int>(pointers.size()), static_cast<const char* const*>(pointers.data()));
  if (failed) {
    compiler.call("nvrtcGetProgramLogSize", program, &size);
    log.resize(size);
    compiler.call("nvrtcGetProgramLog", program, log.data());
  } else {
    failed = compiler.call("nvrtcGetCUBINSize", program, &size);
    std::string bytes(size, 0);
    failed = failed ? failed : compiler.call("nvrtcGetCUBIN", program, bytes.data());
    code.reserve(size);
    for (char byte : bytes) {
      code.push_back(static_cast<uint8_t>(byte));
    }
  }
  compiler.call("nvrtcDestroyProgram", &program);
  if (failed) {
    throw std::runtime_error("NVRTC failed with " + std::to_string(failed) + ": " + log);
  }
  return code;
}

std::unique_ptr<Module> module_of(rust::Str name, rust::Slice<const uint8_t> code) {
  return std::make_unique<Module>(Module{std::string(name), std::string(code.begin(), code.end())});
}

// MLX knows a loaded module by its name and the hash of its code, and copies and hashes the code, tens of kilobytes, for
// every node. Once it is loaded, eight bytes of the same hash do as well: libstdc++'s hash, for which they are found here, takes
// eight bytes to eight without loss.
void shorten(Module& module) {
  constexpr uint64_t factor = 0xc6a4a7935bd1e995, seed = 0xc70f6907;
  uint64_t inverse = factor;  // modulo 2^64, by Newton's method
  for (int i = 0; i < 6; ++i) {
    inverse *= 2 - factor * inverse;
  }
  const auto unmix = [](uint64_t value) { return value ^ value >> 47; };
  const std::hash<std::string> hash;
  const uint64_t mixed = unmix(unmix(hash(module.code)) * inverse);
  const uint64_t block = unmix((mixed * inverse ^ seed ^ 8 * factor) * inverse) * inverse;
  std::string twin(sizeof block, 0);
  std::memcpy(twin.data(), &block, sizeof block);
  // Another library's hash leaves the code as it is.
  if (hash(twin) == hash(module.code)) {
    module.code = std::move(twin);
  }
}

std::unique_ptr<Arrays> launch(
    const Module& module,
    const Arrays& inputs,
    rust::Slice<const Output> outputs,
    Ints integers,
    rust::Slice<const float> floats,
    const Launch& launch) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& output : outputs) {
    shapes.emplace_back(output.shape.begin(), output.shape.end());
    dtypes.push_back(dtype_of(output.dtype));
  }
  std::vector<mx::fast::ScalarArg> scalars(integers.begin(), integers.end());
  scalars.insert(scalars.end(), floats.begin(), floats.end());
  auto made = mx::fast::precompiled_cuda_kernel(
      module.name,
      module.code,
      inputs.all,
      shapes,
      dtypes,
      scalars,
      {launch.grid[0] * launch.threads, launch.grid[1], launch.grid[2]},
      {launch.threads, 1, 1},
      launch.shared,
      std::nullopt,
      true);
  return std::make_unique<Arrays>(Arrays{std::move(made)});
}

} // namespace tandem_mlx
