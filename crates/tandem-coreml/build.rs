//! Compiles `proto/` in pure Rust: no `protoc` is needed. Maps become ordered, so that equal models give equal bytes.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let schema = protox::compile(["proto/model.proto"], ["proto"])?;
    prost_build::Config::new().btree_map(["."]).compile_fds(schema)?;
    Ok(())
}
