//! Arrays of MLX as values: operations build its lazy graph, nothing computes before [`evaluate`] or a reader.
//!
//! The types are not `Send`: an array stays on the thread that made it, where its stream lives.

use cxx::UniquePtr;
use tandem_engine::EngineError;

pub(crate) use crate::ffi::bridge::Dtype;
use crate::ffi::bridge::{self, Arrays};

pub(crate) type Result<T> = std::result::Result<T, EngineError>;

/// What MLX threw, in words.
pub(crate) fn failed(error: &cxx::Exception) -> EngineError {
    EngineError::Device(format!("MLX: {}", error.what()))
}

/// A node of the graph.
pub(crate) struct Array(UniquePtr<bridge::Array>);

impl Clone for Array {
    /// Another handle to the same node.
    fn clone(&self) -> Self {
        Self(bridge::share(&self.0))
    }
}

fn made(result: std::result::Result<UniquePtr<bridge::Array>, cxx::Exception>) -> Result<Array> {
    result.map(Array).map_err(|error| failed(&error))
}

fn listed<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> UniquePtr<Arrays> {
    let mut list = bridge::list();
    for array in arrays {
        bridge::push(list.pin_mut(), &array.0);
    }
    list
}

/// Starts to compute all of them and returns at once where the device works on its own.
pub(crate) fn evaluate_async<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    bridge::evaluate_async(&listed(arrays)).map_err(|error| failed(&error))
}

/// Computes all of them.
pub(crate) fn evaluate<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    bridge::evaluate(&listed(arrays)).map_err(|error| failed(&error))
}

/// Bytes of the memory behind computed arrays.
pub(crate) fn buffer_bytes<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<u64> {
    Ok(bridge::buffer_bytes(&listed(arrays)).map_err(|error| failed(&error))? as u64)
}

/// A size or position for MLX, which counts in `i32`.
///
/// # Errors
/// [`EngineError::Unsupported`] beyond that.
pub(crate) fn int(size: usize) -> Result<i32> {
    i32::try_from(size).map_err(|_| EngineError::Unsupported {
        engine: "mlx".into(),
        feature: format!("an array dimension of {size}"),
        hint: "use the cpu engine".into(),
    })
}

fn ints<const N: usize>(sizes: [usize; N]) -> Result<[i32; N]> {
    let mut out = [0; N];
    for (out, size) in out.iter_mut().zip(sizes) {
        *out = int(size)?;
    }
    Ok(out)
}

impl Array {
    /// Values as they lie in `bytes`, little endian.
    pub fn from_bytes<const N: usize>(bytes: &[u8], dtype: Dtype, shape: [usize; N]) -> Result<Self> {
        int(bytes.len())?;
        made(bridge::from_bytes(bytes, dtype, &ints(shape)?))
    }

    pub fn from_f32<const N: usize>(values: &[f32], shape: [usize; N]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::from_bytes(&bytes, Dtype::F32, shape)
    }

    pub fn from_u32(values: &[u32]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::from_bytes(&bytes, Dtype::U32, [values.len()])
    }

    pub fn zeros<const N: usize>(shape: [usize; N], dtype: Dtype) -> Result<Self> {
        made(bridge::zeros(&ints(shape)?, dtype))
    }

