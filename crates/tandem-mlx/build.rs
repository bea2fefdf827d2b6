//! Locates MLX and compiles the bridge to it.
//!
//! MLX is looked for in `MLX_PREFIX` (a folder with `include/mlx` and `lib`, such as the `mlx` folder of a wheel), then
//! where `python3` imports `mlx` from, then where Homebrew puts it. Without the feature `mlx` nothing is built, but for
//! macOS, where the engine is built if MLX is there. `TANDEM_MLX_CHECK_ONLY=1` compiles nothing native: for `cargo check`
//! of a target that this machine cannot build for.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(tandem_mlx)");
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(any(feature = "mlx", target_os = "macos"))]
    native::build();
}

#[cfg(any(feature = "mlx", target_os = "macos"))]
mod native {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// The release that the tests run with.
    const TESTED: &str = "0.32.4";

    pub fn build() {
        for name in ["MLX_PREFIX", "TANDEM_MLX_CHECK_ONLY"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        if std::env::var_os("TANDEM_MLX_CHECK_ONLY").is_some() {
            println!("cargo::rustc-cfg=tandem_mlx");
            return;
        }
        let apple = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "macos");
        match locate(apple) {
            Ok(prefix) => compile(&prefix, apple),
            Err(what) if std::env::var_os("CARGO_FEATURE_MLX").is_some() => fail(&what, apple),
            Err(what) => println!(
                "cargo::warning=built without the MLX engine: {what}. To have it: {}, then build again",
                install(apple)
            ),
        }
    }

    fn install(apple: bool) -> String {
        let packages = if apple { "mlx" } else { "mlx mlx-cpu (or, for an NVIDIA GPU, mlx mlx-cuda-13)" };
        format!("python3 -m pip install {packages}")
    }

    fn fail(what: &str, apple: bool) {
        println!("cargo::error={what}. hint: {}, or set MLX_PREFIX to the folder of an MLX", install(apple));
        std::process::exit(1);
    }

    fn locate(apple: bool) -> Result<PathBuf, String> {
        if let Some(prefix) = std::env::var_os("MLX_PREFIX") {
            let prefix = PathBuf::from(prefix);
            return if is_mlx(&prefix, apple) {
                Ok(prefix)
            } else {
                Err(format!(
                    "MLX_PREFIX is {}, where include/mlx/version.h or lib/{} is missing",
                    prefix.display(),
                    library(apple)
                ))
            };
        }
        let homebrew = ["/opt/homebrew/opt/mlx", "/usr/local/opt/mlx"].map(PathBuf::from);
        python().into_iter().chain(homebrew).find(|prefix| is_mlx(prefix, apple)).ok_or_else(|| {
            "MLX was not found: MLX_PREFIX is not set, python3 has no mlx with its library, and there is none of Homebrew's"
                .to_owned()
        })
    }

    /// The folders that Python's `mlx` consists of. It is a namespace, and importing it loads nothing.
    fn python() -> Vec<PathBuf> {
        let output =
            Command::new("python3").args(["-c", "import mlx; print(*mlx.__path__, sep='\\n')"]).output();
        let Ok(output) = output else { return Vec::new() };
        String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
    }

    fn library(apple: bool) -> &'static str {
        if apple { "libmlx.dylib" } else { "libmlx.so" }
    }

    fn is_mlx(prefix: &Path, apple: bool) -> bool {
        prefix.join("include/mlx/version.h").is_file() && prefix.join("lib").join(library(apple)).is_file()
    }

    /// `major.minor.patch` of the header.
    fn version(prefix: &Path) -> Option<String> {
        let header = std::fs::read_to_string(prefix.join("include/mlx/version.h")).ok()?;
        let number = |name: &str| {
            let line =
                header.lines().find_map(|line| line.strip_prefix(&format!("#define MLX_VERSION_{name} ")))?;
            line.trim().parse::<u32>().ok()
        };
        Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
    }

    fn compile(prefix: &Path, apple: bool) {
        let version = version(prefix).unwrap_or_else(|| "unknown".to_owned());
        if version != TESTED {
            println!("cargo::warning=MLX {version} was found; Tandem's bridge is tested with {TESTED}");
        }
        for file in ["src/ffi.rs", "src/bridge.h", "src/bridge.cc"] {
            println!("cargo::rerun-if-changed={file}");
        }
        cxx_build::bridge("src/ffi.rs")
            .file("src/bridge.cc")
            .std("c++20")
            .include(prefix.join("include"))
            .flag_if_supported("-Wno-unused-parameter")
            .flag_if_supported("-Wno-deprecated-copy")
            .compile("tandem_mlx_bridge");
        let lib = prefix.join("lib");
        println!("cargo::rustc-link-search=native={}", lib.display());
        println!("cargo::rustc-link-lib=dylib=mlx");
        println!("cargo::rustc-link-lib=dylib={}", if apple { "c++" } else { "stdc++" });
        // For this package's tests; programs that depend on it take the folder from `DEP_MLX_LIB`.
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
        println!("cargo::metadata=lib={}", lib.display());
        println!("cargo::rustc-cfg=tandem_mlx");
    }
}
