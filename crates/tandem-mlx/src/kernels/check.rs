//! Which kernels a model gets: built, compared with f32, and timed against MLX's operations, when it is loaded.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::array::{Array, Dtype, Module, Quantized, Result, evaluate, evaluate_async};
use crate::forward::{self, How, Part};
use crate::kernels::attention::{self, Attention, Decode, Heads, NewToken};
use crate::kernels::choose::{self, Choose};
use crate::kernels::product::{self, After, Matrix, Product, Products, SHARED};
use crate::kernels::{Kernels, ROWS, SLOTS, are_for};
use crate::kv::{CHUNK, KvShape};
use crate::load::Held;
use crate::lower::{Input, Layer, Model, Norm};
use crate::options::KernelChoice;
use crate::turns::Turns;

/// Largest relative error against f32. Results are bfloat16, which alone makes 2e-3.
const TOLERANCE: f32 = 1e-2;
/// Rows of a matrix that are compared.
const COMPARED: usize = 4096;
/// Numbers of sequences that steps are timed with.
const BATCHES: [usize; 3] = [1, 4, ROWS];
/// Steps of a timing.
const STEPS: usize = 8;
/// Tokens that a timed sequence has already.
const HELD: usize = 128;

/// A model that may get kernels.
pub(crate) struct Trial<'a> {
    pub model: &'a Model,
    pub shape: &'a KvShape,
    pub turns: Rc<Turns>,
    /// MLX's word for the device.
    pub architecture: Option<&'a str>,
    pub choice: KernelChoice,
    pub max_batch: usize,
    pub context: usize,
}

/// What it got, and a word on it for the name of the device; none where there is nothing to say.
#[derive(Default)]
pub(crate) struct Chosen {
    pub kernels: Kernels,
    pub report: String,
}

/// Chooses. What fails is left out, and the report says why.
pub(crate) fn choose(trial: &Trial<'_>) -> Chosen {
    if !are_for(trial.architecture) || trial.choice == KernelChoice::Off {
        return Chosen::default();
    }
    if trial.shape.float != Dtype::Bf16 {
        return Chosen {
            kernels: Kernels::default(),
            report: "; MLX's kernels: the model is not in bfloat16".into(),
        };
    }
    trial.choose()
}