    pub fn concatenate<'a>(arrays: impl IntoIterator<Item = &'a Array>, axis: i32) -> Result<Self> {
        made(bridge::concatenate(&listed(arrays), axis))
    }

    pub fn reshape<const N: usize>(&self, shape: [usize; N]) -> Result<Self> {
        made(bridge::reshape(&self.0, &ints(shape)?))
    }

    pub fn transpose<const N: usize>(&self, axes: [usize; N]) -> Result<Self> {
        made(bridge::transpose(&self.0, &ints(axes)?))
    }

    pub fn slice<const N: usize>(&self, start: [usize; N], stop: [usize; N]) -> Result<Self> {
        made(bridge::slice(&self.0, &ints(start)?, &ints(stop)?))
    }

    /// This with `update` in place of a slice. MLX reuses the memory if no other handle to it is left when it computes.
    pub fn slice_update<const N: usize>(
        &self,
        update: &Array,
        start: [usize; N],
        stop: [usize; N],
    ) -> Result<Self> {
        made(bridge::slice_update(&self.0, &update.0, &ints(start)?, &ints(stop)?))
    }

    pub fn as_type(&self, dtype: Dtype) -> Result<Self> {
        made(bridge::as_type(&self.0, dtype))
    }

    /// The rows that `indices` names.
    pub fn take(&self, indices: &Array) -> Result<Self> {
        made(bridge::take(&self.0, &indices.0))
    }

    pub fn add(&self, other: &Array) -> Result<Self> {
        made(bridge::add(&self.0, &other.0))
    }

    pub fn multiply(&self, other: &Array) -> Result<Self> {
        made(bridge::multiply(&self.0, &other.0))
    }

    pub fn scale(&self, factor: f32) -> Result<Self> {
        made(bridge::scale(&self.0, factor))
    }

    /// `cap * tanh(self / cap)`.
    pub fn softcap(&self, cap: f32) -> Result<Self> {
        made(bridge::softcap(&self.0, cap))
    }

    /// `silu(self) * up`, in one kernel if `fuse`.
    pub fn gate_silu(&self, up: &Array, fuse: bool) -> Result<Self> {
        made(bridge::gate_silu(&self.0, &up.0, fuse))
    }

    /// `gelu_tanh(self) * up`, in one kernel if `fuse`.
    pub fn gate_gelu(&self, up: &Array, fuse: bool) -> Result<Self> {
        made(bridge::gate_gelu(&self.0, &up.0, fuse))
    }

    /// `self wᵀ`.
    pub fn matmul_transposed(&self, w: &Array) -> Result<Self> {
        made(bridge::matmul_transposed(&self.0, &w.0))
    }

    pub fn matmul(&self, other: &Array) -> Result<Self> {
        made(bridge::matmul(&self.0, &other.0))
    }

    /// Over the last axis.
    pub fn softmax(&self) -> Result<Self> {
        made(bridge::softmax(&self.0))
    }

    /// `self wᵀ` for a quantized `w`.
    pub fn quantized_matmul(&self, w: &Quantized) -> Result<Self> {
        let Quantized { values, scales, biases, group, bits } = w;
        made(bridge::quantized_matmul(&self.0, &values.0, &scales.0, &biases.0, *group, *bits))
    }

    pub fn rms_norm(&self, weight: &Array, eps: f32) -> Result<Self> {
        made(bridge::rms_norm(&self.0, &weight.0, eps))
    }

    /// Turns the first `dims` of `[batch, heads, tokens, head_dim]`, the first token being at `offset`.
    pub fn rope(&self, dims: usize, wavelengths: &Array, offset: usize) -> Result<Self> {
        made(bridge::rope(&self.0, int(dims)?, &wavelengths.0, int(offset)?))
    }

    /// [`Array::rope`] with an offset for each of the batch.
    pub fn rope_each(&self, dims: usize, wavelengths: &Array, offsets: &Array) -> Result<Self> {
        made(bridge::rope_each(&self.0, int(dims)?, &wavelengths.0, &offsets.0))
    }

    /// `[queries, keys]`: which keys a query sees that looks back over `window` positions, its own included.
    pub fn window_mask(
        first_query: usize,
        queries: usize,
        first_key: usize,
        keys: usize,
        window: usize,
    ) -> Result<Self> {
        let [first_query, queries, first_key, keys, window] =
            ints([first_query, queries, first_key, keys, window])?;
        made(bridge::window_mask(first_query, queries, first_key, keys, window))
    }

    /// Attention of the queries `self`; if `causal`, the last of them sees every key.
    pub fn attention(&self, k: &Array, v: &Array, scale: f32, causal: bool) -> Result<Self> {
        made(bridge::attention(&self.0, &k.0, &v.0, scale, causal))
    }

    pub fn attention_masked(&self, k: &Array, v: &Array, scale: f32, mask: &Array) -> Result<Self> {
        made(bridge::attention_masked(&self.0, &k.0, &v.0, scale, &mask.0))
    }

    /// Attention with `cap * tanh(score / cap)` in place of a score.
    pub fn attention_capped(&self, k: &Array, v: &Array, scale: f32, cap: f32, mask: &Array) -> Result<Self> {
        made(bridge::attention_capped(&self.0, &k.0, &v.0, scale, cap, &mask.0))
    }

    /// Index of the largest along the last axis.
    pub fn argmax(&self) -> Result<Self> {
        made(bridge::argmax(&self.0))
    }

    /// The largest along the last axis.
    pub fn maximum(&self) -> Result<Self> {
        made(bridge::maximum(&self.0))
    }

    /// Waits for the values.
    pub fn read_f32(&self, count: usize) -> Result<Vec<f32>> {
        let mut out = vec![0.0; count];
        bridge::read_f32(&self.0, &mut out).map_err(|error| failed(&error))?;
        Ok(out)
    }

    /// Waits for the values.
    pub fn read_u32(&self, count: usize) -> Result<Vec<u32>> {
        let mut out = vec![0; count];
        bridge::read_u32(&self.0, &mut out).map_err(|error| failed(&error))?;
        Ok(out)
    }

    /// Waits for the values, which come as they lie in row-major order.
    pub fn read_bytes(&self) -> Result<Vec<u8>> {
        bridge::read_bytes(&self.0).map_err(|error| failed(&error))
    }
}

