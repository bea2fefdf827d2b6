//! The bridge to MLX's C++ API: what `bridge.h` declares. A C++ exception becomes an `Err`.
//!
//! Arrays are handles to nodes of MLX's lazy graph. Only `evaluate`, `evaluate_async` and the readers compute.

#[allow(unused_qualifications, reason = "in what cxx generates")]
#[cxx::bridge(namespace = "tandem_mlx")]
pub(crate) mod bridge {
    /// Number formats of arrays.
    #[derive(Debug)]
    enum Dtype {
        U32,
        I32,
        F16,
        Bf16,
        F32,
    }

    /// One thing that MLX knows of a device: a text, or a number where the text is empty.
    struct Fact {
        name: String,
        text: String,
        number: u64,
    }

    /// What a kernel makes.
    struct Output {
        dtype: Dtype,
        shape: Vec<i32>,
    }

    /// How a kernel runs: blocks, threads of a block, bytes of dynamic shared memory.
    struct Launch {
        grid: [i32; 3],
        threads: i32,
        shared: i32,
    }

    // SAFETY: each function of bridge.h takes and gives what is declared here (cxx checks the signatures when it is
    // compiled), keeps no reference after it returns, and may be called from any thread that owns its arguments.
    unsafe extern "C++" {
        include!("tandem-mlx/src/bridge.h");

        type Array;
        type Arrays;
        type Module;

        fn header_version() -> String;
        fn library_version() -> String;
        fn choose_device() -> Result<bool>;
        fn device_facts() -> Result<Vec<Fact>>;
        fn cache_memory() -> usize;
        fn clear_cache() -> Result<()>;
        fn set_memory_limit(bytes: usize) -> Result<()>;
        fn set_cache_limit(bytes: usize) -> Result<()>;
        fn set_wired_limit(bytes: usize) -> Result<()>;

        fn list() -> UniquePtr<Arrays>;
        fn push(list: Pin<&mut Arrays>, array: &Array);
        fn at(list: &Arrays, index: usize) -> Result<UniquePtr<Array>>;
        fn evaluate(list: &Arrays) -> Result<()>;
        fn evaluate_async(list: &Arrays) -> Result<()>;
        fn buffer_bytes(list: &Arrays) -> Result<usize>;

        fn share(a: &Array) -> UniquePtr<Array>;
        fn from_bytes(bytes: &[u8], dtype: Dtype, shape: &[i32]) -> Result<UniquePtr<Array>>;
        fn zeros(shape: &[i32], dtype: Dtype) -> Result<UniquePtr<Array>>;
        fn read_f32(a: &Array, out: &mut [f32]) -> Result<()>;
        fn read_u32(a: &Array, out: &mut [u32]) -> Result<()>;
        fn read_bytes(a: &Array) -> Result<Vec<u8>>;

        fn reshape(a: &Array, shape: &[i32]) -> Result<UniquePtr<Array>>;
        fn transpose(a: &Array, axes: &[i32]) -> Result<UniquePtr<Array>>;
        fn slice(a: &Array, start: &[i32], stop: &[i32]) -> Result<UniquePtr<Array>>;
        fn slice_update(a: &Array, update: &Array, start: &[i32], stop: &[i32]) -> Result<UniquePtr<Array>>;
        fn concatenate(list: &Arrays, axis: i32) -> Result<UniquePtr<Array>>;
        fn as_type(a: &Array, dtype: Dtype) -> Result<UniquePtr<Array>>;
        fn take(a: &Array, indices: &Array) -> Result<UniquePtr<Array>>;
        fn add(a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn multiply(a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn scale(a: &Array, factor: f32) -> Result<UniquePtr<Array>>;
        fn softcap(a: &Array, cap: f32) -> Result<UniquePtr<Array>>;
        fn gate_silu(gate: &Array, up: &Array, fuse: bool) -> Result<UniquePtr<Array>>;
        fn gate_gelu(gate: &Array, up: &Array, fuse: bool) -> Result<UniquePtr<Array>>;
        fn matmul(a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn softmax(a: &Array) -> Result<UniquePtr<Array>>;
        fn matmul_transposed(x: &Array, w: &Array) -> Result<UniquePtr<Array>>;
        fn quantized_matmul(
            x: &Array,
            w: &Array,
            scales: &Array,
            biases: &Array,
            group: i32,
            bits: i32,
        ) -> Result<UniquePtr<Array>>;
        fn quantize(w: &Array, group: i32, bits: i32) -> Result<UniquePtr<Arrays>>;
        fn dequantize(
            w: &Array,
            scales: &Array,
            biases: &Array,
            group: i32,
            bits: i32,
        ) -> Result<UniquePtr<Array>>;
        fn rms_norm(x: &Array, weight: &Array, eps: f32) -> Result<UniquePtr<Array>>;
        fn rope(x: &Array, dims: i32, wavelengths: &Array, offset: i32) -> Result<UniquePtr<Array>>;
        fn rope_each(x: &Array, dims: i32, wavelengths: &Array, offsets: &Array) -> Result<UniquePtr<Array>>;
        fn window_mask(
            first_query: i32,
            queries: i32,
            first_key: i32,
            keys: i32,
            window: i32,
        ) -> Result<UniquePtr<Array>>;
        fn attention(q: &Array, k: &Array, v: &Array, scale: f32, causal: bool) -> Result<UniquePtr<Array>>;
        fn attention_masked(
            q: &Array,
            k: &Array,
            v: &Array,
            scale: f32,
            mask: &Array,
        ) -> Result<UniquePtr<Array>>;
        fn attention_capped(
            q: &Array,
            k: &Array,
            v: &Array,
            scale: f32,
            cap: f32,
            mask: &Array,
        ) -> Result<UniquePtr<Array>>;
        fn argmax(a: &Array) -> Result<UniquePtr<Array>>;
        fn maximum(a: &Array) -> Result<UniquePtr<Array>>;

        fn compile_cuda(source: &str, architecture: &str, defines: &Vec<String>) -> Result<Vec<u8>>;
        fn module_of(name: &str, code: &[u8]) -> UniquePtr<Module>;
        fn shorten(module: Pin<&mut Module>);
        fn launch(
            module: &Module,
            inputs: &Arrays,
            outputs: &[Output],
            integers: &[i32],
            floats: &[f32],
            launch: &Launch,
        ) -> Result<UniquePtr<Arrays>>;
    }
}