impl Trial<'_> {
    fn choose(&self) -> Chosen {
        let mut notes = Vec::new();
        let mut kernels = Kernels::default();
        match self.products() {
            Ok(products) => kernels.products = Some(products),
            Err(why) => notes.push(format!("MLX's products: {why}")),
        }
        match self.attention() {
            Ok(attention) => kernels.attention = attention,
            Err(why) => notes.push(format!("MLX's attention: {why}")),
        }
        match self.choosing() {
            Ok(choose) => kernels.choose = Some(choose),
            Err(why) => notes.push(format!("MLX's argmax: {why}")),
        }
        match self.time(&mut kernels) {
            Ok(said) => notes.extend(said),
            Err(error) => {
                kernels = Kernels::default();
                notes.push(format!("MLX's kernels: {error}"));
            }
        }
        match self.dense() {
            Ok(from) => {
                notes.extend(from.map(|rows| format!("dequantized for products from {rows} rows")));
                kernels.dense_from = from;
            }
            Err(error) => notes.push(format!("products never dequantized: {error}")),
        }
        let report = notes.into_iter().map(|note| format!("; {note}")).collect();
        Chosen { kernels, report }
    }

    fn layer_inputs<'b>(
        &self,
        layer: &'b Layer,
        x: &'b Array,
        none: &'b Kernels,
    ) -> [Option<Product<'b>>; 4] {
        let input = |norm: Option<&'b Norm>| Input { kernels: none, x, rows: 1, norm };
        let plain = layer.residual_scale == 1.0;
        let after =
            |post: &Option<Norm>| if plain && post.is_none() { After::Add(x) } else { After::Nothing };
        [
            layer.attention.qkv.product(&input(layer.mixer_pre_norm.as_ref()), After::Nothing),
            layer.attention.o.product(&input(None), after(&layer.mixer_post_norm)),
            layer.mlp.gate_up.product(&input(layer.mlp_pre_norm.as_ref()), After::Gate(layer.mlp.activation)),
            layer.mlp.down.product(&input(None), after(&layer.mlp_post_norm)),
        ]
    }

    /// Builds the products that the model needs and compares each, in each shape, with f32.
    fn products(&self) -> std::result::Result<Products, String> {
        let (none, x) =
            (Kernels::default(), Array::zeros([1], Dtype::Bf16).map_err(|error| error.to_string())?);
        let mut wanted: Vec<(product::Build, Product<'_>)> = Vec::new();
        let head = Matrix { held: &self.model.head, rows: self.model.vocab, cols: self.model.hidden };
        let head = Product {
            x: &x,
            rows: 1,
            norm: Some(&self.model.final_norm),
            matrix: head,
            after: After::Nothing,
        };
        let layers = self.model.layers.iter().flat_map(|layer| self.layer_inputs(layer, &x, &none));
        for product in layers.flatten().chain([head]) {
            let Some(build) = product.build() else { continue };
            let shape = |product: &Product<'_>| (product.matrix.rows, product.matrix.cols);
            if !wanted.iter().any(|(other, known)| *other == build && shape(known) == shape(&product)) {
                wanted.push((build, product));
            }
        }
        let builds = wanted.iter().map(|(build, _)| *build);
        let broken = self.choice == KernelChoice::Broken;
        let modules =
            compiled("tandem_product", builds, |build, arch| build.compile(arch, broken), self.arch())?;
        let mut products = Products(modules);
        for (_, product) in &wanted {
            // All the memory it may ever take.
            compare(&products, product, 1, SHARED).map_err(|error| error.to_string())?;
        }
        products.shorten();
        for (build, product) in &wanted {
            for rows in [1, 3, 4, ROWS] {
                let error = compare(&products, product, rows, 0).map_err(|error| error.to_string())?;
                if error > TOLERANCE {
                    let Matrix { rows: height, cols, .. } = product.matrix;
                    return Err(format!(
                        "the kernel {build:?} for {rows} rows differs from f32 by {error:.1e} at {height} x {cols}"
                    ));
                }
            }
        }
        Ok(products)
    }

    fn arch(&self) -> &str {
        self.architecture.unwrap_or_default()
    }

    /// Builds attention for the model's shapes and compares it with MLX's in f32.
    fn attention(&self) -> std::result::Result<Option<Attention>, String> {
        let mut shapes: Vec<(Heads, usize, f32)> = Vec::new();
        for layer in &self.model.layers {
            let a = &layer.attention;
            let heads = Heads { heads: a.heads, kv_heads: a.kv_heads, dim: a.head_dim };
            if let (Some(rope), None, None) = (a.rope, &a.qk_norm, a.softcap)
                && !shapes.iter().any(|(known, ..)| *known == heads)
            {
                shapes.push((heads, rope, a.scale));
            }
        }
        let builds: Vec<_> = shapes.iter().flat_map(|(heads, ..)| attention::Build::all(*heads)).collect();
        if builds.is_empty() {
            return Ok(None);
        }
        let broken = self.choice == KernelChoice::Broken;
        let compile = |build: attention::Build, arch: &str| build.compile(arch, broken);
        let modules = compiled("tandem_attention", builds.into_iter(), compile, self.arch())?;
        let most = shapes.iter().map(|(heads, ..)| heads.heads).max().unwrap_or(1);
        let mut attention = Attention::new(modules, most).map_err(|error| error.to_string())?;
        for (heads, rope, scale) in &shapes {
            for slots in SLOTS {
                self.compare_attention(&attention, *heads, *rope, *scale, &vec![1; slots])
                    .map_err(|e| e.to_string())?;
            }
        }
        attention.shorten();
        let many: Vec<usize> = (0..ROWS + 3).map(|i| 37 * i + 1).collect();
        for (heads, rope, scale) in shapes {
            for lengths in [&many[..], &[40], &[1, 700, 33], &[5, 64, 65, 200, 31, 32, 1, 1000]] {
                let error = self
                    .compare_attention(&attention, heads, rope, scale, lengths)
                    .map_err(|e| e.to_string())?;
                if error > TOLERANCE {
                    return Err(format!(
                        "the kernel for {heads:?} differs from f32 by {error:.1e} at {lengths:?} keys"
                    ));
                }
            }
        }
        Ok(Some(attention))
    }

    /// The largest relative error over output and new keys and values, of sequences that then have these lengths.
    fn compare_attention(
        &self,
        attention: &Attention,
        heads: Heads,
        rope: usize,
        scale: f32,
        lengths: &[usize],
    ) -> Result<f32> {
        let Heads { heads: count, kv_heads, dim } = heads;
        let turn = &self.turns.ropes[rope];
        let rows = lengths.len();
        let width = (count + 2 * kv_heads) * dim;
        let qkv = random(1, [rows, width])?;
        let one = KvShape { layers: vec![(kv_heads, dim)], float: Dtype::Bf16 };
        let mut expected = Vec::new();
        let mut buffers = Vec::new();
        for (row, len) in lengths.iter().enumerate() {
            let capacity = len.next_multiple_of(CHUNK);
            let mut kv = one.with_room(None, 0, capacity)?;
            let [k, v] = [2, 3].map(|salt| random(salt + 10 * row as u64, [1, kv_heads, capacity, dim]));
            kv.layers[0] = (k?, v?);
            let own = qkv.slice([row, 0], [row + 1, width])?.as_type(Dtype::F32)?;
            let part = |first: usize, heads: usize| -> Result<Array> {
                own.slice([0, first * dim], [1, (first + heads) * dim])?.reshape([1, heads, 1, dim])
            };
            let turned = |x: Array| x.rope(turn.dims, &turn.wavelengths, len - 1);
            let (q, new_k) = (turned(part(0, count)?)?, turned(part(count, kv_heads)?)?);
            let new_v = part(count + kv_heads, kv_heads)?;
            let with = |old: &Array, new: &Array| -> Result<Array> {
                let old = old.slice([0, 0, 0, 0], [1, kv_heads, len - 1, dim])?.as_type(Dtype::F32)?;
                Array::concatenate([&old, new], 2)
            };
            let (k, v) = (with(&kv.layers[0].0, &new_k)?, with(&kv.layers[0].1, &new_v)?);
            let scores = q
                .reshape([1, kv_heads, count / kv_heads, dim])?
                .scale(scale)?
                .matmul(&k.transpose([0, 1, 3, 2])?)?;
            let attended = scores.softmax()?.matmul(&v)?;
            evaluate([&attended, &k, &v, &kv.layers[0].0, &kv.layers[0].1])?;
            expected.push((
                attended.read_f32(count * dim)?,
                k.read_f32(kv_heads * len * dim)?,
                v.read_f32(kv_heads * len * dim)?,
            ));
            buffers.push(kv);
        }
        let tokens: Vec<NewToken<'_>> = buffers
            .iter()
            .zip(lengths)
            .map(|(kv, len)| NewToken { kv, first: 0, position: len - 1 })
            .collect();
        let decode = Decode { qkv: &qkv, heads, scale, turn, layer: 0, rows: &tokens };
        let Some(out) = attention.apply(&decode)? else { return Ok(0.0) };
        let out = out.as_type(Dtype::F32)?.read_f32(rows * count * dim)?;
        let mut worst = 0.0f32;
        for (row, (attended, k, v)) in expected.iter().enumerate() {
            let len = lengths[row];
            let held = |x: &Array| {
                let held = x.slice([0; 4], [1, kv_heads, len, dim])?.as_type(Dtype::F32)?;
                held.read_f32(kv_heads * len * dim)
            };
            for (got, expected) in [
                (&out[row * count * dim..][..count * dim], attended),
                (&held(&buffers[row].layers[0].0)?, k),
                (&held(&buffers[row].layers[0].1)?, v),
            ] {
                worst = worst.max(relative_error(got, expected));
            }
        }
        Ok(worst)
    }

    /// Builds the choice of the largest logits and compares it with the host's.
    fn choosing(&self) -> std::result::Result<Choose, String> {
        let broken = self.choice == KernelChoice::Broken;
        let compile = |slots: usize, arch: &str| choose::compile(slots, arch, broken);
        let modules = compiled("tandem_choose", Choose::builds().into_iter(), compile, self.arch())?;
        let right = |choose: &Choose, rows: usize| -> Result<bool> {
            // Few values, so that many are equal.
            let vocab = 4096;
            let logits = random(4 + rows as u64, [rows, vocab])?;
            let values = logits.as_type(Dtype::F32)?.read_f32(rows * vocab)?;
            let Some(chosen) = choose.apply(&logits, rows, vocab)? else { return Ok(true) };
            let ids = chosen.ids.read_u32(rows)?;
            for (row, told) in chosen.told.iter().enumerate() {
                let own = &values[row * vocab..][..vocab];
                let most = own.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let first = own.iter().position(|value| *value == most).unwrap_or(0) as u32;
                if told.read_u32(2)? != [first, most.to_bits()] || ids[row] != first {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        let mut choose = Choose::new(modules).map_err(|error| error.to_string())?;
        for slots in SLOTS {
            right(&choose, slots).map_err(|error| error.to_string())?;
        }
        choose.shorten();
        for rows in [1, 1, 3, ROWS, ROWS + 2] {
            if !right(&choose, rows).map_err(|error| error.to_string())? {
                return Err(format!("the kernel chose another than the host of {rows} rows"));
            }
        }
        Ok(choose)
    }

    /// Times steps with more and more of the kernels, and sets for how many rows each pays.
    fn time(&self, kernels: &mut Kernels) -> Result<Vec<String>> {
        let built = [kernels.products.is_some(), kernels.attention.is_some()];
        if built == [false, false] {
            return Ok(Vec::new());
        }
        if self.context < 2 * STEPS {
            return Ok(vec!["MLX's kernels: the context is too short to time others".into()]);
        }
        let (mut limits, mut said) = ([0, 0], Vec::new());
        for batch in BATCHES.into_iter().filter(|batch| *batch <= self.max_batch.max(1)) {
            let mut best = (self.step_time(kernels, [0, 0], batch)?, [false, false]);
            let plain = best.0;
            for with in [[true, false], [true, true], [false, true]] {
                if (with[0] && !built[0]) || (with[1] && !built[1]) {
                    continue;
                }
                let time = self.step_time(kernels, with.map(|with| if with { ROWS } else { 0 }), batch)?;
                if time < best.0 {
                    best = (time, with);
                }
            }
            let (time, with) = best;
            let names: Vec<&str> = ["products", "attention"]
                .into_iter()
                .zip(with)
                .filter(|(_, with)| *with)
                .map(|(name, _)| name)
                .collect();
            let who = if names.is_empty() {
                "MLX's kernels".to_owned()
            } else {
                format!("own {}", names.join(" and "))
            };
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            said.push(format!("{who} at batch {batch} ({:.2} ms a step, MLX's {:.2})", ms(time), ms(plain)));
            // Used up to the largest batch before the first that it does not pay for.
            for (limit, with) in limits.iter_mut().zip(with) {
                let before = BATCHES.into_iter().rev().find(|other| *other < batch).unwrap_or(0);
                if with && *limit == before {
                    *limit = batch;
                }
            }
        }
        // Attention goes on with more sequences, eight at a time.
        if limits[1] == ROWS {
            limits[1] = usize::MAX;
        }
        kernels.limits = limits;
        Ok(said)
    }

    /// Of a decode step of `batch` sequences, each submitted before the last is done.
    fn step_time(&self, kernels: &mut Kernels, limits: [usize; 2], batch: usize) -> Result<Duration> {
        kernels.limits = limits;
        let held = HELD.min(self.context - 2 * STEPS);
        let mut parts = Vec::new();
        for _ in 0..batch {
            parts.push(Part {
                count: 1,
                position: held,
                kv: self.shape.with_room(None, 0, CHUNK)?,
                turns: Rc::clone(&self.turns),
                logits: 1,
            });
        }
        let mut ids = Array::from_u32(&vec![1; batch])?;
        evaluate(parts.iter().flat_map(|part| part.kv.arrays()).chain([&ids]))?;
        let mut begun = Instant::now();
        for step in 0..2 * STEPS {
            if step == STEPS {
                ids.read_u32(batch)?;
                begun = Instant::now();
            }
            let how = How { fuse: true, kernels };
            let out = forward::run(self.model, &mut parts, &ids, how)?;
            let logits = out.logits.as_ref().unwrap_or(&out.last);
            ids = match kernels.choose(logits, batch, self.model.vocab)? {
                Some(chosen) if limits != [0, 0] => chosen.ids,
                _ => logits.argmax()?,
            };
            evaluate_async(parts.iter().flat_map(|part| part.kv.arrays()).chain([&ids]))?;
            parts.iter_mut().for_each(|part| part.position += 1);
        }
        ids.read_u32(batch)?;
        Ok(begun.elapsed() / STEPS as u32)
    }

    /// From how many rows on a quantized product is faster with its weights dequantized first; `None` for never.
    fn dense(&self) -> Result<Option<usize>> {
        let mut matrices = Vec::new();
        let (none, x) = (Kernels::default(), Array::zeros([1], Dtype::Bf16)?);
        for layer in self.model.layers.iter().take(8) {
            for product in self.layer_inputs(layer, &x, &none).into_iter().flatten() {
                if let Held::Quantized(_) = product.matrix.held {
                    matrices.push(product.matrix);
                }
            }
        }
        let mut from = None;
        if matrices.is_empty() {
            return Ok(None);
        }
        for rows in [512, 256, 128, 64, 32, 16] {
            let time = |dense: bool| -> Result<Duration> {
                let mut best = Duration::MAX;
                for _ in 0..3 {
                    let mut outputs = Vec::new();
                    let mut inputs = BTreeMap::new();
                    for Matrix { cols, .. } in &matrices {
                        if !inputs.contains_key(cols) {
                            inputs.insert(*cols, random(7, [rows, *cols])?);
                        }
                    }
                    evaluate(inputs.values())?;
                    let begun = Instant::now();
                    for Matrix { held, cols, .. } in &matrices {
                        outputs.push(held.project(&inputs[cols], dense)?);
                    }
                    evaluate(&outputs)?;
                    best = best.min(begun.elapsed());
                }
                Ok(best)
            };
            if time(true)? >= time(false)? {
                break;
            }
            from = Some(rows);
        }
        Ok(from)
    }
}

/// Kernels of that name by what they are built for, compiled side by side.
fn compiled<B: Copy + Ord + Send + Sync>(
    name: &str,
    builds: impl Iterator<Item = B>,
    compile: impl Fn(B, &str) -> Result<Vec<u8>> + Sync,
    architecture: &str,
) -> std::result::Result<BTreeMap<B, Module>, String> {
    let builds: std::collections::BTreeSet<B> = builds.collect();
    let codes: Vec<(B, Result<Vec<u8>>)> = std::thread::scope(|scope| {
        let compile = &compile;
        let started: Vec<_> =
            builds.iter().map(|build| (*build, scope.spawn(move || compile(*build, architecture)))).collect();
        let failed = || Err(tandem_engine::EngineError::Device("the compiler's thread failed".into()));
        started
            .into_iter()
            .map(|(build, thread)| (build, thread.join().unwrap_or_else(|_| failed())))
            .collect()
    });
    let mut modules = BTreeMap::new();
    for (build, code) in codes {
        modules.insert(build, Module::of(name, &code.map_err(|error| error.to_string())?));
    }
    Ok(modules)
}

/// A kernel's relative error against the same in f32, over the matrix's first rows.
fn compare(products: &Products, product: &Product<'_>, rows: usize, shared: usize) -> Result<f32> {
    let Matrix { held, rows: height, cols } = product.matrix;
    let height = height.min(COMPARED);
    let own = first_rows(held, height, cols)?;
    let matrix = Matrix { held: &own, rows: height, cols };
    let x = random(5, [rows, cols])?;
    let mut tried = Product { x: &x, rows, matrix, ..*product };
    let residual = random(6, [rows, tried.width()])?;
    if let After::Add(_) = tried.after {
        tried.after = After::Add(&residual);
    }
    let Some(got) = products.launch(&tried, shared)? else { return Ok(0.0) };

    let wide = |x: &Array| x.as_type(Dtype::F32);
    let mut input = wide(&x)?;
    if let Some(Norm { weight, eps }) = tried.norm {
        input = input.rms_norm(&wide(weight)?, *eps)?;
    }
    let weights = match &own {
        Held::Float(array) => wide(array)?,
        Held::Quantized(Quantized { values, scales, biases, group, bits }) => {
            let (scales, biases) = (wide(scales)?, wide(biases)?);
            Quantized { values: values.clone(), scales, biases, group: *group, bits: *bits }.dequantize()?
        }
    };
    let y = input.matmul_transposed(&weights)?;
    let expected = match tried.after {
        After::Nothing => y,
        After::Add(residual) => y.add(&wide(residual)?)?,
        After::Gate(activation) => {
            let half = height / 2;
            let (gate, up) = (y.slice([0, 0], [rows, half])?, y.slice([0, half], [rows, height])?);
            match activation {
                tandem_model::decoder::Activation::Silu => gate.gate_silu(&up, false)?,
                tandem_model::decoder::Activation::GeluTanh => gate.gate_gelu(&up, false)?,
            }
        }
    };
    let count = rows * tried.width();
    Ok(relative_error(&got.as_type(Dtype::F32)?.read_f32(count)?, &expected.read_f32(count)?))
}

fn first_rows(held: &Held, rows: usize, cols: usize) -> Result<Held> {
    Ok(match held {
        Held::Float(array) => Held::Float(array.slice([0, 0], [rows, cols])?),
        Held::Quantized(Quantized { values, scales, biases, group, bits }) => {
            let groups = cols / *group as usize;
            Held::Quantized(Quantized {
                values: values.slice([0, 0], [rows, cols * *bits as usize / 32])?,
                scales: scales.slice([0, 0], [rows, groups])?,
                biases: biases.slice([0, 0], [rows, groups])?,
                group: *group,
                bits: *bits,
            })
        }
    })
}

/// Values between -1 and 1, bfloat16, the same for the same salt.
fn random<const N: usize>(salt: u64, shape: [usize; N]) -> Result<Array> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
        })
        .collect();
    Array::from_f32(&values, shape)?.as_type(Dtype::Bf16)
}

/// Of the difference against the reference, in lengths. Not a number is infinitely wrong.
fn relative_error(got: &[f32], reference: &[f32]) -> f32 {
    let square =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>();
    let off =
        square(&mut got.iter().zip(reference).map(|(a, b)| a - b)) / square(&mut reference.iter().copied());
    if off.is_nan() { f32::INFINITY } else { off.sqrt() as f32 }
}