/// A CUDA kernel in machine code.
pub(crate) struct Module(UniquePtr<bridge::Module>);

/// How a kernel runs.
pub(crate) struct Launch<'a> {
    pub inputs: &'a [&'a Array],
    /// What it makes: format and shape.
    pub outputs: &'a [(Dtype, &'a [usize])],
    /// Its parameters behind the arrays.
    pub integers: &'a [usize],
    /// Its parameters behind the integers.
    pub floats: &'a [f32],
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl Module {
    /// Machine code of `source` for an architecture such as `sm_90`, with those names defined. Any thread may do this.
    ///
    /// # Errors
    /// [`EngineError::Device`] with the compiler's words.
    pub fn compile(source: &str, architecture: &str, defines: &[String]) -> Result<Vec<u8>> {
        bridge::compile_cuda(source, architecture, &defines.to_vec()).map_err(|error| failed(&error))
    }

    /// The function `name` of that code.
    pub fn of(name: &str, code: &[u8]) -> Self {
        Self(bridge::module_of(name, code))
    }

    /// Makes its nodes cheaper to build, from its first run on.
    pub fn shorten(&mut self) {
        bridge::shorten(self.0.pin_mut());
    }

    /// A node that runs it, and what it makes. Inputs that are not in row-major order are copied first.
    pub fn launch(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        let Launch { inputs, outputs, integers, floats, grid, threads, shared } = launch;
        let all = |sizes: &[usize]| sizes.iter().map(|size| int(*size)).collect::<Result<Vec<i32>>>();
        let mut made_of = Vec::with_capacity(outputs.len());
        for (dtype, shape) in *outputs {
            made_of.push(bridge::Output { dtype: *dtype, shape: all(shape)? });
        }
        let how = bridge::Launch { grid: ints(*grid)?, threads: int(*threads)?, shared: int(*shared)? };
        let inputs = listed(inputs.iter().copied());
        let out = bridge::launch(&self.0, &inputs, &made_of, &all(integers)?, floats, &how)
            .map_err(|error| failed(&error))?;
        (0..outputs.len()).map(|index| made(bridge::at(&out, index))).collect()
    }
}

/// A matrix in MLX's affine groups: value `i` of a row is `scale * q + bias`.
pub(crate) struct Quantized {
    /// `[rows, cols * bits / 32]` of u32.
    pub values: Array,
    /// `[rows, cols / group]`.
    pub scales: Array,
    /// As `scales`.
    pub biases: Array,
    pub group: i32,
    pub bits: i32,
}

impl Quantized {
    /// Quantizes a float matrix; its format becomes that of the scales.
    pub fn of(matrix: &Array, group: usize, bits: usize) -> Result<Self> {
        let (group, bits) = (int(group)?, int(bits)?);
        let parts = bridge::quantize(&matrix.0, group, bits).map_err(|error| failed(&error))?;
        let part = |index| made(bridge::at(&parts, index));
        Ok(Self { values: part(0)?, scales: part(1)?, biases: part(2)?, group, bits })
    }

    /// As floats in the format of the scales.
    pub fn dequantize(&self) -> Result<Array> {
        let Quantized { values, scales, biases, group, bits } = self;
        made(bridge::dequantize(&values.0, &scales.0, &biases.0, *group, *bits))
    }

    /// The rows that `indices` names, as floats in the format of the scales.
    pub fn rows(&self, indices: &Array) -> Result<Array> {
        let [values, scales, biases] =
            [&self.values, &self.scales, &self.biases].map(|part| part.take(indices));
        made(bridge::dequantize(&values?.0, &scales?.0, &biases?.0, self.group, self.bits))
    }

    pub fn parts(&self) -> [&Array; 3] {
        [&self.values, &self.scales, &self.biases]
    }
}
