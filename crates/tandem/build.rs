//! Tells the linker where the program finds MLX at run time, if the MLX engine is in: its crate cannot say it for others.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_MLX_LIB") {
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,{lib}");
        println!("cargo::rustc-link-arg-tests=-Wl,-rpath,{lib}");
        println!("cargo::rustc-link-arg-examples=-Wl,-rpath,{lib}");
    }
}
