//! Which instruction set the kernels use, chosen once at run time.

#[cfg(target_arch = "x86_64")]
mod amx;

use std::fmt;

/// The environment variable that forces a kernel path by name.
pub const VARIABLE: &str = "TANDEM_KERNELS";

/// An instruction set that kernels are written for. More capable ones compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// All of `Avx2`, and AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// All of `Avx512`, and AMX's tiles of 8-bit integers, where the system lets us use them.
    Amx,
    /// AArch64 with the dot products of ARMv8.2 (`dotprod`), as every Apple M has them.
    Neon,
}

impl Isa {
    const ALL: [Isa; 5] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx, Isa::Neon];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => avx2(),
            Isa::Avx512 => {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Isa::Amx => Isa::Avx512.is_supported() && amx() == Amx::Ready,
            Isa::Neon => false,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn is_supported(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Neon => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => false,
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn is_supported(self) -> bool {
        self == Isa::Scalar
    }
}

/// Whether AMX, Intel's matrix instructions, can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amx {
    /// The CPU has no tiles of 8-bit integers.
    Absent,
    /// The CPU has them, but the system does not let this process use them.
    Refused,
    /// They can be used.
    Ready,
}

/// Whether AMX can be used. The first call asks the system for this process's permission.
pub fn amx() -> Amx {
    #[cfg(target_arch = "x86_64")]
    return amx::amx();
    #[cfg(not(target_arch = "x86_64"))]
    Amx::Absent
}

/// A kernel path that this CPU can run.
///
/// A value is the *proof* that its instructions exist here: the only ways to get one look at the CPU. Kernels rely on
/// that when they call code compiled for more than the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Isa);

/// A kernel path was asked for that does not exist, here or at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// No such path.
    #[error("unknown kernel path {name:?} (hint: set {VARIABLE} to one of {supported}, or unset it)")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What would work here, comma separated.
        supported: String,
    },
    /// The path exists, but this CPU lacks its instructions, or the system refuses them.
    #[error(
        "this machine cannot run the kernel path {name:?} (hint: set {VARIABLE} to one of {supported}, or unset it)"
    )]
    Unsupported {
        /// What was asked for.
        name: String,
        /// What would work here, comma separated.
        supported: String,
    },
}

impl Path {
    /// The portable path, which every CPU runs.
    pub const SCALAR: Path = Path(Isa::Scalar);

    /// Every path that this CPU runs, slowest first.
    pub fn supported() -> Vec<Path> {
        Isa::ALL.into_iter().filter(|isa| isa.is_supported()).map(Path).collect()
    }

    /// The path forced by `TANDEM_KERNELS`, else the best this CPU has.
    ///
    /// # Errors
    /// If the variable names a path that is unknown or that this CPU cannot run.
    pub fn detect() -> Result<Path, PathError> {
        match std::env::var_os(VARIABLE) {
            Some(name) => Path::named(&name.to_string_lossy()),
            None => Ok(Path::supported().pop().unwrap_or(Path::SCALAR)),
        }
    }

    /// The path of that name (`scalar`, `avx2`, `avx512`, `amx`, `neon`).
    ///
    /// # Errors
    /// If the name is unknown or this CPU cannot run that path.
    pub fn named(name: &str) -> Result<Path, PathError> {
        let list = || Path::supported().iter().map(|path| path.name()).collect::<Vec<_>>().join(", ");
        match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
            None => Err(PathError::Unknown { name: name.to_owned(), supported: list() }),
            Some(isa) if isa.is_supported() => Ok(Path(isa)),
            Some(_) => Err(PathError::Unsupported { name: name.to_owned(), supported: list() }),
        }
    }

    /// The instruction set, to dispatch on.
    pub fn isa(self) -> Isa {
        self.0
    }

    /// The name that `TANDEM_KERNELS` knows it by.
    pub fn name(self) -> &'static str {
        self.0.name()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_refused_with_the_list() {
        let error = Path::named("sse9").unwrap_err().to_string();
        assert!(error.contains("sse9") && error.contains("scalar"), "{error}");
    }

    #[test]
    fn amx_is_a_path_just_where_it_is_ready() {
        match Path::named("amx") {
            Ok(path) => {
                assert_eq!(amx(), Amx::Ready);
                assert!(path.isa() > Isa::Avx512, "the best of its machine");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("cannot run") && text.contains("\"amx\"") && text.contains("scalar"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn every_supported_path_is_found_by_its_name() {
        for path in Path::supported() {
            assert_eq!(Path::named(path.name()), Ok(path));
        }
        assert_eq!(Path::supported()[0], Path::SCALAR);
    }
}
