//! The arithmetic of the CUDA kernels, without a GPU: each source is compiled as C++, a block's threads being threads, and
//! compared with f64. What one block could do to another while both run is not seen here; the check at load, on the device,
//! sees that.

// With the engine, which has a C++ compiler; the kernels are for Linux.
#![cfg(all(tandem_mlx, target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

/// Compiles `kernel` with those names defined, and runs it with each list of arguments. The harness judges.
fn judge(kernel: &str, defines: &[&str], runs: &[&str]) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("{kernel}-{}", defines.join("-"));
    let (source, program) = (folder.join(format!("{name}.cc")), folder.join(&name));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let parts = [
        read("tests/emulated/device.h"),
        read(&format!("src/kernels/{kernel}.cu")),
        read(&format!("tests/emulated/{kernel}.cc")),
    ];
    std::fs::write(&source, parts.concat()).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let compiled = Command::new(&compiler)
        .args(["-std=c++20", "-O1", "-w", "-pthread", "-o"])
        .arg(&program)
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(&source)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    assert!(compiled.status.success(), "{name}: {}", String::from_utf8_lossy(&compiled.stderr));
    for run in runs {
        let ran = Command::new(&program).args(run.split(' ')).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        println!("{name} {run}: {said}");
        if !ran.status.success() {
            return Err(format!("{name} {run}: {said}"));
        }
    }
    Ok(())
}

#[test]
fn products_of_four_bits_equal_f64() {
    // One chunk and several, fewer rows than places, tiles beyond the blocks.
    let runs = ["1 1280 32 1", "3 256 48 2", "8 2048 16 1"];
    for (norm, after) in
        [("NORM=0", "AFTER=0"), ("NORM=1", "AFTER=0"), ("NORM=0", "AFTER=1"), ("NORM=1", "AFTER=2")]
    {
        judge("product", &["AFFINE=1", norm, after], &runs).unwrap();
    }
}

#[test]
fn products_of_bfloat16_equal_f64() {
    let runs = ["1 640 32 1", "3 256 48 2", "8 1024 16 1"];
    for (norm, after) in [("NORM=1", "AFTER=0"), ("NORM=0", "AFTER=1"), ("NORM=1", "AFTER=3")] {
        judge("product", &["AFFINE=0", norm, after], &runs).unwrap();
    }
}

#[test]
fn attention_equals_f64_and_writes_the_new_tokens_alone() {
    judge(
        "attention",
        &["SLOTS=1", "DIM=128", "HEADS=4"],
        &["1 8 2 128 1 0", "1 4 1 128 2 0", "1 4 1 64 3 0"],
    )
    .unwrap();
    judge("attention", &["SLOTS=4", "DIM=64", "HEADS=3"], &["3 6 2 64 2 0", "4 3 1 64 3 21"]).unwrap();
    judge("attention", &["SLOTS=8", "DIM=256", "HEADS=2"], &["8 2 1 256 2 0"]).unwrap();
}

#[test]
fn the_largest_logit_is_chosen_and_the_first_of_equals() {
    judge("choose", &["SLOTS=1"], &["1 4096 3"]).unwrap();
    judge("choose", &["SLOTS=4"], &["3 2048 1"]).unwrap();
    judge("choose", &["SLOTS=8"], &["8 4104 2"]).unwrap();
}

#[test]
fn a_kernel_built_wrong_is_seen() {
    assert!(judge("product", &["AFFINE=1", "NORM=0", "AFTER=0", "BROKEN=1"], &["1 256 16 1"]).is_err());
    assert!(judge("attention", &["SLOTS=1", "DIM=64", "HEADS=1", "BROKEN=1"], &["1 1 1 64 1 0"]).is_err());
    assert!(judge("choose", &["SLOTS=1", "BROKEN=1"], &["1 1024 1"]).is_err());
}
